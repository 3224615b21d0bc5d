"""Which tiles serve which head dims, and that calls of all of them take what ships."""

from __future__ import annotations

import itertools

import pytest

from tfla_tk.backends.tk.scalar_gate import walks
from tfla_tk.build.instances import (
    DELTA_TILES,
    GLA_STATES_TILES,
    GLA_TILES,
    MAX_DIM_QK,
    MAX_DIM_V,
    MLSTM_TILES,
    SEQUENTIAL_TILES,
    WALK_TILES,
    all_instances,
    mlstm_fwd,
    mlstm_tile,
    shipped_instances,
    tile_of,
    walk_tile,
)

EVERY_DIMS = list(itertools.product(range(16, MAX_DIM_QK + 1, 16), range(16, MAX_DIM_V + 1, 16)))


def test_two_tiles_have_a_sequential_forward_for_measurements() -> None:
    known, shipped = all_instances(), shipped_instances()
    assert known[: len(shipped)] == [*shipped]
    assert set(known[len(shipped) :]) == {
        mlstm_fwd(tile, half, sequential=True) for tile in SEQUENTIAL_TILES for half in (False, True)
    }


def test_names_tell_instances_apart() -> None:
    assert len({instance.name for instance in all_instances()}) == len(all_instances())
    for dtype in ("bf16", "fp16"):
        of_dtype = {x.name for x in all_instances() if x.dtype == dtype}
        assert of_dtype == {name for name in (x.name for x in all_instances()) if dtype in name}


@pytest.mark.parametrize(
    ("tiles", "of_dims"),
    [
        (DELTA_TILES, {16: 64, 64: 64, 80: 128, 128: 128, 144: 256, 256: 256}),
        (GLA_TILES, {16: 64, 64: 64, 80: 128, 128: 128}),
        (GLA_STATES_TILES, {16: 64, 80: 128, 144: 256, 256: 256}),
    ],
)
def test_other_families_take_the_smallest_tile(tiles: tuple[int, ...], of_dims: dict[int, int]) -> None:
    assert {dim: tile_of(dim, tiles) for dim in of_dims} == of_dims
    with pytest.raises(ValueError, match=f"head dim: expected at most {max(tiles)}, got {max(tiles) + 16}"):
        tile_of(max(tiles) + 16, tiles)


def walks_of(dim_qk: int, dim_v: int) -> list[tuple[str, int, int]]:
    """Arguments of walk_tile in a backward: the keys of dq and dk come in shares of at most 256 columns."""
    share = min(256, dim_v)
    return [("dq", share, dim_qk), ("dk", share, dim_qk), ("dv", dim_qk, dim_v)]


def test_every_tile_serves_some_head_dims() -> None:
    assert {mlstm_tile(*dims) for dims in EVERY_DIMS} == {*MLSTM_TILES}
    assert {walk_tile(*call) for dims in EVERY_DIMS for call in walks_of(*dims)} == {*WALK_TILES}


def test_the_plan_and_the_kernels_count_the_same_parts_of_v() -> None:
    """A share of the keys of dq and dk is a tile's columns; the plan makes room for as many."""
    for dim_qk, dim_v in EVERY_DIMS:
        of_dv, (tile, slice_) = walks.tiles_of(dim_qk, dim_v)
        shares = -(-dim_v // tile)
        assert walks.ctas_of_a_walk(dim_qk, dim_v) == shares * -(-dim_qk // slice_)
        assert shares == 1 or tile == walks.PART_COLUMNS
        assert of_dv[0] >= dim_qk  # dv has one share


@pytest.mark.parametrize("gradient", ["dq", "dk", "dv"])
def test_keys_that_no_walk_holds(gradient: str) -> None:
    with pytest.raises(ValueError):
        walk_tile(gradient, MAX_DIM_QK + 16, 64)


@pytest.mark.parametrize("dims", [(MAX_DIM_QK + 16, 64), (64, MAX_DIM_V + 16), (0, 64), (64, 0)])
def test_dims_that_no_tile_holds(dims: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=rf"head dims: expected .*, got {dims[0]}/{dims[1]}"):
        mlstm_tile(*dims)
