"""The functions behind the names: signatures, states that may be overwritten, states in 16 bits."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tfla_tk import mlstm_chunkwise, mlstm_siging_chunkwise, mlstm_step
from tfla_tk.backends.tk import device
from tfla_tk.integrations.xlstm import kernels

from .conftest import draw, relative_error

SIGNATURES = [
    ("chunkwise.triton_xl_chunk", "mlstm_chunkwise__xl_chunk", kernels.chunkwise),
    ("chunkwise.triton_limit_chunk", "mlstm_chunkwise__limit_chunk", kernels.chunkwise),
    ("chunkwise.native", "mlstm_chunkwise__native_custbw", kernels.chunkwise),
    ("chunkwise.triton_xl_chunk_siging", "mlstm_siging_chunkwise__xl_chunk", kernels.chunkwise_siging),
    ("recurrent.native_step", "mlstm_recurrent_step__native", kernels.step),
]


@pytest.mark.parametrize("module, name, ours", SIGNATURES)
def test_signatures(mlstm_kernels: Any, module: str, name: str, ours: Callable[..., Any]) -> None:
    """Every argument of theirs is taken; positions agree up to the first that is not."""
    theirs = getattr(importlib.import_module(f"mlstm_kernels.torch.{module}"), name)
    names = [n for n, p in inspect.signature(theirs).parameters.items() if p.kind is not p.VAR_KEYWORD]
    own = [n for n, p in inspect.signature(ours).parameters.items() if p.kind is not p.VAR_KEYWORD]
    assert set(names) <= set(own) | kernels.TUNING
    positional = names.index("eps") + 1
    assert names[:positional] == own[:positional]


def test_tuning_arguments() -> None:
    inputs = draw(40)
    expected = mlstm_chunkwise(**inputs)
    found = kernels.chunkwise(**inputs, chunk_size=24, siz_b_L_loop=32, recompute_states_in_bw=False)
    torch.testing.assert_close(found, expected)
    with pytest.raises(TypeError, match="unexpected arguments siz_b_wrong"):
        kernels.chunkwise(**inputs, siz_b_wrong=1)


@pytest.mark.filterwarnings("error:mlstm_chunkwise. q has")
def test_nothing_is_told_of_the_layout() -> None:
    kernels.chunkwise(**draw(1))


@pytest.mark.parametrize("normalize", [True, False])
def test_sigmoid_gate_has_three_states(normalize: bool) -> None:
    inputs = draw(40)
    h, (c, n, m) = kernels.chunkwise_siging(**inputs, return_last_states=True, normalize=normalize)
    expected, (c_last, n_last) = mlstm_siging_chunkwise(
        **inputs, return_last_states=True, normalize=normalize
    )
    for found, want in ((h, expected), (c, c_last), (n, n_last)):
        torch.testing.assert_close(found, want)
    assert m.shape == (2, 2, 1) and not m.any()

    token = {name: x[:, :, -1] if x.dim() == 4 else x[:, :, -1:] for name, x in inputs.items()}
    before = {name: x[:, :, :-1] for name, x in inputs.items()}
    _, state = kernels.chunkwise_siging(**before, return_last_states=True, normalize=normalize)
    h_step, last = kernels.step_siging(*token.values(), *state, normalize=normalize)
    torch.testing.assert_close(h_step, h[:, :, -1])
    for found, want in zip(last, (c, n, m), strict=True):
        torch.testing.assert_close(found, want)


@pytest.mark.parametrize("function", ["chunkwise", "chunkwise_siging", "step", "step_siging"])
@pytest.mark.parametrize("overwritten", ["initial", "last"])
def test_states_may_be_overwritten_before_the_backward(function: str, overwritten: str) -> None:
    """Models copy a state over the one before it, in place."""
    step = function.startswith("step")
    inputs = {
        name: (x[:, :, 0] if x.dim() == 4 else x[:, :, :1]) if step else x for name, x in draw(20).items()
    }
    inputs = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 2, 16, 32), (2, 2, 16), (2, 2, 1))
    options = {} if step else {"return_last_states": True}

    def gradients(overwrite: bool) -> list[Tensor]:
        generator.manual_seed(0)
        state = [torch.randn(shape, generator=generator) for shape in shapes]
        h, last = getattr(kernels, function)(*inputs.values(), *state, **options)
        loss = h.square().sum() + last[0].sum()
        if overwrite:
            with torch.no_grad():
                for x in state if overwritten == "initial" else last:
                    x.fill_(7.0)
        return list(torch.autograd.grad(loss, list(inputs.values())))

    for found, truth in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(found, truth) and truth.any()


@pytest.mark.parametrize("through", ["step", "chunkwise"])
def test_forgetting_survives_a_16_bit_state(through: str) -> None:
    """A decay of 1 % per token, 200 times, m near 8: where m alone is rounded, nothing is ever forgotten."""
    tokens = 200
    inputs = draw(tokens + 1)
    i = torch.full_like(inputs["i"], -30.0)
    i[:, :, 0] = 8.0
    inputs |= {"i": i, "f": torch.full_like(i, 4.6)}
    truth, (c_truth, _, m_truth) = mlstm_chunkwise(
        **{name: x.double() for name, x in inputs.items()}, return_last_states=True
    )
    stored = [x.bfloat16() for x in _zero_state()]
    rounded = [x.bfloat16() for x in _zero_state()]
    for t in range(tokens + 1):
        token = {n: x[:, :, t : t + 1] for n, x in inputs.items()}
        squeezed = [x.squeeze(2) if x.dim() == 4 else x for x in token.values()]
        if through == "step":
            _, last = kernels.step(*squeezed, *stored)
        else:
            _, last = kernels.chunkwise(**token, **_initial(stored), return_last_states=True)
        for x, new in zip(stored, last, strict=True):
            x.copy_(new)
        _, last = mlstm_step(*squeezed, *rounded)
        for x, new in zip(rounded, last, strict=True):
            x.copy_(new)
    memory = c_truth * m_truth[..., None].exp()
    found, without = (state[0].double() * state[2].double()[..., None].exp() for state in (stored, rounded))
    assert truth.isfinite().all()
    assert relative_error(without, memory) > 1.0
    assert relative_error(found, memory) < 0.2


def from_a_state(
    seq: int, dtype: torch.dtype = torch.float32, stored: torch.dtype | None = None
) -> dict[str, Any]:
    """Arguments of the chunkwise functions that go on from a state."""
    generator = torch.Generator().manual_seed(0)
    state = (torch.randn(x.shape, generator=generator) for x in _zero_state())
    kept = [x.to(stored or torch.float32) for x in state]
    return draw(seq, dtype=dtype) | _initial(kept) | {"return_last_states": True}


Calls = list[tuple[str, str]]


@pytest.mark.parametrize("function", ["chunkwise", "chunkwise_siging"])
@pytest.mark.parametrize("backend", ["auto", "tk"])
@pytest.mark.parametrize("seq", [2, 16])
def test_a_few_tokens(sequence_calls: Calls, function: str, backend: str, seq: int) -> None:
    """By the kernel for them; the result is that of the chunkwise one."""
    run, inputs = getattr(kernels, function), from_a_state(seq)
    h, state = run(**inputs, backend=backend)
    gate = "siging_" if "siging" in function else ""
    assert sequence_calls == [(f"mlstm_{gate}sequence", "auto")]
    expected, last = run(**inputs, backend="reference")
    assert sequence_calls[1:] == [(f"mlstm_{gate}chunkwise", "reference")]
    torch.testing.assert_close((h, *state), (expected, *last))


@pytest.mark.parametrize(
    "change",
    [
        {"seq": 1},
        {"seq": 17},
        {"dtype": torch.float64},
        {"backend": "triton"},
        {"backend": "reference:parallel"},
        {"return_last_states": False},
        {"c_initial": None, "n_initial": None, "m_initial": None},
    ],
)
def test_what_is_left_to_the_chunkwise_kernel(sequence_calls: Calls, change: dict[str, Any]) -> None:
    """With the backend that was asked for, never by the reference's recurrence."""
    shape = {"seq": 4} | {name: x for name, x in change.items() if name in ("seq", "dtype")}
    options = {name: x for name, x in change.items() if name not in shape}
    kernels.chunkwise(**from_a_state(**shape) | options)
    kernels.chunkwise_siging(**from_a_state(**shape) | options)
    backend = change.get("backend", "auto")
    assert sequence_calls == [("mlstm_chunkwise", backend), ("mlstm_siging_chunkwise", backend)]


def test_a_few_tokens_with_gradients(sequence_calls: Calls) -> None:
    inputs = from_a_state(4)
    inputs["k"] = inputs["k"].clone().requires_grad_()
    h, _ = kernels.chunkwise(**inputs)
    assert torch.autograd.grad(h.sum(), inputs["k"])[0].any()
    with torch.no_grad():
        kernels.chunkwise(**inputs)
    assert [name for name, _ in sequence_calls] == ["mlstm_chunkwise", "mlstm_sequence"]


def test_a_few_tokens_where_tk_serves_none(sequence_calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "device_fault", lambda index: ("no nvcc", "install it"))
    kernels.chunkwise(**from_a_state(4))
    assert sequence_calls == [("mlstm_chunkwise", "auto")]


@pytest.mark.slow
@pytest.mark.parametrize("function", ["chunkwise", "chunkwise_siging"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_of_the_state_after_a_few_tokens(
    sequence_calls: Calls, function: str, stored: torch.dtype, kept: torch.dtype
) -> None:
    """Those of the chunkwise path; m survives the dtype that the state came in."""
    run, inputs = getattr(kernels, function), from_a_state(4, torch.bfloat16, stored)
    h, (c, n, m) = run(**inputs, dtype_state=kept)
    expected, last = run(**inputs, dtype_state=kept, backend="reference")
    assert [name.rpartition("_")[2] for name, _ in sequence_calls] == ["sequence", "chunkwise"]
    assert h.dtype == torch.bfloat16 and [x.dtype for x in (c, n, m)] == [x.dtype for x in last] == [kept] * 3
    assert relative_error(h, expected) < 4e-3
    narrow = stored if stored.itemsize == 2 else kept
    assert torch.equal(m.to(narrow).to(kept), m)
    for found, want in ((c, last[0]), (n[..., None], last[1][..., None])):
        memory, truth = (x.double() * y.double()[..., None].exp() for x, y in ((found, m), (want, last[2])))
        assert relative_error(memory, truth) < (1e-6 if kept == torch.float32 else 8e-3)


def test_the_normaliser_that_is_not_used(sequence_calls: Calls) -> None:
    """Zeros, as the chunkwise function returns it; without an initial one there is nothing to hand on."""
    inputs = from_a_state(4)
    _, (_, n, _) = kernels.chunkwise_siging(**inputs, normalize=False)
    assert not n.any() and inputs["n_initial"].any()
    kernels.chunkwise_siging(**inputs | {"n_initial": None}, normalize=False)
    assert [name for name, _ in sequence_calls] == ["mlstm_siging_sequence", "mlstm_siging_chunkwise"]


def test_a_few_tokens_under_autocast(sequence_calls: Calls) -> None:
    """q, k, v are cast as for the chunkwise function."""
    inputs = from_a_state(4) | {"autocast_kernel_dtype": torch.float16}
    with torch.autocast("cpu", torch.bfloat16):
        h, state = kernels.chunkwise(**inputs)
        expected, last = kernels.chunkwise(**inputs, backend="reference")
    assert [name for name, _ in sequence_calls] == ["mlstm_sequence", "mlstm_chunkwise"]
    assert h.dtype == expected.dtype == torch.float16
    torch.testing.assert_close((h, *state), (expected, *last), rtol=2e-3, atol=2e-3)


def _zero_state() -> tuple[Tensor, Tensor, Tensor]:
    return torch.zeros(2, 2, 16, 32), torch.zeros(2, 2, 16), torch.zeros(2, 2, 1)


def _initial(state: list[Tensor]) -> dict[str, Tensor]:
    return dict(zip(("c_initial", "n_initial", "m_initial"), state, strict=True))
