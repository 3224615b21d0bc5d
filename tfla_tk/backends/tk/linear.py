"""The operators in [B, T, H, D] on the ThunderKittens kernels: what the registry finds of them here.

The kernels of a family are a package beside this module: scalar_gate of simple GLA, delta_rule, channel_gate
of GLA. Its `support` says which calls they serve, and loads them; the family's ops find what launches them.
"""

from __future__ import annotations

from tfla_tk.backends.tk import device
from tfla_tk.backends.tk.channel_gate import support as gla_support
from tfla_tk.backends.tk.channel_gate.support import supports_gla
from tfla_tk.backends.tk.delta_rule import support as delta_rule_support
from tfla_tk.backends.tk.delta_rule.support import supports_delta_rule
from tfla_tk.backends.tk.scalar_gate import support as simple_gla_support
from tfla_tk.backends.tk.scalar_gate.support import supports_simple_gla
from tfla_tk.calls.delta_rule import DeltaRuleCall
from tfla_tk.calls.linear import LinearCall
from tfla_tk.core.support import SUPPORTED, Support
from tfla_tk.ops import delta_rule as delta_rule_ops
from tfla_tk.ops import gla as gla_ops
from tfla_tk.ops import simple_gla as simple_gla_ops

__all__ = ["load", "supports_delta_rule", "supports_gla", "supports_simple_gla"]

simple_gla, prepare_simple_gla = simple_gla_ops.ops.serve, simple_gla_ops.ops.prepare
delta_rule, prepare_delta_rule = delta_rule_ops.ops.serve, delta_rule_ops.ops.prepare
gla, prepare_gla = gla_ops.ops.serve, gla_ops.ops.prepare


def load(kernel: str, call: LinearCall, variant: str | None = None) -> Support:
    """Load the kernels of a call that is supported, for its gradients too, and compile what the cache lacks.

    Returns:
        Whether the call can be served.

    Raises:
        CaptureError: something would have to be compiled while a CUDA graph is being captured.
    """
    if call.is_empty:
        return SUPPORTED
    if isinstance(call, DeltaRuleCall):
        return device.load(*delta_rule_support.kernels_for(call))
    if kernel == "gla":
        return device.load(*gla_support.kernels_for(call))
    return device.load(*simple_gla_support.kernels_for(kernel, call))
