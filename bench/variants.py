"""Which backends take part in a comparison, by the names that `--backends` gives."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from tfla_tk.backends.triton import mlstm_kernels
from tfla_tk.backends.triton.fla import FLA_OPS
from tfla_tk.core.checks import shown_name

from . import fla
from .operators import FORMS, OPERATORS, Operator
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
    operator: Operator, backends: Sequence[str] | None, *, on_gpu: bool, rivals: bool = False
) -> list[Variant]:
    """The competitors of one operator, in the order they are shown; what it lacks is left out. backends:
    families (of COMPARED with rivals, else of FAMILIES) and single variants (triton:xl_chunk_128); None
    takes every family on a GPU and the reference's forms without one. on_gpu: the family reference is its
    chunkwise form on a GPU, every form elsewhere. rivals: with those of RIVALS that compute the operator,
    which are no backends of the public functions."""
    check_named(list(OPERATORS.values()), backends, rivals=rivals)
    every = (COMPARED if rivals else FAMILIES) if on_gpu else ("reference",)
    named = backends is not None
    found: dict[str, Variant] = {}
    for name in every if backends is None else backends:
        # what it lacks another operator of the same command may have
        if not _has(operator, name):
            continue
        if ":" in name or name == "tk":
            new = [Variant(name, name, named=named)]
        elif name == "reference" and on_gpu:
            new = [Variant(name, name, family_named=named)]
        else:
            calls = _variants_of(operator, name, rivals=rivals)
            new = [Variant(call, call, family_named=named) for call in calls]
        for variant in new:
            found.setdefault(variant.call, variant)
    return list(found.values())


def check_named(
    operators: Sequence[Operator], backends: Sequence[str] | None, *, rivals: bool = False
) -> None:
    """UsageError where a backend that the user named is one of none of the operators. rivals: as
    `find_variants` takes it."""
    families = COMPARED if rivals else FAMILIES
    for name in backends or ():
        family, colon, detail = name.partition(":")
        if family not in families or (colon and not detail):
            got = shown_name(name, families)
            raise UsageError(f"--backends: expected {', '.join(families)} or name:variant, got {got}")
        if name in RIVALS and not rivals:
            raise UsageError(f"--backends: expected a backend of the public functions, got {name!r}")
        able = [operator.name for operator in OPERATORS.values() if _has(operator, name)]
        if not able:
            each = (_variants_of(operator, family, rivals=rivals) for operator in OPERATORS.values())
            known = list(dict.fromkeys(itertools.chain.from_iterable(each)))
            got = shown_name(name, known)
            raise UsageError(f"--backends: expected a variant such as {', '.join(known)}, got {got}")
        given = [operator.name for operator in operators]
        if not set(able) & set(given):
            expected = f"any of {', '.join(able)} for the backend {name}"
            raise UsageError(f"--op: expected {expected}, got {', '.join(given)}")


def _has(operator: Operator, name: str) -> bool:
    """Whether an operator has a backend: a family, or a single variant of it."""
    family, colon, _ = name.partition(":")
    calls = _variants_of(operator, family, rivals=True)
    if not colon:
        return bool(calls)
    # the chunk size of a Triton variant may be any
    return name in calls or (family == "triton" and _without_size(name) in map(_without_size, calls))


def _variants_of(operator: Operator, family: str, *, rivals: bool) -> list[str]:
    """The variants of a family that an operator has; of Triton those worth timing."""
    if family == "tk":
        return ["tk"]
    if family == "reference":
        return [f"reference:{form}" for form in FORMS]
    found = []
    if family == "triton":
        function = operator.function
        found = [fla.VARIANT] if function in FLA_OPS else mlstm_kernels.variants(function)
    return [*found, *rivals_of(operator.name, family)] if rivals else found


def _without_size(name: str) -> str:
    return re.sub(r"_\d+$", "", name)
