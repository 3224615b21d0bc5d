"""Calls of the delta rule: their description, the checks of their arguments, and the call of its kernels."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from tfla_tk.calls.linear import DEFAULT_CHUNK, LinearCall, Operands, check_frame, check_gate, check_operands
from tfla_tk.core import transforms
from tfla_tk.core.checks import check_bool, check_device, check_int, check_shape, check_tensor, fail
from tfla_tk.core.layout import MaybeTensor

CHUNK_SIZES = (16, 32, 64)


@dataclass(frozen=True, kw_only=True)
class DeltaRuleCall(LinearCall):
    """A call of the delta rule as backends judge it. gate is "none" (nothing decays: chunk_delta_rule),
    "token" (g is the log decay) or "raw" (g becomes the log decay by A_log and dt_bias). The flags say
    what is still to be made of the inputs: the norm of q and k, the sigmoid of beta, and its factor of 2."""

    qk_l2norm: bool = False
    beta_sigmoid: bool = False
    neg_eigval: bool = False


class DeltaRuleCore(NamedTuple):
    """A call of the kernels; the arguments of the registered op tfla_tk::delta_rule_fwd in their order.

    Attributes:
        g: [B, T, HV] log decay, or with A_log what it is made from; None: nothing decays.
        beta: [B, T, HV], or with beta_sigmoid what it is made from. g and beta are fp32 or of 16 bits (fp64
            for fp64 q).
        A_log, dt_bias: [HV]; not None: g is -exp(A_log) softplus(g + dt_bias).
        qk_l2norm: q and k are x / sqrt(sum x^2 + 1e-6) of those given.
        beta_sigmoid: beta is the sigmoid of the given one, times 2 with neg_eigval.
        others: as of `SimpleGLACore`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: MaybeTensor
    beta: Tensor
    A_log: MaybeTensor
    dt_bias: MaybeTensor
    initial_state: MaybeTensor
    cu_seqlens: MaybeTensor
    scale: float
    qk_l2norm: bool
    beta_sigmoid: bool
    neg_eigval: bool
    batch_invariant: bool

    @property
    def is_raw(self) -> bool:
        """The log decay is to be made of g."""
        return self.g is not None and self.A_log is not None

    @property
    def lower_bound(self) -> None:
        """Of the log decay: there is none."""
        return None


def check_delta_rule(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    A_log: Any,
    dt_bias: Any,
    initial_state: Any,
    *,
    scale: Any,
    use_qk_l2norm_in_kernel: Any,
    use_gate_in_kernel: Any,
    use_beta_sigmoid_in_kernel: Any,
    allow_neg_eigval: Any,
    chunk_size: Any,
    gated: bool,
    **options: Any,
) -> DeltaRuleCall:
    """Check one call of chunk_gated_delta_rule, or of chunk_delta_rule, whose g is None, and describe it.
    Without use_gate_in_kernel A_log and dt_bias are not looked at. options: as of `check_frame`."""
    operands = check_operands(q, k, v)
    gate = "none"
    use_gate = check_bool("use_gate_in_kernel", use_gate_in_kernel)
    parameters: list[Tensor] = []
    if gated:
        check_gate("g", g, q, operands.gate_shape)
        gate = "raw" if use_gate else "token"
    if use_gate:
        parameters = check_gate_parameters(A_log, dt_bias, q, operands)
    strength = check_strength(beta, q, operands, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    if not gated and isinstance(scale, Tensor):
        fail("scale", "a number or None (chunk_gated_delta_rule takes a gate)", "a tensor", TypeError)
    frame = check_frame(
        q, operands, initial_state, v_first_in="chunk_gated_delta_rule", scale=scale, **options
    )
    return DeltaRuleCall(
        **frame,
        **transforms.of_call((q, k, v, g, beta, *parameters, initial_state), ()),
        gate=gate,
        chunk_size=check_chunk_size(chunk_size, CHUNK_SIZES),
        qk_l2norm=check_bool("use_qk_l2norm_in_kernel", use_qk_l2norm_in_kernel),
        **strength,
    )


def check_strength(
    beta: Any, q: Tensor, operands: Operands, use_sigmoid: Any, allow_neg_eigval: Any
) -> dict[str, Any]:
    """Check beta [B, T, HV] and its flags; the fields of its `DeltaRuleCall`."""
    check_gate("beta", beta, q, operands.gate_shape)
    beta_sigmoid = check_bool("use_beta_sigmoid_in_kernel", use_sigmoid)
    neg_eigval = check_bool("allow_neg_eigval", allow_neg_eigval)
    if neg_eigval and not beta_sigmoid:
        expected = "False without use_beta_sigmoid_in_kernel (multiply beta by 2 instead)"
        fail("allow_neg_eigval", expected, neg_eigval)
    return {"beta_sigmoid": beta_sigmoid, "neg_eigval": neg_eigval}


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
        check_tensor(name, value, 1, f"{layout} with use_gate_in_kernel")
        check_shape(name, value, (size,), f"{layout} of v")
        check_device(name, value, q.device)
        found.append(value)
    return found


def check_chunk_size(value: Any, sizes: tuple[int, ...]) -> int:
    """One of the sizes; None is DEFAULT_CHUNK."""
    if value is None:
        return DEFAULT_CHUNK
    size = check_int("chunk_size", value, "an int or None")
    if size not in sizes:
        fail("chunk_size", f"{', '.join(map(str, sizes[:-1]))} or {sizes[-1]}", value)
    return size
