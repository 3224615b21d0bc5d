"""Gated linear attention on the GPU, of whole and cut sequences: against the reference in fp64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.functional import logsigmoid

import tfla_tk
from tfla_tk import chunk_gla
from tfla_tk.backends.tk import segments
from tfla_tk.backends.tk.channel_gate import Shape
from tfla_tk.calls.linear import GLACore
from tfla_tk.core import eager

from .accuracy import relative_error
from .linear import (
    Normal,
    Tensors,
    assert_accurate,
    assert_equal,
    check_both,
    check_forward,
    exact,
    pack,
    with_sums_of_gates,
)
from .linear import both as both_of
from .linear import draw_gla as draw
from .linear import run as run_function
from .linear import train as train_function
from .memory import LENGTHS

DIMS = [(64, 64), (128, 128), (128, 256), (128, 512), (64, 128), (128, 64), (64, 256), (64, 512)]
PADDED = [(16, 16), (48, 80), (96, 192), (112, 240), (128, 48), (96, 80)]
SHARED = [(64, 256), (128, 256)]  # CTAs of neighbouring slices of V take turns at the chunks
SUMS = [(256, 64), (208, 128), (256, 256)]  # K in two launches: one walker, two, CTAs that take turns
# slices of K, of V, of both
WIDE = [(256, 128), (192, 256), (128, 384), (256, 512), (96, 320), (144, 272), (208, 320)]
WIDE_FORWARD = [(144, 128), (208, 192), *SUMS[:1]]
GATES = [
    *("usual", "none", "-1e-4", "-50", "-1e3", "mixed", "by channel", "one channel", "closed"),
    *("half closed", "growing", "closed blocks"),
]
OF_FP32_SUMS = 1e-5
BY_CHANCE = {"dinitial_state": 1.05}  # to which few tokens add where gates are fast
MILD = {torch.bfloat16: 80.0, torch.float16: 4.0}  # kMildBits of channel_gate/middle.cuh

run = partial(run_function, function=chunk_gla)
train = partial(train_function, function=chunk_gla)
both = partial(both_of, function=chunk_gla)
check = partial(check_both, function=chunk_gla)
CutEvery = Callable[[int], None]
AS_CHOSEN = 0  # chunks of a segment: as the sizes of the call ask for

of_dims = partial(pytest.mark.parametrize, "dims", ids="{0[0]}_{0[1]}".format)
with_states = pytest.mark.parametrize("states", [False, True], ids=["zeros", "states"])
of_gate_dtypes = pytest.mark.parametrize("of_gates", [torch.float32, torch.bfloat16, torch.float16], ids=str)
whole_and_cut = pytest.mark.parametrize("chunks", [AS_CHOSEN, 2], ids=["whole", "cut"])


@whole_and_cut
@of_dims([*DIMS, *PADDED, *WIDE, *WIDE_FORWARD])
@with_states
def test_all_dims(
    states: bool, dims: tuple[int, int], chunks: int, dtype: torch.dtype, cut_every: CutEvery
) -> None:
    cut_every(chunks)
    check(draw(seq=600 if chunks == 2 else 300, dims=dims, dtype=dtype, states=states))


@pytest.mark.parametrize("chunks", [AS_CHOSEN, 1, 3])
@of_dims([(64, 64), (64, 128), (128, 128), *SHARED, *SUMS])
@pytest.mark.parametrize("seq", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 192, 193, 320, 1000, 2048])
def test_any_length(
    seq: int, dims: tuple[int, int], chunks: int, dtype: torch.dtype, cut_every: CutEvery
) -> None:
    cut_every(chunks)
    # of few tokens many heads: the error of a few numbers is a matter of chance
    check(draw(1, seq, max(2, 32 // seq), dims, dtype))


@of_dims([(128, 128), (128, 64), (96, 80), (128, 256), (256, 384)])
@of_gate_dtypes
def test_many_heads(dims: tuple[int, int], of_gates: torch.dtype) -> None:
    """More CTAs than run at once, with two walkers each."""
    x = draw(3, 130, 48, dims)
    check(x | {"g": x["g"].to(of_gates)})


@whole_and_cut
@of_dims([(64, 64), (64, 128), (128, 128), *SHARED, *SUMS, (192, 320), (256, 512)])
@pytest.mark.parametrize("gates", GATES)
def test_gates(
    gates: str, dims: tuple[int, int], chunks: int, dtype: torch.dtype, cut_every: CutEvery
) -> None:
    cut_every(chunks)
    check(draw(1, 600 if max(dims) > 256 else 500, dims=dims, dtype=dtype, gates=gates))


@of_dims([(64, 128), (128, 128), *SHARED])
@pytest.mark.parametrize("tokens", [8, 16], ids=["blocks", "chunk"])
@pytest.mark.parametrize("times", [0.99, 1.01, None], ids=["mild", "hard", "by turns"])
def test_gates_where_the_form_of_scores_changes(
    times: float | None, tokens: int, dims: tuple[int, int], dtype: torch.dtype
) -> None:
    """Sums over sides of eight tokens, or over blocks of 16, beside what counts as mild; None: by turns."""
    most = MILD[dtype] / (1 if tokens == 8 else 2)
    check(with_sums_of_gates(draw(1, 512, dims=dims, dtype=dtype), most, tokens, times, turn=64))


def test_closed_gates_across_borders(cut_every: CutEvery) -> None:
    cut_every(1)
    x = draw(1, 500)
    for token, gate in ((63, -torch.inf), (64, -1e3), (127, 0.0), (128, -50.0), (191, -1e3)):
        x["g"][:, token] = gate
    check(x)


def test_growing_gates_leave_an_empty_state_alone(cut_every: CutEvery) -> None:
    """e^128 over the segment, where nothing is to be scaled by it."""
    cut_every(2)
    x = draw(1, 384, states=False)
    x["g"][:] = -0.1
    x["g"][:, 128:256, :, 3] = 1.0
    x["k"][..., 3] = 0.0
    check_forward(x, chunk_gla)


@pytest.mark.parametrize("gates", ["usual", "mixed"])
@of_gate_dtypes
@of_dims([*SHARED, (128, 384), (64, 384), (128, 512), (64, 512), (256, 256), (144, 384)])
def test_slices_of_v_are_those_alone(dims: tuple[int, int], of_gates: torch.dtype, gates: str) -> None:
    """Bitwise, of packed sequences: CTAs of neighbouring slices make operands and scores for each other."""
    x = pack(draw(1, sum(LENGTHS), dims=dims, sequences=len(LENGTHS), gates=gates))
    x["g"] = x["g"].to(of_gates)
    # a backward adds up what its slices make, but for those of one CTA
    names = ("o", "final_state") + (("dv", "dinitial_state") if dims in SHARED else ())
    given = [torch.randn_like(t) for t in run(x).values()]

    def results(x: Tensors, given: list[torch.Tensor]) -> Tensors:
        with tfla_tk.batch_invariant():
            return both(x, given=given) if dims in SHARED else run(x)

    found = results(x, given)
    for first in range(0, dims[1], 128):
        of = slice(first, first + 128)
        part = {**x, "v": x["v"][..., of], "initial_state": x["initial_state"][..., of].contiguous()}
        alone = results(part, [t[..., of] for t in given])
        assert_equal({n: found[n][..., of] for n in names}, {n: alone[n] for n in names})


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


@of_dims([(128, 128), (256, 512)])
def test_no_gradient_flows_through_closed_gates(dims: tuple[int, int]) -> None:
    assert not train(draw(1, 600, dims=dims, gates="closed"))["dg"].any()


@with_states
@pytest.mark.parametrize("seq", [512, 513, 1024, 1600])
@of_dims([(128, 128), *WIDE])
def test_anchors(dims: tuple[int, int], seq: int, states: bool, dtype: torch.dtype) -> None:
    check(draw(2, seq, 2, dims, dtype, states=states))


@with_states
@pytest.mark.parametrize("chunks", [8, 9, 16, 19])
@of_dims([(128, 128), (256, 128), (128, 384), (256, 512)])
@pytest.mark.parametrize("gates", ["usual", "mixed", "-1e-4"])
def test_borders_and_anchors(
    gates: str, dims: tuple[int, int], chunks: int, states: bool, cut_every: CutEvery
) -> None:
    cut_every(chunks)
    check(draw(1, 2600, dims=dims, gates=gates, states=states))


@whole_and_cut
@of_gate_dtypes
@of_dims([(128, 128), (64, 64), (80, 128)])
def test_dtypes_of_gates(
    dims: tuple[int, int], of_gates: torch.dtype, chunks: int, dtype: torch.dtype, cut_every: CutEvery
) -> None:
    cut_every(chunks)
    x = draw(2, 333, dims=dims, dtype=dtype)
    check(x | {"g": x["g"].to(of_gates)})


@pytest.mark.parametrize("scale", [1.0, 0.02, -0.3])
def test_scale(scale: float) -> None:
    check(draw(1, 200), scale=scale)


def test_a_scale_of_zero() -> None:
    check_forward(draw(1, 200), chunk_gla, scale=0.0)


@pytest.mark.parametrize("offsets", [torch.int32, torch.int64], ids=["int32", "int64"])
@of_dims([(128, 128), (64, 64), (96, 80), *SHARED, (96, 208), *WIDE])
@of_gate_dtypes
@pytest.mark.parametrize("heads", [2, 80])
@pytest.mark.parametrize("chunks", [AS_CHOSEN, 1, 2, 5])
def test_packed_sequences(
    chunks: int,
    heads: int,
    dims: tuple[int, int],
    offsets: torch.dtype,
    of_gates: torch.dtype,
    cut_every: CutEvery,
) -> None:
    cut_every(chunks)
    x = draw(1, sum(LENGTHS), heads, dims, sequences=len(LENGTHS))
    check(pack(x | {"g": x["g"].to(of_gates)}, offsets))


@of_dims([(128, 128), *SUMS])
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


# cut sequences


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
    monkeypatch.setattr(eager, "KNOWS_EAGER_CALLS", False)
    assert_equal(train(x), kept)


def test_few_heads_are_cut(new_calls: None) -> None:
    x = draw(1, 8192, 4, states=False)
    shape = Shape.of(GLACore(*(x[n] for n in "qkvg"), None, None, 1.0, False))
    assert shape.cut.segments * 4 > torch.cuda.get_device_properties(0).multi_processor_count / 2
    with tfla_tk.batch_invariant():
        invariant = run(x)
    assert_accurate(run(x), exact(invariant), torch.bfloat16)
    assert segments.INVARIANT_CHUNKS * 64 < 8192


# the error itself

# lengths, head dims, what gates are divided by, their dtypes: every two values of two of these meet
AS_FLA_TESTS = [
    (seq, dims, (0.01, 0.1, 1.0, 10.0)[(i + j) % 4], (torch.float32, torch.bfloat16)[(i // 4 + j) % 2])
    for i, seq in enumerate([1, 15, 63, 64, 100, 257, 1024, 2048])
    for j, dims in enumerate([(256, 512), (64, 64), (96, 96), (128, 128), (256, 256)])
]


@pytest.mark.parametrize(("seq", "dims", "normaliser", "of_gates"), AS_FLA_TESTS, ids=str)
def test_errors_are_within_the_limits_of_fla(
    seq: int, dims: tuple[int, int], normaliser: float, of_gates: torch.dtype
) -> None:
    """Those of its own tests, of all results."""
    x = draw(2, seq, dims=dims)
    x["g"] = (logsigmoid(Normal(1)(*x["g"].shape)) / normaliser).to(of_gates)
    found, truth = both(x), both(exact(x), backend="reference")
    limits = dict.fromkeys(found, 5e-3) | {"o": 4e-3}
    assert_accurate(found, truth, torch.bfloat16, wider=limits)


@of_dims([(128, 128), *SUMS, (192, 80), (256, 512)])
@pytest.mark.parametrize("gates", ["none", "mixed"])
def test_o_has_the_error_of_two_roundings(gates: str, dims: tuple[int, int], dtype: torch.dtype) -> None:
    """Of P and of o itself; those of the state's operands add little to it. dv hardly has another error than
    its rounding: P has two parts there, and its operands more digits than q and k."""
    x = draw(2, 500, 4, dims, dtype=dtype, gates=gates, states=False)
    truth = run(exact(x), "reference")["o"]
    drawn = torch.randn_like(truth)
    rounding = relative_error(drawn.to(dtype), drawn)
    assert relative_error(run(x)["o"], truth) < {torch.bfloat16: 1.55, torch.float16: 1.8}[dtype] * rounding
    if gates == "mixed":
        dv, truth = train(x)["dv"], train(exact(x), "reference")["dv"]
        assert relative_error(dv, truth) < 1.6 * rounding


# what is compared with Triton: the forward or gradients, of one chunk or several; head dims; initial states
COMPARED = [
    *(((128, 128), False), ((256, 256), False)),
    *(((64, 64), True), ((128, 256), True), ((256, 512), True)),
]
CALLS = [
    *((run, 500, *heads) for heads in (*COMPARED, ((256, 128), False))),
    *((train, seq, *heads) for seq in (64, 500) for heads in COMPARED),
]
# gates and a factor on them: slow, usual and fast ones, none, and some that no middle of a chunk suits
GATES_COMPARED = [
    *(("usual", 0.05), ("usual", 1.0), ("usual", 4.0)),
    *(("none", 1.0), ("mixed", 1.0), ("closed blocks", 1.0)),
]


@pytest.mark.usefixtures("hardly_tuned")
@pytest.mark.parametrize(("gates", "times"), GATES_COMPARED)
@pytest.mark.parametrize(
    ("call", "seq", "dims", "states"),
    CALLS,
    ids=lambda x: getattr(x, "func", x).__name__ if callable(x) else str(x),
)
def test_no_less_accurate_than_triton(
    call: Any, seq: int, dims: tuple[int, int], states: bool, gates: str, times: float, dtype: torch.dtype
) -> None:
    """But for what sums in fp32 leave of exact products, and for chance: of so many heads that two ways to
    round the same numbers have errors that are equal within 2 %."""
    x = draw(2, seq, 4096 // dims[0], dims, dtype, gates, states)
    x["g"] *= times
    truth = call(exact(x), "reference")
    found, theirs = (
        {name: relative_error(t, truth[name]) for name, t in call(x, backend).items()}
        for backend in ("tk", "triton")
    )
    # not(<=): NaN fails
    limits = {name: max(BY_CHANCE.get(name, 1.02) * e, OF_FP32_SUMS) for name, e in theirs.items()}
    worse = {name: e for name, e in found.items() if not e <= limits[name]}
    assert not worse, (found, theirs)
