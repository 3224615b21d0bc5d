"""Why the walks over the states round as they do for dg: an emulation. The kernels' dg is tested in
tests/gpu/test_delta_accuracy.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize, softplus

from tests.conftest import LEAST_LOG_GATE
from tfla_tk.core.layout import ANCHOR_CHUNKS, CHUNK, DELTA_ANCHOR_CHUNKS, SEGMENT_CHUNKS
from tfla_tk.reference import gated_delta_rule_chunkwise

Formulas = Callable[..., Any]
HEADS, TOKENS = 4, 1280
OPEN = 60.0  # an input gate that is 1
CLOSED = -30 * math.log(2)  # ScalarDecay::kClosed
LEAST_KEPT, LEAST_WRITTEN = 1 / 4, 1 / 64  # hardly_decays, hardly_writes in kernels/delta_rule/gates.cuh


class Inputs(NamedTuple):
    """[H, T, D] and [H, T]; the log decay is `times` logsigmoid(raw)."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    do: Tensor


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype)


def exact(x: Tensor) -> Tensor:
    return x


def draw(
    dim: int, *, forget_bias: float = 3.0, times: float = 1.0, tokens: int = TOKENS, seed: int = 0
) -> Inputs:
    """As the benchmark draws them."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(HEADS, tokens, *size, generator=generator)

    q, k = (rounded(normalize(rounded(normal(dim)), dim=-1)) for _ in range(2))
    g = times * logsigmoid(normal() + forget_bias)
    return Inputs(q, k, rounded(normal(dim)), g, torch.sigmoid(normal()), rounded(normal(dim)))


def truth_of(x: Inputs) -> Tensor:
    """dg in fp64."""
    q, k, v, g, beta, do = (t.double()[None].transpose(1, 2) for t in x)
    g.requires_grad_()
    o, _ = gated_delta_rule_chunkwise(q, k, v, g, beta)
    return torch.autograd.grad(o, g, do)[0][0].mT


class Walks:
    """Both directions chunk by chunk, with S of the forward and dS of the mirror at borders between segments.
    Where the mirror makes the right part of dk, the parts through dS have its dS everywhere.

    Attributes:
        round: what is done to every operand that the kernels round.
        consistent: the parts through the states have the operands that the states are made of.
        adds_dropped: where little decays the right walk also adds what rounding has dropped of q and k to dS.
        right_made: the mirror makes the right part of dk, and the left walk computes the flows.
        terms: what the mirror adds of dO to dS: rounded once, or also the rest, rounded.
        written: what U' is multiplied by in the writes; a decay to the chunk's end is part of it from
            `least_kept` on.
        o, dq, left_of_dk, dk: [H, T, D].
        q_dq, k_dk: whole and inter, as the formulas of the gates' kernel take them.
        after, before: flows at the anchors, by chunk.
    """

    def __init__(
        self,
        x: Inputs,
        round: Callable[[Tensor], Tensor],
        *,
        consistent: bool,
        every: int,
        right_made: bool,
        terms: int,
        least_kept: float = LEAST_KEPT,
        adds_dropped: bool = True,
    ) -> None:
        self.round, self.consistent, self.every = round, consistent, every
        self.right_made, self.terms = right_made, terms
        kind = torch.float32 if round is rounded else torch.float64
        self.q, self.k, self.v, g, beta, self.do = (t.to(kind).unflatten(1, (-1, CHUNK)) for t in x)
        self.chunks, self.scale = g.shape[1], x.q.shape[-1] ** -0.5
        self.beta = beta[..., None]
        b = g.double().cumsum(-1)
        difference = b[..., :, None] - b[..., None, :]
        later = torch.ones(CHUNK, CHUNK, dtype=torch.bool).triu(1)
        self.gates = difference.masked_fill(later, -torch.inf).exp().to(kind)
        self.read, self.kept = (t.exp().to(kind)[..., None] for t in (b, b[..., -1:] - b))
        # the parts of beta times the decay to the chunk's end: in the writes, and beside them
        decays, writes = self.kept < least_kept, self.beta.abs() >= LEAST_WRITTEN
        one = torch.ones_like(self.kept)
        self.written = self.beta.where(writes, one) * one.where(decays, self.kept)
        self.update = one.where(writes, self.beta) * self.kept.where(decays, one)
        self.decay = b[..., -1:].exp().to(kind)[..., None]
        self.adds_dropped = adds_dropped & (self.decay >= LEAST_KEPT) & (self.decay < 1)
        self.state = torch.zeros(HEADS, x.q.shape[-1], x.v.shape[-1], dtype=kind)
        self.run()

    def run(self) -> None:
        strict = (self.k @ self.k.mT * self.gates).tril(-1)
        one = torch.eye(CHUNK, dtype=strict.dtype)
        a = -torch.linalg.solve_triangular(one + strict * self.beta.mT, strict, upper=False)
        a, p = self.round(a), self.round(self.scale * self.q @ self.k.mT * self.gates)
        self.forward(a, p)
        self.mirror(a, p)
        gates = self.gates * (self.beta / self.written).mT
        self.reads = self.round(self.scale * gates * (self.do @ self.writes.mT))
        self.erasures = self.round(-(gates * (self.dv @ self.writes.mT)).tril(-1))
        self.left()
        self.right()

    def forward(self, a: Tensor, p: Tensor) -> None:
        state, writes, o = self.state, [], []
        self.borders: dict[int, Tensor] = {}
        for c in range(self.chunks):
            if c % SEGMENT_CHUNKS == 0:
                self.borders[c] = state
            w = self.v[:, c] - self.read[:, c] * (self.k[:, c] @ self.round(state))
            u = w + a[:, c] @ self.round(self.beta[:, c] * w)
            writes.append(self.round(self.written[:, c] * u))
            read = self.scale * self.read[:, c] * (self.q[:, c] @ self.round(state))
            o.append(read + p[:, c] @ self.round(self.beta[:, c] * u))
            added = self.round(self.beta[:, c] * self.kept[:, c] * u)
            state = self.decay[:, c] * state + self.k[:, c].mT @ added
        self.writes, self.o = torch.stack(writes, 1), torch.cat(o, 1)

    def mirror(self, a: Tensor, p: Tensor) -> None:
        state, dv = self.state, []
        self.ends: dict[int, Tensor] = {}
        for c in reversed(range(self.chunks)):
            if self.right_made or c == self.chunks - 1 or (c + 1) % SEGMENT_CHUNKS == 0:
                self.ends[c] = state
            du = p[:, c].mT @ self.do[:, c] + self.kept[:, c] * (self.k[:, c] @ self.round(state))
            dy = du + a[:, c].mT @ self.round(self.beta[:, c] * du)
            dv.append(self.round(self.beta[:, c] * dy))
            scaled = self.scale * self.read[:, c] * self.do[:, c]
            read = self.round(scaled)
            if self.terms == 2:
                read = read + self.round(scaled - read)
            erased = self.round(self.read[:, c] * self.beta[:, c] * dy)
            state = self.decay[:, c] * state + self.q[:, c].mT @ read - self.k[:, c].mT @ erased
        self.dv = torch.stack(dv[::-1], 1)

    def through(
        self, factor: Tensor, by: Tensor, result: Tensor, consistent: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The products with a result that is yet to be scaled: as they are summed for flows, and exact."""
        products = by * factor * result
        return (self.round(by * factor) * result).where(consistent, products), products

    def added_by_right(self, factors: Tensor, c: int) -> Tensor:
        """What of them a right walk adds to dS."""
        added = self.round(factors)
        return added + self.adds_dropped[:, c] * self.round(factors - added)

    def left(self) -> None:
        state, whole, inter, gradients, parts = self.state, [], [], [], []
        self.anchors = {}
        for c in range(self.chunks):
            state = self.borders.get(c, state)
            read = self.round(state)
            if c % self.every == 0:
                self.anchors[c] = state, read
            by = self.scale * self.read[:, c], -self.read[:, c]
            results = self.do[:, c] @ read.mT, self.dv[:, c] @ read.mT
            # else no rounded q and k are added to dS
            rounds = self.consistent & (not self.right_made) & ~self.adds_dropped[:, c]
            (of_reads, _), (of_erasures, _) = (
                self.through(factor[:, c], e, y, rounds)
                for factor, e, y in zip((self.q, self.k), by, results, strict=True)
            )
            inter.append(of_flow((of_reads + of_erasures).sum((1, 2)), of_erasures))
            dq = by[0] * results[0] + self.reads[:, c] @ self.k[:, c]
            left = by[1] * results[1] + self.erasures[:, c] @ self.k[:, c]
            gradients.append(dq)
            parts.append(left)
            whole.append((self.q[:, c] * dq + self.k[:, c] * left).sum(-1))
            added = self.round(self.update[:, c] * self.k[:, c])
            state = self.decay[:, c] * state + added.mT @ self.writes[:, c]
        self.dq, self.left_of_dk = torch.cat(gradients, 1), torch.cat(parts, 1)
        self.q_dq = torch.cat(whole, 1)[None], torch.stack(inter, 1)[None]

    def right(self) -> None:
        state, whole, inter, parts = self.state, [], [], []
        flows = torch.full((2, 1, HEADS, self.chunks // self.every + 1, 1), torch.nan, dtype=torch.float64)
        for c in reversed(range(self.chunks)):
            state = self.ends.get(c, state)
            read = self.round(state)
            if c + 1 in self.anchors:
                whole_s, read_s = self.anchors[c + 1]
                # the walk that computes them has its own state in fp32, too
                sides = (read_s, whole_s) if self.right_made else (read_s, read_s)
                gradients = (read, read) if self.right_made else (state, read)
                for of_side, x, y in zip(flows, sides, gradients, strict=True):
                    of_side[0, :, (c + 1) // self.every, 0] = (x * y).sum((1, 2))
            result = self.writes[:, c] @ read.mT
            rounds = torch.tensor(self.consistent)
            of_keys, of_exact = self.through(self.k[:, c], self.update[:, c], result, rounds)
            inter.append(of_flow(of_keys.sum((1, 2)), of_keys))
            right = self.update[:, c] * result
            right = right + self.reads[:, c].mT @ self.q[:, c] + self.erasures[:, c].mT @ self.k[:, c]
            parts.append(right)
            sums = (self.k[:, c] * right).sum(-1)
            sums[:, -1] += (of_keys - of_exact).sum((1, 2))
            whole.append(sums)
            queries = self.added_by_right(self.scale * self.read[:, c] * self.q[:, c], c)
            keys = self.added_by_right(-self.read[:, c] * self.k[:, c], c)
            added = queries.mT @ self.do[:, c] + keys.mT @ self.dv[:, c]
            state = self.decay[:, c] * state + added
        self.dk = self.left_of_dk + torch.cat(parts[::-1], 1)
        self.k_dk = torch.cat(whole[::-1], 1)[None], torch.stack(inter[::-1], 1)[None]
        self.after, self.before = flows


def of_flow(value: Tensor, products: Tensor) -> Tensor:
    """With the squares of the products of some columns."""
    return torch.stack([value, products[..., ::2].square().sum((1, 2))], -1)


@pytest.fixture
def dg_of_walks(gate_gradients: Formulas) -> Callable[..., Tensor]:
    """By walks with these options and the formulas of the gates' kernel."""

    def dg(x: Inputs, round: Callable[[Tensor], Tensor], options: Any) -> Tensor:
        sides, every = options["sides"], options["every"]
        others = {name: options[name] for name in ("consistent", "right_made", "terms")}
        walks = Walks(x, round, every=every, **others)
        # as of a sigmoid gate, whose gradient is divided by that of its logarithm
        open_part = -torch.expm1(x.g.double().clamp(max=-1e-12))
        f = (x.g.double() - torch.log(open_part))[None]
        i = torch.full_like(f, OPEN)
        ends = [torch.zeros(1, HEADS, dtype=torch.float64)] * 2
        before = walks.before if sides else None
        given = (walks.q_dq, walks.k_dk, walks.after, i, f, None, ends, [(0, x.g.shape[1])], before, every)
        found: Tensor = gate_gradients(*given)[1][0] / torch.sigmoid(-f[0])
        return found

    return dg


BUILT = {"consistent": True, "every": DELTA_ANCHOR_CHUNKS, "sides": True, "right_made": False, "terms": 1}


@pytest.fixture
def error_of_dg(dg_of_walks: Callable[..., Tensor]) -> Callable[..., float]:
    """Of walks with these options over all given inputs."""

    def difference(x: Inputs, truth: Tensor, round: Callable[[Tensor], Tensor], options: Any) -> float:
        return (dg_of_walks(x, round, options) - truth).square().sum().item()

    truths: dict[int, Tensor] = {}

    def error(draws: list[Inputs], round: Callable[[Tensor], Tensor] = rounded, **options: Any) -> float:
        options = BUILT | {"terms": 2 if options.get("right_made") else 1} | options
        for x in draws:
            if id(x) not in truths:
                truths[id(x)] = truth_of(x)
        own = [truths[id(x)] for x in draws]
        squares = [difference(x, truth, round, options) for x, truth in zip(draws, own, strict=True)]
        return (sum(squares) / sum(truth.square().sum().item() for truth in own)) ** 0.5

    return error


def draw_several(*args: Any, **options: Any) -> list[Inputs]:
    return [draw(*args, seed=seed, **options) for seed in range(3)]


PLAIN = {"consistent": False, "every": ANCHOR_CHUNKS, "sides": False}


@pytest.mark.parametrize("right_made", [False, True], ids=["walked", "made"])
@pytest.mark.parametrize("times", [1.0, 1e-3, 30.0])
def test_without_rounding_dg_is_exact(
    times: float, right_made: bool, error_of_dg: Callable[..., float]
) -> None:
    """The flows, followed from anchors on both sides, and the sums per token are those of the recurrence."""
    x = draw(16, times=times, tokens=20 * CHUNK)
    draws = [x._replace(beta=x.beta.where(x.beta > 0.3, 0.01 * x.beta))]  # some tokens hardly write
    assert error_of_dg(draws, exact, right_made=right_made) <= 1e-6


@pytest.mark.parametrize("dim", [64, 128])
def test_dg_at_the_gates_of_models(dim: int, error_of_dg: Callable[..., float]) -> None:
    """fla's kernels, emulated, have 3.5e-3 to 3.7e-3."""
    assert error_of_dg(draw_several(dim)) <= 3.5e-3


def test_what_makes_dg_accurate(error_of_dg: Callable[..., float]) -> None:
    """Sums with the operands of the states, closer anchors, and flows for both of their sides."""
    draws = draw_several(64)
    found = error_of_dg(draws)
    assert found <= error_of_dg(draws, sides=False)
    assert found <= 0.95 * error_of_dg(draws, consistent=False)
    assert found <= 0.95 * error_of_dg(draws, every=ANCHOR_CHUNKS)
    assert found <= 0.8 * error_of_dg(draws, **PLAIN)


@pytest.mark.parametrize(("forget_bias", "times"), [(3.0, 0.1), (3.0, 1e-2), (3.0, 1e-3), (0.0, 1.0)])
def test_other_gates_lose_nothing(
    forget_bias: float, times: float, error_of_dg: Callable[..., float]
) -> None:
    draws = draw_several(64, forget_bias=forget_bias, times=times)
    assert error_of_dg(draws) <= 1.05 * error_of_dg(draws, **PLAIN)


@pytest.mark.parametrize("forget_bias", [2.0, 2.25])
def test_a_chunk_that_forgets_takes_no_noise_from_others(
    forget_bias: float, error_of_dg: Callable[..., float], monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = draw_several(64, forget_bias=forget_bias)
    found = error_of_dg(draws)
    monkeypatch.setattr("tests.conftest.FORGOTTEN", 24.0)
    assert 1.1 * found <= error_of_dg(draws)


def test_closed_gates(error_of_dg: Callable[..., float]) -> None:
    """Factors of 0: nothing is divided by them. What is left of dg is small, so that its error is not."""
    x = draw(64)
    draws = [x._replace(g=torch.full_like(x.g, -10.0))]
    assert error_of_dg(draws) <= 1.05 * error_of_dg(draws, **PLAIN)


# Errors of fla's kernels, emulated, of these draws
OF_FLA = {96: 3.61e-3, 128: 3.41e-3}


@pytest.mark.parametrize("dim", [96, 128])
def test_dg_where_the_mirror_makes_the_right_part(dim: int, error_of_dg: Callable[..., float]) -> None:
    """No worse than with a right walk, because the mirror adds also the rest of dO to dS, which flows follow;
    nor than fla's kernels."""
    draws = draw_several(dim)
    found = error_of_dg(draws, right_made=True)
    assert found <= 1.05 * error_of_dg(draws)
    assert found <= OF_FLA[dim]
    assert found <= 0.95 * error_of_dg(draws, right_made=True, terms=1)
    assert found <= 0.95 * error_of_dg(draws, right_made=True, every=ANCHOR_CHUNKS)


@pytest.mark.parametrize(
    ("forget_bias", "times"), [(2.0, 1.0), (0.0, 1.0), (3.0, 0.1), (3.0, 1e-2), (3.0, 1e-3)]
)
def test_a_right_part_of_the_mirror_at_other_gates(
    forget_bias: float, times: float, error_of_dg: Callable[..., float]
) -> None:
    draws = draw_several(128, forget_bias=forget_bias, times=times)
    assert error_of_dg(draws, right_made=True) <= 1.07 * error_of_dg(draws)


def errors_beside_fp64(x: Inputs, **options: Any) -> dict[str, float]:
    """Of o, dq and dk, by walks over the states alone."""
    q, k, v, g, beta, do = (t.double()[None].transpose(1, 2) for t in x)
    o, _ = gated_delta_rule_chunkwise(q.requires_grad_(), k.requires_grad_(), v, g, beta)
    truth = {"o": o.detach(), **dict(zip(("dq", "dk"), torch.autograd.grad(o, (q, k), do), strict=True))}
    walks = Walks(
        x, rounded, consistent=True, every=DELTA_ANCHOR_CHUNKS, right_made=False, terms=1, **options
    )
    return {
        name: ((getattr(walks, name) - t[0].transpose(0, 1)).norm() / t.norm()).item()
        for name, t in truth.items()
    }


@pytest.mark.parametrize(("times", "gained"), [(1e-3, 1.7), (1e-2, 1.5), (0.1, 1.05), (1.0, 1.0)])
def test_the_left_walk_has_the_state_of_the_forward(times: float, gained: float) -> None:
    """Its errors do not add up over the chunks where gates forget slowly: dq is as accurate as o."""
    x = draw(64, times=times)
    found = errors_beside_fp64(x)
    assert found["dq"] <= 1.1 * found["o"]
    assert gained * found["dq"] <= errors_beside_fp64(x, least_kept=math.inf)["dq"]


@pytest.mark.parametrize(("times", "gained"), [(1e-3, 1.1), (1e-2, 1.07), (1.0, 1.0)])
def test_the_right_walk_adds_what_rounding_drops(times: float, gained: float) -> None:
    x = draw(64, times=times)
    x = x._replace(beta=2 * x.beta)
    assert gained * errors_beside_fp64(x)["dk"] <= errors_beside_fp64(x, adds_dropped=False)["dk"]


@pytest.mark.parametrize("rate", [1e-3, 1.0, 4.0, 16.0, 64.0, 1e3, 1e6, 1e30])
def test_gradients_of_a_rate(rate: float, dg_of_walks: Callable[..., Tensor]) -> None:
    """Of what makes the log decay, -rate softplus(raw), per head. The rate closes six gates of ten. The
    rounding of a closed gate's dg must not be multiplied by the rate."""
    x = draw(64)
    generator = torch.Generator().manual_seed(2)
    raw = torch.randn(x.g.shape, generator=generator, dtype=torch.float64)
    spared = torch.rand(x.g.shape, generator=generator) < 0.4
    raw = torch.where(spared, raw - max(math.log(rate), 0) - 1, raw)
    g, slope = -rate * softplus(raw), -rate * torch.sigmoid(raw)
    x = x._replace(g=g.clamp(min=LEAST_LOG_GATE).float())  # as the kernels read it
    truth, noisy = truth_of(x), dg_of_walks(x, rounded, BUILT)
    found = torch.where(g < CLOSED, 0.0, noisy)
    for factor in (g, slope):
        terms = truth * factor
        size = torch.maximum(terms.sum(-1).abs(), terms.norm(dim=-1))
        error, of_noise = (((dg * factor - terms).sum(-1).abs() / size).amax() for dg in (found, noisy))
        assert error <= 1e-2
        assert rate < 1e6 or of_noise > 0.1
