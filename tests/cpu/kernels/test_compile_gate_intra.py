"""What the compiler made of the intra-chunk kernel: a clean ptxas log, and the order of its wgmmas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tfla_tk import build
from tfla_tk.bench.intra import all_instances

TILE = 64
EXPONENTIALS = TILE * TILE // 128  # gates per thread and KV tile
INSTANCES = all_instances()

Compile = Callable[[build.Instance], Any]


@pytest.fixture(params=INSTANCES, ids=lambda instance: instance.name, scope="session")
def compiled(request: pytest.FixtureRequest, compile_once: Compile) -> Any:
    return compile_once(request.param)


@pytest.fixture
def kernel(compiled: Any) -> Any:
    """The kernel with the GEMMs; the other one scans the gates."""
    scan, main = sorted(compiled.kernels, key=lambda kernel: kernel.wgmmas)
    assert scan.wgmmas == 0
    return main


def test_ptxas_reports_no_fault(compiled: Any) -> None:
    build.check_ptxas_log(compiled.ptxas_log, compiled.instance.name)
    assert len(build.parse_ptxas_log(compiled.ptxas_log)) == 2


def test_the_kernel_is_that_of_the_tile(compiled: Any, kernel: Any) -> None:
    assert compiled.instance.name == f"mlstm_intra_k{kernel.dim_qk}_v{kernel.slice_v}_{kernel.schedule}"


def test_the_schedule_is_in_the_sass(kernel: Any) -> None:
    """Which GEMMs are in flight together, and what is gated meanwhile."""
    stages = kernel.stages()
    alone = [s for s in stages if bool(s["scores"]) != bool(s["register"])]
    together = [s for s in stages if s["scores"] and s["register"]]
    gated = [s for s in stages if s["exp2"] >= EXPONENTIALS // 2]
    if kernel.schedule == "sequential":
        assert len(alone) == len(stages)
        assert not any(s["exp2"] for s in stages)
        return
    # first steps: S alone; then S and the P V of the tile before; last: that P V and the tile's own
    assert together and gated
    if kernel.schedule != "three_stage":
        # every S but the first is gated under, and followed by a P V
        assert len(alone) + len(together) == len(stages)
        assert all(s in gated for s in together)
    assert any(s["turn"] for s in stages) == (kernel.schedule == "pingpong")
