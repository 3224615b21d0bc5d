"""Training by plain eager calls: the kernels without the ops, and where the backward needs the op."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tfla_tk import Support, mlstm_chunkwise, mlstm_siging_chunkwise
from tfla_tk.core import eager
from tfla_tk.ops import mlstm as ops

from .conftest import STATES, leaves, make_inputs
from .served import Operators

FUNCTIONS = {"exp": mlstm_chunkwise, "sig": mlstm_siging_chunkwise}


class Calls:
    """What is called.

    Attributes:
        kernels: "fwd" and "bwd", in order.
        ops: which of the two go through the dispatcher.
        last: the arguments of the last call of any of them, but for what only a kernel takes.
        more: what only a kernel takes.
    """

    def __init__(self, fake_tk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kernels: list[str] = []
        self.ops: set[str] = set()
        self.last: tuple[Any, ...] = ()
        self.more: tuple[Any, ...] = ()
        fake_tk.verdict = Support(True)
        for name, module in (("fwd", fake_tk.forward), ("bwd", fake_tk.backward)):
            kernel, op = getattr(module, f"mlstm_{name}"), getattr(ops, f"_{name}")
            monkeypatch.setattr(module, f"mlstm_{name}", self._noting(name, self.kernels.append, kernel))
            monkeypatch.setattr(ops, f"_{name}", self._noting(name, lambda of: self.ops.add(of), op))

    def _noting(self, name: str, note: Callable[[str], None], function: Callable[..., Any]) -> Any:
        count = len(getattr(torch.ops.tfla_tk, f"mlstm_{name}").default._schema.arguments)

        def call(*args: Any) -> Any:
            note(name)
            self.last, self.more = args[:count], args[count:]
            return function(*args)

        return call

    def clear(self) -> None:
        self.kernels.clear()
        self.ops.clear()


@pytest.fixture
def calls(fake_tk: Any, monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(fake_tk, monkeypatch)


def gradients(x: dict[str, Any], *outputs: Tensor, **options: Any) -> tuple[Tensor | None, ...]:
    """Of a sum of the outputs' squares."""
    wanted = [t for t in x.values() if t.requires_grad]
    return torch.autograd.grad(sum(t.square().sum() for t in outputs), wanted, allow_unused=True, **options)


@pytest.mark.parametrize("last", [False, True], ids=["h", "h_and_state"])
@pytest.mark.parametrize("states", [False, True], ids=["zeros", "initial"])
@pytest.mark.parametrize("varlen", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize(
    ("gate", "options"), [("exp", {}), ("sig", {}), ("sig", {"normalize": False})], ids=["exp", "sig", "raw"]
)
def test_both_paths_agree(
    gate: str,
    options: dict[str, Any],
    varlen: bool,
    states: bool,
    last: bool,
    calls: Calls,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Outputs, gradients, and what the backward is given, None in place of empty tensors."""
    names = (STATES if gate == "exp" else STATES[:2]) if states else ()
    x = make_inputs(1, sequences=3 if varlen else None, dtype=torch.bfloat16, states=names)
    if varlen:
        x["cu_seqlens"] = torch.tensor([0, 5, 5, 40])

    def train() -> list[Any]:
        inputs = leaves(x)
        plain = FUNCTIONS[gate](**x, **options, return_last_states=last)
        out = FUNCTIONS[gate](**inputs, **options, return_last_states=last)
        outputs = [out[0], *out[1]] if last else [out]
        assert all(map(torch.equal, outputs, [plain[0], *plain[1]] if last else [plain]))
        differentiable = [t for t in outputs if t.requires_grad]
        assert len(differentiable) == (3 if last else 1)
        found = [*outputs, *gradients(inputs, *differentiable), *calls.last]
        return [None if isinstance(t, Tensor) and t.numel() == 0 else t for t in found]

    direct = train()
    assert (calls.kernels, calls.ops) == (["fwd", "fwd", "bwd"], set())
    calls.clear()
    with monkeypatch.context() as patch:
        patch.setattr(eager, "KNOWS_EAGER_CALLS", False)
        dispatched = train()
    assert (calls.kernels, calls.ops) == ([], {"fwd", "bwd"})
    for a, b in zip(direct, dispatched, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


def test_only_the_gradients_that_are_asked_for(calls: Calls) -> None:
    """Of the last state alone, and where one input requires one; m is a constant."""
    x = make_inputs(states=STATES)
    x["k"].requires_grad_()
    h, (c, n, m) = mlstm_chunkwise(**x, return_last_states=True)
    assert h.requires_grad and c.requires_grad and n.requires_grad and not m.requires_grad
    c.sum().backward()
    assert x["k"].grad is not None and x["q"].grad is None
    assert (calls.kernels, calls.ops) == (["fwd", "bwd"], set())
    again = x | {"k": x["k"].detach().clone().requires_grad_()}
    _, (c, _, _) = mlstm_chunkwise(**again, return_last_states=True, backend="reference")
    c.sum().backward()
    torch.testing.assert_close(x["k"].grad, again["k"].grad)


def test_a_stabiliser_with_a_graph_passes_none_on(calls: Calls) -> None:
    """It records, as the op does, though nothing gets a gradient."""
    x = make_inputs(states=STATES)
    leaf = x["m_initial"].clone().requires_grad_()
    h = mlstm_chunkwise(**x | {"m_initial": leaf * 1})
    assert h.requires_grad and calls.kernels == ["fwd"]
    assert torch.autograd.grad(h.sum(), leaf, allow_unused=True) == (None,)


@pytest.mark.parametrize("context", [nullcontext, Operators])
def test_an_initial_state_may_be_changed_after_the_forward(
    context: Callable[[], AbstractContextManager[Any]], calls: Calls
) -> None:
    """A cache that is updated in place; of the kernels and of the op."""
    x = make_inputs(states=STATES)
    inputs = leaves({n: t for n, t in x.items() if n not in STATES})
    cache = {n: x[n].clone() for n in STATES}
    with context():
        h = mlstm_chunkwise(**inputs, **cache)
    assert calls.ops == ({"fwd"} if context is Operators else set())
    expected = torch.autograd.grad(h.square().sum(), list(inputs.values()), retain_graph=True)
    for t in cache.values():
        t.zero_()
    found = torch.autograd.grad(h.square().sum(), list(inputs.values()))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_an_input_must_not_be_changed_after_the_forward(calls: Calls) -> None:
    x = leaves(make_inputs())
    h = mlstm_chunkwise(**x | {"v": (v := x["v"] * 1)})
    v.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        h.sum().backward()


# where the backward is not plain


@pytest.mark.parametrize("last", [False, True])
def test_a_backward_that_is_watched(last: bool, calls: Calls) -> None:
    x = leaves(make_inputs())
    out = mlstm_chunkwise(**x, return_last_states=last)
    outputs = (out[0], *out[1][:2]) if last else (out,)
    expected = gradients(x, *outputs, retain_graph=True)
    assert (calls.kernels, calls.ops) == (["fwd", "bwd"], set())
    with Operators():
        found = gradients(x, *outputs)
    assert (calls.kernels, calls.ops) == (["fwd", "bwd"], {"bwd"})
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("watched", ["both", "backward"])
def test_a_profile_shows_the_kernels_that_run_without_it(watched: str, calls: Calls, fake_tk: Any) -> None:
    """Those of plain calls, the states of the forward included, under the names of the ops."""
    x = leaves(make_inputs())
    expected = gradients(x, mlstm_chunkwise(**x))
    plain, left = calls.kernels.copy(), calls.more
    assert left[0].layout == fake_tk.states_left.layout
    assert torch.equal(left[0].tensors[0], fake_tk.states_left.tensors[0])
    calls.clear()
    h = mlstm_chunkwise(**x)
    with torch.profiler.profile() as profile:
        h = mlstm_chunkwise(**x) if watched == "both" else h
        found = gradients(x, h)
    assert calls.kernels[-2:] == plain and calls.ops == set()
    assert torch.equal(calls.more[0].tensors[0], left[0].tensors[0])
    names = {"tfla_tk::mlstm_bwd", *(["tfla_tk::mlstm_fwd"] if watched == "both" else [])}
    assert {event.key for event in profile.key_averages() if "tfla_tk" in event.key} == names
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class Wrapper(Tensor):
    """A tensor subclass."""


def zeros(x: Tensor) -> Tensor:
    """That nothing has written down."""
    return torch._efficientzerotensor(x.shape)


@pytest.mark.parametrize("change", [torch._neg_view, zeros, lambda x: x.as_subclass(Wrapper)])
def test_gradients_that_are_no_plain_tensors(change: Callable[[Tensor], Tensor], calls: Calls) -> None:
    x = leaves(make_inputs())
    h = mlstm_chunkwise(**x)
    dh = change(torch.randn_like(h))
    found = torch.autograd.grad(h, list(x.values()), dh, retain_graph=True)
    assert (calls.kernels, calls.ops) == (["fwd"], {"bwd"})
    expected = torch.autograd.grad(h, list(x.values()), dh.as_subclass(Tensor) + 0)
    assert (calls.kernels, calls.ops) == (["fwd", "bwd"], {"bwd"})
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.as_subclass(Tensor), b)


def test_a_batch_of_gradients(calls: Calls) -> None:
    """By the dispatcher, one after the other."""
    x = leaves(make_inputs())
    h = mlstm_chunkwise(**x)
    dh = torch.randn(2, *h.shape)
    options: dict[str, Any] = {"retain_graph": True}
    found = torch.autograd.grad(h, list(x.values()), dh, is_grads_batched=True, **options)
    assert (calls.kernels, calls.ops) == (["fwd"], {"bwd"})
    each = [torch.autograd.grad(h, list(x.values()), one, **options) for one in dh]
    for batch, *expected in zip(found, *each, strict=True):
        assert torch.equal(batch, torch.stack(expected))


def test_double_backward_is_refused(calls: Calls) -> None:
    x = leaves(make_inputs())
    h = mlstm_chunkwise(**x)
    (dq,) = torch.autograd.grad(h.square().sum(), x["q"], create_graph=True)
    assert (calls.kernels, calls.ops) == (["fwd"], {"bwd"})
    with pytest.raises(RuntimeError, match="double backward of mLSTM is not implemented; backend='ref"):
        dq.sum().backward()


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "subclass"])
def test_hooks_on_what_is_saved(plain: bool, calls: Calls) -> None:
    x = leaves(make_inputs(states=STATES))
    expected = gradients(x, mlstm_chunkwise(**x))
    calls.clear()
    packed: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        packed.append(t)
        return t

    def unpack(t: Tensor) -> Tensor:
        return t.clone() if plain else t.as_subclass(Wrapper)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        h = mlstm_chunkwise(**x)
    found = gradients(x, h)
    # q, k, v, i, f, the states, h, row_n, row_m and chunk_m, as the op saves them
    assert len(packed) == 12
    assert calls.more == ((None,) if plain else ())
    assert (calls.kernels, calls.ops) == ((["fwd", "bwd"], set()) if plain else (["fwd"], {"bwd"}))
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.as_subclass(Tensor), b)


@pytest.mark.parametrize(
    ("context", "watched", "reentrant"),
    [
        *itertools.product((Operators, torch.profiler.profile), ("forward", "backward"), (False,)),
        *((nullcontext, "", reentrant) for reentrant in (False, True)),
    ],
)
def test_activation_checkpointing(
    context: Callable[[], AbstractContextManager[Any]], watched: str, reentrant: bool, calls: Calls
) -> None:
    """The call and its recomputation save alike, whether they are plain or not."""
    x = leaves(make_inputs())
    expected = gradients(x, mlstm_chunkwise(**x))
    with context() if watched == "forward" else nullcontext():
        h = checkpoint(lambda *t: mlstm_chunkwise(*t), *x.values(), use_reentrant=reentrant)
    calls.clear()
    with context() if watched == "backward" else nullcontext():
        h.square().sum().backward()
    through_ops = {"bwd"} if watched == "forward" else {"fwd", "bwd"}
    assert calls.ops == (through_ops if context is Operators else set())
    assert watched or calls.kernels == ["fwd", "bwd"]
    assert all(torch.equal(t.grad, g) for t, g in zip(x.values(), expected, strict=True))


def test_compiled_autograd(calls: Calls) -> None:
    """The op is in the graph."""
    graphs = []

    def compile_with(graph: torch.fx.GraphModule) -> Any:
        def keep(traced: torch.fx.GraphModule, inputs: list[Any]) -> Any:
            graphs.append(traced)
            return traced

        return torch.compile(graph, backend=keep, fullgraph=True)

    torch._dynamo.reset()
    x = leaves(make_inputs())
    expected = gradients(x, mlstm_chunkwise(**x))
    calls.clear()
    h = mlstm_chunkwise(**x)
    with torch._dynamo.compiled_autograd._enable(compile_with):
        h.square().sum().backward()
    assert calls.kernels == ["fwd"]
    assert any("tfla_tk.mlstm_bwd" in graph.code for graph in graphs)
    for t, g in zip(x.values(), expected, strict=True):
        torch.testing.assert_close(t.grad, g)
