"""`python -m tfla_tk.bench model`: what whole xLSTM models gain, Triton against tk in one run.

xlstm's xLSTMLarge in the shape of xLSTM-7B trains, takes a prompt and decodes, on this package's kernels and
on mlstm_kernels' Triton kernels, over the same weights and inputs; logits and first losses are compared with
mlstm_kernels' fp32 native path. Without a GPU a toy model runs on the reference and on mlstm_kernels' native
kernels.

Exit status: 0 done; 1 where a variant of this package fails or is past its limit against the fp32 native
path. A baseline that fails is shown.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from rich.console import Console

from . import compare, environment, report, results
from .model_phases import (
    AGREEMENT,
    BASELINES,
    FP32_GATES,
    NOISE,
    STEP,
    TRITON,
    TRUTH,
    Figures,
    Losses,
    Outcome,
    Task,
    perform,
)
from .results import MODEL, Row, rounded
from .shapes import PHASES
from .usage import UsageError, add_options, names

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
    add = parser.add_argument
    add(
        "--phases",
        type=names(ALL_PHASES),
        default=list(ALL_PHASES),
        metavar="PHASE,..",
        help=f"of {', '.join(ALL_PHASES)} (default: all)",
    )
    add("--layers", type=int, help="of the timed models (default: 32 as xLSTM-7B, 24 for training)")
    baseline = next(iter(TRITON))
    add(
        "--baselines",
        type=names(TRITON),
        default=[baseline],
        metavar="NAME,..",
        help=f"for training and prefill, of {', '.join(TRITON)} (default: {baseline})",
    )
    add_options(parser, "--json", "--update-results", "--commit")
    add_options(parser, "--seed", help="of weights and tokens (default: 0)")
    add_options(parser, "--quick", help="four layers, shorter sequences, fewer steps: a first look")


def run(args: argparse.Namespace) -> int:
    """Run the phases, print their tables and keep the rows; returns the exit status. A run that is cut off
    leaves the rows of the phases before."""
    if args.layers is not None and args.layers < 1:
        raise UsageError(f"--layers: expected a positive number, got {args.layers}")
    record = compare.Record(args)
    device = environment.current_device()
    provenance = environment.provenance(device, args.commit)
    environment.fetch_thunderkittens()
    console = report.make_console()
    tasks = tasks_of(args, device)
    model = tasks[0]
    console.print(
        f"{environment.heading(provenance)}; run {provenance['run']}\n"
        f"xLSTMLarge of width {model.width}, {model.heads} heads, {model.vocabulary:,} tokens; "
        f"speed-up: against the fastest baseline of the phase."
    )
    failed: list[str] = []
    agreed: Sequence[Outcome] = ()
    for asked in tasks:
        start = time.monotonic()
        task, outcomes = perform(asked)
        console.print(f"\n{_title(task)}, {time.monotonic() - start:.0f} s")
        _print(console, task, outcomes)
        failed += failures(task.phase, outcomes)
        if task.phase == AGREEMENT:
            agreed = outcomes
        record.add(make_rows(task, outcomes, agreed, provenance))
    record.tell(console)
    return 1 if failed else 0


def tasks_of(args: argparse.Namespace, device: torch.device) -> list[Task]:
    """What the options describe; the agreement first, since its figures go into the rows of all others."""
    on_gpu = device.type == "cuda"
    found = []
    for task in (GPU_QUICK if args.quick else GPU) if on_gpu else CPU:
        variants = ON_CPU
        if on_gpu:
            variants = ("tk", STEP) if task.phase == "decode" else ("tk", *args.baselines)
        layers = task.layers if task.phase == AGREEMENT else args.layers or task.layers
        found.append(replace(task, device=device, seed=args.seed, variants=variants, layers=layers))
    chosen = [task for task in found if task.phase in args.phases]
    return sorted(chosen, key=lambda task: task.phase != AGREEMENT)


# Verdicts


def limits(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """What an error may be, by phase: from that of the reference in the same dtypes."""
    noise = _errors_of(outcomes, NOISE)
    return {phase: max(floor, FACTORS[phase] * noise.get(phase, 0.0)) for phase, floor in FLOORS.items()}


def _errors_of(outcomes: Sequence[Outcome], *variants: str) -> dict[str, float]:
    """The errors of the first of the variants that has any."""
    found = [each.errors for name in variants for each in outcomes if each.variant == name and each.errors]
    return found[0] if found else {}


def failures(phase: str, outcomes: Sequence[Outcome]) -> list[str]:
    """What makes the command fail, one line each; an error that is NaN is past every limit."""
    lines = []
    allowed = limits(outcomes)
    for outcome in outcomes:
        name, errors = outcome.variant, outcome.errors
        if name in (*BASELINES, TRUTH):
            continue
        if outcome.status:
            lines.append(f"{name}: {outcome.reason}")
        elif phase == AGREEMENT and set(errors) != set(PHASES):
            lines.append(f"{name}: not everything was compared with the {TRUTH} path")
        past = [kind for kind, error in errors.items() if not error <= allowed[kind]]
        lines += [f"{name}, {kind}: {errors[kind]:.1e} is past the limit" for kind in past]
    return lines


def make_rows(
    task: Task, outcomes: Sequence[Outcome], agreed: Sequence[Outcome], provenance: Mapping[str, Any]
) -> list[Row]:
    """A row per batch and variant that was timed. agreed: the outcomes of the agreement."""
    rows = []
    for outcome in outcomes:
        variant = outcome.variant
        # the Triton step decoded with each of TRITON
        error = _errors_of(agreed, *(TRITON if variant == STEP else [variant])).get(task.phase)
        note = NOTES.get(task.phase, "") + (f"; {GATES_NOTE}" if variant in FP32_GATES else "")
        for batch, found in outcome.figures.items():
            more = {"graph_ms": (found.graph_ms, 5), "kernel_share": (found.kernel_share, 3)}
            row = results.new_row(
                MODEL,
                task.shape(batch),
                task.phase,
                variant,
                "bf16" if task.on_gpu else "fp32",
                found.times,
                # NaN is no figure
                rel_err={} if error is None or error != error else {TRUTH: error},
                peak_mem_mb=found.peak_mem_mb,
                note=note if task.on_gpu else "",
                **{key: rounded(x, digits) for key, (x, digits) in more.items() if x is not None},
                **provenance,
            )
            rows.append(row)
    return rows


def _title(task: Task) -> str:
    if task.phase != AGREEMENT:
        return f"{report.PASS_TITLES[task.phase]}, {task.shape(max(task.batches))}"
    plan = task.losses
    steps = f"; {plan.steps} steps of {plan.layers} layers on {plan.batch} x {plan.length}" if plan else ""
    return f"Agreement: logits of {task.length} + {task.tokens} tokens, {task.layers} layers{steps}"


def _print(console: Console, task: Task, outcomes: Sequence[Outcome]) -> None:
    lines = [
        (outcome.variant, _cells(task, batch, outcome.figures[batch], outcomes))
        for outcome in outcomes
        for batch in outcome.figures
    ]
    if task.phase == AGREEMENT:
        shown = {each.variant: each.errors for each in outcomes if each.errors} | {"limit": limits(outcomes)}
        lines = [
            (name, {kind: f"{error:.1e}" for kind, error in errors.items()}) for name, errors in shown.items()
        ]
    if lines:
        console.print(report.filled_table("variant", lines))
    told = [f"  {each.variant}: {each.status}: {each.reason}" for each in outcomes if each.status]
    told += [f"  FAILED {line}" for line in failures(task.phase, outcomes)]
    report.print_lines(console, told)


def _cells(task: Task, batch: int, found: Figures, outcomes: Sequence[Outcome]) -> dict[str, str]:
    rivals = [each.figures[batch] for each in outcomes if each.variant in BASELINES and batch in each.figures]
    # through graphs where all have one, as decoding is run
    graphs = [each.graph_ms for each in (found, *rivals) if each.graph_ms is not None]
    ms, *theirs = graphs if len(graphs) > len(rivals) else [each.times.ms for each in (found, *rivals)]
    return {
        "B": str(batch),
        "ms": report.milliseconds(found.times.ms),
        "graph ms": report.milliseconds(found.graph_ms) if found.graph_ms else "",
        "speed-up": f"{min(theirs) / ms:.2f}x" if theirs else "",
        "tokens/s": f"{batch * task.length / ms * 1e3:,.0f}",
        "mLSTM kernels": f"{found.kernel_share:.1%}" if found.kernel_share else "",
        "peak GB": f"{found.peak_mem_mb / 1024:.1f}" if found.peak_mem_mb else "",
    }
