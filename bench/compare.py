"""`tfla-tk compare`: time the backends side by side, with errors against fp64.

On a CUDA GPU: the ThunderKittens kernels, the Triton kernels, FlashQLA and mamba_ssm where installed, and the
PyTorch reference at the benchmark shapes. Without one: the reference's forms at small shapes.

Exit status: 0 done; 1 where one of this package's backends, or any backend named by --backends, computes a
wrong result or raises; a named backend that cannot serve the call counts as well, and a named family that
serves no call at all; 2 for wrong options, before anything runs. A baseline that fails is shown and not
timed.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console

from . import environment, plots, report, results
from .ceilings import measure_ceilings
from .inputs import FORGET_BIAS, LAYOUTS
from .operators import FUNCTIONS, OPERATORS, Operator
from .runner import FAILED, UNSUPPORTED, Outcome, Settings, run_contest, unserved
from .shapes import PASSES, SETS, Shape, parse_shapes
from .timing import CudaStopwatch, HostStopwatch, Plan
from .tuning import configs_compiled_by
from .usage import UsageError, add_options, argument, check_outputs, finite, listed, names, positive
from .variants import COMPARED, FAMILIES, Variant, check_named, find_variants

GPU_PLAN = Plan(repeats=50, budget_ms=1500)
GPU_QUICK = Plan(repeats=10, budget_ms=500)
CPU_PLAN = Plan(repeats=7, budget_ms=1000)
CPU_QUICK = Plan(repeats=3, budget_ms=200)


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
    parser: argparse.ArgumentParser, *, shapes: str, families: Sequence[str] = FAMILIES
) -> None:
    """What is computed and by which backends. shapes: the default ones, in words. families: what
    --backends names."""
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
        type=argument(listed),
        metavar="NAME,..",
        help=f"of {', '.join(families)} and variants such as triton:xl_chunk_128 "
        "(default: all on a GPU, reference without one)",
    )


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `carry_out`: the inputs, how long to measure, and where the rows go."""
    add = parser.add_argument
    add_options(parser, "--dtype")
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
    add_options(parser, "--json", "--csv", "--plot", "--update-results", "--commit", "--seed")
    add(
        "--tuning-threads",
        type=argument(positive),
        default=1,
        metavar="N",
        help="that compile the configurations of a Triton autotuner before it times them (default: 1)",
    )
    add_options(parser, "--quick")


def run(args: argparse.Namespace) -> int:
    """Run the comparison that the options describe; returns the exit status."""
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
    return carry_out(args, contests)


def shapes_of(operator: Operator, shapes: Sequence[Shape]) -> list[Shape]:
    """Those of the shapes that an operator has; what is left out is told."""
    found: list[Shape] = []
    for shape in shapes:
        try:
            operator.check_shape(shape)
        except UsageError as error:
            if shape == shapes[-1] and not found:
                raise UsageError(f"--shapes: {error}") from error
            report.print_lines(report.make_console(), [f"{shape} left out: {error}"])
        else:
            found.append(shape)
    return found


def carry_out(args: argparse.Namespace, contests: Sequence[Contest]) -> int:
    """Run contests, print their tables and keep their rows, those of a run that is cut off, too; returns
    the exit status."""
    console = report.make_console()
    record = Record(args)
    if args.plot:
        plots.check_path(args.plot)
    environment.fetch_thunderkittens()
    settings = _settings(args)
    _print_head(console, settings)
    outcomes: list[Outcome] = []
    with configs_compiled_by(args.tuning_threads), report.make_progress() as bar:
        task = bar.add_task("", total=len(contests))
        for operator, which, shape, variants in contests:
            title = f"{operator.name} {which} {shape}"

            def tell(label: str, title: str = title) -> None:
                bar.update(task, description=f"{title}: {label}")

            found = run_contest(operator, shape, which, variants, settings, tell)
            bar.advance(task)
            outcomes += found
            heading = f"{results.TITLES[operator.name]}, {report.PASS_TITLES[which]}, {shape}"
            report.print_table(console, heading, report.contest_table(found))
            report.print_lines(console, [*(f"  {line}" for line in report.reasons(found)), ""])
            record.add([outcome.row for outcome in found if outcome.row is not None])
    record.tell(console)
    if args.csv:
        report.write_csv(args.csv, record.rows)
    if args.plot and record.rows:
        plots.write_plot(args.plot, record.rows)
    return 1 if any(map(_counts_as_failure, outcomes)) or unserved(outcomes) else 0


def _settings(args: argparse.Namespace) -> Settings:
    device = environment.current_device()
    on_gpu = device.type == "cuda"
    plan = (GPU_QUICK if args.quick else GPU_PLAN) if on_gpu else (CPU_QUICK if args.quick else CPU_PLAN)
    return Settings(
        device=device,
        dtype=args.dtype or ("bf16" if on_gpu else "fp32"),
        layout=args.layout,
        forget_bias=args.forget_bias,
        seed=args.seed,
        plan=plan,
        stopwatch=CudaStopwatch(device) if on_gpu else HostStopwatch(device),
        provenance=environment.provenance(device, args.commit),
        ceilings=measure_ceilings(device) if on_gpu else None,
    )


class Record:
    """Where the rows of a run go, each time some are there: --json, --update-results."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.rows: list[results.Row] = []
        self._json, self._path = args.json, record_path(args)
        check_outputs(args)
        self._earlier = [] if self._path is None else results.load(self._path)

    def add(self, rows: Sequence[results.Row]) -> None:
        """Keep more rows."""
        self.rows += rows
        if self._json:
            results.write(self._json, self.rows)
        if self._path is not None:
            results.write(self._path, results.merge(self._earlier, self.rows))

    def tell(self, console: Console) -> None:
        """Print what is on record now."""
        if self._path is not None:
            console.print(f"{len(self.rows)} rows merged into {self._path.name}")


def record_path(args: argparse.Namespace) -> Path | None:
    """Where --update-results writes; UsageError for figures that are not fit for the record."""
    if not args.update_results:
        return None
    if not torch.cuda.is_available():
        raise UsageError("--update-results: expected a CUDA GPU, found none")
    if args.quick:
        raise UsageError(f"--update-results: --quick runs fewer than {results.RECORD_REPEATS} times")
    if not (args.commit or environment.git_commit(environment.ROOT)):
        raise UsageError("--update-results: this is no git checkout, name what is measured with --commit")
    return results.record_path(torch.cuda.get_device_name())


def _print_head(console: Console, settings: Settings) -> None:
    facts = settings.provenance
    conditions = report.conditions_title(settings.layout, settings.forget_bias)
    inputs = ", ".join(filter(None, (settings.dtype, conditions)))
    console.print(f"{environment.heading(facts)}; {inputs}; run {facts['run']}")
    if settings.ceilings is not None:
        console.print(f"Ceilings: {settings.ceilings}. Speed-up: against the fastest correct baseline.")
    else:
        told = "`tfla-tk doctor` tells what is missing for the kernels."
        console.print(f"No CUDA GPU: the forms of the PyTorch reference. {told}")
    console.print(
        "Error: relative Frobenius against the fp64 reference on the same inputs; output, worst gradient.\n"
    )


def _counts_as_failure(outcome: Outcome) -> bool:
    ours = outcome.variant.family in ("tk", "reference")
    if outcome.status == FAILED:
        return ours or outcome.variant.named
    return outcome.status == UNSUPPORTED and outcome.variant.named
