"""What the README and the notes point at exists: files and headings behind links, tests named in the text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ +(.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def dead_links(page: Path) -> list[str]:
    """The relative links of a page that lead to no file or to no heading."""
    found = []
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        is_url = "://" in link
        if not is_url and not (target.exists() and (not anchor or anchor in anchors(target))):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_dead_link(page: Path) -> None:
    assert dead_links(page) == []


def test_dead_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b`, c\n```\n# none\n```\n[1](page.md) [2](gone.md) [3](#a-b-c) [4](page.md#none) [5](https://x.y)\n"
    )
    assert dead_links(page) == ["gone.md", "page.md#none"]


def test_tests_named_in_the_notes_exist() -> None:
    files = list((ROOT / "tests").rglob("*.py"))
    tests = {
        name for path in files for name in re.findall(r"^ *def (test_\w+)\(", path.read_text(), re.MULTILINE)
    }
    tests |= {path.stem for path in files}
    pages = [page for page in PAGES if page.parent.name != "log"]
    named = {name for page in pages for name in re.findall(r"\btest_\w+", page.read_text(encoding="utf-8"))}
    assert named
    assert named <= tests
