"""The operators in [B, T, H, D] on the ThunderKittens kernels: what the registry finds of them here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from tfla_tk.backends.tk import recurrent
from tfla_tk.backends.tk.scalar_gate import support
from tfla_tk.calls.linear import LinearCall
from tfla_tk.core.layout import MaybeTensor
from tfla_tk.core.memo import is_plain
from tfla_tk.core.support import Support
from tfla_tk.ops import recurrent as recurrent_ops
from tfla_tk.ops import simple_gla as ops

__all__ = ["load", "prepare_simple_gla", "simple_gla", "supports_simple_gla"]


def supports_simple_gla(call: LinearCall, variant: str | None = None) -> Support:
    """Whether the kernels serve a call; ValueError for a variant."""
    if recurrent.serves(call):
        return recurrent.supports(call, variant)
    return support.supports_simple_gla(call, variant)


def load(kernel: str, call: LinearCall, variant: str | None = None) -> Support:
    """Load the kernels of a call that is supported, for its gradients too."""
    return recurrent.load(call) if recurrent.serves(call) else support.load(kernel, call, variant)


def simple_gla(call: LinearCall, variant: str | None, *tensors: Any) -> tuple[Tensor, MaybeTensor]:
    """o [B, T, HV, V] and the final state, None unless asked for.

    Args:
        tensors: q, k, v, g, g_gamma, initial_state, cu_seqlens, cu_seqlens_cpu.
    """
    if recurrent.serves(call):
        return _step(call, *tensors)
    return ops.simple_gla(call, *tensors)


def prepare_simple_gla(
    call: LinearCall, variant: str | None, tensors: tuple[Any, ...]
) -> Callable[..., Any] | None:
    """`simple_gla` without the op, for plain eager calls with tensors like these."""
    if not is_plain(tensors):
        return None
    if recurrent.serves(call):
        return partial(_step, call, direct=True)
    return ops.prepare_simple_gla(call, tensors)


def _step(call: LinearCall, *tensors: Any, direct: bool = False) -> tuple[Tensor, MaybeTensor]:
    q, k, v, g, g_gamma, state, _, state_indices = tensors
    core = recurrent_ops.core_of(call, q, k, v, g_gamma if g is None else g, initial_state=state)
    return recurrent_ops.serve(call, core, state_indices, direct=direct)
