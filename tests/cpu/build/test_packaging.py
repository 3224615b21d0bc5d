"""The package as it is installed: every directory listed, the kernel sources found."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tfla_tk
from tfla_tk import env
from tfla_tk._first import OLDEST_TORCH
from tfla_tk.build import BuildError, all_instances, sources
from tfla_tk.build.compiler import source_of

ROOT = Path(__file__).parents[3]
MAPPED = {"tfla_tk": "tfla_tk", "reference": "tfla_tk.reference", "bench": "tfla_tk.bench"}


def test_every_package_is_listed_in_pyproject() -> None:
    tomllib = pytest.importorskip("tomllib")
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {
        ".".join((MAPPED[top], *init.parent.relative_to(ROOT / top).parts))
        for top in MAPPED
        for init in (ROOT / top).rglob("__init__.py")
    }
    assert set(listed) == found | {"tfla_tk._kernels"}


def found_from(folder: Path, *options: str) -> list[Path]:
    """Where Python started in a folder finds tfla_tk.reference and tfla_tk.bench."""
    script = (
        f"import sys; sys.path[1:] = {sys.path}\n"
        "import tfla_tk.reference, tfla_tk.bench\n"
        "print(tfla_tk.reference.__file__, tfla_tk.bench.__file__)"
    )
    command = [sys.executable, *options, "-c", script]
    found = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout
    return [Path(file).parent for file in found.split()]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The Python files of a checkout in a folder of their own."""
    for top in MAPPED:
        shutil.copytree(ROOT / top, tmp_path / top, ignore=shutil.ignore_patterns("__pycache__", "kernels"))
    return tmp_path


@pytest.mark.slow
def test_reference_and_bench_in_a_checkout(copy: Path) -> None:
    """Its tfla_tk/ comes before what is installed: nothing (-S reads no .pth file) or another one."""
    beside = [copy / "reference", copy / "bench"]
    assert found_from(copy, "-S") == beside
    assert found_from(copy) == beside


def test_reference_and_bench_of_a_wheel(copy: Path) -> None:
    """What lies beside the package is of other people there."""
    for top in ("reference", "bench"):
        shutil.move(copy / top, copy / "tfla_tk" / top)
        (copy / top).mkdir()
        (copy / top / "__init__.py").write_text("raise AssertionError")
    assert found_from(copy, "-S") == [copy / "tfla_tk/reference", copy / "tfla_tk/bench"]


def test_one_version() -> None:
    """Of the package, of what is installed, and of what pyproject.toml builds."""
    config = pytest.importorskip("setuptools.config.pyprojecttoml")
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", tfla_tk.__version__)
    assert importlib.metadata.version("tfla_tk") == tfla_tk.__version__
    assert config.read_configuration(ROOT / "pyproject.toml")["project"]["version"] == tfla_tk.__version__


def test_one_oldest_torch() -> None:
    """Of the requirement, of the warning at import, and of what the README says."""
    oldest = ".".join(map(str, OLDEST_TORCH))
    assert f'"torch>={oldest}",' in (ROOT / "pyproject.toml").read_text()
    assert f"PyTorch {oldest}, the first supported release" in (ROOT / "README.md").read_text()


def test_the_docs_name_every_environment_variable() -> None:
    text = (ROOT / "docs/install.md").read_text()
    assert [variable.name for variable in env.VARIABLES if f"`{variable.name}`" not in text] == []


def test_kernel_sources_of_the_checkout() -> None:
    assert sources.kernels_root() == ROOT / "kernels"


def test_kernel_sources_of_a_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "site-packages/tfla_tk"
    monkeypatch.setattr(sources, "__file__", str(package / "build/sources.py"))
    with pytest.raises(BuildError, match="kernel sources"):
        sources.kernels_root()
    (package / "_kernels").mkdir(parents=True)
    (package / "_kernels" / sources.COMMIT_FILE).write_text("0\n")
    assert sources.kernels_root() == package / "_kernels"


def kernel_sources() -> list[Path]:
    return [path for path in (ROOT / "kernels").rglob("*") if path.suffix in {".cu", ".cuh", ".cpp", ".h"}]


def test_every_header_is_part_of_a_kernel() -> None:
    """What nothing includes would still be shipped, and change the key of every module."""
    included = {
        name.rsplit("/", 1)[-1]
        for text in (source_of(all_instances()), *(path.read_text() for path in kernel_sources()))
        for name in re.findall(r'#include "([^"]+)"', text)
    }
    headers = {path.name for path in kernel_sources() if path.suffix in {".cuh", ".h"}}
    assert headers <= included


def test_no_torch_header_below_kernels() -> None:
    files = kernel_sources()
    assert files
    for path in files:
        includes = [line for line in path.read_text().splitlines() if line.lstrip().startswith("#include")]
        assert not [line for line in includes if "torch" in line or "ATen" in line or "c10" in line], path


@pytest.mark.parametrize(
    "set_to, expected",
    [
        ({}, "{home}/.cache/tfla_tk"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/tfla_tk"),
        ({"XDG_CACHE_HOME": "~/cache"}, "{home}/cache/tfla_tk"),
        ({"TFLA_TK_CACHE_DIR": "/c"}, "/c"),
    ],
)
def test_cache_directory(
    set_to: dict[str, str], expected: str, isolated_environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TFLA_TK_CACHE_DIR")
    for name, value in set_to.items():
        monkeypatch.setenv(name, value)
    assert str(env.cache_dir()) == expected.format(home=Path.home())


@pytest.mark.parametrize("set_to", [{}, {"TFLA_TK_CACHE_DIR": "~/c"}, {"XDG_CACHE_HOME": "~/c"}])
def test_no_home_directory(
    set_to: dict[str, str], isolated_environment: Path, monkeypatch: pytest.MonkeyPatch, no_home: None
) -> None:
    monkeypatch.delenv("TFLA_TK_CACHE_DIR")
    for name, value in set_to.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match="no home directory for the cache: HOME is not set"):
        env.cache_dir()
    monkeypatch.setenv("TFLA_TK_CACHE_DIR", "/c")
    assert env.cache_dir() == Path("/c")


def test_build_jobs(isolated_environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert env.build_jobs() >= 1
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)  # as on macOS and Windows
    for count in (5, None):
        monkeypatch.setattr(os, "cpu_count", lambda count=count: count)
        assert env.build_jobs() == (count or 1)
    monkeypatch.setenv("TFLA_TK_JOBS", "3")
    assert env.build_jobs() == 3
    for wrong in ("0", "-1", "many"):
        monkeypatch.setenv("TFLA_TK_JOBS", wrong)
        with pytest.raises(ValueError, match="TFLA_TK_JOBS: expected a positive integer"):
            env.build_jobs()
