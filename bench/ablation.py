"""`python -m tfla_tk.bench ablation`: the schedules of the intra-chunk kernel side by side.

The kernel takes the whole sequence as one chunk and keeps no state, so that nothing but the overlap of its
steps differs between the schedules. It is checked and timed as the backends of `compare` are.
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
from .operators import Operator
from .results import INTRA, schedules_of
from .shapes import Shape
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


def contests() -> list[Contest]:
    """Every schedule of the kernel, at each of SHAPES."""
    variants = [Variant(f"tk:{schedule}", "tk", schedule) for schedule in schedules_of(INTRA)]
    return [Contest(OPERATOR, "fwd", shape, variants) for shape in SHAPES]


def run(args: argparse.Namespace) -> int:
    """Run the ablation with the options of `compare.add_run_arguments`; returns the exit status.

    Raises:
        ValueError: no GPU, or options that do not go together.
    """
    if not torch.cuda.is_available():
        raise ValueError("ablation: expected a CUDA GPU, found none")
    chosen = contests()
    return carry_out(args, chosen[:1] if args.quick else chosen, on_gpu=True)
