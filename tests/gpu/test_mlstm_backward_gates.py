"""The kernels for the gradients of the gates of the mLSTM backward on the GPU, against formulas in fp64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tfla_tk import build
from tfla_tk.backends.tk.prepared import gate as _gate
from tfla_tk.backends.tk.prepared import pointer as _pointer
from tfla_tk.build import instances
from tfla_tk.core.layout import GATE_KINDS
from tfla_tk.ops import mlstm as ops

from .accuracy import relative_error
from .memory import high_and_low, launch, normal, offsets_of
from .mlstm_formulas import ANCHOR_CHUNKS, CHUNK, RowSums, gate_gradients

Check = Callable[..., tuple[Tensor, Tensor]]
StateGradient = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]  # c, dc, n, dn

REPEATS = 200
GATES = ["exp", "sig"]
NO_STATE: StateGradient = (None, None, None, None)


@pytest.fixture(scope="module")
def kernel() -> ModuleType:
    return build.load(instances.CHUNKWISE, *map(instances.mlstm_bwd_gates, (False, True)))


class Problem(NamedTuple):
    """Arguments of the gates' kernels.

    Attributes:
        q_dq, k_dk: of every slice of K or V.
        states: c, dc, n, dn at start and end, None where absent.
        before: like `anchors`, for the chunks before an anchor; None: the same.
        every: chunks from one anchor to the next.
    """

    q_dq: RowSums
    k_dk: RowSums
    anchors: Tensor
    i: Tensor
    f: Tensor
    chunk_m: Tensor | None
    cu_seqlens: Tensor | None
    states: tuple[StateGradient, StateGradient]
    dims: tuple[int, int]
    before: Tensor | None = None
    every: int = ANCHOR_CHUNKS

    @property
    def bounds(self) -> list[tuple[int, int]]:
        return bounds_of(self.i, self.cu_seqlens)


def bounds_of(i: Tensor, cu_seqlens: Tensor | None) -> list[tuple[int, int]]:
    """(start, end) of every sequence."""
    return [(0, i.shape[-1])] if cu_seqlens is None else list(itertools.pairwise(cu_seqlens.tolist()))


def draw_anchors(
    i: Tensor, cu_seqlens: Tensor | None, parts: int, every: int = ANCHOR_CHUNKS, seed: int = 8
) -> Tensor:
    """Flows of the size of the row sums between them; what belongs to no anchor is not a number."""
    slots = ops.chunk_slots(i.shape[-1], cu_seqlens) // every + 1
    drawn = 20 * parts**-0.5 * normal(*i.shape[:2], slots, parts, seed=seed)
    found = torch.full_like(drawn, torch.nan)
    for sequence, (start, end) in enumerate(bounds_of(i, cu_seqlens)):
        first = 0 if cu_seqlens is None else start // CHUNK + sequence
        for chunk in range(every, -(-(end - start) // CHUNK), every):
            slot = (first + chunk) // every
            found[:, :, slot] = drawn[:, :, slot]
    return found


def draw_gates(
    gate: str,
    size: tuple[int, int, int],
    *,
    slices: int = 1,
    parts: int = 5,
    lengths: list[int] | None = None,
    states: bool = False,
    dims: tuple[int, int] = (16, 48),
    forget_bias: float = 3.0,
) -> Problem:
    """Row sums of any values: the formulas do not ask where they come from."""
    cu_seqlens = None
    if lengths is not None:
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32)
    count = size[0] if lengths is None else len(lengths)
    slots = ops.chunk_slots(size[-1], cu_seqlens)

    def row_sums(seed: int) -> RowSums:
        inter = normal(slices, *size[:2], slots, 2, seed=seed + 1)
        inter[..., 1] = 64 * inter[..., 1].square()  # of the squares
        return RowSums(normal(slices, *size, seed=seed), inter)

    sums = [row_sums(seed) for seed in (1, 3)]
    chunk_m = 3 * normal(*size[:2], slots, dtype=torch.float64, seed=5) if gate == "exp" else None

    def state(seed: int) -> StateGradient:
        if not states:
            return NO_STATE
        c, n = (count, size[1], *dims), (count, size[1], dims[0])
        return (
            normal(*c, seed=seed),
            normal(*c, seed=seed + 1),
            normal(*n, seed=seed + 2),
            normal(*n, seed=seed + 3),
        )

    i, f = normal(*size, seed=6), normal(*size, seed=7) + forget_bias
    anchors = draw_anchors(i, cu_seqlens, parts)
    return Problem(*sums, anchors, i, f, chunk_m, cu_seqlens, (state(10), state(20)), dims)


def run(kernel: ModuleType, x: Problem) -> tuple[Tensor, Tensor]:
    di, df = (torch.full_like(gate, torch.nan) for gate in (x.i, x.f))
    batch, heads, _ = x.i.shape
    offsets = offsets_of(x.cu_seqlens, batch)
    size = kernel.mlstm_bwd_gates_workspace_bytes(heads, offsets[-1])
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
    device = x.i.get_device()
    chunk_m = None if x.chunk_m is None else high_and_low(x.chunk_m)
    launch(
        kernel,
        "mlstm_bwd_gates",
        *((sums.whole.data_ptr(), sums.inter.data_ptr(), len(sums.whole)) for sums in (x.q_dq, x.k_dk)),
        (
            *(t.data_ptr() for t in (x.anchors, x.anchors if x.before is None else x.before)),
            *(x.anchors.shape[-1], x.every),
        ),
        *(_gate(gate) for gate in (x.i, x.f, di, df)),
        _pointer(chunk_m),
        *(tuple(_pointer(t) for t in state) for state in x.states),
        workspace.data_ptr(),
        offsets,
        (*x.i.shape, *x.dims),
        GATE_KINDS["sigmoid" if x.chunk_m is None else "exponential"],
        device=device,
    )
    return di, df


def truth(x: Problem) -> tuple[Tensor, Tensor]:
    count = x.i.shape[0] if x.cu_seqlens is None else len(x.bounds)
    flows = []
    for c, dc, n, dn in x.states:
        flow = torch.zeros(count, x.i.shape[1], dtype=torch.float64, device="cuda")
        for state, grad in ((c, dc), (n, dn)):
            if state is not None and grad is not None:
                flow += (state.double() * grad.double()).flatten(2).sum(-1)
        flows.append(flow)
    sums = [[t.double().sum(0) for t in (own.whole, own.inter)] for own in (x.q_dq, x.k_dk)]
    given = (*sums, x.anchors, x.i, x.f, x.chunk_m, flows, x.bounds, x.before, x.every)
    return gate_gradients(*given)


@pytest.fixture
def check(kernel: ModuleType) -> Check:
    """Runs the kernels, holds di and df against the formulas, and gives them back."""

    def check(x: Problem, tolerance: float = 1e-5) -> tuple[Tensor, Tensor]:
        found = run(kernel, x)
        for name, own, true in zip(("di", "df"), found, truth(x), strict=True):
            assert relative_error(own, true) <= tolerance, name
        return found

    return check


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(("slices", "parts"), [(1, 1), (3, 5), (2, 70)])
@pytest.mark.parametrize("states", [False, True], ids=["zeros", "states"])
@pytest.mark.parametrize("seq", [1, 63, 64, 65, 512, 513, 1024, 5000])
def test_gate_gradients(gate: str, seq: int, states: bool, slices: int, parts: int, check: Check) -> None:
    x = draw_gates(gate, (2, 3, seq), slices=slices, parts=parts, states=states)
    check(x)


@pytest.mark.parametrize("forget_bias", [-8.0, 0.0, 1.0, 12.0])
@pytest.mark.parametrize("gate", GATES)
def test_chunks_that_forget_and_that_do_not(gate: str, forget_bias: float, check: Check) -> None:
    x = draw_gates(gate, (2, 3, 3000), states=True, forget_bias=forget_bias)
    check(x)


@pytest.mark.parametrize("gate", GATES)
def test_chunks_whose_entering_part_is_not_summed(gate: str, check: Check) -> None:
    """By one walk or by both; the sums of all rows take its place."""
    x = draw_gates(gate, (2, 3, 3000), slices=2, states=True)
    for first in (1, 2):
        x.q_dq.inter[:, :, :, first::4, 0] = torch.inf
        x.k_dk.inter[:, :, :, first + 1 :: 4, 0] = torch.inf
    check(x)


LENGTHS = [200, 0, 1, 64, 63, 65, 0, 450, 1280]
LONG = [513, 0, 575, 512, 1090] * 8  # with an anchor in nearly every slot


@pytest.mark.parametrize(
    "lengths", [LENGTHS, [(7 * n) % 90 for n in range(100)], LONG], ids=["few", "many", "long"]
)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("wide", [False, True])
def test_packed_sequences(wide: bool, gate: str, lengths: list[int], check: Check) -> None:
    x = draw_gates(gate, (1, 3, sum(lengths)), lengths=lengths, states=True)
    assert x.cu_seqlens is not None
    if wide:
        x = x._replace(cu_seqlens=x.cu_seqlens.long())
    check(x)


@pytest.mark.parametrize(
    ("seq", "lengths"),
    [*((seq, None) for seq in (1, 255, 256, 257, 513, 800, 1024, 5000)), (0, LENGTHS), (0, LONG)],
    ids=lambda x: str(x) if isinstance(x, int) else x and f"{len(x)}_packed",
)
def test_closer_anchors_with_a_flow_for_each_side(seq: int, lengths: list[int] | None, check: Check) -> None:
    size = (2, 3, seq) if lengths is None else (1, 3, sum(lengths))
    x = draw_gates("sig", size, lengths=lengths, states=True)
    of_sides = [draw_anchors(x.i, x.cu_seqlens, 5, ANCHOR_CHUNKS // 2, seed) for seed in (8, 9)]
    x = x._replace(anchors=of_sides[0], before=of_sides[1], every=ANCHOR_CHUNKS // 2)
    check(x)


@pytest.mark.parametrize("missing", ["c", "n"])
@pytest.mark.parametrize("end", [0, 1], ids=["initial", "last"])
def test_part_of_the_states(end: int, missing: str, check: Check) -> None:
    x = draw_gates("exp", (2, 3, 300), states=True, dims=(256, 512))
    c, dc, n, dn = x.states[end]
    kept = (None, None, n, dn) if missing == "c" else (c, dc, None, None)
    x = x._replace(states=(kept, NO_STATE) if end == 0 else (NO_STATE, kept))
    check(x)


def test_noise_does_not_pass_a_chunk_that_forgets(kernel: ModuleType) -> None:
    x = draw_gates("exp", (1, 2, 6 * 64))
    x.f[..., 64 + 5] = x.f[..., 4 * 64 + 5] = -60.0
    before = run(kernel, x)[1][..., 64 : 5 * 64]
    for sums in (x.q_dq, x.k_dk):
        sums.whole[..., :CHUNK] += 100.0
        sums.whole[..., 5 * CHUNK :] += 100.0
        sums.inter[..., [0, 5], :] += 100.0
    assert torch.equal(run(kernel, x)[1][..., 64 : 5 * 64], before)


def test_noise_does_not_pass_an_anchor(kernel: ModuleType) -> None:
    tokens = ANCHOR_CHUNKS * CHUNK
    x = draw_gates("exp", (1, 2, 3 * tokens), states=True)
    before = run(kernel, x)[1][..., tokens : 2 * tokens]
    for sums in (x.q_dq, x.k_dk):
        sums.whole[..., :tokens] = torch.nan
        sums.whole[..., 2 * tokens :] = torch.nan
        sums.inter[..., :ANCHOR_CHUNKS, :] = torch.nan
        sums.inter[..., 2 * ANCHOR_CHUNKS :, :] = torch.nan
    assert torch.equal(run(kernel, x)[1][..., tokens : 2 * tokens], before)


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["batch", "packed"])
def test_repeats_are_bitwise_equal(lengths: list[int] | None, kernel: ModuleType) -> None:
    seq = 2000 if lengths is None else sum(lengths)
    x = draw_gates("exp", (1, 16, seq), slices=2, lengths=lengths, states=True)
    first = run(kernel, x)
    for _ in range(REPEATS):
        assert all(torch.equal(a, b) for a, b in zip(run(kernel, x), first, strict=True))


@pytest.mark.sanitize
@pytest.mark.parametrize("lengths", [None, [70, 0, 1, 63], [513, 70]], ids=["batch", "packed", "long"])
def test_small(lengths: list[int] | None, check: Check) -> None:
    """For compute-sanitizer."""
    seq = 1030 if lengths is None else sum(lengths)
    x = draw_gates("exp", (1, 2, seq), slices=2, lengths=lengths, states=True)
    check(x)
