"""The mLSTM backward by the ThunderKittens kernels: numbers per row, three passes, gradients of the gates.

All three large gradients are the same kernel with other operands. It walks (queries, keys, values) chunk by
chunk with a state keys x values on chip, for dk and dv from the last chunk to the first. With the gates W_tj,
the normaliser w_t, s = K^-1/2 and e_t = -(dh_t.h_t) sign(d_t) [|d_t| > floor_t]::

                                                                            queries  keys  values
    dq_t = sum_{j <= t} s W_tj / w_t (dh_t.v_j + e_t) k_j + from the state    dh      v      k
    dk_j = sum_{t >= j} s W_tj / w_t (v_j.dh_t + e_t) q_t + from the state    v       dh     q
    dv_j = sum_{t >= j} s W_tj / w_t (k_j.q_t) dh_t       + from the state    k       q      dh

dq and dk are linear in the columns of v, dh and h, e_t among them: a pass takes as many as it holds, a part
of V.

Where a few long sequences would leave the GPU empty they are cut into segments, all passes alike: what a pass
begins a segment with is made before it, by a segments kernel and a small kernel that carries it on, or, for
dq, has been left by the forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from tfla_tk import build
from tfla_tk.backends.tk import (
    Gate,
    Operand,
    Operands,
    _current_stream,
    _gate,
    _multiprocessors,
    _pointer,
)
from tfla_tk.backends.tk_left import left_by_forward
from tfla_tk.backends.tk_passes import (
    Memory,
    Part,
    Plan,
    Sizes,
    cut_sequences,
    instances_of,
    make_plan,
)
from tfla_tk.ops import MaybeGrads, MaybeTensor, chunk_slots, grads_like

_GRADIENTS = {"dq": 0, "dk": 1, "dv": 2}  # enum class Gradient of params_pass.h

# addresses, of states or their gradients 0 where there is none
Pair = tuple[int, int]  # c and n, or row sums and their inter
Triple = tuple[int, int, int]  # c, n and log2_decay at boundaries, or log2_w, e and chunk_m


@dataclass(slots=True)
class _RowCall:
    """What the kernels for log2_w and e read: tensors by their addresses, 0 where there is none.

    Attributes:
        plan, memory: what is launched, and where it leaves what.
        sizes: batch, heads, seq, dim_qk, dim_v.
        h, dh: [B, NH, S, V], rows aligned for TMA.
        itemsize: bytes of an element of them.
        row_n, row_m: as the forward returns them; row_n is 0 without normaliser alone.
    """

    plan: Plan
    memory: Memory
    sizes: Sizes
    h: Operand
    dh: Operand
    itemsize: int
    row_n: int
    row_m: int
    eps: float
    half: bool
    device: int
    stream: int


@dataclass(slots=True)
class _Call(_RowCall):
    """What all kernels read, in the same way.

    Attributes:
        q, k, v: [B, NH, S, *], rows aligned for TMA. i, f: [B, NH, S].
        chunk_m: as the forward returns it.
        states: c and n that the segments of "dq" begin with, from the forward or in the memory.
        cut: address of the offsets of packed sequences, whether they are 64-bit, number of sequences; the
            plan's cut.
        c_initial to dn_last: [N, NH, K, V] and [N, NH, K], fp32, contiguous.
        scale: of q k^T.
    """

    q: Operand
    k: Operand
    v: Operand
    i: Gate
    f: Gate
    chunk_m: int
    states: Pair
    cut: tuple[int, bool, int, int, int]
    c_initial: int
    n_initial: int
    c_last: int
    n_last: int
    dc_last: int
    dn_last: int
    scale: float
    sigmoid_gate: bool


class _Grads(NamedTuple):
    """What they write, in the same way: each like what it is the gradient of."""

    dq: Operand
    dk: Operand
    dv: Operand
    di: Gate
    df: Gate
    dc_initial: int
    dn_initial: int


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
    row_n: MaybeTensor,
    row_m: MaybeTensor,
    chunk_m: MaybeTensor,
    c_last: MaybeTensor,
    n_last: MaybeTensor,
    dh: Tensor,
    dc_last: MaybeTensor,
    dn_last: MaybeTensor,
    sigmoid_gate: bool,
    normalize: bool,
    eps: float,
    schedule: str,
    left: MaybeTensor = None,
) -> MaybeGrads:
    """Launch the mLSTM backward on the current stream; arguments and results are those of tfla_tk::mlstm_bwd.

    Where no initial state is given its gradients are None. The passes have one schedule: `schedule` is the
    forward's alone.

    Args:
        left: the last result of `tk.mlstm_fwd`. It stands for row_n, row_m and chunk_m, and what enters the
            segments of "dq" is not made again.

    Raises:
        BuildError: A kernel is not compiled yet and cannot be.
        RuntimeError: A launch was refused.
    """
    if not normalize:
        n_last = dn_last = None
    if q.numel() == 0:
        grads = grads_like(q, k, v, i, f, c_initial, n_initial)
        _of_no_token(grads, dc_last, dn_last)
        return grads
    batch, heads, seq, dim_qk = q.shape
    sizes = (batch, heads, seq, dim_qk, v.shape[-1])
    operands = Operands()
    offsets = operands.offsets(cu_seqlens, batch)
    sequences = offsets[-1]
    device = q.get_device()
    cut = cut_sequences(sizes, sequences, _multiprocessors(device), packed=cu_seqlens is not None)
    slots = chunk_slots(seq, cu_seqlens)
    states: Pair | None = None
    if left is None:
        row_n_at, row_m_at, chunk_m_at = _given(row_n), _given(row_m), _given(chunk_m)
    else:
        boundaries, address = (cut.segments - sequences) * heads, left.data_ptr()
        lies = left_by_forward(sizes, slots, boundaries, sigmoid_gate=sigmoid_gate, normalize=normalize)
        row_n_at, row_m_at, chunk_m_at = lies.rows_at(address)
        if left.numel() == lies.bytes:  # else it was cut otherwise
            states = lies.states_at(address)
    kernels = tuple(map(build.load, instances_of(*sizes[3:])))
    plan = make_plan(
        kernels, sizes, sequences, slots, cut, normalize=normalize, states_given=states is not None
    )
    allocation = torch.empty(plan.bytes, dtype=torch.uint8, device=q.device)
    memory = plan.memory_at(allocation.data_ptr())
    of_rows = (
        plan,
        memory,
        sizes,
        operands.read(h),
        operands.read(dh),
        q.element_size(),
        row_n_at,
        row_m_at,
        eps,
        q.dtype == torch.float16,
        device,
        _current_stream(device),
    )
    rows = _RowCall(*of_rows)
    # dh_t.h_t comes from the pass for dv, but where segments need e before the passes
    dots_of_dv = normalize and not plan.is_cut
    if dots_of_dv:
        _launch_factors(rows, plan.parts[0], slices=0)  # dv reads log2 w alone, of the first part
    elif normalize:
        for part in plan.parts:
            _launch_rows(rows, part)
    # only now the rest, and last of all the gradients, so that a GPU that waits for the host has work early
    call = _Call(
        *of_rows,
        q=operands.read(q),
        k=operands.read(k),
        v=operands.read(v),
        i=_gate(i),
        f=_gate(f),
        chunk_m=chunk_m_at,
        states=states or (memory.state_c, memory.state_n),
        cut=(*offsets, *plan.cut),
        c_initial=operands.state(c_initial),
        n_initial=operands.state(n_initial),
        c_last=operands.state(c_last),
        n_last=operands.state(n_last),
        dc_last=operands.state(dc_last),
        dn_last=operands.state(dn_last),
        scale=dim_qk**-0.5,
        sigmoid_gate=sigmoid_gate,
    )
    if plan.is_cut:
        if states is None:
            _launch_segments_of_dq(call)
        _launch_segments_of_dk(call)
    grads = grads_like(q, k, v, i, f, c_initial, n_initial)
    dq, dk, dv, di, df, dc_initial, dn_initial = grads
    dn_initial = operands.state_result(dn_initial)
    written = _Grads(
        operands.write(dq),
        operands.write(dk),
        operands.write(dv),
        _gate(di),
        _gate(df),
        _pointer(operands.state_result(dc_initial)),
        _pointer(dn_initial),
    )
    _launch_dv(call, written, dots=dots_of_dv)
    for part in plan.parts:
        if dots_of_dv:
            _launch_factors(call, part, slices=part.dot_slices)
        if part.number == 0 or dn_initial is None:
            _launch_dq_and_dk(call, written, part, written.dn_initial)
        else:
            dn_of_part = torch.empty_like(dn_initial)
            _launch_dq_and_dk(call, written, part, dn_of_part.data_ptr())
            dn_initial.add_(dn_of_part)
    _launch_gates(call, written)
    operands.copy_back()
    return grads


def _of_no_token(grads: MaybeGrads, dc_last: MaybeTensor, dn_last: MaybeTensor) -> None:
    """Without tokens the state passes through, and so does its gradient."""
    for grad, last in zip(grads[5:], (dc_last, dn_last), strict=True):
        if grad is not None:
            grad.zero_() if last is None else grad.copy_(last)


def _launch_rows(x: _RowCall, part: Part) -> None:
    """log2 w_t and e_t of every token, from dh and h."""
    x.plan.around.mlstm_bwd_rows(
        _columns(x, x.dh, part),
        _columns(x, x.h, part),
        (x.row_n, x.row_m),
        (x.memory.log2_w + part.rows, x.memory.e + part.rows),
        (*x.sizes[:3], part.width),
        x.eps,
        x.half,
        x.device,
        x.stream,
    )


def _launch_factors(x: _RowCall, part: Part, *, slices: int) -> None:
    """log2 w_t and e_t of every token, from the dots of so many slices of "dv"; without any e_t is 0."""
    batch, heads, seq, *_ = x.sizes
    rows = batch * heads * seq
    x.plan.around.mlstm_bwd_factors(
        (x.memory.dots + part.dots, rows, slices),
        (x.row_n, x.row_m),
        (x.memory.log2_w + part.rows, x.memory.e + part.rows),
        rows,
        x.eps,
        x.device,
        x.stream,
    )


def _launch_segments_of_dq(x: _Call) -> None:
    """The states that the passes for dq begin those segments with that follow others."""
    memory = x.memory
    for part in x.plan.parts:
        # n is a sum over keys, the same for every part
        n = memory.state_n if part.number == 0 else 0
        boundary = (memory.state_c + part.state, n, memory.state_decay)
        _sum_segments(x, "dq", part, _columns(x, x.v, part), x.k, boundary)
    states = (memory.state_c, memory.state_n, memory.state_decay)
    _combine(x, states, 1, (x.c_initial, x.n_initial), backward=False)


def _launch_segments_of_dk(x: _Call) -> None:
    """The gradients of states that the passes for dk and dv begin those segments with that others follow."""
    memory, parts = x.memory, x.plan.parts
    for part in parts:
        boundary = (memory.grad_c + part.state, memory.grad_n + part.norms, memory.grad_decay)
        _sum_segments(x, "dk", part, _columns(x, x.dh, part), x.q, boundary)
    grads = (memory.grad_c, memory.grad_n, memory.grad_decay)
    _combine(x, grads, len(parts), (x.dc_last, x.dn_last), backward=True)


def _sum_segments(x: _Call, name: str, part: Part, keys: Operand, values: Operand, boundary: Triple) -> None:
    """What every segment adds by itself at the boundary over which the pass leaves it."""
    *size, dim_qk, dim_v = x.sizes
    part.kernel.mlstm_pass_segments(
        _GRADIENTS[name],
        keys,
        values,
        x.i,
        x.f,
        _rows(x, part),
        boundary,
        x.cut,
        (*size, part.width, dim_qk, dim_v),
        x.scale,
        x.half,
        x.sigmoid_gate,
        x.device,
        x.stream,
    )


def _combine(x: _Call, boundaries: Triple, norm_parts: int, entering: Pair, *, backward: bool) -> None:
    """Carries what enters the sequences on over the boundaries, in place."""
    x.plan.around.mlstm_bwd_combine(
        boundaries,
        norm_parts,
        entering,
        x.cut,
        x.sizes[1:],
        backward,
        x.device,
        x.stream,
    )


def _launch_dq_and_dk(x: _Call, written: _Grads, part: Part, dn: int) -> None:
    """The passes over a part of V, which add to what those before have made.

    Args:
        dn: address of the gradient of n_initial, of this part alone; or 0.
    """
    memory = x.memory
    *size, dim_qk, dim_v = x.sizes
    first = part.number == 0
    v, dh, rows = _columns(x, x.v, part), _columns(x, x.dh, part), _rows(x, part)
    sizes = (*size, part.width, dim_qk, dim_v)
    anchors = (memory.anchors, memory.flows + part.flows, x.plan.flow_parts)
    _run_pass(
        x, "dq", part.kernel, dh, v, x.k, written.dq, rows, sizes,
        entering=(_state(x.c_initial, part), x.n_initial),
        boundary=_boundary(x, x.states[0] + part.state, x.states[1], memory.state_decay),
        factor=x.q, sums=(memory.q_dq + part.sums, memory.q_dq_inter + part.inter), anchors=anchors,
        accumulate=not first,
    )  # fmt: skip
    _run_pass(
        x, "dk", part.kernel, v, dh, x.q, written.dk, rows, sizes,
        entering=(_state(x.dc_last, part), x.dn_last if first else 0),
        leaving=(0, dn),
        boundary=_boundary(x, memory.grad_c + part.state, memory.grad_n + part.norms, memory.grad_decay),
        factor=x.k, sums=(memory.k_dk + part.sums, memory.k_dk_inter + part.inter), anchors=anchors,
        accumulate=not first,
    )  # fmt: skip


def _launch_dv(x: _Call, written: _Grads, *, dots: bool) -> None:
    """The pass over all of V: the state's columns are those of its values.

    Args:
        dots: whether dh_t.h_t is wanted.
    """
    memory = x.memory
    *size, dim_qk, dim_v = x.sizes
    rows, sizes = _rows(x, x.plan.parts[0]), (*size, dim_qk, dim_v, dim_v)
    _run_pass(
        x, "dv", x.plan.dv, x.k, x.q, x.dh, written.dv, rows, sizes,
        entering=(x.dc_last, 0),
        leaving=(written.dc_initial, 0),
        boundary=_boundary(x, memory.grad_c, 0, memory.grad_decay),
        factor=x.h,
        sums=(memory.dots if dots else 0, 0),
    )  # fmt: skip


def _run_pass(
    x: _Call,
    name: str,
    kernel: ModuleType,
    queries: Operand,
    keys: Operand,
    values: Operand,
    out: Operand,
    rows: Triple,
    sizes: tuple[int, ...],
    *,
    entering: Pair,
    leaving: Pair = (0, 0),
    boundary: Triple,
    factor: Operand,
    sums: Pair = (0, 0),
    anchors: Triple = (0, 0, 0),
    accumulate: bool = False,
) -> None:
    """One pass over the chunks, on the current stream.

    Args:
        name: "dq", which walks forward in time, "dv" or "dk", which walk backward.
        out: the gradient, to be written; like `values`.
        rows: log2_w and e, of the part of V, 0 without normaliser, and chunk_m.
        sizes: batch, heads, seq, columns of the keys, of the values, of a whole state.
        entering: what a sequence's walk begins with, (c, n) for "dq", (dc, dn) for the others, fp32; 0 is
            zero. c and dc are [N, NH, K, V] always, contiguous or columns of a contiguous one: the state of
            "dv"; those of "dq" and "dk" are its transpose. n and dn [N, NH, K] go with the values' columns
            and are 0 for "dv".
        leaving: gradients of the initial state, to be written at the walk's end where there is an address:
            "dv" has that of c, "dk" that of n.
        boundary: c, n and log2_decay for the segments that follow others in the walk; 0 where nothing is cut.
        factor: like `out`, what its rows are multiplied with for the row sums, those of `values` for "dv".
        sums: where these are written, whole and inter; "dv" has no inter, and none at all where whole is 0.
        anchors: the states that "dq" leaves for "dk" and the flows that "dk" makes of them, and the parts of
            a flow.
        accumulate: whether the gradient is added to what `out` holds; not for "dv".
    """
    kernel.mlstm_pass(
        _GRADIENTS[name],
        queries,
        keys,
        values,
        out,
        factor,
        x.i,
        x.f,
        rows,
        entering,
        leaving,
        boundary,
        sums,
        anchors,
        x.cut,
        sizes,
        x.scale,
        accumulate,
        x.half,
        x.sigmoid_gate,
        x.device,
        x.stream,
    )


def _launch_gates(x: _Call, written: _Grads) -> None:
    """di and df from the passes' row sums."""
    memory, plan = x.memory, x.plan
    x.plan.around.mlstm_bwd_gates(
        (memory.q_dq, memory.q_dq_inter, plan.sums),
        (memory.k_dk, memory.k_dk_inter, plan.sums),
        (memory.flows, plan.flow_parts),
        x.i,
        x.f,
        written.di,
        written.df,
        x.chunk_m,
        _with_gradient(x.c_initial, written.dc_initial) + _with_gradient(x.n_initial, written.dn_initial),
        _with_gradient(x.c_last, x.dc_last) + _with_gradient(x.n_last, x.dn_last),
        memory.workspace,
        x.cut[:3],
        x.sizes,
        x.sigmoid_gate,
        x.device,
        x.stream,
    )


def _given(x: MaybeTensor) -> int:
    """Address of the data; 0 for None and for an empty tensor, which stands for it."""
    return x.data_ptr() if x is not None and x.numel() > 0 else 0


def _columns(x: _RowCall, operand: Operand, part: Part) -> Operand:
    """A part of the columns of v, h or dh."""
    pointer, batch, head, row = operand
    return pointer + x.itemsize * part.start, batch, head, row


def _state(pointer: int, part: Part) -> int:
    """A part of the columns of a state; 0 where there is none."""
    return pointer and pointer + part.state


def _rows(x: _Call, part: Part) -> Triple:
    """What the passes read of every token and chunk: log2_w, e and chunk_m."""
    if not x.row_n:
        return 0, 0, x.chunk_m
    return x.memory.log2_w + part.rows, x.memory.e + part.rows, x.chunk_m


def _boundary(x: _Call, c: int, n: int, log2_decay: int) -> Triple:
    return (c, n, log2_decay) if x.plan.is_cut else (0, 0, 0)


def _with_gradient(state: int, grad: int) -> Pair:
    """A state and its gradient; neither where one of them is missing."""
    return (state, grad) if state and grad else (0, 0)
