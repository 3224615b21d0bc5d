"""Chunks of GLA around their middle, with rounding where the choice of the form changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

CHUNK = 64
MILD_BITS = {"bf16": 80.0, "fp16": 4.0}  # on a side of a middle
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
ERRORS = {"bf16": 4.5e-3, "fp16": 6e-4}  # relative Frobenius


# How scores are made: levels; blocks of 16 around their middle, then levels; the chunk around its own. fla's:
# exactly within blocks of 16, of operands in tf32 between them.
FORMS = ("levels", "blocks", "chunk")
BLOCK = 16


def tf32(x: Tensor, times: float = 1.0) -> Tensor:
    """What a product in tf32 sees of fp32 numbers."""
    return ((times * x).float().view(torch.int32) & ~0x1FFF).view(torch.float32).double()


def walk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, dtype: torch.dtype | None, form: str, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """o and the last state of [T, K] and [T, V] in fp64, operands of every GEMM as the kernel rounds them.

    Of more than 128 channels as the kernel's launches take them. dtype None: nothing is rounded.
    """
    out, state = sums_of_walk(q[:, :128], k[:, :128], v, g[:, :128], dtype, form, scale)
    if q.shape[1] > 128:
        others, rest = sums_of_walk(q[:, 128:], k[:, 128:], v, g[:, 128:], dtype, form, scale)
        part = out if dtype is None or form == "fla" else left_part(out, dtype)
        out, state = part + others, torch.cat((state, rest))
    out = scale / (scale if form == "fla" else power_of_two_below(scale)) * out
    return out if dtype is None else out.to(dtype).double(), state


def power_of_two_below(scale: float) -> float:
    return float(2.0 ** np.floor(np.log2(scale)))


def left_part(out: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums [T, V] as the next launch finds them (part.cuh)."""
    if dtype == torch.float16:
        return out.float().double()
    tokens, columns = out.shape
    padded = torch.cat((out, out.new_zeros(-tokens % CHUNK, columns))).float()
    lanes = padded.reshape(-1, CHUNK // 8, 4, 2, columns)  # of a lane: every fourth pair of tokens
    largest = torch.where(lanes.isfinite(), lanes, 0.0).abs().amax((1, 3), keepdim=True)
    exponents = torch.frexp(largest.double())[1].clamp(min=-111)
    scaled = (lanes.double() * torch.exp2(15.0 - exponents)).half().double()
    return (scaled * torch.exp2(exponents - 15.0)).reshape(-1, columns)[:tokens]


def sums_of_walk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, dtype: torch.dtype | None, form: str, scale: float
) -> tuple[Tensor, Tensor]:
    """What a launch sums up for o, which its rest of the scale is yet to come to, and the last state."""

    def rounded(x: Tensor) -> Tensor:
        return x if dtype is None else x.to(dtype).double()

    of_operands = scale if form == "fla" else power_of_two_below(scale)
    state, out = torch.zeros(q.shape[1], v.shape[1], dtype=torch.float64), []
    for at in range(0, len(q), CHUNK):
        q_c, k_c, v_c, b = q[at:][:CHUNK], k[at:][:CHUNK], v[at:][:CHUNK], g[at:][:CHUNK].cumsum(0)
        if form == "chunk":
            behind = (b[-1] - b[CHUNK // 2 - 1]).div(np.log(2.0)).ceil().exp2()
            middle = b[-1] - behind.log()
            before = middle.exp()
            x, y = of_operands * q_c * (b - middle).exp(), k_c * (middle - b).exp()
            queries, keys = rounded(x), rounded(y)
            low = rounded(x - queries) @ keys.T + queries @ rounded(y - keys).T
            scores = (low + queries @ keys.T).tril()
        else:
            before, behind = torch.ones_like(b[0]), torch.ones_like(b[0])
            keys = rounded(k_c * (b[-1] - b).exp())
            if form == "fla":
                queries, scores = scale * rounded(q_c * b.exp()), of_fla(q_c, k_c, b)
            else:
                queries = rounded(of_operands * q_c * b.exp())
                scores = by_levels(q_c, k_c, b, dtype, 1 if form == "levels" else BLOCK)
            scores = of_operands * scores
        state = state * before[:, None]
        out.append(queries @ rounded(state) + rounded(scores) @ v_c)
        state = state if form == "chunk" else state * b[-1].exp()[:, None]
        state = (state + keys.T @ v_c) * behind[:, None]
    return torch.cat(out), state


def by_levels(q: Tensor, k: Tensor, b: Tensor, dtype: torch.dtype | None, first: int) -> Tensor:
    """Scores of a chunk, from level `first` on; below it, of blocks around their middle."""

    def operand(x: Tensor, of_block: bool) -> Tensor:  # of fp16 in two parts within a block
        return x if dtype is None or (of_block and dtype == torch.float16) else tf32(x, 1.0 + 0.72 / 2048)

    token = torch.arange(CHUNK)
    if first == 1:
        scores = torch.diag((q * k).sum(1))
    else:
        middle = b[token // first * first + first // 2 - 1]
        x, y = operand(q * (b - middle).exp(), True), operand(k * (middle - b).exp(), True)
        scores = torch.where(token[:, None] // first == token // first, (x @ y.T), 0.0).tril()
    for n in (m for m in (1, 2, 4, 8, 16, 32) if m >= first):
        last = b[token // (2 * n) * 2 * n + n - 1]
        right = (token // n % 2 == 1)[:, None]
        x = torch.where(right, q * (b - last).clamp(max=0.0).exp(), k * (last - b).clamp(max=0.0).exp())
        x = operand(x, n < BLOCK)
        of_level = right & ~right.T & (token[:, None] // (2 * n) == token // (2 * n))
        scores = scores + torch.where(of_level, x @ x.T, 0.0)
    return scores


def of_fla(q: Tensor, k: Tensor, b: Tensor) -> Tensor:
    token = torch.arange(CHUNK)
    seen = token[:, None] >= token
    decays = torch.where(seen[..., None], b[:, None] - b, -np.inf).exp()
    scores = torch.einsum("ic,jc,ijc->ij", q, k, decays)
    for at in range(BLOCK, CHUNK, BLOCK):
        first, rows = b[at], slice(at, at + BLOCK)
        x, y = tf32(q[rows] * (b[rows] - first).exp()), tf32(k[:at] * (first - b[:at]).exp())
        scores[rows, :at] = x @ y.T
    return scores


def gates(kind: str, limit: float, tokens: int, shape: tuple[int, int]) -> Tensor:
    """Log gates whose sum over every `tokens` is -limit; half: of the channels, 0 in the others."""
    rng = torch.Generator().manual_seed(0)
    x = torch.rand(shape, generator=rng, dtype=torch.float64)
    if kind == "alike":
        x = torch.ones_like(x)
    sides = x.reshape(-1, tokens, shape[1])
    if kind == "one token":
        sides = (sides == sides.amax(1, keepdim=True)).double()
    sides = -limit * sides / sides.sum(1, keepdim=True)
    if kind == "half":
        sides[:, :, ::2] = 0.0
    return sides.reshape(shape)


@pytest.mark.parametrize("tokens", [8, 16])
@pytest.mark.parametrize("kind", ["alike", "random", "one token", "half"])
@pytest.mark.parametrize("name", list(DTYPES))
def test_all_forms_are_accurate_where_the_choice_changes(name: str, kind: str, tokens: int) -> None:
    """The most that counts as mild, in sides of eight tokens (of blocks) and of two blocks (of the chunk)."""
    dtype, rng = DTYPES[name], torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(256, 64, generator=rng).to(dtype).double() for _ in range(3))
    limit = MILD_BITS[name] * float(np.log(2.0)) / (1 if tokens == 8 else 2)
    g = gates(kind, limit, tokens, (256, 64))
    truth = walk(q, k, v, g, None, "levels")[0]
    for form in FORMS[: 2 if tokens == 8 else 3]:
        error = (walk(q, k, v, g, dtype, form)[0] - truth).norm() / truth.norm()
        assert error < ERRORS[name], (form, error)


CLOSED = -40.0  # a log gate; fla's differences of sums of gates lose all digits with -inf


@pytest.mark.parametrize(
    "kind", ["none", "closed channels", "closed tokens", "closed blocks", "zero blocks", "fast"]
)
@pytest.mark.parametrize("name", list(DTYPES))
def test_o_is_as_accurate_as_fla_makes_it(name: str, kind: str) -> None:
    """Of gates that no middle of a chunk suits, and of none."""
    dtype, rng = DTYPES[name], torch.Generator().manual_seed(4)
    shape = (512, 128)
    q, k = (torch.randn(shape, generator=rng).to(dtype).double() for _ in range(2))
    v = torch.randn(512, 64, generator=rng).to(dtype).double()
    usual = torch.nn.functional.logsigmoid(torch.randn(shape, generator=rng, dtype=torch.float64) + 2)
    drawn = torch.rand(shape, generator=rng)
    of_block = drawn[::BLOCK].repeat_interleave(BLOCK, 0)
    odd_block = torch.arange(512)[:, None] // BLOCK % 2 == 1
    g = {
        "none": lambda: torch.zeros(shape, dtype=torch.float64),
        "closed channels": lambda: torch.where(drawn[0] < 0.5, CLOSED, usual / 16),
        "closed tokens": lambda: torch.where(drawn < 0.02, CLOSED, usual / 4),
        "closed blocks": lambda: torch.where(of_block < 0.3, CLOSED / 2, usual / 16),
        "zero blocks": lambda: torch.where(odd_block & (drawn[0] < 0.1), CLOSED / 2, 0.0).double(),
        "fast": lambda: 4 * usual,
    }[kind]()
    truth = walk(q, k, v, g, None, "levels", 128**-0.5)[0]
    errors = {
        form: float((walk(q, k, v, g, dtype, form, 128**-0.5)[0] - truth).norm() / truth.norm())
        for form in ("levels", "fla")
    }
    assert errors["levels"] < 1.01 * errors["fla"], errors


@pytest.mark.parametrize("size", [2.0**-8, 2.0**4])
def test_small_and_large_operands_keep_their_digits(size: float) -> None:
    """Of fp16, whose range is the smaller one."""
    rng = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(256, 64, generator=rng, dtype=torch.float64) for _ in range(3))
    q, k, v = (x.half().double() for x in (q * size, k * size, v))
    g = gates("random", MILD_BITS["fp16"] * float(np.log(2.0)) / 2, 16, (256, 64))
    truth = walk(q, k, v, g, None, "levels")[0]
    errors = {
        form: (walk(q, k, v, g, torch.float16, form)[0] - truth).norm() / truth.norm() for form in FORMS
    }
    assert max(errors.values()) < 1.3 * errors["levels"], errors


LARGEST_KEY = 2.0**11  # of fp16, that the form around the middle of a chunk is for


def error_of_large_keys(size: float, kind: str, form: str) -> float:
    """Of o, from fp16 keys of half this size to all of it, and the most that counts as mild."""
    rng, shape = torch.Generator().manual_seed(7), (256, 64)
    q, k, v = (torch.randn(shape, generator=rng) for _ in range(3))
    k = k.sign() * torch.rand(shape, generator=rng).add(1.0) * size / 2
    k[::7, ::5] = size
    q, k, v = (x.half().double() for x in (2.0**-9 * q, k, 2.0**-9 * v))
    g = gates(kind, MILD_BITS["fp16"] * float(np.log(2.0)) / 2, 16, shape)
    truth = walk(q, k, v, g, None, "levels")[0]
    return float((walk(q, k, v, g, torch.float16, form)[0] - truth).norm() / truth.norm())


@pytest.mark.parametrize("kind", ["alike", "random", "one token", "half"])
@pytest.mark.parametrize(
    ("form", "size"), [("chunk", 1.0), ("chunk", LARGEST_KEY), ("blocks", 2.0**15), ("levels", 2.0**15)]
)
def test_large_keys_of_fp16(form: str, size: float, kind: str) -> None:
    """Where gates are not mild they may be as large as fp16 has them."""
    assert error_of_large_keys(size, kind, form) < ERRORS["fp16"]


@pytest.mark.parametrize("kind", ["alike", "one token"])
def test_larger_keys_of_fp16_overflow_around_the_middle(kind: str) -> None:
    """From twice the largest ones on."""
    assert not np.isfinite(error_of_large_keys(2 * LARGEST_KEY, kind, "chunk"))


@pytest.mark.parametrize("shift", [0.0, 2.0, 6.0], ids=["fast", "usual", "slow"])
@pytest.mark.parametrize("name", list(DTYPES))
def test_the_last_state_has_the_error_of_rounded_keys(name: str, shift: float) -> None:
    """Of k e^{b_L - b}, whatever the form: with fast gates the last token, not rounded, counts most."""
    dtype, rng = DTYPES[name], torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(256, 64, generator=rng).to(dtype).double() for _ in range(3))
    g = torch.nn.functional.logsigmoid(torch.randn(256, 64, generator=rng, dtype=torch.float64) + shift)
    if name == "fp16":  # what counts as mild there
        g = g.clamp(min=-MILD_BITS[name] * float(np.log(2.0)) / 32)
    truth = walk(q, k, v, g, None, "levels")[1]
    levels, chunk = (
        (walk(q, k, v, g, dtype, form)[1] - truth).norm() / truth.norm() for form in ("levels", "chunk")
    )
    assert chunk < 1.01 * levels


@pytest.mark.parametrize("kind", ["usual", "slow", "closed tokens"])
@pytest.mark.parametrize("dim_k", [256, 192])
@pytest.mark.parametrize("name", list(DTYPES))
def test_o_of_two_launches_is_rounded_once(name: str, dim_k: int, kind: str) -> None:
    """As accurate as fla makes it, which takes all channels at once."""
    dtype, rng = DTYPES[name], torch.Generator().manual_seed(5)
    q, k = (torch.randn(512, dim_k, generator=rng).to(dtype).double() for _ in range(2))
    v = torch.randn(512, 64, generator=rng).to(dtype).double()
    shift = 6 if kind == "slow" else 2
    g = torch.nn.functional.logsigmoid(torch.randn(512, dim_k, generator=rng, dtype=torch.float64) + shift)
    if kind == "closed tokens":
        g = torch.where(torch.rand(g.shape, generator=rng) < 0.02, CLOSED, g / 4)
    scale = dim_k**-0.5
    truth = walk(q, k, v, g, None, "levels", scale)[0]
    # usual gates are no mild ones of fp16
    form = "levels" if kind == "closed tokens" or name == "fp16" else "chunk"
    ours, fla = (
        float((walk(q, k, v, g, dtype, of, scale)[0] - truth).norm() / truth.norm()) for of in (form, "fla")
    )
    assert ours < 1.01 * fla, (ours, fla)


def test_a_part_keeps_the_digits_of_small_numbers_and_infinities() -> None:
    """Beside far larger ones, of the same column or of others, and beside infinities."""
    rng = torch.Generator().manual_seed(6)
    x = torch.randn(100, 16, generator=rng, dtype=torch.float64)
    x[::3] *= 2.0**-24
    x[:, 5] *= 2.0**90
    x[:, 7] *= 2.0**-100
    x[40, 3], x[41, 4], x[:, 9] = torch.inf, -torch.inf, torch.inf
    x[:, 2] = 0.0
    found = left_part(x, torch.bfloat16)
    finite = x.isfinite()
    assert torch.equal(found[~finite], x[~finite])
    largest = torch.where(finite, x, 0.0).abs().amax(0)
    assert ((found - x).abs() <= 2.0**-11 * x.abs() + 2.0**-39 * largest)[finite].all()
