"""The mLSTM backward by the ThunderKittens kernels: numbers per row, three passes, gradients of the gates.

All three large gradients are the same kernel with other operands. It walks (queries, keys, values) chunk by
chunk with a state keys x values on chip, for dk and dv from the last chunk to the first. With the gates W_tj,
the normaliser w_t, s = K^-1/2 and e_t = -(dh_t.h_t) sign(d_t) [|d_t| > floor_t]::

                                                                            queries  keys  values
    dq_t = sum_{j <= t} s W_tj / w_t (dh_t.v_j + e_t) k_j + from the state    dh      v      k
    dk_j = sum_{t >= j} s W_tj / w_t (v_j.dh_t + e_t) q_t + from the state    v       dh     q
    dv_j = sum_{t >= j} s W_tj / w_t (k_j.q_t) dh_t       + from the state    k       q      dh

Where a few long sequences would leave the GPU empty they are cut into segments, all passes alike: what a pass
begins a segment with is made before it, by a segments kernel and a small kernel that carries it on.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from tfla_tk import build
from tfla_tk.backends import segments
from tfla_tk.backends.tk import (
    _current_stream,
    _fp32,
    _gate,
    _has_aligned_rows,
    _multiprocessors,
    _operand,
    _pointer,
    _rows_aligned,
    _state_aligned,
)
from tfla_tk.backends.tk_passes import (
    Anchors,
    Boundaries,
    Boundary,
    Gates,
    Rows,
    RowSums,
    State,
    StateGradient,
    Walk,
)
from tfla_tk.build import instances
from tfla_tk.ops import Grads, MaybeTensor, chunk_slots, grads_like

_SUM_COLUMNS = 64  # kSumColumns of params_pass.h
_ANCHOR_CHUNKS = 8  # kAnchorChunks of params.h
_GRADIENTS = {"dq": 0, "dk": 1, "dv": 2}  # enum class Gradient of params_pass.h


def mlstm_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c_initial: MaybeTensor,
    n_initial: MaybeTensor,
    m_initial: MaybeTensor,
    cu_seqlens: MaybeTensor,
    h: Tensor,
    row_n: Tensor,
    row_m: Tensor,
    chunk_m: Tensor,
    c_last: MaybeTensor,
    n_last: MaybeTensor,
    dh: Tensor,
    dc_last: MaybeTensor,
    dn_last: MaybeTensor,
    sigmoid_gate: bool,
    normalize: bool,
    eps: float,
    schedule: str,
) -> Grads:
    """Launch the mLSTM backward on the current stream; arguments and results are those of tfla_tk::mlstm_bwd.

    The passes have one schedule: `schedule` is the forward's alone.

    Raises:
        BuildError: A kernel is not compiled yet and cannot be.
        RuntimeError: A launch was refused.
    """
    grads = grads_like(q, (q, k, v, i, f, c_initial, n_initial))
    if not normalize:
        n_last = dn_last = None
    if q.numel() == 0:
        for grad, last in zip(grads[5:], (dc_last, dn_last), strict=True):
            if grad.numel() > 0:
                grad.zero_() if last is None else grad.copy_(last)
        return grads
    # what the kernels write: the gradients themselves where their layout allows it
    dq, dk, dv = (x if _has_aligned_rows(x) else _dense(x) for x in grads[:3])
    di, df = grads[3:5]
    dc_initial, dn_initial = (
        None if given is None else grad if grad.is_contiguous() else _dense(grad)
        for given, grad in zip((c_initial, n_initial), grads[5:], strict=True)
    )
    kernel = build.load(instances.mlstm_bwd())
    q, k, v, h, dh = (_rows_aligned(x) for x in (q, k, v, h, dh))
    c_initial, n_initial, c_last, n_last, dc_last, dn_last = (
        _state_aligned(x) for x in (c_initial, n_initial, c_last, n_last, dc_last, dn_last)
    )
    offsets = None if cu_seqlens is None else cu_seqlens.contiguous()
    gates = Gates(i, f, None if sigmoid_gate else chunk_m, offsets, q.shape[-1] ** -0.5)
    walk = Walk(gates, _cut(gates, q, v), v.shape[-1])

    # dq and dk are linear in the columns of v, dh and h, e_t among them: a pass takes as many as it holds
    parts = [slice(at, at + instances.MAX_DIM_QK) for at in range(0, v.shape[-1], instances.MAX_DIM_QK)]
    v_parts, h_parts, dh_parts = ([x[..., part] for part in parts] for x in (v, h, dh))
    rows = [_row_factors(kernel, *x, row_n, row_m, eps) for x in zip(dh_parts, h_parts, strict=True)]
    states = _fill_boundaries("dq", v_parts, k, walk, rows, parts, (c_initial, n_initial))
    state_grads = _fill_boundaries("dk", dh_parts, q, walk, rows, parts, (dc_last, dn_last))
    q_dq, k_dk = (_empty_sums(q, len(parts), offsets) for _ in range(2))
    anchors = _empty_anchors(q, [x.shape[-1] for x in v_parts], offsets)
    for number, (part, v_part, dh_part) in enumerate(zip(parts, v_parts, dh_parts, strict=True)):
        first = number == 0
        dn_part = dn_initial if first or dn_initial is None else _dense(dn_initial)
        _run_pass(
            "dq", dh_part, v_part, k, dq, walk, rows[number],
            entering=(_columns(c_initial, part), n_initial),
            boundary=None if states is None else states.read_by(number, part),
            factor=q, sums=q_dq.part(number), anchors=anchors.part(number), accumulate=not first,
        )  # fmt: skip
        _run_pass(
            "dk", v_part, dh_part, q, dk, walk, rows[number],
            entering=(_columns(dc_last, part), dn_last if first else None),
            boundary=None if state_grads is None else state_grads.read_by(number, part),
            leaving=(None, dn_part),
            factor=k, sums=k_dk.part(number), anchors=anchors.part(number), accumulate=not first,
        )  # fmt: skip
        if not first and dn_initial is not None and dn_part is not None:
            dn_initial.add_(dn_part)
    _run_pass(
        "dv", k, q, dh, dv, walk, rows[0],
        entering=(dc_last, None),
        boundary=None if state_grads is None else (state_grads.c, None, state_grads.log2_decay),
        leaving=(dc_initial, None),
    )  # fmt: skip
    _gate_gradients(
        kernel,
        gates,
        q_dq,
        k_dk,
        anchors.flows,
        di,
        df,
        (c_initial, dc_initial, n_initial, dn_initial),
        (c_last, dc_last, n_last, dn_last),
        (*q.shape, v.shape[-1]),
    )
    for grad, written in zip((*grads[:3], *grads[5:]), (dq, dk, dv, dc_initial, dn_initial), strict=True):
        if written is not None and written is not grad:
            grad.copy_(written)
    return grads


def _cut(gates: Gates, q: Tensor, v: Tensor) -> segments.Cut:
    """How the sequences are cut, the same for all passes: by the CTAs that dk has for one segment."""
    _, heads, seq, dim = q.shape
    *_, sequences = gates.offsets
    instance = instances.mlstm_pass("dk", min(v.shape[-1], instances.MAX_DIM_QK), dim)
    slices = -(-dim // int(dict(instance.defines)["TFLA_SLICE"]))
    find = segments.cut if gates.cu_seqlens is None else segments.cut_packed
    return find(sequences, seq, heads * slices, _multiprocessors(q.get_device()), segments.BACKWARD)


def _fill_boundaries(
    name: str,
    keys: list[Tensor],
    values: Tensor,
    walk: Walk,
    rows: list[Rows],
    parts: list[slice],
    entering: State,
) -> Boundaries | None:
    """What a pass begins its segments with, of all parts of the keys' columns; None where nothing is cut.

    Args:
        name: "dq", or "dk", whose c is that of "dv" too.
        keys, rows: of every part. values: of the pass.
        entering: what a sequence's walk begins with.
    """
    if walk.slots == 0:
        return None
    # n of dq is a sum over keys; that of dk has e in it, which every part of v has its own of
    found = _empty_boundaries(walk, values, 1 if name == "dq" else len(parts))
    for number, part in enumerate(parts):
        _sum_segments(name, keys[number], values, walk, rows[number], found.made_by(number, part))
    _combine(found, walk, entering, backward=name != "dq")
    return found


def _empty_boundaries(walk: Walk, values: Tensor, parts: int) -> Boundaries:
    dim = values.shape[-1]
    return Boundaries(
        _fp32(values, (walk.slots, dim, walk.dim_v)),
        _fp32(values, (parts, walk.slots, dim)),
        torch.empty(walk.slots, dtype=torch.float64, device=values.device),
    )


def _sum_segments(
    name: str, keys: Tensor, values: Tensor, walk: Walk, rows: Rows, boundary: Boundary
) -> None:
    """What every segment adds by itself at the boundary over which the pass leaves it."""
    kernel = build.load(instances.mlstm_pass(name, keys.shape[-1], values.shape[-1]))
    batch, heads, seq, dim_values = values.shape
    device = values.get_device()
    kernel.mlstm_pass_segments(
        _GRADIENTS[name],
        _operand(keys),
        _operand(values),
        _gate(walk.gates.i),
        _gate(walk.gates.f),
        (rows[0].data_ptr(), rows[1].data_ptr(), _pointer(walk.gates.chunk_m)),
        _boundary(boundary),
        walk.segments,
        (batch, heads, seq, keys.shape[-1], dim_values, walk.dim_v),
        walk.gates.scale,
        values.dtype == torch.float16,
        walk.gates.sigmoid_gate,
        device,
        _current_stream(device),
    )


def _combine(boundaries: Boundaries, walk: Walk, entering: State, backward: bool) -> None:
    """Carries what enters the sequences on over the boundaries, in place."""
    i = walk.gates.i
    device = i.get_device()
    build.load(instances.mlstm_bwd()).mlstm_bwd_combine(
        _boundary((boundaries.c, boundaries.n, boundaries.log2_decay)),
        boundaries.n.shape[0],
        (_pointer(entering[0]), _pointer(entering[1])),
        walk.segments,
        (*i.shape[1:], *boundaries.c.shape[1:]),
        backward,
        device,
        _current_stream(device),
    )


def _run_pass(
    name: str,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    walk: Walk,
    rows: Rows,
    *,
    entering: State,
    boundary: Boundary | None,
    leaving: State = (None, None),
    factor: MaybeTensor = None,
    sums: tuple[Tensor, Tensor] | None = None,
    anchors: tuple[int, int, int] = (0, 0, 0),
    accumulate: bool = False,
) -> None:
    """One pass over the chunks, on the current stream.

    Args:
        name: "dq", which walks forward in time, "dv" or "dk", which walk backward.
        queries, keys, values: [B, NH, S, *], rows aligned for TMA.
        out: the gradient, to be written; like `values`, rows aligned for TMA.
        walk: what all passes have in common.
        rows: log2_w and e, of the part of v.
        entering: what a sequence's walk begins with, (c, n) for "dq", (dc, dn) for the others, fp32; None
            is zero. c and dc are [N, NH, K, V] always, contiguous or columns of a contiguous one: the state
            of "dv"; those of "dq" and "dk" are its transpose. n and dn [N, NH, K] go with the values' columns
            and are None for "dv".
        boundary: the same for the segments that follow others in the walk; None where nothing is cut.
        leaving: gradients of the initial state, to be written at the walk's end where there is a tensor: "dv"
            has that of c, "dk" that of n.
        factor: like `out`, what its rows are multiplied with for the row sums; not for "dv".
        sums: where these are written, whole and inter.
        anchors: addresses of the states that "dq" leaves for "dk" and of the flows that "dk" makes of them,
            and the parts of a flow.
        accumulate: whether the gradient is added to what `out` holds; not for "dv".
    """
    batch, heads, seq, dim_values = values.shape
    gates, device = walk.gates, values.get_device()
    kernel = build.load(instances.mlstm_pass(name, keys.shape[-1], dim_values))
    kernel.mlstm_pass(
        _GRADIENTS[name],
        _operand(queries),
        _operand(keys),
        _operand(values),
        _operand(out),
        _operand(values if factor is None else factor),
        _gate(gates.i),
        _gate(gates.f),
        (rows[0].data_ptr(), rows[1].data_ptr(), _pointer(gates.chunk_m)),
        (_pointer(entering[0]), _pointer(entering[1])),
        (_pointer(leaving[0]), _pointer(leaving[1])),
        _boundary(boundary),
        (0, 0) if sums is None else (sums[0].data_ptr(), sums[1].data_ptr()),
        anchors,
        walk.segments,
        (batch, heads, seq, keys.shape[-1], dim_values, walk.dim_v),
        gates.scale,
        accumulate,
        values.dtype == torch.float16,
        gates.sigmoid_gate,
        device,
        _current_stream(device),
    )


def _empty_sums(q: Tensor, parts: int, offsets: MaybeTensor) -> RowSums:
    batch, heads, seq, dim = q.shape
    rows = (parts * -(-dim // _SUM_COLUMNS), batch, heads)
    shapes = (*rows, seq), (*rows, chunk_slots(seq, offsets), 2)
    whole, inter = (_fp32(q, shape) for shape in shapes)
    return RowSums(whole, inter, parts)


def _empty_anchors(q: Tensor, widths: list[int], offsets: MaybeTensor) -> Anchors:
    """For parts of v of these widths."""
    batch, heads, seq, dim = q.shape
    slots = chunk_slots(seq, offsets)
    kernels = [build.load(instances.mlstm_pass("dq", width, dim)) for width in widths]
    size = max(kernel.anchor_bytes(batch, heads, slots, dim) for kernel in kernels)
    parts = tuple(int(kernel.flow_parts(dim)) for kernel in kernels)
    shape = (batch, heads, slots // _ANCHOR_CHUNKS + 1, sum(parts))
    return Anchors(
        torch.empty(size, dtype=torch.uint8, device=q.device),
        _fp32(q, shape),
        parts,
    )


def _columns(state: MaybeTensor, part: slice) -> MaybeTensor:
    """A part of V of a state [N, NH, K, V]."""
    return None if state is None else state[..., part]


def _row_factors(kernel: ModuleType, dh: Tensor, h: Tensor, row_n: Tensor, row_m: Tensor, eps: float) -> Rows:
    """log2 w_t and e_t of every token."""
    batch, heads, seq, _ = h.shape
    log2_w, e = (_fp32(h, (batch, heads, seq)) for _ in range(2))
    device = h.get_device()
    kernel.mlstm_bwd_rows(
        _operand(dh),
        _operand(h),
        (_given(row_n), _given(row_m)),
        (log2_w.data_ptr(), e.data_ptr()),
        tuple(h.shape),
        eps,
        h.dtype == torch.float16,
        device,
        _current_stream(device),
    )
    return log2_w, e


def _gate_gradients(
    kernel: ModuleType,
    gates: Gates,
    q_dq: RowSums,
    k_dk: RowSums,
    anchors: Tensor,
    di: Tensor,
    df: Tensor,
    initial: StateGradient,
    last: StateGradient,
    sizes: tuple[int, ...],
) -> None:
    """di and df from the passes' row sums.

    Args:
        anchors: the flows of `Anchors`.
        initial, last: before the first and after the last token, contiguous fp32; None without one.
        sizes: batch, heads, seq, dim_qk, dim_v.
    """
    *_, sequences = gates.offsets
    size = kernel.mlstm_bwd_gates_workspace_bytes(sizes[1], sequences)
    workspace = torch.empty(size, dtype=torch.uint8, device=di.device)
    device = di.get_device()
    kernel.mlstm_bwd_gates(
        _row_sums(q_dq),
        _row_sums(k_dk),
        (anchors.data_ptr(), anchors.shape[-1]),
        _gate(gates.i),
        _gate(gates.f),
        _gate(di),
        _gate(df),
        _pointer(gates.chunk_m),
        _state_pair(*initial[:2]) + _state_pair(*initial[2:]),
        _state_pair(*last[:2]) + _state_pair(*last[2:]),
        workspace.data_ptr(),
        gates.offsets,
        sizes,
        gates.sigmoid_gate,
        device,
        _current_stream(device),
    )


def _dense(x: Tensor) -> Tensor:
    """Uninitialised, contiguous."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _given(x: Tensor) -> int:
    """Address of the data; 0 for an empty tensor, which stands for none."""
    return x.data_ptr() if x.numel() > 0 else 0


def _boundary(x: Boundary | None) -> tuple[int, int, int]:
    """Addresses of c, n and log2_decay."""
    return (0, 0, 0) if x is None else (x[0].data_ptr(), _pointer(x[1]), x[2].data_ptr())


def _row_sums(x: RowSums) -> tuple[int, int, int]:
    return x.whole.data_ptr(), x.inter.data_ptr(), x.whole.shape[0]


def _state_pair(state: MaybeTensor, grad: MaybeTensor) -> tuple[int, int]:
    """Addresses of a state and its gradient; of none where one of them is missing."""
    return (0, 0) if state is None or grad is None else (state.data_ptr(), grad.data_ptr())
