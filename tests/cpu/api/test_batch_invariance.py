"""The option batch_invariant: how it is set, who sees it, and that a call keeps what it began with."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import EagerAndRecordGraphs

import tfla_tk
from tfla_tk import (
    UnsupportedError,
    batch_invariant,
    chunk_simple_gla,
    is_batch_invariant,
    mlstm_chunkwise,
    mlstm_step,
)
from tfla_tk.calls.mlstm import MLSTMCall, check_mlstm
from tfla_tk.core import dispatch, eager
from tfla_tk.core.support import Support

from .conftest import make_inputs
from .simple_gla_calls import Kernels, draw


@pytest.fixture(autouse=True)
def off() -> Iterator[None]:
    yield
    batch_invariant(False)


def test_as_a_function() -> None:
    assert not is_batch_invariant()
    batch_invariant(True)
    assert is_batch_invariant()
    batch_invariant(False)
    assert not is_batch_invariant()
    batch_invariant()
    assert is_batch_invariant()


def test_as_a_context_manager() -> None:
    with batch_invariant():
        assert is_batch_invariant()
        with batch_invariant(False):
            assert not is_batch_invariant()
        assert is_batch_invariant()
    assert not is_batch_invariant()
    with pytest.raises(KeyError), batch_invariant():
        raise KeyError
    assert not is_batch_invariant()


@pytest.mark.parametrize("value", ["yes", 1, None, 1.0])
def test_anything_but_a_bool_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^enabled: expected a bool, got .* of type "):
        batch_invariant(value)
    assert not is_batch_invariant()


def test_all_threads_see_it() -> None:
    seen: list[bool] = []
    with batch_invariant():
        thread = threading.Thread(target=lambda: seen.append(is_batch_invariant()))
        thread.start()
        thread.join()
    assert seen == [True]


def describe(x: dict[str, Tensor]) -> MLSTMCall:
    return check_mlstm(
        **x, c_initial=None, n_initial=None, m_initial=None, sigmoid_gate=False, normalize=True,
        return_last_states=False, eps=1e-6, chunk_size=64,
    )  # fmt: skip


def test_triton_is_refused_by_name_and_left_out_by_auto(
    fake_tk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tfla_tk.backends.triton import mlstm_kernels

    monkeypatch.setattr(mlstm_kernels, "supports_mlstm", lambda call, variant=None: Support(True))
    x = make_inputs()
    assert dispatch.choose("mlstm_chunkwise", "mlstm", describe(x), "auto", load=False)[0] == "triton"
    with batch_invariant():
        assert dispatch.choose("mlstm_chunkwise", "mlstm", describe(x), "auto", load=False)[0] == "reference"
        with pytest.raises(UnsupportedError, match="may depend on the batch") as error:
            mlstm_chunkwise(**x, backend="triton")
        assert "backend='tk'" in error.value.remedy
        assert tfla_tk.which(mlstm_chunkwise, **x).backend == "reference"


# A call keeps what it began with


@pytest.mark.parametrize("direct", [True, False], ids=["kernels", "ops"])
@pytest.mark.parametrize("on", [False, True])
def test_mlstm(on: bool, direct: bool, fake_tk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the second of two equal calls, whose plan is kept."""
    from tfla_tk.ops import mlstm as ops

    seen: list[tuple[str, Any]] = []

    def noting(name: str, place: int, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            seen.append((name, args[place] if len(args) > place else False))
            return function(*args)

        return call

    fake_tk.verdict = Support(True)
    monkeypatch.setattr(fake_tk.forward, "mlstm_fwd", noting("fwd", 14, fake_tk.forward.mlstm_fwd))
    monkeypatch.setattr(fake_tk.backward, "mlstm_bwd", noting("bwd", 21, fake_tk.backward.mlstm_bwd))
    monkeypatch.setattr(ops, "_fwd", noting("fwd", 14, ops._fwd))
    monkeypatch.setattr(ops, "_bwd", noting("bwd", 21, ops._bwd))
    if not direct:
        monkeypatch.setattr(eager, "KNOWS_EAGER_CALLS", False)
    x = {name: t.requires_grad_() for name, t in make_inputs().items()}
    for value in (on, not on, on):
        seen.clear()
        with batch_invariant(value):
            h = mlstm_chunkwise(**x, backend="tk")
        with batch_invariant(not value):
            h.sum().backward()
        assert dict(seen) == {"fwd": value, "bwd": value}


def test_a_step(fake_tk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    kernel = fake_tk.decoding.with_new_state

    def step(*args: Any) -> Any:
        seen.append(args[-1])
        return kernel(*args)

    monkeypatch.setattr(fake_tk.decoding, "with_new_state", step)
    fake_tk.verdict = Support(True)
    q, gate = torch.ones(2, 3, 16), torch.ones(2, 3, 1)
    for value in (True, False):
        with batch_invariant(value):
            mlstm_step(q, q, q, gate, gate, torch.ones(2, 3, 16, 16), q, gate, backend="tk")
    assert seen == [True, False]


# torch.compile


def ops_of(graphs: list[torch.fx.GraphModule]) -> list[tuple[Any, ...]]:
    """What the forward op got in each graph behind its tensors."""
    nodes = (node for graph in graphs for node in graph.graph.nodes)
    return [node.args[6:] for node in nodes if node.target is torch.ops.tfla_tk.simple_gla_fwd.default]


def test_compiled_calls_follow_it(kernels: Kernels) -> None:
    """A change compiles anew, and a graph that is there serves again."""
    torch._dynamo.reset()
    recorded = EagerAndRecordGraphs()
    compiled = torch.compile(chunk_simple_gla, backend=recorded, fullgraph=True)
    x = draw()
    for value in (False, True, False, True):
        with batch_invariant(value):
            compiled(**x, backend="tk")
    assert [options[1] for options in ops_of(recorded.graphs)] == [False, True]
    torch._dynamo.reset()


def test_within_compiled_code(kernels: Kernels) -> None:
    recorded = EagerAndRecordGraphs()

    def function(x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        with batch_invariant():
            first, _ = chunk_simple_gla(**x, backend="tk")
        second, _ = chunk_simple_gla(**x, backend="tk")
        return first, second

    torch._dynamo.reset()
    torch.compile(function, backend=recorded)(draw())
    assert [options[1] for options in ops_of(recorded.graphs)] == [True, False]
    assert not is_batch_invariant()
    torch._dynamo.reset()
