"""Timing: variants interleaved round-robin, the L2 cache flushed, medians and percentiles of single runs; and
the two ceilings of a GPU, copy rate and matrix-product rate."""

import ctypes
import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from .shapes import Cost

FLUSH_BYTES = 2**28  # five times the L2 of an H200
GRAPH_BELOW_MS = 0.5
HOST_BELOW_MS = 5.0  # a hundred calls of a longer step cost too much
HOST_CALLS = 100
HOST_BURST = 10  # calls whose launches the driver's queue holds, so that none of them waits for the GPU
LEAST_REPEATS = 3
WARM_UP = 2
COPY_BYTES = 2**30
GEMM_SIZE = 8192
CEILING_REPEATS = 20
_KERNEL_NODE = 0  # CU_GRAPH_NODE_TYPE_KERNEL

Step = Callable[[], object]


class Stopwatch:
    """The host's clock, over a call on a CPU, or a long one on a GPU that is idle before and after it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def run(self, step: Step) -> Callable[[], float]:
        """Run the step; the result gives its time in ms once `wait` has returned."""
        self.wait()
        start = time.perf_counter()
        step()
        self.wait()
        elapsed = (time.perf_counter() - start) * 1e3
        return lambda: elapsed

    def wait(self) -> None:
        """Wait for everything that was run."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class CudaStopwatch(Stopwatch):
    """CUDA events around the step, after a write that flushes the L2 cache and lets the host enqueue. An
    untimed run comes before the first one after a wait, which meets an idle GPU and a late host."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.idle = True
        self.flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=device)

    def run(self, step: Step) -> Callable[[], float]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if self.idle:
            self.flush.zero_()
            step()
            self.idle = False
        self.flush.zero_()
        start.record()
        step()
        end.record()
        return lambda: float(start.elapsed_time(end))

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)
        self.idle = True


@dataclass(frozen=True)
class Plan:
    """How long to measure. repeats: timed runs of each variant. budget_ms: time that one variant may take
    in all; a slower one is run less often."""

    repeats: int
    budget_ms: float

    def repeats_for(self, estimate_ms: float) -> int:
        """Timed runs of a variant: at least LEAST_REPEATS, but one where that alone spends the budget."""
        if estimate_ms > self.budget_ms:
            return 1
        affordable = math.floor(self.budget_ms / max(estimate_ms, 1e-6))
        return min(self.repeats, max(LEAST_REPEATS, affordable))


@dataclass(frozen=True)
class Timing:
    """Single runs of one variant: median, 20th and 80th percentile in ms, and how many there were."""

    ms: float
    p20: float
    p80: float
    repeats: int

    @classmethod
    def of(cls, times: list[float]) -> "Timing":
        """The statistics of at least one time."""
        if len(times) == 1:
            return cls(times[0], times[0], times[0], 1)
        cuts = statistics.quantiles(times, n=5, method="inclusive")
        return cls(statistics.median(times), cuts[0], cuts[3], len(times))


def warm_up(step: Step, stopwatch: Stopwatch, budget_ms: float = math.inf) -> float:
    """Run a step until it is warm (compiled, allocator filled); the time of its last run in ms. A step
    whose first run spends the budget is taken as warm."""
    elapsed = math.inf
    for _ in range(WARM_UP + 1):
        read = stopwatch.run(step)
        stopwatch.wait()
        elapsed = read()
        if elapsed > budget_ms:
            break
    return elapsed


def interleave(
    steps: Mapping[str, Step], repeats: Mapping[str, int], stopwatch: Stopwatch
) -> dict[str, Timing]:
    """Time warm steps in rounds, each round one run of every step, so that drift meets all of them alike.
    A step with fewer repeats takes part in rounds spread evenly."""
    rounds = max(repeats.values(), default=0)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds):
        due = [
            name for name in steps if (turn + 1) * repeats[name] // rounds > turn * repeats[name] // rounds
        ]
        reads = [(name, stopwatch.run(steps[name])) for name in due]
        stopwatch.wait()
        for name, read in reads:
            times[name].append(read())
    return {name: Timing.of(found) for name, found in times.items()}


def time_one(step: Step, repeats: int, stopwatch: Stopwatch) -> Timing:
    """Warm a step up and time it by itself."""
    warm_up(step, stopwatch)
    return interleave({"": step}, {"": repeats}, stopwatch)[""]


def host_us(step: Step, wait: Callable[[], object]) -> float:
    """Median time in us of the host for one call of a warm step, over HOST_CALLS calls. The calls come
    back to back in bursts of HOST_BURST; `wait` drains the queue between bursts."""
    times = []
    for call in range(HOST_CALLS):
        if call % HOST_BURST == 0:
            wait()
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    wait()
    return statistics.median(times) * 1e6


class Captured(NamedTuple):
    """A step as a CUDA graph. launches: the kernels in it; None where the driver does not tell."""

    replay: Step
    launches: int | None


def capture(step: Step, device: torch.device) -> Captured | None:
    """The step as replays of a CUDA graph, or None where it cannot be captured."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    try:
        with torch.cuda.graph(graph):
            step()
        graph.instantiate()
    except Exception:  # of whatever kind: the step may be another package's
        torch.cuda.synchronize(device)
        return None
    return Captured(graph.replay, _kernels_of(graph.raw_cuda_graph()))


def _kernels_of(graph: int) -> int | None:
    """How many kernels a graph of the driver has; None where the driver does not tell."""
    driver, handle, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(graph), ctypes.c_size_t()
    errors = driver.cuGraphGetNodes(handle, None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    errors |= driver.cuGraphGetNodes(handle, nodes, ctypes.byref(count))
    kinds = [ctypes.c_int() for _ in nodes]
    for node, kind in zip(nodes, kinds, strict=True):
        errors |= driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind))
    return None if errors else sum(kind.value == _KERNEL_NODE for kind in kinds)


def launch_us(wait: Callable[[], object]) -> float:
    """Median time in us of the host for the launch of a kernel that does nothing."""
    return host_us(partial(torch.cuda._sleep, 0), wait)


def peak_memory(step: Step, device: torch.device) -> int | None:
    """Bytes that a warm step allocates at its peak beyond what is allocated already; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


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
    copy = time_one(partial(torch.empty_like(source).copy_, source), CEILING_REPEATS, stopwatch)
    left, right = (torch.randn(GEMM_SIZE, GEMM_SIZE, dtype=torch.bfloat16, device=device) for _ in range(2))
    gemm = time_one(partial(torch.mm, left, right, out=torch.empty_like(left)), CEILING_REPEATS, stopwatch)
    return Ceilings(copy=2 * COPY_BYTES / copy.ms * 1e3, gemm=2 * GEMM_SIZE**3 / gemm.ms * 1e3)
