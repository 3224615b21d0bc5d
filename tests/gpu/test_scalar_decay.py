"""The scalar-decay family on the GPU: against the reference in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tfla_tk import chunk_lightning_attn, chunk_retention, chunk_simple_gla

from .conftest import TOLERANCE, forget_calls
from .linear import (
    REPEATS,
    Normal,
    Tensors,
    assert_accurate,
    assert_auto_takes_the_kernels,
    assert_equal,
    check_both,
    draw_cotangents,
    draw_operands,
    exact,
    pack,
    run,
    train,
)
from .memory import LENGTHS, uninitialised_memory_is_nan

Cut = Callable[[int], None]

DIMS = [(64, 64), (128, 128), (128, 256), (256, 512), (128, 64), (64, 512), (256, 64)]
PADDED = [(16, 16), (48, 80), (64, 96), (96, 192), (112, 240), (192, 96)]
GATES = ["usual", "none", "slow", "closed", "-50", "mixed", "growing"]


def draw(
    batch: int = 2,
    seq: int = 300,
    heads: int = 2,
    value_heads: int | None = None,
    dims: tuple[int, int] = (128, 256),
    dtype: torch.dtype = torch.bfloat16,
    gates: str = "usual",
    states: bool = True,
    sequences: int | None = None,
    seed: int = 0,
) -> Tensors:
    """q, k, v, g and, on request, an initial state, [B, T, H, D]."""
    normal = Normal(seed)
    value_heads = heads if value_heads is None else value_heads
    found = draw_operands(normal, batch, seq, heads, value_heads, dims, dtype)
    g = torch.nn.functional.logsigmoid(normal(batch, seq, value_heads) + 2)
    closed = normal(batch, seq, value_heads) > 0.7
    if gates == "none":
        g = torch.zeros_like(g)
    elif gates == "slow":
        g = g * 1e-3
    elif gates == "closed":
        g = torch.where(closed, -torch.inf, g)
    elif gates == "-50":
        g = torch.full_like(g, -50.0)
    elif gates == "mixed":
        g = torch.where(closed, -1000.0, torch.where(normal(*g.shape) > 0, 0.0, g))
    elif gates == "growing":
        g = 0.01 * normal(*g.shape)
    found["g"] = g
    if states:
        found["initial_state"] = normal(batch if sequences is None else sequences, value_heads, *dims)
    return found


def check(x: Tensors, function: Any = chunk_simple_gla, **options: Any) -> None:
    """Forward and backward."""
    check_both(x, function, **options)


@pytest.mark.parametrize("dims", [*DIMS, *PADDED], ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("states", [False, True], ids=["zeros", "states"])
def test_all_dims(dims: tuple[int, int], states: bool, dtype: torch.dtype) -> None:
    check(draw(dims=dims, dtype=dtype, states=states))


@pytest.mark.parametrize("seq", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1000, 2048])
def test_any_length(seq: int, dtype: torch.dtype) -> None:
    check(draw(1, seq, dims=(64, 128), dtype=dtype))


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("dims", [(64, 64), (128, 256), (256, 512)], ids="{0[0]}_{0[1]}".format)
def test_gates(gates: str, dims: tuple[int, int], dtype: torch.dtype) -> None:
    check(draw(1, 500, dims=dims, dtype=dtype, gates=gates))


@pytest.mark.parametrize("group", [2, 3, 16])
@pytest.mark.parametrize("dims", [(128, 64), (64, 128), (256, 256)], ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("chunks", [2, 1000], ids=["cut", "whole"])
def test_value_heads(group: int, dims: tuple[int, int], chunks: int, cut_every: Cut) -> None:
    """Each key head is read by neighbouring value heads, and its gradient is the sum over them."""
    cut_every(chunks)
    check(draw(2, 200, 2, 2 * group, dims))


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("dims", [(64, 64), (128, 256), (256, 512)], ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("gates", ["usual", "none", "mixed"])
def test_cut_sequences(
    gates: str, dims: tuple[int, int], chunks: int, dtype: torch.dtype, cut_every: Cut
) -> None:
    cut_every(chunks)
    check(draw(2, 500, dims=dims, dtype=dtype, gates=gates))


@pytest.mark.parametrize("chunks", [1, 3, 1000])
@pytest.mark.parametrize("offsets", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("value_heads", [2, 4])
def test_packed_sequences(value_heads: int, offsets: torch.dtype, chunks: int, cut_every: Cut) -> None:
    cut_every(chunks)
    check(pack(draw(1, sum(LENGTHS), 2, value_heads, (128, 128), sequences=len(LENGTHS)), offsets))


def test_a_decay_for_each_head(dtype: torch.dtype) -> None:
    """g_gamma, retention and Lightning; any slopes, zero and closed among them. They have no gradient."""
    x = draw(2, 333, 2, 4, (64, 128), dtype)
    g = x.pop("g")
    check(x | {"g_gamma": torch.tensor([0.0, -1e-3, -0.7, -60.0], device="cuda")})
    check(x, chunk_retention)
    check(x, chunk_lightning_attn, layer_idx=3, num_layers=12)
    check(x, chunk_lightning_attn, g_gamma=g[0, 0])


def test_no_decay_at_all(dtype: torch.dtype) -> None:
    x = draw(2, 300, dtype=dtype)
    del x["g"]
    check(x)


@pytest.mark.parametrize("g", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes_of_the_gate(g: torch.dtype) -> None:
    x = draw()
    x["g"] = x["g"].to(g)
    check(x)


def test_options() -> None:
    x = draw(2, 200, dims=(64, 128))
    check(x, scale=0.37)
    check(x | {"initial_state": x["initial_state"].mT.contiguous()}, state_v_first=True)


def test_a_loss_on_the_last_state_alone() -> None:
    x = draw(2, 200, dims=(64, 128))
    names = ("k", "v", "g", "initial_state")
    found = {}
    for backend, given in (("tk", x), ("reference", exact(x))):
        leaves = {name: t.detach().requires_grad_(name in names) for name, t in given.items()}
        _, state = chunk_simple_gla(**leaves, output_final_state=True, backend=backend)
        grads = torch.autograd.grad(state.square().sum(), [leaves[name] for name in names])
        found[backend] = {f"d{name}": grad for name, grad in zip(names, grads, strict=True)}
    assert_accurate(found["tk"], found["reference"], torch.bfloat16)


def test_views_are_read_in_place() -> None:
    """Heads first, as others lay them out, and slices of one projection."""
    x = draw(2, 300, 4, dims=(64, 128))
    expected = run(x) | train(x)
    heads_first = {
        name: t.transpose(1, 2).contiguous().transpose(1, 2) if t.dim() == 4 and name in "qkv" else t
        for name, t in x.items()
    }
    joint = torch.cat([x["q"], x["k"], x["v"]], dim=-1)
    sliced = x | dict(zip("qkv", joint.split([64, 64, 128], dim=-1), strict=True))
    for given in (heads_first, sliced):
        found = run(given) | train(given)
        assert_equal(found, expected)


@pytest.mark.parametrize("dims", [(64, 64), (128, 256), (48, 80), (256, 512)], ids="{0[0]}_{0[1]}".format)
def test_every_element_is_written(dims: tuple[int, int], cut_every: Cut) -> None:
    """PyTorch fills what it allocates with NaN."""
    for chunks in (2, 1000):
        cut_every(chunks)
        for value_heads in (2, 4):
            x = draw(1, 450, 2, value_heads, dims)
            with uninitialised_memory_is_nan():
                found = run(x) | train(x)
            assert all(t.isfinite().all() for t in found.values())


@pytest.mark.parametrize("dims", [(64, 64), (128, 256), (256, 512)], ids="{0[0]}_{0[1]}".format)
def test_repeats_are_bitwise_equal(dims: tuple[int, int]) -> None:
    x = draw(4, 450, 8, 16, dims)
    first = run(x) | train(x)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(REPEATS):
        again = run(x) | train(x)
        for name, t in first.items():
            different += (again[name] != t).sum()
    assert different.item() == 0


def test_shapes_alternate_in_one_process() -> None:
    cases = [draw(dims=dims, dtype=dtype) for dims in DIMS for dtype in TOLERANCE]
    first = [run(x) | train(x) for x in cases]
    for x, expected in zip(cases, first, strict=True):
        again = run(x) | train(x)
        assert_equal(again, expected)


def test_cuda_graph_of_training() -> None:
    x = draw(1, 450, 2, 4)
    x["cu_seqlens"] = torch.tensor([0, 100, 450], device="cuda")
    x["initial_state"] = x["initial_state"].repeat(2, 1, 1, 1)
    given = draw_cotangents(run(x))
    train(x, given=given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(x) | train(x, given=given)
    fresh = draw(1, 450, 2, 4, sequences=2, seed=1)
    for name, t in fresh.items():
        x[name].copy_(t)
    x["cu_seqlens"].copy_(torch.tensor([0, 333, 450]))
    graph.replay()
    expected = run(x) | train(x, given=given)
    assert_equal(captured, expected)


def test_current_stream() -> None:
    x = draw()
    expected = run(x)
    late = {name: torch.full_like(t, torch.nan) for name, t in x.items()}
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        for name, t in x.items():
            late[name].copy_(t)
        found = run(late)
    assert not stream.query()  # the host does not wait
    stream.synchronize()
    assert_equal(found, expected)


def test_no_host_synchronisation() -> None:
    x = draw(1, 450)
    x["cu_seqlens"] = torch.tensor([0, 450], device="cuda")
    train(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        leaves = {name: t.requires_grad_() if t.is_floating_point() else t for name, t in x.items()}
        chunk_simple_gla(**leaves, backend="tk")[0].sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_compiled(cut_every: Cut) -> None:
    x = draw(2, 300, 2, 4)
    compiled = torch.compile(chunk_simple_gla, fullgraph=True)
    expected = run(x) | train(x)
    found = run(x, function=compiled) | train(x, function=compiled)
    assert_equal(found, expected)


def test_auto_takes_the_kernels() -> None:
    assert_auto_takes_the_kernels(chunk_simple_gla, draw())


@pytest.mark.sanitize
@pytest.mark.parametrize("dims", [(64, 64), (128, 256), (256, 512)], ids="{0[0]}_{0[1]}".format)
def test_small_launches(dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every kind of tile for compute-sanitizer, with value heads that share q and k."""
    forget_calls()
    x = draw(1, 330, 1, 2, dims)
    found = run(x) | train(x)
    torch.cuda.synchronize()
    assert all(t.isfinite().all() for t in found.values())
