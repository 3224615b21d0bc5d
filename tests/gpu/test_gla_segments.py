"""Gated linear attention with cut sequences on the GPU: against the reference in fp64, and uncut."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

import tfla_tk
from tfla_tk import chunk_gla
from tfla_tk.backends.tk import segments
from tfla_tk.backends.tk.channel_gate.call import Shape
from tfla_tk.calls.gla import GLACore
from tfla_tk.core import memo

from .conftest import DEVICE, relative_error
from .linear import REPEATS, Tensors, assert_accurate, assert_equal, exact, pack
from .linear import run as run_function
from .linear import train as train_function
from .memory import LENGTHS, uninitialised_memory_is_nan
from .test_gla import GATES, draw
from .test_mlstm_offsets import BAD, offsets_of

run = partial(run_function, function=chunk_gla)
train = partial(train_function, function=chunk_gla)
CutEvery = Callable[[int], None]


def check(x: Tensors, *, trains: bool = True) -> None:
    assert_accurate(run(x), run(exact(x), "reference"), x["q"].dtype)
    if trains:
        found, truth = train(x), train(exact(x), "reference")
        assert_accurate(found, truth, x["q"].dtype, size=x["v"].numel() ** 0.5)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (128, 256), (64, 256), (96, 80), (16, 16)], ids=str)
@pytest.mark.parametrize("states", [False, True], ids=["zeros", "states"])
def test_all_dims(dims: tuple[int, int], states: bool, dtype: torch.dtype, cut_every: CutEvery) -> None:
    cut_every(2)
    check(draw(2, 600, dims=dims, dtype=dtype, states=states))


@pytest.mark.parametrize("dims", [(256, 64), (256, 128), (256, 512), (144, 128), (128, 384)], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_wide_heads(dims: tuple[int, int], packed: bool, cut_every: CutEvery) -> None:
    cut_every(2)
    x = draw(1, sum(LENGTHS), dims=dims, sequences=len(LENGTHS) if packed else None)
    check(pack(x) if packed else x)


@pytest.mark.parametrize("dims", [(256, 128), (128, 384), (256, 512)], ids=str)
@pytest.mark.parametrize("states", [False, True], ids=["zeros", "states"])
@pytest.mark.parametrize("gates", ["usual", "mixed", "-1e-4"])
def test_anchors_and_borders_of_wide_heads(
    gates: str, states: bool, dims: tuple[int, int], cut_every: CutEvery
) -> None:
    cut_every(9)
    check(draw(1, 1500, dims=dims, gates=gates, states=states))


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("seq", [64, 65, 127, 128, 129, 192, 193, 320, 1000])
def test_any_length(seq: int, chunks: int, cut_every: CutEvery) -> None:
    cut_every(chunks)
    check(draw(1, seq))


@pytest.mark.parametrize("chunks", [8, 9, 16, 19])
def test_borders_and_anchors(chunks: int, cut_every: CutEvery) -> None:
    cut_every(chunks)
    check(draw(1, 2600))


@pytest.mark.parametrize("dim_k", [64, 128])
@pytest.mark.parametrize("gates", GATES)
def test_gates(gates: str, dim_k: int, dtype: torch.dtype, cut_every: CutEvery) -> None:
    cut_every(2)
    check(draw(1, 500, dims=(dim_k, 128), dtype=dtype, gates=gates))


def test_closed_gates_across_borders(cut_every: CutEvery) -> None:
    cut_every(1)
    x = draw(1, 500)
    for token, gate in ((63, -torch.inf), (64, -1e3), (127, 0.0), (128, -50.0), (191, -1e3)):
        x["g"][:, token] = gate
    check(x)


@pytest.mark.parametrize("of_gates", [torch.bfloat16, torch.float16], ids=str)
def test_dtypes_of_gates(of_gates: torch.dtype, dtype: torch.dtype, cut_every: CutEvery) -> None:
    cut_every(2)
    x = draw(2, 333, dtype=dtype)
    x["g"] = x["g"].to(of_gates)
    check(x)


@pytest.mark.parametrize("offsets", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("heads", [2, 80])
@pytest.mark.parametrize("chunks", [1, 2, 5])
def test_packed_sequences(chunks: int, heads: int, offsets: torch.dtype, cut_every: CutEvery) -> None:
    cut_every(chunks)
    check(pack(draw(1, sum(LENGTHS), heads, sequences=len(LENGTHS)), offsets))


@pytest.mark.parametrize("chunks", [2, 1000], ids=["cut", "whole"])
@pytest.mark.parametrize("offsets", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dims", [(64, 64), (256, 512)], ids="{0[0]}_{0[1]}".format)
def test_bad_offsets_leave_other_memory_alone(
    dims: tuple[int, int], bad: str, offsets: torch.dtype, chunks: int, cut_every: CutEvery
) -> None:
    """All free memory around the call's own is filled with a pattern, which is still there behind it."""
    tokens, fractions = 1024, BAD[bad]
    cut_every(chunks)
    x = draw(1, tokens, 3, dims, sequences=len(fractions) - 1)
    good = {**x, "cu_seqlens": torch.linspace(0, tokens, len(fractions), device=DEVICE).to(offsets)}
    expected = train(good)
    x["cu_seqlens"] = offsets_of(fractions, tokens, offsets)
    guards = [torch.full((1 << 20,), 0x5A, dtype=torch.uint8, device=DEVICE) for _ in range(64)]
    for guard in guards[::2]:  # what the call allocates lies among the others
        guard.set_()
    found = train(x)
    torch.cuda.synchronize()
    assert all(bool((guard == 0x5A).all()) for guard in guards[1::2])
    assert all(found[f"d{name}"].shape == t.shape for name, t in x.items() if name != "cu_seqlens")
    assert_equal(train(good), expected)


def test_long_sequences(cut_every: CutEvery) -> None:
    """Mild gates, so that much of a state crosses every border."""
    x = draw(1, 8192, 4, states=False)
    x["g"] = x["g"] / 16
    truth, cut = train(exact(x), "reference"), train(x)
    cut_every(1000)
    whole = train(x)
    for name, t in truth.items():
        assert relative_error(cut[name], t) <= 1.2 * relative_error(whole[name], t), name


def test_what_a_forward_keeps_is_what_the_backward_makes(
    cut_every: CutEvery, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_every(3)
    x = draw(2, 1000)
    kept = train(x)
    monkeypatch.setattr(memo, "KNOWS_EAGER_CALLS", False)
    assert_equal(train(x), kept)


@pytest.mark.parametrize("dims", [(128, 128), (192, 384)], ids=str)
def test_every_repeat_is_bitwise_equal(
    dims: tuple[int, int], dtype: torch.dtype, cut_every: CutEvery
) -> None:
    cut_every(2)
    x = draw(2, 700, 8, dims, dtype, "mixed")
    first, first_outputs = train(x), run(x)
    for _ in range(REPEATS):
        assert_equal(train(x), first)
        assert_equal(run(x), first_outputs)


@pytest.mark.parametrize("dims", [(96, 80), (144, 272)], ids=str)
def test_outputs_are_written_whole(dims: tuple[int, int], cut_every: CutEvery) -> None:
    cut_every(2)
    x = pack(draw(1, sum(LENGTHS), dims=dims, sequences=len(LENGTHS)))
    expected = train(x)
    with uninitialised_memory_is_nan():
        found = train(x)
    assert_equal(found, expected)


def test_nan_stays_in_its_sequence(cut_every: CutEvery) -> None:
    cut_every(1)
    x = draw(1, 400, sequences=3)
    x["cu_seqlens"] = torch.tensor([0, 100, 270, 400], device="cuda")
    expected = train(x)
    for name in ("q", "k", "v", "g"):
        given = {**x, name: x[name].clone()}
        given[name][:, 100:270] = torch.nan
        found = train(given)
        for rows in (slice(0, 100), slice(270, 400)):
            for grad in ("dq", "dk", "dv", "dg"):
                assert torch.equal(found[grad][:, rows], expected[grad][:, rows]), (name, grad)
        assert torch.equal(found["dinitial_state"][::2], expected["dinitial_state"][::2])


def test_growing_gates_leave_an_empty_state_alone(cut_every: CutEvery) -> None:
    """e^128 over the segment, where nothing is to be scaled by it."""
    cut_every(2)
    x = draw(1, 384, states=False)
    x["g"][:] = -0.1
    x["g"][:, 128:256, :, 3] = 1.0
    x["k"][..., 3] = 0.0
    check(x, trains=False)


def test_a_graph_replays(cut_every: CutEvery) -> None:
    cut_every(2)
    x = pack(draw(1, sum(LENGTHS), sequences=len(LENGTHS)))
    given = [torch.randn_like(t) for t in run(x).values()]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        train(x, given=given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = train(x, given=given)
    x["v"].copy_(torch.randn_like(x["v"]))
    graph.replay()
    torch.cuda.synchronize()
    assert_equal(found, train(x, given=given))


def test_few_heads_are_cut(new_calls: None) -> None:
    x = draw(1, 8192, 4, states=False)
    shape = Shape.of(GLACore(*(x[n] for n in "qkvg"), None, None, 1.0, False))
    assert shape.cut.segments * 4 > torch.cuda.get_device_properties(0).multi_processor_count / 2
    with tfla_tk.batch_invariant():
        invariant = run(x)
    assert_accurate(run(x), {n: t.double() for n, t in invariant.items()}, torch.bfloat16)
    assert segments.INVARIANT_CHUNKS * 64 < 8192


@pytest.mark.sanitize
def test_a_small_launch(cut_every: CutEvery) -> None:
    """Of training for compute-sanitizer: three segments."""
    cut_every(3)
    found = train(draw(1, 570, 1, (128, 256)))
    torch.cuda.synchronize()
    assert all(t.isfinite().all() for t in found.values())
