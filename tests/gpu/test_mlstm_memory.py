"""mLSTM on the GPU: memory layouts read in place, what is allocated and written, large offsets."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tfla_tk.backends.tk import segments

from .accuracy import relative_error
from .memory import OPERANDS, fuse, head_last, odd_rows, relayout, shifted, shifted_transposed, transposed
from .mlstm import assert_accurate, check, make_inputs

COPIED = (shifted, odd_rows, shifted_transposed, head_last)


@pytest.fixture
def uncut(monkeypatch: pytest.MonkeyPatch, new_calls: None) -> None:
    """No sequence is cut, so that no state needs memory between kernels."""
    monkeypatch.setattr(
        segments, "cut", lambda sequences, tokens, *_: segments.Cut(sequences, -(-tokens // segments.CHUNK))
    )


def peak_bytes(function: Callable[[], Tensor]) -> int:
    """What a warm call asks of the allocator at its peak, its result included."""
    function()
    torch.cuda.synchronize()
    gc.collect()  # exceptions of earlier tests hold tensors, and are not to be freed in the middle
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    function()
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before


@pytest.mark.usefixtures("uncut")
@pytest.mark.parametrize("dims", [(64, 64), (128, 256), (256, 512), (48, 80)], ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("layout", ["transposed", "fused"])
def test_views_are_read_in_place(operator: Any, layout: str, dims: tuple[int, int]) -> None:
    x = make_inputs(2, 4, 1000, dims)
    plain = operator.run(x)
    view = relayout(x, transposed)
    if layout == "fused":
        parts = fuse({name: x[name].transpose(1, 2) for name in OPERANDS})
        view = x | {name: t.transpose(1, 2) for name, t in parts.items()}
    found = operator.run(view)
    assert_accurate(found, operator.truth(x))
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    # memory order of v: [B, S, NH, D]
    assert found["h"].transpose(1, 2).is_contiguous()
    assert peak_bytes(lambda: operator(view)) == found["h"].nbytes


@pytest.mark.usefixtures("uncut")
@pytest.mark.parametrize("layout", COPIED, ids=lambda layout: layout.__name__)
def test_what_tma_cannot_address_is_copied_once(operator: Any, layout: Callable[[Tensor], Tensor]) -> None:
    x = make_inputs(2, 4, 1000, (128, 128))
    plain = operator.run(x)
    view = relayout(x, layout)
    found = operator.run(view)
    assert_accurate(found, operator.truth(x))
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    assert found["h"].stride() == torch.empty_like(view["v"]).stride()
    copies = sum(x[name].nbytes for name in ("q", "k", "v"))
    # one more for h where its rows cannot be addressed either
    copies += found["h"].nbytes if layout is head_last else 0
    assert peak_bytes(lambda: operator(view)) == copies + found["h"].nbytes


@pytest.mark.parametrize("dims", [(128, 256), (256, 512)], ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("gate_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_gates_of_any_dtype_and_strides(
    operator: Any, gate_dtype: torch.dtype, dims: tuple[int, int]
) -> None:
    x = make_inputs(dims=dims)
    # i as a model's [B, S, NH] projection, f every second entry of a row
    i = x["i"].to(gate_dtype).transpose(1, 2).contiguous().transpose(1, 2)
    f = x["f"].to(gate_dtype).repeat_interleave(2, dim=-1)[..., ::2]
    check(operator, x | {"i": i, "f": f})


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("dims", [(128, 256), (256, 512)], ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("gate_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_reads_gates_of_any_dtype(
    gate_dtype: torch.dtype, dims: tuple[int, int], first: int, exponential: Any
) -> None:
    """The registered op takes gates as they are, at addresses of their dtype's alignment."""
    x = make_inputs(dims=dims)
    for name in ("i", "f"):
        x[name] = torch.cat([x[name][..., :first], x[name]], -1).to(gate_dtype)[..., first:]
    arguments = (*x.values(), *[None] * 4, False, True, 1e-6, True, False)
    found = dict(zip("hcnm", torch.ops.tfla_tk.mlstm_fwd(*arguments)[:4], strict=True))
    assert_accurate(found, exponential.truth(x))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_more_than_2_to_the_31_elements_of_q(layout: str, exponential: Any) -> None:
    heads, seq, tail = 8, 1_100_000, 300
    x = make_inputs(1, heads, seq, (256, 64))
    assert x["q"].numel() > 2**31
    # everything before the tail is forgotten: 1e-13 of it is left
    x["f"][..., seq - tail] = -30.0
    if layout == "transposed":
        for name in ("q", "k", "v"):
            x[name] = transposed(x[name])
    h = exponential(x)[:, :, -tail:]
    truth = exponential.truth({name: t[:, :, -tail:] for name, t in x.items()})["h"]
    for head in range(heads):
        assert relative_error(h[:, head], truth[:, head]) <= 5e-3, f"head {head}"


@pytest.mark.slow
def test_more_than_2_to_the_31_elements_of_state(exponential: Any) -> None:
    x = make_inputs(40, 410, 2, (256, 512), states=exponential.states)
    assert x["c_initial"].numel() > 2**31
    found = exponential.run(x)
    for batch, head in ((0, 0), (20, 205), (39, 409)):
        here = slice(batch, batch + 1), slice(head, head + 1)
        truth = exponential.truth({name: t[here] for name, t in x.items()})
        assert_accurate({name: t[here] for name, t in found.items()}, truth)
