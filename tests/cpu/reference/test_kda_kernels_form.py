"""KDA as its kernels compute it (kernels/kda/bindings/params.h has the names): the walk over the chunks, its
mirror, and the gradients of a chunk from what both leave, against autograd of the recurrence."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from .conftest import assert_close, linear_drawer

CHUNK = 64
draw = linear_drawer("Gb")


class Tiles(NamedTuple):
    """What the walks read of a chunk, [L, K], [L, L] and [K]."""

    q_f: Tensor
    k_f: Tensor
    k_g: Tensor
    of_keys: Tensor  # L
    p: Tensor
    decay: Tensor


def tiles_of(q: Tensor, k: Tensor, g: Tensor) -> Tiles:
    """Of the scaled q, k and the log decays of a chunk, [L, K]."""
    b = g.cumsum(0)
    pairs = (b[:, None] - b).exp()

    def scores(x: Tensor, diagonal: int) -> Tensor:
        return torch.einsum("ic,jc,ijc->ij", x, k, pairs).tril(diagonal)

    through, behind = b.exp(), (b[-1] - b).exp()
    return Tiles(q * through, k * through, k * behind, scores(k, -1), scores(q, 0), through[-1])


class Chunk(NamedTuple):
    """A chunk of the walk: its tiles, A [L, L], beta [L, 1], U' and Y [L, V], and S [K, V] at its begin."""

    tiles: Tiles
    a: Tensor
    beta: Tensor
    u: Tensor
    y: Tensor
    state: Tensor


def walk(tiles: Tiles, v: Tensor, beta: Tensor, state: Tensor) -> tuple[Chunk, Tensor, Tensor]:
    """A chunk, O and the state that leaves it."""
    beta = beta[:, None]
    a = -torch.linalg.solve(torch.eye(len(v), dtype=v.dtype) + tiles.of_keys * beta.mT, tiles.of_keys)
    w = v - tiles.k_f @ state
    u = w + a @ (beta * w)
    y = beta * u
    o = tiles.q_f @ state + tiles.p @ y
    left = tiles.decay[:, None] * state + tiles.k_g.mT @ y
    return Chunk(tiles, a, beta, u, y, state), o, left


class ChunkGradients(NamedTuple):
    tiles: Tiles
    v: Tensor
    beta: Tensor


def mirror(chunk: Chunk, do: Tensor, d_left: Tensor) -> tuple[ChunkGradients, Tensor]:
    """The gradients of a chunk, and of the state at its begin."""
    tiles, a, beta, u, y, state = chunk
    r = tiles.p.mT @ do + tiles.k_g @ d_left
    solved = r + a.mT @ (beta * r)  # R'
    dv = beta * solved  # G
    d_state = tiles.decay[:, None] * d_left + tiles.q_f.mT @ do - tiles.k_f.mT @ dv
    of_tiles = Tiles(
        q_f=do @ state.mT,
        k_f=-dv @ state.mT,
        k_g=y @ d_left.mT,
        of_keys=-(dv @ y.mT).tril(-1),
        p=(do @ y.mT).tril(),
        decay=(state * d_left).sum(1),
    )
    return ChunkGradients(of_tiles, dv, (u * solved).sum(1)), d_state


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    rows = []
    for t in range(len(v)):
        state = g[t].exp()[:, None] * state
        state = state + torch.outer(k[t], beta[t] * (v[t] - k[t] @ state))
        rows.append(q[t] @ state)
    return torch.stack(rows), state


@pytest.mark.parametrize("tokens", [1, 64, 150])
def test_walk_and_mirror(tokens: int) -> None:
    drawn, (state,) = draw(tokens, batch=1, heads=1)
    q, k, v, g, beta = (x[0, :, 0].detach().requires_grad_() for x in drawn)
    state = state[0, 0].requires_grad_()
    inputs = q, k, v, g, beta, state
    expected = recurrence(*inputs)
    do, d_last = torch.randn_like(v), torch.randn_like(state)
    expected_gradients = torch.autograd.grad(expected, inputs, (do, d_last))

    parts = [slice(first, first + CHUNK) for first in range(0, tokens, CHUNK)]
    chunks, rows, left = [], [], state
    for part in parts:
        chunk, o, left = walk(tiles_of(q[part], k[part], g[part]), v[part], beta[part], left)
        chunks.append(chunk), rows.append(o)
    assert_close([torch.cat(rows), left], list(expected))

    gradients = [torch.zeros_like(x) for x in inputs[:5]]
    dq, dk, dv, dg, dbeta = gradients
    d_left = d_last
    for part, chunk in zip(reversed(parts), reversed(chunks), strict=True):
        with torch.no_grad():
            found, d_left = mirror(chunk, do[part], d_left)
        of_inputs = torch.autograd.grad(chunk.tiles, (q, k, g), found.tiles, retain_graph=True)
        for total, x in zip((dq, dk, dg), of_inputs, strict=True):
            total += x
        dv[part], dbeta[part] = found.v, found.beta
    assert_close([*gradients, d_left], list(expected_gradients))
