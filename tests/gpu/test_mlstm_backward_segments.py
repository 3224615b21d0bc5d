"""mLSTM gradients on the GPU over cut and packed sequences: the cuts do not show in them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tfla_tk.backends.tk import segments
from tfla_tk.backends.tk.scalar_gate import walks as tk_walks
from tfla_tk.build.instances import MLSTM_TILES
from tfla_tk.core import memo

from .memory import LENGTHS, TOKENS

Tensors = dict[str, Tensor]
Make = Callable[..., Tensors]
CutEvery = Callable[[int], None]

MAIN = [(64, 64), (128, 128), (128, 256), (256, 512)]
PADDED = [(48, 80), (208, 176), (80, 272)]  # the last in parts of 256 and 16 columns of V
REPEATS = 200


def ids(dims: tuple[int, int]) -> str:
    return f"{dims[0]}_{dims[1]}"


@pytest.fixture(params=["plain", "op"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain call, whose dq begins with the states that the forward left, and the op, which makes them."""
    if request.param == "op":
        monkeypatch.setattr(memo, "KNOWS_EAGER_CALLS", False)


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("dims", [*MAIN, *PADDED], ids=ids)
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("states", [False, True], ids=["zeros", "states"])
def test_cut_sequences(
    operator: Any,
    dtype: torch.dtype,
    states: bool,
    chunks: int,
    dims: tuple[int, int],
    cut_every: CutEvery,
    make_inputs: Make,
    compare: Make,
) -> None:
    cut_every(chunks)
    compare(operator, make_inputs(2, 3, 1000, dims, dtype, operator.states if states else ()), last=states)


@pytest.mark.parametrize("chunks", [7, 8, 9])
def test_anchors_at_and_beside_cuts(
    operator: Any, chunks: int, cut_every: CutEvery, make_inputs: Make, compare: Make
) -> None:
    """An anchor lies before every eighth chunk of a sequence, whatever its segments."""
    cut_every(chunks)
    compare(operator, make_inputs(1, 3, 2200, states=operator.states))


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("forget_bias", [-8.0, 0.0, 12.0])
@pytest.mark.parametrize("input_bias", [-60.0, 0.0])
def test_segments_that_forget_and_that_do_not(
    operator: Any,
    input_bias: float,
    forget_bias: float,
    cut_every: CutEvery,
    make_inputs: Make,
    compare: Make,
) -> None:
    """The segments kernel skips what is forgotten at the boundary, and nothing else."""
    x = make_inputs(1, 3, 3000, states=operator.states)
    x["f"] += forget_bias - 3
    for name in ("q", "k", "n_initial"):  # keeps q.n away from zero
        if name in x:
            x[name].abs_()
    # the first third of each segment outweighs the others, where the gates keep it
    x["i"][..., torch.arange(3000, device="cuda") % 1024 > 300] += input_bias
    cut_every(16)
    compare(operator, x, vanishing=True)


def test_a_small_normaliser_outweighs_the_gates(
    exponential: Any, cut_every: CutEvery, make_inputs: Make, rel_err: Callable[[Tensor, Tensor], float]
) -> None:
    """The gates leave 2^-185 of the only rows with a gradient, but these are divided by 2^-100."""
    x = make_inputs(1, 2, 512, (64, 64))
    x["i"].fill_(80.0)
    x["f"].fill_(-math.log(math.e - 1))  # log f = -1
    x["k"][..., 1:] = 0
    x["q"][..., 0] = 0  # q.n = 0: the normaliser is eps
    dh = torch.zeros_like(x["v"])
    dh[:, :, 384:400] = 1

    def dk(tensors: Tensors, dh: Tensor, backend: str) -> Tensor:
        k = tensors["k"].clone().requires_grad_()
        h = exponential(tensors | {"k": k}, backend, eps=1e-30)
        return torch.autograd.grad(h, k, dh)[0][:, :, :256]

    cut_every(4)
    expected = dk({name: t.double() for name, t in x.items()}, dh.double(), "reference")
    assert 0 < expected.abs().max().item() < 2**-70
    assert rel_err(dk(x, dh, "tk"), expected) <= 8e-3


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("gate", ["i", "f"])
@pytest.mark.parametrize("position", [70, 957, 1000, 1001, 1063, 1950])  # odd ones too: each lane has two
def test_a_nan_gate_shows_behind_a_cut(
    operator: Any, position: int, gate: str, cut_every: CutEvery, make_inputs: Make
) -> None:
    """In all that follows it in the walk of a gradient, as far as other segments are concerned."""
    length = 15 * segments.CHUNK
    x = make_inputs(1, 3, 2000)
    x["f"] -= 6  # everything is forgotten within a segment
    x[gate][:, 1, position] = torch.nan
    cut_every(15)
    found = operator.gradients(x, operator.draw_cotangents(x, last=False))
    assert all(t[:, [0, 2]].isfinite().all() for t in found.values())
    segment = position // length
    behind = found["q"][:, 1, (segment + 1) * length :]
    before = [found[name][:, 1, : segment * length] for name in ("k", "v")]
    assert behind.numel() + before[0].numel() > 0
    assert all(t.isnan().all() for t in (behind, *before))


@pytest.mark.slow
@pytest.mark.parametrize("dims", MAIN, ids=ids)
def test_long_sequences_are_cut_by_the_rule(
    operator: Any, dims: tuple[int, int], make_inputs: Make, compare: Make
) -> None:
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    found = tk_walks.cut_sequences((1, 2, 8192, *dims), 1, multiprocessors, packed=False)
    assert found.segments > 8
    compare(operator, make_inputs(1, 2, 8192, dims, states=operator.states))


# packed sequences


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("dims", [*MAIN, *PADDED], ids=ids)
@pytest.mark.parametrize("chunks", [1, 2, 100])
def test_packed_sequences(
    operator: Any,
    dtype: torch.dtype,
    chunks: int,
    dims: tuple[int, int],
    cut_every: CutEvery,
    draw_packed: Make,
    compare: Make,
) -> None:
    cut_every(chunks)
    compare(operator, draw_packed(operator, LENGTHS, dims, dtype))


@pytest.mark.parametrize("chunks", [1, 100])
@pytest.mark.parametrize("count", [31, 33, 100])
def test_many_packed_sequences(
    count: int, chunks: int, operator: Any, cut_every: CutEvery, draw_packed: Make, compare: Make
) -> None:
    cut_every(chunks)
    compare(operator, draw_packed(operator, [(7 * n) % 90 for n in range(count)], (64, 64)))


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("chunks", [1, 100])
def test_packed_sequences_do_not_see_each_other(
    operator: Any, chunks: int, cut_every: CutEvery, draw_packed: Make
) -> None:
    x = draw_packed(operator, LENGTHS, (128, 256))
    cut_every(chunks)
    cotangents = operator.draw_cotangents(x, last=True)
    expected = operator.gradients(x, cotangents)
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
    for broken in (3, 7):
        rows = slice(starts[broken], starts[broken + 1])
        changed = {name: t.clone() for name, t in x.items()}
        for name in TOKENS:
            changed[name][:, :, rows] = torch.nan
        found = operator.gradients(changed, cotangents)
        others = [n for n in range(len(LENGTHS)) if n != broken]
        for name, t in found.items():
            if name in TOKENS:
                assert torch.equal(t[:, :, : rows.start], expected[name][:, :, : rows.start]), name
                assert torch.equal(t[:, :, rows.stop :], expected[name][:, :, rows.stop :]), name
            else:
                assert torch.equal(t[others], expected[name][others]), name


# repeatability


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("dims", [*MLSTM_TILES, (128, 512), (256, 512)], ids=ids)
@pytest.mark.parametrize("chunks", [2, 100], ids=["cut", "whole"])
def test_repeats_are_bitwise_equal(
    operator: Any, chunks: int, dims: tuple[int, int], cut_every: CutEvery, make_inputs: Make
) -> None:
    cut_every(chunks)
    x = make_inputs(2, 17, 450, dims, states=operator.states)
    cotangents = operator.draw_cotangents(x, last=True)
    first = operator.gradients(x, cotangents)
    assert all(t.isfinite().all() for t in first.values())
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(REPEATS):
        again = operator.gradients(x, cotangents)
        for name, t in first.items():
            different += (again[name] != t).sum()
    assert different.item() == 0


@pytest.mark.parametrize("dims", [(128, 256), (256, 512)], ids=ids)
def test_cut_calls_are_captured(
    operator: Any, dims: tuple[int, int], cut_every: CutEvery, make_inputs: Make
) -> None:
    cut_every(3)
    x, fresh = (make_inputs(1, 2, 1000, dims, states=operator.states, seed=seed) for seed in (0, 1))
    cotangents = operator.draw_cotangents(x, last=True)
    operator.gradients(x, cotangents)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = operator.gradients(x, cotangents)
    for name, t in fresh.items():
        x[name].copy_(t)
    graph.replay()
    expected = operator.gradients(fresh, cotangents)
    assert all(torch.equal(captured[name], t) for name, t in expected.items())


@pytest.mark.usefixtures("both_ways")
@pytest.mark.sanitize
@pytest.mark.parametrize("dims", [(64, 64), (128, 256), (256, 512)], ids=ids)
def test_small(
    operator: Any, dims: tuple[int, int], cut_every: CutEvery, draw_packed: Make, compare: Make
) -> None:
    """Packed sequences in segments of one chunk: for compute-sanitizer."""
    cut_every(1)
    compare(operator, draw_packed(operator, [130, 0, 65], dims))
