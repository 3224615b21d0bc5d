"""The intra-chunk kernel of the ablation: its instances, its sources and what it refuses."""

from __future__ import annotations

import re

import pytest
import torch

from tfla_tk.bench import intra
from tfla_tk.build import all_instances, cache, instances, sources


def test_instances() -> None:
    assert intra.SCHEDULES[: len(instances.SCHEDULES)] == instances.SCHEDULES
    text = (intra.ROOT / "intra/mlstm_intra_config.cuh").read_text()
    body = re.search(r"enum class Schedule : int {(.*?)}", text, re.DOTALL)
    assert body
    assert re.findall(r"(\w+) = (\d+)", body[1]) == [(x, str(n)) for n, x in enumerate(intra.SCHEDULES)]
    for dims in intra.TILES:
        instance = intra.instance(*dims, "three_stage")
        assert instance.name == f"mlstm_intra_k{dims[0]}_v{dims[1]}_three_stage"
        assert dict(instance.defines)["TFLA_SCHEDULE"] == "3"
        assert instance not in all_instances()
    assert intra.instance(256, 512).name == "mlstm_intra_k256_v128_overlapped"
    assert len({instance.name for instance in intra.all_instances()}) == 16
    with pytest.raises(ValueError, match=r"schedule: expected one of .*three_stage, got 'eager'"):
        intra.instance(64, 64, "eager")
    with pytest.raises(ValueError, match="head dims: expected at most 256/512, got 272/64"):
        intra.instance(272, 64)


def test_the_key_follows_its_own_files_and_what_they_share_with_the_kernels() -> None:
    found = {name for name, _ in cache._source_digests(intra.instance(64, 64))}
    own = {f"/intra/{path.name}" for path in (intra.ROOT / "intra").iterdir()}
    assert own < found and "common/driver_shim.cpp" in found
    shared = found - own
    assert len(shared) > 3 and all((sources.kernels_root() / name).is_file() for name in shared)


def test_no_file_is_the_kernels() -> None:
    """The product's sources neither hold nor include what belongs to the ablation."""
    for path in sources.kernels_root().rglob("*"):
        assert "intra" not in path.name
        if path.suffix in (".cu", ".cuh", ".cpp", ".h"):
            assert not re.search(r'#include ".*intra', path.read_text()), path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": (1, 2, 8, 16)}, r"k: expected shape \[B, NH, S, K\] = \(1, 2, 64, 16\), got \(1, 2, 8, 16\)"),
        ({"v": (1, 2, 8, 16)}, "v: expected shape"),
        ({"i": (1, 2, 8)}, "i: expected shape"),
        ({"f": (1, 64)}, "f: expected shape"),
        ({name: (1, 65536, 1, 16)[: 4 - (name in "if")] for name in "qkvif"}, "batch times heads: .* 65536"),
        ({}, "expected torch.bfloat16 on a GPU, got torch.bfloat16 on cpu"),
    ],
)
def test_the_intra_chunk_kernel_refuses(change: dict[str, tuple[int, ...]], message: str) -> None:
    shapes = dict.fromkeys("qkv", (1, 2, 64, 16)) | dict.fromkeys("if", (1, 2, 64)) | change
    tensors = [torch.zeros(shapes[name], dtype=torch.bfloat16) for name in "qkvif"]
    with pytest.raises(ValueError, match=message):
        intra.mlstm_intra(*tensors)
