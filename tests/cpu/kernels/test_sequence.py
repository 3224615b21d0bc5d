"""A few tokens of mLSTM without a GPU: the launch, what its launcher refuses."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from tfla_tk.backends.tk import device
from tfla_tk.backends.tk.scalar_gate import sequence as tk_sequence
from tfla_tk.backends.tk.scalar_gate import support as tk
from tfla_tk.build import Launcher
from tfla_tk.build.instances import DECODING, MAX_DIM_QK, MAX_DIM_V, MAX_TOKENS, mlstm_sequence
from tfla_tk.core.layout import MAX_SLICES
from tfla_tk.core.support import SUPPORTED

from .stand_in import Kernels, launch_instead
from .test_support import CALL as CHUNKWISE_CALL

CALL = replace(CHUNKWISE_CALL, seq=8)
B, NH, S, K, V = 2, 3, 5, 64, 128
SHAPES = {
    **{"q": (S, K), "k": (S, K), "v": (S, V), "i": (S,), "f": (S,)},
    **{"c": (K, V), "n": (K,), "m": (1,)},
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
OPTIONS = (False, True, 1e-6)

# of a module's mlstm_sequence, as scalar_gate/bindings/sequence.cpp names them
ARGUMENTS = (
    *("q", "k", "v", "dtype", "i", "f", "before", "after", "h", "tiling", "sizes", "scale", "eps"),
    *("sigmoid_gate", "normalize", "in_place", "device", "stream"),
)


class Launches(Kernels):
    """Stands for the launcher and records its launches."""

    ARGUMENTS: ClassVar[dict[str, tuple[str, ...]]] = {}  # none is prepared

    def mlstm_sequence(self, *arguments: Any) -> None:
        self.launches.append(SimpleNamespace(**dict(zip(ARGUMENTS, arguments, strict=True))))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    recorder = Launches()
    launch_instead(monkeypatch, recorder, tk_sequence)
    return recorder.launches


def tokens(dtype: torch.dtype = torch.bfloat16, state: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {
        name: torch.zeros(B, NH, *shape, dtype=dtype if name in "qkv" else state)
        for name, shape in SHAPES.items()
    }


def addresses(state: tuple[Tensor | None, ...]) -> tuple[int, ...]:
    pointers = (0 if x is None else x.data_ptr() for x in state)
    return *pointers, *(0 if x is None else CODES[x.dtype] for x in state)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("before", "after"), list(itertools.product(DTYPES, DTYPES)))
def test_a_new_state(
    dtype: torch.dtype, before: torch.dtype, after: torch.dtype, launches: list[SimpleNamespace]
) -> None:
    x = tokens(dtype, before)
    h, *state = tk_sequence.mlstm_sequence(*x.values(), *OPTIONS, after)
    (launch,) = launches
    assert (h.shape, h.dtype, h.data_ptr()) == ((B, NH, S, V), dtype, launch.h)
    assert h.is_contiguous() and launch.dtype == CODES[dtype]
    assert [(t.shape, t.dtype) for t in state] == [(x[name].shape, after) for name in "cnm"]
    assert launch.after == addresses(tuple(state)) and not launch.in_place
    if {before, after} == {torch.bfloat16, torch.float16}:
        assert launch.before[0] != x["c"].data_ptr() and launch.before[3] == 0  # widened before
        assert launch.before[1:3] == (x["n"].data_ptr(), x["m"].data_ptr())
    else:
        assert launch.before == addresses((x["c"], x["n"], x["m"]))
    eight = before.itemsize == 2 and after == before and dtype != torch.float32
    assert launch.tiling[1] == (8 if eight else 4)
    assert launch.sizes == (B, NH, S, K, V) and launch.stream == 7 and launch.device == -1
    assert (launch.scale, launch.eps) == (K**-0.5, 1e-6)
    assert (launch.sigmoid_gate, launch.normalize) == (False, True)


@pytest.mark.parametrize("count", range(1, MAX_TOKENS + 1))
def test_any_number_of_tokens(count: int, launches: list[SimpleNamespace]) -> None:
    x = tokens(state=torch.bfloat16)
    x |= {name: torch.zeros(B, NH, count, *x[name].shape[3:], dtype=x[name].dtype) for name in "qkvif"}
    tk_sequence.mlstm_sequence_(*x.values(), *OPTIONS)
    (launch,) = launches
    assert launch.sizes[2] == count and launch.tiling[1] == (8 if count <= 8 else 4)


@pytest.mark.parametrize("count", [0, MAX_TOKENS + 1])
def test_no_instance(count: int) -> None:
    with pytest.raises(ValueError, match=f"tokens: expected 1 to 16, got {count}"):
        mlstm_sequence(count, "fp32", "fp32", False)


def test_tokens_are_read_where_they_lie(launches: list[SimpleNamespace]) -> None:
    """Any strides: [B, S, NH, D], parts of a fused projection, the end of a longer sequence."""
    x = tokens()
    fused = torch.zeros(B, S, NH, 2 * K + V, dtype=torch.bfloat16).transpose(1, 2)
    x["q"], x["k"], x["v"] = fused.split((K, K, V), dim=-1)
    x["i"] = torch.zeros(B, 9, NH).transpose(1, 2)[..., 4:]
    x["f"] = torch.zeros(B, 1, S, dtype=torch.float16).expand(B, NH, S)
    tk_sequence.mlstm_sequence(*x.values(), *OPTIONS, torch.float32)
    for name in ("q", "k", "v"):
        assert getattr(launches[0], name) == (x[name].data_ptr(), *x[name].stride())
    for name in ("i", "f"):
        assert getattr(launches[0], name) == (x[name].data_ptr(), *x[name].stride(), CODES[x[name].dtype])
    x["i"] = x["i"].double()
    x["q"] = torch.zeros(B, NH, S, 2 * K, dtype=torch.bfloat16)[..., ::2]
    tk_sequence.mlstm_sequence(*x.values(), *OPTIONS, torch.float32)
    assert launches[1].i[4] == 0 and launches[1].q[4] == 2


def test_in_place(launches: list[SimpleNamespace]) -> None:
    x = tokens()
    x["c"], x["m"] = x["c"].bfloat16(), x["m"].half()
    tk_sequence.mlstm_sequence_(*x.values(), *OPTIONS)
    (launch,) = launches
    assert launch.before == launch.after == addresses((x["c"], x["n"], x["m"]))
    assert launch.in_place and launch.tiling[1] == 8


def test_in_place_on_what_the_kernel_cannot_write(launches: list[SimpleNamespace]) -> None:
    """A copy is updated, and copied back."""
    x = tokens()
    x["c"] = torch.ones(B, NH, V, K).mT
    x["n"] = x["n"].double()
    tk_sequence.mlstm_sequence_(*x.values(), *OPTIONS)
    (launch,) = launches
    assert launch.before == launch.after and launch.before[3:] == (0, 0, 0)
    assert launch.before[0] != x["c"].data_ptr() and launch.before[2] == x["m"].data_ptr()
    assert x["c"].mean() == 1.0


def test_sigmoid_gate_has_no_m(launches: list[SimpleNamespace]) -> None:
    x = tokens()
    for normalize in (True, False):
        *_, m = tk_sequence.mlstm_sequence(*x.values(), True, normalize, 1e-6, torch.float32)
        assert m is None
        launch = launches[-1]
        assert launch.before[2] == launch.after[2] == 0
        assert (launch.sigmoid_gate, launch.normalize) == (True, normalize)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_vectors_do_not_fit(dtype: torch.dtype, launches: list[SimpleNamespace]) -> None:
    x = tokens(state=dtype)
    x["c"] = torch.zeros(B * NH * K * V + 1, dtype=dtype)[1:].view(B, NH, K, V)  # shifted by one number
    tk_sequence.mlstm_sequence_(*x.values(), *OPTIONS)
    x["c"] = torch.zeros(B, NH, K, 31, dtype=dtype)
    x["v"] = torch.zeros(B, NH, S, 31, dtype=torch.bfloat16)
    tk_sequence.mlstm_sequence_(*x.values(), *OPTIONS)
    assert [launch.tiling[1] for launch in launches] == [1, 1]


@pytest.mark.parametrize("multiprocessors", [1, 114, 132])
def test_warps(multiprocessors: int) -> None:
    """A head never takes more slices than a cluster has CTAs; a small batch takes more than a large one."""
    for width, dim_v in itertools.product((1, 4, 8), range(1, MAX_DIM_V + 1)):
        if dim_v % width:
            continue
        columns = 8 * max(width, 4)
        found = [tk_sequence._warps(heads, dim_v, width, multiprocessors) for heads in (1, 8, 64, 4096)]
        assert found == sorted(found)
        for warps in found:
            assert warps in (1, 2, 4, 8) and warps * columns <= 128
            assert -(-dim_v // (warps * columns)) <= MAX_SLICES
        assert found[-1] == 2 or columns >= dim_v
    assert tk_sequence._warps(8, 512, 4, 132) == 1  # 128 CTAs
    assert tk_sequence._warps(512, 512, 4, 132) == 2


# support


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "device_fault", lambda index: ("", ""))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(1, 1), (17, 31), (MAX_DIM_QK, MAX_DIM_V)])
def test_serves(dtype: torch.dtype, dims: tuple[int, int], hopper: None) -> None:
    for seq in (1, MAX_TOKENS):
        call = replace(CALL, dtype=dtype, seq=seq, dim_qk=dims[0], dim_v=dims[1])
        assert tk.supports_mlstm_sequence(call) == SUPPORTED


@pytest.mark.parametrize(
    ("change", "reason", "remedy"),
    [
        ({"seq": 17}, "17 tokens, the kernel takes 16", "use mlstm_chunkwise"),
        ({"requires_grad": True}, "has no gradients", "use mlstm_chunkwise or torch.no_grad()"),
        ({"device": torch.device("cpu")}, "the tensors are on cpu", "move them to a GPU"),
        ({"dtype": torch.float64}, "q, k, v are torch.float64", "use torch.float32"),
        ({"dim_qk": 257}, "head dims are 257/256", "use at most 256/512"),
        ({"dim_v": 513}, "head dims are 128/513", "use at most 256/512"),
        # 16 slices of each along x of a grid, which ends at 2^31 - 1
        ({"batch": 1 << 26}, "batch x heads = 134,217,728, the kernels take 134,217,727", "split the batch"),
    ],
)
def test_refuses(change: dict[str, object], reason: str, remedy: str, hopper: None) -> None:
    verdict = tk.supports_mlstm_sequence(replace(CALL, **change))  # type: ignore[arg-type]
    assert not verdict.ok and reason in verdict.reason and remedy in verdict.remedy


@pytest.mark.parametrize(("batch", "heads"), [(70000, 1), (1, 70000), (2**27 - 1, 1), (1, 2**27 - 1)])
def test_serves_any_number_of_heads(batch: int, heads: int, hopper: None) -> None:
    assert tk.supports_mlstm_sequence(replace(CALL, batch=batch, sequences=batch, heads=heads)) == SUPPORTED


def test_the_machine_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "device_fault", lambda index: ("no nvcc", "install it"))
    verdict = tk.supports_mlstm_sequence(CALL)
    assert (verdict.ok, verdict.reason, verdict.remedy) == (False, "no nvcc", "install it")


def test_what_the_launcher_refuses(load_once: Callable[[Launcher], ModuleType]) -> None:
    module = load_once(DECODING)
    assert module.MAX_COLUMNS >= 8 * 8 * tk_sequence._MOST_WARPS
    rows, gate, state = (16, 64, 64, 64, 1), (16, 64, 64, 1, 0), (16, 16, 16, 0, 0, 0)
    options = (0.125, 1e-6, False, True, True, 0, 0)

    def launch(warps: int = 1, count: int = 8, dim_qk: int = 64) -> None:
        sizes = (1, 1, count, dim_qk, 64)
        module.mlstm_sequence(*([rows] * 3), 1, gate, gate, state, state, 16, (warps, 4), sizes, *options)

    for fault in ({"warps": 3}, {"warps": 0}, {"count": 17}, {"count": 0}, {"dim_qk": 257}):
        with pytest.raises(ValueError, match="no kernel for these warps or this many tokens or keys"):
            launch(**fault)
    if torch.cuda.is_available():
        return  # the launch would be real
    with pytest.raises(RuntimeError, match="mlstm_sequence: CUDA driver version is insufficient"):
        launch()
