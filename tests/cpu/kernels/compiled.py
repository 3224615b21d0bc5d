"""Instances, compiled and disassembled; launchers, compiled once for all tests and worker processes."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from tfla_tk import build, env
from tfla_tk.build import Instance, Launcher, builder

from .recorded import RecordedLauncher, compiled
from .sass import Instruction, functions_of

# whatever the compile gate looks at
GATED = build.all_instances()
# the same in groups: one kernel's in bf16 and fp16 together
_groups: dict[str, list[Instance]] = {}
for _instance in GATED:
    _groups.setdefault(re.sub("_(bf16|fp16)", "", _instance.name), []).append(_instance)
GROUPS = list(_groups.values())


@dataclass(frozen=True)
class Compiled:
    """One instance: what ptxas said, and the SASS of its kernels by symbol."""

    instance: Instance
    ptxas_log: str
    functions: dict[str, list[Instruction]]


class Compiler:
    """Compiles instances, and loads launchers.

    Args:
        folder: that worker processes share.
        cache: of launchers, for this run of the tests and later ones.
    """

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder, self._cache = folder, cache
        self.launcher = functools.cache(self._launcher)
        self.recorded = functools.cache(self._recorded)

    def _launcher(self, launcher: Launcher) -> ModuleType:
        """What a launcher offers to Python, without machine code of kernels."""
        with self._own_cache():
            builder._files[launcher], _ = compiled(launcher, self._cache, self.folder)
            return builder.load(launcher)

    def _recorded(self, launcher: Launcher) -> RecordedLauncher:
        with self._own_cache():
            return RecordedLauncher(launcher, self._cache, self.folder)

    @contextmanager
    def _own_cache(self) -> Iterator[None]:
        """With nothing loaded."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(env.THUNDERKITTENS_ROOT.name, str(build.find_thunderkittens(clone=False).root))
            patch.setenv(env.CACHE_DIR.name, str(self._cache))
            for loaded in ("_launchers", "_attached", "_files"):
                patch.setattr(builder, loaded, {})
            yield

    def compiled(self, instance: Instance) -> Compiled:
        result = build.compile_instance(instance, self.folder)
        functions = functions_of(build.disassemble(result.cubin))
        result.cubin.unlink()
        return Compiled(instance, result.ptxas_log, functions)
