"""What the kernels of KDA over whole sequences support."""

from __future__ import annotations

from tfla_tk.backends.tk import kda, refusals
from tfla_tk.calls.kda import KDACall
from tfla_tk.core.support import Support


def supports_kda(call: KDACall, variant: str | None = None) -> Support:
    """Whether the kernels serve a call; ValueError for a variant."""
    refusals.check_variant(variant)
    return kda.MISSING
