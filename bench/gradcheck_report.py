"""What `tfla-tk gradcheck` prints, and a check as it stands in the JSON file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tfla_tk.core.checks import counted

from . import accuracy
from .gradcheck_cases import OP, Checked, Settings
from .operators import Operator
from .results import rounded
from .runner import OK


def print_head(
    console: Console, settings: Settings, facts: Mapping[str, Any], chosen: Iterable[Operator]
) -> None:
    place = facts["gpu"] or f"CPU, {counted(torch.get_num_threads(), 'thread')}"
    console.print(f"{place}; torch {facts['torch']}; triton {facts['triton']}; {settings.dtype}")
    limits: dict[float, list[str]] = {}
    for operator in chosen:
        for name, limit in operator.tolerances(settings.dtype).items():
            if name != operator.output and name not in limits.setdefault(limit, []):
                limits[limit].append(name)
    told = "; ".join(f"{', '.join(names)} {limit:.3g}" for limit, names in limits.items())
    if settings.device.type != "cuda":
        console.print(f"No CUDA GPU: the forms of the PyTorch reference, and the registered {OP}.")
    console.print("Error: relative Frobenius against the fp64 reference on the same inputs.")
    console.print(f"Past tolerance where marked with '!': {told}.\n", soft_wrap=True)


def print_contest(console: Console, checked: Sequence[Checked], dtype: str) -> None:
    """The table of one problem and shape, then why rows have no figures."""
    console.print(errors_table(checked, dtype))
    reasons: dict[str, list[str]] = {}
    for _, case, _, outcome in checked:
        if outcome.status != OK and not outcome.errors:
            line = f"{outcome.variant.call}: {outcome.status}: {outcome.reason}"
            reasons.setdefault(line, []).append(str(case))
    cases = len({one.case for one in checked})
    for line, names in reasons.items():
        where = "" if len(names) == cases else f" [{', '.join(names)}]"
        console.print(f"  {line}{where}", markup=False, soft_wrap=True)
    for note in dict.fromkeys(note for one in checked for note in one.outcome.notes):
        console.print(f"  {note}", markup=False, soft_wrap=True)
    console.print()


def errors_table(checked: Sequence[Checked], dtype: str) -> Table:
    """A row per case and variant of one problem and shape, a column per gradient."""
    problem, _, form, first = checked[0]
    title = f"{problem.title}, gradients, {first.shape}; truth: {form} in fp64"
    # as the reference names them: a variant that was not served has none
    operator = problem.operator
    names = [f"d{name}" for name in ("q", "k", "v", *operator.gates, *operator.parameters)]
    if any(one.case.initial for one in checked):
        names += [f"d{name}" for name in operator.states]
    table = Table(title=title, title_justify="left", highlight=False)
    table.add_column("case", no_wrap=True)
    table.add_column("backend", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for place, (_, case, _, outcome) in enumerate(checked):
        limits = operator.tolerances(dtype)
        cells = [_cell(name, outcome.errors, limits) for name in names]
        if not outcome.errors:
            cells[0] = Text(outcome.status)
        ends = place + 1 == len(checked) or checked[place + 1].case != case
        style = "" if outcome.errors else "dim"
        table.add_row(str(case), Text(outcome.variant.call), *cells, style=style, end_section=ends)
    return table


def _cell(name: str, errors: Mapping[str, float], limits: Mapping[str, float]) -> Text:
    if name not in errors:
        return Text("")
    if accuracy.failures({name: errors[name]}, limits):
        return Text(f"{errors[name]:.1e}!", style="bold red")
    return Text(f"{errors[name]:.1e} ")


def row_of(checked: Checked, settings: Settings) -> dict[str, Any]:
    """One check as it stands in the JSON file; an error that is not finite is null."""
    problem, case, form, outcome = checked
    errors = outcome.errors
    return {
        "op": outcome.op,
        "normalize": problem.normalize,
        "options": problem.operator.options,
        "shape": outcome.shape.as_dict(),
        "case": str(case),
        "backend": outcome.variant.call,
        "dtype": settings.dtype,
        "seed": settings.seed,
        "truth": form,
        "partial": any(note.startswith("error on a part") for note in outcome.notes),
        "status": outcome.status,
        "reason": outcome.reason,
        "rel_err": {name: rounded(x, 3) if x == x else None for name, x in errors.items()},
        "tolerance": {name: problem.operator.tolerances(settings.dtype)[name] for name in errors},
    }
