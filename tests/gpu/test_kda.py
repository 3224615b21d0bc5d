"""KDA's kernels on the GPU: against the reference in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tfla_tk import chunk_kda
from tfla_tk.backends.tk.kda import MOST_TRAINED_V, Shape

from .conftest import forget_calls
from .kda import GATES, check, draw, draw_raw
from .linear import assert_equal, both, check_forward, pack, with_sums_of_gates
from .memory import LENGTHS

DIMS = [(128, 128), (64, 64), (64, 128), (128, 64), (128, 256), (64, 512)]
PADDED = [(16, 16), (96, 80), (48, 192), (112, 112)]
# what is made of g, by which parameters
RAW_GATES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "softplus": (("A_log",), {}),
    "softplus and bias": (("A_log", "dt_bias"), {}),
    "bounded": ((), {"lower_bound": -5.0}),
    "bounded with a rate": (("A_log", "dt_bias"), {"lower_bound": -5.0}),
}
NORM, SIGMOID, TWICE = "use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval"
FLAGS = [(NORM, SIGMOID), (SIGMOID, TWICE), (NORM,)]
RAW = dict.fromkeys((NORM, SIGMOID, "use_gate_in_kernel"), True)
MILD_BITS = 80.0  # kMildBits in kda/matrices/config.cuh

of_dims = pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids="{0[0]}_{0[1]}".format)
of_gate_dtypes = pytest.mark.parametrize("of_gates", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@pytest.fixture(params=[1, 2], ids=["one walker", "two walkers"])
def walkers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, new_calls: None) -> int:
    """Of a CTA of the walk, whatever the call's sizes ask for."""
    monkeypatch.setattr(Shape, "walkers", request.param)
    return request.param


def check_either(x: dict[str, torch.Tensor], **options: Any) -> None:
    """With gradients, where the kernels have them."""
    if x["v"].shape[3] <= MOST_TRAINED_V:
        check(x, **options)
    else:
        check_forward(x, chunk_kda, **options)


@pytest.mark.parametrize("dims", [*DIMS, *PADDED], ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("states", [False, True], ids=["zeros", "states"])
def test_all_dims(states: bool, dims: tuple[int, int], dtype: torch.dtype, walkers: int) -> None:
    check_either(draw(dims=dims, dtype=dtype, states=states))


@of_dims
@pytest.mark.parametrize("seq", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 192, 193, 320, 1000])
def test_any_length(seq: int, dims: tuple[int, int], dtype: torch.dtype, walkers: int) -> None:
    # of few tokens many heads: the error of a few numbers is a matter of chance
    check(draw(1, seq, max(2, 32 // seq), dims=dims, dtype=dtype))


@of_dims
@of_gate_dtypes
@pytest.mark.parametrize("gates", GATES)
def test_gates(
    gates: str, of_gates: torch.dtype, dims: tuple[int, int], dtype: torch.dtype, walkers: int
) -> None:
    if of_gates == torch.float16 and gates == "-1e5":
        gates = "-inf"
    check(draw(dims=dims, dtype=dtype, gates=gates, of_gates=of_gates))


@of_dims
@pytest.mark.parametrize("times", [0.99, 1.01, None], ids=["mild", "hard", "by turns"])
def test_gates_where_the_form_of_scores_changes(
    times: float | None, dims: tuple[int, int], dtype: torch.dtype
) -> None:
    """Sums over eight tokens beside what counts as mild; None: by turns."""
    check(with_sums_of_gates(draw(1, 512, dims=dims, dtype=dtype), MILD_BITS, 8, times, turn=16))


@of_gate_dtypes
@pytest.mark.parametrize("raw", RAW_GATES)
@pytest.mark.parametrize("flags", FLAGS, ids=" ".join)
@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (96, 80), (100, 72)], ids="{0[0]}_{0[1]}".format)
def test_raw_inputs(
    dims: tuple[int, int], flags: tuple[str, ...], raw: str, of_gates: torch.dtype, dtype: torch.dtype
) -> None:
    parameters, of_gate = RAW_GATES[raw]
    options = dict.fromkeys((*flags, "use_gate_in_kernel"), True) | of_gate
    x = draw_raw(of_gates, options, parameters=parameters, dims=dims, dtype=dtype, value_heads=4)
    check(x, **options)


def test_raw_gates_that_hardly_decay() -> None:
    """softplus of numbers far below 0, whose logarithm of 1 + e^g would have lost them."""
    options = {"use_gate_in_kernel": True}
    x = draw_raw(torch.float32, options, parameters=("A_log",), batch=1, seq=2000)
    check_forward(x | {"g": x["g"] - 12, "beta": 0.02 * x["beta"]}, chunk_kda, **options)


@of_dims
@pytest.mark.parametrize("heads", [(2, 6), (1, 4), (3, 3)], ids="{0[0]}_{0[1]}".format)
def test_heads(heads: tuple[int, int], dims: tuple[int, int], walkers: int) -> None:
    """Neighbouring heads of v share a head of q and k."""
    check(draw(heads=heads[0], value_heads=heads[1], dims=dims))


@of_dims
def test_many_heads(dims: tuple[int, int], walkers: int) -> None:
    """More CTAs than run at once."""
    check(draw(3, 130, 48, dims=dims, gates="bounded", of_gates=torch.bfloat16))


@of_dims
@pytest.mark.parametrize("offsets", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("gates", ["usual", "mixed"])
def test_packed(gates: str, offsets: torch.dtype, dims: tuple[int, int], walkers: int) -> None:
    sizes = {"batch": 1, "seq": sum(LENGTHS), "sequences": len(LENGTHS), "dims": dims}
    check(pack(draw(gates=gates, of_gates=torch.bfloat16, **sizes), offsets))


def test_packed_raw_inputs() -> None:
    """Sums over all sequences for A_log and dt_bias."""
    sizes = {"batch": 1, "seq": sum(LENGTHS), "sequences": len(LENGTHS)}
    check(pack(draw_raw(torch.bfloat16, RAW, **sizes)), **RAW)


@of_dims
@pytest.mark.parametrize("gates", ["usual", "mixed"])
def test_walkers_do_not_change_a_bit(
    gates: str, dims: tuple[int, int], new_calls: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On which batch_invariant rests: how many there are follows from the batch."""
    x, found = draw(3, 300, 2, 4, dims=dims, gates=gates), []
    for count in (1, 2):
        monkeypatch.setattr(Shape, "walkers", count)
        forget_calls()
        found.append(both(x, chunk_kda))
    assert_equal(*found)


def test_a_scale_below_zero() -> None:
    check(draw(), scale=-0.3)


@pytest.mark.sanitize
@of_dims
@pytest.mark.parametrize("gates", ["usual", "mixed"])
def test_small_calls(gates: str, dims: tuple[int, int], walkers: int) -> None:
    """Every place of every ring is used twice at least."""
    check(draw(1, 450, 2, dims=dims, gates=gates))


@pytest.mark.sanitize
def test_small_packed_calls_of_raw_inputs(walkers: int) -> None:
    lengths = [70, 0, 1, 64, 100]
    sizes = {"batch": 1, "seq": sum(lengths), "sequences": len(lengths), "dims": (96, 80), "value_heads": 4}
    check(pack(draw_raw(torch.bfloat16, RAW, **sizes), lengths=lengths), **RAW)
