"""The explicit backward formulas of mLSTM against autograd of the recurrence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tfla_tk import reference

from .conftest import assert_close, draw_mlstm

Tensors = list[Tensor]

GATES = ["exp", "sig", "sig_unnormalised"]


def explicit(
    gate: str, tokens: Tensors, state: Sequence[Tensor | None], *grads: Tensor, **options: Any
) -> reference.MLSTMGrads:
    if gate == "exp":
        return reference.mlstm_backward(*tokens, *state, *grads, **options)
    return reference.mlstm_siging_backward(*tokens, *state[:2], *grads, normalize=gate == "sig", **options)


def autograd(
    gate: str, tokens: Tensors, state: Tensors, dh: Tensor, dc_last: Tensor, dn_last: Tensor, **options: Any
) -> tuple[Tensor, ...]:
    """Gradients of the recurrence in the order of MLSTMGrads; n_initial is absent without normalisation."""
    inputs = [x.clone().requires_grad_() for x in (*tokens, *state[:2])]
    options["return_last_states"] = True
    if gate == "exp":
        h, (c, n, _) = reference.mlstm_recurrent(*inputs, state[2], **options)
    else:
        h, (c, n) = reference.mlstm_siging_recurrent(*inputs, normalize=gate == "sig", **options)
    if gate == "sig_unnormalised":
        return torch.autograd.grad((h, c), inputs[:6], (dh, dc_last))
    return torch.autograd.grad((h, c, n), inputs, (dh, dc_last, dn_last))


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("length", [1, 63, 65, 100])
@pytest.mark.parametrize("chunk_size", [16, 64, 128])
@pytest.mark.parametrize("with_last", [False, True], ids=["h", "h_and_state"])
def test_gradients(gate: str, length: int, chunk_size: int, with_last: bool) -> None:
    tokens, state = draw_mlstm(length)
    dh, dc, dn = torch.randn_like(tokens[2]), torch.randn_like(state[0]), torch.randn_like(state[1])
    if not with_last:
        dc, dn = torch.zeros_like(dc), torch.zeros_like(dn)
    expected = autograd(gate, tokens, state, dh, dc, dn)
    actual = explicit(gate, tokens, state, dh, *((dc, dn) if with_last else ()), chunk_size=chunk_size)
    for name, grad, want in zip(actual._fields, actual, expected, strict=False):
        assert_close(grad, want, name=name)
    if gate == "sig_unnormalised":
        assert torch.equal(actual.n_initial, torch.zeros_like(state[1]))


@pytest.mark.parametrize("gate", GATES)
def test_gradients_without_initial_state(gate: str) -> None:
    tokens, state = draw_mlstm(50)
    zeros = [torch.zeros_like(x) for x in state]
    dh = torch.randn_like(tokens[2])
    actual = explicit(gate, tokens, (None, None, None), dh)
    for grad, want in zip(actual, explicit(gate, tokens, zeros, dh), strict=True):
        assert torch.equal(grad, want)


@pytest.mark.parametrize("chunk_size", [3, 64])
@pytest.mark.parametrize("gate", GATES)
def test_gradients_of_packed_sequences(gate: str, chunk_size: int) -> None:
    """The explicit formulas as the backward of the packed recurrence; two of the five sequences are empty."""
    offsets = torch.tensor([0, 4, 4, 5, 11, 11])
    tokens, _ = draw_mlstm(11, batch=1)
    _, state = draw_mlstm(1, batch=5, seed=1)
    dh, dc, dn = torch.randn_like(tokens[2]), torch.randn_like(state[0]), torch.randn_like(state[1])
    expected = autograd(gate, tokens, state, dh, dc, dn, cu_seqlens=offsets)
    actual = explicit(gate, tokens, state, dh, dc, dn, chunk_size=chunk_size, cu_seqlens=offsets)
    for name, grad, want in zip(actual._fields, actual, expected, strict=False):
        assert_close(grad, want, name=name)


@pytest.mark.parametrize("gate", GATES)
def test_gradcheck_of_the_explicit_formulas(gate: str) -> None:
    """Packed sequences against finite differences in fp64."""
    offsets = torch.tensor([0, 1, 1, 4])
    tokens, _ = draw_mlstm(4, batch=1, heads=1, dims=(2, 3))
    _, state = draw_mlstm(1, batch=3, heads=1, dims=(2, 3), seed=1)

    class Operator(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> Tensor:
            ctx.save_for_backward(*inputs)
            options = {"sigmoid_gate": gate != "exp", "normalize": gate != "sig_unnormalised"}
            return reference.mlstm_forward_terms(*inputs, state[2], **options, cu_seqlens=offsets).h

        @staticmethod
        def backward(ctx: Any, dh: Tensor) -> tuple[Tensor, ...]:
            *own_tokens, c, n = ctx.saved_tensors
            return explicit(gate, own_tokens, (c, n, state[2]), dh, cu_seqlens=offsets)

    inputs = [x.requires_grad_() for x in (*tokens, *state[:2])]
    assert torch.autograd.gradcheck(Operator.apply, inputs)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("offsets", [None, [0, 30, 30, 31, 100], [0, 100]])
def test_forward_terms_are_those_of_the_forms(gate: str, offsets: list[int] | None) -> None:
    """h, last state and, whatever the chunks, d and m_t."""
    tokens, _ = draw_mlstm(100, batch=1)
    _, state = draw_mlstm(1, batch=len(offsets) - 1 if offsets else 1, seed=1)
    cu_seqlens = None if offsets is None else torch.tensor(offsets)
    options = {"sigmoid_gate": gate != "exp", "normalize": gate != "sig_unnormalised"}
    terms = reference.mlstm_forward_terms(*tokens, *state, chunk_size=16, **options, cu_seqlens=cu_seqlens)
    if gate == "exp":
        h, last = reference.mlstm_chunkwise(*tokens, *state, True, chunk_size=16, cu_seqlens=cu_seqlens)
    else:
        h, last = reference.mlstm_siging_chunkwise(
            *tokens, *state[:2], True, 1e-6, gate == "sig", 16, cu_seqlens=cu_seqlens
        )
    assert torch.equal(terms.h, h)
    assert all(torch.equal(a, b) for a, b in zip((terms.c, terms.n, terms.m), last, strict=False))
    whole = reference.mlstm_forward_terms(*tokens, *state, chunk_size=128, **options, cu_seqlens=cu_seqlens)
    assert terms.d.shape == terms.m_t.shape == tokens[3].shape
    for name in ("d", "m_t"):
        assert_close(getattr(terms, name), getattr(whole, name), name=name)


def test_no_token_at_all() -> None:
    tokens, state = draw_mlstm(0)
    terms = reference.mlstm_forward_terms(*tokens, *state)
    assert terms.h.shape == tokens[2].shape and terms.d.shape == terms.m_t.shape == tokens[3].shape
    assert all(torch.equal(a, b) for a, b in zip((terms.c, terms.n, terms.m), state, strict=True))
    dc, dn = torch.randn_like(state[0]), torch.randn_like(state[1])
    grads = reference.mlstm_backward(*tokens, *state, tokens[2], dc, dn)
    assert torch.equal(grads.c_initial, dc) and torch.equal(grads.n_initial, dn)
    assert all(grad.shape == x.shape for grad, x in zip(grads, tokens, strict=False))


def test_gradients_have_the_dtype_of_their_input() -> None:
    (q, k, v, i, f), (c, n, m) = draw_mlstm(20)
    low = [x.bfloat16() for x in (q, k, v)] + [i.float(), f.float(), c.bfloat16(), n.float()]
    grads = reference.mlstm_backward(*low, m.float(), torch.randn_like(low[2]))
    assert [g.dtype for g in grads] == [x.dtype for x in low]
