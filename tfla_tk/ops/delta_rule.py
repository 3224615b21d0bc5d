"""The registered ops of the delta rule, without decay and with one per token and head; see `ops.linear`.

tfla_tk::delta_rule_fwd takes a `DeltaRuleCore` and output_final_state. Without g nothing decays. The flags
say what of the raw inputs the op itself makes: the norm of q and k, the sigmoid of beta, and by A_log and
dt_bias the log decay. Those of KDA, the same with a decay per token, head and key channel, are beside them:
tfla_tk::kda_fwd takes a `KDACore`. Both families keep (`KeepingOps`).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tfla_tk.calls.delta_rule import DeltaRuleCall, DeltaRuleCore, KDACall, KDACore
from tfla_tk.core import eager, flops, library, transforms
from tfla_tk.core.layout import Kept, MaybeTensor, present
from tfla_tk.ops import autograd
from tfla_tk.ops.linear import Family, LinearOps, Result, explicit_gradients, in_form


class KeepingOps:
    """The ops of a family that keep what its kernels leave of a forward for the backward. fwd, bwd: the ops.

    tfla_tk::<name>_fwd_kept and <name>_bwd_kept are <name>_fwd and <name>_bwd beside autograd: the first one
    also returns what the kernels have kept, one tensor of v's dtype, which the second one takes behind dht.
    <name>_fwd records them where it can, so that no backward makes the forward again under torch.compile and
    activation checkpointing. The kernels of such a family also have

        kept_layout(core) -> the layout of what a forward with `keep` leaves in one tensor of v's dtype:
                             ints, of which the first one is the number of elements

    which follows from the metadata of core alone. It is an argument of <name>_fwd_kept, and of
    <name>_bwd_kept behind what is kept. A graph from torch's cache on disk may have the layout of other
    kernels. Then what is returned has that size, with nothing in it, and the backward of the kernels, whose
    layout is another one, makes the forward again."""

    def __init__(self, ops: LinearOps) -> None:
        self._ops = ops
        self._inputs = len(ops.family.inputs)
        self._place = self._inputs + 2  # of what is kept and its layout, among the arguments of bwd
        self._names = f"{ops.family.name}_fwd_kept", f"{ops.family.name}_bwd_kept"
        self._define()
        self.fwd, self.bwd = (getattr(torch.ops.tfla_tk, name).default for name in self._names)
        self._implement()
        self._register()

    def layout(self, args: Sequence[Any]) -> tuple[int, ...] | None:
        """The layout of what a recorded call of <name>_fwd with these arguments should keep. None where no
        kernels run, a transform of torch.func would batch it, hooks would move it, or sizes are not known."""
        if not self._has_kernels(args[0]) or transforms.are_active() or not eager.may_keep():
            return None
        sizes = [size for x in args[: self._inputs] if x is not None for size in x.shape]
        if not all(isinstance(size, int) for size in sizes) or args[2].numel() == 0:
            return None
        core, _ = self._ops.split(tuple(args))
        return self._ops.family.kernels().kept_layout(core)

    def _has_kernels(self, q: Tensor) -> bool:
        # fake tensors of a GPU are also on machines without one
        return q.device.type == "cuda" and torch.cuda.is_available()

    def _without(self, args: Sequence[Any]) -> tuple[Any, ...]:
        return *args[: self._place], *args[self._place + 2 :]

    def _define(self) -> None:
        forward, backward = self._names
        inputs, options, grads = self._ops.arguments()
        define = library.get().define
        define(
            f"{forward}({inputs}, {options}, bool output_final_state, int[] layout)"
            " -> (Tensor o, Tensor final_state, Tensor kept)"
        )
        define(
            f"{backward}({inputs}, Tensor do, Tensor? dht, Tensor kept, int[] layout, {options},"
            f" bool needs_gates) -> ({grads})"
        )

    def _implement(self) -> None:
        forward, backward = self._names
        impl = library.get().impl
        impl(forward, self._fwd_cpu, "CPU")
        impl(forward, self._fwd_cuda, "CUDA")
        impl(backward, lambda *args: self._ops.bwd(*self._without(args)), "CPU")
        impl(backward, self._bwd_cuda, "CUDA")
        no_gradients = f"tfla_tk::{forward} records nothing; {forward.removesuffix('_kept')} does"
        for name, op, refusal in ((forward, self.fwd, no_gradients), (backward, self.bwd, self._ops.refusal)):
            refusing = autograd.refusing(name, op, refusal)
            impl(name, autograd.recording(name, op, refusing), "Autograd")

    def _register(self) -> None:
        forward, backward = self._names
        our_library = library.get()
        our_library.register_fake(forward, self._fwd_fake)
        our_library.register_fake(backward, lambda *args: self._ops.bwd_fake(*self._without(args)))
        # what is kept is of one call, not of one that is as many times as large
        our_library.register_vmap(
            backward,
            lambda info, in_dims, *args: self._ops.bwd_vmap(
                info, self._without(in_dims), *self._without(args)
            ),
        )
        for name, count in zip(self._names, self._ops.family.flops, strict=True):
            flops.register(name, count)

    def _fwd_cpu(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        *of_fwd, layout = args
        return *self._ops.fwd(*of_fwd), args[2].new_zeros(layout[0])

    def _fwd_fake(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        *of_fwd, layout = args
        return *self._ops.fwd_fake(*of_fwd), args[2].new_empty(layout[0])

    def _fwd_cuda(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        core, (output_final_state, layout) = self._ops.split(args)
        forward = self._ops.family.kernels().forward
        o, last, kept = forward(core, output_final_state=output_final_state, keep=True)
        left = kept.tensors[0] if kept is not None and kept.layout == tuple(layout) else None
        return o, present(last, o), o.new_empty(layout[0]) if left is None else left

    def _bwd_cuda(self, *args: Any) -> tuple[Tensor, ...]:
        left, layout = args[self._place : self._place + 2]
        return self._ops.differentiate(Kept((left,), tuple(layout)), self._without(args))


def _core(call: DeltaRuleCall, tensors: Sequence[Any]) -> DeltaRuleCore:
    q, k, v, g, beta, a_log, dt_bias, initial_state, cu_seqlens, _ = tensors
    if call.gate != "raw":
        a_log = dt_bias = None
    flags = call.qk_l2norm, call.beta_sigmoid, call.neg_eigval, call.batch_invariant
    return DeltaRuleCore(q, k, v, g, beta, a_log, dt_bias, initial_state, cu_seqlens, call.scale, *flags)


def from_raw(core: Any) -> Any:
    """The core with what its flags ask for made of the raw inputs."""
    import tfla_tk.reference as forms

    if core.qk_l2norm:
        core = core._replace(q=forms.l2_norm(core.q), k=forms.l2_norm(core.k))
    if core.beta_sigmoid:
        core = core._replace(beta=forms.writing_strength(core.beta, core.neg_eigval))
    if core.is_raw:
        g = forms.delta_log_decay(core.g, core.A_log, core.dt_bias, core.lower_bound)
        core = core._replace(g=g)
    return core


def by_reference(core: Any, *options: Any) -> Result:
    """o and the final state or None by a form of the reference, of a `DeltaRuleCore` or a `KDACore`."""
    made = from_raw(core)
    operands = made.q, made.k, made.v
    if made.g is None:
        o, last = in_form("delta_rule", (*operands, made.beta), made, *options)
    else:
        o, last = in_form("gated_delta_rule", (*operands, made.g, made.beta), made, *options)
    return o.to(core.q.dtype), last


def gradients(core: Any, *grads: Any) -> Sequence[MaybeTensor]:
    """Of the tensors of such a core but cu_seqlens, by the explicit formulas."""
    import tfla_tk.reference as forms

    made = from_raw(core)
    g = made.beta.new_zeros(made.beta.shape) if made.g is None else made.g
    operands = made.q, made.k, made.v, g, made.beta
    dq, dk, dv, dg, dbeta, dh0 = explicit_gradients("gated_delta_rule", operands, made, *grads)
    da_log = ddt_bias = None
    if core.qk_l2norm:
        dq, dk = forms.l2_norm_backward(core.q, dq), forms.l2_norm_backward(core.k, dk)
    if core.beta_sigmoid:
        dbeta = forms.writing_strength_backward(core.beta, dbeta, core.neg_eigval)
    if core.is_raw:
        found = forms.delta_log_decay_backward(core.g, core.A_log, core.dt_bias, dg, core.lower_bound)
        dg, da_log, ddt_bias = found
    given = None if core.g is None else dg
    return dq, dk, dv, given, dbeta, da_log, ddt_bias, None if core.initial_state is None else dh0


def _kernels() -> Any:
    from tfla_tk.backends.tk.delta_rule import launch

    return launch


delta_rule = LinearOps(
    Family(
        name="delta_rule",
        title="the delta rule",
        inputs=("q", "k", "v", "g?", "beta", "A_log?", "dt_bias?", "initial_state?", "cu_seqlens?"),
        heads=(2, 2, 2, 2, 2, 0, 0, 1, 0),
        options=(
            "float scale",
            "bool qk_l2norm",
            "bool beta_sigmoid",
            "bool neg_eigval",
            "bool batch_invariant",
        ),
        gates=("g", "A_log", "dt_bias"),
        core=DeltaRuleCore,
        read=_core,
        reference=by_reference,
        gradients=gradients,
        kernels=_kernels,
        flops=(flops.delta_rule, flops.delta_rule_backward),
    )
)


def _kda_core(call: KDACall, tensors: Sequence[Any]) -> KDACore:
    q, k, v, g, beta, a_log, dt_bias, initial_state, cu_seqlens, _ = tensors
    if call.gate != "raw":
        a_log = dt_bias = None
    flags = call.qk_l2norm, call.beta_sigmoid, call.neg_eigval, call.lower_bound, call.batch_invariant
    return KDACore(q, k, v, g, beta, a_log, dt_bias, initial_state, cu_seqlens, call.scale, *flags)


def _kda_kernels() -> Any:
    from tfla_tk.backends.tk import kda

    return kda


_OPTIONS = delta_rule.family.options
kda = LinearOps(
    replace(
        delta_rule.family,
        name="kda",
        title="KDA",
        options=(*_OPTIONS[:-1], "float? lower_bound", _OPTIONS[-1]),
        core=KDACore,
        read=_kda_core,
        kernels=_kda_kernels,
    )
)

delta_rule.keeping, kda.keeping = KeepingOps(delta_rule), KeepingOps(kda)
