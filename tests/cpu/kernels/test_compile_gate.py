"""What the compiler made of the forward: a clean ptxas log, and the order of its wgmmas in the SASS.

How many there are of everything is on record: test_sass_summary.py.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tfla_tk import build
from tfla_tk.build.instances import MLSTM_TILES, mlstm_fwd

from .state_walk import kinds, walk_blocks

CHUNK = 64
EXPONENTIALS = CHUNK * CHUNK // 128  # gates per thread and chunk
INSTRUCTIONS = 7_500  # of a kernel, all roles together
SEQUENTIAL = [mlstm_fwd(*dims, sequential=True) for dims in ((128, 256), (256, 512))]
INSTANCES = [*(mlstm_fwd(*dims) for dims in MLSTM_TILES), *SEQUENTIAL]
WIDE = [instance for instance in INSTANCES if ("TFLA_DIM_QK", "256") in instance.defines]
NARROW = [instance for instance in INSTANCES if instance not in WIDE]

Compile = Callable[[build.Instance], Any]


@pytest.fixture(params=INSTANCES, ids=lambda instance: instance.name, scope="session")
def compiled(request: pytest.FixtureRequest, compile_once: Compile) -> Any:
    return compile_once(request.param)


@pytest.fixture(params=NARROW, ids=lambda instance: instance.name, scope="session")
def narrow(request: pytest.FixtureRequest, compile_once: Compile) -> Any:
    """Up to K = 128."""
    return compile_once(request.param)


@pytest.fixture(params=WIDE, ids=lambda instance: instance.name, scope="session")
def wide(request: pytest.FixtureRequest, compile_once: Compile) -> Any:
    """At K = 256, where the state is read out of registers."""
    return compile_once(request.param)


def check_tile(compiled: Any, kernels: Iterable[Any]) -> None:
    """That the fused kernels of an instance are for its tile."""
    defines = dict(compiled.instance.defines)
    dims = int(defines["TFLA_DIM_QK"]), int(defines["TFLA_SLICE_V"])
    for kernel in kernels:
        assert (kernel.dim_qk, kernel.slice_v) == dims


def narrow_kernels(compiled: Any) -> dict[tuple[bool, bool], Any]:
    """Of an instance up to K = 128, by (half, normalize): all four."""
    made = {(kernel.half, kernel.normalize): kernel for kernel in compiled.kernels}
    assert set(made) == set(itertools.product((False, True), repeat=2))
    check_tile(compiled, made.values())
    return made


def wide_kernels(compiled: Any) -> dict[tuple[bool, bool, bool], Any]:
    """Of an instance at K = 256, by (half, normalize, sigmoid): the exponential gate is normalised."""
    made = {
        (kernel.half, kernel.normalize, kernel.gate == "SigmoidInput"): kernel for kernel in compiled.kernels
    }
    variants = itertools.product((False, True), repeat=3)
    assert set(made) == {variant for variant in variants if variant[1] or variant[2]}
    check_tile(compiled, made.values())
    return made


def test_ptxas_reports_no_fault(compiled: Any) -> None:
    build.check_ptxas_log(compiled.ptxas_log, compiled.instance.name)
    found = Counter(
        re.search(r"mlstm_\w+?_kernel", entry.function)[0]
        for entry in build.parse_ptxas_log(compiled.ptxas_log)
    )
    # dtypes and normaliser, and at K = 256 the gate; the combine kernel has no dtype
    fused = {"mlstm_transposed_kernel": 6} if compiled.instance in WIDE else {"mlstm_fwd_kernel": 4}
    assert found == fused | {"mlstm_states_kernel": 4, "mlstm_combine_kernel": 2}


def passes(slice_v: int) -> int:
    """In how many passes the output warpgroup walks its slice of V: 128 columns at most each."""
    return 2 if slice_v == 256 else 1


def test_the_narrow_kernels_are_those_of_the_tile(narrow: Any) -> None:
    assert narrow_kernels(narrow)


def test_the_wide_kernels_are_those_of_the_tile(wide: Any) -> None:
    assert wide_kernels(wide)


def test_keys_of_a_state_in_two_blocks_are_loaded_under_a_gemm(compiled: Any) -> None:
    """Those of the second block, where segments are summed."""
    kernels = [kernel for kernel in compiled.every_kernel if kernel.name == "mlstm_states"]
    assert len(kernels) == 4
    for kernel in kernels:
        opcodes = [opcode.split(".")[0] for opcode, _ in kernel.instructions]
        wgmmas = [n for n, opcode in enumerate(opcodes) if opcode == "HGMMA"]
        under = opcodes[wgmmas[0] : wgmmas[-1]].count("LDSM")
        assert (under > 0) == (kernel.dim_qk > 128)


def test_the_code_fits_the_instruction_cache(compiled: Any) -> None:
    """docs/log/mlstm.md: at 256/512 a kernel of 6,880 instructions does, one of 8,320 took 28 % longer."""
    assert max(len(kernel.instructions) for kernel in compiled.kernels) <= INSTRUCTIONS


def test_the_overlap_is_in_the_sass(narrow: Any) -> None:
    """Gates under Q C, and the next chunk's scores under the epilogue, unless every GEMM is waited for."""
    for kernel in narrow.kernels:
        stages = kernel.stages()
        inter = [stage for stage in stages if stage["inter"]]
        assert len(inter) == 2 * passes(kernel.slice_v)
        # the first pass of the step and of the last chunk's step
        gated = inter[:: passes(kernel.slice_v)]
        # of the first chunk, then of the next one
        under_epilogue = [bool(stage["store"]) for stage in stages if stage["scores"]]
        assert not any(stage["turn"] for stage in gated)
        if narrow.instance in SEQUENTIAL:
            # without a normaliser no row sum holds the gates back, and ptxas moves them down by itself
            assert not kernel.normalize or all(stage["exp2"] == 0 for stage in inter)
            assert under_epilogue == [False, False]
        else:
            assert all(stage["exp2"] >= EXPONENTIALS // 2 for stage in gated)
            assert under_epilogue == [False, True]


def test_the_state_is_published_before_its_gemms_wait_for_their_turn(narrow: Any) -> None:
    """Else the output, which reads it before it gives the turn, and the state would wait for each other."""
    for kernel in narrow.kernels:
        opcodes = [opcode for opcode, _ in kernel.instructions]
        published = [n for n, opcode in enumerate(opcodes) if opcode.startswith("STSM") and "MT88" in opcode]
        turns = waits_at_barrier(kernel, 1)
        if narrow.instance not in SEQUENTIAL:
            assert not turns
        else:
            (turn,) = turns
            assert published and max(published) < turn


def waits_at_barrier(kernel: Any, number: int) -> list[int]:
    """Where a kernel waits at a named barrier."""
    return [
        n
        for n, (opcode, operands) in enumerate(kernel.instructions)
        if opcode.startswith("BAR.SYNC") and operands.startswith(f"{number:#x},")
    ]


def test_the_overlap_of_the_wide_kernel_is_in_the_sass(wide: Any) -> None:
    """The output's scaling and staging stand under the update, unless every GEMM is waited for.

    Scaling: its 32 registers. Staging: 64 columns of V by 64 tokens, 16 of these a store.
    """
    sequential = wide.instance in SEQUENTIAL
    for kernel in wide.kernels:
        (block,) = walk_blocks(kernel)
        assert block.groups == ["update", "values"] * 3 + ["values", "update"]
        # the first half of the queries meets its values later
        scaling = block.before_values["FMUL"] + block.after_values["FMUL"]
        assert (scaling >= CHUNK // 2) == (not sequential)
        assert (block.after_values["STSM"] > 0) == (not sequential)
        assert len(waits_at_barrier(kernel, 1)) == sequential


def test_scores_and_values_are_waited_for_when_the_state_has_been_read(wide: Any) -> None:
    """Until then a hand-over of scores between two CTAs has time; nothing else is waited for in between."""
    for kernel in wide.kernels:
        of_gemms = kinds(kernel)
        opcodes = [opcode for opcode, _ in kernel.instructions]
        waits = [n for n, opcode in enumerate(opcodes) if "PHASECHK" in opcode]
        read = of_gemms.index("read")
        updated = len(of_gemms) - of_gemms[::-1].index("update")
        after_reading = [n for n in waits if read < n < updated]
        assert len(after_reading) == 2
        assert len(of_gemms) - of_gemms[::-1].index("read") <= after_reading[0]
        assert after_reading[1] < of_gemms.index("update")
        stored = opcodes.index("STSM.16.MT88.4", updated)
        assert not any(updated < n < stored for n in waits)  # h takes the values' place


def test_scores_of_the_wide_kernel_are_sent_to_the_other_cta(wide: Any) -> None:
    """P and its factors, from shared memory to shared memory. No fence of the GPU's scope stands in the walk,
    where a release to a cluster would have one.
    """
    for kernel in wide.kernels:
        opcodes = [opcode for opcode, _ in kernel.instructions]
        assert sum(opcode.startswith("UBLKCP") for opcode in opcodes) == 2
        fences = [n for n, opcode in enumerate(opcodes) if opcode.startswith("MEMBAR") and "GPU" in opcode]
        of_gemms = kinds(kernel)
        gemms = [n for n, kind in enumerate(of_gemms) if kind]
        assert len(fences) == 2  # with the cluster's barrier, before and after
        assert fences[0] < gemms[0] and gemms[-1] < fences[1]


def test_the_sums_of_the_wide_kernel_follow_the_scores(wide: Any) -> None:
    """The state waits for the scores alone; a wgmma of the sums comes with six instructions at most."""
    for (_, normalize, _), kernel in wide_kernels(wide).items():
        if not normalize:
            continue
        opcodes = [opcode for opcode, _ in kernel.instructions]
        sums = [n for n, opcode in enumerate(opcodes) if opcode.startswith("HGMMA.64x8x16")]
        assert opcodes.index("STSM.16.M88.4") < sums[0]
        assert sums[-1] - sums[0] <= 7 * (len(sums) - 1)


def test_the_state_of_the_wide_kernel_stays_in_registers(wide: Any) -> None:
    """Every register of it decays in place, under the last GEMMs of the reading unless each is waited for."""
    for kernel in wide.kernels:
        (block,) = walk_blocks(kernel)
        assert len(block.state) == kernel.dim_qk // 2
        assert block.state <= block.scaled
        assert (block.state <= block.scaled_under_reading) == (wide.instance not in SEQUENTIAL)
