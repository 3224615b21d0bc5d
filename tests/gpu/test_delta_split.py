"""The split of few long sequences in the delta rule's forward and mirror, forced: against the reference in
fp64 and against walks that take whole sequences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from tfla_tk import batch_invariant, build, chunk_gated_delta_rule
from tfla_tk.backends.tk.delta_rule import launch
from tfla_tk.backends.tk.delta_rule.call import Left, Shape
from tfla_tk.backends.tk.prepared import Scratch
from tfla_tk.calls.delta_rule import DeltaRuleCore
from tfla_tk.core.layout import ADDRESS_BITS, CHUNK, SEGMENT_CHUNKS

from .accuracy import TOLERANCE
from .conftest import forget_calls
from .delta_rule import SEGMENT, check, draw
from .linear import (
    Tensors,
    assert_accurate,
    assert_graph_replays,
    assert_whole_and_repeated,
    exact,
    pack,
    run,
    train,
)
from .linear import both as both_of
from .memory import uninitialised_memory_is_nan

LENGTHS = [0, 900, 2 * SEGMENT, SEGMENT + 1, 70, SEGMENT, 3 * SEGMENT + 65, 0]
CARRIED = -1  # in the place of leads
Split = Callable[..., None]

both = partial(both_of, function=chunk_gated_delta_rule)
with_leads = pytest.mark.parametrize("longest", [SEGMENT_CHUNKS, 0], ids=["leads", "carried"])


@pytest.fixture
def split_every(monkeypatch: pytest.MonkeyPatch) -> Iterator[Split]:
    """Cuts the walks of the forward and the mirror into segments of so many borders; 0: not at all. With
    leads of at most so many chunks; 0: every head is carried."""

    def split_every(borders: int, longest: int = SEGMENT_CHUNKS) -> None:
        chunks = borders * SEGMENT_CHUNKS
        found = property(lambda shape: shape.cut_into(chunks)) if borders else None
        monkeypatch.setattr(Shape, "split", found)
        monkeypatch.setattr(Shape, "longest_lead", longest)
        forget_calls()

    yield split_every
    forget_calls()


def packed(
    heads: int = 1, dims: tuple[int, int] = (128, 128), dtype: torch.dtype = torch.bfloat16
) -> Tensors:
    x = draw(1, sum(LENGTHS), heads, 2 * heads, dims, dtype, sequences=len(LENGTHS))
    return pack(x, lengths=LENGTHS)


def leads_of(x: Tensors) -> tuple[Tensor, Tensor]:
    """Those that a forward of a split keeps, [segments, HV]: before its segments, and behind them."""
    named = {name: x.get(name) for name in ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens")}
    *operands, initial, offsets = named.values()
    options = (1.0, False, False, False, False)
    core = DeltaRuleCore._make((*operands, None, None, initial, offsets, *options))
    _, _, found = launch.forward(core, output_final_state=False, keep=True)
    shape, address = Shape.of(core, trains=True), 1 << ADDRESS_BITS
    assert found is not None and shape.split is not None
    kept = found.tensors[0]
    assert kept is not None
    first = Left.of(shape, Scratch(address)).leads - address
    leads = kept.view(torch.uint8)[first : first + 2 * shape.leads_bytes].view(torch.int32)
    before, behind = leads.view(2, shape.split.segments, shape.heads).cpu()
    return before, behind


def mixed(x: Tensors) -> Tensors:
    """Every second head hardly forgets."""
    x["g"] = x["g"].clone()
    x["g"][:, :, 1::2] *= 1e-3
    return x


@pytest.mark.parametrize("borders", [1, 2, 3])
@pytest.mark.parametrize("more", [-1, 0, 1, 64, 65])
@with_leads
def test_any_length(longest: int, more: int, borders: int, split_every: Split) -> None:
    """Around segments of one border or several, where others lie within them."""
    split_every(borders, longest)
    for count in (1, 2, 3):
        check(draw(1, count * borders * SEGMENT + more, 2))


def test_a_walk_without_a_lead_begins_with_zero(split_every: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunk matrices and the walk alone, so that leads are those of memory full of zeros."""
    split_every(1)
    x = draw(1, 2 * SEGMENT, 2)
    behind = {name: t[:, SEGMENT:].clone() for name, t in x.items() if name != "initial_state"}
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
        in_order = build.launches
        patch.setattr(build, "launches", lambda launches: in_order([launches[0], launches[-1]]))
        found = run(x, function=chunk_gated_delta_rule)
    split_every(0)
    expected = run(behind, function=chunk_gated_delta_rule)
    found["o"] = found["o"][:, SEGMENT:]
    assert_accurate(found, expected, x["v"].dtype)


@pytest.mark.parametrize("gates", ["none", "slow", "-10", "mixed", "closed", "half closed"])
@pytest.mark.parametrize("betas", ["usual", "up to two"])
@with_leads
def test_gates(longest: int, gates: str, betas: str, split_every: Split) -> None:
    """Maps that keep a state, and such that leave nothing of it, which leads take the place of."""
    split_every(1, longest)
    # dg is a small difference of large sums where nothing is forgotten, but much is erased
    wider = {"dg": 1.25e-2} if (gates, betas) == ("none", "up to two") else None
    check(draw(1, 3 * SEGMENT + 100, gates=gates, betas=betas), wider=wider)


@pytest.mark.parametrize("gates", ["none", "slow"])
@pytest.mark.parametrize("betas", ["usual", "one", "up to two"])
def test_errors_are_those_of_whole_sequences(gates: str, betas: str, split_every: Split) -> None:
    x = draw(1, 8 * SEGMENT, 2, gates=gates, betas=betas)
    truth = both(exact(x), backend="reference")

    def errors(found: Tensors) -> dict[str, float]:
        return {
            name: float((t.double() - truth[name]).norm() / truth[name].norm()) for name, t in found.items()
        }

    split_every(0)
    whole = errors(both(x))
    split_every(1)
    split = errors(both(x))
    most = {"dg": 1.5}  # a small difference of large sums: 1.37 on an H100, where nothing decays
    worse = {
        name: (split[name], e)
        for name, e in whole.items()
        if not split[name] <= most.get(name, 1.15) * e + 2e-4
    }
    assert not worse, worse


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (96, 48)], ids="{0[0]}_{0[1]}".format)
@with_leads
def test_packed_sequences(
    longest: int, dims: tuple[int, int], dtype: torch.dtype, split_every: Split
) -> None:
    for borders in (1, 2):
        split_every(borders, longest)
        check(packed(dims=dims, dtype=dtype))


def test_a_loss_on_the_final_state_alone(split_every: Split) -> None:
    """Its gradient goes through the maps of all segments."""
    split_every(1)
    x = draw(1, 3 * SEGMENT, gates="slow")
    given = [torch.zeros_like(x["v"]), torch.randn_like(x["initial_state"])]
    found = train(x, function=chunk_gated_delta_rule, given=given)
    truth = exact(x)
    of_truth = [t.double() for t in given]
    expected = train(truth, "reference", chunk_gated_delta_rule, given=of_truth)
    for name in ("dk", "dv", "dinitial_state"):
        error = (found[name].double() - expected[name]).norm() / expected[name].norm()
        assert error < 8e-3, name
    assert found["dq"].norm() == 0


@with_leads
def test_results_are_written_whole_and_always_the_same(longest: int, split_every: Split) -> None:
    """And nothing is read that no launch has written: neither states of heads with leads, nor leads of
    segments that there are not."""
    split_every(1, longest)
    for x in (
        draw(1, 3 * SEGMENT + 77, 1, 2, (96, 48)),
        packed(dims=(96, 80)),
        mixed(draw(1, 3 * SEGMENT + 77, 2, 4)),
        mixed(packed(2)),
    ):
        assert_whole_and_repeated(partial(both, x))


@pytest.mark.parametrize("gates", [("usual", "usual"), ("usual", "slow"), ("slow", "usual")], ids=" ".join)
def test_a_graph_replays_a_split(gates: tuple[str, str], split_every: Split) -> None:
    """In both directions. Each time it is found out anew which heads are carried."""
    split_every(1)
    x, other = (draw(1, 3 * SEGMENT, 4, gates=of, seed=seed) for seed, of in enumerate(gates))
    given = [torch.ones_like(x["v"]), torch.ones_like(x["initial_state"])]

    def call(of_call: Tensors) -> Tensors:
        return both(of_call, given=given)

    assert_graph_replays(call, x, other, [call(other), call(x)], 10)


@pytest.mark.parametrize("heads", [2, 16])  # segments of one border and of several
@pytest.mark.parametrize("gates", ["usual", "slow"])
def test_a_call_that_is_split_by_itself(gates: str, heads: int) -> None:
    """As calls of its size are; and not where a sequence's bits may not follow from the call."""
    x = draw(1, 16 * SEGMENT, heads, gates=gates, states=False)
    sizes = (16 * SEGMENT, 128, 128)
    shape = Shape(1, sizes[0] // 64, 1, heads, *sizes, 1, False, 0, False, False, trains=True)
    assert shape.split is not None and (shape.longest_lead == 0) == (heads == 2)
    check(x)
    are_carried = [bool((leads == CARRIED).any()) for leads in leads_of(x)]
    assert are_carried == [gates == "slow" or shape.longest_lead == 0] * 2
    alone = run(x, function=chunk_gated_delta_rule)
    many = {name: t.expand(8, *t.shape[1:]) for name, t in x.items()}
    with batch_invariant():
        found, batch = (run(given, function=chunk_gated_delta_rule) for given in (x, many))
    assert torch.equal(batch["o"][3:4], found["o"])
    assert float((found["o"].float() - alone["o"].float()).norm() / found["o"].float().norm()) < 7e-3


# Heads that forget soon


def expected_leads(x: Tensors, borders: int, limit: float) -> tuple[Tensor, Tensor]:
    """Of one sequence, [borders, HV]: before each border and behind it, so long that less than 2^limit of all
    that is left out arrives in the segment."""
    squares = x["k"].double().square().sum(-1).repeat_interleave(x["v"].shape[2] // x["k"].shape[2], 2)
    grown = (1 - x["beta"].double() * squares).abs().clamp(min=1).log2()
    decay = x["g"].double() / math.log(2)
    wholes, stretches = (
        torch.stack([of_chunk[0].sum(0) for of_chunk in of_tokens.split(CHUNK, 1)])
        for of_tokens in (grown + decay, grown + decay.clamp(min=0))
    )

    def lead_of(whole: Tensor, stretch: Tensor, of_segment: Tensor) -> Tensor:
        ends = torch.cat([stretch, torch.zeros_like(stretch[:1])])
        between = torch.cat([torch.zeros_like(whole[:1]), whole.cumsum(0)])
        reaching = ~(of_segment.sum(0) + between + ends < limit)
        counts = torch.arange(1, len(whole) + 2, device=whole.device)[:, None] * reaching
        lead = -(-counts.amax(0) // SEGMENT_CHUNKS) * SEGMENT_CHUNKS
        return lead.clamp(max=len(whole)).int().cpu()

    length = borders * SEGMENT_CHUNKS
    cuts = range(length, len(wholes), length)
    before = [
        lead_of(wholes[:at].flip(0), stretches[:at].flip(0), stretches[at : at + length]) for at in cuts
    ]
    behind = [lead_of(wholes[at:], stretches[at:], stretches[at - length : at]) for at in cuts]
    return torch.stack(before), torch.stack(behind)


@pytest.mark.parametrize("borders", [1, 2, 3])
@pytest.mark.parametrize("betas", ["usual", "up to two"])
@pytest.mark.parametrize("faster", [1.0, 0.5, 20.0])
def test_leads_are_as_long_as_gates_need(
    faster: float, betas: str, borders: int, dtype: torch.dtype, split_every: Split
) -> None:
    """Those that the kernels find, by the bounds in fp64; also of heads that share keys."""
    split_every(borders, longest=10_000)
    x = draw(1, 7 * SEGMENT + 77, 2, 4, dtype=dtype, betas=betas)
    x["g"] = x["g"] * faster * torch.tensor([1.0, 0.3, 0.1, 1e-3], device="cuda")
    before, behind = leads_of(x)
    found = before[1:], behind[:-1]
    bounds = zip(*(expected_leads(x, borders, limit) for limit in (-99.99, -100.01)), strict=True)
    for leads, (least, most) in zip(found, bounds, strict=True):
        assert (least <= leads).all() and (leads <= most).all(), (leads, least, most)


def test_a_head_is_carried_or_has_leads(split_every: Split) -> None:
    """By its own gates, in each sequence."""
    split_every(1)
    x = mixed(packed(2))
    before, behind = leads_of(x)
    offsets = x["cu_seqlens"].tolist()
    for number, (start, length) in enumerate(zip(offsets, LENGTHS, strict=False)):
        first, count = start // SEGMENT + number, -(-length // SEGMENT)
        if count < 2:
            continue
        for leads in (before[first + 1 : first + count], behind[first : first + count - 1]):
            assert (leads[:, ::2] > 0).all()
            # leads of two segments reach the ends
            assert ((leads[:, 1::2] == CARRIED) == (count > 2)).all()
    check(x)


@pytest.mark.parametrize("gates", ["usual", "-10", "closed", "slow"])
@pytest.mark.parametrize("borders", [1, 2])
@pytest.mark.parametrize("is_packed", [False, True], ids=["batch", "packed"])
def test_results_are_those_of_whole_walks(
    is_packed: bool, borders: int, gates: str, dtype: torch.dtype, split_every: Split
) -> None:
    """Within the tolerances of the dtype."""
    x = packed(2, dtype=dtype) if is_packed else draw(1, 5 * SEGMENT + 77, 2, 4, dtype=dtype)
    like = draw(1, x["g"].shape[1], 2, 4, dtype=dtype, gates=gates)
    x["g"] = like["g"]
    split_every(0)
    whole = both(x)
    split_every(borders)
    assert_accurate(both(x), exact(whole), dtype, x["v"].numel() ** 0.5)


def test_heads_do_not_depend_on_others(split_every: Split) -> None:
    """A head with leads has the same bits whether others of the call have them or are carried."""
    split_every(1)
    x = draw(1, 4 * SEGMENT + 77, 4)
    alone, among = both(x), both(mixed(x))
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert torch.equal(alone[name][:, :, ::2], among[name][:, :, ::2]), name
    for name in ("final_state", "dinitial_state"):
        assert torch.equal(alone[name][:, ::2], among[name][:, ::2]), name


def by_chunk(found: Tensor, truth: Tensor) -> float:
    """The largest relative error of a chunk."""
    chunks = zip(found.double().split(CHUNK, 1), truth.double().split(CHUNK, 1), strict=True)
    return max(float((x - y).norm() / y.norm()) for x, y in chunks)


@pytest.mark.parametrize("longest", [SEGMENT_CHUNKS, 64], ids=["carried", "leads"])
@pytest.mark.parametrize("place", [0, 8, 14])
def test_a_state_that_shrinks_and_grows_again(place: int, longest: int, split_every: Split) -> None:
    """Over segments whose chunks forget seven bits each, but for two that let the state grow by 18 each."""
    x = draw(1, 5 * SEGMENT, 2)
    x["g"] = torch.full_like(x["g"], -0.08)
    grown = (2 * SEGMENT_CHUNKS + place) * CHUNK
    x["g"][:, grown : grown + 2 * CHUNK, 1] = 0.2
    split_every(0)
    whole = both(x)
    split_every(1, longest)
    before, behind = leads_of(x)
    assert (before[1:, 0] == SEGMENT_CHUNKS).all() and (behind[:-1, 0] == SEGMENT_CHUNKS).all()
    if longest == SEGMENT_CHUNKS:
        assert (before[1:, 1] == CARRIED).all() and (behind[:-1, 1] == CARRIED).all()
    else:
        assert before[3, 1] == behind[1, 1] == 2 * SEGMENT_CHUNKS
    found = both(x)
    truth = run(exact(x), "reference", chunk_gated_delta_rule)
    assert by_chunk(found["o"], truth["o"]) < 1e-2
    for name in ("o", "dq", "dk", "dv"):
        assert by_chunk(found[name], whole[name]) < 2e-2, name


def test_keys_that_let_a_state_grow(split_every: Split) -> None:
    """Where beta |k|^2 > 2 the gates alone do not tell what is forgotten."""
    split_every(1)
    x = draw(1, 3 * SEGMENT, 2)
    x["g"], x["beta"] = torch.full_like(x["g"], -0.2), torch.full_like(x["beta"], 1.0)
    x["beta"][:, :, 1] = 2.2
    before, behind = leads_of(x)
    assert (before[1:, 0] > 0).all() and (before[1:, 1] == CARRIED).all()
    assert (behind[:-1, 0] > 0).all() and (behind[:-1, 1] == CARRIED).all()
    check(x, wider={"dg": 3e-2, "dbeta": 3e-2, "dk": 1.5e-2})


@pytest.mark.parametrize("of", ["g", "beta", "k"])
@pytest.mark.parametrize("token", [70, 2 * SEGMENT + 5, 4 * SEGMENT - 1])
def test_nan_in_gates_and_keys_reaches_as_far_as_in_a_whole_walk(
    token: int, of: str, split_every: Split
) -> None:
    x = draw(1, 4 * SEGMENT, 3)
    x[of] = x[of].clone()
    x[of][:, token, 1] = torch.nan
    split_every(0)
    whole = both(x)
    split_every(1)
    expected, found = both(x | {of: x[of].nan_to_num(0)}), both(x)

    def chunks(t: Tensor) -> Tensor:
        return t.isnan().unflatten(1, (-1, CHUNK)).any(-1).any(2)  # and heads

    for name in ("o", "dq", "dk", "dv"):
        assert torch.equal(chunks(found[name]), chunks(whole[name])), name
        assert torch.equal(found[name][:, :, ::2], expected[name][:, :, ::2]), name
    assert found["o"][:, token:, 1].isnan().all()


@pytest.mark.parametrize("forgets", [1, 0], ids=["carried backward alone", "carried forward alone"])
def test_heads_that_are_carried_in_one_direction(forgets: int, split_every: Split) -> None:
    """Segments of two halves, of which one forgets, before the border or behind it."""
    split_every(2)
    x = draw(1, 6 * SEGMENT, 2)
    halves = x["g"].view(1, 3, 2, SEGMENT, 2)
    halves[:, :, 1 - forgets] = 0
    before, behind = leads_of(x)
    near, far = (before[1:], behind[:-1])[:: 1 if forgets else -1]
    assert (near == SEGMENT_CHUNKS).all() and (far == CARRIED).all()
    with uninitialised_memory_is_nan():
        found = both(x)
    truth, wider = both(exact(x), backend="reference"), {"dv": TOLERANCE[torch.bfloat16]}
    assert_accurate(found, truth, torch.bfloat16, x["v"].numel() ** 0.5, wider)
