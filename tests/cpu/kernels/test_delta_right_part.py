"""The delta rule's backward where its mirror makes the right part of dk, and where another walk does; the
recurrence takes the place of the kernels. No GPU."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

from tfla_tk.backends.tk.delta_rule import launch
from tfla_tk.backends.tk.delta_rule.call import Shape
from tfla_tk.backends.tk.delta_rule.split import MOST_V_WITH_RIGHT
from tfla_tk.backends.tk.prepared import Scratch
from tfla_tk.calls.delta_rule import DeltaRuleCore
from tfla_tk.core.layout import ADDRESS_BITS

from .addresses import at_odd_address
from .delta_emulation import Kernel, launch_delta_instead
from .test_delta_launch import check, cotangents, draw, split_into


@pytest.fixture(params=[True, False], ids=["made", "walked"])
def made(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the mirror makes it, where the left walk can add it."""
    found: bool = request.param
    monkeypatch.setattr(
        Shape, "makes_right", property(lambda shape: found and shape.dim_v <= MOST_V_WITH_RIGHT)
    )
    return found


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return launch_delta_instead(monkeypatch)


def names_of(kernel: Kernel) -> list[str]:
    """Of the walks of the backward, in their order."""
    return [x.name for x in kernel.launches if x.name in ("mirror", "left", "right")]


def walks(made: bool) -> list[str]:
    return ["mirror", "left"] if made else ["mirror", "left", "right"]


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("state", [False, True], ids=["zeros", "state"])
@pytest.mark.parametrize("dims", [(96, 80), (128, 128)], ids=str)
def test_one_head_per_key(
    dims: tuple[int, int], state: bool, packed: bool, made: bool, kernel: Kernel
) -> None:
    """With the decay's gradient, in segments of one chunk."""
    check(draw(dims, state=state, packed=packed))
    assert names_of(kernel) == walks(made)


@pytest.mark.parametrize(
    ("dims", "group", "adds"),
    [
        ((128, 96), 2, True),  # heads take turns
        ((128, 256), 1, True),  # slices of V are a pair
        ((128, 272), 1, False),  # slices take turns
        ((80, 144), 2, True),  # heads and slices do
        ((80, 80), 5, True),  # parts of every head, which another launch adds up
        ((80, 144), 3, True),  # and of slices, a pair each
        ((80, 144), 6, True),  # and of two heads each
    ],
    ids=str,
)
@pytest.mark.parametrize("gate", [False, True], ids=["ungated", "gated"])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_results_that_are_added_up(
    dims: tuple[int, int], group: int, adds: bool, gate: bool, packed: bool, made: bool, kernel: Kernel
) -> None:
    """adds: the left walk can add the right part of dk."""
    check(draw(dims, group=group, gate=gate, packed=packed, tokens=70))
    assert names_of(kernel) == walks(made and adds)


@pytest.mark.parametrize("longest", [0, 1], ids=["carried", "leads"])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("group", [1, 2])
def test_split_sequences(
    group: int, packed: bool, longest: int, made: bool, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the chunks that are walked ahead of a segment nothing is left."""
    split_into(monkeypatch, 1, longest)
    core = draw((96, 80), group=group, packed=packed)
    assert core.g is not None
    check(core._replace(g=core.g - 2))
    assert names_of(kernel)[1:] == walks(made)  # behind the mirror that leaves states alone
    assert any((leads > 0).any() for leads in kernel.made_leads) == (longest > 0)


def test_a_decay_whose_gradient_is_not_wanted(made: bool, kernel: Kernel) -> None:
    check(draw((96, 96), group=2, tokens=70), needs_gates=False)
    assert names_of(kernel) == walks(made)
    assert not kernel.anchor_shapes


def layouts() -> Iterator[tuple[str, DeltaRuleCore]]:
    """A call whose tensors are not dense, or begin at odd addresses, by name."""
    core = draw((96, 80), tokens=70)
    q, k, v = core.q, core.k, core.v
    joined = torch.cat([q, k, v], -1)
    parts = dict(zip("qkv", joined.split([96, 96, 80], -1), strict=True))
    yield "parts of one tensor", core._replace(**parts)
    turned = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in parts.items()}
    yield "heads before tokens", core._replace(**turned)
    yield "other dimensions innermost", core._replace(k=k.transpose(1, 3).contiguous().transpose(1, 3))
    yield "rows that are not aligned", core._replace(k=torch.cat([k, k[..., :1]], -1)[..., :-1])
    yield "odd addresses", core._replace(k=at_odd_address(k), v=at_odd_address(v))
    ungated = draw((96, 80), group=2, gate=False, tokens=70)
    turned = {
        name: getattr(ungated, name).transpose(1, 2).contiguous().transpose(1, 2) for name in ("q", "k", "v")
    }
    yield "heads before tokens, in turns", ungated._replace(**turned)


@pytest.mark.parametrize(("name", "core"), list(layouts()), ids=lambda x: x if isinstance(x, str) else "")
def test_tensors_that_are_not_dense(name: str, core: DeltaRuleCore, made: bool, kernel: Kernel) -> None:
    check(core)
    assert names_of(kernel) == walks(made)


CALLS: list[dict[str, Any]] = [
    {},
    {"packed": True},
    {"state": False},
    {"group": 2, "gate": False},
    {"group": 2},
    {"group": 5},
    {"group": 5, "packed": True},
    {"dims": (96, 144), "group": 2, "gate": False},
]


@pytest.mark.parametrize("options", CALLS, ids=str)
def test_regions_do_not_overlap(
    options: dict[str, Any], made: bool, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What launches look at are tensors that begin alike and end alike, or have no memory in common; and all
    of it is allocated."""
    taken: list[Scratch] = []

    class Recorded(Scratch):
        def __init__(self, address: int) -> None:
            super().__init__(address)
            taken.append(self)

    monkeypatch.setattr(launch, "Scratch", Recorded)
    core = draw(**{"dims": (96, 80), "tokens": 150, **options})
    o, last, kept = launch.forward(core, output_final_state=True, keep=True)
    grads = cotangents(o, last)
    taken.clear()
    kernel.regions.clear()
    launch.backward(core, kept, *grads, needs_gates=core.g is not None)
    regions = sorted(x for x in kernel.regions if x[0] >> ADDRESS_BITS)
    for (at, end), (following, _) in pairwise(regions):
        assert end <= following, (at, end, following)
    sums = next(x.dbeta for x in kernel.launches if x.name == "mirror")
    workspace = [x for x in regions if x[0] >> ADDRESS_BITS == sums >> ADDRESS_BITS]
    assert len(workspace) > 2
    assert max(end for _, end in workspace) <= taken[-1].take(1)
