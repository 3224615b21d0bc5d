"""What the walks of GLA's backward make of a sequence, lane by lane, against the explicit backward."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tfla_tk import reference

from .gla_emulation import Memory
from .gla_states_emulation import Walk


@pytest.mark.parametrize("tokens", [1, 16, 37, 530])
@pytest.mark.parametrize("dim_v", [48, 128])
@pytest.mark.parametrize("short", [False, True], ids=["fp32", "16 bits"])
def test_gradients(tokens: int, dim_v: int, short: bool) -> None:
    rng = np.random.default_rng(tokens + dim_v)
    q, k, g = (rng.standard_normal((tokens, 64)) for _ in range(3))
    v, do = (rng.standard_normal((tokens, dim_v)) for _ in range(2))
    initial, d_last = (rng.standard_normal((64, dim_v)) for _ in range(2))
    g = -np.log1p(np.exp(-g - 2))
    kind = rng.random(g.shape)
    g[kind < 0.02], g[(kind > 0.02) & (kind < 0.3)], g[kind > 0.98] = -50.0, 0.0, -1e-4
    g[:, 3], g[tokens // 2, 5] = -np.inf, -1e3
    scale = 0.3

    def tensor(x: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(x)[None, :, None]

    def state(x: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(x)[None, None]

    expected = reference.gla_backward(
        *map(tensor, (q, k, v, g, do)), state(d_last), scale=scale, initial_state=state(initial)
    )

    def empty() -> np.ndarray:
        return np.full_like(g, np.nan)

    left = Walk(True, scale, short, initial, empty(), empty(), {})
    left.run(q, k, g, v, do)
    flow = (left.state * d_last).sum(1)
    right = Walk(False, scale, short, d_last, empty(), left.sums, left.anchors, flow)
    right.run(q, k, g, v, do)
    assert len(left.anchors) == tokens // 513
    for found, name in ((left.result, "dq"), (right.result, "dk"), (right.sums, "dg")):
        wanted = getattr(expected, name)[0, :, 0].numpy()
        np.testing.assert_allclose(found, wanted, atol=1e-9, err_msg=name)
    np.testing.assert_allclose(right.state, expected.dh0[0, 0].numpy(), atol=1e-9)


@pytest.mark.parametrize(("address", "count"), [(4, 2), (8, 4), (24, 8)])
def test_misaligned_accesses_are_caught(address: int, count: int) -> None:
    memory, at = Memory(64), np.array(address)
    with pytest.raises(AssertionError, match="misaligned"):
        memory.load_wide(at, count)
    with pytest.raises(AssertionError, match="misaligned"):
        memory.store_wide(at, np.zeros(count))
