"""Modules compiled by the nvcc of this machine, with no GPU and no driver: skipped where there is no nvcc."""

from __future__ import annotations

import ctypes
import dataclasses
import threading
from pathlib import Path

import pytest

from tfla_tk import build, env
from tfla_tk.build import BuildError, Built, Instance, builder, cache
from tfla_tk.build.disassembly import find_tool
from tfla_tk.build.thunderkittens import ThunderKittens

STUB_LIBRARY = 34  # CUDA_ERROR_STUB_LIBRARY: what the driver shim answers where there is no driver


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def write_bytes(scratch: Path) -> tuple[Path, str]:
    """Stands for a compiler whose output is no shared object."""
    module = scratch / "toy_1.so"
    module.write_bytes(b"no shared object")
    return module, ""


@pytest.fixture
def nvcc(
    monkeypatch: pytest.MonkeyPatch,
    isolated_environment: Path,
    kernel_sources: Path,
    kittens: ThunderKittens,
) -> None:
    """The real nvcc, the toy kernel, an empty ThunderKittens, nothing loaded yet."""
    try:
        found = build.find_toolchain()
    except BuildError as error:
        pytest.skip(error.reason.splitlines()[0])
    monkeypatch.setenv(env.NVCC.name, str(found.nvcc))
    monkeypatch.setenv(env.THUNDERKITTENS_ROOT.name, str(kittens.root))
    monkeypatch.setattr(builder, "_loaded", {})


def test_modules_of_one_source_load_side_by_side(nvcc: None, toy: Instance) -> None:
    other = Instance("toy_2", toy.source, (("ANSWER", "2"),))
    seen: list[Built] = []
    built = build.ensure([toy, other], jobs=2, progress=seen.append)
    assert [one.instance for one in built] == [toy, other]
    assert {one.instance for one in seen} == {toy, other}
    assert all(one.compiled and one.seconds > 0 for one in built)
    assert build.parse_ptxas_log(built[0].ptxas_log)[0].registers > 0

    first, second = build.load(toy), build.load(other)
    assert (first.answer(), second.answer(), first.answer()) == (1, 2, 1)
    assert build.load(toy) is first
    assert not any(one.compiled for one in build.ensure([toy, other]))

    # the shim answers for the driver
    assert (first.encode() == STUB_LIBRARY) != has_driver()
    assert first.error_text()


def test_cubin_and_sass(nvcc: None, toy: Instance, tmp_path: Path) -> None:
    result = build.compile_cubin(toy, tmp_path / "out")
    assert result.cubin == tmp_path / "out/toy_1.cubin"
    assert result.seconds > 0
    build.check_ptxas_log(result.ptxas_log)
    if find_tool("nvdisasm") is None:
        pytest.skip("no nvdisasm")
    sass = build.disassemble(result.cubin)
    assert "toy" in sass and "FADD" in sass


SPILL = """
#include "common/params.h"
__global__ void toy(float* out, int n) {
    float local[64];
    for (int j = 0; j < n; ++j) local[j % 64] = out[j];
    out[threadIdx.x] = local[n % 64] + local[threadIdx.x % 64];
}
int answer() { return ANSWER; }
"""


def test_a_kernel_with_a_stack_frame_is_refused(nvcc: None, kernel_sources: Path, toy: Instance) -> None:
    (kernel_sources / "toy/toy.cu").write_text(SPILL)
    with pytest.raises(BuildError, match=r"toy_1: ptxas reports\n.*256 bytes stack frame"):
        build.load(toy)
    assert [path.suffix for path in cache.modules_dir().iterdir()] == [".lock"]


def test_such_a_kernel_is_built_where_the_gate_is_off(
    nvcc: None, kernel_sources: Path, toy: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    (kernel_sources / "toy/toy.cu").write_text(SPILL)
    monkeypatch.setenv(env.PTXAS_GATE.name, "off")
    assert build.load(toy).answer() == 1
    monkeypatch.delenv(env.PTXAS_GATE.name)
    monkeypatch.setattr(builder, "_loaded", {})
    with pytest.raises(BuildError, match="stack frame"):
        build.load(toy)


def test_the_gate_is_on_or_off(toy: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.PTXAS_GATE.name, "0")
    with pytest.raises(ValueError, match="TFLA_TK_PTXAS_GATE: expected on or off, got '0'"):
        env.refuses_slow_kernels()


def test_a_compiler_error_is_quoted_and_the_rest_goes_on(
    nvcc: None, kernel_sources: Path, toy: Instance
) -> None:
    (kernel_sources / "other/other.cu").write_text("int answer() { return undeclared; }\n")
    broken = dataclasses.replace(toy, name="broken", source="other/other.cu")
    cache.find_or_build(toy, build.cache_key(toy), write_bytes)
    seen: list[Built] = []
    with pytest.raises(BuildError, match="1 of 2 kernels were not built") as caught:
        build.ensure([broken, toy], progress=seen.append)
    assert "undeclared" in caught.value.reason
    assert [one.instance for one in seen] == [toy]


def test_a_missing_source_is_named(nvcc: None, toy: Instance, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"toy/gone\.cu does not exist"):
        build.compile_cubin(dataclasses.replace(toy, source="toy/gone.cu"), tmp_path)


def test_nothing_is_compiled_while_a_graph_is_captured(
    nvcc: None, toy: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "_capturing", lambda: True)
    with pytest.raises(BuildError, match="while a CUDA graph is being captured") as caught:
        build.load(toy)
    assert "before the capture" in caught.value.remedy


def test_an_entry_that_does_not_import_is_reported(nvcc: None, toy: Instance) -> None:
    cache.find_or_build(toy, build.cache_key(toy), write_bytes)
    with pytest.raises(BuildError, match="was built but does not import"):
        build.load(toy)


def test_an_interrupt_begins_no_further_compilation(monkeypatch: pytest.MonkeyPatch, toy: Instance) -> None:
    begun: list[Instance] = []
    running_ends = threading.Event()

    def build_one(instance: Instance, slots: object) -> Built:
        begun.append(instance)
        if len(begun) > 1:
            running_ends.wait(timeout=10)
        return Built(instance, Path("module"), "", True, 0.0)

    def interrupt(built: Built) -> None:
        threading.Timer(0.5, running_ends.set).start()
        raise KeyboardInterrupt

    monkeypatch.setattr(builder, "_timed_build", build_one)
    with pytest.raises(KeyboardInterrupt):
        build.ensure([dataclasses.replace(toy, name=f"toy{n}") for n in range(6)], 1, interrupt)
    assert len(begun) <= 2


@pytest.mark.parametrize("jobs", [0, -1])
def test_jobs_must_be_positive(jobs: int) -> None:
    with pytest.raises(ValueError, match="jobs: expected a positive number"):
        build.ensure([], jobs=jobs)
