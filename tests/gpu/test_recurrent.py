"""A few tokens of the operators in [B, T, H, D] on the decoding kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tfla_tk

from ..cpu.kernels.test_recurrent import CASES, FLAGS, HALF, NAMES, assert_close, call, draw
from .accuracy import DEVICE
from .memory import uninitialised_memory_is_nan

of_every_name = pytest.mark.parametrize("name", NAMES)


def on_gpu(x: dict[str, Any]) -> dict[str, Any]:
    return {key: value.to(DEVICE) if isinstance(value, Tensor) else value for key, value in x.items()}


@pytest.mark.sanitize
@pytest.mark.parametrize(("name", "dims", "tokens", "dtype", "v_first"), CASES, ids=str)
def test_against_fp64(
    name: str, dims: tuple[int, int], tokens: int, dtype: torch.dtype, v_first: bool
) -> None:
    v_first = v_first and name != "delta_rule"
    assert_close(name, on_gpu(draw(name, tokens=tokens, dims=dims, dtype=dtype, v_first=v_first)))


@pytest.mark.parametrize(
    ("name", "heads", "dims", "batch"),
    [
        ("gated_delta_rule", (16, 32), (128, 128), 64),  # Qwen3-Next
        ("gated_delta_rule", (30, 30), (96, 192), 8),  # OLMo-hybrid
        ("gla", (4, 4), (256, 512), 64),
        ("retention", (8, 8), (256, 512), 1),
    ],
)
@pytest.mark.parametrize("v_first", [False, True])
def test_shapes_of_models(
    name: str, heads: tuple[int, int], dims: tuple[int, int], batch: int, v_first: bool
) -> None:
    assert_close(name, on_gpu(draw(name, heads=heads, dims=dims, batch=batch, v_first=v_first)))


@of_every_name
@pytest.mark.parametrize("v_first", [False, True])
def test_tokens_of_one_call_are_those_of_single_calls(name: str, v_first: bool) -> None:
    """Bitwise, and so are repeats."""
    x = on_gpu(draw(name, tokens=8, dims=(128, 128), v_first=v_first and name != "delta_rule"))
    o, last = call(name, x)
    assert all(map(torch.equal, call(name, x), (o, last)))
    rows, state = [], x["initial_state"]
    for t in range(8):
        token = {key: v[:, t : t + 1] if isinstance(v, Tensor) else v for key, v in x.items()}
        row, state = call(name, token | {"initial_state": state})
        rows.append(row)
    assert torch.equal(torch.cat(rows, dim=1), o) and torch.equal(state, last)


def test_raw_inputs_and_views() -> None:
    x = draw("gated_delta_rule", tokens=2, heads=(2, 2), dims=(128, 128)) | dict.fromkeys(FLAGS, True)
    x |= {"A_log": torch.tensor([0.5, -1.0]), "dt_bias": torch.tensor([0.3, 30.0]).bfloat16()}
    joined = torch.cat([x["q"], x["k"], x["v"]], dim=-1).to(DEVICE)
    assert_close("gated_delta_rule", on_gpu(x) | dict(zip("qkv", joined.split(128, dim=-1), strict=True)))


def test_what_is_not_written_before_is_written() -> None:
    x = on_gpu(draw("gla", tokens=5, dims=(128, 128)))
    expected = call("gla", x)
    with uninitialised_memory_is_nan():
        found = call("gla", x)
    assert all(map(torch.equal, found, expected))


@of_every_name
def test_in_a_graph_and_on_another_stream(name: str) -> None:
    x = on_gpu(draw(name, tokens=1, dims=(128, 128)))
    expected = call(name, x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = call(name, x)
    stream.synchronize()
    assert all(map(torch.equal, found, expected))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(name, x)
    for tensor in captured:
        tensor.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, captured, expected))


@pytest.mark.parametrize("v_first", [False, True])
def test_a_pool_in_a_graph(v_first: bool) -> None:
    """Replayed with other indices, of a pool of more than 2^31 elements."""
    x = on_gpu(draw("gated_delta_rule", batch=3, dims=(128, 128), v_first=v_first))
    states = x.pop("initial_state")
    slots = 2**31 // states[0].numel() + 2
    pool = torch.zeros(slots, *states.shape[1:], device=DEVICE, dtype=HALF)
    first, second = ([slots - 1, -1, 1], [2, slots - 2, -1])
    for indices in (first, second):
        for n, slot in enumerate(indices):
            if slot >= 0:
                pool[slot] = states[n]
    before = {slot: pool[slot].clone() for slot in {*first, *second} - {-1}}
    indices = torch.tensor(first, device=DEVICE, dtype=torch.int32)
    graph = torch.cuda.CUDAGraph()
    call(
        "gated_delta_rule",
        x | {"initial_state": pool[:3].clone(), "state_indices": indices.clamp(max=2), "inplace": True},
    )
    with torch.cuda.graph(graph):
        o, _ = call(
            "gated_delta_rule", x | {"initial_state": pool, "state_indices": indices, "inplace": True}
        )
    for order in (first, second):
        indices.copy_(torch.tensor(order))
        graph.replay()
        for n, slot in enumerate(order):
            if slot < 0:
                assert not o[n].any()
                continue
            alone = {k: v[n : n + 1] if isinstance(v, Tensor) else v for k, v in x.items()}
            state = before[slot][None].clone()
            expected, _ = call("gated_delta_rule", alone | {"initial_state": state, "inplace": True})
            assert torch.equal(o[n : n + 1], expected) and torch.equal(pool[slot], state[0])


@pytest.mark.sanitize
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_packed_sequences(name: str, v_first: bool) -> None:
    """Some of them of no token, or of several turns; each is bitwise as alone."""
    v_first = v_first and name != "delta_rule"
    lengths = [1, 0, 3, 8, 30, 4, 1, 1]
    x = on_gpu(draw(name, tokens=sum(lengths), batch=1, dims=(128, 128), v_first=v_first))
    states = on_gpu(draw(name, batch=len(lengths), dims=(128, 128), v_first=v_first))["initial_state"]
    offsets = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
    o, last = assert_close(name, x | {"cu_seqlens": offsets, "initial_state": states})
    tokens = {key: v for key, v in x.items() if isinstance(v, Tensor) and key != "initial_state"}
    parts = zip(*(v.split(lengths, dim=1) for v in tokens.values()), strict=True)
    for n, (part, found) in enumerate(zip(parts, o.split(lengths, dim=1), strict=True)):
        if 0 < lengths[n] <= 8:
            alone = x | dict(zip(tokens, part, strict=True)) | {"initial_state": states[n : n + 1]}
            expected, expected_last = call(name, alone)
            assert torch.equal(found, expected) and torch.equal(last[n], expected_last[0])


@of_every_name
def test_auto_takes_them(name: str) -> None:
    x = on_gpu(draw(name, dims=(128, 128), dtype=HALF))
    assert tfla_tk.which(f"fused_recurrent_{name}", **x).backend == "tk"
