"""Packed sequences on the GPU whatever their offsets hold, and many of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from .families import Case, compute, draw, gla, is_of_states, kda, mlstm
from .linear import assert_equal
from .mlstm import check, draw_packed, make_inputs

Tensors = dict[str, Tensor]

CutEvery = Callable[[int], None]
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


def draw_for(case: Case, tokens: int, sequences: int) -> Tensors:
    """Inputs of one batch of tokens, with states and their gradients for so many sequences."""
    x, of_sequences = draw(case, 1, tokens), draw(case, sequences, 1, seed=1)
    return {name: of_sequences[name] if is_of_states(name) else t for name, t in x.items()}


CASES = [family(*dims) for family in (partial(mlstm, "exp"), gla) for dims in ((64, 64), (256, 512))]
CASES.append(kda(128, 128))
of_case = pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.function}-{c.dims[0]}_{c.dims[1]}")


@of_case
@pytest.mark.parametrize("chunks", [2, 1000], ids=["cut", "whole"])
@pytest.mark.parametrize("offsets", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("bad", BAD)
def test_bad_offsets_leave_other_memory_alone(
    case: Case, bad: str, offsets: torch.dtype, chunks: int, cut_every: CutEvery
) -> None:
    """All free memory around the call's own is filled with a pattern, which is still there behind it."""
    tokens, fractions = 1024, BAD[bad]
    cut_every(chunks)
    x = draw_for(case, tokens, len(fractions) - 1)
    good = torch.linspace(0, tokens, len(fractions), device="cuda").to(offsets)
    expected = compute(case, x, good)
    wrong = offsets_of(fractions, tokens, offsets)
    guards = [torch.full((1 << 20,), 0x5A, dtype=torch.uint8, device="cuda") for _ in range(64)]
    for guard in guards[::2]:  # what the call allocates lies among the others
        guard.set_()
    found = compute(case, x, wrong)
    torch.cuda.synchronize()
    assert all(bool((guard == 0x5A).all()) for guard in guards[1::2])
    assert {name: t.shape for name, t in found.items()} == {name: t.shape for name, t in expected.items()}
    assert_equal(compute(case, x, good), expected)


@pytest.mark.sanitize
@of_case
@pytest.mark.parametrize("bad", BAD)
def test_bad_offsets_under_memcheck(case: Case, bad: str, cut_every: CutEvery) -> None:
    """Under compute-sanitizer every access outside an allocation is an error of the run."""
    cut_every(2)
    compute(case, draw_for(case, 512, len(BAD[bad]) - 1), offsets_of(BAD[bad], 512, torch.int64))
    torch.cuda.synchronize()


@pytest.mark.parametrize("sequences", [31, 32, 33, 1000, 1025, 5000])
def test_many_short_sequences(operator: Any, sequences: int) -> None:
    """Empty ones among them, and in the middle one that is cut, where there are many."""
    lengths = [number * 7 % 5 for number in range(sequences)]
    lengths[sequences // 2] = 3000
    x = draw_packed(operator, lengths, (64, 64))
    check(operator, x)


@pytest.mark.parametrize("chunks", [1, 3])
def test_many_short_sequences_cut(operator: Any, chunks: int, cut_every: CutEvery) -> None:
    """More sequences than boundaries: a CTA looks for the sequence of a boundary."""
    lengths = [40] * 30 + [500, 0, 64, 129] + [10] * 40 + [700]
    cut_every(chunks)
    x = draw_packed(operator, lengths, (128, 128))
    check(operator, x)


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
