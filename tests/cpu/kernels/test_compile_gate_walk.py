"""What the compiler made of the mLSTM backward's walks: a clean ptxas log, the wgmmas and their overlap.

How many there are of everything is on record: test_sass_summary.py.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tfla_tk import build
from tfla_tk.build.instances import WALK_TILES, mlstm_pass

from .state_walk import kinds, walk_blocks

CHUNK = 64
OUTPUT_REGISTERS = CHUNK // 2  # of a block: fp32, 64 columns of the values by 64 tokens
INSTANCES = [mlstm_pass("dv", *tile) for tile in WALK_TILES]

Compile = Callable[[build.Instance], Any]


@pytest.fixture(params=INSTANCES, ids=lambda instance: instance.name, scope="session")
def compiled(request: pytest.FixtureRequest, compile_once: Compile) -> Any:
    return compile_once(request.param)


def gradients(slice_: int) -> tuple[str, ...]:
    """What an instance makes: slices of 256 leave no registers for the row sums of dq and dk."""
    return ("dv",) if slice_ == 256 else ("dq", "dk", "dv")


def makes(slice_: int) -> set[tuple[bool, str, bool]]:
    """The same as (half, gradient, normalize): dq and dk with a normaliser and without."""
    return {
        (half, gradient, normalize)
        for half, gradient, normalize in itertools.product((False, True), gradients(slice_), (False, True))
        if gradient != "dv" or not normalize
    }


def kernels_named(compiled: Any, name: str) -> list[Any]:
    """The walks, "mlstm_pass", or their segments kernels, "mlstm_pass_segments"."""
    return [kernel for kernel in compiled.every_kernel if kernel.name == name]


def part_of_keys(dim_keys: int) -> int:
    """Columns of the state in one wgmma."""
    return min(dim_keys, 128)


def blocks_of(slice_: int) -> int:
    """64 columns of the values each, of one state warpgroup: there are two but at a slice of 64."""
    return max(1, slice_ // 128)


def test_ptxas_reports_no_fault(compiled: Any) -> None:
    build.check_ptxas_log(compiled.ptxas_log, compiled.instance.name)
    entries = build.parse_ptxas_log(compiled.ptxas_log)
    assert len(entries) == len(compiled.every_kernel)
    assert all(re.search(r"mlstm_pass(_segments)?_kernel", entry.function) for entry in entries)
    assert all(entry.stack_frame == entry.spill_stores == entry.spill_loads == 0 for entry in entries)


def test_the_kernels_are_those_of_the_tile(compiled: Any) -> None:
    defines = dict(compiled.instance.defines)
    tile = int(defines["TFLA_DIM_KEYS"]), int(defines["TFLA_SLICE"])
    walks = kernels_named(compiled, "mlstm_pass")
    made = {(kernel.half, kernel.gradient, kernel.normalize) for kernel in walks}
    assert len(made) == len(walks)
    assert made == makes(tile[1])
    assert {(kernel.dim_qk, kernel.slice_v) for kernel in walks} == {tile}


def test_segments_only_update(compiled: Any) -> None:
    """values^T K over a chunk, waited for once; nothing else writes the registers of the state.

    The values of its later half are loaded under the GEMMs of its earlier one.
    """
    defines = dict(compiled.instance.defines)
    dim_keys, slice_ = int(defines["TFLA_DIM_KEYS"]), int(defines["TFLA_SLICE"])
    kernels = kernels_named(compiled, "mlstm_pass_segments")
    made = [(kernel.half, kernel.gradient, kernel.normalize) for kernel in kernels]
    assert sorted(made) == sorted(variant for variant in makes(slice_) if variant[1] != "dv")
    part = part_of_keys(dim_keys)
    for kernel in kernels:
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
        assert len(state) == dim_keys // 2
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


def test_the_state_decays_before_its_update(compiled: Any) -> None:
    """Every register of the state is multiplied after it has been read, where the decay is due."""
    for kernel in kernels_named(compiled, "mlstm_pass"):
        blocks = walk_blocks(kernel)
        assert len(blocks) == blocks_of(kernel.slice_v)
        for block in blocks:
            assert len(block.state) == kernel.dim_qk // 2
            assert block.state <= block.scaled
        assert len(set().union(*(block.state for block in blocks))) == len(blocks) * kernel.dim_qk // 2


def test_the_update_is_spread(compiled: Any) -> None:
    """Half of it is issued before values^T scores^T, its last part behind that; 16 tokens a group."""
    for kernel in kernels_named(compiled, "mlstm_pass"):
        for block in walk_blocks(kernel):
            assert block.groups == ["update"] * 2 + ["values"] * 2 + ["update"] + ["values"] * 2 + ["update"]


def test_the_output_stands_under_the_update(compiled: Any) -> None:
    """Before values^T scores^T its scaling, and with dq and dk the loads of the factor for its entering sum,
    those of a slow chunk's 16 tokens first. After it its staging, and with dq and dk its row sums: the factor
    again, and exchanges between lanes.
    """
    for kernel in kernels_named(compiled, "mlstm_pass"):
        of_sums = kernel.gradient != "dv"
        for block in walk_blocks(kernel):
            assert block.before_values["FMUL"] >= OUTPUT_REGISTERS
            assert block.after_values["STSM"]
            if of_sums:
                assert block.before_values["LDSM"] and block.after_values["LDSM"]
            assert bool(block.after_values["SHFL"]) == of_sums


def test_barriers_are_asked_ahead(compiled: Any) -> None:
    """Those of the next step's tiles and gates while the last GEMMs of a step are in flight."""
    for kernel in kernels_named(compiled, "mlstm_pass"):
        opcodes = [opcode for opcode, _ in kernel.instructions]
        last = max(n for n, kind in enumerate(kinds(kernel)) if kind == "update")
        waits = [n for n in range(last, len(opcodes)) if opcodes[n] == "WARPGROUP.DEPBAR.LE"]
        asked = Counter(opcodes[last : waits[1]])
        assert asked["SYNCS.PHASECHK.TRANS64"] >= 2 + 2 * kernel.dim_qk // part_of_keys(kernel.dim_qk)


def test_the_gradient_is_handed_over_under_the_reading(compiled: Any) -> None:
    """Of the block before, so that its fence is not waited for with no GEMM in flight."""
    for kernel in kernels_named(compiled, "mlstm_pass"):
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


def test_descriptors_are_uniform(compiled: Any) -> None:
    """Computed as such: none between two GEMMs of the scores goes through the registers of the lanes."""
    for kernel in kernels_named(compiled, "mlstm_pass"):
        of_scores = [n for n, kind in enumerate(kinds(kernel)) if kind == "scores"]
        between = kernel.instructions[of_scores[0] : of_scores[-1]]
        assert not any(opcode.startswith("R2UR") for opcode, _ in between)


def test_anchors_stand_apart(compiled: Any) -> None:
    """dq stores its state before it is read, dk multiplies it with that after its update, by a unit of 16
    bytes a lane and 16 columns, while no GEMM is in flight.
    """
    for kernel in kernels_named(compiled, "mlstm_pass"):
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


def test_shares_of_the_keys_take_turns(compiled: Any) -> None:
    """The storing warp waits before it stores, and tells the next share when its stores are done.

    A wait until stores have only been read would not end with CCTL.IVALL.
    """
    told = (
        *("DEPBAR.LE", "DEPBAR.LE", "CCTL.IVALL", "FENCE.VIEW.ASYNC.G"),
        *("MEMBAR.ALL.GPU", "STG.E.STRONG.GPU"),
    )
    for kernel in kernels_named(compiled, "mlstm_pass"):
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


def test_scores_are_sent_to_the_other_cta(compiled: Any) -> None:
    """From shared memory to shared memory, behind a branch: predicated away, where a cluster is one CTA, the
    copy was an illegal instruction. CTAs wait for one another before they write into the other's, and before
    theirs is gone; no fence of the GPU's scope stands in the walk.
    """
    for kernel in kernels_named(compiled, "mlstm_pass"):
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


def test_one_warp_stores_the_output(compiled: Any) -> None:
    """By a box of 16 rows or of one, stored, or added by dq and dk; never by the state's warps."""
    for kernel in kernels_named(compiled, "mlstm_pass"):
        opcodes = Counter(opcode.split(".")[0] for opcode, _ in kernel.instructions)
        assert opcodes["UTMASTG"]
        assert bool(opcodes["UTMAREDG"]) == (kernel.gradient != "dv")
        for block in walk_blocks(kernel):
            under = block.before_values.keys() | block.after_values.keys()
            assert not under & {"UTMASTG", "UTMAREDG"}
