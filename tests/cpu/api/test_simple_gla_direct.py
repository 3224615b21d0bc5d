"""The tk backend's path of chunk_simple_gla: what the kernels get, which calls go to them directly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tfla_tk import (
    chunk_retention,
    chunk_simple_gla,
    reference,
    simple_gla,
)

from .linear import assert_same, gradients, leaves
from .linear_checks import assert_pads_head_dims
from .simple_gla_calls import Kernels, draw


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_kernels_get_what_they_read(kernels: Kernels, v_first: bool, packed: bool) -> None:
    x = draw(batch=1, rows=3 if packed else 1)
    options: dict[str, Any] = {"cu_seqlens": torch.tensor([0, 5, 5, 40])} if packed else {}
    options["state_v_first"] = v_first
    if v_first:
        x["initial_state"] = x["initial_state"].mT.contiguous()
    expected = gradients(reference.simple_gla_recurrent, x, **options)
    found = gradients(chunk_simple_gla, x, **options, backend="tk")
    assert kernels.calls == ["forward, kept", "backward, kept"]
    assert_same(found, expected)
    assert kernels.tensors[4].shape == (3 if packed else 1, 4, 16, 32)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dims", [(20, 25), (16, 9), (60, 32)], ids="{0[0]}_{0[1]}".format)
def test_other_head_dims_are_padded(kernels: Kernels, dims: tuple[int, int], compiled: bool) -> None:
    def read() -> tuple[Tensor, ...]:
        q, k, v, _, initial_state, _ = kernels.tensors
        return q, k, v, initial_state

    assert_pads_head_dims(chunk_simple_gla, draw(dims=dims), read, compiled=compiled)


def test_a_decay_per_head_comes_with_strides_of_zero(kernels: Kernels) -> None:
    x = draw(dtype=torch.float32)
    chunk_retention(x["q"], x["k"], x["v"])
    g = kernels.tensors[3]
    assert g.shape == (2, 40, 4) and g.stride()[:2] == (0, 0) and g.dtype == torch.float32
    chunk_simple_gla(x["q"], x["k"], x["v"])
    assert kernels.tensors[3] is None


@pytest.mark.parametrize("with_grad", [False, True])
def test_plain_calls_go_to_the_kernels_and_others_to_the_op(
    kernels: Kernels, with_grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = leaves(draw()) if with_grad else draw()
    chunk_simple_gla(**x)
    assert kernels.calls == (["forward, kept"] if with_grad else ["forward"])
    with FlopCounterMode(display=False) as counter:
        chunk_simple_gla(**x)
    assert len(kernels.calls) == 1  # the op's CPU code
    per_token = (64 + 64) * (16 + 32) + 4 * 16 * 32
    assert counter.get_total_flops() == 2 * 40 * 4 * per_token


def test_plans_are_kept_by_what_matters(kernels: Kernels) -> None:
    x = draw()
    for _ in range(3):
        chunk_simple_gla(**x)
    assert len(simple_gla._path.plans) == 1
    chunk_simple_gla(**x, scale=1.0)
    chunk_simple_gla(**x | {"v": x["v"].transpose(0, 1).contiguous().transpose(0, 1)})
    chunk_simple_gla(**leaves(x))
    assert len(simple_gla._path.plans) == 4


def test_gates_that_need_no_gradient_get_none(kernels: Kernels) -> None:
    x = draw()
    q = x["q"].clone().requires_grad_()
    chunk_simple_gla(q, x["k"], x["v"], x["g"])[0].sum().backward()
    g = x["g"].clone().requires_grad_()
    chunk_simple_gla(q, x["k"], x["v"], g)[0].sum().backward()
    chunk_retention(q, x["k"], x["v"])[0].sum().backward()
    assert kernels.needs_gates == [False, True, False] and g.grad is not None


def test_an_initial_state_that_is_overwritten_keeps_the_gradient(kernels: Kernels) -> None:
    """As a cache of states is."""
    x = draw()
    cache = x.pop("initial_state")
    q = x.pop("q").requires_grad_()
    (expected,) = torch.autograd.grad(chunk_simple_gla(q, **x, initial_state=cache.clone())[0].sum(), q)
    o, _ = chunk_simple_gla(q, **x, initial_state=cache)
    cache.zero_()
    assert torch.equal(torch.autograd.grad(o.sum(), q)[0], expected)


def test_checkpointing_and_hooks(kernels: Kernels) -> None:
    from torch.utils.checkpoint import checkpoint

    x = leaves(draw())
    expected = torch.autograd.grad(chunk_simple_gla(**x)[0].square().sum(), list(x.values()))
    o, _ = checkpoint(lambda: chunk_simple_gla(**x), use_reentrant=False)
    found = torch.autograd.grad(o.square().sum(), list(x.values()))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_double_backward_and_forward_mode(kernels: Kernels) -> None:
    x = leaves(draw(seq=10))
    o, _ = chunk_simple_gla(**x)
    (dq,) = torch.autograd.grad(o.square().sum(), x["q"], create_graph=True)
    with pytest.raises(RuntimeError, match=r"double backward of simple GLA .* backend='reference'"):
        dq.sum().backward()
    fwd = torch.ops.tfla_tk.simple_gla_fwd
    with pytest.raises(RuntimeError, match=r"simple_gla_fwd has no forward-mode derivative .*reference"):
        torch.func.jvp(
            lambda q: fwd(q, x["k"], x["v"], x["g"], None, None, 0.25, False)[0],
            (x["q"].detach(),),
            (x["q"].detach(),),
        )
    # under "auto" the reference serves both
    tangent = torch.func.jvp(
        lambda q: chunk_simple_gla(q, x["k"], x["v"], x["g"])[0], (x["q"].detach(),), (x["q"].detach(),)
    )[1]
    torch.testing.assert_close(tangent, chunk_simple_gla(**x | {"initial_state": None})[0])
    o, _ = chunk_simple_gla(**x, backend="reference")
    (dq,) = torch.autograd.grad(o.square().sum(), x["q"], create_graph=True)
    dq.sum().backward()
