"""What the GPU tests of the operators in [B, T, H, D] share: draws, runs, gradients, comparison with fp64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from tfla_tk import chunk_simple_gla

from .accuracy import DEVICE, GRADIENT_TOLERANCE, TOLERANCE, relative_error
from .memory import LENGTHS, uninitialised_memory_is_nan

Tensors = dict[str, Tensor]

REPEATS = 200  # of a call whose results have to be the same, bit for bit
VANISHED = 1e-3  # of a gradient, relative to that of o
# gradients that are sums over many products, of which little is left
SUMS = ("dg", "dbeta", "dA_log", "ddt_bias")


class Normal:
    """Numbers from N(0, 1) on the GPU: the same for equal seeds, drawn in the same order."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator(DEVICE).manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=DEVICE)

    def uniform(self, *shape: int) -> Tensor:
        """From 0 to 1 instead."""
        return torch.rand(shape, generator=self.generator, device=DEVICE)


def draw_operands(
    normal: Normal,
    batch: int,
    seq: int,
    heads: int,
    value_heads: int,
    dims: tuple[int, int],
    dtype: torch.dtype,
    *,
    unit: bool = False,
) -> Tensors:
    """q, k and v, in this order.

    Args:
        unit: q and k of norm 1.
    """
    found = {name: normal(batch, seq, heads, dims[0]) for name in ("q", "k")}
    if unit:
        found = {name: normalize(t, dim=-1) for name, t in found.items()}
    found["v"] = normal(batch, seq, value_heads, dims[1])
    return {name: t.to(dtype) for name, t in found.items()}


def draw_simple_gla(
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
    g = logsigmoid(normal(batch, seq, value_heads) + 2)
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


def draw_gla(
    batch: int = 2,
    seq: int = 300,
    heads: int = 2,
    dims: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.bfloat16,
    gates: str = "usual",
    states: bool = True,
    sequences: int | None = None,
    seed: int = 0,
) -> Tensors:
    """q, k, v, g and, on request, an initial state, [B, T, H, D]."""
    normal = Normal(seed)
    found = draw_operands(normal, batch, seq, heads, heads, dims, dtype)
    g = logsigmoid(normal(batch, seq, heads, dims[0]) + 2)
    chosen = normal.uniform(*g.shape)
    closed_channel = torch.arange(dims[0], device="cuda") == 5
    found["g"] = {
        "usual": lambda: g,
        "none": lambda: torch.zeros_like(g),
        "-1e-4": lambda: torch.full_like(g, -1e-4),
        "-50": lambda: torch.full_like(g, -50.0),
        "-1e3": lambda: torch.full_like(g, -1e3),
        # of every kind in one channel after the other, token by token
        "mixed": lambda: (
            g.where(chosen > 0.03, -50.0)
            .where(chosen > 0.01, -1e3)
            .where(chosen < 0.7, -1e-4)
            .where(chosen < 0.8, 0.0)
        ),
        "by channel": lambda: g.new_tensor([0.0, -1e-4, -50.0, -1e3]).repeat(*g.shape[:3], dims[0] // 4),
        "one channel": lambda: g.where(~closed_channel, -torch.inf),
        "closed": lambda: torch.full_like(g, -torch.inf),
        "half closed": lambda: torch.where(chosen > 0.5, -torch.inf, 0.0),
        "growing": lambda: 0.01 * normal(*g.shape),
        # channels of 16 tokens each
        "closed blocks": lambda: torch.where(
            chosen[:, ::16].repeat_interleave(16, 1)[:, :seq] < 0.3, -20.0, g / 16
        ),
    }[gates]()
    if states:
        found["initial_state"] = normal(batch if sequences is None else sequences, heads, *dims)
    return found


def with_sums_of_gates(x: Tensors, bits: float, tokens: int, times: float | None, *, turn: int) -> Tensors:
    """x with random gates whose sums over every `tokens` tokens are `times` as many bits; None: half of it
    and more than it, by turns of so many tokens."""
    parts = torch.rand_like(x["g"]).unflatten(1, (-1, tokens))
    parts *= -bits * math.log(2) / parts.sum(2, keepdim=True)
    if times is None:
        is_more = torch.arange(parts.shape[1], device=DEVICE) // (turn // tokens) % 2 == 1
        parts *= torch.where(is_more, 1.5, 0.5)[None, :, None, None, None]
    else:
        parts *= times
    return x | {"g": parts.flatten(1, 2)}


def draw_cotangents(outputs: Tensors) -> list[Tensor]:
    """Gradients of o, of numbers that all dtypes of operands hold, and of the last state."""
    normal = Normal(9)
    o, state = (normal(*t.shape) for t in outputs.values())
    return [o.bfloat16().half().to(outputs["o"].dtype), state.to(outputs["final_state"].dtype)]


def pack(x: Tensors, offsets: torch.dtype = torch.int64, lengths: Sequence[int] = LENGTHS) -> Tensors:
    """x with the offsets of sequences of these lengths."""
    return x | {"cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).to(DEVICE, offsets)}


def exact(x: Tensors) -> Tensors:
    """The same numbers in fp64."""
    return {name: t.double() if t.is_floating_point() else t for name, t in x.items()}


def run(x: Tensors, backend: str = "tk", function: Any = chunk_simple_gla, **options: Any) -> Tensors:
    """o and the last state."""
    o, state = function(**x, output_final_state=True, backend=backend, **options)
    return {"o": o, "final_state": state}


def train(
    x: Tensors,
    backend: str = "tk",
    function: Any = chunk_simple_gla,
    given: list[Tensor] | None = None,
    **options: Any,
) -> Tensors:
    """The gradients of what can have one, from gradients of o and of the last state."""
    names = [name for name, t in x.items() if t.is_floating_point() and name != "g_gamma"]
    leaves = {name: t.detach().requires_grad_(name in names) for name, t in x.items()}
    found = run(leaves, backend, function, **options)
    given = draw_cotangents(found) if given is None else given
    outputs = list(found.values())
    grads = torch.autograd.grad(outputs, [leaves[name] for name in names], given)
    return {f"d{name}": grad for name, grad in zip(names, grads, strict=True)}


def both(
    x: Tensors, function: Any, backend: str = "tk", given: list[Tensor] | None = None, **options: Any
) -> Tensors:
    """Of a forward alone and of a training step."""
    return run(x, backend, function, **options) | train(x, backend, function, given, **options)


def assert_equal(found: Tensors, expected: Tensors) -> None:
    """Bitwise."""
    assert found.keys() == expected.keys()
    different = [name for name, t in expected.items() if not torch.equal(found[name], t)]
    assert not different


def assert_whole_and_repeated(call: Callable[[], Tensors]) -> None:
    """Every element of the results is written, and is the same in every call, bitwise."""
    expected = call()
    with uninitialised_memory_is_nan():
        assert_equal(call(), expected)
    for _ in range(REPEATS):
        assert_equal(call(), expected)


def assert_graph_replays(
    call: Callable[[Tensors], Tensors], x: Tensors, other: Tensors, expected: list[Tensors], replays: int
) -> None:
    """A graph of call(x) gives, bitwise, the results of what lies in x's tensors when it is replayed.

    Args:
        expected: of `other` and of x as it is now, which come by turns.
    """
    kept = {name: t.clone() for name, t in x.items()}
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = call(x)
    for n in range(replays):
        for name, t in (kept if n % 2 else other).items():
            x[name].copy_(t)
        graph.replay()
        torch.cuda.synchronize()
        assert_equal(found, expected[n % 2])


def assert_equal_on_streams(call: Callable[[], Tensors], expected: Tensors, rounds: int) -> None:
    """Calls on four streams at once, so many on each, all give this, bitwise."""
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    found = []
    for _ in range(rounds):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(call())
    torch.cuda.synchronize()
    for one in found:
        assert_equal(one, expected)


def assert_accurate(
    found: Tensors,
    truth: Tensors,
    dtype: torch.dtype,
    size: float = 0.0,
    wider: dict[str, float] | None = None,
) -> None:
    """Relative errors within the tolerances of the dtype.

    Args:
        size: norm of the gradient of o. Gradients far smaller have vanished: closed gates leave 1e-22
            of them, which 16-bit factors cannot hold. Of these only the size is checked.
        wider: other tolerances, by name.
    """
    assert found.keys() == truth.keys()
    of_tensors, of_sums = GRADIENT_TOLERANCE[dtype]
    limits = {"o": TOLERANCE[dtype], "final_state": TOLERANCE[dtype]} | dict.fromkeys(SUMS, of_sums)
    limits = {name: limits.get(name, of_tensors) for name in found} | (wider or {})
    failed = {}
    for name, x in found.items():
        assert x.shape == truth[name].shape, name
        error = relative_error(x, truth[name])
        if truth[name].norm().item() < VANISHED * size:
            error = (x.double() - truth[name]).norm().item() / (VANISHED * size)
        # not(<=): NaN fails
        if not error <= limits[name]:
            failed[name] = error
    assert not failed, f"relative errors {failed} exceed {limits}"


def check_forward(x: Tensors, function: Any, wider: dict[str, float] | None = None, **options: Any) -> None:
    """o and the last state against the reference in fp64."""
    of_function = {"function": function, **options}
    truth = run(exact(x), "reference", **of_function)
    assert_accurate(run(x, **of_function), truth, x["q"].dtype, wider=wider)


def check_both(x: Tensors, function: Any, wider: dict[str, float] | None = None, **options: Any) -> None:
    """Forward and backward against the reference in fp64.

    Args:
        wider: other tolerances, by name.
    """
    check_forward(x, function, wider, **options)
    of_function = {"function": function, **options}
    found, truth = train(x, **of_function), train(exact(x), "reference", **of_function)
    assert all(found[f"d{name}"].dtype == x[name].dtype for name in x if f"d{name}" in found)
    assert_accurate(found, truth, x["q"].dtype, x["v"].numel() ** 0.5, wider)
