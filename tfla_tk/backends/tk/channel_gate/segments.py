"""How GLA's sequences are cut into segments, and the launches that give the states at the borders between
these.

One allocation has, in fp32, the states at the borders [slots, heads, K, V], then the decays [slots, heads, K]
by which they are carried from border to border. Slots are the segments less the sequences (segments.cuh).
"""

from __future__ import annotations

from typing import Protocol

import torch

from tfla_tk import build
from tfla_tk.backends.tk import segments
from tfla_tk.backends.tk.operands import Operand
from tfla_tk.backends.tk.prepared import Launch
from tfla_tk.build import instances
from tfla_tk.core.layout import Cut

# By the tile of K, in chunks of the forward's walk: 6,900 cycles with K = 128, 3,000 with 64. The other walks
# are a little slower. Estimates (docs/log/gla.md, "Segments").
COSTS = {
    64: segments.Costs(states_chunk=0.5, prologue=3.0, launches=4.5),
    128: segments.Costs(states_chunk=0.45, prologue=1.5, launches=2.0),
}


class CutShape(Protocol):
    """Sizes of a call that is cut."""

    @property
    def sequences(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def dim_k(self) -> int: ...
    @property
    def dim_v(self) -> int: ...
    @property
    def half(self) -> bool: ...
    @property
    def cut(self) -> Cut: ...
    def with_offsets(self, address: int) -> tuple[int, ...]:
        """As the kernels take it."""


def find_cut(
    sequences: int,
    tokens: int,
    ctas: int,
    dim_k: int,
    multiprocessors: int,
    *,
    packed: bool,
    batch_invariant: bool,
) -> Cut:
    """The cut of sequences of `tokens` tokens each, or together where they are packed.

    Args:
        ctas: of the forward that work on one segment.
        batch_invariant: the cut follows from the length of each sequence alone.
    """
    if batch_invariant:
        return segments.cut_invariant(sequences, tokens, packed=packed)
    find = segments.cut_packed if packed else segments.cut
    return find(sequences, tokens, ctas, multiprocessors, COSTS[64 if dim_k <= 64 else 128])


def count_borders(shape: CutShape) -> int:
    """Slots for states at borders; 0 where every sequence is one segment."""
    return shape.cut.segments - shape.sequences


def borders_bytes(shape: CutShape) -> int:
    """Of the allocation of the states at the borders; 0 where there are none."""
    return count_borders(shape) * shape.heads * shape.dim_k * (shape.dim_v + 1) * torch.float32.itemsize


def launch_segments(
    shape: CutShape,
    offsets_at: int,
    operands: tuple[Operand, Operand, Operand, int],
    entering_at: int,
    borders_at: int,
    scale: float,
    *,
    backward: bool,
) -> Launch:
    """The launch that gives the states at the borders, or backward in time their gradients.

    Args:
        operands: k and v, or q and do; g and the code of its dtype.
        entering_at: the first states, or the gradients of the last ones; 0 for none.
    """
    kernel = build.load(instances.GLA, instances.gla_segments(shape.dim_v, shape.half, backward))
    states = count_borders(shape) * shape.heads * shape.dim_k * shape.dim_v
    decays_at = borders_at + states * torch.float32.itemsize
    return kernel.segments(
        shape.with_offsets(offsets_at), *operands, entering_at, borders_at, decays_at, scale, backward
    )
