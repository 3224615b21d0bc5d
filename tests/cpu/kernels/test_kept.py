"""What a forward of the delta rule or of KDA keeps for its backward, on the tk backend."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tfla_tk.backends.tk import kda as tk_kda
from tfla_tk.backends.tk.delta_rule import launch as delta_launch
from tfla_tk.calls.delta_rule import DeltaRuleCore, KDACore
from tfla_tk.core.layout import CHUNK, Kept

from .calls import OPS, Op, Tensors, cut_into, draw
from .stand_in import Kernels, at_odd_address


class Family(NamedTuple):
    """core: type of a call's inputs. options: behind the scale."""

    op: Op
    launch: ModuleType
    core: Any
    options: tuple[Any, ...]
    registered: Any

    def core_of(self, x: Tensors) -> Any:
        return self.core(*(x.get(name) for name in self.core._fields[:9]), 0.3, *self.options)

    def forward(self, core: Any, *, keep: bool = True) -> Kept | None:
        kept: Kept | None = self.launch.forward(core, output_final_state=True, keep=keep)[2]
        return kept

    def backward(self, core: Any, kept: Kept | None) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)
        do = torch.randn(core.v.shape, generator=generator).to(core.v.dtype)
        return [x for x in self.launch.backward(core, kept, do, None, needs_gates=True) if x is not None]


OPTIONS = (False, False, False)
REGISTERED = torch.ops.tfla_tk
DELTA = Family(OPS["delta"], delta_launch, DeltaRuleCore, (*OPTIONS, False), REGISTERED.delta_rule_fwd_kept)
KDA = Family(OPS["kda"], tk_kda, KDACore, (*OPTIONS, None, False), REGISTERED.kda_fwd_kept)


@pytest.fixture(params=[DELTA, KDA], ids=["delta", "kda"])
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


@pytest.fixture
def op(family: Family) -> Op:
    return family.op


def test_what_is_kept(family: Family, op: Op, kernels: Kernels) -> None:
    """A forward that does not train keeps nothing. What is of another size or layout is made again."""
    core = family.core_of(draw(op))
    assert family.forward(core, keep=False) is None
    kept = family.forward(core)
    assert kept is not None and kept.layout == family.launch.kept_layout(core)
    kernels.launches.clear()
    expected, (size, *others) = family.backward(core, kept), kept.layout
    assert "forward" not in kernels.names()
    left = torch.full((size - 128,), torch.nan).bfloat16()
    for other in (None, Kept((left,), (size - 128, *others)), Kept((left,), kept.layout)):
        assert all(map(torch.equal, family.backward(core, other), expected))
        assert "forward" in kernels.names()


@pytest.mark.parametrize(
    "move", [at_odd_address, lambda t: t.repeat_interleave(2)[::2]], ids=["odd", "strided"]
)
def test_what_is_kept_may_lie_elsewhere(move: Any, family: Family, op: Op, kernels: Kernels) -> None:
    """Where torch.compile or a hook on saved tensors has put it."""
    core = family.core_of(draw(op))
    kept = family.forward(core)
    assert kept is not None
    moved = kept._replace(tensors=(move(kept.tensors[0]),))
    assert all(map(torch.equal, family.backward(core, moved), family.backward(core, kept)))


def test_the_layout_of_what_is_kept_is_known_of_fake_tensors(
    family: Family, op: Op, kernels: Kernels
) -> None:
    """Of a GPU, on any machine: what torch.compile asks."""
    core = family.core_of(draw(op, (128, 128), group=2, packed=True))
    with FakeTensorMode():
        fake = [None if x is None else torch.empty(x.shape, dtype=x.dtype, device="cuda:0") for x in core[:9]]
        layout = family.launch.kept_layout(family.core._make((*fake, *core[9:])))
        *_, kept = family.registered(*fake, *core[9:], True, layout)
    assert layout == family.launch.kept_layout(core) and kept.shape == layout[:1]
    assert kept.device.type == "cuda" and kept.dtype == core.v.dtype


@pytest.mark.parametrize("family", [DELTA], ids=["delta"])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_what_is_kept_of_another_split_is_made_again(
    packed: bool, family: Family, op: Op, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same size: two segments of 3 and 2 chunks, then of 4 and 1. In a graph from torch's cache on
    disk, for example, which kernels of another version have made."""
    core, found = family.core_of(draw(op, tokens=5 * CHUNK, packed=packed)), []
    for chunks in (3, 4):
        cut_into(monkeypatch, chunks)
        found.append(family.forward(core))
    of_other, of_own = found
    assert of_other.layout[0] == of_own.layout[0]
    expected = family.backward(core, of_own)
    kernels.launches.clear()
    assert all(map(torch.equal, family.backward(core, of_other), expected))
    assert kernels.names().count("forward") == 1


@pytest.mark.parametrize("family", [DELTA], ids=["delta"])
def test_no_gate_at_all(family: Family, op: Op, kernels: Kernels) -> None:
    """As `chunk_delta_rule` has none."""
    core = family.core_of(draw(op))
    of_zeros = family.backward(core._replace(g=torch.zeros_like(core.beta)), None)
    expected = *of_zeros[:3], *of_zeros[4:]
    assert all(map(torch.equal, family.backward(core._replace(g=None), None), expected))
