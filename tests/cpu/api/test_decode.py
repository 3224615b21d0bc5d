"""One token: against the recurrence, its errors, and which backend serves it."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

import tfla_tk
from tfla_tk import mlstm_siging_step, mlstm_step
from tfla_tk.backends.tk import mlstm as tk
from tfla_tk.backends.triton import mlstm_kernels as triton
from tfla_tk.ops.mlstm_decode import representable

from .conftest import BY_GATE
from .decode_calls import DECODES, draw_token


def as_sequence(token: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same as a sequence of one."""
    sequence = {name: x.unsqueeze(2) if name in "qkv" else x for name, x in token.items()}
    return {name if name in "qkvif" else f"{name}_initial": x for name, x in sequence.items()}


@pytest.mark.parametrize("gate", BY_GATE)
def test_step_is_a_sequence_of_one(gate: str) -> None:
    name, options = BY_GATE[gate]
    inputs = draw_token(torch.float64)
    if gate != "exp":
        del inputs["m"]
    h, (c, n, *m) = getattr(tfla_tk, f"{name}_step")(**inputs, **options)
    function = getattr(tfla_tk, f"{name}_chunkwise")
    expected, (c_last, n_last, *m_last) = function(**as_sequence(inputs), return_last_states=True, **options)
    torch.testing.assert_close((h, c, m), (expected.squeeze(2), c_last, m_last))
    torch.testing.assert_close(n, inputs["n"].double() if gate == "unnormalised" else n_last)
    assert {x.dtype for x in (h, c, n)} == {torch.float64} and n.data_ptr() != inputs["n"].data_ptr()


def test_representable_keeps_the_memory() -> None:
    m = torch.tensor([[[7.99], [-1000.3], [0.0], [float("-inf")]]])
    c, n = torch.ones(1, 4, 2, 3), torch.ones(1, 4, 2)
    c_kept, n_kept, m_kept = representable(c, n, m, torch.bfloat16)
    assert torch.equal(m_kept, m.bfloat16().float()) and c_kept.dtype == torch.float32
    change = torch.tensor([[[7.99 - 8.0], [-1000.3 + 1000.0], [0.0], [0.0]]]).exp()
    torch.testing.assert_close(n_kept, change.expand_as(n), rtol=1e-4, atol=0)
    torch.testing.assert_close(c_kept, change[..., None].expand_as(c), rtol=1e-4, atol=0)


# on a GPU, as far as it can be asked without one


@pytest.mark.parametrize(
    "changes, refusal",
    [
        ({}, None),
        ({"sigmoid_gate": True}, "no step with sigmoid input gate"),
        ({"dtype": torch.float64}, "no float64"),
        ({"requires_grad": True}, "no gradients"),
        ({"dim_qk": 48}, "DHQK = 48"),
        ({"dim_v": 96}, "DHHV = 96"),
        ({"batch": 1 << 23}, "int32 offsets"),
    ],
)
def test_triton_step(passes_for_a_gpu: None, changes: dict[str, Any], refusal: str | None) -> None:
    support = triton.supports_mlstm_step(DECODES["step"].on_gpu(draw_token(), **changes))
    assert support.ok == support.auto == (refusal is None) if refusal is None else not support.ok
    assert refusal is None or (refusal in support.reason and support.remedy)


@pytest.mark.parametrize("normalize", [True, False])
def test_gradients_come_from_the_chunkwise_kernel_by_name(
    passes_for_a_gpu: None, fake_tk: Any, normalize: bool
) -> None:
    inputs = draw_token(torch.bfloat16)
    step = DECODES["step"]
    support = tk.supports_mlstm_step(step.on_gpu(inputs, requires_grad=True))
    assert support.ok and not support.auto and "chunkwise kernel over one token" in support.reason
    assert not tk.supports_mlstm_step(
        DECODES["step"].on_gpu(draw_token(), requires_grad=True)
    ).ok  # it takes no fp32
    del inputs["m"]
    fake_tk.verdict = support
    inputs["q"].requires_grad_()
    assert tfla_tk.which("mlstm_siging_step", **inputs).backend == "reference"
    found = mlstm_siging_step(**inputs, normalize=normalize, backend="tk")
    want = mlstm_siging_step(**inputs, normalize=normalize)
    torch.testing.assert_close((found[0], *found[1]), (want[0], *want[1]))
    torch.autograd.grad(found[0].float().sum(), inputs["q"])


@pytest.mark.parametrize("wider", ["if", "cnm", "n", "ifcnm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_default_dtype_of_the_state_follows_q(
    reference_or_tk: str, dtype: torch.dtype, wider: str
) -> None:
    """Of a step and of a few tokens, as of whole sequences."""
    inputs = {name: x.double() if name in wider else x for name, x in draw_token(dtype).items()}
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    h, state = mlstm_step(**inputs, backend=reference_or_tk)
    assert h.dtype == dtype and {x.dtype for x in state} == {expected}
    inputs |= {name: inputs[name].unsqueeze(2) for name in "qkv"}
    h, state = tfla_tk.mlstm_sequence(**inputs, backend=reference_or_tk)
    assert h.dtype == dtype and {x.dtype for x in state} == {expected}


def test_the_triton_step_gets_what_it_takes(passes_for_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names and order of the arguments, with mlstm_kernels' native step in its place."""
    pytest.importorskip("mlstm_kernels")
    theirs = importlib.import_module("mlstm_kernels.torch.recurrent.triton_step")
    native = importlib.import_module("mlstm_kernels.torch.recurrent.native_step")
    monkeypatch.setattr(theirs, "mlstm_recurrent_step__triton", native.mlstm_recurrent_step__native)
    monkeypatch.setattr(triton, "supports_mlstm_step", lambda call, variant=None: tfla_tk.Support(True))
    inputs = draw_token()
    h, state = mlstm_step(**inputs, backend="triton")
    expected = mlstm_step(**inputs)
    torch.testing.assert_close((h, *state), (expected[0], *expected[1]), rtol=1e-4, atol=1e-5)
