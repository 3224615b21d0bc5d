"""Into how many segments a sequence is cut, so that a few long sequences fill the GPU too.

A CTA walks one segment of one slice of a head. Cut sequences cost two more launches: a kernel that sums what
each segment but the last of a sequence adds to the state, and a small kernel that carries the states on from
segment to segment. The forward has these, and so have the backward's walks, for the state and for its
gradient, with costs of their own; a forward that keeps its states for the backward takes the backward's cut.
"""

import functools
from typing import NamedTuple

from tfla_tk.core.layout import CHUNK, Cut

# Of a segment where the cut follows from a sequence's length alone. The forward and the backward share it, so
# that the states that a forward keeps are those of its backward. Of all powers of two it costs the least on
# average, by the costs below (docs/batch-invariance.md).
INVARIANT_CHUNKS = 32

# Shorter segments would make the states between them larger than the inputs.
_LEAST_CHUNKS = 4


class Costs(NamedTuple):
    """What a cut costs, in chunks of the kernel whose sequences are cut."""

    states_chunk: float  # a chunk that forgets nothing, of the kernel that sums segments
    prologue: float  # start and end of a CTA
    launches: float  # the small kernel, with the gaps between launches


# measured on an H200 (docs/log/mlstm.md, "Cut and packed sequences")
FORWARD = Costs(states_chunk=0.5, prologue=4.0, launches=6.0)
# of one walk: estimates (docs/mlstm-backward.md, "Cut sequences")
BACKWARD = Costs(states_chunk=0.35, prologue=4.0, launches=6.0)


def choose_cut(
    sequences: int,
    tokens: int,
    ctas: int,
    multiprocessors: int,
    costs: Costs,
    *,
    packed: bool,
    batch_invariant: bool,
) -> Cut:
    """The cut of sequences of `tokens` tokens each, or together where they are packed; batch invariant it
    follows from the length of each sequence alone: every INVARIANT_CHUNKS chunks from its start. Others as of
    `cut`."""
    if batch_invariant:
        return cut_into(sequences, tokens, INVARIANT_CHUNKS, packed=packed)
    return (cut_packed if packed else cut)(sequences, tokens, ctas, multiprocessors, costs)


@functools.lru_cache(maxsize=4096)
def cut(sequences: int, tokens: int, ctas: int, multiprocessors: int, costs: Costs = FORWARD) -> Cut:
    """The cut of `sequences` sequences of `tokens` tokens each. ctas: that work on one segment: heads
    times slices of V, or of K times parts of V in the backward. multiprocessors: of the GPU, times the
    CTAs that one of them holds."""
    chunks = -(-tokens // CHUNK)

    def cost(length: int) -> float:
        count = -(-chunks // length)
        fused = waves_of(sequences * count * ctas, multiprocessors) * (length + costs.prologue)
        if count == 1:
            return fused
        states = waves_of(sequences * (count - 1) * ctas, multiprocessors)
        return fused + states * (costs.states_chunk * length + costs.prologue) + costs.launches

    # more segments than fill the GPU twice only add work
    most = max(1, min(chunks // _LEAST_CHUNKS, 2 * multiprocessors // (sequences * ctas)))
    lengths = dict.fromkeys(-(-chunks // count) for count in range(1, most + 1))
    best = min(lengths, key=cost)
    return Cut(sequences * -(-chunks // best), best)


def cut_packed(sequences: int, tokens: int, ctas: int, multiprocessors: int, costs: Costs = FORWARD) -> Cut:
    """The cut of packed sequences of `tokens` tokens together, whose lengths the host does not know. A
    segment is as long as if all tokens were one sequence: then one long sequence among short ones fills
    the GPU, and sequences of equal length are rarely cut at all."""
    length = cut(1, tokens, ctas, multiprocessors, costs).chunks
    if length * CHUNK >= tokens:  # uncut: a segment that no sequence fills
        return Cut(sequences, tokens // CHUNK + 1)
    return cut_into(sequences, tokens, length, packed=True)


def cut_into(sequences: int, tokens: int, chunks: int, *, packed: bool) -> Cut:
    """The cut into segments of so many chunks. tokens: of each sequence, or of all packed ones together."""
    length = chunks * CHUNK
    if packed:
        return Cut(sequences + tokens // length, chunks)
    return Cut(sequences * max(1, -(-tokens // length)), chunks)


def waves_of(ctas: int, multiprocessors: int) -> int:
    """In which so many CTAs run, one on a multiprocessor."""
    return -(-ctas // multiprocessors)
