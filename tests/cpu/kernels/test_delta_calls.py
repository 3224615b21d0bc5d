"""The delta rule on the tk backend: what its calls alone have."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.pairs import pairwise
from tfla_tk import chunk_gated_delta_rule
from tfla_tk.backends.tk.delta_rule import call
from tfla_tk.backends.tk.delta_rule.call import Shape

from .calls import FLAGS, MODULES, OPS, Op, assert_equal, check, draw, forget_calls, raw, results
from .stand_in import Kernels, pretend_a_gpu


@pytest.fixture
def op() -> Op:
    return OPS["delta"]


# Who makes the chunk matrices

MAKERS = {"makers": 132, "a launch before": 1, "the walk": 1}


def have_them_made_by(monkeypatch: pytest.MonkeyPatch, who: str) -> None:
    pretend_a_gpu(monkeypatch, *MODULES, multiprocessors=MAKERS[who], memory_rate=1.0)
    monkeypatch.setattr(Shape, "walk_makes_matrices", who == "the walk")
    forget_calls()


@pytest.mark.parametrize("who", MAKERS)
@pytest.mark.parametrize("dims", [(96, 128), (80, 208), (112, 80)], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("group", [1, 3])
def test_who_makes_the_chunk_matrices(
    who: str, dims: Any, packed: bool, group: int, op: Op, kernels: Kernels, monkeypatch: Any
) -> None:
    """The backward reads those of its forward."""
    have_them_made_by(monkeypatch, who)
    x = draw(op, dims, packed=packed, group=group)
    check(op, x)
    before = ["matrices"] * (who == "a launch before")
    assert kernels.names()[: 1 + len(before)] == [*before, "forward"]
    with torch.no_grad():  # nothing is kept
        expected, _ = chunk_gated_delta_rule(**x, backend="tk")
    assert kernels.names() == [*before, "forward"]
    assert_equal({"o": expected}, {"o": results(op, x)["output 0"]})


# Splits


def test_calls_for_a_backward_alone_are_split(
    op: Op, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = property(lambda self: self.cut_into(1) if self.trains else None)
    monkeypatch.setattr(Shape, "split", split)
    x = draw(op)
    check(op, x)
    assert {"leads", "maps", "carry", "mirror"} < {*kernels.names()}
    with torch.no_grad():
        chunk_gated_delta_rule(**x, backend="tk")
    assert kernels.names() == ["forward"]


# Heads that share one of q and k


@pytest.mark.parametrize("group", [2, 4, 5, 8])
@pytest.mark.parametrize("dims", [(144, 16), (144, 144), (80, 136)], ids=str)
def test_heads_of_a_group_add_up_their_results(dims: Any, group: int, op: Op, kernels: Kernels) -> None:
    """In the walks over the states, as many as take turns; of larger groups parts are added up."""
    check(op, draw(op, dims, group=group, tokens=70))
    for x in kernels.launches:
        if x.name in ("left", "right"):
            assert x.shared * -(-dims[1] // 128) <= call.MOST_TURNS


# Raw inputs


@pytest.mark.parametrize(
    ("norm", "sigmoid", "twice", "decay", "packed", "group"),
    pairwise(*[(False, True)] * 5, (1, 3), where=lambda *x: any(x[:4]) and (x[1] or not x[2])),
)
def test_raw_inputs(
    norm: bool, sigmoid: bool, twice: bool, decay: bool, packed: bool, group: int, op: Op, kernels: Kernels
) -> None:
    flags = dict(zip(FLAGS, (norm, sigmoid, twice, decay), strict=True))
    x = raw(draw(op, (48, 32), packed=packed, group=group), flags)
    x["beta"] = x["beta"].bfloat16()
    check(op, x, tolerance=2e-2, **flags)
    names = kernels.names()
    assert names.count("inputs") == 2 and names[0] == "inputs" and names[-1] == "inputs_backward"


@pytest.mark.parametrize("layout", ["unaligned", "turned"])
def test_raw_inputs_of_any_layout(layout: str, op: Op, kernels: Kernels) -> None:
    """Also without a bias, and without gradients of gates."""
    flags = dict.fromkeys(FLAGS, True)
    x = raw(draw(op, (48, 32)), flags, ("A_log", "dt_bias") if layout == "turned" else ("A_log",))
    if layout == "unaligned":
        x["q"] = torch.cat([x["q"], x["q"][..., :1]], -1)[..., :-1]
    else:
        x |= {name: x[name].transpose(1, 3).contiguous().transpose(1, 3) for name in ("k", "v")}
        x |= {name: x[name].mT.contiguous().mT for name in op.gates}
    check(op, x, tolerance=2e-2, **flags)
    check(op, x, ("g", "beta", "A_log", "dt_bias"), tolerance=2e-2, **flags)
