"""Checks that hold for every function of an operator in [B, T, H, D], each for a family's tests to call."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import EagerAndRecordGraphs

from tfla_tk import which

from .linear import Inputs, assert_same, gradients, leaves

OFFSETS = [0, 0, 1, 23, 23, 40]


def parameters_of_fla(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    """Names and defaults of the parameters of fla's own function, in their order, but for **kwargs."""
    found = inspect.signature(getattr(function, "tfla_tk_original", function)).parameters.values()
    return [(p.name, p.default) for p in found if p.kind is not p.VAR_KEYWORD]


def parameters_by_place(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    """Names and defaults of the parameters that may be given by their place."""
    found = inspect.signature(function).parameters.values()
    return [(p.name, p.default) for p in found if p.kind is not p.KEYWORD_ONLY]


def assert_packs_sequences(
    function: Callable[..., Any],
    recurrent: Callable[..., Any],
    x: Inputs,
    dtype: torch.dtype,
    *,
    with_cpu: bool,
) -> None:
    """That packed sequences give what the recurrence gives, and what each of them gives alone.

    Args:
        x: inputs of one batch with five initial states; an empty sequence returns its own.
        dtype: of the offsets. with_cpu: they are given on the CPU, too.
    """
    offsets = torch.tensor(OFFSETS, dtype=dtype)
    expected = gradients(recurrent, x, cu_seqlens=offsets)
    options = {"cu_seqlens_cpu": offsets} if with_cpu else {}
    assert_same(gradients(function, x, cu_seqlens=offsets, **options), expected)
    o, last = function(**x, cu_seqlens=offsets, output_final_state=True)
    for j, (start, end) in enumerate(itertools.pairwise(OFFSETS)):
        own = {name: t[:, start:end] for name, t in x.items() if name != "initial_state"}
        state = x["initial_state"][j : j + 1]
        alone, alone_last = function(**own, initial_state=state, output_final_state=True)
        torch.testing.assert_close(o[:, start:end], alone)
        torch.testing.assert_close(last[j : j + 1], alone_last)


def assert_final_state_is_a_copy(
    function: Callable[..., Any], x: Inputs, *, v_first: bool, **options: Any
) -> None:
    """That without a token the final state is no view of the initial one, as caches are updated in place, or
    zeros."""
    assert x["q"].shape[1] == 0
    given = x["initial_state"].mT.contiguous() if v_first else x["initial_state"]
    before = given.clone()
    x = x | {"initial_state": given}
    o, last = function(**x, output_final_state=True, state_v_first=v_first, **options)
    assert o.shape == x["v"].shape
    last.add_(1)
    torch.testing.assert_close(given, before, rtol=0, atol=0)
    _, last = function(**x | {"initial_state": None}, output_final_state=True, **options)
    assert last.shape == (*before.shape[:2], x["k"].shape[-1], x["v"].shape[-1]) and not last.any()


def assert_final_state_may_change(function: Callable[..., Any], x: Inputs, **options: Any) -> None:
    """That a final state that is updated in place, as a cache, leaves the gradients as they are."""
    x = leaves(x)

    def call() -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = function(**x, **options, output_final_state=True)
        return found

    expected = torch.autograd.grad(call()[0].sum(), list(x.values()))
    o, last = call()
    with torch.no_grad():
        last.zero_()
    found = torch.autograd.grad(o.sum(), list(x.values()))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def assert_dtypes(function: Callable[..., Any], x: Inputs, dtype: torch.dtype, **options: Any) -> None:
    """That o has q's dtype, the state fp32, and every gradient that of its input."""
    x = leaves({name: t.to(dtype if name in ("q", "k", "v") else torch.float32) for name, t in x.items()})
    o, last = function(**x, **options, output_final_state=True)
    assert (o.dtype, last.dtype) == (dtype, torch.float32)
    (o.float().sum() + last.sum()).backward()
    assert all(t.grad is not None and t.grad.dtype == t.dtype for t in x.values())


def assert_autocast(function: Callable[..., Any], x: Inputs) -> None:
    """That q, k, v are cast, which may differ in dtype; gates and states are not."""
    x = {name: t.float() for name, t in x.items()}
    cast = x | {name: x[name].bfloat16() for name in "qkv"}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, last = function(**x | {"k": cast["k"]}, output_final_state=True)
    expected, expected_last = function(**cast, output_final_state=True)
    assert o.dtype == torch.bfloat16 and last.dtype == torch.float32
    assert torch.equal(o, expected) and torch.equal(last, expected_last)


def assert_refused(
    function: Callable[..., Any], arguments: Inputs, error: type[Exception], message: str
) -> None:
    """That the call raises this, and `which` of the call, too."""
    with pytest.raises(error, match=message):
        function(**arguments)
    with pytest.raises(error, match=message):
        which(function.__name__, **arguments)


def assert_profiles_show_what_runs(
    function: Callable[..., Any], inputs: Inputs, calls: list[str], op: str
) -> None:
    """Kernels of a profiled training call: those of one that is not, under the names of the ops.

    Args:
        calls: the log of the kernels. op: the ops' common name.
    """
    calls.clear()
    expected, plain = gradients(function, inputs), calls.copy()
    calls.clear()
    with torch.profiler.profile() as profile:
        found = gradients(function, inputs)
    assert calls == plain == ["forward, kept", "backward, kept"]
    names = {event.key for event in profile.key_averages() if "tfla_tk" in event.key}
    assert names == {f"tfla_tk::{op}_fwd", f"tfla_tk::{op}_bwd"}
    assert all(torch.equal(found[name], x) for name, x in expected.items())


def assert_pads_head_dims(
    function: Callable[..., Any], x: Inputs, read: Callable[[], tuple[Tensor, ...]], *, compiled: bool
) -> None:
    """That kernels get multiples of 16, and that nobody who calls them notices.

    Args:
        x: inputs of other head dims.
        read: q, k, v and the initial state that the kernels have read last.
        compiled: the function is compiled, so that its op gets them.
    """
    whole = [dim + -dim % 16 for dim in (x["q"].shape[-1], x["v"].shape[-1])]
    graphs = EagerAndRecordGraphs()
    called = torch.compile(function, backend=graphs, fullgraph=True) if compiled else function
    for v_first in (False, True):
        if v_first:
            x = x | {"initial_state": x["initial_state"].mT.contiguous()}
        expected = gradients(function, x, state_v_first=v_first, backend="reference")
        found = gradients(called, x, state_v_first=v_first, backend="tk")
        assert_same(found, expected)
        q, k, v, state = _read_by_op(graphs.graphs[-1]) if compiled else read()
        assert q.shape == k.shape
        assert [q.shape[-1], v.shape[-1]] == list(state.shape[-2:]) == whole
        o, last = called(**x, state_v_first=v_first, output_final_state=True, backend="tk")
        assert o.is_contiguous() and o.shape == x["v"].shape and last.shape == x["initial_state"].shape
        assert o.untyped_storage().nbytes() == o.nbytes and last.untyped_storage().nbytes() == last.nbytes
        o, last = called(**x, state_v_first=v_first, backend="tk")
        assert last is None and torch.equal(o, found["o"])
    torch._dynamo.reset()


def _read_by_op(graph: torch.fx.GraphModule) -> tuple[Tensor, ...]:
    """q, k, v and the initial state, without data, of a registered op in a graph."""
    (node,) = (n for n in graph.graph.nodes if getattr(n.target, "namespace", "") == "tfla_tk")
    names = [argument.name for argument in node.target._schema.arguments]
    given = dict(zip(names, node.args, strict=False))
    q, k, v, state = (given[name].meta["example_value"] for name in ("q", "k", "v", "initial_state"))
    return q, k, v, state
