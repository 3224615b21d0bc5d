"""FLA as the baseline: how it is called, and when its guard is lifted. FLA's modules are replaced."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tfla_tk import UnsupportedError, reference
from tfla_tk.bench import fla, runner
from tfla_tk.bench.operators import OPERATORS
from tfla_tk.bench.runner import FAILED, OK, Contest, run_contest
from tfla_tk.bench.shapes import Shape
from tfla_tk.bench.variants import Variant

SHAPE = Shape(1, 48, 2, 16, 32)
VARIANTS = [Variant("triton:fla"), Variant("reference")]


class Guarded(torch.autograd.Function):
    """The identity, whose backward raises where FLA's guard stands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        if not sys.modules["fla.ops.common.chunk_o"].TRITON_ABOVE_3_7_1:
            raise RuntimeError("incorrect results")
        return dx * sys.modules["fla.ops.common.chunk_o"].factor


@pytest.fixture
def chunk_o(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """FLA's modules on a Hopper GPU with a Triton that it distrusts; the functions are the reference's."""
    calls: list[tuple[tuple[int, ...], ...]] = []

    def chunk_simple_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, **options: Any) -> Any:
        calls.append((tuple(q.shape), tuple(v.shape)))
        o, state = reference.simple_gla_chunkwise(q, k, v, g, **options)
        return Guarded.apply(o), state

    chunk_o = SimpleNamespace(
        IS_NVIDIA_HOPPER=True, TRITON_ABOVE_3_4_0=True, TRITON_ABOVE_3_7_1=False, factor=1.0, calls=calls
    )
    modules = {
        "fla.backends": SimpleNamespace(_DISPATCH_DISABLED=True),
        "fla.ops.common.chunk_o": chunk_o,
        "fla.ops.simple_gla": SimpleNamespace(chunk_simple_gla=chunk_simple_gla),
    }
    for name in ("fla", "fla.ops", "fla.ops.common"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(fla, "find_package", lambda name: object())
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("FLA_DISABLE_BACKEND_DISPATCH", "1")
    return chunk_o


def contest(settings, monkeypatch: pytest.MonkeyPatch, shape: Shape = SHAPE):
    """A contest that takes its device for a GPU where it asks whether to lift the guard."""
    lifted = runner.fla.lifted_guard
    monkeypatch.setattr(runner, "lifted_guard", lambda operator, *others: lifted(operator.function))
    return run_contest(Contest(OPERATORS["simple_gla"], "fwdbwd", shape, VARIANTS), settings)


def test_the_guard_is_lifted_for_a_checked_contest_alone(settings, monkeypatch, chunk_o) -> None:
    outcome, ours = contest(settings, monkeypatch)
    assert (outcome.status, ours.status) == (OK, OK)
    assert outcome.row["note"] == fla.NOTE and "note" not in ours.row
    assert list(outcome.row["rel_err"]) == ["o", "dq", "dk", "dv", "dg"]
    assert not chunk_o.TRITON_ABOVE_3_7_1
    # a miscompiled backward is found and not timed
    chunk_o.factor = 1.2
    chunk_o.calls.clear()
    outcome, ours = contest(settings, monkeypatch)
    assert (outcome.status, ours.status) == (FAILED, OK) and outcome.row is None
    assert "dq 2.0e-01 > " in outcome.reason
    assert len(chunk_o.calls) == 1 and not chunk_o.TRITON_ABOVE_3_7_1


def test_the_guard_stands_without_a_gpu_and_for_the_forward(settings, chunk_o) -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    for op, which, device, variants, expected in (
        ("simple_gla", "fwdbwd", cuda, VARIANTS, True),
        ("simple_gla", "fwd", cuda, VARIANTS, False),
        ("simple_gla", "fwdbwd", cpu, VARIANTS, False),
        ("simple_gla", "fwdbwd", cuda, VARIANTS[1:], False),
        ("retention", "fwdbwd", cuda, VARIANTS, False),
    ):
        with runner.lifted_guard(OPERATORS[op], variants, which, device) as lifted:
            assert lifted is expected is chunk_o.TRITON_ABOVE_3_7_1
    (outcome, _) = run_contest(Contest(OPERATORS["simple_gla"], "fwdbwd", SHAPE, VARIANTS), settings)
    assert (outcome.status, outcome.reason) == (FAILED, "RuntimeError: incorrect results")


def test_queries_and_keys_are_repeated_where_fla_does_not_take_more_value_heads(
    settings, monkeypatch, chunk_o
) -> None:
    outcome, ours = contest(settings, monkeypatch, dataclasses.replace(SHAPE, HV=6))
    assert (outcome.status, ours.status) == (OK, OK)
    assert set(chunk_o.calls) == {((1, 48, 6, 16), (1, 48, 6, 32))}
    got: list[int] = []

    def function(q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> None:
        got.append(q.shape[2])

    for name in ("delta_rule", "gated_delta_rule"):
        module = SimpleNamespace(**{f"chunk_{name}": function})
        monkeypatch.setitem(sys.modules, f"fla.ops.{name}", module)
        q, v = torch.zeros(1, 16, 1, 16), torch.zeros(1, 16, 3, 16)
        fla.call(f"chunk_{name}", q, q, v, v[..., 0])
    assert got == [3, 1]


@pytest.mark.parametrize("serves", [False, True])
def test_fla_with_its_dispatch_on(serves: bool, chunk_o) -> None:
    """It is called where no backend serves; the refusal tells how to switch them off."""

    class Base:
        is_available = classmethod(lambda cls: False)
        is_enabled = staticmethod(lambda: serves)

    class Derived(Base):
        is_available = classmethod(lambda cls: True)

    backends = sys.modules["fla.backends"]
    backends._DISPATCH_DISABLED = False
    backends.BaseBackend = SimpleNamespace(__subclasses__=lambda: [Base])
    q = torch.zeros(1, 16, 1, 16)
    refused = pytest.raises(UnsupportedError, match=r"kernels of other packages.*FLA_TILELANG=0")
    with refused if serves else contextlib.nullcontext():
        fla.call("chunk_simple_gla", q, q, q, q[..., 0])
    assert len(chunk_o.calls) == (not serves)


def test_fla_that_is_not_installed(monkeypatch, chunk_o) -> None:
    monkeypatch.setattr(fla, "find_package", lambda name: None)
    q = torch.zeros(1, 16, 1, 16)
    with pytest.raises(UnsupportedError, match="fla-core is not installed"):
        fla.call("chunk_simple_gla", q, q, q, q[..., 0])
    with fla.lifted_guard("chunk_simple_gla") as lifted:
        assert not lifted
