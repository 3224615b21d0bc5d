"""docs/api.md: made of the docstrings, and as they are now."""

from __future__ import annotations

from pathlib import Path

from tfla_tk.bench import api
from tfla_tk.bench.__main__ import main

PAGE = Path(__file__).parents[3] / "docs/api.md"


def test_the_page_is_what_the_docstrings_make(tmp_path: Path) -> None:
    """`make api` writes it."""
    assert main(["api", str(tmp_path / "api.md")]) == 0
    assert (tmp_path / "api.md").read_text() == PAGE.read_text()


def test_arguments_and_sections_of_a_docstring() -> None:
    text = api.markdown(
        "First line.\n\nEquations::\n\n    a = b\n\n    c = d\n\nSee :func:`f` and ``x``.\n\n"
        "Args:\n    q, k: of one\n        dtype: any.\n    v: values.\n\n"
        "Returns:\n    o [B, T]\n    in fp32.\n"
    )
    assert text == (
        "First line.\n\nEquations:\n\n```text\na = b\n\nc = d\n```\n\nSee `f` and `x`.\n\n"
        "**Args**\n\n- `q, k`: of one dtype: any.\n- `v`: values.\n\n**Returns**\n\no [B, T] in fp32."
    )
