"""Instances compiled once for all the tests and worker processes, and what is in their SASS; launchers."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from tfla_tk import build, env
from tfla_tk.build import Instance, Launcher, builder
from tfla_tk.build.locking import file_lock

from .recorded import RecordedLauncher
from .sass import Instruction, functions_of

# whatever the compile gate looks at
GATED = build.all_instances()


@dataclass(frozen=True)
class Compiled:
    """One instance: what ptxas said, and the SASS of its kernels by symbol."""

    instance: Instance
    ptxas_log: str
    functions: dict[str, list[Instruction]]


class Compiler:
    """Compiles instances into a folder that worker processes share, each of them once, and loads launchers.

    Args:
        cache: of launchers, for this run of the tests and later ones.
    """

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder, self._cache = folder, cache
        self.launcher = functools.cache(self._launcher)
        self.recorded = functools.cache(self._recorded)
        # a disassembly takes tens of megabytes as objects
        self.compiled = functools.lru_cache(maxsize=4)(self._compiled)

    def _launcher(self, launcher: Launcher) -> ModuleType:
        """What a launcher offers to Python, without machine code of kernels."""
        with self._own_cache():
            return build.load(launcher)

    def _recorded(self, launcher: Launcher) -> RecordedLauncher:
        with self._own_cache():
            return RecordedLauncher(launcher, self._cache)

    @contextmanager
    def _own_cache(self) -> Iterator[None]:
        """With nothing loaded."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(env.THUNDERKITTENS_ROOT.name, str(build.find_thunderkittens(clone=False).root))
            patch.setenv(env.CACHE_DIR.name, str(self._cache))
            for loaded in ("_launchers", "_attached", "_files"):
                patch.setattr(builder, loaded, {})
            yield

    def _compiled(self, instance: Instance) -> Compiled:
        assert instance in GATED, f"{instance.name} is not on record: it has to be one of all_instances"
        pickled = self.folder / f"{instance.name}.pickle"
        with file_lock(self.folder / f"{instance.name}.lock"):
            if not pickled.exists():
                result = build.compile_instance(instance, self.folder)
                functions = functions_of(build.disassemble(result.cubin))
                result.cubin.unlink()
                found = Compiled(instance, result.ptxas_log, functions)
                pickled.write_bytes(pickle.dumps(found))
                return found
        found = pickle.loads(pickled.read_bytes())
        assert isinstance(found, Compiled)
        return found
