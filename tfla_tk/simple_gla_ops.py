"""The registered ops of linear attention with a scalar decay: simple GLA, RetNet, Lightning, Mamba-2's SSD.

They are the path of the tk backend, of one signature for all of its public functions. On a CPU they compute
the reference, so that torch.compile, fake tensors and opcheck can be tested on any machine. The public
functions check arguments and answer empty inputs.

States are fp32 (fp64 for fp64 q, k, v). N is B, or the number of sequences with cu_seqlens.

tfla_tk::simple_gla_fwd takes q, k [B, T, H, K], v [B, T, HV, V], g [B, T, HV] log decay or None,
    initial_state [N, HV, K, V] or None, cu_seqlens [N + 1] or None: offsets of sequences packed in a batch of
    one, rising from 0 to T; and returns (o, final_state): o like v; final_state [N, HV, K, V], an empty
    tensor [0] without output_final_state. A decay per head is a g with strides of zero along B and T.
tfla_tk::simple_gla_bwd takes the same inputs, final_state where dht is given and needs_dg, and the gradients
    of both outputs, dht None for zero. It returns (dq, dk, dv, dg, dh0), each like its input: dg is an empty
    tensor [0] without needs_dg, dh0 without initial_state.
schedule: how the CUDA kernel overlaps its steps, one of SCHEDULES; the result does not depend on it beyond
    rounding.

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
from tfla_tk.core.layout import KeptStates, MaybeTensor, as_dtype, state_dtype
from tfla_tk.core.memo import are_saved_tensors_hooked, dispatch_like, is_direct, is_eager, records

Output: TypeAlias = tuple[Tensor, Tensor]
Grads: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
Result: TypeAlias = tuple[Tensor, MaybeTensor]

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? initial_state, Tensor? cu_seqlens, "
_GRADS = "(Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dh0)"
_TENSORS = 6  # that both ops begin with
_library = library.get()
_library.define(
    f"simple_gla_fwd({_INPUTS}float scale, bool output_final_state, str schedule)"
    " -> (Tensor o, Tensor final_state)"
)
_library.define(
    f"simple_gla_bwd({_INPUTS}Tensor? final_state, Tensor do, Tensor? dht, float scale, bool needs_dg, "
    f"str schedule) -> {_GRADS}"
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


def simple_gla(call: LinearCall, schedule: str, *tensors: Any) -> Result:
    """The tk backend: tfla_tk::simple_gla_fwd, float64 gates and the initial state cast to what the kernels
    read.

    Args:
        tensors: q, k, v, g, g_gamma, initial_state, cu_seqlens, cu_seqlens_cpu.

    Returns:
        (o, final state or None), the state as the call wants it.
    """
    o, last = _fwd(*as_read(call, tensors), call.scale, call.output_final_state, schedule)
    return o, _as_asked(call, last)


def prepare_simple_gla(
    call: LinearCall, schedule: str, tensors: tuple[Any, ...]
) -> Callable[..., tuple[Tensor, MaybeTensor]]:
    """`simple_gla` without the op: the kernels themselves, for plain eager calls with tensors like these.

    Like these are tensors with the same metadata, strides included, that autograd records or not as these.
    """
    options = call.scale, call.output_final_state, schedule
    if records(as_read(call, tensors)):

        def recorded(*tensors: Any) -> Result:
            o, last = _DirectSimpleGLA.apply(*as_read(call, tensors), options)
            return o, _as_asked(call, last)

        return recorded

    kernels = _kernels()

    def plain(*tensors: Any) -> Result:
        o, last, _ = kernels.simple_gla_fwd(*as_read(call, tensors), *options)
        return o, _as_asked(call, last)

    return plain


def packed_simple_gla(call: LinearCall, form: str, *tensors: Any) -> Result:
    """tfla_tk::packed_simple_gla; tensors and result as of `simple_gla`."""
    o, last = _packed(*as_read(call, tensors), call.scale, call.output_final_state, form, call.chunk_size)
    return o, _as_asked(call, last)


def as_read(call: LinearCall, tensors: Sequence[Any]) -> tuple[Any, ...]:
    """The tensors of simple_gla_fwd from those of a call: one g, the initial state [N, HV, K, V] in fp32."""
    q, k, v, g, g_gamma, initial_state, cu_seqlens, _ = tensors
    dtype = state_dtype(q)
    if g is not None and g.dtype == torch.float64:
        g = as_dtype(g, dtype)
    elif g_gamma is not None:
        g = g_gamma.to(dtype).expand(v.shape[:3])
    initial_state = as_dtype(initial_state, dtype)
    if initial_state is not None and call.state_v_first:
        initial_state = initial_state.mT
    return q, k, v, g, initial_state, cu_seqlens


def _as_asked(call: LinearCall, last: MaybeTensor) -> MaybeTensor:
    """The final state as the call wants it."""
    if not call.output_final_state or last is None:
        return None
    return last.mT if call.state_v_first else last


# The reference


def _fwd_cpu(*args: Any) -> Output:
    inputs, (scale, output_final_state, _) = args[:_TENSORS], args[_TENSORS:]
    return _reference_fwd(*inputs, scale, output_final_state, "chunkwise", 64)


def _reference_fwd(*args: Any) -> Output:
    """tfla_tk::packed_simple_gla."""
    import tfla_tk.reference as forms

    q, k, v, g, initial_state, cu_seqlens, scale, output_final_state, form, chunk_size = args
    size = {"chunk_size": chunk_size} if form == "chunkwise" else {}
    found = getattr(forms, f"simple_gla_{form}")(
        q, k, v, g, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        cu_seqlens=cu_seqlens, **size,
    )  # fmt: skip
    out = _outputs_like(args[:_TENSORS], output_final_state)
    # own memory: an op may not return a view of its input
    for buffer, value in zip(out, found, strict=True):
        if value is not None:
            buffer.copy_(value)
    return out


def _bwd_cpu(*args: Any) -> Grads:
    inputs, (_, do, dht, scale, needs_dg, _) = args[:_TENSORS], args[_TENSORS:]
    return _reference_bwd(*inputs, do, dht, scale, needs_dg, 64)


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
    return torch.empty_like(v), q.new_empty(shape, dtype=state_dtype(q))


def _bwd_fake(*args: Any) -> Grads:
    return _grads_like(args[:_TENSORS], args[-2])


def _grads_like(inputs: tuple[Any, ...], needs_dg: bool) -> Grads:
    """Uninitialised gradients, each like its input; [0] for what was not asked for."""
    q, k, v, g, initial_state, _ = inputs
    dg = torch.empty_like(g) if needs_dg and g is not None else None
    dh0 = None if initial_state is None else torch.empty_like(initial_state)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), _present(dg, q), _present(dh0, q)


def _present(x: MaybeTensor, q: Tensor) -> Tensor:
    """x, or the empty tensor that stands for none."""
    return q.new_empty(0, dtype=state_dtype(q)) if x is None else x


# CUDA: the kernels, which have None in place of empty tensors


def _kernels() -> Any:
    """The module with

    simple_gla_fwd(*tensors, scale, output_final_state, schedule, keep_states=False)
        -> (o, final_state or None, KeptStates or None)
    simple_gla_bwd(*tensors, final_state, do, dht, scale, needs_dg, schedule, kept=None)
        -> (dq, dk, dv, dg or None, dh0 or None)

    of the tensors of the ops, any strides, with kept what the forward of the call has left.
    """
    from tfla_tk.backends import tk_scalar_decay

    return tk_scalar_decay


def _fwd_cuda(*args: Any) -> Output:
    o, last, _ = _kernels().simple_gla_fwd(*args)
    return o, _present(last, args[0])


def _bwd_cuda(*args: Any) -> Grads:
    dq, dk, dv, dg, dh0 = _kernels().simple_gla_bwd(*args)
    return dq, dk, dv, _present(dg, dq), _present(dh0, dq)


# Autograd


class _SimpleGLA(torch.autograd.Function):
    """Records the backward op."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Output:
        *tensors, scale, output_final_state, schedule = args
        with transforms.below_function():
            out: Output = _fwd(*args)
            _save(ctx, tensors, out[1] if output_final_state else None, (scale, schedule))
        if not output_final_state:
            ctx.mark_non_differentiable(out[1])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: MaybeTensor) -> tuple[MaybeTensor, ...]:
        return _needed(ctx, _bwd(*_backward_arguments(ctx, ctx.saved_tensors, *grads)))


class _DirectSimpleGLA(torch.autograd.Function):
    """`_SimpleGLA` of a plain eager call: the kernels themselves, forward and, where it is plain too,
    backward.

    Its arguments are the tensors of simple_gla_fwd and the other ones in one tuple; its outputs are o and the
    final state, None where it is not asked for.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, MaybeTensor]:
        *tensors, (scale, output_final_state, schedule) = args
        # not under hooks: checkpointing wants the call and its recomputation to save alike, and the op, which
        # one of them may take, saves no states
        keep_states = not are_saved_tensors_hooked()
        o, last, kept = _kernels().simple_gla_fwd(*tensors, scale, output_final_state, schedule, keep_states)
        workspace, ctx.cut = (None, None) if kept is None else kept
        _save(ctx, tensors, last, (scale, schedule), workspace)
        return o, last

    @staticmethod
    def backward(ctx: Any, do: MaybeTensor, dht: MaybeTensor) -> tuple[MaybeTensor, ...]:
        *saved, workspace = ctx.saved_tensors
        arguments = _backward_arguments(ctx, saved, do, dht)
        tensors = tuple(x for x in arguments if x is None or isinstance(x, Tensor))
        if is_eager((*tensors, workspace)) and is_direct(tensors) and dispatch_like(saved[0], (do, dht)):
            kept = None if workspace is None else KeptStates(workspace, ctx.cut)
            return _needed(ctx, _kernels().simple_gla_bwd(*arguments, kept))
        return _needed(ctx, _bwd(*arguments))


class _PackedSimpleGLA(torch.autograd.Function):
    """Records the backward op of the reference over packed sequences."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Output:
        *tensors, scale, output_final_state, _, chunk_size = args
        with transforms.below_function():
            out: Output = _packed(*args)
            _save(ctx, tensors, None, (scale, chunk_size))
        if not output_final_state:
            ctx.mark_non_differentiable(out[1])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: MaybeTensor) -> tuple[MaybeTensor, ...]:
        *inputs, _, do, dht, scale, needs_dg, size = _backward_arguments(ctx, ctx.saved_tensors, *grads)
        return _needed(ctx, _packed_bwd(*inputs, do, dht, scale, needs_dg, size))


def _save(
    ctx: Any, tensors: Sequence[MaybeTensor], last: MaybeTensor, options: tuple[Any, Any], *more: MaybeTensor
) -> None:
    """Keep what the backward takes instead of a second forward.

    Saved are the inputs and the final state where it is an output and g has a gradient. All by reference, but
    the
    initial state: a cache that is updated in place must not change the gradient.

    Args:
        tensors: the inputs of simple_gla_fwd. options: the scale and what else the backward takes last.
        more: what else to save.
    """
    q, k, v, g, initial_state, cu_seqlens = tensors
    initial_state = None if initial_state is None else initial_state.clone()
    ctx.needs_dg = g is not None and ctx.needs_input_grad[3]
    ctx.save_for_backward(q, k, v, g, initial_state, cu_seqlens, last if ctx.needs_dg else None, *more)
    ctx.options = options
    ctx.set_materialize_grads(False)


def _backward_arguments(ctx: Any, saved: Sequence[Any], do: MaybeTensor, dht: MaybeTensor) -> tuple[Any, ...]:
    """What simple_gla_bwd takes."""
    scale, last_option = ctx.options
    do = torch.zeros_like(saved[2]) if do is None else do
    return *saved, do, dht, scale, ctx.needs_dg, last_option


def _needed(ctx: Any, grads: Sequence[MaybeTensor]) -> tuple[MaybeTensor, ...]:
    """For every argument of the forward its gradient, or None where nobody asks for it."""
    needed = ctx.needs_input_grad
    found = [grad if asked else None for grad, asked in zip(grads, needed, strict=False)]
    return *found, *(None,) * (len(needed) - len(found))


class _Backward(torch.autograd.Function):
    """Stands where a second derivative would be."""

    @staticmethod
    def forward(ctx: Any, op: Any, *args: Any) -> Grads:
        with transforms.below_function():
            out: Grads = op(*args)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: MaybeTensor) -> tuple[MaybeTensor, ...]:
        raise RuntimeError(
            "double backward of simple GLA is not implemented; "
            "backend='reference' is plain autograd and has it"
        )


def _autograd(name: str, op: Any, function: type[torch.autograd.Function], *first: Any) -> Callable[..., Any]:
    """The autograd kernel of an op, which `function` records, with `first` before the op's arguments."""

    def kernel(*args: Any) -> Any:
        transforms.refuse_tangents(name, args)
        if records(args):
            return transforms.apply(function, *first, *args)
        with transforms.below_autograd():
            return op(*args)

    return kernel


_library.impl("simple_gla_fwd", _fwd_cpu, "CPU")
_library.impl("simple_gla_bwd", _bwd_cpu, "CPU")
_library.impl("simple_gla_fwd", _fwd_cuda, "CUDA")
_library.impl("simple_gla_bwd", _bwd_cuda, "CUDA")
_library.impl("packed_simple_gla", _reference_fwd, "CompositeExplicitAutograd")
_library.impl("packed_simple_gla_bwd", _reference_bwd, "CompositeExplicitAutograd")
_library.impl("simple_gla_fwd", _autograd("simple_gla_fwd", _fwd, _SimpleGLA), "Autograd")
_library.impl("simple_gla_bwd", _autograd("simple_gla_bwd", _bwd, _Backward, _bwd), "Autograd")
_library.impl("packed_simple_gla", _autograd("packed_simple_gla", _packed, _PackedSimpleGLA), "Autograd")
_library.impl(
    "packed_simple_gla_bwd",
    _autograd("packed_simple_gla_bwd", _packed_bwd, _Backward, _packed_bwd),
    "Autograd",
)
_library.register_fake("simple_gla_fwd", _fwd_fake)
_library.register_fake("simple_gla_bwd", _bwd_fake)
_library.register_fake("packed_simple_gla", _fwd_fake)
_library.register_fake("packed_simple_gla_bwd", _bwd_fake)
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
