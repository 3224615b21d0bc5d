"""Limits of errors on the GPU, and the error that they are of."""

from __future__ import annotations

import math

import torch
from torch import Tensor

DEVICE = "cuda"

# relative Frobenius error of outputs and states
TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 1.25e-3}
# relative Frobenius error of the gradient of q, k, v and the states, and of the gates
GRADIENT_TOLERANCE = {torch.bfloat16: (8e-3, 1e-2), torch.float16: (2e-3, 2.5e-3)}


def relative_error(found: Tensor, truth: Tensor) -> float:
    """Relative Frobenius error; 0 where both are zero, inf or NaN where only the truth is, or one is NaN."""
    assert found.shape == truth.shape
    difference = (found.double() - truth.double()).norm().item()
    norm = truth.double().norm().item()
    if difference == 0:
        return 0.0
    return difference / norm if norm else math.inf
