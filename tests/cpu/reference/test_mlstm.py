"""What only mLSTM has: the stabiliser, extreme gates, the single step, torch.compile."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tfla_tk import reference

from .conftest import assert_close, draw_mlstm

FORMS = ["recurrent", "parallel", "chunkwise"]


def unstabilised(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, c: Tensor, n: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition with plain e^i gates and no m, at eps = 0."""
    scale = q.shape[-1] ** -0.5
    outputs = []
    for t in range(q.shape[2]):
        forget, write = torch.sigmoid(f[:, :, t, None]), torch.exp(i[:, :, t, None])
        c = forget[..., None] * c + write[..., None] * k[:, :, t, :, None] * v[:, :, t, None, :]
        n = forget * n + write * k[:, :, t]
        d = scale * (q[:, :, t] * n).sum(-1, keepdim=True)
        outputs.append(scale * (q[:, :, t, None, :] @ c).squeeze(-2) / d.abs().clamp(min=1.0))
    return torch.stack(outputs, dim=2), c, n


@pytest.mark.parametrize("form", FORMS)
def test_stabiliser_changes_neither_values_nor_gradients(form: str) -> None:
    (q, k, v, i, f), (c, n, m) = draw_mlstm(70)
    inputs = [x.requires_grad_() for x in (q, k, v, i, f, c, n)]
    function = getattr(reference, f"mlstm_{form}")
    h, (c_last, n_last, m_last) = function(*inputs, m, return_last_states=True, eps=0.0)
    grow = m_last.exp()
    actual = (h, grow[..., None] * c_last, grow * n_last)
    start = m.exp()
    expected = unstabilised(q, k, v, i, f, start[..., None] * c, start * n)
    weights = [torch.randn_like(x) for x in expected]
    results = [(*outputs, *torch.autograd.grad(outputs, inputs, weights)) for outputs in (actual, expected)]
    assert_close(*results)


@pytest.mark.parametrize("form", FORMS)
def test_m_is_the_maximum_of_all_log_gates(form: str) -> None:
    tokens, (c, n, m) = draw_mlstm(40)
    i, log_f = tokens[3], logsigmoid(tokens[4])
    function = getattr(reference, f"mlstm_{form}")
    _, (_, _, m_last) = function(*tokens, c, n, m, return_last_states=True)
    after = log_f.flip(-1).cumsum(-1).flip(-1) - log_f
    expected = torch.maximum(log_f.sum(-1) + m[..., 0], (after + i).amax(-1))
    torch.testing.assert_close(m_last[..., 0], expected)


@pytest.mark.parametrize("form", FORMS)
def test_default_initial_state_is_zeros(form: str) -> None:
    tokens, state = draw_mlstm(20)
    function = getattr(reference, f"mlstm_{form}")
    h, last = function(*tokens, return_last_states=True)
    h_zeros, last_zeros = function(*tokens, *(torch.zeros_like(x) for x in state), return_last_states=True)
    assert torch.equal(h, h_zeros)
    assert all(torch.equal(a, b) for a, b in zip(last, last_zeros, strict=True))


def test_h_alone_without_last_states() -> None:
    tokens, _ = draw_mlstm(20)
    h, _ = reference.mlstm_chunkwise(*tokens, return_last_states=True)
    assert torch.equal(reference.mlstm_chunkwise(*tokens), h)


def extreme_gates(i: Tensor, f: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """By names; of the shape of these, which some of them keep."""
    half = i.shape[-1] // 2
    alternating = torch.where(torch.arange(i.shape[-1]) % 2 == 0, 1e4, -1e4).to(i)
    rising = torch.where(torch.arange(i.shape[-1]) < half, 80.0, -80.0).to(i)
    flat = torch.full_like(i, 0.5)
    return {
        "i_plus": (flat * 2e4, f),
        "i_minus": (-flat * 2e4, f),
        "f_plus": (i, flat * 2e4),
        "f_minus": (i, -flat * 2e4),
        "both_minus": (-flat * 2e4, -flat * 2e4),
        "i_alternating": (alternating.expand_as(i), f),
        "f_alternating": (i, alternating.expand_as(f)),
        "i_80_then_-80": (rising.expand_as(i), f),
        "i_-80_then_80": (-rising.expand_as(i), f),
        "f_closed": (i, torch.where(torch.arange(i.shape[-1]) % 9 == 4, -math.inf, f)),
        "constant": (flat, flat),
    }


GATES = tuple(extreme_gates(torch.zeros(1), torch.zeros(1)))


@pytest.mark.parametrize("gate", ["exp", "sig", "sig_unnormalised"])
@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("zero", ["", "q", "k"])
def test_extreme_gates(gate: str, name: str, zero: str) -> None:
    """All forms and the explicit backward: finite and equal, forward and backward."""
    (q, k, v, i, f), state = draw_mlstm(40)
    q, k = (torch.zeros_like(q) if zero == "q" else q), (torch.zeros_like(k) if zero == "k" else k)
    tokens = (q, k, v, *extreme_gates(i, f)[name])
    weights = [torch.randn_like(x) for x in (v, *state[:2])]
    options = {} if gate == "exp" else {"normalize": gate == "sig"}
    prefix, state = ("mlstm", state) if gate == "exp" else ("mlstm_siging", state[:2])
    reached = 2 if gate == "sig_unnormalised" else 3

    results = []
    for form in FORMS:
        inputs = [x.clone().requires_grad_() for x in (*tokens, *state)]
        size = {"chunk_size": 16} if form == "chunkwise" else {}
        h, last = getattr(reference, f"{prefix}_{form}")(*inputs, return_last_states=True, **size, **options)
        wanted = inputs[: 4 + reached]
        grads = torch.autograd.grad((h, *last)[:reached], wanted, weights[:reached])
        results.append({str(j): x.detach() for j, x in enumerate((h, *last, *grads))})
    explicit = getattr(reference, f"{prefix}_backward")(*tokens, *state, *weights, **options, chunk_size=16)
    first_grad = len(results[0]) - len(grads)
    results.append({str(first_grad + j): x for j, x in enumerate(explicit[: len(grads)])})

    for result in results[1:]:
        # gate gradients that vanish are sums of terms of order 1
        assert_close(result, {key: results[0][key] for key in result}, tol=1e-9, floor=1e-3)


@pytest.mark.parametrize("gate", ["exp", "sig"])
@pytest.mark.parametrize("name", GATES)
def test_extreme_gates_in_fp32(gate: str, name: str) -> None:
    tokens, state = draw_mlstm(100)
    tokens[3:] = extreme_gates(*tokens[3:])[name]
    state = state if gate == "exp" else state[:2]
    function = reference.mlstm_chunkwise if gate == "exp" else reference.mlstm_siging_chunkwise
    expected = function(*tokens, *state)
    h = function(*(x.float() for x in (*tokens, *state)))
    # beside a gate of 1e4 fp32 keeps log decays to 5e-4 only, and small normalisers amplify that
    assert_close(h.double(), expected, tol=5e-2)


@pytest.mark.parametrize("gate", ["exp", "sig", "sig_unnormalised"])
@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_equal_the_sequence(gate: str, dtype: torch.dtype, closed: bool) -> None:
    (q, k, v, i, f), state = draw_mlstm(9)
    if closed:
        i[..., [0, 4, 8]], f[..., [0, 4, 8]] = -math.inf, -math.inf
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    i, f, *state = (x.float() for x in (i, f, *state))
    if gate == "exp":
        step, sequence, options = reference.mlstm_step, reference.mlstm_recurrent, {}
    else:
        step, sequence = reference.mlstm_siging_step, reference.mlstm_siging_recurrent
        options, state = {"normalize": gate == "sig"}, [state[0], torch.zeros_like(state[1])]
    expected, expected_last = sequence(q, k, v, i, f, *state, return_last_states=True, **options)
    outputs = []
    for t in range(9):
        gates = i[:, :, t, None], f[:, :, t, None]
        h, state = step(q[:, :, t], k[:, :, t], v[:, :, t], *gates, *state, **options)
        outputs.append(h)
    assert h.dtype == dtype
    assert torch.equal(torch.stack(outputs, dim=2), expected)
    assert all(torch.equal(a, b) for a, b in zip(state, expected_last, strict=True))


def test_unnormalised_sigmoid_gate_has_no_n() -> None:
    tokens, (c, n, _) = draw_mlstm(20)
    for form in FORMS:
        function = getattr(reference, f"mlstm_siging_{form}")
        h, (_, n_last) = function(*tokens, c, n, return_last_states=True, normalize=False)
        assert torch.equal(n_last, torch.zeros_like(n))
        assert torch.equal(h, function(*tokens, c, normalize=False))


@pytest.mark.parametrize("given", ["c", "n", "m", "cn", "cm", "nm"])
def test_partial_initial_state(given: str) -> None:
    tokens, state = draw_mlstm(5)
    partial = [x if name in given else None for name, x in zip("cnm", state, strict=True)]
    for form in FORMS:
        with pytest.raises(ValueError, match="expected c, n and m together"):
            getattr(reference, f"mlstm_{form}")(*tokens, *partial)


@pytest.mark.parametrize("given", ["c", "n"])
def test_partial_initial_state_of_siging(given: str) -> None:
    tokens, state = draw_mlstm(5)
    partial = [x if name in given else None for name, x in zip("cn", state[:2], strict=True)]
    with pytest.raises(ValueError, match=f"expected c and n together or none of them, got only {given}"):
        reference.mlstm_siging_chunkwise(*tokens, *partial)
