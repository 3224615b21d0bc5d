"""Gated linear attention on the ThunderKittens kernels: what the registry finds of it here.

The kernels' package beside this module, tfla_tk.backends.tk.channel_gate, has

    support     supports_gla(call, variant)         as every family has it; call is a `LinearCall`
                load(kernel, call, variant)         likewise
    launch      forward, prepare, backward          as `tfla_tk.ops.linear` says; core is a `GLACore`

Neither may import tfla_tk.ops or this module.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from tfla_tk.backends.tk import recurrent
from tfla_tk.backends.tk.channel_gate import support
from tfla_tk.calls.linear import LinearCall
from tfla_tk.core.layout import MaybeTensor
from tfla_tk.core.memo import is_plain
from tfla_tk.core.support import Support
from tfla_tk.ops import gla as ops
from tfla_tk.ops import recurrent as recurrent_ops

__all__ = ["gla", "load", "prepare_gla", "supports_gla"]


def supports_gla(call: LinearCall, variant: str | None = None) -> Support:
    """Whether the kernels serve a call; ValueError for a variant."""
    return (
        recurrent.supports(call, variant) if recurrent.serves(call) else support.supports_gla(call, variant)
    )


def load(kernel: str, call: LinearCall, variant: str | None = None) -> Support:
    """Load the kernels of a call that is supported, for its gradients too."""
    return recurrent.load(call) if recurrent.serves(call) else support.load(kernel, call, variant)


def gla(call: LinearCall, variant: str | None, *tensors: Any) -> tuple[Tensor, MaybeTensor]:
    """o [B, T, H, V] and the final state, None unless asked for.

    Args:
        tensors: q, k, v, g, initial_state, cu_seqlens, cu_seqlens_cpu.
    """
    if recurrent.serves(call):
        return _step(call, *tensors)
    return ops.gla(call, tensors)


def prepare_gla(call: LinearCall, variant: str | None, tensors: tuple[Any, ...]) -> Callable[..., Any] | None:
    """`gla` without the op, for plain eager calls with tensors like these."""
    if not is_plain(tensors):
        return None
    return partial(_step, call, direct=True) if recurrent.serves(call) else ops.prepare_gla(call, tensors)


def _step(call: LinearCall, *tensors: Any, direct: bool = False) -> tuple[Tensor, MaybeTensor]:
    q, k, v, g, state, _, state_indices = tensors
    core = recurrent_ops.core_of(call, q, k, v, g, initial_state=state)
    return recurrent_ops.serve(call, core, state_indices, direct=direct)
