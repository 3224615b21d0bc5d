"""The delta rule on the tk backend: what its calls alone have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.pairs import pairwise
from tfla_tk.backends.tk.delta_rule import call, launch
from tfla_tk.backends.tk.delta_rule.call import Shape
from tfla_tk.calls.delta_rule import DeltaRuleCore
from tfla_tk.core.layout import CHUNK, Kept

from .calls import MODULES, OPS, Op, Tensors, assert_equal, check, cut_into, draw, forget_calls, results
from .stand_in import Kernels, at_odd_address, pretend_a_gpu


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
        expected = results_of_forward(x)
    assert kernels.names() == [*before, "forward"]
    assert_equal({"o": expected[0]}, {"o": results(op, x)["output 0"]})


@pytest.mark.parametrize("trained", [False, True])
def test_calls_for_a_backward_have_their_own_rule(
    trained: bool, op: Op, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backward without what its forward kept makes such a forward again."""
    have_them_made_by(monkeypatch, "a launch before")
    monkeypatch.setattr(Shape, "walk_makes_matrices", property(lambda self: self.trains == trained))
    core = core_of(draw(op, (96, 128)))
    o, last, _ = launch.forward(core, output_final_state=True, keep=False)
    launch.backward(core, None, o, last, needs_gates=True)
    by_launch = ["matrices", "forward"]
    expected = [*by_launch, "forward"] if trained else ["forward", *by_launch]
    assert [name for name in kernels.names() if name in by_launch] == expected


def test_a_split_makes_its_matrices_before(op: Op, kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_a_gpu(monkeypatch, *MODULES, multiprocessors=1, memory_rate=1.0)
    cut_into(monkeypatch, 1)
    check(op, draw(op, (96, 128)))
    names = kernels.names()
    assert names[:5] == ["matrices", "leads", "maps", "carry", "forward"]


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
        results_of_forward(x)
    assert kernels.names() == ["forward"]


def test_a_forward_alone_asks_for_nothing_behind_its_segments(
    op: Op, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_into(monkeypatch, 1)
    with torch.no_grad():
        results_of_forward(draw(op))
    leads, maps = (next(x for x in kernels.launches if x.name == name) for name in ("leads", "maps"))
    assert not leads.both and maps.maps[0] == 0


def test_sequences_no_longer_than_a_segment_are_not_split(
    op: Op, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_into(monkeypatch, 1)
    check(op, draw(op, tokens=CHUNK))
    assert {*kernels.names()}.isdisjoint({"leads", "maps", "carry"})


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

FLAGS = ("use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "use_gate_in_kernel")


def raw(x: Tensors, flags: dict[str, bool], *, bias: bool = True) -> Tensors:
    """The inputs that such flags are for."""
    heads = x["v"].shape[2]
    if flags.get("use_qk_l2norm_in_kernel"):
        x |= {"q": 3 * x["q"], "k": 5 * x["k"]}
        x["k"][:, 3] = 0
    if flags.get("use_beta_sigmoid_in_kernel"):
        x["beta"] = (4 * x["beta"] - 2).bfloat16()
    if flags.get("use_gate_in_kernel"):
        x |= {"g": 4 * x["g"] + 2, "A_log": torch.linspace(-1, 0.5, heads)}
        if bias:
            x["dt_bias"] = torch.linspace(0.5, -2, 2 * heads)[::2].bfloat16()
    return x


@pytest.mark.parametrize(
    ("norm", "sigmoid", "twice", "decay", "packed", "group"),
    pairwise(*[(False, True)] * 5, (1, 3), where=lambda *x: any(x[:4]) and (x[1] or not x[2])),
)
def test_raw_inputs(
    norm: bool, sigmoid: bool, twice: bool, decay: bool, packed: bool, group: int, op: Op, kernels: Kernels
) -> None:
    flags = dict(zip(FLAGS, (norm, sigmoid, twice, decay), strict=True))
    x = raw(draw(op, (48, 32), packed=packed, group=group), flags)
    check(op, x, tolerance=2e-2, **flags)
    names = kernels.names()
    assert names.count("inputs") == 2 and names[0] == "inputs" and names[-1] == "inputs_backward"


@pytest.mark.parametrize("layout", ["unaligned", "turned"])
def test_raw_inputs_of_any_layout(layout: str, op: Op, kernels: Kernels) -> None:
    """Also without a bias, and without gradients of gates."""
    flags = dict.fromkeys(FLAGS, True)
    x = raw(draw(op, (48, 32)), flags, bias=layout == "turned")
    if layout == "unaligned":
        x["q"] = torch.cat([x["q"], x["q"][..., :1]], -1)[..., :-1]
    else:
        x |= {name: x[name].transpose(1, 3).contiguous().transpose(1, 3) for name in ("k", "v")}
        x |= {name: x[name].mT.contiguous().mT for name in op.gates}
    check(op, x, tolerance=2e-2, **flags)
    check(op, x, ("g", "beta", "A_log", "dt_bias"), tolerance=2e-2, **flags)


# What a forward keeps


def core_of(x: Tensors) -> DeltaRuleCore:
    inputs = [x.get(name) for name in DeltaRuleCore._fields[:9]]
    return DeltaRuleCore(*inputs, 0.3, False, False, False, False)


def results_of_forward(x: Tensors) -> Any:
    core = core_of(x)._replace(scale=x["q"].shape[-1] ** -0.5)
    return launch.forward(core, output_final_state=True, keep=False)


def backward(core: DeltaRuleCore, kept: Kept | None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    do = torch.randn(core.v.shape, generator=generator).to(core.v.dtype)
    return [x for x in launch.backward(core, kept, do, None, needs_gates=True) if x is not None]


@pytest.mark.parametrize(
    "move", [at_odd_address, lambda t: t.repeat_interleave(2)[::2]], ids=["odd", "strided"]
)
def test_what_is_kept_may_lie_elsewhere(move: Any, op: Op, kernels: Kernels) -> None:
    """Where torch.compile or a hook on saved tensors has put it."""
    core = core_of(draw(op))
    *_, kept = launch.forward(core, output_final_state=True, keep=True)
    moved = kept._replace(tensors=(move(kept.tensors[0]),))
    assert all(map(torch.equal, backward(core, moved), backward(core, kept)))


def test_what_is_kept_of_another_size_is_made_again(op: Op, kernels: Kernels) -> None:
    core = core_of(draw(op))
    *_, kept = launch.forward(core, output_final_state=True, keep=True)
    assert kept is not None and kept.layout == launch.kept_layout(core)
    expected, (size, *others) = backward(core, kept), kept.layout
    kernels.launches.clear()
    left = torch.full((size - 128,), torch.nan).bfloat16()
    for other in (None, Kept((left,), (size - 128, *others)), Kept((left,), kept.layout)):
        assert all(map(torch.equal, backward(core, other), expected))
        assert "forward" in kernels.names()


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_what_is_kept_of_another_split_is_made_again(
    packed: bool, op: Op, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same size: two segments of 3 and 2 chunks, then of 4 and 1. In a graph from torch's cache on
    disk, for example, which kernels of another version have made."""
    core, found = core_of(draw(op, tokens=5 * CHUNK, packed=packed)), []
    for chunks in (3, 4):
        cut_into(monkeypatch, chunks)
        found.append(launch.forward(core, output_final_state=True, keep=True)[2])
    of_other, of_own = found
    assert of_other.layout[0] == of_own.layout[0]
    expected = backward(core, of_own)
    kernels.launches.clear()
    assert all(map(torch.equal, backward(core, of_other), expected))
    assert kernels.names().count("forward") == 1


def test_the_layout_of_what_is_kept_is_known_of_fake_tensors(op: Op, kernels: Kernels) -> None:
    """Of a GPU, on any machine: what torch.compile asks."""
    core = core_of(draw(op, (128, 128), group=2, packed=True))
    with FakeTensorMode():
        fake = [None if x is None else torch.empty(x.shape, dtype=x.dtype, device="cuda:0") for x in core[:9]]
        layout = launch.kept_layout(DeltaRuleCore._make((*fake, *core[9:])))
        *_, kept = torch.ops.tfla_tk.delta_rule_fwd_kept(*fake, *core[9:], True, layout)
    assert layout == launch.kept_layout(core) and kept.shape == layout[:1]
    assert kept.device.type == "cuda" and kept.dtype == core.v.dtype


def test_no_gate_at_all(op: Op, kernels: Kernels) -> None:
    """As `chunk_delta_rule` has none."""
    core = core_of(draw(op))
    of_zeros = backward(core._replace(g=torch.zeros_like(core.beta)), None)
    expected = *of_zeros[:3], *of_zeros[4:]
    assert all(map(torch.equal, backward(core._replace(g=None), None), expected))
