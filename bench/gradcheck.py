"""`tfla-tk gradcheck`: the error of every gradient of every backend, against fp64 on the same rounded inputs.

What is differentiated is <h, dh>, and with last states + <c_T, dc> + <n_T, dn>, for random dh, dc and dn; in
the other families <o, do> and <S_T, dS>. The truth is autograd through the fp64 reference: the
recurrent form, or the chunkwise one where that would take too much memory or time; the heading of each table
says which.

Options and exit status: docs/benchmarks.md. What the Triton kernels do not compute exactly
(docs/triton-baselines.md) is shown and is no failure unless they were named.
"""

import argparse
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor

from . import accuracy, compare, environment, fla, report
from .accuracy import AS_GIVEN
from .inputs import DTYPES, FORGET_BIAS, LAYOUTS, normal_draws
from .operators import OPERATORS, Operator, raw_delta_rule
from .results import TITLES, rounded
from .runner import FAILED, OK, UNSUPPORTED, Outcome, check, lifted_guard, release, unserved
from .shapes import Shape, parse_shapes
from .usage import UsageError, add_options, names
from .variants import Variant

CPU_SHAPES = parse_shapes("2x64x2x16x32,1x100x2x32x64")
# the third has a tail, the last is cut into segments
GPU_SHAPES = parse_shapes("2x512x4x128x256,1x512x2x256x512,1x1000x2x64x64,1x8192x4x128x256")
RESET = 30.0  # e^-30 is nothing beside 1 in fp32


def _problems(operator: Operator) -> tuple[Operator, ...]:
    """An operator with the options that are checked: mLSTMsig with and without the normaliser; the gated
    delta rule and KDA with raw inputs, too, and with the log decay made of A_log and dt_bias."""
    if operator.name in ("gated_delta_rule", "kda"):
        return operator, raw_delta_rule(operator), raw_delta_rule(operator, gate_parameters=True)
    if operator.name == "mlstm_sig":
        states = {**operator.states, "n_initial": "K"}
        return replace(operator, options={"normalize": True}, states=states), operator
    return (operator,)


PROBLEMS = {name: _problems(operator) for name, operator in OPERATORS.items()}


class Case(NamedTuple):
    """What the inputs are: a pattern of the gates, with an initial state, with gradients of the last one."""

    gates: str
    initial: bool = False
    last: bool = False

    def __str__(self) -> str:
        return "+".join([self.gates, *["initial"] * self.initial, *["last"] * self.last])


# the mean of the forget gates' inputs; at 0 half of the state is forgotten in each step
GATES = {"default": FORGET_BIAS, "normal": 0.0, "extreme": FORGET_BIAS}
CASES = {str(case): case for case in itertools.starmap(Case, itertools.product(GATES, *[(False, True)] * 2))}
DEFAULT_CASES = [name for name in CASES if name.startswith("default") or name.endswith("+initial+last")]


def cases_of(operator: Operator, shape: Shape, chosen: list[str] | None) -> list[Case]:
    """Those of the chosen cases that differ for this operator: without a gate the default pattern alone.
    chosen: None for DEFAULT_CASES, of packed sequences without the gradients of the last states: the truth
    is computed on sequences that are padded to the longest, whose last states are others."""
    cases = [CASES[name] for name in (DEFAULT_CASES if chosen is None else chosen)]
    if chosen is None and shape.N is not None:
        cases = [case._replace(last=False) for case in cases]
    if not operator.gates:
        cases = [case._replace(gates="default") for case in cases]
    return list(dict.fromkeys(cases))


def make_case(
    operator: Operator, shape: Shape, case: Case, device: torch.device, dtype: str, seed: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of a call by their names, and the cotangents of the output and of the last states."""
    tensors = operator.inputs(shape, DTYPES[dtype], device, LAYOUTS[0], seed, GATES[case.gates])
    normal = normal_draws(device, seed + 1)
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


def _make_extreme(operator: Operator, tensors: dict[str, Tensor]) -> None:
    """Tokens that forget all or nothing, write all or nothing or are skipped, and a stabiliser that leaps.
    With a normaliser q, k and n are positive: near q.n = 0 every kernel would lose digits."""
    gates = {name: operator.head_first(tensors[name]) for name in operator.gates}
    if "beta" in gates:
        gates["beta"][..., ::5] = 0
        gates["beta"][..., 2::5] = 1
    if "g" in gates:
        gates["g"][:, :, 6::7] = -RESET
        # of what makes the log decay, a large number closes the gate
        gates["g"][:, :, 3::7] = RESET if operator.parameters else 0
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


class Checked(NamedTuple):
    """What one variant did in one case. form: of the reference that is the truth."""

    operator: Operator
    shape: Shape
    case: Case
    form: str
    outcome: Outcome


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `tfla-tk gradcheck`."""
    compare.add_problem_arguments(
        parser, shapes="four with 512 to 8192 tokens on a GPU, two with 64 and 100 without one"
    )
    told = (
        f"gates ({', '.join(GATES)}), with +initial (from a state), +last (gradients of the last state) "
        f"(default: {', '.join(DEFAULT_CASES)}; of packed sequences these without +last)"
    )
    parser.add_argument("--cases", type=names(CASES), metavar="CASE,..", help=told)
    add_options(parser, "--dtype", "--seed")
    add_options(parser, "--json", help="write every error as JSON")
    parser.set_defaults(commit=None, update_results=False)


def run(args: argparse.Namespace) -> int:
    """Check what the options describe; returns the exit status."""
    on_gpu = torch.cuda.is_available()
    given: Sequence[Shape] = args.shapes or ()
    if any(shape.T < 2 for shape in given):
        raise UsageError("--shapes: expected at least 2 tokens, the gradients of a single one vanish")
    if any(shape.N for shape in given) and any(CASES[name].last for name in args.cases or ()):
        raise UsageError("--cases: expected none with +last for packed sequences, such as default+initial")
    contests = [
        (problem, shape, cases_of(problem, shape, args.cases), variants)
        for operator, shapes, variants in compare.problems(args, GPU_SHAPES if on_gpu else CPU_SHAPES)
        for problem in PROBLEMS[operator.name]
        for shape in shapes
        if variants
    ]
    session = environment.Session(args)
    args.dtype = args.dtype or ("bf16" if on_gpu else "fp32")
    _print_head(session, args.dtype, [problem for op in args.op for problem in PROBLEMS[op]])
    found: list[Checked] = []
    with report.make_progress() as bar:
        task = bar.add_task("", total=sum(len(cases) * len(variants) for _, _, cases, variants in contests))

        def advance(label: str) -> None:
            bar.update(task, advance=1, description=label)

        for problem, shape, cases, variants in contests:
            checked = [
                one for case in cases for one in run_case(problem, shape, case, variants, args, advance)
            ]
            release(session.device)
            _print_contest(session, checked, args.dtype)
            found += checked
    counts = Counter(one.outcome.status for one in found)
    session.console.print(
        f"{len(found)} checks: {counts[OK]} within tolerance, {counts[FAILED]} failed, "
        f"{counts[UNSUPPORTED]} not served."
    )
    if args.json:
        lines = [json.dumps({**_row_of(one, args), **session.facts}, allow_nan=False) for one in found]
        args.json.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
    outcomes = [one.outcome for one in found]
    failed = (each.variant for each in outcomes if each.status == FAILED)
    return 1 if unserved(outcomes) or any(x.named or x.family != "triton" for x in failed) else 0


def run_case(
    operator: Operator,
    shape: Shape,
    case: Case,
    variants: Sequence[Variant],
    args: argparse.Namespace,
    advance: Callable[[str], object] = lambda label: None,
) -> list[Checked]:
    """Check every variant in one case with the dtype and the seed of args; whatever one raises is its
    outcome. advance is called with a label after each."""
    device = environment.current_device()
    tensors, cotangents = make_case(operator, shape, case, device, args.dtype, args.seed)
    truth = accuracy.compute_truth(operator, shape, tensors, cotangents, AS_GIVEN, recurrent=True)
    del truth.values[operator.output]  # which `tfla-tk compare` checks
    limits = operator.tolerances(args.dtype)
    found = []
    for variant in variants:
        outcome = Outcome(variant)
        with lifted_guard(operator, [variant], "fwdbwd", device) as lifted:
            outcome.notes += [f"{variant.call}: {fla.NOTE}"] * lifted
            outcome.run(partial(check, outcome, tensors, truth, limits))
        found.append(Checked(operator, shape, case, truth.form, outcome))
        advance(f"{_title_of(operator)}, {shape}, {case}: {variant.call}")
    return found


def _print_head(session: environment.Session, dtype: str, chosen: Iterable[Operator]) -> None:
    limits: dict[float, dict[str, None]] = {}
    for operator in chosen:
        for name, limit in operator.tolerances(dtype).items():
            if name != operator.output:
                limits.setdefault(limit, {})[name] = None
    told = "; ".join(f"{', '.join(names)} {limit:.3g}" for limit, names in limits.items())
    lines = [
        f"{environment.heading(session.facts)}; {dtype}",
        *["No CUDA GPU: the forms of the PyTorch reference."] * (not session.on_gpu),
        "Error: relative Frobenius against the fp64 reference on the same inputs.",
        f"Past tolerance where marked with '!': {told}.\n",
    ]
    session.print_lines(lines)


def _print_contest(session: environment.Session, checked: Sequence[Checked], dtype: str) -> None:
    """The table of one problem and shape, then why rows have no figures."""
    operator, shape, _, form, _ = checked[0]
    title = f"{_title_of(operator)}, gradients, {shape}; truth: {form} in fp64"
    session.print_table(title, _errors_table(checked, dtype))
    reasons: dict[str, list[str]] = {}
    for _, _, case, _, outcome in checked:
        if outcome.status != OK and not outcome.errors:
            line = f"{outcome.variant.call}: {outcome.status}: {outcome.reason}"
            reasons.setdefault(line, []).append(str(case))
    cases = len({one.case for one in checked})
    lines = [line + ("" if len(told) == cases else f" [{', '.join(told)}]") for line, told in reasons.items()]
    lines += dict.fromkeys(note for one in checked for note in one.outcome.notes)
    session.print_lines([*(f"  {line}" for line in lines), ""])


def _title_of(operator: Operator) -> str:
    """For example "mLSTM, sigmoid input gate, normalize=False"."""
    chosen = [f"{name}={value}" for name, value in operator.options.items()]
    return ", ".join([TITLES[operator.name], *chosen])


def _errors_table(checked: Sequence[Checked], dtype: str) -> Table:
    """A row per case and variant of one problem and shape, a column per gradient."""
    operator = checked[0].operator
    # as the reference names them: a variant that was not served has none
    names = [f"d{name}" for name in ("q", "k", "v", *operator.gates, *operator.parameters)]
    if any(one.case.initial for one in checked):
        names += [f"d{name}" for name in operator.states]
    table = report.make_table("case", "backend", numbers=names)
    limits = operator.tolerances(dtype)
    for place, (_, _, case, _, outcome) in enumerate(checked):
        cells = dict.fromkeys(names, Text(""))
        for name, error in outcome.errors.items():
            mark, style = ("!", "bold red") if accuracy.failures({name: error}, limits) else (" ", "")
            cells[name] = Text(f"{error:.1e}{mark}", style=style)
        if not outcome.errors:
            cells["dq"] = Text(outcome.status)
        ends = place + 1 == len(checked) or checked[place + 1].case != case
        style = "" if outcome.errors else "dim"
        table.add_row(str(case), Text(outcome.variant.call), *cells.values(), style=style, end_section=ends)
    return table


def _row_of(checked: Checked, args: argparse.Namespace) -> dict[str, Any]:
    """One check as it stands in the JSON file; an error that is not finite is null."""
    operator, shape, case, form, outcome = checked
    errors, limits = outcome.errors, operator.tolerances(args.dtype)
    return {
        "op": operator.name,
        "normalize": "n_initial" in operator.states,
        "options": operator.options,
        "shape": shape.as_dict(),
        "case": str(case),
        "backend": outcome.variant.call,
        "dtype": args.dtype,
        "seed": args.seed,
        "truth": form,
        "partial": outcome.partial,
        "status": outcome.status,
        "reason": outcome.reason,
        "rel_err": {name: rounded("rel_err", x) if x == x else None for name, x in errors.items()},
        "tolerance": {name: limits[name] for name in errors},
    }
