"""Results of public calls on the tk backend, both directions, in all that calls may differ in.

The reference takes the place of the kernels, of what launches are given: so the host side is tested.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tfla_tk

from .calls import (
    CUT,
    MODULES,
    OPS,
    H,
    Op,
    Tensors,
    assert_equal,
    check,
    cut_into,
    draw,
    flat,
    forget_calls,
    results,
)
from .stand_in import Kernels, at_odd_address, pretend_a_gpu

HALVES = (torch.bfloat16, torch.float16)
# narrow and wide; of several slices of V, of K, of both
DIMS = [(16, 16), (64, 48), (80, 208), (128, 128), (64, 272), (144, 16), (192, 144), (256, 512)]


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("of_gates", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("state", [False, True], ids=["zeros", "states"])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("dims", DIMS[:5], ids=str)
def test_results(
    op: Op, dims: Any, dtype: Any, of_gates: Any, state: bool, packed: bool, group: int, kernels: Kernels
) -> None:
    x = draw(op, dims, dtype=dtype, of_gates=of_gates, state=state, packed=packed, group=group)
    check(op, x)


@pytest.mark.parametrize("op", CUT.values(), ids=CUT)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("chunks", [1, 2, 10])
@pytest.mark.parametrize("state", [False, True], ids=["zeros", "states"])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("group", [1, 4])
def test_cut_sequences(
    op: Op, dims: Any, chunks: int, state: bool, packed: bool, group: int, kernels: Kernels, monkeypatch: Any
) -> None:
    """With other results of launches at the borders between segments."""
    cut_into(monkeypatch, chunks)
    check(op, draw(op, dims, state=state, packed=packed, group=group))


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@pytest.mark.parametrize("dims", [(64, 48), (192, 272)], ids=str)
@pytest.mark.parametrize("without", ["last", "gates", "operands"])
def test_gradients_that_nobody_asks_for(op: Op, dims: Any, without: str, kernels: Kernels) -> None:
    names = {"last": ["last"], "gates": op.gates, "operands": ["q", "k", "v"]}[without]
    check(op, draw(op, dims), names)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_lengths(op: Op, kernels: Kernels) -> None:
    for size in (1, 63, 64, 65, 129):
        check(op, draw(op, tokens=size))


# Where tensors lie


def transposed(x: Tensor) -> Tensor:
    """Heads and tokens the other way round in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def part_of_rows(x: Tensor) -> Tensor:
    """As a split of a fused projection is."""
    return torch.cat([x, x], -1)[..., : x.shape[-1]]


def unaligned_rows(x: Tensor) -> Tensor:
    return torch.cat([x, x[..., :1]], -1)[..., : x.shape[-1]]


def last_outside(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


def expanded(x: Tensor) -> Tensor:
    return x[:1].expand_as(x)


LAYOUTS = (transposed, part_of_rows, unaligned_rows, last_outside, expanded, at_odd_address)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", ["operands", "gates", "states"])
@pytest.mark.parametrize("dims", [(64, 48), (144, 272)], ids=str)
def test_layouts(op: Op, layout: Callable[[Tensor], Tensor], which: str, dims: Any, kernels: Kernels) -> None:
    """Whatever kernels cannot read is copied, and gradients lie like the inputs."""
    names = {"operands": ("q", "k", "v"), "gates": op.gates, "states": op.states}[which]
    x = draw(op, dims)
    check(op, x | {name: layout(x[name]) for name in names})


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_offsets(op: Op, kernels: Kernels) -> None:
    """Of both dtypes and any stride."""
    x = draw(op, packed=True)
    for dtype in (torch.int32, torch.int64):
        check(op, x | {"cu_seqlens": x["cu_seqlens"].to(dtype).repeat_interleave(2)[::2]})


# Calls like an earlier one


@pytest.fixture(params=[(16, 48), (144, 272)], ids=str)
def dims(request: pytest.FixtureRequest, op: Op) -> Any:
    """KDA's kernels have one form above K = 64."""
    return (80, 72) if op is OPS["kda"] and request.param[0] > 64 else request.param


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@pytest.mark.parametrize("chunks", [None, 1], ids=["whole", "cut"])
def test_what_is_prepared_serves_every_call_like_it(
    op: Op, dims: Any, chunks: int | None, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever its tensors begin, on the stream of its time. It holds no tensor."""
    if chunks is not None:
        cut_into(monkeypatch, chunks)
    x = draw(op, dims, tokens=20)
    held = [weakref.ref(t) for t in x.values()]
    results(op, x)
    del x
    gc.collect()
    assert not any(reference() is not None for reference in held)
    for stream in (7, 8):
        pretend_a_gpu(monkeypatch, *MODULES, stream=stream)
        kernels.launches.clear()
        x, prepared = draw(op, dims, tokens=20, seed=stream), kernels.prepared
        expected = check(op, x)
        assert {launch.stream for launch in kernels.launches} == {stream}
        assert kernels.prepared == prepared
    for name in ("q", "v", op.gates[0], op.states[0]):
        assert_equal(results(op, x | {name: at_odd_address(x[name])}), expected)
    prepared = kernels.prepared
    assert_equal(results(op, x), expected)
    assert kernels.prepared == prepared


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_whichever_call_comes_first(op: Op, dims: Any, kernels: Kernels) -> None:
    """What a first call had to copy says nothing of later ones that lie alike."""
    x = draw(op, dims, tokens=20)
    expected = results(op, x)
    for name in ("k", *op.states):
        forget_calls()
        assert_equal(results(op, x | {name: at_odd_address(x[name])}), expected)
        assert_equal(results(op, x), expected)


def changes(op: Op, x: Tensors) -> list[tuple[Tensors, dict[str, Any]]]:
    """Calls of which every two differ in what launches are prepared for."""
    halves = {name: x[name].half() for name in "qkv"}
    found = [x, x | halves, {name: t for name, t in x.items() if name not in op.states}]
    found += [x | {name: transposed(x[name])} for name in ("q", "k", "v")]
    found += [x | {"k": layout(x["k"])} for layout in (unaligned_rows, last_outside)]
    found += [x | {name: x[name].bfloat16()} for name in op.gates]
    found += [x | {name: transposed(x[name])} for name in op.gates]
    found += [draw(op, x["q"].shape[-1:] + x["v"].shape[-1:], tokens=64), draw(op, (48, 48), packed=True)]
    if op is OPS["decay"]:
        ungated, slopes = {name: t for name, t in x.items() if name != "g"}, torch.linspace(-0.5, 0, H)
        found += [ungated, ungated | {"g_gamma": slopes}, ungated | {"g_gamma": slopes.double()}]
        found += [x | {"g": x["g"].double()}, x | {"initial_state": x["initial_state"].bfloat16()}]
        found += [draw(op, x["q"].shape[-1:] + x["v"].shape[-1:], tokens=20, group=2)]
    other = {"eps": 1e-3} if op.is_mlstm else {"scale": 0.5}
    calls: list[tuple[Tensors, dict[str, Any]]] = [*((each, {}) for each in found), (x, other)]
    if op is OPS["decay"]:
        calls.append((x | {"initial_state": x["initial_state"].mT.contiguous()}, {"state_v_first": True}))
    return calls


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_calls_that_are_not_alike(op: Op, dims: Any, kernels: Kernels) -> None:
    """One after the other they have the results that each has alone."""
    calls, alone = changes(op, draw(op, dims, tokens=20)), []
    for x, options in calls:
        forget_calls()
        alone.append(results(op, x, **options))
    forget_calls()
    for (x, options), expected in zip(calls, alone, strict=True):
        assert_equal(results(op, x, **options), expected)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@pytest.mark.parametrize("layout", [transposed, last_outside, at_odd_address])
def test_gradients_that_lie_elsewhere(
    op: Op, dims: Any, layout: Callable[[Tensor], Tensor], kernels: Kernels
) -> None:
    """That of an output, in calls of which everything else is alike."""
    x = draw(op, dims, tokens=20)
    inputs = {name: t.requires_grad_() for name, t in x.items() if name not in ("m_initial", "cu_seqlens")}

    def gradients(moved: int | None) -> tuple[Tensor, ...]:
        found = flat(getattr(tfla_tk, op.name)(**x, **dict(op.options), backend="tk"))
        outputs = [y for y in found.values() if y.requires_grad]
        generator = torch.Generator().manual_seed(3)
        given = [torch.randn(y.shape, generator=generator).to(y.dtype) for y in outputs]
        given = [layout(y) if place == moved else y for place, y in enumerate(given)]
        return torch.autograd.grad(outputs, list(inputs.values()), given)

    expected = gradients(None)
    for moved in (0, 1, 2, None):
        assert all(map(torch.equal, gradients(moved), expected))


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@pytest.mark.parametrize(
    "move", [at_odd_address, lambda t: t.repeat_interleave(2)[::2]], ids=["odd", "strided"]
)
def test_what_autograd_saves_may_lie_elsewhere(op: Op, dims: Any, move: Any, kernels: Kernels) -> None:
    """Where a hook has put it."""
    x = draw(op, dims)
    expected = results(op, x)
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda t: t, lambda t: move(t) if t.dim() == 1 else t.clone()
    )
    with hooks:
        assert_equal(results(op, x), expected)
