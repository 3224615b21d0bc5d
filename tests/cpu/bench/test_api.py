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


def test_the_same_words_about_an_argument_stand_once() -> None:
    told: dict[str, str] = {}
    first = "First.\n\n**Args**\n\n- `q, k`: of one dtype.\n- `scale`: of q."
    assert api.once("first", first, told) == first
    second = "Second.\n\n**Args**\n\n- `scale`: of q.\n- `v`: values.\n- `q, k`: as in `first`."
    assert api.once("second", second, told) == (
        "Second.\n\n**Args**\n\n- `v`: values.\n- `scale, q, k`: as in `first`."
    )
