"""A few tokens from a state on: against as many steps, errors, and which backend serves them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tfla_tk
from tfla_tk import UnsupportedError, decode, mlstm_sequence, mlstm_siging_sequence, mlstm_step
from tfla_tk.backends.tk import mlstm as tk

from .conftest import BY_GATE
from .decode_calls import DECODES, NAMES, draw_tokens


def token_of(tokens: dict[str, Tensor], t: int) -> dict[str, Tensor]:
    """The arguments of the step of one token, but for the state."""
    return {
        name: tokens[name][:, :, t] if name in "qkv" else tokens[name][:, :, t : t + 1] for name in NAMES[:5]
    }


@pytest.mark.parametrize("seq", [1, 2, 16, 40])
@pytest.mark.parametrize("gate", BY_GATE)
def test_a_sequence_is_as_many_steps(gate: str, seq: int) -> None:
    """The reference takes any number of tokens."""
    name, options = BY_GATE[gate]
    inputs = draw_tokens(torch.float64, seq)
    if gate != "exp":
        del inputs["m"]
    h, state = getattr(tfla_tk, f"{name}_sequence")(**inputs, **options)
    expected = [inputs[name] for name in "cnm" if name in inputs]
    for t in range(seq):
        given = dict(zip("cnm", expected, strict=False))
        out, expected = getattr(tfla_tk, f"{name}_step")(**token_of(inputs, t), **given, **options)
        torch.testing.assert_close(h[:, :, t], out)
    torch.testing.assert_close(state, tuple(expected))
    assert {x.dtype for x in (h, *state)} == {torch.float64}
    assert state[1].data_ptr() != inputs["n"].data_ptr()


def test_steps_and_sequences_keep_plans_of_their_own() -> None:
    """A plan of the one does not let arguments of the other pass."""
    inputs = draw_tokens(seq=1)
    state = {name: inputs[name] for name in "cnm"}
    token = token_of(inputs, 0)
    for _ in range(2):
        mlstm_step(**token, **state)
        mlstm_sequence(**inputs)
    with pytest.raises(ValueError, match="q: expected 4 dimensions"):
        mlstm_sequence(**token, **state)
    with pytest.raises(ValueError, match="q: expected 3 dimensions"):
        mlstm_step(**inputs)


# on a GPU, as far as it can be asked without one


@pytest.mark.parametrize("sigmoid_gate", [False, True])
def test_whether_a_sequence_is_on_tk(fake_tk: Any, sigmoid_gate: bool) -> None:
    """What the call does, from the plan that it keeps."""
    inputs = draw_tokens()
    if sigmoid_gate:
        inputs["m"] = None
    options = {"eps": 1e-6, "dtype_state": None}
    rest = {"sigmoid_gate": sigmoid_gate, "normalize": True}
    for serves in (False, True):
        fake_tk.verdict = tfla_tk.Support(serves)
        decode._sequence.plans.clear()
        assert decode.is_sequence_on_tk(tuple(inputs.values()), **rest, **options) == serves
        given = {name: x for name, x in inputs.items() if x is not None}
        (mlstm_siging_sequence if sigmoid_gate else mlstm_sequence)(**given, **options)
        assert len(decode._sequence.plans) == 1


@pytest.mark.parametrize("changes", [{"seq": 17}, {"requires_grad": True}])
def test_what_tk_leaves_to_the_chunkwise_kernel(
    passes_for_a_gpu: None, fake_tk: Any, changes: dict[str, Any]
) -> None:
    fake_tk.verdict = tk.supports_mlstm_sequence(
        DECODES["sequence"].on_gpu(draw_tokens(torch.bfloat16), **changes)
    )
    inputs = draw_tokens(torch.bfloat16)
    assert tfla_tk.which("mlstm_sequence", **inputs).backend == "reference"
    with pytest.raises(UnsupportedError, match="use mlstm_chunkwise"):
        mlstm_sequence(**inputs, backend="tk")


@pytest.mark.parametrize("inplace", [False, True])
def test_nothing_to_compute(reference_or_tk: str, inplace: bool) -> None:
    """No head, and no token: the state stays as it is."""
    inputs = {name: x[:0] for name, x in draw_tokens().items()}
    h, (c, _, _) = mlstm_sequence(**inputs, backend=reference_or_tk)
    assert h.shape == (0, 2, 5, 32) and c.shape == (0, 2, 16, 32)
    inputs = draw_tokens(seq=0)
    h, state = mlstm_sequence(**inputs, inplace=inplace, backend=reference_or_tk)
    assert h.shape == (3, 2, 0, 32)
    for name, x in zip("cnm", state, strict=True):
        assert torch.equal(x, inputs[name]) and (x is inputs[name]) == inplace
