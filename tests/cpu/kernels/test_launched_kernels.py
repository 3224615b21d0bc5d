"""Which kernels calls launch, as launchers choose them: their machine code is loaded, and nothing else is.

The launchers are the real ones but for the launch itself: recorder.cpp. Tensors are on the CPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tfla_tk
from tests.pairs import pairwise
from tfla_tk import build
from tfla_tk.backends.tk.scalar_gate import forward
from tfla_tk.build import Instance, Launcher
from tfla_tk.build.instances import (
    CHUNKWISE,
    DECODING,
    DELTA_RULE,
    GLA,
    KDA,
    SEQUENTIAL,
    mlstm_bwd_combine,
    mlstm_bwd_gates,
    mlstm_bwd_rows,
)

from .calls import MODULES, OPS, Op, Tensors, forget_calls, results, take_tensors_for_a_gpus
from .compiled import Compiler
from .recorded import RecordedLauncher
from .stand_in import pretend_a_gpu

HALVES = (torch.bfloat16, torch.float16)


@pytest.fixture(scope="session")
def recorded(compiler: Compiler) -> Callable[[Launcher], RecordedLauncher]:
    return compiler.recorded


Compared = Callable[..., AbstractContextManager[None]]


@pytest.fixture
def compared(recorded: Callable[[Launcher], RecordedLauncher], monkeypatch: pytest.MonkeyPatch) -> Compared:
    """Around calls, which errors name: what they have loaded is compared with what they have launched."""
    loaded: dict[Launcher, set[Instance]] = {}

    def load(launcher: Launcher, *instances: Instance) -> SimpleNamespace:
        loaded.setdefault(launcher, set()).update(instances)
        return recorded(launcher).module

    monkeypatch.setattr(build, "load", load)
    take_tensors_for_a_gpus(monkeypatch)
    pretend_a_gpu(monkeypatch, *MODULES, stream=0)

    @contextmanager
    def compared(*calls: Any) -> Iterator[None]:
        loaded.clear()
        forget_calls()
        yield
        assert loaded
        for launcher, instances in loaded.items():
            launched = set(recorded(launcher).launched())
            known: set[str] = set()
            for instance in instances:
                assert instance in build.all_instances()
                kernels = recorded(instance.launcher).kernels[instance.name]
                assert kernels & launched, f"{calls}: {instance.name} is loaded in vain"
                known |= kernels
            assert launched and not launched - known, f"{calls}: launched, but not loaded"

    return compared


def zeros(
    op: Op, dims: tuple[int, int], tokens: int, heads: int, group: int, dtype: torch.dtype, packed: bool
) -> Tensors:
    def of(heads: int, *dims: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        shape = (1, heads, tokens) if op.is_mlstm else (1, tokens, heads)
        return torch.zeros(*shape, *dims, dtype=dtype)

    x = {name: of(heads // group, dims[0], dtype=dtype) for name in "qk"} | {
        "v": of(heads, dims[1], dtype=dtype)
    }
    x |= {name: of(heads, *op.channels(name, dims[0])) for name in op.gates}
    offsets = {"cu_seqlens": torch.tensor([0, tokens // 3, tokens // 3, tokens])}
    return x | offsets if packed else x


# tokens, of which many are cut, heads, and heads that share one of q and k
SIZES = {op: [(130, 2, 1), (9000, 2, 1)] for op in OPS}
SIZES["gla"] += [(130, 100, 1)]
SIZES["kda"] = [(130, 2, 1), (70, 200, 2)]
SIZES["delta"] += [(130, 4, 2), (130, 16, 8), (70, 200, 1)]
DIMS = [
    *((16, 16), (64, 80), (64, 128), (64, 512), (80, 48), (96, 256), (128, 64), (128, 128), (128, 192)),
    *((128, 256), (128, 320), (256, 64), (256, 144), (256, 512)),
]
RAW = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}


@pytest.mark.parametrize(("name", "sizes"), [(name, sizes) for name in OPS for sizes in SIZES[name]], ids=str)
def test_calls(name: str, sizes: tuple[int, int, int], compared: Compared) -> None:
    """Both directions, with gradients of gates and without, and a forward alone. All instances have to be
    asked for."""
    op = OPS[name]
    every = [*dict.fromkeys(map(op.fitting, DIMS))]
    for dims, dtype, packed in pairwise(every, HALVES, (False, True)):
        x = zeros(op, dims, *sizes, dtype, packed)
        with compared(dims, dtype, packed):
            for options in ({}, RAW) if op.is_delta_rule else ({},):
                for without in ((), op.gates):
                    results(op, x, without=without, **options)
            with torch.no_grad():
                getattr(tfla_tk, op.name)(**x, **dict(op.options), backend="tk")


@pytest.mark.parametrize("tile", [(128, 256), (256, 128)], ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_mlstm_without_overlap(tile: tuple[int, int], dtype: torch.dtype, compared: Compared) -> None:
    with compared():
        q, v = (torch.zeros(1, 2, 130, dim, dtype=dtype) for dim in tile)
        f = torch.zeros(1, 2, 130)
        options = forward.Options(False, True, 1e-6, False, False, sequential=True)
        forward.run((q, q, v, f, f, *[None] * 4), options)


DTYPES = (torch.float32, *HALVES)


@pytest.mark.parametrize("tokens", [(), (3,), (16,)], ids=["step", "few", "more"])
@pytest.mark.parametrize("after", DTYPES, ids=str)
def test_decoding(after: torch.dtype, tokens: tuple[int, ...], compared: Compared) -> None:
    """By vectors and by numbers."""
    function: Any = tfla_tk.mlstm_sequence if tokens else tfla_tk.mlstm_step
    for dtype, before in itertools.product(DTYPES, DTYPES):
        with compared():
            for dim_v in (64, 63):
                q, v = (torch.zeros(1, 2, *tokens, dim, dtype=dtype) for dim in (32, dim_v))
                gate = torch.zeros(1, 2, *(tokens or (1,)))
                state = [torch.zeros(1, 2, *shape, dtype=before) for shape in ((32, dim_v), (32,), (1,))]
                function(q, q, v, gate, gate, *state, dtype_state=after, backend="tk")


# A launcher and the instances of it

_ROWS = [mlstm_bwd_rows(half) for half in (False, True)]  # of a normaliser
_GATES = [mlstm_bwd_gates(), mlstm_bwd_gates(sigmoid_gate=True), mlstm_bwd_gates(decay=True)]
# what launchers may launch beside the kernels of their own instances: their sources have it, too
OTHERS: dict[Launcher, list[Instance]] = {
    DELTA_RULE: [*_ROWS, *_GATES, mlstm_bwd_combine()],
    SEQUENTIAL: [x for x in build.all_instances() if x.launcher == CHUNKWISE],
}


@pytest.mark.parametrize(
    "launcher", [CHUNKWISE, SEQUENTIAL, DECODING, DELTA_RULE, GLA, KDA], ids=lambda x: x.name
)
def test_all_that_a_launcher_may_launch_is_in_some_instance(
    launcher: Launcher, recorded: Callable[[Launcher], RecordedLauncher]
) -> None:
    """And every kernel of an instance is one that its launcher may launch."""
    own = set().union(*recorded(launcher).kernels.values())
    others = (recorded(x.launcher).kernels[x.name] for x in OTHERS.get(launcher, []))
    assert own and not own - recorded(launcher).may_launch
    assert not recorded(launcher).may_launch - own - set().union(*others)
