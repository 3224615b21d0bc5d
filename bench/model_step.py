"""`python -m tfla_tk.bench model`: what whole xLSTM models gain, Triton against tk in one run.

xlstm's xLSTMLarge in the shape of xLSTM-7B trains, takes a prompt and decodes, on this package's kernels and
on mlstm_kernels' Triton kernels, over the same weights and inputs; logits and first losses are compared with
mlstm_kernels' fp32 native path. Each phase runs in a process of its own (`model_phases`): a variant over
which the process dies is reported, and the phase is run again without it. Without a GPU a toy model runs on
the reference and on mlstm_kernels' native kernels.

Exit status: 0 done; 1 where a variant of this package fails or is past its limit against the fp32 native
path, or where it and a baseline that is within that limit are farther apart. A baseline that fails is shown.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tfla_tk.core.checks import counted

from . import compare, environment, results
from .model_runs import TRITON, Outcomes, carry_out, failures, limits, past, run_task
from .model_task import AGREEMENT, BASELINES, FP32_GATES, Task, Training
from .report import PASS_TITLES, milliseconds
from .results import MODEL, Row, rounded
from .runner import RECORD_REPEATS
from .shapes import PHASES, ModelShape
from .usage import UsageError, check_outputs

STEP = "triton:step"
NOTES = {
    "train": "fp32 weights, bf16 autocast, AdamW, every block recomputed",
    "prefill": "bf16 weights, logits of every token",
    "decode": "bf16 weights, fp32 states",
}
GATES_NOTE = "gates cast to fp32, over others Triton 3.6 aborts"


@dataclass(frozen=True)
class Preset:
    """Sizes of a run.

    Attributes:
        train, prefill: (batch, tokens of a sequence). decode: batches.
        layers, train_layers, check_layers: for inference, training and the agreement of logits.
        check_tokens: of the prompt whose logits are compared. training: whose losses are compared.
        repeats: timed runs per phase.
        variants: what takes part in training and prefill, of this package and baselines; `step`: in decoding.
    """

    width: int
    heads: int
    vocabulary: int
    layers: int
    train_layers: int
    check_layers: int
    train: tuple[int, int]
    prefill: tuple[int, int]
    decode: tuple[int, ...]
    check_tokens: int
    training: Training
    repeats: Mapping[str, int]
    variants: tuple[str, ...] = ("tk", TRITON[0])
    step: tuple[str, ...] = ("tk", STEP)


# 32 layers of 4096 are xLSTM-7B; 24 of them with fp32 weights and AdamW take about 105 GiB
GPU = Preset(
    width=4096,
    heads=8,
    vocabulary=50304,
    layers=32,
    train_layers=24,
    check_layers=4,
    train=(8, 8192),
    prefill=(1, 65536),
    decode=(1, 8, 64),
    check_tokens=1024,
    training=Training(layers=2, batch=4, length=512, steps=50, rate=1e-4),
    repeats={"train": 3, "prefill": 4, "decode": 30, AGREEMENT: 1},
)
GPU_QUICK = dataclasses.replace(
    GPU,
    layers=4,
    train_layers=4,
    train=(2, 2048),
    prefill=(1, 8192),
    decode=(1,),
    training=dataclasses.replace(GPU.training, steps=10),
    repeats={"train": 3, "prefill": 3, "decode": 10, AGREEMENT: 1},
)
CPU = Preset(
    width=64,
    heads=2,
    vocabulary=256,
    layers=2,
    train_layers=2,
    check_layers=2,
    train=(2, 128),
    prefill=(1, 128),
    decode=(1, 2),
    check_tokens=64,
    training=Training(layers=2, batch=2, length=64, steps=8, rate=1e-3),
    repeats={"train": 3, "prefill": 3, "decode": 3, AGREEMENT: 1},
    variants=("reference:chunkwise", "native"),
    step=("reference:chunkwise", "native"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m tfla_tk.bench model`."""
    add = parser.add_argument
    phases = (*PHASES, AGREEMENT)
    add(
        "--phases",
        type=compare.names(phases),
        default=list(phases),
        metavar="PHASE,..",
        help=f"of {', '.join(phases)} (default: all)",
    )
    add("--layers", type=int, help="of the timed models (default: 32 as xLSTM-7B, 24 for training)")
    add(
        "--baselines",
        type=compare.names(TRITON),
        default=[TRITON[0]],
        metavar="NAME,..",
        help=f"for training and prefill, of {', '.join(TRITON)} (default: {TRITON[0]})",
    )
    add("--json", type=Path, metavar="PATH", help="write the rows of this run as JSON")
    add("--update-results", action="store_true", help="merge the rows into bench/results/<gpu>.json")
    add("--commit", metavar="HASH", help="what is measured, recorded where this is no git checkout")
    add("--seed", type=int, default=0, help="of weights and tokens (default: 0)")
    add("--quick", action="store_true", help="four layers, shorter sequences, fewer steps: a first look")


def run(args: argparse.Namespace) -> int:
    """Run the phases, print their tables and keep the rows; returns the exit status.

    Raises:
        UsageError: options that do not go together.
    """
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    record = compare.record_path(args, on_gpu)
    preset = (GPU_QUICK if args.quick else GPU) if on_gpu else CPU
    if args.layers is not None:
        if args.layers < 1:
            raise UsageError(f"--layers: expected a positive number, got {args.layers}")
        preset = dataclasses.replace(preset, layers=args.layers, train_layers=args.layers)
    if on_gpu:
        preset = dataclasses.replace(preset, variants=("tk", *args.baselines))
    check_outputs(args)
    provenance = environment.provenance(device, args.commit)
    environment.fetch_thunderkittens()
    console = compare.make_console()
    place = provenance["gpu"] or f"CPU, {counted(torch.get_num_threads(), 'thread')}"
    console.print(
        f"{place}; torch {provenance['torch']}; triton {provenance['triton']}; run {provenance['run']}\n"
        f"xLSTMLarge of width {preset.width}, {preset.heads} heads, {preset.vocabulary:,} tokens; "
        f"speed-up: against the fastest baseline of the phase."
    )
    found: dict[str, Outcomes] = {}
    tasks: dict[str, Task] = {}
    # the agreement first: its figures go into the rows of all others
    for phase in sorted(args.phases, key=(AGREEMENT, *PHASES).index):
        start = time.monotonic()
        task = _task(preset, phase, str(device), args.seed)
        tasks[phase], found[phase] = carry_out(task, run_task)
        console.print(f"\n{_title(tasks[phase])}, {time.monotonic() - start:.0f} s")
        _print(console, tasks[phase], found[phase])
        rows = make_rows(tasks, found, provenance)
        if args.json:
            results.write(args.json, rows)
    if record is not None:
        results.write(record, results.merge(results.load(record), rows))
        console.print(f"{len(rows)} rows merged into {record.name}")
    return 1 if any(failures(phase, found[phase]) for phase in found) else 0


def _task(preset: Preset, phase: str, device: str, seed: int) -> Task:
    decode = phase == "decode"
    layers = {AGREEMENT: preset.check_layers, "train": preset.train_layers}.get(phase, preset.layers)
    sizes: dict[str, tuple[tuple[int, ...], int]] = {
        "train": ((preset.train[0],), preset.train[1]),
        "prefill": ((preset.prefill[0],), preset.prefill[1]),
        "decode": (preset.decode, 1),
        AGREEMENT: ((1,), preset.check_tokens),
    }
    batches, length = sizes[phase]
    return Task(
        phase=phase,
        device=device,
        variants=preset.step if decode else preset.variants,
        layers=layers,
        width=preset.width,
        heads=preset.heads,
        vocabulary=preset.vocabulary,
        batches=batches,
        length=length,
        repeats=preset.repeats[phase],
        seed=seed,
        training=preset.training if phase == AGREEMENT else None,
    )


# Rows


def make_rows(
    tasks: Mapping[str, Task], found: Mapping[str, Outcomes], provenance: Mapping[str, Any]
) -> list[Row]:
    """A row per phase, batch and variant that was timed."""
    agreed = found.get(AGREEMENT, {})
    rows = []
    for phase, outcomes in found.items():
        for outcome in outcomes.values():
            for batch, facts in outcome.facts.items():
                if "ms" in facts:
                    errors = _errors_of(agreed, outcome.variant, phase)
                    rows.append(_row(tasks[phase], batch, outcome.variant, facts, errors, provenance))
    return rows


def _row(
    task: Task,
    batch: int,
    variant: str,
    facts: Mapping[str, Any],
    errors: Mapping[str, float],
    provenance: Mapping[str, Any],
) -> Row:
    row: Row = {
        "op": MODEL,
        "shape": shape_of(task, batch).as_dict(),
        "pass": task.phase,
        "backend": variant,
        "schedule": None,
        "dtype": "bf16" if task.on_gpu else "fp32",
        "ms": rounded(facts["ms"]),
        "ms_p20": rounded(facts["p20"]),
        "ms_p80": rounded(facts["p80"]),
        "tflops": None,
        "gbps": None,
        "roofline": None,
        "peak_mem_mb": rounded(facts["peak_mem_mb"]) if "peak_mem_mb" in facts else None,
        "rel_err": {name: rounded(error, 3) for name, error in errors.items()},
        **provenance,
    }
    for name, digits in (("graph_ms", 5), ("kernel_share", 3)):
        if name in facts:
            row[name] = rounded(facts[name], digits)
    if facts["repeats"] < RECORD_REPEATS:
        row["repeats"] = facts["repeats"]
    if task.on_gpu:
        row["note"] = NOTES[task.phase] + (f"; {GATES_NOTE}" if variant in FP32_GATES else "")
    return row


def _errors_of(agreed: Outcomes, variant: str, phase: str) -> dict[str, float]:
    """Finite errors of a variant in a phase, by what it was compared with.

    The Triton step has those of the first baseline that decoded with it.
    """
    names = [x for x in agreed if x.startswith("triton:")] if variant == STEP else [variant]
    for name in names:
        errors = agreed[name].errors if name in agreed else {}
        found = {other: kinds[phase] for other, kinds in errors.items() if phase in kinds}
        if found:
            return {other: error for other, error in found.items() if error == error}
    return {}


def shape_of(task: Task, batch: int) -> ModelShape:
    """The shape of a task's rows."""
    dim_qk, dim_v = task.head_dims
    return ModelShape(batch, task.length, task.heads, dim_qk, dim_v, task.layers, task.width)


# Tables


def _title(task: Task) -> str:
    if task.phase == AGREEMENT:
        plan = task.training
        steps = (
            f"; {plan.steps} steps of {plan.layers} layers on {plan.batch} x {plan.length}" if plan else ""
        )
        return f"Agreement: logits of {task.length} + {task.tokens} tokens, {task.layers} layers{steps}"
    return f"{PASS_TITLES[task.phase]}, {shape_of(task, max(task.batches))}"


def _print(console: Console, task: Task, outcomes: Outcomes) -> None:
    console.print(_agreement_table(outcomes) if task.phase == AGREEMENT else _table(task, outcomes))
    for outcome in outcomes.values():
        if outcome.status:
            console.print(f"  {outcome.variant}: {outcome.reason}", markup=False, soft_wrap=True)
    for line in failures(task.phase, outcomes):
        console.print(f"  FAILED {line}", markup=False, soft_wrap=True)


def _table(task: Task, outcomes: Outcomes) -> Table:
    table = Table(highlight=False)
    table.add_column("variant", no_wrap=True)
    columns = ("B", "ms", "graph ms", "speed-up", "tokens/s", "mLSTM kernels", "peak GB")
    for column in columns:
        table.add_column(column, justify="right")
    for outcome in outcomes.values():
        if outcome.status and not outcome.facts:
            table.add_row(outcome.variant, "", outcome.status, style="dim")
        for batch, facts in outcome.facts.items():
            if "ms" in facts:
                table.add_row(outcome.variant, str(batch), *_cells(task, batch, facts, outcomes))
    return table


def _cells(task: Task, batch: int, facts: Mapping[str, Any], outcomes: Outcomes) -> list[str]:
    rivals = [
        each.facts[batch] for each in outcomes.values() if each.variant in BASELINES and batch in each.facts
    ]
    # through graphs where all have one, as decoding is run
    key = "graph_ms" if rivals and all("graph_ms" in x for x in (facts, *rivals)) else "ms"
    best = min((rival[key] for rival in rivals if key in rival), default=None)
    return [
        milliseconds(facts["ms"]),
        milliseconds(facts["graph_ms"]) if "graph_ms" in facts else "",
        f"{best / facts[key]:.2f}x" if best else "",
        f"{batch * task.length / facts[key] * 1e3:,.0f}",
        f"{facts['kernel_share']:.1%}" if "kernel_share" in facts else "",
        f"{facts['peak_mem_mb'] / 1024:.1f}" if "peak_mem_mb" in facts else "",
    ]


def _agreement_table(outcomes: Outcomes) -> Table:
    allowed = limits(outcomes)
    table = Table(highlight=False)
    table.add_column("variant", no_wrap=True)
    table.add_column("against")
    for column in ("prefill logits", "decode logits", "losses, nats"):
        table.add_column(column, justify="right")
    kinds = ("prefill", "decode", "train")
    for outcome in outcomes.values():
        for other, errors in outcome.errors.items():
            wrong = past(errors, allowed)
            cells = [f"{errors[kind]:.1e}{'!' * (kind in wrong)}" if kind in errors else "" for kind in kinds]
            table.add_row(outcome.variant, other, *cells)
    table.add_row("limit", "", *(f"{allowed[kind]:.1e}" if kind in allowed else "" for kind in kinds))
    return table
