"""What the walks of GLA's backward make of a sequence, lane by lane, against the explicit backward."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from tfla_tk import reference

from .gla_emulation import Memory
from .gla_states_emulation import Rounding, Walk

Arrays = dict[str, np.ndarray]


def run(
    x: Arrays, scale: float, short: bool = False, rounding: Rounding | None = None, slice_of_v: int = 0
) -> tuple[Walk, Walk]:
    """The walk forward in time and the other one, of x: q, k, g, v, do, initial, d_last.

    slice_of_v: columns of V of a launch, 0 for all; returns the last ones.
    """
    rounding = rounding or Rounding()
    dim_v = x["v"].shape[1]
    slices = [slice(n, n + (slice_of_v or dim_v)) for n in range(0, dim_v, slice_of_v or dim_v)]
    ends = [{"is_first": n == 0, "is_last": n == len(slices) - 1, "handed": {}} for n in range(len(slices))]
    for this, following in itertools.pairwise(ends):
        following["handed"] = this["handed"]

    def operands(of: slice) -> tuple[np.ndarray, ...]:
        return x["q"], x["k"], x["g"], x["v"][:, of], x["do"][:, of]

    def empty() -> np.ndarray:
        return np.full_like(x["g"], np.nan)

    lefts, flow = [], np.zeros(64)
    for of, end in zip(slices, ends, strict=True):
        left = Walk(True, scale, short, x["initial"][:, of], empty(), empty(), {}, rounding=rounding, **end)
        left.run(*operands(of))
        flow = flow + (left.state * rounding.of_both(x["d_last"][:, of])).sum(1)
        lefts.append(left)
    sums = lefts[-1].sums
    for of, end, left in zip(slices, ends, lefts, strict=True):
        at = (x["d_last"][:, of], empty(), sums, left.anchors, flow, rounding)
        right = Walk(False, scale, short, *at, **end)
        right.run(*operands(of))
    return lefts[-1], right


def expected(x: Arrays, scale: float) -> tuple[Arrays, np.ndarray]:
    """dq, dk and dg, and the initial state's gradient."""
    tokens = (torch.from_numpy(x[name])[None, :, None] for name in ("q", "k", "v", "g", "do"))
    initial, d_last = (torch.from_numpy(x[name])[None, None] for name in ("initial", "d_last"))
    found = reference.gla_backward(*tokens, d_last, scale=scale, initial_state=initial)
    grads = {name: getattr(found, name)[0, :, 0].numpy() for name in ("dq", "dk", "dg")}
    return grads, found.dh0[0, 0].numpy()


@pytest.mark.parametrize("tokens", [1, 16, 37, 530])
@pytest.mark.parametrize("dim_v", [48, 128, 144, 256])
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
    x = {"q": q, "k": k, "g": g, "v": v, "do": do, "initial": initial, "d_last": d_last}
    left, right = run(x, scale, short)
    grads, d_initial = expected(x, scale)
    assert len(left.anchors) == tokens // 513
    for found, name in ((left.result, "dq"), (right.result, "dk"), (right.sums, "dg")):
        np.testing.assert_allclose(found, grads[name], atol=1e-9, err_msg=name)
    np.testing.assert_allclose(right.state, d_initial, atol=1e-9)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("dim_v", "slices"), [(64, (0, 32)), (512, (128, 256)), (272, (128, 256))])
def test_slices_of_v(dim_v: int, slices: tuple[int, int], dtype: torch.dtype | None) -> None:
    """What launches hand on makes the results of all of V, beyond an anchor."""
    x = draw("usual", 600, dtype or torch.bfloat16, dim_v)
    whole, by_slices = (run(x, 0.125, rounding=Rounding(dtype), slice_of_v=n) for n in slices)
    for found, expected in zip(by_slices, whole, strict=True):
        for name in ("result", "sums"):
            error = np.linalg.norm(getattr(found, name) - getattr(expected, name))
            assert error < (1e-12 if dtype is None else 1e-3) * np.linalg.norm(getattr(expected, name)), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("gates", "tokens"), [("usual", 300), ("usual", 700), ("half closed", 300)])
def test_the_error_of_dg(gates: str, tokens: int, dtype: torch.dtype) -> None:
    """q dq and k dk cancel: of a state and writers in one part, 1.5 eps would be left."""
    x, rounding = draw(gates, tokens, dtype), Rounding(dtype)
    left, right = run(x, 0.125, rounding=rounding)
    grads, _ = expected(x, 0.125)
    errors = {
        name: np.linalg.norm(found - grads[name]) / np.linalg.norm(grads[name])
        for found, name in ((left.result, "dq"), (right.result, "dk"), (right.sums, "dg"))
    }
    eps = torch.finfo(dtype).eps
    limits = {"dq": eps / 3, "dk": eps / 3, "dg": eps / 5}
    assert all(errors[name] <= limit for name, limit in limits.items()), (errors, limits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("gates", ["closed", "-1e3", "-50"])
def test_nothing_is_left_of_dg_behind_closed_gates(gates: str, dtype: torch.dtype) -> None:
    x = draw(gates, 100, dtype)
    _, right = run(x, 0.125, rounding=Rounding(dtype))
    assert not right.sums.any()


def draw(gates: str, tokens: int, dtype: torch.dtype, dim_v: int = 64) -> Arrays:
    """Operands that the dtype holds."""
    rng = np.random.default_rng(tokens)
    sizes = {"q": (tokens, 64), "k": (tokens, 64), "v": (tokens, dim_v), "do": (tokens, dim_v)}
    x = {name: Rounding(dtype)(rng.standard_normal(size)) for name, size in sizes.items()}
    x |= {name: rng.standard_normal((64, dim_v)) for name in ("initial", "d_last")}
    usual, chosen = -np.log1p(np.exp(-rng.standard_normal((tokens, 64)) - 2)), rng.random((tokens, 64))
    x["g"] = {
        "usual": usual,
        "half closed": np.where(chosen > 0.5, -np.inf, 0.0),
        "closed": np.full_like(usual, -np.inf),
        "-1e3": np.full_like(usual, -1e3),
        "-50": np.full_like(usual, -50.0),
    }[gates]
    return x


@pytest.mark.parametrize(("address", "count"), [(4, 2), (8, 4), (24, 8)])
def test_misaligned_accesses_are_caught(address: int, count: int) -> None:
    memory, at = Memory(64), np.array(address)
    with pytest.raises(AssertionError, match="misaligned"):
        memory.load_wide(at, count)
    with pytest.raises(AssertionError, match="misaligned"):
        memory.store_wide(at, np.zeros(count))
