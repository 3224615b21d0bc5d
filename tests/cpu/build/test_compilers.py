"""What `make compilers` says of the logs of several compilers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tfla_tk import build, env
from tfla_tk.build.instances import kernel_of
from tfla_tk.build.toolchain import find_tool

from ... import compilers

KERNEL = "_ZN7tfla_tk5mlstm17mlstm_pass_kernelINS0_10PassConfigILi256EEEEEvNS0_11PassGlobalsE"


def log(registers: int = 128, frame: int = 0, spills: int = 0, more: str = "") -> str:
    return f"""\
ptxas info    : Compiling entry function '{KERNEL}' for 'sm_90a'
ptxas info    : Function properties for {KERNEL}
    {frame} bytes stack frame, {spills} bytes spill stores, {spills} bytes spill loads
ptxas info    : Used {registers} registers, used 1 barriers
{more}"""


SERIALISED = f"""\
ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized due to \
insufficient register resources for the function '{KERNEL}'
"""
IGNORED = "ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored\n"


def test_equal_logs_differ_in_nothing() -> None:
    assert list(compilers.differences({"13.0": log(), "13.5": log()})) == []
    assert compilers.row("13.0", [log(), log()]) == "| 13.0 | 2 | 2 | none | none |\n"


@pytest.mark.parametrize(
    ("other", "said", "serialised", "spilling"),
    [
        (log(registers=168), "168 registers", "none", "none"),
        (log(frame=8, spills=8), "128 registers, 8 bytes of frame, 16 bytes of spills", "none", 1),
        (log(more=SERIALISED), "128 registers, C7512", 1, "none"),
        (log(more=IGNORED), IGNORED.strip(), 1, "none"),
    ],
    ids=["registers", "spills", "serialised", "no_kernel_named"],
)
def test_what_another_compiler_does_is_told(
    other: str, said: str, serialised: object, spilling: object
) -> None:
    (line,) = compilers.differences({"13.0": log(), "13.5": other})
    assert line.startswith(f"13.5: {said}, first compiler ")
    assert compilers.row("13.5", [other]).endswith(f"| {serialised} | {spilling} |\n")


def test_a_fault_that_all_compilers_have_is_told() -> None:
    slow = log(more=SERIALISED)
    assert len(list(compilers.differences({"13.0": slow, "13.5": slow}))) == 2


def test_the_ptx_goes_through_another_ptxas(
    kernel_compiler: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both name the same kernels; here it is nvcc's own ptxas, which reads PTX of older versions, too."""
    nvcc, ptxas = build.find_toolchain().nvcc, find_tool("ptxas")
    monkeypatch.setattr(compilers, "FOLDER", tmp_path)
    monkeypatch.setenv(env.NVCC.name, str(nvcc))  # and back, as the next
    monkeypatch.setenv(env.NVCC_APPEND_FLAGS.name, "")
    assert ptxas
    segments = kernel_of("gla_segments", False, tile=64, backward=False)
    own, others = compilers.compiled(segments, [nvcc], ptxas).values()
    kernels = set(compilers.kernels_of(own))
    assert kernels and kernels == set(compilers.kernels_of(others))
