"""FLOPs of the operators, for the benchmarks and for torch.utils.flop_counter.FlopCounterMode.

Multiplications and additions per token and head of the chunkwise form with fused chunks of CHUNK tokens.
"""

import importlib.abc
import importlib.machinery
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from tfla_tk.core.layout import CHUNK

_COUNTER = "torch.utils.flop_counter"


@dataclass(frozen=True)
class Count:
    """FLOPs of a token from K and V. intra: how often scores are made with the chunk, and multiplied with the
    values. state: multiplications and additions per element of the state."""

    intra: int
    state: int

    def __call__(self, dim_qk: int, dim_v: int) -> int:
        return self.intra * (CHUNK + 64) * (dim_qk + dim_v) + self.state * dim_qk * dim_v


intra_chunk = Count(1, 0)
forward = Count(1, 4)  # with a scalar gate: the state is read and updated
backward = Count(3, 10)  # of the same in two sweeps: dq forward in time, dk and dv backward in time
gla_backward = Count(3, 8)  # with a gate per key channel
delta_rule = Count(1, 6)  # the state is read for q and for k, and updated
delta_rule_backward = Count(3, 18)  # the walk again, its mirror, and the walks for dq and dk
step = Count(0, 5)  # one token of decoding: decay, update and read the state


_formulas: dict[str, Callable[..., int]] = {}


def register(op: str, per_token: Callable[[int, int], int]) -> None:
    """Have FlopCounterMode count the op tfla_tk::<op>, whose tensors begin with q, k and v: per_token
    FLOPs per token and head of v from the head dims of q and v."""

    def formula(q: Sequence[int], k: Sequence[int], v: Sequence[int], *rest: Any, **options: Any) -> int:
        return math.prod(v[:-1]) * per_token(q[-1], v[-1])

    _formulas[op] = formula
    if _COUNTER in sys.modules:
        _tell(sys.modules[_COUNTER])


def _tell(counter: ModuleType) -> None:
    for name, formula in _formulas.items():
        op = getattr(torch.ops.tfla_tk, name)
        if op not in counter.flop_registry:
            counter.register_flop_formula(op)(formula)


class _WhenImported(importlib.abc.MetaPathFinder):
    """Tells the counter the formulas when it is imported: importing it here would import Triton."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _COUNTER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _tell(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if _COUNTER not in sys.modules:
    sys.meta_path.insert(0, _WhenImported())
