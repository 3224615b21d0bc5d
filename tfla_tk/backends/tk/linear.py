"""The operators in [B, T, H, D] on the ThunderKittens kernels: what the registry finds of them here.

The kernels of a family are a package beside this module: scalar_gate of simple GLA, delta_rule, channel_gate
of GLA, kda. Its `support` says which calls they serve, and loads them; the family's ops find what launches
them.
A few tokens without gradients are served by the decoding kernels of all families (recurrent.py).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tfla_tk.backends.tk import device, recurrent
from tfla_tk.backends.tk.channel_gate import call as gla_support
from tfla_tk.backends.tk.delta_rule import support as delta_rule_support
from tfla_tk.backends.tk.kda import call as kda_support
from tfla_tk.backends.tk.scalar_gate import support as simple_gla_support
from tfla_tk.calls.delta_rule import DeltaRuleCall, KDACall
from tfla_tk.calls.linear import LinearCall
from tfla_tk.core.memo import is_plain
from tfla_tk.core.support import SUPPORTED, Support
from tfla_tk.ops import delta_rule as delta_rule_ops
from tfla_tk.ops import recurrent as steps
from tfla_tk.ops import simple_gla as simple_gla_ops
from tfla_tk.ops.linear import LinearOps, Result


def _with_steps(
    kernel: str, supports: Callable[..., Support], chunkwise: LinearOps
) -> tuple[Callable[..., Support], Callable[..., Result], Callable[..., Any]]:
    """What the registry wants of a family, supports_<kernel>, <kernel> and prepare_<kernel>, of that of its
    chunk kernels."""

    def supports_either(call: LinearCall, variant: str | None = None) -> Support:
        return recurrent.supports(call, variant) if recurrent.serves(call) else supports(call, variant)

    def serve(call: LinearCall, variant: str | None, *tensors: Any) -> Result:
        if recurrent.serves(call):
            return steps.serve(kernel, call, *tensors)
        return chunkwise.serve(call, variant, *tensors)

    def prepare(call: LinearCall, variant: str | None, tensors: Sequence[Any]) -> Any:
        if not recurrent.serves(call):
            return chunkwise.prepare(call, variant, tensors)
        return partial(steps.serve, kernel, call, direct=True) if is_plain(tuple(tensors)) else None

    return supports_either, serve, prepare


supports_simple_gla, simple_gla, prepare_simple_gla = _with_steps(
    "simple_gla", simple_gla_support.supports_simple_gla, simple_gla_ops.ops
)
supports_delta_rule, delta_rule, prepare_delta_rule = _with_steps(
    "delta_rule", delta_rule_support.supports_delta_rule, delta_rule_ops.ops
)
supports_gla, gla, prepare_gla = _with_steps("gla", gla_support.supports_gla, simple_gla_ops.gla)
supports_kda, kda, prepare_kda = _with_steps("kda", kda_support.supports_kda, delta_rule_ops.kda)


def load(kernel: str, call: LinearCall, variant: str | None = None) -> Support:
    if call.is_empty:
        return SUPPORTED
    if recurrent.serves(call):
        return recurrent.load(call)
    if isinstance(call, KDACall):
        return kda_support.load(call)
    if isinstance(call, DeltaRuleCall):
        return device.load(*delta_rule_support.kernels_for(call))
    if kernel == "gla":
        return device.load(*gla_support.kernels_for(call))
    return device.load(*simple_gla_support.kernels_for(kernel, call))
