"""What the compiler made of every kernel: a clean ptxas log, and the wgmmas in the SASS and their order."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tfla_tk import build
from tfla_tk.build.instances import MLSTM_TILES, SCHEDULES, mlstm_fwd

CHUNK = 64
EXPONENTIALS = CHUNK * CHUNK // 128  # gates per thread and chunk
INSTRUCTIONS = 7_500  # of a kernel, all roles together
MAIN = [mlstm_fwd(*dims, schedule) for dims in ((128, 256), (256, 512)) for schedule in SCHEDULES]
INSTANCES = list(dict.fromkeys([*(mlstm_fwd(*dims) for dims in MLSTM_TILES), *MAIN]))

Compile = Callable[[build.Instance], Any]


@pytest.fixture(params=INSTANCES, ids=lambda instance: instance.name, scope="session")
def compiled(request: pytest.FixtureRequest, compile_once: Compile) -> Any:
    return compile_once(request.param)


def passes(slice_v: int) -> int:
    """In how many passes the output warpgroup walks its slice of V: 128 columns at most each."""
    return 2 if slice_v == 256 else 1


def expected_wgmmas(dim_qk: int, slice_v: int) -> int:
    """The wgmmas of one kernel, each 16 deep.

    Output warpgroup: Q K^T for the first chunk and for the next one; in each of the two copies of a chunk's
    step (the last chunk has its own), per pass Q C and P V. State warpgroups: per 64-row block and pass one
    GEMM over the chunk's tokens; one warpgroup at K = 64, else two.
    """
    scores = inter = dim_qk // 16
    tokens = CHUNK // 16
    blocks = max(1, dim_qk // 128)
    return 2 * scores + passes(slice_v) * (2 * (inter + tokens) + blocks * tokens)


def test_ptxas_reports_no_fault(compiled: Any) -> None:
    build.check_ptxas_log(compiled.ptxas_log, compiled.instance.name)
    found = Counter(
        re.search(r"mlstm_\w+?_kernel", entry.function)[0]
        for entry in build.parse_ptxas_log(compiled.ptxas_log)
    )
    # dtypes and normaliser; the combine kernel has no dtype
    assert found == {"mlstm_fwd_kernel": 4, "mlstm_states_kernel": 4, "mlstm_combine_kernel": 2}


def test_the_code_fits_the_instruction_cache(compiled: Any) -> None:
    """docs/mlstm.md: at 256/512 a kernel of 6,880 instructions does, one of 8,320 took 28 % longer."""
    assert max(len(kernel.instructions) for kernel in compiled.kernels) <= INSTRUCTIONS


def test_every_wgmma_is_there(compiled: Any) -> None:
    defines = dict(compiled.instance.defines)
    dims = int(defines["TFLA_DIM_QK"]), int(defines["TFLA_SLICE_V"])
    schedule = SCHEDULES[int(defines["TFLA_SCHEDULE"])]
    made = {(kernel.half, kernel.normalize): kernel for kernel in compiled.kernels}
    assert set(made) == set(itertools.product((False, True), repeat=2))
    for kernel in made.values():
        assert (kernel.dim_qk, kernel.slice_v, kernel.schedule) == (*dims, schedule)
        assert kernel.wgmmas == expected_wgmmas(*dims)


def test_every_wgmma_of_the_states_pass_is_there(compiled: Any) -> None:
    kernels = [kernel for kernel in compiled.every_kernel if kernel.name == "mlstm_states"]
    assert len(kernels) == 4
    for kernel in kernels:
        blocks = max(1, kernel.dim_qk // 128)
        assert kernel.wgmmas == blocks * passes(kernel.slice_v) * CHUNK // 16
        # the keys of the second block are loaded under the GEMM of the first one
        opcodes = [opcode.split(".")[0] for opcode, _ in kernel.instructions]
        wgmmas = [n for n, opcode in enumerate(opcodes) if opcode == "HGMMA"]
        loads = opcodes[wgmmas[0] : wgmmas[-1]].count("LDSM")
        assert (opcodes.count("LDSM"), loads) == (blocks * CHUNK // 16, (blocks - 1) * CHUNK // 16)


def test_the_schedule_is_in_the_sass(compiled: Any) -> None:
    """Gates under Q C, and the next chunk's scores under the epilogue, exactly where the schedule says so."""
    for kernel in compiled.kernels:
        stages = kernel.stages()
        inter = [stage for stage in stages if stage["inter"]]
        assert len(inter) == 2 * passes(kernel.slice_v)
        # the first pass of the step and of the last chunk's step
        gated = inter[:: passes(kernel.slice_v)]
        # of the first chunk, then of the next one
        under_epilogue = [bool(stage["store"]) for stage in stages if stage["scores"]]
        turns = [bool(stage["turn"]) for stage in gated]
        if kernel.schedule == "sequential":
            # without a normaliser no row sum holds the gates back, and ptxas moves them down by itself
            assert not kernel.normalize or all(stage["exp2"] == 0 for stage in inter)
            assert under_epilogue == [False, False]
            assert turns == [False, False]
        else:
            assert all(stage["exp2"] >= EXPONENTIALS // 2 for stage in gated)
            assert under_epilogue == [False, True]
            assert turns == [kernel.schedule == "pingpong"] * 2


def test_all_of_the_state_is_published_before_its_gemms_wait_for_their_turn(compiled: Any) -> None:
    """Else the output, which reads it before it gives the turn, and the state would wait for each other."""
    for kernel in compiled.kernels:
        opcodes = [opcode for opcode, _ in kernel.instructions]
        published = [n for n, opcode in enumerate(opcodes) if opcode.startswith("STSM") and "MT88" in opcode]
        # four registers a store, two numbers a register: C in a thread, rounded
        c = max(1, kernel.dim_qk // 128) * kernel.slice_v // 2
        turns = [
            n
            for n, (opcode, operands) in enumerate(kernel.instructions)
            if opcode.startswith("BAR.SYNC") and operands.startswith("0x1,")
        ]
        if kernel.schedule == "overlapped":
            assert not turns
        else:
            (turn,) = turns
            assert len(published) == c // 8 and max(published) < turn
