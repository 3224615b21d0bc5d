"""`tfla-tk gradcheck`: the error of every gradient of every backend, against fp64 on the same rounded inputs.

What is differentiated is <h, dh>, and with last states + <c_T, dc> + <n_T, dn>, for random dh, dc and dn; in
the other families <o, do> and <S_T, dS>. The truth is autograd through the fp64 reference: the
recurrent form, or the chunkwise one where that would take too much memory or time; the heading of each table
says which.

Exit status: 0 done; 1 where one of this package's backends, or any variant named by --backends, is past its
tolerance or raises, or where a named one, or every variant of a named family, serves no case at all; 2 for
wrong options, before anything runs. What the Triton kernels do not compute exactly (docs/triton-baselines.md)
is shown and is no failure unless they were named.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tfla_tk.calls.mlstm import check_mlstm
from tfla_tk.core.errors import UnsupportedError
from tfla_tk.ops import mlstm as ops

from . import accuracy, compare, environment, fla
from .accuracy import RANDOM, Truth
from .gradcheck_cases import (
    CASES,
    DEFAULT_CASES,
    GATES,
    OP,
    PROBLEMS,
    WHICH,
    Case,
    Checked,
    Problem,
    Settings,
    compute_truth,
    gradients,
    make_case,
)
from .gradcheck_report import print_contest, print_head, row_of
from .inputs import DTYPES, OFFSETS
from .operators import OPERATORS, Operator
from .runner import FAILED, OK, UNSUPPORTED, Outcome, guard, refuse_quadratic, release, unserved
from .shapes import CHUNK, Shape
from .usage import UsageError, check_outputs
from .variants import FAMILIES, Variant, check_named, find_variants

CPU_SHAPES = (Shape(2, 64, 2, 16, 32), Shape(1, 100, 2, 32, 64))
# the third has a tail, the last is cut into segments
GPU_SHAPES = (
    Shape(2, 512, 4, 128, 256),
    Shape(1, 512, 2, 256, 512),
    Shape(1, 1000, 2, 64, 64),
    Shape(1, 8192, 4, 128, 256),
)
WITH_OP = ("mlstm_exp", "mlstm_sig")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `tfla-tk gradcheck`."""
    compare.add_problem_arguments(
        parser,
        shapes="four with 512 to 8192 tokens on a GPU, two with 64 and 100 without one",
        families=(*FAMILIES, OP),
    )
    add = parser.add_argument
    add(
        "--cases",
        type=compare.names(CASES),
        metavar="CASE,..",
        help=f"gates ({', '.join(GATES)}), with +initial (from a state), +last (gradients of the last state) "
        f"(default: {', '.join(DEFAULT_CASES)}; of packed sequences these without +last)",
    )
    add("--dtype", choices=list(DTYPES), help="of q, k, v (default: bf16 on a GPU, fp32 without one)")
    add("--seed", type=int, default=0, help="of the random inputs (default: 0)")
    add("--json", type=Path, metavar="PATH", help="write every error as JSON")


def run(args: argparse.Namespace) -> int:
    """Check what the options describe; returns the exit status.

    Raises:
        UsageError: a backend or a shape that cannot be checked, or a file that cannot be written.
    """
    on_gpu = torch.cuda.is_available()
    check_named([OPERATORS[op] for op in args.op], _without_op(args.backends))
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    shapes: Sequence[Shape] = args.shapes or (GPU_SHAPES if on_gpu else CPU_SHAPES)
    if any(shape.T < 2 for shape in shapes):
        raise UsageError("--shapes: expected at least 2 tokens, the gradients of a single one vanish")
    cases = None if args.cases is None else [CASES[name] for name in args.cases]
    if cases is not None and any(shape.N for shape in shapes) and any(case.last for case in cases):
        raise UsageError("--cases: expected none with +last for packed sequences, such as default+initial")
    settings = Settings(device, args.dtype or ("bf16" if on_gpu else "fp32"), args.seed)
    facts = environment.provenance(device)
    served = {op: compare.shapes_of(OPERATORS[op], shapes) for op in args.op}
    variants_of = {op: find_checked(OPERATORS[op], args.backends, on_gpu=on_gpu) for op in args.op}
    contests = [
        (problem, shape, variants_of[op])
        for op in args.op
        for problem in PROBLEMS[op]
        for shape in served[op]
        if variants_of[op]
    ]
    check_outputs(args)
    environment.fetch_thunderkittens()
    console = compare.make_console()
    print_head(console, settings, facts, [problem.operator for op in args.op for problem in PROBLEMS[op]])
    found: list[Checked] = []
    with compare.make_progress() as bar:
        steps = sum(
            len(problem.cases(cases or default_cases(shape))) * (1 + len(variants))
            for problem, shape, variants in contests
        )
        task = bar.add_task("", total=steps)

        def advance(label: str) -> None:
            bar.update(task, advance=1, description=label)

        for problem, shape, variants in contests:
            checked = [
                one
                for case in problem.cases(cases or default_cases(shape))
                for one in run_case(problem, shape, case, variants, settings, advance)
            ]
            release(device)
            print_contest(console, checked, settings.dtype)
            found += checked
    counts = Counter(one.outcome.status for one in found)
    console.print(
        f"{len(found)} checks: {counts[OK]} within tolerance, {counts[FAILED]} failed, "
        f"{counts[UNSUPPORTED]} not served."
    )
    if args.json:
        lines = [json.dumps({**row_of(one, settings), **facts}, allow_nan=False) for one in found]
        args.json.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
    return 1 if has_failed(found) else 0


def default_cases(shape: Shape) -> list[Case]:
    """DEFAULT_CASES, of packed sequences without the gradients of their last states.

    The truth is computed on sequences that are padded to the longest, whose last states are others.
    """
    cases = [CASES[name] for name in DEFAULT_CASES]
    if shape.N is None:
        return cases
    return list(dict.fromkeys(case._replace(last=False) for case in cases))


def find_checked(operator: Operator, backends: Sequence[str] | None, *, on_gpu: bool) -> list[Variant]:
    """The variants to check: those of `find_variants`, and without a GPU the registered op.

    Raises:
        UsageError: a name that is no backend, or the op on a GPU.
    """
    if backends is not None and OP in backends and on_gpu:
        raise UsageError(f"--backends: {OP} is the registered op on a CPU; on a GPU that is tk")
    found = find_variants(operator, _without_op(backends), on_gpu=on_gpu)
    if OP in backends if backends is not None else not on_gpu and operator.name in WITH_OP:
        found.append(Variant(OP, OP, named=backends is not None))
    return found


def _without_op(backends: Sequence[str] | None) -> list[str] | None:
    return None if backends is None else [name for name in backends if name != OP]


def run_case(
    problem: Problem,
    shape: Shape,
    case: Case,
    variants: Sequence[Variant],
    settings: Settings,
    advance: Callable[[str], object] = lambda label: None,
) -> list[Checked]:
    """Check every variant in one case; whatever one raises is its outcome."""
    tensors, cotangents = make_case(problem, shape, case, settings)
    form, truth = compute_truth(problem, shape, tensors, cotangents)
    title = f"{problem.title}, {shape}, {case}"
    advance(f"{title}: fp64 reference")
    found = []
    for variant in variants:
        outcome = Outcome(problem.operator.name, shape, WHICH, variant)
        guard(outcome, partial(_check, problem, outcome, tensors, cotangents, truth, settings))
        found.append(Checked(problem, case, form, outcome))
        advance(f"{title}: {variant.call}")
    return found


def _check(
    problem: Problem,
    outcome: Outcome,
    tensors: Mapping[str, Tensor],
    cotangents: Mapping[str, Tensor],
    truth: Truth,
    settings: Settings,
) -> None:
    """Fill the outcome's errors, and stop it where they exceed the tolerance."""
    refuse_quadratic(outcome)
    operator = problem.operator
    if outcome.variant.call == OP:
        function: Callable[..., Any] = partial(_registered_op, problem)
    else:
        options = {**operator.options, **operator.decay_options}
        function = partial(operator.function_of(outcome.variant.call), **options)
    accuracy.poison(tensors["v"].numel() * tensors["v"].element_size(), settings.device)
    guard = settings.device.type == "cuda" and outcome.variant.call == fla.VARIANT
    with fla.lifted_guard(operator.function) if guard else nullcontext(False) as lifted:
        outcome.errors = truth.errors(RANDOM, gradients(function, operator, tensors, cotangents))
    outcome.notes += [f"{outcome.variant.call}: {fla.NOTE}"] * bool(lifted)
    outcome.notes += [truth.picks.left_out] * truth.partial
    wrong = accuracy.failures(outcome.errors, operator.tolerances(settings.dtype))
    if wrong:
        outcome.stop(FAILED, "error against fp64: " + ", ".join(wrong))


def _registered_op(problem: Problem, *, return_last_states: bool = False, **tensors: Any) -> Any:
    """The path of the tk backend with the op's own implementation for the tensors' device."""
    if problem.operator.name not in WITH_OP:
        raise UnsupportedError(OP, f"no registered op of {problem.operator.name} is checked", "name others")
    q, k, v, i, f = (tensors[name] for name in "qkvif")
    c, n, m = (tensors.get(f"{name}_initial") for name in "cnm")
    call = check_mlstm(
        q,
        k,
        v,
        i,
        f,
        c,
        n,
        m,
        sigmoid_gate=not problem.operator.constants,
        normalize=problem.normalize,
        return_last_states=return_last_states,
        eps=1e-6,
        chunk_size=CHUNK,
    )
    return ops.mlstm(call, q, k, v, i, f, c, n, m, tensors.get(OFFSETS))


def has_failed(found: Iterable[Checked]) -> bool:
    """Whether something of ours or something named is wrong, or a named variant or family served no case."""
    outcomes = [one.outcome for one in found]
    return bool(unserved(outcomes)) or any(
        outcome.status == FAILED and (outcome.variant.named or outcome.variant.family != "triton")
        for outcome in outcomes
    )
