"""The reference beside the plain PyTorch functions of mlstm_kernels and fla, in fp32."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from tfla_tk import reference

from .conftest import assert_close, draw_mlstm

Tensors = list[Tensor]

TOL = 2e-4


def native(package: str, module: str, name: str) -> Callable[..., Any]:
    pytest.importorskip(package)
    return getattr(importlib.import_module(f"{package}.{module}"), name)


@pytest.fixture
def inputs() -> tuple[Tensors, Tensors]:
    tokens, state = draw_mlstm(128, dims=(16, 32))
    return [x.float() for x in tokens], [x.float() for x in state]


@pytest.mark.parametrize("with_state", [False, True], ids=["zero_state", "state"])
@pytest.mark.parametrize(
    ("module", "name", "options"),
    [
        ("torch.chunkwise.native.fwbw", "mlstm_chunkwise__native_autograd", {"chunk_size": 64}),
        ("torch.recurrent.native_sequence", "mlstm_recurrent_sequence__native_fw", {}),
    ],
)
def test_mlstm(
    module: str, name: str, options: dict[str, Any], with_state: bool, inputs: tuple[Tensors, Tensors]
) -> None:
    tokens, state = inputs
    initial = state if with_state else []
    expected, expected_last = native("mlstm_kernels", module, name)(
        *tokens, *initial, return_last_states=True, **options
    )
    h, last = reference.mlstm_chunkwise(*tokens, *initial, return_last_states=True)
    assert_close(h, expected, tol=TOL)
    assert_close(last, expected_last, tol=TOL)


def test_mlstm_step(inputs: tuple[Tensors, Tensors]) -> None:
    (q, k, v, i, f), state = inputs
    args = (q[:, :, 0], k[:, :, 0], v[:, :, 0], i[:, :, :1], f[:, :, :1], *state)
    name = "mlstm_recurrent_step__native"
    expected, expected_last = native("mlstm_kernels", "torch.recurrent.native_step", name)(*args)
    h, last = reference.mlstm_step(*args)
    assert_close(h, expected, tol=TOL)
    assert_close(last, expected_last, tol=TOL)


@pytest.mark.parametrize("normalised", [True, False])
def test_mlstm_siging(normalised: bool, inputs: tuple[Tensors, Tensors]) -> None:
    name = "mlstm_siging_parallel__native_autograd"
    function = native("mlstm_kernels", "torch.parallel.native_siging.fwbw", name)
    h = reference.mlstm_siging_chunkwise(*inputs[0], normalize=normalised)
    assert_close(h, function(*inputs[0], normalize=normalised), tol=TOL)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Triton is not supported")
@pytest.mark.parametrize("family", ["simple_gla", "gla", "gated_delta_rule", "kda"])
def test_linear(family: str) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 50, 3, 16), torch.randn(2, 50, 3, 16), torch.randn(2, 50, 3, 32)
    k = normalize(k, dim=-1)
    g = logsigmoid(torch.randn(q.shape if family in ("gla", "kda") else q.shape[:3]))
    beta = {"beta": torch.rand(2, 50, 3)} if family in ("gated_delta_rule", "kda") else {}
    state = torch.randn(2, 3, 16, 32)
    options = {"initial_state": state, "output_final_state": True}
    function = native("fla", f"ops.{family}.naive", f"naive_recurrent_{family}")
    o, last = getattr(reference, f"{family}_chunkwise")(q, k, v, g, **beta, **options)
    gate = {"gk" if family == "gla" else "g": g}
    expected, expected_last = function(q, k, v, **gate, **beta, **options)
    assert_close(o, expected, tol=TOL)
    assert_close(last, expected_last, tol=TOL)


@pytest.mark.filterwarnings("ignore:Triton is not supported")
def test_retention() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 50, 3, 16), torch.randn(2, 50, 3, 16), torch.randn(2, 50, 3, 32)
    expected = native("fla", "ops.retention.naive", "naive_retention")(
        *(x.transpose(1, 2) for x in (q, k, v))
    )
    o, _ = reference.simple_gla_chunkwise(q, k, v, g_gamma=reference.retention_log_decay(3))
    assert_close(o, expected.transpose(1, 2), tol=TOL)
