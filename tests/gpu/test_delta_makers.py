"""Makers of the chunk matrices beside the forward's walk of the delta rule, and small launches with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tfla_tk import chunk_gated_delta_rule
from tfla_tk.backends.tk.delta_rule.call import Shape

from .conftest import forget_calls
from .delta_rule import draw, shape_of
from .linear import REPEATS, Tensors, assert_equal, assert_equal_on_streams, assert_graph_replays, run, train


@pytest.fixture
def make_beside(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    """Has the chunk matrices made beside the walks, where the call's sizes allow it, or before them."""
    makers = Shape.makers

    def make_beside(so: bool) -> None:
        monkeypatch.setattr(Shape, "makers", makers if so else 0)
        forget_calls()

    yield make_beside
    forget_calls()


def both(x: Tensors) -> Tensors:
    return run(x, function=chunk_gated_delta_rule) | train(x, function=chunk_gated_delta_rule)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (96, 48), (128, 256)], ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_makers_beside_the_walks_change_no_bit(
    packed: bool, dims: tuple[int, int], dtype: torch.dtype, make_beside: Callable[[bool], None]
) -> None:
    lengths = [0, 900, 1, 64, 2500, 65, 0]
    if packed:
        x = draw(1, sum(lengths), 1, 2, dims, dtype, sequences=len(lengths))
        x["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0).cuda()
    else:
        x = draw(2, 2500, 4, 8, dims, dtype)
    make_beside(False)
    expected = both(x)
    make_beside(True)
    for _ in range(REPEATS):
        assert_equal(both(x), expected)


def test_makers_beside_two_walkers_change_no_bit(
    dtype: torch.dtype, make_beside: Callable[[bool], None]
) -> None:
    """Of 64 walks, which leave about half of the multiprocessors to makers; and of several lengths."""
    lengths = [0, 900, 1, 64, 1500, 65, 700, 3] * 2
    packed = draw(1, sum(lengths), 1, 4, (128, 128), dtype, sequences=len(lengths))
    packed["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0).cuda()
    for x in (draw(4, 1000, 8, 16, (128, 128), dtype), packed):
        make_beside(False)
        expected = both(x)
        make_beside(True)
        shape = shape_of(x)
        assert shape.makers > 0 and shape.forward_walkers == 2
        for _ in range(REPEATS):
            assert_equal(both(x), expected)


@pytest.mark.parametrize("dims", [(64, 128), (128, 128)], ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("makers", [1, 4, 300])
def test_more_ctas_than_run_at_once(
    makers: int,
    dims: tuple[int, int],
    make_beside: Callable[[bool], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """512 of the walk, which wait for makers, and up to 300 of makers, which wait a little for walks that
    have yet to begin. On several streams at once, too."""
    for name, value in {"split": None, "walk_makes_matrices": False, "forward_walkers": 1}.items():
        monkeypatch.setattr(Shape, name, value)
    x = draw(4, 700, 64, 64, dims)
    make_beside(False)
    expected = both(x)
    monkeypatch.setattr(Shape, "makers", makers)
    forget_calls()
    for _ in range(REPEATS):
        assert_equal(both(x), expected)
    outputs = {name: expected[name] for name in ("o", "final_state")}
    assert_equal_on_streams(lambda: run(x, function=chunk_gated_delta_rule), outputs, 3)


def test_a_graph_replays_makers(make_beside: Callable[[bool], None]) -> None:
    """Each time the flags of the chunks are cleared."""
    x, other = draw(1, 3000, 8, 16), draw(1, 3000, 8, 16, seed=1)

    def call(given: Tensors) -> Tensors:
        return run(given, function=chunk_gated_delta_rule)

    make_beside(False)
    expected = [call(other), call(x)]
    make_beside(True)
    assert_graph_replays(call, x, other, expected, REPEATS)


def test_makers_on_several_streams(make_beside: Callable[[bool], None]) -> None:
    """Their walks together have more CTAs than there are multiprocessors."""
    x = draw(1, 4000, 16, 32)
    make_beside(False)
    expected = run(x, function=chunk_gated_delta_rule)
    make_beside(True)
    assert_equal_on_streams(lambda: run(x, function=chunk_gated_delta_rule), expected, 10)


@pytest.mark.sanitize
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 192), (128, 384)], ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("beside", [False, True])
def test_small_launches(dims: tuple[int, int], beside: bool, make_beside: Callable[[bool], None]) -> None:
    """Of every kind of tile for compute-sanitizer: every place of every ring is used twice. One of the heads
    forgets slowly."""
    forget_calls()
    make_beside(beside)
    x = draw(1, 450, 1, 2, dims)
    x["g"][:, :, 1] *= 1e-3
    found = run(x, function=chunk_gated_delta_rule) | train(x, function=chunk_gated_delta_rule)
    torch.cuda.synchronize()
    assert all(t.isfinite().all() for t in found.values())
