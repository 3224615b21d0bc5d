"""fla's functions replaced by this package's, with the real package: callers, and the way back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from tfla_tk.backends.triton import fla_own
from tfla_tk.integrations import fla as integration

from .fla_calls import ALL, MARKS, own

pytestmark = MARKS


# what of fla's is replaced beside its functions
APPLIED = {
    "fla.ops.gated_delta_rule.fused_recurrent.FusedRecurrentFunction",
    "fla.ops.kda.fused_recurrent.fused_recurrent_kda_fwd",
}


def holders(function: Any) -> set[str]:
    """Every attribute of a module that is this function."""
    return {
        f"{name}.{attribute}"
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType)
        for attribute, value in list(vars(module).items())
        if value is function
    }


@pytest.mark.slow
def test_every_attribute_of_a_module_is_replaced_and_put_back() -> None:
    functions = {name: own(name) for name in ALL}
    before = {name: holders(function) for name, function in functions.items()}
    assert {"fla.ops.chunk_retention", "fla.ops.retention.chunk.chunk_retention"} <= before["chunk_retention"]
    assert "fla.ops.retention.chunk.chunk_simple_gla" in before["chunk_simple_gla"]
    assert not any(map(integration.is_accelerated, ALL))

    found = integration.accelerate()
    assert set(found) == APPLIED.union(*before.values())
    assert not any(map(holders, functions.values()))
    assert {name: holders(own(name)) for name in ALL} == before
    assert integration.is_accelerated() and all(map(integration.is_accelerated, ALL))
    assert integration.accelerate() == []  # again: nothing to do
    assert {name: holders(own(name)) for name in ALL} == before

    assert set(integration.restore()) == set(found)
    assert {name: own(name) for name in ALL} == functions
    assert {name: holders(function) for name, function in functions.items()} == before
    assert not integration.is_accelerated() and integration.restore() == []


def test_some_of_them() -> None:
    integration.accelerate(["chunk_retention"])
    assert [integration.is_accelerated(name) for name in ALL] == [name == "chunk_retention" for name in ALL]
    assert not integration.is_accelerated()
    integration.accelerate()
    integration.restore("chunk_simple_gla")
    assert [integration.is_accelerated(name) for name in ALL] == [name != "chunk_simple_gla" for name in ALL]
    for function in (integration.accelerate, integration.restore):
        with pytest.raises(ValueError, match="names: expected some of chunk_simple_gla, .* got 'chunk_gsa'"):  # noqa: RUF043
            function(["chunk_gsa"])
    with pytest.raises(ValueError, match="names: expected some of"):
        integration.is_accelerated("softmax")


def test_later_imports_find_it_and_are_restored(
    accelerated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("a_model_of_somebody")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec("from fla.ops.simple_gla import chunk_simple_gla as attention", vars(module))
    assert module.attention is own("chunk_simple_gla")
    integration.restore()
    assert module.attention is own("chunk_simple_gla")
    assert not hasattr(module.attention, fla_own.ORIGINAL)


def test_a_module_that_has_got_hold_of_the_original(
    accelerated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("another_model")
    module.attention = fla_own.original(own("chunk_simple_gla"))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert integration.accelerate() == ["another_model.attention"]


LOADED_ANEW = """
import importlib, sys
import torch
from tfla_tk.integrations import fla

PLACE = "fla.ops.simple_gla.chunk.chunk_simple_gla"
GATED = "fla.ops.gated_delta_rule.chunk.chunk_gated_delta_rule"
first = set(fla.accelerate())
q = torch.randn(1, 40, 2, 16)
for _ in range(2):
    module, gated = (importlib.reload(sys.modules[x.rpartition(".")[0]]) for x in (PLACE, GATED))
    newest = [module.chunk_simple_gla]
    assert not fla.is_accelerated("chunk_simple_gla") and not fla.is_accelerated()
    assert set(fla.accelerate()) == {PLACE, GATED, "fla.ops.gated_delta_rule.chunk.chunk_gdn"}
    assert fla.is_accelerated() and fla.accelerate() == []
    for function in (module.chunk_simple_gla, sys.modules["fla.ops"].chunk_simple_gla):
        function(q, q, q)
        assert fla.last_path().backend == "reference"
        fla._last = None
    gated.chunk_gated_delta_rule(q, q, q, q[..., 0], q[..., 0])
    assert fla.last_path().backend == "reference"
assert first <= set(fla.restore())
assert module.chunk_simple_gla is newest[0]
ours = [name for m in list(sys.modules.values()) for name, value in list(vars(m).items())
        if name.startswith("chunk_") and hasattr(value, "tfla_tk_original")]
assert not ours and not fla.is_accelerated("chunk_simple_gla") and fla.restore() == []
"""


OURS_LOADED_ANEW = """
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


def test_modules_that_are_loaded_anew(in_forks: Callable[..., dict[str, str]]) -> None:
    """Those of fla are found again; after one of ours what is accelerated stays so."""
    in_forks("import torch, fla.ops", {"of fla": LOADED_ANEW, "of ours": OURS_LOADED_ANEW})


def test_looks_like_the_original(accelerated: list[str]) -> None:
    import inspect

    function = own("chunk_simple_gla")
    original = fla_own.original(function)
    assert function is not original
    assert inspect.signature(function) == inspect.signature(original)
    assert function.__doc__ == original.__doc__


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ModuleNotFoundError(name="fla"), "fla is not installed: pip install flash-linear-attention"),
        (ModuleNotFoundError(name="triton"), "fla needs triton, which is not installed: pip install triton"),
        # by a stand-in for triton
        (AttributeError("no 'language'"), "fla cannot be imported: AttributeError: no 'language'"),
    ],
)
def test_fla_fails_to_import(error: Exception, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> Any:
        raise error

    monkeypatch.setattr(integration.importlib, "import_module", fail)
    with pytest.raises(ImportError, match=f"^{told}$"):
        integration.accelerate()
