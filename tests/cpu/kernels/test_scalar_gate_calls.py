"""mLSTM and a scalar decay on the tk backend: what their calls alone have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tfla_tk.backends.tk.scalar_gate import backward, forward, scalar_decay
from tfla_tk.core.layout import Kept
from tfla_tk.ops import mlstm as ops

from .calls import MLSTM, OPS, B, H, Op, Tensors, cut_into, draw, results
from .stand_in import Kernels
from .test_calls import LAYOUTS

NAMES = ("q", "k", "v", "i", "f", "c_initial", "n_initial", "m_initial", "cu_seqlens")
NARROW, WIDE = (64, 48), (64, 144)  # head dims of one walk backward, of three


@pytest.fixture
def op() -> Op:
    return OPS["exp"]


def inputs_of(x: Tensors) -> tuple[Any, ...]:
    return tuple(x.get(name) for name in NAMES)


def forward_of(x: Tensors, *, keep_states: bool = True, batch_invariant: bool = False) -> forward.FwdResult:
    options = False, True, 1e-6, True, True, batch_invariant, keep_states
    return forward.mlstm_fwd(*inputs_of(x), *options)


def backward_of(x: Tensors, of_forward: forward.FwdResult, states: Kept | None, **changes: Any) -> Any:
    h, c, n, _, *rows, _ = of_forward
    given = {"row_n": rows[0], "dc": torch.ones_like(c), "dn": torch.ones_like(n)} | changes
    return backward.mlstm_bwd(
        *inputs_of(x), h, given["row_n"], *rows[1:], c, n, torch.ones_like(h), given["dc"], given["dn"],
        False, True, 1e-6, False, states,
    )  # fmt: skip


# The states that a forward leaves for its backward


@pytest.mark.parametrize("dims", [NARROW, WIDE, (64, 272)], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_states_that_a_forward_has_kept_are_not_made_again(
    dims: tuple[int, int], packed: bool, op: Op, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of another cut are, though they may be as many."""
    x, is_narrow = draw(op, dims, packed=packed, tokens=270), dims == NARROW
    cut_into(monkeypatch, 2)
    found = forward_of(x)
    kept = found[-1]
    cut = kept.layout.cut._replace(chunks=3)
    of_another = kept._replace(layout=kept.layout._replace(cut=cut))
    expected = backward_of(x, found, None)
    for states in (kept, None, kept, of_another):
        kernels.launches.clear()
        assert all(map(torch.equal, backward_of(x, found, states), expected))
        summed = [y.of_walk[0] for y in kernels.launches if y.name == "segments"]
        names = kernels.names()
        if is_narrow:
            assert summed == [1] and ("forward" in names) == (states is None)
        else:
            assert summed == ([1] if states is kept else [0, 1]) and "forward" not in names


# Normalisers


def test_without_normaliser_n_is_not_read(op: Op, kernels: Kernels) -> None:
    """Not even where it is given: a NaN in it would be in all results."""
    without = OPS["sig unnormalised"]
    x = draw(without)
    n = torch.full((B, H, 64), torch.nan)
    expected, found = results(without, x), results(without, x | {"n_initial": n}, without=["n_initial"])
    for name in expected:
        assert torch.equal(found[name], expected[name])


@pytest.mark.parametrize("missing", [None, torch.empty(0)])
def test_a_normaliser_needs_its_rows(missing: Tensor | None, op: Op, kernels: Kernels) -> None:
    x = draw(op)
    found = forward_of(x)
    kernels.launches.clear()
    with pytest.raises(ValueError, match="with a normaliser needs row_n of its forward"):
        backward_of(x, found, None, row_n=missing)
    assert not kernels.launches


@pytest.mark.parametrize("size", [(0, 2, 10), (2, 0, 10), (2, 2, 0)])
def test_no_token(size: tuple[int, int, int], op: Op, kernels: Kernels) -> None:
    """The gradient of the initial state is that of the last one."""
    x = {name: t.new_empty(*size, *t.shape[3:]) for name, t in draw(op).items() if name in NAMES[:5]}
    c, n = torch.rand(*size[:2], 64, 48), torch.rand(*size[:2], 64)
    x |= {"c_initial": c, "n_initial": n, "m_initial": n[..., :1]}
    h, rows = torch.empty_like(x["v"]), x["i"]
    for grads in ((None, None), (2 * c, 2 * n)):
        found = backward_of(x, (h, c, n, None, rows, rows, rows, None), None, dc=grads[0], dn=grads[1])
        for y, state, grad in zip(found[5:], (c, n), grads, strict=True):
            assert torch.equal(y, torch.zeros_like(state) if grad is None else grad)


# How results lie


@pytest.mark.parametrize("layout", LAYOUTS)
def test_h_has_the_strides_that_the_fake_op_says(layout: Any, op: Op, kernels: Kernels) -> None:
    x = draw(op, WIDE)
    q, k, v, i, f, *_ = inputs_of(x | {"v": layout(x["v"])})
    h, *_ = forward.mlstm_fwd(q, k, v, i, f, *[None] * 4, False, True, 1e-6, False, False)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(t) for t in (q, k, v, i, f)]
        h_fake, *_ = ops._fwd_fake(*fake, *[None] * 4, False, True, 1e-6, False, False)
    assert h.stride() == h_fake.stride()


@pytest.mark.parametrize("op", [OPS[name] for name in MLSTM], ids=MLSTM)
@pytest.mark.parametrize("sizes", [(1, H, 70), (B, 1, 70), (B, H, 1), (1, 1, 1)])
def test_strides_of_single_entries_suit_the_descriptor(
    sizes: tuple[int, int, int], op: Op, kernels: Kernels
) -> None:
    """A dimension of size 1 may have any stride in PyTorch; TMA wants multiples of 16 bytes."""

    def view(dim: int) -> Tensor:
        dense = (H * 70 * dim, 70 * dim, dim)
        strides = (3 if size == 1 else stride for size, stride in zip(sizes, dense, strict=True))
        return torch.randn(B * H * 70 * dim).bfloat16().as_strided((*sizes, dim), (*strides, 1))

    x = {name: view(64) for name in "qkv"} | {name: torch.randn(sizes) for name in "if"}
    results(op, x)  # the stand-in looks at the strides of all operands
    assert next(y for y in kernels.launches if y.name == "forward").q[0] == x["q"].data_ptr()


# A scalar decay


@pytest.mark.parametrize("op", [OPS["decay"]], ids=["decay"])
@pytest.mark.parametrize("gate", ["head", "none"])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("chunks", [1, 10], ids=["cut", "whole"])
@pytest.mark.parametrize("dims", [NARROW, WIDE], ids=str)
def test_gates_of_heads_and_none(
    op: Op, gate: str, group: int, chunks: int, dims: Any, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which have the results of a gate of every token."""
    cut_into(monkeypatch, chunks)
    x = draw(op, dims, group=group)
    own = torch.linspace(-0.1, -0.02, group * H) if gate == "head" else torch.zeros(group * H)
    given = {} if gate == "none" else {"g_gamma": own}
    without_g = {name: t for name, t in x.items() if name != "g"} | given
    found = results(op, without_g)
    expected = results(op, x | {"g": own.expand_as(x["g"]).contiguous()})
    for name, y in found.items():
        assert torch.equal(y, expected[name]), name


def test_a_zero_in_place_of_gates_is_made_once() -> None:
    scalar_decay._zeros.clear()
    q = torch.empty(1, 1, 1, 16)
    with torch.inference_mode():
        zero = scalar_decay._tensors(q, q, q, None, None, None)[4]
    assert scalar_decay._tensors(q, q, q, None, None, None)[4] is zero and not zero.is_inference()
