"""The delta rule on the GPU: against the reference in fp64, by its kernels' forms.

The form "in walk" has the forward's walk make the chunk matrices, "leads" and "carried" split sequences: the
fixture `take_form`. What is told of splits alone is in test_delta_split.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tfla_tk import batch_invariant, chunk_delta_rule, chunk_gated_delta_rule
from tfla_tk.backends.tk.delta_rule import call
from tfla_tk.backends.tk.delta_rule.call import Shape
from tfla_tk.backends.tk.prepared import multiprocessors

from .accuracy import relative_error
from .conftest import forget_calls
from .delta_rule import (
    BETAS,
    GATES,
    KINDS,
    LONG,
    OF_WRITTEN,
    SEGMENT,
    check,
    cotangents,
    draw,
    draw_lengths,
    draw_packed,
    function_of,
    of_both_functions,
    shape_of,
    ungated,
    with_keys_of,
)
from .linear import (
    REPEATS,
    Tensors,
    assert_equal,
    assert_equal_on_streams,
    assert_graph_replays,
    assert_whole_and_repeated,
    both,
    exact,
    pack,
    run,
    train,
)
from .memory import LENGTHS

DIMS = [(64, 64), (128, 128), (128, 256), (64, 128), (128, 64), (64, 512)]
PADDED = [(16, 16), (48, 80), (96, 192), (112, 240), (128, 48)]
# K whose state takes half of a walker's registers, and V in slices
LARGE = [(256, 64), (144, 128), (192, 256), (256, 512), (128, 320)]
IN_WALK = [(128, 128), (96, 192), (80, 80), (112, 128), (128, 256)]
SPLIT = [(64, 64), (128, 128), (96, 48), (128, 64), (64, 192), (128, 256)]
LEAST = [1, 0, 15, 16, 17, 1, 0, 31, 33, 48, 49]  # of packed sequences: about blocks of 16 tokens
CLOSE = 1e-3  # the error of two forms to each other, whose A differs by a rounding

TakeForm = Callable[[str], None]

train_gated = partial(train, function=chunk_gated_delta_rule)
run_gated = partial(run, function=chunk_gated_delta_rule)
both_gated = partial(both, function=chunk_gated_delta_rule)


def name_of(x: object) -> str:
    """In the names of tests."""
    return "{}_{}".format(*x) if isinstance(x, tuple) else str(x) or "as chosen"


of_dims = partial(pytest.mark.parametrize, "dims", ids=name_of)
of_form_and_dims = partial(pytest.mark.parametrize, ("form", "dims"), ids=name_of)
with_states = pytest.mark.parametrize("states", [False, True], ids=["zeros", "states"])
as_chosen_or_in_walk = pytest.mark.parametrize("form", ["", "in walk"], ids=name_of)
batch_or_packed = pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])


@pytest.mark.product
@of_form_and_dims(
    [
        *(("", dims) for dims in (*DIMS, *PADDED, *LARGE)),
        *(("in walk", dims) for dims in IN_WALK),
        *((form, dims) for form in ("leads", "carried") for dims in SPLIT),
    ]
)
@with_states
def test_all_dims(
    form: str, dims: tuple[int, int], states: bool, dtype: torch.dtype, take_form: TakeForm
) -> None:
    take_form(form)
    sizes = (2, 3 * SEGMENT + 77, 1, 2) if form in ("leads", "carried") else (2, 300, 2, 2)
    check(draw(*sizes, dims, dtype, states=states))


@of_form_and_dims(
    [("", (128, 128)), ("", (64, 128)), ("leads", (128, 128)), *(("in walk", dims) for dims in IN_WALK)]
)
@with_states
def test_without_gate(
    form: str, dims: tuple[int, int], states: bool, dtype: torch.dtype, take_form: TakeForm
) -> None:
    take_form(form)
    x = draw(1, 2 * SEGMENT + 500 if form == "leads" else 333, dims=dims, dtype=dtype, states=states)
    check(ungated(x), chunk_delta_rule)


@pytest.mark.product
@pytest.mark.parametrize("seq", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 192, 200, 384, 1000, 2048])
@of_form_and_dims([("", (64, 128)), ("", (256, 192)), ("in walk", (128, 128))])
def test_any_length(
    form: str, dims: tuple[int, int], seq: int, dtype: torch.dtype, take_form: TakeForm
) -> None:
    take_form(form)
    # of few tokens many heads: sums such as dbeta may nearly cancel where there are only two
    x = draw(1, seq, max(2, 32 // seq), dims=dims, dtype=dtype)
    check(x)
    if form == "in walk":
        check(ungated(x), chunk_delta_rule)


@pytest.mark.parametrize("gates", GATES)
@of_form_and_dims([("", (128, 128)), ("", (256, 320)), ("in walk", (128, 128))])
def test_gates(form: str, dims: tuple[int, int], gates: str, dtype: torch.dtype, take_form: TakeForm) -> None:
    take_form(form)
    # dg of a few heads is a matter of chance where most of it is that of the last tokens
    check(draw(1, 500, 8 if gates == "mixed" else 2, dims=dims, dtype=dtype, gates=gates))


# where nothing is written a state that decays for long is below fp32's range; where it is erased but not
# forgotten, dk is a difference of terms larger than itself
@as_chosen_or_in_walk
@pytest.mark.parametrize(
    ("gates", "betas"),
    [
        *(("usual", betas) for betas in BETAS if betas != "zero"),
        *(("slow", x) for x in ("zero", "one", "up to two")),
    ],
)
def test_betas(form: str, gates: str, betas: str, dtype: torch.dtype, take_form: TakeForm) -> None:
    take_form(form)
    check(draw(1, 500, dtype=dtype, gates=gates, betas=betas))


@pytest.mark.parametrize("betas", ["usual", "one", "up to two"])
def test_betas_without_gate(betas: str, dtype: torch.dtype, take_form: TakeForm) -> None:
    take_form("in walk")
    check(ungated(draw(1, 500, dtype=dtype, betas=betas)), chunk_delta_rule)


@pytest.mark.parametrize("places", [[0], [15], [0, 1, 15], [7, 8]], ids=str)
@pytest.mark.parametrize("decay", [-10.0, -1e3, -torch.inf])
def test_gates_about_blocks(decay: float, places: list[int], take_form: TakeForm) -> None:
    """Decays of a few tokens of every block of 16, over whose borders a decay is a product in the walk."""
    take_form("in walk")
    x = draw(1, 500, 4, gates="slow")
    for place in places:
        x["g"][:, place::16] = decay
    check(x)


@pytest.mark.parametrize("decays", [[-1e3], [0.0, -10.0], [0.0, -1e-3, -10.0, -1e3, -torch.inf]], ids=str)
def test_extreme_gates(decays: list[float], dtype: torch.dtype, take_form: TakeForm) -> None:
    """One of these decays in each token."""
    take_form("in walk")
    x = draw(1, 500, 4, dtype=dtype)
    values = torch.tensor(decays, device="cuda")
    x["g"] = values[(x["beta"] * 997).long() % len(values)]
    check(x)


@as_chosen_or_in_walk
@pytest.mark.parametrize("gates", ["slow", "closed", "half closed"])
@pytest.mark.parametrize("betas", ["usual", "up to two"])
def test_gates_at_borders(form: str, gates: str, betas: str, take_form: TakeForm) -> None:
    """Flows of gradient over a border between segments, large ones and none."""
    take_form(form)
    # many heads: dg of a few is a matter of chance where hardly anything decays
    check(draw(1, SEGMENT + 1000, heads=16, gates=gates, betas=betas))


def test_nothing_decays_for_long() -> None:
    """The error of the walks over the states grows no further than over a segment."""
    check(ungated(draw(1, 12_000)), chunk_delta_rule)


@as_chosen_or_in_walk
def test_repeated_keys(form: str, dtype: torch.dtype, take_form: TakeForm) -> None:
    """The same key over and over: what is written is erased at once."""
    take_form(form)
    x = draw(1, 300, dtype=dtype)
    x["k"] = x["k"][:, :4].repeat(1, 75, 1, 1)
    check(x)


@pytest.mark.parametrize("norm", [0.3, 1.3])
@of_form_and_dims(
    [
        *(("", dims) for dims in ((64, 64), (128, 128), (256, 320))),
        *((form, (128, 128)) for form in ("in walk", "leads", "carried")),
    ]
)
@of_both_functions
def test_keys_of_other_norms(
    gated: bool, form: str, dims: tuple[int, int], norm: float, dtype: torch.dtype, take_form: TakeForm
) -> None:
    """The state is stable: beta |k|^2 is below 2. The bounds on what is left of it take account of them."""
    take_form(form)
    is_split = form in ("leads", "carried")
    x = with_keys_of(norm, draw(1, 3 * SEGMENT + 100 if is_split else 500, 4, dims=dims, dtype=dtype))
    x["initial_state"] *= OF_WRITTEN
    x = x if gated else ungated(x)
    check(x, function_of(x))


@pytest.mark.parametrize(
    ("form", "scale"),
    [("", 1.0), ("", 0.02), ("in walk", 1.0), ("in walk", 0.02), ("leads", 1.0)],
    ids=name_of,
)
@of_both_functions
def test_scale(gated: bool, form: str, scale: float, dtype: torch.dtype, take_form: TakeForm) -> None:
    take_form(form)
    x = draw(1, 2 * SEGMENT + 500 if form == "leads" else 500, 4, dtype=dtype)
    x["initial_state"] *= OF_WRITTEN
    x = x if gated else ungated(x)
    check(x, function_of(x), scale=scale)


# long sequences


@with_states
@of_dims([(64, 64), (128, 128)])
def test_anchors(dims: tuple[int, int], states: bool) -> None:
    """Sequences of more chunks than lie between two anchors, of one batch and packed."""
    check(draw(1, 1700, dims=dims, states=states))
    x = draw(1, 1700, dims=dims, states=states, sequences=3)
    x["cu_seqlens"] = torch.tensor([0, 600, 1150, 1700], device="cuda")
    check(x)


def draw_long(
    packed: bool, heads: int, value_heads: int, dims: tuple[int, int], more: int, **options: Any
) -> Tensors:
    """Two sequences of SEGMENT + more tokens, or packed ones of LONG."""
    if packed:
        return pack(
            draw(1, sum(LONG), heads, value_heads, dims, sequences=len(LONG), **options), lengths=LONG
        )
    return draw(2, SEGMENT + more, heads, value_heads, dims, **options)


@of_dims([(64, 64), (128, 128), (96, 48), (192, 144)])
@with_states
@batch_or_packed
def test_segments(packed: bool, dims: tuple[int, int], states: bool, dtype: torch.dtype) -> None:
    """Of the walks over the states: of several, of exactly one and of a token more."""
    heads = (1, 2) if packed else (2, 2)
    check(draw_long(packed, *heads, dims, SEGMENT + 900, states=states, dtype=dtype))


@pytest.mark.parametrize("group", [2, 3, 4])
@of_dims([(64, 64), (128, 128), (96, 80), (128, 320)])
@batch_or_packed
def test_value_heads_of_segments(packed: bool, dims: tuple[int, int], group: int) -> None:
    """The heads of a group take turns at dq and dk, in the same order every time."""
    x = draw_long(packed, 2, 2 * group, dims, 500)
    check(x)
    assert_whole_and_repeated(lambda: train_gated(x))


# heads of v, slices of V, and packed sequences


@pytest.mark.parametrize("group", [2, 3, 4, 5, 8])
@of_form_and_dims(
    [
        *(("", dims) for dims in ((128, 128), (64, 192), (256, 320))),
        *(("in walk", dims) for dims in ((128, 128), (96, 192))),
    ]
)
def test_value_heads(
    form: str, dims: tuple[int, int], group: int, dtype: torch.dtype, take_form: TakeForm
) -> None:
    """Each key head is read by neighbouring value heads, and its gradient is the sum over them."""
    take_form(form)
    check(draw(2, 200, 2, 2 * group, dims, dtype))


@pytest.mark.parametrize(
    ("sizes", "dims"),
    [
        ((4, 200, 80, 80), (128, 128)),
        *(((2, 200, 40, 80), dims) for dims in ((128, 128), (128, 256), (128, 64))),
    ],
    ids=str,
)
def test_many_heads(sizes: tuple[int, ...], dims: tuple[int, int], dtype: torch.dtype) -> None:
    """As many that two walkers share a CTA. Heads of v, and slices of V, take turns at dq and dk."""
    check(draw(*sizes, dims, dtype))


@pytest.mark.parametrize("offsets", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("value_heads", [2, 4])
@of_dims([(128, 128), (128, 256), (256, 320)])
def test_packed_sequences(dims: tuple[int, int], value_heads: int, offsets: torch.dtype) -> None:
    check(pack(draw(1, sum(LENGTHS), 2, value_heads, dims, sequences=len(LENGTHS)), offsets))


@pytest.mark.parametrize(
    ("lengths", "offsets"),
    [(LENGTHS, torch.int32), (LEAST, torch.int64), (LONG, torch.int64)],
    ids=["short", "least", "long"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_in_walk(
    kind: str, lengths: list[int], offsets: torch.dtype, take_form: TakeForm
) -> None:
    take_form("in walk")
    x = draw_packed(kind, lengths, offsets)
    check(x, function_of(x))


@pytest.mark.parametrize("of_gates", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("dims", "seq", "value_heads"), [((64, 16), 130, 2), ((128, 128), 1100, 4), ((64, 512), 1, 3)], ids=str
)
def test_gradients_lie_like_the_gates(
    dims: tuple[int, int], seq: int, value_heads: int, of_gates: torch.dtype
) -> None:
    """Those in fp32, rounded to the dtype of g and beta and in their memory order."""
    x = draw(2, seq, 1, value_heads, dims)
    gates = {name: x[name].to(of_gates).mT.contiguous().mT for name in ("g", "beta")}
    expected = train_gated(x | {name: t.contiguous().float() for name, t in gates.items()})
    found = train_gated(x | gates)
    for name, t in gates.items():
        assert found[f"d{name}"].stride() == torch.empty_like(t).stride()
    assert_equal(found, expected | {f"d{name}": expected[f"d{name}"].to(of_gates) for name in gates})


# CTAs that take turns


@pytest.mark.parametrize(
    ("heads", "value_heads", "dims"),
    [(16, 48, (192, 128)), (8, 16, (192, 256)), (8, 8, (192, 512))],
    ids=["heads", "heads and slices", "slices"],
)
def test_turns_in_many_waves(heads: int, value_heads: int, dims: tuple[int, int]) -> None:
    """Of more CTAs than the GPU has room for."""
    x = draw(1, 8 * SEGMENT + 100, heads, value_heads, dims)
    expected = train_gated(x)
    for _ in range(20):
        assert_equal(train_gated(x), expected)


# matrices that the walk makes itself


def test_the_walk_is_told_who_makes_the_matrices(monkeypatch: pytest.MonkeyPatch, new_calls: None) -> None:
    """Forms of these tests force something."""
    asked: list[bool] = []
    monkeypatch.setattr(
        Shape, "walk_makes_matrices", property(lambda shape: bool(asked.append(shape.trains)))
    )
    both_gated(draw())
    assert {*asked} == {False, True}


@pytest.mark.parametrize("gates", ["usual", "none", "slow"])
@pytest.mark.parametrize("betas", ["usual", "one", "up to two"])
def test_errors_are_those_of_matrices_from_memory(betas: str, gates: str, take_form: TakeForm) -> None:
    x = draw(1, 2000, 4, gates=gates, betas=betas)
    given = cotangents(x)
    truth = both_gated(exact(x), backend="reference", given=[t.double() for t in given])
    errors = []
    for form in ("before two walkers", "in walk"):
        take_form(form)
        found = both_gated(x, given=given)
        errors.append({name: relative_error(t, truth[name]) for name, t in found.items()})
    for name, error in errors[1].items():
        most = 1.5 if name in ("dg", "dbeta") else 1.25  # small differences of large sums
        assert error <= most * errors[0][name] + 2e-4, (name, errors)


@pytest.mark.parametrize("lengths", [None, LENGTHS, LEAST], ids=["batch", "short", "least"])
@pytest.mark.parametrize("kind", KINDS)
def test_keeping_matrices_changes_no_bit(kind: str, lengths: list[int] | None, take_form: TakeForm) -> None:
    """Of the forward's results. All results are written whole, and the same in every call."""
    take_form("in walk")
    x = draw_lengths(kind, lengths)
    alone = run(x, function=function_of(x))
    leaves = {name: t.detach().requires_grad_(t.is_floating_point()) for name, t in x.items()}
    assert_equal(run(leaves, function=function_of(x)), alone)
    assert_whole_and_repeated(lambda: both(x, function_of(x)))


def test_more_ctas_than_the_gpu_has_room_for(take_form: TakeForm) -> None:
    take_form("in walk")
    x = draw(8, 200, 40)
    check(x)
    expected = both_gated(x)
    for _ in range(20):
        assert_equal(both_gated(x), expected)


@pytest.fixture(params=[False, True], ids=["without gate", "gated"])
def filling(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, new_calls: None) -> Tensors:
    """A call of which the rule itself has the walk make the matrices, with the memory of an H100."""
    monkeypatch.setattr(call, "memory_rate", lambda device: 3.35e6)
    x = draw(8, 300, 16)
    shape = shape_of(x)
    if multiprocessors(shape.device) != 132:
        pytest.skip("other GPUs are filled by other calls")
    assert all(shape._replace(trains=trains).walk_makes_matrices for trains in (False, True))
    return x if request.param else ungated(x)


def test_a_call_that_fills_the_gpu(filling: Tensors) -> None:
    check(filling, function_of(filling))


def test_batch_invariant_calls_have_the_bits_of_matrices_from_memory(
    filling: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    both_of_call = partial(both, filling, function_of(filling), given=cotangents(filling))
    with batch_invariant():
        found = both_of_call()
    monkeypatch.setattr(Shape, "walk_makes_matrices", False)
    forget_calls()
    with batch_invariant():
        assert_equal(found, both_of_call())
    # here the walk has two walkers and no makers without the option, too
    expected = run(filling, function=function_of(filling))
    assert_equal({name: found[name] for name in expected}, expected)


# makers of matrices beside the walk


def assert_makers_change_no_bit(x: Tensors, take_form: TakeForm) -> None:
    """Beside the walk instead of before it."""
    take_form("before")
    expected = both_gated(x)
    take_form("")
    for _ in range(REPEATS):
        assert_equal(both_gated(x), expected)


@of_dims([(64, 64), (128, 128), (96, 48), (128, 256)])
@batch_or_packed
def test_makers_beside_the_walks_change_no_bit(
    packed: bool, dims: tuple[int, int], dtype: torch.dtype, take_form: TakeForm
) -> None:
    lengths = [0, 900, 1, 64, 2500, 65, 0]
    x = draw(2, 2500, 4, 8, dims, dtype)
    if packed:
        x = pack(draw(1, sum(lengths), 1, 2, dims, dtype, sequences=len(lengths)), lengths=lengths)
    assert_makers_change_no_bit(x, take_form)


def test_makers_beside_two_walkers_change_no_bit(dtype: torch.dtype, take_form: TakeForm) -> None:
    """Of 64 walks, which leave about half of the multiprocessors to makers; and of several lengths."""
    lengths = [0, 900, 1, 64, 1500, 65, 700, 3] * 2
    packed = pack(draw(1, sum(lengths), 1, 4, dtype=dtype, sequences=len(lengths)), lengths=lengths)
    for x in (draw(4, 1000, 8, 16, dtype=dtype), packed):
        assert_makers_change_no_bit(x, take_form)
        shape = shape_of(x)
        assert shape.makers > 0 and shape.forward_walkers == 2


@of_dims([(64, 128), (128, 128)])
@pytest.mark.parametrize("makers", [1, 4, 300])
def test_more_makers_and_walks_than_run_at_once(
    makers: int, dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch, new_calls: None
) -> None:
    """512 of the walk, which wait for makers, and up to 300 of makers, which wait a little for walks that
    have yet to begin. On several streams at once, too."""
    for name, value in {
        "split": None,
        "walk_makes_matrices": False,
        "forward_walkers": 1,
        "makers": 0,
    }.items():
        monkeypatch.setattr(Shape, name, value)
    x = draw(4, 700, 64, 64, dims)
    expected = both_gated(x)
    monkeypatch.setattr(Shape, "makers", makers)
    forget_calls()
    for _ in range(REPEATS):
        assert_equal(both_gated(x), expected)
    outputs = {name: expected[name] for name in ("o", "final_state")}
    assert_equal_on_streams(lambda: run_gated(x), outputs, 3)


def test_makers_in_a_graph_and_on_several_streams(take_form: TakeForm) -> None:
    """The flags of the chunks are cleared each time. On streams the walks together have more CTAs than there
    are multiprocessors."""
    x, other, long = draw(1, 3000, 8, 16), draw(1, 3000, 8, 16, seed=1), draw(1, 4000, 16, 32)
    take_form("before")
    expected, of_long = [run_gated(other), run_gated(x)], run_gated(long)
    take_form("")
    assert_graph_replays(run_gated, x, other, expected, REPEATS)
    assert_equal_on_streams(lambda: run_gated(long), of_long, 10)
