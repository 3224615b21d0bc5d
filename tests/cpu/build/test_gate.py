"""ptxas logs: what passes the gate and what it refuses."""

from __future__ import annotations

import pytest

from tfla_tk.build import BuildError, check_ptxas_log, parse_ptxas_log

CLEAN = """\
ptxas info    : 0 bytes gmem, 8 bytes cmem[4]
ptxas info    : Compiling entry function '_Z9mlstm_fwdILi64EEv7globals' for 'sm_90a'
ptxas info    : Function properties for _Z9mlstm_fwdILi64EEv7globals
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 512 bytes cmem[0]
ptxas info    : Compile time = 812.430 ms
"""
WGMMA = "'_Z9mlstm_fwdILi64EEv7globals'"
SERIALISED = (
    "ptxas info    : (C7520) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
    f"the presence of divergent branches in function {WGMMA}"
)
SETMAXNREG = (
    "ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored to maintain minimum registers"
)


def test_a_clean_log_passes() -> None:
    check_ptxas_log(CLEAN)
    (kernel,) = parse_ptxas_log(CLEAN)
    assert kernel.function == "_Z9mlstm_fwdILi64EEv7globals"
    assert (kernel.registers, kernel.stack_frame, kernel.spill_stores, kernel.spill_loads) == (168, 0, 0, 0)


FRAME = "    16 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads"


@pytest.mark.parametrize(
    "lines",
    [[SERIALISED], [SETMAXNREG], [SERIALISED.replace("C7520", "C7512")], [SERIALISED, FRAME, SETMAXNREG]],
)
def test_every_fault_is_quoted(lines: list[str]) -> None:
    with pytest.raises(BuildError) as caught:
        check_ptxas_log(CLEAN + "\n".join(lines) + "\n", "mlstm_fwd_k128_v256")
    assert all(line.strip() in caught.value.reason for line in (*lines, "mlstm_fwd_k128_v256"))


@pytest.mark.parametrize(
    "frame",
    [
        "8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads",
        "0 bytes stack frame, 4 bytes spill stores, 0 bytes spill loads",
        "0 bytes stack frame, 0 bytes spill stores, 12 bytes spill loads",
    ],
)
def test_a_frame_or_a_spill_is_refused_with_its_function(frame: str) -> None:
    spilled = CLEAN.replace("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", frame)
    with pytest.raises(BuildError) as caught:
        check_ptxas_log(CLEAN + spilled.replace("mlstm_fwd", "mlstm_bwd"))
    assert frame in caught.value.reason
    assert "_Z9mlstm_bwd" in caught.value.reason
    assert "_Z9mlstm_fwd" not in caught.value.reason
