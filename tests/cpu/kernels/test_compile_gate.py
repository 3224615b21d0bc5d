"""What the compiler made of the forward, of a scalar decay and of GLA's walks: the order of wgmmas and waits.

By one instance of each kind. Of all instances a clean ptxas log, and how many there are of everything, are
looked at in test_sass_summary.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tfla_tk.build import Instance
from tfla_tk.build.instances import gla_walk, mlstm_fwd, mlstm_fwd_states, mlstm_walk

from .compiled import Compiled, Kernel
from .state_walk import kinds, walk_blocks

CHUNK = 64
EXPONENTIALS = CHUNK * CHUNK // 128  # gates per thread and chunk
INSTRUCTIONS = 7_500  # of a kernel, all roles together
NARROW, WIDE = (128, 256), (256, 128)  # tiles
SEQUENTIAL = [mlstm_fwd(tile, False, sequential=True) for tile in (NARROW, WIDE)]

Compile = Callable[[Instance], Compiled]


def is_sequential(compiled: Compiled) -> bool:
    return compiled.instance in SEQUENTIAL


def fused(compiled: Compiled) -> Kernel:
    """The only kernel of an instance."""
    (found,) = compiled.kernels
    return found


@pytest.fixture(params=[mlstm_fwd(NARROW, False), SEQUENTIAL[0]], ids=lambda instance: instance.name)
def narrow(request: pytest.FixtureRequest, compile_once: Compile) -> Compiled:
    """Up to K = 128."""
    return compile_once(request.param)


@pytest.fixture(params=[mlstm_fwd(WIDE, False), SEQUENTIAL[1]], ids=lambda instance: instance.name)
def wide(request: pytest.FixtureRequest, compile_once: Compile) -> Compiled:
    """At K = 256, where the state is read out of registers."""
    return compile_once(request.param)


def test_keys_of_a_state_in_two_blocks_are_loaded_under_a_gemm(compile_once: Compile) -> None:
    """Those of the second block, where segments are summed."""
    kernel = fused(compile_once(mlstm_fwd_states(WIDE, False)))
    opcodes = [opcode.split(".")[0] for opcode, _ in kernel.instructions]
    wgmmas = [n for n, opcode in enumerate(opcodes) if opcode == "HGMMA"]
    assert "LDSM" in opcodes[wgmmas[0] : wgmmas[-1]]


def test_the_code_fits_the_instruction_cache(wide: Compiled) -> None:
    """At 256/512 a kernel of 6,880 instructions does, one of 8,320 took 28 % longer.

    docs/log/mlstm.md has the times: "The two state warpgroups are two template instances".
    """
    assert len(fused(wide).instructions) <= INSTRUCTIONS


def test_the_overlap_is_in_the_sass(narrow: Compiled) -> None:
    """Gates under Q C, and the next chunk's scores under the epilogue, unless every GEMM is waited for.

    The output warpgroup walks its slice of V in two passes.
    """
    stages = fused(narrow).stages()
    inter = [stage for stage in stages if stage["inter"]]
    assert len(inter) == 2 * 2
    # the first pass of the step and of the last chunk's step
    gated = inter[::2]
    # of the first chunk, then of the next one
    under_epilogue = [bool(stage["store"]) for stage in stages if stage["scores"]]
    assert not any(stage["turn"] for stage in gated)
    if is_sequential(narrow):
        assert all(stage["exp2"] == 0 for stage in inter)
        assert under_epilogue == [False, False]
    else:
        assert all(stage["exp2"] >= EXPONENTIALS // 2 for stage in gated)
        assert under_epilogue == [False, True]


def test_the_state_is_published_before_its_gemms_wait_for_their_turn(narrow: Compiled) -> None:
    """Else the output, which reads it before it gives the turn, and the state would wait for each other."""
    kernel = fused(narrow)
    opcodes = [opcode for opcode, _ in kernel.instructions]
    published = [n for n, opcode in enumerate(opcodes) if opcode.startswith("STSM") and "MT88" in opcode]
    turns = waits_at_barrier(kernel, 1)
    if not is_sequential(narrow):
        assert not turns
    else:
        (turn,) = turns
        assert published and max(published) < turn


def waits_at_barrier(kernel: Kernel, number: int) -> list[int]:
    """Where a kernel waits at a named barrier."""
    return [
        n
        for n, (opcode, operands) in enumerate(kernel.instructions)
        if opcode.startswith("BAR.SYNC") and operands.startswith(f"{number:#x},")
    ]


def test_the_overlap_of_the_wide_kernel_is_in_the_sass(wide: Compiled) -> None:
    """The output's scaling and staging stand under the update, unless every GEMM is waited for.

    Scaling: its 32 registers. Staging: 64 columns of V by 64 tokens, 16 of these a store.
    """
    sequential, kernel = is_sequential(wide), fused(wide)
    (block,) = walk_blocks(kernel)
    assert block.groups == ["update", "values"] * 3 + ["values", "update"]
    # the first half of the queries meets its values later
    scaling = block.before_values["FMUL"] + block.after_values["FMUL"]
    assert (scaling >= CHUNK // 2) == (not sequential)
    assert (block.after_values["STSM"] > 0) == (not sequential)
    assert len(waits_at_barrier(kernel, 1)) == sequential


def test_scores_and_values_are_waited_for_when_the_state_has_been_read(wide: Compiled) -> None:
    """Until then a hand-over of scores between two CTAs has time; nothing else is waited for in between."""
    kernel = fused(wide)
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


def test_scores_of_the_wide_kernel_are_sent_to_the_other_cta(wide: Compiled) -> None:
    """P and its factors, from shared memory to shared memory. No fence of the GPU's scope stands in the walk,
    where a release to a cluster would have one.
    """
    kernel = fused(wide)
    opcodes = [opcode for opcode, _ in kernel.instructions]
    assert sum(opcode.startswith("UBLKCP") for opcode in opcodes) == 2
    fences = [n for n, opcode in enumerate(opcodes) if opcode.startswith("MEMBAR") and "GPU" in opcode]
    gemms = [n for n, kind in enumerate(kinds(kernel)) if kind]
    assert len(fences) == 2  # with the cluster's barrier, before and after
    assert fences[0] < gemms[0] and gemms[-1] < fences[1]


def test_the_sums_of_the_wide_kernel_follow_the_scores(wide: Compiled) -> None:
    """The state waits for the scores alone; a wgmma of the sums comes with six instructions at most."""
    opcodes = [opcode for opcode, _ in fused(wide).instructions]
    sums = [n for n, opcode in enumerate(opcodes) if opcode.startswith("HGMMA.64x8x16")]
    assert opcodes.index("STSM.16.M88.4") < sums[0]
    assert sums[-1] - sums[0] <= 7 * (len(sums) - 1)


def test_the_state_of_the_wide_kernel_stays_in_registers(wide: Compiled) -> None:
    """Every register of it decays in place, under the last GEMMs of the reading unless each is waited for."""
    kernel = fused(wide)
    (block,) = walk_blocks(kernel)
    assert len(block.state) == kernel.dim_qk // 2
    assert block.state <= block.scaled
    assert (block.state <= block.scaled_under_reading) == (not is_sequential(wide))


# A scalar decay: mLSTM's kernels without normaliser, compiled with another gate

SCHEDULED = ("HGMMA", "WARPGROUP.", "BAR.", "UTMALDG", "UTMASTG", "UTMAREDG")
# instructions that a walk of the backward may have more: a token's own key may be left out of its sums
OF_STRICT_SUMS = 24
PAIRS = {
    "narrow": [mlstm_fwd((128, 128), False, normalize=False, decay=decay) for decay in (False, True)],
    "wide": [
        mlstm_fwd(WIDE, False, normalize=False, sigmoid_gate=not decay, decay=decay)
        for decay in (False, True)
    ],
    "walks": [mlstm_walk("dq and dk", (128, 128), False, False, decay) for decay in (False, True)],
}


def schedule_of(kernel: Kernel) -> list[tuple[str, str]]:
    """Tensor-core instructions, their waits, barriers between roles and TMA, in the order of the program."""
    return [
        # what a wait leaves in flight; registers and descriptors are the compiler's
        (opcode, operands if opcode.startswith("WARPGROUP.DEPBAR") else "")
        for opcode, operands in kernel.instructions
        if opcode.startswith(SCHEDULED)
    ]


@pytest.mark.parametrize("pair", PAIRS)
def test_the_schedule_of_a_scalar_decay_is_that_of_mlstm(pair: str, compile_once: Compile) -> None:
    of_mlstm, of_decay = (
        {kernel.gradient: kernel for kernel in compile_once(instance).kernels} for instance in PAIRS[pair]
    )
    assert of_decay.keys() == of_mlstm.keys()
    for role, kernel in of_decay.items():
        assert schedule_of(kernel) == schedule_of(of_mlstm[role]), role
        assert len(kernel.instructions) <= len(of_mlstm[role].instructions) + OF_STRICT_SUMS, role


# GLA


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_what_a_walk_of_gla_leaves_in_flight(direction: str, compile_once: Compile) -> None:
    """Besides nothing: K^T V of 64 channels, all of it but a step under P V's end, and four steps that read
    the state.
    """
    kernel = fused(compile_once(gla_walk(direction, 128, False, 2, 1)))
    in_flight = {
        operands.rpartition(" ")[2]
        for opcode, operands in kernel.instructions
        if opcode.startswith("WARPGROUP.DEPBAR")
    }
    assert in_flight == {"0x0", "0x3", "0x4", "0x7"}
