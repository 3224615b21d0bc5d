"""The registered ops of KDA (the delta rule with a decay per token, head and key channel); see `ops.linear`.

tfla_tk::kda_fwd takes a `KDACore` and output_final_state.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch.nn.functional import pad

from tfla_tk.calls.delta_rule import KDACall, KDACore
from tfla_tk.core.layout import state_dtype
from tfla_tk.ops import delta_rule
from tfla_tk.ops.linear import STEP, LinearOps, as_asked


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
        core = delta_rule.from_raw(self._core(call, (*inputs, offsets, None)))
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


def _core(call: KDACall, tensors: Sequence[Any]) -> KDACore:
    q, k, v, g, beta, a_log, dt_bias, initial_state, cu_seqlens, _ = tensors
    if call.gate != "raw":
        a_log = dt_bias = None
    flags = call.qk_l2norm, call.beta_sigmoid, call.neg_eigval, call.lower_bound, call.batch_invariant
    return KDACore(q, k, v, g, beta, a_log, dt_bias, initial_state, cu_seqlens, call.scale, *flags)


def _kernels() -> Any:
    from tfla_tk.backends.tk.kda import launch

    return launch


_OPTIONS = delta_rule.ops.family.options
ops = KDAOps(
    replace(
        delta_rule.ops.family,
        name="kda",
        title="KDA",
        options=(*_OPTIONS[:-1], "float? lower_bound", _OPTIONS[-1]),
        core=KDACore,
        read=_core,
        kernels=_kernels,
    )
)
