"""The two ceilings of a GPU, measured: copy rate and matrix-product rate."""

import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .shapes import Cost

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
    """Measure both rates on a CUDA device; once per process and device. The operands are random: a product
    of zeros runs faster than one of real data."""
    return Ceilings(copy=_copy_rate(device), gemm=_gemm_rate(device))


def _copy_rate(device: torch.device) -> float:
    source = torch.randint(-(2**31), 2**31 - 1, (COPY_BYTES // 4,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / _median_s(lambda: target.copy_(source), device)


def _gemm_rate(device: torch.device) -> float:
    left, right = (torch.randn(GEMM_SIZE, GEMM_SIZE, dtype=torch.bfloat16, device=device) for _ in range(2))
    product = torch.empty_like(left)
    return 2 * GEMM_SIZE**3 / _median_s(lambda: torch.mm(left, right, out=product), device)


def _median_s(call: Callable[[], object], device: torch.device) -> float:
    with torch.cuda.device(device):
        for _ in range(3):
            call()
        events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(REPEATS)]
        for start, end in events:
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in events) / 1e3
