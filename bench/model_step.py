"""`python -m tfla_tk.bench model`: what whole xLSTM models gain, Triton against tk in one run.

What the phases do: docs/benchmarks.md. Exit status: 0 done; 1 where a variant of this package fails or is
past its limit against mlstm_kernels' fp32 native path. A baseline that fails is shown.
"""

import argparse
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from . import environment, report
from .model_phases import AGREEMENT, BASELINES, NOISE, STEP, TRITON, TRUTH, Losses, Outcome, Task, perform
from .results import Row, rounded
from .runner import OK
from .shapes import PHASES
from .usage import add_options, names

ALL_PHASES = (*PHASES, AGREEMENT)
NOTES = {
    "train": "fp32 weights, bf16 autocast, AdamW, every block recomputed",
    "prefill": "bf16 weights, logits of every token",
    "decode": "bf16 weights, fp32 states",
}
GATES_NOTE = "gates cast to fp32, over others Triton 3.6 aborts"
# a rounding error is one draw of many: how far another draw may lie beyond the reference's in the same dtypes
# (losses of the first steps, on a CPU: up to 1.7 times), and what is agreement whatever that is
FACTORS = {"prefill": 2.0, "decode": 2.0, "train": 3.0}
FLOORS = {"prefill": 5e-3, "decode": 5e-3, "train": 1e-2}

# 32 layers of 4096 are xLSTM-7B; 24 of them with fp32 weights and AdamW take about 105 GiB
_xlstm_7b = partial(Task, width=4096, heads=8, vocabulary=50304)
GPU = (
    _xlstm_7b("train", layers=24, batches=(8,), length=8192, repeats=3),
    _xlstm_7b("prefill", layers=32, batches=(1,), length=65536, repeats=4),
    _xlstm_7b("decode", layers=32, batches=(1, 8, 64), length=1, repeats=30),
    _xlstm_7b(AGREEMENT, layers=4, batches=(1,), length=1024, losses=Losses(2, 4, 512, steps=50, rate=1e-4)),
)
GPU_QUICK = (
    _xlstm_7b("train", layers=4, batches=(2,), length=2048, repeats=3),
    _xlstm_7b("prefill", layers=4, batches=(1,), length=8192, repeats=3),
    _xlstm_7b("decode", layers=4, batches=(1,), length=1, repeats=10),
    _xlstm_7b(AGREEMENT, layers=4, batches=(1,), length=1024, losses=Losses(2, 4, 512, steps=10, rate=1e-4)),
)
_toy = partial(Task, width=64, heads=2, vocabulary=256, layers=2)
CPU = (
    _toy("train", batches=(2,), length=128, repeats=3),
    _toy("prefill", batches=(1,), length=128, repeats=3),
    _toy("decode", batches=(1, 2), length=1, repeats=3),
    _toy(AGREEMENT, batches=(1,), length=64, losses=Losses(2, 2, 64, steps=8, rate=1e-3)),
)
ON_CPU = ("reference:chunkwise", "native")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m tfla_tk.bench model`."""
    phases, told = list(ALL_PHASES), f"of {', '.join(ALL_PHASES)} (default: all)"
    parser.add_argument("--phases", type=names(phases), default=phases, metavar="PHASE,..", help=told)
    add_options(parser, "--json", "--update-results", "--commit")
    add_options(parser, "--seed", help="of weights and tokens (default: 0)")
    add_options(parser, "--quick", help="four layers, shorter sequences, fewer steps: a first look")


def run(args: argparse.Namespace) -> int:
    """Run the phases, print their tables and keep the rows; returns the exit status. A run that is cut off
    leaves the rows of the phases before."""
    session = environment.Session(args)
    tasks = tasks_of(args, session.device)
    model = tasks[0]
    session.console.print(
        f"{environment.heading(session.facts)}; run {session.facts['run']}\n"
        f"xLSTMLarge of width {model.width}, {model.heads} heads, {model.vocabulary:,} tokens; "
        f"speed-up: against the fastest baseline of the phase."
    )
    failed: list[str] = []
    agreed: Sequence[Outcome] = ()
    for asked in tasks:
        start = time.monotonic()
        task, outcomes = perform(asked)
        session.console.print(f"\n{_title(task)}, {time.monotonic() - start:.0f} s")
        _print(session, task, outcomes)
        failed += failures(task.phase, outcomes)
        if task.phase == AGREEMENT:
            agreed = outcomes
        session.add(make_rows(task, outcomes, agreed, session.facts))
    session.tell()
    return 1 if failed else 0


def tasks_of(args: argparse.Namespace, device: torch.device) -> list[Task]:
    """What the options describe; the agreement first, since its figures go into the rows of all others."""
    on_gpu = device.type == "cuda"
    found = []
    for task in (GPU_QUICK if args.quick else GPU) if on_gpu else CPU:
        variants = ("tk", STEP if task.phase == "decode" else TRITON) if on_gpu else ON_CPU
        found.append(replace(task, device=device, seed=args.seed, variants=variants))
    chosen = [task for task in found if task.phase in args.phases]
    return sorted(chosen, key=lambda task: task.phase != AGREEMENT)


# Verdicts


def limits(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """What an error may be, by phase: from that of the reference in the same dtypes."""
    noise = errors_of(outcomes).get(NOISE, {})
    return {phase: max(floor, FACTORS[phase] * noise.get(phase, 0.0)) for phase, floor in FLOORS.items()}


def errors_of(outcomes: Sequence[Outcome]) -> dict[str, dict[str, float]]:
    return {each.variant: each.errors for each in outcomes if each.errors}


def failures(phase: str, outcomes: Sequence[Outcome]) -> list[str]:
    """What makes the command fail, one line each; an error that is NaN is past every limit."""
    lines = []
    allowed = limits(outcomes)
    for outcome in outcomes:
        name, errors = outcome.variant, outcome.errors
        if name in (*BASELINES, TRUTH):
            continue
        if outcome.status != OK:
            lines.append(f"{name}: {outcome.reason}")
        elif phase == AGREEMENT and set(errors) != set(PHASES):
            lines.append(f"{name}: not everything was compared with the {TRUTH} path")
        past = [kind for kind, error in errors.items() if not error <= allowed[kind]]
        lines += [f"{name}, {kind}: {errors[kind]:.1e} is past the limit" for kind in past]
    return lines


def make_rows(
    task: Task, outcomes: Sequence[Outcome], agreed: Sequence[Outcome], facts: Mapping[str, Any]
) -> list[Row]:
    """The rows of what was timed. agreed: the outcomes of the agreement. facts: what all rows share."""
    rows = []
    for outcome in outcomes:
        # the Triton step decoded with TRITON
        variant = TRITON if outcome.variant == STEP else outcome.variant
        error = errors_of(agreed).get(variant, {}).get(task.phase, math.nan)
        # NaN is no figure
        more: Row = {**facts, "rel_err": {TRUTH: rounded("rel_err", error)} if error == error else {}}
        if task.on_gpu:
            more["note"] = NOTES[task.phase] + f"; {GATES_NOTE}" * (outcome.variant == TRITON)
        rows += [row | more for row in outcome.rows.values()]
    return rows


def _title(task: Task) -> str:
    if task.phase != AGREEMENT:
        return f"{report.PASS_TITLES[task.phase]}, {task.shape(max(task.batches))}"
    plan = task.losses
    steps = f"; {plan.steps} steps of {plan.layers} layers on {plan.batch} x {plan.length}" if plan else ""
    return f"Agreement: logits of {task.length} + {task.tokens} tokens, {task.layers} layers{steps}"


def _print(session: environment.Session, task: Task, outcomes: Sequence[Outcome]) -> None:
    lines = [
        (outcome.variant, _cells(row, outcomes)) for outcome in outcomes for row in outcome.rows.values()
    ]
    if task.phase == AGREEMENT:
        shown = errors_of(outcomes) | {"limit": limits(outcomes)}
        lines = [
            (name, {kind: f"{error:.1e}" for kind, error in errors.items()}) for name, errors in shown.items()
        ]
    if lines:
        session.console.print(report.filled_table("variant", lines))
    told = [f"  {each.variant}: {each.status}: {each.reason}" for each in outcomes if each.status != OK]
    session.print_lines([*told, *(f"  FAILED {line}" for line in failures(task.phase, outcomes))])


def _cells(row: Row, outcomes: Sequence[Outcome]) -> dict[str, str]:
    batch, tokens = row["shape"]["B"], row["shape"]["T"]
    rivals = [each.rows[batch] for each in outcomes if each.variant in BASELINES and batch in each.rows]
    # through graphs where all have one, as decoding is run
    key = "graph_ms" if all("graph_ms" in each for each in (row, *rivals)) else "ms"
    best = min((each[key] for each in rivals), default=None)
    return {
        "B": str(batch),
        "ms": report.milliseconds(row["ms"]),
        "graph ms": report.milliseconds(row["graph_ms"]) if "graph_ms" in row else "",
        "speed-up": f"{best / row[key]:.2f}x" if best is not None else "",
        "tokens/s": f"{batch * tokens / row[key] * 1e3:,.0f}",
        "mLSTM kernels": f"{row['kernel_share']:.1%}" if "kernel_share" in row else "",
        "peak GB": f"{row['peak_mem_mb'] / 1024:.1f}" if row["peak_mem_mb"] else "",
    }
