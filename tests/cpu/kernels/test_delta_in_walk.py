"""The delta rule where the forward's walk makes the chunk matrices itself; the recurrence takes the place of
the kernels. No GPU."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from tfla_tk.backends.tk.delta_rule import call, launch
from tfla_tk.backends.tk.delta_rule.call import Shape
from tfla_tk.core.layout import ADDRESS_BITS

from .addresses import at_odd_address
from .delta_emulation import Kernel, launch_delta_instead
from .test_delta_launch import T, check, cotangents, draw, forget_calls, raw, split_into

CALLS: list[dict[str, Any]] = [
    {},
    {"packed": True},
    {"state": False, "gate": False},
    {"group": 3},
    {"group": 2, "gate": False, "packed": True},
    {"dims": (80, 208)},
    {"dims": (112, 80), "state": False},
]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """Of a machine that calls fill, and whose memory bounds the speed."""
    found = launch_delta_instead(monkeypatch)
    monkeypatch.setattr(call, "multiprocessors", lambda device: 1)
    monkeypatch.setattr(call, "memory_rate", lambda device: 1.0)
    return found


def draw_for(options: dict[str, Any], tokens: int = T) -> Any:
    return draw(**{"dims": (96, 128), "tokens": tokens, **options})


def force(monkeypatch: pytest.MonkeyPatch, *, kept: bool, others: bool) -> None:
    """Has walks make the matrices in calls for a backward and in others."""
    made = property(lambda shape: kept if shape.trains else others)
    monkeypatch.setattr(Shape, "walk_makes_matrices", made)
    forget_calls()


def forwards(kernel: Kernel) -> list[str]:
    """What the forwards have launched."""
    return [x.name for x in kernel.launches if x.name in ("matrices", "forward")]


@pytest.mark.parametrize("options", CALLS, ids=str)
def test_both_directions(options: dict[str, Any], kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward reads the matrices of the walk, of its own forward where the call has kept none. Packed
    sequences are served, too, but the rule does not choose it for them."""
    core = draw_for(options)
    shape = Shape.of(core)
    assert {shape._replace(trains=x).walk_makes_matrices for x in (False, True)} == {not shape.packed}
    force(monkeypatch, kept=True, others=True)
    check(core)
    check(core, keep=False)
    assert forwards(kernel) == ["forward"] * 3
    for x, is_kept in zip((x for x in kernel.launches if x.name == "forward"), (1, 0, 1), strict=True):
        assert x.makes_matrices and (x.walkers, x.makers) == (2, 0)
        assert [at != 0 for at in x.matrices] == [bool(is_kept), False, False]


@pytest.mark.parametrize("keep", [False, True], ids=["alone", "kept"])
def test_one_launch_less(keep: bool, kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    core, names, results = draw_for({}), [], []
    for so in (True, False):
        force(monkeypatch, kept=so, others=so)
        kernel.launches.clear()
        results.append(launch.forward(core, output_final_state=True, keep=keep))
        names.append([x.name for x in kernel.launches])
    assert names == [["forward"], ["matrices", "forward"]]
    (o, last, kept), (expected_o, expected_last, _) = results
    assert torch.equal(o, expected_o) and last is not None and torch.equal(last, expected_last)
    assert (kept is not None) == keep


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("kept", [False, True])
def test_calls_for_a_backward_and_others_have_their_own_rule(
    kept: bool, packed: bool, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    force(monkeypatch, kept=kept, others=not kept)
    core = draw_for({"packed": packed}, tokens=70)
    launches = {True: ["forward"], False: ["matrices", "forward"]}
    check(core, keep=False)
    # the second one is the backward's
    assert forwards(kernel) == launches[not kept] + launches[kept]
    kernel.launches.clear()
    check(core)
    assert forwards(kernel) == launches[kept]


@pytest.mark.parametrize("options", CALLS, ids=str)
@pytest.mark.parametrize("keep", [False, True], ids=["alone", "kept"])
def test_regions_do_not_overlap(keep: bool, options: dict[str, Any], kernel: Kernel) -> None:
    """What the walk keeps has its own places."""
    launch.forward(draw_for(options), output_final_state=True, keep=keep)
    regions = sorted(x for x in kernel.regions if x[0] >> ADDRESS_BITS)
    for (at, end), (following, _) in pairwise(regions):
        assert end <= following, (at, end, following)


@pytest.mark.parametrize("keep", [False, True], ids=["alone", "kept"])
def test_a_prepared_forward(keep: bool, kernel: Kernel) -> None:
    """It serves tensors that begin anywhere."""
    core, options = draw_for({}, tokens=70), {"output_final_state": True, "keep": keep}
    prepared = launch.prepare(core, **options)
    odd = core._replace(**{name: at_odd_address(getattr(core, name)) for name in ("k", "v", "initial_state")})
    results = [prepared(*one[:9]) for one in (core, odd, core)]
    assert forwards(kernel) == ["forward"] * 3
    for o, last, kept in results:
        assert torch.equal(o, results[0][0]) and torch.equal(last, results[0][1])
        assert (kept is not None) == keep


def test_raw_inputs(kernel: Kernel) -> None:
    """The walk reads what another launch has made of them."""
    core = raw(draw_for({}, tokens=70), True, True, True)
    o, last, kept = launch.forward(core, output_final_state=True, keep=True)
    assert [x.name for x in kernel.launches] == ["inputs", "forward"]
    kernel.launches.clear()
    launch.backward(core, kept, *cotangents(o, last), needs_gates=True)
    assert "matrices" not in {x.name for x in kernel.launches}


def test_makers_and_splits_come_first(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """No walk that is split, or has makers beside it, makes the matrices."""
    monkeypatch.setattr(call, "multiprocessors", lambda device: 132)
    check(draw_for({}, tokens=70))
    assert forwards(kernel) == ["forward"] and not kernel.launches[0].makes_matrices
    assert kernel.launches[0].makers > 0
    kernel.launches.clear()
    forget_calls()
    monkeypatch.setattr(call, "multiprocessors", lambda device: 1)
    split_into(monkeypatch, 1)
    check(draw_for({}))
    assert forwards(kernel) == ["matrices", "forward"]
