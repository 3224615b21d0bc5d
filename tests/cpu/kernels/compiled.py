"""Kernel instances compiled once for all the tests and worker processes, and what is in their SASS."""

from __future__ import annotations

import functools
import pickle
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import pytest

from tfla_tk import build, env
from tfla_tk.build import builder
from tfla_tk.build.disassembly import cubin_of_module
from tfla_tk.build.instances import (
    all_instances,
    for_scalar_decay,
    mlstm_bwd,
    mlstm_fwd,
    mlstm_pass,
    mlstm_sequence,
    mlstm_step,
)
from tfla_tk.build.locking import file_lock
from tfla_tk.core.layout import GRADIENTS

from .sass import Instruction, functions_of

T = TypeVar("T")

# whose Python modules the tests import: they are compiled with their host code and bindings
IMPORTED = (
    mlstm_fwd(64, 64),
    for_scalar_decay(mlstm_fwd(64, 64)),
    mlstm_bwd(),
    mlstm_pass("dq", 64, 128),
    mlstm_step(),
    mlstm_sequence(8),
)
# whatever the compile gate looks at
GATED = all_instances()

_GRADIENTS = tuple(GRADIENTS)
_EVENTS = {"MUFU.EX2": "exp2", "UTMASTG": "store", "BAR.ARV": "turn"}
# a kernel's config in its symbol: type, tile and, in any order, flags, gate and gradient
_CONFIG = re.compile(r"ConfigI(\d+)(\w+?)Li(\d+)ELi(\d+)E(\w*?)EEv")
_FLAG = re.compile(r"Lb([01])E")
_GATE = re.compile(r"\d+(ExponentialInput|SigmoidInput|ScalarDecay)")
_GRADIENT = re.compile(r"\d+GradientE(\d)E")
_KERNEL = re.compile(r"\d+((?:mlstm|delta|gla)_[a-z_]+?)(?:_kernel)?[IE]")


def _is_wgmma_of_shared(opcode: str, operands: str) -> bool:
    """Whether both operands of a wgmma are in shared memory."""
    return opcode.startswith("HGMMA") and operands.split(", ")[1].startswith("gdesc")


@dataclass(frozen=True)
class Kernel:
    """The SASS of one kernel, with what its symbol names; gradient "" where it has none, gate ""
    where it is an argument.

    Of a walk of the backward, dim_qk and slice_v are the tile of the keys and the slice of the values.
    """

    name: str
    half: bool
    dim_qk: int
    slice_v: int
    normalize: bool
    gate: str
    gradient: str
    instructions: list[Instruction]

    @property
    def wgmmas(self) -> int:
        return sum(opcode.startswith("HGMMA") for opcode, _ in self.instructions)

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
                of_scores = (opcode, operands.split(",")[0]) == scores or self.name != "mlstm_fwd"
                shared = "scores" if of_scores else "inter"
                stage[shared if _is_wgmma_of_shared(opcode, operands) else "register"] += 1
            elif opcode == "WARPGROUP.DEPBAR.LE" and operands.endswith("0x0"):
                found.append(stage)
                stage = None
            elif name := _EVENTS.get(opcode.removesuffix(".4D")):
                stage[name] += 1
        return found


@dataclass(frozen=True)
class Compiled:
    """One instance: what ptxas said, the SASS of its kernels by symbol, and of those that multiply matrices
    what their symbols name.
    """

    instance: build.Instance
    ptxas_log: str
    functions: dict[str, list[Instruction]]
    every_kernel: list[Kernel]

    @property
    def kernels(self) -> list[Kernel]:
        """The fused ones of mLSTM's forward."""
        return [kernel for kernel in self.every_kernel if kernel.name in ("mlstm_fwd", "mlstm_transposed")]


def kernels_of(functions: dict[str, list[Instruction]]) -> list[Kernel]:
    """The kernels whose symbols name a config."""
    found: list[Kernel] = []
    for function, instructions in functions.items():
        name, config = _KERNEL.search(function), _CONFIG.search(function)
        assert name, f"{function} is no kernel of this package"
        if not config:
            continue
        length, text, dim_qk, slice_v, rest = config.groups()
        flags, gate = _FLAG.findall(rest), _GATE.search(rest)
        gradient = _GRADIENT.search(rest)
        found.append(
            Kernel(
                name=name[1],
                half=text[: int(length)] == "__half",
                dim_qk=int(dim_qk),
                slice_v=int(slice_v),
                normalize=flags == ["1"],
                gate=gate[1] if gate else "",
                gradient=_GRADIENTS[int(gradient[1])] if gradient else "",
                instructions=instructions,
            )
        )
    return found


class Compiler:
    """Compiles instances into a folder that worker processes share: each of them once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._modules: dict[build.Instance, ModuleType] = {}
        # a disassembly takes tens of megabytes as objects
        self.compiled = functools.lru_cache(maxsize=4)(self._compiled)

    def module(self, instance: build.Instance) -> ModuleType:
        """The Python module of an instance, as on a GPU machine."""
        assert instance in IMPORTED, f"{instance.name} is compiled without bindings: add it to IMPORTED"
        if instance not in self._modules:
            self._modules[instance] = self._in_own_cache(lambda: build.load(instance))
        return self._modules[instance]

    def _compiled(self, instance: build.Instance) -> Compiled:
        assert instance in GATED, f"{instance.name} is compiled late and not on record: add it to GATED"
        pickled = self.folder / f"{instance.name}.pickle"
        with file_lock(self.folder / f"{instance.name}.lock"):
            if not pickled.exists():
                found = self._compile(instance)
                pickled.write_bytes(pickle.dumps(found))
                return found
        found = pickle.loads(pickled.read_bytes())
        assert isinstance(found, Compiled)
        return found

    def _compile(self, instance: build.Instance) -> Compiled:
        if instance in IMPORTED:
            (built,) = self._in_own_cache(lambda: build.ensure([instance]))
            log, cubin = built.ptxas_log, cubin_of_module(built.module, self.folder / instance.name)
        else:
            result = build.compile_cubin(instance, self.folder)
            log, cubin = result.ptxas_log, result.cubin
        functions = functions_of(build.disassemble(cubin))
        cubin.unlink()
        return Compiled(instance, log, functions, kernels_of(functions))

    def _in_own_cache(self, run: Callable[[], T]) -> T:
        """Run with a cache of modules below the folder, and nothing loaded."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(env.THUNDERKITTENS_ROOT.name, str(build.find_thunderkittens(clone=False).root))
            patch.setenv(env.CACHE_DIR.name, str(self.folder / "cache"))
            patch.setattr(builder, "_loaded", {})
            return run()
