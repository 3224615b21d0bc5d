"""Which backends take part in a comparison, by the names that `--backends` and `--schedules` give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tfla_tk.backends.triton.variants import variants
from tfla_tk.core.layout import SCHEDULES

from .operators import Operator
from .rivals import RIVALS, rivals_of

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
    """

    call: str
    backend: str
    schedule: str | None = None
    named: bool = False

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
    """The competitors of one operator, in the order they are shown.

    Args:
        backends: families (of COMPARED with rivals, else of FAMILIES) and single variants
            (triton:xl_chunk_128, tk:pingpong); None takes every family on a GPU and the reference's forms
            without one.
        schedules: for the family tk, of SCHEDULES.
        on_gpu: the family reference is its chunkwise form on a GPU, every form elsewhere.
        rivals: with those of RIVALS that compute the operator, which are no backends of the public functions.

    Raises:
        ValueError: a name that is no backend.
    """
    families = COMPARED if rivals else FAMILIES
    chosen = tuple(backends) if backends is not None else families if on_gpu else ("reference",)
    found: dict[str, Variant] = {}
    for name in chosen:
        family, colon, detail = name.partition(":")
        if family not in families or (colon and not detail):
            raise ValueError(f"backends: expected {', '.join(families)} or name:variant, got {name!r}")
        if name in RIVALS and not rivals:
            raise ValueError(f"backends: expected a backend of the public functions, got {name!r}")
        if name in RIVALS and RIVALS[name].operator != operator.name:
            # another operator of the same command may have it
            new = []
        elif colon:
            new = [_single(name, family, detail)]
        elif family == "tk":
            new = [_single(f"tk:{schedule}", "tk", schedule, backends is not None) for schedule in schedules]
        elif family == "tilelang":
            new = _rivals(operator, family)
        elif family == "triton":
            new = [Variant(call, call) for call in variants(operator.function)]
            new += _rivals(operator, family) if rivals else []
        elif on_gpu:
            new = [Variant("reference", "reference")]
        else:
            new = [Variant(f"reference:{form}", f"reference:{form}") for form in operator.forms]
        for variant in new:
            found.setdefault(variant.call, variant)
    return list(found.values())


def _rivals(operator: Operator, family: str) -> list[Variant]:
    return [Variant(call, call) for call in rivals_of(operator.name, family)]


def _single(name: str, family: str, detail: str, named: bool = True) -> Variant:
    if family != "tk":
        return Variant(name, name, named=named)
    if detail not in SCHEDULES:
        raise ValueError(f"schedules: expected one of {', '.join(SCHEDULES)}, got {detail!r}")
    return Variant(name, "tk", None if detail == "auto" else detail, named)
