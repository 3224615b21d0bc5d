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
from typing import Any, NamedTuple

import torch

from tfla_tk.core.dispatch import split_backend

from . import environment, model, plots, report
from .operators import OPERATORS
from .results import TITLES
from .runner import FAILED, OK, UNSUPPORTED, release, verdict_on
from .text import make_text, windows
from .usage import UsageError, add_options, argument, check_outputs, finite, listed

OPS = {"exp": "mlstm_exp", "sig": "mlstm_sig"}
BASELINE, OTHER_ORDER = "reference", "reference, other order"
OUTSIDE = "OUTSIDE"
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

    @property
    def rates(self) -> list[float]:
        """The learning rate of each step: a linear warm-up, then along a cosine to LEAST_RATE of the peak."""
        found = []
        for step in range(self.steps):
            cosine = 0.5 + 0.5 * math.cos(math.pi * step / self.steps)
            warm_up = min(1.0, (step + 1) / self.tenth)
            found.append(self.rate * warm_up * (LEAST_RATE + (1 - LEAST_RATE) * cosine))
        return found


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
        name: OTHER_ORDER or that of the backend. backend: of the mLSTM.
        order: seed of the batches.
        status: OK, OUTSIDE the band, UNSUPPORTED or FAILED; with a reason unless OK.
        losses: of each step, nats per byte. curve: their mean over a tenth of the steps, moving.
        step_ms: the median. peak_mem_mb: allocated in 2^20 bytes, None on a CPU.
        distance: of the curve from the baseline's.
    """

    name: str
    backend: str
    order: int
    status: str = OK
    reason: str = ""
    losses: list[float] = dataclasses.field(default_factory=list)
    curve: list[float] = dataclasses.field(default_factory=list)
    step_ms: float | None = None
    peak_mem_mb: float | None = None
    distance: Distance | None = None

    def figures(self) -> dict[str, Any]:
        """As JSON takes them."""
        found = dataclasses.asdict(self)
        return found | {"distance": self.distance._asdict() if self.distance else None}

    def cells(self) -> dict[str, str]:
        """As the table shows them, by column."""
        if not self.curve:
            return {"status": self.status}
        distance, memory = self.distance, self.peak_mem_mb
        return {
            "final loss": f"{self.curve[-1]:.4f}",
            "max distance": f"{distance.max:.1e}" if distance else "",
            "rms distance": f"{distance.rms:.1e}" if distance else "",
            "step ms": report.milliseconds(self.step_ms) if self.step_ms else "",
            "peak MB": f"{memory:,.0f}" if memory else "",
            "status": self.status,
        }


@dataclass(frozen=True)
class Task:
    """What all trainings of one run share.

    Attributes:
        op: of `operators.OPERATORS`. seed: of parameters and text.
        dtype: "bf16" for autocast over fp32 parameters, "fp32" for none.
    """

    preset: Preset
    op: str
    dtype: str
    seed: int
    device: torch.device

    def carry_out(self, training: Training, advance: Callable[[], object]) -> None:
        """Train a fresh model and fill in the training; whatever the backend raises is in it.

        Args:
            advance: called after each step.
        """
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        try:
            losses, training.step_ms = self._losses(training, advance)
        except Exception as error:
            training.status, training.reason = verdict_on(error)
            return
        finally:
            release(self.device)
        if on_gpu:
            training.peak_mem_mb = torch.cuda.max_memory_allocated(self.device) / 2**20
        diverged = next((step for step, loss in enumerate(losses) if not math.isfinite(loss)), None)
        if diverged is not None:
            training.status, training.reason = FAILED, f"the loss of step {diverged} is not finite"
            return
        training.losses, training.curve = losses, smooth(losses, self.preset.tenth)

    def _losses(self, training: Training, advance: Callable[[], object]) -> tuple[list[float], float]:
        """The loss of each step, and the median time of a step in ms."""
        preset = self.preset
        cell = partial(OPERATORS[self.op].call, training.backend)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            fresh = model.LanguageModel(preset.blocks, preset.width, preset.heads, preset.input_bias, cell)
        fresh.to(self.device)
        text = make_text(preset.text_bytes, self.seed)
        batches = windows(text, (preset.steps, preset.batch), preset.sequence + 1, training.order)
        marks = [_mark(self.device)]

        def advance_and_mark() -> None:
            marks.append(_mark(self.device))
            advance()

        losses = model.train(
            fresh,
            fresh,
            batches.to(self.device),
            preset.rates,
            autocast=self.dtype == "bf16",
            advance=advance_and_mark,
        )
        return losses.tolist(), _median_ms(marks, self.device)


def _mark(device: torch.device) -> Any:
    """A point in time; on a GPU an event, so that the host enqueues ahead as in any training."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _median_ms(marks: Sequence[Any], device: torch.device) -> float:
    """Median time from mark to mark."""
    if device.type != "cuda":
        return 1e3 * statistics.median(b - a for a, b in itertools.pairwise(marks))
    torch.cuda.synchronize(device)
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks))


def smooth(losses: Sequence[float], window: int) -> list[float]:
    """Moving means over `window` steps; the last one is that of the last steps."""
    return [statistics.fmean(losses[end - window : end]) for end in range(window, len(losses) + 1)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m tfla_tk.bench train`."""
    add = parser.add_argument
    add("--op", choices=list(OPS), default="exp", help="input gate of the mLSTM (default: exp)")
    add("--preset", choices=list(PRESETS), help="size of the model and the training (default: by the device)")
    add(
        "--backends",
        type=argument(_backends),
        metavar="NAME,..",
        help="as the functions of this package take them, such as tk or triton:xl_chunk_64 "
        "(default: tk, triton, and without a GPU the forms of the reference)",
    )
    add_options(
        parser,
        "--dtype",
        choices=("bf16", "fp32"),
        help="bf16: autocast, with fp32 parameters; fp32: without (default: bf16 on a GPU, fp32 without one)",
    )
    add("--steps", type=int, help="of the training, in place of the preset's")
    add(
        "--input-bias",
        type=argument(finite),
        metavar="BIAS",
        help="of the input gates at the start (default: -10, nearly closed, as in xLSTM-7B); near 0 the "
        "exponential gate's normaliser takes part from the start",
    )
    add_options(parser, "--seed", help="of text, parameters and batches (default: 0)")
    add_options(parser, "--json", help="write figures and curves as JSON")
    add_options(parser, "--plot", help="draw the smoothed curves (png, svg or pdf)")
    add_options(parser, "--commit")


def run(args: argparse.Namespace) -> int:
    """Train on every backend, print the table and keep the curves; returns the exit status.

    Raises:
        UsageError: options that are wrong, or a file that cannot be written.
        ValueError: the baseline itself fails.
    """
    device = environment.current_device()
    where = "gpu" if device.type == "cuda" else "cpu"
    preset = PRESETS[args.preset or where]
    changes = {"steps": args.steps, "input_bias": args.input_bias}
    preset = dataclasses.replace(preset, **{name: x for name, x in changes.items() if x is not None})
    if args.plot:
        plots.check_path(args.plot)
    if preset.steps < 1:
        raise UsageError(f"--steps: expected a positive number, got {preset.steps}")
    check_outputs(args)
    provenance = environment.provenance(device, args.commit)
    environment.fetch_thunderkittens()
    console = report.make_console()
    dtype = args.dtype or ("bf16" if where == "gpu" else "fp32")
    console.print(
        f"{environment.heading(provenance)}; {dtype}; run {provenance['run']}\n{preset}\n"
        f"Loss: nats per byte, the final one a mean over {preset.tenth} steps.\n"
        f"Distance: from the smoothed curve of the first training; that of {OTHER_ORDER!r} is the band.\n"
    )
    task = Task(preset, OPS[args.op], dtype, args.seed, device)
    trainings = [
        Training(BASELINE, BASELINE, args.seed),
        Training(OTHER_ORDER, BASELINE, args.seed + 1),
        *(Training(name, name, args.seed) for name in args.backends or BACKENDS[where]),
    ]
    with report.make_progress() as bar:
        bar_task = bar.add_task("", total=len(trainings) * preset.steps)
        for number, training in enumerate(trainings):
            bar.update(bar_task, description=training.name, completed=number * preset.steps)
            task.carry_out(training, partial(bar.advance, bar_task))
    band = judge(trainings)
    title = f"{TITLES[task.op]}, {preset.steps} steps"
    lines = [(training.name, training.cells()) for training in trainings]
    report.print_table(console, title, report.filled_table("training", lines))
    report.print_lines(console, (f"  {each.name}: {each.reason}" for each in trainings if each.reason))
    if args.json:
        figures = {
            **provenance,
            "op": task.op,
            "dtype": dtype,
            "seed": args.seed,
            "preset": dataclasses.asdict(preset),
            "band": band._asdict(),
            "trainings": [training.figures() for training in trainings],
        }
        args.json.write_text(json.dumps(figures) + "\n", encoding="utf-8")
    if args.plot:
        curves = {each.name: each.curve for each in trainings if each.curve}
        plots.write_curves(args.plot, f"{TITLES[task.op]}, {dtype}", curves, preset.tenth)
    return 1 if any(_counts_as_failure(each, each.name in (args.backends or ())) for each in trainings) else 0


def judge(trainings: Sequence[Training]) -> Distance:
    """Fill in each distance from the first training, the baseline; the second one's is the band, returned.

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
            if not training.distance.within(band):
                training.status = OUTSIDE
                training.reason = "farther from the reference than another order of batches"
    return band


def _counts_as_failure(training: Training, named: bool) -> bool:
    if training.status in (FAILED, OUTSIDE):
        return named or split_backend(training.backend)[0] in ("tk", "reference")
    return training.status == UNSUPPORTED and named


def _backends(text: str) -> list[str]:
    names = listed(text)
    for name in names:
        split_backend(name)
    return names
