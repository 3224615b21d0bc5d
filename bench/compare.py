"""`tfla-tk compare`: time the backends side by side, with errors against fp64.

On a CUDA GPU: the ThunderKittens kernels, the Triton kernels, FlashQLA and mamba_ssm where installed, and the
PyTorch reference at the benchmark shapes. Without one: the reference's forms at small shapes, and what is
missing for the rest.

Exit status: 0 done; 1 where one of this package's backends, or any backend named by --backends, computes a
wrong result or raises; a named backend that cannot serve the call counts as well, and a named family that
serves no call at all; 2 for wrong options, before anything runs. A baseline that fails is shown and not
timed.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tfla_tk.core.checks import counted, shown_name

from . import environment, plots, report, results
from .ceilings import measure_ceilings
from .inputs import DTYPES, FORGET_BIAS, LAYOUTS
from .operators import FUNCTIONS, OPERATORS, Operator
from .runner import FAILED, RECORD_REPEATS, UNSUPPORTED, Outcome, Settings, run_contest, steps_of, unserved
from .shapes import PASSES, SETS, Shape, parse_shapes
from .timing import CpuStopwatch, CudaStopwatch, Plan
from .tuning import configs_compiled_by
from .usage import UsageError, check_outputs
from .variants import COMPARED, FAMILIES, Variant, check_named, find_variants

GPU_PLAN = Plan(repeats=50, budget_ms=1500)
GPU_QUICK = Plan(repeats=10, budget_ms=500)
CPU_PLAN = Plan(repeats=7, budget_ms=1000)
CPU_QUICK = Plan(repeats=3, budget_ms=200)


PIPED_WIDTH = 140

Parsed = TypeVar("Parsed")


class Contest(NamedTuple):
    """One table: the variants of an operator on one shape and pass."""

    operator: Operator
    which: str
    shape: Shape
    variants: Sequence[Variant]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `tfla-tk compare`."""
    add_problem_arguments(parser, shapes="main on a GPU, small without one", families=COMPARED)
    parser.add_argument(
        "--pass",
        dest="passes",
        type=names(PASSES),
        default=["fwd"],
        metavar="PASS,..",
        help="of fwd, fwdbwd (default: fwd)",
    )
    add_run_arguments(parser)


def add_problem_arguments(
    parser: argparse.ArgumentParser,
    *,
    shapes: str,
    families: Sequence[str] = FAMILIES,
) -> None:
    """The options that say what is computed and by which backends.

    Args:
        shapes: the default ones, in words.
        families: what --backends names.
    """
    ops, sets = ", ".join(OPERATORS), ", ".join(SETS)
    add = parser.add_argument
    add(
        "--op",
        type=names(OPERATORS, FUNCTIONS),
        default=list(OPERATORS),
        metavar="OP,..",
        help=f"of {ops}, or public functions such as chunk_gla (default: all)",
    )
    add(
        "--shapes",
        type=argument(parse_shapes),
        metavar="SHAPES",
        help=f"comma-separated: {sets}, or BxTxHxKxV such as 8x8192x16x128x256, behind it xN.. for packed "
        f"sequences, xHV.. for heads of v (default: {shapes})",
    )
    add(
        "--backends",
        type=argument(backends),
        metavar="NAME,..",
        help=f"of {', '.join(families)} and variants such as triton:xl_chunk_128 "
        "(default: all on a GPU, reference without one)",
    )


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `carry_out`: the inputs, how long to measure, and where the rows go."""
    add = parser.add_argument
    add("--dtype", choices=list(DTYPES), help="of q, k, v (default: bf16 on a GPU, fp32 without one)")
    add(
        "--layout",
        choices=LAYOUTS,
        default=LAYOUTS[0],
        help="memory order of q, k, v of mLSTM: bnsd contiguous (default), bsnd as models pass them",
    )
    add(
        "--forget-bias",
        type=argument(finite),
        default=FORGET_BIAS,
        metavar="BIAS",
        help=f"mean of the forget gates' inputs (default: {FORGET_BIAS:g}); at 12 they forget nothing",
    )
    add("--json", type=Path, metavar="PATH", help="write the rows of this run as JSON")
    add("--csv", type=Path, metavar="PATH", help="write the rows of this run as CSV")
    add("--plot", type=Path, metavar="PATH", help="draw the rows of this run (png, svg or pdf)")
    add("--update-results", action="store_true", help="merge the rows into bench/results/<gpu>.json")
    add(
        "--commit",
        metavar="HASH",
        help="what is measured, recorded in the rows where this is no git checkout",
    )
    add("--seed", type=int, default=0, help="of the random inputs (default: 0)")
    add(
        "--tuning-threads",
        type=argument(positive),
        default=1,
        metavar="N",
        help="that compile the configurations of a Triton autotuner before it times them (default: 1)",
    )
    add("--quick", action="store_true", help="the first of the shapes only, and fewer repeats")


def run(args: argparse.Namespace) -> int:
    """Run the comparison that the options describe; returns the exit status.

    Raises:
        UsageError: options that do not go together.
    """
    on_gpu = torch.cuda.is_available()
    check_named([OPERATORS[op] for op in args.op], args.backends, rivals=True)
    shapes: Sequence[Shape] = args.shapes or SETS["main" if on_gpu else "small"]
    for op in args.op:
        if args.layout != LAYOUTS[0] and OPERATORS[op].layout != LAYOUTS[0]:
            raise UsageError(
                f"--layout: expected {LAYOUTS[0]} for {op}, which has no other, got {args.layout}"
            )
    variants = {op: find_variants(OPERATORS[op], args.backends, on_gpu=on_gpu, rivals=True) for op in args.op}
    served = {op: shapes_of(OPERATORS[op], shapes) for op in args.op}
    contests = [
        Contest(OPERATORS[op], which, shape, variants[op])
        for op in args.op
        for which in args.passes
        for shape in (served[op][:1] if args.quick else served[op])
        if variants[op]
    ]
    return carry_out(args, contests, on_gpu=on_gpu)


def shapes_of(operator: Operator, shapes: Sequence[Shape]) -> list[Shape]:
    """Those of the shapes that an operator has; what is left out is told.

    Raises:
        UsageError: it has none of them.
    """
    found: list[Shape] = []
    for shape in shapes:
        try:
            operator.check_shape(shape)
        except UsageError as error:
            if shape == shapes[-1] and not found:
                raise UsageError(f"--shapes: {error}") from error
            make_console().print(f"{shape} left out: {error}", markup=False, soft_wrap=True)
        else:
            found.append(shape)
    return found


def carry_out(args: argparse.Namespace, contests: Sequence[Contest], *, on_gpu: bool) -> int:
    """Run contests, print their tables and keep their rows; returns the exit status.

    Args:
        args: the options of `add_run_arguments`.

    Raises:
        UsageError: options that do not go together, or a file that cannot be written.
    """
    console = make_console()
    record = record_path(args, on_gpu)
    if args.plot:
        plots.check_path(args.plot)
    check_outputs(args)
    environment.fetch_thunderkittens()
    settings = _settings(args, on_gpu)
    _print_head(console, settings, on_gpu)

    earlier = [] if record is None else results.load(record)

    def keep(outcomes: Sequence[Outcome]) -> None:
        if args.json:
            results.write(args.json, _rows(outcomes))
        if record is not None:
            results.write(record, results.merge(earlier, _rows(outcomes)))

    with configs_compiled_by(args.tuning_threads):
        outcomes = _run_all(contests, settings, console, keep)
    rows = _rows(outcomes)
    if record is not None:
        console.print(f"{len(rows)} rows merged into {record.name}")
    if args.csv:
        report.write_csv(args.csv, rows)
    if args.plot and rows:
        plots.write_plot(args.plot, rows)
    lacking = environment.missing()
    if lacking:
        console.print("Missing for the full comparison:")
        for line in lacking:
            console.print(f"  - {line}", markup=False, soft_wrap=True)
    return 1 if any(map(_counts_as_failure, outcomes)) or unserved(outcomes) else 0


def _rows(outcomes: Sequence[Outcome]) -> list[results.Row]:
    return [outcome.row for outcome in outcomes if outcome.row is not None]


def _run_all(
    contests: Sequence[Contest],
    settings: Settings,
    console: Console,
    keep: Callable[[Sequence[Outcome]], None],
) -> list[Outcome]:
    """Every contest in turn, its table printed as soon as it is done.

    Args:
        keep: given all outcomes so far after every contest, so that a run that is cut off leaves them.
    """
    outcomes: list[Outcome] = []
    with make_progress() as bar:
        task = bar.add_task("", total=sum(steps_of(contest.variants) for contest in contests))
        for operator, which, shape, variants in contests:
            title = f"{operator.name} {which} {shape}"

            def advance(label: str, title: str = title) -> None:
                bar.update(task, advance=1, description=f"{title}: {label}")

            found = run_contest(operator, shape, which, variants, settings, advance)
            outcomes += found
            console.print(report.contest_table(found))
            for line in report.reasons(found):
                console.print(f"  {line}", markup=False, soft_wrap=True)
            console.print()
            keep(outcomes)
    return outcomes


def make_console() -> Console:
    """The console that tables are printed to; wide enough for them where it is piped."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)


def make_progress() -> Progress:
    """A progress bar on stderr, so that the tables can be piped; hidden where that is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())


def _settings(args: argparse.Namespace, on_gpu: bool) -> Settings:
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    plan = (GPU_QUICK if args.quick else GPU_PLAN) if on_gpu else (CPU_QUICK if args.quick else CPU_PLAN)
    return Settings(
        device=device,
        dtype=args.dtype or ("bf16" if on_gpu else "fp32"),
        layout=args.layout,
        forget_bias=args.forget_bias,
        seed=args.seed,
        plan=plan,
        stopwatch=CudaStopwatch(device) if on_gpu else CpuStopwatch(),
        provenance=environment.provenance(device, args.commit),
        ceilings=measure_ceilings(device) if on_gpu else None,
    )


def record_path(args: argparse.Namespace, on_gpu: bool) -> Path | None:
    """Where --update-results writes; refuses figures that are not fit for the record.

    Raises:
        UsageError: no GPU, --quick, or no commit.
    """
    if not args.update_results:
        return None
    if not on_gpu:
        raise UsageError("--update-results: expected a CUDA GPU, found none")
    if args.quick:
        raise UsageError(f"--update-results: --quick runs fewer than {RECORD_REPEATS} times")
    if not (args.commit or environment.git_commit(environment.ROOT)):
        raise UsageError("--update-results: this is no git checkout, name what is measured with --commit")
    return results.record_path(torch.cuda.get_device_name())


def _print_head(console: Console, settings: Settings, on_gpu: bool) -> None:
    facts = settings.provenance
    place = facts["gpu"] if on_gpu else f"CPU, {counted(torch.get_num_threads(), 'thread')}"
    versions = f"torch {facts['torch']}; triton {facts['triton']}"
    conditions = report.conditions_title(settings.layout, settings.forget_bias)
    inputs = ", ".join(filter(None, (settings.dtype, conditions)))
    console.print(f"{place}; {versions}; {inputs}; run {facts['run']}")
    if settings.ceilings is not None:
        console.print(f"Ceilings: {settings.ceilings}. Speed-up: against the fastest correct baseline.")
    else:
        console.print("No CUDA GPU: the forms of the PyTorch reference.")
    console.print(
        "Error: relative Frobenius against the fp64 reference on the same inputs; output, worst gradient."
    )
    console.print()


def _counts_as_failure(outcome: Outcome) -> bool:
    ours = outcome.variant.family in ("tk", "reference")
    if outcome.status == FAILED:
        return ours or outcome.variant.named
    return outcome.status == UNSUPPORTED and outcome.variant.named


def split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def backends(text: str) -> list[str]:
    """The names of a comma-separated list, each once.

    Raises:
        ValueError: there is none.
    """
    found = split(text)
    if not found:
        raise ValueError("expected at least one, got none")
    return list(dict.fromkeys(found))


def finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"expected a finite number, got {text}")
    return number


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"expected a positive number, got {text}")
    return int(text)


def names(allowed: Collection[str], others: Mapping[str, str] | None = None) -> Callable[[str], list[str]]:
    """Parser of a comma-separated list; "all" takes every name.

    Args:
        others: what each name that stands for an allowed one stands for.
    """

    def parse(text: str) -> list[str]:
        chosen = list(allowed) if text == "all" else [(others or {}).get(name, name) for name in split(text)]
        unknown = [name for name in chosen if name not in allowed]
        if unknown or not chosen:
            known = [*allowed, *(others or ())]
            got = ", ".join(shown_name(name, known) for name in unknown) or "nothing"
            raise argparse.ArgumentTypeError(f"expected {', '.join(allowed)} or all, got {got}")
        return list(dict.fromkeys(chosen))

    return parse


def argument(parse: Callable[[str], Parsed]) -> Callable[[str], Parsed]:
    """A parser whose ValueError message argparse shows."""

    def parsed(text: str) -> Parsed:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed
