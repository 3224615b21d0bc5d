"""Calls of gated linear attention: the call of its kernels."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tfla_tk.core.layout import MaybeTensor


class GlaCore(NamedTuple):
    """A call of the kernels; the arguments of the registered op tfla_tk::gla_fwd in their order.

    Attributes:
        q, k: [B, T, H, K]. v: [B, T, H, V], q's dtype. Any strides.
        g: [B, T, H, K] log decay per channel, fp32 or of 16 bits (fp64 for fp64 q), any strides.
        initial_state: [N, H, K, V] in fp32 (fp64 for fp64 q), any strides; None: zeros.
        cu_seqlens: [N + 1] offsets of sequences packed in a batch of one, int32 or int64; not read on the
            host.
        scale: of q.
        schedule: the variant that the caller has named, or "auto".
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    initial_state: MaybeTensor
    cu_seqlens: MaybeTensor
    scale: float
    schedule: str
