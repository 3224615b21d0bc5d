"""Few combinations of parameters in the place of all: any two values of two of them meet in one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def pairwise(
    *options: Sequence[Any], where: Callable[..., bool] = lambda *values: True
) -> list[tuple[Any, ...]]:
    """Combinations of one value of each option.

    Args:
        where: which combinations there may be.
    """
    candidates = [values for values in itertools.product(*options) if where(*values)]
    return _cover(candidates, lambda values: [repr(value) for value in values])


def in_pairs(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Of each test what `pairwise` takes of its parameters; what one `parametrize` names stays together."""

    def name(item: pytest.Item) -> str:
        return item.nodeid.partition("[")[0]

    tests = itertools.groupby(sorted(items, key=name), name)
    kept = {item for _, cases in tests for item in _cover(list(cases), _values_of)}
    return [item for item in items if item in kept]


def _values_of(item: pytest.Item) -> list[str]:
    """The name of a value of every `parametrize` and of every fixture with parameters."""
    return [*item.callspec._idlist] if hasattr(item, "callspec") else []


def _cover(candidates: list[T], values_of: Callable[[T], list[str]]) -> list[T]:
    """Few of them, with any two values of two places that any of them has."""
    if len(candidates) == 1:
        return candidates
    numbers: dict[Any, int] = {}
    pairs = []  # of each candidate, as the bits of a number
    for candidate in candidates:
        own = itertools.combinations(enumerate(values_of(candidate)), 2)
        pairs.append(sum(1 << numbers.setdefault(pair, len(numbers)) for pair in own))
    if not any(pairs):
        return candidates
    left, found = (1 << len(numbers)) - 1, []
    while left:
        best = max(range(len(pairs)), key=lambda n: (pairs[n] & left).bit_count())
        found.append(candidates[best])
        left &= ~pairs[best]
    return found
