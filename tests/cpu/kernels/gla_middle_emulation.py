"""channel_gate/middle.cuh in NumPy, lane by lane: its addresses, fragments and masks.

Nothing is rounded but the high parts of the operands.
"""

from __future__ import annotations

import numpy as np

from .gla_emulation import (
    BLOCK,
    BLOCKS,
    CHUNK,
    FRAGMENT_COLUMN,
    FRAGMENT_ROW,
    LANE,
    PANEL,
    ROW,
    SHORT_GATES,
    TOKEN,
    Array,
    Chunk,
    high,
    panel_offset,
)

TOKENS, CHANNELS = 8, 4  # of a lane
HALF, CHANNEL = LANE // 16, LANE % 16 * CHANNELS
MILD_BITS = {"bf16": 80.0, "fp16": 4.0}  # on a side of a middle


def power_of_two(x: Array) -> Array:
    """The least one that is not less than x."""
    digits, exponent = np.frexp(x)
    return np.ldexp(1.0, np.where(digits == 0.5, exponent - 1, exponent))


class ChunkAroundMiddle(Chunk):
    """A team's work on a chunk of q, k, g [64, K] that is mild; mirrors: as in Chunk."""

    def run(self) -> None:
        """The steps of all warps of the team."""
        places = [(n % BLOCKS, n // BLOCKS) for n in range(BLOCKS * self.parts)]
        self.before, self.behind = np.full(self.dim_k, np.nan), np.full(self.dim_k, np.nan)
        lanes = [self._sum_gates(*place) for place in places]
        self.mild_bits = max(x[3] for x in lanes)
        self.low_q, self.low_k = self.work_at, self.work_at + self.parts * PANEL
        for place, (_, total, beside, _) in zip(places, lanes, strict=True):
            low = HALF == 0
            self.memory.store_wide((self._totals_at(*place))[low], (total * beside)[low])
        found = [self._factors(*place, *x[1:3]) for place, x in zip(places, lanes, strict=True)]
        for place, x, factors in zip(places, lanes, found, strict=True):
            self._scale(*place, x[0], *factors)
        for place in places:
            self._store_scores_of(*place)

    def _totals_at(self, block: int, part: int) -> Array:
        return self.p_at + 48 * ROW + part * 256 + block * self.dim_k * 4 + CHANNEL * 4

    def _sum_gates(self, block: int, part: int) -> tuple[Array, Array, Array, float]:
        """a [32, 8, 4], T of the lane's tokens and of those beside them, the largest sum of |log2 a|."""
        work, first = self.work_at + (part * BLOCKS + block) * PANEL // 2, HALF * TOKENS
        g = np.empty((32, TOKENS, CHANNELS))
        for i in range(TOKENS):
            if self.short:
                g[:, i] = self.memory.load(work + SHORT_GATES + (first + i) * ROW + CHANNEL * 2, CHANNELS)
            else:
                g[:, i] = self.memory.load_wide(work + (first + i) * TOKEN + CHANNEL * 4, CHANNELS)
            g[first + i >= self.tokens - block * BLOCK, i] = 0.0
        sums = np.abs(g).sum(1)
        total = np.exp(g).prod(1)
        return np.exp(g), total, total[LANE ^ 16], (sums + sums[LANE ^ 16]).max() / np.log(2.0)

    def _factors(self, block: int, part: int, total: Array, beside: Array) -> tuple[Array, Array]:
        """Of q before the lane's first token, of k behind its last one."""
        totals = self._totals_at(block // 2 * 2, part)
        x, y = (self.memory.load_wide(totals + n * self.dim_k * 4, CHANNELS) for n in range(2))
        up = 1.0 / (x * y if block % 3 == 0 else y if block == 1 else x)
        one = np.ones_like(x)
        queries = self.scale * (up if block < 2 else one if block == 2 else x)
        keys = up if block >= 2 else one if block == 1 else y
        low = (HALF == 0)[:, None]
        queries, keys = np.where(low, queries, queries * beside), np.where(low, keys * beside, keys)
        second_half = self._totals_at(2, part)
        half = self.memory.load_wide(second_half, CHANNELS)
        half = half * self.memory.load_wide(second_half + self.dim_k * 4, CHANNELS)
        behind = power_of_two(half)
        down = half / behind
        if block % 2 == 0:
            to, factor = (self.before, x * y * down) if block == 0 else (self.behind, behind)
            to[(part * 64 + CHANNEL)[:16, None] + np.arange(CHANNELS)] = factor[:16]
        return queries / down, keys * down

    def _row_of(self, tile: int, i: int) -> Array:
        return tile + HALF * (TOKENS * ROW) + ((2 * CHANNEL) ^ (16 * i)) + i * ROW

    def _scale(self, block: int, part: int, a: Array, queries: Array, keys: Array) -> None:
        rows = part * PANEL + block * BLOCK * ROW
        for i in range(TOKENS):
            queries = queries * a[:, i]
            self._scale_row(self._row_of(rows, i), self._row_of(self.low_q + rows, i), queries)
        for i in reversed(range(TOKENS)):
            self._scale_row(self._row_of(self.k_at + rows, i), self._row_of(self.low_k + rows, i), keys)
            keys = keys * a[:, i]

    def _scale_row(self, at: Array, at_low: Array, factor: Array) -> None:
        x = self.memory.load(at, CHANNELS) * factor
        self.memory.store(at, high(x))
        self.memory.store(at_low, x - high(x))

    def _store_scores_of(self, block: int, part: int) -> None:
        """The accumulator of a warp of wgmma, masked; stmatrix of four, of the mirror by blocks."""
        columns = CHUNK // self.parts
        q, low_q = (self.read_tile(at, self.dim_k)[block * BLOCK :][:BLOCK] for at in (0, self.low_q))
        k, low_k = (
            self.read_tile(at, self.dim_k)[part * columns :][:columns] for at in (self.k_at, self.low_k)
        )
        scores = low_q @ k.T + q @ low_k.T + q @ k.T
        to = self.p_at + panel_offset(BLOCK * block + LANE % 16, LANE // 16)
        for j in range(columns // 16):
            visible = []
            for n in range(4):
                row, column = FRAGMENT_ROW + n % 2 * 8, FRAGMENT_COLUMN + 16 * j + n // 2 * 8
                x = scores[row[:, None], column[:, None] + np.arange(2)]
                behind = part * columns + column - (block * BLOCK + row)
                visible.append(np.where(behind[:, None] <= np.array([0, -1]), x, 0.0))
            if self.mirrors:
                if part * columns // 16 + j <= block:
                    self.store_parts(block, part * columns // 16 + j, visible)
                continue
            for n in range(4):
                at = (to ^ (32 * j + part * columns * 2))[8 * n + FRAGMENT_ROW] + LANE % 4 * 4
                self.memory.store(at, visible[n])
