"""torch.cuda.make_graphed_callables on a module with mLSTM in it, forward and backward."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tfla_tk
from tfla_tk.backends.tk.scalar_gate import walks as tk_walks

from .accuracy import relative_error

WIDTH = 128
# batch, heads, tokens, head dims; the last ones are so long that the few heads are cut into segments
SHAPES = {"64_64": (2, 4, 300, (64, 64)), "128_256_cut": (1, 2, 8192, (128, 256))}
STATES = ("c", "n", "m")


class Layer(nn.Module):
    """Projections to q, k, v, i and f, and mLSTM; without a gate the values alone."""

    def __init__(self, gate: str | None, heads: int, dims: tuple[int, int]) -> None:
        super().__init__()
        self.gate, self.heads = gate, heads
        sizes = {"q": heads * dims[0], "k": heads * dims[0], "v": heads * dims[1], "i": heads, "f": heads}
        self.projections = nn.ModuleDict({name: nn.Linear(WIDTH, size) for name, size in sizes.items()})
        self.to("cuda", torch.bfloat16)

    def forward(self, x: Tensor, *state: Tensor) -> Tensor | tuple[Tensor, ...]:
        """h [B, S, heads, V] and, from an initial state, the last one."""
        projected = {name: layer(x) for name, layer in self.projections.items()}
        q, k, v = (projected[name].unflatten(-1, (self.heads, -1)).transpose(1, 2) for name in "qkv")
        i, f = (projected[name].transpose(1, 2).float() for name in "if")
        if self.gate is None:
            return (v * i[..., None].sigmoid() + (q * k).sum(-1, keepdim=True) * f[..., None]).to(v.dtype)
        function = tfla_tk.mlstm_chunkwise if self.gate == "exp" else tfla_tk.mlstm_siging_chunkwise
        initial = dict(zip((f"{name}_initial" for name in STATES), state, strict=False))
        out = function(q, k, v, i, f + 3, **initial, return_last_states=bool(state), backend="tk")
        return (out[0].transpose(1, 2), *out[1]) if state else out.transpose(1, 2)


def draw_inputs(layer: Layer, shape: tuple[Any, ...], states: bool, seed: int) -> tuple[Tensor, ...]:
    """Of a layer: tokens and, on request, the initial state, but for m with a gradient."""
    generator = torch.Generator("cuda").manual_seed(seed)
    batch, heads, seq, (dim_qk, dim_v) = shape

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device="cuda")

    x = normal(batch, seq, WIDTH).bfloat16().requires_grad_()
    if not states:
        return (x,)
    c, n = normal(batch, heads, dim_qk, dim_v).requires_grad_(), normal(batch, heads, dim_qk).requires_grad_()
    return (x, c, n, normal(batch, heads, 1)) if layer.gate == "exp" else (x, c, n)


def train(layer: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Outputs, and gradients of parameters and inputs, of fresh leaves."""
    inputs = tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in inputs)
    layer.zero_grad(set_to_none=True)
    out = layer(*inputs)
    outputs = out if isinstance(out, tuple) else (out,)
    # m, the last one of four, is a constant of the differentiation
    sum(t.float().square().mean() for t in outputs[:3]).backward()
    found = {f"output {number}": t.detach().clone() for number, t in enumerate(outputs)}
    found |= {f"input {number}": t.grad for number, t in enumerate(inputs) if t.requires_grad}
    found |= {name: p.grad.clone() for name, p in layer.named_parameters()}
    return found


@pytest.mark.parametrize("before", ["nothing", "a step"])
@pytest.mark.parametrize("states", [False, True], ids=["h", "states"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("gate", ["exp", "sig"])
def test_a_graphed_module_trains_like_an_eager_one(
    gate: str, shape: str, states: bool, before: str, new_calls: None
) -> None:
    """Whether no call like its own was made before, or the module has run forward and backward by then."""
    batch, heads, seq, dims = SHAPES[shape]
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    cut = tk_walks.cut_sequences((batch, heads, seq, *dims), batch, multiprocessors, packed=False)
    assert (cut.segments > batch) == shape.endswith("cut")
    torch.manual_seed(0)
    layer = Layer(gate, heads, dims)
    eager = copy.deepcopy(layer)
    if before == "a step":
        train(layer, draw_inputs(layer, SHAPES[shape], states, seed=0))
        layer.zero_grad(set_to_none=True)
        gc.collect()
    graphed = torch.cuda.make_graphed_callables(layer, draw_inputs(layer, SHAPES[shape], states, seed=1))
    for seed in (2, 3):
        inputs = draw_inputs(layer, SHAPES[shape], states, seed)
        found, expected = train(graphed, inputs), train(eager, inputs)
        assert found.keys() == expected.keys()
        errors = {name: relative_error(found[name], t) for name, t in expected.items()}
        # not(<=): NaN fails
        failed = {name: error for name, error in errors.items() if not error <= 5e-3}
        assert not failed, failed
