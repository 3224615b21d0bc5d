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
from .rivals import RIVALS
from .usage import UsageError

FAMILIES = ("tk", "triton", "reference")
COMPARED = ("tk", "triton", "tilelang", "reference")  # with the families of rivals alone


@dataclass(frozen=True)
class Variant:
    """One competitor.

    Attributes:
        call: a backend as the public functions take it, for example "tk" or "triton:xl_chunk_128".
        schedule: the row's schedule; None but in the ablation, which has it behind the backend.
        named: the user asked for this very backend, so that its failure is the command's failure.
        family_named: the user asked for its family, one variant of which has to serve some call.
    """

    call: str
    schedule: str | None = None
    named: bool = False
    family_named: bool = False

    @property
    def backend(self) -> str:
        """The row's backend."""
        return self.call.removesuffix(f":{self.schedule}")

    @property
    def family(self) -> str:
        """tk, triton, tilelang or reference."""
        return self.call.partition(":")[0]


def find_variants(
    operator: Operator, backends: Sequence[str] | None, *, on_gpu: bool, rivals: bool = False
) -> list[Variant]:
    """The competitors of one operator, in the order they are shown; what it lacks another operator of the
    same command may have. backends: families (of COMPARED with rivals, else of FAMILIES) and single variants
    (triton:xl_chunk_128); None takes every family on a GPU and the reference's forms without one. on_gpu:
    the family reference is its chunkwise form on a GPU, every form elsewhere. rivals: with those of RIVALS
    that compute the operator, which are no backends of the public functions."""
    every = (COMPARED if rivals else FAMILIES) if on_gpu else ("reference",)
    named = backends is not None
    found: dict[str, Variant] = {}
    for name in every if backends is None else backends:
        single = ":" in name or name == "tk"
        calls = _variants_of(operator, name, rivals=rivals)
        for call in [name] if name == "reference" and on_gpu else calls:
            found.setdefault(call, Variant(call, named=named and single, family_named=named and not single))
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
        every = OPERATORS.values()
        able = [operator.name for operator in every if _variants_of(operator, name, rivals=rivals)]
        if not able:
            each = (_variants_of(operator, family, rivals=rivals) for operator in every)
            known = list(dict.fromkeys(itertools.chain.from_iterable(each)))
            got = shown_name(name, known)
            raise UsageError(f"--backends: expected a variant such as {', '.join(known)}, got {got}")
        given = [operator.name for operator in operators]
        if not set(able) & set(given):
            expected = f"any of {', '.join(able)} for the backend {name}"
            raise UsageError(f"--op: expected {expected}, got {', '.join(given)}")


def _variants_of(operator: Operator, name: str, *, rivals: bool) -> list[str]:
    """The variants that a name of --backends stands for, of Triton's family those worth timing; none where
    the operator lacks them."""
    family, colon, _ = name.partition(":")
    calls = {"tk": ["tk"], "reference": [f"reference:{form}" for form in FORMS]}.get(family, [])
    if family == "triton":
        is_fla = operator.function in FLA_OPS
        calls = [fla.VARIANT] if is_fla else mlstm_kernels.variants(operator.function)
    if rivals:
        own = [call for call, rival in RIVALS.items() if rival.operator == operator.name]
        calls = [*calls, *(call for call in own if call.startswith(f"{family}:"))]
    if not colon:
        return calls
    # the chunk size of a Triton variant may be any
    sizeless = map(_without_size, calls if family == "triton" else ())
    return [name] if name in calls or _without_size(name) in sizeless else []


def _without_size(name: str) -> str:
    return re.sub(r"_\d+$", "", name)
