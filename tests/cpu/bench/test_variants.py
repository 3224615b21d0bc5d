"""Which variants of an operator the options of the commands name."""

from __future__ import annotations

import pytest
import torch

from tfla_tk import UnsupportedError, mlstm_chunkwise
from tfla_tk.bench.operators import OPERATORS
from tfla_tk.bench.shapes import Shape
from tfla_tk.bench.variants import Variant, find_variants


def test_variants_on_a_gpu() -> None:
    found = find_variants(OPERATORS["mlstm_exp"], None, ["auto"], on_gpu=True)
    assert [variant.call for variant in found] == [
        "tk:auto",
        "triton:limit_chunk_64",
        "triton:xl_chunk_64",
        "triton:xl_chunk_128",
        "triton:xl_chunk_256",
        "reference",
    ]
    assert {variant.family for variant in found} == {"tk", "triton", "reference"}
    assert not any(variant.named for variant in found)


def test_what_an_operator_lacks_is_left_out_where_another_one_has_it() -> None:
    def calls(op: str, *backends: str) -> list[str]:
        schedules = ("auto", "sequential", "overlapped", "pingpong")
        found = find_variants(OPERATORS[op], backends, schedules, on_gpu=True, rivals=True)
        return [variant.call for variant in found]

    some = ["tk:auto", "tk:sequential", "tk:overlapped"]
    for op in ("gla", "delta_rule", "gated_delta_rule"):
        assert calls(op, "tk") == some and calls(op, "tk:pingpong") == []
    for op in ("mlstm_exp", "mlstm_sig", "simple_gla", "retention", "lightning"):
        assert calls(op, "tk") == [*some, "tk:pingpong"] and calls(op, "tk:pingpong") == ["tk:pingpong"]
    others = ("triton:siging_xl_32", "triton:fla", "tilelang", "triton:mamba_ssm")
    assert calls("mlstm_sig", *others) == ["triton:siging_xl_32"] and calls("mlstm_exp", *others) == []
    assert calls("gla", *others) == ["triton:fla"]
    assert calls("gated_delta_rule", *others) == ["triton:fla", "tilelang:flash_qla"]
    assert calls("simple_gla", *others) == ["triton:fla", "triton:mamba_ssm"]


def test_variants_by_name() -> None:
    names = ["tk", "triton:xl_chunk_128", "reference:recurrent", "tk:overlapped"]
    found = find_variants(OPERATORS["mlstm_exp"], names, ["overlapped", "pingpong"], on_gpu=True)
    assert found == [
        Variant("tk:overlapped", "tk", "overlapped", True),
        Variant("tk:pingpong", "tk", "pingpong", True),
        Variant("triton:xl_chunk_128", "triton:xl_chunk_128", None, True),
        Variant("reference:recurrent", "reference:recurrent", None, True),
    ]


@pytest.mark.parametrize("name", ["cuda", "triton:", "tk:fast", "reference:foo", "triton:xl", "tilelang:qla"])
def test_variants_refuse_unknown_names(name: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        find_variants(OPERATORS["mlstm_exp"], [name], ["auto"], on_gpu=True)


def test_variants_are_backends_of_the_public_function() -> None:
    inputs = OPERATORS["mlstm_exp"].inputs
    tensors = inputs(Shape(1, 64, 1, 16, 16), torch.float32, torch.device("cpu"), "bnsd", 0)
    for variant in find_variants(OPERATORS["mlstm_exp"], ["triton", "reference"], ["auto"], on_gpu=False):
        if variant.family == "reference":
            assert mlstm_chunkwise(*tensors.values(), backend=variant.call).shape == (1, 1, 64, 16)
        else:
            with pytest.raises(UnsupportedError, match="GPU"):
                mlstm_chunkwise(*tensors.values(), backend=variant.call)
