from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import tfla_tk
from tfla_tk import UnsupportedError, reference
from tfla_tk.bench.inputs import FORGET_BIAS
from tfla_tk.bench.results import Row
from tfla_tk.bench.runner import Settings
from tfla_tk.bench.timing import Plan

PROVENANCE = {
    "run": "run-a",
    "gpu": "NVIDIA H200",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "nvcc": "13.0",
    "commit": "abc",
    "date": "2026-11-20T10:00:00Z",
}


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


def _stand_in(decay: Callable[..., torch.Tensor] | None) -> Callable[..., Any]:
    """A function of the scalar-decay family: the reference's forms, q and k repeated for the heads of v."""

    def function(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor | None = None,
        *,
        backend: str = "auto",
        layer_idx: int | None = None,
        num_layers: int | None = None,
        **options: Any,
    ) -> Any:
        name, _, form = backend.partition(":")
        if name != "reference":
            raise UnsupportedError(backend, "it stands in for a function that is not there", "")
        group = v.shape[2] // q.shape[2]
        layer = [] if layer_idx is None else [layer_idx, num_layers]
        gamma = None if decay is None else decay(v.shape[2], *layer)
        run = getattr(reference, f"simple_gla_{form or 'chunkwise'}")
        q, k = q.repeat_interleave(group, 2), k.repeat_interleave(group, 2)
        return run(q, k, v, g, g_gamma=gamma, **options)

    return function


@pytest.fixture(autouse=True)
def scalar_decay_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for those of the scalar-decay family that the package does not have."""
    for name, decay in (
        ("chunk_simple_gla", None),
        ("chunk_retention", reference.retention_log_decay),
        ("chunk_lightning_attn", reference.lightning_log_decay),
    ):
        if not hasattr(tfla_tk, name):
            monkeypatch.setattr(tfla_tk, name, _stand_in(decay), raising=False)


@pytest.fixture
def stopwatch() -> FakeStopwatch:
    return FakeStopwatch()


@pytest.fixture
def settings(stopwatch: FakeStopwatch) -> Settings:
    return Settings(
        device=torch.device("cpu"),
        dtype="fp32",
        layout="bnsd",
        forget_bias=FORGET_BIAS,
        seed=0,
        plan=Plan(repeats=5, budget_ms=1000),
        stopwatch=stopwatch,
        provenance=PROVENANCE,
    )


@pytest.fixture
def make_row() -> Callable[..., Row]:
    def make(backend: str = "tk", ms: float = 0.5, **changes: Any) -> Row:
        row: Row = {
            "op": "mlstm_exp",
            "shape": {"B": 8, "T": 8192, "H": 16, "K": 128, "V": 256},
            "pass": "fwd",
            "backend": backend,
            "schedule": None,
            "dtype": "bf16",
            "ms": ms,
            "ms_p20": ms,
            "ms_p80": ms,
            "tflops": 377.0,
            "gbps": 3246.0,
            "roofline": 0.76,
            "peak_mem_mb": 512.0,
            "rel_err": {"h": 2.3e-3},
            **PROVENANCE,
        }
        return {**row, **changes}

    return make
