"""The rule that cuts sequences into segments."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from tfla_tk.backends.tk.scalar_gate.walks import cut_sequences
from tfla_tk.backends.tk.segments import BACKWARD, FORWARD, Costs, cut, cut_packed
from tfla_tk.core.layout import CHUNK, STATE_CHUNKS, Cut, state_slots

H200 = 132


def test_enough_ctas_are_left_whole() -> None:
    for sequences, ctas in ((8, 16), (8, 32), (32, 16), (132, 1)):
        assert cut(sequences, 8192, ctas, H200) == Cut(sequences, 8192 // CHUNK)


def test_short_sequences_are_left_whole() -> None:
    assert cut(1, 512, 4, H200) == Cut(1, 8)
    assert cut(2, 1000, 16, H200) == Cut(2, 16)
    assert cut(1, 1, 1, H200) == Cut(1, 1)


@pytest.mark.parametrize(
    ("sequences", "tokens", "ctas", "count"),
    [(1, 65536, 16, 8), (2, 32768, 16, 4), (4, 16384, 16, 2), (1, 8192, 32, 4), (1, 1_000_000, 1, 132)],
)
def test_few_long_sequences_fill_the_gpu_once(sequences: int, tokens: int, ctas: int, count: int) -> None:
    found = cut(sequences, tokens, ctas, H200)
    assert found.segments == sequences * count
    assert found.segments * ctas <= H200


def test_segments_are_longer_than_their_state_is_large() -> None:
    for tokens in range(64, 20_000, 500):
        found = cut(1, tokens, 1, H200)
        assert found.segments == 1 or found.chunks >= 4


@pytest.mark.parametrize("multiprocessors", [78, 114, 132, 264])
def test_segments_cover_their_sequences(multiprocessors: int) -> None:
    for sequences in (1, 3, 16):
        for tokens in (1, 63, 64, 65, 1000, 4096, 100_000):
            for ctas in (1, 2, 7, 64):
                found = cut(sequences, tokens, ctas, multiprocessors)
                count, rest = divmod(found.segments, sequences)
                assert rest == 0
                # the last segment has a token, and no token is left over
                assert (count - 1) * found.chunks * CHUNK < tokens <= count * found.chunks * CHUNK


def test_segments_of_one_walk_begin_where_the_forward_leaves_a_state() -> None:
    """They cover their sequences all the same."""
    for sequences, seq, heads in itertools.product((1, 3, 16), (1, 64, 65, 1000, 4096, 30_000), (1, 7, 64)):
        for packed in (False, True):
            sizes = (1 if packed else sequences, heads, seq, 128, 64)
            found = cut_sequences(sizes, sequences, H200, packed=packed)
            if found.segments == sequences:
                continue
            assert found.chunks % STATE_CHUNKS == 0
            if packed:
                assert found.segments == sequences + seq // (found.chunks * CHUNK)
            else:
                count = found.segments // sequences
                assert (count - 1) * found.chunks * CHUNK < seq <= count * found.chunks * CHUNK


def test_packed_sequences_have_slots_for_their_states() -> None:
    """Of any lengths: none is used twice, and none lies behind the last one."""
    rng = random.Random(0)
    for _ in range(300):
        lengths = [
            rng.choice((0, 1, 63, 64, 65, 127, 128, 129, 200, 1000)) for _ in range(rng.randrange(1, 9))
        ]
        offsets = torch.tensor([0, *itertools.accumulate(lengths)])
        slots = [
            start // (CHUNK * STATE_CHUNKS) + number + state
            for number, (start, length) in enumerate(zip(offsets.tolist(), lengths, strict=False))
            for state in range(-(-length // (CHUNK * STATE_CHUNKS)))
        ]
        assert len(set(slots)) == len(slots)
        assert all(slot < state_slots(sum(lengths), offsets) for slot in slots)


@pytest.mark.parametrize("tokens", [1, 1000, 65536, 1_000_001])
@pytest.mark.parametrize("sequences", [1, 5, 300])
def test_packed_sequences_have_segments_for_any_lengths(sequences: int, tokens: int) -> None:
    found = cut_packed(sequences, tokens, 16, H200)
    size = found.chunks * CHUNK

    def needed(lengths: list[int]) -> int:
        return sum(max(1, -(-length // size)) for length in lengths)

    # one sequence with all tokens, and as many as possible with one token more than fills their segments
    over = min(sequences, tokens // (size + 1))
    lengths = [size + 1] * over + [0] * (sequences - over)
    lengths[-1] += tokens - sum(lengths)
    for case in ([tokens] + [0] * (sequences - 1), lengths):
        assert sum(case) == tokens
        assert needed(case) <= found.segments


@pytest.mark.parametrize(
    ("sequences", "tokens", "ctas", "count"), [(1, 65536, 16, 8), (1, 8192, 16, 8), (1, 8192, 8, 16)]
)
def test_the_backward_fills_the_gpu_too(sequences: int, tokens: int, ctas: int, count: int) -> None:
    assert cut(sequences, tokens, ctas, H200, BACKWARD).segments == sequences * count
    assert cut(8, 8192, 16, H200, BACKWARD).segments == 8


def test_costs_decide() -> None:
    """Where states cost as much as the kernel itself, or launches more than it all, sequences stay whole."""
    assert cut(1, 4096, 60, H200, FORWARD).segments > 1
    for costs in (Costs(1.0, 4.0, 6.0), Costs(0.5, 4.0, 100.0)):
        assert cut(1, 4096, 60, H200, costs) == Cut(1, 64)
        assert cut_packed(1, 4096, 60, H200, costs).segments == 1


def test_one_packed_sequence_is_cut_like_a_batch_of_one() -> None:
    whole, packed = cut(1, 65536, 16, H200), cut_packed(1, 65536, 16, H200)
    assert packed.chunks == whole.chunks
    # never cut: no workspace, one launch
    assert cut_packed(40, 4096, 200, H200).segments == 40


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 4096, 10_000, 65_536])
@pytest.mark.parametrize("costs", [FORWARD, BACKWARD], ids=["forward", "backward"])
def test_every_segment_of_packed_sequences_has_a_number_of_its_own(tokens: int, costs: Costs) -> None:
    """The numbering of segments.cuh, which follows from a sequence's own offset, for any rising offsets."""
    generator = random.Random(tokens)
    for sequences in (1, 2, 7, 100):
        ends = sorted(
            generator.choice((0, tokens, generator.randint(0, tokens))) for _ in range(sequences - 1)
        )
        found = cut_packed(sequences, tokens, generator.choice((1, 4, 64)), H200, costs)
        length = found.chunks * CHUNK
        numbers, slots = [], []
        for number, (start, end) in enumerate(itertools.pairwise([0, *ends, tokens])):
            first, count = start // length + number, max(-(-(end - start) // length), 1)
            numbers += range(first, first + count)
            slots += range(start // length, start // length + count - 1)
        assert len(set(numbers)) == len(numbers) and max(numbers) < found.segments
        assert len(set(slots)) == len(slots)
        assert all(slot < found.segments - sequences for slot in slots)
