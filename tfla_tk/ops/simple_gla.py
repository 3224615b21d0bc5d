"""The registered ops of linear attention with a scalar decay: simple GLA, RetNet, Lightning, Mamba-2's SSD.

They are the path of the tk backend, of one signature for all of its public functions. On a CPU they compute
the reference, so that torch.compile, fake tensors and opcheck can be tested on any machine. The public
functions check arguments and answer empty inputs.

States are fp32 (fp64 for fp64 q, k, v). N is B, or the number of sequences with cu_seqlens.

tfla_tk::simple_gla_fwd takes q, k [B, T, H, K], v [B, T, HV, V], g [B, T, HV] log decay or None,
    initial_state [N, HV, K, V] or None, cu_seqlens [N + 1] or None: offsets of sequences packed in a batch of
    one, rising from 0 to T. It returns o [B, T, HV, V] in v's dtype and final_state [N, HV, K, V], an empty
    tensor [0] without output_final_state, both contiguous. A decay per head is a g with strides of zero along
    B and T.
tfla_tk::simple_gla_bwd takes the same inputs, final_state where dht is given and needs_dg, and the gradients
    of both outputs, dht None for zero. It returns (dq, dk, dv, dg, dh0), each like its input: dg is an empty
    tensor [0] without needs_dg, dh0 without initial_state.
batch_invariant: the option of that name, for the CUDA kernels. torch leaves out what a default stands for, so
    implementations may get one argument less.

tfla_tk::packed_simple_gla(_bwd): the reference over packed sequences, on any device, for traced calls. The
    reference reads cu_seqlens on the host; what traces has no values to read, so it calls these ops, which
    read them when they run. Eager calls do not come here. `form` and chunk_size say which form of the
    reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tfla_tk.calls.linear import LinearCall
from tfla_tk.core import flops, library, transforms
from tfla_tk.core.layout import (
    CHUNK,
    KeptStates,
    MaybeTensor,
    as_dtype,
    dense_like,
    grads_like,
    present,
    state_dtype,
)
from tfla_tk.core.memo import are_saved_tensors_hooked, named_in_profiles, records
from tfla_tk.ops import autograd
from tfla_tk.ops.autograd import Recorded
from tfla_tk.ops.head_dims import as_asked, fits, padded, unpadded

Output: TypeAlias = tuple[Tensor, Tensor]
Grads: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
Result: TypeAlias = tuple[Tensor, MaybeTensor]

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? initial_state, Tensor? cu_seqlens, "
_GRADS = "(Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dh0)"
_TENSORS = 6  # that both ops begin with
_library = library.get()
_library.define(
    f"simple_gla_fwd({_INPUTS}float scale, bool output_final_state, "
    "bool batch_invariant=False)"
    " -> (Tensor o, Tensor final_state)"
)
_library.define(
    f"simple_gla_bwd({_INPUTS}Tensor? final_state, Tensor do, Tensor? dht, float scale, bool needs_dg, "
    f"bool batch_invariant=False) -> {_GRADS}"
)
_library.define(
    f"packed_simple_gla({_INPUTS}float scale, bool output_final_state, str form, int chunk_size)"
    " -> (Tensor o, Tensor final_state)"
)
_library.define(
    f"packed_simple_gla_bwd({_INPUTS}Tensor do, Tensor? dht, float scale, bool needs_dg, int chunk_size)"
    f" -> {_GRADS}"
)
_fwd = torch.ops.tfla_tk.simple_gla_fwd.default
_bwd = torch.ops.tfla_tk.simple_gla_bwd.default
_packed = torch.ops.tfla_tk.packed_simple_gla.default
_packed_bwd = torch.ops.tfla_tk.packed_simple_gla_bwd.default


def simple_gla(call: LinearCall, *tensors: Any) -> Result:
    """The tk backend: tfla_tk::simple_gla_fwd, float64 gates and the initial state cast to what the kernels
    read.

    Args:
        tensors: q, k, v, g, g_gamma, initial_state, cu_seqlens, cu_seqlens_cpu.

    Returns:
        (o, final state or None), the state as the call wants it.
    """
    options = call.scale, call.output_final_state, call.batch_invariant
    o, last = unpadded(call, *_fwd(*_padded(call, as_read(call, tensors)), *options))
    return o, as_asked(call, last)


def prepare_simple_gla(
    call: LinearCall, tensors: tuple[Any, ...]
) -> Callable[..., tuple[Tensor, MaybeTensor]]:
    """`simple_gla` without the op: the kernels themselves, for plain eager calls with tensors like these.

    Like these are tensors with the same metadata, strides included, that autograd records or not as these.
    """
    read = _padded(call, _as_read(call, tensors))
    recorded = records(read)
    options = call.scale, call.output_final_state, call.batch_invariant
    prepared = _kernels().prepare_simple_gla_fwd(*read, *options, recorded)
    q, k, v, g, g_gamma, initial_state, cu_seqlens, _ = tensors
    as_given = q, k, v, g_gamma if g is None else g, initial_state, cu_seqlens
    reads_all_as_given = all(x is given for x, given in zip(read, as_given, strict=True))

    def run(*tensors: Any) -> Result:
        if reads_all_as_given:
            q, k, v, g, g_gamma, initial_state, cu_seqlens, _ = tensors
            read = q, k, v, g_gamma if g is None else g, initial_state, cu_seqlens
        else:
            read = _padded(call, _as_read(call, tensors))
        if recorded:
            o, last = _direct_simple_gla(*read, (prepared, options))
        else:
            o, last, _ = prepared(*read)
        o, last = unpadded(call, o, last)
        return o, as_asked(call, last)

    return named_in_profiles("tfla_tk::simple_gla_fwd", run)


def packed_simple_gla(call: LinearCall, form: str, *tensors: Any) -> Result:
    """tfla_tk::packed_simple_gla; tensors and result as of `simple_gla`."""
    o, last = _packed(*as_read(call, tensors), call.scale, call.output_final_state, form, call.chunk_size)
    return o, as_asked(call, last)


def as_read(call: LinearCall, tensors: Sequence[Any]) -> tuple[Any, ...]:
    """The tensors of simple_gla_fwd from those of a call: one g, the initial state [N, HV, K, V] in fp32."""
    q, k, v, g, *others = _as_read(call, tensors)
    return q, k, v, _of_tokens(g, v), *others


def _of_tokens(g: MaybeTensor, v: Tensor) -> MaybeTensor:
    """g [B, T, HV] of a decay per token, or per head [HV]."""
    return g if g is None or g.dim() == 3 else g.expand(v.shape[:3])


def _as_read(call: LinearCall, tensors: Sequence[Any]) -> tuple[Any, ...]:
    """`as_read`, but that a decay per head is [HV]."""
    q, k, v, g, g_gamma, initial_state, cu_seqlens, _ = tensors
    dtype = state_dtype(q)
    if g is None:
        g = as_dtype(g_gamma, dtype)
    elif g.dtype == torch.float64:
        g = as_dtype(g, dtype)
    initial_state = as_dtype(initial_state, dtype)
    if initial_state is not None and call.state_v_first:
        initial_state = initial_state.mT
    return q, k, v, g, initial_state, cu_seqlens


def _padded(call: LinearCall, read: tuple[Any, ...]) -> tuple[Any, ...]:
    """What is read, with head dims that the kernels have."""
    if fits(call):
        return read
    q, k, v, g, initial_state, cu_seqlens = read
    q, k, v, initial_state = padded(q, k, v, initial_state)
    return q, k, v, g, initial_state, cu_seqlens


# The reference


def _fwd_cpu(*args: Any) -> Output:
    inputs, (scale, output_final_state, *_) = args[:_TENSORS], args[_TENSORS:]
    return _reference_fwd(*inputs, scale, output_final_state, "chunkwise", CHUNK)


def _reference_fwd(*args: Any) -> Output:
    """tfla_tk::packed_simple_gla."""
    q, k, v, g, initial_state, cu_seqlens, scale, output_final_state, form, chunk_size = args
    tensors = q, k, v, g, None, initial_state, cu_seqlens
    found = in_form(form, chunk_size, *tensors, scale=scale, output_final_state=output_final_state)
    out = _outputs_like(args[:_TENSORS], output_final_state)
    # own memory: an op may not return a view of its input
    for buffer, value in zip(out, found, strict=True):
        if value is not None:
            buffer.copy_(value)
    return out


def in_form(
    form: str,
    chunk_size: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: MaybeTensor,
    g_gamma: MaybeTensor,
    initial_state: MaybeTensor,
    cu_seqlens: MaybeTensor,
    **options: Any,
) -> Result:
    """A form of the reference: o in q's dtype, and the final state in at least fp32 or None.

    Args:
        form: one of layout.FORMS.
        options: scale, output_final_state, state_v_first, as `reference.simple_gla_recurrent` has them.
    """
    import tfla_tk.reference as forms

    tensors = (q, k, v, g, g_gamma)
    options |= {"initial_state": initial_state, "cu_seqlens": cu_seqlens}
    if form == "chunkwise":
        return forms.simple_gla_chunkwise(*tensors, chunk_size=chunk_size, **options)
    function = forms.simple_gla_parallel if form == "parallel" else forms.simple_gla_recurrent
    return function(*tensors, **options)


def _bwd_cpu(*args: Any) -> Grads:
    inputs, (_, do, dht, scale, needs_dg, *_) = args[:_TENSORS], args[_TENSORS:]
    return _reference_bwd(*inputs, do, dht, scale, needs_dg, CHUNK)


def _reference_bwd(*args: Any) -> Grads:
    """tfla_tk::packed_simple_gla_bwd."""
    import tfla_tk.reference as forms

    q, k, v, g, initial_state, cu_seqlens, do, dht, scale, needs_dg, chunk_size = args
    found = forms.simple_gla_backward(
        q, k, v, g, do, dht, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
    )  # fmt: skip
    out = _grads_like(args[:_TENSORS], needs_dg)
    for buffer, value in zip(out, found, strict=True):
        if buffer.shape == value.shape:
            buffer.copy_(value)
    return out


def _fwd_fake(*args: Any) -> Output:
    return _outputs_like(args[:_TENSORS], args[_TENSORS + 1])


def _outputs_like(inputs: tuple[Any, ...], output_final_state: bool) -> Output:
    """Uninitialised outputs; [0] for what was not asked for."""
    q, _, v, _, _, cu_seqlens = inputs
    count = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shape = (count, v.shape[2], q.shape[3], v.shape[3]) if output_final_state else (0,)
    return dense_like(v), q.new_empty(shape, dtype=state_dtype(q))


def _bwd_fake(*args: Any) -> Grads:
    return _grads_like(args[:_TENSORS], args[_TENSORS + 4])


def _packed_bwd_fake(*args: Any) -> Grads:
    return _grads_like(args[:_TENSORS], args[_TENSORS + 3])


def _grads_like(inputs: tuple[Any, ...], needs_dg: bool) -> Grads:
    """Uninitialised gradients, each like its input; [0] for what was not asked for."""
    q, k, v, g, initial_state, _ = inputs
    dq, dk, dv, dg, dh0 = grads_like(q, k, v, g if needs_dg else None, initial_state)
    return dq, dk, dv, present(dg, q), present(dh0, q)


# CUDA: the kernels, which have None in place of empty tensors


def _kernels() -> Any:
    from tfla_tk.backends.tk.scalar_gate import scalar_decay

    return scalar_decay


def _fwd_cuda(*args: Any) -> Output:
    o, last, _ = _kernels().simple_gla_fwd(*args)
    return o, present(last, args[0])


def _bwd_cuda(*args: Any) -> Grads:
    dq, dk, dv, dg, dh0 = _kernels().simple_gla_bwd(*args)
    return dq, dk, dv, present(dg, dq), present(dh0, dq)


# Autograd


def _record(*args: Any) -> Recorded:
    """simple_gla_fwd with what its backward op takes."""
    tensors, (scale, output_final_state, *of_kernels) = args[:_TENSORS], args[_TENSORS:]
    with transforms.below_function():
        o, last = _fwd(*args)
        saved, needs_dg = _saved(tensors, last if output_final_state else None)
    return Recorded((o, last), () if output_final_state else (last,), saved, (scale, needs_dg, *of_kernels))


def _differentiate(
    saved: Sequence[Any], options: tuple[Any, ...], grads: tuple[MaybeTensor, ...]
) -> Sequence[MaybeTensor]:
    found: Grads = _bwd(*_backward_tensors(saved, grads), *options)
    return found


def _record_directly(*args: Any) -> tuple[Recorded, KeptStates | None]:
    """`_record` of a plain eager call: the kernels themselves.

    Args:
        args: the tensors of simple_gla_fwd, a decay per head as [HV], and in one tuple the prepared forward
            and the other arguments.
    """
    *tensors, (forward, options) = args
    if are_saved_tensors_hooked():
        # checkpointing wants the call and its recomputation to save alike, and the op, which one of them may
        # take, saves no states
        tensors[3] = _of_tokens(tensors[3], tensors[2])
        o, last, kept = _kernels().simple_gla_fwd(*tensors, *options)
    else:
        o, last, kept = forward(*tensors)
    scale, _, *of_kernels = options
    saved, needs_dg = _saved(tensors, last)
    return Recorded((o, last), (), saved, (scale, needs_dg, *of_kernels)), kept


def _differentiate_by_op(*args: Any) -> Sequence[MaybeTensor]:
    """simple_gla_bwd of what a plain forward has saved."""
    q, k, v, g, *others = args
    found: Grads = _bwd(q, k, v, _of_tokens(g, v), *others)
    return found


def _record_packed(*args: Any) -> Recorded:
    """packed_simple_gla with what its backward op takes."""
    *tensors, scale, output_final_state, _, chunk_size = args
    with transforms.below_function():
        o, last = _packed(*args)
        saved, needs_dg = _saved(tensors, None)
    return Recorded((o, last), () if output_final_state else (last,), saved, (scale, needs_dg, chunk_size))


def _differentiate_packed(
    saved: Sequence[Any], options: tuple[Any, ...], grads: tuple[MaybeTensor, ...]
) -> Sequence[MaybeTensor]:
    *inputs, _, do, dht = _backward_tensors(saved, grads)
    found: Grads = _packed_bwd(*inputs, do, dht, *options)
    return found


def _saved(tensors: Sequence[Any], last: MaybeTensor) -> tuple[tuple[MaybeTensor, ...], bool]:
    """What the backward takes instead of a second forward, and whether g has a gradient.

    The inputs, and the final state where it is an output and g has a gradient. All by reference, but the
    initial state: a cache that is updated in place must not change the gradient.

    Args:
        tensors: the inputs of simple_gla_fwd. last: the final state where it is an output.
    """
    q, k, v, g, initial_state, cu_seqlens = tensors
    needs_dg = g is not None and g.requires_grad
    initial_state = None if initial_state is None else initial_state.clone()
    return (q, k, v, g, initial_state, cu_seqlens, last if needs_dg else None), needs_dg


def _backward_tensors(saved: Sequence[Any], grads: tuple[MaybeTensor, ...]) -> tuple[Any, ...]:
    """The tensors that simple_gla_bwd takes."""
    do, dht = grads
    return *saved, torch.zeros_like(saved[2]) if do is None else do, dht


_REFUSAL = (
    "double backward of simple GLA is not implemented; backend='reference' is plain autograd and has it"
)
_SimpleGLA = autograd.function("SimpleGLA", _record, _differentiate)
_direct_simple_gla = autograd.direct_function(
    "DirectSimpleGLA",
    _record_directly,
    _backward_tensors,
    lambda *args: _kernels().simple_gla_bwd(*args),
    _differentiate_by_op,
    "tfla_tk::simple_gla_bwd",
)
_PackedSimpleGLA = autograd.function("PackedSimpleGLA", _record_packed, _differentiate_packed)
_SimpleGLABackward = autograd.refusing("SimpleGLABackward", _bwd, _REFUSAL)
_PackedBackward = autograd.refusing("PackedSimpleGLABackward", _packed_bwd, _REFUSAL)


_library.impl("simple_gla_fwd", _fwd_cpu, "CPU")
_library.impl("simple_gla_bwd", _bwd_cpu, "CPU")
_library.impl("simple_gla_fwd", _fwd_cuda, "CUDA")
_library.impl("simple_gla_bwd", _bwd_cuda, "CUDA")
_library.impl("packed_simple_gla", _reference_fwd, "CompositeExplicitAutograd")
_library.impl("packed_simple_gla_bwd", _reference_bwd, "CompositeExplicitAutograd")
for _name, _op, _function in (
    ("simple_gla_fwd", _fwd, _SimpleGLA),
    ("simple_gla_bwd", _bwd, _SimpleGLABackward),
    ("packed_simple_gla", _packed, _PackedSimpleGLA),
    ("packed_simple_gla_bwd", _packed_bwd, _PackedBackward),
):
    _library.impl(_name, autograd.recording(_name, _op, _function), "Autograd")
_library.register_fake("simple_gla_fwd", _fwd_fake)
_library.register_fake("simple_gla_bwd", _bwd_fake)
_library.register_fake("packed_simple_gla", _fwd_fake)
_library.register_fake("packed_simple_gla_bwd", _packed_bwd_fake)
# where the heads are, which packed sequences of a batch are merged into: q, k, v, g, initial_state, ...
_library.register_vmap(
    "simple_gla_fwd",
    transforms.merge_into_batch(_fwd, cu_seqlens=5, heads=(2, 2, 2, 2, 1), result_heads=(2, 1)),
)
_library.register_vmap(
    "simple_gla_bwd",
    transforms.merge_into_batch(
        _bwd, cu_seqlens=5, heads=(2, 2, 2, 2, 1, 0, 1, 2, 1), result_heads=(2, 2, 2, 2, 1)
    ),
)
for _name in ("simple_gla_fwd", "packed_simple_gla"):
    flops.register(_name, flops.forward)
for _name in ("simple_gla_bwd", "packed_simple_gla_bwd"):
    flops.register(_name, flops.backward)
