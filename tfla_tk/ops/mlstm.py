"""The registered mLSTM ops, with CPU, CUDA, fake and autograd implementations.

mlstm_fwd and mlstm_bwd are the path of the tk backend and compute the reference on a CPU, as in `ops.linear`.

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

tfla_tk::packed_mlstm(_bwd): the reference over packed sequences, for traced calls, as in `ops.linear`. The
    last states are in the common dtype of the inputs, at least fp32; m is an empty tensor [0] with the
    sigmoid gate, and has no gradient.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tfla_tk.calls.mlstm import Grads, MaybeGrads, MLSTMCall
from tfla_tk.core import flops, library, transforms
from tfla_tk.core.eager import are_saved_tensors_hooked, is_plain, named_in_profiles, records
from tfla_tk.core.layout import (
    CHUNK,
    Kept,
    MaybeTensor,
    as_dtype,
    chunk_slots,
    grads_like,
    present,
    state_dtype,
)
from tfla_tk.ops import autograd
from tfla_tk.ops.autograd import Recorded

Output: TypeAlias = tuple[Tensor, ...]

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor i, Tensor f, "
    "Tensor? c_initial, Tensor? n_initial, Tensor? m_initial, Tensor? cu_seqlens, "
)
_INPUT_COUNT = 9
_SAVED_COUNT = 15  # of the tensors of a backward, those before the gradients that it is given
_OPTIONS = "bool sigmoid_gate, bool normalize, float eps"
_OF_FORM = f"str form, int chunk_size, {_OPTIONS}"
_GRADS = "(Tensor dq, Tensor dk, Tensor dv, Tensor di, Tensor df, Tensor dc_initial, Tensor dn_initial)"
_library = library.get()
_library.define(
    f"mlstm_fwd({_INPUTS}{_OPTIONS}, "
    "bool return_last_states, bool return_rows, bool batch_invariant=False)"
    " -> (Tensor h, Tensor c, Tensor n, Tensor m, Tensor row_n, Tensor row_m, Tensor chunk_m)"
)
_library.define(
    f"mlstm_bwd({_INPUTS}Tensor h, Tensor? row_n, Tensor? row_m, Tensor? chunk_m, "
    "Tensor? c_last, Tensor? n_last, Tensor dh, Tensor? dc_last, Tensor? dn_last, "
    f"{_OPTIONS}, bool batch_invariant=False) -> {_GRADS}"
)
_library.define(
    f"packed_mlstm({_INPUTS.replace('Tensor? cu', 'Tensor cu')}{_OF_FORM})"
    " -> (Tensor h, Tensor c_last, Tensor n_last, Tensor m_last)"
)
_library.define(
    f"packed_mlstm_bwd({_INPUTS.replace('Tensor? cu', 'Tensor cu')}"
    f"Tensor? dh, Tensor? dc_last, Tensor? dn_last, {_OF_FORM}) -> {_GRADS}"
)
_fwd = torch.ops.tfla_tk.mlstm_fwd.default
_bwd = torch.ops.tfla_tk.mlstm_bwd.default
_packed = torch.ops.tfla_tk.packed_mlstm.default
_packed_bwd = torch.ops.tfla_tk.packed_mlstm_bwd.default


# What backends call. Tensors are q, k, v, i, f, c_initial, n_initial, m_initial, cu_seqlens; results are h
# and the last state, (c, n, m) or with the sigmoid gate (c, n), of use only if asked for


def mlstm(call: MLSTMCall, variant: str | None, *tensors: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The tk backend: tfla_tk::mlstm_fwd, float64 gates and the initial state cast to what kernels read."""
    options = *_options(call), call.return_last_states, False, call.batch_invariant
    h, c, n, m, *_ = _fwd(*_as_read(call, tensors), *options)
    return h, (c, n) if call.sigmoid_gate else (c, n, m)


def prepare_mlstm(
    call: MLSTMCall, variant: str | None, tensors: tuple[Any, ...]
) -> Callable[..., tuple[Tensor, tuple[Tensor, ...]]] | None:
    """`mlstm` without the op: the kernels themselves, for plain eager calls with tensors like these. Like
    these are tensors with the same metadata, strides included, that autograd records or not as these."""
    if not is_plain(tensors):
        return None
    from tfla_tk.backends.tk.scalar_gate import forward as tk_forward

    sigmoid_gate = call.sigmoid_gate
    read = _as_read(call, tensors)
    reads_all_as_given = all(x is given for x, given in zip(read, tensors, strict=True))
    recorded = records(read)
    of_call = call.return_last_states, recorded, call.batch_invariant
    options = tk_forward.Options(*_options(call), *of_call, recorded)
    forward = tk_forward.prepare(read, options)

    def run(*tensors: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        read = tensors if reads_all_as_given else _as_read(call, tensors)
        found: Any = _direct_mlstm(*read, (forward, options)) if recorded else forward(*read)
        h, c, n, m, *_ = found
        return h, (c, n) if sigmoid_gate else (c, n, m)

    return named_in_profiles("tfla_tk::mlstm_fwd", run)


def packed_mlstm(call: MLSTMCall, form: str, tensors: tuple[Any, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
    h, c, n, m = _packed(*tensors, form, call.chunk_size, *_options(call))
    return h, (c, n) if call.sigmoid_gate else (c, n, m)


def _options(call: MLSTMCall) -> tuple[bool, bool, float]:
    return call.sigmoid_gate, call.normalize, call.eps


def _as_read(call: MLSTMCall, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """The tensors of mlstm_fwd in dtypes that the kernels read, None for those that do not count."""
    q, k, v, i, f, c_initial, n_initial, m_initial, cu_seqlens = tensors
    dtype = state_dtype(q)
    i = i.to(dtype) if i.dtype == torch.float64 else i
    f = f.to(dtype) if f.dtype == torch.float64 else f
    n_initial = as_dtype(n_initial, dtype) if call.normalize else None
    m_initial = None if call.sigmoid_gate else as_dtype(m_initial, dtype)
    return q, k, v, i, f, as_dtype(c_initial, dtype), n_initial, m_initial, cu_seqlens


# The reference, of the arguments of an op


def _fwd_cpu(*args: Any) -> Output:
    import tfla_tk.reference as forms

    *inputs, m_initial, cu_seqlens = args[:_INPUT_COUNT]
    sigmoid_gate, normalize, eps, *_ = args[_INPUT_COUNT:]
    terms = forms.mlstm_forward_terms(
        *(*inputs, m_initial, eps), sigmoid_gate=sigmoid_gate, normalize=normalize, cu_seqlens=cu_seqlens
    )
    *out, chunk_m = _fwd_fake(*args)
    _fill_chunk_m(chunk_m, terms.m_t, m_initial, cu_seqlens)
    return *_filled(out, terms), chunk_m


def _filled(out: Sequence[Tensor], values: Sequence[Any]) -> tuple[Tensor, ...]:
    """Those of the outputs that are wanted with their values, in memory of their own: an op may not return a
    view of its input."""
    for buffer, value in zip(out, values, strict=False):
        if buffer.numel() > 0:
            buffer.copy_(value)
    return tuple(out)


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


def _bwd_cpu(*args: Any) -> Grads:
    inputs, grads, options = (
        args[:_INPUT_COUNT],
        args[_SAVED_COUNT : _SAVED_COUNT + 3],
        args[_SAVED_COUNT + 3 :],
    )
    return _packed_bwd_reference(*inputs, *grads, "chunkwise", CHUNK, *options[:3])


def by_reference(
    tensors: tuple[Any, ...], form: str, chunk_size: int, sigmoid_gate: bool, normalize: bool, eps: float
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One form (layout.FORMS) of the reference of q, k, v, i, f, c_initial, n_initial, m_initial,
    cu_seqlens: h [B, NH, S, V] and the last state, (c, n, m) or with the sigmoid gate (c, n), in the
    widest dtype of the inputs."""
    import tfla_tk.reference as forms

    *inputs, m_initial, cu_seqlens = tensors
    options: dict[str, Any] = {"return_last_states": True, "eps": eps, "cu_seqlens": cu_seqlens}
    if form == "chunkwise":
        options["chunk_size"] = chunk_size
    if sigmoid_gate:
        h, last = getattr(forms, f"mlstm_siging_{form}")(*inputs, **options, normalize=normalize)
    else:
        h, last = getattr(forms, f"mlstm_{form}")(*inputs, m_initial, **options)
    return h, last


def _packed_reference(*args: Any) -> Output:
    inputs, (form, chunk_size, *options) = args[:_INPUT_COUNT], args[_INPUT_COUNT:]
    h, last = by_reference(inputs, form, chunk_size, *options)
    return _filled(_packed_fake(*args), (h, *last))


def _packed_bwd_reference(*args: Any) -> Grads:
    import tfla_tk.reference as forms

    inputs, (dh, *grads, _, chunk_size, sigmoid_gate, normalize, eps) = (
        args[:_INPUT_COUNT],
        args[_INPUT_COUNT:],
    )
    *tensors, cu_seqlens = inputs
    of_h = torch.zeros_like(inputs[2]) if dh is None else dh
    options = {"sigmoid_gate": sigmoid_gate, "normalize": normalize}
    given = *tensors, of_h, *grads, eps, chunk_size
    found = forms.mlstm_backward(*given, **options, cu_seqlens=cu_seqlens)
    return _filled(_bwd_fake(*inputs), found)


# CUDA: the kernels, which have None in place of empty tensors


def _fwd_cuda(*args: Any) -> Output:
    h, *rest, _ = _kernels_fwd(*args)
    return h, *(present(x, args[0]) for x in rest)


def _bwd_cuda(*args: Any) -> Grads:
    return tuple(present(x, args[0]) for x in _kernels_bwd(*args))


def _kernels_fwd(*args: Any) -> Any:
    from tfla_tk.backends.tk.scalar_gate import forward

    return forward.mlstm_fwd(*args)


def _kernels_bwd(*args: Any) -> MaybeGrads:
    from tfla_tk.backends.tk.scalar_gate import backward

    return backward.mlstm_bwd(*args)


# Uninitialised results; [0] for what was not asked for


def _fwd_fake(*args: Any) -> Output:
    inputs, options = args[:_INPUT_COUNT], args[_INPUT_COUNT:]
    q, _, v, *_, cu_seqlens = inputs
    sigmoid_gate, normalize, _, return_last_states, return_rows, *_ = options
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


def _bwd_fake(*args: Any) -> Grads:
    return tuple(present(x, args[0]) for x in grads_like(*args[:7]))


def _packed_fake(*args: Any) -> Output:
    from tfla_tk.reference.common import compute_dtype

    (q, _, v, *_, cu_seqlens), sigmoid_gate = args[:_INPUT_COUNT], args[_INPUT_COUNT + 2]
    count, (heads, dim_qk), dim_v = cu_seqlens.shape[0] - 1, (q.shape[1], q.shape[3]), v.shape[3]
    dtype = compute_dtype(*args[: 7 if sigmoid_gate else 8])

    def empty(*shape: int) -> Tensor:
        return q.new_empty(shape, dtype=dtype)

    return (
        q.new_empty(v.shape),
        empty(count, heads, dim_qk, dim_v),
        empty(count, heads, dim_qk),
        empty(0) if sigmoid_gate else empty(count, heads, 1),
    )


# Autograd


def _record(*args: Any) -> Recorded:
    """mlstm_fwd with what its backward op takes; the stabiliser is a constant of the differentiation."""
    tensors, (sigmoid_gate, normalize, eps, return_last_states, return_rows, *of_kernels) = args[:9], args[9:]
    with transforms.below_function():
        h, c, n, m, *rows = _fwd(*args[:13], True, *of_kernels)
        last = (c, n) if return_last_states else (None, None)
        saved = *_inputs_to_save(tensors), h, *rows, *last
    if not return_rows:
        rows = [x.new_empty(0) for x in rows]
    constants = *(() if return_last_states else (c, n)), m, *rows
    return Recorded((h, c, n, m, *rows), constants, saved, (sigmoid_gate, normalize, eps, *of_kernels))


def _differentiate(
    saved: Sequence[Any], options: tuple[Any, ...], grads: tuple[MaybeTensor, ...]
) -> Sequence[MaybeTensor]:
    return _bwd(*_backward_tensors(saved, grads), *options)


def _record_directly(*args: Any) -> Recorded:
    """`_record` of a plain eager call: the kernels themselves. args: the tensors of mlstm_fwd, and in one
    tuple the prepared forward and its options."""
    *tensors, (forward, options) = args
    if are_saved_tensors_hooked():
        # checkpointing wants the call and its recomputation to save alike, and the op, which one of them may
        # take, saves no states
        h, c, n, m, *rows, kept = _kernels_fwd(*tensors, *options[:6])
    else:
        h, c, n, m, *rows, kept = forward(*tensors)
    saved = *_inputs_to_save(tensors), h, *rows, c, n
    of_backward = *options[:3], options.batch_invariant
    constants = () if m is None else (m,)
    if kept is None:
        return Recorded((h, c, n, m), constants, saved, (of_backward, None))
    return Recorded((h, c, n, m), constants, (*saved, *kept.tensors), (of_backward, kept.layout))


def _differentiate_directly(
    saved: Sequence[Any], options: tuple[Any, ...], grads: tuple[MaybeTensor, ...]
) -> Sequence[MaybeTensor]:
    """The kernels again where the backward is plain, too."""
    of_backward, layout = options
    tensors, left = _backward_tensors(saved[:_SAVED_COUNT], grads), tuple(saved[_SAVED_COUNT:])
    if not autograd.is_plain_backward((*tensors, *left), grads):
        return _bwd(*tensors, *of_backward)
    kept = Kept(left, layout) if left else None
    return named_in_profiles("tfla_tk::mlstm_bwd", _kernels_bwd)(*tensors, *of_backward, kept)


def _inputs_to_save(tensors: Sequence[Any]) -> tuple[MaybeTensor, ...]:
    """The inputs for the backward, by reference but for the initial state: a cache that is updated in place
    must not change the gradient."""
    states = (None if x is None else x.clone() for x in tensors[5:8])
    return *tensors[:5], *states, tensors[8]


def _backward_tensors(saved: Sequence[Any], grads: tuple[MaybeTensor, ...]) -> tuple[Any, ...]:
    """What mlstm_bwd takes."""
    dh, dc_last, dn_last, *_ = grads
    return *saved, torch.zeros_like(saved[2]) if dh is None else dh, dc_last, dn_last


def _record_packed(*args: Any) -> Recorded:
    """packed_mlstm with what its backward op takes; m is a constant of the differentiation."""
    with transforms.below_function():
        out: Output = _packed(*args)
    return Recorded(out, (out[3],), _inputs_to_save(args[:_INPUT_COUNT]), args[_INPUT_COUNT:])


def _differentiate_packed(
    saved: Sequence[Any], options: tuple[Any, ...], grads: tuple[MaybeTensor, ...]
) -> Sequence[MaybeTensor]:
    return _packed_bwd(*saved, *grads[:3], *options)


_MLSTM = autograd.function("MLSTM", _record, _differentiate)
_direct_mlstm = autograd.direct_apply(
    autograd.function("DirectMLSTM", _record_directly, _differentiate_directly)
)
_MLSTMBackward = autograd.refusing(
    "MLSTMBackward",
    _bwd,
    "double backward of mLSTM is not implemented; backend='reference' is plain autograd and has it",
)
_Packed = autograd.function("Packed", _record_packed, _differentiate_packed, once=True)


_library.impl("mlstm_fwd", _fwd_cpu, "CPU")
_library.impl("mlstm_bwd", _bwd_cpu, "CPU")
_library.impl("mlstm_fwd", _fwd_cuda, "CUDA")
_library.impl("mlstm_bwd", _bwd_cuda, "CUDA")
_library.impl("packed_mlstm", _packed_reference, "CompositeExplicitAutograd")
_library.impl("packed_mlstm_bwd", _packed_bwd_reference, "CompositeExplicitAutograd")
_library.impl("mlstm_fwd", autograd.recording("mlstm_fwd", _fwd, _MLSTM), "Autograd")
_library.impl("mlstm_bwd", autograd.recording("mlstm_bwd", _bwd, _MLSTMBackward), "Autograd")
_library.impl("packed_mlstm", autograd.recording("packed_mlstm", _packed, _Packed), "Autograd")
for _name, _fake, _count in (
    ("mlstm_fwd", _fwd_fake, flops.forward),
    ("mlstm_bwd", _bwd_fake, flops.backward),
    ("packed_mlstm", _packed_fake, flops.forward),
    ("packed_mlstm_bwd", _bwd_fake, flops.backward),
):
    _library.register_fake(_name, _fake)
    flops.register(_name, _count)
_library.register_vmap("mlstm_fwd", transforms.merge_into_batch(_fwd, cu_seqlens=8))
_library.register_vmap("mlstm_bwd", transforms.merge_into_batch(_bwd, cu_seqlens=8))
