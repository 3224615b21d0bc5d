"""Compiled files are kept under a key of all that made them, verified when read and published whole."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tfla_tk.build import (
    EXTENSION,
    BuildError,
    Instance,
    Launcher,
    all_instances,
    cache,
    shipped_launchers,
    sources,
)
from tfla_tk.build.cache import Artifact, Entry
from tfla_tk.build.thunderkittens import ThunderKittens
from tfla_tk.build.toolchain import Toolchain

KEY = "0" * 32


class Compiler:
    """Writes a file and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, missing: list[Artifact], scratch: Path) -> tuple[Path, str]:
        self.calls += 1
        file = scratch / f"{cache.name_of(missing[0])}.cubin"
        file.write_bytes(b"code" * 100)
        return file, "log"


def find_or_build(artifact: Artifact, key: str, compile_into: Callable[..., tuple[Path, str]]) -> Entry:
    return cache.find_or_build({artifact: key}, compile_into)[artifact]


@pytest.fixture
def compiler(isolated_environment: Path, kernel_sources: Path) -> Compiler:
    return Compiler()


def edit(path: Path) -> None:
    path.write_text(path.read_text() + "int changed;\n")


# by what is compiled, each edit changes one thing that it depends on
COMMON: dict[str, Callable[[dict[str, Any], Path, pytest.MonkeyPatch], object]] = {
    "ThunderKittens": lambda a, root, mp: a.update(
        kittens=dataclasses.replace(a["kittens"], identity="other")
    ),
    "a define": lambda a, root, mp: a.update(artifact=with_define(a["artifact"])),
    "the kernels' header": lambda a, root, mp: edit(root / "toy/kernel.cuh"),
    "a header in a folder": lambda a, root, mp: edit(root / "toy/parts/part.cuh"),
    "another family's header": lambda a, root, mp: edit(root / "other/shared.cuh"),
    "a header of a header": lambda a, root, mp: edit(root / "common/deep.h"),
    "a header under a condition": lambda a, root, mp: edit(root / "toy/parts/conditional.cuh"),
    "a header that hides another": lambda a, root, mp: (root / "toy/cuda_runtime.h").write_text(""),
    "a lost header": lambda a, root, mp: (root / "other/shared.cuh").unlink(),
}
OF_THE_MACHINE: dict[str, Callable[[dict[str, Any], Path, pytest.MonkeyPatch], object]] = {
    "the compiler": lambda a, root, mp: a.update(
        toolchain=dataclasses.replace(a["toolchain"], identity="nvcc 13.1")
    ),
    "nvcc's environment": lambda a, root, mp: mp.setenv("NVCC_APPEND_FLAGS", "-G"),
    "flags before all others": lambda a, root, mp: mp.setenv("NVCC_PREPEND_FLAGS", "-G"),
    "the gate": lambda a, root, mp: mp.setenv("TFLA_TK_PTXAS_GATE", "off"),
}
EDITS = {
    "instance": COMMON
    | OF_THE_MACHINE
    | {
        "the kernels": lambda a, root, mp: a.update(
            artifact=dataclasses.replace(a["artifact"], kernels=("toy_kernel<9>",))
        ),
        "flags": lambda a, root, mp: mp.setattr(cache, "DEVICE_FLAGS", (*cache.DEVICE_FLAGS, "-G")),
    },
    "launcher": COMMON
    | OF_THE_MACHINE
    | {
        "the launches": lambda a, root, mp: edit(root / "toy/launcher.cu"),
        "what all launchers have": lambda a, root, mp: edit(root / "common/loaded_kernels.cpp"),
        "flags": lambda a, root, mp: mp.setattr(cache.compiler, "LAUNCHER_FLAGS", ("-G",)),
    },
    "extension": OF_THE_MACHINE
    | {"its source": lambda a, root, mp: edit(root / "common/launcher_module.cpp")},
}


def with_define(artifact: Any) -> Any:
    if isinstance(artifact, Instance):
        return dataclasses.replace(artifact, launcher=with_define(artifact.launcher))
    return dataclasses.replace(artifact, defines=(("ANSWER", "9"),))


@pytest.mark.parametrize(("kind", "edit"), [(kind, edit) for kind, edits in EDITS.items() for edit in edits])
def test_the_key_changes_with(
    kind: str,
    edit: str,
    isolated_environment: Path,
    kernel_sources: Path,
    toy: Instance,
    toolchain: Toolchain,
    kittens: ThunderKittens,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is of the machine alone is not in the key of the sources: a wheel's kernels serve any machine."""
    artifact = {"instance": toy, "launcher": toy.launcher, "extension": EXTENSION}[kind]
    arguments: dict[str, Any] = {"artifact": artifact, "toolchain": toolchain, "kittens": kittens}

    def source_key() -> str:
        return cache.source_key(arguments["artifact"], arguments["kittens"].identity)

    before, of_sources = cache.cache_key(**arguments), source_key()
    assert before == cache.cache_key(**arguments)
    EDITS[kind][edit](arguments, kernel_sources, monkeypatch)
    assert cache.cache_key(**arguments) != before
    assert (source_key() == of_sources) == (edit in OF_THE_MACHINE)


def test_the_key_ignores_comments_other_families_and_places(
    isolated_environment: Path,
    kernel_sources: Path,
    toy: Instance,
    toolchain: Toolchain,
    kittens: ThunderKittens,
) -> None:
    before = cache.cache_key(toy, toolchain, kittens)
    for name in (
        "other/other.cu",
        "toy/unused.cuh",
        "toy/parts/new.cuh",
        "common/unused.h",
        "toy/launcher.cu",
    ):
        (kernel_sources / name).write_text("changed")
    header = kernel_sources / toy.header
    header.write_text(f"// a comment\n\n{header.read_text()}/* and\none more */\n")
    moved = dataclasses.replace(toolchain, nvcc=Path("/elsewhere/nvcc"), origin="CUDA_HOME")
    assert cache.cache_key(toy, moved, kittens) == before


def test_the_key_follows_every_include_of_the_kernels() -> None:
    """What is compiled depends on the files that the compiler opens, but for what lies outside kernels/."""
    root = sources.kernels_root()
    begun = {instance.header for instance in all_instances()}
    begun |= {launcher.source for launcher in shipped_launchers()}
    for file in begun:
        found = {name for name, _ in cache._source_digests((file,))}
        assert file in found
        for name in found:
            quoted = re.findall(r'#include "([^"]+)"', (root / name).read_text(encoding="utf-8"))
            for included in quoted:
                ends = [other for other in found if f"/{other}".endswith(f"/{included}")]
                outside = included.startswith(("kittens", "Python", "cuda"))
                assert ends or outside, (name, included)


def test_an_include_that_cannot_be_followed_is_refused(
    kernel_sources: Path, toy: Instance, toolchain: Toolchain, kittens: ThunderKittens
) -> None:
    (kernel_sources / "toy/parts/part.cuh").write_text("#include CONFIG_OF_THE_DAY\n")
    with pytest.raises(BuildError, match=r"part\.cuh: the include of 'CONFIG_OF_THE_DAY' cannot be followed"):
        cache.cache_key(toy, toolchain, kittens)
    (kernel_sources / "toy/kernel.cuh").unlink()
    with pytest.raises(BuildError, match=r"the kernel source .*kernel\.cuh cannot be read"):
        cache.cache_key(toy, toolchain, kittens)


def test_an_entry_is_compiled_once_and_private(compiler: Compiler, toy: Instance) -> None:
    first = find_or_build(toy, KEY, compiler)
    second = find_or_build(toy, KEY, compiler)
    assert (first.built, second.built, compiler.calls) == (True, False, 1)
    assert first.file == second.file
    assert (first.ptxas_log, second.ptxas_log) == ("log", "log")
    assert stat.S_IMODE(cache.modules_dir().stat().st_mode) == 0o700
    assert not list(cache.modules_dir().glob(".*"))


def test_what_is_missing_is_compiled_together(compiler: Compiler, toys: list[Instance]) -> None:
    """To one file, and each is found by itself afterwards."""
    keys = {toy: f"{n}" * 32 for n, toy in enumerate(toys)}
    alone = find_or_build(toys[1], keys[toys[1]], compiler)
    found = cache.find_or_build(dict(keys), compiler)
    assert compiler.calls == 2
    assert [found[toy].built for toy in toys] == [True, False, True]
    assert found[toys[0]].file.samefile(found[toys[2]].file) and found[toys[1]].file == alone.file
    for toy in toys:
        assert cache.find_entry(toy, keys[toy]) == dataclasses.replace(found[toy], built=False)


def test_a_file_with_old_code_of_another_kernel_is_not_taken(
    compiler: Compiler, toy: Instance, kernel_sources: Path
) -> None:
    """Kernels are loaded by the file, and the old code has the new one's name."""
    header = kernel_sources / "other/kernel.cuh"
    header.write_text("")
    other = dataclasses.replace(toy, name="other", header="other/kernel.cuh")
    keys: dict[Artifact, str] = {toy: KEY, other: KEY}
    together = cache.find_or_build(dict(keys), compiler)
    assert cache.find_entry(toy, KEY) == dataclasses.replace(together[toy], built=False)
    edit(header)
    assert cache.find_entry(toy, KEY) is None
    assert find_or_build(toy, KEY, compiler).built
    edit(header)
    assert cache.find_entry(toy, KEY) is not None  # it is alone in its file
    header.unlink()
    assert cache.find_entry(toy, KEY) is not None and cache.find_entry(other, KEY) is None


def test_what_another_process_has_compiled_meanwhile_stays(compiler: Compiler, toys: list[Instance]) -> None:
    """It may be in use."""
    keys = {toy: KEY for toy in toys}
    meanwhile: list[Entry] = []

    def compile_into(missing: list[Artifact], scratch: Path) -> tuple[Path, str]:
        meanwhile.append(find_or_build(toys[1], KEY, compiler))
        return compiler(missing, scratch)

    file = cache.find_or_build(dict(keys), compile_into)[toys[1]].file
    assert file == meanwhile[0].file and file.name == "adds_2.cubin" and file.is_file()


def test_a_lax_directory_is_made_private(compiler: Compiler, toy: Instance) -> None:
    cache.modules_dir().mkdir(parents=True, mode=0o755)
    cache.modules_dir().chmod(0o777)
    find_or_build(toy, KEY, compiler)
    assert stat.S_IMODE(cache.modules_dir().stat().st_mode) == 0o700


# what can be said of the cache without writing to it


def test_a_cache_that_does_not_exist_can_be_made(isolated_environment: Path) -> None:
    assert cache.check_cache()
    assert not isolated_environment.exists()


@pytest.mark.parametrize(
    "put", [lambda place: place.touch(), lambda place: place.symlink_to(place.with_name("nowhere") / "x")]
)
def test_a_file_or_a_broken_link_in_place_of_the_cache(
    put: Callable[[Path], None], isolated_environment: Path
) -> None:
    put(isolated_environment)
    with pytest.raises(BuildError, match=r"cannot be used: .*the cache is not a directory") as caught:
        cache.check_cache()
    assert "set TFLA_TK_CACHE_DIR" in caught.value.remedy


def test_no_home_for_the_cache(
    isolated_environment: Path, monkeypatch: pytest.MonkeyPatch, no_home: None
) -> None:
    monkeypatch.delenv("TFLA_TK_CACHE_DIR")
    for ask in (cache.check_cache, cache.modules_dir):
        with pytest.raises(BuildError, match="no home directory for the cache") as caught:
            ask()
        assert "set TFLA_TK_CACHE_DIR" in caught.value.remedy


@pytest.mark.parametrize("mode", [0o000, 0o500])
def test_a_cache_without_kernels_that_cannot_be_written(
    mode: int, monkeypatch: pytest.MonkeyPatch, of_nobody: Path
) -> None:
    (of_nobody / "cache/modules").mkdir(parents=True)
    (of_nobody / "cache/modules").chmod(0o500)
    (of_nobody / "cache").chmod(mode)
    monkeypatch.setenv("TFLA_TK_CACHE_DIR", str(of_nobody / "cache"))
    with pytest.raises(BuildError, match="cannot be written, and no kernel can be read from it") as caught:
        cache.check_cache()
    assert "set TFLA_TK_CACHE_DIR" in caught.value.remedy


def test_files_of_a_cache_that_can_only_be_read_are_used(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, of_nobody: Path
) -> None:
    monkeypatch.setenv("TFLA_TK_CACHE_DIR", str(of_nobody / "cache"))
    compiler = Compiler()
    assert find_or_build(launcher, KEY, compiler).built and cache.check_cache()
    for folder in (cache.modules_dir(), of_nobody / "cache"):
        folder.chmod(0o500)
    assert not cache.check_cache()
    assert not find_or_build(launcher, KEY, compiler).built
    with pytest.raises(BuildError, match=r"cannot be used: .*Permission denied"):
        find_or_build(launcher, "1" * 32, compiler)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated file": lambda file: file.write_bytes(file.read_bytes()[:100]),
    "altered file": lambda file: file.write_bytes(b"M" + file.read_bytes()[1:]),
    "lost file": lambda file: file.unlink(),
    "lost log": lambda file: (file.parent / cache.PTXAS_LOG).unlink(),
    "truncated manifest": lambda file: (file.parent / cache.MANIFEST).write_text('{"key": '),
    "manifest of another shape": lambda file: (file.parent / cache.MANIFEST).write_text("[]"),
    "manifest of no file": lambda file: (file.parent / cache.MANIFEST).write_text(
        json.dumps({"key": KEY, "file": file.name, "files": {}})
    ),
    "lost manifest": lambda file: (file.parent / cache.MANIFEST).unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_compiled_again(damage: str, compiler: Compiler, toy: Instance) -> None:
    file = find_or_build(toy, KEY, compiler).file
    whole = file.read_bytes()
    DAMAGE[damage](file)
    assert cache.find_entry(toy, KEY) is None
    assert find_or_build(toy, KEY, compiler).built
    assert file.read_bytes() == whole
    assert compiler.calls == 2


def test_a_failed_compilation_leaves_nothing_and_is_tried_again(compiler: Compiler, toy: Instance) -> None:
    def fail(missing: list[Artifact], scratch: Path) -> tuple[Path, str]:
        (scratch / "kernel.o").write_bytes(b"half")
        raise BuildError("the compiler fails")

    with pytest.raises(BuildError, match="the compiler fails"):
        find_or_build(toy, KEY, fail)
    assert [path.suffix for path in cache.modules_dir().iterdir()] == [".lock"]
    assert find_or_build(toy, KEY, compiler).built


def test_a_cache_of_another_user_is_refused(
    compiler: Compiler, toy: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    # also where it holds the entry: its module is code that would be run
    find_or_build(toy, KEY, compiler)
    cache.modules_dir().chmod(0o777)  # root's is refused as well then
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(BuildError, match="belongs to user id") as caught:
        find_or_build(toy, KEY, compiler)
    assert "TFLA_TK_CACHE_DIR" in caught.value.remedy
    assert compiler.calls == 1


def test_a_cache_that_cannot_be_written_serves(
    compiler: Compiler, toy: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, mode: int) -> None:
        raise OSError(30, "Read-only file system")

    find_or_build(toy, KEY, compiler)
    cache.modules_dir().chmod(0o755)
    monkeypatch.setattr(Path, "chmod", refuse)
    assert not find_or_build(toy, KEY, compiler).built


@pytest.mark.skipif(os.getuid() != 0, reason="needs a directory of root's")
def test_a_cache_that_root_alone_writes_serves_others(
    compiler: Compiler, toy: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_or_build(toy, KEY, compiler)
    cache.modules_dir().chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert not find_or_build(toy, KEY, compiler).built


# a process, or two, that builds KEY slowly and notes in the file it is given when its compiler starts
BUILDER = """
import os, sys, time
from tfla_tk.build import Launcher, cache

if int(sys.argv[3]) == 2:
    os.fork()

def compile_into(missing, scratch):
    with open(sys.argv[1], "a") as notes:
        notes.write("started\\n")
    time.sleep(float(sys.argv[2]))
    file = scratch / "toy.so"
    file.write_bytes(b"code")
    return file, "log"

toy = Launcher("toy", "toy/launcher.cu")
(entry,) = cache.find_or_build({toy: "0" * 32}, compile_into).values()
os.write(1, f"{entry.built} {entry.file}\\n".encode())  # at once
"""


def start_builder(notes: Path, seconds: float, processes: int = 1) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUILDER, str(notes), str(seconds), str(processes)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.05)


@pytest.mark.slow
def test_two_processes_compile_once(isolated_environment: Path, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    told = start_builder(notes, 1.0, processes=2).communicate(timeout=120)[0]
    answers = [line.split(maxsplit=1) for line in told.splitlines()]
    assert notes.read_text() == "started\n"
    assert sorted(built for built, _ in answers) == ["False", "True"]
    assert answers[0][1] == answers[1][1]


def test_a_killed_process_releases_the_lock(
    isolated_environment: Path, compiler: Compiler, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    builder = start_builder(notes, 600)
    wait_for(notes)
    builder.send_signal(signal.SIGKILL)
    builder.communicate(timeout=60)
    toy = Launcher("toy", "toy/launcher.cu")
    assert list(cache.modules_dir().glob(".*"))
    assert find_or_build(toy, KEY, compiler).built
    assert not list(cache.modules_dir().glob(".*"))
