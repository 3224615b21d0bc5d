"""mLSTM's decoding without a GPU, a step or a few tokens: results of calls, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

import tfla_tk
from tfla_tk.backends.tk import device
from tfla_tk.backends.tk.scalar_gate import decoding
from tfla_tk.backends.tk.scalar_gate import support as tk
from tfla_tk.build import Launcher
from tfla_tk.build.instances import DECODING, MAX_DIM_QK, MAX_DIM_V, MAX_TOKENS, mlstm_sequence
from tfla_tk.core.layout import MAX_SLICES
from tfla_tk.core.support import SUPPORTED

from .calls import Tensors, flat
from .scalar_gate import Decoding
from .stand_in import at_odd_address
from .test_support import CALL

B, NH, K, V = 2, 3, 64, 128
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOKENS = [(), (5,), (16,)]
GATES = {
    "exp": ("mlstm", {}),
    "sig": ("mlstm_siging", {}),
    "unnormalised": ("mlstm_siging", {"normalize": False}),
}


def draw(
    tokens: tuple[int, ...],
    dtype: torch.dtype = torch.bfloat16,
    state: torch.dtype = torch.float32,
    dim_v: int = V,
) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        **dict.fromkeys("qk", (*tokens, K)),
        "v": (*tokens, dim_v),
        **dict.fromkeys("if", tokens or (1,)),
    }
    shapes |= {"c": (K, dim_v), "n": (K,), "m": (1,)}
    drawn = {name: torch.randn(B, NH, *shape, generator=generator) for name, shape in shapes.items()}
    return {
        name: t.to(state if name in "cnm" else dtype if name in "qkv" else t.dtype)
        for name, t in drawn.items()
    }


def check(x: Tensors, gate: str = "exp", *, inplace: bool = False, **options: Any) -> None:
    """That a call has the results of the reference, in place or new ones."""
    name, of_gate = GATES[gate]
    x = x if gate == "exp" else {name: t for name, t in x.items() if name != "m"}
    function = getattr(tfla_tk, f"{name}_step" if x["q"].dim() == 3 else f"{name}_sequence")
    options |= of_gate
    expected = flat(function(**{name: t.double() for name, t in x.items()}, backend="reference", **options))
    found = flat(function(**x, backend="tk", inplace=inplace, **options))
    assert found.keys() == expected.keys() and found["output 0"].is_contiguous()
    for name, y in expected.items():
        assert (found[name].double() - y).norm() <= 1e-2 * y.norm(), name
    for number, name in enumerate("cnm"[: len(found) - 1], 1):
        assert (found[f"output {number}"] is x[name]) == inplace


@pytest.mark.parametrize("tokens", TOKENS, ids=str)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("before", DTYPES, ids=str)
@pytest.mark.parametrize("after", DTYPES, ids=str)
def test_a_new_state(tokens: Any, gate: str, dtype: Any, before: Any, after: Any, decoding: Decoding) -> None:
    check(draw(tokens, dtype, before), gate, dtype_state=after)
    (launch,) = decoding.launches
    assert launch.stream == 7 and launch.tiling[1] >= 4  # aligned, so that vectors are loaded


@pytest.mark.parametrize("tokens", TOKENS, ids=str)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("state", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["as they are", "turned", "wider", "odd"])
def test_in_place(tokens: Any, gate: str, state: torch.dtype, layout: str, decoding: Decoding) -> None:
    """What a kernel cannot write is updated in a copy, and copied back."""
    x = draw(tokens, state=state)
    if layout == "turned":
        x["c"] = x["c"].mT.contiguous().mT
    elif layout == "wider":
        x["n"] = x["n"].double()
    elif layout == "odd":
        x["c"] = at_odd_address(x["c"])
    check(x, gate, inplace=True, dtype_state=None)
    if layout == "as they are":  # nothing is copied
        (launch,) = decoding.launches
        assert launch.before[:2] == (x["c"].data_ptr(), x["n"].data_ptr())


@pytest.mark.parametrize("count", range(1, MAX_TOKENS + 1))
def test_any_number_of_tokens(count: int, decoding: Decoding) -> None:
    check(draw((count,), state=torch.bfloat16))


@pytest.mark.parametrize("count", [0, MAX_TOKENS + 1])
def test_no_instance(count: int) -> None:
    with pytest.raises(ValueError, match=f"tokens: expected 1 to 16, got {count}"):
        mlstm_sequence(count, "fp32", "fp32", False)


@pytest.mark.parametrize("tokens", TOKENS[:2], ids=str)
def test_tokens_are_read_where_they_lie(tokens: Any, decoding: Decoding) -> None:
    """Any strides: a fused projection, the end of a longer sequence, every second number, gates of one."""
    x = draw(tokens)
    fused = torch.cat([x["q"], x["k"], x["v"]], -1).transpose(1, -2).contiguous().transpose(1, -2)
    views = dict(zip("qkv", fused.split((K, K, V), -1), strict=True))
    views["i"] = torch.cat([x["i"], x["i"]], -1)[..., x["i"].shape[-1] :]
    views["f"] = x["f"][:1, :1, :1].half().expand_as(x["f"])
    check(x | views)
    (launch,) = decoding.launches
    for name, y in views.items():
        assert getattr(launch, name)[: 1 + y.dim()] == (y.data_ptr(), *y.stride())
    check(x | {"q": x["q"].repeat_interleave(2, -1)[..., ::2], "i": x["i"].double()})


@pytest.mark.parametrize("tokens", TOKENS[:2], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_vectors_do_not_fit(tokens: Any, dtype: torch.dtype, decoding: Decoding) -> None:
    check(draw(tokens, state=dtype, dim_v=31))


@pytest.mark.parametrize("multiprocessors", [1, 114, 132])
def test_slices_of_a_head(multiprocessors: int) -> None:
    """Never more than a cluster has CTAs; a small batch takes more than a large one."""
    for width, dim_v in itertools.product((1, 4, 8), range(1, MAX_DIM_V + 1)):
        if dim_v % width:
            continue
        batches, columns = (1, 8, 64, 4096), 8 * max(width, 4)
        lanes = [decoding._lanes(heads, dim_v, width, multiprocessors) for heads in batches]
        warps = [decoding._warps(heads, dim_v, width, multiprocessors) for heads in batches]
        assert lanes == sorted(lanes) and {*lanes} <= {1, 2, 4, 8, 16, 32}
        assert warps == sorted(warps) and {*warps} <= {1, 2}
        for of_slice in (*(count * width for count in lanes), *(count * columns for count in warps)):
            assert -(-dim_v // of_slice) <= MAX_SLICES


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
    assert module.MAX_COLUMNS >= 8 * 8 * decoding._MOST_WARPS
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
