"""The registered ops of a family of operators in [B, T, H, D], made from a description of the family; and
those of simple GLA (RetNet, Lightning Attention, Mamba-2's SSD) and of gated linear attention.

They are the path of the tk backend. On a CPU they compute the reference, so that torch.compile, fake tensors
and opcheck can be tested on any machine. The public functions check arguments and answer empty inputs.

States are fp32 (fp64 for fp64 q, k, v). N is B, or the number of sequences with cu_seqlens.

tfla_tk::<name>_fwd takes the inputs and options of the family and output_final_state; it returns o
    [B, T, HV, V] in v's dtype and final_state [N, HV, K, V], an empty tensor [0] without output_final_state,
    both contiguous.
tfla_tk::<name>_bwd takes the inputs, the gradients of both outputs (dht None for zero), the options, and
    needs_gates. It returns the gradient of every input but cu_seqlens, each like its input; an empty tensor
    [0] for inputs that there are not, and for gates without needs_gates.

tfla_tk::packed_<name>(_bwd): the reference over packed sequences, on any device, for traced calls. The
    reference reads cu_seqlens on the host; what traces has no values to read, so it calls these ops, which
    read them when they run. Eager calls do not come here. `form` and chunk_size say which form of the
    reference.

The kernels of a family are a module with

    forward(core, *, output_final_state, keep) -> (o, final_state or None, Kept or None)
    prepare(core, *, output_final_state, keep) -> a function of the inputs, which returns what forward does
    backward(core, kept, do, dht, *, needs_gates) -> gradients

core is the family's NamedTuple: the inputs and the options. What `prepare` returns is for all
inputs that have the metadata of core's, strides included; the options are core's. With `keep` the forward may
return what its backward can use (`layout.Kept`). Without it kept is None, and the backward computes it again:
so it is in the registered ops, but for a family that keeps (`ops.delta_rule.KeepingOps`).
do is like o, dht [N, HV, K, V] or None for zeros, both with any strides. The gradients are those of the
inputs but cu_seqlens in their order, each like its input; None for what was not asked for. The backward of a
family that saves the final state gets it by keyword, final_state.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tfla_tk.calls.linear import GLACore, LinearCall, SimpleGLACore
from tfla_tk.core import eager, flops, library, transforms
from tfla_tk.core.checks import fail
from tfla_tk.core.layout import (
    CHUNK,
    Kept,
    MaybeTensor,
    as_dtype,
    dense_like,
    grads_like,
    present,
    state_dtype,
)
from tfla_tk.ops import autograd
from tfla_tk.ops.autograd import Recorded

Result: TypeAlias = tuple[Tensor, MaybeTensor]


@dataclass(frozen=True)
class Family:
    """A family of operators, as its ops need to know it."""

    name: str  # of the ops
    title: str  # in messages
    # the names of the tensors, "?" behind those that may be None; q, k, v first, initial_state and cu_seqlens
    # last
    inputs: tuple[str, ...]
    heads: tuple[int, ...]  # the dimension of the heads in each input
    options: tuple[str, ...]  # of the ops' schema, without output_final_state
    gates: tuple[str, ...]  # the inputs whose gradients are computed only where one of them is asked for
    core: Callable[..., Any]  # what the kernels and the reference take: a NamedTuple of inputs and options
    # the core of a call and its tensors as they are, but for the layout of the initial state
    read: Callable[[Any, Sequence[Any]], Any]
    # (core, form, chunk_size, output_final_state) to o in q's dtype and the final state or None
    reference: Callable[..., Result]
    # the explicit backward: (core, do, dht, chunk_size) to the gradients, None where no input
    gradients: Callable[..., Sequence[MaybeTensor]]
    kernels: Callable[[], Any]  # finds the module of the kernels
    # of forward and backward per token and head of v, from K and V
    flops: tuple[Callable[[int, int], int], Callable[[int, int], int]]
    # <name>_bwd takes the final state behind the inputs: that of a forward which returns it, where gates have
    # a gradient
    saves_final_state: bool = False
    # of the inputs among the tensors of a call; None: they are the first ones, in their order
    places: Callable[[Sequence[Any]], Sequence[int]] | None = None
    # the inputs as the ops take them, from those that the kernels take; None: the same
    op_inputs: Callable[[Sequence[Any]], tuple[Any, ...]] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name.removesuffix("?") for name in self.inputs)


def in_form(
    name: str, operands: Sequence[Any], core: Any, form: str, chunk_size: int, output_final_state: bool
) -> Result:
    """o and the final state or None by a form of the reference, `<name>_<form>`, of positional operands;
    core has the other arguments."""
    import tfla_tk.reference as forms

    options = {"chunk_size": chunk_size} if form == "chunkwise" else {}
    return getattr(forms, f"{name}_{form}")(
        *operands,
        scale=core.scale,
        initial_state=core.initial_state,
        output_final_state=output_final_state,
        cu_seqlens=core.cu_seqlens,
        **options,
    )


def explicit_gradients(
    name: str, operands: Sequence[Any], core: Any, do: Tensor, dht: MaybeTensor, chunk_size: int
) -> tuple[Tensor, ...]:
    """Of the operands and the initial state, by the reference's `<name>_backward`."""
    import tfla_tk.reference as forms

    return getattr(forms, f"{name}_backward")(
        *operands,
        do,
        dht,
        scale=core.scale,
        initial_state=core.initial_state,
        cu_seqlens=core.cu_seqlens,
        chunk_size=chunk_size,
    )


class LinearOps:
    """The registered ops of a family. fwd, bwd, packed, packed_bwd: the ops, called with arguments in the
    order above. keeping: `KeepingOps` of a family that keeps; None for others. direct: applies the autograd
    function of plain eager calls, which calls the kernels themselves; its arguments are the inputs, and in
    one tuple the prepared forward, its module, the options, output_final_state, and whether gates have a
    gradient."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.count = len(family.inputs)
        self._saved_count = self.count + family.saves_final_state
        self._place = {name: place for place, name in enumerate(family.names)}
        self._gates = [self._place[name] for name in family.gates]
        name = family.name
        self._define()
        self.fwd, self.bwd, self.packed, self.packed_bwd = (
            getattr(torch.ops.tfla_tk, op).default
            for op in (f"{name}_fwd", f"{name}_bwd", f"packed_{name}", f"packed_{name}_bwd")
        )
        self._fwd_name, self._bwd_name = f"tfla_tk::{name}_fwd", f"tfla_tk::{name}_bwd"
        self.direct = autograd.direct_apply(
            autograd.function(f"Direct_{name}", self._record_directly, self._differentiate_directly)
        )
        self._implement()
        self._register()
        self.keeping: Any = None

    def core_of(self, call: LinearCall, tensors: Sequence[Any]) -> Any:
        """The core of a call's tensors in the dtypes that they have."""
        core = self.family.read(call, tensors)
        if core.initial_state is None or not call.state_v_first:
            return core
        return core._replace(initial_state=core.initial_state.mT)

    def read(self, call: LinearCall, tensors: Sequence[Any]) -> Any:
        """The core as the ops take it: no fp64 beside operands of less, the initial state as states are."""
        core = self.core_of(call, tensors)
        dtype = state_dtype(core.q)
        gates = {name: getattr(core, name) for name in self.family.names[3:-2]}
        narrowed = {
            name: x.to(dtype)
            for name, x in gates.items()
            if x is not None and x.dtype.itemsize > dtype.itemsize
        }
        return core._replace(**narrowed, initial_state=as_dtype(core.initial_state, dtype))

    def as_op_takes(self, core: Any) -> Any:
        """The core for the ops, from that for the kernels."""
        if self.family.op_inputs is None:
            return core
        return core._make((*self.family.op_inputs(core[: self.count]), *core[self.count :]))

    # Registration

    def _define(self) -> None:
        name, define = self.family.name, library.get().define
        inputs, options, grads = self.arguments()
        outputs, given = "(Tensor o, Tensor final_state)", "Tensor do, Tensor? dht"
        final_state = "Tensor? final_state, " if self.family.saves_final_state else ""
        packed = "int chunk_size, bool"
        define(f"{name}_fwd({inputs}, {options}, bool output_final_state) -> {outputs}")
        define(f"{name}_bwd({inputs}, {final_state}{given}, {options}, bool needs_gates) -> ({grads})")
        define(f"packed_{name}({inputs}, {options}, str form, {packed} output_final_state) -> {outputs}")
        define(f"packed_{name}_bwd({inputs}, {given}, {options}, {packed} needs_gates) -> ({grads})")

    def arguments(self) -> tuple[str, str, str]:
        """The inputs, options and gradients of a schema."""
        family = self.family
        inputs = (f"Tensor? {x[:-1]}" if x.endswith("?") else f"Tensor {x}" for x in family.inputs)
        grads = (f"Tensor d{name}" for name in family.names[:-1])
        return ", ".join(inputs), ", ".join(family.options), ", ".join(grads)

    @property
    def refusal(self) -> str:
        """What a second derivative is answered with."""
        return (
            f"double backward of {self.family.title} is not implemented; "
            "backend='reference' is plain autograd and has it"
        )

    def _implement(self) -> None:
        name, impl = self.family.name, library.get().impl
        for of, function, key in (
            (f"{name}_fwd", self._fwd_cpu, "CPU"),
            (f"{name}_bwd", self._bwd_cpu, "CPU"),
            (f"{name}_fwd", self._fwd_cuda, "CUDA"),
            (f"{name}_bwd", self._bwd_cuda, "CUDA"),
            (f"packed_{name}", self._packed, "CompositeExplicitAutograd"),
            (f"packed_{name}_bwd", self._packed_bwd, "CompositeExplicitAutograd"),
        ):
            impl(of, function, key)
        for title, forward, record, differentiate, backward in (
            (name, self.fwd, self._record, self._differentiate, self.bwd),
            (f"packed_{name}", self.packed, self._record_packed, self._differentiate_packed, self.packed_bwd),
        ):
            recorder = autograd.function(title, record, differentiate)
            refusing = autograd.refusing(f"{title}_backward", backward, self.refusal)
            for op, applied in ((forward, recorder), (backward, refusing)):
                op_name = op._schema.name.partition("::")[2]
                impl(op_name, autograd.recording(op_name, op, applied), "Autograd")

    def _register(self) -> None:
        name, heads, our_library = self.family.name, self.family.heads, library.get()
        for of in (f"{name}_fwd", f"packed_{name}"):
            our_library.register_fake(of, self.fwd_fake)
            flops.register(of, self.family.flops[0])
        for of in (f"{name}_bwd", f"packed_{name}_bwd"):
            our_library.register_fake(of, self.bwd_fake)
            flops.register(of, self.family.flops[1])
        common: dict[str, Any] = {
            "cu_seqlens": self.count - 1,
            # tensors [HV], and cu_seqlens, which is not one of them
            "per_head": [place for place, dim in enumerate(heads[:-1]) if dim == 0],
        }
        fwd_vmap = transforms.merge_into_batch(self.fwd, heads=heads, result_heads=(2, 1), **common)
        # of the final state, do and dht
        others = (1, 2, 1) if self.family.saves_final_state else (2, 1)
        self.bwd_vmap = transforms.merge_into_batch(
            self.bwd, heads=(*heads, *others), result_heads=heads[:-1], **common
        )
        our_library.register_vmap(f"{name}_fwd", fwd_vmap)
        our_library.register_vmap(f"{name}_bwd", self.bwd_vmap)

    # What the ops compute

    def _fwd_cpu(self, *args: Any) -> tuple[Tensor, Tensor]:
        return self._packed(*args[:-1], "chunkwise", CHUNK, args[-1])

    def _packed(self, *args: Any) -> tuple[Tensor, Tensor]:
        *core, form, chunk_size, output_final_state = args
        out = self._outputs_like(core, output_final_state)
        found = self.family.reference(self.family.core(*core), form, chunk_size, output_final_state)
        # own memory: an op may not return a view of its input
        for buffer, value in zip(out, found, strict=True):
            if value is not None:
                buffer.copy_(value)
        return out

    def _bwd_cpu(self, *args: Any) -> tuple[Tensor, ...]:
        inputs, do, dht, (*options, needs_gates) = self._split_backward(args, self._saved_count)
        return self._packed_bwd(*inputs, do, dht, *options, CHUNK, needs_gates)

    def _packed_bwd(self, *args: Any) -> tuple[Tensor, ...]:
        inputs, do, dht, (*options, chunk_size, needs_gates) = self._split_backward(args, self.count)
        found = self.family.gradients(self.family.core(*inputs, *options), do, dht, chunk_size)
        out = self._grads_like(inputs, needs_gates)
        for buffer, value in zip(out, found, strict=True):
            if value is not None and buffer.shape == value.shape:
                buffer.copy_(value)
        return out

    def _fwd_cuda(self, *args: Any) -> tuple[Tensor, Tensor]:
        core, (output_final_state,) = self.split(args)
        o, last, _ = self.family.kernels().forward(core, output_final_state=output_final_state, keep=False)
        return o, present(last, o)

    def _bwd_cuda(self, *args: Any) -> tuple[Tensor, ...]:
        return self.differentiate(None, args)

    def differentiate(self, kept: Kept | None, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """What <name>_bwd returns on a GPU, from its arguments and what the forward has kept."""
        inputs, do, dht, (*options, needs_gates) = self._split_backward(args, self._saved_count)
        core, more = self.family.core(*inputs, *options), self._final_state(args)
        found = self.family.kernels().backward(core, kept, do, dht, needs_gates=needs_gates, **more)
        return tuple(map(present, found, itertools.repeat(do)))

    def fwd_fake(self, *args: Any) -> tuple[Tensor, Tensor]:
        return self._outputs_like(args, args[-1])

    def bwd_fake(self, *args: Any) -> tuple[Tensor, ...]:
        return self._grads_like(args[: self.count], args[-1])

    def _outputs_like(self, args: Sequence[Any], output_final_state: bool) -> tuple[Tensor, Tensor]:
        """Uninitialised outputs; [0] for what was not asked for."""
        self._check_state(args)
        q, v, cu_seqlens = args[0], args[2], args[self.count - 1]
        count = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        shape = (count, v.shape[2], q.shape[3], v.shape[3]) if output_final_state else (0,)
        return dense_like(v), q.new_empty(shape, dtype=state_dtype(q))

    def _grads_like(self, inputs: tuple[Any, ...], needs_gates: bool) -> tuple[Tensor, ...]:
        """Uninitialised gradients, each like its input; [0] for what was not asked for."""
        left_out = () if needs_gates else self._gates
        wanted = [None if place in left_out else x for place, x in enumerate(inputs[:-1])]
        return tuple(present(x, inputs[0]) for x in grads_like(*wanted))

    def split(self, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """The core of an op's arguments, and what follows it."""
        self._check_state(args)
        count = self.count + len(self.family.options)
        return self.family.core(*args[:count]), args[count:]

    def _check_state(self, args: Sequence[Any]) -> None:
        """Kernels read an initial state by its dtype, which public functions convert."""
        state, dtype = args[self.count - 2], state_dtype(args[0])
        if state is not None and state.dtype != dtype:
            fail(f"{self._fwd_name}: initial_state", f"dtype {dtype}", state.dtype, TypeError)

    def _split_backward(
        self, args: tuple[Any, ...], place: int
    ) -> tuple[tuple[Any, ...], Tensor, MaybeTensor, Any]:
        """The inputs of a backward op's arguments, do, which is at a place, dht, and what follows these."""
        return args[: self.count], args[place], args[place + 1], args[place + 2 :]

    def _final_state(self, saved: Sequence[Any]) -> dict[str, MaybeTensor]:
        """The keyword of the kernels' backward, from what is saved."""
        return {"final_state": saved[self.count]} if self.family.saves_final_state else {}

    # Autograd

    def _record(self, *args: Any) -> Recorded:
        """<name>_fwd with what its backward op takes."""
        inputs, (*options, output_final_state) = args[: self.count], args[self.count :]
        layout, kept = None if self.keeping is None else self.keeping.layout(args), None
        with transforms.below_function():
            if self.keeping is not None and layout is not None:
                o, last, kept = self.keeping.fwd(*args, layout)
            else:
                o, last = self.fwd(*args)
            needs = self.needs_gates(inputs)
            saved = _inputs_to_save(inputs)
            if self.family.saves_final_state:
                saved = *saved, last if output_final_state and needs else None
        return Recorded(
            (o, last), () if output_final_state else (last,), (*saved, kept), (layout, *options, needs)
        )

    def _differentiate(
        self, saved: Sequence[Any], options: tuple[Any, ...], grads: tuple[MaybeTensor, ...]
    ) -> Sequence[MaybeTensor]:
        *inputs, left = saved
        layout, *others = options
        kept = None if left is None else Kept((left,), layout)
        return self._differentiate_by_op(_with_grads(inputs, *grads), kept, others)

    def _differentiate_by_op(
        self, tensors: tuple[Any, ...], kept: Kept | None, options: Sequence[Any]
    ) -> Sequence[MaybeTensor]:
        """Args: tensors: what is saved, do and dht. kept: by the forward."""
        if self.keeping is None or kept is None:
            return self.bwd(*tensors, *options)
        return self.keeping.bwd(*tensors, kept.tensors[0], kept.layout, *options)

    def _record_directly(self, *args: Any) -> Recorded:
        """`_record` of a plain eager call: the kernels themselves."""
        *inputs, (forward, kernels, options, output_final_state, needs) = args
        if eager.are_saved_tensors_hooked() and (self.keeping is None or not eager.may_keep()):
            # checkpointing wants the call and its recomputation to save alike, also where one of them takes
            # the op
            core = self.as_op_takes(self.family.core(*inputs, *options))
            inputs = core[: self.count]
            o, last, kept = kernels.forward(core, output_final_state=output_final_state, keep=False)
        else:
            o, last, kept = forward(*inputs)
        saved = _inputs_to_save(inputs)
        if self.family.saves_final_state:
            saved = *saved, last if needs else None
        if kept is None:
            return Recorded((o, last), (), saved, (kernels, options, needs, None))
        return Recorded((o, last), (), (*saved, *kept.tensors), (kernels, options, needs, kept.layout))

    def _differentiate_directly(
        self, saved: Sequence[Any], options: tuple[Any, ...], grads: tuple[MaybeTensor, ...]
    ) -> Sequence[MaybeTensor]:
        """The kernels again where the backward is plain, too."""
        kernels, options_of_core, needs, layout = options
        tensors = _with_grads(saved[: self._saved_count], *grads)
        tensors_kept = tuple(saved[self._saved_count :])
        kept = Kept(tensors_kept, layout) if tensors_kept else None
        if not autograd.is_plain_backward((*tensors, *tensors_kept), grads):
            if self.family.op_inputs is not None:
                tensors = *self.family.op_inputs(tensors[: self.count]), *tensors[self.count :]
            return self._differentiate_by_op(tensors, kept, (*options_of_core, needs))
        return eager.named_in_profiles(self._bwd_name, kernels.backward)(
            self.family.core(*saved[: self.count], *options_of_core),
            kept,
            *tensors[-2:],
            needs_gates=needs,
            **self._final_state(saved),
        )

    def _record_packed(self, *args: Any) -> Recorded:
        inputs, (*options, _, chunk_size, output_final_state) = args[: self.count], args[self.count :]
        with transforms.below_function():
            o, last = self.packed(*args)
            saved, needs = _inputs_to_save(inputs), self.needs_gates(inputs)
        constants = () if output_final_state else (last,)
        return Recorded((o, last), constants, saved, (*options, chunk_size, needs))

    def _differentiate_packed(
        self, saved: Sequence[Any], options: tuple[Any, ...], grads: tuple[MaybeTensor, ...]
    ) -> Sequence[MaybeTensor]:
        return self.packed_bwd(*_with_grads(saved, *grads), *options)

    def needs_gates(self, inputs: Sequence[Any]) -> bool:
        return any(inputs[place] is not None and inputs[place].requires_grad for place in self._gates)


def _inputs_to_save(inputs: Sequence[Any]) -> tuple[MaybeTensor, ...]:
    """The inputs for the backward, by reference but for the initial state: a cache that is updated in place
    must not change the gradient."""
    *others, initial_state, cu_seqlens = inputs
    return *others, None if initial_state is None else initial_state.clone(), cu_seqlens


def _with_grads(saved: Sequence[Any], do: MaybeTensor, dht: MaybeTensor) -> tuple[Any, ...]:
    """The tensors that a backward op takes."""
    return *saved, torch.zeros_like(saved[2]) if do is None else do, dht


def as_asked(call: LinearCall, last: MaybeTensor) -> MaybeTensor:
    """The final state as the call wants it, contiguous."""
    if not call.output_final_state or last is None:
        return None
    return last.mT.contiguous() if call.state_v_first else last


# Families. Those of the delta rule are in `ops.delta_rule`


def _simple_gla_core(call: LinearCall, tensors: Sequence[Any]) -> SimpleGLACore:
    """With g, or a decay per head, which is fp32 at least, or fp64 beside fp64."""
    q, k, v, g, g_gamma, initial_state, cu_seqlens, _ = tensors
    if g_gamma is not None:
        g, dtype = g_gamma, state_dtype(q)
        g = g.to(dtype) if g.dtype.itemsize < dtype.itemsize else g
    return SimpleGLACore(q, k, v, g, initial_state, cu_seqlens, call.scale, call.batch_invariant)


def _with_g_per_token(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """With a decay per head, which the kernels take as [HV], expanded to [B, T, HV]."""
    q, k, v, g, *others = inputs
    return q, k, v, g if g is None or g.dim() > 1 else g.expand(v.shape[:3]), *others


def _simple_gla_in_form(core: SimpleGLACore, *options: Any) -> Result:
    is_per_head = core.g is not None and core.g.dim() == 1
    gates = (None, core.g) if is_per_head else (core.g, None)
    return in_form("simple_gla", (*core[:3], *gates), core, *options)


def _simple_gla_gradients(core: SimpleGLACore, *grads: Any) -> Sequence[MaybeTensor]:
    *found, dh0 = explicit_gradients("simple_gla", _with_g_per_token(core[:4]), core, *grads)
    return *found, None if core.initial_state is None else dh0


def _simple_gla_kernels() -> Any:
    from tfla_tk.backends.tk.scalar_gate import scalar_decay

    return scalar_decay


simple_gla = LinearOps(
    Family(
        name="simple_gla",
        title="simple GLA",
        inputs=("q", "k", "v", "g?", "initial_state?", "cu_seqlens?"),
        heads=(2, 2, 2, 2, 1, 0),
        options=("float scale", "bool batch_invariant"),
        gates=("g",),
        core=SimpleGLACore,
        read=_simple_gla_core,
        reference=_simple_gla_in_form,
        gradients=_simple_gla_gradients,
        kernels=_simple_gla_kernels,
        flops=(flops.forward, flops.backward),
        saves_final_state=True,
        places=lambda tensors: (0, 1, 2, 4 if tensors[3] is None else 3, 5, 6),
        op_inputs=_with_g_per_token,
    )
)


def _gla_core(call: LinearCall, tensors: Sequence[Any]) -> GLACore:
    q, k, v, g, initial_state, cu_seqlens, _ = tensors
    return GLACore(q, k, v, g, initial_state, cu_seqlens, call.scale, call.batch_invariant)


def _gla_kernels() -> Any:
    from tfla_tk.backends.tk import channel_gate

    return channel_gate


gla = LinearOps(
    replace(
        simple_gla.family,  # whose reference takes a decay per key channel as g, too
        name="gla",
        title="GLA",
        inputs=("q", "k", "v", "g", "initial_state?", "cu_seqlens?"),
        core=GLACore,
        read=_gla_core,
        kernels=_gla_kernels,
        flops=(flops.forward, flops.gla_backward),
        saves_final_state=False,
        places=None,
        op_inputs=None,
    )
)
