"""GLA on the tk backend: what its calls alone have."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tfla_tk.backends.tk import channel_gate, segments
from tfla_tk.calls.linear import GLACore
from tfla_tk.core.layout import Cut

from .calls import OPS, B, Op, Tensors, check, cut_into, draw
from .stand_in import Kernels


@pytest.fixture
def op() -> Op:
    return OPS["gla"]


def core_of(x: Tensors, *, batch_invariant: bool = False) -> GLACore:
    return GLACore(x["q"], x["k"], x["v"], x["g"], x["initial_state"], None, 0.3, batch_invariant)


def test_a_backward_keeps_the_cut_of_its_forward(op: Op, kernels: Kernels, monkeypatch: Any) -> None:
    """And takes its states at the borders; without them it makes them again."""
    cut_into(monkeypatch, 1)
    core = core_of(draw(op))
    *_, kept = channel_gate.forward(core, output_final_state=False, keep=True)
    do, dht = torch.ones_like(core.v), torch.ones_like(core.initial_state)
    expected = channel_gate.backward(core, None, do, dht, needs_gates=True)
    walks = ["mirror", "left", "right"]
    assert kernels.names() == ["segments", "forward", "segments", "segments", *walks]
    monkeypatch.setattr(segments, "cut", lambda *_: Cut(B, 3))
    found = channel_gate.backward(core, kept, do, dht, needs_gates=True)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)
    assert kernels.launches[-1].shape[4] == 1 and kernels.names() == ["segments", *walks]


def test_nothing_is_kept_of_whole_sequences(op: Op, kernels: Kernels) -> None:
    assert channel_gate.forward(core_of(draw(op)), output_final_state=True, keep=True)[2] is None


@pytest.mark.parametrize("dims", [(64, 272), (144, 512)], ids=str)
@pytest.mark.parametrize("of_gates", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("state", [False, True], ids=["zeros", "states"])
@pytest.mark.parametrize("without", [(), ("g",), ("last",)], ids=str)
def test_slices_of_v_without_states_or_gates(
    dims: Any, of_gates: torch.dtype, state: bool, without: tuple[str, ...], op: Op, kernels: Kernels
) -> None:
    check(op, draw(op, dims, of_gates=of_gates, state=state, tokens=70), without)
