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
from functools import partial
from typing import Any

from torch import Tensor

from tfla_tk.backends.tk import recurrent
from tfla_tk.backends.tk.delta_rule import support
from tfla_tk.backends.tk.delta_rule.support import NATIVE
from tfla_tk.calls.delta_rule import DeltaRuleCall
from tfla_tk.core.layout import MaybeTensor
from tfla_tk.core.memo import is_plain
from tfla_tk.core.support import Support
from tfla_tk.ops import delta_rule as ops
from tfla_tk.ops import recurrent as recurrent_ops

__all__ = ["delta_rule", "load", "prepare_delta_rule", "supports_delta_rule"]


def supports_delta_rule(call: DeltaRuleCall, variant: str | None = None) -> Support:
    """Whether the kernels serve a call; ValueError for a variant."""
    if recurrent.serves(call):
        return recurrent.supports(call, variant)
    return support.supports_delta_rule(call, variant)


def load(kernel: str, call: DeltaRuleCall, variant: str | None = None) -> Support:
    """Load the kernels of a call that is supported, for its gradients too."""
    return recurrent.load(call) if recurrent.serves(call) else support.load(kernel, call, variant)


def delta_rule(call: DeltaRuleCall, variant: str | None, *tensors: Any) -> tuple[Tensor, MaybeTensor]:
    """o [B, T, HV, V] and the final state, None unless asked for.

    Args:
        tensors: q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu.
    """
    if recurrent.serves(call):
        return _step(call, *tensors)
    return ops.delta_rule(call, NATIVE, tensors)


def prepare_delta_rule(
    call: DeltaRuleCall, variant: str | None, tensors: tuple[Any, ...]
) -> Callable[..., Any] | None:
    """`delta_rule` without the op, for plain eager calls with tensors like these."""
    if not is_plain(tensors):
        return None
    if recurrent.serves(call):
        return partial(_step, call, direct=True)
    return ops.prepare_delta_rule(call, NATIVE, tensors)


def _step(call: DeltaRuleCall, *tensors: Any, direct: bool = False) -> tuple[Tensor, MaybeTensor]:
    *given, _, state_indices = tensors
    return recurrent_ops.serve(call, recurrent_ops.core_of(call, *given), state_indices, direct=direct)
