"""The registered ops of chunk_simple_gla, and what its kernels get."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tfla_tk import chunk_retention, chunk_simple_gla, reference

from .linear import leaves
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
    return x["q"], x["k"], x["v"], g, state, offsets, 0.25, False, last


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("gate", "with_state", "last"),
    [("token", True, True), ("token", False, False), ("none", True, False), ("head", False, True)],
)
def test_opcheck(packed: bool, gate: str, with_state: bool, last: bool) -> None:
    args = op_arguments(packed, gate, with_state, last)
    torch.library.opcheck(torch.ops.tfla_tk.simple_gla_fwd, args)
    torch.library.opcheck(torch.ops.tfla_tk.packed_simple_gla, (*args[:-1], "chunkwise", 16, last))
    detached = [x.detach() if isinstance(x, Tensor) else x for x in args[:6]]
    o, state = torch.ops.tfla_tk.simple_gla_fwd(*detached, *args[6:])
    dht = torch.randn_like(state) if last else None
    rest, needs_gates = (torch.randn_like(o), dht, 0.25, False), gate == "token"
    final_state = state if last else None
    torch.library.opcheck(torch.ops.tfla_tk.simple_gla_bwd, (*detached, final_state, *rest, needs_gates))
    torch.library.opcheck(torch.ops.tfla_tk.packed_simple_gla_bwd, (*detached, *rest, 16, needs_gates))


def test_a_decay_per_head_comes_with_strides_of_zero(kernels: Kernels) -> None:
    x = draw(dtype=torch.float32)
    chunk_retention(x["q"], x["k"], x["v"])
    g = kernels.tensors[3]
    assert g.shape == (2, 40, 4) and g.stride()[:2] == (0, 0) and g.dtype == torch.float32
    chunk_simple_gla(x["q"], x["k"], x["v"])
    assert kernels.tensors[3] is None
    chunk_retention(x["q"].requires_grad_(), x["k"], x["v"])[0].sum().backward()
    assert kernels.needs_gates == [False]
