"""Into how many segments a sequence is cut, so that a few long sequences fill the GPU too.

A CTA walks one segment of one head and one V slice. Cut sequences cost two more launches: a states pass over
all segments but the last of each sequence, and a small kernel that carries the states on from segment to
segment.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

CHUNK = 64  # kChunk of gates.cuh

# Costs in chunks of the fused kernel, measured on an H200 (docs/mlstm.md, "Sequence split"): a chunk of the
# states pass that forgets nothing, start and end of a CTA, and the combine with the gaps between launches.
_STATES_CHUNK = 0.5
_PROLOGUE = 4.0
_LAUNCHES = 6.0
# Shorter segments would make the states between them larger than the inputs.
_LEAST_CHUNKS = 4


@dataclass(frozen=True)
class Cut:
    """How the sequences of a call are cut.

    Attributes:
        segments: of all sequences together; with packed sequences an upper bound.
        chunks: per segment; the last segment of a sequence may have fewer.
    """

    segments: int
    chunks: int


@functools.lru_cache(maxsize=4096)
def cut(sequences: int, tokens: int, ctas: int, multiprocessors: int) -> Cut:
    """The cut of `sequences` sequences of `tokens` tokens each.

    Args:
        ctas: that work on one segment: heads times V slices.
        multiprocessors: of the GPU, times the CTAs that one of them holds.
    """
    chunks = -(-tokens // CHUNK)

    def cost(length: int) -> float:
        count = -(-chunks // length)
        fused = _waves(sequences * count * ctas, multiprocessors) * (length + _PROLOGUE)
        if count == 1:
            return fused
        states = _waves(sequences * (count - 1) * ctas, multiprocessors)
        return fused + states * (_STATES_CHUNK * length + _PROLOGUE) + _LAUNCHES

    # more segments than fill the GPU twice only add work
    most = max(1, min(chunks // _LEAST_CHUNKS, 2 * multiprocessors // (sequences * ctas)))
    lengths = dict.fromkeys(-(-chunks // count) for count in range(1, most + 1))
    best = min(lengths, key=cost)
    return Cut(sequences * -(-chunks // best), best)


def cut_packed(sequences: int, tokens: int, ctas: int, multiprocessors: int) -> Cut:
    """The cut of packed sequences of `tokens` tokens together, whose lengths the host does not know.

    A segment is as long as if all tokens were one sequence: then one long sequence among short ones fills the
    GPU, and sequences of equal length are rarely cut at all.
    """
    length = cut(1, tokens, ctas, multiprocessors).chunks
    if length * CHUNK >= tokens:
        return Cut(sequences, length)
    return Cut(sequences + tokens // (length * CHUNK), length)


def _waves(ctas: int, multiprocessors: int) -> int:
    return -(-ctas // multiprocessors)
