"""Every operator: its forms agree, forward and backward, whatever way the sequence is cut."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tfla_tk.reference.common import sequence_bounds

from .conftest import assert_close

Tensors = list[Tensor]

FORMS = ["parallel", "chunkwise_16", "chunkwise_64"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [1, 63, 65, 100])
@pytest.mark.parametrize("with_state", [False, True], ids=["zero_state", "state"])
def test_forms_agree(operator: Any, form: str, length: int, with_state: bool) -> None:
    tokens, state = operator.draw(length)
    state = state if with_state else []
    assert_close(operator.evaluate(form, tokens, state), operator.evaluate("recurrent", tokens, state))


@pytest.mark.parametrize("form", ["recurrent", "parallel", "chunkwise_3"])
def test_gradcheck(operator: Any, form: str) -> None:
    tokens, state = operator.draw(4, batch=1, heads=2, dims=(3, 2))
    count = operator.differentiable
    inputs = [x.requires_grad_() for x in tokens + state[:count]]
    rest = state[count:]
    options = {"eps": 0.0} if operator.name.startswith("mlstm") else {}

    def outputs(*args: Tensor) -> tuple[Tensor, ...]:
        out, last = operator.run(form, args[: len(tokens)], [*args[len(tokens) :], *rest], **options)
        # C and n are stored relative to e^m: their invariant is e^m C
        stored = torch.exp(last[2]) if len(last) == 3 else torch.ones(())
        return (
            out,
            *(x * stored.reshape(stored.shape + (1,) * (x.dim() - stored.dim())) for x in last[:count]),
        )

    assert torch.autograd.gradcheck(outputs, inputs, eps=1e-6, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("form", ["recurrent", *FORMS])
def test_packed_sequences_equal_separate_calls(operator: Any, form: str) -> None:
    # one empty sequence, one of one token, one over a chunk border
    bounds = [0, 30, 30, 31, 100]
    tokens, _ = operator.draw(100, batch=1)
    _, state = operator.draw(1, batch=len(bounds) - 1, seed=3)
    for dtype in (torch.int32, torch.int64):
        out, last = operator.run(form, tokens, state, cu_seqlens=torch.tensor(bounds, dtype=dtype))
        for row, (start, end) in enumerate(pairwise(bounds)):
            own_tokens = [x.narrow(operator.time_dim, start, end - start) for x in tokens]
            own_out, own_last = operator.run(form, own_tokens, [x[row : row + 1] for x in state])
            assert_close(out.narrow(operator.time_dim, start, end - start), own_out, tol=0.0)
            for rows, own in zip(last, own_last, strict=True):
                assert_close(rows[row : row + 1], own, tol=0.0)


def test_packed_sequences_without_initial_state(operator: Any) -> None:
    tokens, _ = operator.draw(40, batch=1)
    out, last = operator.run("chunkwise_16", tokens, [], cu_seqlens=torch.tensor([0, 17, 40]))
    own, own_last = operator.run("chunkwise_16", [x.narrow(operator.time_dim, 17, 23) for x in tokens], [])
    assert_close(out.narrow(operator.time_dim, 17, 23), own, tol=0.0)
    assert last[0].shape[0] == 2
    assert_close(last[0][1:], own_last[0], tol=0.0)


def test_bad_arguments(operator: Any) -> None:
    tokens, state = operator.draw(10)
    with pytest.raises(ValueError, match="chunk_size: expected a positive integer, got 0"):
        operator.run("chunkwise_0", tokens, state)
    for batch, offsets in ((2, [0, 10]), (1, [0, 9]), (1, [1, 10]), (1, [0, 7, 5, 10]), (1, [0])):
        tokens, _ = operator.draw(10, batch=batch)
        with pytest.raises(ValueError, match="cu_seqlens: expected"):
            operator.run("chunkwise_16", tokens, [], cu_seqlens=torch.tensor(offsets))


@pytest.mark.parametrize("form", ["recurrent", *FORMS])
def test_two_calls_equal_one(operator: Any, form: str) -> None:
    tokens, state = operator.draw(100)
    whole = operator.evaluate(form, tokens, state)

    def in_two_calls(_form: str, tokens: Tensors, state: Tensors) -> tuple[Tensor, Tensors]:
        first, middle = operator.run(form, [x.narrow(operator.time_dim, 0, 37) for x in tokens], state)
        second, last = operator.run(form, [x.narrow(operator.time_dim, 37, 63) for x in tokens], middle)
        return torch.cat([first, second], dim=operator.time_dim), last

    pair = type(operator)(
        operator.name, in_two_calls, operator.draw, operator.time_dim, operator.differentiable
    )
    assert_close(pair.evaluate(form, tokens, state), whole)


def test_low_precision_inputs_accumulate_in_fp32(operator: Any) -> None:
    tokens, state = operator.draw(70)
    low = [x.bfloat16() for x in tokens]
    state = [x.float() for x in state]
    for form in ("recurrent", *FORMS):
        out, last = operator.run(form, low, state)
        expected, expected_last = operator.run(form, [x.float() for x in low], state)
        assert out.dtype == torch.bfloat16 and all(x.dtype == torch.float32 for x in last), form
        assert torch.equal(out, expected.bfloat16()), form
        assert all(torch.equal(a, b) for a, b in zip(last, expected_last, strict=True)), form


def test_autocast_changes_nothing(operator: Any) -> None:
    tokens, state = ([x.float() for x in group] for group in operator.draw(20))
    expected, _ = operator.run("chunkwise_16", tokens, state)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = operator.run("chunkwise_16", tokens, state)
    assert torch.equal(out, expected)


def test_no_token_returns_the_initial_state(operator: Any) -> None:
    tokens, state = operator.draw(0)
    for form in ("recurrent", *FORMS):
        out, last = operator.run(form, tokens, state)
        assert out.shape == tokens[2].shape, form
        assert all(torch.equal(a, b) for a, b in zip(last, state, strict=True)), form


def test_offsets_of_an_empty_batch_are_not_read_from_a_device() -> None:
    """A tensor on the meta device has no values."""
    assert sequence_bounds(torch.empty(4, dtype=torch.int64, device="meta"), 1, 0) == [(0, 0)] * 3
