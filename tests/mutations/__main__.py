"""Puts small faults into copies of the tree, one at a time, and tells whether the tests notice them.

    python -m tests.mutations --python
    python -m tests.mutations --kernels -j 4 --json out.json     on a machine with a Hopper GPU

The checkout stays as it is, and so does the cache of compiled kernels: a copy has one of its own, with links
to what there is. First the same tests run on an unchanged copy: what fails there notices nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from tests.mutations.faults import KERNELS, PYTHON, Fault
from tfla_tk import env

ROOT = Path(__file__).resolve().parents[2]
PARTS = "tfla_tk", "reference", "bench", "kernels", "tests", "docs", "examples"  # directories that tests read
NOTICED, SURVIVED, GONE, BROKEN, COMPILES = "noticed", "survived", "gone", "does not compile", "compiles"
FAILS, SKIPPED, ERROR = "fails unchanged", "all skipped", "error"
SOUND = (NOTICED, GONE, COMPILES)
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


class Result(NamedTuple):
    """What became of a fault. `first`: the first test that failed, or what is to be said."""

    name: str
    result: str
    seconds: float
    first: str = ""


class Options(NamedTuple):
    """jobs: compiler processes of one fault. limit: seconds for its tests. caches: where those of the copies
    stay; None: nowhere. only_compiles: no tests are run."""

    jobs: int = 1
    limit: float = 600.0
    caches: Path | None = None
    only_compiles: bool = False


def copy_tree(source: Path, target: Path) -> None:
    """The files of a tree and what tests read. Nothing is left out of the package: where another tree is
    installed, the rest would come from there."""
    target.mkdir()
    for path in source.iterdir():
        if path.is_file():
            shutil.copy2(path, target)
        elif path.name in PARTS:
            shutil.copytree(path, target / path.name, ignore=shutil.ignore_patterns("__pycache__"))


def link_cache(shared: Path, own: Path) -> None:
    """Makes a cache with links to the files of another one. An entry that is replaced stays there."""
    modules = own / "modules"
    modules.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.path.lexists(own / "thunderkittens") and (shared / "thunderkittens").exists():
        (own / "thunderkittens").symlink_to(shared / "thunderkittens")
    for manifest in shared.glob("modules/*/manifest.json"):
        entry = modules / manifest.parent.name
        if (entry / manifest.name).exists():
            continue
        shutil.rmtree(entry, ignore_errors=True)  # links that lead nowhere
        entry.mkdir()
        for file in manifest.parent.iterdir():
            (entry / file.name).symlink_to(file)


def run(command: Sequence[str], tree: Path, cache: Path, options: Options) -> tuple[int | None, str]:
    """A command of Python on a tree: its exit code, None at the limit, and what it wrote."""
    environment = os.environ | {
        "PYTHONPATH": str(tree),
        "OMP_NUM_THREADS": "1",
        env.CACHE_DIR.name: str(cache),
        env.JOBS.name: str(options.jobs),
    }
    with tempfile.TemporaryFile("w+") as written:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=tree,
            env=environment,
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(options.limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:  # with what it has started
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        written.seek(0)
        return code, written.read()


def run_tests(name: str, tests: str, tree: Path, cache: Path, options: Options) -> Result:
    """The tests of a fault in a tree."""
    begin = time.monotonic()
    command = ["pytest", "-x", "-q", "--color=no", "-p", "no:cacheprovider", *shlex.split(tests)]
    code, written = run(command, tree, cache, options)
    seconds = time.monotonic() - begin
    lines = written.strip().splitlines() or [""]
    if code is None:
        return Result(name, NOTICED, seconds, "no end within the limit")
    if code < 0:
        return Result(name, NOTICED, seconds, f"the tests end by signal {-code}")
    if code == 1 and (failed := _FAILED.search(written)):
        return Result(name, NOTICED, seconds, failed[1])
    if code == 0:
        return Result(name, SURVIVED if " passed" in written else SKIPPED, seconds)
    return Result(name, ERROR, seconds, lines[-1])


def run_fault(fault: Fault, source: Path, shared: Path, options: Options) -> Result:
    """Puts a fault into a copy of a tree, compiles it where it is a kernel's, and runs its tests."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutation-", ignore_cleanup_errors=True) as folder:
        tree = Path(folder, "tree")
        copy_tree(source, tree)
        file = tree / fault.file
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        if text.count(fault.text) != 1:
            return Result(fault.name, GONE, 0.0)
        file.write_text(text.replace(fault.text, fault.replacement), encoding="utf-8")
        cache = (options.caches or Path(folder)).resolve() / re.sub(r"\W+", "-", fault.name)
        link_cache(shared, cache)
        if fault.instance:
            code, written = run(["tfla_tk", "build", "--match", fault.instance], tree, cache, options)
            if code != 0:
                said = (written.strip().splitlines() or ["nothing"])[-1]
                return Result(fault.name, BROKEN, time.monotonic() - begin, said)
        if options.only_compiles:
            return Result(fault.name, COMPILES, time.monotonic() - begin)
        found = run_tests(fault.name, fault.tests, tree, cache, options)
        return found._replace(seconds=time.monotonic() - begin)


def run_all(faults: Sequence[Fault], options: Options, parallel: int, unchanged: bool) -> Iterator[Result]:
    """Of some faults, several at a time, as they come. unchanged: first run the tests without a fault."""
    shared = env.cache_dir()
    with tempfile.TemporaryDirectory(prefix="unchanged-") as folder, ThreadPoolExecutor(parallel) as pool:
        tree = Path(folder, "tree")
        copy_tree(ROOT, tree)
        bad: dict[str, Result] = {}
        if unchanged and not options.only_compiles:
            selections = dict.fromkeys(fault.tests for fault in faults)
            of_tests = pool.map(lambda tests: run_tests(tests, tests, tree, shared, options), selections)
            bad = {result.name: result for result in of_tests if result.result != SURVIVED}
        for fault in faults:
            if fault.tests in bad:
                result = bad[fault.tests]
                told = FAILS if result.result == NOTICED else result.result
                yield result._replace(name=fault.name, result=told)
        rest = [fault for fault in faults if fault.tests not in bad]
        running = [pool.submit(run_fault, fault, tree, shared, options) for fault in rest]
        yield from (future.result() for future in as_completed(running))


def table(results: Sequence[Result]) -> str:
    """A line for each fault: its name, what became of it, seconds, the first test that failed."""
    widths = [max(map(len, column)) for column in zip(*(result[:2] for result in results), strict=True)]
    return "".join(
        f"{name:{widths[0]}} | {result:{widths[1]}} | {seconds:4.0f} | {first}\n"
        for name, result, seconds, first in results
    )


def lost(before: Sequence[dict[str, str]], results: Sequence[Result]) -> list[str]:
    """Faults that were noticed before, as a file of results tells, and are not now, though they are there."""
    noticed = {each["name"] for each in before if each["result"] == NOTICED}
    return [result.name for result in results if result.name in noticed and result.result not in SOUND]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutations",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__,
    )
    parser.add_argument("names", nargs="*", help="parts of names of faults; none: all")
    parser.add_argument("--python", action="store_true", help="those of Python alone, which need no GPU")
    parser.add_argument("--kernels", action="store_true", help="those of kernels alone")
    parser.add_argument("-j", type=int, default=1, help="faults at a time")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for the tests of one fault")
    parser.add_argument("--compile", action="store_true", help="put them in and compile them; needs no GPU")
    parser.add_argument("--caches", type=Path, help="keep what copies compile there, for another run")
    parser.add_argument("--no-unchanged", action="store_true", help="do not run the tests without a fault")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--before", type=Path, help="such a file: tell what was noticed then and is not now")
    given = parser.parse_args(arguments)
    every = given.python == given.kernels
    chosen = KERNELS * (every or given.kernels) + PYTHON * (every or given.python)
    faults = [fault for fault in chosen if not given.names or any(part in fault.name for part in given.names)]
    if not faults:
        parser.error("no fault has such a name")
    options = Options(max(1, env.build_jobs() // given.j), given.limit, given.caches, given.compile)
    results: list[Result] = []
    for result in run_all(faults, options, given.j, not given.no_unchanged):
        print(f"{result.result}: {result.name}", flush=True)
        results.append(result)
        if given.json:
            given.json.write_text(json.dumps([each._asdict() for each in results], indent=1) + "\n")
    names = [fault.name for fault in faults]
    results.sort(key=lambda result: names.index(result.name))
    print(table(results), end="")
    if given.before:
        print(
            "not noticed any more:",
            *lost(json.loads(given.before.read_text()), results) or ["none"],
            sep="\n  ",
        )
    return any(result.result not in SOUND for result in results)


if __name__ == "__main__":
    sys.exit(main())
