"""The registered mLSTM ops: one forward and one backward, with CPU, CUDA, fake and autograd implementations.

They are the path of the tk backend. On a CPU they compute the reference, so that torch.compile, fake tensors
and opcheck can be tested on any machine. The public functions validate arguments and answer empty inputs.

States and rows are fp32 (fp64 for fp64 q, k, v). N is B, or the number of sequences with cu_seqlens.

tfla_tk::mlstm_fwd returns (h, c, n, m, row_n, row_m, chunk_m):
    h [B, NH, S, V] in q's dtype and, where v is a dense permutation, v's memory order;
    c [N, NH, K, V], n [N, NH, K], m [N, NH, 1]: last state; empty tensors [0] without return_last_states, and
    m is always empty with the sigmoid gate;
    row_n, row_m [B, NH, S]: with return_rows, what a backward needs per token: s q_t.n_t in units of e^{m_t},
    signed, and the stabiliser m_t; no gradient flows through them. Empty tensors [0] without return_rows,
    row_n without normaliser, row_m with the sigmoid gate.
    chunk_m [B, NH, slots, 2]: like row_m: the stabiliser at the start of every chunk of CHUNK tokens, in log2
    units, as a high and a low part, whose sum it is. slots: `chunk_slots`; chunk j of packed sequence s,
    which starts at token t, has slot t // CHUNK + s + j. Slots of no chunk hold nothing.
tfla_tk::mlstm_bwd takes the inputs of mlstm_fwd and of its outputs with return_rows h, row_n, row_m, chunk_m
    (None stands for an empty one), and c_last, n_last where dc_last, dn_last are given. It returns (dq, dk,
    dv, di, df, dc_initial, dn_initial), each like its input; the last two are empty tensors [0] where no
    initial state was given.
cu_seqlens: [N + 1] int32 or int64 offsets of sequences packed in a batch of one, rising from 0 to S.
batch_invariant: the option of that name, for the CUDA kernels. torch leaves out what a default stands for, so
    implementations may get one argument less.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tfla_tk.calls.mlstm import Grads, MaybeGrads, MLSTMCall
from tfla_tk.core import flops, library, transforms
from tfla_tk.core.layout import (
    CHUNK,
    KeptStates,
    MaybeTensor,
    as_dtype,
    chunk_slots,
    grads_like,
    present,
    state_dtype,
)
from tfla_tk.core.memo import are_saved_tensors_hooked, named_in_profiles, records
from tfla_tk.ops import autograd
from tfla_tk.ops.autograd import Recorded

Output: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor i, Tensor f, "
    "Tensor? c_initial, Tensor? n_initial, Tensor? m_initial, Tensor? cu_seqlens, "
)
_library = library.get()
_library.define(
    f"mlstm_fwd({_INPUTS}bool sigmoid_gate, bool normalize, float eps, "
    "bool return_last_states, bool return_rows, bool batch_invariant=False)"
    " -> (Tensor h, Tensor c, Tensor n, Tensor m, Tensor row_n, Tensor row_m, Tensor chunk_m)"
)
_library.define(
    f"mlstm_bwd({_INPUTS}Tensor h, Tensor? row_n, Tensor? row_m, Tensor? chunk_m, "
    "Tensor? c_last, Tensor? n_last, Tensor dh, Tensor? dc_last, Tensor? dn_last, "
    "bool sigmoid_gate, bool normalize, float eps, bool batch_invariant=False)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor di, Tensor df, Tensor dc_initial, Tensor dn_initial)"
)
_fwd = torch.ops.tfla_tk.mlstm_fwd.default
_bwd = torch.ops.tfla_tk.mlstm_bwd.default


def mlstm(
    call: MLSTMCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c_initial: MaybeTensor,
    n_initial: MaybeTensor,
    m_initial: MaybeTensor,
    cu_seqlens: MaybeTensor,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The tk backend: tfla_tk::mlstm_fwd, float64 gates and the initial state cast to what the kernels read.

    Returns:
        h and the last state, (c, n, m) or with the sigmoid gate (c, n); of use only if asked for.
    """
    tensors = _as_read(call, (q, k, v, i, f, c_initial, n_initial, m_initial, cu_seqlens))
    h, c, n, m, *_ = _fwd(*tensors, *_options(call), call.return_last_states, False, call.batch_invariant)
    return h, (c, n) if call.sigmoid_gate else (c, n, m)


def prepare_mlstm(
    call: MLSTMCall, tensors: tuple[Any, ...]
) -> Callable[..., tuple[Tensor, tuple[Tensor, ...]]]:
    """`mlstm` without the op: the kernels themselves, for plain eager calls with tensors like these.

    Like these are tensors with the same metadata, strides included, that autograd records or not as these.

    Returns:
        A function of the tensors that `mlstm` takes.
    """
    from tfla_tk.backends.tk.scalar_gate import forward as tk_forward

    sigmoid_gate = call.sigmoid_gate
    read = _as_read(call, tensors)
    reads_all_as_given = all(x is given for x, given in zip(read, tensors, strict=True))
    recorded = records(read)
    options = tk_forward.Options(
        *_options(call), call.return_last_states, recorded, call.batch_invariant, recorded
    )
    forward = tk_forward.prepare(read, options)

    def run(*tensors: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        read = tensors if reads_all_as_given else _as_read(call, tensors)
        found: Any = _direct_mlstm(*read, (forward, options)) if recorded else forward(*read)
        h, c, n, m, *_ = found
        return h, (c, n) if sigmoid_gate else (c, n, m)

    return named_in_profiles("tfla_tk::mlstm_fwd", run)


def _options(call: MLSTMCall) -> tuple[bool, bool, float]:
    return call.sigmoid_gate, call.normalize, call.eps


def _as_read(call: MLSTMCall, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """The tensors of mlstm_fwd in dtypes that the kernels read, None for those that do not count."""
    q, k, v, i, f, c_initial, n_initial, m_initial, cu_seqlens = tensors
    dtype = state_dtype(q)
    return (
        q,
        k,
        v,
        i.to(dtype) if i.dtype == torch.float64 else i,
        f.to(dtype) if f.dtype == torch.float64 else f,
        as_dtype(c_initial, dtype),
        as_dtype(n_initial, dtype) if call.normalize else None,
        None if call.sigmoid_gate else as_dtype(m_initial, dtype),
        cu_seqlens,
    )


# CPU: the reference


def _fwd_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c_initial: MaybeTensor,
    n_initial: MaybeTensor,
    m_initial: MaybeTensor,
    cu_seqlens: MaybeTensor,
    sigmoid_gate: bool,
    normalize: bool,
    eps: float,
    return_last_states: bool,
    return_rows: bool,
    batch_invariant: bool = False,
) -> Output:
    import tfla_tk.reference as forms

    terms = forms.mlstm_forward_terms(
        q, k, v, i, f, c_initial, n_initial, m_initial, eps,
        sigmoid_gate=sigmoid_gate, normalize=normalize, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    out = _outputs_like(q, v, cu_seqlens, sigmoid_gate, normalize, return_last_states, return_rows)
    # own memory: an op may not return a view of its input
    for buffer, value in zip(out[:-1], terms, strict=True):
        if buffer.numel() > 0:
            buffer.copy_(value)
    _fill_chunk_m(out[-1], terms.m_t, m_initial, cu_seqlens)
    return out


def _fill_chunk_m(chunk_m: Tensor, row_m: Tensor, m_initial: MaybeTensor, cu_seqlens: MaybeTensor) -> None:
    """The stabiliser at the start of every chunk, in log2 units, as two parts; 0 in slots of no chunk."""
    chunk_m.zero_()
    if chunk_m.numel() == 0:
        return
    exact = torch.zeros_like(chunk_m[..., 0], dtype=torch.float64)
    seq = row_m.shape[-1]
    bounds = [0, seq] if cu_seqlens is None else cu_seqlens.tolist()
    for sequence, (start, end) in enumerate(itertools.pairwise(bounds)):
        if start == end:
            continue
        slot = start // CHUNK + sequence
        own = exact[:, :, slot : slot + (end - start + CHUNK - 1) // CHUNK]
        if m_initial is not None:
            own[..., :1] = m_initial if cu_seqlens is None else m_initial[sequence]
        # what the last token of the chunk before left
        own[..., 1:] = row_m[:, :, start + CHUNK - 1 : end - 1 : CHUNK]
    exact.mul_(math.log2(math.e))
    high, low = chunk_m.unbind(-1)
    high.copy_(exact)
    low.copy_(torch.where(high.isfinite(), exact - high, 0.0))


def _bwd_cpu(
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
    batch_invariant: bool = False,
) -> Grads:
    import tfla_tk.reference as forms

    terms = forms.mlstm_backward_terms(
        q, k, v, i, f, c_initial, n_initial, m_initial, dh, dc_last, dn_last, eps,
        sigmoid_gate=sigmoid_gate, normalize=normalize, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    out = present_grads(grads_like(q, k, v, i, f, c_initial, n_initial))
    for buffer, value in zip(out, terms.grads, strict=True):
        if buffer.numel() > 0:
            buffer.copy_(value)
    return out


# CUDA: the kernels, which have None in place of empty tensors


def _fwd_cuda(*args: Any) -> Output:
    q: Tensor = args[0]
    h, *rest, _ = _kernels_fwd(*args)
    c, n, m, row_n, row_m, chunk_m = (present(x, q) for x in rest)
    return h, c, n, m, row_n, row_m, chunk_m


def _bwd_cuda(*args: Any) -> Grads:
    return present_grads(_kernels_bwd(*args))


def _kernels_fwd(*args: Any) -> Any:
    from tfla_tk.backends.tk.scalar_gate import forward as tk_forward

    return tk_forward.mlstm_fwd(*args)


def _kernels_bwd(*args: Any) -> MaybeGrads:
    from tfla_tk.backends.tk.scalar_gate import backward as tk_backward

    return tk_backward.mlstm_bwd(*args)


def present_grads(grads: MaybeGrads) -> Grads:
    dq, dk, dv, di, df, dc_initial, dn_initial = grads
    return dq, dk, dv, di, df, present(dc_initial, dq), present(dn_initial, dq)


def _fwd_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c_initial: MaybeTensor,
    n_initial: MaybeTensor,
    m_initial: MaybeTensor,
    cu_seqlens: MaybeTensor,
    sigmoid_gate: bool,
    normalize: bool,
    eps: float,
    return_last_states: bool,
    return_rows: bool,
    batch_invariant: bool = False,
) -> Output:
    return _outputs_like(q, v, cu_seqlens, sigmoid_gate, normalize, return_last_states, return_rows)


def _bwd_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c_initial: MaybeTensor,
    n_initial: MaybeTensor,
    *rest: Any,
) -> Grads:
    return present_grads(grads_like(q, k, v, i, f, c_initial, n_initial))


def _outputs_like(
    q: Tensor,
    v: Tensor,
    cu_seqlens: MaybeTensor,
    sigmoid_gate: bool,
    normalize: bool,
    return_last_states: bool,
    return_rows: bool,
) -> Output:
    """Uninitialised outputs of mlstm_fwd; [0] for what was not asked for."""
    batch, heads, seq, dim_qk = q.shape
    count = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1

    def empty(wanted: bool, *shape: int) -> Tensor:
        return q.new_empty(shape if wanted else (0,), dtype=state_dtype(q))

    return (
        torch.empty_like(v),
        empty(return_last_states, count, heads, dim_qk, v.shape[-1]),
        empty(return_last_states, count, heads, dim_qk),
        empty(return_last_states and not sigmoid_gate, count, heads, 1),
        empty(return_rows and normalize, batch, heads, seq),
        empty(return_rows and not sigmoid_gate, batch, heads, seq),
        empty(return_rows and not sigmoid_gate, batch, heads, chunk_slots(seq, cu_seqlens), 2),
    )


# Autograd


def _record(*args: Any) -> Recorded:
    """mlstm_fwd with what its backward op takes; the stabiliser is a constant of the differentiation."""
    tensors, (sigmoid_gate, normalize, eps, return_last_states, return_rows, *of_kernels) = args[:9], args[9:]
    with transforms.below_function():
        h, c, n, m, *rows = _fwd(*args[:13], True, *of_kernels)
        saved = _saved(tensors, h, rows, (c, n) if return_last_states else (None, None))
    if not return_rows:
        rows = [x.new_empty(0) for x in rows]
    constants = *(() if return_last_states else (c, n)), m, *rows
    return Recorded((h, c, n, m, *rows), constants, saved, (sigmoid_gate, normalize, eps, *of_kernels))


def _differentiate(
    saved: Sequence[Any], options: tuple[Any, ...], grads: tuple[MaybeTensor, ...]
) -> Sequence[MaybeTensor]:
    return _bwd(*_backward_tensors(saved, grads), *options)


def _record_directly(*args: Any) -> tuple[Recorded, KeptStates | None]:
    """`_record` of a plain eager call: the kernels themselves.

    Args:
        args: the tensors of mlstm_fwd, and in one tuple the prepared forward and its options.
    """
    *tensors, (forward, options) = args
    if are_saved_tensors_hooked():
        # checkpointing wants the call and its recomputation to save alike, and the op, which one of them may
        # take, saves no states
        h, c, n, m, *rows, kept = _kernels_fwd(*tensors, *options[:6])
    else:
        h, c, n, m, *rows, kept = forward(*tensors)
    saved = _saved(tensors, h, rows, (c, n))
    of_backward = (*options[:3], options.batch_invariant)
    return Recorded((h, c, n, m), () if m is None else (m,), saved, of_backward), kept


def _saved(
    tensors: Sequence[MaybeTensor],
    h: Tensor,
    rows: Sequence[MaybeTensor],
    last: tuple[MaybeTensor, MaybeTensor],
) -> tuple[MaybeTensor, ...]:
    """What the backward takes instead of a second forward.

    The inputs, h, the last state where it is an output, and the forward's rows. All by reference, but the
    initial state: a cache that is updated in place must not change the gradient.

    Args:
        tensors: the inputs of mlstm_fwd.
    """
    states = (None if x is None else x.clone() for x in tensors[5:8])
    return *tensors[:5], *states, tensors[8], h, *rows, *last


def _backward_tensors(saved: Sequence[Any], grads: tuple[MaybeTensor, ...]) -> tuple[Any, ...]:
    """What mlstm_bwd takes."""
    dh, dc_last, dn_last, *_ = grads
    return *saved, torch.zeros_like(saved[2]) if dh is None else dh, dc_last, dn_last


_MLSTM = autograd.function("MLSTM", _record, _differentiate)
_direct_mlstm = autograd.direct_function(
    "DirectMLSTM",
    _record_directly,
    _backward_tensors,
    lambda *args: _kernels_bwd(*args),
    lambda *args: _bwd(*args),
    "tfla_tk::mlstm_bwd",
)
_MLSTMBackward = autograd.refusing(
    "MLSTMBackward",
    _bwd,
    "double backward of mLSTM is not implemented; backend='reference' is plain autograd and has it",
)


_library.impl("mlstm_fwd", _fwd_cpu, "CPU")
_library.impl("mlstm_bwd", _bwd_cpu, "CPU")
_library.impl("mlstm_fwd", _fwd_cuda, "CUDA")
_library.impl("mlstm_bwd", _bwd_cuda, "CUDA")
_library.impl("mlstm_fwd", autograd.recording("mlstm_fwd", _fwd, _MLSTM), "Autograd")
_library.impl("mlstm_bwd", autograd.recording("mlstm_bwd", _bwd, _MLSTMBackward), "Autograd")
_library.register_fake("mlstm_fwd", _fwd_fake)
_library.register_fake("mlstm_bwd", _bwd_fake)
_library.register_vmap("mlstm_fwd", transforms.merge_into_batch(_fwd, cu_seqlens=8))
_library.register_vmap("mlstm_bwd", transforms.merge_into_batch(_bwd, cu_seqlens=8))
flops.register("mlstm_fwd", flops.forward)
flops.register("mlstm_bwd", flops.backward)
