"""Gates of -inf and empty states through the public functions and the ops on the CPU."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tfla_tk import mlstm_chunkwise, mlstm_sequence, mlstm_step
from tfla_tk.ops.mlstm_decode import representable

Tensors = dict[str, Tensor]
TOKENS, STATE = ("q", "k", "v", "i", "f"), ("c", "n", "m")
SEQ = 9
CLOSED = [0, 3, 4]
CASES = ["closed", "empty", "last_closed"]


def draw(case: str, least: float) -> tuple[Tensors, Tensors]:
    """Tokens and a state in fp64; closed gates and an m of -inf have the value `least`."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, 3, *shape, generator=generator, dtype=torch.float64)

    tokens = {name: normal(SEQ, dim) for name, dim in (("q", 16), ("k", 16), ("v", 32))}
    tokens["i"], tokens["f"] = normal(SEQ), normal(SEQ) + 3
    state = {"c": normal(16, 32), "n": normal(16), "m": normal(1)}
    closed = [*CLOSED, SEQ - 1] if case == "last_closed" else CLOSED
    tokens["i"][..., closed], tokens["f"][..., closed] = least, least
    if case == "empty":
        state["m"][:] = least
        tokens["i"][..., 1] = least
    return tokens, state


def memory(c: Tensor, n: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    grow = torch.exp(m)
    return c * grow[..., None], n * grow


def step_by_step(tokens: Tensors, state: Tensors, **options: object) -> tuple[Tensor, tuple[Tensor, ...]]:
    """As many calls of mlstm_step as there are tokens."""
    outputs, given = [], tuple(state[name] for name in STATE)
    for t in range(SEQ):
        q, k, v, i, f = (tokens[name][:, :, t] for name in TOKENS)
        h, given = mlstm_step(q, k, v, i[..., None], f[..., None], *given, **options)
        outputs.append(h)
    return torch.stack(outputs, dim=2), given


@pytest.mark.parametrize("case", CASES)
def test_decoding_computes_what_gates_of_minus_1e5_do(case: str) -> None:
    tokens, state = draw(case, -1e5)
    expected, last = mlstm_chunkwise(*tokens.values(), *state.values(), return_last_states=True)
    tokens, state = draw(case, -math.inf)
    for h, given in (mlstm_sequence(**tokens, **state), step_by_step(tokens, state)):
        torch.testing.assert_close(h, expected)
        torch.testing.assert_close(memory(*given), memory(*last))
        assert not h[:, :, CLOSED].any()


@pytest.mark.parametrize("case", CASES)
def test_the_op_and_its_gradients(case: str) -> None:
    """tfla_tk::mlstm_fwd and its explicit backward equal autograd of the reference."""
    tokens, state = draw(case, -math.inf)
    leaves = [x.requires_grad_() for x in (*tokens.values(), state["c"], state["n"])]
    reference, last = mlstm_chunkwise(*leaves, state["m"], return_last_states=True)
    h, c, n, m, _, row_m, chunk_m = torch.ops.tfla_tk.mlstm_fwd(
        *leaves, state["m"], None, False, True, 1e-6, True, True
    )
    torch.testing.assert_close(h, reference)
    torch.testing.assert_close((c, n, m), last)
    assert not chunk_m.isnan().any()
    assert row_m[..., CLOSED].eq(-math.inf).all()
    weights = [torch.randn_like(x) for x in (h, c, n)]
    expected = torch.autograd.grad((reference, *last[:2]), leaves, weights)
    found = torch.autograd.grad((h, c, n), leaves, weights)
    for x, want in zip(found, expected, strict=True):
        assert x.isfinite().all()
        torch.testing.assert_close(x, want)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("least", [-math.inf, -2e5, -1e5, -9e4, -4e4])
def test_states_of_any_dtype_forget(least: float, kept: torch.dtype, inplace: bool) -> None:
    """What 16 bits hold of an m far below 0 neither overflows nor leaves anything behind."""
    tokens, state = draw("last_closed", least)
    expected, _ = mlstm_sequence(**tokens, **state)
    state = {name: x.to(kept) for name, x in state.items()}
    for call in (step_by_step, lambda x, given, **options: mlstm_sequence(**x, **given, **options)):
        given = {name: x.clone() for name, x in state.items()}
        options = {"inplace": True} if inplace else {"dtype_state": kept}
        h, last = call(tokens, given, **options)
        assert h.isfinite().all() and all(x.dtype == kept for x in last)
        assert all(x.isfinite().all() for x in last[:2]) and not last[2].isnan().any()
        assert (h - expected).norm() <= 2e-2 * expected.norm()
        assert not any(x.any() for x in memory(*(x.double() for x in last)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_representable_far_below_zero(dtype: torch.dtype) -> None:
    m = torch.tensor([-16383.0, -16400.0, -40000.7, -90000.0, -1e5, -2e5, -1e30])[None, :, None]
    c, n, kept = representable(torch.full((1, 7, 2, 3), 4.0), torch.ones(1, 7, 2), m, dtype)
    assert c.to(dtype).isfinite().all() and n.isfinite().all()
    assert torch.equal(kept, kept.to(dtype).float()) and kept.ge(-16384).all()
    torch.testing.assert_close(n, torch.exp(m - kept).expand_as(n))
