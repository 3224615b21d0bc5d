"""channel_gate/chunk.cuh in NumPy, lane by lane: its addresses, fragments and masks.

Nothing is rounded but the high parts of numbers in two parts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating]

CHUNK, BLOCK, BLOCKS = 64, 16, 4
ROW, TOKEN = 128, 256  # bytes
BLOCK_BYTES, PANEL, SHORT_GATES = 4096, 8192, 2048
LANE = np.arange(32)
FRAGMENT_ROW, FRAGMENT_COLUMN = LANE // 4, LANE % 4 * 2


class Memory:
    """Shared memory that holds numbers of two and of four bytes; a write of one size spoils the other.

    Accesses are aligned to their size, of 16 bytes at most.
    """

    def __init__(self, size: int) -> None:
        self.short, self.wide = np.full(size // 2, np.nan), np.full(size // 4, np.nan)

    def store(self, address: Array, x: Array) -> None:
        """Numbers of two bytes, one behind the other: x [..., n] at address [...]."""
        place = self._numbers(address, 2, x.shape[-1])
        self.short[place], self.wide[place // 2] = x, np.nan

    def load(self, address: Array, count: int = 2) -> Array:
        return self.short[self._numbers(address, 2, count)]

    def store_wide(self, address: Array, x: Array) -> None:
        place = self._numbers(address, 4, x.shape[-1])
        self.wide[place] = x
        self.short[2 * place] = self.short[2 * place + 1] = np.nan

    def load_wide(self, address: Array, count: int = 2) -> Array:
        return self.wide[self._numbers(address, 4, count)]

    def _numbers(self, address: Array, size: int, count: int) -> Array:
        """Which of the numbers of `size` bytes: `count` of them at each address."""
        found = np.asarray(address)[..., None]
        unit = min(size * count, 16)
        assert not np.any(found % unit), f"misaligned to {unit} bytes: {np.unique(found[found % unit > 0])}"
        return found // size + np.arange(count)

    def matrices(self, rows: Array, transposed: bool = False) -> list[Array]:
        """ldmatrix of four: [32] addresses of rows to the two numbers of every lane."""
        x = self.load(rows, 8).reshape(4, 8, 8)
        if transposed:
            x = x.swapaxes(1, 2)
        return [m[FRAGMENT_ROW[:, None], FRAGMENT_COLUMN[:, None] + np.arange(2)] for m in x]

    def wide_matrices(self, rows: Array) -> list[Array]:
        """The same of numbers of four bytes: one of every lane."""
        x = self.load_wide(rows, 4).reshape(4, 8, 4)
        return [m[FRAGMENT_ROW, LANE % 4] for m in x]


def panel_offset(row: Array, unit: Array) -> Array:
    return row * ROW + ((unit ^ (row % 8)) * 16)


def high(x: Array) -> Array:
    """x with eight binary digits."""
    digits, exponent = np.frexp(x)
    return np.ldexp(np.round(digits * 256.0) / 256.0, exponent)


def multiply_16(c: Array, a: list[Array], b: list[Array]) -> None:
    """mma.m16n8k16 of fragments, or m16n8k8 of those of wide numbers; c [32, 4]."""
    count = 1 if a[0].ndim == 1 else 2  # numbers of a register
    x, y = np.zeros((16, 8 * count)), np.zeros((8 * count, 8))
    for n, part in enumerate(a):
        rows, columns = FRAGMENT_ROW + 8 * (n % 2), LANE % 4 * count + 4 * count * (n // 2)
        x[rows[:, None], columns[:, None] + np.arange(count)] = part.reshape(32, count)
    for n, part in enumerate(b):
        rows = LANE % 4 * count + 4 * count * n
        y[rows[:, None] + np.arange(count), FRAGMENT_ROW[:, None]] = part.reshape(32, count)
    z = x @ y
    for half in range(2):
        c[:, 2 * half :][:, :2] += z[
            (FRAGMENT_ROW + 8 * half)[:, None], FRAGMENT_COLUMN[:, None] + np.arange(2)
        ]


def halves(c: Array) -> Array:
    """The two scores of every lane, of c [2, 32, 4]: half of A with one B and half with the other."""
    return c[0][:, :2] + c[1][:, 2:]


class FloatRows(NamedTuple):
    """Rows of 64 fp32 numbers: where the first one has channels 0 to 31 and 32 to 63, bytes between rows."""

    channels_0: int
    channels_32: int
    stride: int

    def begin(self, t: int) -> FloatRows:
        return self._replace(
            channels_0=self.channels_0 + t * self.stride, channels_32=self.channels_32 + t * self.stride
        )

    def at(self, t: int) -> Array:
        offset = 8 * (LANE % 16) + LANE // 16 * (self.channels_32 - self.channels_0)
        return self.channels_0 + (offset ^ (t % 8 * 16)) + t * self.stride


@dataclass
class Block:
    """block.cuh: one warp's 16 tokens and 64 channels; where its rows of q and k and its memory are.

    two_parts: the operands of its scores have two, whose sum is all that matters here.
    """

    memory: Memory
    q: int
    k: int
    work: int
    two_parts: bool = False
    total: Array = field(default_factory=lambda: np.full((BLOCK, 32, 2), np.nan))
    qf: Array = field(default_factory=lambda: np.full((BLOCK, 32, 2), np.nan))
    kg: Array = field(default_factory=lambda: np.full((BLOCK, 32, 2), np.nan))
    p: Array = field(default_factory=lambda: np.full((2, 32, 4), np.nan))

    @property
    def first_rows(self) -> FloatRows:
        return FloatRows(self.work, self.work + ROW, TOKEN)

    @property
    def second_rows(self) -> FloatRows:
        return FloatRows(self.q, self.k, ROW)

    @staticmethod
    def at(rows: int, t: int) -> Array:
        return rows + ((4 * LANE) ^ (t % 8 * 16)) + t * ROW

    @staticmethod
    def rows_of_a(rows: int, stride: int) -> Array:
        return rows + LANE % 16 * stride + ((LANE // 16) ^ (LANE % 8)) * 16

    @staticmethod
    def rows_of_b(rows: int, stride: int) -> Array:
        return rows + (LANE // 16 * 8 + LANE % 8) * stride + ((LANE // 8 % 2) ^ (LANE % 8)) * 16

    def load_gates(self, first: int, short: bool, tokens: int) -> None:
        for t in range(first, first + 8):
            if short:
                g = self.memory.load(self.work + SHORT_GATES + 4 * LANE + t * ROW)
            else:
                g = self.memory.load_wide(self.work + 8 * LANE + t * TOKEN)
            self.total[t] = np.exp(g) if t < tokens else 1.0

    def load_operands(self, first: int, store: bool = True) -> None:
        for left in range(first, first + 8, 2):
            right = left + 1
            q = [self.memory.load(self.at(self.q, t)) for t in (left, right)]
            k = [self.memory.load(self.at(self.k, t)) for t in (left, right)]
            self.qf[left], self.qf[right] = q[0] * self.total[left], q[1] * self.total[right]
            if store:
                self.memory.store_wide(self.first_rows.at(left), k[0])
                self.memory.store_wide(self.first_rows.at(right), self.qf[right])
            self.kg[left], self.kg[right] = k[0] * self.total[right], k[1]
            self.qf[right] *= self.total[left]
            self.total[left] *= self.total[right]

    def store_level(self, n: int, rows: FloatRows, first: int) -> None:
        for t in range(first, first + 8):
            self.memory.store_wide(rows.at(t), self.qf[t] if t & n else self.kg[t])

    def join(self, n: int, first: int, count: int = 8) -> None:
        for t in range(first, first + count):
            left = t // (2 * n) * 2 * n
            if t & n:
                self.qf[t] *= self.total[left]
            else:
                self.kg[t] *= self.total[left + n]
        for left in range(first, first + count, 2 * n):
            self.total[left] = self.total[left] * self.total[left + n]

    @staticmethod
    def eight_of_a(stride: int) -> Array:
        return LANE % 8 * stride + ((LANE // 8) ^ (LANE % 8)) * 16

    @staticmethod
    def eight_of_b(stride: int) -> Array:
        return LANE % 8 * stride + ((LANE // 8 % 2 * 2 + LANE // 16) ^ (LANE % 8)) * 16

    def multiply_pairs(self, q: int, k: int) -> Array:
        c = np.zeros((2, 32, 4))
        for i in range(2):
            a = self.memory.matrices(q + (self.eight_of_a(ROW) ^ (i * 64)))
            b = self.memory.matrices(k + (self.eight_of_b(ROW) ^ (i * 64)))
            for n in range(2):
                multiply_16(c[n], a, b[2 * n : 2 * n + 2])
        return halves(c)

    def multiply_eight(self, x: FloatRows, y: FloatRows) -> Array:
        c = np.zeros((2, 32, 4))
        for i in range(4):
            of_a, of_b = (f(x.stride) ^ (i % 2 * 64) for f in (self.eight_of_a, self.eight_of_b))
            a = self.memory.wide_matrices((x.channels_32 if i // 2 else x.channels_0) + of_a)
            if x == y:
                b = [a[n] for n in (0, 2, 1, 3)]
            else:
                b = self.memory.wide_matrices((y.channels_32 if i // 2 else y.channels_0) + of_b)
            for n in range(2):
                multiply_16(c[n], a, b[2 * n : 2 * n + 2])
        return halves(c)

    def take(self, first: int, c: Array, n: int) -> None:
        for e in range(2):
            differ = FRAGMENT_ROW ^ (FRAGMENT_COLUMN + e)
            below = (FRAGMENT_COLUMN + e < FRAGMENT_ROW) & (differ >= n) & (differ < 2 * n)
            of_level = differ == 0 if n == 0 else below
            to = self.p[first // 8, :, first // 4 + e]
            to[:] = np.where(of_level, c[:, e], 0.0 if n == 0 else to)

    def make_eight(self, first: int, short: bool, tokens: int) -> None:
        rows, more = self.first_rows, self.second_rows
        self.load_gates(first, short, tokens)
        self.load_operands(first)
        self.store_level(2, more, first)
        self.join(2, first)
        for n, x in ((1, rows), (2, more)):
            self.take(first, self.multiply_eight(x.begin(first), x.begin(first)), n)
        self.store_level(4, rows, first)
        self.join(4, first)
        self.store_level(8, more, first)
        self.take(first, self.multiply_eight(rows.begin(first), rows.begin(first)), 4)

    def by_levels(self, short: bool, tokens: int) -> None:
        for first in (0, 8):
            self.take(first, self.multiply_pairs(self.q + first * ROW, self.k + first * ROW), 0)
        self.make_eight(0, short, tokens)
        for t in range(8):
            self.memory.store_wide(self.first_rows.at(t), self.qf[t])
        self.qf[:8] = self.kg[:8] = np.nan
        self.make_eight(8, short, tokens)
        self.p[0, :, 2:] = self.multiply_eight(self.second_rows.begin(8), self.second_rows)
        self.p[1, :, :2] = 0.0
        self._read_back(range(8), range(8))
        self.join(8, 0, BLOCK)

    def _read_back(self, of_q: range, of_k: range) -> None:
        for t in of_q:
            self.qf[t] = self.memory.load_wide(self.first_rows.at(t))
        for t in of_k:
            self.kg[t] = self.memory.load_wide(self.second_rows.at(t))

    def around_middle(self, short: bool, tokens: int) -> None:
        for first in (0, 8):
            self.load_gates(first, short, tokens)
            self.load_operands(first, store=False)
            self.join(2, first)
            self.join(4, first)
            up = 1.0 / self.total[first]
            for t in range(first, first + 8):
                x, y = (self.qf[t] * up, self.kg[t]) if first == 0 else (self.qf[t], self.kg[t] * up)
                self.memory.store_wide(self.first_rows.at(t), x)
                self.memory.store_wide(self.second_rows.at(t), y)
        a_rows, b_rows = self.rows_of_a(self.work, TOKEN), self.rows_of_b(self.q, ROW)
        self.p[:] = 0.0
        for i in range(8):
            a = self.memory.wide_matrices((a_rows ^ (i % 4 * 32)) + i // 4 * ROW)
            b = self.memory.wide_matrices((b_rows ^ (i % 4 * 32)) + i // 4 * (self.k - self.q))
            for n in range(2):
                multiply_16(self.p[n], a, b[2 * n : 2 * n + 2])
        if self.two_parts:
            self.kg[:8] = self.qf[8:] = np.nan
            self._read_back(range(8, BLOCK), range(8))
        self.join(8, 0, BLOCK)
        for e in range(2):
            above = FRAGMENT_COLUMN + e > FRAGMENT_ROW
            self.p[0, above, e] = self.p[1, above, 2 + e] = 0.0
            self.p[1, :, e] = 0.0


class Chunk:
    """chunk.cuh: a team's work on a chunk of q, k, g [64, K]; mild: blocks whose gates are.

    mirrors: P is transposed and in two parts, as the mirror has it. two_parts: of a block's operands.
    """

    def __init__(
        self,
        q: Array,
        k: Array,
        g: Array,
        scale: float,
        short: bool,
        tokens: int,
        mild: tuple[int, ...] = (),
        mirrors: bool = False,
        two_parts: bool = False,
    ) -> None:
        self.mild, self.mirrors, self.two_parts = mild, mirrors, two_parts
        self.dim_k, self.scale, self.short, self.tokens = q.shape[1], scale, short, tokens
        self.parts = self.dim_k // 64
        self.k_at = self.parts * PANEL
        self.work_at = 2 * self.k_at
        self.p_at = self.work_at + self.parts * BLOCKS * BLOCK_BYTES
        self.memory = Memory(self.p_at + PANEL + mirrors * BLOCK * ROW)
        self.memory.store_wide(self.p_at + np.arange(0, PANEL, 4), np.zeros((PANEL // 4, 1)))
        self.memory.short[self.p_at // 2 :] = 0.0
        self.decay = np.full(self.dim_k, np.nan)
        for tile, x in ((0, q), (self.k_at, k)):
            self._store_tile(tile, x)
        self._load_gates(g)

    def _store_tile(self, tile: int, x: Array) -> None:
        row, unit = np.meshgrid(np.arange(CHUNK), np.arange(self.dim_k // 8), indexing="ij")
        self.memory.store(tile + unit // 8 * PANEL + panel_offset(row, unit % 8), x.reshape(CHUNK, -1, 8))

    def read_tile(self, tile: int, columns: int) -> Array:
        row, unit = np.meshgrid(np.arange(CHUNK), np.arange(columns // 8), indexing="ij")
        found = self.memory.load(tile + unit // 8 * PANEL + panel_offset(row, unit % 8), 8)
        return found.reshape(CHUNK, columns)

    def read_scores(self) -> Array:
        """P as forward/walker.cuh reads it."""
        if not self.mirrors:
            return self.read_tile(self.p_at, CHUNK)
        row, unit = np.meshgrid(np.arange(CHUNK + BLOCK), np.arange(CHUNK // 8), indexing="ij")
        panel = self.memory.load(self.p_at + panel_offset(row, unit), 8).reshape(CHUNK + BLOCK, CHUNK)
        p = np.zeros((CHUNK, CHUNK))
        for i in range(BLOCKS):
            rows, low = BLOCK * (i + 1), panel[BLOCK * (BLOCKS - i) :, BLOCK * (BLOCKS - 1 - i) :]
            p[BLOCK * i :][:BLOCK, :rows] = (panel[:rows, BLOCK * i :][:, :BLOCK] + low[:, :BLOCK]).T
        return p

    def _load_gates(self, g: Array) -> None:
        """walk.cuh: boxes of all tokens, or of 16-bit gates those of a block."""
        for part in range(self.parts):
            x, to = g[:, 64 * part :][:, :64], self.work_at + part * BLOCKS * BLOCK_BYTES
            if not self.short:
                self.memory.store_wide(to + np.arange(CHUNK) * 256, x)
                continue
            for block in range(BLOCKS):
                rows = to + block * BLOCK_BYTES + SHORT_GATES + np.arange(BLOCK) * 128
                self.memory.store(rows, x[BLOCK * block :][:BLOCK])

    def run(self) -> None:
        """The steps of all warps of the team."""
        warps = [self._begin(n % BLOCKS, n // BLOCKS) for n in range(BLOCKS * self.parts)]
        for n, x in enumerate(warps):
            self._publish(x, n % BLOCKS, n // BLOCKS)
        self.operands = [self._scale_operands(x, n % BLOCKS, n // BLOCKS) for n, x in enumerate(warps)]
        for n, x in enumerate(warps):
            self._make_scores(x, n, len(warps))
        for x, operands in zip(warps, self.operands, strict=True):
            for n, (query, key) in enumerate(operands):
                self.memory.store(x.at(x.q, n), query)
                self.memory.store(x.at(x.k, n), key)

    def _begin(self, block: int, part: int) -> Block:
        rows = part * PANEL + block * BLOCK * ROW
        work = self.work_at + (part * BLOCKS + block) * BLOCK_BYTES
        x = Block(self.memory, rows, self.k_at + rows, work, self.two_parts)
        make = x.around_middle if block in self.mild else x.by_levels
        make(self.short, self.tokens - block * BLOCK)
        return x

    def _totals(self, block: int, part: int) -> Array:
        return self.p_at + 48 * ROW + (part * 64 + block * self.dim_k) * 4 + 8 * LANE

    def _partial(self, block: int, i: int) -> Array:
        return self.p_at + (16 + block * 8) * ROW + 16 * LANE + 512 * i

    def _publish(self, x: Block, block: int, part: int) -> None:
        self.memory.store_wide(self._totals(block, part), x.total[0])
        for i in range(2):
            if part > 0:
                self.memory.store_wide(self._partial(block, i), x.p[i])

    def _scale_operands(self, x: Block, block: int, part: int) -> list[tuple[Array, Array]]:
        """Rows of levels 16 and 32; the operands of the walk, token by token."""
        t = [self.memory.load_wide(self._totals(i, part)) for i in range(BLOCKS)]
        if self.parts > 1 and part == 0:
            x.p += np.stack([self.memory.load_wide(self._partial(block, i), 4) for i in range(2)])
        one = np.ones_like(t[0])
        first, last = t[0] * t[1], t[2] * t[3]
        left, right = (t[2] if block == 3 else one), (t[1] if block == 0 else one)
        before = (first * left if block // 2 else t[0] if block == 1 else one) * self.scale
        behind = last * right if block // 2 == 0 else t[3] if block == 2 else one
        for n in range(BLOCK):
            self.memory.store_wide(x.first_rows.at(n), x.qf[n] if block % 2 else x.kg[n])
            level_32 = x.qf[n] * left if block // 2 else x.kg[n] * right
            self.memory.store_wide(x.second_rows.at(n), level_32)
        if block == 0:
            self.decay[64 * part :][:64] = (first * last).reshape(64)
        return [(x.qf[n] * before, x.kg[n] * behind) for n in range(BLOCK)]

    def _make_scores(self, x: Block, warp: int, warps: int) -> None:
        if warp < BLOCKS:
            self._store_scores(warp, warp, x.p)
        for n in range(warp, 6, warps):
            row, column = (2 * n + 1, 2 * n) if n < 2 else (n // 2 + 1, n % 2)
            rows, stride = (self.work_at, TOKEN) if n < 2 else (0, ROW)
            to_channels_32, to_part = (ROW, BLOCKS * BLOCK_BYTES) if n < 2 else (self.k_at, PANEL)
            a_rows = x.rows_of_a(rows + row * BLOCK * stride, stride)
            b_rows = x.rows_of_b(rows + column * BLOCK * stride, stride)
            c = np.zeros((2, 32, 4))
            for i in range(8 * self.parts):
                further = i // 4 % 2 * to_channels_32 + i // 8 * to_part
                a, b = (self.memory.wide_matrices((y ^ (i % 4 * 32)) + further) for y in (a_rows, b_rows))
                for half in range(2):
                    multiply_16(c[half], a, b[2 * half : 2 * half + 2])
            self._store_scores(row, column, c)
        if self.parts > 1 and warp == 6 and not self.mirrors:
            for row, column in ((1, 2), (1, 3), (2, 3)):
                self._store_scores(row, column, np.zeros((2, 32, 4)))

    def _store_scores(self, row: int, column: int, c: Array) -> None:
        """stmatrix of four."""
        x = [self.scale * c[i // 2][:, i % 2 * 2 :][:, :2] for i in range(4)]
        if self.mirrors:
            return self.store_parts(row, column, x)
        to = self.p_at + panel_offset(BLOCK * row + LANE % 16, 2 * column + LANE // 16)
        for i in range(4):
            self.memory.store(to[8 * i + FRAGMENT_ROW] + LANE % 4 * 4, x[i])

    def store_parts(self, row: int, column: int, x: list[Array]) -> None:
        """Transposed stmatrix of four, of both parts."""
        for to, part in (
            (self._lane_of_block(column, row), high),
            (self._lane_of_block(BLOCKS - row + column, BLOCKS - 1 - row), lambda y: y - high(y)),
        ):
            for i in range(4):
                for e in range(2):
                    at = to[8 * i + FRAGMENT_COLUMN + e] + 2 * FRAGMENT_ROW
                    self.memory.store(at, part(x[i][:, e : e + 1]))

    def _lane_of_block(self, row: int, column: int) -> Array:
        transposed_row = LANE % 8 + LANE // 16 * 8
        return self.p_at + panel_offset(BLOCK * row + transposed_row, 2 * column + LANE // 8 % 2)
