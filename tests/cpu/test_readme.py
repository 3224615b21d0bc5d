"""The README: every block of Python runs by itself, and so do those of two notes; images."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ..conftest import has_hopper

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
NOTES = [(ROOT / f"docs/{name}.md").read_text(encoding="utf-8") for name in ("scalar-decay", "xlstm")]
BLOCKS, OF_NOTES = (
    re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL) for text in (TEXT, "".join(NOTES))
)
PACKAGES = ("fla", "transformers", "xlstm")  # that a block may need

# what takes seconds to import, and is the same before any block
IMPORTS = """
import contextlib, importlib
for name in ("torch", "fla", "transformers.generation.utils"):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
"""


@pytest.mark.slow
def test_every_block_runs_by_itself(in_forks: Callable[..., dict[str, str]]) -> None:
    """In a process of its own."""
    assert len(OF_NOTES) == len(NOTES)
    missing = {package for package in PACKAGES if importlib.util.find_spec(package) is None}
    every = {str(n): block for n, block in enumerate(BLOCKS + OF_NOTES)}
    scripts = {n: block for n, block in every.items() if not missing & needed(block)}
    for n, printed in in_forks(IMPORTS, scripts).items():
        assert printed
        if "which(" in scripts[n] or "last_path(" in scripts[n]:  # what served it
            served = re.search(r"backend='(\w+)'|^(?:[\d.]+ )?(\w+)$", printed, re.MULTILINE)
            assert served is not None and (served[1] or served[2]) == ("tk" if has_hopper() else "reference")
    if len(scripts) < len(every):
        pytest.skip(f"not installed: {', '.join(sorted(missing))}")


def needed(block: str) -> set[str]:
    """Packages that a block imports."""
    named = {name for name in PACKAGES if re.search(rf"^(from|import) {name}\b", block, re.MULTILINE)}
    return named | ({"fla"} if "tfla_fla" in block else set())


def test_every_family_and_drop_in_has_a_block() -> None:
    code = "\n".join(BLOCKS)
    used = ("mlstm_chunkwise", "mlstm_step", "chunk_simple_gla", "chunk_gated_delta_rule", "chunk_gla")
    for name in (*used, "tfla_fla.accelerate()", "Qwen3NextForCausalLM", "xlstm import replace"):
        assert name in code
    assert len(BLOCKS) >= 7


def test_it_is_short_and_the_drop_in_comes_early() -> None:
    lines = TEXT.splitlines()
    assert len(lines) <= 200 and lines.index("## Drop-in") < 90


def test_every_image_is_shown() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    shown = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    assert [image.name for image in (ROOT / "docs").glob("*.png") if image.name not in shown] == []
