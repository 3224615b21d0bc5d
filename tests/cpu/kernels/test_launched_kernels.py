"""Which kernels calls launch, as launchers choose them: their machine code is loaded, and nothing else is.

The launchers are the real ones but for the launch itself: recorder.cpp. Tensors are on the CPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tfla_tk import build
from tfla_tk.backends.tk.channel_gate import backward as gla_backward
from tfla_tk.backends.tk.channel_gate import call as gla_call
from tfla_tk.backends.tk.channel_gate import launch as gla
from tfla_tk.backends.tk.delta_rule import call as delta_call
from tfla_tk.backends.tk.delta_rule import inputs as delta_inputs
from tfla_tk.backends.tk.delta_rule import launch as delta
from tfla_tk.backends.tk.scalar_gate import backward, forward, scalar_decay, sequence, step
from tfla_tk.build import Instance, Launcher
from tfla_tk.build.instances import (
    CHUNKWISE,
    DECODING,
    DELTA_RULE,
    GLA,
    SEQUENTIAL,
    mlstm_bwd_combine,
    mlstm_bwd_gates,
    mlstm_bwd_rows,
)
from tfla_tk.calls.delta_rule import DeltaRuleCore
from tfla_tk.calls.gla import GLACore
from tfla_tk.calls.linear import SimpleGLACore
from tfla_tk.core.memo import Memo

from .compiled import Compiler
from .recorded import RecordedLauncher
from .stand_in import pretend_a_gpu

# every instance is to be asked for
pytestmark = pytest.mark.product

MODULES = (
    *(forward, backward, step, sequence, gla_call, gla, gla_backward),
    *(delta_call, delta, delta_inputs),
)
MEMOS = (
    *itertools.product((forward, gla, delta), ["_forwards"]),
    *itertools.product((backward, gla_backward, delta), ["_backwards"]),
)
HALVES = (False, True)
KINDS = tuple(itertools.product(HALVES, (False, True)))  # half, packed


@pytest.fixture(scope="session")
def recorded(compiler: Compiler) -> Callable[[Launcher], RecordedLauncher]:
    return compiler.recorded


Calls = Callable[[], AbstractContextManager[None]]


@pytest.fixture
def calls(recorded: Callable[[Launcher], RecordedLauncher], monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Around calls: what they have loaded is compared with what they have launched."""
    loaded: dict[Launcher, set[Instance]] = {}

    def load(launcher: Launcher, *instances: Instance) -> SimpleNamespace:
        loaded.setdefault(launcher, set()).update(instances)
        return recorded(launcher).module

    monkeypatch.setattr(build, "load", load)
    pretend_a_gpu(monkeypatch, *MODULES, stream=0)

    @contextmanager
    def compared() -> Iterator[None]:
        loaded.clear()
        for module, memo in MEMOS:
            monkeypatch.setattr(module, memo, Memo())
        yield
        assert loaded
        for launcher, instances in loaded.items():
            launched = set(recorded(launcher).launched())
            known: set[str] = set()
            for instance in instances:
                assert instance in build.all_instances()
                kernels = recorded(instance.launcher).kernels[instance.name]
                assert kernels & launched, f"{instance.name} is loaded in vain"
                known |= kernels
            assert launched and not launched - known, "launched, but not loaded"

    return compared


def dtype_of(half: bool) -> torch.dtype:
    return torch.float16 if half else torch.bfloat16


def offsets_of(tokens: int, packed: bool) -> Tensor | None:
    return torch.tensor([0, tokens // 3, tokens // 3, tokens]) if packed else None


@pytest.mark.parametrize("tokens", [130, 9000])
@pytest.mark.parametrize("gate", ["exp", "sig", "sig_unnormalised"])
@pytest.mark.parametrize(
    "dims", [(16, 16), (64, 80), (64, 512), (80, 48), (128, 128), (128, 256), (256, 64), (256, 512)], ids=str
)
def test_mlstm(
    dims: tuple[int, int],
    gate: str,
    tokens: int,
    calls: Calls,
) -> None:
    """Long sequences are cut. With narrow head dims every forward leaves states."""
    for half, packed in KINDS:
        with calls():
            q, v = (torch.zeros(1, 2, tokens, dim, dtype=dtype_of(half)) for dim in dims)
            f, offsets = torch.zeros(1, 2, tokens), offsets_of(tokens, packed)
            options = (gate != "exp", gate != "sig_unnormalised", 1e-6)
            inputs = (q, q, v, f, f, None, None, None, offsets)
            h, _, _, _, *rows, states = forward.mlstm_fwd(*inputs, *options, False, True, False, True)
            assert (states is not None) == (tokens > 1000 or max(dims) <= 128)
            for kept in {states, None}:
                backward.mlstm_bwd(
                    *inputs, h, *rows, None, None, torch.zeros_like(h), None, None, *options, False, kept
                )


@pytest.mark.parametrize("tokens", [130, 9000])
@pytest.mark.parametrize(
    "dims", [(16, 16), (64, 80), (80, 48), (128, 128), (128, 256), (256, 64), (256, 512)], ids=str
)
def test_a_scalar_decay(dims: tuple[int, int], tokens: int, calls: Calls) -> None:
    for half, packed in KINDS:
        with calls():
            q, v = (torch.zeros(1, tokens, 2, dim, dtype=dtype_of(half)) for dim in dims)
            x = (q, q, v, torch.zeros(1, tokens, 2), None, offsets_of(tokens, packed))
            core = SimpleGLACore(*x, 0.5)
            scalar_decay.forward(core, output_final_state=False, keep=False)
            for needs_dg in (True, False):
                scalar_decay.backward(core, None, v, None, needs_gates=needs_dg)


@pytest.mark.parametrize("tile", [(128, 256), (256, 128)], ids=str)
def test_mlstm_without_overlap(tile: tuple[int, int], calls: Calls) -> None:
    for half in HALVES:
        with calls():
            q, v = (torch.zeros(1, 2, 130, dim, dtype=dtype_of(half)) for dim in tile)
            f = torch.zeros(1, 2, 130)
            forward.run(
                (q, q, v, f, f, *[None] * 4),
                forward.Options(False, True, 1e-6, False, False, sequential=True),
            )


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("tokens", [(), (3,), (16,)], ids=["step", "few", "more"])
@pytest.mark.parametrize("after", DTYPES, ids=str)
def test_decoding(
    after: torch.dtype,
    tokens: tuple[int, ...],
    calls: Calls,
) -> None:
    """By vectors and by numbers."""
    decode = sequence.mlstm_sequence if tokens else step.mlstm_step
    for dtype, before in itertools.product(DTYPES, DTYPES):
        with calls():
            for dim_v in (64, 63):
                q, v = (torch.zeros(1, 2, *tokens, dim, dtype=dtype) for dim in (32, dim_v))
                gate = torch.zeros(1, 2, *(tokens or (1,)))
                state = [torch.zeros(1, 2, *shape, dtype=before) for shape in ((32, dim_v), (32,), (1,))]
                decode(q, q, v, gate, gate, *state, False, True, 1e-6, after)


@pytest.mark.parametrize(("tokens", "heads"), [(130, 2), (4000, 2), (130, 100)])
@pytest.mark.parametrize("dims", [(16, 16), (64, 128), (128, 64), (128, 192), (96, 256), (256, 512)], ids=str)
def test_gla(
    dims: tuple[int, int],
    tokens: int,
    heads: int,
    calls: Calls,
) -> None:
    for half, packed in KINDS:
        with calls():
            q, v = (torch.zeros(1, tokens, heads, dim, dtype=dtype_of(half)) for dim in dims)
            core = GLACore(q, q, v, torch.zeros(q.shape), None, offsets_of(tokens, packed), 0.5, False)
            _, _, kept = gla.forward(core, output_final_state=True, keep=True)
            for of_forward, needs_gates in itertools.product((kept, None), (False, True)):
                gla.backward(core, of_forward, v, None, needs_gates=needs_gates)


@pytest.mark.parametrize(
    ("tokens", "heads", "group"), [(130, 2, 1), (9000, 2, 1), (130, 4, 2), (130, 16, 8), (130, 200, 1)]
)
@pytest.mark.parametrize(
    "dims", [(16, 16), (64, 128), (128, 64), (128, 128), (128, 320), (256, 144)], ids=str
)
def test_the_delta_rule(
    dims: tuple[int, int],
    tokens: int,
    heads: int,
    group: int,
    calls: Calls,
) -> None:
    """With gates and without, its inputs raw or made."""
    for half, packed in KINDS:
        with calls():
            dtype = dtype_of(half)
            q = torch.zeros(1, tokens, heads // group, dims[0], dtype=dtype)
            v, beta = torch.zeros(1, tokens, heads, dims[1], dtype=dtype), torch.zeros(1, tokens, heads)
            for g, raw in ((beta, False), (None, False), (beta, True)):
                core = DeltaRuleCore(
                    q,
                    q,
                    v,
                    g,
                    beta,
                    None,
                    None,
                    None,
                    offsets_of(tokens, packed),
                    0.5,
                    raw,
                    raw,
                    False,
                    False,
                )
                _, _, kept = delta.forward(core, output_final_state=True, keep=True)
                delta.forward(core, output_final_state=False, keep=False)
                delta.backward(core, kept, v, None, needs_gates=g is not None)


# A launcher and the instances of it

_ROWS = [mlstm_bwd_rows(half) for half in (False, True)]  # of a normaliser
# what launchers may launch beside the kernels of their own instances: their sources have it, too
OTHERS: dict[Launcher, list[Instance]] = {
    CHUNKWISE[True]: _ROWS,
    DELTA_RULE: [*_ROWS, mlstm_bwd_gates(decay=True), mlstm_bwd_combine(True)],
    SEQUENTIAL: [x for x in build.all_instances() if x.launcher == CHUNKWISE[False]],
}


@pytest.mark.parametrize(
    "launcher", [*CHUNKWISE.values(), SEQUENTIAL, DECODING, DELTA_RULE, GLA], ids=lambda x: x.name
)
def test_all_that_a_launcher_may_launch_is_in_some_instance(
    launcher: Launcher, recorded: Callable[[Launcher], RecordedLauncher]
) -> None:
    """And every kernel of an instance is one that its launcher may launch."""
    own = set().union(*recorded(launcher).kernels.values())
    others = (recorded(x.launcher).kernels[x.name] for x in OTHERS.get(launcher, []))
    assert own and not own - recorded(launcher).may_launch
    assert not recorded(launcher).may_launch - own - set().union(*others)
