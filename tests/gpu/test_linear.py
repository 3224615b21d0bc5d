"""What the operators in [B, T, H, D] share: padded head dims, contiguous results, states with V first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tfla_tk
from tfla_tk import chunk_delta_rule, chunk_gated_delta_rule, chunk_gla, chunk_kda, chunk_simple_gla

from . import delta_rule, kda
from .linear import (
    Tensors,
    assert_accurate,
    assert_equal,
    assert_graph_replays,
    check_both,
    draw_gla,
    draw_simple_gla,
    exact,
    pack,
    run,
    train,
)
from .memory import LENGTHS

DRAWS: dict[Any, Callable[..., Tensors]] = {
    chunk_simple_gla: draw_simple_gla,
    chunk_delta_rule: delta_rule.draw,
    chunk_gated_delta_rule: delta_rule.draw,
    chunk_gla: draw_gla,
    chunk_kda: kda.draw,
}
of_function = pytest.mark.parametrize("function", DRAWS, ids=lambda f: f.__name__)
batch_or_packed = pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])


def draw(function: Any, *args: Any, dims: tuple[int, int] = (128, 128), **options: Any) -> Tensors:
    """Args: dims: as far as the kernels take them with gradients."""
    if function is chunk_kda:
        dims = min(dims[0], kda.MOST_TRAINED[0]), min(dims[1], kda.MOST_TRAINED[1])
    x = DRAWS[function](*args, dims=dims, **options)
    return delta_rule.ungated(x) if function is chunk_delta_rule else x


def draw_either(function: Any, packed: bool, **options: Any) -> Tensors:
    """Packed sequences, or a batch of two."""
    if packed:
        return pack(draw(function, 1, sum(LENGTHS), sequences=len(LENGTHS), **options))
    return draw(function, 2, 300, **options)


def check(x: Tensors, function: Any, **options: Any) -> None:
    of_family = {chunk_kda: kda.check, chunk_gated_delta_rule: delta_rule.check}.get(function, check_both)
    of_family(x, function, **options)


@of_function
@pytest.mark.parametrize(
    "dims", [(60, 60), (100, 100), (72, 64), (64, 100), (250, 500), (24, 8)], ids="{0[0]}_{0[1]}".format
)
@batch_or_packed
def test_any_head_dim(function: Any, packed: bool, dims: tuple[int, int], dtype: torch.dtype) -> None:
    """Those that are no multiple of 16 are padded with zeros, in front of the kernels."""
    x = draw_either(function, packed, dims=dims, dtype=dtype)
    assert tfla_tk.which(function, **x).backend == "tk"
    check_both(x, function)


@of_function
def test_a_graph_replays_a_call_of_padded_heads(function: Any) -> None:
    x, other = (draw(function, 1, 150, dims=(60, 100), seed=seed) for seed in range(2))

    def call(x: Tensors) -> Tensors:
        return run(x, function=function)

    assert_graph_replays(call, x, other, [call(other), call(x)], 4)


@of_function
@pytest.mark.parametrize("dims", [(128, 128), (256, 512)], ids="{0[0]}_{0[1]}".format)
def test_auto_takes_the_kernels(function: Any, dims: tuple[int, int]) -> None:
    """With and without gradients; fp64 goes to the reference."""
    x = draw(function, dims=dims)
    leaves = {name: t.clone().requires_grad_() for name, t in x.items()}
    assert [tfla_tk.which(function, **y).backend for y in (x, leaves, exact(x))] == ["tk", "tk", "reference"]


def heads_first(x: Tensors) -> Tensors:
    """The same numbers with tokens and heads swapped in memory, of the initial state K and V."""

    def turned(name: str, t: Tensor) -> Tensor:
        if t.dim() < 3:
            return t
        dims = (2, 3) if name == "initial_state" else (1, 2)
        return t.transpose(*dims).contiguous().transpose(*dims)

    return {name: turned(name, t) for name, t in x.items()}


@of_function
@pytest.mark.parametrize("dims", [(128, 128), (60, 100), (256, 512)], ids="{0[0]}_{0[1]}".format)
@batch_or_packed
@pytest.mark.parametrize("compiled", [False, True])
def test_results_are_contiguous(function: Any, dims: tuple[int, int], packed: bool, compiled: bool) -> None:
    """And bitwise equal, whatever the inputs' strides."""
    x = draw_either(function, packed, dims=dims)
    called = torch.compile(function, backend="aot_eager", fullgraph=True) if compiled else function
    turned = heads_first(x)
    found = run(turned, function=called)
    assert all(t.is_contiguous() for t in found.values())
    assert_equal(found, run(x, function=called))
    assert_equal(train(turned, function=called), train(x, function=called))
    if function is not chunk_delta_rule:
        turned["initial_state"] = turned["initial_state"].mT
        last = run(turned, function=called, state_v_first=True)["final_state"]
        assert last.is_contiguous() and torch.equal(last.mT, found["final_state"])
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "function", [chunk_simple_gla, chunk_gated_delta_rule, chunk_gla, chunk_kda], ids=lambda f: f.__name__
)
@pytest.mark.parametrize(
    "dims", [(64, 64), (128, 128), (96, 192), (128, 256), (256, 320)], ids="{0[0]}_{0[1]}".format
)
@batch_or_packed
def test_states_with_v_first(function: Any, dims: tuple[int, int], packed: bool, dtype: torch.dtype) -> None:
    x = draw_either(function, packed, dims=dims, dtype=dtype)
    check(x | {"initial_state": x["initial_state"].mT.contiguous()}, function, state_v_first=True)


@pytest.mark.parametrize(
    ("function", "form"),
    [*((function, "") for function in DRAWS), (chunk_gated_delta_rule, "in walk"), (chunk_gla, "cut")],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
@pytest.mark.parametrize("dims", [(128, 128), (96, 192), (128, 256)], ids="{0[0]}_{0[1]}".format)
@batch_or_packed
def test_a_loss_on_the_final_state_alone(
    function: Any,
    form: str,
    packed: bool,
    dims: tuple[int, int],
    dtype: torch.dtype,
    take_form: Callable[[str], None],
) -> None:
    take_form(form)
    x = draw_either(function, packed, dims=dims, dtype=dtype)
    names = [name for name in x if name != "cu_seqlens"]

    def differentiate(given: Tensors, backend: str) -> Tensors:
        leaves = {name: t.detach().requires_grad_(name in names) for name, t in given.items()}
        loss = run(leaves, backend, function)["final_state"].square().sum()
        found = torch.autograd.grad(loss, [leaves[name] for name in names], materialize_grads=True)
        return {f"d{name}": t for name, t in zip(names, found, strict=True)}

    found = differentiate(x, "tk")
    assert_accurate(found, differentiate(exact(x), "reference"), dtype, size=x["v"].numel() ** 0.5)
    assert not found["dq"].any()


@pytest.mark.parametrize("how", ["compiled", "checkpointed"])
@pytest.mark.parametrize(
    ("function", "kernel"),
    [(chunk_gated_delta_rule, "delta_forward_"), (chunk_kda, "kda_forward_")],
    ids=["delta rule", "KDA"],
)
def test_no_backward_makes_the_forward_again(function: Any, kernel: str, how: str) -> None:
    torch._dynamo.reset()  # else lengths of other tests may have made this one's a symbol
    x = {name: t.requires_grad_() for name, t in draw(function, 2, 500).items()}
    expected = train(x, function=function)

    def again(**arguments: Any) -> Any:
        return checkpoint(lambda: function(**arguments), use_reentrant=False)

    called = again if how == "checkpointed" else torch.compile(function, fullgraph=True)
    train(x, function=called)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        found = train(x, function=called)
        torch.cuda.synchronize()
    assert_equal(found, expected)
    forwards = sum(kernel in event.name for event in profile.events())  # with makers or without
    assert forwards == (2 if how == "checkpointed" else 1)  # a checkpoint makes it once more for its backward
