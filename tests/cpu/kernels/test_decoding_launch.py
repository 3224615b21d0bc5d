"""mLSTM's decoding without a GPU, a step or a few tokens: what kernels are handed, what they refuse."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from tfla_tk.backends.tk import device
from tfla_tk.backends.tk.scalar_gate import sequence as tk_sequence
from tfla_tk.backends.tk.scalar_gate import step as tk_step
from tfla_tk.backends.tk.scalar_gate import support as tk
from tfla_tk.build import Launcher
from tfla_tk.build.instances import DECODING, MAX_DIM_QK, MAX_DIM_V, MAX_TOKENS, mlstm_sequence
from tfla_tk.core.layout import MAX_SLICES
from tfla_tk.core.support import SUPPORTED

from .stand_in import Kernels, launch_instead
from .test_support import CALL

B, NH, S, K, V = 2, 3, 5, 64, 128
SHAPES = {"q": (K,), "k": (K,), "v": (V,), "i": (), "f": (), "c": (K, V), "n": (K,), "m": (1,)}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
OPTIONS = (False, True, 1e-6)
OF_LAUNCH = ("before", "after", "h", "tiling", "sizes", "scale", "eps", "sigmoid_gate", "normalize")
OF_LAUNCH += ("in_place", "device", "stream")


class Launches(Kernels):
    """Stands for the launcher and records its launches, by the names in scalar_gate/bindings."""

    ARGUMENTS: ClassVar[dict[str, tuple[str, ...]]] = {}  # none is prepared

    def mlstm_step(self, *arguments: Any) -> None:
        self._record(("q", "k", "v", "i", "f", *OF_LAUNCH), arguments)

    def mlstm_sequence(self, *arguments: Any) -> None:
        self._record(("q", "k", "v", "dtype", "i", "f", *OF_LAUNCH), arguments)

    def _record(self, names: tuple[str, ...], arguments: tuple[Any, ...]) -> None:
        self.launches.append(SimpleNamespace(**dict(zip(names, arguments, strict=True))))


@dataclass(frozen=True)
class Decoding:
    """A step, or a few tokens.

    Attributes:
        tokens: dimension of them, of q, k and v.
        gate: dimension of a gate behind its head.
    """

    module: Any
    tokens: tuple[int, ...]
    gate: tuple[int, ...]
    launches: list[SimpleNamespace]

    @property
    def is_step(self) -> bool:
        return not self.tokens

    def draw(
        self, dtype: torch.dtype = torch.bfloat16, state: torch.dtype = torch.float32
    ) -> dict[str, Tensor]:
        before = {**dict.fromkeys("qkv", self.tokens), **dict.fromkeys("if", self.gate)}
        return {
            name: torch.zeros(B, NH, *before.get(name, ()), *shape, dtype=dtype if name in "qkv" else state)
            for name, shape in SHAPES.items()
        }

    def __call__(self, x: dict[str, Tensor], *options: Any, in_place: bool = False) -> Any:
        name = "mlstm_step" if self.is_step else "mlstm_sequence"
        return getattr(self.module, name + "_" * in_place)(*x.values(), *(options or OPTIONS))

    def in_place(self, x: dict[str, Tensor]) -> SimpleNamespace:
        self(x, in_place=True)
        return self.launches[-1]


@pytest.fixture(params=["step", "sequence"])
def decoding(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Decoding:
    recorder = Launches()
    is_step = request.param == "step"
    module = tk_step if is_step else tk_sequence
    launch_instead(monkeypatch, recorder, module)
    return Decoding(module, () if is_step else (S,), (1,) if is_step else (S,), recorder.launches)


def addresses(state: tuple[Tensor | None, ...]) -> tuple[int, ...]:
    pointers = (0 if x is None else x.data_ptr() for x in state)
    return *pointers, *(0 if x is None else CODES[x.dtype] for x in state)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("before", "after"), list(itertools.product(DTYPES, DTYPES)))
def test_a_new_state(dtype: torch.dtype, before: torch.dtype, after: torch.dtype, decoding: Decoding) -> None:
    x = decoding.draw(dtype, before)
    h, *state = decoding(x, *OPTIONS, after)
    (launch,) = decoding.launches
    assert (h.shape, h.dtype, h.data_ptr()) == ((B, NH, *decoding.tokens, V), dtype, launch.h)
    assert h.is_contiguous() and (decoding.is_step or launch.dtype == CODES[dtype])
    assert [(t.shape, t.dtype) for t in state] == [(x[name].shape, after) for name in "cnm"]
    assert launch.after == addresses(tuple(state)) and not launch.in_place
    if {before, after} == {torch.bfloat16, torch.float16}:
        assert launch.before[0] != x["c"].data_ptr() and launch.before[3] == 0  # widened before
        assert launch.before[1:3] == (x["n"].data_ptr(), x["m"].data_ptr())
    else:
        assert launch.before == addresses((x["c"], x["n"], x["m"]))
    eight = before.itemsize == 2 and after == before and (decoding.is_step or dtype != torch.float32)
    assert launch.tiling[1] == (8 if eight else 4)
    assert launch.sizes == (B, NH, *decoding.tokens, K, V) and launch.stream == 7 and launch.device == -1
    assert (launch.scale, launch.eps) == (K**-0.5, 1e-6)
    assert (launch.sigmoid_gate, launch.normalize) == (False, True)


@pytest.mark.parametrize("count", range(1, MAX_TOKENS + 1))
@pytest.mark.parametrize("decoding", ["sequence"], indirect=True)
def test_any_number_of_tokens(count: int, decoding: Decoding) -> None:
    x = decoding.draw(state=torch.bfloat16)
    x |= {name: torch.zeros(B, NH, count, *x[name].shape[3:], dtype=x[name].dtype) for name in "qkvif"}
    launch = decoding.in_place(x)
    assert launch.sizes[2] == count and launch.tiling[1] == (8 if count <= 8 else 4)


@pytest.mark.parametrize("count", [0, MAX_TOKENS + 1])
def test_no_instance(count: int) -> None:
    with pytest.raises(ValueError, match=f"tokens: expected 1 to 16, got {count}"):
        mlstm_sequence(count, "fp32", "fp32", False)


def test_tokens_are_read_where_they_lie(decoding: Decoding) -> None:
    """Any strides: [B, S, NH, D], a fused projection, the end of a longer sequence, every second number."""
    x = decoding.draw()
    fused = torch.zeros(B, *decoding.tokens, NH, 2 * K + V, dtype=torch.bfloat16)
    fused = fused if decoding.is_step else fused.transpose(1, 2)
    x["q"], x["k"], x["v"] = fused.split((K, K, V), dim=-1)
    (count,) = decoding.gate
    x["i"] = torch.zeros(B, 4 + count, NH).transpose(1, 2)[..., 4:]
    x["f"] = torch.zeros(B, 1, 1, dtype=torch.float16).expand(B, NH, count)
    decoding(x, *OPTIONS, torch.float32)
    for name in ("q", "k", "v", "i", "f"):
        dtype = () if name in "qkv" and not decoding.is_step else (CODES[x[name].dtype],)
        assert getattr(decoding.launches[0], name) == (x[name].data_ptr(), *x[name].stride(), *dtype)
    x["i"] = x["i"].double()
    x["q"] = torch.zeros(B, NH, *decoding.tokens, 2 * K, dtype=torch.bfloat16)[..., ::2]
    decoding(x, *OPTIONS, torch.float32)
    launch = decoding.launches[1]
    assert launch.i[4] == 0 and launch.q[x["q"].ndim] == 2


def test_in_place(decoding: Decoding) -> None:
    x = decoding.draw()
    x["c"], x["m"] = x["c"].bfloat16(), x["m"].half()
    launch = decoding.in_place(x)
    assert launch.before == launch.after == addresses((x["c"], x["n"], x["m"]))
    assert launch.in_place and launch.tiling[1] == 8


def test_in_place_on_what_the_kernel_cannot_write(
    decoding: Decoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy is updated, and copied back; what the kernel can write is written by it."""
    x = decoding.draw()
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
    launch = decoding.in_place(x)
    assert launch.before == launch.after == addresses(tuple(written)) and launch.before[3:] == (0, 0, 0)
    assert [float(x[name].mean()) for name in "cnm"] == [3.0, 3.0, 0.0]
    assert launch.before[2] == x["m"].data_ptr()


@pytest.mark.parametrize("normalize", [True, False])
def test_sigmoid_gate_has_no_m(normalize: bool, decoding: Decoding) -> None:
    *_, m = decoding(decoding.draw(), True, normalize, 1e-6, torch.float32)
    (launch,) = decoding.launches
    assert m is None and launch.before[2] == launch.after[2] == 0
    assert (launch.sigmoid_gate, launch.normalize) == (True, normalize)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_vectors_do_not_fit(dtype: torch.dtype, decoding: Decoding) -> None:
    x = decoding.draw(state=dtype)
    x["c"] = torch.zeros(B * NH * K * V + 1, dtype=dtype)[1:].view(B, NH, K, V)  # shifted by one number
    assert decoding.in_place(x).tiling[1] == 1
    x["c"], x["v"] = torch.zeros(B, NH, K, 31, dtype=dtype), x["v"][..., :31].contiguous()
    assert decoding.in_place(x).tiling[1] == 1


@pytest.mark.parametrize("multiprocessors", [1, 114, 132])
def test_slices_of_a_head(multiprocessors: int) -> None:
    """Never more than a cluster has CTAs; a small batch takes more than a large one."""
    for width, dim_v in itertools.product((1, 4, 8), range(1, MAX_DIM_V + 1)):
        if dim_v % width:
            continue
        batches = (1, 8, 64, 4096)
        lanes = [tk_step._lanes(heads, dim_v, width, multiprocessors) for heads in batches]
        warps = [tk_sequence._warps(heads, dim_v, width, multiprocessors) for heads in batches]
        assert lanes == sorted(lanes) and {*lanes} <= {1, 2, 4, 8, 16, 32}
        assert warps == sorted(warps) and {*warps} <= {1, 2, 4, 8}
        assert lanes[-1] >= 16 or lanes[-1] * width >= dim_v
        columns = 8 * max(width, 4)
        assert warps[-1] == 2 or columns >= dim_v
        assert all(count * columns <= 128 for count in warps)
        for of_slice in (*(count * width for count in lanes), *(count * columns for count in warps)):
            assert -(-dim_v // of_slice) <= MAX_SLICES
    assert tk_step._lanes(8, 512, 4, 132) == 8  # 128 CTAs
    assert tk_step._lanes(8, 512, 8, 132) == 4
    assert tk_step._lanes(512, 512, 4, 132) == 16
    assert tk_step._lanes(512, 512, 1, 132) == 32  # 16 slices
    assert tk_sequence._warps(8, 512, 4, 132) == 1  # 128 CTAs
    assert tk_sequence._warps(512, 512, 4, 132) == 2


# support

SUPPORTS = {"step": tk.supports_mlstm_step, "sequence": tk.supports_mlstm_sequence}
OF_BOTH = pytest.mark.parametrize("name", SUPPORTS)
A_CALL = {"step": CALL, "sequence": replace(CALL, seq=8)}


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "device_fault", lambda index: ("", ""))


@OF_BOTH
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(1, 1), (17, 31), (MAX_DIM_QK, MAX_DIM_V)])
def test_serves(name: str, dtype: torch.dtype, dims: tuple[int, int], hopper: None) -> None:
    for seq in (CALL.seq,) if name == "step" else (1, MAX_TOKENS):
        call = replace(CALL, dtype=dtype, seq=seq, dim_qk=dims[0], dim_v=dims[1])
        assert SUPPORTS[name](call) == SUPPORTED


REFUSED: list[tuple[dict[str, object], str, str]] = [
    ({"device": torch.device("cpu")}, "the tensors are on cpu", "move them to a GPU"),
    ({"dtype": torch.float64}, "q, k, v are torch.float64", "use torch.float32"),
    ({"dim_qk": 257}, "head dims are 257/256", "use at most 256/512"),
    ({"dim_v": 513}, "head dims are 128/513", "use at most 256/512"),
    # 16 slices of each along x of a grid, which ends at 2^31 - 1
    ({"batch": 1 << 26}, "batch x heads = 134,217,728, the kernels take 134,217,727", "split the batch"),
]
OF_STEPS = [({"requires_grad": True, "dtype": torch.float32}, "q, k, v are torch.float32", "torch.bfloat16")]
OF_SEQUENCES = [
    ({"seq": 17}, "17 tokens, the kernel takes 16", "use mlstm_chunkwise"),
    ({"requires_grad": True}, "has no gradients", "use mlstm_chunkwise or torch.no_grad()"),
]


@pytest.mark.parametrize(
    ("name", "change", "reason", "remedy"),
    [("step", *case) for case in (*REFUSED, *OF_STEPS)]
    + [("sequence", *case) for case in (*REFUSED, *OF_SEQUENCES)],
)
def test_refuses(name: str, change: dict[str, Any], reason: str, remedy: str, hopper: None) -> None:
    verdict = SUPPORTS[name](replace(A_CALL[name], **change))
    assert not verdict.ok and reason in verdict.reason and remedy in verdict.remedy


@OF_BOTH
@pytest.mark.parametrize(("batch", "heads"), [(70000, 1), (1, 70000), (2**27 - 1, 1), (1, 2**27 - 1)])
def test_serves_any_number_of_heads(name: str, batch: int, heads: int, hopper: None) -> None:
    call = replace(A_CALL[name], batch=batch, sequences=batch, heads=heads)
    assert SUPPORTS[name](call) == SUPPORTED


@OF_BOTH
def test_the_machine_is_asked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "device_fault", lambda index: ("no nvcc", "install it"))
    verdict = SUPPORTS[name](A_CALL[name])
    assert (verdict.ok, verdict.reason, verdict.remedy) == (False, "no nvcc", "install it")


# launchers


def test_what_the_launcher_of_a_step_refuses(load_once: Callable[[Launcher], ModuleType]) -> None:
    module = load_once(DECODING)
    row, state = (16, 64, 64, 1, 0), (16, 16, 16, 0, 0, 0)

    def launch(lanes: int = 32, dim_qk: int = 64) -> None:
        module.mlstm_step(*([row] * 5), state, state, 16, (lanes, 4), (1, 1, dim_qk, 64), *OF_A_LAUNCH)

    faults = [{"lanes": 3}, {"lanes": 64}, {"dim_qk": 257}]
    assert_refused(launch, faults, "no kernel for these lanes or this many keys", "mlstm_step")


def test_what_the_launcher_of_a_sequence_refuses(load_once: Callable[[Launcher], ModuleType]) -> None:
    module = load_once(DECODING)
    assert module.MAX_COLUMNS >= 8 * 8 * tk_sequence._MOST_WARPS
    rows, gate, state = (16, 64, 64, 64, 1), (16, 64, 64, 1, 0), (16, 16, 16, 0, 0, 0)

    def launch(warps: int = 1, count: int = 8, dim_qk: int = 64) -> None:
        sizes = (1, 1, count, dim_qk, 64)
        module.mlstm_sequence(*([rows] * 3), 1, gate, gate, state, state, 16, (warps, 4), sizes, *OF_A_LAUNCH)

    faults = [{"warps": 3}, {"warps": 0}, {"count": 17}, {"count": 0}, {"dim_qk": 257}]
    assert_refused(launch, faults, "no kernel for these warps or this many tokens or keys", "mlstm_sequence")


OF_A_LAUNCH = (0.125, 1e-6, False, True, True, 0, 0)


def assert_refused(launch: Callable[..., None], faults: list[dict[str, int]], told: str, name: str) -> None:
    for fault in faults:
        with pytest.raises(ValueError, match=told):
            launch(**fault)
    if torch.cuda.is_available():
        return  # the launch would be real
    with pytest.raises(RuntimeError, match=f"{name}: CUDA driver version is insufficient"):
        launch()
