"""Errors of the delta rule beside those of fla."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tfla_tk import chunk_gated_delta_rule
from tfla_tk.bench import fla
from tfla_tk.bench.inputs import cotangent_like, delta_rule_inputs
from tfla_tk.bench.shapes import Shape as BenchShape

from .conftest import relative_error
from .linear import Tensors, exact, run, train
from .test_delta_rule import draw


@pytest.mark.usefixtures("hardly_tuned")
def test_no_less_accurate_than_triton() -> None:
    x = draw(2, 500, states=False)
    truth = run(exact(x), "reference", chunk_gated_delta_rule)["o"]
    errors = {
        backend: (run(x, backend, chunk_gated_delta_rule)["o"].double() - truth).norm() / truth.norm()
        for backend in ("tk", "triton")
    }
    assert errors["tk"] <= 1.05 * errors["triton"], errors


def draw_as_measured(
    seq: int, heads: int, dims: tuple[int, int], forget_bias: float = 3.0
) -> tuple[Tensors, list[Tensor]]:
    """Inputs of the gated delta rule as the benchmark draws them, gradients of o and of the last state."""
    shape = BenchShape(B=1, T=seq, H=heads, K=dims[0], V=dims[1])
    x = delta_rule_inputs(shape, torch.bfloat16, torch.device("cuda"), forget_bias=forget_bias)
    return x, [cotangent_like(x["v"], 0), torch.zeros(1, heads, *dims, device="cuda")]


# errors of dg that fla 0.6.0 has at 4 x 4,096 tokens (bench/results)
@pytest.mark.parametrize(
    ("heads", "dims", "of_fla"),
    [(32, (64, 64), 3.53e-3), (30, (96, 192), 3.45e-3), (24, (256, 512), 3.30e-3)],
    ids=str,
)
def test_dg_is_no_less_accurate_than_what_is_on_record(
    heads: int, dims: tuple[int, int], of_fla: float
) -> None:
    x, given = draw_as_measured(4096, heads, dims)
    found = train(x, function=chunk_gated_delta_rule, given=given)["dg"]
    truth = train(exact(x), "reference", chunk_gated_delta_rule, [t.double() for t in given])["dg"]
    assert relative_error(found, truth) <= 1.02 * of_fla


@pytest.mark.usefixtures("hardly_tuned", "fla_alone")
@pytest.mark.parametrize("forget_bias", [0.0, 2.0, 3.0])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (96, 192)], ids="{0[0]}_{0[1]}".format)
def test_gradients_are_no_less_accurate_than_triton(dims: tuple[int, int], forget_bias: float) -> None:
    pytest.importorskip("fla")
    x, given = draw_as_measured(2048, 16, dims, forget_bias)

    def of_fla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Any:
        return fla.call("chunk_gated_delta_rule", q, k, v, g, beta, output_final_state=True)

    # fla refuses this backward where its Triton may be wrong: a wrong gradient is no bound
    with fla.lifted_guard("chunk_gated_delta_rule"):
        theirs = train(x, function=of_fla, given=given)
    found = train(x, function=chunk_gated_delta_rule, given=given)
    truth = train(exact(x), "reference", chunk_gated_delta_rule, [t.double() for t in given])
    errors = {name: [relative_error(y[name], t) for y in (found, theirs)] for name, t in truth.items()}
    assert not {name: pair for name, pair in errors.items() if not pair[0] <= 1.02 * pair[1]}
