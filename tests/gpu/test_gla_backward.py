"""The gradients of gated linear attention on the GPU: against the reference in fp64."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn.functional import logsigmoid

import tfla_tk
from tfla_tk import chunk_gla

from . import memory
from .conftest import DEVICE, forget_calls
from .linear import REPEATS, Normal, Tensors, assert_accurate, assert_equal, exact, pack
from .linear import run as run_function
from .linear import train as train_function
from .memory import LENGTHS, uninitialised_memory_is_nan
from .test_gla import (
    COMPARED,
    GATES,
    GATES_COMPARED,
    PADDED,
    assert_no_less_accurate_than_triton,
    draw,
    draw_batch_or_packed,
    draw_beside_mild,
    draw_compared,
)

DIMS = [(64, 64), (128, 128), (128, 256), (64, 128), (128, 64), (64, 256)]
WIDE = [  # slices of K, of V, of both
    (256, 128),
    (192, 256),
    (128, 384),
    (256, 512),
    (96, 320),
    (144, 272),
    (208, 320),
]

# lengths, head dims, what gates are divided by, their dtypes: every two values of two of these meet
AS_FLA_TESTS = [
    (seq, dims, (0.01, 0.1, 1.0, 10.0)[(i + j) % 4], (torch.float32, torch.bfloat16)[(i // 4 + j) % 2])
    for i, seq in enumerate([1, 15, 63, 64, 100, 257, 1024, 2048])
    for j, dims in enumerate([(256, 512), (64, 64), (96, 96), (128, 128), (256, 256)])
]

run = partial(run_function, function=chunk_gla)
train = partial(train_function, function=chunk_gla)


def check(x: Tensors, **options: float) -> None:
    found, truth = train(x, **options), train(exact(x), "reference", **options)
    assert all(found[f"d{name}"].dtype == x[name].dtype for name in x if f"d{name}" in found)
    assert_accurate(found, truth, x["q"].dtype, size=x["v"].numel() ** 0.5)


@pytest.mark.parametrize("dims", [*DIMS, *PADDED, *WIDE], ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("states", [False, True], ids=["zeros", "states"])
def test_all_dims(dims: tuple[int, int], states: bool, dtype: torch.dtype) -> None:
    check(draw(dims=dims, dtype=dtype, states=states))


@pytest.mark.parametrize(
    "dims", [(128, 128), (128, 64), (96, 80), (128, 256), (256, 384)], ids="{0[0]}_{0[1]}".format
)
@pytest.mark.parametrize("of_gates", [torch.float32, torch.bfloat16], ids=str)
def test_many_heads(dims: tuple[int, int], of_gates: torch.dtype) -> None:
    """More CTAs than run at once, with two walkers each."""
    x = draw(3, 130, 48, dims)
    x["g"] = x["g"].to(of_gates)
    check(x)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (128, 256), (256, 256)], ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("seq", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 193, 320, 1000, 2048])
def test_any_length(seq: int, dims: tuple[int, int], dtype: torch.dtype) -> None:
    check(draw(1, seq, dims=dims, dtype=dtype))


@pytest.mark.parametrize(("seq", "dims", "normaliser", "of_gates"), AS_FLA_TESTS, ids=str)
def test_errors_are_within_the_limits_of_fla(
    seq: int, dims: tuple[int, int], normaliser: float, of_gates: torch.dtype
) -> None:
    """Those of its own tests, of all results."""
    x = draw(2, seq, dims=dims)
    x["g"] = (logsigmoid(Normal(1)(*x["g"].shape)) / normaliser).to(of_gates)
    found, truth = (
        run(given, backend) | train(given, backend) for given, backend in ((x, "tk"), (exact(x), "reference"))
    )
    limits = dict.fromkeys(found, 5e-3) | {"o": 4e-3}
    assert_accurate(found, truth, torch.bfloat16, wider=limits)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (128, 256)], ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("gates", GATES)
def test_gates(gates: str, dims: tuple[int, int], dtype: torch.dtype) -> None:
    check(draw(1, 500, dims=dims, dtype=dtype, gates=gates))


@pytest.mark.parametrize("dim_k", [64, 128])
@pytest.mark.parametrize("tokens", [8, 16], ids=["blocks", "chunk"])
@pytest.mark.parametrize("times", [0.99, 1.01, None], ids=["mild", "hard", "by turns"])
def test_gates_where_the_form_of_scores_changes(
    times: float | None, tokens: int, dim_k: int, dtype: torch.dtype
) -> None:
    check(draw_beside_mild(times, tokens, (dim_k, 128), dtype))


@pytest.mark.parametrize("dims", [(128, 256), (64, 256)], ids="{0[0]}_{0[1]}".format)
def test_slices_of_v_are_those_alone(dims: tuple[int, int]) -> None:
    """dv, bitwise, of packed sequences: CTAs of neighbouring slices make operands for each other."""
    x = pack(draw(1, sum(LENGTHS), dims=dims, sequences=len(LENGTHS), gates="mixed"))
    given = [torch.randn_like(t) for t in run(x).values()]
    with tfla_tk.batch_invariant():
        found = train(x, given=given)
    for of in (slice(0, 128), slice(128, 256)):
        part = {**x, "v": x["v"][..., of], "initial_state": x["initial_state"][..., of].contiguous()}
        with tfla_tk.batch_invariant():
            alone = train(part, given=[t[..., of] for t in given])
        for name in ("dv", "dinitial_state"):
            assert torch.equal(found[name][..., of], alone[name])


@pytest.mark.parametrize("dims", WIDE, ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("of_gates", [torch.float32, torch.bfloat16], ids=str)
def test_wide_heads_of_packed_sequences(of_gates: torch.dtype, dims: tuple[int, int]) -> None:
    x = draw(1, sum(LENGTHS), 3, dims, sequences=len(LENGTHS), gates="mixed")
    x["g"] = x["g"].to(of_gates)
    check(pack(x))


@pytest.mark.parametrize("dims", WIDE, ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("states", [False, True], ids=["zeros", "states"])
def test_wide_heads_beyond_anchors(states: bool, dims: tuple[int, int], dtype: torch.dtype) -> None:
    check(draw(2, 1100, 2, dims, dtype, states=states))


@pytest.mark.parametrize("dims", [(192, 320), (256, 512)], ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("gates", GATES)
def test_wide_heads_with_gates_of_any_size(gates: str, dims: tuple[int, int], dtype: torch.dtype) -> None:
    check(draw(1, 600, dims=dims, dtype=dtype, gates=gates))


@pytest.mark.parametrize("dims", [(128, 128), (256, 512)], ids="{0[0]}_{0[1]}".format)
def test_no_gradient_flows_through_closed_gates(dims: tuple[int, int]) -> None:
    assert not train(draw(1, 600, dims=dims, gates="closed"))["dg"].any()


def test_the_channels_of_wide_keys_are_those_alone() -> None:
    """dq, dk and dg of a slice of K, bitwise, need no others."""
    x = draw(1, 600, 3, (256, 512), gates="mixed")
    given = [torch.randn_like(t) for t in run(x).values()]
    found = train(x, given=given)
    for of in (slice(0, 128), slice(128, 256)):
        part = {**x, **{name: x[name][..., of] for name in ("q", "k", "g")}}
        part["initial_state"] = x["initial_state"][:, :, of].contiguous()
        alone = train(part, given=[given[0], given[1][:, :, of].contiguous()], scale=256**-0.5)
        for name in ("dq", "dk", "dg"):
            assert torch.equal(found[name][..., of], alone[name])


@pytest.mark.parametrize("states", [False, True], ids=["zeros", "states"])
@pytest.mark.parametrize("seq", [512, 513, 1024, 1600])
def test_anchors(seq: int, states: bool) -> None:
    check(draw(2, seq, 2, states=states))


@pytest.mark.parametrize("of_gates", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (80, 128)], ids="{0[0]}_{0[1]}".format)
def test_dtypes_of_gates(dims: tuple[int, int], of_gates: torch.dtype, dtype: torch.dtype) -> None:
    x = draw(2, 333, dims=dims, dtype=dtype)
    x["g"] = x["g"].to(of_gates)
    check(x)


@pytest.mark.parametrize("scale", [1.0, 0.02, -0.3])
def test_scale(scale: float) -> None:
    check(draw(1, 200), scale=scale)


@pytest.mark.parametrize("offsets", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (96, 80), (96, 208)], ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("of_gates", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [2, 80])
def test_packed_sequences(
    heads: int, dims: tuple[int, int], offsets: torch.dtype, of_gates: torch.dtype
) -> None:
    x = draw(1, sum(LENGTHS), heads, dims, sequences=len(LENGTHS))
    x["g"] = x["g"].to(of_gates)
    check(pack(x, offsets))


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 512)], ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("packed", [False, True])
def test_a_loss_on_the_final_state_alone(packed: bool, dims: tuple[int, int], dtype: torch.dtype) -> None:
    x = draw_batch_or_packed(packed, dims, dtype)
    names = [name for name in x if name != "cu_seqlens"]

    def differentiate(given: Tensors, backend: str) -> Tensors:
        leaves = {name: t.detach().requires_grad_(name in names) for name, t in given.items()}
        loss = run(leaves, backend)["final_state"].square().sum()
        found = torch.autograd.grad(loss, [leaves[name] for name in names], materialize_grads=True)
        return {f"d{name}": t for name, t in zip(names, found, strict=True)}

    found = differentiate(x, "tk")
    assert_accurate(found, differentiate(exact(x), "reference"), dtype, size=x["v"].numel() ** 0.5)
    assert not found["dq"].any()


@pytest.mark.parametrize("dims", [(64, 64), (128, 256), (256, 512)], ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("packed", [False, True])
def test_states_with_v_first_have_the_transposed_gradients(
    packed: bool, dims: tuple[int, int], dtype: torch.dtype
) -> None:
    """Bitwise."""
    x = draw_batch_or_packed(packed, dims, dtype)
    do, d_last = (torch.randn_like(t) for t in run(x).values())
    expected = train(x, given=[do, d_last])
    x["initial_state"] = x["initial_state"].mT.contiguous()
    found = train(x, given=[do, d_last.mT.contiguous()], state_v_first=True)
    assert_equal({**found, "dinitial_state": found["dinitial_state"].mT}, expected)


def test_gates_without_gradient() -> None:
    """The other gradients are bitwise the same."""
    x = draw(2, 300)
    names = [name for name in x if name != "g"]
    leaves = {name: t.detach().requires_grad_(name in names) for name, t in x.items()}
    outputs = run(leaves)
    given = [torch.ones_like(t) for t in outputs.values()]
    grads = torch.autograd.grad(list(outputs.values()), [leaves[name] for name in names], given)
    expected = train(x, given=given)
    del expected["dg"]
    assert_equal({f"d{name}": t for name, t in zip(names, grads, strict=True)}, expected)


@pytest.mark.parametrize("layout", ["transposed", "shifted", "odd_rows", "shifted_transposed"])
def test_any_layout(layout: str) -> None:
    x = draw(2, 200)
    plain = train(x)
    for name in ("q", "k", "v", "g"):
        x[name] = getattr(memory, layout)(x[name])
    x["initial_state"] = x["initial_state"].mT.contiguous().mT
    assert_equal(train(x), plain)


@pytest.mark.parametrize("heads", [4, 80])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (128, 256)], ids="{0[0]}_{0[1]}".format)
def test_every_repeat_is_bitwise_equal(dims: tuple[int, int], heads: int, dtype: torch.dtype) -> None:
    x = draw(2, 700, heads, dims, dtype, "mixed")
    first = train(x)
    for _ in range(REPEATS):
        assert_equal(train(x), first)


@pytest.mark.parametrize("dims", [(256, 512), (144, 272)], ids="{0[0]}_{0[1]}".format)
def test_every_repeat_of_wide_heads_is_bitwise_equal(dims: tuple[int, int], dtype: torch.dtype) -> None:
    x = draw(2, 700, 4, dims, dtype, "mixed")
    first = train(x)
    for _ in range(REPEATS):
        assert_equal(train(x), first)


@pytest.mark.parametrize("dims", [(96, 80), (192, 320)], ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("of_gates", [torch.float32, torch.bfloat16], ids=str)
def test_outputs_are_written_whole(of_gates: torch.dtype, dims: tuple[int, int]) -> None:
    x = pack(draw(1, sum(LENGTHS), dims=dims, sequences=len(LENGTHS)))
    x["g"] = x["g"].to(of_gates)
    expected = train(x)
    with uninitialised_memory_is_nan():
        found = train(x)
    assert_equal(found, expected)


def test_nan_stays_in_its_sequence() -> None:
    x = draw(1, 300, sequences=3)
    x["cu_seqlens"] = torch.tensor([0, 100, 170, 300], device="cuda")
    expected = train(x)
    for name in ("q", "k", "v", "g"):
        given = {**x, name: x[name].clone()}
        given[name][:, 100:170] = torch.nan
        found = train(given)
        for rows in (slice(0, 100), slice(170, 300)):
            for grad in ("dq", "dk", "dv", "dg"):
                assert torch.equal(found[grad][:, rows], expected[grad][:, rows]), (name, grad)
        assert torch.equal(found["dinitial_state"][::2], expected["dinitial_state"][::2])


def test_a_graph_replays_packed_training() -> None:
    x = pack(draw(1, sum(LENGTHS), sequences=len(LENGTHS)))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    given = [torch.randn_like(t) for t in run(x).values()]
    with torch.cuda.stream(stream):
        train(x, given=given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = train(x, given=given)
    x["v"].copy_(torch.randn_like(x["v"]))
    graph.replay()
    torch.cuda.synchronize()
    assert_equal(found, train(x, given=given))


def test_torch_compile() -> None:
    x = draw(1, 200)
    assert_equal(train(x, function=torch.compile(chunk_gla, fullgraph=True)), train(x))


@pytest.mark.parametrize(
    "dims", [(128, 128), (256, 64), (208, 128), (192, 80), (256, 512)], ids="{0[0]}_{0[1]}".format
)
def test_dv_hardly_has_another_error_than_its_rounding(dims: tuple[int, int], dtype: torch.dtype) -> None:
    """P has two parts, and its operands more digits than q and k."""
    x = draw(2, 500, 4, dims, dtype=dtype, gates="mixed", states=False)
    dv, truth = train(x)["dv"].double(), train(exact(x), "reference")["dv"]
    drawn = torch.randn_like(truth)
    rounding = (drawn.to(dtype) - drawn).norm() / drawn.norm()
    assert (dv - truth).norm() / truth.norm() < 1.6 * rounding


@pytest.mark.usefixtures("hardly_tuned")
@pytest.mark.parametrize("seq", [64, 500])
@pytest.mark.parametrize(("gates", "times"), GATES_COMPARED)
@pytest.mark.parametrize(("dims", "states"), COMPARED, ids=str)
def test_no_less_accurate_than_triton(
    dims: tuple[int, int], states: bool, gates: str, times: float, seq: int, dtype: torch.dtype
) -> None:
    """Of one chunk and of several."""
    x = draw_compared(seq, dims, states, gates, times, dtype)
    assert_no_less_accurate_than_triton(x, train)


def test_auto_takes_the_kernels() -> None:
    leaves = {name: t.requires_grad_() for name, t in draw().items()}
    assert tfla_tk.which(chunk_gla, **leaves).backend == "tk"
    wide = {name: t.requires_grad_() for name, t in draw(dims=(256, 512)).items()}
    assert tfla_tk.which(chunk_gla, **wide).backend == "tk"


@pytest.mark.sanitize
@pytest.mark.parametrize("heads", [1, 140])
@pytest.mark.parametrize(
    "dims", [(64, 64), (128, 128), (128, 192), (64, 256), (144, 272)], ids="{0[0]}_{0[1]}".format
)
def test_small_launches(dims: tuple[int, int], heads: int) -> None:
    """Of every kind of tile for compute-sanitizer: every place of every ring is used twice."""
    forget_calls()
    found = train(draw(1, 570 if heads == 1 else 180, heads, dims))
    torch.cuda.synchronize()
    assert all(t.isfinite().all() for t in found.values())


@pytest.mark.sanitize
@pytest.mark.parametrize("kind", ["packed", "fp16"])
def test_small_launches_of_other_calls(kind: str) -> None:
    """Packed sequences, an empty one among them, and fp16."""
    forget_calls()
    dtype = torch.float16 if kind == "fp16" else torch.bfloat16
    x = draw(1, 570, 1, (128, 256), dtype, sequences=4 if kind == "packed" else None)
    if kind == "packed":
        x["cu_seqlens"] = torch.tensor([0, 330, 330, 331, 570], device=DEVICE)
    found = train(x)
    torch.cuda.synchronize()
    assert all(t.isfinite().all() for t in found.values())
