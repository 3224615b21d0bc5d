"""What the families of the reference backend have in common."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from tfla_tk.calls.linear import LinearCall
from tfla_tk.core.checks import fail, shown_name
from tfla_tk.core.layout import FORMS
from tfla_tk.core.support import SUPPORTED, Support


def supports_form(variant: str | None) -> Support:
    """Everything is supported; ValueError for a variant that is no form."""
    if variant is not None and variant not in FORMS:
        known = [f"reference:{name}" for name in FORMS]
        fail("backend", " or ".join(map(repr, known)), shown_name(f"reference:{variant}", known))
    return SUPPORTED


def has_no_values(cu_seqlens: Tensor | None) -> bool:
    """Whether the offsets of packed sequences cannot be read now: a registered op reads them when it runs."""
    return cu_seqlens is not None and (torch.compiler.is_compiling() or is_fake(cu_seqlens))


def form_of(call: LinearCall, variant: str | None) -> str:
    """The form of the reference that serves a call."""
    return variant or ("recurrent" if call.goes_by_token() else "chunkwise")
