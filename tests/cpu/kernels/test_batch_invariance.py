"""With batch_invariant nothing that launches take of a sequence follows from what else is in the call."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tfla_tk
from tfla_tk.backends.tk import segments
from tfla_tk.backends.tk.delta_rule.call import Shape
from tfla_tk.backends.tk.scalar_gate import walks
from tfla_tk.backends.tk.segments import INVARIANT_CHUNKS
from tfla_tk.core.layout import ANCHOR_CHUNKS, CHUNK, STATE_CHUNKS, Cut

from .calls import CUT, Op, check, draw, results
from .stand_in import Kernels
from .test_segments import assert_numbered

SEGMENT = INVARIANT_CHUNKS * CHUNK
LENGTHS = (0, 1, 63, 64, 65, 1000, SEGMENT - 1, SEGMENT, SEGMENT + 1, 5000, 4 * SEGMENT, 65536)
Borders = list[list[int]]  # of every sequence, where its segments begin, from its own start


# How a family cuts sequences of the given lengths, a batch of equal ones or packed


def cut_scalar_gate(lengths: tuple[int, ...], packed: bool, heads: int, multiprocessors: int) -> Cut:
    batch, seq = (1, sum(lengths)) if packed else (len(lengths), lengths[0])
    sizes = (batch, heads, seq, 128, 256)
    return walks.cut_sequences(sizes, len(lengths), multiprocessors, packed=packed, batch_invariant=True)


def cut_delta(lengths: tuple[int, ...], packed: bool, heads: int, multiprocessors: int) -> Cut:
    batch, seq = (1, sum(lengths)) if packed else (len(lengths), lengths[0])
    return Shape(len(lengths), 0, batch, heads, seq, 128, 128, 1, False, 0, False, packed).cut


def cut_gla(lengths: tuple[int, ...], packed: bool, heads: int, multiprocessors: int) -> Cut:
    seq = sum(lengths) if packed else lengths[0]
    of = (len(lengths), seq, heads, multiprocessors, segments.FORWARD)
    return segments.choose_cut(*of, packed=packed, batch_invariant=True)


FAMILIES = {"scalar gate": cut_scalar_gate, "delta rule": cut_delta, "gla": cut_gla}


def borders_of(cut: Cut, lengths: tuple[int, ...], packed: bool) -> Borders:
    """Asserts that the segments cover their sequences and have numbers of their own."""
    tokens, counts = cut.chunks * CHUNK, [cut.segments // len(lengths)] * len(lengths)
    if packed:
        assert_numbered(cut, [*itertools.accumulate(lengths, initial=0)])
        counts = [max(-(-length // tokens), 1) for length in lengths]
    assert all(count * tokens >= length for count, length in zip(counts, lengths, strict=True))
    return [[number * tokens for number in range(count)] for count in counts]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("heads", [1, 16])
@pytest.mark.parametrize("multiprocessors", [78, 132])
def test_borders_follow_from_the_length(family: str, heads: int, multiprocessors: int) -> None:
    """Of a sequence alone, in a batch, and packed with others before and behind it."""
    find: Callable[..., Cut] = FAMILIES[family]

    def borders(lengths: tuple[int, ...], packed: bool) -> Borders:
        return borders_of(find(lengths, packed, heads, multiprocessors), lengths, packed)

    for length in LENGTHS:
        (alone,) = borders((length,), False)
        for batch in (2, 3, 40, 300):
            assert borders((length,) * batch, False) == [alone] * batch
        for before, behind in ((), ()), ((1, 5000), (64, 0)), ((0, 65536, 63), ()), ((), (2 * SEGMENT, 7)):
            assert borders((*before, length, *behind), True)[len(before)] == alone


def test_a_segment_is_of_whole_stretches_between_anchors_and_states() -> None:
    assert INVARIANT_CHUNKS % ANCHOR_CHUNKS == 0 and INVARIANT_CHUNKS % STATE_CHUNKS == 0


# What is launched


def traits(kernels: Kernels) -> list[tuple[Any, ...]]:
    """Of all launches since the last call: the name, the segments' length, and what chooses a kernel.

    Whether makers or a launch make the delta rule's chunk matrices changes no bit of them.
    """
    found = []
    for x in (x for x in kernels.launches if x.name != "matrices"):
        cut = getattr(x, "cut", getattr(x, "shape", x.of_walk[8] if hasattr(x, "of_walk") else ()))
        chosen = [getattr(x, name, None) for name in ("tile", "walkers", "makes_matrices")]
        found.append((x.name, cut[4:5], *chosen))
    kernels.launches.clear()
    return found


@pytest.mark.parametrize("op", CUT.values(), ids=CUT)
@pytest.mark.parametrize("dims", [(128, 128), (64, 144), (192, 64)], ids=str)
def test_a_batch_is_launched_like_one_sequence(op: Op, dims: Any, kernels: Kernels) -> None:
    """With the option, and forwards of inference like those of training."""
    kernels.computes = False
    found: dict[bool, list[Any]] = {False: [], True: []}
    for invariant, batch in itertools.product(found, (1, 2, 12)):
        x = {name: t[:1].repeat(batch, *[1] * (t.dim() - 1)) for name, t in draw(op, dims).items()}
        place = 2 if op.is_mlstm else 1
        x |= {name: x[name].repeat_interleave(50, place) for name in ("q", "k", "v", *op.gates)}
        with tfla_tk.batch_invariant(invariant):
            with torch.no_grad():
                getattr(tfla_tk, op.name)(**x, **dict(op.options), backend="tk")
            of_inference = traits(kernels)
            results(op, x)
        of_training = traits(kernels)
        found[invariant].append([of_inference, of_training])
        assert not invariant or of_training[: len(of_inference)] == of_inference
    assert found[True][0] == found[True][1] == found[True][2]
    assert dims != (128, 128) or not found[False][0] == found[False][1] == found[False][2]


@pytest.mark.parametrize("op", CUT.values(), ids=CUT)
@pytest.mark.parametrize("chunks", [2, 4, INVARIANT_CHUNKS])
@pytest.mark.parametrize("dims", [(64, 48), (64, 144), (144, 272)], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_results(
    op: Op, chunks: int, dims: Any, packed: bool, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With borders and without; the backward takes the states that the forward has kept."""
    monkeypatch.setattr(segments, "INVARIANT_CHUNKS", chunks)
    with tfla_tk.batch_invariant():
        check(op, draw(op, dims, packed=packed, tokens=270))
    assert 0 not in [x.of_walk[0] for x in kernels.launches if x.name == "segments" and hasattr(x, "of_walk")]


@pytest.mark.parametrize("tokens", [(), (5,)], ids=["step", "sequence"])
def test_decoding_shares_a_state_in_one_way(tokens: tuple[int, ...], decoding: Kernels) -> None:
    """Whatever the batch; without the option few heads take narrower slices."""
    decoding.computes = False
    for batch_invariant, batch in itertools.product((False, True), (1, 3, 300)):
        q, v = torch.empty(batch, 2, *tokens, 64), torch.empty(batch, 2, *tokens, 256)
        gate = torch.empty(batch, 2, *(tokens or (1,)))
        state = torch.empty(batch, 2, 64, 256), torch.empty(batch, 2, 64), torch.empty(batch, 2, 1)
        function = tfla_tk.mlstm_sequence if tokens else tfla_tk.mlstm_step
        with tfla_tk.batch_invariant(batch_invariant):
            function(q, q, v, gate, gate, *state, backend="tk")
    seen = [x.tiling for x in decoding.launches]
    assert len(set(seen[:3])) > 1 and set(seen[3:]) == {seen[2]}
