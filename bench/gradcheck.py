"""`tfla-tk gradcheck`: the error of every gradient of every backend, against fp64 on the same rounded inputs.

What is differentiated is <h, dh>, and with last states + <c_T, dc> + <n_T, dn>, for random dh, dc and dn. The
truth is autograd through the fp64 reference: the recurrent form, or the chunkwise one where that would take
too much memory or time; the heading of each table says which.

Exit status: 0 done; 1 where one of this package's backends, or any variant named by --backends, is past its
tolerance or raises, or where a named one serves no case at all. What the Triton kernels do not compute
exactly (docs/triton-baselines.md) is shown and is no failure unless they were named.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

import tfla_tk
from tfla_tk import reference
from tfla_tk.calls.mlstm import check_mlstm
from tfla_tk.ops import mlstm as ops

from . import accuracy, compare, environment, report
from .accuracy import RANDOM, SLICE_BYTES, TOLERANCES, Truth
from .inputs import DTYPES, FORGET_BIAS, mlstm_inputs
from .operators import OPERATORS, Operator
from .results import rounded
from .runner import FAILED, OK, UNSUPPORTED, Outcome, guard, refuse_quadratic, release
from .shapes import CHUNK, Shape
from .variants import FAMILIES, SCHEDULES, Variant, find_variants

CPU_SHAPES = (Shape(2, 64, 2, 16, 32), Shape(1, 100, 2, 32, 64))
# the third has a tail, the last is cut into segments
GPU_SHAPES = (
    Shape(2, 512, 4, 128, 256),
    Shape(1, 512, 2, 256, 512),
    Shape(1, 1000, 2, 64, 64),
    Shape(1, 8192, 4, 128, 256),
)
OP = "op"  # the registered op of the tk backend, which computes the explicit backward formulas on a CPU
WHICH = "fwdbwd"
RECURRENT_TOKENS = 1024  # longer ones would take minutes
KEPT_PER_STEP = 4  # matrices [K, V] that autograd keeps per token of the recurrent form
RESET = 30.0  # e^-30 is nothing beside 1 in fp32


@dataclass(frozen=True)
class Problem:
    """A public function with its options.

    Attributes:
        recurrent: the reference's recurrent form, of the arguments of `operator.truth` without chunk_size.
        stabilised: the state has an m.
    """

    operator: Operator
    recurrent: Callable[..., Any]
    stabilised: bool

    @property
    def normalize(self) -> bool:
        """Whether h is divided by the normaliser; without it there is no n to differentiate."""
        return bool(self.operator.options.get("normalize", True))

    @property
    def title(self) -> str:
        """For example "mLSTM, sigmoid input gate, normalize=False"."""
        chosen = [f"{name}={value}" for name, value in self.operator.options.items()]
        return ", ".join([report.TITLES[self.operator.name], *chosen])


_SIG = OPERATORS["mlstm_sig"]
PROBLEMS: dict[str, tuple[Problem, ...]] = {
    "mlstm_exp": (Problem(OPERATORS["mlstm_exp"], reference.mlstm_recurrent, True),),
    "mlstm_sig": tuple(
        Problem(replace(_SIG, options={"normalize": normalize}), reference.mlstm_siging_recurrent, False)
        for normalize in (True, False)
    ),
}


class Case(NamedTuple):
    """What the inputs are: a pattern of the gates, with an initial state, with gradients of the last one."""

    gates: str
    initial: bool = False
    last: bool = False

    def __str__(self) -> str:
        return "+".join([self.gates, *["initial"] * self.initial, *["last"] * self.last])


def _default(tensors: dict[str, Tensor]) -> None:
    """i ~ N(0, 1), f ~ FORGET_BIAS + N(0, 1)."""


def _normal(tensors: dict[str, Tensor]) -> None:
    """f ~ N(0, 1): half of the state is forgotten in each step."""
    tensors["f"] -= FORGET_BIAS


def _extreme(tensors: dict[str, Tensor]) -> None:
    """Tokens that forget all or nothing or are skipped, and a stabiliser that leaps in the middle.

    q, k and n are positive: the normaliser has no floor here, and near q.n = 0 every kernel would lose
    digits.
    """
    for name in ("q", "k", "n_initial"):
        if name in tensors:
            tensors[name].abs_()
    i, f = tensors["i"], tensors["f"]
    f[..., 6::7] = -RESET
    f[..., 3::7] = RESET
    i[..., ::5] = -RESET
    i[..., i.shape[-1] // 2 :] += RESET


GATES: dict[str, Callable[[dict[str, Tensor]], None]] = {
    "default": _default,
    "normal": _normal,
    "extreme": _extreme,
}
CASES = {str(case): case for case in itertools.starmap(Case, itertools.product(GATES, *[(False, True)] * 2))}
DEFAULT_CASES = [
    *(name for name, case in CASES.items() if case.gates == "default"),
    "normal+initial+last",
    "extreme+initial+last",
]


class Checked(NamedTuple):
    """What one variant did in one case. form: of the reference that is the truth."""

    problem: Problem
    case: Case
    form: str
    outcome: Outcome


class Settings(NamedTuple):
    """What all checks of one run share."""

    device: torch.device
    dtype: str
    seed: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `tfla-tk gradcheck`."""
    compare.add_problem_arguments(
        parser,
        shapes="four with 512 to 8192 tokens on a GPU, two with 64 and 100 without one",
        families=(*FAMILIES, OP),
        schedules=[name for name in SCHEDULES if name != "auto"],
    )
    add = parser.add_argument
    add(
        "--cases",
        type=compare.names("cases", CASES),
        default=DEFAULT_CASES,
        metavar="CASE,..",
        help=f"gates ({', '.join(GATES)}), with +initial (from a state), +last (gradients of the last state) "
        f"(default: {', '.join(DEFAULT_CASES)})",
    )
    add("--dtype", choices=list(DTYPES), help="of q, k, v (default: bf16 on a GPU, fp32 without one)")
    add("--seed", type=int, default=0, help="of the random inputs (default: 0)")
    add("--json", type=Path, metavar="PATH", help="write every error as JSON")


def run(args: argparse.Namespace) -> int:
    """Check what the options describe; returns the exit status.

    Raises:
        ValueError: a backend or a shape that cannot be checked.
    """
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    shapes: Sequence[Shape] = args.shapes or (GPU_SHAPES if on_gpu else CPU_SHAPES)
    if any(shape.T < 2 for shape in shapes):
        raise ValueError("--shapes: expected at least 2 tokens, the gradients of a single one vanish")
    cases = [CASES[name] for name in args.cases]
    settings = Settings(device, args.dtype or ("bf16" if on_gpu else "fp32"), args.seed)
    facts = environment.provenance(device)
    contests = [
        (problem, shape, find_checked(problem.operator, args.backends, args.schedules, on_gpu=on_gpu))
        for op in args.op
        for problem in PROBLEMS[op]
        for shape in shapes
    ]
    environment.fetch_thunderkittens()
    console = compare.make_console()
    _print_head(console, settings, facts)
    found: list[Checked] = []
    with compare.make_progress() as bar:
        task = bar.add_task("", total=len(cases) * sum(1 + len(variants) for *_, variants in contests))

        def advance(label: str) -> None:
            bar.update(task, advance=1, description=label)

        for problem, shape, variants in contests:
            checked = [
                one for case in cases for one in run_case(problem, shape, case, variants, settings, advance)
            ]
            release(device)
            _print_contest(console, checked, settings.dtype)
            found += checked
    counts = Counter(one.outcome.status for one in found)
    console.print(
        f"{len(found)} checks: {counts[OK]} within tolerance, {counts[FAILED]} failed, "
        f"{counts[UNSUPPORTED]} not served."
    )
    if args.json:
        lines = [json.dumps({**_row(one, settings), **facts}, allow_nan=False) for one in found]
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
    return 1 if has_failed(found) else 0


def find_checked(
    operator: Operator, backends: Sequence[str] | None, schedules: Sequence[str], *, on_gpu: bool
) -> list[Variant]:
    """The variants to check: those of `find_variants`, and without a GPU the registered op.

    Raises:
        ValueError: a name that is no backend, or the op on a GPU.
    """
    if backends is not None and OP in backends and on_gpu:
        raise ValueError(f"backends: {OP} is the registered op on a CPU; on a GPU that is tk")
    others = None if backends is None else [name for name in backends if name != OP]
    found = find_variants(operator, others, schedules, on_gpu=on_gpu)
    if OP in backends if backends is not None else not on_gpu:
        found.append(Variant(OP, OP, named=backends is not None))
    return found


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


def make_case(
    problem: Problem, shape: Shape, case: Case, settings: Settings
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of a call by their names, and the cotangents of h and of the last c and n."""
    tensors = mlstm_inputs(shape, DTYPES[settings.dtype], settings.device, seed=settings.seed)
    generator = torch.Generator(settings.device).manual_seed(settings.seed + 1)

    def normal(*size: int) -> Tensor:
        return torch.randn(shape.B, shape.H, *size, generator=generator, device=settings.device)

    # c, and n where there is one
    sizes = {"c": (shape.K, shape.V), "n": (shape.K,)}
    states = {name: sizes[name] for name in ("c", "n")[: 1 + problem.normalize]}
    cotangents = {"h": normal(shape.T, shape.V).to(tensors["v"].dtype)}
    if case.last:
        cotangents |= {name: normal(*size) for name, size in states.items()}
    if case.initial:
        tensors |= {f"{name}_initial": normal(*size) for name, size in states.items()}
        if problem.stabilised:
            tensors["m_initial"] = normal(1)
    GATES[case.gates](tensors)
    return tensors, cotangents


def gradients(
    function: Callable[..., Any], tensors: Mapping[str, Tensor], cotangents: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The gradient of every tensor but m_initial, "dq" to "dn_initial"; zeros where a function drops it.

    Args:
        function: takes `tensors` by name and return_last_states; returns h or (h, (c, n, ..)).
        cotangents: of h, or of h, c and, with a normaliser, n, in this order.
    """
    leaves = {name: tensor.detach().requires_grad_(name != "m_initial") for name, tensor in tensors.items()}
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    output = function(**leaves, return_last_states="c" in cotangents)
    h, state = output if isinstance(output, tuple) else (output, ())
    found = torch.autograd.grad(
        (h, *state)[: len(cotangents)],
        list(wanted.values()),
        list(cotangents.values()),
        allow_unused=True,
        materialize_grads=True,
    )
    return {f"d{name}": grad for name, grad in zip(wanted, found, strict=True)}


def compute_truth(
    problem: Problem, shape: Shape, tensors: Mapping[str, Tensor], cotangents: Mapping[str, Tensor]
) -> tuple[str, Truth]:
    """The form of the reference that was taken and its gradients in fp64, on the pairs of `pick_pairs`."""
    device = tensors["v"].device
    pairs = accuracy.pick_pairs(problem.operator, shape, WHICH, device)
    indices = torch.tensor(pairs, device=device)
    batch, head = indices // shape.H, indices % shape.H
    size = SLICE_BYTES[device.type] // (8 * KEPT_PER_STEP * shape.T * shape.K * shape.V)
    form, function = "recurrent", partial(problem.recurrent, **problem.operator.options)
    if size < 1 or shape.T > RECURRENT_TOKENS:
        form, size = "chunkwise", accuracy.slice_size(shape, WHICH, device)
        function = partial(problem.operator.truth, chunk_size=CHUNK, **problem.operator.options)
    parts: list[dict[str, Tensor]] = []
    for b, h in zip(batch.split(size), head.split(size), strict=True):
        exact, given = (
            {name: tensor[b, h].double().unsqueeze(0) for name, tensor in group.items()}
            for group in (tensors, cotangents)
        )
        parts.append(gradients(function, exact, given))
    values = {name: torch.cat([part[name][0] for part in parts]) for name in parts[0]}
    return form, Truth({RANDOM: values}, {}, batch, head, partial=len(pairs) < shape.B * shape.H)


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
    if outcome.variant.call == OP:
        function: Callable[..., Any] = partial(_registered_op, problem)
    else:
        public = getattr(tfla_tk, problem.operator.function)
        function = partial(public, backend=outcome.variant.call, **problem.operator.options)
    accuracy.poison(tensors["v"].numel() * tensors["v"].element_size(), settings.device)
    outcome.errors = truth.errors(RANDOM, gradients(function, tensors, cotangents))
    outcome.incomplete = truth.partial
    wrong = accuracy.failures(outcome.errors, TOLERANCES[settings.dtype])
    if wrong:
        outcome.stop(FAILED, "error against fp64: " + ", ".join(wrong))


def _registered_op(problem: Problem, *, return_last_states: bool, **tensors: Tensor) -> Any:
    """The path of the tk backend with the op's own implementation for the tensors' device."""
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
        sigmoid_gate=not problem.stabilised,
        normalize=problem.normalize,
        return_last_states=return_last_states,
        eps=1e-6,
        chunk_size=CHUNK,
    )
    return ops.mlstm(call, "auto", q, k, v, i, f, c, n, m, None)


def has_failed(found: Iterable[Checked]) -> bool:
    """Whether something of ours or something named is wrong, or a named variant served no case."""
    served: dict[str, bool] = {}
    for *_, outcome in found:
        variant = outcome.variant
        if outcome.status == FAILED and (variant.named or variant.family != "triton"):
            return True
        if variant.named:
            served[variant.call] = served.get(variant.call, False) or outcome.status != UNSUPPORTED
    return not all(served.values())


def _print_head(console: Console, settings: Settings, facts: Mapping[str, Any]) -> None:
    place = facts["gpu"] or f"CPU, {torch.get_num_threads()} threads"
    console.print(f"{place}; torch {facts['torch']}; triton {facts['triton']}; {settings.dtype}")
    limits: dict[float, list[str]] = {}
    for name, limit in TOLERANCES[settings.dtype].items():
        if name != "h":
            limits.setdefault(limit, []).append(name)
    told = "; ".join(f"{', '.join(names)} {limit:.3g}" for limit, names in limits.items())
    if settings.device.type != "cuda":
        console.print(f"No CUDA GPU: the forms of the PyTorch reference, and the registered {OP}.")
    console.print("Error: relative Frobenius against the fp64 reference on the same inputs.")
    console.print(f"Past tolerance where marked with '!': {told}.\n", soft_wrap=True)


def _print_contest(console: Console, checked: Sequence[Checked], dtype: str) -> None:
    """The table of one problem and shape, then why rows have no figures."""
    console.print(errors_table(checked, dtype))
    reasons: dict[str, list[str]] = {}
    for _, case, _, outcome in checked:
        if outcome.status != OK and not outcome.errors:
            line = f"{outcome.variant.call}: {outcome.status}: {outcome.reason}"
            reasons.setdefault(line, []).append(str(case))
    cases = len({one.case for one in checked})
    for line, names in reasons.items():
        where = "" if len(names) == cases else f" [{', '.join(names)}]"
        console.print(f"  {line}{where}", markup=False, soft_wrap=True)
    if any(one.outcome.incomplete for one in checked):
        console.print("  on a part of the heads")
    console.print()


def errors_table(checked: Sequence[Checked], dtype: str) -> Table:
    """A row per case and variant of one problem and shape, a column per gradient."""
    problem, _, form, first = checked[0]
    title = f"{problem.title}, gradients, {first.shape}; truth: {form} in fp64"
    # as the reference names them: a variant that was not served has none
    names = ["dq", "dk", "dv", "di", "df"]
    if any(one.case.initial for one in checked):
        names += ["dc_initial", "dn_initial"][: 1 + problem.normalize]
    table = Table(title=title, title_justify="left", highlight=False)
    table.add_column("case", no_wrap=True)
    table.add_column("backend", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for place, (_, case, _, outcome) in enumerate(checked):
        cells = [_cell(name, outcome.errors, dtype) for name in names]
        if not outcome.errors:
            cells[0] = Text(outcome.status)
        ends = place + 1 == len(checked) or checked[place + 1].case != case
        style = "" if outcome.errors else "dim"
        table.add_row(str(case), Text(outcome.variant.call), *cells, style=style, end_section=ends)
    return table


def _cell(name: str, errors: Mapping[str, float], dtype: str) -> Text:
    if name not in errors:
        return Text("")
    if accuracy.failures({name: errors[name]}, TOLERANCES[dtype]):
        return Text(f"{errors[name]:.1e}!", style="bold red")
    return Text(f"{errors[name]:.1e} ")


def _row(checked: Checked, settings: Settings) -> dict[str, Any]:
    """One check as it stands in the JSON file; an error that is not finite is null."""
    problem, case, form, outcome = checked
    errors = outcome.errors
    return {
        "op": outcome.op,
        "normalize": problem.normalize,
        "shape": outcome.shape.as_dict(),
        "case": str(case),
        "backend": outcome.variant.call,
        "dtype": settings.dtype,
        "seed": settings.seed,
        "truth": form,
        "partial": outcome.incomplete,
        "status": outcome.status,
        "reason": outcome.reason,
        "rel_err": {name: rounded(x, 3) if x == x else None for name, x in errors.items()},
        "tolerance": {name: TOLERANCES[settings.dtype][name] for name in errors},
    }
