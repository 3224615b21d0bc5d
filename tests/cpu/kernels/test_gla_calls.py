"""GLA on the tk backend: what its calls alone have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tfla_tk.backends.tk import segments
from tfla_tk.backends.tk.channel_gate import call as support
from tfla_tk.backends.tk.channel_gate import launch
from tfla_tk.calls.linear import GLACore
from tfla_tk.core.layout import Cut
from tfla_tk.core.support import SUPPORTED

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
    *_, kept = launch.forward(core, output_final_state=False, keep=True)
    do, dht = torch.ones_like(core.v), torch.ones_like(core.initial_state)
    expected = launch.backward(core, None, do, dht, needs_gates=True)
    walks = ["mirror", "left", "right"]
    assert kernels.names() == ["segments", "forward", "segments", "segments", *walks]
    monkeypatch.setattr(segments, "cut", lambda *_: Cut(B, 3))
    found = launch.backward(core, kept, do, dht, needs_gates=True)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)
    assert kernels.launches[-1].shape[4] == 1 and kernels.names() == ["segments", *walks]


def test_nothing_is_kept_of_whole_sequences(op: Op, kernels: Kernels) -> None:
    assert launch.forward(core_of(draw(op)), output_final_state=True, keep=True)[2] is None


@pytest.mark.parametrize("dims", [(64, 272), (144, 512)], ids=str)
@pytest.mark.parametrize("of_gates", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("state", [False, True], ids=["zeros", "states"])
@pytest.mark.parametrize("without", [(), ("g",), ("last",)], ids=str)
def test_slices_of_v_without_states_or_gates(
    dims: Any, of_gates: torch.dtype, state: bool, without: tuple[str, ...], op: Op, kernels: Kernels
) -> None:
    check(op, draw(op, dims, of_gates=of_gates, state=state, tokens=70), without)


# Which head dims are served


def described(dims: tuple[int, int], requires_grad: bool) -> Any:
    sizes = {"dim_qk": dims[0], "dim_v": dims[1], "heads": 2, "value_heads": 2, "sequences": 3}
    return SimpleNamespace(
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        requires_grad=requires_grad,
        goes_by_token=lambda most: False,
        **sizes,
    )


@pytest.mark.parametrize("dims", [(256, 512), (144, 272), (100, 250)], ids=str)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_gradients_are_served_for_all_heads_of_the_forward(
    dims: tuple[int, int], requires_grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(support.device, "device_fault", lambda index: ("", ""))
    monkeypatch.setattr(support.device, "supports", lambda *of: asked.append(of) or SUPPORTED)
    assert support.supports_gla(described(dims, requires_grad)).ok
    ((_, kernels_of, *key),) = asked
    assert len(kernels_of(*key)[1]) == (4 if requires_grad else 1)


@pytest.mark.parametrize("dims", [(272, 64), (64, 528), (257, 64)], ids=str)
def test_other_head_dims_are_refused(dims: tuple[int, int]) -> None:
    verdict = support.supports_gla(described(dims, requires_grad=True))
    assert not verdict.ok and f"K = {dims[0]}, V = {dims[1]}" in verdict.reason
