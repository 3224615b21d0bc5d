"""Which variants of an operator the options of the commands name."""

from __future__ import annotations

import pytest
import torch

from tfla_tk import UnsupportedError, mlstm_chunkwise
from tfla_tk.bench.operators import OPERATORS
from tfla_tk.bench.shapes import Shape
from tfla_tk.bench.variants import Variant, find_variants


def test_variants_on_a_gpu() -> None:
    found = find_variants(OPERATORS["mlstm_exp"], None, on_gpu=True)
    assert [variant.call for variant in found] == [
        "tk",
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
        found = find_variants(OPERATORS[op], backends, on_gpu=True, rivals=True)
        return [variant.call for variant in found]

    others = ("triton:siging_xl_32", "triton:fla", "tilelang", "triton:mamba_ssm")
    assert calls("mlstm_sig", *others) == ["triton:siging_xl_32"] and calls("mlstm_exp", *others) == []
    assert calls("gla", *others) == ["triton:fla"]
    assert calls("gated_delta_rule", *others) == ["triton:fla", "tilelang:flash_qla"]
    assert calls("simple_gla", *others) == ["triton:fla", "triton:mamba_ssm"]


def test_variants_by_name() -> None:
    names = ["tk", "triton:xl_chunk_128", "reference:recurrent"]
    found = find_variants(OPERATORS["mlstm_exp"], names, on_gpu=True)
    assert found == [
        Variant("tk", "tk", None, True),
        Variant("triton:xl_chunk_128", "triton:xl_chunk_128", None, True),
        Variant("reference:recurrent", "reference:recurrent", None, True),
    ]


@pytest.mark.parametrize("name", ["cuda", "triton:", "tk:fast", "reference:foo", "triton:xl", "tilelang:qla"])
def test_variants_refuse_unknown_names(name: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        find_variants(OPERATORS["mlstm_exp"], [name], on_gpu=True)


def test_variants_are_backends_of_the_public_function() -> None:
    inputs = OPERATORS["mlstm_exp"].inputs
    tensors = inputs(Shape(1, 64, 1, 16, 16), torch.float32, torch.device("cpu"), "bnsd", 0)
    for variant in find_variants(OPERATORS["mlstm_exp"], ["triton", "reference"], on_gpu=False):
        if variant.family == "reference":
            assert mlstm_chunkwise(*tensors.values(), backend=variant.call).shape == (1, 1, 64, 16)
        else:
            with pytest.raises(UnsupportedError, match="GPU"):
                mlstm_chunkwise(*tensors.values(), backend=variant.call)
