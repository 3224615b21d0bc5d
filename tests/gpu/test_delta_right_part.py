"""The right part of dk made by the delta rule's mirror, forced: against fp64 and against a right walk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from tfla_tk import chunk_delta_rule, chunk_gated_delta_rule
from tfla_tk.backends.tk.delta_rule.call import Shape
from tfla_tk.backends.tk.operands import multiprocessors
from tfla_tk.core.layout import CHUNK, SEGMENT_CHUNKS

from . import test_delta_accuracy, test_delta_rule, test_delta_runtime
from .conftest import GRADIENT_TOLERANCE, TOLERANCE, forget_calls, relative_error
from .delta_rule import BETAS, GATES, check, draw, function_of, of_both_functions, shape_of, ungated
from .linear import (
    Tensors,
    assert_accurate,
    assert_equal,
    assert_graph_replays,
    assert_whole_and_repeated,
    exact,
    train,
)
from .memory import LENGTHS, head_last, odd_rows, relayout, shifted, transposed

SEGMENT = SEGMENT_CHUNKS * CHUNK
LONG = [0, 900, 2 * SEGMENT, SEGMENT + 1, 70, SEGMENT, 0]  # around segments of the walks over the states
DIMS = [(80, 128), (80, 80), (96, 128), (128, 80), (128, 128)]
DIMS += [(80, 256), (96, 192), (128, 192), (128, 256)]  # V of several slices
# of heads of v and slices of V that add up dq and dk; the last of both
KINDS = ["plain", "grouped", "sliced", "both", "without gate"]
Force = Callable[[bool], None]


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Iterator[Force]:
    """Has the mirror, of two walkers and whole sequences, make the right part of dk, or a right walk."""

    def force(made: bool) -> None:
        monkeypatch.setattr(Shape, "makes_right", made)
        monkeypatch.setattr(Shape, "walkers", 2)
        monkeypatch.setattr(Shape, "split", None)
        forget_calls()

    yield force
    forget_calls()


@pytest.fixture
def right_made(force: Force) -> None:
    force(True)


def gradients(x: Tensors, **options: Any) -> Tensors:
    return train(x, function=function_of(x), **options)


def draw_kind(kind: str, seq: int, batch: int = 2, **options: Any) -> Tensors:
    """Of KINDS."""
    value_heads = {"plain": 2, "grouped": 8, "sliced": 2}.get(kind, 6)
    dims = {"plain": (128, 128), "grouped": (96, 128), "sliced": (128, 192)}.get(kind, (128, 256))
    x = draw(batch, seq, 2, value_heads, dims, **options)
    if kind == "without gate":
        del x["g"]
    return x


def draw_packed(kind: str, lengths: list[int], offsets: torch.dtype = torch.int64, **options: Any) -> Tensors:
    x = draw_kind(kind, sum(lengths), 1, sequences=len(lengths), **options)
    return x | {"cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).to("cuda", offsets)}


def draw_lengths(kind: str, lengths: list[int] | None, seq: int = 700, **options: Any) -> Tensors:
    """Packed sequences of these lengths, or else a batch of `seq` tokens each."""
    if lengths is None:
        return draw_kind(kind, seq, **options)
    return draw_packed(kind, lengths, **options)


def cotangents(x: Tensors) -> list[Tensor]:
    """Of o and of the last state."""
    normal = torch.Generator("cuda").manual_seed(3)
    return [torch.empty_like(x[name]).normal_(generator=normal) for name in ("v", "initial_state")]


@pytest.mark.parametrize("dims", DIMS, ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("states", [False, True], ids=["zeros", "states"])
@of_both_functions
@pytest.mark.usefixtures("right_made")
def test_all_dims(gated: bool, states: bool, dims: tuple[int, int], dtype: torch.dtype) -> None:
    x = draw(dims=dims, dtype=dtype, states=states)
    x = x if gated else ungated(x)
    check(x, function_of(x))


@pytest.mark.parametrize("norm", [0.3, 1.3])
@of_both_functions
@pytest.mark.usefixtures("right_made")
def test_keys_of_other_norms(gated: bool, norm: float, dtype: torch.dtype) -> None:
    test_delta_rule.test_keys_of_other_norms(gated, (128, 128), norm, dtype)


@pytest.mark.parametrize("scale", [1.0, 0.02])
@of_both_functions
@pytest.mark.usefixtures("right_made")
def test_scale(gated: bool, scale: float, dtype: torch.dtype) -> None:
    test_delta_rule.test_scale(gated, scale, dtype)


@pytest.mark.parametrize("seq", [1, 2, 63, 64, 65, 127, 128, 129, 192, 193, 1024, 1025, 2048, 2049])
@pytest.mark.parametrize("kind", ["plain", "both", "without gate"])
@pytest.mark.usefixtures("right_made")
def test_any_length(kind: str, seq: int, dtype: torch.dtype) -> None:
    # of few tokens a larger batch: sums such as dbeta may nearly cancel where there are only two
    x = draw_kind(kind, seq, max(1, 16 // seq), dtype=dtype)
    check(x, function_of(x))


@pytest.mark.parametrize("group", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("dims", [(80, 80), (128, 256)], ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("gate", ["none", "fixed", "usual"])
@pytest.mark.usefixtures("right_made")
def test_value_heads(gate: str, dims: tuple[int, int], group: int, dtype: torch.dtype) -> None:
    """That share a head of q and k; of larger groups a launch behind the walks adds up the rest. A fixed gate
    gets no gradient, so that there are no sums."""
    x = draw(2, 200, 2, 2 * group, dims, dtype)
    g = x["g"] if gate == "usual" else x.pop("g")

    def with_fixed(q: Tensor, **others: Any) -> Any:
        return chunk_gated_delta_rule(q=q, g=g.double() if q.dtype == torch.float64 else g, **others)

    check(x, with_fixed if gate == "fixed" else function_of(x))


@pytest.mark.parametrize(
    ("gates", "betas"), [*((x, "usual") for x in GATES), *(("usual", x) for x in BETAS[1:])]
)
@pytest.mark.usefixtures("right_made")
def test_gates_and_betas(gates: str, betas: str, dtype: torch.dtype) -> None:
    # where nothing is written a state that decays for long is below fp32's range
    x = draw(1, 500, dtype=dtype, gates="slow" if betas == "zero" else gates, betas=betas)
    check(x)
    del x["g"]
    check(x, chunk_delta_rule)


@pytest.mark.parametrize("gates", ["slow", "closed", "half closed"])
@pytest.mark.parametrize("betas", ["usual", "up to two"])
@pytest.mark.usefixtures("right_made")
def test_gates_at_borders(betas: str, gates: str) -> None:
    test_delta_rule.test_gates_at_borders(gates, betas)


@pytest.mark.parametrize(
    ("lengths", "offsets"), [(LENGTHS, torch.int32), (LONG, torch.int64)], ids=["int32", "int64"]
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("right_made")
def test_packed_sequences(kind: str, lengths: list[int], offsets: torch.dtype) -> None:
    x = draw_packed(kind, lengths, offsets)
    check(x, function_of(x))


@pytest.mark.parametrize("of", ["o", "state"])
@pytest.mark.parametrize("kind", ["plain", "both", "without gate"])
@pytest.mark.usefixtures("right_made")
def test_a_loss_on_one_output(kind: str, of: str) -> None:
    """Without a gradient of the final state, or with no other one."""
    x = draw_kind(kind, 300)
    given = dict(zip(("o", "state"), cotangents(x), strict=True))[of]
    grads = []
    for of_call, backend in ((x, "tk"), (exact(x), "reference")):
        leaves = {name: t.clone().requires_grad_() for name, t in of_call.items()}
        o, state = function_of(x)(**leaves, output_final_state=of == "state", backend=backend)
        out = o if of == "o" else state
        found = torch.autograd.grad(out, list(leaves.values()), given.to(out), materialize_grads=True)
        grads.append({f"d{name}": t for name, t in zip(leaves, found, strict=True)})
    assert_accurate(*grads, torch.bfloat16, size=x["v"].numel() ** 0.5)
    assert of == "o" or grads[0]["dq"].norm() == 0


@pytest.mark.parametrize("lengths", [None, LENGTHS, LONG], ids=["batch", "short", "long"])
@pytest.mark.parametrize("kind", KINDS)
def test_beside_a_right_walk(kind: str, lengths: list[int] | None, force: Force) -> None:
    """Without dg, whether the mirror makes more or not changes nothing that it makes in either case. For dg
    it rounds less of what it adds to dS. dq does not depend on that."""
    x = draw_lengths(kind, lengths, SEGMENT + 500)
    force(False)
    expected = gradients(x)
    force(True)
    found = gradients(x)
    rounded = {"dk"} | ({"dv", "dg", "dbeta", "dinitial_state"} if "g" in x else set())
    errors = {name: relative_error(found.pop(name), expected.pop(name)) for name in rounded}
    assert_equal(found, expected)
    assert errors["dk"] > 0, "the mirror does the same in both cases: these tests force nothing"
    limits = dict.fromkeys(rounded, TOLERANCE[torch.bfloat16])
    limits |= {"dg": GRADIENT_TOLERANCE[torch.bfloat16][0]}
    assert not {name: error for name, error in errors.items() if not error <= limits[name]}


@pytest.mark.parametrize("gates", ["usual", "none", "slow"])
@pytest.mark.parametrize("betas", ["usual", "one", "up to two"])
def test_errors_are_those_of_a_right_walk(betas: str, gates: str, force: Force) -> None:
    x = draw(1, 4 * SEGMENT, 2, gates=gates, betas=betas)
    truth = train(exact(x), "reference", chunk_gated_delta_rule)
    errors = []
    for made in (False, True):
        force(made)
        errors.append({name: relative_error(t, truth[name]) for name, t in gradients(x).items()})
    for name, most in (("dk", 1.15), ("dg", 1.5)):  # dg: a small difference of large sums
        assert errors[1][name] <= most * errors[0][name] + 2e-4, (name, errors)


@pytest.mark.parametrize("lengths", [None, LENGTHS, LONG], ids=["batch", "short", "long"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("right_made")
def test_results_are_written_whole_and_always_the_same(kind: str, lengths: list[int] | None) -> None:
    x = draw_lengths(kind, lengths)
    assert_whole_and_repeated(lambda: gradients(x))


@pytest.mark.parametrize("layout", [transposed, shifted, odd_rows, head_last])
@pytest.mark.parametrize("kind", ["plain", "both", "without gate"])
@pytest.mark.usefixtures("right_made")
def test_any_layout(kind: str, layout: Callable[[Tensor], Tensor]) -> None:
    """Of q, k, v, the states and the gradient of o."""
    x = draw_kind(kind, 200)
    do, dht = cotangents(x)
    expected = gradients(x, given=[do, dht])
    views = relayout(x, layout) | {"initial_state": head_last(x["initial_state"])}
    assert_equal(gradients(views, given=[layout(do), head_last(dht)]), expected)
    wide = {name: pad(t, (0, 64))[..., : t.shape[-1]] if t.ndim == 4 else t for name, t in x.items()}
    assert_equal(gradients(wide, given=[pad(do, (64, 0))[..., 64:], dht]), expected)


@pytest.mark.parametrize("kind", ["plain", "both", "without gate"])
@pytest.mark.usefixtures("right_made")
def test_a_graph_replays_the_backward(kind: str) -> None:
    x, other = draw_kind(kind, 1500), draw_kind(kind, 1500, seed=1)
    given = cotangents(x)

    def call(of_call: Tensors) -> Tensors:
        return gradients(of_call, given=given)

    assert_graph_replays(call, x, other, [call(other), call(x)], 6)


@pytest.mark.usefixtures("right_made")
def test_turns() -> None:
    """Of more CTAs than the GPU has room for, and of several calls at once."""
    test_delta_rule.test_turns_in_many_waves(16, 48, (128, 128))
    test_delta_runtime.test_turns_on_several_streams()


@pytest.mark.usefixtures("right_made")
def test_several_calls_on_several_streams() -> None:
    """Calls of other sizes in turn, on one stream and on two at once."""
    calls = [draw_kind("plain", 1500), draw_packed("without gate", LENGTHS), draw_kind("grouped", 65)]
    given = [cotangents(x) for x in calls]
    expected = [gradients(x, given=of_x) for x, of_x in zip(calls, given, strict=True)]
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    found = []
    for n in range(30):
        with torch.cuda.stream(streams[n // 3 % 2]):
            found.append(gradients(calls[n % 3], given=given[n % 3]))
    torch.cuda.synchronize()
    for n, results in enumerate(found):
        assert_equal(results, expected[n % 3])


@pytest.mark.usefixtures("right_made", "hardly_tuned", "fla_alone")
@pytest.mark.parametrize("forget_bias", [2.0, 3.0])
@pytest.mark.parametrize("betas", ["usual", "one"])
def test_gradients_are_no_less_accurate_than_triton(betas: str, forget_bias: float) -> None:
    of_accuracy = test_delta_accuracy.test_gradients_are_no_less_accurate_than_triton
    of_accuracy((128, 128), betas, forget_bias)


@of_both_functions
def test_a_call_that_fills_the_gpu(gated: bool) -> None:
    """As the rule itself chooses."""
    x = draw(8, 1024, 16)
    x = x if gated else ungated(x)
    shape = shape_of(x)
    if multiprocessors(shape.device) != 132:
        pytest.skip("other GPUs are filled by other calls")
    assert shape.makes_right
    assert not shape._replace(sequences=1, batch=1).makes_right
    assert not shape._replace(batch_invariant=True).makes_right
    assert not any(shape._replace(dim_k=dim).makes_right for dim in (64, 136, 256))
    check(x, function_of(x))


@pytest.mark.sanitize
@pytest.mark.parametrize("kind", ["plain", "sliced", "without gate"])
@pytest.mark.usefixtures("right_made")
def test_small_launches(kind: str) -> None:
    """For compute-sanitizer: every place of every ring is used twice, and sequences have tails."""
    x = draw_kind(kind, 330, 1) if kind == "plain" else draw_packed(kind, [150, 0, 330])
    found = gradients(x)
    torch.cuda.synchronize()
    assert all(t.isfinite().all() for t in found.values())
