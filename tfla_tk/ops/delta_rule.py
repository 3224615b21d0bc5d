"""The registered ops of the delta rule, without decay and with one per token and head; see `ops.linear`.

tfla_tk::delta_rule_fwd takes a `DeltaRuleCore` and output_final_state. Without g nothing decays. The flags
say what of the raw inputs the op itself makes: the norm of q and k, the sigmoid of beta, and by A_log and
dt_bias the log decay. Those of KDA, the same with a
decay per token, head and key channel, are beside them: tfla_tk::kda_fwd takes a `KDACore`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch.nn.functional import pad

from tfla_tk.calls.delta_rule import DeltaRuleCall, DeltaRuleCore, KDACall, KDACore
from tfla_tk.core import flops
from tfla_tk.core.layout import MaybeTensor, state_dtype
from tfla_tk.ops.linear import STEP, Family, LinearOps, Result, as_asked, explicit_gradients, in_form


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


ops = LinearOps(
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
        keeps=True,
    )
)


class KDAOps(LinearOps):
    """Those of a family whose dt_bias has a number per head and key channel, and whose calls may ask for the
    states between chunks."""

    def serve_by_reference(self, call: Any, variant: str | None, *tensors: Any) -> Any:
        """As `LinearOps` does; where they are asked for also the states before every chunk, in v's dtype
        [B, NT, HV, K, V], or [B, NT, HV, V, K] with state_v_first."""
        if not call.intermediate_states:
            return super().serve_by_reference(call, variant, *tensors)
        import tfla_tk.reference as forms

        *inputs, cu_seqlens, cu_seqlens_cpu = tensors
        offsets = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
        core = from_raw(self._core(call, (*inputs, offsets, None)))
        operands, of_states = (core.q, core.k, core.v, core.g, core.beta), call.output_final_state
        o, last, states = forms.kda_with_states(
            *operands, call.scale, core.initial_state, of_states, core.cu_seqlens, call.chunk_size
        )
        # without a token it may be the initial state itself
        last = None if last is None else as_asked(call, last.to(state_dtype(core.v), copy=True))
        states = (states.mT if call.state_v_first else states).to(call.dtype)
        return o.to(call.dtype), last, states.contiguous()

    def _padded(self, call: Any, core: KDACore) -> KDACore:
        if core.dt_bias is not None and call.dim_qk % STEP:
            rows = pad(core.dt_bias.view(-1, call.dim_qk), (0, -call.dim_qk % STEP))
            core = core._replace(dt_bias=rows.flatten())
        return super()._padded(call, core)


def _kda_core(call: KDACall, tensors: Sequence[Any]) -> KDACore:
    q, k, v, g, beta, a_log, dt_bias, initial_state, cu_seqlens, _ = tensors
    if call.gate != "raw":
        a_log = dt_bias = None
    flags = call.qk_l2norm, call.beta_sigmoid, call.neg_eigval, call.lower_bound, call.batch_invariant
    return KDACore(q, k, v, g, beta, a_log, dt_bias, initial_state, cu_seqlens, call.scale, *flags)


def _kda_kernels() -> Any:
    from tfla_tk.backends.tk.kda import launch

    return launch


_OPTIONS = ops.family.options
kda = KDAOps(
    replace(
        ops.family,
        name="kda",
        title="KDA",
        options=(*_OPTIONS[:-1], "float? lower_bound", _OPTIONS[-1]),
        core=KDACore,
        read=_kda_core,
        kernels=_kda_kernels,
    )
)
