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
OF_BOTH = pytest.mark.parametrize("costs", [FORWARD, BACKWARD], ids=["forward", "backward"])


@OF_BOTH
def test_what_fills_the_gpu_or_is_short_is_left_whole(costs: Costs) -> None:
    for sequences, tokens, ctas in ((8, 8192, 16), (32, 8192, 16), (132, 8192, 1), (1, 512, 4), (1, 1, 1)):
        assert cut(sequences, tokens, ctas, H200, costs) == Cut(sequences, -(-tokens // CHUNK))
    assert cut_packed(40, 4096, 200, H200, costs).segments == 40


@OF_BOTH
@pytest.mark.parametrize(
    ("sequences", "tokens", "ctas", "count"),
    [(1, 65536, 16, 8), (2, 32768, 16, 4), (1, 8192, 32, 4), (1, 1_000_000, 1, 132)],
)
def test_few_long_sequences_fill_the_gpu_once(
    sequences: int, tokens: int, ctas: int, count: int, costs: Costs
) -> None:
    found = cut(sequences, tokens, ctas, H200, costs)
    assert found.segments == sequences * count and found.segments * ctas <= H200
    assert sequences > 1 or cut_packed(1, tokens, ctas, H200, costs).chunks == found.chunks


def assert_covered(found: Cut, sequences: int, tokens: int) -> None:
    """The last segment has a token, and no token is left over."""
    count, rest = divmod(found.segments, sequences)
    assert rest == 0 and (count - 1) * found.chunks * CHUNK < tokens <= count * found.chunks * CHUNK


def assert_numbered(found: Cut, offsets: list[int]) -> None:
    """Every segment and every state between two has a number of its own, by that of segments.cuh, which
    follows from a sequence's own offset."""
    length, numbers, slots = found.chunks * CHUNK, list[int](), list[int]()
    for number, (start, end) in enumerate(itertools.pairwise(offsets)):
        count = max(-(-(end - start) // length), 1)
        numbers += range(start // length + number, start // length + number + count)
        slots += range(start // length, start // length + count - 1)
    assert len(set(numbers)) == len(numbers) and max(numbers) < found.segments
    assert len(set(slots)) == len(slots) and all(slot < found.segments - number - 1 for slot in slots)


@OF_BOTH
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 1000, 4096, 100_000])
def test_segments_cover_their_sequences(tokens: int, costs: Costs) -> None:
    """Packed ones of any lengths. Segments of one walk backward begin where the forward leaves a state."""
    generator, sizes = random.Random(tokens), ((1, 3, 16, 100), (1, 2, 7, 64), (78, 132, 264))
    for sequences, ctas, multiprocessors in itertools.product(*sizes):
        assert_covered(cut(sequences, tokens, ctas, multiprocessors, costs), sequences, tokens)
        ends = [generator.choice((0, tokens, generator.randint(0, tokens))) for _ in range(sequences - 1)]
        packed = cut_packed(sequences, tokens, ctas, multiprocessors, costs)
        assert_numbered(packed, [0, *sorted(ends), tokens])
        of_backward = [
            cut_sequences(
                (batch, ctas, tokens, 128, 64), sequences, multiprocessors, packed=batch < sequences
            )
            for batch in {sequences, 1}
        ]
        assert all(x.segments == sequences or x.chunks % STATE_CHUNKS == 0 for x in of_backward)


def test_packed_sequences_have_slots_for_their_states() -> None:
    """Of any lengths: none is used twice, and none lies behind the last one."""
    generator, tokens = random.Random(0), CHUNK * STATE_CHUNKS
    for _ in range(300):
        lengths = generator.choices((0, 1, 63, 64, 65, 127, 128, 129, 200, 1000), k=generator.randrange(1, 9))
        offsets = [0, *itertools.accumulate(lengths)]
        slots = [
            start // tokens + number + state
            for number, (start, length) in enumerate(zip(offsets, lengths, strict=False))
            for state in range(-(-length // tokens))
        ]
        assert len(set(slots)) == len(slots)
        assert all(slot < state_slots(sum(lengths), torch.tensor(offsets)) for slot in slots)
