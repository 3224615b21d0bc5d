"""The order of the tests: compilers take the most time, so that each worker process begins with its share."""

from __future__ import annotations

import math

import pytest

from .summary import instructions_on_record

RECORDING = "test_what_is_compiled_is_on_record["


def compile_first(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """The order for so many worker processes, each of which gets an equal part of the list at first.

    A part begins with compilations, the longest first, so that none of them is left alone at the end; tests
    that compile launchers stand at the end of the list.
    """
    lengths = instructions_on_record()
    compiling, launching, others = list[pytest.Item](), list[pytest.Item](), list[pytest.Item]()
    for item in items:
        if item.name.startswith(RECORDING):
            compiling.append(item)
        else:
            (launching if "compiler" in getattr(item, "fixturenames", ()) else others).append(item)
    # a new one may be the longest
    compiling.sort(key=lambda item: sum(lengths.get(x, math.inf) for x in _names(item)), reverse=True)
    others += launching
    found: list[pytest.Item] = []
    for worker in range(workers):
        share = compiling[worker::workers]
        size = (len(items) - len(found)) // (workers - worker)
        room = max(0, size - len(share))
        found += [*share, *others[:room]]
        del others[:room]
    return found + others


def _names(item: pytest.Item) -> list[str]:
    """Of the instances that a test compiles."""
    return [x.name for x in item.callspec.params["instances"]]  # type: ignore[attr-defined]
