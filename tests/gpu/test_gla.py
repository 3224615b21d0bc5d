"""Gated linear attention on the GPU: against the reference in fp64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.functional import logsigmoid

import tfla_tk
from tfla_tk import chunk_gla

from . import memory
from .conftest import forget_calls, relative_error
from .linear import REPEATS, Normal, Tensors, assert_equal, check_forward, draw_operands, exact, pack
from .linear import run as run_function
from .memory import LENGTHS, uninitialised_memory_is_nan

DIMS = [(64, 64), (128, 128), (128, 256), (128, 384), (128, 512), (64, 128), (128, 64), (64, 256), (64, 512)]
PADDED = [(16, 16), (48, 80), (96, 192), (112, 240), (128, 48)]
WIDE = [(256, 64), (256, 512), (144, 128), (208, 192)]  # K in two launches
SHARED = [(64, 256), (128, 256)]  # CTAs of neighbouring slices of V take turns at the chunks
SUMS = [(256, 64), (208, 128), (256, 256)]  # K in two launches: one walker, two, CTAs that take turns
GATES = [
    *("usual", "none", "-1e-4", "-50", "-1e3", "mixed", "by channel", "one channel", "closed"),
    *("half closed", "growing", "closed blocks"),
]
OF_FP32_SUMS = 1e-5
BY_CHANCE = {"dinitial_state": 1.05}  # to which few tokens add where gates are fast
# of the comparison with fla: head dims, whether there is an initial state
COMPARED = [
    *(((128, 128), False), ((256, 256), False)),
    *(((64, 64), True), ((128, 256), True), ((256, 512), True)),
]
# its gates and a factor on them: slow, usual and fast ones, none, and some that no middle of a chunk suits
GATES_COMPARED = [
    *(("usual", 0.05), ("usual", 1.0), ("usual", 4.0)),
    *(("none", 1.0), ("mixed", 1.0), ("closed blocks", 1.0)),
]
MILD = {torch.bfloat16: 80.0, torch.float16: 4.0}  # kMildBits of channel_gate/middle.cuh

run = partial(run_function, function=chunk_gla)


def draw(
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


def draw_beside_mild(times: float | None, tokens: int, dims: tuple[int, int], dtype: torch.dtype) -> Tensors:
    """Sums over sides of eight tokens, or over blocks of 16, beside what counts as mild; None: by turns."""
    x = draw(1, 512, dims=dims, dtype=dtype)
    most = MILD[dtype] * 0.693147 / (1 if tokens == 8 else 2)
    sides = torch.rand_like(x["g"]).reshape(1, -1, tokens, 2, dims[0])
    sides *= -most / sides.sum(2, keepdim=True)
    if times is None:
        hard = torch.arange(sides.shape[1], device="cuda") // (64 // tokens) % 2 == 1
        sides *= torch.where(hard, 1.5, 0.5)[None, :, None, None, None]
    else:
        sides *= times
    x["g"] = sides.reshape(x["g"].shape)
    return x


def draw_batch_or_packed(packed: bool, dims: tuple[int, int], dtype: torch.dtype) -> Tensors:
    """Of two sequences, or of packed ones."""
    if packed:
        return pack(draw(1, sum(LENGTHS), dims=dims, dtype=dtype, sequences=len(LENGTHS)))
    return draw(2, 300, dims=dims, dtype=dtype)


def draw_compared(
    seq: int, dims: tuple[int, int], states: bool, gates: str, times: float, dtype: torch.dtype
) -> Tensors:
    """So many heads that two ways to round the same numbers have errors that are equal within 2 %."""
    x = draw(2, seq, 4096 // dims[0], dims, dtype, gates, states)
    x["g"] *= times
    return x


def check(x: Tensors, **options: Any) -> None:
    check_forward(x, chunk_gla, **options)


def assert_no_less_accurate_than_triton(x: Tensors, call: Callable[..., Tensors]) -> None:
    """But for what sums in fp32 leave of exact products, and for chance."""
    truth = call(exact(x), "reference")
    found, theirs = (
        {name: relative_error(t, truth[name]) for name, t in call(x, backend).items()}
        for backend in ("tk", "triton")
    )
    # not(<=): NaN fails
    limits = {name: max(BY_CHANCE.get(name, 1.02) * e, OF_FP32_SUMS) for name, e in theirs.items()}
    worse = {name: e for name, e in found.items() if not e <= limits[name]}
    assert not worse, (found, theirs)


@pytest.mark.parametrize("dims", [*DIMS, *PADDED, *WIDE], ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("states", [False, True], ids=["zeros", "states"])
def test_all_dims(dims: tuple[int, int], states: bool, dtype: torch.dtype) -> None:
    check(draw(dims=dims, dtype=dtype, states=states))


@pytest.mark.parametrize("dims", [(64, 128), (128, 128), *SHARED, *SUMS], ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("seq", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 193, 320, 1000, 2048])
def test_any_length(seq: int, dims: tuple[int, int], dtype: torch.dtype) -> None:
    check(draw(1, seq, dims=dims, dtype=dtype))


@pytest.mark.parametrize("dims", [(64, 128), (128, 128), *SHARED, *SUMS], ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("gates", GATES)
def test_gates(gates: str, dims: tuple[int, int], dtype: torch.dtype) -> None:
    check(draw(1, 500, dims=dims, dtype=dtype, gates=gates))


@pytest.mark.parametrize("dims", [(64, 128), (128, 128), *SHARED], ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("tokens", [8, 16], ids=["blocks", "chunk"])
@pytest.mark.parametrize("times", [0.99, 1.01, None], ids=["mild", "hard", "by turns"])
def test_gates_where_the_form_of_scores_changes(
    times: float | None, tokens: int, dims: tuple[int, int], dtype: torch.dtype
) -> None:
    check(draw_beside_mild(times, tokens, dims, dtype))


@pytest.mark.parametrize("gates", ["usual", "mixed"])
@pytest.mark.parametrize("of_gates", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "dims",
    [*SHARED, (128, 384), (64, 384), (128, 512), (64, 512), (256, 256), (144, 384)],
    ids="{0[0]}_{0[1]}".format,
)
def test_slices_of_v_are_those_alone(dims: tuple[int, int], of_gates: torch.dtype, gates: str) -> None:
    """Bitwise, of packed sequences: CTAs of neighbouring slices make operands and scores for each other."""
    x = pack(draw(1, sum(LENGTHS), dims=dims, sequences=len(LENGTHS), gates=gates))
    x["g"] = x["g"].to(of_gates)
    with tfla_tk.batch_invariant():
        found = run(x)
    for first in range(0, dims[1], 128):
        of = slice(first, first + 128)
        part = {**x, "v": x["v"][..., of], "initial_state": x["initial_state"][..., of].contiguous()}
        with tfla_tk.batch_invariant():
            alone = run(part)
        assert torch.equal(found["o"][..., of], alone["o"])
        assert torch.equal(found["final_state"][..., of], alone["final_state"])


@pytest.mark.parametrize("of_gates", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (80, 128)], ids="{0[0]}_{0[1]}".format)
def test_dtypes_of_gates(dims: tuple[int, int], of_gates: torch.dtype, dtype: torch.dtype) -> None:
    x = draw(2, 333, dims=dims, dtype=dtype)
    x["g"] = x["g"].to(of_gates)
    check(x)


@pytest.mark.parametrize("scale", [1.0, 0.02, -0.3, 0.0])
def test_scale(scale: float) -> None:
    check(draw(1, 200), scale=scale)


@pytest.mark.parametrize("offsets", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize(
    "dims",
    [(128, 128), (64, 64), (96, 80), *SHARED, (128, 384), (96, 208), (256, 128), (256, 256)],
    ids="{0[0]}_{0[1]}".format,
)
@pytest.mark.parametrize("of_gates", [torch.float32, torch.bfloat16], ids=str)
def test_packed_sequences(dims: tuple[int, int], offsets: torch.dtype, of_gates: torch.dtype) -> None:
    x = draw(1, sum(LENGTHS), dims=dims, sequences=len(LENGTHS))
    x["g"] = x["g"].to(of_gates)
    check(pack(x, offsets))


@pytest.mark.parametrize("dims", [(128, 128), *SHARED, *SUMS], ids="{0[0]}_{0[1]}".format)
def test_packed_sequences_are_those_alone(dims: tuple[int, int]) -> None:
    """Bitwise, where nothing is cut."""
    x = pack(draw(1, sum(LENGTHS), dims=dims, sequences=len(LENGTHS)))
    with tfla_tk.batch_invariant():
        found, begin = run(x), 0
    for n, length in enumerate(LENGTHS):
        rows = slice(begin, begin + length)
        begin += length
        if length == 0:
            assert torch.equal(found["final_state"][n], x["initial_state"][n])
            continue
        alone = {name: x[name][:, rows] for name in ("q", "k", "v", "g")}
        expected = run({**alone, "initial_state": x["initial_state"][n : n + 1]})
        assert torch.equal(found["o"][:, rows], expected["o"])
        assert torch.equal(found["final_state"][n : n + 1], expected["final_state"])


@pytest.mark.parametrize("layout", ["transposed", "shifted", "odd_rows", "shifted_transposed"])
def test_any_layout(layout: str) -> None:
    """Views whose rows are aligned are read in place, others are copied."""
    x = draw(2, 200)
    plain = run(x)
    for name in ("q", "k", "v", "g"):
        x[name] = getattr(memory, layout)(x[name])
    x["initial_state"] = x["initial_state"].mT.contiguous().mT
    assert_equal(run(x), plain)


@pytest.mark.parametrize("dims", [(64, 64), (128, 256), (256, 512)], ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("packed", [False, True])
def test_states_with_v_first_are_the_transposed_ones(
    packed: bool, dims: tuple[int, int], dtype: torch.dtype
) -> None:
    """Bitwise."""
    x = draw_batch_or_packed(packed, dims, dtype)
    found = run({**x, "initial_state": x["initial_state"].mT.contiguous()}, state_v_first=True)
    assert_equal({**found, "final_state": found["final_state"].mT}, run(x))


@pytest.mark.parametrize("gates", ["usual", "mixed"])
@pytest.mark.parametrize(
    "dims", [(64, 64), (128, 128), *SHARED, (128, 512), (256, 512), *SUMS], ids="{0[0]}_{0[1]}".format
)
def test_every_repeat_is_bitwise_equal(dims: tuple[int, int], gates: str, dtype: torch.dtype) -> None:
    x = draw(2, 700, 4, dims, dtype, gates)
    first = run(x)
    for _ in range(REPEATS):
        assert_equal(run(x), first)


@pytest.mark.parametrize("dims", [(96, 80), (96, 208), (144, 80), (256, 256)], ids="{0[0]}_{0[1]}".format)
def test_outputs_are_written_whole(dims: tuple[int, int]) -> None:
    x = pack(draw(1, sum(LENGTHS), dims=dims, sequences=len(LENGTHS)))
    expected = run(x)
    with uninitialised_memory_is_nan():
        found = run(x)
    assert_equal(found, expected)


@pytest.mark.parametrize("dims", [(64, 128), (128, 128), *SHARED, *SUMS], ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("of_gates", [torch.float32, torch.bfloat16], ids=str)
def test_nan_stays_in_its_sequence(dims: tuple[int, int], of_gates: torch.dtype) -> None:
    x = draw(1, 300, dims=dims, sequences=3)
    x["g"] = x["g"].to(of_gates)
    x["cu_seqlens"] = torch.tensor([0, 100, 170, 300], device="cuda")
    expected = run(x)
    for name in ("q", "k", "v", "g"):
        given = {**x, name: x[name].clone()}
        given[name][:, 100:170] = torch.nan
        found = run(given)
        for rows in (slice(0, 100), slice(170, 300)):
            assert torch.equal(found["o"][:, rows], expected["o"][:, rows])
        assert torch.equal(found["final_state"][::2], expected["final_state"][::2])
        assert found["o"][:, 100:170].isnan().any()


@pytest.mark.parametrize("dims", [(128, 128), *SUMS], ids="{0[0]}_{0[1]}".format)
def test_columns_of_v_do_not_see_one_another(dims: tuple[int, int], dtype: torch.dtype) -> None:
    """Infinities, NaN, zeros, and numbers of another size."""
    x = draw(1, 300, dims=dims, dtype=dtype, states=False)
    given = {**x, "v": x["v"].clone()}
    given["v"][0, 70, :, 1], given["v"][0, 130, :, 2] = torch.inf, torch.nan
    given["v"][..., 3], given["v"][..., 4] = 0.0, 2.0**-8 * given["v"][..., 4]
    if dtype == torch.bfloat16:
        given["v"][..., 5] *= 2.0**60
    found, expected = run(given)["o"], run(x)["o"]
    others = torch.arange(dims[1], device="cuda") > 5
    others[0] = True
    assert torch.equal(found[..., others], expected[..., others])
    assert torch.equal(found[:, :64, :, 1:3], expected[:, :64, :, 1:3])  # of the chunks before
    assert not found[:, 70:, :, 1].isfinite().any() and found[:, 130:, :, 2].isnan().all()
    assert not found[..., 3].any()
    if dtype == torch.bfloat16:
        sizes = torch.tensor([2.0**-8, 2.0**60], device="cuda", dtype=dtype)
        assert torch.equal(found[..., 4:6], expected[..., 4:6] * sizes)


def test_a_nan_gate_is_seen_by_its_channel_from_its_token_on() -> None:
    x = draw(1, 200, 1)
    x["g"] = x["g"].clone()
    x["g"][0, 130, 0, 7] = torch.nan
    # -inf: or the chunk's scores would be of another form, equal but for rounding
    found, expected = run(x), run({**x, "g": x["g"].nan_to_num(-torch.inf)})
    assert torch.equal(found["o"][:, :128], expected["o"][:, :128])
    assert found["o"][:, 130:].isnan().all()
    channels = torch.arange(128, device="cuda") != 7
    assert torch.equal(found["final_state"][:, :, channels], expected["final_state"][:, :, channels])
    assert found["final_state"][:, :, 7].isnan().all()


def test_a_graph_replays_packed_sequences() -> None:
    x = pack(draw(1, sum(LENGTHS), sequences=len(LENGTHS)))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = run(x)
    x["v"].copy_(torch.randn_like(x["v"]))
    graph.replay()
    torch.cuda.synchronize()
    assert_equal(found, run(x))


def test_torch_compile() -> None:
    x = draw(1, 200)
    assert_equal(run(x, function=torch.compile(chunk_gla, fullgraph=True)), run(x))


@pytest.mark.parametrize("dims", [(128, 128), *SUMS, (192, 80), (256, 512)], ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("gates", ["none", "mixed"])
def test_o_has_the_error_of_two_roundings(gates: str, dims: tuple[int, int], dtype: torch.dtype) -> None:
    """Of P and of o itself; those of the state's operands add little to it."""
    x = draw(2, 500, 4, dims, dtype=dtype, gates=gates, states=False)
    o, truth = run(x)["o"].double(), run(exact(x), "reference")["o"]
    drawn = torch.randn_like(truth)
    rounding = (drawn.to(dtype) - drawn).norm() / drawn.norm()
    assert (o - truth).norm() / truth.norm() < {torch.bfloat16: 1.55, torch.float16: 1.8}[dtype] * rounding


@pytest.mark.usefixtures("hardly_tuned")
@pytest.mark.parametrize(("gates", "times"), GATES_COMPARED)
@pytest.mark.parametrize(("dims", "states"), [*COMPARED, ((256, 128), False)], ids=str)
def test_no_less_accurate_than_triton(
    dims: tuple[int, int], states: bool, gates: str, times: float, dtype: torch.dtype
) -> None:
    x = draw_compared(500, dims, states, gates, times, dtype)
    assert_no_less_accurate_than_triton(x, run)


def test_auto_takes_the_kernels() -> None:
    x = draw()
    assert tfla_tk.which(chunk_gla, **x).backend == "tk"
    assert tfla_tk.which(chunk_gla, **exact(x)).backend == "reference"


@pytest.mark.sanitize
@pytest.mark.parametrize(
    "dims",
    [(64, 64), (64, 128), (128, 64), (128, 128), (128, 192), (64, 256), (128, 256), (208, 128), (256, 256)],
    ids="{0[0]}_{0[1]}".format,
)
@pytest.mark.parametrize("gates", ["usual", "mixed"])
def test_small_launches(dims: tuple[int, int], gates: str) -> None:
    """Of every kind of tile for compute-sanitizer: every place of every ring is used twice."""
    forget_calls()
    found = run(draw(1, 570, 1, dims, gates=gates))
    torch.cuda.synchronize()
    assert all(t.isfinite().all() for t in found.values())
