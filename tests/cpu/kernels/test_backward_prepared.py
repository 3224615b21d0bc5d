"""What the backward prepares once for calls that are alike, and which calls are not; no GPU is touched."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from tfla_tk.backends.tk import segments
from tfla_tk.backends.tk.scalar_gate import backward as tk_backward
from tfla_tk.core.layout import KeptStates

from .backward_launches import NAMES, NH, B, K, Launches, V, draw, named, operand, transposed


def test_what_is_prepared_serves_every_call_like_it(launches: Launches) -> None:
    """With its own addresses, on the stream of its time; and it holds no tensor."""
    first = draw("exp")
    references = [weakref.ref(x) for x in first if isinstance(x, Tensor)]
    tk_backward.mlstm_bwd(*first)
    del first
    gc.collect()
    assert not any(reference() is not None for reference in references)
    prepared = launches.prepared
    for stream in (7, 8):
        launches.clear()
        tk_backward._current_stream = lambda device, stream=stream: stream  # the fixture puts it back
        x = named(given := draw("exp"))
        dq, dk, dv, *_ = tk_backward.mlstm_bwd(*given)
        assert [launch.name for launch in launches] == ["scan", "dv", "factors", "dq", "dk", "gates"]
        assert {launch.stream for launch in launches} == {stream}
        (of_dq,), (of_dk,), (of_dv,) = map(launches.of, ("dq", "dk", "dv"))
        for launch, *tensors in ((of_dq, x.dh, x.v, x.k, dq), (of_dk, x.v, x.dh, x.q, dk)):
            found = launch.queries, launch.keys, launch.values, launch.out
            assert found == tuple(map(operand, tensors))
        assert (of_dv.out, of_dv.factor) == (operand(dv), operand(x.h))
        assert launches.of("scan")[0].i[0] == x.i.data_ptr()
        assert torch.equal(of_dq.entering_c, x.c_initial) and torch.equal(of_dk.entering_c, x.dc_last)
    assert launches.prepared == prepared


def test_calls_of_equal_sizes_share_a_plan(launches: Launches) -> None:
    given = draw("exp")
    for _ in range(2):
        tk_backward.mlstm_bwd(*given)
    assert len(launches.anchor_sizes) == 1
    tk_backward.mlstm_bwd(*draw("exp", packed=True))
    assert len(launches.anchor_sizes) == 2


def changed(given: tuple[Any, ...], **changes: Any) -> tuple[Any, ...]:
    """The arguments with these tensors in the place of theirs."""
    return *(changes.get(name, x) for name, x in zip(NAMES, given, strict=False)), *given[len(NAMES) :]


def test_calls_that_are_not_alike_are_prepared_anew(launches: Launches) -> None:
    """Everything that a launch has but addresses makes another one."""
    given = draw("exp")
    x = named(given)
    no_states = dict.fromkeys(("c_initial", "n_initial", "m_initial"))
    calls = [
        given,
        *(changed(given, **{name: transposed(getattr(x, name))}) for name in ("q", "k", "v", "h", "dh")),
        *(changed(given, **{name: transposed(getattr(x, name))}) for name in ("i", "f")),
        *(changed(given, **{name: getattr(x, name).bfloat16()}) for name in ("i", "f")),
        changed(given, **no_states),
        changed(given, dc_last=None),
        changed(given, dn_last=None),
        (*given[:-2], 1e-3, given[-1]),
        (*given[:-1], True),
        draw("sig"),
        draw("sig_unnormalised"),
        draw("exp", packed=True),
        draw("exp", dtype=torch.float16),
        draw("exp", dim_v=128),
    ]
    for count, call in enumerate(calls):
        tk_backward.mlstm_bwd(*call)
        assert len(tk_backward._backwards) == count + 1
    prepared = launches.prepared
    for call in calls:
        tk_backward.mlstm_bwd(*call)
    assert (len(tk_backward._backwards), launches.prepared) == (len(calls), prepared)


def starting_late(x: Tensor) -> Tensor:
    """One element later than where TMA or vector loads can take it."""
    memory = torch.empty(x.numel() + 1, dtype=x.dtype)
    return memory[1:].view(x.shape).copy_(x)


@pytest.mark.parametrize("name", ["q", "k", "v", "h", "dh", "c_initial", "n_initial", "dc_last", "dn_last"])
def test_addresses_are_looked_at_in_every_call(name: str, launches: Launches) -> None:
    """What lies odd is copied, in the one call; its gradient lies as it does."""
    given = draw("exp")
    for odd in (False, True, False):
        launches.clear()
        x = named(given if not odd else changed(given, **{name: starting_late(getattr(named(given), name))}))
        grads = tk_backward.mlstm_bwd(*vars(x).values(), *given[len(NAMES) :])
        (of_dq,), (of_dk,), (of_dv,) = map(launches.of, ("dq", "dk", "dv"))
        read = {
            "q": of_dk.values, "k": of_dq.values, "v": of_dq.keys, "h": of_dv.factor, "dh": of_dq.queries,
            "c_initial": (of_dq.entering[0],), "n_initial": (of_dq.entering[1],),
            "dc_last": (of_dk.entering[0],), "dn_last": (of_dk.entering[1],),
        }  # fmt: skip
        for each, (address, *_) in read.items():
            as_given = address == getattr(x, each).data_ptr()
            assert as_given == (not odd or each != name) and address % 16 == 0
        assert torch.equal(of_dq.entering_c, x.c_initial) and torch.equal(of_dk.entering_c, x.dc_last)
        for grad, like in zip(grads, given, strict=False):
            assert grad.stride() == like.stride()


def test_the_states_of_a_forward_are_taken_from_every_call(cut_every_chunk: None, launches: Launches) -> None:
    """Calls with them and without them are of two kinds."""
    given, slots = draw("exp"), B * NH * 2
    for kept in (True, False, True):
        launches.clear()
        workspace = torch.empty(slots * (4 + K * V + K + 1))
        states = KeptStates(workspace, segments.Cut(B * 3, 1), (16 * slots, 64 * slots))
        tk_backward.mlstm_bwd(*given, states if kept else None)
        (of_dq,) = launches.of("dq")
        at_states = of_dq.boundaries[0] == workspace.data_ptr() + 16 * slots
        assert at_states == kept and len(launches.of("segments_dq")) == (not kept)
