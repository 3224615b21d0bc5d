"""Errors of the delta rule beside those of fla, and of the gradients of a log decay's own parameters."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import softplus

from tfla_tk import chunk_gated_delta_rule, chunk_simple_gla
from tfla_tk.bench import fla
from tfla_tk.bench.inputs import cotangent_like, delta_rule_inputs
from tfla_tk.bench.shapes import Shape as BenchShape
from tfla_tk.reference import delta_log_decay

from .accuracy import GRADIENT_TOLERANCE, relative_error
from .delta_rule import SEGMENT, draw, function_of, shape_of, ungated
from .linear import VANISHED, Normal, Tensors, draw_cotangents, exact, run, train


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


@pytest.mark.parametrize("dim_v", [256, 384, 512])
def test_slices_of_v_are_added_up_in_fp32(dim_v: int) -> None:
    """The sum of two, three and four is rounded once, as the result of one slice is."""
    errors = []
    for columns in (128, dim_v):
        x, given = draw_as_measured(1000, 8, (256, columns))
        found = train(x, function=chunk_gated_delta_rule, given=given)
        truth = train(exact(x), "reference", chunk_gated_delta_rule, [t.double() for t in given])
        errors.append({name: relative_error(found[name], truth[name]) for name in ("dq", "dk")})
    assert all(error <= 1.1 * errors[0][name] for name, error in errors[1].items()), errors


def assert_no_less_accurate_than_fla(x: Tensors) -> None:
    """Results and gradients, but those that have vanished; of o, whose gradient is drawn."""
    batch, _, heads, dim_v = x["v"].shape
    given = [cotangent_like(x["v"], 0), torch.zeros(batch, heads, x["q"].shape[-1], dim_v, device="cuda")]
    function = function_of(x)
    of_its_name = "chunk_gated_delta_rule" if "g" in x else "chunk_delta_rule"

    def of_fla(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None = None, **options: Any) -> Any:
        gates = [beta] if g is None else [g, beta]
        return fla.call(of_its_name, q, k, v, *gates, output_final_state=True)

    # fla refuses the gated backward where its Triton may be wrong: a wrong gradient is no bound
    with fla.lifted_guard(of_its_name):
        theirs = run(x, function=of_fla) | train(x, function=of_fla, given=given)
    found = run(x, function=function) | train(x, function=function, given=given)
    truth = run(exact(x), "reference", function)
    most = dict.fromkeys(truth, 1.05)
    gradients = train(exact(x), "reference", function, [t.double() for t in given])
    least = VANISHED * given[0].double().norm()
    truth |= {name: t for name, t in gradients.items() if t.norm() >= least}
    errors = {name: [relative_error(y[name], t) for y in (found, theirs)] for name, t in truth.items()}
    worse = {name: e for name, e in errors.items() if not e[0] <= most.get(name, 1.02) * e[1]}
    assert not worse, worse


@pytest.mark.usefixtures("hardly_tuned", "fla_alone")
@pytest.mark.parametrize("forget_bias", [0.0, 2.0, 2.5, 3.0])
@pytest.mark.parametrize("betas", ["usual", "one"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (96, 192)], ids="{0[0]}_{0[1]}".format)
def test_gradients_are_no_less_accurate_than_triton(
    dims: tuple[int, int], betas: str, forget_bias: float
) -> None:
    pytest.importorskip("fla")
    x, _ = draw_as_measured(2048, 16, dims, forget_bias)
    if betas == "one":  # fla rounds beta k and beta v, which is exact then
        x["beta"] = torch.ones_like(x["beta"])
    assert_no_less_accurate_than_fla(x)


# Nearly every two of these values in some case. Four sequences, since few tokens of a single one have most of
# its dg: there the two errors of dg differ by some per cent either way.
@pytest.mark.usefixtures("hardly_tuned", "fla_alone")
@pytest.mark.parametrize(
    ("gates", "dims", "betas", "dtype"),
    [
        (None, (64, 64), "small", torch.bfloat16),
        (None, (128, 128), "one", torch.float16),
        (None, (128, 256), "up to two", torch.bfloat16),
        (None, (256, 512), "half", torch.float16),
        ("none", (128, 128), "up to two", torch.bfloat16),
        ("none", (128, 256), "half", torch.float16),
        ("-10", (64, 64), "one", torch.bfloat16),
        ("-10", (256, 512), "up to two", torch.float16),
        ("mixed", (64, 64), "up to two", torch.float16),
        ("mixed", (128, 128), "small", torch.bfloat16),
        ("mixed", (128, 256), "half", torch.bfloat16),
        ("mixed", (256, 512), "one", torch.bfloat16),
    ],
    ids=str,
)
def test_no_less_accurate_than_fla(
    gates: str | None, dims: tuple[int, int], betas: str, dtype: torch.dtype
) -> None:
    """With its own gates per step, or by the function without."""
    pytest.importorskip("fla")
    x = draw(4, 1000, 8, dims=dims, dtype=dtype, gates=gates or "none", betas=betas, states=False)
    assert_no_less_accurate_than_fla(ungated(x) if gates is None else x)


@pytest.mark.usefixtures("hardly_tuned", "fla_alone")
@pytest.mark.parametrize(
    ("dims", "betas"), [((64, 64), "up to two"), ((96, 192), "usual"), ((128, 128), "one")], ids=str
)
def test_no_less_accurate_where_gates_forget_slowly(dims: tuple[int, int], betas: str) -> None:
    pytest.importorskip("fla")
    x = draw(1, 2000, 8, dims=dims, gates="slow", betas=betas, states=False)
    assert_no_less_accurate_than_fla(x)


@pytest.mark.usefixtures("hardly_tuned", "fla_alone")
@pytest.mark.parametrize("gates", ["none", "slow", "usual"])
@pytest.mark.parametrize("betas", ["usual", "one"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids="{0[0]}_{0[1]}".format)
def test_no_less_accurate_where_a_call_is_split(dims: tuple[int, int], betas: str, gates: str) -> None:
    """A few long heads: their segments are walked side by side, whatever the gates keep."""
    pytest.importorskip("fla")
    x = draw(1, 16 * SEGMENT, 2, dims=dims, gates=gates, betas=betas, states=False)
    assert shape_of(x)._replace(trains=True).split is not None
    assert_no_less_accurate_than_fla(x)


# what makes a log decay, -e^{A_log} softplus(g + dt_bias), per head at every rate e^{A_log}

RATES = [1e-3, 1.0, 4.0, 16.0, 64.0, 1e3, 1e6, 1e30]
# of a head's gradient, relative to that of o. NOTES: fp16 has no number between 0 and 6e-8, so that it loses
# what nearly closed gates leave
VANISHED_SUM = {torch.bfloat16: 1e-4, torch.float16: 2e-4}
NAMES = ("dA_log", "ddt_bias")
HEADS = 32


def in_kernel(**x: Any) -> Any:
    return chunk_gated_delta_rule(**x, use_gate_in_kernel=True)


def by_torch(g: Tensor, A_log: Tensor, dt_bias: Tensor, **x: Any) -> Any:
    return chunk_gated_delta_rule(g=delta_log_decay(g, A_log, dt_bias), **x)


def scalar_decay(g: Tensor, A_log: Tensor, dt_bias: Tensor, **x: Any) -> Any:
    return chunk_simple_gla(g=delta_log_decay(g, A_log, dt_bias), **x)


def draw_rates(
    rate: float, function: Any, heads: int, dims: tuple[int, int], dtype: torch.dtype = torch.bfloat16
) -> Tensors:
    """In every second head four tokens of ten keep much of the state at any rate."""
    x, normal = draw(2, 1000, heads, dims=dims, dtype=dtype, states=False), Normal(1)
    raw, chosen = normal(*x["g"].shape), normal.uniform(*x["g"].shape) < 0.4
    spared = chosen & (torch.arange(heads, device="cuda") % 2 == 0)
    x["g"] = torch.where(spared, raw - max(math.log(rate), 0) - 1, raw)
    x["A_log"] = torch.full((heads,), math.log(rate), device="cuda")
    x["dt_bias"] = torch.linspace(0.5, -0.5, heads).cuda()
    if function is scalar_decay:
        del x["beta"]
    return x


def errors_of_heads(found: Tensors, truth: Tensors, x: Tensors, do: Tensor) -> dict[str, Tensor]:
    """Of the sums over the tokens, relative to what their terms come to where none cancel: a sum is as
    accurate as its terms, whose errors may have one sign."""
    biased = x["g"].double() + x["dt_bias"].double()
    terms = {"dA_log": truth["dg"] * softplus(biased) / biased.sigmoid(), "ddt_bias": truth["dg"]}
    least = VANISHED_SUM[x["q"].dtype] * vector_norm(do.double(), dim=(0, 1, 3))
    return {
        name: (found[name] - truth[name]).abs() / terms[name].abs().sum(dim=(0, 1)).maximum(least)
        for name in NAMES
    }


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("function", [in_kernel, by_torch, scalar_decay], ids=lambda f: f.__name__)
def test_gradients_at_every_rate(
    function: Any, dims: tuple[int, int], rate: float, dtype: torch.dtype
) -> None:
    x = draw_rates(rate, function, HEADS, dims, dtype)
    given = draw_cotangents(run(x, function=function))
    found = train(x, function=function, given=given)
    truth = train(exact(x), "reference", function, [t.double() for t in given])
    assert all(t.isfinite().all() for t in found.values())
    limit = GRADIENT_TOLERANCE[dtype][1]
    assert relative_error(found["dg"], truth["dg"]) <= limit
    for name, errors in errors_of_heads(found, truth, x, given[0]).items():
        for like in (errors[::2], errors[1::2]):  # with the tokens that keep much, without them
            assert like.square().mean().sqrt() <= limit, (name, like)


@pytest.mark.usefixtures("hardly_tuned", "fla_alone")
@pytest.mark.parametrize("rate", [1e-3, 1.0, 4.0, 16.0, 64.0])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids="{0[0]}_{0[1]}".format)
def test_sums_for_rates_are_no_less_accurate_than_those_of_fla(dims: tuple[int, int], rate: float) -> None:
    """Over many heads; or where both errors are so small that chance decides."""
    pytest.importorskip("fla")

    def of_fla(backend: str, **x: Any) -> Any:
        operands = [x.pop(name) for name in ("q", "k", "v", "g", "beta")]
        return fla.call("chunk_gated_delta_rule", *operands, **x, use_gate_in_kernel=True)

    x = draw_rates(rate, in_kernel, HEADS, dims)
    given = draw_cotangents(run(x, function=in_kernel))
    truth = train(exact(x), "reference", in_kernel, [t.double() for t in given])
    found = train(x, function=in_kernel, given=given)
    with fla.lifted_guard("chunk_gated_delta_rule"):
        theirs = train(x, function=of_fla, given=given)
    errors = [errors_of_heads(y, truth, x, given[0]) for y in (found, theirs)]
    chance = GRADIENT_TOLERANCE[torch.bfloat16][1] / 4
    for name in NAMES:
        own, of_theirs = (y[name].square().mean().sqrt() for y in errors)
        assert own <= max(1.1 * of_theirs, chance), (name, own, of_theirs)
