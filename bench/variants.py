"""Which backends take part in a comparison, by the names that `--backends` gives."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tfla_tk.backends.triton.variants import variants
from tfla_tk.core.checks import shown_name

from .operators import OPERATORS, Operator
from .rivals import RIVALS, rivals_of
from .usage import UsageError

FAMILIES = ("tk", "triton", "reference")
COMPARED = ("tk", "triton", "tilelang", "reference")  # with the families of rivals alone


@dataclass(frozen=True)
class Variant:
    """One competitor: a backend as the public functions take it, and how it is written in a results row.

    Attributes:
        call: value of `backend=`, for example "tk" or "triton:xl_chunk_128".
        backend: the row's backend, for example "tk".
        schedule: the row's schedule; None but in the ablation.
        named: the user asked for this very backend, so that its failure is the command's failure.
        family_named: the user asked for its family, one variant of which has to serve some call.
    """

    call: str
    backend: str
    schedule: str | None = None
    named: bool = False
    family_named: bool = False

    @property
    def family(self) -> str:
        """tk, triton, tilelang or reference."""
        return self.backend.partition(":")[0]


def find_variants(
    operator: Operator,
    backends: Sequence[str] | None,
    *,
    on_gpu: bool,
    rivals: bool = False,
) -> list[Variant]:
    """The competitors of one operator, in the order they are shown; what it lacks is left out.

    Args:
        backends: families (of COMPARED with rivals, else of FAMILIES) and single variants
            (triton:xl_chunk_128); None takes every family on a GPU and the reference's forms without one.
        on_gpu: the family reference is its chunkwise form on a GPU, every form elsewhere.
        rivals: with those of RIVALS that compute the operator, which are no backends of the public functions.

    Raises:
        UsageError: a name that is a backend of no operator.
    """
    check_named(list(OPERATORS.values()), backends, rivals=rivals)
    families = COMPARED if rivals else FAMILIES
    named = backends is not None
    chosen = tuple(backends) if backends is not None else families if on_gpu else ("reference",)
    found: dict[str, Variant] = {}
    for name in chosen:
        family, colon, _ = name.partition(":")
        if not _has(operator, name):
            # another operator of the same command may have it
            new = []
        elif colon or family == "tk":
            new = [Variant(name, name, named=named)]
        else:
            whole = family == "reference" and on_gpu
            calls = [family] if whole else _variants_of(operator, family, rivals=rivals)
            new = [Variant(call, call, family_named=named) for call in calls]
        for variant in new:
            found.setdefault(variant.call, variant)
    return list(found.values())


def check_named(
    operators: Sequence[Operator],
    backends: Sequence[str] | None,
    *,
    rivals: bool = False,
) -> None:
    """Whether each backend that the user named is one of at least one of the operators.

    Args:
        backends: as the user gave them, None where nothing was.
        rivals: as `find_variants` takes it.

    Raises:
        UsageError: names the option, what was expected and what came.
    """
    families = COMPARED if rivals else FAMILIES
    given = ", ".join(operator.name for operator in operators)
    for name in backends or ():
        family, colon, detail = name.partition(":")
        if family not in families or (colon and not detail):
            got = shown_name(name, families)
            raise UsageError(f"--backends: expected {', '.join(families)} or name:variant, got {got}")
        if name in RIVALS and not rivals:
            raise UsageError(f"--backends: expected a backend of the public functions, got {name!r}")
        if any(_has(operator, name) for operator in operators):
            continue
        able = [operator.name for operator in OPERATORS.values() if _has(operator, name)]
        if able:
            raise UsageError(f"--op: expected any of {', '.join(able)} for the backend {name}, got {given}")
        known = dict.fromkeys(
            call for operator in OPERATORS.values() for call in _variants_of(operator, family, rivals=rivals)
        )
        got = shown_name(name, known)
        raise UsageError(f"--backends: expected a variant such as {', '.join(known)}, got {got}")


def _has(operator: Operator, name: str) -> bool:
    """Whether an operator has a backend: a family, or a single variant of it."""
    family, _, detail = name.partition(":")
    calls = _variants_of(operator, family, rivals=True)
    if not detail:
        return bool(calls)
    # the chunk size of a Triton variant may be any
    return name in calls or (family == "triton" and _without_size(name) in map(_without_size, calls))


def _variants_of(operator: Operator, family: str, *, rivals: bool) -> list[str]:
    """The variants of a family that an operator has; of Triton those worth timing."""
    if family == "tk":
        return ["tk"]
    if family == "reference":
        return [f"reference:{form}" for form in operator.forms]
    found = variants(operator.function) if family == "triton" else []
    return [*found, *rivals_of(operator.name, family)] if rivals else found


def _without_size(name: str) -> str:
    return re.sub(r"_\d+$", "", name)
