"""decode/sequence.cuh in NumPy, lane by lane: its indices, its registers and the rounding of its products."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating]

WARPS, BLOCK, PAIR = 8, 8, 2
LANE = np.arange(32)
G, T = LANE // 4, LANE % 4
TF32 = np.uint32(0xFFFFE000)


@dataclass(frozen=True)
class Config:
    """A kernel's template arguments and its tiling."""

    tokens: int  # 8 or 16
    wide: bool
    vector: bool
    wide_state: bool
    width: int
    warps: int

    @property
    def tiles(self) -> int:
        return self.tokens // 8

    @property
    def warp_columns(self) -> int:
        return 8 * self.width

    @property
    def columns(self) -> int:
        return self.warps * self.warp_columns

    @property
    def row_warps(self) -> int:
        return WARPS // self.warps

    def column(self, position: int | Array) -> Array:
        """Of V in the slice, at positions in shared memory."""
        position = np.asarray(position)
        if self.vector:
            return position
        own = position % self.warp_columns
        return position - own + own % self.width * 8 + own // self.width

    def position(self, warp: int) -> Array:
        """Of the lanes' first columns."""
        return warp % self.warps * self.warp_columns + G * self.width


@dataclass(frozen=True)
class Gates:
    """SequenceGates."""

    column: Array
    row: Array
    inter: Array
    floor: Array
    write: Array
    decay: float
    m: float


def truncated(x: Array) -> Array:
    """fp32 towards zero, as tensor cores add."""
    near = x.astype(np.float32)
    return np.where(np.abs(near) > np.abs(x), np.nextafter(near, np.float32(0)), near)


def operand(x: Array, has_low: bool) -> list[Array]:
    """The high part and, where there is one, the low part."""
    x = x.astype(np.float32)
    high = (x.view(np.uint32) & TF32).view(np.float32)
    if not has_low:
        assert np.array_equal(high, x), "an operand without a low part is no tf32 number"
        return [high]
    return [high, ((x - high).view(np.uint32) & TF32).view(np.float32)]


def multiply_tf32(d: Array, a: Array, b: Array) -> None:
    """mma.m16n8k8 on the registers of 32 lanes: d [32, 4] += a [32, 4] b [32, 2]."""
    left, right = np.zeros((16, 8)), np.zeros((8, 8))
    for n in range(4):
        left[G + n % 2 * 8, T + n // 2 * 4] = a[:, n]
    for n in range(2):
        right[T + 4 * n, G] = b[:, n]
    product = left @ right
    for n in range(4):
        d[:, n] = truncated(d[:, n].astype(np.float64) + product[G + n // 2 * 8, 2 * T + n % 2])


def multiply(d: Array, a: list[Array], b: list[Array]) -> None:
    for low in a[1:]:
        multiply_tf32(d, low, b[0])
    for low in b[1:]:
        multiply_tf32(d, a[0], low)
    multiply_tf32(d, a[0], b[0])


def log2_sigmoid(x: Array) -> Array:
    return (np.minimum(x, 0) - np.log1p(np.exp(-np.abs(x)))) / math.log(2)


def exp2(x: Array) -> Array:
    """exp2_of."""
    return np.exp2(np.asarray(x, np.float32))


def scan_gates(
    config: Config, i: Array, f: Array, m: float | None, scale: float, round_m: np.dtype | type
) -> Gates:
    tokens = len(i)
    i, f = i.astype(np.float64), f.astype(np.float64)
    log_i = np.full(config.tokens, -2e5 / math.log(2))
    log_f = np.zeros(config.tokens)
    log_i[:tokens] = log2_sigmoid(i) if m is None else np.maximum(i, -2e5) / math.log(2)
    log_f[:tokens] = np.maximum(log2_sigmoid(f), -2e5 / math.log(2))
    b = np.cumsum(log_f)
    a = log_i - b
    entering = 0.0 if m is None else m / math.log(2)
    row = -b if m is None else np.maximum(entering, np.maximum.accumulate(a))
    exact = (b + row)[tokens - 1]
    stored = 0.0 if m is None else float(np.float32(exact * math.log(2)).astype(round_m))
    end = b[tokens - 1] - stored / math.log(2)
    inter = np.float32(scale) * exp2(entering - row)
    with np.errstate(over="ignore"):
        return Gates(a, row, inter, exp2(-(b + row)), exp2(a + end), float(exp2(entering + end)), stored)


def score_parts(config: Config, query: Array, key: Array, dim_qk: int) -> Array:
    """[parts, t, j]."""
    parts = WARPS // config.tiles
    scores = np.full((parts, config.tokens, config.tokens), np.nan, np.float32)
    for warp in range(WARPS):
        tile, part = warp % config.tiles, warp // config.tiles
        sums = np.zeros((32, 4), np.float32)
        for row in range(part * BLOCK, dim_qk, parts * BLOCK):
            keys = np.zeros((32, 4), np.float32)
            for half in range(config.tiles):
                keys[:, half] = key[8 * half + G, row + PAIR * T]
                keys[:, 2 + half] = key[8 * half + G, row + PAIR * T + 1]
            multiply(sums, operand(keys, config.wide), queries_of(config, query, tile, row))
        for half in range(config.tiles):
            scores[part, 8 * tile + 2 * T, 8 * half + G] = sums[:, 2 * half]
            scores[part, 8 * tile + 2 * T + 1, 8 * half + G] = sums[:, 2 * half + 1]
    return scores


def queries_of(config: Config, query: Array, tile: int, row: int) -> list[Array]:
    pair = [query[8 * tile + G, row + PAIR * T + n] for n in range(2)]
    return operand(np.stack(pair, 1), config.wide)


def run(
    config: Config,
    q: Array,
    k: Array,
    v: Array,
    i: Array,
    f: Array,
    c: Array,
    n: Array,
    m: float | None,
    eps: float = 1e-6,
    normalize: bool = True,
    round_m: np.dtype | type = np.float32,
) -> tuple[Array, Array, Array, float]:
    """One head: q, k [S, K], v [S, V], i, f [S], c [K, V], n [K]; m is None with the sigmoid gate.

    Returns h [S, V] and c, n, m, in fp32 before they are stored. Elements of c that no thread writes, or two
    do, are NaN.
    """
    (tokens, dim_qk), dim_v = q.shape, v.shape[1]
    query, key = (np.zeros((config.tokens, 264), np.float32) for _ in range(2))
    query[:tokens, :dim_qk], key[:tokens, :dim_qk] = q, k
    scale = dim_qk**-0.5
    gates = scan_gates(config, i, f, m, scale, round_m)

    score = np.zeros((config.tokens, config.tokens), np.float32)
    for part in score_parts(config, query, key, dim_qk):
        score += part
    with np.errstate(over="ignore"):
        weights = exp2(gates.column[None, :] - gates.row[:, None])
    score = np.where(np.tri(config.tokens, dtype=bool), np.float32(scale) * weights * score, 0).astype(
        np.float32
    )
    divisor = np.ones(config.tokens, np.float32)
    n_next = n.astype(np.float32)
    if normalize:
        d = np.abs(score.sum(1) + gates.inter * (query[:, :dim_qk] @ n_next))
        divisor = np.maximum(d, gates.floor) + np.float32(eps)
        n_next = np.float32(gates.decay) * n_next + gates.write @ key[:, :dim_qk]

    h = np.full((tokens, dim_v), np.nan, np.float32)
    c_next = np.full((dim_qk, dim_v), np.nan, np.float32)
    for first in range(0, dim_v, config.columns):
        value = np.zeros((config.tokens, config.columns), np.float32)
        columns = first + config.column(np.arange(config.columns))
        inside = columns < dim_v
        value[:tokens, inside] = v[:, columns[inside]]
        sums = np.full((config.row_warps, config.tokens, config.columns), np.nan, np.float32)
        for warp in range(WARPS):
            _run_warp(config, warp, first, value, query, key, score, gates, c, c_next, sums)
        found = sums[0]
        for part in sums[1:]:
            found = found + part
        h[:, columns[inside]] = (found / divisor[:, None])[:tokens, inside]
    return h, c_next, n_next, gates.m


def _run_warp(
    config: Config,
    warp: int,
    first: int,
    value: Array,
    query: Array,
    key: Array,
    score: Array,
    gates: Gates,
    c: Array,
    c_next: Array,
    out: Array,
) -> None:
    dim_qk, dim_v = c.shape
    row_warp, position = warp // config.warps, config.position(warp)
    first_column = first + config.column(position)
    step = 1 if config.vector else 8
    products = config.width // 2

    values = np.zeros((products, config.tiles, 32, 4), np.float32)
    for product in range(products):
        for tile in range(config.tiles):
            for n in range(4):
                values[product, tile, :, n] = value[8 * tile + T + n // 2 * 4, position + 2 * product + n % 2]
    values_of = [[operand(x, config.wide) for x in own] for own in values]

    sums = np.zeros((products, config.tiles, 32, 4), np.float32)
    for row in range(row_warp * BLOCK, dim_qk, config.row_warps * BLOCK):
        old = np.zeros((PAIR, config.width, 32), np.float32)
        places = []
        for second in range(PAIR):
            for n in range(config.width):
                rows, columns = row + PAIR * T + second, first_column + step * n
                # a word is moved as a whole
                fits = first_column < dim_v if config.vector else columns < dim_v
                exists = fits & (rows < dim_qk)
                old[second, n, exists] = c[rows[exists], columns[exists]]
                places.append((second, n, rows[exists], columns[exists], exists))
        queries = [queries_of(config, query, tile, row) for tile in range(config.tiles)]
        keys = []
        for tile in range(config.tiles):
            scaled = [
                gates.write[8 * tile + 4 * half + T] * key[8 * tile + 4 * half + T, row + G]
                for half in range(2)
            ]
            keys.append(operand(np.stack(scaled, 1), True))
        result = np.zeros_like(old)
        for product in range(products):
            written = np.zeros((32, 4), np.float32)
            for tile in range(config.tiles):
                multiply(written, values_of[product][tile], keys[tile])
            columns_of = np.zeros((32, 4), np.float32)
            for which in range(4):
                second, column = which // 2, 2 * product + which % 2
                x = old[second, column]
                columns_of[:, which] = x
                exact = gates.decay * x.astype(np.float64) + written[:, which % 2 * 2 + second]
                result[second, column] = exact.astype(np.float32)
            for tile in range(config.tiles):
                multiply(sums[product, tile], operand(columns_of, config.wide_state), queries[tile])
        for second, n, rows, columns, exists in places:
            assert np.isnan(c_next[rows, columns]).all(), "an element that two threads write"
            c_next[rows, columns] = result[second, n, exists]

    for tile in range(config.tiles):
        for n in range(4):
            sums[:, tile, :, n] *= gates.inter[8 * tile + 2 * T + n % 2]
    if row_warp == 0:
        for of_t in range(config.tiles):
            for of_j in range(of_t + 1):
                own = [score[8 * of_t + G, 8 * of_j + T + 4 * n] for n in range(2)]
                for product in range(products):
                    multiply(sums[product, of_t], values_of[product][of_j], operand(np.stack(own, 1), True))
    for tile in range(config.tiles):
        for second in range(2):
            for product in range(products):
                for n in range(2):
                    place = position + 2 * product + n
                    out[row_warp, 8 * tile + 2 * T + second, place] = sums[product, tile, :, 2 * n + second]
