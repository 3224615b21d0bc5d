"""A token that is not finite: what it may reach, and what stays as it was, bit for bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tfla_tk import reference

from .conftest import draw_mlstm, split_form

Tensors = list[Tensor]

FORMS = ["recurrent", "parallel", "chunkwise_16"]
BAD = [math.nan, math.inf]


def poison(operator: Any, tokens: Tensors, which: int, at: int, value: float) -> Tensors:
    """The tokens with ``value`` in tensor ``which`` at token ``at`` of the last batch entry's first head."""
    tokens = [x.clone() for x in tokens]
    row = tokens[which][-1].select(operator.time_dim - 1, at)[0]
    row.view(-1)[row.numel() // 2] = value
    return tokens


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("form", FORMS)
def test_other_heads_batch_entries_and_calls_stay_clean(operator: Any, form: str, value: float) -> None:
    """Outputs, last states and gradients."""
    tokens, state = operator.draw(40)
    clean = operator.evaluate(form, tokens, state)
    for which in range(len(tokens)):
        found = operator.evaluate(form, poison(operator, tokens, which, 20, value), state)
        assert not torch.equal(found["out"], clean["out"])
        for name, x in found.items():
            # heads come second but in tokens of operators whose second dimension is time
            head_dim = 2 if operator.time_dim == 1 and x.dim() > 2 and x.shape[1] == 40 else 1
            assert torch.equal(x[0], clean[name][0]), (which, name)
            own, want = (t[1].select(head_dim - 1, t.shape[head_dim] - 1) for t in (x, clean[name]))
            assert torch.equal(own, want), (which, name)
    again = operator.evaluate(form, tokens, state)
    assert all(torch.equal(x, clean[name]) for name, x in again.items())


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("form", FORMS)
def test_packed_neighbours_stay_clean(operator: Any, form: str, value: float) -> None:
    """Outputs, last states and gradients of the sequences before and behind, which share a chunk's tokens."""
    bounds = [0, 20, 45, 60]
    tokens, _ = operator.draw(60, batch=1)
    _, state = operator.draw(1, batch=3, seed=3)
    options = {"cu_seqlens": torch.tensor(bounds)}
    clean = operator.evaluate(form, tokens, state, **options)
    neighbours = torch.ones(60, dtype=torch.bool)
    neighbours[20:45] = False
    for which in range(len(tokens)):
        found = operator.evaluate(form, poison(operator, tokens, which, 30, value), state, **options)
        for name, x in found.items():
            if x.shape[0] == 3:
                assert torch.equal(x[[0, 2]], clean[name][[0, 2]]), (which, name)
            else:
                own, want = (t.movedim(operator.time_dim, 0)[neighbours] for t in (x, clean[name]))
                assert torch.equal(own, want), (which, name)


@pytest.mark.parametrize("value", BAD)
def test_tokens_before_stay_clean_up_to_the_chunk(operator: Any, value: float) -> None:
    """The recurrence keeps all tokens before it, the chunkwise form those of earlier chunks."""
    tokens, state = operator.draw(60)
    for form, kept in (("recurrent", 40), ("chunkwise_16", 32)):
        clean, _ = operator.run(form, tokens, state)
        for which in range(len(tokens)):
            found, _ = operator.run(form, poison(operator, tokens, which, 40, value), state)
            own, want = (x.narrow(operator.time_dim, 0, kept) for x in (found, clean))
            assert torch.equal(own, want), (form, which)


@pytest.mark.parametrize("form", FORMS)
def test_a_value_that_is_not_a_number_shows(form: str) -> None:
    """From its token on, in its column of V."""
    tokens, state = draw_mlstm(40)
    tokens[2][0, 1, 20, 3] = math.nan
    name, options = split_form(form)
    h = getattr(reference, f"mlstm_{name}")(*tokens, *state, **options)
    assert h[0, 1, 20:, 3].isnan().all()
    assert h[0, 1, :, :3].isfinite().all() and h[0, 1, :, 4:].isfinite().all()
