"""The reference as a backend: pure PyTorch, plain autograd, any device and floating dtype, any shape."""

from functools import partial
from typing import Any

from torch import Tensor

from tfla_tk.calls.delta_rule import KDACall
from tfla_tk.calls.linear import LinearCall
from tfla_tk.calls.mlstm import MLSTMCall
from tfla_tk.core.checks import fail, shown_name
from tfla_tk.core.eager import has_no_values
from tfla_tk.core.layout import FORMS, as_dtype, state_dtype
from tfla_tk.core.support import SUPPORTED, Support
from tfla_tk.ops import delta_rule as delta_rule_ops
from tfla_tk.ops import linear as linear_ops
from tfla_tk.ops import mlstm as ops
from tfla_tk.ops import mlstm_decode
from tfla_tk.ops.linear import LinearOps, Result, as_asked


def _serve(of: LinearOps, call: LinearCall, variant: str | None, *tensors: Any) -> Result:
    """o, and the final state as the call wants it: by the form that the variant names, in plain autograd, or
    by packed_<name>. The last tensor is cu_seqlens_cpu."""
    form = variant or ("recurrent" if call.goes_by_token() else "chunkwise")
    *inputs, cu_seqlens, cu_seqlens_cpu = tensors
    if has_no_values(cu_seqlens):
        core = of.as_op_takes(of.read(call, tensors))
        o, last = of.packed(*core, form, call.chunk_size, call.output_final_state)
        return o, as_asked(call, last)
    offsets = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    core = of.core_of(call, (*inputs, offsets, None))
    o, last = of.family.reference(core, form, call.chunk_size, call.output_final_state)
    # computed in the widest dtype of the inputs
    last = as_asked(call, as_dtype(last, state_dtype(core.q)))
    # without a token it may be the initial state itself
    return o, last.clone() if last is not None and call.seq == 0 else last


simple_gla, gla = partial(_serve, linear_ops.simple_gla), partial(_serve, linear_ops.gla)
delta_rule = partial(_serve, delta_rule_ops.delta_rule)


def kda(call: KDACall, variant: str | None, *tensors: Any) -> tuple[Any, ...]:
    """The same; where they are asked for also the states before every chunk, in v's dtype [B, NT, HV, K, V],
    or [B, NT, HV, V, K] with state_v_first."""
    if not call.intermediate_states:
        return _serve(delta_rule_ops.kda, call, variant, *tensors)
    import tfla_tk.reference as forms

    *inputs, cu_seqlens, cu_seqlens_cpu = tensors
    offsets = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    core = delta_rule_ops.from_raw(delta_rule_ops.kda.core_of(call, (*inputs, offsets, None)))
    operands, of_states = (core.q, core.k, core.v, core.g, core.beta), call.output_final_state
    o, last, states = forms.kda_with_states(
        *operands, call.scale, core.initial_state, of_states, core.cu_seqlens, call.chunk_size
    )
    # without a token it may be the initial state itself
    last = None if last is None else as_asked(call, last.to(state_dtype(core.v), copy=True))
    states = (states.mT if call.state_v_first else states).to(call.dtype)
    return o.to(call.dtype), last, states.contiguous()


def supports_form(call: object, variant: str | None = None) -> Support:
    """Everything is supported; ValueError for a variant that is no form."""
    if variant is not None and variant not in FORMS:
        known = [f"reference:{name}" for name in FORMS]
        fail("backend", " or ".join(map(repr, known)), shown_name(f"reference:{variant}", known))
    return SUPPORTED


supports_simple_gla = supports_delta_rule = supports_gla = supports_kda = supports_form
supports_mlstm = supports_form


def mlstm(call: MLSTMCall, variant: str | None, *tensors: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    """h [B, NH, S, V] and the last state, (c, n, m) or with the sigmoid gate (c, n). tensors: q, k, v, i,
    f, c_initial, n_initial, m_initial, cu_seqlens."""
    form = variant or "chunkwise"
    cu_seqlens = tensors[-1]
    if has_no_values(cu_seqlens):
        h, last = ops.packed_mlstm(call, form, tensors)
    else:
        options = call.sigmoid_gate, call.normalize, call.eps
        h, last = ops.by_reference(tensors, form, call.chunk_size, *options)
    # computed in the widest dtype of the inputs
    dtype = state_dtype(tensors[0])
    last = tuple(x if x.dtype == dtype else x.to(dtype) for x in last)
    # without a token it may be the initial state itself
    return h, tuple(x.clone() for x in last) if call.seq == 0 else last


def supports_mlstm_step(call: MLSTMCall, variant: str | None = None, what: str = "a step") -> Support:
    """Everything is supported; ValueError for a variant: decoding has one form."""
    if variant is not None:
        fail("backend", f"'reference' for {what}", repr(f"reference:{variant}"))
    return SUPPORTED


supports_mlstm_sequence = partial(supports_mlstm_step, what="a few tokens")


def mlstm_step(call: MLSTMCall, variant: str | None, *tensors: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`mlstm_decode.by_reference` of q, k, v, i, f, c, n, m, with the state stored as the call says."""
    *others, m = tensors
    read = *others, None if call.sigmoid_gate else m
    h, state = mlstm_decode.by_reference(read, call.normalize, call.eps)
    return h, mlstm_decode.stored(call, state, tensors[5:])


mlstm_sequence = mlstm_step
