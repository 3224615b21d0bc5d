"""Gated linear attention on the ThunderKittens kernels: what the registry finds of it here.

The kernels' package beside this module, tfla_tk.backends.tk.channel_gate, has

    support     supports_gla(call, variant)         as every family has it; call is a `LinearCall`
                load(kernel, call, variant)         likewise
    launch      forward, prepare, backward          as `tfla_tk.ops.linear` says; core is a `GLACore`

Neither may import tfla_tk.ops or this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tfla_tk.backends.tk.channel_gate.support import load, supports_gla
from tfla_tk.calls.linear import LinearCall
from tfla_tk.core.layout import MaybeTensor
from tfla_tk.core.memo import is_plain
from tfla_tk.ops import gla as ops

__all__ = ["gla", "load", "prepare_gla", "supports_gla"]


def gla(call: LinearCall, variant: str | None, *tensors: Any) -> tuple[Tensor, MaybeTensor]:
    """o [B, T, H, V] and the final state, None unless asked for.

    Args:
        tensors: q, k, v, g, initial_state, cu_seqlens, cu_seqlens_cpu.
    """
    return ops.gla(call, tensors)


def prepare_gla(call: LinearCall, variant: str | None, tensors: tuple[Any, ...]) -> Callable[..., Any] | None:
    """`gla` without the op, for plain eager calls with tensors like these."""
    return ops.prepare_gla(call, tensors) if is_plain(tensors) else None
