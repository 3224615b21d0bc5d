"""Puts something else in the place of compiled modules."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from tfla_tk import build


def launch_instead(
    monkeypatch: pytest.MonkeyPatch, backend: ModuleType, modules: Any, stream: int = 7
) -> None:
    """Have `backend` launch what `modules.load` returns, on this stream of a GPU of 132 multiprocessors."""
    monkeypatch.setattr(build, "load", modules.load)
    monkeypatch.setattr(backend, "_multiprocessors", lambda device: 132)
    monkeypatch.setattr(backend, "_current_stream", lambda device: stream)
