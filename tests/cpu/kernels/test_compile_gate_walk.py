"""What the compiler made of the mLSTM backward's walks: their wgmmas, what overlaps them, and the waits.

By one instance of each kind. Of all instances a clean ptxas log, and how many there are of everything, are
looked at in test_sass_summary.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from tfla_tk.build import Instance
from tfla_tk.build.instances import mlstm_walk, mlstm_walk_segments

from .compiled import Compiled, Kernel
from .state_walk import kinds, walk_blocks

CHUNK = 64
OUTPUT_REGISTERS = CHUNK // 2  # of a block: fp32, 64 columns of the values by 64 tokens
# where shares of the keys take turns, and where a state warpgroup has two blocks
INSTANCES = [mlstm_walk("dq and dk", (256, 128), False), mlstm_walk("dv", (128, 256), False)]

Compile = Callable[[Instance], Compiled]


@pytest.fixture(params=INSTANCES, ids=lambda instance: instance.name)
def walks(request: pytest.FixtureRequest, compile_once: Compile) -> list[Kernel]:
    """dq and dk, or dv."""
    return compile_once(request.param).kernels


def part_of_keys(dim_keys: int) -> int:
    """Columns of the state in one wgmma."""
    return min(dim_keys, 128)


def blocks_of(slice_: int) -> int:
    """64 columns of the values each, of one state warpgroup: there are two but at a slice of 64."""
    return max(1, slice_ // 128)


def test_segments_only_update(compile_once: Compile) -> None:
    """values^T K over a chunk, waited for once; nothing else writes the registers of the state.

    The values of its later half are loaded under the GEMMs of its earlier one.
    """
    for kernel in compile_once(mlstm_walk_segments((256, 128), False)).kernels:
        part = part_of_keys(kernel.dim_qk)
        assert set(kinds(kernel)) == {"", "update"}
        opcodes = [opcode for opcode, _ in kernel.instructions]
        assert opcodes.count("WARPGROUP.DEPBAR.LE") == 1
        first, wait = (
            next(n for n, opcode in enumerate(opcodes) if opcode.startswith(name))
            for name in ("HGMMA", "WARPGROUP.DEPBAR.LE")
        )
        state: set[int] = set()
        for opcode, operands in kernel.instructions[first:wait]:
            if opcode.startswith("HGMMA"):
                register = int(operands.split(", ")[0].removeprefix("R"))
                state |= set(range(register, register + part // 2))
        assert len(state) == kernel.dim_qk // 2
        # from the loop's first wait for tiles, the loads of the values, to that for the GEMM
        loads = [n for n, opcode in enumerate(opcodes) if opcode.startswith("LDSM")]
        assert sum(first < load < wait for load in loads) == len(loads) // 2
        written = [
            (opcode, operands)
            for opcode, operands in kernel.instructions[loads[0] : wait]
            if not opcode.startswith(("HGMMA", "ST"))
            and any(operands.split(", ")[0].split(".")[0] == f"R{n}" for n in state)
        ]
        assert not written


def test_the_state_decays_before_its_update(walks: list[Kernel]) -> None:
    """Every register of the state is multiplied after it has been read, where the decay is due."""
    for kernel in walks:
        blocks = walk_blocks(kernel)
        assert len(blocks) == blocks_of(kernel.slice_v)
        for block in blocks:
            assert len(block.state) == kernel.dim_qk // 2
            assert block.state <= block.scaled
        assert len(set().union(*(block.state for block in blocks))) == len(blocks) * kernel.dim_qk // 2


def test_the_update_is_spread(walks: list[Kernel]) -> None:
    """Half of it is issued before values^T scores^T, its last part behind that; 16 tokens a group."""
    for kernel in walks:
        for block in walk_blocks(kernel):
            assert block.groups == ["update"] * 2 + ["values"] * 2 + ["update"] + ["values"] * 2 + ["update"]


def test_the_output_stands_under_the_update(walks: list[Kernel]) -> None:
    """Before values^T scores^T its scaling, and with dq and dk the loads of the factor for its entering sum,
    those of a slow chunk's 16 tokens first. After it its staging, and with dq and dk its row sums: the factor
    again, and exchanges between lanes.
    """
    for kernel in walks:
        of_sums = kernel.gradient != "dv"
        for block in walk_blocks(kernel):
            assert block.before_values["FMUL"] >= OUTPUT_REGISTERS
            assert block.after_values["STSM"]
            if of_sums:
                assert block.before_values["LDSM"] and block.after_values["LDSM"]
            assert bool(block.after_values["SHFL"]) == of_sums


def test_barriers_are_asked_ahead(walks: list[Kernel]) -> None:
    """Those of the next step's tiles and gates while the last GEMMs of a step are in flight."""
    for kernel in walks:
        opcodes = [opcode for opcode, _ in kernel.instructions]
        last = max(n for n, kind in enumerate(kinds(kernel)) if kind == "update")
        waits = [n for n in range(last, len(opcodes)) if opcodes[n] == "WARPGROUP.DEPBAR.LE"]
        asked = Counter(opcodes[last : waits[1]])
        assert asked["SYNCS.PHASECHK.TRANS64"] >= 2 + 2 * kernel.dim_qk // part_of_keys(kernel.dim_qk)


def test_the_gradient_is_handed_over_under_the_reading(walks: list[Kernel]) -> None:
    """Of the block before, so that its fence is not waited for with no GEMM in flight."""
    for kernel in walks:
        of_walk = [n for n, kind in enumerate(kinds(kernel)) if kind in ("read", "update")]
        fences = [n for n, (opcode, _) in enumerate(kernel.instructions) if opcode == "FENCE.VIEW.ASYNC.S"]
        fences = [n for n in fences if of_walk[0] < n < of_walk[-1]]
        assert len(fences) == blocks_of(kernel.slice_v)
        for fence in fences:
            before, after = (
                next(kind for kind in order if kind)
                for order in (reversed(kinds(kernel)[:fence]), kinds(kernel)[fence:])
            )
            assert before == after == "read"


def test_descriptors_are_uniform(walks: list[Kernel]) -> None:
    """Computed as such: none between two GEMMs of the scores goes through the registers of the lanes."""
    for kernel in walks:
        of_scores = [n for n, kind in enumerate(kinds(kernel)) if kind == "scores"]
        between = kernel.instructions[of_scores[0] : of_scores[-1]]
        assert not any(opcode.startswith("R2UR") for opcode, _ in between)


def test_anchors_stand_apart(walks: list[Kernel]) -> None:
    """dq stores its state before it is read, dk multiplies it with that after its update, by a unit of 16
    bytes a lane and 16 columns, while no GEMM is in flight.
    """
    for kernel in walks:
        if kernel.gradient == "dv":
            continue
        opcodes = [opcode for opcode, _ in kernel.instructions]
        gemms = [n for n, kind in enumerate(kinds(kernel)) if kind in ("read", "update")]
        done = next(n for n in range(gemms[-1], len(opcodes)) if opcodes[n] == "WARPGROUP.DEPBAR.LE")
        units = kernel.dim_qk // 16
        if kernel.gradient == "dq":
            stores = [n for n, opcode in enumerate(opcodes) if opcode.startswith("STG.E.128")]
            assert len(stores) == units and max(stores) < gemms[0]
        else:  # the producer loads gates so
            loads = [n for n, opcode in enumerate(opcodes) if opcode.startswith("LDG.E.128")]
            assert sum(load > done for load in loads) == units
            assert not any(gemms[0] < load < done for load in loads)


def test_shares_of_the_keys_take_turns(walks: list[Kernel]) -> None:
    """The storing warp waits before it stores, and tells the next share when its stores are done.

    A wait until stores have only been read would not end with CCTL.IVALL.
    """
    told = (
        *("DEPBAR.LE", "DEPBAR.LE", "CCTL.IVALL", "FENCE.VIEW.ASYNC.G"),
        *("MEMBAR.ALL.GPU", "STG.E.STRONG.GPU"),
    )
    for kernel in walks:
        opcodes = [opcode for opcode, _ in kernel.instructions]
        if kernel.gradient == "dv":
            assert not {"NANOSLEEP", "STG.E.STRONG.GPU"} & set(opcodes)
            continue
        stores = [n for n, opcode in enumerate(opcodes) if opcode.startswith(("UTMASTG", "UTMAREDG"))]
        before = opcodes[opcodes.index("NANOSLEEP") : stores[0]]
        assert "FENCE.VIEW.ASYNC.G" in before and "LDG.E.STRONG.GPU" in before
        behind = iter(opcodes[stores[-1] :])
        assert all(name in behind for name in told)
        done = [n for n, opcode in enumerate(opcodes) if opcode == "DEPBAR.LE" and n > stores[-1]][1]
        assert opcodes[done + 1] == "CCTL.IVALL"


def test_scores_are_sent_to_the_other_cta(walks: list[Kernel]) -> None:
    """From shared memory to shared memory, behind a branch: predicated away, where a cluster is one CTA, the
    copy was an illegal instruction. CTAs wait for one another before they write into the other's, and before
    theirs is gone; no fence of the GPU's scope stands in the walk.
    """
    for kernel in walks:
        opcodes = [opcode for opcode, _ in kernel.instructions]
        (sent,) = (n for n, opcode in enumerate(opcodes) if opcode.startswith("UBLKCP"))
        stored = sent - opcodes[sent::-1].index("FENCE.VIEW.ASYNC.S")
        assert "BRA" in opcodes[stored:sent]
        # where several shares of the keys take tickets, CTAs wait for theirs first
        tickets = kernel.gradient != "dv" and kernel.dim_qk == 256
        assert opcodes.count("UCGABAR_ARV") == opcodes.count("UCGABAR_WAIT") == 2 + tickets
        gemms = [n for n, kind in enumerate(kinds(kernel)) if kind]
        *_, first, last = (n for n, opcode in enumerate(opcodes) if opcode == "UCGABAR_WAIT")
        assert first < gemms[0] and gemms[-1] < last
        assert first < sent < last
        walk = [n for n, kind in enumerate(kinds(kernel)) if kind in ("read", "update")]
        assert not any("MEMBAR" in opcode and "GPU" in opcode for opcode in opcodes[walk[0] : walk[-1]])


def test_one_warp_stores_the_output(walks: list[Kernel]) -> None:
    """By a box of 16 rows or of one, stored, or added by dq and dk; never by the state's warps."""
    for kernel in walks:
        opcodes = Counter(opcode.split(".")[0] for opcode, _ in kernel.instructions)
        assert opcodes["UTMASTG"]
        assert bool(opcodes["UTMAREDG"]) == (kernel.gradient != "dv")
        for block in walk_blocks(kernel):
            under = block.before_values.keys() | block.after_values.keys()
            assert not under & {"UTMASTG", "UTMAREDG"}
