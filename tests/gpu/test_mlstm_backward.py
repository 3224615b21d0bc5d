"""mLSTM gradients on the GPU: accuracy against fp64 autograd."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tfla_tk import reference

from .memory import TOKENS, head_last, relayout, shifted, transposed, uninitialised_memory_is_nan

Tensors = dict[str, Tensor]
Make = Callable[..., Tensors]
Check = Callable[..., None]
Error = Callable[[Tensor, Tensor], float]
Change = Callable[[Tensors], None]

NATIVE = list(itertools.product((64, 128, 256), (64, 128, 256, 512)))
PADDED = [(16, 16), (48, 80), (96, 96), (160, 384), (208, 176)]
MAIN = [(64, 64), (128, 256), (256, 512)]


def ids(dims: tuple[int, int]) -> str:
    return f"{dims[0]}_{dims[1]}"


# accuracy


@pytest.mark.parametrize("dims", NATIVE, ids=ids)
@pytest.mark.parametrize("size", [(1, 2, 63), (2, 3, 300)], ids="B{0[0]}_NH{0[1]}_S{0[2]}".format)
def test_native_head_dims(
    operator: Any,
    dtype: torch.dtype,
    size: tuple[int, int, int],
    dims: tuple[int, int],
    make_inputs: Make,
    compare: Make,
) -> None:
    compare(operator, make_inputs(*size, dims, dtype, operator.states))


@pytest.mark.parametrize("dims", PADDED, ids=ids)
@pytest.mark.parametrize("seq", [64, 130])
def test_padded_head_dims(
    operator: Any,
    dtype: torch.dtype,
    seq: int,
    dims: tuple[int, int],
    make_inputs: Make,
    compare: Make,
) -> None:
    compare(operator, make_inputs(2, 3, seq, dims, dtype, operator.states))


@pytest.mark.parametrize("dims", MAIN, ids=ids)
@pytest.mark.parametrize("seq", [1, 2, 64, 65, 127, 129, 1000])
def test_lengths(operator: Any, seq: int, dims: tuple[int, int], make_inputs: Make, compare: Make) -> None:
    x = make_inputs(2, 3, seq, dims, states=operator.states)
    compare(operator, x, vanishing=seq < 64)


@pytest.mark.parametrize("dims", MAIN, ids=ids)
@pytest.mark.parametrize("initial", [False, True], ids=["zeros", "initial"])
@pytest.mark.parametrize("last", [False, True], ids=["h", "h_and_state"])
def test_with_and_without_states(
    operator: Any,
    dtype: torch.dtype,
    last: bool,
    initial: bool,
    dims: tuple[int, int],
    make_inputs: Make,
    compare: Make,
) -> None:
    x = make_inputs(2, 3, 300, dims, dtype, operator.states if initial else ())
    compare(operator, x, last=last)


@pytest.mark.parametrize("dims", MAIN, ids=ids)
def test_only_through_the_last_state(
    operator: Any, dims: tuple[int, int], make_inputs: Make, assert_gradients: Check
) -> None:
    """h is not used: the gradient of q is none, or zero."""
    x = make_inputs(2, 3, 300, dims, states=operator.states)
    cotangents = operator.draw_cotangents(x, last=True)
    del cotangents["h"]
    found = operator.gradients(x, cotangents)
    assert not found["q"].any()
    assert_gradients(found, operator.true_gradients(x, cotangents), x["q"].dtype)


@pytest.mark.parametrize("dims", MAIN, ids=ids)
def test_against_the_recurrence(
    exponential: Any,
    dtype: torch.dtype,
    dims: tuple[int, int],
    make_inputs: Make,
    assert_gradients: Check,
) -> None:
    """The specification itself, token by token."""
    x = make_inputs(1, 2, 150, dims, dtype, exponential.states)
    cotangents = exponential.draw_cotangents(x, last=True)
    expected = exponential.true_gradients(x, cotangents, "reference:recurrent")
    assert_gradients(exponential.gradients(x, cotangents), expected, dtype)


@pytest.mark.parametrize("forget_bias", [0.0, 3.0, 12.0])
def test_forget_gates_of_a_long_sequence(
    operator: Any,
    dtype: torch.dtype,
    forget_bias: float,
    make_inputs: Make,
    compare: Make,
) -> None:
    """df is a sum over tokens: the noise of all of them must not collect in it."""
    x = make_inputs(1, 4, 4096, (128, 256), dtype)
    x["f"] += forget_bias - 3
    compare(operator, x, last=False)


# gates


def constant(i: float, f: float) -> Change:
    def set_gates(x: Tensors) -> None:
        x["i"].fill_(i)
        x["f"].fill_(f)

    return set_gates


def halves(first: float, second: float) -> Change:
    def set_gates(x: Tensors) -> None:
        x["i"].fill_(first)
        x["i"][..., x["i"].shape[-1] // 2 :] = second

    return set_gates


def slope(per_chunk: float) -> Change:
    def set_gates(x: Tensors) -> None:
        x["i"] += torch.arange(x["i"].shape[-1], device="cuda") * (per_chunk / 64)

    return set_gates


def resets(x: Tensors) -> None:
    x["f"][..., ::7] = -1e4
    x["f"][..., 100] = -torch.inf
    x["i"][..., ::5] = -1e4
    x["i"][..., 63] = -torch.inf


def closed_at_start(x: Tensors) -> None:
    """Gates of a model before training: the input gate's bias is -10."""
    x["i"] -= 10.0


# whether gradients vanish there
EXTREME: dict[str, tuple[Change, bool]] = {
    "forget_nothing": (constant(0.0, 1e4), False),
    "forget_everything": (constant(0.0, -1e4), True),
    "i_high_f_high": (constant(1e4, 1e4), False),
    "i_high_f_low": (constant(1e4, -1e4), True),
    "i_low_f_high": (constant(-1e4, 1e4), True),
    "i_low_f_low": (constant(-1e4, -1e4), True),
    "spike": (halves(80.0, -80.0), True),
    "late_spike": (halves(-80.0, 80.0), True),
    "growing": (slope(200.0), True),
    "falling": (slope(-200.0), True),
    "resets": (resets, True),
    "closed_at_start": (closed_at_start, False),
}


@pytest.mark.parametrize("dims", MAIN, ids=ids)
@pytest.mark.parametrize("case", EXTREME)
def test_extreme_gates(
    operator: Any, case: str, dims: tuple[int, int], make_inputs: Make, compare: Make
) -> None:
    x = make_inputs(2, 3, 450, dims)
    for name in ("q", "k"):  # keeps q.n away from zero
        x[name].abs_()
    change, vanishing = EXTREME[case]
    change(x)
    found = compare(operator, x, vanishing=vanishing)
    assert all(t.isfinite().all() for t in found.values())


@pytest.mark.parametrize("gate_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_gates_of_any_dtype_and_strides(
    operator: Any, gate_dtype: torch.dtype, make_inputs: Make, compare: Make
) -> None:
    x = make_inputs()
    i = x["i"].to(gate_dtype).transpose(1, 2).contiguous().transpose(1, 2)
    f = x["f"].to(gate_dtype).repeat_interleave(2, dim=-1)[..., ::2]
    compare(operator, x | {"i": i, "f": f})


# memory


@pytest.mark.parametrize("dims", [*MAIN, (48, 80)], ids=ids)
@pytest.mark.parametrize("layout", [transposed, shifted, head_last], ids=lambda layout: layout.__name__)
def test_layouts(
    operator: Any, layout: Callable[[Tensor], Tensor], dims: tuple[int, int], make_inputs: Make
) -> None:
    """The same bits, whatever the layout of the operands and of dh; gradients lie as their inputs do."""
    x = make_inputs(2, 3, 200, dims, states=operator.states)
    cotangents = operator.draw_cotangents(x, last=True)
    expected = operator.gradients(x, cotangents)
    view = relayout(x, layout)
    found = operator.gradients(view, cotangents | {"h": layout(cotangents["h"])})
    for name, t in found.items():
        assert torch.equal(t, expected[name]), name
        assert t.stride() == torch.empty_like(view[name]).stride(), name


def test_a_cotangent_of_ones(operator: Any, make_inputs: Make, assert_gradients: Check) -> None:
    """h.sum(): one element, expanded."""
    x = make_inputs()
    leaves = {name: t.clone().requires_grad_() for name, t in x.items()}
    operator(leaves).sum().backward()
    expected = operator.true_gradients(x, {"h": torch.ones_like(x["v"])})
    assert_gradients({name: t.grad for name, t in leaves.items()}, expected, x["q"].dtype)


def test_gradients_whose_squares_are_beyond_fp32(
    operator: Any, make_inputs: Make, assert_gradients: Check
) -> None:
    """Every gradient is linear in dh, whatever its size: so is df, whose noise is weighed by squares."""
    x = make_inputs()
    cotangents = operator.draw_cotangents(x, last=False)
    cotangents["h"] = cotangents["h"] * 2.0**64
    assert_gradients(operator.gradients(x, cotangents), operator.true_gradients(x, cotangents), x["q"].dtype)


@pytest.mark.parametrize("dims", [*MAIN, (48, 80)], ids=ids)
@pytest.mark.parametrize("seq", [1, 63, 129])
def test_every_element_is_written(
    operator: Any, seq: int, dims: tuple[int, int], make_inputs: Make, assert_gradients: Check
) -> None:
    x = make_inputs(2, 3, seq, dims, states=operator.states)
    for view in (x, relayout(x, transposed)):
        cotangents = operator.draw_cotangents(view, last=True)
        with uninitialised_memory_is_nan():
            found = operator.gradients(view, cotangents)
        assert_gradients(found, operator.true_gradients(view, cotangents), x["q"].dtype, cotangents["h"])


def test_inputs_are_left_alone(operator: Any, make_inputs: Make) -> None:
    x = make_inputs(states=operator.states)
    cotangents = operator.draw_cotangents(x, last=True)
    before = {name: t.clone() for name, t in (x | cotangents).items()}
    operator.gradients(x, cotangents)
    assert all(torch.equal(t, before[name]) for name, t in (x | cotangents).items())


@pytest.mark.parametrize("size", [(0, 3, 300), (2, 0, 300), (2, 3, 0)])
def test_empty(operator: Any, size: tuple[int, int, int], make_inputs: Make) -> None:
    x = make_inputs(*size, states=operator.states)
    cotangents = operator.draw_cotangents(x, last=True)
    found = operator.gradients(x, cotangents)
    assert all(t.shape == x[name].shape for name, t in found.items())
    if size[-1] == 0:
        assert torch.equal(found["c_initial"], cotangents["c"])


def test_the_explicit_formulas_agree(exponential: Any, make_inputs: Make, rel_err: Error) -> None:
    """The op on the GPU and the op on the CPU, which computes the reference, from the same saved rows."""
    x = make_inputs(1, 2, 200, (64, 64), states=exponential.states)
    cotangents = exponential.draw_cotangents(x, last=True)
    found = exponential.gradients(x, cotangents)
    names = (*TOKENS, "c_initial", "n_initial")
    expected = reference.mlstm_backward(
        *(x[name].double() for name in (*names, "m_initial")), *(t.double() for t in cotangents.values())
    )
    for name, t in zip(names, expected, strict=True):
        assert rel_err(found[name], t) <= 1e-2, name


@pytest.mark.sanitize
@pytest.mark.parametrize("dims", MAIN, ids=ids)
def test_small(operator: Any, dims: tuple[int, int], make_inputs: Make, compare: Make) -> None:
    """Five chunks, the last one short, from an initial state: for compute-sanitizer. Every place of every
    ring is used twice.
    """
    compare(operator, make_inputs(1, 2, 290, dims, states=operator.states))
