"""Into how many segments the walks of the forward and of its mirror cut a sequence, so that a few long
sequences fill the GPU, too.

A split costs two more launches: walks that leave what each segment makes of the state, a matrix and a state,
and a small kernel that carries the states over the segments. A and P have to be there before, so that no
makers run beside a walk. The backward has A, P and M from the forward and makes the states alone, so that a
split pays there where it pays in the forward.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from tfla_tk.core.layout import CHUNK, SEGMENT_CHUNKS

# microseconds, from the log of 2026-11-26, of K = V = 128: of a chunk of the forward's walk by walkers of a
# CTA, and of A and P of a chunk on a multiprocessor, before the walk and, by the tile of K, beside it. The
# latter of K = 128 is an estimate: four chunks at a time, five before the walk; with K = 64 three
WALKED = {1: 1.56, 2: 2.36}
MADE_BEFORE, MADE_BESIDE = 1.88, {64: 2.9, 128: 2.2}
# fitted to forwards of K = V = 128 on an H100 (the log of 2026-11-26): a chunk of two walkers that leave
# states alone, where their CTAs run all at once and where they take several waves; the start of a launch with
# that of its CTAs. An estimate: a segment that is carried
_MAPPED, _MAPPED_IN_WAVES, _LAUNCH, _CARRIED = 2.0, 2.7, 15.0, 1.3
# of the time without a split, which a split has to stay below
_WORTH = 0.9
_WALKERS = 2  # of a CTA that leaves states alone


class Slices(NamedTuple):
    """Of 64 columns, each owned by a walker."""

    values: int
    keys: int


def beside(pairs: int, idle: int, dim_k: int) -> float:
    """Of a chunk of walks of one walker, with makers on so many multiprocessors.

    Args:
        pairs: sequences times heads.
    """
    return max(WALKED[1], MADE_BESIDE[64 if dim_k <= 64 else 128] * pairs / idle)


@functools.lru_cache(maxsize=4096)
def segment_chunks(
    sequences: int, tokens: int, heads: int, slices: Slices, multiprocessors: int
) -> int | None:
    """Chunks of a segment, a multiple of SEGMENT_CHUNKS; None where sequences are better left whole.

    Args:
        tokens: of each sequence.
    """
    chunks, pairs = -(-tokens // CHUNK), sequences * heads
    made = MADE_BEFORE * chunks * pairs / multiprocessors

    def walked(segments: int, length: int) -> float:
        return min(
            _waves(pairs * segments * -(-slices.values // walkers), multiprocessors) * length * of_chunk
            for walkers, of_chunk in WALKED.items()
        )

    def split(length: int) -> float:
        segments = -(-chunks // length)
        mapping = (segments - 2) * -(-sum(slices) // _WALKERS) + -(-slices.values // _WALKERS)
        waves = _waves(pairs * mapping, multiprocessors)
        mapped = waves * length * (_MAPPED if waves == 1 else _MAPPED_IN_WAVES)
        carried = _CARRIED * max(_waves(pairs * slices.values, multiprocessors), 1) * (segments - 2)
        return made + mapped + carried + walked(segments, length) + 3 * _LAUNCH

    idle = multiprocessors - pairs * slices.values
    whole = made + walked(1, chunks) + _LAUNCH
    if idle > 0:
        whole = min(whole, chunks * beside(pairs, idle, 64 * slices.keys))
    pieces = -(-chunks // SEGMENT_CHUNKS)
    lengths = {-(-pieces // segments) * SEGMENT_CHUNKS for segments in range(2, pieces + 1)}
    best = min(sorted(lengths), key=split, default=None)
    return best if best is not None and split(best) < _WORTH * whole else None


def _waves(ctas: int, multiprocessors: int) -> int:
    return -(-ctas // multiprocessors)
