"""The registered ops of chunk_simple_gla: opcheck, compiled, exported, without data, under vmap, counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tfla_tk import (
    chunk_simple_gla,
    reference,
)

from .linear import assert_same, gradients, leaves
from .simple_gla_calls import Kernels, draw


def op_arguments(packed: bool, gate: str, with_state: bool, last: bool) -> tuple[Any, ...]:
    x = draw(batch=1 if packed else 2, seq=20, rows=3 if packed else None, dtype=torch.float32)
    offsets = torch.tensor([0, 5, 5, 20]) if packed else None
    g = {"token": x["g"], "none": None}.get(gate)
    x = leaves({name: x[name] for name in ("q", "k", "v", "initial_state")}) | {"g": g}
    state = x["initial_state"] if with_state else None
    g = None if g is None else g.clone().requires_grad_()
    if gate == "head":
        g = reference.retention_log_decay(4).expand(x["v"].shape[:3])
    return x["q"], x["k"], x["v"], g, state, offsets, 0.25, last


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("gate", "with_state", "last"),
    [("token", True, True), ("token", False, False), ("none", True, False), ("head", False, True)],
)
def test_opcheck(packed: bool, gate: str, with_state: bool, last: bool) -> None:
    args = op_arguments(packed, gate, with_state, last)
    torch.library.opcheck(torch.ops.tfla_tk.simple_gla_fwd, args)
    torch.library.opcheck(torch.ops.tfla_tk.packed_simple_gla, (*args, "chunkwise", 16))
    detached = [x.detach() if isinstance(x, Tensor) else x for x in args[:6]]
    o, state = torch.ops.tfla_tk.simple_gla_fwd(*detached, 0.25, last)
    dht = torch.randn_like(state) if last else None
    rest = (torch.randn_like(o), dht, 0.25, gate == "token")
    torch.library.opcheck(torch.ops.tfla_tk.simple_gla_bwd, (*detached, state if last else None, *rest))
    torch.library.opcheck(torch.ops.tfla_tk.packed_simple_gla_bwd, (*detached, *rest, 16))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("backend", ["reference", "tk"])
def test_compile(kernels: Kernels, packed: bool, backend: str) -> None:
    x = draw(batch=1, rows=3 if packed else 1)
    options: dict[str, Any] = {"cu_seqlens": torch.tensor([0, 5, 5, 40])} if packed else {}
    expected = gradients(reference.simple_gla_recurrent, x, **options)
    compiled = torch.compile(chunk_simple_gla, backend="aot_eager", fullgraph=True)
    assert_same(gradients(compiled, x, **options, backend=backend), expected)
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "tk"])
def test_compile_with_sizes_as_symbols(kernels: Kernels, backend: str) -> None:
    """Tokens, heads, groups, head dims and the scale: one graph serves another size."""
    compiled = torch.compile(chunk_simple_gla, backend="aot_eager", fullgraph=True, dynamic=True)
    for seq, heads, dims, scale in ((40, (2, 4), (16, 32), 0.3), (56, (3, 9), (24, 8), 0.7)):
        x = draw(seq=seq, heads=heads, dims=dims)
        expected = gradients(reference.simple_gla_recurrent, x, scale=scale)
        assert_same(gradients(compiled, x, scale=scale, backend=backend), expected)
    torch._dynamo.reset()


def test_export() -> None:
    """Packed sequences: the exported program reads the offsets when it runs."""

    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, cu_seqlens: Tensor) -> Tensor:
            return chunk_simple_gla(q, k, v, g, cu_seqlens=cu_seqlens, backend="reference")[0]

    x = [t for name, t in draw(batch=1).items() if name != "initial_state"]
    program = torch.export.export(Model(), (*x, torch.tensor([0, 7, 40]))).module()
    offsets = torch.tensor([0, 20, 40])
    torch.testing.assert_close(program(*x, offsets), Model()(*x, offsets))


def test_fake_and_meta_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = draw(batch=1, rows=2)
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(t) for name, t in x.items()}
        o, last = chunk_simple_gla(
            **fake, cu_seqlens=mode.from_tensor(torch.tensor([0, 5, 40])), output_final_state=True
        )
    assert o.shape == x["v"].shape and last.shape == x["initial_state"].shape
    meta = {name: t.to("meta") for name, t in x.items()}
    o, last = chunk_simple_gla(**meta, cu_seqlens=torch.zeros(3, device="meta", dtype=torch.int32))
    assert o.shape == x["v"].shape and o.device.type == "meta" and last is None


@pytest.mark.parametrize("packed", [False, True])
def test_vmap(kernels: Kernels, packed: bool) -> None:
    """One call over a batch of calls: results and gradients of each."""
    x = draw(batch=1, seq=20, rows=2 if packed else 1, dtype=torch.float64)
    offsets = torch.tensor([0, 5, 20]) if packed else None
    q = torch.stack([x["q"], 2 * x["q"], -x["q"]])
    g = torch.stack([x["g"], 2 * x["g"], 3 * x["g"]], dim=1)

    def run(q: Tensor, g: Tensor, state: Tensor) -> Tensor:
        o, last = chunk_simple_gla(
            q, x["k"], x["v"], g, initial_state=state, cu_seqlens=offsets, output_final_state=True
        )
        return o.square().sum() + last.sum()

    found = torch.func.vmap(torch.func.grad(run, argnums=(0, 1, 2)), (0, 1, None))(q, g, x["initial_state"])
    for j in range(3):
        alone = leaves({"q": q[j], "g": g[:, j], "state": x["initial_state"]})
        options: dict[str, Any] = {"cu_seqlens": offsets, "output_final_state": True}
        o, last = reference.simple_gla_recurrent(
            alone["q"], x["k"], x["v"], alone["g"], initial_state=alone["state"], **options
        )
        expected = torch.autograd.grad(o.square().sum() + last.sum(), list(alone.values()))
        for actual, want in zip(found, expected, strict=True):
            torch.testing.assert_close(actual[j], want)


def test_flops_of_the_backward(kernels: Kernels) -> None:
    x = leaves(draw())
    with FlopCounterMode(display=False) as counter:
        chunk_simple_gla(**x)[0].sum().backward()
    intra, state = (64 + 64) * (16 + 32), 16 * 32
    assert counter.get_total_flops() == 2 * 40 * 4 * (4 * intra + 14 * state)


def test_doctor_tells(kernels: Kernels) -> None:
    from tfla_tk import doctor

    for name in ("chunk_simple_gla", "chunk_retention", "chunk_lightning_attn"):
        for use in doctor._choices(name).values():
            assert use["backend"] == "tk", use
