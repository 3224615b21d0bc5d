"""Packed sequences on the GPU whatever their offsets hold, and many of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from .mlstm import assert_accurate, compare, draw_packed, make_inputs

Tensors = dict[str, Tensor]

HEADS = 3
LAST = 2**62  # an offset that fits in no int

# offsets that are none, in units of the length; the comment says what is wrong
BAD = {
    "twice": [0, 1, 0, 1],  # all tokens two times, with a step back
    "falling": [1, 0.5, 0],
    "beyond": [0, 2, 3],
    "negative": [-1, -0.25, 0.5, 1],
    "late": [0.5, 0.5, 0.75],  # tokens of no sequence before and behind
    "zigzag": [0, 0.9, 0.1, 0.8, 0.2, 0.7, 0.3, 1],
    "nothing": [0, 0, 0],
}


def offsets_of(fractions: list[float], tokens: int, dtype: torch.dtype) -> Tensor:
    found = torch.tensor([int(x * tokens) for x in fractions], device="cuda", dtype=dtype)
    if dtype == torch.int64:
        found = torch.where(found > tokens, LAST, torch.where(found < 0, -LAST, found))
    return found


def with_states(x: Tensors, names: tuple[str, ...], count: int) -> Tensors:
    drawn = make_inputs(count, HEADS, 1, (x["q"].shape[-1], x["v"].shape[-1]), states=names, seed=1)
    return x | {name: drawn[name] for name in names}


@pytest.mark.parametrize("chunks", [2, 1000], ids=["cut", "whole"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dims", [(64, 64), (256, 512)], ids="{0[0]}_{0[1]}".format)
def test_bad_offsets_leave_other_memory_alone(
    dims: tuple[int, int],
    bad: str,
    dtype: torch.dtype,
    chunks: int,
    exponential: Any,
    cut_every: Callable[[int], None],
) -> None:
    """All free memory around the call's own is filled with a pattern, which is still there behind it."""
    tokens, fractions = 1024, BAD[bad]
    cut_every(chunks)
    x = make_inputs(1, HEADS, tokens, dims)
    x = with_states(x, exponential.states, len(fractions) - 1)
    good = x | {"cu_seqlens": torch.linspace(0, tokens, len(fractions), device="cuda").to(dtype)}
    expected = exponential.run(good)
    x["cu_seqlens"] = offsets_of(fractions, tokens, dtype)
    guards = [torch.full((1 << 20,), 0x5A, dtype=torch.uint8, device="cuda") for _ in range(64)]
    for guard in guards[::2]:  # what the call allocates lies among the others
        guard.set_()
    h, last = exponential(x, return_last_states=True)
    assert h.shape == x["v"].shape
    assert [t.shape[0] for t in last] == [len(fractions) - 1] * 3
    leaves = {name: t.detach().requires_grad_(name in ("q", "k", "v", "i", "f")) for name, t in x.items()}
    exponential(leaves).sum().backward()
    torch.cuda.synchronize()
    assert all(bool((guard == 0x5A).all()) for guard in guards[1::2])
    again = exponential.run(good)
    assert all(torch.equal(again[name], t) for name, t in expected.items())


@pytest.mark.sanitize
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dims", [(64, 64), (256, 512)], ids="{0[0]}_{0[1]}".format)
def test_bad_offsets_under_memcheck(
    dims: tuple[int, int], bad: str, exponential: Any, cut_every: Callable[[int], None]
) -> None:
    """Under compute-sanitizer every access outside an allocation is an error of the run."""
    tokens, fractions = 512, BAD[bad]
    cut_every(2)
    x = {name: t.cuda() for name, t in make_inputs(1, HEADS, tokens, dims, device="cpu").items()}
    for name, shape in (("c_initial", dims), ("n_initial", dims[:1]), ("m_initial", (1,))):
        x[name] = torch.zeros(len(fractions) - 1, HEADS, *shape, device="cuda")
    leaves = {name: t.requires_grad_(name != "m_initial") for name, t in x.items()}
    leaves["cu_seqlens"] = offsets_of(fractions, tokens, torch.int64)
    h, (c, n, _) = exponential(leaves, return_last_states=True)
    torch.autograd.backward([h, c, n], [torch.ones_like(t) for t in (h, c, n)])
    torch.cuda.synchronize()
    assert h.shape == x["v"].shape


@pytest.mark.parametrize("sequences", [31, 32, 33, 1000, 1025, 5000])
def test_many_short_sequences(operator: Any, sequences: int) -> None:
    """Empty ones among them, and in the middle one that is cut, where there are many."""
    lengths = [number * 7 % 5 for number in range(sequences)]
    lengths[sequences // 2] = 3000
    x = draw_packed(operator, lengths, (64, 64))
    assert_accurate(operator.run(x), operator.truth(x))
    compare(operator, x)


@pytest.mark.parametrize("chunks", [1, 3])
def test_many_short_sequences_cut(operator: Any, chunks: int, cut_every: Callable[[int], None]) -> None:
    """More sequences than boundaries: a CTA looks for the sequence of a boundary."""
    lengths = [40] * 30 + [500, 0, 64, 129] + [10] * 40 + [700]
    cut_every(chunks)
    x = draw_packed(operator, lengths, (128, 128))
    assert_accurate(operator.run(x), operator.truth(x))
    compare(operator, x)


def test_time_goes_with_tokens_and_sequences(exponential: Any) -> None:
    """Eight times the sequences of ten tokens take eight times as long, within a factor of two."""
    seconds = {}
    for sequences in (2000, 16_000):
        x = make_inputs(1, 2, 10 * sequences, (64, 64))
        x["cu_seqlens"] = torch.arange(0, 10 * sequences + 1, 10, device="cuda")
        leaves = {name: t.requires_grad_() if t.is_floating_point() else t for name, t in x.items()}

        def run(leaves: Tensors = leaves) -> None:
            exponential(leaves).sum().backward()

        run()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(5):
            run()
        end.record()
        end.synchronize()
        seconds[sequences] = start.elapsed_time(end)
    assert seconds[16_000] < 16 * seconds[2000]
