"""Calls of Kimi Delta Attention (KDA): their description, the checks of their arguments, and the call of its
kernels."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from tfla_tk.calls.delta_rule import DeltaRuleCall, check_chunk_size, check_gate_parameters, check_strength
from tfla_tk.calls.linear import check_frame, check_operands
from tfla_tk.core import transforms
from tfla_tk.core.checks import (
    check_bool,
    check_device,
    check_int,
    check_number,
    check_shape,
    check_tensor,
    fail,
)
from tfla_tk.core.layout import MaybeTensor

CHUNK_SIZES = (32, 64)
SAFE = -5.0  # fla's safe gate takes lower bounds from here on


@dataclass(frozen=True, kw_only=True)
class KDACall(DeltaRuleCall):
    """A call of KDA as backends judge it; its gate is "channel", or "raw" where g becomes the log decay.
    lower_bound: of raw gates, or None. intermediate_states: the states between chunks are a third result.
    safe_gate, disable_recompute, use_graph: how fla's function is to compute it; results are the same."""

    lower_bound: float | None
    intermediate_states: bool
    safe_gate: bool
    disable_recompute: bool
    use_graph: bool

    @property
    def by_channel(self) -> bool:
        """The decay is per key channel."""
        return True


class KDACore(NamedTuple):
    """A call of the kernels; the arguments of the registered op tfla_tk::kda_fwd in their order.

    Attributes:
        g: [B, T, HV, K] log decay, or with A_log or lower_bound what it is made from.
        A_log: [HV] or None. dt_bias: [HV K] or None.
        lower_bound: not None: g is lower_bound sigmoid(exp(A_log) (g + dt_bias)), with exp(A_log) 1 where
            A_log is None. None and A_log given: g is -exp(A_log) softplus(g + dt_bias).
        others: as of `DeltaRuleCore`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: MaybeTensor
    dt_bias: MaybeTensor
    initial_state: MaybeTensor
    cu_seqlens: MaybeTensor
    scale: float
    qk_l2norm: bool
    beta_sigmoid: bool
    neg_eigval: bool
    lower_bound: float | None
    batch_invariant: bool

    @property
    def is_raw(self) -> bool:
        """The log decay is to be made of g."""
        return self.A_log is not None or self.lower_bound is not None


def check_kda(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    A_log: Any,
    dt_bias: Any,
    initial_state: Any,
    *,
    use_qk_l2norm_in_kernel: Any,
    use_gate_in_kernel: Any,
    use_beta_sigmoid_in_kernel: Any,
    allow_neg_eigval: Any,
    lower_bound: Any,
    cu_seqlens: Any,
    safe_gate: Any = False,
    disable_recompute: Any = False,
    return_intermediate_states: Any = False,
    use_graph: Any = False,
    max_num_seqs: Any = None,
    chunk_size: Any = None,
    **options: Any,
) -> KDACall:
    """Check one call of KDA and describe it. Without use_gate_in_kernel A_log, dt_bias and lower_bound are
    not looked at. options: as of `check_frame`."""
    operands = check_operands(q, k, v)
    check_tensor("g", g, 4, "[B, T, HV, K]")
    check_shape("g", g, (*operands.gate_shape, operands.dim_qk), "[B, T, HV] of v and K of q")
    check_device("g", g, q.device)
    raw, safe = check_bool("use_gate_in_kernel", use_gate_in_kernel), check_bool("safe_gate", safe_gate)
    bound = _check_lower_bound(lower_bound, safe) if raw else None
    parameters = []
    if raw:
        needs_a = bound is None
        parameters = check_gate_parameters(A_log, dt_bias, q, operands, by_channel=True, needs_a=needs_a)
    strength = check_strength(beta, q, operands, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    frame = check_frame(q, operands, initial_state, v_first_in="chunk_kda", cu_seqlens=cu_seqlens, **options)
    in_graph = check_bool("use_graph", use_graph)
    if max_num_seqs is not None:
        count = check_int("max_num_seqs", max_num_seqs, "an int or None")
        if in_graph and cu_seqlens is not None and count != frame["sequences"]:
            fail("max_num_seqs", f"the {frame['sequences']} sequences of cu_seqlens", max_num_seqs)
    return KDACall(
        **frame,
        **transforms.of_call((q, k, v, g, beta, *parameters, initial_state), ()),
        gate="raw" if raw else "channel",
        chunk_size=check_chunk_size(chunk_size, CHUNK_SIZES),
        qk_l2norm=check_bool("use_qk_l2norm_in_kernel", use_qk_l2norm_in_kernel),
        **strength,
        lower_bound=bound,
        intermediate_states=check_bool("return_intermediate_states", return_intermediate_states),
        safe_gate=safe,
        disable_recompute=check_bool("disable_recompute", disable_recompute),
        use_graph=in_graph,
    )


def _check_lower_bound(value: Any, safe: bool) -> float | None:
    """A finite number or None; within fla's bounds where its safe gate is asked for."""
    if value is None and not safe:
        return None
    bound = check_number("lower_bound", value, "a number with safe_gate" if safe else "a number or None")
    if safe and not SAFE <= bound < 0:
        fail("lower_bound", f"a number from {SAFE:g} to less than 0 with safe_gate", value)
    if not abs(bound) < float("inf"):
        fail("lower_bound", "a finite number", value)
    return bound
