"""One token: against the recurrence, its errors, and which backend serves it."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tfla_tk
from tfla_tk import UnsupportedError, mlstm_chunkwise, mlstm_siging_chunkwise, mlstm_siging_step, mlstm_step
from tfla_tk.backends.tk import mlstm as tk
from tfla_tk.backends.triton import mlstm_kernels as triton
from tfla_tk.calls.mlstm import check_mlstm_step
from tfla_tk.ops.mlstm_decode import representable

from .decode_calls import draw_token


def as_sequence(token: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same as a sequence of one."""
    sequence = {name: x.unsqueeze(2) if name in "qkv" else x for name, x in token.items()}
    return {name if name in "qkvif" else f"{name}_initial": x for name, x in sequence.items()}


def test_step_is_a_sequence_of_one() -> None:
    inputs = draw_token(torch.float64)
    h, state = mlstm_step(**inputs)
    expected, last = mlstm_chunkwise(**as_sequence(inputs), return_last_states=True)
    torch.testing.assert_close((h, *state), (expected.squeeze(2), *last))
    assert {x.dtype for x in (h, *state)} == {torch.float64}


@pytest.mark.parametrize("normalize", [True, False])
def test_siging_step_is_a_sequence_of_one(normalize: bool) -> None:
    inputs = draw_token(torch.float64)
    del inputs["m"]
    h, (c, n) = mlstm_siging_step(**inputs, normalize=normalize)
    options = {"return_last_states": True, "normalize": normalize}
    expected, (c_last, n_last) = mlstm_siging_chunkwise(**as_sequence(inputs), **options)
    torch.testing.assert_close((h, c), (expected.squeeze(2), c_last))
    torch.testing.assert_close(n, n_last if normalize else inputs["n"].double())
    assert n.data_ptr() != inputs["n"].data_ptr()


def test_representable_keeps_the_memory() -> None:
    m = torch.tensor([[[7.99], [-1000.3], [0.0], [float("-inf")]]])
    c, n = torch.ones(1, 4, 2, 3), torch.ones(1, 4, 2)
    c_kept, n_kept, m_kept = representable(c, n, m, torch.bfloat16)
    assert torch.equal(m_kept, m.bfloat16().float()) and c_kept.dtype == torch.float32
    change = torch.tensor([[[7.99 - 8.0], [-1000.3 + 1000.0], [0.0], [0.0]]]).exp()
    torch.testing.assert_close(n_kept, change.expand_as(n), rtol=1e-4, atol=0)
    torch.testing.assert_close(c_kept, change[..., None].expand_as(c), rtol=1e-4, atol=0)


@pytest.mark.slow
def test_gradients() -> None:
    """Exact for h, and for e^m c and e^m n: m is a constant of the differentiation."""
    inputs = {name: x.double().requires_grad_() for name, x in draw_token().items()}
    m = inputs.pop("m").detach()

    def step(*tensors: Tensor) -> Tensor:
        return mlstm_step(*tensors, m)[0]

    assert torch.autograd.gradcheck(step, tuple(inputs.values()), atol=1e-5)
    _, (c, n, last) = mlstm_step(*inputs.values(), m)
    assert not last.requires_grad and c.requires_grad and n.requires_grad


def test_plans_are_kept_by_signature() -> None:
    """The same step again costs no validation, another gate or dtype is another plan."""
    inputs = draw_token()
    first = mlstm_step(**inputs)
    assert torch.equal(mlstm_step(**inputs)[0], first[0])
    assert mlstm_step(**draw_token(torch.bfloat16))[0].dtype == torch.bfloat16
    with pytest.raises(ValueError, match="eps"):
        mlstm_step(**inputs, eps=-1.0)


@pytest.mark.parametrize(
    "name, change, error",
    [
        ("q", lambda x: x[..., None], (ValueError, r"q: expected 3 dimensions \[B, NH, DHQK\]")),
        ("k", lambda x: x[..., :8], (ValueError, "k: expected shape")),
        ("v", lambda x: x.double(), (TypeError, "v: expected dtype torch.float32, the dtype of q")),
        ("v", lambda x: x[:2], (ValueError, "v: expected shape")),
        ("i", lambda x: x.squeeze(2), (ValueError, r"i: expected 3 dimensions \[B, NH, 1\], got 2")),
        ("f", lambda x: x[:1], (ValueError, r"f: expected shape \[B, NH, 1\] = .*, got \(1, ")),
        ("f", lambda x: x.long(), (TypeError, "f: expected dtype float16")),
        ("c", lambda x: x.mT, (ValueError, "c: expected shape")),
        ("n", lambda x: x.to("meta"), (ValueError, "n: expected device cpu")),
        ("m", lambda x: None, (TypeError, r"m: expected a tensor \[B, NH, 1\], got NoneType")),
    ],
)
def test_bad_arguments(
    name: str, change: Callable[[Tensor], Any], error: tuple[type[Exception], str]
) -> None:
    inputs = draw_token()
    with pytest.raises(error[0], match=error[1]):
        mlstm_step(**inputs | {name: change(inputs[name])})


def test_bad_options() -> None:
    expected = "None, torch.float16, torch.bfloat16, torch.float32 or torch.float64"
    with pytest.raises(ValueError, match=f"dtype_state: expected {expected}, got torch.int8"):
        mlstm_step(**draw_token(), dtype_state=torch.int8)
    for function, inputs in ((mlstm_step, draw_token()), (mlstm_siging_step, draw_token())):
        if function is mlstm_siging_step:
            del inputs["m"]
        with pytest.raises(TypeError, match=f"dtype_state: expected {expected}, got 'float32' of type str"):
            function(**inputs, dtype_state="float32")
    with pytest.raises(ValueError, match="backend: expected 'reference' for a step"):
        mlstm_step(**draw_token(), backend="reference:parallel")
    with pytest.raises(UnsupportedError, match=r"mlstm_step on backend 'triton': .*on cpu"):
        mlstm_step(**draw_token(), backend="triton")
    with pytest.raises(UnsupportedError, match="mlstm_step on backend 'tk'"):
        mlstm_step(**draw_token(), backend="tk")


# on a GPU, as far as it can be asked without one


def on_gpu(token: dict[str, Tensor], **changes: Any) -> Any:
    options = {"sigmoid_gate": False, "normalize": True, "eps": 1e-6, "dtype_state": None}
    call = check_mlstm_step(**token, **options)
    return dataclasses.replace(call, device=torch.device("cuda", 0), **changes)


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
    support = triton.supports_mlstm_step(on_gpu(draw_token(), **changes))
    assert support.ok == support.auto == (refusal is None) if refusal is None else not support.ok
    assert refusal is None or (refusal in support.reason and support.remedy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["auto", "tk"])
def test_tk_serves_steps(passes_for_a_gpu: None, fake_tk: Any, dtype: torch.dtype, backend: str) -> None:
    inputs = draw_token(dtype)
    fake_tk.verdict = tk.supports_mlstm_step(on_gpu(inputs))
    assert tfla_tk.which("mlstm_step", **inputs, backend=backend).backend == "tk"
    expected = mlstm_step(**inputs, backend="reference")
    h, state = mlstm_step(**inputs, backend=backend)  # the op computes the reference on a CPU
    torch.testing.assert_close((h, *state), (expected[0], *expected[1]))


@pytest.mark.parametrize("normalize", [True, False])
def test_gradients_come_from_the_chunkwise_kernel_by_name(
    passes_for_a_gpu: None, fake_tk: Any, normalize: bool
) -> None:
    inputs = draw_token(torch.bfloat16)
    support = tk.supports_mlstm_step(on_gpu(inputs, requires_grad=True))
    assert support.ok and not support.auto and "chunkwise kernel over one token" in support.reason
    assert not tk.supports_mlstm_step(on_gpu(draw_token(), requires_grad=True)).ok  # it takes no fp32
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


def test_no_head_at_all(fake_tk: Any) -> None:
    fake_tk.verdict = tfla_tk.Support(True)
    inputs = {name: x[:0] for name, x in draw_token().items()}
    h, (c, _, _) = mlstm_step(**inputs, backend="tk")
    assert h.shape == (0, 2, 32) and c.shape == (0, 2, 16, 32)


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
