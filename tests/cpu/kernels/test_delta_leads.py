"""The leads of a split's segments, and that nothing is missing in what walks make that begin with them. The
recurrence takes the place of the kernels; no GPU. How long leads are: tests/gpu/test_delta_split.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.pairs import pairwise
from tfla_tk.backends.tk.delta_rule import call, launch
from tfla_tk.calls.delta_rule import DeltaRuleCore
from tfla_tk.core.layout import CHUNK

from .delta_before_walks import CARRIED
from .delta_emulation import Kernel, launch_delta_instead, uninitialised_memory_is_nan
from .test_delta_launch import OFFSETS, check, cotangents, draw, forget_calls, split_into

NEAR, SLOW = -1.2, -1e-3  # log decays of a token: a chunk forgets all or hardly anything
NOISE = 2e-4  # of fp32 where results are rounded to 16 bits
RESULTS = ("dq", "dk", "dv", "dg", "dbeta", "da_log", "ddt_bias", "dh0")
Results = dict[str, Tensor]
Split = Callable[..., None]


@pytest.fixture(params=[1], ids=lambda chunks: f"multiples of {chunks}")
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    """Whose segments of the walks over the states have so many chunks. What is not written is NaN."""
    with uninitialised_memory_is_nan():
        yield launch_delta_instead(monkeypatch, request.param)


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch, kernel: Kernel) -> Split:
    """Cuts the next calls into segments of so many chunks, None: not at all; with leads up to `longest`,
    else up to a quarter of a segment or one of the walks over the states."""

    def split(chunks: int | None, longest: int | None = None) -> None:
        if chunks is not None and longest is None:
            longest = max(chunks // (4 * kernel.whole_lead), 1) * kernel.whole_lead
        split_into(monkeypatch, chunks, longest)
        forget_calls()

    return split


def decaying(log_decay: float | Tensor, **options: Any) -> DeltaRuleCore:
    """A call whose tokens decay alike, but for a tenth, or heads or chunks [chunks, HV] of it do."""
    core = draw((16, 32), **options)
    generator = torch.Generator().manual_seed(2)
    tenth = 1 + 0.1 * (torch.rand(core.beta.shape, generator=generator) - 0.5)
    by = torch.as_tensor(log_decay)
    if by.ndim == 2:
        by, tenth = by.repeat_interleave(CHUNK, 0)[: core.beta.shape[1]], torch.ones_like(tenth)
    return core._replace(g=by * tenth)


def run(core: DeltaRuleCore, kernel: Kernel, *, needs_gates: bool = True) -> Results:
    """All results of both directions."""
    o, last, kept = launch.forward(core, output_final_state=True, keep=True)
    assert last is not None
    gradients = launch.backward(core, kept, *cotangents(o, last), needs_gates=needs_gates)
    found = {name: x for name, x in zip(RESULTS, gradients, strict=True) if x is not None}
    return found | {"o": o, "last": last}


def difference(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth.double()).norm() / truth.double().norm())


def assert_as_whole(core: DeltaRuleCore, kernel: Kernel, split: Split, *of_split: int) -> None:
    """A split makes of a call what walks of whole sequences do."""
    split(None)
    whole = run(core, kernel)
    split(*of_split)
    found = run(core, kernel)
    assert found.keys() == whole.keys()
    differences = {name: difference(x, whole[name]) for name, x in found.items()}
    # not(<=): NaN fails
    assert not {name: error for name, error in differences.items() if not error <= NOISE}


def at_borders(kernel: Kernel, segments: int) -> tuple[Tensor, Tensor]:
    """Leads of the last split, of two sequences of so many segments: [2, borders, HV] before and behind."""
    before, behind = kernel.made_leads[-1].unflatten(1, (2, segments))
    return before[:, 1:], behind[:, :-1]


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [2], indirect=True)
def test_they_are_multiples_of_a_segment_of_the_walks_over_the_states(kernel: Kernel, split: Split) -> None:
    """But at a sequence's end."""
    core = decaying(NEAR, tokens=7 * CHUNK - 10)
    assert_as_whole(core, kernel, split, 2)
    before, behind = at_borders(kernel, 4)
    assert (before == 2).all() and (behind == torch.tensor([2, 2, 1])[:, None]).all()
    assert_as_whole(core, kernel, split, 4)
    check(core)


# What walks make that begin with them


@pytest.mark.parametrize(
    ("chunks", "group", "state", "packed"),
    [(*sizes, *others) for sizes, *others in pairwise([(1, 1), (1, 3), (2, 1)], *[(False, True)] * 2)],
)
def test_heads_that_forget_soon_have_them(
    chunks: int, group: int, state: bool, packed: bool, kernel: Kernel, split: Split
) -> None:
    """All of them; nothing is carried."""
    core = decaying(NEAR, group=group, state=state, packed=packed, tokens=200)
    assert_as_whole(core, kernel, split, chunks)
    assert (kernel.made_leads[-1] >= 0).all() and (kernel.made_leads[-1] == 1).any()
    check(core)
    check(core, keep=False)


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("gate", [SLOW, 0.0, None], ids=["slow", "zero", "none"])
def test_heads_that_hardly_forget_are_carried(
    gate: float | None, packed: bool, kernel: Kernel, split: Split
) -> None:
    """But over sequences of two segments, whose leads reach the ends."""
    core = draw((16, 32), gate=False, packed=packed) if gate is None else decaying(gate, packed=packed)
    split(1)
    check(core)
    if packed:
        places = [start // CHUNK + number for number, start in enumerate(OFFSETS[:-1])]
        before, behind = kernel.made_leads[-1]
        assert (before[places[0] + 1] == 1).all() and (behind[places[0]] == 1).all()  # of 70 tokens
        assert (before[places[3] + 1 : places[3] + 3] == CARRIED).all()  # of 130
        assert (behind[places[3] : places[3] + 2] == CARRIED).all()
    else:
        assert all((leads == CARRIED).all() for leads in at_borders(kernel, 3))


def test_sequences_of_a_call_differ(kernel: Kernel, split: Split) -> None:
    """A head is carried over one sequence and has leads in the other."""
    core = decaying(NEAR, tokens=200)
    assert core.g is not None
    core.g[1, :, 0] = SLOW
    assert_as_whole(core, kernel, split, 1)
    before, _ = at_borders(kernel, 4)
    assert (before == torch.tensor([[1, 1], [CARRIED, 1]])[:, None]).all()


@pytest.mark.parametrize("tokens", [CHUNK + 1, 2 * CHUNK])
def test_leads_that_reach_the_ends_begin_with_their_states(tokens: int, kernel: Kernel, split: Split) -> None:
    """Of a sequence that forgets nothing: the initial state and the last state's gradient."""
    core = decaying(0.0, tokens=tokens)
    assert_as_whole(core, kernel, split, 1)
    assert all((leads == 1).all() for leads in at_borders(kernel, 2))
    check(core)


def test_packed_sequences_begin_with_their_own_states(kernel: Kernel, split: Split) -> None:
    """Leads that reach a sequence's ends go no further."""
    core = decaying(0.0, packed=True)
    split(1, longest=100)
    check(core)
    assert (kernel.made_leads[-1] >= 0).all()


# Both directions of a head

UNEVEN = {
    # segments of two chunks that forget in the second one, before the borders, or in the first one
    "carried backward alone": ([0.0, NEAR] * 3, 0),
    "carried forward alone": ([NEAR, 0.0] * 3, 1),
}


@pytest.mark.parametrize(("decays", "near"), UNEVEN.values(), ids=UNEVEN)
def test_heads_that_are_carried_in_one_direction(
    decays: list[float], near: int, kernel: Kernel, split: Split
) -> None:
    core = decaying(torch.tensor(decays)[:, None].expand(-1, 2), tokens=CHUNK * len(decays))
    split(2)
    launch.forward(core, output_final_state=True, keep=True)
    borders = at_borders(kernel, 3)
    assert (borders[near] == 1).all() and (borders[1 - near] == CARRIED).all()
    assert_as_whole(core, kernel, split, 2)
    check(core, keep=False)


# The launches


@pytest.mark.parametrize("keep", [False, True])
def test_a_call_without_a_split_has_none(keep: bool, kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor bounds, with matrices made before the walk or beside it."""
    for count in (1, 132):
        monkeypatch.setattr(call, "multiprocessors", lambda device, count=count: count)
        launch._forwards.clear()
        launch.forward(draw(), output_final_state=True, keep=keep)
    names = [x.name for x in kernel.launches]
    assert names == ["matrices", "forward", "forward"]
    assert kernel.launches[0].bounds == 0
    assert all(x.leads == x.carried == 0 for x in kernel.launches[1:])


def test_the_launches_of_a_split_share_them(kernel: Kernel, split: Split) -> None:
    """Those of the backward have the second half of what the forward keeps."""
    split(1)
    run(decaying(NEAR), kernel)
    names = [x.name for x in kernel.launches]
    forward, backward = ["matrices", "leads", "maps", "carry", "forward"], ["mirror", "carry", "gradients"]
    assert names[:8] == forward + backward
    matrices, leads = kernel.launches[:2]
    assert matrices.bounds == leads.bounds != 0 and leads.longest == 1 and leads.both
    assert {x.leads for x in kernel.launches[1:5]} == {leads.leads} != {0}
    assert len({x.leads for x in kernel.launches[5:8]}) == 1


def test_a_forward_alone_has_none_behind_its_segments(kernel: Kernel, split: Split) -> None:
    split(1)
    launch.forward(decaying(NEAR), output_final_state=True, keep=False)
    assert not kernel.launches[1].both
    before, behind = at_borders(kernel, 3)
    assert (before == 1).all() and (behind == 0).all()


def test_where_all_heads_are_carried(kernel: Kernel, split: Split) -> None:
    """Of segments that are as short as a lead."""
    core = decaying(NEAR, tokens=200)
    assert_as_whole(core, kernel, split, 1, 0)
    assert all((leads == CARRIED).all() for leads in at_borders(kernel, 4))


@pytest.mark.parametrize("chunks", [1, 2])
def test_they_lie_apart_from_everything_else(chunks: int, kernel: Kernel, split: Split) -> None:
    """Bounds and leads overlap no other tensor of the launches."""
    split(chunks)
    core = decaying(NEAR, tokens=200)
    for keep in (False, True):
        kernel.regions.clear()
        launch.forward(core, output_final_state=True, keep=keep)
        leads = next(x for x in kernel.launches if x.name == "leads")
        of_leads = [region for region in kernel.regions if region[0] in (leads.leads, leads.bounds)]
        for (start, end), (first, behind) in itertools.product(of_leads, kernel.regions):
            assert (start, end) == (first, behind) or end <= first or behind <= start
        kernel.launches.clear()
