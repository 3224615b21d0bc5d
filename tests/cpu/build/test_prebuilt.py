"""Kernels that come with the package are used as they are: without nvcc and without ThunderKittens."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tfla_tk import build, env
from tfla_tk.backends.tk import device
from tfla_tk.build import EXTENSION, BuildError, Instance, Launcher, builder, cache, prebuilt, toolchain

FINDERS = builder.find_toolchain, builder.find_thunderkittens


def forget_keys() -> None:
    """As in a process that begins."""
    prebuilt._key.cache_clear()
    prebuilt._headers_key.cache_clear()


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the package's kernels lie; nothing yet."""
    found = tmp_path / "_prebuilt"
    monkeypatch.setattr(prebuilt, "FOLDER", found)
    forget_keys()
    yield found
    forget_keys()


@pytest.fixture
def brought(
    folder: Path,
    fake_compiler: Any,
    fake_extension: Any,
    toys: list[Instance],
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """A folder with the toys, on a machine that has no compiler; nothing is loaded."""
    built = build.ensure([EXTENSION, toys[0].launcher, *toys])
    files = {artifact: file for one in built for artifact, file in one.files.items()}
    prebuilt.write(folder, (13, 0), files)
    fake_compiler.compiled.clear()
    builder._files.clear()
    monkeypatch.setenv(env.CACHE_DIR.name, str(folder.parent / "empty"))
    for name, find in zip(("find_toolchain", "find_thunderkittens"), FINDERS, strict=True):
        monkeypatch.setattr(builder, name, find)
    monkeypatch.setattr(toolchain, "pip_toolkits", list)
    monkeypatch.setenv("PATH", "")
    return folder


def test_they_are_used_without_a_compiler(
    brought: Path, fake_compiler: Any, fake_extension: Any, launcher: Launcher, toys: list[Instance]
) -> None:
    """What is compiled together comes as one file."""
    assert len(list(brought.iterdir())) == 4  # and the index
    assert prebuilt.find(EXTENSION) == brought / next(brought.glob("tfla_launcher_module*.so")).name
    assert all(build.is_cached(toy) for toy in toys)
    build.load(launcher, *toys)
    assert [file.parent for file in fake_extension.loaded] == [brought]
    assert fake_compiler.compiled == [] and not cache.modules_dir().exists()


@pytest.mark.parametrize("variable", ["TFLA_TK_NVCC", "THUNDERKITTENS_ROOT", "NVCC_APPEND_FLAGS"])
def test_not_where_the_user_wants_kernels_of_their_own(
    variable: str, brought: Path, launcher: Launcher, toys: list[Instance], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, str(brought / "nothing"))
    assert prebuilt.find(toys[0]) is None
    with pytest.raises(BuildError, match=r"no usable nvcc|nothing does not exist"):
        build.load(launcher, toys[0])


def test_not_those_of_other_sources(brought: Path, kernel_sources: Path, toys: list[Instance]) -> None:
    (kernel_sources / "common/deep.h").write_text("int changed;\n")
    forget_keys()
    assert prebuilt.find(toys[0]) is None and prebuilt.find(toys[0].launcher) is None
    assert prebuilt.find(EXTENSION) is not None


def test_not_a_file_with_old_code_of_another_kernel(
    folder: Path, isolated_environment: Path, kernel_sources: Path, toy: Instance, tmp_path: Path
) -> None:
    """Kernels are loaded by the file, and the old code has the new one's name."""
    header, file = kernel_sources / "other/kernel.cuh", tmp_path / "adds_1.cubin"
    header.write_text("")
    file.write_text("both")
    other = dataclasses.replace(toy, name="other", header="other/kernel.cuh")
    prebuilt.write(folder, (13, 0), {toy: file, other: file})
    assert prebuilt.find(toy) == prebuilt.find(other) == folder / "adds_1.cubin"
    header.write_text("int changed;\n")
    forget_keys()
    assert prebuilt.find(toy) is None and prebuilt.find(other) is None


def test_a_package_without_any(folder: Path, kernel_sources: Path, toys: list[Instance]) -> None:
    assert prebuilt.index() is None and prebuilt.find(toys[0]) is None


def test_an_index_that_cannot_be_read(folder: Path, isolated_environment: Path) -> None:
    folder.mkdir()
    (folder / prebuilt.INDEX).write_text("{")
    with pytest.raises(BuildError, match=r"index\.json cannot be read") as caught:
        prebuilt.index()
    assert "reinstall" in caught.value.remedy


def test_files_of_one_name_are_kept_apart(
    folder: Path, isolated_environment: Path, kernel_sources: Path, toys: list[Instance], tmp_path: Path
) -> None:
    """That of several kernels has the name of the first, which may have been compiled again by itself."""
    files = {toy: tmp_path / toy.name / "adds_1.cubin" for toy in toys[:2]}
    for toy, file in files.items():
        file.parent.mkdir()
        file.write_text(toy.name)
    prebuilt.write(folder, (13, 0), files)
    for toy in files:
        found = prebuilt.find(toy)
        assert found is not None and found.read_text() == toy.name


@pytest.mark.parametrize(("driver", "fault"), [((13, 0), ""), ((12, 9), "the driver runs CUDA 12.9")])
def test_the_driver_alone_is_asked_for(
    driver: tuple[int, int],
    fault: str,
    brought: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(device, "_driver_version", lambda: driver)
    with caplog.at_level(logging.WARNING):
        reason, _ = device._probe_device.__wrapped__(0)
    assert reason.startswith(fault) and bool(reason) == bool(fault) and caplog.text == ""
