"""The backward of mLSTM and of scalar decay by the ThunderKittens kernels: three passes over the chunks.

A pass is what kernels/ and docs/mlstm-backward.md call a walk. The gates are scanned before the passes, and
the gradients of the gates come after them. All three large gradients are the same kernel with other operands.
It walks (queries, keys, values) chunk by chunk with a state keys x values on chip, for dk and dv from the
last chunk to the first. With the gates W_tj, the normaliser w_t, s = K^-1/2 and
e_t = -(dh_t.h_t) sign(d_t) [|d_t| > floor_t]::

                                                                            queries  keys  values
    dq_t = sum_{j <= t} s W_tj / w_t (dh_t.v_j + e_t) k_j + from the state    dh      v      k
    dk_j = sum_{t >= j} s W_tj / w_t (v_j.dh_t + e_t) q_t + from the state    v       dh     q
    dv_j = sum_{t >= j} s W_tj / w_t (k_j.q_t) dh_t       + from the state    k       q      dh

dq and dk are linear in the columns of v, dh and h, e_t among them: CTAs take as many as they hold, a part of
V, and those of different parts add to the same gradient.

Where a few long sequences would leave the GPU empty they are cut into segments, at the same places for all
passes. A kernel for the segments and a small kernel that carries states make the state with which a pass
begins a segment, or, for dq, the forward has left it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tfla_tk import build
from tfla_tk.backends.tk.operands import Operands
from tfla_tk.backends.tk.operands import current_stream as _current_stream
from tfla_tk.backends.tk.operands import gate as _gate
from tfla_tk.backends.tk.operands import multiprocessors as _multiprocessors
from tfla_tk.backends.tk.operands import pointer as _pointer
from tfla_tk.backends.tk.scalar_gate.launches import (
    Call,
    Grads,
    Pair,
    RowCall,
    launch_dq_and_dk,
    launch_dv,
    launch_factors,
    launch_gates,
    launch_rows,
    launch_scan,
    launch_segments_of_dk,
    launch_segments_of_dq,
)
from tfla_tk.backends.tk.scalar_gate.passes import Sizes, cut_sequences, instances_of, make_plan
from tfla_tk.calls.mlstm import MaybeGrads
from tfla_tk.core.layout import Cut, KeptStates, MaybeTensor, chunk_slots, grads_like

_NO_GATE = (0, 0, 0, 0, 0)


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
    states: KeptStates | None = None,
) -> MaybeGrads:
    """Launch the mLSTM backward on the current stream; arguments and results are those of tfla_tk::mlstm_bwd.

    Where no initial state is given its gradients are None. The passes have one schedule: `schedule` is the
    forward's alone.

    Args:
        states: the last result of `forward.mlstm_fwd`: what enters the segments of "dq" is then not made
            again.

    Raises:
        BuildError: A kernel is not compiled yet and cannot be.
        RuntimeError: A launch was refused.
    """
    return scalar_gate_bwd(
        *(q, k, v, i, f, c_initial, n_initial, m_initial, cu_seqlens, h, row_n, row_m, chunk_m),
        *(c_last, n_last, dh, dc_last, dn_last),
        sigmoid_gate=sigmoid_gate,
        normalize=normalize,
        eps=eps,
        scale=q.shape[-1] ** -0.5,
        states=states,
    )


def scalar_gate_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: MaybeTensor,
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
    *,
    sigmoid_gate: bool,
    normalize: bool,
    eps: float,
    scale: float,
    states: KeptStates | None,
    decay: bool = False,
    needs_df: bool = True,
) -> tuple[Any, ...]:
    """The backward of mLSTM and of a scalar decay; arguments and results as of `mlstm_bwd`.

    Args:
        q, k: may have fewer heads than v, each shared by as many neighbouring heads of v. dq and dk come
            back for every head of v then, [B, NH, S, K].
        i: None with a decay.
        f: with a decay its natural log.
        h: with a normaliser alone it is read.
        scale: of q k^T.
        decay: as in `forward.Options`.
        needs_df: without it di and df come back as None.
    """
    if not normalize:
        n_last = dn_last = row_n = None
    if v.numel() == 0:
        grads = _grads_like(q, k, v, i, f, c_initial, n_initial, needs_df)
        _of_no_token(grads, dc_last, dn_last)
        return grads
    batch, heads, seq, dim_v = v.shape
    dim_qk, group = q.shape[-1], heads // q.shape[1]
    row_n_at = _given(row_n)
    if normalize and not row_n_at:
        raise ValueError("mlstm_bwd with a normaliser needs row_n of its forward")
    sizes = (batch, heads, seq, dim_qk, dim_v)
    operands = Operands()
    offsets = operands.offsets(cu_seqlens, batch)
    device = q.get_device()
    cut, given = _cut(sizes, offsets, device, states)
    kernels = tuple(map(build.load, instances_of(*sizes[3:], decay=decay)))
    slots = chunk_slots(seq, cu_seqlens)
    plan = make_plan(
        kernels, sizes, offsets[-1], slots, cut, normalize=normalize, states_given=given is not None
    )
    allocation = torch.empty(plan.bytes, dtype=torch.uint8, device=q.device)
    memory = plan.memory_at(allocation.data_ptr())
    if given:
        memory = memory._replace(state_c=given[0], state_n=given[1] if normalize else 0)
    of_rows = (
        plan,
        memory,
        sizes,
        operands.read(h),
        operands.read(dh),
        row_n_at,
        _given(row_m),
        eps,
        q.dtype == torch.float16,
        device,
        _current_stream(device),
    )
    # dh_t.h_t comes from the pass for dv, but where segments need e before the passes
    dots_of_dv = normalize and not plan.is_cut
    if normalize and plan.is_cut:
        launch_rows(RowCall(*of_rows))
    # only now the rest, and last of all the gradients, so that a GPU that waits for the host has work early
    call = Call(
        *of_rows,
        q=operands.read(q),
        k=operands.read(k),
        v=operands.read(v),
        i=_NO_GATE if i is None else _gate(i),
        f=_gate(f),
        chunk_m=_given(chunk_m),
        cut=(*offsets, *plan.cut),
        c_initial=operands.state(c_initial),
        n_initial=operands.state(n_initial) if normalize else 0,
        c_last=operands.state(c_last),
        n_last=operands.state(n_last),
        dc_last=operands.state(dc_last),
        dn_last=operands.state(dn_last),
        scale=scale,
        sigmoid_gate=sigmoid_gate,
        group=group,
    )
    launch_scan(call)
    if plan.is_cut:
        if not given:
            launch_segments_of_dq(call)
        launch_segments_of_dk(call)
    grads = _grads_like(q, k, v, i, f, c_initial, n_initial, needs_df)
    dq, dk, dv, di, df, dc_initial, dn_initial = grads
    dn_initial = operands.state_result(dn_initial)
    written = Grads(
        operands.write(dq),
        operands.write(dk),
        operands.write(dv),
        _NO_GATE if di is None else _gate(di),
        _NO_GATE if df is None else _gate(df),
        _pointer(operands.state_result(dc_initial)),
        _pointer(dn_initial),
    )
    launch_dv(call, written, dots=dots_of_dv)
    if dots_of_dv:
        launch_factors(call)
    if dn_initial is None or plan.parts == 1:
        launch_dq_and_dk(call, written, written.dn_initial)
    else:
        dn_of_parts = dn_initial.new_empty((plan.parts, *dn_initial.shape))
        launch_dq_and_dk(call, written, dn_of_parts.data_ptr())
        torch.sum(dn_of_parts, dim=0, out=dn_initial)
    if needs_df:
        launch_gates(call, written)
    operands.copy_back()
    return grads


def _grads_like(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: MaybeTensor,
    f: Tensor,
    c_initial: MaybeTensor,
    n_initial: MaybeTensor,
    needs_df: bool,
) -> tuple[Tensor, Tensor, Tensor, MaybeTensor, MaybeTensor, MaybeTensor, MaybeTensor]:
    """Uninitialised gradients, each like its input; those of q and k for every head of v."""
    heads = v.shape[1]

    def for_every_head(x: Tensor) -> Tensor:
        if x.shape[1] == heads:
            return torch.empty_like(x)
        batch, _, seq, dim = x.shape
        return x.new_empty((batch, seq, heads, dim)).transpose(1, 2)

    of_gates = grads_like(i, f) if needs_df else (None, None)
    of_states = grads_like(c_initial, n_initial)
    return (for_every_head(q), for_every_head(k), torch.empty_like(v), *of_gates, *of_states)


def _of_no_token(grads: tuple[MaybeTensor, ...], dc_last: MaybeTensor, dn_last: MaybeTensor) -> None:
    """Without tokens the state passes through, and so does its gradient."""
    for grad, last in zip(grads[5:], (dc_last, dn_last), strict=True):
        if grad is not None:
            grad.zero_() if last is None else grad.copy_(last)


def _cut(
    sizes: Sizes, offsets: tuple[int, bool, int], device: int, states: KeptStates | None
) -> tuple[Cut, Pair | None]:
    """The cut, and the addresses of the forward's states at its boundaries if it was cut in the same way.

    Args:
        offsets: of packed sequences, as the kernels take them.
    """
    pointer, _, sequences = offsets
    cut = cut_sequences(sizes, sequences, _multiprocessors(device), packed=pointer != 0)
    if states is None or states.cut != cut:
        return cut, None
    address, (c, n) = states.workspace.data_ptr(), states.offsets
    return cut, (address + c, address + n)


def _given(x: MaybeTensor) -> int:
    """Address of the data; 0 for None and for an empty tensor, which stands for it."""
    return x.data_ptr() if x is not None and x.numel() > 0 else 0
