"""What the GPU tests of decoding share: names, shapes, tolerances and the comparison of states."""

from __future__ import annotations

import torch
from torch import Tensor

Tensors = dict[str, Tensor]

DEVICE = "cuda"
NAMES = ("q", "k", "v", "i", "f", "c", "n", "m")
TOKENS, STATE = NAMES[:5], NAMES[5:]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# of h and of a state in this dtype, relative Frobenius error
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
DIMS = [
    *((64, 64), (128, 256), (256, 512), (64, 512), (256, 64), (128, 128), (16, 16), (80, 48)),
    *((1, 1), (1, 512), (256, 1), (3, 5), (17, 31), (33, 36), (255, 511), (256, 504), (100, 300)),
]


def relative_error(found: Tensor, truth: Tensor) -> float:
    assert found.shape == truth.shape
    difference, norm = (found.double() - truth).norm().item(), truth.norm().item()
    return difference / norm if difference else 0.0


def assert_close(found: Tensors, truth: Tensors) -> None:
    """h within its dtype; of the state c e^m and n e^m, which is all that counts; m within its rounding."""
    assert found.keys() == truth.keys()
    # h is nothing beyond the range of fp32
    errors = {"h": (relative_error(found["h"], truth["h"].float().double()), found["h"].dtype)}
    for name in ("c", "n"):
        own, true = (x[name].double() for x in (found, truth))
        if "m" in truth:
            largest = truth["m"].amax()
            own, true = (
                t * torch.exp(x["m"].double() - largest).reshape(*t.shape[:2], *(1,) * (t.dim() - 2))
                for t, x in ((own, found), (true, truth))
            )
        errors[name] = (relative_error(own, true), found[name].dtype)
    failed = {name: error for name, (error, dtype) in errors.items() if not error <= TOLERANCE[dtype]}
    assert not failed, f"relative errors {failed}"
    if "m" in found:
        rounding = torch.finfo(found["m"].dtype).eps
        torch.testing.assert_close(found["m"].double(), truth["m"], rtol=rounding, atol=1e-6)


def clone(x: Tensors) -> Tensors:
    return {name: t.clone() for name, t in x.items()}
