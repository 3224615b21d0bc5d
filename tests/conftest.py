"""Markers and fixtures that every test shares.

Parameters of tests are combined in pairs: three and more of them are not all tried with one another, but for
tests marked `product`.
"""

from __future__ import annotations

import gc
import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pairs import in_pairs
from tfla_tk import env
from tfla_tk.build import BuildError, find_thunderkittens, find_toolchain

# inductor writes no vector code here: it would compile C++ to find out which the machine has
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

TESTS = Path(__file__).parent
GPU_TESTS = TESTS / "gpu"
LONG = ("slow", "compiles", "gpu")  # markers of what --quick leaves out


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-sass-summary", action="store_true", help="record what is compiled (make sass-summary)"
    )
    parser.addoption(
        "--every-kernel", action="store_true", help="compile all unchanged kernels, not some of them by turns"
    )
    parser.addoption(
        "--quick", action="store_true", help="one case of each test that is short and compiles nothing"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "product: all combinations of the parameters count, not pairs of them")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark all of tests/gpu, and skip what needs a Hopper GPU where there is none; --quick takes a few."""
    own = [item for item in items if TESTS in item.path.parents and not item.get_closest_marker("product")]
    left_out = {*own} - {*in_pairs(own)}
    config.hook.pytest_deselected(items=[item for item in own if item in left_out])
    items[:] = [item for item in items if item not in left_out]
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.gpu)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not has_hopper():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a Hopper (sm_90) GPU"))
    if config.getoption("--quick"):
        short = [item for item in items if not _is_long(item)]
        quick = {*{item.nodeid.partition("[")[0]: item for item in reversed(short)}.values()}
        config.hook.pytest_deselected(items=[item for item in items if item not in quick])
        items[:] = [item for item in items if item in quick]


def _is_long(item: pytest.Item) -> bool:
    """Whether --quick leaves it out; nvcc takes ten seconds and more."""
    return any(map(item.get_closest_marker, LONG)) or "kernel_compiler" in getattr(item, "fixturenames", ())


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """In one line what was skipped, by reasons."""
    skipped = terminalreporter.stats.get("skipped", [])
    counts = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    if counts:
        of_reasons = "; ".join(f"{count:,}: {reason}" for reason, count in counts.most_common())
        terminalreporter.write_line(f"skipped: {of_reasons}")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Without the garbage collector: what comes of it stays for the whole run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Keep the garbage collector off what is there for the whole run: benchmarks call it again and again."""
    gc.collect()
    gc.freeze()


def has_hopper() -> bool:
    """Whether torch sees a GPU of compute capability 9.0."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.fixture
def isolated_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """None of tfla_tk's environment variables, and an empty cache directory (returned; not yet made)."""
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    cache = tmp_path / "the cache"
    monkeypatch.setenv(env.CACHE_DIR.name, str(cache))
    return cache


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """No HOME, and a user without a passwd entry, as in containers that run as any user id."""

    def unknown(user: object) -> None:
        raise KeyError(user)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(pwd, "getpwnam", unknown)


@pytest.fixture
def of_nobody() -> Iterator[Path]:
    """A directory that anybody can enter, while this process is not root: root could read and write all."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield folder
    finally:
        if root:
            os.seteuid(0)
        subprocess.run(["chmod", "-R", "u+rwx", str(folder)], check=True)
        shutil.rmtree(folder)


# A process of its own for each script, all of them forked from one that has run what they begin with
FORKS = """
import json, os, sys, tempfile, traceback, types

first, scripts = json.load(sys.stdin)
sys.modules["__main__"] = types.ModuleType("__main__")
namespace = vars(sys.modules["__main__"])
exec(first, namespace)
found = {}
for name, script in scripts.items():
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1), os.dup2(err.fileno(), 2)
            status = 0
            try:
                exec(script, namespace)
            except BaseException:
                traceback.print_exc()
                status = 1
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(status)
        status = os.waitpid(child, 0)[1]
        out.seek(0), err.seek(0)
        found[name] = status, out.read(), err.read()
json.dump(found, sys.stdout)
"""


def _in_forks(first: str, scripts: dict[str, str]) -> dict[str, str]:
    command = [sys.executable, "-W", "ignore", "-c", FORKS]
    given = json.dumps([first, scripts])
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    faults = [f"{name}: {err[-3000:]}" for name, (status, _, err) in found.items() if status]
    assert not faults, "\n".join(faults)
    return {name: out for name, (_, out, _) in found.items()}


@pytest.fixture
def in_forks() -> Callable[[str, dict[str, str]], dict[str, str]]:
    """What each script writes, run in a process of its own behind `first`, which is run once.

    Importing torch takes longer than most of what is asked of a fresh process.
    """
    return _in_forks


@pytest.fixture(scope="session")
def kernel_compiler() -> None:
    """Skip where kernels cannot be compiled: no nvcc or no ThunderKittens (none is fetched)."""
    try:
        find_toolchain()
        find_thunderkittens(clone=False)
    except BuildError as error:
        pytest.skip(error.reason.splitlines()[0])
