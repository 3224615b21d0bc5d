"""Gates of -inf and empty states: every form forgets exactly, returns 0 and has finite gradients."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.pairs import pairwise
from tfla_tk import reference

from .conftest import OPERATORS, assert_close, draw_mlstm, split_form

Tensors = list[Tensor]

FORMS = ["recurrent", "parallel", "chunkwise_1", "chunkwise_3", "chunkwise_8", "chunkwise_64"]
FORMS_OF_LINEAR = ["recurrent", "parallel", "chunkwise_3", "chunkwise_8"]
LENGTH = 24
# tokens whose gates are both closed; chunks of 8 begin at 8 and 16
CLOSED = {
    "first": [0],
    "last": [23],
    "inside": [5],
    "end_of_chunk": [7],
    "start_of_chunk": [8],
    "over_a_border": [7, 8],
    "first_tokens": list(range(10)),
    "last_tokens": list(range(14, 24)),
    "whole_chunk": list(range(8, 16)),
    "every_third": list(range(0, 24, 3)),
    "all": list(range(24)),
}
STATES = ["none", "given", "empty", "empty_in_one_head"]


def close(i: Tensor, f: Tensor, tokens: list[int], least: float) -> tuple[Tensor, Tensor]:
    """Both gates of the tokens at ``least``, in the first head; in the second the tokens behind each of them
    have an input gate of ``least`` too, so that what is forgotten stays forgotten for a while."""
    i, f = i.clone(), f.clone()
    i[..., tokens], f[..., tokens] = least, least
    behind = [t + step for t in tokens for step in (1, 2) if t + step < i.shape[-1]]
    i[:, 1, behind] = least
    return i, f


def initial(kind: str, state: Tensors, least: float) -> list[Tensor | None]:
    """Of the exponential gate: none, one with weight, one without whatever c and n hold."""
    c, n, m = state
    if kind == "none":
        return [None, None, None]
    if kind == "empty":
        m = torch.full_like(m, least)
    if kind == "empty_in_one_head":
        m = m.clone()
        m[:, 0] = least
    return [c, n, m]


def true_state(c: Tensor, n: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    """e^m C and e^m n."""
    grow = torch.exp(m)
    return grow[..., None] * c, grow * n


def evaluate(form: str, tokens: Tensors, state: list[Tensor | None]) -> dict[str, Tensor]:
    """h, e^m C and e^m n of the last state, and the gradients of a loss that reaches all of them."""
    name, options = split_form(form)
    inputs = [x.clone().requires_grad_() for x in tokens]
    given = [None if x is None else x.clone().requires_grad_() for x in state[:2]]
    call = getattr(reference, f"mlstm_{name}")
    h, last = call(*inputs, *given, state[2], return_last_states=True, **options)
    reached = (h, *true_state(*last))
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in reached]
    wanted = inputs + [x for x in given if x is not None]
    grads = torch.autograd.grad(reached, wanted, weights)
    found = {"h": h, "C": reached[1], "n": reached[2]}
    found.update({f"d{name}": x for name, x in zip(("q", "k", "v", "i", "f", "c", "n"), grads, strict=False)})
    return {name: x.detach() for name, x in found.items()}


@pytest.mark.parametrize("closed", CLOSED)
def test_all_forms_compute_what_gates_of_minus_1e5_do(closed: str) -> None:
    """e^{-1e5} is 0 in fp64 too. Outputs, states and gradients, of closed gates too; the same in fp32."""
    (*qkv, i, f), state = draw_mlstm(LENGTH)
    low, closed_at = (close(i, f, CLOSED[closed], least) for least in (-1e5, -math.inf))
    for kind in STATES:
        expected = evaluate("recurrent", [*qkv, *low], initial(kind, state, -1e5))
        tokens, given = [*qkv, *closed_at], initial(kind, state, -math.inf)
        in_fp32 = [[None if x is None else x.float() for x in group] for group in (tokens, given)]
        for form in FORMS:
            found = evaluate(form, tokens, given)
            # gradients that vanish are sums of terms of order 1
            assert_close(found, expected, tol=1e-9, floor=1e-3, name=f"{form}, {kind}")
            assert not found["h"][:, :, CLOSED[closed]].any()
        for form in ("recurrent", "parallel", "chunkwise_8"):
            found = evaluate(form, *in_fp32)
            assert_close(found, expected, tol=1e-3, floor=1e-3, name=f"{form}, {kind}, fp32")


CASES = pairwise((1, 3, 8, 64), tuple(CLOSED), STATES)


@pytest.mark.parametrize("chunk_size", [1, 3, 8, 64])
def test_explicit_formulas_equal_autograd(chunk_size: int) -> None:
    for _, closed, kind in (case for case in CASES if case[0] == chunk_size):
        check_explicit_formulas(chunk_size, closed, kind)


def check_explicit_formulas(chunk_size: int, closed: str, kind: str) -> None:
    (*qkv, i, f), state = draw_mlstm(LENGTH)
    tokens = [*qkv, *close(i, f, CLOSED[closed], -math.inf)]
    given = initial(kind, state, -math.inf)
    given = [torch.zeros_like(x) if y is None else y for x, y in zip(state, given, strict=True)]
    inputs = [x.clone().requires_grad_() for x in (*tokens, *given[:2])]
    h, last = reference.mlstm_recurrent(*inputs, given[2], return_last_states=True)
    dh, dc, dn = (torch.randn_like(x) for x in (h, *last[:2]))
    expected = torch.autograd.grad((h, *last[:2]), inputs, (dh, dc, dn))
    found = reference.mlstm_backward(*tokens, *given, dh, dc, dn, chunk_size=chunk_size)
    for name, grad, want in zip(found._fields, found, expected, strict=True):
        assert_close(grad, want, tol=1e-9, floor=1e-3, name=name)

    terms = reference.mlstm_forward_terms(*tokens, *given, chunk_size=chunk_size)
    assert_close(terms.h, h.detach())
    for x, want in zip((terms.c, terms.n, terms.m), last, strict=True):
        torch.testing.assert_close(x, want.detach())


@pytest.mark.parametrize("form", ["recurrent", "parallel", "chunkwise_3"])
def test_gradcheck_of_the_open_gates(form: str) -> None:
    (q, k, v, i, f), (c, n, m) = draw_mlstm(6, batch=1, dims=(3, 2))
    name, options = split_form(form)
    m[:, 0] = -math.inf
    closed = torch.zeros_like(i, dtype=torch.bool)
    closed[..., [0, 3]] = True

    def outputs(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, c: Tensor, n: Tensor) -> Any:
        gates = (torch.where(closed, -math.inf, x) for x in (i, f))
        call = getattr(reference, f"mlstm_{name}")
        h, last = call(q, k, v, *gates, c, n, m, return_last_states=True, eps=0.0, **options)
        return h, *true_state(*last)

    inputs = [x.requires_grad_() for x in (q, k, v, i, f, c, n)]
    assert torch.autograd.gradcheck(outputs, inputs, eps=1e-6, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", STATES)
def test_an_empty_state_goes_on(form: str, kind: str) -> None:
    """Wherever the sequence is cut: the last state, with m = -inf, is a right initial state."""
    (*qkv, i, f), state = draw_mlstm(LENGTH)
    tokens = [*qkv, *close(i, f, [0, 5, 7, 8], -math.inf)]
    name, options = split_form(form)
    options["return_last_states"] = True
    call = getattr(reference, f"mlstm_{name}")
    given = initial(kind, state, -math.inf)
    expected, expected_last = call(*tokens, *given, **options)
    for cut in (1, 2, 5, 6, 7, 8, 9, 10, 11):
        first, middle = call(*(x[:, :, :cut] for x in tokens), *given, **options)
        second, last = call(*(x[:, :, cut:] for x in tokens), *middle, **options)
        assert_close(torch.cat([first, second], dim=2), expected)
        assert_close(last, expected_last)


@pytest.mark.parametrize("form", FORMS)
def test_the_last_state_of_nothing_is_empty(form: str) -> None:
    """m = -inf, and zeros for C and n; no gradient comes through it."""
    (*qkv, i, f), state = draw_mlstm(LENGTH)
    name, options = split_form(form)
    inputs = [x.requires_grad_() for x in (*qkv, *close(i, f, [LENGTH - 1], -math.inf), *state[:2])]
    call = getattr(reference, f"mlstm_{name}")
    _, (c, n, m) = call(*inputs, state[2], return_last_states=True, **options)
    assert m.eq(-math.inf).all() and not c.any() and not n.any()
    for grad in torch.autograd.grad(c.sum() + n.sum(), inputs[1:]):
        assert not grad.any()


@pytest.mark.parametrize("gate", ["i", "f"])
@pytest.mark.parametrize("form", FORMS)
def test_a_nan_gate_is_not_a_closed_one(form: str, gate: str) -> None:
    (*qkv, i, f), state = draw_mlstm(LENGTH)
    {"i": i, "f": f}[gate][:, 0, 12] = math.nan
    name, options = split_form(form)
    h, last = getattr(reference, f"mlstm_{name}")(*qkv, i, f, *state, return_last_states=True, **options)
    assert h[:, 0, 12:].isnan().all() and h[:, 1].isfinite().all()
    assert all(x[:, 0].isnan().all() for x in last)


# the operators whose decay is a gate alone


def closed_at(tokens: Tensors, positions: list[int], operator: Any, least: float) -> Tensors:
    """Gates at ``least``: both of mLSTM; the decay of the linear operators, per channel in some alone."""
    tokens = [x.clone() for x in tokens]
    if operator.name.startswith("mlstm"):
        tokens[3:] = close(*tokens[3:], positions, least)
    elif operator.name in ("gla", "kda"):
        tokens[3][:, positions, :, ::3] = least
        tokens[3][:, positions[:1]] = least
    else:
        tokens[3][:, positions] = least
    return tokens


def test_a_decay_of_zero(decaying_operator: Any) -> None:
    """Sigmoid gate, simple GLA, GLA, the gated delta rule and KDA: all forms, forward and backward."""
    operator = decaying_operator
    tokens, drawn = operator.draw(LENGTH)
    for number, (closed, places) in enumerate(CLOSED.items(), OPERATORS.index(operator)):
        state = drawn if number % 2 else []
        expected = operator.evaluate("recurrent", closed_at(tokens, places, operator, -1e5), state)
        for least, form in itertools.product((-1e4, -math.inf), FORMS_OF_LINEAR):
            found = operator.evaluate(form, closed_at(tokens, places, operator, least), state)
            assert_close(found, expected, tol=1e-9, floor=1e-3, name=f"{closed}, {form}")


def test_a_decay_of_zero_for_a_whole_head() -> None:
    """Simple GLA with g_gamma = -inf: every token sees itself alone."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 20, 3, 4, dtype=torch.float64) for _ in range(3))
    g_gamma = torch.tensor([-math.inf, -0.1, 0.0], dtype=torch.float64)
    expected = 0.5 * (q[:, :, 0] * k[:, :, 0]).sum(-1, keepdim=True) * v[:, :, 0]
    for form in ("recurrent", "parallel", "chunkwise"):
        o, _ = getattr(reference, f"simple_gla_{form}")(q, k, v, g_gamma=g_gamma)
        assert_close(o[:, :, 0], expected)
        assert o.isfinite().all()
