"""The chunk matrices made by the delta rule's forward walk itself, forced: against fp64 and against matrices
from a launch before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tfla_tk import batch_invariant, chunk_delta_rule
from tfla_tk.backends.tk.delta_rule import call
from tfla_tk.backends.tk.delta_rule.call import Shape
from tfla_tk.backends.tk.operands import multiprocessors

from . import test_delta_rule, test_delta_runtime
from .conftest import forget_calls, relative_error
from .delta_rule import (
    BETAS,
    GATES,
    KINDS,
    LONG,
    check,
    cotangents,
    draw,
    draw_kind,
    draw_lengths,
    draw_packed,
    function_of,
    gradients,
    of_both_functions,
    shape_of,
    ungated,
)
from .linear import (
    Tensors,
    assert_accurate,
    assert_equal,
    assert_equal_on_streams,
    assert_graph_replays,
    assert_whole_and_repeated,
    exact,
    run,
)
from .memory import LENGTHS, head_last, odd_rows, relayout, shifted, transposed

DIMS = [(128, 128), (96, 192), (80, 80), (112, 128), (128, 256)]
LEAST = [1, 0, 15, 16, 17, 1, 0, 31, 33, 48, 49]  # of packed sequences: about blocks of 16 tokens
CLOSE = 1e-3  # the error of two forms to each other, whose A differs by a rounding
Force = Callable[[bool], None]


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Iterator[Force]:
    """Has the forward's walk, of two walkers and whole sequences, make the matrices, or a launch before."""
    asked: list[bool] = []

    def force(made: bool) -> None:
        def walk_makes_matrices(shape: Shape) -> bool:
            asked.append(shape.trains)
            return made

        monkeypatch.setattr(Shape, "walk_makes_matrices", property(walk_makes_matrices))
        for name, value in {"makers": 0, "walkers": 2, "forward_walkers": 2, "split": None}.items():
            monkeypatch.setattr(Shape, name, value)
        forget_calls()

    yield force
    forget_calls()
    assert asked, "no forward was prepared: this test forces nothing"


@pytest.fixture
def in_walk(force: Force) -> None:
    force(True)


def both(x: Tensors, backend: str = "tk", given: list[Tensor] | None = None) -> Tensors:
    """Of a forward alone and of a training step."""
    return run(x, backend, function_of(x)) | gradients(x, backend=backend, given=given)


@pytest.mark.parametrize("dims", DIMS, ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("states", [False, True], ids=["zeros", "states"])
@of_both_functions
@pytest.mark.usefixtures("in_walk")
def test_all_dims(gated: bool, states: bool, dims: tuple[int, int], dtype: torch.dtype) -> None:
    x = draw(dims=dims, dtype=dtype, states=states)
    x = x if gated else ungated(x)
    check(x, function_of(x))


@pytest.mark.parametrize("seq", [1, 15, 16, 17, 63, 64, 65, 127, 129, 192, 200, 384, 1000])
@of_both_functions
@pytest.mark.usefixtures("in_walk")
def test_any_length(gated: bool, seq: int, dtype: torch.dtype) -> None:
    # of few tokens many heads: sums such as dbeta may nearly cancel where there are only two
    x = draw(1, seq, max(2, 32 // seq), dims=(128, 128), dtype=dtype)
    x = x if gated else ungated(x)
    check(x, function_of(x))


@pytest.mark.parametrize("norm", [0.3, 1.3])
@of_both_functions
@pytest.mark.usefixtures("in_walk")
def test_keys_of_other_norms(gated: bool, norm: float, dtype: torch.dtype) -> None:
    test_delta_rule.test_keys_of_other_norms(gated, (128, 128), norm, dtype)


@pytest.mark.parametrize("scale", [1.0, 0.02])
@of_both_functions
@pytest.mark.usefixtures("in_walk")
def test_scale(gated: bool, scale: float, dtype: torch.dtype) -> None:
    test_delta_rule.test_scale(gated, scale, dtype)


@pytest.mark.parametrize("dims", [(128, 128), (96, 192)], ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("group", [2, 3])
@pytest.mark.usefixtures("in_walk")
def test_value_heads(group: int, dims: tuple[int, int], dtype: torch.dtype) -> None:
    """That share a head of q and k, of which each CTA has its own copy."""
    check(draw(2, 200, 2, 2 * group, dims, dtype))


@pytest.mark.parametrize(
    ("gates", "betas"), [*((x, "usual") for x in GATES), *(("usual", x) for x in BETAS[1:])]
)
@pytest.mark.usefixtures("in_walk")
def test_gates_and_betas(gates: str, betas: str, dtype: torch.dtype) -> None:
    # where nothing is written a state that decays for long is below fp32's range
    x = draw(1, 500, dtype=dtype, gates="slow" if betas == "zero" else gates, betas=betas)
    check(x)


@pytest.mark.parametrize("betas", ["usual", "one", "up to two"])
@pytest.mark.usefixtures("in_walk")
def test_betas_without_gate(betas: str, dtype: torch.dtype) -> None:
    check(ungated(draw(1, 500, dtype=dtype, betas=betas)), chunk_delta_rule)


@pytest.mark.parametrize("places", [[0], [15], [0, 1, 15], [7, 8]], ids=str)
@pytest.mark.parametrize("decay", [-10.0, -1e3, -torch.inf])
@pytest.mark.usefixtures("in_walk")
def test_gates_about_blocks(decay: float, places: list[int]) -> None:
    """Decays of a few tokens of every block of 16, over whose borders a decay is a product."""
    x = draw(1, 500, 4, gates="slow")
    for place in places:
        x["g"][:, place::16] = decay
    check(x)


@pytest.mark.parametrize("decays", [[-1e3], [0.0, -10.0], [0.0, -1e-3, -10.0, -1e3, -torch.inf]], ids=str)
@pytest.mark.usefixtures("in_walk")
def test_extreme_gates(decays: list[float], dtype: torch.dtype) -> None:
    """One of these decays in each token."""
    x = draw(1, 500, 4, dtype=dtype)
    values = torch.tensor(decays, device="cuda")
    x["g"] = values[(x["beta"] * 997).long() % len(values)]
    check(x)


@pytest.mark.parametrize("gates", ["slow", "closed", "half closed"])
@pytest.mark.parametrize("betas", ["usual", "up to two"])
@pytest.mark.usefixtures("in_walk")
def test_gates_at_borders(betas: str, gates: str) -> None:
    test_delta_rule.test_gates_at_borders(gates, betas)


@pytest.mark.usefixtures("in_walk")
def test_repeated_keys(dtype: torch.dtype) -> None:
    test_delta_rule.test_repeated_keys(dtype)


@pytest.mark.parametrize("betas", ["one", "up to two"])
@pytest.mark.usefixtures("in_walk")
def test_a_state_that_is_erased_but_not_forgotten(betas: str, dtype: torch.dtype) -> None:
    test_delta_rule.test_a_state_that_is_erased_but_not_forgotten(betas, dtype)


@pytest.mark.parametrize(
    ("lengths", "offsets"),
    [(LENGTHS, torch.int32), (LEAST, torch.int64), (LONG, torch.int64)],
    ids=["short", "least", "long"],
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("in_walk")
def test_packed_sequences(kind: str, lengths: list[int], offsets: torch.dtype) -> None:
    x = draw_packed(kind, lengths, offsets)
    check(x, function_of(x))


@pytest.mark.usefixtures("in_walk")
def test_nan_stays_in_its_sequence() -> None:
    test_delta_runtime.test_nan_stays_in_its_sequence()


@pytest.mark.usefixtures("in_walk")
def test_a_loss_on_the_final_state_alone() -> None:
    test_delta_rule.test_a_loss_on_the_final_state_alone()


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["batch", "packed"])
@pytest.mark.parametrize("kind", KINDS)
def test_beside_matrices_from_memory(
    kind: str, lengths: list[int] | None, dtype: torch.dtype, force: Force
) -> None:
    """Both forms give nearly the same results, and gradients as close as those of one form to the truth."""
    x = draw_lengths(kind, lengths, dtype=dtype)
    given = cotangents(x)
    force(False)
    expected, of_backward = run(x, function=function_of(x)), gradients(x, given=given)
    force(True)
    found = run(x, function=function_of(x))
    errors = {name: relative_error(t, expected[name]) for name, t in found.items()}
    assert not {name: error for name, error in errors.items() if not error <= CLOSE}
    assert_accurate(gradients(x, given=given), of_backward, dtype, x["v"].numel() ** 0.5)


@pytest.mark.parametrize("gates", ["usual", "none", "slow"])
@pytest.mark.parametrize("betas", ["usual", "one", "up to two"])
def test_errors_are_those_of_matrices_from_memory(betas: str, gates: str, force: Force) -> None:
    x = draw(1, 2000, 4, gates=gates, betas=betas)
    given = cotangents(x)
    truth = both(exact(x), "reference", [t.double() for t in given])
    errors = []
    for made in (False, True):
        force(made)
        errors.append({name: relative_error(t, truth[name]) for name, t in both(x, given=given).items()})
    for name, error in errors[1].items():
        most = 1.5 if name in ("dg", "dbeta") else 1.25  # small differences of large sums
        assert error <= most * errors[0][name] + 2e-4, (name, errors)


@pytest.mark.parametrize("lengths", [None, LENGTHS, LEAST], ids=["batch", "short", "least"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("in_walk")
def test_results_are_written_whole_and_always_the_same(kind: str, lengths: list[int] | None) -> None:
    x = draw_lengths(kind, lengths)
    assert_whole_and_repeated(lambda: both(x))


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["batch", "packed"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("in_walk")
def test_keeping_matrices_changes_no_bit(kind: str, lengths: list[int] | None) -> None:
    """Of the forward's results."""
    x = draw_lengths(kind, lengths)
    alone = run(x, function=function_of(x))
    leaves = {name: t.detach().requires_grad_(t.is_floating_point()) for name, t in x.items()}
    assert_equal(run(leaves, function=function_of(x)), alone)


@pytest.mark.parametrize("layout", [transposed, shifted, odd_rows, head_last])
@pytest.mark.usefixtures("in_walk")
def test_any_layout(layout: Callable[[Tensor], Tensor]) -> None:
    x = draw_kind("plain", 200)
    views = relayout(x, layout) | {"initial_state": head_last(x["initial_state"])}
    given = cotangents(x)
    assert_equal(both(views, given=given), both(x, given=given))


@pytest.mark.parametrize("kind", ["plain", "both", "without gate"])
@pytest.mark.usefixtures("in_walk")
def test_a_graph_replays_both_directions(kind: str) -> None:
    x, other = draw_kind(kind, 700), draw_kind(kind, 700, seed=1)
    given = cotangents(x)

    def step(of_call: Tensors) -> Tensors:
        return both(of_call, given=given)

    assert_graph_replays(step, x, other, [step(other), step(x)], 20)


@pytest.mark.parametrize("kind", ["plain", "both", "without gate"])
@pytest.mark.usefixtures("in_walk")
def test_on_several_streams(kind: str) -> None:
    x = draw_kind(kind, 700, 8)
    given = cotangents(x)
    assert_equal_on_streams(lambda: both(x, given=given), both(x, given=given), 10)


@pytest.mark.usefixtures("in_walk")
def test_more_ctas_than_the_gpu_has_room_for() -> None:
    x = draw(8, 200, 40)
    check(x)
    expected = both(x)
    for _ in range(20):
        assert_equal(both(x), expected)


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
    given = cotangents(filling)
    with batch_invariant():
        found = both(filling, given=given)
    monkeypatch.setattr(Shape, "walk_makes_matrices", False)
    forget_calls()
    with batch_invariant():
        assert_equal(found, both(filling, given=given))
    # here the walk has two walkers and no makers without the option, too
    expected = run(filling, function=function_of(filling))
    assert_equal({name: found[name] for name in expected}, expected)


@pytest.mark.sanitize
@pytest.mark.parametrize("kind", ["plain", "sliced", "without gate"])
@pytest.mark.usefixtures("in_walk")
def test_small_launches(kind: str) -> None:
    """For compute-sanitizer: every place of every ring is used twice, and sequences have tails."""
    found = both(draw_packed(kind, [70, 0, 1, 450, 190]))
    torch.cuda.synchronize()
    assert all(t.isfinite().all() for t in found.values())
