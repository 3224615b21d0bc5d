"""Which backends take part in a comparison, by the names that `--backends` and `--schedules` give."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tfla_tk.backends.triton.variants import variants
from tfla_tk.core.checks import shown_name
from tfla_tk.core.layout import SCHEDULES

from .operators import OPERATORS, Operator
from .results import schedules_of
from .rivals import RIVALS, rivals_of
from .usage import UsageError

FAMILIES = ("tk", "triton", "reference")
COMPARED = ("tk", "triton", "tilelang", "reference")  # with the families of rivals alone


@dataclass(frozen=True)
class Variant:
    """One competitor: a backend as the public functions take it, and how it is written in a results row.

    Attributes:
        call: value of `backend=`, for example "tk:pingpong" or "triton:xl_chunk_128".
        backend: the row's backend, for example "tk".
        schedule: the row's schedule; None where the backend has none or picks it.
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
    schedules: Sequence[str],
    *,
    on_gpu: bool,
    rivals: bool = False,
) -> list[Variant]:
    """The competitors of one operator, in the order they are shown; what it lacks is left out.

    Args:
        backends: families (of COMPARED with rivals, else of FAMILIES) and single variants
            (triton:xl_chunk_128, tk:pingpong); None takes every family on a GPU and the reference's forms
            without one.
        schedules: for the family tk, of SCHEDULES.
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
        family, colon, detail = name.partition(":")
        if not _has(operator, name):
            # another operator of the same command may have it
            new = []
        elif colon:
            new = [_single(name, family, detail, named)]
        elif family == "tk":
            own = [schedule for schedule in schedules if schedule in _schedules(operator)]
            new = [_single(f"tk:{schedule}", "tk", schedule, named) for schedule in own]
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
    schedules: Sequence[str] | None = None,
    *,
    rivals: bool = False,
) -> None:
    """Whether each backend and schedule that the user named is one of at least one of the operators.

    Args:
        backends, schedules: as the user gave them, None where nothing was. All schedules together stand for
            those that there are.
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
    if schedules is None or {*schedules} == {*SCHEDULES}:
        return
    own = {schedule for operator in operators for schedule in _schedules(operator)}
    for schedule in schedules:
        if schedule not in own:
            expected = ", ".join(name for name in SCHEDULES if name in own)
            raise UsageError(f"--schedules: expected any of {expected} for {given}, got {schedule}")


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
        return [f"tk:{schedule}" for schedule in _schedules(operator)]
    if family == "reference":
        return [f"reference:{form}" for form in operator.forms]
    found = variants(operator.function) if family == "triton" else []
    return [*found, *rivals_of(operator.name, family)] if rivals else found


def _schedules(operator: Operator) -> tuple[str, ...]:
    return "auto", *schedules_of(operator.name)


def _without_size(name: str) -> str:
    return re.sub(r"_\d+$", "", name)


def _single(name: str, family: str, detail: str, named: bool) -> Variant:
    if family != "tk":
        return Variant(name, name, named=named)
    return Variant(name, "tk", None if detail == "auto" else detail, named)
