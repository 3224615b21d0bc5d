"""The host side of mLSTM's backward for tensors of any kind and place, by its results; no GPU is touched.

The plan of its kernels: test_backward_formulas.py.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from tfla_tk.backends.tk.scalar_gate import backward as tk_backward
from tfla_tk.backends.tk.scalar_gate import forward as tk_forward

from .addresses import at_odd_address
from .test_backward_formulas import (
    LENGTHS,
    NAMES,
    WIDE,
    arguments,
    assert_gradients,
    draw,
    states_left_by_a_forward,
    transposed,
)

ALL = (*NAMES, "h", "row_n", "row_m", "chunk_m", "c_last", "n_last", "dh", "dc_last", "dn_last")


def changed(given: tuple[Any, ...], **changes: Any) -> tuple[Any, ...]:
    """The arguments with these tensors in the place of theirs."""
    return *(changes.get(name, x) for name, x in zip(ALL, given, strict=False)), *given[len(ALL) :]


def named(given: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(ALL, given, strict=False))


def check(given: tuple[Any, ...]) -> None:
    """That what is prepared for such calls serves this one."""
    found = [x for x in tk_backward.mlstm_bwd(*given) if x is not None]
    expected = torch.ops.tfla_tk.mlstm_bwd(*given)
    for x, y in zip(found, (y for y in expected if y.numel()), strict=True):
        assert (x - y).norm() <= 1e-7 * max(y.norm(), 1e-3)
        assert x.stride() == y.stride()


def test_what_is_prepared_serves_every_call_like_it(backward_formulas: Any) -> None:
    """With its own addresses, on the stream of its time; and it holds no tensor."""
    first = arguments("exp", draw("exp"))
    references = [weakref.ref(x) for x in first if isinstance(x, Tensor)]
    check(first)
    backward_formulas.scanned.clear(), backward_formulas.launches.clear()
    del first
    gc.collect()
    assert not any(reference() is not None for reference in references)
    prepared = backward_formulas.prepared
    x = draw("exp")
    for stream in (7, 8):
        backward_formulas.launches.clear()
        for module in (tk_backward, tk_forward):  # the fixture puts it back
            module.current_stream = lambda device, stream=stream: stream
        x = {name: 2 * t if name == "q" else t.clone() for name, t in x.items()}
        check(arguments("exp", x))
        assert {launch.stream for launch in backward_formulas.launches} == {stream}
    assert backward_formulas.prepared == prepared


@pytest.mark.parametrize("name", ["q", "k", "v", "h", "dh", "c_initial", "n_initial", "dc_last", "dn_last"])
def test_addresses_are_looked_at_in_every_call(name: str, backward_formulas: Any) -> None:
    """What lies where TMA or vector loads cannot take it is copied, in the one call."""
    given = arguments("exp", draw("exp"))
    odd = changed(given, **{name: at_odd_address(named(given)[name])})
    for call in (given, odd, given):
        check(call)
        walks = [x for x in backward_formulas.launches if x.name == "gradients"]
        at = [y for x in walks for y in (x.q[0], x.k[0], x.v[0], x.dh[0], *x.entering)]
        assert not any(address % 16 for address in at)


def test_calls_that_are_not_alike_are_prepared_anew(backward_formulas: Any) -> None:
    """Everything that a launch has but addresses makes another one."""
    backward_formulas.computes = False
    given = arguments("exp", draw("exp"))
    x = named(given)
    calls = [
        given,
        *(changed(given, **{name: transposed(x[name])}) for name in ("q", "k", "v", "h", "dh")),
        *(changed(given, **{name: transposed(x[name])}) for name in ("i", "f")),
        *(changed(given, **{name: x[name].bfloat16()}) for name in ("i", "f")),
        changed(given, c_initial=None, n_initial=None, m_initial=None),
        changed(given, dc_last=None),
        changed(given, dn_last=None),
        (*given[:-2], 1e-3, given[-1]),
        (*given[:-1], True),
        arguments("sig", draw("sig")),
        arguments("sig_unnormalised", draw("sig_unnormalised")),
        arguments("exp", draw("exp", lengths=LENGTHS)),
        arguments("exp", {name: x.half() for name, x in draw("exp").items()}),
        arguments("exp", draw("exp", dims=(8, 128))),
    ]
    for count, call in enumerate(calls):
        tk_backward.mlstm_bwd(*call)
        assert len(tk_backward._backwards) == count + 1
    prepared = backward_formulas.prepared
    for call in calls:
        tk_backward.mlstm_bwd(*call)
    assert (len(tk_backward._backwards), backward_formulas.prepared) == (len(calls), prepared)


@pytest.mark.parametrize(("dtype", "half"), [(torch.bfloat16, False), (torch.float16, True)])
@pytest.mark.parametrize(("of_gates", "code"), [(torch.float32, 0), (torch.bfloat16, 1), (torch.float16, 2)])
def test_dtypes(
    dtype: torch.dtype, half: bool, of_gates: torch.dtype, code: int, backward_formulas: Any
) -> None:
    """The kernels that are launched are for the operands' dtype, whose machine code is loaded."""
    backward_formulas.computes = False
    x = draw("exp", dims=(16, 16))
    x = {
        name: t.to(dtype if name in "qkv" else of_gates if name in "if" else torch.float32)
        for name, t in x.items()
    }
    tk_backward.mlstm_bwd(*arguments("exp", x))
    walks = [launch for launch in backward_formulas.launches if launch.name in ("forward", "gradients")]
    assert [launch.half for launch in walks] == [half] * 2
    (scan,) = (launch for launch in backward_formulas.launches if launch.name == "mlstm_bwd_scan")
    assert scan.i[-1] == scan.f[-1] == code
    assert {instance.dtype for instance in backward_formulas.loaded} == {"", "fp16" if half else "bf16"}


def test_the_states_of_a_forward_are_taken_from_every_call(backward_formulas: Any) -> None:
    """Calls with them, without them, and with those of another cut, though they are as many."""
    x, backward_formulas.segment_chunks = draw("exp", (2, 2, 300), dims=WIDE), 2
    given = arguments("exp", x)
    kept = states_left_by_a_forward("exp", x, 2)
    of_another = kept._replace(layout=kept.layout._replace(cut=kept.layout.cut._replace(chunks=3)))
    expected = torch.ops.tfla_tk.mlstm_bwd(*given)
    for states in (kept, None, kept, of_another):
        backward_formulas.summed.clear()
        assert_gradients(tk_backward.mlstm_bwd(*given, states), expected)
        assert ("dq" in backward_formulas.summed) == (states is not kept)


def test_without_normaliser_n_is_not_read(backward_formulas: Any) -> None:
    """Not even where the op is given one: a NaN in it would be in dq. Nor are rows of the forward."""
    given = arguments("sig_unnormalised", draw("sig_unnormalised"))
    x = named(given)
    n_initial = torch.full_like(x["c_initial"][..., 0], torch.nan)
    row_n = torch.full_like(x["i"], torch.nan)
    *found, dn_initial = tk_backward.mlstm_bwd(*changed(given, n_initial=n_initial, row_n=row_n))
    for grad, expected in zip(found, torch.ops.tfla_tk.mlstm_bwd(*given), strict=False):
        torch.testing.assert_close(grad, expected, rtol=1e-6, atol=1e-6)
    assert dn_initial.shape == n_initial.shape


@pytest.mark.parametrize("missing", [None, torch.empty(0)])
def test_a_normaliser_needs_its_rows(missing: Tensor | None, backward_formulas: Any) -> None:
    given = changed(arguments("exp", draw("exp")), row_n=missing)
    with pytest.raises(ValueError, match="with a normaliser needs row_n of its forward"):
        tk_backward.mlstm_bwd(*given)
    assert not backward_formulas.launches
