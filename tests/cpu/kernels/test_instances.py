"""Which kernel instance serves which head dims, and the constants that Python and the sources share."""

from __future__ import annotations

import re

import pytest

from tfla_tk import ops
from tfla_tk.backends import tk
from tfla_tk.build import sources
from tfla_tk.build.instances import (
    DEFAULT_SCHEDULE,
    INTRA_SCHEDULES,
    INTRA_TILES,
    MAX_DIM_QK,
    MAX_DIM_V,
    MLSTM_TILES,
    SCHEDULES,
    mlstm_fwd,
    mlstm_intra,
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


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("dims", "tile"), TILES)
def test_the_smallest_tile_that_holds_the_dims(
    dims: tuple[int, int], tile: tuple[int, int], schedule: str
) -> None:
    instance = mlstm_fwd(*dims, schedule)
    assert instance.name == f"mlstm_fwd_k{tile[0]}_v{tile[1]}_{schedule}"
    assert dict(instance.defines) == {
        "TFLA_DIM_QK": str(tile[0]),
        "TFLA_SLICE_V": str(tile[1]),
        "TFLA_SCHEDULE": str(SCHEDULES.index(schedule)),
    }


def test_every_supported_pair_of_dims_takes_a_shipped_instance() -> None:
    shipped = set(shipped_instances())
    assert len(shipped) == len(MLSTM_TILES) == len({instance.name for instance in shipped})
    taken = {mlstm_fwd(qk, v) for qk in range(16, MAX_DIM_QK + 1, 16) for v in range(16, MAX_DIM_V + 1, 16)}
    assert taken == shipped


@pytest.mark.parametrize("dims", [(MAX_DIM_QK + 16, 64), (64, MAX_DIM_V + 16), (0, 64), (64, 0)])
def test_dims_that_no_tile_holds(dims: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=rf"head dims: expected .*, got {dims[0]}/{dims[1]}"):
        mlstm_fwd(*dims)


def test_an_unknown_schedule() -> None:
    with pytest.raises(ValueError, match=r"schedule: expected one of sequential, .*, got 'eager'"):
        mlstm_fwd(64, 64, "eager")


def test_sources_of_every_instance_exist() -> None:
    for instance in shipped_instances():
        assert (sources.kernels_root() / instance.source).is_file()


def enum_of(file: str, name: str) -> dict[str, int]:
    """The values of a C++ `enum class`."""
    text = (sources.kernels_root() / file).read_text()
    body = re.search(rf"enum class {name} : int {{(.*?)}}", text, re.DOTALL)
    assert body, f"{file} has no enum {name}"
    return {key: int(value) for key, value in re.findall(r"(\w+) = (\d+)", body[1])}


def test_enums_agree_with_the_sources() -> None:
    schedules = enum_of("mlstm/config.cuh", "Schedule")
    assert tuple(sorted(schedules, key=schedules.__getitem__)) == SCHEDULES
    assert [x for x in ops.SCHEDULES if x != "auto"] == list(SCHEDULES)
    assert DEFAULT_SCHEDULE in SCHEDULES
    names = {str(dtype).removeprefix("torch."): code for dtype, code in tk._GATE_DTYPES.items()}
    assert names == enum_of("include/tfla_tk/params.h", "DType")


def test_instances_of_the_intra_chunk_kernel() -> None:
    assert INTRA_SCHEDULES[: len(SCHEDULES)] == SCHEDULES
    schedules = enum_of("mlstm/mlstm_intra_config.cuh", "Schedule")
    assert tuple(sorted(schedules, key=schedules.__getitem__)) == INTRA_SCHEDULES
    for dims in INTRA_TILES:
        instance = mlstm_intra(*dims, "three_stage")
        assert instance.name == f"mlstm_intra_k{dims[0]}_v{dims[1]}_three_stage"
        assert dict(instance.defines)["TFLA_SCHEDULE"] == "3"
        assert instance not in shipped_instances()
        for file in (instance.source, instance.bindings):
            assert (sources.kernels_root() / file).is_file()
    assert mlstm_intra(256, 512).name == "mlstm_intra_k256_v128_overlapped"
    with pytest.raises(ValueError, match=r"schedule: expected one of .*three_stage, got 'eager'"):
        mlstm_intra(64, 64, "eager")


def test_no_torch_header_under_kernels() -> None:
    files = [x for x in sources.kernels_root().rglob("*") if x.suffix in (".cu", ".cuh", ".cpp", ".h")]
    assert len(files) >= 8
    for file in files:
        included = re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)', file.read_text(), re.MULTILINE)
        assert not [x for x in included if re.match(r"(torch|ATen|c10|caffe2)/|pyutils/torchutils", x)], file
