"""Packed sequences on the reference under torch.compile(fullgraph=True), torch.export and opcheck."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

from tfla_tk import mlstm_chunkwise, mlstm_siging_chunkwise

from .conftest import STATES, make_inputs

Inputs = dict[str, Tensor]
FUNCTIONS = [mlstm_chunkwise, mlstm_siging_chunkwise]


@pytest.fixture
def packed() -> Callable[..., Inputs]:
    """Inputs of three sequences in 90 tokens; q, k, v, i, f, c and n record gradients."""

    def make(dtype: torch.dtype = torch.float64, states: tuple[str, ...] = STATES) -> Inputs:
        inputs = make_inputs(1, seq=90, sequences=3, dtype=dtype, states=states)
        return {name: x.requires_grad_(name != "m_initial") for name, x in inputs.items()}

    return make


def offsets(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def flat(out: tuple[Tensor, tuple[Tensor, ...]]) -> list[Tensor]:
    return [out[0], *out[1]]


def gradients(out: tuple[Tensor, tuple[Tensor, ...]], inputs: Inputs) -> list[Tensor]:
    """Of a sum with fixed weights over h, c and n."""
    generator = torch.Generator().manual_seed(1)
    total = torch.zeros(())
    for x in flat(out)[:3]:
        if x.requires_grad:
            total = total + (x * torch.randn(x.shape, generator=generator, dtype=torch.float64)).sum()
    wanted = [x for x in inputs.values() if x.requires_grad]
    found = torch.autograd.grad(total, wanted, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, wanted, strict=True)]


@pytest.mark.parametrize(
    "backend, compiler",
    [
        ("auto", "eager"),
        ("auto", "aot_eager"),
        ("auto", "inductor"),
        ("reference:parallel", "aot_eager"),
        ("reference:recurrent", "aot_eager"),
    ],
)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_fullgraph(packed: Any, function: Any, backend: str, compiler: str) -> None:
    """Outputs and gradients are those of the eager call, for other offsets too, without another graph."""

    def call(cu_seqlens: Tensor, inputs: Inputs) -> Any:
        return function(**inputs, return_last_states=True, cu_seqlens=cu_seqlens, backend=backend)

    torch._dynamo.reset()
    graphs = CompileCounterWithBackend(compiler)
    compiled = torch.compile(call, fullgraph=True, backend=graphs)
    for cu_seqlens in (offsets(0, 20, 20, 90), offsets(0, 1, 64, 90)):
        inputs = packed()
        expected, found = call(cu_seqlens, inputs), compiled(cu_seqlens, inputs)
        torch.testing.assert_close(flat(found), flat(expected), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(
            gradients(found, inputs), gradients(expected, inputs), rtol=1e-8, atol=1e-8
        )
    assert graphs.frame_count == 1


def test_compiled_calls_refuse_offsets_that_do_not_fit(packed: Any) -> None:
    inputs = packed()
    torch._dynamo.reset()
    compiled = torch.compile(mlstm_chunkwise, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match="cu_seqlens: expected offsets rising from 0 to 90"):
        compiled(**inputs, cu_seqlens=offsets(0, 50, 20, 90))


class Packed(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, cu_seqlens: Tensor) -> Tensor:
        h = mlstm_chunkwise(q, k, v, i, f, cu_seqlens=cu_seqlens)
        assert isinstance(h, Tensor)
        return h


@pytest.mark.parametrize("strict", [False, True])
def test_export(packed: Any, strict: bool) -> None:
    tokens = tuple(x.detach() for x in packed(states=()).values())
    program = torch.export.export(Packed(), (*tokens, offsets(0, 20, 20, 90)), strict=strict).module()
    other = offsets(0, 30, 31, 90)
    torch.testing.assert_close(program(*tokens, other), Packed()(*tokens, other))


@pytest.mark.parametrize("dtypes", [("float64",) * 2, ("bfloat16", "float32"), ("float32", "float64")])
@pytest.mark.parametrize(("gate", "normalize"), [("exp", True), ("sig", True), ("sig", False)])
@pytest.mark.parametrize("states", [(), STATES])
def test_opcheck(packed: Any, states: tuple[str, ...], gate: str, normalize: bool, dtypes: Any) -> None:
    """With q, k, v of one dtype and all else of another."""
    own, other = (getattr(torch, name) for name in dtypes)
    inputs = {n: x.detach().to(own if n in "qkv" else other) for n, x in packed(states=states).items()}
    tensors = [inputs.get(name) for name in ("q", "k", "v", "i", "f", *STATES)]
    if gate == "sig":
        tensors[7] = None
    if not normalize:
        tensors[6] = None
    options = ("chunkwise", 64, gate == "sig", normalize, 1e-6)
    cu_seqlens = offsets(0, 20, 20, 90)
    leaves = [x if x is None or n == 7 else x.clone().requires_grad_() for n, x in enumerate(tensors)]
    opcheck(torch.ops.tfla_tk.packed_mlstm.default, (*leaves, cu_seqlens, *options))
    dh = torch.ones_like(inputs["v"])
    opcheck(torch.ops.tfla_tk.packed_mlstm_bwd.default, (*tensors, cu_seqlens, dh, None, None, *options))
