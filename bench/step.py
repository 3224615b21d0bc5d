"""`python -m tfla_tk.bench step`: one token of mLSTM, against mlstm_kernels' Triton step and the copy rate.

With --op one token of the linear operators: `linear_step`.

A call makes T steps, each on a state of its own, as a model of T layers does for one token: at T = 32 even
the states of batch 1 are more than the L2 cache holds. The column "roofline" is the share of the copy rate
that was measured in the same run. q, k, v, h and the state are of the run's dtype, m among them. Decoding
runs in CUDA graphs: every row has the time of their replay as well.
"""

import argparse
import importlib
from typing import Any

import torch
from torch import Tensor

from tfla_tk import mlstm_step, reference
from tfla_tk.backends.triton import mlstm_kernels
from tfla_tk.core.errors import UnsupportedError

from . import linear_step
from .compare import add_run_arguments, carry_out
from .inputs import Sizes, draw_steps, forget, made_once
from .operators import Operator
from .results import IN_PLACE, STEP
from .runner import Contest
from .shapes import Shape, parse_shapes
from .usage import UsageError, argument, names
from .variants import Variant

MLSTM = "mlstm"
SHAPES = parse_shapes("64x1x8x256x512,256x1x8x256x512,64x1x16x128x256,8x8x8x256x512,1x32x8x256x512")


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


# the Triton step rounds its decay, its write factor and every product to q's dtype and sums 64 products in it
# (docs/triton-baselines.md, 12); of few heads, those with a normaliser near zero are most of the error of h
BASELINE_TOLERANCES = {"bf16": 5e-2, "fp16": 6e-3}
OPERATOR = StepOperator(
    STEP, STEP, step_inputs, step_truth, baseline_tolerances=BASELINE_TOLERANCES, runs_in_graphs=True
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m tfla_tk.bench step`."""
    ops = (MLSTM, *linear_step.OPERATORS)
    told = f"of {', '.join(ops)} (default: {MLSTM})"
    parser.add_argument("--op", type=names(ops), default=[MLSTM], metavar="OP,..", help=told)
    told = "as compare takes them, T steps on states of their own (default: batch 1 to 256)"
    parser.add_argument("--shapes", type=argument(parse_shapes), metavar="SHAPES", help=told)
    add_run_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Time the steps with the options of `compare.add_run_arguments`; returns the exit status. Without a
    GPU the reference alone."""
    on_gpu = torch.cuda.is_available()
    contests = []
    for op in args.op:
        operator: Operator = OPERATOR
        shapes, kernels = SHAPES, ["tk", IN_PLACE, "triton"]
        if op != MLSTM:
            operator = linear_step.OPERATORS[op]
            shapes, kernels = linear_step.shapes_of(op), linear_step.kernels_of(op)
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
        forget()
