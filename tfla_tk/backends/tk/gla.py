"""Gated linear attention on the ThunderKittens kernels: what the registry finds of it here.

The kernels are a package beside this module, tfla_tk.backends.tk.channel_gate, with

    support     supports_gla(call, variant)         as every family has it; call is a `LinearCall`
                load(kernel, call, variant)         likewise
    launch      forward, backward                   as `tfla_tk.ops.linear` says; core is a `GLACore`

Neither may import tfla_tk.ops or this module. Until the package is there, no call is served here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from tfla_tk.calls.linear import LinearCall
from tfla_tk.core.installed import find_package
from tfla_tk.core.layout import MaybeTensor
from tfla_tk.core.memo import is_plain
from tfla_tk.core.support import SUPPORTED, Support
from tfla_tk.ops import gla as ops

_SUPPORT = f"{ops.KERNELS.rpartition('.')[0]}.support"
# looked up once at import, so that torch.compile sees a constant
_family: Any = importlib.import_module(_SUPPORT) if find_package(_SUPPORT.rpartition(".")[0]) else None
_MISSING = Support(False, "this version has no kernels for GLA", "use 'triton' or 'reference'")


def supports_gla(call: LinearCall, variant: str | None = None) -> Support:
    """Whether the kernels of gated linear attention serve a call."""
    if _family is None:
        return _MISSING
    verdict: Support = _family.supports_gla(call, variant)
    return verdict


def load(kernel: str, call: LinearCall, variant: str | None = None) -> Support:
    """Load the kernels of a call that is supported, for its gradients too."""
    verdict: Support = SUPPORTED if _family is None else _family.load(kernel, call, variant)
    return verdict


def gla(call: LinearCall, variant: str | None, *tensors: Any) -> tuple[Tensor, MaybeTensor]:
    """o [B, T, H, V] and the final state, None unless asked for.

    Args:
        tensors: q, k, v, g, initial_state, cu_seqlens, cu_seqlens_cpu.
    """
    return ops.gla(call, variant or "auto", tensors)


def prepare_gla(call: LinearCall, variant: str | None, tensors: tuple[Any, ...]) -> Callable[..., Any] | None:
    """`gla` without the op, for plain eager calls with tensors like these."""
    return ops.prepare_gla(call, variant or "auto", tensors) if is_plain(tensors) else None
