"""Which variants of an operator the options of the commands name."""

from __future__ import annotations

import pytest

from tfla_tk.bench.operators import OPERATORS
from tfla_tk.bench.variants import FAMILIES, Variant, check_named, find_variants


def calls(op: str, *backends: str, on_gpu: bool = True, rivals: bool = True) -> list[str]:
    found = find_variants(OPERATORS[op], backends or None, on_gpu=on_gpu, rivals=rivals)
    assert len({variant.call for variant in found}) == len(found)
    return [variant.call for variant in found]


def test_all_that_an_operator_has() -> None:
    triton = [f"triton:{name}" for name in ("limit_chunk_64", "xl_chunk_64", "xl_chunk_128", "xl_chunk_256")]
    assert calls("mlstm_exp") == calls("mlstm_exp", *FAMILIES) == ["tk", *triton, "reference"]
    assert calls("gated_delta_rule") == ["tk", "triton:fla", "tilelang:flash_qla", "reference"]
    assert calls("gated_delta_rule", rivals=False) == ["tk", "triton:fla", "reference"]
    forms = [f"reference:{form}" for form in ("recurrent", "parallel", "chunkwise")]
    assert calls("gla", on_gpu=False) == calls("gla", "reference", on_gpu=False) == forms


def test_what_an_operator_lacks_is_left_out_where_another_one_has_it() -> None:
    others = ("triton:siging_xl_32", "triton:fla", "tilelang", "triton:mamba_ssm")
    assert calls("mlstm_sig", *others) == ["triton:siging_xl_32"] and calls("mlstm_exp", *others) == []
    for name in ("gla", "retention", "lightning", "delta_rule"):
        assert calls(name, *others) == calls(name, "triton") == ["triton:fla"]
    assert calls("gated_delta_rule", *others) == ["triton:fla", "tilelang:flash_qla"]
    assert calls("simple_gla", *others) == ["triton:fla", "triton:mamba_ssm"]


def test_what_was_named() -> None:
    """A failure of a single variant counts; of a family one has to serve."""
    names = ["tk", "triton:xl_chunk_128", "reference:recurrent", "reference"]
    found = find_variants(OPERATORS["mlstm_exp"], names, on_gpu=True)
    assert found == [
        *(Variant(name, named=True) for name in names[:3]),
        Variant("reference", family_named=True),
    ]
    found = find_variants(OPERATORS["mlstm_exp"], None, on_gpu=True)
    assert not any(variant.named or variant.family_named for variant in found)


def test_unknown_names_are_refused() -> None:
    """Functions of other packages are no backends where rivals do not take part."""
    for name, rivals, expected in (
        ("cuda", True, "tk, triton, "),
        ("triton:", True, "tk, triton, "),
        ("triton:xl", True, "a variant such as triton:limit_chunk_64, "),
        ("tk:fast", True, "a variant such as tk, got 'tk:fast'"),
        ("reference:foo", True, "a variant such as reference:recurrent, reference:parallel, "),
        ("tilelang:qla", True, ""),
        ("triton:mamba_ssm", False, "a variant such as triton:"),
        ("tilelang", False, "tk, triton, "),
    ):
        with pytest.raises(ValueError, match=f"--backends: expected {expected}"):
            check_named(list(OPERATORS.values()), [name], rivals=rivals)
