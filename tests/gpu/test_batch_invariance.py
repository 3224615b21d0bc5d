"""batch_invariant on the GPU: the bits of a sequence alone, in a batch, and packed with others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import tfla_tk
from tfla_tk.core import eager

from . import families
from .families import (
    HEADS,
    RAW,
    Case,
    compute,
    delta,
    draw,
    gated_delta,
    gla,
    is_of_states,
    kda,
    mlstm,
    pack,
    simple_gla,
)
from .linear import Normal, Tensors, assert_equal

OTHERS = (1111, 65)  # tokens of what is packed before and behind the sequences of a test
CASES = {
    "mlstm_exp": mlstm("exp", 128, 256),
    "mlstm_sig": mlstm("sig", 128, 128),
    "mlstm_exp_parts": mlstm("exp", 64, 512),
    "simple_gla": simple_gla(128, 128),
    "retention": Case("chunk_retention", (128, 256)),
    "delta": delta(128, 128),
    "delta_raw": delta(64, 64, flags=RAW[:1]),
    "gated_delta_64": gated_delta(64, 64),
    "gated_delta_raw": gated_delta(128, 128, group=2, flags=RAW),
    "gated_delta_128": gated_delta(128, 128),
    "gated_delta_256": gated_delta(128, 256),
    "gated_delta_wide": gated_delta(192, 320),
    "simple_gla_grouped": simple_gla(64, 64, group=3),
    "gated_delta_grouped": gated_delta(128, 256, group=2),
    "gla": gla(128, 128),
    "gla_64": gla(64, 256),
    "gla_wide": gla(192, 320),
    "kda_64": kda(64, 64),
    "kda_128": kda(128, 128),
    "kda_raw": kda(128, 128, group=2, flags=RAW),
    # forwards of CTAs that take turns, and of K in two launches
    "gla_shared": gla(128, 256, trains=False),
    "gla_sums": gla(256, 64, trains=False),
    "gla_sums_of_two": gla(208, 128, trains=False),
    "gla_sums_shared": gla(256, 256, trains=False),
}


@pytest.fixture(autouse=True)
def on() -> Iterator[None]:
    with tfla_tk.batch_invariant():
        yield


def sequence_of(x: Tensors, number: int, tokens: slice | None = None) -> Tensors:
    """One sequence, as a batch of one; of packed ones by its tokens."""
    return {
        name: t[number : number + 1] if is_of_states(name) or tokens is None else t[:, tokens]
        for name, t in x.items()
    }


def check(case: Case, batch: int, seq: int) -> None:
    """The first, a middle and the last sequence of a batch, alone and in every call."""
    x = draw(case, batch, seq, 0)
    numbers = sorted({0, batch // 2, batch - 1})
    alone = {number: compute(case, sequence_of(x, number)) for number in numbers}
    together = compute(case, x)
    for number in numbers:
        assert_equal(sequence_of(together, number), alone[number])
    before, behind = (draw(case, 1, tokens, seed) for seed, tokens in enumerate(OTHERS, 1))
    for parts, first in (([x], 0), ([before, x, behind], 1)):
        packed, offsets = pack(parts)
        found = compute(case, packed, offsets)
        start = OTHERS[0] * first
        for number in numbers:
            tokens = slice(start + number * seq, start + (number + 1) * seq)
            mine = sequence_of(found, first + number, tokens)
            assert_equal(mine, alone[number])


@pytest.mark.parametrize("batch", [1, 3, 40])
@pytest.mark.parametrize("seq", [1, 63, 1000, 5000])
@pytest.mark.parametrize("case", CASES)
def test_bits(case: str, seq: int, batch: int) -> None:
    check(CASES[case], batch, seq)


@pytest.mark.parametrize(
    "case", ["mlstm_exp", "simple_gla", "delta", "gated_delta_256", "gated_delta_raw", "gla", "kda_raw"]
)
def test_bits_of_the_ops(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which keep no states for their backward."""
    monkeypatch.setattr(eager, "KNOWS_EAGER_CALLS", False)
    check(CASES[case], 3, 5000)


@pytest.mark.parametrize("case", CASES)
def test_one_token_of_one_head(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over parts have one number each then."""
    monkeypatch.setattr(families, "HEADS", 1)
    check(CASES[case], 3, 1)


@pytest.mark.parametrize(
    "case",
    ["mlstm_exp", "mlstm_sig", "simple_gla", "delta", "gated_delta_256", "gated_delta_raw", "gla", "kda_raw"],
)
def test_inference_has_the_bits_of_training(case: str) -> None:
    x = draw(CASES[case], 2, 5000, 0)
    trained = compute(CASES[case], x)
    without = compute(CASES[case].forward, x)
    assert_equal(without, {name: trained[name] for name in without})


@pytest.mark.parametrize(
    "case", ["mlstm_exp", "simple_gla", "delta", "gated_delta_128", "gated_delta_raw", "gla", "kda_128"]
)
def test_a_graph_keeps_what_was_on_at_its_capture(case: str) -> None:
    x, of_case = draw(CASES[case], 1, 5000, 0), CASES[case]
    expected = compute(of_case, x)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        compute(of_case, x)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = compute(of_case, x)
    with tfla_tk.batch_invariant(False):
        graph.replay()
    torch.cuda.synchronize()
    assert_equal(found, expected)


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [None, 1, 5, 16])
@pytest.mark.parametrize("dims", [(128, 256), (256, 512), (64, 64)], ids="{0[0]}_{0[1]}".format)
def test_decoding(dims: tuple[int, int], tokens: int | None, state: torch.dtype) -> None:
    """One token (None), or a few."""
    normal, rows = Normal(0), () if tokens is None else (tokens,)
    function: Callable[..., Any] = tfla_tk.mlstm_step if tokens is None else tfla_tk.mlstm_sequence
    dim_k, dim_v = dims
    shapes = {
        "q": (*rows, dim_k),
        "k": (*rows, dim_k),
        "v": (*rows, dim_v),
        "i": rows or (1,),
        "f": rows or (1,),
    }
    x = {name: normal(40, HEADS, *shape) for name, shape in shapes.items()}
    x = {name: t.to(torch.bfloat16) if name in "qkv" else t for name, t in x.items()}
    for name, shape in (("c", dims), ("n", (dim_k,)), ("m", (1,))):
        x[name] = normal(40, HEADS, *shape).to(state)

    def run(first: int, count: int) -> Tensors:
        own = {name: t[first : first + count] for name, t in x.items()}
        h, last = function(**own, dtype_state=state, backend="tk")
        return {"h": h, **dict(zip("cnm", last, strict=True))}

    whole = run(0, 40)
    for first, count in ((0, 1), (7, 1), (39, 1), (5, 3)):
        expected = {name: t[first : first + count] for name, t in whole.items()}
        assert_equal(run(first, count), expected)
