"""What `tfla-tk gradcheck` checks: problems and cases, their inputs, the gradients of the fp64 reference."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import accuracy, report
from .accuracy import RANDOM, SLICE_BYTES, Truth
from .inputs import DTYPES, FORGET_BIAS, LAYOUTS
from .operators import (
    OPERATORS,
    Operator,
    last_state_of,
    output_of,
    raw_delta_rule,
    split_offsets,
    with_gate_parameters,
)
from .runner import Outcome
from .shapes import CHUNK, Shape

OP = "op"  # the registered op of the tk backend, which computes the explicit backward formulas on a CPU
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

    Of mLSTMsig with and without the normaliser; of the gated delta rule with raw inputs, too, and with the
    log decay made of A_log and dt_bias.
    """
    if operator.name == "gated_delta_rule":
        raw = raw_delta_rule(operator)
        return Problem(operator), Problem(raw), Problem(with_gate_parameters(raw))
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
    # a gradient that is a sum over the whole call is told where all of it is picked
    dropped = set() if picks.all_pairs and picks.all_sequences else set(operator.parameters)
    parts: list[dict[str, Tensor]] = []
    for part in picks.split(size):
        exact, given = (
            {name: _take(part, operator, name, tensor, states) for name, tensor in group.items()}
            for group in (differentiated, cotangents)
        )
        if part.filled is not None:
            given[operator.output] = turn(turn(given[operator.output]) * part.filled[:, None, :, None])
        options = {**operator.options, **part.decays(operator, shape.value_heads)}
        found = gradients(partial(function, **options), operator, exact, given)
        parts.append(
            {
                name: _rows(part, operator, name.removeprefix("d"), grad, states)
                for name, grad in found.items()
                if name.removeprefix("d") not in dropped
            }
        )
    values = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    for name in operator.parameters:
        if f"d{name}" in values:
            # the pairs come batch entry by batch entry
            values[f"d{name}"] = values[f"d{name}"].view(-1, shape.value_heads).sum(0)
    return form, Truth({RANDOM: values}, {}, picks, operator)


def _take(part: accuracy.Picks, operator: Operator, name: str, tensor: Tensor, states: set[str]) -> Tensor:
    """The picked part of an input or of a cotangent, in fp64 and as the reference takes it."""
    if name in operator.parameters:
        return part.take_parameter(tensor).double()
    if name in states:
        return part.take_state(tensor).double()
    return operator.head_first(part.take(operator.head_first(tensor)).double())


def _rows(part: accuracy.Picks, operator: Operator, name: str, grad: Tensor, states: set[str]) -> Tensor:
    """The gradient of what `_take` gave, head by head."""
    if name in operator.parameters:
        return grad
    return part.state_rows(grad) if name in states else part.rows(operator.head_first(grad))
