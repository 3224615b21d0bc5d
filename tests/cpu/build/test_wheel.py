"""What is given away: the plain wheel, the one with compiled kernels, the archive of the sources."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import tfla_tk

ROOT = Path(__file__).parents[3]
MATCH = "mlstm_step_*bf16*"  # three instances

pytestmark = pytest.mark.slow
pytest.importorskip("setuptools", minversion="77.0.3")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy: setuptools leaves files beside the sources."""
    found = tmp_path_factory.mktemp("wheel") / "checkout"
    of_root = shutil.ignore_patterns(".git", ".venv*", "build", "dist", "*.egg-info")
    caches = shutil.ignore_patterns("__pycache__", ".*_cache")

    def ignored(folder: str, names: list[str]) -> set[str]:
        return caches(folder, names) | (of_root(folder, names) if Path(folder) == ROOT else set())

    shutil.copytree(ROOT, found, ignore=ignored)
    return found


def run(*command: object, cwd: Path, **environment: str) -> str:
    given = [str(part) for part in command]
    done = subprocess.run(
        given, cwd=cwd, capture_output=True, text=True, timeout=500, env=os.environ | environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def make(what: str, checkout: Path, **environment: str) -> Path:
    """A wheel or an sdist, as pip and build have it made."""
    code = f"from setuptools import build_meta; print(build_meta.build_{what}('dist'))"
    return checkout / "dist" / run(sys.executable, "-c", code, cwd=checkout, **environment).splitlines()[-1]


def test_the_archive_of_the_sources_has_tests_and_docs(checkout: Path) -> None:
    with tarfile.open(make("sdist", checkout)) as archive:
        found = {name.partition("/")[2] for name in archive.getnames()}
    ours = {str(path.relative_to(ROOT)) for path in Path(__file__).parent.glob("*.py")}
    assert ours <= found
    for folder, pattern in (
        ("docs", "*.md"),
        ("kernels", "*.cuh"),
        ("examples", "*.py"),
        ("bench", "*.json"),
    ):
        assert {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob(pattern)} <= found
    assert {
        "setup.py",
        "Makefile",
        "CHANGELOG.md",
        "constraints.txt",
        "kernels/THUNDERKITTENS_COMMIT",
    } <= found
    assert not [name for name in found if "__pycache__" in name]


def test_the_plain_wheel_is_pure_python(checkout: Path) -> None:
    wheel = make("wheel", checkout)
    assert wheel.name == f"tfla_tk-{tfla_tk.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "tfla_tk/_kernels/THUNDERKITTENS_COMMIT" in names
    assert not [name for name in names if "_prebuilt" in name or name.endswith((".so", ".cubin"))]


PROGRAM = f"""
import fnmatch, tfla_tk
from tfla_tk import build, doctor
from tfla_tk.build import EXTENSION, instances, prebuilt

wanted = [x for x in build.shipped_instances() if fnmatch.fnmatch(x.name, {MATCH!r})]
files = {{prebuilt.find(x) for x in (EXTENSION, instances.DECODING, *wanted)}}
assert len(wanted) == 3 and None not in files
assert all(build.is_cached(x) for x in wanted)
assert build.load(instances.DECODING).MAX_KEYS == 256
print(doctor.report()["prebuilt"]["kernels"], tfla_tk.__version__, tfla_tk.__file__)
"""


def test_a_wheel_with_compiled_kernels(checkout: Path, kernel_compiler: None, tmp_path: Path) -> None:
    """It serves an environment that has torch, but neither a compiler nor ThunderKittens."""
    compiled = checkout / "build" / "compiled"
    run(sys.executable, "-m", "tfla_tk", "build", "--match", MATCH, "--copy", compiled, cwd=checkout)
    wheel = make("wheel", checkout, TFLA_TK_COMPILED=str(compiled))
    platform = sysconfig.get_platform().replace("-", "_")
    name, version, *tags = wheel.stem.split("-")
    assert (name, tags) == ("tfla_tk", ["cp310", "abi3", platform])
    public, _, cuda = version.partition("+cu")
    assert public == tfla_tk.__version__ and cuda.isdecimal()
    with zipfile.ZipFile(wheel) as archive:
        suffixes = [Path(name).suffix for name in archive.namelist() if "/_prebuilt/" in name]
    assert set(suffixes) == {".cubin", ".json", ".so"} and suffixes.count(".so") == 2

    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=tmp_path)
    install = ("install", "--quiet", "--no-deps", "--no-index", wheel)
    run(sys.executable, "-m", "pip", "--python", venv / "bin/python", *install, cwd=tmp_path)
    (packages,) = venv.glob("lib/python3*/site-packages")
    others = Path(str(importlib.metadata.distribution("torch").locate_file("")))
    (packages / "others.pth").write_text(f"{others}\n")
    environment = {"PATH": "", "PYTHONPATH": "", "HOME": str(tmp_path)}
    environment["TFLA_TK_CACHE_DIR"] = str(tmp_path / "cache")
    count, version, file = run(
        venv / "bin/python", "-c", PROGRAM, cwd=tmp_path, TFLA_TK_NVCC="", CUDA_HOME="", **environment
    ).split()
    assert (count, version) == ("3", tfla_tk.__version__) and Path(file).is_relative_to(packages)
    assert not (tmp_path / "cache").exists()
