"""What the registered ops of the delta rule keep of a forward for its backward, with stand-ins as kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import AotEagerAndRecordGraphs
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from tfla_tk import chunk_gated_delta_rule, reference
from tfla_tk.core.layout import Kept
from tfla_tk.ops import delta_rule as ops

from .delta_rule import LAUNCH, draw, serve_by
from .linear import LAYOUT, Kernels, assert_same, gradients, leaves
from .served import Operators

PLAIN = ["forward, kept", "backward, kept"]


class KeepingKernels(Kernels):
    """Kernels that say how they lay out what they keep, which the ops then return.

    Attributes:
        split: a part of the layout.
    """

    split = 4

    def kept_layout(self, core: Any) -> tuple[int, ...]:
        return self.left.numel(), self.split

    def forward(
        self, core: Any, *, output_final_state: bool, keep: bool
    ) -> tuple[Tensor, Tensor | None, Kept | None]:
        o, last, kept = super().forward(core, output_final_state=output_final_state, keep=keep)
        return o, last, kept and Kept((self.left.to(core.v.dtype),), self.kept_layout(core))

    def backward(self, core: Any, kept: Kept | None, do: Tensor, dht: Any, *, needs_gates: bool) -> Any:
        if kept is not None and kept.layout == self.kept_layout(core):
            assert torch.equal(*kept.tensors, self.left.to(core.v.dtype))
            kept = Kept((self.left, None), LAYOUT)
        else:
            kept = None
        return super().backward(core, kept, do, dht, needs_gates=needs_gates)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[KeepingKernels]:
    """Those of the tk backend, which the ops call, too, as they do on a GPU."""
    module = KeepingKernels(ops.delta_rule, LAUNCH)
    serve_by(module, monkeypatch)
    keeping = ops.delta_rule.keeping
    assert keeping is not None
    monkeypatch.setattr(keeping, "_has_kernels", lambda q: True)
    of_cuda = {
        "delta_rule_fwd": ops.delta_rule._fwd_cuda,
        "delta_rule_bwd": ops.delta_rule._bwd_cuda,
        "delta_rule_fwd_kept": keeping._fwd_cuda,
        "delta_rule_bwd_kept": keeping._bwd_cuda,
    }
    with torch.library._scoped_library("tfla_tk", "IMPL") as library:
        for name, function in of_cuda.items():
            library.impl(name, function, "CPU", allow_override=True)
        yield module
    torch._dynamo.reset()


def expected_of(x: dict[str, Any]) -> dict[str, Tensor]:
    return gradients(reference.gated_delta_rule_recurrent, x)


def test_compiled_training_runs_the_forward_once(kernels: KeepingKernels) -> None:
    recorded = AotEagerAndRecordGraphs()
    x = draw()
    compiled = torch.compile(chunk_gated_delta_rule, backend=recorded, fullgraph=True)
    kernels.calls.clear()
    found = gradients(compiled, x)
    assert kernels.calls == PLAIN
    assert_same(found, expected_of(x))
    forward, backward = (graphs[0].code for graphs in (recorded.fw_graphs, recorded.bw_graphs))
    assert "delta_rule_fwd_kept" in forward and "delta_rule_bwd_kept" in backward
    assert "delta_rule_fwd" not in backward


def test_a_compiled_backward_of_another_split_makes_the_forward_again(kernels: KeepingKernels) -> None:
    """What they keep has the same size."""
    x = leaves(draw())
    o, _ = torch.compile(chunk_gated_delta_rule, backend="aot_eager", fullgraph=True)(**x)
    kernels.split += 1
    kernels.calls.clear()
    found = torch.autograd.grad(o.square().sum(), list(x.values()))
    assert kernels.calls == ["backward"]
    expected = torch.autograd.grad(chunk_gated_delta_rule(**x)[0].square().sum(), list(x.values()))
    assert all(torch.allclose(a, b) for a, b in zip(found, expected, strict=True))


def test_sizes_as_symbols_keep_nothing(kernels: KeepingKernels) -> None:
    compiled = torch.compile(chunk_gated_delta_rule, backend="aot_eager", fullgraph=True, dynamic=True)
    for seq in (40, 56):
        x = draw(seq=seq)
        kernels.calls.clear()
        assert_same(gradients(compiled, x), expected_of(x))
        assert kernels.calls == ["forward", "backward"]


def test_a_checkpoint_around_what_is_compiled(kernels: KeepingKernels) -> None:
    """Nothing is kept: between a call and its recomputation another length may make its graph one of sizes
    as symbols, which would save otherwise."""
    compiled = torch.compile(chunk_gated_delta_rule, backend="aot_eager", fullgraph=True)
    calls = [leaves(draw(seq=seq)) for seq in (40, 56)]
    outputs = [checkpoint(lambda x=x: compiled(**x)[0], use_reentrant=False) for x in calls]
    for x, o in zip(calls, outputs, strict=True):
        found = torch.autograd.grad(o.square().sum(), list(x.values()))
        expected = torch.autograd.grad(chunk_gated_delta_rule(**x)[0].square().sum(), list(x.values()))
        for actual, want in zip(found, expected, strict=True):
            torch.testing.assert_close(actual, want)


def test_a_traced_training_step(kernels: KeepingKernels) -> None:
    x = leaves(draw())
    names = ("q", "k", "v", "g", "beta")

    def step(*tensors: Tensor) -> tuple[Tensor, ...]:
        o, _ = chunk_gated_delta_rule(**dict(zip(names, tensors, strict=True)))
        return torch.autograd.grad(o.square().sum(), tensors)

    given = [x[name] for name in names]
    traced = make_fx(step)(*given)
    assert "delta_rule_bwd_kept" in traced.code
    for actual, want in zip(traced(*given), step(*given), strict=True):
        torch.testing.assert_close(actual, want)


@pytest.mark.parametrize("layout", [(5, 4), (3, 8)], ids=["size", "split"])
def test_a_graph_of_other_kernels(layout: tuple[int, ...], kernels: KeepingKernels) -> None:
    """From a cache on disk: what it keeps has the size that the graph has, and the backward does not read
    it."""
    x = draw()
    inputs = *(x[name] for name in ("q", "k", "v", "g", "beta")), None, None, None, None
    options = 0.25, *[False] * 4
    found = torch.ops.tfla_tk.delta_rule_fwd_kept(*inputs, *options, True, layout)
    assert found[2].shape == layout[:1]
    given = torch.ones_like(found[0]), None
    kernels.calls.clear()
    torch.ops.tfla_tk.delta_rule_bwd_kept(*inputs, *given, found[2], layout, *options, True)
    assert kernels.calls == ["backward"]
    x["initial_state"] = None
    expected = chunk_gated_delta_rule(**x, scale=0.25, output_final_state=True)
    for actual, want in zip(found[:2], expected, strict=True):
        torch.testing.assert_close(actual, want)


@pytest.mark.parametrize("watched", ["neither", "forward", "backward", "both"])
def test_checkpointing(kernels: KeepingKernels, watched: str) -> None:
    """The backward reads what the recomputation keeps; both save alike, watched or not."""
    x = leaves(draw())
    expected = torch.autograd.grad(chunk_gated_delta_rule(**x)[0].square().sum(), list(x.values()))
    kernels.calls.clear()

    def maybe(where: str) -> Any:
        return Operators() if watched in (where, "both") else torch.enable_grad()

    with maybe("forward"):
        o, _ = checkpoint(lambda: chunk_gated_delta_rule(**x), use_reentrant=False)
        loss = o.square().sum()
    with maybe("backward"):
        found = torch.autograd.grad(loss, list(x.values()))
    assert kernels.calls == ["forward, kept", *PLAIN]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("watched", [False, True])
def test_hooks_that_may_move_what_is_saved(kernels: KeepingKernels, watched: bool) -> None:
    """To make it again is faster than to move it."""
    x = draw()
    expected = gradients(chunk_gated_delta_rule, x)
    kernels.calls.clear()
    with torch.autograd.graph.save_on_cpu(), Operators() if watched else torch.enable_grad():
        found = gradients(chunk_gated_delta_rule, x)
    assert kernels.calls == ["forward", "backward"]
    assert_same(found, expected)


def test_transforms_keep_nothing(kernels: KeepingKernels) -> None:
    x = draw()

    def run(q: Tensor) -> Tensor:
        return chunk_gated_delta_rule(**x | {"q": q})[0].square().sum()

    q = torch.stack([x["q"], -x["q"]])
    found = torch.func.vmap(torch.func.grad(run))(q)
    assert kernels.calls == ["forward", "backward"]
    for j in range(2):
        alone = q[j].clone().requires_grad_()
        torch.testing.assert_close(found[j], *torch.autograd.grad(run(alone), alone))


def test_a_batch_of_cotangents(kernels: KeepingKernels) -> None:
    """What is kept is of one call, so one backward of several cotangents makes the forward again."""
    x = leaves(draw())
    o, _ = chunk_gated_delta_rule(**x)

    def dq_of(cotangent: Tensor) -> Tensor:
        (dq,) = torch.autograd.grad(o, x["q"], cotangent, retain_graph=True)
        return dq

    cotangents = torch.stack([torch.ones_like(o), -2 * torch.ones_like(o)])
    kernels.calls.clear()
    found = torch.func.vmap(dq_of)(cotangents)
    assert kernels.calls == ["backward"]
    assert torch.allclose(found, torch.stack([dq_of(x) for x in cotangents]))


@pytest.mark.parametrize("packed", [False, True])
def test_opcheck(packed: bool) -> None:
    x = draw(batch=1 if packed else 2, seq=20, rows=3 if packed else None, dtype=torch.float32)
    offsets = torch.tensor([0, 5, 5, 20]) if packed else None
    inputs = *(x[name] for name in ("q", "k", "v", "g", "beta")), None, None, x["initial_state"], offsets
    options = (0.25, False, False, False, False)
    registered = torch.ops.tfla_tk
    layout = (7, 4, 1)
    torch.library.opcheck(registered.delta_rule_fwd_kept, (*inputs, *options, True, layout))
    o, state, kept = registered.delta_rule_fwd_kept(*inputs, *options, True, layout)
    assert kept.shape == layout[:1]
    given = torch.randn_like(o), torch.randn_like(state), kept, layout
    torch.library.opcheck(registered.delta_rule_bwd_kept, (*inputs, *given, *options, True))


def test_the_forward_that_keeps_has_no_gradients() -> None:
    x = leaves(draw(seq=10))
    inputs = *(x[name] for name in ("q", "k", "v", "g", "beta")), None, None, None, None
    o, *_ = torch.ops.tfla_tk.delta_rule_fwd_kept(*inputs, 0.25, *[False] * 4, True, [0])
    with pytest.raises(RuntimeError, match=r"delta_rule_fwd_kept records nothing; delta_rule_fwd does"):
        o.sum().backward()
