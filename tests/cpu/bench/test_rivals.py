"""FlashQLA and mamba_ssm beside tk: how they are called, checked and left out. Stand-ins compute for them."""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tfla_tk import reference
from tfla_tk.bench import results, rivals
from tfla_tk.bench.operators import OPERATORS
from tfla_tk.bench.report import reasons
from tfla_tk.bench.runner import OK, UNSUPPORTED, Contest, Outcome, run_contest
from tfla_tk.bench.shapes import Shape
from tfla_tk.bench.variants import Variant


def expand(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[2], 2)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Both packages, whose functions take any device; what they were called with."""
    seen = SimpleNamespace(offsets=[], sequences=[])

    def chunk_gated_delta_rule(q, k, v, g, beta, *, cu_seqlens=None) -> Any:
        seen.offsets.append(cu_seqlens)
        tensors = (expand(q, v.shape[2]).float(), expand(k, v.shape[2]).float(), v.float(), g, beta)
        o, state = reference.gated_delta_rule_chunkwise(*tensors, cu_seqlens=cu_seqlens)
        return o.to(v.dtype), state

    def mamba_chunk_scan_combined(x, dt, a, b, c, *, chunk_size, seq_idx=None) -> Tensor:
        assert chunk_size == rivals.MAMBA_CHUNK and (a == -1).all() and (dt > 0).all()
        seen.sequences.append(seq_idx)
        offsets = None if seq_idx is None else torch.tensor([0, *seq_idx[0].bincount().cumsum(0)])
        tensors = (expand(c, x.shape[2]), expand(b, x.shape[2]), x * dt[..., None], dt * a)
        return reference.simple_gla_chunkwise(*tensors, scale=1.0, cu_seqlens=offsets)[0]

    flash_qla = SimpleNamespace(chunk_gated_delta_rule=chunk_gated_delta_rule)
    mamba = SimpleNamespace(mamba_chunk_scan_combined=mamba_chunk_scan_combined)
    monkeypatch.setitem(sys.modules, "flash_qla", flash_qla)
    monkeypatch.setattr(rivals, "_mamba_module", lambda: mamba)
    monkeypatch.setattr(rivals, "find_package", lambda name: object())
    monkeypatch.setattr(rivals, "_check_gpu", lambda variant, tensor: None)
    return seen


def contest(variant: str, settings, which: str, shape: Shape) -> Outcome:
    operator = OPERATORS[rivals.RIVALS[variant].operator]
    (outcome,) = run_contest(Contest(operator, which, shape, [Variant(variant)]), settings)
    return outcome


@pytest.mark.parametrize("which", ["fwd", "fwdbwd"])
@pytest.mark.parametrize(
    "shape", [Shape(2, 48, 2, 16, 32), Shape(1, 64, 2, 16, 16, HV=6), Shape(1, 60, 2, 16, 16, N=4)]
)
def test_mamba_computes_simple_gla(settings, installed, which: str, shape: Shape) -> None:
    outcome = contest(rivals.MAMBA, settings, which, shape)
    assert outcome.status == OK, outcome.reason
    results.validate(outcome.row)
    gradients = ["dq", "dk", "dv"] if which == "fwdbwd" else []
    assert list(outcome.row["rel_err"]) == ["o", *gradients]
    assert max(outcome.row["rel_err"].values()) < 1e-4
    assert "not checked" in outcome.row["note"]
    if shape.N is not None:
        assert [row.bincount().tolist() for row in installed.sequences[0]] == [shape.lengths(settings.seed)]


@pytest.mark.parametrize("which", ["fwd", "fwdbwd"])
@pytest.mark.parametrize("shape", [Shape(1, 64, 1, 128, 128, HV=2), Shape(1, 64, 1, 128, 128, N=3)])
def test_flash_qla_computes_the_gated_delta_rule(settings, installed, which: str, shape: Shape) -> None:
    outcome = contest(rivals.FLASH_QLA, dataclasses.replace(settings, dtype="bf16"), which, shape)
    assert outcome.status == OK, outcome.reason
    results.validate(outcome.row)
    assert outcome.row["backend"] == "tilelang:flash_qla" and "note" not in outcome.row
    assert all(
        (x is None) == (shape.N is None) and (x is None or x.dtype == torch.int64) for x in installed.offsets
    )


def test_what_is_not_installed_is_told(settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "find_package", lambda name: None)
    for variant, package in ((rivals.FLASH_QLA, "flash_qla"), (rivals.MAMBA, "mamba_ssm")):
        outcome = contest(variant, settings, "fwd", Shape(1, 64, 1, 128, 128))
        assert outcome.status == UNSUPPORTED and f"{package} is not installed" in reasons([outcome])[0]


def test_mamba_modules_are_imported_where_the_extensions_are_missing(tmp_path, monkeypatch) -> None:
    """The package's own __init__ raises; the module below it is imported all the same."""
    folder = tmp_path / "mamba_ssm" / "ops" / "triton"
    folder.mkdir(parents=True)
    (tmp_path / "mamba_ssm" / "__init__.py").write_text("import selective_scan_cuda_that_is_not_there\n")
    for package in (folder.parent, folder):
        (package / "__init__.py").write_text("")
    (folder / "ssd_combined.py").write_text("from mamba_ssm.ops import triton\nNAME = 'mine'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [each for each in sys.modules if each.partition(".")[0] == "mamba_ssm"]:
        monkeypatch.delitem(sys.modules, name)
    try:
        assert rivals._mamba_module().NAME == "mine"
        assert isinstance(sys.modules["mamba_ssm"], ModuleType)
    finally:
        for name in [each for each in sys.modules if each.partition(".")[0] == "mamba_ssm"]:
            del sys.modules[name]
