"""What the compiler made of the intra-chunk kernel: a clean ptxas log, the wgmmas and their order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tfla_tk import build
from tfla_tk.bench.intra import all_instances

TILE = 64
EXPONENTIALS = TILE * TILE // 128  # gates per thread and KV tile
INSTANCES = all_instances()

# How often each GEMM, S and P V, stands in the code of both consumers.
# sequential: in the loop and in the last step, of each.
# Else S of the first tile, two steps in the loop, the last step; the second consumer has a first step too.
# three_stage: the first consumer has two steps before the loop, and one that is first and last.
GEMMS = {"sequential": (4, 4), "overlapped": (7, 7), "pingpong": (7, 7), "three_stage": (9, 10)}

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


def test_every_wgmma_is_there(compiled: Any, kernel: Any) -> None:
    assert compiled.instance.name == f"mlstm_intra_k{kernel.dim_qk}_v{kernel.slice_v}_{kernel.schedule}"
    scores, values = GEMMS[kernel.schedule]
    assert kernel.wgmmas == scores * kernel.dim_qk // 16 + values * TILE // 16


def test_the_schedule_is_in_the_sass(kernel: Any) -> None:
    """Which GEMMs are in flight together, and what is gated meanwhile."""
    stages = kernel.stages()
    alone = [s for s in stages if bool(s["scores"]) != bool(s["register"])]
    together = [s for s in stages if s["scores"] and s["register"]]
    gated = [s for s in stages if s["exp2"] >= EXPONENTIALS // 2]
    scores, values = GEMMS[kernel.schedule]
    if kernel.schedule == "sequential":
        assert len(alone) == len(stages) == scores + values
        assert not any(s["exp2"] for s in stages)
        return
    if kernel.schedule == "three_stage":
        # first steps: S alone; middle: S and the P V of the tile before; last: that P V and the tile's own
        assert len(together) == 5
        assert len(gated) == 9
    else:
        # every S but the first is gated under, and followed by a P V
        assert len(together) == scores - 2
        assert all(s in gated for s in together)
    assert any(s["turn"] for s in stages) == (kernel.schedule == "pingpong")
