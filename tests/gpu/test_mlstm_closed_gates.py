"""Gates of -inf and states of m = -inf on the GPU: forward, states, backward, step and sequence."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from .accuracy import relative_error
from .decoding import DTYPES, GATES, STATE, Decoder, clone
from .mlstm import assert_gradients, draw_packed, make_inputs

Tensors = dict[str, Tensor]
CutEvery = Callable[[int], None]

DIMS = [(64, 64), (128, 256), (256, 512)]
SEQ = 450
# tokens whose gates are both closed; chunks of 64 begin at 64, 128, .., the last one at 448
CLOSED = {
    "first": [0],
    "last": [SEQ - 1],
    "end_of_chunk": [63],
    "start_of_chunk": [64],
    "over_a_border": [127, 128],
    "first_tokens": list(range(130)),
    "some_chunks": list(range(100, 300)),
    "last_tokens": list(range(300, SEQ)),
    "every_seventh": list(range(0, SEQ, 7)),
    "all": list(range(SEQ)),
}
INITIAL = ["none", "given", "empty", "empty_in_one_head"]
# of h, and of a state in this dtype, that has gone through some tokens of decoding
DECODING_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def close(x: Tensors, tokens: list[int], least: float = -math.inf) -> Tensors:
    """Both gates of the tokens at `least`; in the second head the input gates of the next 70 tokens too, so
    that what is forgotten stays forgotten for more than a chunk. q.n is kept away from zero."""
    x = x | {name: x[name].clone() for name in ("i", "f")} | {name: x[name].abs() for name in ("q", "k")}
    seq = x["i"].shape[-1]
    x["i"][..., tokens], x["f"][..., tokens] = least, least
    x["i"][:, 1, sorted({t for first in tokens for t in range(first, min(first + 70, seq))})] = least
    return x


def with_initial(x: Tensors, kind: str) -> Tensors:
    """x, which has an initial state, with that or with m = -inf."""
    if "m_initial" in x and kind.startswith("empty"):
        m = x["m_initial"] = x["m_initial"].clone()
        m[:, : 1 if kind == "empty_in_one_head" else None] = -math.inf
    return x


def assert_same_memory(found: Tensors, truth: Tensors, tolerance: float) -> None:
    """c e^m and n e^m relative to the truth's e^m, and m; 0 where that is 0 even in fp64."""
    ratio = weight = torch.ones(truth["n"].shape[:2] if "n" in truth else truth["c"].shape[:2], device="cuda")
    if "m" in truth:
        m, exact = found["m"].double()[..., 0], truth["m"][..., 0]
        empty = exact < -1e4
        assert m[empty].le(-1e4).all()
        torch.testing.assert_close(m[~empty], exact[~empty], rtol=tolerance, atol=tolerance)
        ratio, weight = torch.exp(m - exact.where(~empty, 0.0)), (~empty).double()
    for name in sorted({"c", "n"} & found.keys()):
        own, true = found[name], truth[name]
        assert own.isfinite().all(), name
        a, b = (x.reshape(*x.shape, *(1,) * (own.dim() - 2)) for x in (ratio, weight))
        assert relative_error(own.double() * a, true * b) <= tolerance, name


def check(operator: Any, x: Tensors, *, trains: bool = True) -> None:
    """h and the last state against the reference in fp64; h = 0 where the truth is. And the gradients of h
    and of the last states that are not empty, of which nothing is left to compare c and n with."""
    found, truth = operator.run(x), operator.truth(x)
    assert truth["h"].isfinite().all()
    tolerance = {torch.bfloat16: 5e-3, torch.float16: 1.25e-3}[x["q"].dtype]
    assert relative_error(found["h"], truth["h"]) <= tolerance
    assert not found["h"][truth["h"] == 0].any()
    assert_same_memory(found, truth, tolerance)
    if not trains:
        return
    cotangents = operator.draw_cotangents(x, True)
    m = truth.get("m")
    if m is not None:
        cotangents["c"] *= (m > -math.inf)[..., None]
        cotangents["n"] *= m > -math.inf
    found = operator.gradients(x, cotangents)
    assert all(grad.isfinite().all() for grad in found.values())
    expected = operator.true_gradients(x, cotangents)
    assert_gradients(found, expected, x["q"].dtype, cotangents["h"])


@pytest.mark.parametrize("dims", DIMS, ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("closed", CLOSED)
@pytest.mark.parametrize("kind", INITIAL)
@pytest.mark.parametrize("gates", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_closed_tokens(
    operator: Any, dtype: torch.dtype, gates: torch.dtype, kind: str, closed: str, dims: tuple[int, int]
) -> None:
    x = make_inputs(2, 3, SEQ, dims, dtype, () if kind == "none" else operator.states)
    x = with_initial(close(x, CLOSED[closed]), kind)
    x |= {name: x[name].to(gates) for name in ("i", "f")}
    check(operator, x, trains=kind in ("given", "empty"))


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("dims", DIMS, ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("kind", ["given", "empty"])
def test_cut_sequences(
    operator: Any, dtype: torch.dtype, kind: str, dims: tuple[int, int], chunks: int, cut_every: CutEvery
) -> None:
    """Closed tokens at the ends of segments, over a whole one, and at both ends of the sequence."""
    cut_every(chunks)
    drawn = make_inputs(1, 3, 1000, dims, dtype, operator.states)
    for closed in ([0], [63, 191], [64, 192], list(range(180, 600)), list(range(900, 1000)), [0, 500, 999]):
        x = with_initial(close(drawn, closed), kind)
        check(operator, x)


@pytest.mark.parametrize("dims", DIMS, ids="{0[0]}_{0[1]}".format)
def test_a_long_sequence(operator: Any, dims: tuple[int, int]) -> None:
    """One that is cut by the package's own rule."""
    x = make_inputs(1, 2, 16384, dims, states=operator.states)
    x = with_initial(close(x, [0, 5000, *range(9000, 11000), 16383]), "empty_in_one_head")
    check(operator, x)


@pytest.mark.parametrize("chunks", [1, 100])
@pytest.mark.parametrize("dims", DIMS, ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("kind", ["given", "empty"])
def test_packed_sequences(
    operator: Any, dtype: torch.dtype, kind: str, dims: tuple[int, int], chunks: int, cut_every: CutEvery
) -> None:
    """Closed first and last tokens, a sequence that is closed as a whole, and one of one closed token."""
    cut_every(chunks)
    lengths = [100, 1, 0, 130, 64, 200]
    ends = list(itertools.accumulate(lengths))
    closed = sorted({0, 99, 100, *range(101, 231), ends[-2], ends[-1] - 1})
    x = with_initial(close(draw_packed(operator, lengths, dims, dtype), closed), kind)
    check(operator, x)


@pytest.mark.parametrize("dims", DIMS, ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("cut", [1, 64, 100, 101, 170])
def test_an_empty_state_goes_on_in_any_backend(exponential: Any, cut: int, dims: tuple[int, int]) -> None:
    """The first tokens by one backend, the others by another: as all of them by the reference in fp64."""
    x = close(make_inputs(2, 3, 300, dims, states=exponential.states), [0, 63, 99, 100])
    truth = exponential.truth(x)
    tokens = ("q", "k", "v", "i", "f")
    before = x | {name: x[name][:, :, :cut] for name in tokens}
    for first, second in itertools.product(("tk", "reference"), repeat=2):
        middle = exponential.run(before, first)
        after = {name: x[name][:, :, cut:] for name in tokens}
        after |= {f"{name}_initial": middle[name] for name in STATE}
        last = exponential.run(after, second)
        assert relative_error(torch.cat([middle["h"], last["h"]], 2), truth["h"]) <= 5e-3
        assert_same_memory(last, truth, 5e-3)


@pytest.mark.parametrize("gate", ["exp", "sig"])
@pytest.mark.parametrize("state", DTYPES, ids=str)
@pytest.mark.parametrize("least", [-math.inf, -2e5, -1e5, -9e4, -4e4])
@pytest.mark.parametrize("dims", [(64, 64), (128, 256), (256, 512), (17, 31)], ids="{0[0]}_{0[1]}".format)
def test_decoding(gate: str, state: torch.dtype, least: float, dims: tuple[int, int]) -> None:
    """Steps and sequences of tokens, from a state with weight and an empty one, in place and not."""
    decoder = Decoder(*GATES[gate], tokens=12)
    initial = ("c_initial", "n_initial", "m_initial")
    for closed, kind in itertools.product(([0], [3, 4], [11], range(12)), ("given", "empty")):
        drawn = make_inputs(2, 3, 12, dims, states=initial)
        x = with_initial(close(drawn, list(closed), least), kind)
        x = {name: x.get(name, x.get(f"{name}_initial")) for name in decoder.names}
        x |= {name: x[name].to(state) for name in STATE if name in x}
        truth = decoder.truth(x)
        for call, inplace in itertools.product((decoder.by_steps, decoder), (False, True)):
            options: dict[str, Any] = {"inplace": True} if inplace else {"dtype_state": state}
            found = call(clone(x), **options)
            h, h_true = found.pop("h"), truth["h"]
            assert h.isfinite().all()
            assert relative_error(h, h_true) <= max(DECODING_TOLERANCE[state], 5e-3)
            assert_same_memory(found, truth, DECODING_TOLERANCE[state])
