"""`tfla-tk gradcheck`: the error of every gradient of every backend, against fp64 on the same rounded inputs.

What is differentiated is <h, dh>, and with last states + <c_T, dc> + <n_T, dn>, for random dh, dc and dn; in
the other families <o, do> and <S_T, dS>. The truth is autograd through the fp64 reference: the
recurrent form, or the chunkwise one where that would take too much memory or time; the heading of each table
says which.

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
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from tfla_tk.calls.mlstm import check_mlstm
from tfla_tk.core.errors import UnsupportedError
from tfla_tk.ops import mlstm as ops

from . import accuracy, compare, environment, fla, report
from .accuracy import RANDOM, SLICE_BYTES, Truth
from .inputs import DTYPES, FORGET_BIAS, LAYOUTS, OFFSETS
from .operators import OPERATORS, Operator, last_state_of, output_of, raw_delta_rule, split_offsets
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
WITH_OP = ("mlstm_exp", "mlstm_sig")
WHICH = "fwdbwd"
RECURRENT_TOKENS = 1024  # longer ones would take minutes
KEPT_PER_STEP = 4  # matrices [K, V] that autograd keeps per token of the recurrent form
RESET = 30.0  # e^-30 is nothing beside 1 in fp32


@dataclass(frozen=True)
class Problem:
    """A public function with its options."""

    operator: Operator

    @property
    def normalize(self) -> bool:
        """Whether h is divided by the normaliser; without it there is no n to differentiate."""
        return "n_initial" in self.operator.states

    @property
    def title(self) -> str:
        """For example "mLSTM, sigmoid input gate, normalize=False"."""
        chosen = [f"{name}={value}" for name, value in self.operator.options.items()]
        return ", ".join([report.TITLES[self.operator.name], *chosen])

    def cases(self, chosen: Sequence[Case]) -> list[Case]:
        """Those that differ for this operator: without a gate there is nothing but the default."""
        if self.operator.gates:
            return list(chosen)
        return list(dict.fromkeys(case._replace(gates="default") for case in chosen))


def _problems(operator: Operator) -> tuple[Problem, ...]:
    """The options of an operator that are checked.

    Of mLSTMsig with and without the normaliser; of the gated delta rule with raw inputs, too.
    """
    if operator.name == "gated_delta_rule":
        return Problem(operator), Problem(raw_delta_rule(operator))
    if operator.name != "mlstm_sig":
        return (Problem(operator),)
    normalized = replace(operator, options={"normalize": True}, states={**operator.states, "n_initial": "K"})
    return Problem(normalized), Problem(operator)


PROBLEMS: dict[str, tuple[Problem, ...]] = {name: _problems(operator) for name, operator in OPERATORS.items()}


class Case(NamedTuple):
    """What the inputs are: a pattern of the gates, with an initial state, with gradients of the last one."""

    gates: str
    initial: bool = False
    last: bool = False

    def __str__(self) -> str:
        return "+".join([self.gates, *["initial"] * self.initial, *["last"] * self.last])


# the mean of the forget gates' inputs; at 0 half of the state is forgotten in each step
GATES = {"default": FORGET_BIAS, "normal": 0.0, "extreme": FORGET_BIAS}


def _make_extreme(operator: Operator, tensors: dict[str, Tensor]) -> None:
    """Tokens that forget all or nothing, write all or nothing or are skipped, and a stabiliser that leaps.

    Where there is a normaliser q, k and n are positive: it has no floor here, and near q.n = 0 every kernel
    would lose digits.
    """
    gates = {name: operator.head_first(tensors[name]) for name in operator.gates}
    if "beta" in gates:
        gates["beta"][..., ::5] = 0
        gates["beta"][..., 2::5] = 1
    if "g" in gates:
        gates["g"][:, :, 6::7] = -RESET
        gates["g"][:, :, 3::7] = 0
    if "g" in gates and gates["g"].dim() == 4:
        # a few channels of every token
        gates["g"][..., 2::5] = -RESET
        gates["g"][..., 4::5] = 0
    if "i" not in gates:
        return
    for name in ("q", "k", "n_initial"):
        if name in tensors:
            tensors[name].abs_()
    i, f = gates["i"], gates["f"]
    f[..., 6::7] = -RESET
    f[..., 3::7] = RESET
    i[..., ::5] = -RESET
    i[..., i.shape[-1] // 2 :] += RESET


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
    if any(shape.N for shape in shapes) and any(case.last for case in cases):
        raise ValueError("--cases: expected none with +last for packed sequences, such as default+initial")
    settings = Settings(device, args.dtype or ("bf16" if on_gpu else "fp32"), args.seed)
    facts = environment.provenance(device)
    served = {op: compare.shapes_of(OPERATORS[op], shapes) for op in args.op}
    contests = [
        (problem, shape, find_checked(problem.operator, args.backends, args.schedules, on_gpu=on_gpu))
        for op in args.op
        for problem in PROBLEMS[op]
        for shape in served[op]
    ]
    environment.fetch_thunderkittens()
    console = compare.make_console()
    _print_head(console, settings, facts, [problem.operator for op in args.op for problem in PROBLEMS[op]])
    found: list[Checked] = []
    with compare.make_progress() as bar:
        steps = sum(len(problem.cases(cases)) * (1 + len(variants)) for problem, _, variants in contests)
        task = bar.add_task("", total=steps)

        def advance(label: str) -> None:
            bar.update(task, advance=1, description=label)

        for problem, shape, variants in contests:
            checked = [
                one
                for case in problem.cases(cases)
                for one in run_case(problem, shape, case, variants, settings, advance)
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
    if OP in backends if backends is not None else not on_gpu and operator.name in WITH_OP:
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
    operator = problem.operator
    dtype, bias = DTYPES[settings.dtype], GATES[case.gates]
    tensors = operator.inputs(shape, dtype, settings.device, LAYOUTS[0], settings.seed, bias)
    generator = torch.Generator(settings.device).manual_seed(settings.seed + 1)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=settings.device)

    rows = (shape.N or shape.B, shape.value_heads)
    states = {name: (*rows, *(getattr(shape, dim) for dim in dims)) for name, dims in operator.states.items()}
    # drawn head-first, whatever the layout
    drawn = normal(shape.B, shape.value_heads, shape.T, shape.V).to(tensors["v"].dtype)
    cotangents = {operator.output: operator.head_first(drawn).contiguous()}
    if case.last:
        cotangents |= {name: normal(*size) for name, size in states.items()}
    if case.initial:
        tensors |= {name: normal(*size) for name, size in states.items()}
        tensors |= {name: normal(*rows, size) for name, size in operator.constants.items()}
    if case.gates == "extreme":
        _make_extreme(operator, tensors)
    return tensors, cotangents


def gradients(
    function: Callable[..., Any],
    operator: Operator,
    tensors: Mapping[str, Tensor],
    cotangents: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """The gradient of every tensor but the constants, "dq" to "dn_initial"; zeros where a function drops it.

    Args:
        function: takes `tensors` by name and `operator.last`; returns the output or (output, last state).
        cotangents: of the output, or of it and the parts of the last state, named as the initial ones are.
    """
    differentiated, offsets = split_offsets(tensors)
    leaves = {
        name: tensor.detach().requires_grad_(name not in operator.constants)
        for name, tensor in differentiated.items()
    }
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    result = function(**leaves, **offsets, **{operator.last: len(cotangents) > 1})
    found = torch.autograd.grad(
        (output_of(result), *last_state_of(result))[: len(cotangents)],
        list(wanted.values()),
        list(cotangents.values()),
        allow_unused=True,
        materialize_grads=True,
    )
    return {f"d{name}": grad for name, grad in zip(wanted, found, strict=True)}


def compute_truth(
    problem: Problem, shape: Shape, tensors: Mapping[str, Tensor], cotangents: Mapping[str, Tensor]
) -> tuple[str, Truth]:
    """The form of the reference that was taken and its gradients in fp64, on what `accuracy.pick` picks."""
    operator, device = problem.operator, tensors["v"].device
    picks = accuracy.pick(operator, shape, WHICH, tensors)
    count, length = picks.padded or (1, shape.T)
    tokens = count * length * shape.group
    size = SLICE_BYTES[device.type] // (8 * KEPT_PER_STEP * tokens * shape.K * shape.V)
    form, function = "recurrent", operator.recurrent
    if size < 1 or length > RECURRENT_TOKENS or function is None:
        form, size = "chunkwise", accuracy.slice_size(shape, WHICH, device, picks.padded)
        function = partial(operator.truth, chunk_size=CHUNK)
    turn, states = operator.head_first, {*operator.states, *operator.constants}
    # the padding of packed sequences changes their last states
    assert not (picks.padded and len(cotangents) > 1)
    differentiated, _ = split_offsets(tensors)
    parts: list[dict[str, Tensor]] = []
    for part in picks.split(size):
        exact, given = (
            {
                name: part.take_state(tensor).double()
                if name in states
                else turn(part.take(turn(tensor)).double())
                for name, tensor in group.items()
            }
            for group in (differentiated, cotangents)
        )
        if part.filled is not None:
            given[operator.output] = turn(turn(given[operator.output]) * part.filled[:, None, :, None])
        options = {**operator.options, **part.decays(operator, shape.value_heads)}
        found = gradients(partial(function, **options), operator, exact, given)
        parts.append(
            {
                name: part.state_rows(grad) if name.removeprefix("d") in states else part.rows(turn(grad))
                for name, grad in found.items()
            }
        )
    values = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return form, Truth({RANDOM: values}, {}, picks, operator)


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
    return ops.mlstm(call, "auto", q, k, v, i, f, c, n, m, tensors.get(OFFSETS))


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


def _print_head(
    console: Console, settings: Settings, facts: Mapping[str, Any], chosen: Iterable[Operator]
) -> None:
    place = facts["gpu"] or f"CPU, {torch.get_num_threads()} threads"
    console.print(f"{place}; torch {facts['torch']}; triton {facts['triton']}; {settings.dtype}")
    limits: dict[float, list[str]] = {}
    for operator in chosen:
        for name, limit in operator.tolerances(settings.dtype).items():
            if name != operator.output and name not in limits.setdefault(limit, []):
                limits[limit].append(name)
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
    for note in dict.fromkeys(note for one in checked for note in one.outcome.notes):
        console.print(f"  {note}", markup=False, soft_wrap=True)
    console.print()


def errors_table(checked: Sequence[Checked], dtype: str) -> Table:
    """A row per case and variant of one problem and shape, a column per gradient."""
    problem, _, form, first = checked[0]
    title = f"{problem.title}, gradients, {first.shape}; truth: {form} in fp64"
    # as the reference names them: a variant that was not served has none
    operator = problem.operator
    names = [f"d{name}" for name in ("q", "k", "v", *operator.gates)]
    if any(one.case.initial for one in checked):
        names += [f"d{name}" for name in operator.states]
    table = Table(title=title, title_justify="left", highlight=False)
    table.add_column("case", no_wrap=True)
    table.add_column("backend", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for place, (_, case, _, outcome) in enumerate(checked):
        limits = operator.tolerances(dtype)
        cells = [_cell(name, outcome.errors, limits) for name in names]
        if not outcome.errors:
            cells[0] = Text(outcome.status)
        ends = place + 1 == len(checked) or checked[place + 1].case != case
        style = "" if outcome.errors else "dim"
        table.add_row(str(case), Text(outcome.variant.call), *cells, style=style, end_section=ends)
    return table


def _cell(name: str, errors: Mapping[str, float], limits: Mapping[str, float]) -> Text:
    if name not in errors:
        return Text("")
    if accuracy.failures({name: errors[name]}, limits):
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
        "partial": any(note.startswith("error on a part") for note in outcome.notes),
        "status": outcome.status,
        "reason": outcome.reason,
        "rel_err": {name: rounded(x, 3) if x == x else None for name, x in errors.items()},
        "tolerance": {name: problem.operator.tolerances(settings.dtype)[name] for name in errors},
    }
