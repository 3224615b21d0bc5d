"""Which kernel instance serves which head dims, and the constants that Python and the sources share."""

from __future__ import annotations

import itertools
import re

import pytest

from tfla_tk.backends.tk.scalar_gate import walks as tk_walks
from tfla_tk.build import sources
from tfla_tk.build.instances import (
    GLA_DIRECTIONS,
    GLA_STATES_TILES,
    MAX_DIM_QK,
    MAX_DIM_V,
    MAX_TOKENS,
    MLSTM_TILES,
    WALK_TILES,
    Instance,
    all_instances,
    delta_rule,
    delta_states,
    for_scalar_decay,
    gla,
    gla_segments,
    gla_states,
    mlstm_bwd,
    mlstm_fwd,
    mlstm_pass,
    mlstm_sequence,
    mlstm_step,
    shipped_instances,
)

TILES = [
    ((16, 16), (64, 64)),
    ((48, 80), (64, 128)),
    ((64, 64), (64, 64)),
    ((64, 144), (64, 256)),
    ((64, 512), (64, 256)),
    ((80, 48), (128, 64)),
    ((96, 96), (128, 128)),
    ((128, 256), (128, 256)),
    ((128, 272), (128, 256)),
    ((144, 16), (256, 64)),
    ((160, 384), (256, 128)),
    ((208, 176), (256, 128)),
    ((256, 512), (256, 128)),
]
DELTA_DIMS = range(16, 129, 16)  # K, or V of the delta rule's walks over states
EVERY_DIMS = list(itertools.product(range(16, MAX_DIM_QK + 1, 16), range(16, MAX_DIM_V + 1, 16)))


@pytest.mark.parametrize(("dims", "tile"), TILES)
def test_the_smallest_tile_that_holds_the_dims(dims: tuple[int, int], tile: tuple[int, int]) -> None:
    defines = {"TFLA_DIM_QK": str(tile[0]), "TFLA_SLICE_V": str(tile[1])}
    instance = mlstm_fwd(*dims)
    assert instance.name == f"mlstm_fwd_k{tile[0]}_v{tile[1]}"
    assert dict(instance.defines) == defines
    sequential = mlstm_fwd(*dims, sequential=True)
    assert sequential.name == f"{instance.name}_sequential"
    assert dict(sequential.defines) == defines | {"TFLA_SEQUENTIAL": "1"}


def test_two_tiles_have_a_sequential_forward_for_measurements() -> None:
    known, shipped = all_instances(), shipped_instances()
    assert known[: len(shipped)] == shipped
    assert [x.name for x in known[len(shipped) :]] == [
        "mlstm_fwd_k128_v256_sequential",
        "mlstm_fwd_k256_v128_sequential",
    ]


def walks_of(dim_qk: int, dim_v: int) -> list[tuple[str, int, int]]:
    """Arguments of mlstm_pass in a backward: the keys of dq and dk come in shares of at most 256 columns."""
    share = min(256, dim_v)
    return [("dq", share, dim_qk), ("dk", share, dim_qk), ("dv", dim_qk, dim_v)]


def test_every_supported_pair_of_dims_takes_a_shipped_instance() -> None:
    shipped = set(shipped_instances())
    assert len(shipped) == len(shipped_instances()) == len({instance.name for instance in shipped})
    forward, walks = set(), set()
    for dims in EVERY_DIMS:
        forward.add(mlstm_fwd(*dims))
        walks |= {mlstm_pass(*call) for call in walks_of(*dims)}
    assert (len(forward), len(walks)) == (len(MLSTM_TILES), len(WALK_TILES))
    sequences = {mlstm_sequence(tokens) for tokens in range(1, MAX_TOKENS + 1)}
    of_chunks = forward | walks | {mlstm_bwd()}
    of_decay = {for_scalar_decay(instance) for instance in of_chunks}
    of_delta = {delta_rule(direction, k) for direction in ("forward", "backward") for k in range(16, 257, 16)}
    of_delta |= {delta_states(v) for v in range(16, 513, 16)}
    of_gla = {gla(direction, k) for direction in GLA_DIRECTIONS for k in DELTA_DIMS}
    of_gla |= {gla_states(v) for v in range(16, max(GLA_STATES_TILES) + 1, 16)} | {gla_segments()}
    assert shipped == of_chunks | of_decay | of_delta | of_gla | sequences | {mlstm_step()}


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_delta_rule_takes_the_smallest_tile_that_holds_k(direction: str) -> None:
    for dim, tile in ((16, 64), (64, 64), (80, 128), (128, 128), (144, 256), (256, 256)):
        assert delta_rule(direction, dim).name == f"delta_{direction}_k{tile}"
    with pytest.raises(ValueError, match="K: expected at most 256, got 272"):
        delta_rule(direction, 272)


def test_the_walks_of_the_delta_rule_over_states_take_v_in_slices_of_the_largest_tile() -> None:
    for dim, tile in ((16, 64), (64, 64), (80, 128), (144, 128), (512, 128)):
        assert delta_states(dim).name == f"delta_states_v{tile}"
    with pytest.raises(ValueError, match="V: expected at most 512, got 528"):
        delta_states(528)


def test_gla_takes_the_smallest_tile_that_holds_k() -> None:
    for dim, tile in ((16, 64), (64, 64), (80, 128), (128, 128)):
        assert gla("forward", dim).name == f"gla_forward_k{tile}"
    with pytest.raises(ValueError, match="K: expected at most 128, got 144"):
        gla("forward", 144)


def test_the_walks_of_gla_over_states_take_the_smallest_tile_that_holds_v() -> None:
    for dim, tile in ((16, 64), (64, 64), (80, 128), (144, 256), (256, 256)):
        assert gla_states(dim).name == f"gla_states_v{tile}"
    with pytest.raises(ValueError, match="V: expected at most 256, got 272"):
        gla_states(272)


def tile_of_walk(instance: Instance) -> tuple[int, int]:
    defines = dict(instance.defines)
    return int(defines["TFLA_DIM_KEYS"]), int(defines["TFLA_SLICE"])


def test_the_plan_and_the_kernels_count_the_same_parts_of_v() -> None:
    """A share of the keys of dq and dk is a tile's columns; the plan makes room for as many."""
    for dim_qk, dim_v in EVERY_DIMS:
        *_, of_dv, of_dq_and_dk = tk_walks.instances_of(dim_qk, dim_v)
        tile, slice_ = tile_of_walk(of_dq_and_dk)
        shares = -(-dim_v // tile)
        assert tk_walks.ctas_of_a_walk(dim_qk, dim_v) == shares * -(-dim_qk // slice_)
        assert shares == 1 or tile == tk_walks.PART_COLUMNS
        assert tile_of_walk(of_dv)[0] >= dim_qk  # dv has one share
        assert {of_dv, of_dq_and_dk} == {mlstm_pass(*call) for call in walks_of(dim_qk, dim_v)}


def test_walks_take_the_smallest_tile_that_holds_their_operands() -> None:
    """A slice may hold a part of the values; dq and dk leave slices of 256 to dv, and are one instance."""
    for dims in EVERY_DIMS:
        of_dq, of_dk, _ = (mlstm_pass(*call) for call in walks_of(*dims))
        assert of_dq == of_dk
        for gradient, keys, values in walks_of(*dims):
            tile, slice_ = tile_of_walk(mlstm_pass(gradient, keys, values))
            assert tile == min(x for x in (64, 128, 256) if x >= keys)
            slices = [x for at, x in WALK_TILES if at == tile and (gradient == "dv" or x < 256)]
            assert slice_ == min((x for x in slices if x >= values), default=max(slices))
    for gradient, operands, expected in (
        ("dq", (16, 16), (64, 64)),
        ("dk", (80, 128), (128, 128)),
        ("dq", (256, 144), (256, 128)),
        ("dk", (64, 256), (64, 128)),
        ("dv", (64, 256), (64, 256)),
        ("dv", (128, 272), (128, 256)),
        ("dv", (144, 48), (256, 64)),
        ("dv", (256, 512), (256, 128)),
    ):
        instance = mlstm_pass(gradient, *operands)
        assert tile_of_walk(instance) == expected
        assert instance.name == f"mlstm_pass_k{expected[0]}_v{expected[1]}"


@pytest.mark.parametrize("gradient", ["dq", "dk", "dv"])
def test_keys_that_no_walk_holds(gradient: str) -> None:
    with pytest.raises(ValueError):
        mlstm_pass(gradient, MAX_DIM_QK + 16, 64)


@pytest.mark.parametrize("dims", [(MAX_DIM_QK + 16, 64), (64, MAX_DIM_V + 16), (0, 64), (64, 0)])
def test_dims_that_no_tile_holds(dims: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=rf"head dims: expected .*, got {dims[0]}/{dims[1]}"):
        mlstm_fwd(*dims)


def test_sources_of_every_instance_exist() -> None:
    for instance in shipped_instances():
        for file in (instance.source, instance.bindings):
            assert (sources.kernels_root() / file).is_file()


def test_no_torch_header_under_kernels() -> None:
    files = [x for x in sources.kernels_root().rglob("*") if x.suffix in (".cu", ".cuh", ".cpp", ".h")]
    assert len(files) >= 8
    for file in files:
        included = re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)', file.read_text(), re.MULTILINE)
        assert not [x for x in included if re.match(r"(torch|ATen|c10|caffe2)/|pyutils/torchutils", x)], file
