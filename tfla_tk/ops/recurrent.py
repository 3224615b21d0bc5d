"""The registered op of a few tokens of the operators in [B, T, H, D]; it has no gradients.

tfla_tk::recurrent takes a `RecurrentCore` and returns (o, last): o [B, T, HV, V] in q's dtype, and the state
after the last token in fp32 (fp64 for fp64 q), [0] where it is not wanted.
tfla_tk::recurrent_ writes the state over the one it read, in its dtype, and returns o. With state_indices [B]
    int32 the states lie in a pool [slots, ..]; where an index is below 0, o is 0 and nothing is written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tfla_tk.calls.delta_rule import DeltaRuleCall
from tfla_tk.calls.kda import KDACall
from tfla_tk.calls.linear import LinearCall
from tfla_tk.calls.recurrent import RecurrentCore, through_a_copy
from tfla_tk.core import flops, library, transforms
from tfla_tk.core.layout import MaybeTensor, state_dtype
from tfla_tk.ops import autograd
from tfla_tk.ops.kda import log_decay

_library = library.get()
_GIVEN = "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor? A_log, Tensor? dt_bias, "
_FLAGS = "float scale, bool state_v_first, bool qk_l2norm, bool beta_sigmoid, bool neg_eigval, "
_library.define(
    f"recurrent({_GIVEN}Tensor? initial_state, Tensor? cu_seqlens, {_FLAGS}bool output_final_state)"
    " -> (Tensor o, Tensor last)"
)
_library.define(
    f"recurrent_({_GIVEN}Tensor(a!) state, Tensor? cu_seqlens, {_FLAGS}Tensor? state_indices) -> Tensor o"
)
_op = torch.ops.tfla_tk.recurrent.default
_op_in_place = torch.ops.tfla_tk.recurrent_.default
_TENSORS = 8


def serve(kernel: str, call: LinearCall, *tensors: Any, direct: bool = False) -> tuple[Tensor, MaybeTensor]:
    """o and the state after the last token, None unless it is wanted.

    Args:
        kernel: "simple_gla", "gla", "delta_rule" or "kda".
        tensors: those of its calls; the last one is state_indices.
        direct: call the kernels, not the op: for plain eager calls.
    """
    core, state_indices = _core(kernel, call, tensors), tensors[-1]
    if call.state_in_place is not None:
        run = _direct_in_place if direct else _op_in_place
        return run(*core[:-1], state_indices), core.initial_state
    o, last = _on_cuda(*core) if direct else _op(*core)
    return o, last if core.output_final_state else None


def _core(kernel: str, call: LinearCall, tensors: tuple[Any, ...]) -> RecurrentCore:
    q, k, v, g, *more, initial_state, cu_seqlens, _ = tensors
    beta = a_log = dt_bias = None
    if kernel in ("delta_rule", "kda"):
        beta, a_log, dt_bias = more
    elif kernel == "simple_gla" and g is None and more[0] is not None:
        g = more[0].expand(v.shape[:3])
    flags = (False, False, False)
    if isinstance(call, DeltaRuleCall):
        flags = call.qk_l2norm, call.beta_sigmoid, call.neg_eigval
    if isinstance(call, KDACall):
        g, a_log, dt_bias = log_decay(call, g, a_log, dt_bias), None, None
    raw = (a_log, dt_bias) if call.gate == "raw" else (None, None)
    options = call.scale, call.state_v_first, *flags, call.output_final_state
    return RecurrentCore(q, k, v, g, beta, *raw, initial_state, cu_seqlens, *options)


def _on_cpu(*args: Any) -> tuple[Tensor, Tensor]:
    import tfla_tk.reference as forms

    core = RecurrentCore(*args)
    q, k, g, beta, state = core.q, core.k, core.g, core.beta, core.initial_state
    if core.qk_l2norm:
        q, k = forms.l2_norm(q), forms.l2_norm(k)
    if core.beta_sigmoid and beta is not None:
        beta = forms.writing_strength(beta, core.neg_eigval)
    if core.A_log is not None and g is not None:
        g = forms.delta_log_decay(g, core.A_log, core.dt_bias)
    if core.state_v_first and state is not None:
        state = state.mT
    options: dict[str, Any] = {"scale": core.scale, "initial_state": state, "output_final_state": True}
    options["cu_seqlens"] = core.cu_seqlens
    if beta is not None and g is not None:
        o, last = forms.gated_delta_rule_recurrent(q, k, core.v, g, beta, **options)
    elif beta is not None:
        o, last = forms.delta_rule_recurrent(q, k, core.v, beta, **options)
    elif core.by_channel:
        o, last = forms.gla_recurrent(q, k, core.v, g, **options)
    else:
        o, last = forms.simple_gla_recurrent(q, k, core.v, g, **options)
    out = _as_fake(*core)
    out[0].copy_(o)
    if core.output_final_state:
        out[1].copy_(last.mT if core.state_v_first else last)
    return out


def _in_place_on_cpu(*args: Any) -> Tensor:
    core, state, indices = RecurrentCore(*args[:-1], True), args[7], args[-1]

    def new_state(*tensors: Any) -> tuple[Tensor, Tensor]:
        return _on_cpu(*core._replace(initial_state=tensors[0]))

    return through_a_copy(new_state, 0, state, indices)[0]


def _on_cuda(*args: Any) -> tuple[Tensor, Tensor]:
    from tfla_tk.backends.tk import recurrent

    return recurrent.launch(RecurrentCore(*args))


def _in_place_on_cuda(*args: Any) -> Tensor:
    from tfla_tk.backends.tk import recurrent

    return recurrent.launch_in_place(RecurrentCore(*args[:-1], True), args[-1])


def _written(args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    return (args[7],)


_direct_in_place = autograd.noting_writes(_in_place_on_cuda, _written)


def _in_place_as_fake(*args: Any) -> Tensor:
    return args[0].new_empty(args[2].shape)


def _refuse_vmap(info: Any, in_dims: Any, *args: Any) -> Any:
    raise RuntimeError("vmap of a recurrence in place: expected inplace=False, got True")


def _as_fake(*args: Any) -> tuple[Tensor, Tensor]:
    """Uninitialised outputs."""
    core = RecurrentCore(*args)
    shape = core.state_shape if core.output_final_state else (0,)
    return core.q.new_empty(core.v.shape), core.q.new_empty(shape, dtype=state_dtype(core.q))


_library.impl("recurrent", _on_cpu, "CPU")
_library.impl("recurrent", _on_cuda, "CUDA")
_library.register_fake("recurrent", _as_fake)
_library.impl("recurrent", autograd.without_gradients("recurrent", _op, _TENSORS), "Autograd")
_vmap = transforms.merge_into_batch(
    _op, cu_seqlens=8, heads=(2, 2, 2, 2, 2, 0, 0, 1), result_heads=(2, 1), per_head=(5, 6)
)
_library.register_vmap("recurrent", _vmap)
flops.register("recurrent", flops.step)
_library.impl("recurrent_", _in_place_on_cpu, "CPU")
_library.impl("recurrent_", _in_place_on_cuda, "CUDA")
_library.register_fake("recurrent_", _in_place_as_fake)
_library.impl("recurrent_", autograd.without_gradients("recurrent_", _op_in_place, _TENSORS), "Autograd")
_library.impl(
    "recurrent_", autograd.noting_writes(autograd.below_versions(_op_in_place), _written), "ADInplaceOrView"
)
_library.register_vmap("recurrent_", _refuse_vmap)
flops.register("recurrent_", flops.step)
