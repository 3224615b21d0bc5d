"""The operators in [B, T, H, D] on the ThunderKittens kernels: what the registry finds of them here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tfla_tk.backends.tk.scalar_gate.support import load, supports_simple_gla
from tfla_tk.calls.linear import LinearCall
from tfla_tk.core.layout import MaybeTensor
from tfla_tk.core.memo import is_plain
from tfla_tk.ops import simple_gla as ops

__all__ = ["load", "prepare_simple_gla", "simple_gla", "supports_simple_gla"]


def simple_gla(call: LinearCall, variant: str | None, *tensors: Any) -> tuple[Tensor, MaybeTensor]:
    """o [B, T, HV, V] and the final state, None unless asked for.

    Args:
        tensors: q, k, v, g, g_gamma, initial_state, cu_seqlens, cu_seqlens_cpu.
    """
    return ops.simple_gla(call, tensors)


def prepare_simple_gla(
    call: LinearCall, variant: str | None, tensors: tuple[Any, ...]
) -> Callable[..., Any] | None:
    """`simple_gla` without the op, for plain eager calls with tensors like these."""
    return ops.prepare_simple_gla(call, tensors) if is_plain(tensors) else None
