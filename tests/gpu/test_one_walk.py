"""The backward in one walk on the GPU, of mLSTM and scalar decay: chunks that a state enters, and others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tfla_tk import chunk_lightning_attn, chunk_simple_gla

from .linear import check_both
from .memory import normal

Tensors = dict[str, Tensor]
Make = Callable[..., Tensors]
CutEvery = Callable[[int], None]

DIMS = pytest.mark.parametrize("dims", [(64, 64), (128, 128), (48, 80)], ids="{0[0]}_{0[1]}".format)
# about one, two and three chunks of 64 and pairs of them
LENGTHS = [1, 64, 65, 127, 128, 129, 192, 193, 257]


@DIMS
@pytest.mark.parametrize("seq", LENGTHS)
def test_lengths(
    operator: Any, seq: int, dims: tuple[int, int], dtype: torch.dtype, make_inputs: Make, compare: Make
) -> None:
    compare(operator, make_inputs(2, 3, seq, dims, dtype, operator.states))


@DIMS
@pytest.mark.parametrize("chunks", [1, 2, 3, 100])
def test_packed_sequences(
    operator: Any,
    chunks: int,
    dims: tuple[int, int],
    dtype: torch.dtype,
    cut_every: CutEvery,
    draw_packed: Make,
    compare: Make,
) -> None:
    cut_every(chunks)
    compare(operator, draw_packed(operator, [*LENGTHS, 0, 700], dims, dtype))


@DIMS
def test_states_made_again_are_the_same(operator: Any, dims: tuple[int, int], make_inputs: Make) -> None:
    """Where autograd keeps none of the forward's: the gradients have the same bits. So has h without them."""
    x = make_inputs(2, 3, 1000, dims, states=operator.states)
    cotangents = operator.draw_cotangents(x, True)
    kept = operator.gradients(x, cotangents)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        made = operator.gradients(x, cotangents)
    assert all(torch.equal(made[name], grad) for name, grad in kept.items())
    trained = operator({name: t.clone().requires_grad_(name == "v") for name, t in x.items()})
    assert torch.equal(trained, operator(x))


@DIMS
@pytest.mark.parametrize("first", [64, 100, 128, 170])
@pytest.mark.parametrize("forget", [-4.0, -12.0, -40.0])
def test_gates_that_close_in_either_chunk_of_a_pair(
    operator: Any, forget: float, first: int, dims: tuple[int, int], make_inputs: Make, compare: Make
) -> None:
    x = make_inputs(2, 3, 400, dims, states=operator.states)
    x["f"][..., first], x["f"][..., first + 3] = forget, forget
    for name in ("q", "k", "n_initial"):  # keeps q.n away from zero
        if name in x:
            x[name].abs_()
    compare(operator, x)


@DIMS
@pytest.mark.parametrize("rate", [0.01, 1.0, 8.0])
def test_decays(rate: float, dims: tuple[int, int], dtype: torch.dtype, cut_every: CutEvery) -> None:
    """Per token, with more heads of v than of q and k; constant ones have no sums for a gradient."""
    q, k = (normal(2, 500, 2, dims[0], dtype=dtype, seed=seed) for seed in (0, 1))
    v = normal(2, 500, 4, dims[1], dtype=dtype)
    x = {"q": q, "k": k, "v": v, "initial_state": normal(2, 4, *dims)}
    for chunks in (1, 1000):
        cut_every(chunks)
        check_both(x | {"g": -rate * normal(2, 500, 4).abs()}, chunk_simple_gla)
        check_both(x | {"g_gamma": -rate * normal(4).abs()}, chunk_simple_gla)
        check_both(x, chunk_lightning_attn, layer_idx=3, num_layers=12)


@pytest.mark.sanitize
@DIMS
def test_small(operator: Any, dims: tuple[int, int], make_inputs: Make, compare: Make) -> None:
    """For compute-sanitizer."""
    compare(operator, make_inputs(1, 2, 290, dims, states=operator.states))
