"""docs/api.md: made of the docstrings, and as they are now."""

from __future__ import annotations

from pathlib import Path

from tfla_tk.bench.__main__ import main

PAGE = Path(__file__).parents[3] / "docs/api.md"


def test_the_page_is_what_the_docstrings_make(tmp_path: Path) -> None:
    """`make api` writes it."""
    assert main(["api", str(tmp_path / "api.md")]) == 0
    assert (tmp_path / "api.md").read_text() == PAGE.read_text()
