"""`python -m tfla_tk.bench train`: train a small language model on every backend, compare the loss curves.

The model (`model`) learns structured text (`text`) from the same initial parameters and the same batches on
each backend. The curve to agree with is that of the reference, the same model with an mLSTM in fp32; how far
apart curves may lie is measured by training it once more, on batches in another order.

Exit status: 0 done; 1 where one of this package's backends, or any backend named by --backends, fails or
leaves the band; a named backend that cannot train counts as well.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.table import Table
from rich.text import Text
from torch import Tensor

from tfla_tk.core.checks import counted
from tfla_tk.core.dispatch import split_backend

from . import compare, environment, plots
from .model import LanguageModel
from .operators import OPERATORS
from .report import TITLES, milliseconds
from .runner import FAILED, OK, UNSUPPORTED, release, verdict_on
from .text import bigram_entropy, make_text
from .usage import UsageError, check_outputs

OPS = {"exp": "mlstm_exp", "sig": "mlstm_sig"}
BASELINE, OTHER_ORDER, NO_AUTOCAST = "reference", "reference, other order", "reference, no autocast"
OUTSIDE = "OUTSIDE"
GRADIENT_NORM = 1.0
LEAST_RATE = 0.1


@dataclass(frozen=True)
class Preset:
    """A training: the model, its batches, their number, the peak learning rate, bytes of text."""

    blocks: int
    width: int
    heads: int
    batch: int
    sequence: int
    steps: int
    rate: float
    text_bytes: int
    input_bias: float = -10.0

    def __str__(self) -> str:
        value = self.width // self.heads
        return (
            f"{self.blocks} blocks of width {self.width}, {self.heads} heads of {value // 2}/{value}, "
            f"input bias {self.input_bias:g}; {self.steps} steps of {self.batch} x {self.sequence} bytes"
        )

    @property
    def tenth(self) -> int:
        """A tenth of the steps: the warm-up, and what curves are smoothed over."""
        return max(1, self.steps // 10)


PRESETS = {
    "cpu": Preset(blocks=2, width=64, heads=2, batch=8, sequence=128, steps=60, rate=1e-2, text_bytes=2**17),
    "gpu": Preset(
        blocks=6, width=1024, heads=4, batch=16, sequence=1024, steps=300, rate=1.5e-4, text_bytes=2**22
    ),
}
# without a GPU, tk and Triton say why they cannot train
BACKENDS = {"cpu": ["tk", "triton", "reference:recurrent", "reference:parallel"], "gpu": ["tk", "triton"]}


class Distance(NamedTuple):
    """Between two smoothed loss curves, in nats per byte: the largest difference and its root mean square."""

    max: float
    rms: float

    @classmethod
    def between(cls, a: Sequence[float], b: Sequence[float]) -> Distance:
        """Of curves of equal length."""
        differences = [abs(x - y) for x, y in zip(a, b, strict=True)]
        return cls(max(differences), math.sqrt(statistics.fmean(x * x for x in differences)))

    def within(self, band: Distance) -> bool:
        """Whether neither figure exceeds that of the band."""
        return self.max <= band.max and self.rms <= band.rms


@dataclass
class Training:
    """What became of one training.

    Attributes:
        name: OTHER_ORDER, NO_AUTOCAST or that of the backend. backend: of the mLSTM.
        status: OK, OUTSIDE the band, UNSUPPORTED or FAILED; with a reason unless OK.
        losses: of each step, nats per byte. curve: their mean over a tenth of the steps, moving.
        step_ms: the median. peak_mem_mb: allocated in 2^20 bytes, None on a CPU.
        distance: of the curve from the baseline's.
    """

    name: str
    backend: str
    dtype: str
    status: str = OK
    reason: str = ""
    losses: list[float] = dataclasses.field(default_factory=list)
    curve: list[float] = dataclasses.field(default_factory=list)
    step_ms: float | None = None
    tokens_per_s: float | None = None
    peak_mem_mb: float | None = None
    distance: Distance | None = None

    def figures(self) -> dict[str, Any]:
        """As JSON takes them."""
        found = dataclasses.asdict(self)
        return found | {"distance": self.distance._asdict() if self.distance else None}


@dataclass(frozen=True)
class Task:
    """What all trainings of one run share.

    Attributes:
        op: of `operators.OPERATORS`. text: bytes [N], uint8, on the device.
        seed: of parameters and batches.
    """

    preset: Preset
    op: str
    text: Tensor
    seed: int

    def train(
        self, name: str, backend: str, dtype: str, order: int, advance: Callable[[], object]
    ) -> Training:
        """Train a fresh model; whatever the backend raises is in the result.

        Args:
            dtype: as --dtype takes it.
            order: seed of the batches.
            advance: called after each step.
        """
        found = Training(name, backend, dtype)
        device, preset = self.text.device, self.preset
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        try:
            losses, found.step_ms = self._losses(backend, dtype, order, advance)
        except Exception as error:
            found.status, found.reason = verdict_on(error)
            return found
        finally:
            release(device)
        if device.type == "cuda":
            found.peak_mem_mb = torch.cuda.max_memory_allocated(device) / 2**20
        diverged = next((step for step, loss in enumerate(losses) if not math.isfinite(loss)), None)
        if diverged is not None:
            found.status, found.reason = FAILED, f"the loss of step {diverged} is not finite"
            return found
        found.tokens_per_s = preset.batch * preset.sequence / found.step_ms * 1e3
        found.losses = losses
        found.curve = smooth(losses, preset.tenth)
        return found

    def _losses(
        self, backend: str, dtype: str, order: int, advance: Callable[[], object]
    ) -> tuple[list[float], float]:
        """The loss of each step, and the median time of a step in ms."""
        device, preset = self.text.device, self.preset
        cell = partial(OPERATORS[self.op].call, backend)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = LanguageModel(preset.blocks, preset.width, preset.heads, preset.input_bias, cell)
        model.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), preset.rate, betas=(0.9, 0.95), fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(_rate_factor, preset))
        losses = torch.empty(preset.steps, device=device)
        clock = _Clock(device)
        for step, window in enumerate(self._windows(order)):
            tokens = self.text[window].long()
            with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bf16"):
                logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses[step] = loss.detach()
            clock.mark()
            advance()
        return losses.tolist(), clock.median_ms()

    def _windows(self, order: int) -> Tensor:
        """Where the batches lie in the text [steps, B, S + 1], each row as long as inputs and targets."""
        preset, device = self.preset, self.text.device
        generator = torch.Generator().manual_seed(order)
        last = len(self.text) - preset.sequence
        starts = torch.randint(last, (preset.steps, preset.batch, 1), generator=generator)
        return (starts + torch.arange(preset.sequence + 1)).to(device)


class _Clock:
    """Time from mark to mark; on a GPU by events, so that the host enqueues ahead as in any training."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[Any] = []
        self.mark()

    def mark(self) -> None:
        if self.device.type == "cuda":
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def median_ms(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(self.marks))
        return 1e3 * statistics.median(b - a for a, b in itertools.pairwise(self.marks))


def smooth(losses: Sequence[float], window: int) -> list[float]:
    """Moving means over `window` steps; the last one is that of the last steps."""
    return [statistics.fmean(losses[end - window : end]) for end in range(window, len(losses) + 1)]


def _rate_factor(preset: Preset, step: int) -> float:
    """Linear warm-up, then along a cosine to LEAST_RATE of the peak."""
    warm_up = min(1.0, (step + 1) / preset.tenth)
    cosine = 0.5 + 0.5 * math.cos(math.pi * step / preset.steps)
    return warm_up * (LEAST_RATE + (1 - LEAST_RATE) * cosine)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m tfla_tk.bench train`."""
    add = parser.add_argument
    add("--op", choices=list(OPS), default="exp", help="input gate of the mLSTM (default: exp)")
    add("--preset", choices=list(PRESETS), help="size of the model and the training (default: by the device)")
    add(
        "--backends",
        type=compare.argument(_backends),
        metavar="NAME,..",
        help="as the functions of this package take them, such as tk or triton:xl_chunk_64 "
        "(default: tk, triton, and without a GPU the forms of the reference)",
    )
    add(
        "--dtype",
        choices=("bf16", "fp32"),
        help="bf16: autocast, with fp32 parameters; fp32: without (default: bf16 on a GPU, fp32 without one)",
    )
    add("--steps", type=int, help="of the training, in place of the preset's")
    add(
        "--input-bias",
        type=compare.argument(compare.finite),
        metavar="BIAS",
        help="of the input gates at the start (default: -10, nearly closed, as in xLSTM-7B); near 0 the "
        "exponential gate's normaliser takes part from the start",
    )
    add("--seed", type=int, default=0, help="of text, parameters and batches (default: 0)")
    add("--json", type=Path, metavar="PATH", help="write figures and curves as JSON")
    add("--plot", type=Path, metavar="PATH", help="draw the smoothed curves (png, svg or pdf)")
    add("--commit", metavar="HASH", help="what is trained, recorded where this is no git checkout")


def run(args: argparse.Namespace) -> int:
    """Train on every backend, print the table and keep the curves; returns the exit status.

    Raises:
        UsageError: options that are wrong, or a file that cannot be written.
        ValueError: the baseline itself fails.
    """
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    where = "gpu" if on_gpu else "cpu"
    preset = PRESETS[args.preset or where]
    changes = {"steps": args.steps, "input_bias": args.input_bias}
    preset = dataclasses.replace(preset, **{name: x for name, x in changes.items() if x is not None})
    if args.plot:
        plots.check_path(args.plot)
    if preset.steps < 1:
        raise UsageError(f"--steps: expected a positive number, got {preset.steps}")
    check_outputs(args)
    text = make_text(preset.text_bytes, args.seed)
    entropy = bigram_entropy(text)
    provenance = environment.provenance(device, args.commit)
    place = provenance["gpu"] or f"CPU, {counted(torch.get_num_threads(), 'thread')}"
    environment.fetch_thunderkittens()
    console = compare.make_console()
    console.print(
        f"{place}; torch {provenance['torch']}; triton {provenance['triton']}; run {provenance['run']}\n"
        f"{preset}\n"
        f"Loss: nats per byte, the final one a mean over {preset.tenth} steps; "
        f"{entropy:.2f} at best without mLSTM layers.\n"
        f"Distance: from the smoothed curve of the first training; that of {OTHER_ORDER!r} is the band."
    )
    console.print()
    on_device = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    task = Task(preset, OPS[args.op], on_device, args.seed)
    dtype = args.dtype or ("bf16" if on_gpu else "fp32")
    backends = args.backends or BACKENDS[where]
    plans = [
        (BASELINE, BASELINE, dtype, args.seed),
        (OTHER_ORDER, BASELINE, dtype, args.seed + 1),
        *[(NO_AUTOCAST, BASELINE, "fp32", args.seed)] * (dtype != "fp32"),
        *((name, name, dtype, args.seed) for name in backends),
    ]
    with compare.make_progress() as bar:
        bar_task = bar.add_task("", total=len(plans) * preset.steps)
        trainings = []
        for number, plan in enumerate(plans):
            bar.update(bar_task, description=plan[0], completed=number * preset.steps)
            trainings.append(task.train(*plan, advance=partial(bar.advance, bar_task)))
    band = judge(trainings)
    console.print(_table(f"{TITLES[task.op]}, {preset.steps} steps", trainings))
    for training in trainings:
        if training.reason:
            console.print(f"  {training.name}: {training.reason}", markup=False, soft_wrap=True)
    if args.json:
        figures = {
            **provenance,
            "op": task.op,
            "seed": args.seed,
            "preset": dataclasses.asdict(preset),
            "bigram_entropy": entropy,
            "band": band._asdict(),
            "trainings": [training.figures() for training in trainings],
        }
        args.json.write_text(json.dumps(figures) + "\n", encoding="utf-8")
    if args.plot:
        curves = {f"{each.name}, {each.dtype}": each.curve for each in trainings if each.curve}
        plots.write_curves(args.plot, TITLES[task.op], curves, preset.tenth)
    return 1 if any(_counts_as_failure(each, each.name in (args.backends or ())) for each in trainings) else 0


def judge(trainings: Sequence[Training]) -> Distance:
    """Fill in each distance from the first training, the baseline; the second one's is the band, returned.

    The distance of a training without autocast is shown, not judged: all of its model rounds otherwise.

    Raises:
        ValueError: one of those two has no curve.
    """
    baseline, other, *rest = trainings
    for training in (baseline, other):
        if training.status != OK:
            raise ValueError(f"{training.name}: {training.reason}")
    band = other.distance = Distance.between(other.curve, baseline.curve)
    for training in rest:
        if training.status == OK:
            training.distance = Distance.between(training.curve, baseline.curve)
            if training.name != NO_AUTOCAST and not training.distance.within(band):
                training.status = OUTSIDE
                training.reason = "farther from the reference than another order of batches"
    return band


def _counts_as_failure(training: Training, named: bool) -> bool:
    if training.status in (FAILED, OUTSIDE):
        return named or split_backend(training.backend)[0] in ("tk", "reference")
    return training.status == UNSUPPORTED and named


def _table(title: str, trainings: Sequence[Training]) -> Table:
    table = Table(title=title, title_justify="left", highlight=False)
    table.add_column("training", no_wrap=True)
    shown = [name for name in _cells(trainings[0]) if any(_cells(each)[name] for each in trainings)]
    for name in shown:
        table.add_column(name, justify="right")
    for training in trainings:
        cells = _cells(training)
        style = "dim" if training.status in (FAILED, UNSUPPORTED) else None
        table.add_row(Text(training.name), *(cells[name] for name in shown), style=style)
    return table


def _cells(training: Training) -> dict[str, str]:
    """By column; empty where there is no figure."""
    distance, memory, speed = training.distance, training.peak_mem_mb, training.tokens_per_s
    return {
        "dtype": training.dtype,
        "first loss": f"{training.losses[0]:.4f}" if training.losses else "",
        "final loss": f"{training.curve[-1]:.4f}" if training.curve else "",
        "max distance": f"{distance.max:.1e}" if distance else "",
        "rms distance": f"{distance.rms:.1e}" if distance else "",
        "step ms": milliseconds(training.step_ms) if training.step_ms else "",
        "tokens/s": f"{speed:,.0f}" if speed else "",
        "peak MB": f"{memory:,.0f}" if memory else "",
        "status": training.status,
    }


def _backends(text: str) -> list[str]:
    names = compare.backends(text)
    for name in names:
        split_backend(name)
    return names
