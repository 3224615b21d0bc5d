"""What `tfla-tk gradcheck` checks: problems, and cases with their inputs."""

import itertools
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from .inputs import DTYPES, FORGET_BIAS, LAYOUTS
from .operators import OPERATORS, Operator, raw_delta_rule
from .shapes import Shape

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


PROBLEMS: dict[str, tuple[Operator, ...]] = {
    name: _problems(operator) for name, operator in OPERATORS.items()
}


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
DEFAULT_CASES = [
    *(name for name, case in CASES.items() if case.gates == "default"),
    "normal+initial+last",
    "extreme+initial+last",
]


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
    generator = torch.Generator(device).manual_seed(seed + 1)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

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
