"""The kernel that scans the gates for the walks of the mLSTM backward on the GPU, against fp64 formulas."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tfla_tk import build
from tfla_tk.backends.tk.prepared import gate as _gate
from tfla_tk.backends.tk.prepared import pointer as _pointer
from tfla_tk.build import instances
from tfla_tk.ops import mlstm as ops

from .memory import LENGTHS, high_and_low, launch, normal, offsets_of
from .mlstm_formulas import row_factors

CHUNK = 64
EPS = 1e-6
SCALE = 0.0625
STORED = 2 * 4  # numbers by which shares of dq and dk take turns: kMostSlices of each


class ChunkGates(NamedTuple):
    """Of every token, [B, NH, slots, 64], in log2 but for the last two; of every chunk the decay."""

    sends: Tensor
    receives: Tensor
    sent: Tensor
    received: Tensor
    decay: Tensor


class Problem(NamedTuple):
    """i, f, d, m: [B, NH, S]; d is None without normaliser. chunk_m: fp64, None with the sigmoid gate."""

    i: Tensor
    f: Tensor
    d: Tensor | None
    m: Tensor | None
    chunk_m: Tensor | None
    cu_seqlens: Tensor | None

    @property
    def slots(self) -> int:
        return ops.chunk_slots(self.i.shape[-1], self.cu_seqlens)

    def chunks(self) -> list[tuple[int, int, slice]]:
        """The number, the slot and the tokens of every chunk, sequence by sequence."""
        packed = self.cu_seqlens is not None
        offsets = self.cu_seqlens.tolist() if packed else [0, self.i.shape[-1]]
        return [
            (number, start // CHUNK + packed * sequence + number, slice(at, min(at + CHUNK, end)))
            for sequence, (start, end) in enumerate(itertools.pairwise(offsets))
            for number, at in enumerate(range(start, end, CHUNK))
        ]


@pytest.fixture(scope="module")
def kernel() -> ModuleType:
    return build.load(instances.CHUNKWISE[False], *map(instances.mlstm_bwd_gates, (False, True)))


def draw(
    gate: str,
    size: tuple[int, int, int],
    *,
    packed: bool = False,
    dtype: torch.dtype = torch.float32,
    change: Callable[[Tensor, Tensor], None] = lambda i, f: None,
) -> Problem:
    """With the stabilisers that a forward leaves, in fp64."""
    cu_seqlens = None
    if packed:
        cu_seqlens = torch.tensor([0, *itertools.accumulate(LENGTHS)], device="cuda")
        size = (1, size[1], sum(LENGTHS))
    i, f = normal(*size, seed=1), normal(*size, seed=2) + 3
    change(i, f)
    i, f = i.to(dtype), f.to(dtype)
    normalize, exponential = gate != "sig_unnormalised", gate == "exp"
    d = 5 * normal(*size, seed=3) if normalize else None
    m = 3 * normal(*size, seed=4) if exponential else None
    problem = Problem(i, f, d, m, None, cu_seqlens)
    if not exponential:
        return problem
    chunk_m = torch.zeros(*size[:2], problem.slots, dtype=torch.float64, device="cuda")
    end = torch.zeros_like(chunk_m[..., 0])
    for number, slot, own in problem.chunks():
        at_start = end if number > 0 else torch.zeros_like(end)
        chunk_m[:, :, slot] = at_start
        b = logsigmoid(f[:, :, own].double()).cumsum(-1) / math.log(2)
        a = i[:, :, own].double() / math.log(2) - b
        end = b[..., -1] + torch.maximum(at_start, a.amax(-1))
    return problem._replace(chunk_m=chunk_m)


def run(kernel: ModuleType, x: Problem) -> ChunkGates:
    """What the kernel writes, of pairs of floats their sums; NaN where it writes nothing."""
    batch, heads, seq = x.i.shape
    floats = kernel.chunk_gates_bytes() // 4
    gates = torch.full((batch, heads, x.slots, floats), torch.nan, device="cuda")
    device = x.i.get_device()
    chunk_m = None if x.chunk_m is None else high_and_low(x.chunk_m)
    tickets = torch.full((3,), 7, dtype=torch.int32, device="cuda")
    launch(
        kernel,
        "mlstm_bwd_scan",
        _gate(x.i),
        _gate(x.f),
        (_pointer(x.d), _pointer(x.m), EPS),
        _pointer(chunk_m),
        gates.data_ptr(),
        tickets.data_ptr(),
        offsets_of(x.cu_seqlens, batch),
        (batch, heads, seq),
        SCALE,
        x.chunk_m is None,
        device=device,
    )
    sends, receives, sent, received, end = gates.split([128, 128, 64, 64, floats - 384], dim=-1)
    assert tickets.tolist() == [0, 0, 7]  # of dq and dk
    decay, stored = end[..., 0], end[..., 1 : 1 + STORED]
    assert not stored[~decay.isnan()].count_nonzero()  # of shares that take turns, none
    pairs = (y.double().unflatten(-1, (CHUNK, 2)).sum(-1) for y in (sends, receives))
    return ChunkGates(*pairs, sent.double(), received.double(), decay.double())


def expected(x: Problem) -> ChunkGates:
    """The same in fp64; NaN past a chunk's last token."""
    nothing = torch.full((*x.i.shape[:2], x.slots, CHUNK), torch.nan, dtype=torch.float64, device="cuda")
    found = [*(nothing.clone() for _ in range(4)), nothing[..., 0].clone()]
    log2_w = torch.zeros_like(x.i, dtype=torch.float64)
    if x.d is not None:
        log2_w = row_factors(torch.zeros_like(x.d), x.d, x.m, EPS)[0]
    for _, slot, own in x.chunks():
        tokens = slice(own.stop - own.start)
        i, f = x.i[:, :, own].double(), x.f[:, :, own].double()
        b = logsigmoid(f).cumsum(-1) / math.log(2)
        if x.chunk_m is None:
            a, m_in, largest = logsigmoid(i) / math.log(2) - b, torch.zeros_like(b[..., :1]), -b
            end = b[..., -1:]
        else:
            a, m_in = i / math.log(2) - b, x.chunk_m[:, :, slot, None]
            largest = torch.maximum(m_in, a.cummax(-1).values)
            end = -largest[..., -1:]
        receives = largest + log2_w[:, :, own]
        of_tokens = (a + math.log2(SCALE), receives, torch.exp2(a + end), SCALE * torch.exp2(m_in - receives))
        for y, values in zip(found, of_tokens, strict=False):
            y[:, :, slot, tokens] = values
        found[-1][:, :, slot] = (m_in + end)[..., 0]
    return ChunkGates(*found)


def assert_close(found: ChunkGates, truth: ChunkGates) -> None:
    for name, a, b in zip(ChunkGates._fields, found, truth, strict=True):
        there = ~b.isnan()
        assert there.any()
        # M_t is rounded up to fp32; 2^x has the error of x times ln 2
        tolerance = 1e-5 if name in ("sent", "received") else 1e-6
        error = (a[there] - b[there]).abs() - tolerance * b[there].abs()
        assert (error <= 1e-5).all(), name  # NaN fails


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("gate", ["exp", "sig", "sig_unnormalised"])
def test_scan(gate: str, packed: bool, dtype: torch.dtype, kernel: ModuleType) -> None:
    for size in ((2, 3, 1), (2, 3, 64), (1, 2, 700)):
        x = draw(gate, size, packed=packed, dtype=dtype)
        assert_close(run(kernel, x), expected(x))


@pytest.mark.parametrize("gate", ["exp", "sig"])
def test_transposed_gates(gate: str, kernel: ModuleType) -> None:
    """[B, S, NH] views are read as they lie."""
    x = draw(gate, (2, 3, 300))
    i, f = (y.transpose(1, 2).contiguous().transpose(1, 2) for y in (x.i, x.f))
    assert_close(run(kernel, x._replace(i=i, f=f)), expected(x))


@pytest.mark.parametrize("gate", ["exp", "sig"])
def test_extreme_gates(gate: str, kernel: ModuleType) -> None:
    """Weights stay numbers, and those of what a chunk keeps of its own tokens are 1 at most."""

    def change(i: Tensor, f: Tensor) -> None:
        f[:, :, 10:20], f[:, :, 70] = -1e4, -1e4
        i[:, :, 30], i[:, :, 100:110] = 1e4, -1e4
        i[:, :, 140], i[:, :, 141:] = 80.0, -80.0

    found = run(kernel, draw(gate, (1, 2, 300), change=change))
    for name, values in zip(ChunkGates._fields, found, strict=True):
        own = values.flatten(2)[..., :300] if values.ndim == 4 else values
        assert own.isfinite().all(), name
    assert (found.sent.flatten(2)[..., :300] <= 1 + 1e-5).all()
    assert (found.decay <= 0).all()


@pytest.mark.sanitize
def test_small(kernel: ModuleType) -> None:
    """For compute-sanitizer."""
    for gate, packed in (("exp", True), ("sig", False)):
        x = draw(gate, (1, 2, 130), packed=packed)
        assert_close(run(kernel, x), expected(x))
