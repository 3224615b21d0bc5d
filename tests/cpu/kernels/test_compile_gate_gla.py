"""What the compiler made of the kernels of GLA: a clean ptxas log, and what the walks leave in flight."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from tfla_tk import build
from tfla_tk.build.instances import (
    GLA_DIRECTIONS,
    GLA_STATES_TILES,
    GLA_TILES,
    gla,
    gla_segments,
    gla_states,
)

Compile = Callable[[build.Instance], Any]
INSTANCES = [gla(*kind) for kind in itertools.product(GLA_DIRECTIONS, GLA_TILES)]


@pytest.mark.parametrize("instance", INSTANCES, ids=lambda instance: instance.name)
def test_ptxas_reports_no_fault(instance: build.Instance, compile_once: Compile) -> None:
    compiled = compile_once(instance)
    build.check_ptxas_log(compiled.ptxas_log, instance.name)
    kernels = compiled.every_kernel
    # by type and walkers; of two walkers also where two CTAs take turns
    assert sorted((kernel.half, kernel.slice_v) for kernel in kernels) == [
        (t, n) for t in (False, True) for n in (1, 2, 2)
    ]
    dim_k = int(dict(instance.defines)["TFLA_DIM_K"])
    # steps that read the state, of the first chunk and of others; of P V, of the mirror by parts of P, and of
    # K^T V by 64 channels, of the last chunk and of others; of the scores around a chunk's middle, of
    # operands in two parts
    of_scores = 8 if "backward" in instance.name else 4
    assert [k.wgmmas for k in kernels] == [2 * (dim_k // 16 + of_scores + dim_k // 16) + 3 * dim_k // 16] * 6


@pytest.mark.parametrize("dim_v", GLA_STATES_TILES)
def test_the_walks_over_states(dim_v: int, compile_once: Compile) -> None:
    """A clean log, and no wgmma: a walker's warps wait for one another nowhere."""
    compiled = compile_once(gla_states(dim_v))
    build.check_ptxas_log(compiled.ptxas_log, f"gla_states_v{dim_v}")
    kernels = compiled.every_kernel
    walkers = (1, 2) if dim_v <= 128 else (2,)
    wanted = sorted(itertools.product((False, True), walkers)) * 2  # left and right
    assert sorted((kernel.half, kernel.slice_v) for kernel in kernels) == sorted(wanted)
    assert {kernel.wgmmas for kernel in kernels} == {0}


def test_the_sums_of_segments(compile_once: Compile) -> None:
    """A clean log; of a block two GEMMs, by parts, in each kernel of sums: types, tiles of V, directions."""
    compiled = compile_once(gla_segments())
    build.check_ptxas_log(compiled.ptxas_log, "gla_segments")
    wgmmas = sorted(
        sum(opcode.startswith("HGMMA") for opcode, _ in instructions)
        for instructions in compiled.functions.values()
    )
    assert wgmmas == [0] * 2 + [2] * 8


@pytest.mark.parametrize("direction", GLA_DIRECTIONS)
@pytest.mark.parametrize("dim_k", GLA_TILES)
def test_what_a_walk_leaves_in_flight(dim_k: int, direction: str, compile_once: Compile) -> None:
    in_flight = {
        operands.rpartition(" ")[2]
        for kernel in compile_once(gla(direction, dim_k)).every_kernel
        for opcode, operands in kernel.instructions
        if opcode.startswith("WARPGROUP.DEPBAR")
    }
    # besides nothing: K^T V of 64 channels; with K = 128 all of it but a step under P V's end, and four steps
    # that read the state
    assert in_flight == {"0x0", "0x4"} | ({"0x3", "0x7"} if dim_k == 128 else set())
