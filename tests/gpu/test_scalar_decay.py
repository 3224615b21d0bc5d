"""The scalar-decay family on the GPU: against the reference in fp64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tfla_tk import chunk_lightning_attn, chunk_retention, chunk_simple_gla

from .linear import Tensors, assert_graph_replays, both, check_both, draw_cotangents, pack, run
from .linear import draw_simple_gla as draw
from .memory import LENGTHS, normal

Cut = Callable[[int], None]

DIMS = [(64, 64), (128, 128), (128, 256), (256, 512), (128, 64), (64, 512), (256, 64)]
PADDED = [(16, 16), (48, 80), (64, 96), (96, 192), (112, 240), (192, 96)]
GATES = ["usual", "none", "slow", "closed", "-50", "mixed", "growing"]


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


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (48, 80)], ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("rate", [0.01, 1.0, 8.0])
def test_decays(rate: float, dims: tuple[int, int], dtype: torch.dtype, cut_every: Cut) -> None:
    """Of a backward in one walk, with more heads of v than of q and k. Constant decays have no gradient."""
    q, k = (normal(2, 500, 2, dims[0], dtype=dtype, seed=seed) for seed in (0, 1))
    v = normal(2, 500, 4, dims[1], dtype=dtype)
    x = {"q": q, "k": k, "v": v, "initial_state": normal(2, 4, *dims)}
    for chunks in (1, 1000):
        cut_every(chunks)
        check_both(x | {"g": -rate * normal(2, 500, 4).abs()}, chunk_simple_gla)
        check_both(x | {"g_gamma": -rate * normal(4).abs()}, chunk_simple_gla)
        check_both(x, chunk_lightning_attn, layer_idx=3, num_layers=12)


def test_no_decay_at_all(dtype: torch.dtype) -> None:
    x = draw(2, 300, dtype=dtype)
    del x["g"]
    check(x)


def test_scale() -> None:
    check(draw(2, 200, dims=(64, 128)), scale=0.37)


@pytest.mark.parametrize("g", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes_of_the_gate(g: torch.dtype) -> None:
    x = draw()
    x["g"] = x["g"].to(g)
    check(x)


def test_a_graph_replays_other_offsets() -> None:
    x, other = (draw(1, 450, 2, 4, sequences=2, seed=seed) for seed in (0, 1))
    for of_call, border in ((x, 100), (other, 333)):
        of_call["cu_seqlens"] = torch.tensor([0, border, 450], device="cuda")
    step = partial(both, function=chunk_simple_gla, given=draw_cotangents(run(x)))
    assert_graph_replays(step, x, other, [step(other), step(x)], 4)
