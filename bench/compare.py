"""`tfla-tk compare`: time the backends side by side, with errors against fp64.

On a CUDA GPU: the ThunderKittens kernels, the Triton kernels, FlashQLA and mamba_ssm where installed, and the
PyTorch reference at the benchmark shapes. Without one: the reference's forms at small shapes.

Options and exit status: docs/benchmarks.md.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from . import environment, plots, report, results
from .inputs import LAYOUTS
from .operators import FUNCTIONS, OPERATORS, Operator
from .runner import FAILED, OK, Contest, Outcome, Settings, run_contest, unserved
from .shapes import PASSES, SETS, Shape, parse_shapes
from .timing import CudaStopwatch, Plan, Stopwatch, measure_ceilings
from .tuning import configs_compiled_by
from .usage import UsageError, add_options, argument, listed, names, positive
from .variants import COMPARED, FAMILIES, Variant, check_named, find_variants

# on a GPU, with --quick
PLANS = {
    (True, False): Plan(repeats=50, budget_ms=1500),
    (True, True): Plan(repeats=10, budget_ms=500),
    (False, False): Plan(repeats=7, budget_ms=1000),
    (False, True): Plan(repeats=3, budget_ms=200),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `tfla-tk compare`."""
    add_problem_arguments(parser, shapes="main on a GPU, small without one", families=COMPARED)
    told: dict[str, Any] = {"metavar": "PASS,..", "help": "of fwd, fwdbwd (default: fwd)"}
    parser.add_argument("--pass", dest="passes", type=names(PASSES), default=["fwd"], **told)
    add_run_arguments(parser)


def add_problem_arguments(
    parser: argparse.ArgumentParser, *, shapes: str, families: Sequence[str] = FAMILIES
) -> None:
    """What is computed and by which backends. shapes: the default ones, in words. families: what
    --backends names."""
    add = parser.add_argument
    told = f"of {', '.join(OPERATORS)}, or public functions such as chunk_gla (default: all)"
    add("--op", type=names(OPERATORS, FUNCTIONS), default=list(OPERATORS), metavar="OP,..", help=told)
    told = (
        f"comma-separated: {', '.join(SETS)}, or BxTxHxKxV such as 8x8192x16x128x256, behind it xN.. for "
        f"packed sequences, xHV.. for heads of v (default: {shapes})"
    )
    add("--shapes", type=argument(parse_shapes), metavar="SHAPES", help=told)
    told = (
        f"of {', '.join(families)} and variants such as triton:xl_chunk_128 "
        "(default: all on a GPU, reference without one)"
    )
    add("--backends", type=argument(listed), metavar="NAME,..", help=told)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `carry_out`: the inputs, how long to measure, and where the rows go."""
    inputs, files = ("--dtype", "--layout", "--forget-bias"), ("--json", "--csv", "--plot")
    add_options(parser, *inputs, *files, "--update-results", "--commit", "--seed")
    told = "that compile the configurations of a Triton autotuner before it times them (default: 1)"
    parser.add_argument("--tuning-threads", type=argument(positive), default=1, metavar="N", help=told)
    add_options(parser, "--quick")


def run(args: argparse.Namespace) -> int:
    """Run the comparison that the options describe; returns the exit status."""
    for op in args.op:
        if args.layout != LAYOUTS[0] and OPERATORS[op].layout != LAYOUTS[0]:
            expected = f"expected {LAYOUTS[0]} for {op}, which has no other"
            raise UsageError(f"--layout: {expected}, got {args.layout}")
    default = SETS["main" if torch.cuda.is_available() else "small"]
    contests = [
        Contest(operator, which, shape, variants)
        for operator, shapes, variants in problems(args, default, rivals=True)
        for which in args.passes
        for shape in (shapes[:1] if args.quick else shapes)
        if variants
    ]
    return carry_out(args, contests)


def problems(
    args: argparse.Namespace, default: Sequence[Shape], *, rivals: bool = False
) -> list[tuple[Operator, list[Shape], list[Variant]]]:
    """The operators that the options name, each with those of the shapes and of the backends that it has.
    rivals: as `find_variants` takes it."""
    chosen = [OPERATORS[op] for op in args.op]
    check_named(chosen, args.backends, rivals=rivals)
    find = partial(find_variants, backends=args.backends, on_gpu=torch.cuda.is_available(), rivals=rivals)
    return [(operator, shapes_of(operator, args.shapes or default), find(operator)) for operator in chosen]


def shapes_of(operator: Operator, shapes: Sequence[Shape]) -> list[Shape]:
    """Those of the shapes that an operator has; what is left out is told."""
    found: list[Shape] = []
    for shape in shapes:
        try:
            operator.check_shape(shape)
        except UsageError as error:
            if shape == shapes[-1] and not found:
                raise UsageError(f"--shapes: {error}") from error
            environment.make_console().print(f"{shape} left out: {error}", markup=False, soft_wrap=True)
        else:
            found.append(shape)
    return found


def carry_out(args: argparse.Namespace, contests: Sequence[Contest]) -> int:
    """Run contests, print their tables and keep their rows, those of a run that is cut off, too; returns
    the exit status."""
    if args.plot:
        plots.check_path(args.plot)
    session = environment.Session(args)
    on_gpu, device = session.on_gpu, session.device
    settings = Settings(
        device=device,
        dtype=args.dtype or ("bf16" if on_gpu else "fp32"),
        layout=args.layout,
        forget_bias=args.forget_bias,
        seed=args.seed,
        plan=PLANS[on_gpu, args.quick],
        stopwatch=(CudaStopwatch if on_gpu else Stopwatch)(device),
        provenance=session.facts,
        ceilings=measure_ceilings(device) if on_gpu else None,
    )
    _print_head(session, settings)
    outcomes: list[Outcome] = []
    with configs_compiled_by(args.tuning_threads), report.make_progress() as bar:
        task = bar.add_task("", total=len(contests))
        for contest in contests:
            operator, which, shape, _ = contest

            def tell(label: str, title: str = f"{operator.name} {which} {shape}") -> None:
                bar.update(task, description=f"{title}: {label}")

            found = run_contest(contest, settings, tell)
            bar.advance(task)
            outcomes += found
            heading = f"{results.TITLES[operator.name]}, {report.PASS_TITLES[which]}, {shape}"
            session.print_table(heading, report.contest_table(found))
            session.print_lines([*(f"  {line}" for line in report.reasons(found)), ""])
            session.add([outcome.row for outcome in found if outcome.row is not None])
    session.tell()
    if args.csv:
        report.write_csv(args.csv, session.rows)
    if args.plot and session.rows:
        plots.write_plot(args.plot, session.rows)
    return 1 if any(map(_counts_as_failure, outcomes)) or unserved(outcomes) else 0


def _print_head(session: environment.Session, settings: Settings) -> None:
    conditions = report.conditions_title(vars(settings))
    inputs = ", ".join(filter(None, (settings.dtype, conditions)))
    told = f"{environment.heading(session.facts)}; {inputs}; run {session.facts['run']}\n"
    if settings.ceilings is not None:
        told += f"Ceilings: {settings.ceilings}. Speed-up: against the fastest correct baseline."
    else:
        told += "No CUDA GPU: the forms of the PyTorch reference. "
        told += "`tfla-tk doctor` tells what is missing for the kernels."
    errors = "relative Frobenius against the fp64 reference on the same inputs; output, worst gradient."
    session.console.print(f"{told}\nError: {errors}\n")


def _counts_as_failure(outcome: Outcome) -> bool:
    ours = outcome.variant.family in ("tk", "reference")
    return outcome.status != OK and (outcome.variant.named or (ours and outcome.status == FAILED))
