"""channel_gate/backward/states in NumPy, lane by lane but what later blocks write to the state.

Numbers are those of fp64, or operands and results are rounded as the kernels round them. What TMA reads and
writes of a panel is taken from the panel's layout.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from .gla_emulation import (
    BLOCK,
    FRAGMENT_COLUMN,
    FRAGMENT_ROW,
    LANE,
    ROW,
    Array,
    Memory,
    multiply_16,
    panel_offset,
)

CHANNELS = 64
PANEL, FLOAT_ROW, OUT_ROW = BLOCK * ROW, 256, 68 * 4  # bytes
GROUP = 4  # readers that make_results takes at a time
GROUPS = BLOCK // GROUP
CLOSED = 2.0**-30  # a gate that lets through less
ANCHOR = 8 * 64  # tokens from one to the next
BY_LANES = 3  # blocks that write to the state lane by lane; the others would only take time
# where lanes find their rows for ldmatrix in a panel: lane_by_tokens and lane_by_columns
BY_TOKENS = (LANE // 16 * 8 + LANE % 8) * ROW + ((LANE // 8 % 2) ^ (LANE % 8)) * 16
BY_COLUMNS = LANE % 16 * ROW + ((LANE // 16) ^ (LANE % 8)) * 16
WALKER_V = 128  # columns of V of a walker, at most; two walkers split what is more


@dataclass(frozen=True)
class Rounding:
    """To a dtype of 16 bits; None: none."""

    dtype: torch.dtype | None = None

    def __call__(self, x: Array) -> Array:
        return x if self.dtype is None else torch.from_numpy(x).to(self.dtype).double().numpy()

    def parts(self, x: Array) -> tuple[Array, Array]:
        """High and low."""
        high = self(x)
        return high, self(x - high)

    def of_both(self, x: Array) -> Array:
        """The sum of both parts."""
        high, low = self.parts(x)
        return high + low


@dataclass
class Places:
    """Addresses of a unit's tiles; `of_readers` and `of_writers` have `panels`."""

    panels: int
    readers: int = 0
    writers: int = PANEL  # and room for a part of `out`
    gates: int = 3 * PANEL
    inflow: int = 5 * PANEL
    out: int = 7 * PANEL
    products: int = 10 * PANEL
    of_readers: int = 11 * PANEL

    @property
    def of_writers(self) -> int:
        return self.of_readers + self.panels * PANEL

    @property
    def size(self) -> int:
        return self.of_writers + self.panels * PANEL


class Unit:
    """gates.cuh: a warp's block of 16 tokens and 64 channels."""

    def __init__(self, left: bool, dim_v: int, rounding: Rounding) -> None:
        self.left, self.rounding = left, rounding
        self.at = Places(-(-dim_v // 64))
        self.memory = Memory(self.at.size)
        # where the walkers' parts of what readers see are; two are in place of other tiles
        self.in_place = dim_v > WALKER_V
        self.parts = (self.at.gates, self.at.writers) if self.in_place else (self.at.out,)
        self.a = np.full((BLOCK, 32, 2), np.nan)
        self.writer = np.full((BLOCK, 32, 2), np.nan)

    # what TMA and wgmma see

    def store_panels(self, place: int, x: Array) -> None:
        padded = np.zeros((BLOCK, -(-x.shape[1] // 64) * 64))
        padded[:, : x.shape[1]] = x
        row, unit = np.meshgrid(np.arange(BLOCK), np.arange(padded.shape[1] // 8), indexing="ij")
        at = place + unit // 8 * PANEL + panel_offset(row, unit % 8)
        self.memory.store(at, padded.reshape(BLOCK, -1, 8))

    def read_panel(self, place: int) -> Array:
        row, unit = np.meshgrid(np.arange(BLOCK), np.arange(8), indexing="ij")
        return self.memory.load(place + panel_offset(row, unit), 8).reshape(BLOCK, CHANNELS)

    def store_rows(self, place: int, x: Array, short: bool = False) -> None:
        if short:
            self.memory.store(place + np.arange(BLOCK) * ROW, x)
        else:
            self.memory.store_wide(place + np.arange(BLOCK) * FLOAT_ROW, x)

    def read_rows(self, place: int, short: bool = False) -> Array:
        if short:
            return self.memory.load(place + np.arange(BLOCK) * ROW, CHANNELS)
        return self.memory.load_wide(place + np.arange(BLOCK) * FLOAT_ROW, CHANNELS)

    # the walkers

    def see_state(self, state: Array, first_column: int) -> Array:
        """What walker.cuh's walk_tile of four warps adds up: [16 tokens, 64 channels].

        Args:
            state: of the walker's columns of V, from first_column on.
        """
        of_readers = self.at.of_readers + first_column // 64 * PANEL + BY_TOKENS
        rounded, out = self.rounding.of_both(state), np.full((BLOCK, CHANNELS), np.nan)
        for warp in range(4):
            c = np.zeros((2, 32, 4))
            for tile in range(state.shape[1] // 16):
                values = self.memory.matrices((of_readers ^ (tile % 4 * 32)) + tile // 4 * PANEL)
                fragment = [
                    rounded[
                        (16 * warp + FRAGMENT_ROW + 8 * (i % 2))[:, None],
                        (16 * tile + FRAGMENT_COLUMN + 8 * (i // 2))[:, None] + np.arange(2),
                    ]
                    for i in range(4)
                ]
                for n in range(2):
                    multiply_16(c[n], fragment, values[2 * n : 2 * n + 2])
            for half, n, e in np.ndindex(2, 2, 2):
                out[8 * half + FRAGMENT_COLUMN + e, 16 * warp + 8 * n + FRAGMENT_ROW] = c[half][:, 2 * n + e]
        return out

    def write_state(self, state: Array, decay: Array, first_column: int) -> Array:
        """What walker.cuh's walk_tile of four warps makes of the state.

        Args:
            decay: over the block, [64]. state, first_column: as in see_state.
        """
        of_writers = self.at.of_writers + first_column // 64 * PANEL + BY_COLUMNS
        found = np.full_like(state, np.nan)
        for warp in range(4):
            places = (place + (BY_TOKENS ^ (32 * warp)) for place in (self.at.writers, self.at.gates))
            parts = [self.memory.matrices(place, transposed=True) for place in places]
            for tile, n in np.ndindex(state.shape[1] // 16, 2):
                at = (of_writers ^ (tile % 4 * 32)) + tile // 4 * PANEL
                values = self.memory.matrices(at, transposed=True)[2 * n : 2 * n + 2]
                rows = 16 * warp + FRAGMENT_ROW[:, None] + np.array([0, 0, 8, 8])
                columns = 16 * tile + 8 * n + FRAGMENT_COLUMN[:, None] + np.array([0, 1, 0, 1])
                c = state[rows, columns] * decay[rows]
                for part in parts:
                    multiply_16(c, part, values)
                found[rows, columns] = c
        return found

    def store_out(self, place: int, out: Array) -> None:
        """walker.cuh's store_out of four warps; out [16 tokens, 64 channels]."""
        row = FLOAT_ROW if self.in_place else OUT_ROW
        first_token = LANE % 4 * 2
        swizzle = first_token // 2 % 4 * 32 if self.in_place else 0
        for warp in range(4):
            address = place + first_token * row + LANE // 4 * 4
            for k in range(4):
                for e in range(2):
                    channel = 16 * warp + FRAGMENT_ROW + 8 * (k % 2)
                    token = FRAGMENT_COLUMN + 8 * (k // 2) + e
                    to = address + (k // 2 * 8 + e) * row + ((64 * warp + 32 * (k % 2)) ^ swizzle)
                    self.memory.store_wide(to, out[token, channel][:, None])

    def own_out(self, place: int, t: int) -> Array:
        """Where a lane's two channels of a token are."""
        if self.in_place:
            return place + t * FLOAT_ROW + ((8 * LANE) ^ (t // 2 % 4 * 32))
        return place + t * OUT_ROW + 8 * LANE

    # the warp's steps

    def token(self, n: int) -> int:
        return n if self.left else BLOCK - 1 - n

    @staticmethod
    def column_of(rows: int, t: int) -> Array:
        return rows + ((4 * LANE) ^ (t % 8 * 16)) + t * ROW

    @staticmethod
    def floats_of(rows: int, t: int) -> Array:
        return rows + 8 * LANE + t * FLOAT_ROW

    def load_gates(self, short: bool) -> None:
        for t in range(BLOCK):
            at = self.at.gates + 4 * LANE + t * ROW if short else self.floats_of(self.at.gates, t)
            self.a[t] = np.exp(self.memory.load(at) if short else self.memory.load_wide(at))

    def scale_writers(self, scale: float) -> Array:
        """Returns the product over the block, [64]."""
        for t in range(BLOCK):
            self.writer[t] = self.memory.load(self.column_of(self.at.writers, t))
        product = np.ones((32, 2))
        for n in range(BLOCK):
            t = BLOCK - 1 - self.token(n)
            if not self.left:
                product = product * self.a[t]
            by = product if self.left else product * scale
            high, low = self.rounding.parts(self.writer[t] * by)
            self.memory.store(self.column_of(self.at.writers, t), high)
            self.memory.store(self.column_of(self.at.gates, t), low)
            if self.left:
                product = product * self.a[t]
        return product.reshape(CHANNELS)

    def multiply_values(self, dim_v: int, scale: float) -> None:
        a_rows = self.at.of_readers + LANE % 16 * ROW + ((LANE // 16) ^ (LANE % 8)) * 16
        b_rows = self.at.of_writers + (LANE // 16 * 8 + LANE % 8) * ROW + ((LANE // 8 % 2) ^ (LANE % 8)) * 16
        c = np.zeros((2, 32, 4))
        for i in range(-(-dim_v // 64) * 4):
            x, y = (self.memory.matrices((rows ^ (i % 4 * 32)) + i // 4 * PANEL) for rows in (a_rows, b_rows))
            for n in range(2):
                multiply_16(c[n], x, y[2 * n : 2 * n + 2])
        place = self.at.products + LANE // 4 * 64 + LANE % 4 * 8
        for i in range(4):
            at = place + i % 2 * (8 * 64) + i // 2 * 32
            self.memory.store_wide(at, scale * c[i // 2][:, i % 2 * 2 :][:, :2])

    def make_results(self, scale: float) -> Array:
        """Returns the sums of q dq - k dk over the block (right), as a lane has them."""
        self.through, self.sum = np.full((32, 2), scale if self.left else 1.0), np.zeros((32, 2))
        fades = [
            self.a[n] if self.left else self.a[BLOCK - n] if n else np.ones((32, 2)) for n in range(BLOCK)
        ]
        self.fade, *self.others = (fades[n : n + GROUP] for n in range(0, BLOCK, GROUP))
        self.waiting = [self.writer[self.token(n)] for n in range(BLOCK)]
        for group in range(GROUPS):
            through, writers = self._make_group(group)
            self._go_on(group, through, writers)
        return self.sum

    def _first_token(self, group: int) -> int:
        return GROUP * (group if self.left else GROUPS - 1 - group)

    def _of(self, e: int) -> int:
        """Where the e-th reader of a group is behind the group's first token."""
        return e if self.left else GROUP - 1 - e

    def _make_group(self, group: int) -> tuple[Array, list[Array]]:
        """Returns the product of the group's gates and its writers, faded up to its last token."""
        first, of = self._first_token(group), [self._of(e) for e in range(GROUP)]
        rows = self.at.products + first * (BLOCK + 1) * 4
        before = [self.through * self.seen(first + of[e]) for e in range(GROUP)]
        for back in range(1, group + 1):
            for e in range(GROUP):
                at = np.array(rows + of[e] * BLOCK * 4 + (-16 if self.left else 16) * back)
                by = self.memory.load_wide(at, 4)
                for w in range(GROUP):
                    before[e] = before[e] + by[of[w]] * self.others[GROUPS - 1 - back][w]
        writers: list[Array] = []
        through = np.ones((32, 2))
        for e in range(GROUP):
            through = through * self.fade[e]
            writers = [*(writer * self.fade[e] for writer in writers), self.waiting[e]]
            by = self.memory.load_wide(np.array(rows + of[e] * BLOCK * 4), 4)
            x = through * before[e]
            for w in range(e):
                x = x + by[of[w]] * writers[w]
            result = x + by[of[e]] * writers[e]
            r = first + of[e]
            own = self.memory.load(self.column_of(self.at.readers, r))
            self.memory.store(self.column_of(self.at.readers, r), self.rounding(result))
            product = own * x
            if not self.left:
                given = self.memory.load_wide(self.floats_of(self.at.inflow, r))
                product = self.sum = self.sum + given - product
            self.memory.store_wide(self.floats_of(self.at.gates if self.left else self.at.inflow, r), product)
        self.through = self.through * through
        return through, writers

    def _go_on(self, group: int, through: Array, writers: list[Array]) -> None:
        """From a group to the next one: others has fades of those to come, then writers of those before."""
        self.fade, *rest = self.others
        self.others = [
            [x * through for x in others] if group > GROUPS - 3 - i else others
            for i, others in enumerate(rest)
        ]
        self.others.append(writers)
        self.waiting = self.waiting[GROUP:]

    def seen(self, t: int) -> Array:
        """Of the state, by all walkers."""
        first, *rest = (self.memory.load_wide(self.own_out(place, t)) for place in self.parts)
        return first + rest[0] if rest else first

    # slices.cuh

    def leave_sums(self) -> tuple[Array, Array]:
        """A lane's two channels of what readers see, of every token, and its eight products."""
        out = [self.seen(t) for t in range(BLOCK)]
        products = [self.memory.load_wide(self.at.products + 512 * n + 16 * LANE, 4) for n in range(2)]
        return np.stack(out), np.stack(products)

    def add_out(self, others: Array) -> None:
        for t in range(BLOCK):
            at = self.own_out(self.parts[0], t)
            self.memory.store_wide(at, self.memory.load_wide(at) + others[t])

    def add_products(self, others: Array) -> None:
        for n in range(2):
            at = self.at.products + 512 * n + 16 * LANE
            self.memory.store_wide(at, self.memory.load_wide(at, 4) + others[n])

    def store_sums(self, carry: Array, short: bool) -> Array:
        """Returns what of the carry is left for the tokens before the block."""
        for n in range(BLOCK):
            t = self.token(n)
            x = self.memory.load_wide(self.floats_of(self.at.inflow, t))
            carry = np.where(self.a[t] < CLOSED, -x, carry)
            if short:
                self.memory.store(self.at.gates + 4 * LANE + t * ROW, x + carry)
            else:
                self.memory.store_wide(self.floats_of(self.at.gates, t), x + carry)
        return carry


@dataclass
class Walk:
    """A walk over a sequence of one head's 64 channels: q, k, g [T, 64], v, do [T, V]; its results.

    Attributes:
        state: [64, V], S or dS. result: dq or dk. sums: q dq, or dg.
        flow: what the left walk leaves for the other one's begin, [64].
        is_first, is_last: of the launches for slices of V. handed: by block, from slice to slice.
    """

    left: bool
    scale: float
    short: bool
    state: Array
    result: Array
    sums: Array
    anchors: dict[int, Array]
    flow: Array | None = None
    rounding: Rounding = Rounding()
    is_first: bool = True
    is_last: bool = True
    handed: dict[int, tuple[Array, ...]] = field(default_factory=dict)

    def run(self, q: Array, k: Array, g: Array, v: Array, do: Array) -> None:
        readers, writers = (q, k) if self.left else (k, q)
        of_readers, of_writers = (do, v) if self.left else (v, do)
        tokens, dim_v = v.shape
        blocks = -(-tokens // BLOCK)
        carry = np.zeros((32, 2)) if self.flow is None else self.flow.reshape(32, 2)
        for step in range(blocks):
            block = step if self.left else blocks - 1 - step
            rows = slice(BLOCK * block, min(BLOCK * (block + 1), tokens))
            x = Unit(self.left, dim_v, self.rounding)
            for place, tile in (
                (x.at.readers, readers if self.is_last else np.full_like(readers, np.nan)),
                (x.at.writers, writers),
                (x.at.of_readers, of_readers),
                (x.at.of_writers, of_writers),
            ):
                x.store_panels(place, _padded(tile[rows]))
            x.store_rows(x.at.gates, _padded(g[rows]), self.short)
            if not self.left and self.is_last:
                x.store_rows(x.at.inflow, _padded(self.sums[rows]))
            x.load_gates(self.short)
            decay = x.scale_writers(self.scale)
            x.multiply_values(dim_v, self.scale)
            if not self.is_first:
                x.add_products(self.handed[block][1])
            end = BLOCK * (block + 1)
            if self.left and block and BLOCK * block % ANCHOR == 0:
                self.anchors[BLOCK * block] = self.rounding(self.state)
            if not self.left and end < tokens and end % ANCHOR == 0:
                carry = (self.anchors[end] * self.state).sum(1).reshape(32, 2)
                if not self.is_first:
                    carry = carry + self.handed[block][2]
            columns = [slice(WALKER_V * n, WALKER_V * (n + 1)) for n in range(len(x.parts))]
            seen = [x.see_state(self.state[:, own], own.start) for own in columns]
            if step < BY_LANES:
                parts = [x.write_state(self.state[:, own], decay, own.start) for own in columns]
                self.state = np.concatenate(parts, axis=1)
            else:
                written = x.read_panel(x.at.writers) + x.read_panel(x.at.gates)
                self.state = decay[:, None] * self.state + written.T @ _padded(of_writers[rows])
            for place, out in zip(x.parts, seen, strict=True):
                x.store_out(place, out)
            if not self.is_first:
                x.add_out(self.handed[block][0])
            if not self.is_last:
                self.handed[block] = (*x.leave_sums(), carry)
                continue
            total = x.make_results(self.scale)
            if not self.left:
                carry = x.store_sums(carry, self.short) + total
            count = rows.stop - rows.start
            self.result[rows] = x.read_panel(x.at.readers)[:count]
            self.sums[rows] = x.read_rows(x.at.gates, self.short and not self.left)[:count]


def _padded(x: Array) -> Array:
    """With rows of zeros to a block."""
    found = np.zeros((BLOCK, x.shape[1]))
    found[: len(x)] = x
    return found


def sum_of_segment(
    forward: bool, scale: float, keys: Array, g: Array, values: Array, rounding: Rounding
) -> tuple[Array, Array]:
    """segments/sums.cuh: what a segment adds to the state at its end, or dS at its begin, and its decay.

    Args:
        keys: k, or q backward in time. values: v, or do.
    """
    state, through = np.zeros((CHANNELS, values.shape[1])), np.ones(CHANNELS)
    blocks = -(-len(keys) // BLOCK)
    for step in range(blocks):
        block = step if forward else blocks - 1 - step
        rows = slice(BLOCK * block, BLOCK * (block + 1))
        x = Unit(forward, values.shape[1], rounding)
        x.store_panels(x.at.writers, _padded(keys[rows]))
        x.store_rows(x.at.gates, _padded(g[rows]))
        x.load_gates(False)
        decay = x.scale_writers(scale)
        written = x.read_panel(x.at.writers) + x.read_panel(x.at.gates)
        state = decay[:, None] * state + written.T @ _padded(values[rows])
        through = through * decay
    return state, through
