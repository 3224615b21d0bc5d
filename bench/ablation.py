"""`python -m tfla_tk.bench ablation`: the schedules of a kernel side by side.

The intra-chunk kernel of mLSTM takes the whole sequence as one chunk and keeps no state, so that nothing but
the overlap of its steps differs between its schedules. GLA and the delta rule are the public functions, whose
forward and backward kernels have the schedules "sequential" and "overlapped". All are checked and timed as
the backends of `compare` are.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from tfla_tk import reference
from tfla_tk.core.errors import UnsupportedError

from . import intra
from .compare import Contest, carry_out
from .inputs import mlstm_inputs
from .operators import OPERATORS, Operator
from .results import INTRA, schedules_of
from .shapes import PASSES, Shape
from .variants import Variant

TOKENS = 65536
SHAPES = tuple(
    Shape(TOKENS // length, length, heads, dim_qk, dim_v)
    for heads, dim_qk, dim_v in ((16, 128, 256), (8, 256, 512))
    for length in (1024, 4096, 8192)
)


class IntraOperator(Operator):
    """The intra-chunk part of mLSTMexp; over one chunk and without initial state it is the whole result."""

    def call(self, backend: str, *tensors: Tensor, **offsets: Tensor) -> Tensor:
        """The kernel's h with the schedule of "tk:<schedule>"; UnsupportedError where it refuses the call."""
        q, k, v, i, f = tensors
        try:
            return intra.mlstm_intra(q, k, v, i, f, backend.partition(":")[2])
        except ValueError as error:
            raise UnsupportedError(INTRA, str(error)) from error


OPERATOR = IntraOperator(INTRA, INTRA, mlstm_inputs, reference.mlstm_chunkwise)
# of the public functions: shapes that fill the card, few long sequences, narrow heads
PUBLIC: dict[str, tuple[Shape, ...]] = {
    "gla": (
        Shape(8, 8192, 16, 128, 128),
        Shape(8, 8192, 16, 128, 256),
        Shape(1, 8192, 16, 128, 128),
        Shape(4, 4096, 16, 64, 64),
    ),
    "delta_rule": (Shape(8, 8192, 16, 128, 128), Shape(8, 8192, 16, 128, 256)),
    "gated_delta_rule": (
        Shape(8, 8192, 16, 128, 128),
        Shape(1, 32768, 16, 128, 128, HV=32),
        Shape(4, 4096, 16, 64, 64),
    ),
}
OPS = (INTRA, *PUBLIC)


def contests(op: str = INTRA) -> list[Contest]:
    """Every schedule of an operator's kernels, at each of its shapes, in each pass that has them.

    Args:
        op: one of OPS.
    """
    variants = [Variant(f"tk:{schedule}", "tk", schedule) for schedule in schedules_of(op)]
    if op == INTRA:
        return [Contest(OPERATOR, "fwd", shape, variants) for shape in SHAPES]
    return [Contest(OPERATORS[op], which, shape, variants) for which in PASSES for shape in PUBLIC[op]]


def run(args: argparse.Namespace) -> int:
    """Run the ablation of args.op with the options of `compare.add_run_arguments`; returns the exit status.

    Raises:
        ValueError: no GPU, or options that do not go together.
    """
    if not torch.cuda.is_available():
        raise ValueError("ablation: expected a CUDA GPU, found none")
    chosen = [contest for op in args.op for contest in (contests(op)[:1] if args.quick else contests(op))]
    return carry_out(args, chosen, on_gpu=True)
