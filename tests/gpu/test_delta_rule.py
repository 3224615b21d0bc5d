"""The delta rule on the GPU: against the reference in fp64."""

from __future__ import annotations

import pytest
import torch

from tfla_tk import chunk_delta_rule, chunk_gated_delta_rule
from tfla_tk.backends.tk.delta_rule.call import Shape

from .conftest import forget_calls
from .delta_rule import (
    BETAS,
    GATES,
    OF_WRITTEN,
    SEGMENT,
    check,
    draw,
    function_of,
    of_both_functions,
    shape_of,
    ungated,
    with_keys_of,
)
from .linear import (
    Tensors,
    assert_accurate,
    assert_equal,
    assert_whole_and_repeated,
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


@pytest.mark.parametrize("dims", [*DIMS, *PADDED, *LARGE], ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("states", [False, True], ids=["zeros", "states"])
def test_all_dims(dims: tuple[int, int], states: bool, dtype: torch.dtype) -> None:
    check(draw(dims=dims, dtype=dtype, states=states))


@pytest.mark.parametrize("seq", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1000, 2048])
@pytest.mark.parametrize("dims", [(64, 128), (256, 192)], ids="{0[0]}_{0[1]}".format)
def test_any_length(seq: int, dims: tuple[int, int], dtype: torch.dtype) -> None:
    # of few tokens many heads: sums such as dbeta may nearly cancel where there are only two
    check(draw(1, seq, max(2, 32 // seq), dims=dims, dtype=dtype))


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("dims", [(128, 128), (256, 320)], ids="{0[0]}_{0[1]}".format)
def test_gates(gates: str, dims: tuple[int, int], dtype: torch.dtype) -> None:
    # dg of a few heads is a matter of chance where most of it is that of the last tokens
    check(draw(1, 500, 8 if gates == "mixed" else 2, dims=dims, dtype=dtype, gates=gates))


@pytest.mark.parametrize("betas", BETAS)
def test_betas(betas: str, dtype: torch.dtype) -> None:
    # where nothing is written a state that decays for long is below fp32's range
    gates = "slow" if betas == "zero" else "usual"
    check(draw(1, 500, dtype=dtype, gates=gates, betas=betas))


@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("states", [False, True], ids=["zeros", "states"])
def test_anchors(dims: tuple[int, int], states: bool) -> None:
    """Sequences of more chunks than lie between two anchors, of one batch and packed."""
    check(draw(1, 1700, dims=dims, states=states))
    x = draw(1, 1700, dims=dims, states=states, sequences=3)
    x["cu_seqlens"] = torch.tensor([0, 600, 1150, 1700], device="cuda")
    check(x)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (96, 48), (192, 144)], ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("states", [False, True], ids=["zeros", "states"])
def test_segments(dims: tuple[int, int], states: bool, dtype: torch.dtype) -> None:
    """Of the walks over the states: of several, of exactly one and of a token more."""
    check(draw(2, 2 * SEGMENT + 900, dims=dims, states=states, dtype=dtype))
    lengths = [0, 900, 2 * SEGMENT, SEGMENT + 1, 70, SEGMENT, 0]
    x = draw(1, sum(lengths), 1, 2, dims, states=states, dtype=dtype, sequences=len(lengths))
    x["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0).cuda()
    check(x)


@pytest.mark.parametrize("gates", ["slow", "closed", "half closed"])
@pytest.mark.parametrize("betas", ["usual", "up to two"])
def test_gates_at_borders(gates: str, betas: str) -> None:
    """Flows of gradient over a border between segments, large ones and none."""
    # many heads: dg of a few is a matter of chance where hardly anything decays
    check(draw(1, SEGMENT + 1000, heads=16, gates=gates, betas=betas))


def test_nothing_decays_for_long() -> None:
    """The error of the walks over the states grows no further than over a segment."""
    x = draw(1, 12_000)
    del x["g"]
    check(x, chunk_delta_rule)


@pytest.mark.parametrize("seq", [1, 700, 2 * SEGMENT + 77])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 144)], ids="{0[0]}_{0[1]}".format)
def test_a_sequence_has_the_same_bits_in_any_call(
    seq: int, dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, in batches with one and with two walkers per CTA, and packed behind other sequences, none split.
    Where the forward of a training call makes A itself, it holds for no gradient."""
    monkeypatch.setattr(Shape, "split", None)
    forget_calls()
    heads = 2

    def same(call: Tensors, rows: slice, tokens: slice, sequence: int, but: set[str]) -> bool:
        call_given = [torch.zeros_like(call["v"]), torch.zeros_like(call["initial_state"])]
        call_given[0][rows, tokens] = given[0]
        call_given[1][sequence] = given[1][0]
        found = run(call, function=chunk_gated_delta_rule)
        found |= train(call, function=chunk_gated_delta_rule, given=call_given)
        of_states = {"final_state", "dinitial_state"}
        mine = {
            name: t[sequence : sequence + 1] if name in of_states else t[rows, tokens]
            for name, t in found.items()
        }
        return all(torch.equal(mine[name], t) for name, t in alone.items() if name not in but)

    x = draw(1, seq, heads, dims=dims)
    given = [torch.randn_like(x["v"]), torch.randn_like(x["initial_state"])]
    alone = run(x, function=chunk_gated_delta_rule)
    alone |= train(x, function=chunk_gated_delta_rule, given=given)
    for batch in (3, 150):
        others = draw(batch, seq, heads, dims=dims, seed=1)
        call = {name: torch.cat([t[:1], x[name], t[2:]]) for name, t in others.items()}
        of_gradients = {"dq", "dk", "dv", "dg", "dbeta", "dinitial_state"}
        but = of_gradients if shape_of(call)._replace(trains=True).walk_makes_matrices else set()
        assert same(call, slice(1, 2), slice(0, seq), 1, but), batch
    for before, behind in ((0, 300), (1111, 0), (2 * SEGMENT, 1)):
        tokens = before + seq + behind
        call = draw(1, tokens, heads, dims=dims, sequences=3, seed=2)
        for name, t in call.items():
            if name == "initial_state":
                t[1] = x[name][0]
            else:
                t[:, before : before + seq] = x[name]
        call["cu_seqlens"] = torch.tensor([0, before, before + seq, tokens], device="cuda")
        assert same(call, slice(0, 1), slice(before, before + seq), 1, set()), before


@pytest.mark.parametrize("betas", ["one", "up to two"])
def test_a_state_that_is_erased_but_not_forgotten(betas: str, dtype: torch.dtype) -> None:
    """dk is a difference of terms larger than itself."""
    check(draw(1, 500, dtype=dtype, gates="slow", betas=betas))


def test_without_gate(dtype: torch.dtype) -> None:
    check(ungated(draw(2, 333, dtype=dtype)), chunk_delta_rule)


@pytest.mark.parametrize("norm", [0.3, 1.3])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 320)], ids="{0[0]}_{0[1]}".format)
@of_both_functions
def test_keys_of_other_norms(gated: bool, dims: tuple[int, int], norm: float, dtype: torch.dtype) -> None:
    """The state is stable: beta |k|^2 is below 2."""
    x = with_keys_of(norm, draw(1, 500, 4, dims=dims, dtype=dtype))
    x["initial_state"] *= OF_WRITTEN
    x = x if gated else ungated(x)
    check(x, function_of(x))


@pytest.mark.parametrize("scale", [1.0, 0.02])
@of_both_functions
def test_scale(gated: bool, scale: float, dtype: torch.dtype) -> None:
    x = draw(1, 500, 4, dtype=dtype)
    x["initial_state"] *= OF_WRITTEN
    x = x if gated else ungated(x)
    check(x, function_of(x), scale=scale)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (96, 192), (256, 320)], ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_state_v_first(packed: bool, dims: tuple[int, int], dtype: torch.dtype) -> None:
    x = draw(2, 300, 2, 4, dims, dtype)
    if packed:
        x = pack(draw(1, sum(LENGTHS), 2, 4, dims, dtype, sequences=len(LENGTHS)))
    x["initial_state"] = x["initial_state"].mT.contiguous()
    check(x, state_v_first=True)


@pytest.mark.parametrize("group", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("dims", [(128, 128), (64, 192), (256, 320)], ids="{0[0]}_{0[1]}".format)
def test_value_heads(group: int, dims: tuple[int, int], dtype: torch.dtype) -> None:
    """Each key head is read by neighbouring value heads, and its gradient is the sum over them."""
    check(draw(2, 200, 2, 2 * group, dims, dtype))


@pytest.mark.parametrize("group", [2, 3, 4])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (96, 80), (128, 320)], ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_value_heads_of_segments(packed: bool, dims: tuple[int, int], group: int) -> None:
    """The heads of a group take turns at dq and dk, in the same order every time."""
    x = draw(2, SEGMENT + 500, 2, 2 * group, dims)
    if packed:
        lengths = [0, 900, 2 * SEGMENT, SEGMENT + 1, 70, SEGMENT, 0]
        x = draw(1, sum(lengths), 2, 2 * group, dims, sequences=len(lengths))
        x["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0).cuda()
    check(x)
    assert_whole_and_repeated(lambda: train(x, function=chunk_gated_delta_rule))


@pytest.mark.parametrize(
    ("heads", "value_heads", "dims"),
    [(16, 48, (192, 128)), (8, 16, (192, 256)), (8, 8, (192, 512))],
    ids=["heads", "heads and slices", "slices"],
)
def test_turns_in_many_waves(heads: int, value_heads: int, dims: tuple[int, int]) -> None:
    """Of more CTAs than the GPU has room for."""
    x = draw(1, 8 * SEGMENT + 100, heads, value_heads, dims)
    expected = train(x, function=chunk_gated_delta_rule)
    for _ in range(20):
        assert_equal(train(x, function=chunk_gated_delta_rule), expected)


@pytest.mark.parametrize("offsets", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("value_heads", [2, 4])
@pytest.mark.parametrize("dims", [(128, 128), (128, 256), (256, 320)], ids="{0[0]}_{0[1]}".format)
def test_packed_sequences(dims: tuple[int, int], value_heads: int, offsets: torch.dtype) -> None:
    x = draw(1, sum(LENGTHS), 2, value_heads, dims, sequences=len(LENGTHS))
    x["cu_seqlens"] = torch.tensor([0, *LENGTHS]).cumsum(0).to("cuda", offsets)
    check(x)


def test_repeated_keys(dtype: torch.dtype) -> None:
    """The same key over and over: what is written is erased at once."""
    x = draw(1, 300, dtype=dtype)
    x["k"] = x["k"][:, :4].repeat(1, 75, 1, 1)
    check(x)


def test_a_loss_on_the_final_state_alone() -> None:
    x = draw()
    leaves = {name: t.clone().requires_grad_() for name, t in x.items()}
    truth = {name: t.clone().requires_grad_() for name, t in exact(x).items()}
    grads = []
    for inputs, backend in ((leaves, "tk"), (truth, "reference")):
        _, state = chunk_gated_delta_rule(**inputs, output_final_state=True, backend=backend)
        found = torch.autograd.grad(state.square().sum(), list(inputs.values()), materialize_grads=True)
        grads.append({f"d{name}": t for name, t in zip(inputs, found, strict=True)})
    assert_accurate(*grads, torch.bfloat16, size=x["v"].numel() ** 0.5)
    assert grads[0]["dq"].norm() == 0


def test_any_layout() -> None:
    """Views whose rows are aligned are read in place, others are copied."""
    x = draw(2, 200, states=True)
    plain = run(x, function=chunk_gated_delta_rule)
    for name, t in list(x.items()):
        if t.ndim == 4 and name != "initial_state":
            x[name] = torch.cat([t, t], -1)[..., : t.shape[-1]]
        elif t.ndim == 3:
            x[name] = t.transpose(1, 2).contiguous().transpose(1, 2)
    x["initial_state"] = x["initial_state"].mT.contiguous().mT
    found = run(x, function=chunk_gated_delta_rule)
    assert all(torch.equal(found[name], t) for name, t in plain.items())


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
    plain = x | {name: t.contiguous().float() for name, t in gates.items()}
    expected = train(plain, function=chunk_gated_delta_rule)
    found = train(x | gates, function=chunk_gated_delta_rule)
    for name, t in gates.items():
        assert found[f"d{name}"].stride() == torch.empty_like(t).stride()
    assert_equal(found, expected | {f"d{name}": expected[f"d{name}"].to(of_gates) for name in gates})


def test_many_heads() -> None:
    """As many that two walkers share a CTA."""
    check(draw(4, 200, 80))


@pytest.mark.parametrize("dims", [(128, 128), (128, 256), (128, 64)], ids="{0[0]}_{0[1]}".format)
def test_many_value_heads(dims: tuple[int, int], dtype: torch.dtype) -> None:
    """The same, where heads of v, and slices of V, take turns at dq and dk."""
    check(draw(2, 200, 40, 80, dims, dtype))
