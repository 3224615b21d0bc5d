"""Instances compiled once for all the tests and worker processes, and what is in their SASS; launchers."""

from __future__ import annotations

import functools
import pickle
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from tfla_tk import build, env
from tfla_tk.build import Instance, Launcher, builder
from tfla_tk.build.locking import file_lock
from tfla_tk.core.layout import GRADIENTS

from .recorded import RecordedLauncher
from .sass import Instruction, functions_of

# whatever the compile gate looks at
GATED = build.all_instances()

_GRADIENTS = tuple(GRADIENTS)
_EVENTS = {"MUFU.EX2": "exp2", "UTMASTG": "store", "BAR.ARV": "turn"}
# a kernel's config in its symbol: type, tile and, in any order, flags, gate and gradient
_CONFIG = re.compile(r"ConfigI\d+\w+?Li(\d+)ELi(\d+)E(\w*?)EEv")
_FLAG = re.compile(r"Lb([01])E")
_GRADIENT = re.compile(r"\d+GradientE(\d)E")
_KERNEL = re.compile(r"\d+((?:mlstm|delta|gla)_[a-z_]+?)_kernel[IE]")


def _is_wgmma_of_shared(opcode: str, operands: str) -> bool:
    """Whether both operands of a wgmma are in shared memory."""
    return opcode.startswith("HGMMA") and operands.split(", ")[1].startswith("gdesc")


@dataclass(frozen=True)
class Kernel:
    """The SASS of one kernel, with what its symbol names; gradient "" where it has none.

    Of a walk of the backward, dim_qk and slice_v are the tile of the keys and the slice of the values.
    """

    name: str
    dim_qk: int
    slice_v: int
    normalize: bool
    gradient: str
    instructions: list[Instruction]

    def stages(self) -> list[Counter[str]]:
        """What the program holds while wgmmas are in flight, from WARPGROUP.ARRIVE to the wait for all.

        Counts per stage: "scores" (Q K^T), "inter" (Q C) and "register" (A from registers: P V, or the
        state) wgmmas, "exp2", "store" (TMA stores), "turn" (arrivals at a named barrier). The forward's
        first wgmma tells the shape of the scores' and which registers accumulate them.
        """
        found: list[Counter[str]] = []
        stage: Counter[str] | None = None
        first = next((op, o) for op, o in self.instructions if _is_wgmma_of_shared(op, o))
        scores = (first[0], first[1].split(",")[0])
        for opcode, operands in self.instructions:
            if opcode == "WARPGROUP.ARRIVE" and stage is None:
                stage = Counter()
            elif stage is None:
                continue
            elif opcode.startswith("HGMMA"):
                shared = "scores" if (opcode, operands.split(",")[0]) == scores else "inter"
                stage[shared if _is_wgmma_of_shared(opcode, operands) else "register"] += 1
            elif opcode == "WARPGROUP.DEPBAR.LE" and operands.endswith("0x0"):
                found.append(stage)
                stage = None
            elif name := _EVENTS.get(opcode.removesuffix(".4D")):
                stage[name] += 1
        return found


@dataclass(frozen=True)
class Compiled:
    """One instance: what ptxas said, and the SASS of its kernels by symbol."""

    instance: Instance
    ptxas_log: str
    functions: dict[str, list[Instruction]]

    @property
    def kernels(self) -> list[Kernel]:
        """Those whose symbols name a config."""
        found: list[Kernel] = []
        for function, instructions in self.functions.items():
            name, config = _KERNEL.search(function), _CONFIG.search(function)
            assert name, f"{function} is no kernel of this package"
            if config:
                dim_qk, slice_v, rest = config.groups()
                gradient, normalize = _GRADIENT.search(rest), _FLAG.findall(rest) == ["1"]
                of = _GRADIENTS[int(gradient[1])] if gradient else ""
                found.append(Kernel(name[1], int(dim_qk), int(slice_v), normalize, of, instructions))
        return found


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
