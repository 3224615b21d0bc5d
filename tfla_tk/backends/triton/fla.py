"""Adapters onto fla's operators on tensors [B, T, H, D].

What fla gets wrong or does not have is refused here with the reason; docs/triton-baselines.md lists it. The
only variant is "triton:fla".
"""

import importlib
import re
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from tfla_tk.backends.triton import installation
from tfla_tk.backends.triton.fla_own import on_its_own, original, undispatched
from tfla_tk.calls.delta_rule import DeltaRuleCall, KDACall
from tfla_tk.calls.linear import LinearCall
from tfla_tk.core.checks import fail
from tfla_tk.core.layout import MaybeTensor
from tfla_tk.core.support import SUPPORTED, Support, together

# public name -> module of fla
_IN_BOTH_WAYS = ("simple_gla", "retention", "gla", "delta_rule", "gated_delta_rule", "kda")
FLA_OPS = {f"chunk_{op}": f"fla.ops.{op}" for op in (*_IN_BOTH_WAYS, "lightning_attn")}
FLA_OPS |= {f"fused_recurrent_{op}": f"fla.ops.{op}" for op in _IN_BOTH_WAYS}

# those whose backward fla refuses on Hopper with some versions of Triton
GUARDED = ("chunk_simple_gla", "chunk_gated_delta_rule")

_MOST_KEYS = 256  # of the delta rule and KDA
_SMALLEST_CHUNK = 16  # rows that a Triton matrix product takes
_HALVES = (torch.float16, torch.bfloat16)
_REPAIRED = (3, 7, 1)  # the Triton from which on the gated backward is right on Hopper

# looked up once at import, so that torch.compile sees a constant
FLA_MISSING = installation.missing("fla", "fla-core")


def supports_simple_gla(call: LinearCall, variant: str | None = None) -> Support:
    # the kernel that Triton miscompiles is the one with a decay per token
    op = "chunk_simple_gla" if call.gate == "token" else "chunk_retention"
    found = [refusal_of_call(op, call, variant), uneven_heads(call)]
    if call.chunk_size < _SMALLEST_CHUNK:
        remedy = f"use a power of two from {_SMALLEST_CHUNK} on"
        found.append(Support(False, f"chunk_size = {call.chunk_size}", remedy))
    if call.requires_grad and call.dtype in _HALVES and (call.dim_qk % 2 or call.dim_v % 2):
        of_dims = f"K = {call.dim_qk}, V = {call.dim_v}"
        reason = f"fla's backward takes even head dims in 16 bits, these are {of_dims}"
        found.append(Support(False, reason, "pad them"))
    return together(*found) or too_many_heads(call) or verdict_on_gradients(call, gated=call.gate == "token")


def refusal_of_call(op: str, call: LinearCall, variant: str | None) -> Support | None:
    """Why fla's operator, one of FLA_OPS, does not serve a call at all; ValueError for a variant but
    "fla"."""
    if variant not in (None, "fla"):
        fail("backend", "'triton' or 'triton:fla'", repr(f"triton:{variant}"))
    found = [installation.unusable(call.device, FLA_MISSING)]
    if call.dtype == torch.float64:
        found.append(Support(False, "Triton kernels have no float64", "use float32 or the reference"))
    if op == "chunk_delta_rule" and call.dtype == torch.float32:
        reason = "fla's chunk_delta_rule does not take float32"
        found.append(Support(False, reason, "use bfloat16 or float16"))
    if not any(found) and call.requires_grad and op in GUARDED and gated_backward_is_guarded():
        reason = (
            "fla refuses the gated backward on Hopper with triton >= 3.4 and < 3.7.1, which miscompiles it"
        )
        found.append(Support(False, reason, "use triton >= 3.7.1"))
    if call.transformed:
        reason = "fla has no rules for torch.func transforms"
        found.insert(0, Support(False, reason, "use backend 'tk' or 'reference'"))
    return together(*found)


def uneven_heads(call: LinearCall) -> Support | None:
    """The refusal of more heads of v than of q and k, where fla does not have it, or None."""
    if call.value_heads == call.heads:
        return None
    reason = f"fla takes as many heads of v as of q and k, these are {call.value_heads} and {call.heads}"
    return Support(False, reason, "repeat those of q and k: q.repeat_interleave(HV // H, dim=2)")


def too_many_heads(call: LinearCall) -> Support | None:
    count = call.batch * call.value_heads
    if count <= installation.GRID_LIMIT:
        return None
    return installation.too_many("batch x value heads", count, "split the batch or the heads")


def verdict_on_gradients(call: LinearCall, *, gated: bool) -> Support:
    """The verdict on a call that fla's kernels take. gated: some versions of Triton miscompile its
    backward."""
    if call.requires_grad and gated and _guard_is_lifted():
        reason = "fla's guard is lifted: this Triton miscompiles its gated backward on Hopper"
        return Support(True, reason, "check the gradients, or use triton >= 3.7.1", auto=False)
    if installation.is_interpreted(call.device):
        reason = "runs in Triton's interpreter, where fla's kernels fail as they are"
        return Support(True, reason, "make the substitutions that docs/triton-baselines.md tells", auto=False)
    return SUPPORTED


def supports_gla(call: LinearCall, variant: str | None = None) -> Support:
    refusal = refusal_of_call("chunk_gla", call, variant) or too_many_heads(call)
    return refusal or verdict_on_gradients(call, gated=False)


def supports_delta_rule(call: DeltaRuleCall, variant: str | None = None) -> Support:
    """Of KDA, too: its backward is not one that some versions of Triton miscompile."""
    found = [refusal_of_call(_op_of(call), call, variant)]
    if call.gate == "none":
        found.append(uneven_heads(call))
    found.append(_too_many_keys(call))
    gated = call.gate != "none" and not isinstance(call, KDACall)
    return together(*found) or too_many_heads(call) or verdict_on_gradients(call, gated=gated)


supports_kda = supports_delta_rule


def _too_many_keys(call: LinearCall) -> Support | None:
    if call.dim_qk <= _MOST_KEYS:
        return None
    return Support(False, f"K = {call.dim_qk}, fla takes {_MOST_KEYS}", "use the reference")


def load(kernel: str, call: LinearCall, variant: str | None = None) -> Support:
    return installation.load_module(FLA_OPS[_op_of(call)])


def _op_of(call: LinearCall) -> str:
    way = "fused_recurrent" if call.goes_by_token() else "chunk"
    if isinstance(call, KDACall):
        return f"{way}_kda"
    if isinstance(call, DeltaRuleCall):
        return f"{way}_delta_rule" if call.gate == "none" else f"{way}_gated_delta_rule"
    return f"{way}_gla" if call.gate == "channel" else f"{way}_simple_gla"


# o [B, T, HV, V] and the final state in fp32, None unless asked for, of tensors in the order of the calls


def simple_gla(call: LinearCall, variant: str | None, *tensors: Any) -> tuple[Tensor, MaybeTensor]:
    """fla's functions for simple GLA of q, k, v, g, g_gamma, initial_state, cu_seqlens, cu_seqlens_cpu."""
    q, k, v, g, g_gamma, *_ = tensors
    g_gamma = None if g_gamma is None else g_gamma.float()
    options = _options(call, tensors) | {"state_v_first": call.state_v_first}
    return call_fla(_op_of(call), call.device, q, k, v, g, g_gamma, **options)


def gla(call: LinearCall, variant: str | None, *tensors: Any) -> tuple[Tensor, MaybeTensor]:
    """fla's functions for GLA of q, k, v, g, initial_state, cu_seqlens, cu_seqlens_cpu."""
    options = _options(call, tensors, sized=False) | {"state_v_first": call.state_v_first}
    return call_fla(_op_of(call), call.device, *tensors[:4], **options)


def delta_rule(call: DeltaRuleCall, variant: str | None, *tensors: Any) -> tuple[Tensor, MaybeTensor]:
    """fla's functions for the delta rule, or the gated one, of q, k, v, g, beta, A_log, dt_bias,
    initial_state, cu_seqlens, cu_seqlens_cpu."""
    q, k, v, _, beta, *_ = tensors
    if call.gate == "none":
        options = _options(call, tensors) | {"use_qk_l2norm_in_kernel": call.qk_l2norm}
        return call_fla(_op_of(call), call.device, q, k, v, beta, **options)
    return call_fla(_op_of(call), call.device, q, k, v, **_gated_options(call, tensors))


def kda(call: KDACall, variant: str | None, *tensors: Any) -> Any:
    """fla's functions for KDA, of the tensors of `delta_rule`; with the states between chunks as a third
    result where the call wants them."""
    options = _gated_options(call, tensors)
    if call.gate == "raw":
        options["lower_bound"] = call.lower_bound
    operands: list[Any] = list(tensors[:3])
    if call.goes_by_token():
        # `undispatched` also takes off what would do it
        operands = [x.contiguous() for x in operands]
        options = {name: x.contiguous() if isinstance(x, Tensor) else x for name, x in options.items()}
    else:
        flags = ("safe_gate", "disable_recompute", "use_graph")
        options |= {name: getattr(call, name) for name in flags}
        options["return_intermediate_states"] = call.intermediate_states
    return call_fla(_op_of(call), call.device, *operands, **options)


def _gated_options(call: DeltaRuleCall, tensors: tuple[Any, ...]) -> dict[str, Any]:
    """What the functions of the gated delta rule and of KDA take beside q, k and v."""
    _, _, _, g, beta, a_log, dt_bias, *_ = tensors
    options = _options(call, tensors) | {
        "g": g,
        "beta": beta,
        "use_qk_l2norm_in_kernel": call.qk_l2norm,
        "use_beta_sigmoid_in_kernel": call.beta_sigmoid,
        "allow_neg_eigval": call.neg_eigval,
        "state_v_first": call.state_v_first,
    }
    if call.gate == "raw":
        options |= {"use_gate_in_kernel": True, "A_log": a_log, "dt_bias": dt_bias}
    return options


def _options(call: LinearCall, tensors: tuple[Any, ...], *, sized: bool = True) -> dict[str, Any]:
    """What fla's functions have in common beside operands and gates. sized: the chunkwise one has a
    chunk_size."""
    *_, initial_state, cu_seqlens, cu_seqlens_cpu = tensors
    options = {
        "scale": call.scale,
        "initial_state": None if initial_state is None else initial_state.float(),
        "output_final_state": call.output_final_state,
        "cu_seqlens": cu_seqlens,
    }
    if not call.goes_by_token():
        options |= {"cu_seqlens_cpu": cu_seqlens_cpu} | ({"chunk_size": call.chunk_size} if sized else {})
    return options


def call_fla(op: str, device: torch.device, *args: Any, **kwargs: Any) -> Any:
    """fla's own operator, one of FLA_OPS, with autocast off and on the device of the tensors."""
    function = undispatched(original(getattr(importlib.import_module(FLA_OPS[op]), op)))
    # its launches go to the current device
    current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with current, torch.autocast(device.type, enabled=False), on_its_own():
        return function(*args, **kwargs)


def guard_module() -> Any:
    """The module of fla that holds the flags of its guard."""
    return importlib.import_module("fla.ops.common.chunk_o")


def gated_backward_is_guarded() -> bool:
    """fla's own check, so that a lifted guard counts here too."""
    return _stands_on_hopper() and not guard_module().TRITON_ABOVE_3_7_1


def _guard_is_lifted() -> bool:
    """Whether someone has told fla that a Triton that miscompiles its gated backward does not."""
    version = installation.triton_version()
    if version is None or tuple(int(x) for x in re.findall(r"\d+", version)[:3]) >= _REPAIRED:
        return False
    return _stands_on_hopper() and bool(guard_module().TRITON_ABOVE_3_7_1)


def _stands_on_hopper() -> bool:
    """Whether GPU and Triton are ones that fla's guard is for, but for the Triton that is repaired."""
    guard = guard_module()
    return bool(guard.IS_NVIDIA_HOPPER and guard.TRITON_ABOVE_3_4_0)
