"""The processes of `python -m tfla_tk.bench model`: what became of every variant, and whether it is right."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .model_task import AGREEMENT, BASELINES, NOISE, OUT_OF_MEMORY, TRUTH, Task
from .runner import FAILED
from .shapes import PHASES

# a rounding error is one draw of many: how far another draw may lie beyond the reference's in the same dtypes
# (losses of the first steps, on a CPU: up to 1.7 times), and what is agreement whatever that is
FACTORS = {"prefill": 2.0, "decode": 2.0, "train": 3.0}
FLOORS = {"prefill": 5e-3, "decode": 5e-3, "train": 1e-2}
TIME_LIMIT_S = 300
# the fastest correct one on record, and the default of xlstm's models, which stands in where the first dies
TRITON = ("triton:xl_chunk_128", "triton:limit_chunk_64")


@dataclass
class Outcome:
    """What became of a variant in a phase.

    Attributes:
        facts: figures by batch, as `model_phases.measure` notes them.
        errors: of the agreement, by what it was compared with and by kind.
        status, reason: why there are none, or no more.
    """

    variant: str
    facts: dict[int, dict[str, Any]] = field(default_factory=dict)
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    status: str = ""
    reason: str = ""


Outcomes = dict[str, Outcome]

Facts = list[dict[str, Any]]
RunTask = Callable[[Task], tuple[Facts, str]]


def run_task(task: Task) -> tuple[Facts, str]:
    """Do a task in a process of its own: the facts that it noted, and how it died; empty where it did not."""
    with tempfile.TemporaryDirectory() as folder:
        given, journal, log = (Path(folder) / name for name in ("task", "journal", "log"))
        task.save(given)
        command = [sys.executable, "-m", f"{__package__}.model_phases", str(given), str(journal)]
        with log.open("w") as output:
            death = run_process(command, output, TIME_LIMIT_S)
        if death:
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            # of a Python traceback the last line, of an assertion in a compiler the one that names it
            told = [line for line in lines if "Assertion" in line] or lines
            death += f": {told[-1][:300]}" if told else ""
        noted = journal.read_text(encoding="utf-8").splitlines() if journal.exists() else []
    return [json.loads(line) for line in noted], death


def run_process(command: Sequence[str], output: Any, limit_s: float) -> str:
    """Run a command to its end; says how it died, or nothing where it ended with 0."""
    try:
        code = subprocess.run(command, stdout=output, stderr=output, timeout=limit_s, check=False).returncode
    except subprocess.TimeoutExpired:
        return f"the process was stopped after {limit_s:.0f} s"
    if code < 0:
        return f"the process died of {signal.Signals(-code).name}"
    return f"the process ended with {code}" if code else ""


def carry_out(task: Task, run_task: RunTask) -> tuple[Task, Outcomes]:
    """Do a task, without the variants over which the process dies, at the largest batch that fits.

    Returns:
        The task as it was done at last, and an outcome for each of the variants that took part.
    """
    lost: Outcomes = {}
    while True:
        facts, death = run_task(task)
        outcomes = {name: Outcome(name) for name in task.variants}
        running = None
        for fact in facts:
            name = fact.pop("variant")
            if fact.pop("running", False):
                running = name
            _take(outcomes.setdefault(name, Outcome(name)), fact)
        if any(each.status == OUT_OF_MEMORY for each in outcomes.values()) and task.batches[-1] > 1:
            task = dataclasses.replace(task, batches=tuple(max(1, batch // 2) for batch in task.batches))
            continue
        if death and running in outcomes and _timed(task, outcomes[running]):
            # in a graph or in the profiler: what was timed is right
            _take(outcomes[running], {"status": FAILED, "reason": death})
        elif death:
            culprits = task.variants if running is None else (running,)
            lost |= {name: Outcome(name, status=FAILED, reason=death) for name in culprits}
            left = _without(task.variants, culprits, lost)
            # measured anew, side by side; without the yardsticks of the agreement there is nothing to measure
            if left and running in task.variants:
                task = dataclasses.replace(task, variants=left)
                continue
        return task, outcomes | lost


def _timed(task: Task, outcome: Outcome) -> bool:
    return all("ms" in outcome.facts.get(batch, {}) for batch in task.batches)


def _without(variants: Sequence[str], culprits: Sequence[str], lost: Outcomes) -> tuple[str, ...]:
    """What to go on with; where the only chunkwise Triton baseline is out, the other one takes its place."""
    left = [name for name in variants if name not in culprits]
    if any(name in TRITON for name in culprits) and not any(name in TRITON for name in left):
        left += [name for name in TRITON if name not in lost][:1]
    return tuple(left)


def _take(outcome: Outcome, fact: dict[str, Any]) -> None:
    """Add a fact of the journal."""
    if "status" in fact:
        outcome.status, outcome.reason = fact["status"], fact["reason"]
    elif "errors" in fact:
        outcome.errors.setdefault(fact["against"], {}).update(fact["errors"])
    elif "batch" in fact:
        batch = fact.pop("batch")
        figures = {name: value for name, value in fact.items() if value is not None}
        outcome.facts.setdefault(batch, {}).update(figures)


# Verdicts


def limits(outcomes: Outcomes) -> dict[str, float]:
    """What an error may be, by kind: from that of the reference in the same dtypes."""
    noise = outcomes[NOISE].errors.get(TRUTH, {}) if NOISE in outcomes else {}
    return {kind: max(FLOORS[kind], FACTORS[kind] * noise[kind]) for kind in noise}


def past(errors: Mapping[str, float], allowed: Mapping[str, float]) -> list[str]:
    """The kinds whose error exceeds its limit; NaN exceeds every limit."""
    return [kind for kind, error in errors.items() if not error <= allowed.get(kind, FLOORS[kind])]


def failures(phase: str, outcomes: Outcomes) -> list[str]:
    """What makes the command fail, one line each."""
    lines = []
    ours = [each for each in outcomes.values() if each.variant not in (*BASELINES, TRUTH)]
    for outcome in ours:
        if outcome.status:
            lines.append(f"{outcome.variant}: {outcome.reason}")
    if phase == AGREEMENT:
        allowed = limits(outcomes)
        for outcome in ours:
            errors = outcome.errors
            if not outcome.status and set(errors.get(TRUTH, {})) != set(PHASES):
                lines.append(f"{outcome.variant}: not everything was compared with the {TRUTH} path")
            for other, found in errors.items():
                theirs = outcomes[other].errors.get(TRUTH, {}) if other in outcomes else {}
                for kind in past(found, allowed):
                    # a baseline that is off by itself does not make this package wrong
                    if other == TRUTH or kind not in past(theirs, allowed):
                        lines.append(
                            f"{outcome.variant} against {other}, {kind}: {found[kind]:.1e} is past the limit"
                        )
    return lines
