from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import tfla_tk
from tfla_tk import UnsupportedError, cli, reference
from tfla_tk.bench import __main__ as bench
from tfla_tk.bench import compare, generate, gradcheck, model_phases, runner
from tfla_tk.bench.inputs import FORGET_BIAS
from tfla_tk.bench.results import Row, new_row
from tfla_tk.bench.runner import Settings
from tfla_tk.bench.shapes import Shape
from tfla_tk.bench.timing import Plan, Timing

PROVENANCE = {"run": "run-a", "gpu": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "nvcc": "13.0"}
PROVENANCE |= {"commit": "abc", "date": "2026-11-20T10:00:00Z"}
FORMS = [f"reference:{form}" for form in ("recurrent", "parallel", "chunkwise")]
# gradients beside dq, dk and dv, by operator
GATES = {"mlstm_exp": ["di", "df"], "mlstm_sig": ["di", "df"], "simple_gla": ["dg"], "retention": []}
GATES |= {"lightning": [], "gla": ["dg"], "delta_rule": ["dbeta"]}
GATES |= {op: ["dg", "dbeta"] for op in ("gated_delta_rule", "kda")}
Result = tuple[Tensor, tuple[Tensor, ...]]


class Ran(NamedTuple):
    """What a command returned, wrote and printed."""

    status: int
    rows: Any
    out: str
    err: str


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test sees a CPU alone, and times few runs. Nothing is collected between variants, which takes
    most of the time in a process with many objects."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for module in (generate, gradcheck, model_phases, runner):
        monkeypatch.setattr(module, "release", lambda device: None)
    monkeypatch.setattr(compare, "PLANS", dict.fromkeys(compare.PLANS, Plan(repeats=2, budget_ms=20)))


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Runs `tfla-tk` or `python -m tfla_tk.bench` with these options and --json."""

    def run(name: str, *options: str) -> Ran:
        path = tmp_path / "written.json"
        path.unlink(missing_ok=True)
        main = cli.main if name in ("compare", "gradcheck") else bench.main
        status = main([name, *options, "--json", str(path)])
        captured = capsys.readouterr()
        rows = json.loads(path.read_text()) if path.exists() else None
        return Ran(status, rows, captured.out, captured.err)

    return run


@pytest.fixture
def break_backends(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Result]], None]:
    """Every backend of mLSTMexp becomes a function of its name and of the inputs: (h, states)."""

    def patch(distort: Callable[..., Result]) -> None:
        def broken(*operands: Tensor, backend: str, return_last_states: bool = False, **more: Tensor) -> Any:
            h, state = distort(backend, dict(zip("qkvif", operands, strict=True)) | more)
            return (h, state) if return_last_states else h

        monkeypatch.setattr(tfla_tk, "mlstm_chunkwise", broken)

    return patch


def exact(backend: str, tensors: dict[str, Tensor]) -> Result:
    result: Result = reference.mlstm_chunkwise(**tensors, return_last_states=True)
    return result


def refuse(backend: str, tensors: dict[str, Tensor]) -> Result:
    raise UnsupportedError("mlstm_chunkwise", "the kernels have no backward yet", "use the reference")


def crash(backend: str, tensors: dict[str, Tensor]) -> Result:
    raise RuntimeError("illegal memory access\nsecond line")


@dataclass
class FakeStopwatch:
    """Runs the steps, tells scripted times: `times[name]` in ms, where the step puts its name in `ran`."""

    times: dict[str, float] = field(default_factory=dict)
    ran: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    def step(self, name: str) -> Callable[[], None]:
        return lambda: self.ran.append(name)

    def run(self, step: Callable[[], object]) -> Callable[[], float]:
        before = len(self.ran)
        step()
        name = self.ran[-1] if len(self.ran) > before else "?"
        self.log.append(name)
        # each run of a step takes a little longer than the one before
        elapsed = self.times.get(name, 1.0) + 0.01 * self.log.count(name)
        return lambda: elapsed

    def wait(self) -> None:
        self.log.append("|")


@pytest.fixture
def stopwatch() -> FakeStopwatch:
    return FakeStopwatch()


@pytest.fixture
def settings(stopwatch: FakeStopwatch) -> Settings:
    plan = Plan(repeats=5, budget_ms=1000)
    return Settings(torch.device("cpu"), "fp32", "bnsd", FORGET_BIAS, 0, plan, stopwatch, PROVENANCE)


@pytest.fixture
def make_row() -> Callable[..., Row]:
    def make(backend: str = "tk", ms: float = 0.5, **changes: Any) -> Row:
        figures: dict[str, Any] = {"tflops": 377.0, "gbps": 3246.0, "roofline": 0.76, "peak_mem_mb": 512.0}
        shape, times = Shape(8, 8192, 16, 128, 256), Timing(ms, ms, ms, 30)
        figures |= {"rel_err": {"h": 2.3e-3}, **PROVENANCE}
        return new_row("mlstm_exp", shape, "fwd", backend, "bf16", times, **figures) | changes

    return make
