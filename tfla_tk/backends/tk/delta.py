"""The delta rule on the ThunderKittens kernels: what the registry finds of it here.

The kernels are a package beside this module, tfla_tk.backends.tk.delta_rule, with

    support     NATIVE                                 a frozenset of what the kernels make themselves of
                                                       "qk_l2norm", "beta_sigmoid" and "gate" (from A_log and
                                                       dt_bias); torch operations in front make the rest
                supports_delta_rule(call, variant)     as every family has it
                load(kernel, call, variant)            likewise
    launch      forward, backward                      as `tfla_tk.ops.linear` says; core is a `DeltaRuleCore`
                                                       whose flags and A_log are set for what is native alone

Neither may import tfla_tk.ops or this module. Until the package is there, no call is served here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from tfla_tk.calls.delta_rule import DeltaRuleCall
from tfla_tk.core.installed import find_package
from tfla_tk.core.layout import MaybeTensor
from tfla_tk.core.memo import is_plain
from tfla_tk.core.support import SUPPORTED, Support
from tfla_tk.ops import delta_rule as ops

_SUPPORT = f"{ops.KERNELS.rpartition('.')[0]}.support"
# looked up once at import, so that torch.compile sees a constant
_family: Any = importlib.import_module(_SUPPORT) if find_package(_SUPPORT.rpartition(".")[0]) else None
_native: frozenset[str] = frozenset() if _family is None else _family.NATIVE
_MISSING = Support(False, "this version has no kernels for the delta rule", "use 'triton' or 'reference'")


def supports_delta_rule(call: DeltaRuleCall, variant: str | None = None) -> Support:
    """Whether the kernels of the delta rule serve a call."""
    if _family is None:
        return _MISSING
    verdict: Support = _family.supports_delta_rule(call, variant)
    return verdict


def load(kernel: str, call: DeltaRuleCall, variant: str | None = None) -> Support:
    """Load the kernels of a call that is supported, for its gradients too."""
    verdict: Support = SUPPORTED if _family is None else _family.load(kernel, call, variant)
    return verdict


def delta_rule(call: DeltaRuleCall, variant: str | None, *tensors: Any) -> tuple[Tensor, MaybeTensor]:
    """o [B, T, HV, V] and the final state, None unless asked for.

    Args:
        tensors: q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu.
    """
    return ops.delta_rule(call, variant or "auto", _native, tensors)


def prepare_delta_rule(
    call: DeltaRuleCall, variant: str | None, tensors: tuple[Any, ...]
) -> Callable[..., Any] | None:
    """`delta_rule` without the op, for plain eager calls with tensors like these."""
    if not is_plain(tensors):
        return None
    return ops.prepare_delta_rule(call, variant or "auto", _native, tensors)
