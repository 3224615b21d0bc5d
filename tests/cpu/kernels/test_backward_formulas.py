"""The plan of the kernels' backward, formula by formula, against the explicit backward of the reference.

With narrow head dims one walk over states that the forward leaves. Else three walks that are one kernel with
other operands, factors of rows before or after the first of them, gates from their row sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tfla_tk import reference
from tfla_tk.backends.tk.scalar_gate.forward import Left
from tfla_tk.core.layout import Cut, Kept
from tfla_tk.ops import mlstm as ops

from .addresses import CHUNK

Tensors = dict[str, Tensor]
Formulas = Callable[..., Any]

EPS = 1e-6
GATES = ["exp", "sig", "sig_unnormalised"]
TOKENS = ("q", "k", "v", "i", "f")
NAMES = (*TOKENS, "c_initial", "n_initial", "m_initial", "cu_seqlens")
LENGTHS = [70, 0, 64, 1, 100]
LONG = [600, 70, 0, 1100, 1, 513]  # with anchors
NARROW, WIDE = (8, 24), (8, 136)  # head dims of one walk, of three
WALKS = pytest.mark.parametrize("dims", [NARROW, WIDE], ids=["one_walk", "three_walks"])


def draw(
    gate: str,
    size: tuple[int, int, int] = (2, 3, 150),
    *,
    lengths: list[int] | None = None,
    states: bool = True,
    dims: tuple[int, int] = NARROW,
) -> Tensors:
    """Inputs in fp64."""
    torch.manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    dim_qk, dim_v = dims
    count = size[0]
    x: Tensors = {}
    if lengths is not None:
        x["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0)
        count, size = len(lengths), (1, size[1], sum(lengths))
    x |= {"q": normal(*size, dim_qk), "k": normal(*size, dim_qk), "v": normal(*size, dim_v)}
    x |= {"i": normal(*size), "f": normal(*size) + 3}
    if states:
        x["c_initial"] = normal(count, size[1], dim_qk, dim_v)
        if gate != "sig_unnormalised":
            x["n_initial"] = normal(count, size[1], dim_qk)
        if gate == "exp":
            x["m_initial"] = normal(count, size[1], 1)
    return x


def arguments(
    gate: str, x: Tensors, *, last: bool = True, dh: Tensor | None = None, eps: float = EPS
) -> tuple[Any, ...]:
    """Of the backward op, from its forward."""
    tensors = [x.get(name) for name in NAMES]
    options = (gate != "exp", gate != "sig_unnormalised", eps)
    h, c, n, _, *rows = torch.ops.tfla_tk.mlstm_fwd(*tensors, *options, True, True)
    dh, dc, dn = torch.randn_like(h) if dh is None else dh, torch.randn_like(c), torch.randn_like(n)
    given = (c, n, dh, dc, dn) if last else (None, None, dh, None, None)
    return (*tensors, h, *rows, *given, *options, False)


def assert_gradients(found: ops.Grads, expected: ops.Grads) -> None:
    """df within what a chunk drops as forgotten, 2^-24; a gradient may be zero."""
    for name, x, y in zip(reference.MLSTMGrads._fields, found, expected, strict=True):
        assert x.isfinite().all(), name
        error = (x - y).norm() / max(y.norm(), 1e-3)
        assert error <= (1e-7 if name == "f" else 1e-9), f"{name}: {error}"


@pytest.mark.parametrize("lengths", [None, LENGTHS, LONG], ids=["batch", "packed", "long"])
@pytest.mark.parametrize("last", [False, True], ids=["h", "h_and_state"])
@pytest.mark.parametrize("states", [False, True], ids=["zeros", "initial"])
@pytest.mark.parametrize("gate", GATES)
@WALKS
def test_gradients(
    dims: tuple[int, int],
    gate: str,
    states: bool,
    last: bool,
    lengths: list[int] | None,
    backward_formulas: Formulas,
) -> None:
    given = arguments(gate, draw(gate, lengths=lengths, states=states, dims=dims), last=last)
    assert_gradients(backward_formulas(*given), torch.ops.tfla_tk.mlstm_bwd(*given))


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("seq", [1, 63, 64, 65, 128, 129, 300, 512, 513, 1030])
@WALKS
def test_lengths(dims: tuple[int, int], gate: str, seq: int, backward_formulas: Formulas) -> None:
    given = arguments(gate, draw(gate, (2, 3, seq), dims=dims))
    assert_gradients(backward_formulas(*given), torch.ops.tfla_tk.mlstm_bwd(*given))


@pytest.mark.parametrize("lengths", [None, LENGTHS, LONG[:3]], ids=["batch", "packed", "long"])
@pytest.mark.parametrize("last", [False, True], ids=["h", "h_and_state"])
@pytest.mark.parametrize("dim_qk", [80, 144], ids=["slice", "slices"])  # of dv, in a part of V
@pytest.mark.parametrize("gate", GATES)
def test_parts_of_v(
    gate: str, dim_qk: int, last: bool, lengths: list[int] | None, backward_formulas: Formulas
) -> None:
    """More columns than a walk takes for keys: dq, dk and dn are sums over parts of V."""
    given = arguments(gate, draw(gate, (1, 2, 150), lengths=lengths, dims=(dim_qk, 272)), last=last)
    assert_gradients(backward_formulas(*given), torch.ops.tfla_tk.mlstm_bwd(*given))


@pytest.mark.parametrize("lengths", [None, LENGTHS, LONG[:4]], ids=["batch", "packed", "long"])
@pytest.mark.parametrize("states", [False, True], ids=["zeros", "states"])
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("gate", GATES)
@WALKS
def test_cut_sequences(
    dims: tuple[int, int],
    gate: str,
    chunks: int,
    states: bool,
    lengths: list[int] | None,
    backward_formulas: Any,
) -> None:
    """Each segment from what arrives at it, as the segments before it in the walk make it. One walk has
    segments of whole pairs of chunks, and needs no states of segments."""
    given = arguments(gate, draw(gate, (2, 2, 600), lengths=lengths, states=states, dims=dims), last=states)
    backward_formulas.segment_chunks = chunks
    assert_gradients(backward_formulas(*given), torch.ops.tfla_tk.mlstm_bwd(*given))
    assert backward_formulas.summed <= ({"dk"} if dims == NARROW else {"dq", "dk"})


def states_left_by_a_forward(gate: str, x: Tensors, chunks: int) -> Kept:
    """With its workspace in fp64: C and n at the cuts, and what is no number where nothing is read."""
    heads, seq, dim_qk, dim_v = *x["q"].shape[1:], x["v"].shape[-1]
    offsets = x["cu_seqlens"].tolist() if "cu_seqlens" in x else None
    count, length = x["c_initial"].shape[0], chunks * CHUNK
    segments = count * -(-seq // length) if offsets is None else count + seq // length
    slots = heads * (segments - count)
    workspace = torch.full((slots * (2 + dim_qk * dim_v + dim_qk + 1),), math.nan, dtype=torch.float64)
    c, n = workspace[2 * slots :].split([slots * dim_qk * dim_v, slots * (dim_qk + 1)])
    c, n = c.view(slots, dim_qk, dim_v), n[: slots * dim_qk].view(slots, dim_qk)
    options = (gate != "exp", gate != "sig_unnormalised", EPS)
    for row in range(count):
        batch, start, end = (row, 0, seq) if offsets is None else (0, *offsets[row : row + 2])
        slot = heads * (row * (-(-seq // length) - 1) if offsets is None else start // length)
        initial = [x[name][row : row + 1] if name in x else None for name in NAMES[5:8]]
        for at in range(start + length, end, length):
            before = [x[name][batch : batch + 1, :, start:at] for name in TOKENS]
            _, left_c, left_n, *_ = torch.ops.tfla_tk.mlstm_fwd(
                *before, *initial, None, *options, True, False
            )
            c[slot : slot + heads], n[slot : slot + heads] = left_c[0], left_n[0]
            slot += heads
    places = (c.data_ptr() - workspace.data_ptr(), n.data_ptr() - workspace.data_ptr())
    return Kept((workspace,), Left(Cut(segments, chunks), places))


@pytest.mark.parametrize("lengths", [None, LENGTHS, LONG[:4]], ids=["batch", "packed", "long"])
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("dims", [WIDE, (8, 272)], ids=["whole", "parts"])
@pytest.mark.parametrize("gate", GATES)
def test_states_that_the_forward_leaves(
    gate: str, dims: tuple[int, int], chunks: int, lengths: list[int] | None, backward_formulas: Any
) -> None:
    """What enters the segments of dq is not made again."""
    x = draw(gate, (2, 2, 600), lengths=lengths, dims=dims)
    given = arguments(gate, x)
    backward_formulas.segment_chunks = chunks
    states = states_left_by_a_forward(gate, x, chunks)
    assert_gradients(backward_formulas(*given, states), torch.ops.tfla_tk.mlstm_bwd(*given))
    assert not backward_formulas.summed & {"dq"}


@pytest.mark.parametrize("lengths", [None, LONG[:3]], ids=["batch", "packed"])
@pytest.mark.parametrize("gate", GATES)
def test_cut_sequences_in_parts_of_v(gate: str, lengths: list[int] | None, backward_formulas: Any) -> None:
    given = arguments(gate, draw(gate, (2, 2, 450), lengths=lengths, dims=(80, 528)))
    backward_formulas.segment_chunks = 2
    assert_gradients(backward_formulas(*given), torch.ops.tfla_tk.mlstm_bwd(*given))


def test_a_small_normaliser_outweighs_the_gates(backward_formulas: Any) -> None:
    """The gates leave 2^-185 of the only rows with a gradient, but these are divided by 2^-100."""
    x = draw("exp", (1, 2, 512), states=False)
    x["i"].fill_(80.0)
    x["f"].fill_(-math.log(math.e - 1))  # log f = -1
    x["k"][..., 1:] = 0
    x["q"][..., 0] = 0  # q.n = 0: the normaliser is eps
    dh = torch.zeros_like(x["v"])
    dh[:, :, 384:400] = 1
    given = arguments("exp", x, last=False, dh=dh, eps=1e-30)
    backward_formulas.segment_chunks = 4
    found, want = (of(*given)[1][:, :, :256] for of in (backward_formulas, torch.ops.tfla_tk.mlstm_bwd))
    assert 0 < want.abs().max() < 2**-70
    assert (found - want).norm() <= 1e-9 * want.norm()


@pytest.mark.parametrize("size", [(0, 3, 10), (2, 0, 10), (2, 3, 0)])
def test_no_token(size: tuple[int, int, int], backward_formulas: Formulas) -> None:
    """The gradient of the initial state is that of the last one."""
    for last in (False, True):
        given = arguments("exp", draw("exp", size), last=last)
        for x, y in zip(backward_formulas(*given), torch.ops.tfla_tk.mlstm_bwd(*given), strict=True):
            assert torch.equal(x, y)


def transposed(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def first_inside(x: Tensor) -> Tensor:
    """The first dimension innermost in memory."""
    return x.movedim(0, -1).contiguous().movedim(-1, 0)


@pytest.mark.parametrize("layout", [transposed, first_inside])
def test_layouts(layout: Callable[[Tensor], Tensor], backward_formulas: Formulas) -> None:
    """Gradients lie as their inputs do, whatever a kernel can write."""
    x = draw("exp")
    dh = torch.randn_like(x["v"])
    expected = torch.ops.tfla_tk.mlstm_bwd(*arguments("exp", x, last=False, dh=dh))
    view = {name: t if name == "m_initial" else layout(t) for name, t in x.items()}
    found = backward_formulas(*arguments("exp", view, last=False, dh=layout(dh)))
    assert_gradients(found, expected)
    for name, t in zip(NAMES, found, strict=False):
        assert t.stride() == torch.empty_like(view[name]).stride(), name


# gates


def forget_everything(i: Tensor, f: Tensor) -> None:
    f.fill_(-1e4)


def forget_nothing(i: Tensor, f: Tensor) -> None:
    f.fill_(1e4)


def never_written(i: Tensor, f: Tensor) -> None:
    """e^{-m} beyond every float."""
    i.fill_(-1e4)


def spike(i: Tensor, f: Tensor) -> None:
    half = i.shape[-1] // 2
    i[..., :half], i[..., half:] = 80.0, -80.0


def falling(i: Tensor, f: Tensor) -> None:
    """The stabiliser falls by 200 across each chunk."""
    i -= torch.arange(i.shape[-1]) * (200 / CHUNK)


def resets(i: Tensor, f: Tensor) -> None:
    f[..., ::90] = -torch.inf
    i[..., 3::7] = -torch.inf


def silence(i: Tensor, f: Tensor) -> None:
    """A state that decays by e^-64 per chunk and is all there is, until tokens of its size come."""
    f[..., 64:256], i[..., 64:256] = -math.log(math.e - 1), -1e4
    i[..., :64] += 200.0
    i[..., 256:] += 8.0


EXTREME = [forget_everything, forget_nothing, never_written, spike, falling, resets, silence]


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("chunks", [2, 100], ids=["cut", "whole"])
@pytest.mark.parametrize("set_gates", EXTREME)
@WALKS
def test_extreme_gates(
    dims: tuple[int, int],
    gate: str,
    chunks: int,
    set_gates: Callable[[Tensor, Tensor], None],
    backward_formulas: Any,
) -> None:
    x = draw(gate, (2, 2, 300), dims=dims)
    for name in "qk":
        x[name].abs_()
    set_gates(x["i"], x["f"])
    given = arguments(gate, x)
    backward_formulas.segment_chunks = chunks
    assert_gradients(backward_formulas(*given), torch.ops.tfla_tk.mlstm_bwd(*given))


@WALKS
def test_a_state_that_outweighs_its_chunk_is_not_dropped(
    dims: tuple[int, int], backward_formulas: Formulas
) -> None:
    """Its decay alone says nothing: what counts is what the chunk's own tokens weigh beside it."""
    x = draw("exp", (2, 2, 400), dims=dims)
    for name in "qk":
        x[name].abs_()
    silence(x["i"], x["f"])
    given = arguments("exp", x)
    want = torch.ops.tfla_tk.mlstm_bwd(*given)[4][..., 64:256]
    assert want.abs().max() > 1e-3
    torch.testing.assert_close(backward_formulas(*given)[4][..., 64:256], want, rtol=1e-6, atol=1e-9)
