"""fla's own dispatch, which hands calls of the gated delta rule over to these kernels."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tfla_tk
from tfla_tk.integrations import fla as integration

from .fla_calls import draw_gated_delta_rule, own

pytestmark = [
    pytest.mark.usefixtures("restored"),
    pytest.mark.filterwarnings("ignore:Triton is not supported"),
]

ON_A_CPU = integration.Path("chunk_gated_delta_rule", "reference", "the tensors are on a CPU")


def expected_of(x: dict[str, Any]) -> Any:
    """Output and final state of the recurrence."""
    return tfla_tk.chunk_gated_delta_rule(**x, output_final_state=True, backend="reference:recurrent")


def test_a_reference_taken_before_reaches_these_kernels() -> None:
    """A closure keeps fla's function; fla itself hands the call over, and no more after `restore`."""
    function, x = own("chunk_gated_delta_rule"), draw_gated_delta_rule()
    integration.accelerate()
    assert own("chunk_gated_delta_rule") is not function
    o, last = function(**x, output_final_state=True)
    assert integration.last_path() == ON_A_CPU
    torch.testing.assert_close((o, last), expected_of(x), rtol=1e-4, atol=1e-5)
    integration.restore()
    registry = importlib.import_module("fla.backends")._operation_registries["gated_delta_rule"]
    assert not registry._backends["tfla_tk"].is_available()


def test_a_reference_taken_while_accelerated_is_fla_s_after_restore(monkeypatch: pytest.MonkeyPatch) -> None:
    integration.accelerate()
    function = own("chunk_gated_delta_rule")
    integration.restore()
    module = importlib.import_module("fla.ops.gated_delta_rule.chunk")
    monkeypatch.setattr(module.ChunkGatedDeltaRuleFunction, "apply", lambda *args: ("fla's", None))
    assert function(**draw_gated_delta_rule()) == ("fla's", None)


RELOADED = """
import importlib, torch
from fla.ops.gated_delta_rule import chunk_gated_delta_rule as kept
from tfla_tk.integrations import fla
fla.accelerate()
importlib.reload(fla)
from fla.ops.gated_delta_rule import chunk_gated_delta_rule as replaced
q, gate = torch.randn(1, 70, 2, 16), torch.zeros(1, 70, 2)
for function in (kept, replaced):
    function(q, q, q, gate, gate)
    assert fla.last_path().backend == "reference"
    fla._last = None
"""


@pytest.mark.slow
def test_a_reload_keeps_what_is_accelerated(in_forks: Callable[..., dict[str, str]]) -> None:
    in_forks("", {"": RELOADED})


def test_it_comes_before_flash_qla() -> None:
    integration.accelerate("chunk_gated_delta_rule")
    importlib.import_module("fla.ops.gated_delta_rule")
    registry = importlib.import_module("fla.backends")._operation_registries["gated_delta_rule"]
    order = [backend.backend_type for backend in registry._get_sorted_backends()]
    assert order.index("tfla_tk") < order.index("flash_qla")
    integration.accelerate()  # again: still one
    assert [b.backend_type for b in registry._get_sorted_backends()] == order


def test_flags_that_are_no_bools() -> None:
    """fla asks no more of a flag than that it is true or not."""
    function, x = own("chunk_gated_delta_rule"), draw_gated_delta_rule()
    integration.accelerate()
    given = (x[name] for name in ("q", "k", "v", "g", "beta"))
    options = {"use_gate_in_kernel": 1, "A_log": x["A_log"], "dt_bias": x["dt_bias"]}
    o, last = function(*given, None, x["initial_state"].mT, 1, 1, 1, 1, 1, **options)
    torch.testing.assert_close((o, last.mT), expected_of(x), rtol=1e-4, atol=1e-5)
    assert function(**x, output_final_state=None)[1] is None
