"""The operators that the comparison knows: how to make inputs, call a backend and compute the truth."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import tfla_tk
from tfla_tk import reference

from . import fla
from .inputs import OFFSETS, linear_inputs, mlstm_inputs
from .shapes import Shape
from .usage import UsageError

FORMS = ("recurrent", "parallel", "chunkwise")  # of the reference
# |q.n| relative to its floor, closer to 1 than which a row is at the kink: ten times the error of q.n in bf16
KINK = 1e-3

MakeInputs = Callable[..., dict[str, Tensor]]  # of shape, dtype, device, layout, seed and forget bias


# relative Frobenius errors that are allowed of this package's backends: of the output, of dq, dk, dv and the
# initial states' gradients, and of the gates' gradients
LIMITS = {"bf16": (5e-3, 8e-3, 1e-2), "fp16": (1.25e-3, 2e-3, 2.5e-3), "fp32": (1e-4, 1e-4, 1e-3)}
# of the Triton kernels: those of mLSTM keep n and m in bf16, and the products of fp32 are tf32 in all of them
_COARSE = (4e-3, 8e-3, 2.5e-2)
BASELINE_LIMITS = {"bf16": (1.5e-2, 3e-2, 1e-1), "fp16": _COARSE, "fp32": _COARSE}


@dataclass(frozen=True)
class Operator:
    """One operator of the comparison.

    Attributes:
        name: as it stands in a results row.
        function: the public function of tfla_tk, which takes `backend=`; looked up when it is called.
        inputs: makes the inputs, in the order of the function's parameters (see `inputs`).
        truth, recurrent: the reference's chunkwise and recurrent form; called by keywords with fp64 inputs,
            chunk_size (the chunkwise one), `options` and, where there is a `decay`, g_gamma.
        options: keyword arguments of function and truth besides the inputs.
        layout: of the tensors of all tokens: "bnsd" [B, H, T(, D)] or "bshd" [B, T, H(, D)].
        output: the output's name in rows and tolerances.
        gates: names of the gates among the inputs.
        parameters: arguments of as many numbers for every head of v, head by head in one dimension, whose
            gradients are sums over all tokens.
        states: arguments of the initial state that have a gradient, each with its dims: letters of a Shape.
        constants: arguments of the initial state that have none, each with its size.
        last: the argument that asks for the last state, whose parts come in the order of `states`.
        decay: of the number of heads and the device, the log decay of each head [H] in fp64, which the public
            function has without, or with `decay_options`; None where the decay is a gate.
        has_value_heads: v may have more heads than q and k.
        at_kink: of the inputs in fp64, the rows [B, NH, S] where the gradient jumps and rounding decides it;
            None where it never does.
        baseline_omits_normaliser: the Triton backward leaves out the gradient through the normaliser; it can
            only be checked with an output gradient that is orthogonal to the output (see `accuracy`).
        baseline_tolerances: of the Triton kernel's output per dtype, where it is not BASELINE_LIMITS'.
        baseline_unchecked: gradients of the Triton kernels that are reported and not checked.
        runs_in_graphs: a CUDA graph is how it is used, so that its replay is timed whatever a call takes.
    """

    name: str
    function: str
    inputs: MakeInputs
    truth: Callable[..., Any]
    options: dict[str, Any] = field(default_factory=dict)
    recurrent: Callable[..., Any] | None = None
    layout: str = "bnsd"
    output: str = "h"
    gates: tuple[str, ...] = ("i", "f")
    parameters: tuple[str, ...] = ()
    states: dict[str, str] = field(default_factory=lambda: {"c_initial": "KV", "n_initial": "K"})
    constants: dict[str, int] = field(default_factory=dict)
    last: str = "return_last_states"
    decay: Callable[..., Tensor] | None = None
    decay_options: dict[str, Any] = field(default_factory=dict)
    has_value_heads: bool = False
    at_kink: Callable[..., Tensor] | None = None
    baseline_omits_normaliser: bool = False
    baseline_tolerances: dict[str, float] = field(default_factory=dict)
    baseline_unchecked: tuple[str, ...] = ()
    runs_in_graphs: bool = False

    def call(self, backend: str, *tensors: Tensor, **named: Any) -> Any:
        """What the function of one backend returns, from the inputs in their order, and initial states,
        parameters and cu_seqlens by their names."""
        return self.function_of(backend)(*tensors, **named, **self.options, **self.decay_options)

    def function_of(self, backend: str) -> Callable[..., Any]:
        """What computes the operator on a backend: the public function, or FLA's own for "triton:fla"."""
        if backend == fla.VARIANT:
            return partial(fla.call, self.function)
        return partial(getattr(tfla_tk, self.function), backend=backend)

    def check_shape(self, shape: Shape) -> None:
        """UsageError where the operator has no such calls."""
        if shape.HV is not None and not self.has_value_heads:
            expected = f"expected {shape.H}, {self.name} has no more value heads"
            raise UsageError(f"shape HV: {expected}, got {shape.HV}")

    def is_state(self, name: str) -> bool:
        """Whether a tensor, or the gradient "d<name>" of one, is of an initial or of the last state."""
        return bool({name, name.removeprefix("d")} & {*self.states, *self.constants})

    def is_parameter(self, name: str) -> bool:
        """Whether it has numbers of heads, not of tokens."""
        return bool({name, name.removeprefix("d")} & {*self.parameters})

    def head_first(self, tensor: Tensor) -> Tensor:
        """A view [B, H, T(, D)] of a tensor of all tokens; of such a view the tensor again."""
        return tensor if self.layout == "bnsd" else tensor.transpose(1, 2)

    def tolerances(self, dtype: str, *, baseline: bool = False) -> dict[str, float]:
        """What the error may be of the output, of every input and of the initial states; of a baseline
        without what is not checked."""
        output, operand, gate = (BASELINE_LIMITS if baseline else LIMITS)[dtype]
        found = {self.output: self.baseline_tolerances.get(dtype, output) if baseline else output}
        found |= {f"d{name}": operand for name in ("q", "k", "v", *self.states)}
        found |= {f"d{name}": gate for name in (*self.gates, *self.parameters)}
        skipped = self.baseline_unchecked if baseline else ()
        return {name: limit for name, limit in found.items() if name not in skipped}


def split_offsets(inputs: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What is differentiated among the inputs of a call, and cu_seqlens where sequences are packed."""
    tensors = {name: tensor for name, tensor in inputs.items() if name != OFFSETS}
    return tensors, {name: tensor for name, tensor in inputs.items() if name == OFFSETS}


def parts_of(result: Any) -> tuple[Tensor, ...]:
    """The output in what a function returned, and the parts of the last state where it was asked for."""
    output, state = (result, None) if isinstance(result, Tensor) else result
    return (output, state) if isinstance(state, Tensor) else (output, *(state or ()))


def _normaliser_at_floor(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> Tensor:
    """Rows of mLSTMexp whose max(|s q.n|, e^-m) is of nearly equals."""
    # one column of v: it takes no part
    terms = reference.mlstm_forward_terms(q, k, v[..., :1], i, f)
    return (terms.d.abs() * terms.m_t.exp() - 1).abs() < KINK


LIGHTNING_LAYER: dict[str, Any] = {"layer_idx": 4, "num_layers": 32}


def _linear(name: str, gates: str = "", form: str | None = None, **fields: Any) -> Operator:
    """An operator with FLA's signature. gates: of "g", a log decay of heads, "gk", one of channels, and
    "beta". form: the name of its reference, where it is another."""
    decay: Any = {"g": "head", "gk": "channel"}.get(gates.partition(" ")[0])
    return Operator(
        name,
        fields.pop("function", f"chunk_{name}"),
        partial(linear_inputs, decay=decay, beta="beta" in gates),
        getattr(reference, f"{form or name}_chunkwise"),
        recurrent=getattr(reference, f"{form or name}_recurrent"),
        layout="bshd",
        output="o",
        gates=tuple(gates.replace("gk", "g").split()),
        states={"initial_state": "KV"},
        last="output_final_state",
        **fields,
    )


# flags of the gated delta rule and of KDA: for raw q, k and beta; for a decay made of g by A_log and dt_bias
RAW = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
GATE_PARAMETERS = {"use_gate_in_kernel": True}


def _raw_delta_rule(form: Callable[..., Any]) -> Callable[..., Any]:
    """A form of the reference that makes q, k, beta and, of the gate parameters, g of raw inputs."""

    def function(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Any:
        if "A_log" in options:
            g = reference.delta_log_decay(g, options.pop("A_log"), options.pop("dt_bias"))
        beta = reference.writing_strength(beta, RAW["allow_neg_eigval"])
        others = {name: value for name, value in options.items() if name not in (*RAW, *GATE_PARAMETERS)}
        return form(reference.l2_norm(q), reference.l2_norm(k), v, g, beta, **others)

    return function


def raw_delta_rule(operator: Operator, *, gate_parameters: bool = False) -> Operator:
    """The gated delta rule or KDA with flags for the norm of q and k and for 2 sigmoid(beta), and with
    gate_parameters for a log decay made of g by A_log and dt_bias."""
    assert operator.recurrent is not None
    return replace(
        operator,
        inputs=partial(operator.inputs, raw=True, gate_parameters=gate_parameters),
        truth=_raw_delta_rule(operator.truth),
        recurrent=_raw_delta_rule(operator.recurrent),
        options=RAW | (GATE_PARAMETERS if gate_parameters else {}),
        parameters=("A_log", "dt_bias") if gate_parameters else (),
    )


OPERATORS: dict[str, Operator] = {
    operator.name: operator
    for operator in (
        Operator(
            "mlstm_exp",
            "mlstm_chunkwise",
            mlstm_inputs,
            reference.mlstm_chunkwise,
            recurrent=reference.mlstm_recurrent,
            constants={"m_initial": 1},
            at_kink=_normaliser_at_floor,
            baseline_omits_normaliser=True,
            # summed from rounded dq and dk
            baseline_unchecked=("df",),
        ),
        Operator(
            "mlstm_sig",
            "mlstm_siging_chunkwise",
            mlstm_inputs,
            reference.mlstm_siging_chunkwise,
            options={"normalize": False},
            recurrent=reference.mlstm_siging_recurrent,
            states={"c_initial": "KV"},
            baseline_unchecked=("df",),
        ),
        _linear("simple_gla", "g", has_value_heads=True),
        _linear(
            "retention",
            form="simple_gla",
            decay=partial(reference.retention_log_decay, dtype=torch.float64),
        ),
        _linear(
            "lightning",
            form="simple_gla",
            function="chunk_lightning_attn",
            decay=partial(reference.lightning_log_decay, **LIGHTNING_LAYER, dtype=torch.float64),
            decay_options=LIGHTNING_LAYER,
        ),
        _linear("gla", "gk"),
        _linear("delta_rule", "beta", has_value_heads=True),
        _linear("gated_delta_rule", "g beta", has_value_heads=True),
        _linear("kda", "gk beta", has_value_heads=True),
    )
}
# what --op takes as well: public function -> name
FUNCTIONS = {operator.function: name for name, operator in OPERATORS.items()}
