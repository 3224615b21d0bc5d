"""The mLSTM step without a GPU: what is handed to the kernel, its formula, what it refuses."""

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
from tfla_tk.backends.tk.scalar_gate import step as tk_step
from tfla_tk.backends.tk.scalar_gate import support as tk
from tfla_tk.build import Launcher, instances
from tfla_tk.build.instances import MAX_DIM_QK, MAX_DIM_V
from tfla_tk.core.layout import MAX_SLICES
from tfla_tk.core.support import SUPPORTED

from .stand_in import Kernels, launch_instead
from .test_support import CALL

B, NH, K, V = 2, 3, 64, 128
SHAPES = {"q": (K,), "k": (K,), "v": (V,), "i": (1,), "f": (1,), "c": (K, V), "n": (K,), "m": (1,)}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

# of a module's mlstm_step, as scalar_gate/bindings/step.cpp names them
ARGUMENTS = (
    *("q", "k", "v", "i", "f", "before", "after", "h", "tiling", "sizes", "scale", "eps"),
    *("sigmoid_gate", "normalize", "in_place", "device", "stream"),
)


class Launches(Kernels):
    """Stands for the launcher and records its launches."""

    ARGUMENTS: ClassVar[dict[str, tuple[str, ...]]] = {}  # none is prepared

    def mlstm_step(self, *arguments: Any) -> None:
        self.launches.append(SimpleNamespace(**dict(zip(ARGUMENTS, arguments, strict=True))))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    recorder = Launches()
    launch_instead(monkeypatch, recorder, tk_step)
    return recorder.launches


def token(dtype: torch.dtype = torch.bfloat16, state: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {
        name: torch.zeros(B, NH, *shape, dtype=dtype if name in "qkv" else state)
        for name, shape in SHAPES.items()
    }


OPTIONS = (False, True, 1e-6)


def addresses(state: tuple[Tensor | None, ...]) -> tuple[int, ...]:
    pointers = (0 if x is None else x.data_ptr() for x in state)
    return *pointers, *(0 if x is None else CODES[x.dtype] for x in state)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("before", "after"), list(itertools.product(DTYPES, DTYPES)))
def test_a_new_state(
    dtype: torch.dtype, before: torch.dtype, after: torch.dtype, launches: list[SimpleNamespace]
) -> None:
    x = token(dtype, before)
    h, *state = tk_step.mlstm_step(*x.values(), *OPTIONS, after)
    (launch,) = launches
    assert (h.shape, h.dtype, h.data_ptr()) == ((B, NH, V), dtype, launch.h)
    assert [(t.shape, t.dtype) for t in state] == [(x[name].shape, after) for name in "cnm"]
    assert launch.after == addresses(tuple(state)) and not launch.in_place
    if {before, after} == {torch.bfloat16, torch.float16}:
        assert launch.before[0] != x["c"].data_ptr() and launch.before[3] == 0  # widened before
        assert launch.before[1:3] == (x["n"].data_ptr(), x["m"].data_ptr())
    else:
        assert launch.before == addresses((x["c"], x["n"], x["m"]))
    width = 8 if before.itemsize == 2 and after == before else 4
    assert launch.tiling[1] == width
    assert launch.sizes == (B, NH, K, V) and launch.stream == 7 and launch.device == -1
    assert (launch.scale, launch.eps) == (K**-0.5, 1e-6)
    assert (launch.sigmoid_gate, launch.normalize) == (False, True)


def test_tokens_are_read_where_they_lie(launches: list[SimpleNamespace]) -> None:
    """Any strides: heads of a fused projection, the only token of a sequence, every second number."""
    x = token()
    fused = torch.zeros(B, NH, 2 * K + V, dtype=torch.bfloat16)
    x["q"], x["k"], x["v"] = fused.split((K, K, V), dim=-1)
    x["i"] = torch.zeros(B, NH, 5).transpose(0, 1).contiguous().transpose(0, 1)[..., 4:]
    x["f"] = torch.zeros(B, 1, 1, dtype=torch.float16).expand(B, NH, 1)
    tk_step.mlstm_step(*x.values(), *OPTIONS, torch.float32)
    for name in ("q", "k", "v", "i", "f"):
        assert getattr(launches[0], name) == (x[name].data_ptr(), *x[name].stride(), CODES[x[name].dtype])
    x["i"] = x["i"].double()
    x["q"] = torch.zeros(B, NH, 2 * K, dtype=torch.bfloat16)[..., ::2]
    tk_step.mlstm_step(*x.values(), *OPTIONS, torch.float32)
    assert launches[1].i[4] == 0 and launches[1].q[3] == 2


def test_in_place(launches: list[SimpleNamespace]) -> None:
    x = token()
    x["c"], x["m"] = x["c"].bfloat16(), x["m"].half()
    tk_step.mlstm_step_(*x.values(), *OPTIONS)
    (launch,) = launches
    assert launch.before == launch.after == addresses((x["c"], x["n"], x["m"]))
    assert launch.in_place and launch.tiling[1] == 8


def test_in_place_on_what_the_kernel_cannot_write(
    launches: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy is updated, and copied back; what the kernel can write is written by it."""
    x = token()
    x["c"] = torch.zeros(B, NH, V, K).mT
    x["n"] = x["n"].double()
    written: list[Tensor] = []
    readable = tk_step._readable

    def note(t: Tensor) -> Tensor:
        written.append(readable(t))
        if written[-1] is not t:
            written[-1].fill_(3.0)
        return written[-1]

    monkeypatch.setattr(tk_step, "_readable", note)
    tk_step.mlstm_step_(*x.values(), *OPTIONS)
    assert launches[0].before == addresses(tuple(written))
    assert [float(x[name].mean()) for name in "cnm"] == [3.0, 3.0, 0.0]
    assert launches[0].before[2] == x["m"].data_ptr()


def test_sigmoid_gate_has_no_m(launches: list[SimpleNamespace]) -> None:
    x = token()
    for normalize in (True, False):
        *_, m = tk_step.mlstm_step(*x.values(), True, normalize, 1e-6, torch.float32)
        assert m is None
        launch = launches[-1]
        assert launch.before[2] == launch.after[2] == 0
        assert (launch.sigmoid_gate, launch.normalize) == (True, normalize)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_vectors_do_not_fit(dtype: torch.dtype, launches: list[SimpleNamespace]) -> None:
    x = token(state=dtype)
    x["c"] = torch.zeros(B * NH * K * V + 1, dtype=dtype)[1:].view(B, NH, K, V)  # shifted by one number
    tk_step.mlstm_step_(*x.values(), *OPTIONS)
    x["c"], x["v"] = torch.zeros(B, NH, K, 31, dtype=dtype), torch.zeros(B, NH, 31)
    tk_step.mlstm_step_(*x.values(), *OPTIONS)
    assert [launch.tiling[1] for launch in launches] == [1, 1]


@pytest.mark.parametrize("multiprocessors", [1, 114, 132])
def test_lanes(multiprocessors: int) -> None:
    """A head never takes more slices than a cluster has CTAs; a small batch takes more than a large one."""
    for width, dim_v in itertools.product((1, 4, 8), range(1, MAX_DIM_V + 1)):
        if dim_v % width:
            continue
        found = [tk_step._lanes(heads, dim_v, width, multiprocessors) for heads in (1, 8, 64, 4096)]
        assert found == sorted(found)
        for lanes in found:
            assert lanes in (1, 2, 4, 8, 16, 32)
            assert -(-dim_v // (lanes * width)) <= MAX_SLICES
        assert found[-1] >= 16 or found[-1] * width >= dim_v
    assert tk_step._lanes(8, 512, 4, 132) == 8  # 128 CTAs
    assert tk_step._lanes(8, 512, 8, 132) == 4
    assert tk_step._lanes(512, 512, 4, 132) == 16
    assert tk_step._lanes(512, 512, 1, 132) == 32  # 16 slices


# support


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "device_fault", lambda index: ("", ""))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(1, 1), (17, 31), (MAX_DIM_QK, MAX_DIM_V)])
def test_serves(dtype: torch.dtype, dims: tuple[int, int], hopper: None) -> None:
    call = replace(CALL, dtype=dtype, dim_qk=dims[0], dim_v=dims[1])
    assert tk.supports_mlstm_step(call) == SUPPORTED


@pytest.mark.parametrize(
    ("change", "reason", "remedy"),
    [
        ({"device": torch.device("cpu")}, "the tensors are on cpu", "move them to a GPU"),
        ({"dtype": torch.float64}, "q, k, v are torch.float64", "use torch.float32"),
        ({"dim_qk": 257}, "head dims are 257/256", "use at most 256/512"),
        ({"dim_v": 513}, "head dims are 128/513", "use at most 256/512"),
        # 16 slices of each along x of a grid, which ends at 2^31 - 1
        ({"batch": 1 << 26}, "batch x heads = 134,217,728, the kernels take 134,217,727", "split the batch"),
        ({"requires_grad": True, "dtype": torch.float32}, "q, k, v are torch.float32", "torch.bfloat16"),
    ],
)
def test_refuses(change: dict[str, object], reason: str, remedy: str, hopper: None) -> None:
    verdict = tk.supports_mlstm_step(replace(CALL, **change))  # type: ignore[arg-type]
    assert not verdict.ok and reason in verdict.reason and remedy in verdict.remedy


@pytest.mark.parametrize(("batch", "heads"), [(70000, 1), (1, 70000), (2**27 - 1, 1), (1, 2**27 - 1)])
def test_serves_any_number_of_heads(batch: int, heads: int, hopper: None) -> None:
    assert tk.supports_mlstm_step(replace(CALL, batch=batch, sequences=batch, heads=heads)) == SUPPORTED


def test_the_machine_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "device_fault", lambda index: ("no nvcc", "install it"))
    verdict = tk.supports_mlstm_step(CALL)
    assert (verdict.ok, verdict.reason, verdict.remedy) == (False, "no nvcc", "install it")


def test_what_the_launcher_refuses(load_once: Callable[[Launcher], ModuleType]) -> None:
    module = load_once(instances.DECODING)
    row, state = (16, 64, 64, 1, 0), (16, 16, 16, 0, 0, 0)
    options = (0.125, 1e-6, False, True, True, 0, 0)

    def launch(lanes: int = 32, width: int = 4, dim_qk: int = 64, before: tuple[int, ...] = state) -> None:
        sizes = (1, 1, dim_qk, 64)
        module.mlstm_step(*([row] * 5), before, state, 16, (lanes, width), sizes, *options)

    for fault in ({"lanes": 3}, {"lanes": 64}, {"dim_qk": 257}):
        with pytest.raises(ValueError, match="no kernel for these lanes or this many keys"):
            launch(**fault)
    if torch.cuda.is_available():
        return  # the launch would be real
    with pytest.raises(RuntimeError, match="mlstm_step: CUDA driver version is insufficient"):
        launch()
