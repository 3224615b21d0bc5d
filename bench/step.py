"""`python -m tfla_tk.bench step`: one token of mLSTM, against mlstm_kernels' Triton step and the copy rate.

With --op one token of the linear operators against FLA's step.

A call makes T steps, each on a state of its own, as a model of T layers does for one token: at T = 32 even
the states of batch 1 are more than the L2 cache holds. The column "roofline" is the share of the copy rate
that was measured in the same run. Of mLSTM q, k, v, h and the state are of the run's dtype, m among them; of
the linear operators the state is fp32, of the variant "v_first" [V, K], as engines and most of FLA's layers
keep it. Decoding runs in CUDA graphs: every row has the time of their replay as well.
"""

import argparse
import importlib
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tfla_tk import mlstm_step, reference
from tfla_tk.backends.triton import mlstm_kernels
from tfla_tk.core.errors import UnsupportedError

from . import fla
from .compare import add_run_arguments, carry_out
from .inputs import Sizes, draw_steps, made_once
from .operators import Operator
from .results import IN_PLACE, STEP, STEP_OF, V_FIRST
from .runner import Contest
from .shapes import Shape, parse_shapes
from .usage import UsageError, argument, names
from .variants import Variant

MLSTM_SHAPES = "64x1x8x256x512,256x1x8x256x512,64x1x16x128x256,8x8x8x256x512,1x32x8x256x512"
STATE_BYTES = 2e8
BATCHES = 1, 8, 64, 256
# of the public functions, in the order of the inputs
GATES: dict[str, tuple[str, ...]] = {"gated_delta_rule": ("g", "beta"), "gla": ("gk",), "simple_gla": ("g",)}
GATES |= {"delta_rule": ("beta",), "kda": ("g", "beta")}
BY_CHANNEL = ("gla", "kda")  # their first gate: a number for every channel of a key
# heads, K, V, heads of v: Qwen3-Next and OLMo-hybrid, GLA-1.3B, small models, Kimi-Linear
MODELS = {
    "gated_delta_rule": ((16, 128, 128, 32), (30, 96, 192, 30)),
    "gla": ((4, 256, 512, 4),),
    "simple_gla": ((16, 128, 128, 16),),
    "delta_rule": ((16, 128, 128, 16),),
    "kda": ((32, 128, 128, 32),),
}


def step_inputs(
    shape: Shape, dtype: torch.dtype, device: torch.device, layout: str, seed: int, forget_bias: float
) -> dict[str, Tensor]:
    """q, k, v, i, f and c, n, m of T steps [B, NH, T, ...], N(0, 1), f + forget_bias; those of one step
    are contiguous. dtype: of q, k, v and of the state. layout means nothing."""
    keys, values = (shape.H, shape.K), (shape.H, shape.V)
    sizes: Sizes = {"q": (keys, dtype), "k": (keys, dtype), "v": (values, dtype)}
    sizes |= dict.fromkeys("if", ((shape.H, 1), torch.float32))
    sizes |= {"c": ((*keys, shape.V), dtype), "n": (keys, dtype), "m": ((shape.H, 1), dtype)}
    found = draw_steps(sizes, shape, device, seed)
    found["f"] += forget_bias
    return found


class StepOperator(Operator):
    """T steps of mLSTMexp; in place they go on from the state that the call before left."""

    def call(self, backend: str, *tensors: Tensor, **named: Any) -> Tensor:
        """h [B, NH, T, V] of "tk", "tk:in_place", "triton" or "reference"."""
        state = made_once(Tensor.clone, *tensors[5:]) if backend == IN_PLACE else tensors[5:]
        outputs = []
        for q, k, v, i, f, c, n, m in zip(*(t.unbind(2) for t in (*tensors[:5], *state)), strict=True):
            if backend == "triton":
                h = _triton_step(q, k, v, i, f, c, n, m)
            elif backend == IN_PLACE:
                h, _ = mlstm_step(q, k, v, i, f, c, n, m, inplace=True, backend="tk")
            else:
                h, _ = mlstm_step(q, k, v, i, f, c, n, m, dtype_state=c.dtype, backend=backend)
            outputs.append(h)
        return outputs[0].unsqueeze(2) if len(outputs) == 1 else torch.stack(outputs, dim=2)


def _triton_step(*tensors: Tensor) -> Tensor:
    """mlstm_kernels' step as its users call it, the state in the dtype it has."""
    missing = mlstm_kernels.MLSTM_KERNELS_MISSING
    if missing is not None:
        raise UnsupportedError("triton's step", missing.reason, missing.remedy)
    module = importlib.import_module("mlstm_kernels.torch.recurrent.triton_step")
    h: Tensor
    h, _ = module.mlstm_recurrent_step__triton(*tensors, eps=1e-6, dtype_state=tensors[5].dtype)
    return h


def step_truth(*, chunk_size: int, **tensors: Tensor) -> Tensor:
    """h [B, NH, T, V] of the recurrence."""
    steps = zip(*(t.unbind(2) for t in tensors.values()), strict=True)
    return torch.stack([reference.mlstm_step(*x)[0] for x in steps], dim=2)


def linear_step_inputs(
    op: str, shape: Shape, dtype: torch.dtype, device: torch.device, layout: str, seed: int, bias: float
) -> dict[str, Tensor]:
    """q, k, v in dtype, gates and states in fp32, of T steps: [B, H, T, ...], those of a step contiguous.
    layout and bias mean nothing."""
    values, wide, gates = shape.value_heads, torch.promote_types(dtype, torch.float32), GATES[op]
    sizes: Sizes = dict.fromkeys("qk", ((shape.H, shape.K), dtype))
    sizes |= {"v": ((values, shape.V), dtype), **dict.fromkeys(gates, ((values,), wide))}
    if op in BY_CHANNEL:
        sizes[gates[0]] = (values, shape.K), wide
    sizes["state"] = (values, shape.K, shape.V), wide
    found = draw_steps(sizes, shape, device, seed)
    for gate in gates:
        drawn = found[gate]
        drawn.copy_(torch.sigmoid(drawn) if gate == "beta" else logsigmoid(drawn + 2))
    return found


class LinearStep(Operator):
    """T steps of one token. Their new states are kept until the end, so that each is written to memory."""

    def call(self, backend: str, *tensors: Tensor, **named: Any) -> Tensor:
        """o [B, HV, T, V] of a backend of the public function or of FLA's, with states [K, V], or [V, K]."""
        *tokens, state = tensors
        backend, v_first, _ = backend.partition(V_FIRST)
        options: dict[str, Any] = dict(self.options)
        if v_first:
            (state,), options["state_v_first"] = made_once(_transposed, state), True
        function = self.function_of(backend)
        outputs, states = [], []
        for *of_token, before in zip(*(x.unbind(2) for x in (*tokens, state)), strict=True):
            q, k, v, *rest = (x[:, None] for x in of_token)
            given = dict(zip(self.gates, rest, strict=True))
            o, after = function(q, k, v, **given, **options, initial_state=before, output_final_state=True)
            outputs.append(o[:, 0])
            states.append(after)
        return torch.stack(outputs, dim=2)


def _transposed(states: Tensor) -> Tensor:
    return states.mT.contiguous()


def linear_step_truth(
    *, op: str, chunk_size: int, use_qk_l2norm_in_kernel: bool = False, **tensors: Tensor
) -> Tensor:
    """o [B, HV, T, V] of the recurrence."""
    batch, _, steps, _ = tensors["q"].shape
    of_steps = {name: x.movedim(2, 1).flatten(0, 1) for name, x in tensors.items()}
    state = of_steps.pop("state")
    q, k, v, *gates = (x[:, None] for x in of_steps.values())
    if use_qk_l2norm_in_kernel:
        q, k = reference.l2_norm(q), reference.l2_norm(k)
    o, _ = getattr(reference, f"{op}_recurrent")(q, k, v, *gates, initial_state=state)
    return o[:, 0].unflatten(0, (batch, steps)).movedim(1, 2)


class Compared(NamedTuple):
    """A step, the shapes of its contest on a GPU, and the kernels, the reference beside them."""

    operator: Operator
    shapes: Sequence[Shape]
    kernels: Sequence[str]


def _linear_step(op: str) -> Compared:
    """With states [K, V] and, where the function has it, [V, K]; each model with each of BATCHES, and as many
    steps as fill STATE_BYTES, so that no state is left in the L2 cache."""
    operator = LinearStep(
        STEP_OF[op],
        f"fused_recurrent_{op}",
        partial(linear_step_inputs, op),
        partial(linear_step_truth, op=op),
        options={"use_qk_l2norm_in_kernel": True} if "beta" in GATES[op] else {},
        output="o",
        gates=GATES[op],
        states={},
        has_value_heads=op in ("gated_delta_rule", "kda"),
        runs_in_graphs=True,
    )
    shapes = [
        Shape(batch, math.ceil(STATE_BYTES / (batch * values * k * v * 4)), heads, k, v, HV=values)
        for heads, k, v, values in MODELS[op]
        for batch in BATCHES
    ]
    layouts = ("",) if op == "delta_rule" else ("", V_FIRST)
    return Compared(operator, shapes, [name + layout for layout in layouts for name in ("tk", fla.VARIANT)])


# the Triton step rounds its decay, its write factor and every product to q's dtype and sums 64 products in it
# (docs/triton-baselines.md, 12); of few heads, those with a normaliser near zero are most of the error of h
COARSE = {"bf16": 5e-2, "fp16": 6e-3}
OPERATOR = StepOperator(STEP, STEP, step_inputs, step_truth, baseline_tolerances=COARSE, runs_in_graphs=True)
STEPS = {
    "mlstm": Compared(OPERATOR, parse_shapes(MLSTM_SHAPES), ("tk", IN_PLACE, "triton")),
    **{op: _linear_step(op) for op in GATES},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m tfla_tk.bench step`."""
    told = f"of {', '.join(STEPS)} (default: mlstm)"
    parser.add_argument("--op", type=names(STEPS), default=["mlstm"], metavar="OP,..", help=told)
    told = "as compare takes them, T steps on states of their own (default: batch 1 to 256)"
    parser.add_argument("--shapes", type=argument(parse_shapes), metavar="SHAPES", help=told)
    add_run_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Time the steps with the options of `compare.add_run_arguments`; returns the exit status. Without a
    GPU the reference alone."""
    on_gpu = torch.cuda.is_available()
    contests = []
    for op in args.op:
        operator, shapes, kernels = STEPS[op]
        variants = [Variant(name) for name in (*(kernels if on_gpu else ()), "reference")]
        shapes = args.shapes or (shapes if on_gpu else (Shape(2, 3, 2, 16, 32),))
        for shape in shapes:
            operator.check_shape(shape)
            if shape.N is not None:
                raise UsageError(f"--shapes: expected no N, a step has one token, got {shape.N}")
        chosen = shapes[:1] if args.quick else shapes
        contests += [Contest(operator, "fwd", shape, variants) for shape in chosen]
    try:
        return carry_out(args, contests)
    finally:
        made_once.cache_clear()
