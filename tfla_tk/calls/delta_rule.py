"""Calls of the delta rule and of Kimi Delta Attention (KDA): their descriptions, the checks of their
arguments, and the calls of their kernels."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from tfla_tk.calls.linear import DEFAULT_CHUNK, LinearCall, Operands, check_frame, check_gate, check_operands
from tfla_tk.core import checks, transforms
from tfla_tk.core.layout import MaybeTensor

CHUNK_SIZES, KDA_CHUNK_SIZES = (16, 32, 64), (32, 64)
SAFE = -5.0  # fla's safe gate takes lower bounds of KDA's log decay from here on


@dataclass(frozen=True, kw_only=True)
class DeltaRuleCall(LinearCall):
    """A call of the delta rule as backends judge it. gate is "none" (nothing decays: chunk_delta_rule),
    "token" (g is the log decay) or "raw" (g becomes the log decay by A_log and dt_bias). The flags say
    what is still to be made of the inputs: the norm of q and k, the sigmoid of beta, and its factor of 2."""

    qk_l2norm: bool = False
    beta_sigmoid: bool = False
    neg_eigval: bool = False


class DeltaRuleCore(NamedTuple):
    """A call of the kernels; the arguments of the registered op tfla_tk::delta_rule_fwd in their order. g and
    beta are fp32 or of 16 bits (fp64 for fp64 q); what has no comment is as of `SimpleGLACore`."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: MaybeTensor  # [B, T, HV] log decay, or with A_log what it is made from; None: nothing decays
    beta: Tensor  # [B, T, HV], or with beta_sigmoid what it is made from
    A_log: MaybeTensor  # [HV]; not None: g is -exp(A_log) softplus(g + dt_bias)
    dt_bias: MaybeTensor  # [HV]
    initial_state: MaybeTensor
    cu_seqlens: MaybeTensor
    scale: float
    qk_l2norm: bool  # q and k are x / sqrt(sum x^2 + 1e-6) of those given
    beta_sigmoid: bool  # beta is the sigmoid of the given one
    neg_eigval: bool  # times 2
    batch_invariant: bool

    @property
    def is_raw(self) -> bool:
        """The log decay is to be made of g."""
        return self.g is not None and self.A_log is not None

    @property
    def lower_bound(self) -> None:
        return None


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
        return True


class KDACore(NamedTuple):
    """A call of the kernels; the arguments of the registered op tfla_tk::kda_fwd in their order. What has no
    comment is as of `DeltaRuleCore`."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor  # [B, T, HV, K] log decay, or with A_log or lower_bound what it is made from
    beta: Tensor
    A_log: MaybeTensor  # [HV] or None
    dt_bias: MaybeTensor  # [HV K] or None
    initial_state: MaybeTensor
    cu_seqlens: MaybeTensor
    scale: float
    qk_l2norm: bool
    beta_sigmoid: bool
    neg_eigval: bool
    # not None: g is lower_bound sigmoid(exp(A_log) (g + dt_bias)), with exp(A_log) 1 where A_log is None.
    # None and A_log given: g is -exp(A_log) softplus(g + dt_bias)
    lower_bound: float | None
    batch_invariant: bool

    @property
    def is_raw(self) -> bool:
        """The log decay is to be made of g."""
        return self.A_log is not None or self.lower_bound is not None


def check_delta_rule(
    q: Any, k: Any, v: Any, g: Any, *, scale: Any, chunk_size: Any, gated: bool, **others: Any
) -> DeltaRuleCall:
    """Check one call of chunk_gated_delta_rule, or of chunk_delta_rule, whose g is None, and describe it.
    Without use_gate_in_kernel A_log and dt_bias are not looked at. others: as of `_check_rule`."""
    operands = check_operands(q, k, v)
    use_gate = checks.check_bool("use_gate_in_kernel", others.pop("use_gate_in_kernel"))
    if gated:
        check_gate("g", g, q, operands.gate_shape)
    elif isinstance(scale, Tensor):
        checks.fail("scale", "a number or None (chunk_gated_delta_rule takes a gate)", "a tensor", TypeError)
    of_frame: dict[str, Any] = {"v_first_in": "chunk_gated_delta_rule", "scale": scale}
    return DeltaRuleCall(
        **_check_rule(q, k, v, g, operands, {} if use_gate else None, **of_frame, **others),
        gate="none" if not gated else "raw" if use_gate else "token",
        chunk_size=check_chunk_size(chunk_size, CHUNK_SIZES),
    )


def check_kda(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    *,
    use_gate_in_kernel: Any,
    lower_bound: Any,
    cu_seqlens: Any,
    safe_gate: Any = False,
    disable_recompute: Any = False,
    return_intermediate_states: Any = False,
    use_graph: Any = False,
    max_num_seqs: Any = None,
    chunk_size: Any = None,
    **others: Any,
) -> KDACall:
    """Check one call of KDA and describe it. Without use_gate_in_kernel A_log, dt_bias and lower_bound are
    not looked at. others: as of `_check_rule`."""
    operands = check_operands(q, k, v)
    checks.check_tensor("g", g, 4, "[B, T, HV, K]")
    checks.check_shape("g", g, (*operands.gate_shape, operands.dim_qk), "[B, T, HV] of v and K of q")
    checks.check_device("g", g, q.device)
    raw = checks.check_bool("use_gate_in_kernel", use_gate_in_kernel)
    safe = checks.check_bool("safe_gate", safe_gate)
    bound = _check_lower_bound(lower_bound, safe) if raw else None
    of_raw = {"by_channel": True, "needs_a": bound is None} if raw else None
    of_frame: dict[str, Any] = {"v_first_in": "chunk_kda", "cu_seqlens": cu_seqlens}
    fields = _check_rule(q, k, v, g, operands, of_raw, **of_frame, **others)
    in_graph = checks.check_bool("use_graph", use_graph)
    if max_num_seqs is not None:
        count = checks.check_int("max_num_seqs", max_num_seqs, "an int or None")
        if in_graph and cu_seqlens is not None and count != fields["sequences"]:
            checks.fail("max_num_seqs", f"the {fields['sequences']} sequences of cu_seqlens", max_num_seqs)
    return KDACall(
        **fields,
        gate="raw" if raw else "channel",
        chunk_size=check_chunk_size(chunk_size, KDA_CHUNK_SIZES),
        lower_bound=bound,
        intermediate_states=checks.check_bool("return_intermediate_states", return_intermediate_states),
        safe_gate=safe,
        disable_recompute=checks.check_bool("disable_recompute", disable_recompute),
        use_graph=in_graph,
    )


def _check_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Any,
    operands: Operands,
    of_raw: dict[str, bool] | None,
    *,
    beta: Any,
    A_log: Any,
    dt_bias: Any,
    initial_state: Any,
    use_qk_l2norm_in_kernel: Any,
    use_beta_sigmoid_in_kernel: Any,
    allow_neg_eigval: Any,
    **frame: Any,
) -> dict[str, Any]:
    """Check what the calls of the family have beside q, k, v and g, and describe it: fields of a
    `DeltaRuleCall`. of_raw: the options of `check_gate_parameters` where g becomes the log decay. frame: as
    of `check_frame`."""
    parameters = [] if of_raw is None else check_gate_parameters(A_log, dt_bias, q, operands, **of_raw)
    check_gate("beta", beta, q, operands.gate_shape)
    beta_sigmoid = checks.check_bool("use_beta_sigmoid_in_kernel", use_beta_sigmoid_in_kernel)
    neg_eigval = checks.check_bool("allow_neg_eigval", allow_neg_eigval)
    if neg_eigval and not beta_sigmoid:
        expected = "False without use_beta_sigmoid_in_kernel (multiply beta by 2 instead)"
        checks.fail("allow_neg_eigval", expected, neg_eigval)
    return {
        **check_frame(q, operands, initial_state, **frame),
        **transforms.of_call((q, k, v, g, beta, *parameters, initial_state), ()),
        "qk_l2norm": checks.check_bool("use_qk_l2norm_in_kernel", use_qk_l2norm_in_kernel),
        "beta_sigmoid": beta_sigmoid,
        "neg_eigval": neg_eigval,
    }


def _check_lower_bound(value: Any, safe: bool) -> float | None:
    """A finite number or None; within fla's bounds where its safe gate is asked for."""
    if value is None and not safe:
        return None
    bound = checks.check_number(
        "lower_bound", value, "a number with safe_gate" if safe else "a number or None"
    )
    if safe and not SAFE <= bound < 0:
        checks.fail("lower_bound", f"a number from {SAFE:g} to less than 0 with safe_gate", value)
    if not abs(bound) < float("inf"):
        checks.fail("lower_bound", "a finite number", value)
    return bound


def check_gate_parameters(
    A_log: Any, dt_bias: Any, q: Tensor, operands: Operands, *, by_channel: bool = False, needs_a: bool = True
) -> list[Tensor]:
    """What makes the log decay of g: A_log, which may be None without needs_a, and dt_bias where it is
    given, [HV], or by_channel [HV K]."""
    heads, found = operands.value_heads, []
    of_bias = ("[HV K]", heads * operands.dim_qk) if by_channel else ("[HV]", heads)
    for name, value, layout, size in (("A_log", A_log, "[HV]", heads), ("dt_bias", dt_bias, *of_bias)):
        if value is None and (name == "dt_bias" or not needs_a):
            continue
        checks.check_tensor(name, value, 1, f"{layout} with use_gate_in_kernel")
        checks.check_shape(name, value, (size,), f"{layout} of v")
        checks.check_device(name, value, q.device)
        found.append(value)
    return found


def check_chunk_size(value: Any, sizes: tuple[int, ...]) -> int:
    """One of the sizes; None is DEFAULT_CHUNK."""
    if value is None:
        return DEFAULT_CHUNK
    size = checks.check_int("chunk_size", value, "an int or None")
    if size not in sizes:
        checks.fail("chunk_size", f"{', '.join(map(str, sizes[:-1]))} or {sizes[-1]}", value)
    return size
