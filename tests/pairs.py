"""Few combinations of parameters in the place of all."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any


def pairwise(
    *options: Sequence[Any], where: Callable[..., bool] = lambda *values: True
) -> list[tuple[Any, ...]]:
    """Combinations of one value of each option, so that any two values of two options meet in one of them.

    Args:
        where: which combinations there may be.
    """
    candidates = [values for values in itertools.product(*options) if where(*values)]

    def pairs(values: tuple[Any, ...]) -> set[tuple[Any, ...]]:
        return set(itertools.combinations(enumerate(map(repr, values)), 2))

    left, found = set().union(*map(pairs, candidates)), []
    while left:
        found.append(max(candidates, key=lambda values: len(pairs(values) & left)))
        left -= pairs(found[-1])
    return found
