"""KDA on the tk backend: what its calls alone have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.pairs import pairwise
from tfla_tk import UnsupportedError, build, chunk_kda
from tfla_tk.backends.tk import kda as tk_kda
from tfla_tk.core import dispatch

from .calls import FLAGS, MODULES, OPS, Op, Tensors, assert_close, assert_equal, check, draw, raw, results
from .kda import KDA
from .stand_in import pretend_a_gpu
from .test_kept import KDA as OF_KDA

# what makes the log decay of g, and the lower bound
GATES = {"given": ((), None), "softplus": (("A_log", "dt_bias"), None), "no bias": (("A_log",), None)}
GATES |= {"bounded": (("A_log", "dt_bias"), -5.0), "no rate": (("dt_bias",), -5.0), "bound alone": ((), -5.0)}


@pytest.fixture
def op() -> Op:
    return OPS["kda"]


# Raw inputs


@pytest.mark.parametrize(
    ("norm", "sigmoid", "twice", "gate", "packed", "group", "dims", "of_gates"),
    pairwise(
        *[(False, True)] * 3,
        tuple(GATES),
        *((False, True), (1, 3), ((64, 48), (40, 24), (80, 72)), (torch.float32, torch.bfloat16)),
        where=lambda *x: x[1] or not x[2],
    ),
)
def test_raw_inputs(
    norm: bool,
    sigmoid: bool,
    twice: bool,
    gate: str,
    packed: bool,
    group: int,
    dims: tuple[int, int],
    of_gates: torch.dtype,
    op: Op,
    kernels: KDA,
) -> None:
    """Also of head dims that are padded, dt_bias with them."""
    parameters, lower_bound = GATES[gate]
    flags: dict[str, Any] = dict(zip(FLAGS[:3], (norm, sigmoid, twice), strict=True))
    flags |= {"use_gate_in_kernel": gate != "given", "lower_bound": lower_bound}
    x = raw(draw(op, dims, packed=packed, group=group, of_gates=of_gates), flags, parameters)
    check(op, x, **flags)
    names = ["matrices", "forward", "mirror", "gradients", *["combine"] * (group > 1)]
    assert kernels.names() == names


def test_gates_without_gradients(op: Op, kernels: KDA) -> None:
    """And what makes them."""
    flags = dict.fromkeys(FLAGS, True)
    x = raw(draw(op), flags)
    check(op, x, ("g", "A_log", "dt_bias"), **flags)
    assert (kernels.launches[-1].of_bias, kernels.launches[-1].of_rate) == (0, 0)


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_states_with_v_first(packed: bool, op: Op, kernels: KDA) -> None:
    x = draw(op, packed=packed)
    turned = x | {"initial_state": x["initial_state"].mT.contiguous()}
    check(op, turned, state_v_first=True)
    check(op, turned | {"initial_state": x["initial_state"].mT}, state_v_first=True)


# What the kernels take


def verdict_of(x: Tensors, **options: Any) -> Any:
    return tk_kda.supports_kda(dispatch.describe("chunk_kda", **x, **options)[2])


def test_v_of_more_than_the_backward_takes(op: Op, kernels: KDA) -> None:
    """Without gradients V may be larger."""
    wide = replace(op, most=(128, 512))
    x = draw(wide, (64, 192))
    with torch.no_grad():
        o, last = chunk_kda(**x, output_final_state=True, backend="tk")
        exact = {name: t.double() for name, t in x.items()}
        of_reference = chunk_kda(**exact, output_final_state=True, backend="reference")
    assert_close({"o": o, "last": last}, dict(zip(("o", "last"), of_reference, strict=True)), 1e-2)
    assert verdict_of(x).ok
    with pytest.raises(UnsupportedError, match="V = 192, of a call with gradients the kernels take 128"):
        results(wide, x)
    core = OF_KDA.core_of(x)
    with pytest.raises(UnsupportedError, match="V = 192"):
        tk_kda.forward(core, output_final_state=False, keep=True)
    with pytest.raises(UnsupportedError, match="V = 192"):
        OF_KDA.backward(core, None)


def test_states_between_chunks_are_refused(op: Op, kernels: KDA) -> None:
    """ "auto" goes on to the next backend."""
    x, options = draw(op), {"return_intermediate_states": True}
    with torch.inference_mode():
        with pytest.raises(UnsupportedError, match="states between chunks"):
            chunk_kda(**x, **options, backend="tk")
        expected = chunk_kda(**x, **options, backend="reference")
        found = chunk_kda(**x, **options)
    assert kernels.names() == []
    assert_equal({"o": found[0], "states": found[2]}, {"o": expected[0], "states": expected[2]})


def test_more_channels_than_the_kernels_have(op: Op, kernels: KDA) -> None:
    x = draw(replace(op, most=(256, 512)), (144, 64))
    assert "K = 144" in verdict_of(x).reason and not verdict_of(x).ok


def test_what_adds_up_heads_is_loaded_before(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a launcher of its own, in training alone."""
    pretend_a_gpu(monkeypatch, *MODULES)
    loaded: list[str] = []
    monkeypatch.setattr(build, "load", lambda launcher, *kernels: loaded.append(launcher.name))
    for group, trains, expected in (
        (1, True, ["kda"]),
        (3, True, ["kda", "delta_rule"]),
        (3, False, ["kda"]),
    ):
        x = {name: t.requires_grad_(trains) for name, t in draw(op, group=group).items()}
        assert tk_kda.load(dispatch.describe("chunk_kda", **x)[2]).ok
        assert loaded == expected
        loaded.clear()
