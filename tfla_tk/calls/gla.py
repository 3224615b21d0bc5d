"""Calls of gated linear attention: the checks of their arguments, and the call of its kernels."""

from typing import Any, NamedTuple

from torch import Tensor

from tfla_tk.calls.linear import LinearCall, check_frame, check_operands
from tfla_tk.core import transforms
from tfla_tk.core.checks import check_device, check_shape, check_tensor
from tfla_tk.core.layout import MaybeTensor


class GLACore(NamedTuple):
    """A call of the kernels; the arguments of the registered op tfla_tk::gla_fwd in their order. g: [B, T,
    H, K] log decay, fp32 or of 16 bits (fp64 for fp64 q), any strides. others: as of `SimpleGLACore`, HV =
    H."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    initial_state: MaybeTensor
    cu_seqlens: MaybeTensor
    scale: float
    batch_invariant: bool


def check_gla(
    q: Any, k: Any, v: Any, g: Any, initial_state: Any, *, gate: str = "g", **options: Any
) -> LinearCall:
    """Check one call of gated linear attention and describe it; its gate is "channel". g: [B, T, H, K],
    and its name in messages. v has the heads of q. options: as of `check_frame`."""
    operands = check_operands(q, k, v, grouped=False)
    check_tensor(gate, g, 4, "[B, T, H, K]")
    check_shape(gate, g, tuple(q.shape), "[B, T, H, K] of q")
    check_device(gate, g, q.device)
    frame = check_frame(q, operands, initial_state, v_first_in="chunk_gla", heads="H", **options)
    return LinearCall(**frame, **transforms.of_call((q, k, v, g, initial_state), ()), gate="channel")
