"""How calls of the delta rule run on the GPU: graphs, streams, repeats, torch.compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tfla_tk import chunk_gated_delta_rule

from .delta_rule import (
    SEGMENT,
    assert_no_host_synchronisation,
    draw,
    function_of,
    of_both_functions,
    shape_of,
    ungated,
)
from .linear import (
    REPEATS,
    Tensors,
    assert_auto_takes_the_kernels,
    assert_equal,
    assert_equal_on_streams,
    assert_graph_replays,
    pack,
    run,
    train,
)
from .memory import LENGTHS, uninitialised_memory_is_nan


@pytest.mark.parametrize("value_heads", [4, 6, 8])
def test_a_graph_replays_turns(value_heads: int) -> None:
    """Each time the numbers by which heads of a group take turns are cleared."""
    x, other = (draw(1, 2500, 2, value_heads, (192, 128), seed=seed) for seed in (0, 1))
    given = [torch.ones_like(x["v"]), torch.ones_like(x["initial_state"])]

    def call(of_call: Tensors) -> Tensors:
        return train(of_call, function=chunk_gated_delta_rule, given=given)

    assert_graph_replays(call, x, other, [call(other), call(x)], 6)


def test_turns_on_several_streams() -> None:
    """Walks of several calls at once, whose CTAs begin in any order, each with its own turns."""
    x = draw(1, 4000, 8, 32, (192, 128))
    given = [torch.ones_like(x["v"]), torch.ones_like(x["initial_state"])]
    expected = train(x, function=chunk_gated_delta_rule, given=given)
    assert_equal_on_streams(lambda: train(x, function=chunk_gated_delta_rule, given=given), expected, 5)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 320)], ids="{0[0]}_{0[1]}".format)
def test_every_repeat_is_bitwise_equal(dims: tuple[int, int]) -> None:
    x = draw(2, 700, 2, 4, dims)
    first = run(x, function=chunk_gated_delta_rule) | train(x, function=chunk_gated_delta_rule)
    for _ in range(REPEATS):
        again = run(x, function=chunk_gated_delta_rule) | train(x, function=chunk_gated_delta_rule)
        assert_equal(again, first)


@pytest.mark.parametrize("dims", [(96, 80), (256, 320)], ids="{0[0]}_{0[1]}".format)
def test_outputs_are_written_whole(dims: tuple[int, int]) -> None:
    x = draw(1, sum(LENGTHS), 2, 4, dims, sequences=len(LENGTHS))
    x["cu_seqlens"] = torch.tensor([0, *LENGTHS]).cumsum(0).cuda()
    expected = run(x, function=chunk_gated_delta_rule) | train(x, function=chunk_gated_delta_rule)
    with uninitialised_memory_is_nan():
        found = run(x, function=chunk_gated_delta_rule) | train(x, function=chunk_gated_delta_rule)
    assert_equal(found, expected)


def test_nan_stays_in_its_sequence() -> None:
    x = draw(1, 300, sequences=3)
    x["cu_seqlens"] = torch.tensor([0, 100, 170, 300], device="cuda")
    expected = run(x, function=chunk_gated_delta_rule)
    for name in ("q", "k", "v", "g", "beta"):
        x[name] = x[name].clone()
        x[name][:, 100:170] = torch.nan
    found = run(x, function=chunk_gated_delta_rule)
    for rows in (slice(0, 100), slice(170, 300)):
        assert torch.equal(found["o"][:, rows], expected["o"][:, rows])
    assert torch.equal(found["final_state"][::2], expected["final_state"][::2])


def test_a_graph_replays_packed_training() -> None:
    x = draw(1, 300, 2, 4, sequences=3)
    x["cu_seqlens"] = torch.tensor([0, 100, 170, 300], device="cuda")
    expected = train(x, function=chunk_gated_delta_rule)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        train(x, function=chunk_gated_delta_rule)
    graph = torch.cuda.CUDAGraph()
    leaves = {name: t.detach().requires_grad_(t.is_floating_point()) for name, t in x.items()}
    given = [torch.ones_like(x["v"]), torch.ones_like(x["initial_state"])]
    with torch.cuda.graph(graph, stream=stream):
        found = train(leaves, function=chunk_gated_delta_rule, given=given)
    x["v"].copy_(torch.zeros_like(x["v"]))
    graph.replay()
    torch.cuda.synchronize()
    again = train(x, function=chunk_gated_delta_rule, given=given)
    assert expected.keys() == found.keys()
    assert_equal(found, again)


def test_on_a_second_stream() -> None:
    x = draw()
    expected = run(x, function=chunk_gated_delta_rule)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = run(x, function=chunk_gated_delta_rule)
    torch.cuda.current_stream().wait_stream(stream)
    assert_equal(found, expected)


@pytest.mark.parametrize("kind", ["batch", "packed", "split"])
@of_both_functions
def test_no_host_synchronisation(gated: bool, kind: str) -> None:
    if kind == "packed":
        x = pack(draw(1, sum(LENGTHS), sequences=len(LENGTHS)))
    else:
        x = draw(1, 16 * SEGMENT if kind == "split" else 500)
    x = x if gated else ungated(x)
    assert (shape_of(x).split is not None) == (kind == "split")
    assert_no_host_synchronisation(x, function_of(x))


def test_torch_compile() -> None:
    x = draw(1, 200)
    compiled = torch.compile(chunk_gated_delta_rule, fullgraph=True)
    expected = run(x, function=chunk_gated_delta_rule) | train(x, function=chunk_gated_delta_rule)
    found = run(x, function=compiled) | train(x, function=compiled)
    assert_equal(found, expected)


@pytest.mark.parametrize("how", ["compiled", "checkpointed"])
def test_no_backward_makes_the_forward_again(how: str) -> None:
    torch._dynamo.reset()  # else lengths of other tests may have made this one's a symbol
    x = {name: t.requires_grad_() for name, t in draw(2, 500).items()}
    expected = train(x, function=chunk_gated_delta_rule)

    def again(**arguments: Any) -> Any:
        return checkpoint(lambda: chunk_gated_delta_rule(**arguments), use_reentrant=False)

    function = again if how == "checkpointed" else torch.compile(chunk_gated_delta_rule, fullgraph=True)
    train(x, function=function)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        found = train(x, function=function)
        torch.cuda.synchronize()
    assert_equal(found, expected)
    forwards = sum("delta_forward_" in event.name for event in profile.events())  # with makers or without
    assert forwards == (2 if how == "checkpointed" else 1)  # a checkpoint makes it once more for its backward


def test_auto_takes_the_kernels() -> None:
    assert_auto_takes_the_kernels(chunk_gated_delta_rule, draw())
