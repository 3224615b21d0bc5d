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
from tfla_tk.integrations.xlstm import kernels

Draw = Callable[..., dict[str, Tensor]]
RelErr = Callable[[Tensor, Tensor], float]

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


def test_tuning_arguments(draw: Draw) -> None:
    inputs = draw(40)
    expected = mlstm_chunkwise(**inputs)
    found = kernels.chunkwise(**inputs, chunk_size=24, siz_b_L_loop=32, recompute_states_in_bw=False)
    torch.testing.assert_close(found, expected)
    with pytest.raises(TypeError, match="unexpected arguments siz_b_wrong"):
        kernels.chunkwise(**inputs, siz_b_wrong=1)


@pytest.mark.parametrize("normalize", [True, False])
def test_sigmoid_gate_has_three_states(draw: Draw, normalize: bool) -> None:
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
def test_states_may_be_overwritten_before_the_backward(draw: Draw, function: str, overwritten: str) -> None:
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


def test_nothing_is_copied_without_gradients(draw: Draw, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = draw(20)
    _, state = kernels.chunkwise(**inputs, return_last_states=True)
    monkeypatch.setattr(kernels, "_private", None)
    monkeypatch.setattr(kernels, "_handed_out", None)
    tensors = [x.requires_grad_() for x in inputs.values()]
    with torch.no_grad():
        kernels.chunkwise(*tensors, *state, return_last_states=True)


@pytest.mark.parametrize("through", ["step", "chunkwise"])
def test_forgetting_survives_a_16_bit_state(draw: Draw, rel_err: RelErr, through: str) -> None:
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
    assert rel_err(without, memory) > 1.0
    assert rel_err(found, memory) < 0.2


def _zero_state() -> tuple[Tensor, Tensor, Tensor]:
    return torch.zeros(2, 2, 16, 32), torch.zeros(2, 2, 16), torch.zeros(2, 2, 1)


def _initial(state: list[Tensor]) -> dict[str, Tensor]:
    return dict(zip(("c_initial", "n_initial", "m_initial"), state, strict=True))
