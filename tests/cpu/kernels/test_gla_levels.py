"""What the gate warps of GLA make of a chunk, lane by lane, against sums of gates."""

from __future__ import annotations

import numpy as np
import pytest

from .gla_emulation import CHUNK, Chunk


@pytest.mark.parametrize("mild", [(), (2,), (0, 1, 3)], ids=["levels", "one mild", "three mild"])
@pytest.mark.parametrize("tokens", [CHUNK, 37, 1])
@pytest.mark.parametrize("short", [False, True], ids=["fp32", "16 bits"])
@pytest.mark.parametrize("dim_k", [64, 128])
@pytest.mark.parametrize("two_parts", [False, True], ids=["bf16", "fp16"])
def test_scores_and_operands(
    two_parts: bool, dim_k: int, short: bool, tokens: int, mild: tuple[int, ...]
) -> None:
    """Tokens past the end have k = 0 and gates that are not looked at; mild: blocks around their middle."""
    rng = np.random.default_rng(dim_k + tokens)
    q, k, g = (rng.standard_normal((CHUNK, dim_k)) for _ in range(3))
    g = -np.log1p(np.exp(-g))
    g[rng.random(g.shape) < 0.1], g[rng.random(g.shape) < 0.1] = -50.0, 0.0
    g[:, 3], g[tokens // 2, 5] = -np.inf, -1e3
    for block in mild:
        g[16 * block :][:16] = np.maximum(g[16 * block :][:16], -2.0)
    q[tokens:] = k[tokens:] = 0.0
    given = g.copy()
    given[tokens:], g[tokens:] = np.nan, 0.0
    scale = 0.3
    chunk = Chunk(q, k, given, scale, short, tokens, mild, two_parts=two_parts)
    chunk.run()

    def decay(i: int, j: int) -> np.ndarray:
        """Of what token j leaves, seen by token i."""
        return np.exp(g[j + 1 : i + 1].sum(0))

    p = np.zeros((CHUNK, CHUNK))
    for i in range(CHUNK):
        for j in range(i + 1):
            p[i, j] = scale * (q[i] * k[j] * decay(i, j)).sum()
    np.testing.assert_allclose(chunk.read_tile(chunk.p_at, CHUNK), p, atol=1e-12)
    through = np.stack([decay(i, -1) for i in range(CHUNK)])
    behind = np.stack([decay(CHUNK - 1, j) for j in range(CHUNK)])
    np.testing.assert_allclose(chunk.read_tile(0, dim_k), scale * q * through, atol=1e-12)
    np.testing.assert_allclose(chunk.read_tile(chunk.k_at, dim_k), k * behind, atol=1e-12)
    np.testing.assert_allclose(chunk.decay, decay(CHUNK - 1, -1), atol=1e-12)
