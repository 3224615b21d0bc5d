"""The order of the tests: compilers take the most time, so that each worker process begins with its share."""

from __future__ import annotations

import math

import pytest

from .summary import instructions_on_record

RECORDING = "test_what_is_compiled_is_on_record["


def compile_first(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """The order for so many worker processes, each of which gets an equal part of the list at first.

    A part begins with compilations, the longest first, so that none of them is left alone at the end; tests
    that look at what was compiled stand at the end of the list.
    """
    lengths = instructions_on_record()
    compiling, looking, others = list[pytest.Item](), list[pytest.Item](), list[pytest.Item]()
    for item in items:
        if _instance(item) is not None:
            compiling.append(item)
        else:
            (looking if "compiler" in getattr(item, "fixturenames", ()) else others).append(item)
    # a new one may be the longest
    compiling.sort(key=lambda item: lengths.get(str(_instance(item)), math.inf), reverse=True)
    others += looking
    found: list[pytest.Item] = []
    for worker in range(workers):
        share = compiling[worker::workers]
        size = (len(items) - len(found)) // (workers - worker)
        room = max(0, size - len(share))
        found += [*share, *others[:room]]
        del others[:room]
    return found + others


def _instance(item: pytest.Item) -> str | None:
    """Which one a test compiles for others."""
    if item.name.startswith(RECORDING):
        name: str = item.callspec.params["instance"].name  # type: ignore[attr-defined]
        return name
    return None
