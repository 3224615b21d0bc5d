"""The delta rule on the ThunderKittens kernels: what the registry finds of it here.

The kernels' package beside this module, tfla_tk.backends.tk.delta_rule, has

    support     NATIVE                                 a frozenset of what the kernels make themselves of
                                                       "qk_l2norm", "beta_sigmoid" and "gate" (from A_log and
                                                       dt_bias); torch operations in front make the rest
                supports_delta_rule(call, variant)     as every family has it
                load(kernel, call, variant)            likewise
    launch      forward, prepare, backward             as `tfla_tk.ops.linear` says; core is a `DeltaRuleCore`
                                                       whose flags and A_log are set for what is native alone

Neither may import tfla_tk.ops or this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tfla_tk.backends.tk.delta_rule.support import NATIVE, load, supports_delta_rule
from tfla_tk.calls.delta_rule import DeltaRuleCall
from tfla_tk.core.layout import MaybeTensor
from tfla_tk.core.memo import is_plain
from tfla_tk.ops import delta_rule as ops

__all__ = ["delta_rule", "load", "prepare_delta_rule", "supports_delta_rule"]


def delta_rule(call: DeltaRuleCall, variant: str | None, *tensors: Any) -> tuple[Tensor, MaybeTensor]:
    """o [B, T, HV, V] and the final state, None unless asked for.

    Args:
        tensors: q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu.
    """
    return ops.delta_rule(call, NATIVE, tensors)


def prepare_delta_rule(
    call: DeltaRuleCall, variant: str | None, tensors: tuple[Any, ...]
) -> Callable[..., Any] | None:
    """`delta_rule` without the op, for plain eager calls with tensors like these."""
    if not is_plain(tensors):
        return None
    return ops.prepare_delta_rule(call, NATIVE, tensors)
