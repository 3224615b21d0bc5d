"""The README: every block of Python runs by itself, and what is generated is what would be generated now."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ..conftest import has_hopper

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
PACKAGES = ("fla", "transformers", "xlstm")  # that a block may need


def names_of(block: str) -> str:
    """What a block is about."""
    found = re.findall(r"tfla_tk\.(chunk_\w+|mlstm_\w+)\(|^from ([\w.]+) import", block, re.MULTILINE)
    return next((call or module for call, module in found), "block")


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS, ids=names_of)
def test_every_block_runs_by_itself(block: str, tmp_path: Path) -> None:
    for package in PACKAGES:
        if re.search(rf"^(from|import) {package}\b", block, re.MULTILINE) or (
            package == "fla" and "tfla_fla" in block
        ):
            pytest.importorskip(package, reason=f"{package} is not installed")
    script = tmp_path / "block.py"
    script.write_text(block)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    if "which(" in block or "last_path(" in block:  # what served it
        served = re.search(r"backend='(\w+)'|^(?:[\d.]+ )?(\w+)$", done.stdout, re.MULTILINE)
        assert served is not None and (served[1] or served[2]) == ("tk" if has_hopper() else "reference")


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
