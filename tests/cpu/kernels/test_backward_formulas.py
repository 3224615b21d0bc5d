"""The plan of the kernels' backward, formula by formula, against the explicit backward of the reference.

With narrow head dims one walk over states that the forward leaves. Else three walks that are one kernel with
other operands, factors of rows before or after the first of them, gates from their row sums.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tfla_tk import reference
from tfla_tk.core.layout import Cut, KeptStates
from tfla_tk.ops import mlstm as ops

from .addresses import CHUNK

Tensors = dict[str, Tensor]
Formulas = Callable[..., Any]

EPS = 1e-6
ANCHOR_CHUNKS = 8
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


def states_left_by_a_forward(gate: str, x: Tensors, chunks: int) -> KeptStates:
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
    return KeptStates(workspace, Cut(segments, chunks), places)


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
    assert error(found, want) <= 1e-9


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


def test_noise_does_not_pass_a_chunk_that_forgets(backward_formulas: Any, gate_gradients: Formulas) -> None:
    """Row sums of other chunks, wrong as they may be, leave no trace in df between two such chunks."""
    x = draw("exp", (1, 2, 6 * CHUNK), states=False, dims=WIDE)
    x["f"][..., CHUNK + 5] = x["f"][..., 4 * CHUNK + 5] = -60.0
    given = arguments("exp", x, last=False)
    backward_formulas(*given)
    flows = (torch.zeros(1, 2), torch.zeros(1, 2))
    chunk_m = given[12].sum(-1)

    def df(*chunks: int) -> Tensor:
        sums = [[t.clone() for t in backward_formulas.row_sums[name]] for name in ("dq", "dk")]
        for chunk in chunks:
            for noise, (whole, inter) in enumerate(sums, start=1):
                whole[..., chunk * CHUNK : (chunk + 1) * CHUNK] += 100.0 * noise
                inter[:, :, chunk] += 300.0 * noise
        found: Tensor = gate_gradients(*sums, None, x["i"], x["f"], chunk_m, flows, [(0, 6 * CHUNK)])[1]
        return found

    between = slice(CHUNK, 5 * CHUNK)
    assert torch.equal(df(0, 5)[..., between], df()[..., between])
    assert not torch.allclose(df(2)[..., between], df()[..., between])


def test_noise_does_not_pass_an_anchor(gate_gradients: Formulas) -> None:
    """Row sums in front of it leave no trace in df behind it, and the other way round."""
    q_dq, k_dk, *rest = gate_problem("sig", [3 * ANCHOR_CHUNKS * CHUNK])
    between = slice(ANCHOR_CHUNKS * CHUNK, 2 * ANCHOR_CHUNKS * CHUNK)

    def df(noise: float) -> Tensor:
        changed = [[t + noise for t in sums] for sums in (q_dq, k_dk)]
        chunks = slice(ANCHOR_CHUNKS, 2 * ANCHOR_CHUNKS)
        for (whole, inter), given in zip(changed, (q_dq, k_dk), strict=True):
            whole[..., between] = given[0][..., between]
            inter[:, :, chunks] = given[1][:, :, chunks]
        found: Tensor = gate_gradients(*changed, *rest, [(0, 3 * ANCHOR_CHUNKS * CHUNK)])[1]
        return found

    assert torch.equal(df(100.0)[..., between], df(0.0)[..., between])


def to_bf16(x: Tensor) -> Tensor:
    return x.bfloat16().double()


def error(x: Tensor, y: Tensor) -> float:
    return ((x - y).norm() / y.norm()).item()


def draw_rounded(
    gate: str,
    seq: int,
    forget_bias: float,
    *,
    heads: int = 2,
    states: bool = False,
    dims: tuple[int, int] = (64, 136),
) -> tuple[Any, ...]:
    """Arguments whose operands are bf16."""
    x = draw(gate, (1, heads, seq), states=states, dims=dims)
    x |= {name: to_bf16(x[name]) for name in "qkv"}
    x["f"] += forget_bias - 3
    return arguments(gate, x, last=states, dh=to_bf16(torch.randn_like(x["v"])))


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("forget_bias", [-2.0, 0.0, 2.0, 3.0, 12.0])
def test_rounding_noise_of_one_walk(forget_bias: float, gate: str, backward_formulas: Any) -> None:
    """Operands rounded to bf16 where the kernels round them: it does not grow with the sequence."""
    given = draw_rounded(gate, 4096, forget_bias, dims=(64, 64))
    backward_formulas.rounded = to_bf16
    for name, a, b in zip(
        TOKENS, backward_formulas(*given), torch.ops.tfla_tk.mlstm_bwd(*given), strict=False
    ):
        assert error(a, b) <= (3e-3 if name in "qkv" else 6e-3), name


@pytest.mark.parametrize("rate", [0.01, 1.0, 16.0])
def test_rounding_noise_of_a_decay(rate: float, backward_formulas: Any) -> None:
    """Gates that forget fast, and closed ones among mild ones, in the chunks that a state enters and in those
    behind them: what is left of dg is right, times the rate, too."""
    x = draw("sig_unnormalised", (1, 4, 4096), states=False, dims=(64, 64))
    x |= {name: to_bf16(x[name]) for name in "qkv"}
    x["i"].fill_(30.0)
    decay = -2 * rate * torch.rand_like(x["f"])
    decay[..., ::23] = -14.0
    x["f"] = decay - torch.log(-torch.expm1(decay))
    given = arguments("sig_unnormalised", x, last=False, dh=to_bf16(torch.randn_like(x["v"])))
    backward_formulas.rounded = to_bf16
    dg, want = (
        of(*given)[4] / torch.sigmoid(-x["f"]) for of in (backward_formulas, torch.ops.tfla_tk.mlstm_bwd)
    )
    for own in (slice(0, None, 23), slice(None)):
        assert error(dg[..., own], want[..., own]) <= 5e-3
    assert error((dg * decay).sum(-1), (want * decay).sum(-1)) <= 2e-2


@pytest.mark.parametrize("forget_bias", [0.0, 2.0, 3.0, 12.0])
def test_rounding_noise(forget_bias: float, backward_formulas: Any) -> None:
    """Operands rounded to bf16 where the kernels round them: df within 1e-2 of the truth at S = 4096."""
    given = draw_rounded("exp", 4096, forget_bias)
    want = torch.ops.tfla_tk.mlstm_bwd(*given)
    backward_formulas.rounded = to_bf16
    found = backward_formulas(*given)
    for name, a, b in zip(TOKENS, found, want, strict=False):
        assert error(a, b) <= (8e-3 if name in "qkv" else 1e-2), name
    # one sum over all tokens collects the noise of all of them
    (q_dq, _), (k_dk, _) = (backward_formulas.row_sums[name] for name in ("dq", "dk"))
    summed = (q_dq - k_dk).flip(-1).cumsum(-1).flip(-1) * torch.sigmoid(-given[4])
    assert error(found[4], want[4]) <= error(summed, want[4]) * (0.3 if forget_bias == 0 else 1.1)


@pytest.mark.parametrize(("seq", "forget_bias"), [(300, 2.5), (600, 3.0), (300, 6.0), (600, 12.0)])
@pytest.mark.parametrize("states", [False, True], ids=["zeros", "states"])
@pytest.mark.parametrize("gate", GATES)
def test_sums_of_all_rows_serve_slow_chunks(
    gate: str, states: bool, seq: int, forget_bias: float, backward_formulas: Any
) -> None:
    """Their noise is no larger than that of the parts through the states, as 16 tokens tell it."""
    given = draw_rounded(gate, seq, forget_bias, heads=24, states=states)
    want = torch.ops.tfla_tk.mlstm_bwd(*given)[4]
    backward_formulas.rounded = to_bf16
    found = error(backward_formulas(*given)[4], want)
    assert all(inter.isinf().any() for _, inter in backward_formulas.row_sums.values())
    backward_formulas.slow_decay = math.inf
    assert found <= 1.05 * error(backward_formulas(*given)[4], want)
    assert not any(inter.isinf().any() for _, inter in backward_formulas.row_sums.values())


@pytest.mark.parametrize("gate", GATES)
def test_anchors_hold_the_noise_of_long_sequences(gate: str, backward_formulas: Any) -> None:
    """Without them what is followed from the ends takes up the noise of more and more chunks."""
    given = draw_rounded(gate, 8192, 3.0)
    want = torch.ops.tfla_tk.mlstm_bwd(*given)[4]
    backward_formulas.rounded = to_bf16
    anchored = error(backward_formulas(*given)[4], want)
    backward_formulas.anchored = False
    assert anchored <= min(1e-2, 0.5 * error(backward_formulas(*given)[4], want))


# formulas by themselves


def gate_problem(gate: str, lengths: Sequence[int]) -> tuple[Any, ...]:
    """Arguments of gate_gradients for any row sums."""
    torch.manual_seed(0)
    shape = (1, 2, sum(lengths))
    slots = -(-shape[-1] // CHUNK) + len(lengths)
    sums = [(torch.randn(shape), torch.rand(1, 2, slots, 2)) for _ in range(2)]
    anchors = torch.randn(1, 2, slots // ANCHOR_CHUNKS + 1, 3)
    chunk_m = torch.randn(1, 2, slots) if gate == "exp" else None
    flows = (torch.randn(len(lengths), 2), torch.randn(len(lengths), 2))
    return (*sums, anchors, 5 * torch.randn(shape), 5 * torch.randn(shape), chunk_m, flows)


@pytest.mark.parametrize("gate", ["exp", "sig"])
@pytest.mark.parametrize(
    "lengths", [LENGTHS, LONG, [513, 0, 575, 512, 1090] * 8], ids=["short", "long", "many"]
)
def test_packed_sequences_by_themselves(lengths: list[int], gate: str, gate_gradients: Formulas) -> None:
    """Chunks start at each sequence's start; each has its own slot, and each anchor too."""
    q_dq, k_dk, anchors, i, f, chunk_m, flows = gate_problem(gate, lengths)
    bounds = list(itertools.pairwise(itertools.accumulate([0, *lengths])))
    found = gate_gradients(q_dq, k_dk, anchors, i, f, chunk_m, flows, bounds)
    used = []
    for sequence, (start, end) in enumerate(bounds):
        own, slot = slice(start, end), start // CHUNK + sequence
        behind = range(ANCHOR_CHUNKS, -(-(end - start) // CHUNK), ANCHOR_CHUNKS)
        own_anchors = [(slot + chunk) // ANCHOR_CHUNKS for chunk in behind]
        used += own_anchors
        expected = gate_gradients(
            *((whole[..., own], inter[:, :, slot:]) for whole, inter in (q_dq, k_dk)),
            anchors[:, :, [0, *own_anchors]],  # that before chunk 0 does not exist
            i[..., own],
            f[..., own],
            None if chunk_m is None else chunk_m[..., slot:],
            [x[sequence : sequence + 1] for x in flows],
            [(0, end - start)],
        )
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x[..., own], y)
    assert len(set(used)) == len(used) and max(used, default=0) < anchors.shape[2]


def test_row_factors_at_the_ends_of_the_range(row_factors: Formulas) -> None:
    """Finite where e^{-m} is not; no gradient of d where the floor holds."""
    m = torch.tensor([-1e4, -100.0, 0.0, 0.0, 0.0, 100.0, 1e4])
    d = torch.tensor([1.0, 1.0, 0.5, -2.0, 0.0, 0.0, -3.0])
    dh_h = torch.full_like(d, 4.0)
    log2_w, e = row_factors(dh_h, d, m.double(), EPS)
    assert log2_w.isfinite().all()
    torch.testing.assert_close(log2_w[:2], torch.tensor([1e4, 100.0]).double() / math.log(2))
    assert e.tolist() == [0.0, 0.0, 0.0, 4.0, 0.0, 0.0, 4.0]
