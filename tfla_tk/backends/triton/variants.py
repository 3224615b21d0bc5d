"""What of the Triton kernels is worth timing."""

from __future__ import annotations

from tfla_tk.backends.triton import mlstm_kernels
from tfla_tk.backends.triton.fla import FLA_OPS
from tfla_tk.core.checks import fail

_MLSTM = ("mlstm_chunkwise", "mlstm_siging_chunkwise")


def variants(op: str) -> list[str]:
    """The variants of an operator that are worth timing, as `backend=` takes them.

    Args:
        op: "mlstm_chunkwise", "mlstm_siging_chunkwise" or one of FLA_OPS.
    """
    if op in FLA_OPS:
        return ["triton:fla"]
    if op not in _MLSTM:
        fail("op", f"one of {', '.join((*_MLSTM, *FLA_OPS))}", repr(op))
    return mlstm_kernels.variants(op)
