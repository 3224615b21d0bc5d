"""mLSTM on the GPU at extreme gates, and its error beside that of the Triton kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tfla_tk
from tfla_tk.backends.triton import mlstm_kernels as triton

from .accuracy import relative_error
from .mlstm import assert_accurate, compare, make_inputs, with_positive_sums

Tensors = dict[str, Tensor]

DIMS = [(64, 64), (128, 256), (256, 512)]
# error against fp64 relative to Triton's; two roundings of the same size differ by chance
NOISE = 1.05
# Where one token outweighs all others h is v of that token. limit_chunk divides the gated scores by the
# normaliser before it rounds them, and is exact there; the tk kernel divides afterwards, which leaves two
# roundings of an operand (rms) and costs nothing anywhere else.
ONE_TOKEN = ("i_high_f_low", "random_signs", "forget_everything", "growing", "falling")
TWO_ROUNDINGS = 0.25  # eps of the operands' dtype


def constant(i: float, f: float) -> Callable[[Tensors], None]:
    def set_gates(x: Tensors) -> None:
        x["i"].fill_(i)
        x["f"].fill_(f)

    return set_gates


def random_signs(x: Tensors) -> None:
    x["i"].sign_().mul_(1e4)
    x["f"].copy_(x["i"].roll(17, dims=-1))


def forget_everything(x: Tensors) -> None:
    x["f"].fill_(-1e4)


def forget_nothing(x: Tensors) -> None:
    x["f"].fill_(1e4)


def spike(x: Tensors) -> None:
    half = x["i"].shape[-1] // 2
    x["i"][..., :half] = 80.0
    x["i"][..., half:] = -80.0


def late_spike(x: Tensors) -> None:
    x["i"].fill_(-80.0)
    x["i"][..., x["i"].shape[-1] // 2 :] = 80.0


def growing(x: Tensors) -> None:
    """The stabiliser grows by 200 across each chunk of 64."""
    x["i"] += torch.arange(x["i"].shape[-1], device=x["i"].device) * (200 / 64)


def falling(x: Tensors) -> None:
    x["i"] -= torch.arange(x["i"].shape[-1], device=x["i"].device) * (200 / 64)


def closed_at_start(x: Tensors) -> None:
    """Gates of a model before training: the input gate's bias is -10."""
    x["i"] -= 10.0


def alternating(x: Tensors) -> None:
    x["f"][..., ::7] = -1e4
    x["i"][..., ::5] = -1e4


def resets(x: Tensors) -> None:
    alternating(x)
    x["f"][..., 100], x["i"][..., 63] = -torch.inf, -torch.inf


# what is set, and whether some gradients vanish then; None: gradients are not checked
CASES: dict[str, tuple[Callable[[Tensors], None], bool | None]] = {
    "plain": (lambda x: None, None),
    "i_high_f_high": (constant(1e4, 1e4), False),
    "i_high_f_low": (constant(1e4, -1e4), True),
    "i_low_f_high": (constant(-1e4, 1e4), True),
    "i_low_f_low": (constant(-1e4, -1e4), True),
    "random_signs": (random_signs, None),
    "forget_everything": (forget_everything, None),
    "forget_nothing": (forget_nothing, None),
    "forget_everything_of_equals": (constant(0.0, -1e4), True),
    "forget_nothing_of_equals": (constant(0.0, 1e4), False),
    "spike": (spike, True),
    "late_spike": (late_spike, True),
    "growing": (growing, True),
    "falling": (falling, True),
    "constant": (constant(0.5, 2.0), None),
    "closed_at_start": (closed_at_start, False),
    "alternating": (alternating, None),
    "resets": (resets, True),
}
NOT_COMPARED = ("forget_everything_of_equals", "forget_nothing_of_equals", "resets")  # with Triton


@pytest.mark.parametrize("dims", DIMS, ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("case", CASES)
def test_extreme_gates(operator: Any, case: str, dims: tuple[int, int]) -> None:
    change, vanishing = CASES[case]
    x = with_positive_sums(make_inputs(2, 3, 450, dims))
    change(x)
    found = operator.run(x)
    assert_accurate(found, operator.truth(x), norm_tolerance=1e-4)
    grads = {} if vanishing is None else compare(operator, x, vanishing=vanishing)
    assert all(t.isfinite().all() for t in (*found.values(), *grads.values()))


@pytest.mark.parametrize("dims", DIMS, ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("closed", [slice(0, 130), slice(200, 330), slice(600, 700)], ids=str)
def test_gates_that_close_for_a_while_leave_fp16_its_digits(
    operator: Any, closed: slice, dims: tuple[int, int]
) -> None:
    """What is small in h is as exact as fp16 can be, and so is what comes before and after."""
    x = with_positive_sums(make_inputs(2, 2, 700, dims, torch.float16))
    x["i"][..., closed] -= 12.0
    x["f"][..., closed] = -10.0
    h, truth = operator(x), operator.truth(x)["h"]
    open_rows = torch.ones(700, dtype=torch.bool, device=h.device)
    open_rows[closed] = False
    for rows in (open_rows, ~open_rows):
        found, exact = h[:, :, rows], truth[:, :, rows]
        least = math.hypot(relative_error(exact.half(), exact), 2 * torch.finfo(torch.float16).eps)
        assert relative_error(found, exact) <= 1.1 * least


@pytest.mark.parametrize("dims", DIMS, ids="{0[0]}_{0[1]}".format)
def test_n_beyond_the_range_of_fp16_shows(exponential: Any, dims: tuple[int, int]) -> None:
    """Where C stays within it: h is not finite then, and not wrong."""
    # At K = 256 n is kept in units of the state, which is up to 2^-10 of what it stands for.
    units = 2**10 if dims[0] == 256 else 1
    for key in sorted({8, 8 * units}):
        x = make_inputs(1, 1, 9000, dims, torch.float16)
        x["q"].abs_().mul_(8 / key), x["k"].fill_(key), x["i"].zero_(), x["f"].fill_(20.0)
        x["v"].fill_(1.0)[:, :, ::2] = -1.0
        h = exponential.run(x)["h"]
        chunk = 65504 // key // 64  # the last one that n enters in its range, in units of 1
        assert h[:, :, : 64 * chunk].isfinite().all()
        assert h[~h.isnan()].abs().max() < 1.01  # means of values
    chunk = 65504 * units // key // 64
    assert h[:, :, 64 * (chunk + 2) :].isnan().all()


@pytest.mark.parametrize("dims", DIMS, ids="{0[0]}_{0[1]}".format)
def test_keys_behind_closed_gates_are_not_seen(
    operator: Any, dtype: torch.dtype, dims: tuple[int, int]
) -> None:
    """A token without weight leaves nothing, however large its key."""
    x = with_positive_sums(make_inputs(2, 3, 450, dims, dtype))
    closed = x["i"] < -0.5
    x["i"][closed] = -1e4
    x["k"][closed] *= 1000.0
    assert_accurate(operator.run(x), operator.truth(x))


@pytest.mark.parametrize("names", [("q",), ("k",), ("v",), ("q", "k", "v")], ids="".join)
def test_zero_operands(operator: Any, names: tuple[str, ...]) -> None:
    x = make_inputs()
    for name in names:
        x[name].zero_()
    found = operator.run(x)
    assert_accurate(found, operator.truth(x))
    assert not found["h"].any()


def triton_variants() -> list[tuple[str, str]]:
    """(operator, variant)."""
    exponential, sigmoid = map(triton.variants, ("mlstm_chunkwise", "mlstm_siging_chunkwise"))
    pairs = [("exp", exponential), ("sig", sigmoid), ("sig_unnormalised", sigmoid)]
    return [(operator, variant) for operator, variants in pairs for variant in variants]


@pytest.mark.skipif(triton.MLSTM_KERNELS_MISSING is not None, reason="mlstm_kernels cannot be used here")
@pytest.mark.parametrize("dims", [(128, 256), (256, 512)], ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("case", [case for case in CASES if case not in NOT_COMPARED])
@pytest.mark.parametrize(
    ("operator", "variant"), triton_variants(), indirect=["operator"], ids=lambda x: x.removeprefix("triton:")
)
def test_no_less_accurate_than_triton(
    operator: Any, dtype: torch.dtype, variant: str, case: str, dims: tuple[int, int]
) -> None:
    x = make_inputs(2, 4, 512, dims, dtype)
    if case != "plain":
        x = with_positive_sums(x)
    CASES[case][0](x)
    truth = operator.truth(x)["h"]
    error = relative_error(operator(x), truth)
    baseline = getattr(tfla_tk, operator.function)(**x, **operator.options, backend=variant)
    baseline_error = relative_error(baseline, truth)
    assert error == error, "NaN"
    limit = baseline_error
    if variant.startswith("triton:limit_chunk") and case in ONE_TOKEN:
        limit = math.hypot(limit, TWO_ROUNDINGS * torch.finfo(dtype).eps)
    # a NaN of the baseline is larger than any error
    assert baseline_error != baseline_error or error <= NOISE * limit
