"""KDA beyond what every operator has: decays of every size in one chunk, and the states between chunks."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tfla_tk import reference

from .conftest import assert_close, linear_drawer

DECAYS = (0.0, -1e-4, -1.0, -50.0, -1e3, -1e5)
draw = linear_drawer("Gb", groups=2)


@pytest.mark.parametrize("form", ["kda_chunkwise", "kda_parallel"])
def test_decays_mixed_by_channel_in_fp32(form: str) -> None:
    """As exact as milder ones: what decays count is the product of e^g, however it comes about."""
    (q, k, v, g, beta), (state,) = draw(100)
    kind = torch.randint(len(DECAYS), g.shape, generator=torch.Generator().manual_seed(0))
    g = torch.tensor(DECAYS, dtype=torch.float64)[kind]
    inputs = q, k, v, g, beta
    options = {"output_final_state": True}
    expected = reference.kda_recurrent(*inputs, initial_state=state, **options)
    narrow = [x.float() for x in (*inputs, state)]
    found = getattr(reference, form)(*narrow[:-1], initial_state=narrow[-1], **options)
    assert_close(list(found), list(expected), tol=1e-5)


@pytest.mark.parametrize("offsets", [None, [0, 0, 40, 41, 100]])
def test_states_between_chunks(offsets: list[int] | None) -> None:
    """Each is what the recurrence leaves of the tokens before its chunk."""
    tokens, _ = draw(100, batch=1)
    rows = 1 if offsets is None else len(offsets) - 1
    _, (state,) = draw(1, batch=rows, seed=3)
    cu_seqlens = None if offsets is None else torch.tensor(offsets)
    options = {"initial_state": state, "output_final_state": True, "cu_seqlens": cu_seqlens}
    o, last, between = reference.kda_with_states(*tokens, **options, chunk_size=32)
    assert_close([o, last], list(reference.kda_chunkwise(*tokens, **options, chunk_size=32)), tol=0.0)
    bounds = [0, 100] if offsets is None else offsets
    expected = []
    for row, (start, end) in enumerate(pairwise(bounds)):
        for border in range(start, end, 32):
            before = [x[:, start:border] for x in tokens]
            expected.append(
                reference.kda_recurrent(*before, initial_state=state[row : row + 1], output_final_state=True)[
                    1
                ]
            )
    assert_close(between, torch.stack(expected, dim=1))


def test_no_states_between_no_tokens() -> None:
    tokens, (state,) = draw(0)
    _, last, between = reference.kda_with_states(*tokens, initial_state=state)
    assert last is None and between.shape == (2, 0, 4, 8, 6)
