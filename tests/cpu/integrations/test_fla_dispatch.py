"""fla's own dispatch, which hands calls of the gated delta rule and of KDA over to these kernels."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import torch

import tfla_tk
from tfla_tk.integrations import fla as integration

from .fla_calls import DISPATCHED, MARKS, draw_raw, own

pytestmark = MARKS

of_dispatched = pytest.mark.parametrize("name", DISPATCHED)


def expected_of(name: str, x: dict[str, Any]) -> Any:
    """Output and final state of the recurrence."""
    return getattr(tfla_tk, name)(**x, output_final_state=True, backend="reference:recurrent")


def registry_of(name: str) -> Any:
    """Of fla, with the backends of a function."""
    backends = importlib.import_module("fla.backends")
    if name == "chunk_gated_delta_rule":
        return backends._operation_registries["gated_delta_rule"]
    return backends._function_registries[inspect.unwrap(getattr(own(name), "tfla_tk_original", own(name)))]


@of_dispatched
def test_a_reference_taken_before_reaches_these_kernels(name: str) -> None:
    """A closure keeps fla's function; fla itself hands the call over, and no more after `restore`."""
    function, x = own(name), draw_raw(name)
    integration.accelerate()
    assert own(name) is not function
    o, last = function(**x, output_final_state=True)
    assert integration.last_path() == integration.Path(name, "reference", "the tensors are on a CPU")
    torch.testing.assert_close((o, last), expected_of(name, x), rtol=1e-4, atol=1e-5)
    integration.restore()
    assert not registry_of(name)._backends["tfla_tk"].is_available()


@of_dispatched
def test_a_reference_taken_while_accelerated_is_fla_s_after_restore(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    integration.accelerate()
    function = own(name)
    integration.restore()
    module, title = {
        "chunk_gated_delta_rule": ("gated_delta_rule", "ChunkGatedDeltaRuleFunction"),
        "chunk_kda": ("kda", "ChunkKDAFunction"),
    }[name]
    autograd = getattr(importlib.import_module(f"fla.ops.{module}.chunk"), title)
    monkeypatch.setattr(autograd, "apply", lambda *args: ("fla's", None))
    assert function(**draw_raw(name)) == ("fla's", None)


def test_a_step_of_kda_taken_before_reaches_these_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what fla's function looks up; whoever calls that for more than fla's function has keeps fla's."""
    function, x = own("fused_recurrent_kda"), draw_raw("chunk_kda", seq=3)
    module = importlib.import_module("fla.ops.kda.fused_recurrent")

    def fused_recurrent_kda_fwd(**given: Any) -> str:
        return "fla's"

    with monkeypatch.context() as patch:
        patch.setattr(module, "fused_recurrent_kda_fwd", fused_recurrent_kda_fwd)
        integration.accelerate()
        for other in ({"inplace_final_state": True}, {"inplace_final_state": False, "out": x["v"]}):
            assert module.fused_recurrent_kda_fwd(**x, **other) == "fla's"
        assert integration.last_path() is None
        integration.restore()
    integration.accelerate()
    found = function(**x, output_final_state=True)
    path = integration.Path("fused_recurrent_kda", "reference", "the tensors are on a CPU")
    assert integration.last_path() == path
    torch.testing.assert_close(found, expected_of("chunk_kda", x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "other"), [(DISPATCHED[0], "flash_qla"), (DISPATCHED[1], "flash_kda")])
def test_it_comes_before_other_packages(name: str, other: str) -> None:
    integration.accelerate(name)
    registry = registry_of(name)
    order = [backend.backend_type for backend in registry._get_sorted_backends()]
    assert order.index("tfla_tk") < order.index(other)
    integration.accelerate()  # again: still one
    assert [b.backend_type for b in registry._get_sorted_backends()] == order


def test_flags_that_are_no_bools() -> None:
    """fla asks no more of a flag than that it is true or not."""
    name = "chunk_gated_delta_rule"
    function, x = own(name), draw_raw(name)
    integration.accelerate()
    given = (x[name] for name in ("q", "k", "v", "g", "beta"))
    options = {"use_gate_in_kernel": 1, "A_log": x["A_log"], "dt_bias": x["dt_bias"]}
    o, last = function(*given, None, x["initial_state"].mT, 1, 1, 1, 1, 1, **options)
    torch.testing.assert_close((o, last.mT), expected_of(name, x), rtol=1e-4, atol=1e-5)
    assert function(**x, output_final_state=None)[1] is None
