"""`python -m tfla_tk.bench ablation`: what it gains mLSTM's forward that its GEMMs overlap the other steps.

Beside the kernel that ships, "overlapped", there is one that waits for every GEMM, "sequential". Both are
launched directly, without the public function, and checked and timed as the backends of `compare` are.
"""

import argparse
from typing import Any

import torch
from torch import Tensor

from tfla_tk.backends.tk.scalar_gate import forward

from .compare import add_run_arguments, carry_out
from .operators import OPERATORS, Operator
from .results import ABLATED, SCHEDULES
from .runner import Contest
from .shapes import MAIN
from .variants import Variant

add_arguments = add_run_arguments


class Ablated(Operator):
    """A forward of mLSTM by the kernel that "tk:<schedule>" names."""

    def call(self, backend: str, *tensors: Tensor, **named: Any) -> Tensor:
        """The kernel's h."""
        options = forward.Options(
            sigmoid_gate=self.name == "mlstm_sig",
            normalize=self.options.get("normalize", True),
            eps=1e-6,
            return_last_states=False,
            return_rows=False,
            sequential=backend == "tk:sequential",
        )
        q, k, v, i, f = tensors
        return forward.run((q, k, v, i, f, None, None, None, None), options)[0]


def run(args: argparse.Namespace) -> int:
    """Both kernels of every mLSTM, at each of the main shapes; returns the exit status."""
    if not torch.cuda.is_available():
        raise ValueError("ablation: expected a CUDA GPU, found none")
    variants = [Variant(f"tk:{schedule}", schedule) for schedule in SCHEDULES]
    contests = [
        Contest(Ablated(**vars(OPERATORS[op])), "fwd", shape, variants) for op in ABLATED for shape in MAIN
    ]
    return carry_out(args, contests[:1] if args.quick else contests)
