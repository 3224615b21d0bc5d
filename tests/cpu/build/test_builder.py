"""What is compiled together and side by side, and what is told of it; some by the nvcc of this machine."""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from tfla_tk import build, env
from tfla_tk.build import EXTENSION, BuildError, Built, CaptureError, Instance, Launcher, builder, cache
from tfla_tk.build.thunderkittens import ThunderKittens
from tfla_tk.build.toolchain import find_tool

STUB_LIBRARY = 34  # CUDA_ERROR_STUB_LIBRARY: what a launcher answers where there is no driver
SERIALISED = "ptxas info : (C7520) Potential Performance Loss: wgmma.mma_async instructions are serialized"


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@pytest.fixture
def nvcc(
    monkeypatch: pytest.MonkeyPatch,
    isolated_environment: Path,
    kernel_sources: Path,
    kittens: ThunderKittens,
    nothing_loaded: None,
) -> None:
    """The real nvcc, the toys and an empty ThunderKittens."""
    try:
        found = build.find_toolchain()
    except BuildError as error:
        pytest.skip(error.reason.splitlines()[0])
    monkeypatch.setenv(env.NVCC.name, str(found.nvcc))
    monkeypatch.setenv(env.THUNDERKITTENS_ROOT.name, str(kittens.root))


@pytest.mark.slow
def test_launchers_of_one_source_open_side_by_side(
    nvcc: None, launcher: Launcher, toys: list[Instance]
) -> None:
    other = dataclasses.replace(launcher, name="toy_2", defines=(("ANSWER", "2"),))
    built = build.ensure([EXTENSION, launcher, other, *toys])
    assert all(one.compiled and one.seconds > 0 for one in built)
    kernels = [kernel for one in built for kernel in build.parse_ptxas_log(one.ptxas_log)]
    assert len(kernels) == 3 and all(kernel.registers > 0 for kernel in kernels)

    first, second = build.load(launcher), build.load(other)
    assert (first.answer(), second.answer(), first.answer()) == (1, 2, 1)
    assert build.load(launcher) is first
    assert first.CODES == {"one": 1}
    assert not any(one.compiled for one in build.ensure([EXTENSION, launcher, other, *toys]))
    # a launcher answers for the driver, which alone takes machine code
    assert (first.encode() == STUB_LIBRARY) != has_driver()
    if not has_driver():
        with pytest.raises(BuildError, match=r"adds_1\.cubin was built but does not load: "):
            build.load(launcher, toys[0])


def test_cubin_and_sass(nvcc: None, toy: Instance, tmp_path: Path) -> None:
    result = build.compile_instance(toy, tmp_path / "out")
    assert result.cubin == tmp_path / "out/adds_1.cubin"
    assert result.seconds > 0
    build.check_ptxas_log(result.ptxas_log)
    if find_tool("nvdisasm") is None:
        pytest.skip("no nvdisasm")
    sass = build.disassemble(result.cubin)
    assert "toy_kernel" in sass and "FADD" in sass


SPILLS = """
namespace tfla_tk::toy {
template <int kAdds> __global__ void toy_kernel(float* out, int n) {
    float local[64];
    for (int j = 0; j < n; ++j) local[j % 64] = out[j];
    out[threadIdx.x] = local[n % 64] + local[threadIdx.x % 64] + kAdds;
}
}  // namespace tfla_tk::toy
"""


def test_a_kernel_that_spills_is_taken_with_a_warning(
    nvcc: None, kernel_sources: Path, toy: Instance, caplog: pytest.LogCaptureFixture
) -> None:
    (kernel_sources / "toy/kernel.cuh").write_text(SPILLS)
    with caplog.at_level(logging.WARNING, "tfla_tk"):
        (built,) = build.ensure([toy])
    assert built.files[toy].is_file()
    assert "adds_1, compiled by nvcc " in caplog.text and "256 bytes stack frame" in caplog.text


def test_a_compiler_error_is_quoted_and_the_rest_goes_on(
    nvcc: None, kernel_sources: Path, toy: Instance
) -> None:
    (kernel_sources / "other/other.cu").write_text("int answer() { return undeclared; }\n")
    broken = dataclasses.replace(toy, name="broken", header="other/other.cu", dtype="fp16")
    seen: list[Built] = []
    with pytest.raises(BuildError, match="1 compilations failed\nbroken: the compiler fails") as caught:
        build.ensure([broken, toy], progress=seen.append)
    assert "undeclared" in caught.value.reason
    assert [list(one.files) for one in seen] == [[toy]]


def test_what_a_call_takes_is_compiled_side_by_side(
    fake_compiler: Any,
    fake_extension: Any,
    launcher: Launcher,
    toys: list[Instance],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The extension, two files of the launcher and a cubin of each kernel."""
    monkeypatch.setenv(env.JOBS.name, "6")
    fake_compiler.wait_for = 6
    module = build.load(launcher, *toys)
    assert fake_compiler.most == 6
    assert set(fake_compiler.compiled) >= {"adds_1", "adds_2", "adds_3", "toy_1: link"}
    assert sorted(file.read_text() for file in fake_extension.loaded) == ["adds_1", "adds_2", "adds_3"]
    assert build.load(launcher, *toys) is module and len(fake_extension.loaded) == 3


def test_no_more_compilers_than_jobs(fake_compiler: Any, launcher: Launcher, toys: list[Instance]) -> None:
    fake_compiler.wait_for, fake_compiler.seconds = 2, 0.05
    build.ensure([EXTENSION, launcher, *(dataclasses.replace(toy, dtype=toy.name) for toy in toys)], jobs=2)
    assert fake_compiler.most == 2 and len(fake_compiler.compiled) == 7


def test_kernels_that_are_compiled_together_are_found_one_by_one(
    fake_compiler: Any, fake_extension: Any, launcher: Launcher, toys: list[Instance]
) -> None:
    """And loaded once."""
    (built,) = build.ensure(toys)
    assert fake_compiler.compiled == ["3 kernels of toy_1"]
    assert len({file.stat().st_ino for file in built.files.values()}) == 1
    builder._files.clear()
    build.load(launcher, toys[1])
    build.load(launcher, *toys)
    assert not [what for what in fake_compiler.compiled if what.startswith("adds")]
    assert [file.read_text() for file in fake_extension.loaded] == ["3 kernels of toy_1"]


def test_what_takes_long_is_told(
    fake_compiler: Any,
    fake_extension: Any,
    launcher: Launcher,
    toys: list[Instance],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """After two seconds, with how to have it done before."""
    build.load(launcher, toys[0])
    assert capfd.readouterr().err == ""
    fake_compiler.seconds = 2.5
    build.load(launcher, *toys[1:])
    out, err = capfd.readouterr()
    assert out == ""
    for part in ("compiling 2 files for the first call", str(cache.modules_dir()), "`tfla-tk build`"):
        assert part in err
    assert err.endswith("compiled in 3 s\n") or err.endswith("compiled in 2 s\n")


def serialise(source: str) -> str:
    """ptxas serialises the second kernel alone."""
    return SERIALISED if "toy_kernel<2>" in source else ""


def test_a_serialised_kernel_is_refused_alone(
    fake_compiler: Any, fake_extension: Any, launcher: Launcher, toys: list[Instance]
) -> None:
    """Also where it is compiled together with others."""
    fake_compiler.log = serialise
    seen: list[Built] = []
    with pytest.raises(BuildError) as caught:
        build.ensure(toys, progress=seen.append)
    reason = caught.value.reason
    assert "adds_2: nvcc 13.0.88; g++ 13 serialises its matrix products" in reason and SERIALISED in reason
    assert "adds_1" not in reason and "adds_3" not in reason
    assert [list(one.files) for one in seen] == [[toys[0]], [toys[2]]]
    build.load(launcher, toys[0], toys[2])
    with pytest.raises(BuildError, match=r"adds_2: .* serialises"):
        build.load(launcher, toys[1])


def test_the_remedy_for_a_serialised_kernel_is_one(
    fake_compiler: Any,
    fake_extension: Any,
    launcher: Launcher,
    toys: list[Instance],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_compiler.log = serialise
    with pytest.raises(BuildError) as caught:
        build.load(launcher, toys[1])
    assert "set TFLA_TK_PTXAS_GATE=off" in caught.value.remedy
    monkeypatch.setenv("TFLA_TK_PTXAS_GATE", "off")
    build.load(launcher, toys[1])
    assert [file.read_text() for file in fake_extension.loaded] == ["adds_2"]


def test_the_gate_is_on_or_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.PTXAS_GATE.name, "0")
    with pytest.raises(ValueError, match="TFLA_TK_PTXAS_GATE: expected on or off, got '0'"):
        env.refuses_slow_kernels()


def test_nothing_is_compiled_while_a_graph_is_captured(
    fake_compiler: Any,
    fake_extension: Any,
    launcher: Launcher,
    toys: list[Instance],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is compiled already loads; the rest does after the capture."""
    build.ensure([EXTENSION, launcher, toys[0]])
    known, caller = len(fake_compiler.compiled), threading.current_thread()
    # other threads have other streams, which nothing captures
    monkeypatch.setattr(builder, "_capturing", lambda: threading.current_thread() is caller)
    build.load(launcher, toys[0])
    with pytest.raises(CaptureError, match=r"adds_2 .* while a CUDA graph is being captured") as caught:
        build.load(launcher, toys[1])
    assert "before the capture" in caught.value.remedy and len(fake_compiler.compiled) == known
    monkeypatch.setattr(builder, "_capturing", lambda: False)
    build.load(launcher, toys[1])


def test_a_cache_that_is_emptied_is_filled_again(
    fake_compiler: Any, fake_extension: Any, launcher: Launcher, toys: list[Instance]
) -> None:
    """The call that finds it so fails, the next one does not."""
    build.load(launcher, toys[0])
    (built,) = build.ensure([toys[1]])
    built.files[toys[1]].unlink()
    with pytest.raises(BuildError, match="was built but does not load"):
        build.load(launcher, toys[1])
    build.load(launcher, toys[1])
    assert [file.read_text() for file in fake_extension.loaded] == ["adds_1", "adds_2"]


def test_a_library_that_is_none_is_reported(
    fake_compiler: Any, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BuildError, match=f"{EXTENSION}.* was built but does not import"):
        build.load(launcher)


def test_an_interrupt_begins_no_further_compilation(fake_compiler: Any, toys: list[Instance]) -> None:
    def interrupt(built: Built) -> None:
        raise KeyboardInterrupt

    fake_compiler.seconds = 0.2
    with pytest.raises(KeyboardInterrupt):
        build.ensure(
            [dataclasses.replace(toys[0], name=f"toy{n}", dtype=f"{n}") for n in range(6)], 1, interrupt
        )
    assert len(fake_compiler.compiled) <= 2


@pytest.mark.parametrize("jobs", [0, -1])
def test_jobs_must_be_positive(jobs: int) -> None:
    with pytest.raises(ValueError, match="jobs: expected a positive number"):
        build.ensure([], jobs=jobs)
