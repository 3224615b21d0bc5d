"""The two ceilings of a GPU, measured: copy rate and matrix-product rate."""

import functools
from dataclasses import dataclass
from functools import partial

import torch

from .shapes import Cost
from .timing import CudaStopwatch, time_one

COPY_BYTES = 2**30
GEMM_SIZE = 8192
REPEATS = 20


@dataclass(frozen=True)
class Ceilings:
    """Rates that nothing on this GPU exceeds. copy: bytes read plus bytes written per second by a large
    device-to-device copy. gemm: floating-point operations per second of an 8192^3 bf16 matrix product."""

    copy: float
    gemm: float

    def roofline_ms(self, cost: Cost) -> float:
        """The least time in ms: the larger of the cost's bytes and its FLOP at these rates."""
        return max(cost.bytes / self.copy, cost.flops / self.gemm) * 1e3

    def __str__(self) -> str:
        return f"copy {self.copy / 1e12:.2f} TB/s, {GEMM_SIZE}^3 GEMM {self.gemm / 1e12:.0f} TFLOP/s"


@functools.lru_cache(maxsize=8)
def measure_ceilings(device: torch.device) -> Ceilings:
    """Measure both rates on a CUDA device, as steps are timed; once per process and device. The operands are
    random: a product of zeros runs faster than one of real data."""
    stopwatch = CudaStopwatch(device)
    source = torch.randint(-(2**31), 2**31 - 1, (COPY_BYTES // 4,), dtype=torch.int32, device=device)
    copy = time_one(partial(torch.empty_like(source).copy_, source), REPEATS, stopwatch)
    left, right = (torch.randn(GEMM_SIZE, GEMM_SIZE, dtype=torch.bfloat16, device=device) for _ in range(2))
    gemm = time_one(partial(torch.mm, left, right, out=torch.empty_like(left)), REPEATS, stopwatch)
    return Ceilings(copy=2 * COPY_BYTES / copy.ms * 1e3, gemm=2 * GEMM_SIZE**3 / gemm.ms * 1e3)
