"""Every kernel instance compiled once for all the tests and worker processes; the backward in formulas."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tfla_tk import build, ops
from tfla_tk.backends import segments, tk_backward
from tfla_tk.backends.tk_backward import Boundaries, Boundary, Gates, Rows, RowSums, State, Walk
from tfla_tk.build.disassembly import find_tool
from tfla_tk.build.instances import INTRA_SCHEDULES
from tfla_tk.build.locking import file_lock
from tfla_tk.reference.common import segment_sum

_FUNCTION = re.compile(r"^\.text\.(\S+):$")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\S+)\s*(.*?)\s*;")
_GRADIENTS = tuple(tk_backward._GRADIENTS)
_EVENTS = {"MUFU.EX2": "exp2", "UTMASTG": "store", "BAR.ARV": "turn"}
_CONFIG = re.compile(
    r"ConfigI(\d+)(\w+?)Li(\d+)ELi(\d+)E(?:Lb([01])E)?(?:LNS\w*_\d+(Schedule|Gradient)E(\d)E)?"
)
_KERNEL = re.compile(r"\d+(mlstm_[a-z_]+?)(?:_kernel)?[IE]")


def _is_wgmma_of_shared(opcode: str, operands: str) -> bool:
    """Whether both operands of a wgmma are in shared memory."""
    return opcode.startswith("HGMMA") and operands.split(", ")[1].startswith("gdesc")


@dataclass(frozen=True)
class Kernel:
    """The SASS of one kernel, with what its symbol names; schedule and gradient "" where it has none.

    Of a pass of the backward, dim_qk and slice_v are the tile of the keys and the slice of the values.
    """

    name: str
    half: bool
    dim_qk: int
    slice_v: int
    normalize: bool
    schedule: str
    gradient: str
    instructions: list[tuple[str, str]]

    @property
    def wgmmas(self) -> int:
        return sum(opcode.startswith("HGMMA") for opcode, _ in self.instructions)

    def stages(self) -> list[Counter[str]]:
        """What the program holds while wgmmas are in flight, from WARPGROUP.ARRIVE to the wait for all.

        Counts per stage: "scores" (Q K^T), "inter" (Q C) and "register" (A from registers: P V, or the
        state) wgmmas, "exp2", "store" (TMA stores), "turn" (arrivals at the ping-pong barrier). The forward's
        first wgmma tells the shape of the scores' and which registers accumulate them.
        """
        found: list[Counter[str]] = []
        stage: Counter[str] | None = None
        first = next((op, o) for op, o in self.instructions if _is_wgmma_of_shared(op, o))
        scores = (first[0], first[1].split(",")[0])
        for opcode, operands in self.instructions:
            if opcode == "WARPGROUP.ARRIVE" and stage is None:
                stage = Counter()
            elif stage is None:
                continue
            elif opcode.startswith("HGMMA"):
                of_scores = (opcode, operands.split(",")[0]) == scores or self.name != "mlstm_fwd"
                shared = "scores" if of_scores else "inter"
                stage[shared if _is_wgmma_of_shared(opcode, operands) else "register"] += 1
            elif opcode == "WARPGROUP.DEPBAR.LE" and operands.endswith("0x0"):
                found.append(stage)
                stage = None
            elif name := _EVENTS.get(opcode.removesuffix(".4D")):
                stage[name] += 1
        return found


@dataclass(frozen=True)
class Compiled:
    """One instance: what ptxas said, its SASS, and its kernels that multiply matrices."""

    instance: build.Instance
    ptxas_log: str
    sass: str
    every_kernel: list[Kernel]

    @property
    def kernels(self) -> list[Kernel]:
        """Those with a schedule."""
        return [kernel for kernel in self.every_kernel if kernel.schedule]


def parse_sass(sass: str) -> list[Kernel]:
    """The kernels of a disassembly."""
    found: list[Kernel] = []
    current: Kernel | None = None
    for line in sass.splitlines():
        if function := _FUNCTION.match(line):
            name, config = _KERNEL.search(function[1]), _CONFIG.search(function[1])
            assert name, f"{function[1]} is no kernel of this package"
            current = None
            if config:
                length, text, dim_qk, slice_v, normalize, enum, value = config.groups()
                current = Kernel(
                    name=name[1],
                    half=text[: int(length)] == "__half",
                    dim_qk=int(dim_qk),
                    slice_v=int(slice_v),
                    normalize=normalize == "1",
                    schedule=INTRA_SCHEDULES[int(value)]
                    if enum == "Schedule"
                    else "",  # begins with SCHEDULES
                    gradient=_GRADIENTS[int(value)] if enum == "Gradient" else "",
                    instructions=[],
                )
                found.append(current)
        elif current and (instruction := _INSTRUCTION.match(line)):
            current.instructions.append((instruction[1], instruction[2]))
    return found


@pytest.fixture(scope="session")
def compile_once(
    kernel_compiler: None, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[build.Instance], Compiled]:
    """Compile and disassemble an instance; worker processes share the results."""
    if find_tool("nvdisasm") is None:
        pytest.skip("no nvdisasm")
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    folder /= "kernel_sass"
    folder.mkdir(exist_ok=True)
    done: dict[build.Instance, Compiled] = {}

    def compiled(instance: build.Instance) -> Compiled:
        if instance not in done:
            log, sass = _read_or_compile(instance, folder)
            done[instance] = Compiled(instance, log, sass, parse_sass(sass))
        return done[instance]

    return compiled


def _read_or_compile(instance: build.Instance, folder: Path) -> tuple[str, str]:
    log, sass = folder / f"{instance.name}.log", folder / f"{instance.name}.sass"
    with file_lock(folder / f"{instance.name}.lock"):
        if not sass.exists():
            result = build.compile_cubin(instance, folder)
            log.write_text(result.ptxas_log)
            sass.write_text(build.disassemble(result.cubin))
    return log.read_text(), sass.read_text()


# The backward with the formula of every kernel in its place


CHUNK = 64
SUM_COLUMNS = 64


def exact(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Flows:
    """For `tk_backward.Anchors`: the flows at the anchors, as many of them as there are parts of v."""

    flows: Tensor

    def part(self, number: int) -> Tensor:
        return self.flows[..., number]


class BackwardFormulas:
    """tk_backward.mlstm_bwd in PyTorch, in fp64.

    Attributes:
        rounded: what a kernel does to an operand that it computes: scores and states.
        anchored: whether the flows at the anchors are used.
        segment_chunks: of which sequences are cut into segments.
        row_sums: of the last call's passes by name, whole and inter.
    """

    def __init__(self, row_factors: Callable[..., Any], gate_gradients: Callable[..., Any]) -> None:
        self.row_factors, self.gate_gradients = row_factors, gate_gradients
        self.empty_sums, self.empty_boundaries = tk_backward._empty_sums, tk_backward._empty_boundaries
        self.segment_chunks = 10_000
        self.rounded: Callable[[Tensor], Tensor] = exact
        self.anchored = True
        self.states: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # left at the anchors by dq
        self.row_sums: dict[str, tuple[Tensor, Tensor]] = {}

    def __call__(self, *arguments: Any) -> ops.Grads:
        return tk_backward.mlstm_bwd(*arguments)

    def of_rows(
        self, kernel: Any, dh: Tensor, h: Tensor, row_n: Tensor, row_m: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        given = (x if x.numel() > 0 else None for x in (row_n, row_m))
        found: tuple[Tensor, Tensor] = self.row_factors(dh, self.rounded(h), *given, eps)
        return found

    def of_sums(self, q: Tensor, parts: int, offsets: Tensor | None) -> RowSums:
        """In fp64; what no pass writes is not a number."""
        found = self.empty_sums(q, parts, offsets)
        whole, inter = (torch.full_like(x, torch.nan, dtype=q.dtype) for x in (found.whole, found.inter))
        return RowSums(whole, inter, parts)

    def of_anchors(self, q: Tensor, widths: list[int], offsets: Tensor | None) -> Flows:
        """In fp64; what no pass writes is not a number."""
        slots = ops.chunk_slots(q.shape[2], offsets) // tk_backward._ANCHOR_CHUNKS + 1
        return Flows(q.new_full((*q.shape[:2], slots, len(widths)), torch.nan))

    def of_cut(self, gates: Gates, q: Tensor, v: Tensor) -> segments.Cut:
        """Every sequence cut into segments of `segment_chunks`."""
        lengths = [end - start for start, end in bounds_of(gates.cu_seqlens, q.shape[2])]
        count = sum(max(1, -(-length // (CHUNK * self.segment_chunks))) for length in lengths)
        return segments.Cut(count if gates.cu_seqlens is not None else count * len(q), self.segment_chunks)

    def of_boundaries(self, walk: Walk, values: Tensor, parts: int) -> Boundaries:
        """In fp64; what no kernel writes is not a number."""
        found = self.empty_boundaries(walk, values, parts)
        return Boundaries(*(torch.full_like(x, torch.nan, dtype=values.dtype) for x in vars(found).values()))

    def of_segments(
        self, name: str, keys: Tensor, values: Tensor, walk: Walk, rows: Rows, boundary: Boundary
    ) -> None:
        """`tk_backward._sum_segments`: from the boundary away, until all is forgotten."""
        forward = name == "dq"
        for sequence in sequences_of(walk, keys.shape[2]):
            for g in range(1, len(sequence.segments)):
                chunks = sequence.segments[g - 1][::-1] if forward else sequence.segments[g]
                c, n, log2_decay = (None if x is None else sequence.at(x, g) for x in boundary)
                assert c is not None and log2_decay is not None
                c.zero_(), log2_decay.zero_()
                own_n = torch.zeros_like(c[..., 0])
                tokens = slice(sequence.tokens(min(chunks)).start, sequence.tokens(max(chunks)).stop)
                largest = 0.0 if forward else (-rows[0][:, :, tokens]).amax(-1).clamp(min=0)
                for chunk in chunks:
                    own = sequence.tokens(chunk)
                    forgotten = log2_decay + largest <= -150.0
                    _, of_t, of_j, decay = _chunk_factors(walk.gates, rows[0], own, sequence.slot + chunk)
                    scale = (of_j if forward else of_t) * torch.exp2(log2_decay)[..., None]
                    scale = torch.where(forgotten[..., None], 0.0, scale)
                    key, value, e = (x[:, :, own] for x in (keys, values, rows[1]))
                    c += value.mT @ self.rounded(scale[..., None] * key)
                    own_n += ((scale if forward else e * scale)[..., None] * value).sum(-2)
                    log2_decay += torch.where(forgotten, 0.0, torch.log2(decay))
                if n is not None:
                    n.copy_(own_n)

    def of_combine(self, boundaries: Boundaries, walk: Walk, entering: State, backward: bool) -> None:
        """`tk_backward._combine`."""
        for sequence in sequences_of(walk, walk.gates.i.shape[2]):
            along = range(1, len(sequence.segments))
            for part, states in ((0, boundaries.c), *enumerate(boundaries.n)):
                given = entering[states is not boundaries.c] if part == 0 else None
                x = 0.0 if given is None else given[sequence.which]
                for g in reversed(along) if backward else along:
                    own, log2_decay = sequence.at(states, g), sequence.at(boundaries.log2_decay, g)
                    decay = torch.exp2(log2_decay).reshape(*log2_decay.shape, *(1,) * (own.ndim - 2))
                    x = own + decay * x
                    own.copy_(x)

    def of_pass(
        self,
        name: str,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
        walk: Walk,
        rows: Rows,
        *,
        entering: State,
        boundary: Boundary | None,
        leaving: State = (None, None),
        factor: Tensor | None = None,
        sums: tuple[Tensor, Tensor] | None = None,
        anchors: Tensor | None = None,
        accumulate: bool = False,
    ) -> None:
        """`tk_backward._run_pass`."""
        forward, turned = name == "dq", name != "dv"

        def state(c: Tensor | None, n: Tensor | None) -> tuple[Tensor, Tensor]:
            zero = keys.new_zeros(keys.shape[-1], values.shape[-1])
            return zero if c is None else c.mT if turned else c, zero[0] if n is None else n

        for number, sequence in enumerate(sequences_of(walk, queries.shape[2])):
            c, n = state(*(None if x is None else x[sequence.which] for x in entering))
            along = list(enumerate(sequence.segments))[:: 1 if forward else -1]
            for chunk, g in ((chunk, g) for g, chunks in along for chunk in chunks[:: 1 if forward else -1]):
                first = sequence.segments[g][0 if forward else -1] == chunk
                if first and boundary is not None and g != along[0][0]:
                    at = (None if x is None else sequence.at(x, g + (not forward)) for x in boundary[:2])
                    c, n = state(*at)
                own = sequence.tokens(chunk)
                flow = None  # to be written, where there is an anchor before the chunk
                if anchors is not None and chunk > 0 and chunk % tk_backward._ANCHOR_CHUNKS == 0:
                    flow = anchors[:, :, (sequence.slot + chunk) // tk_backward._ANCHOR_CHUNKS]
                    if forward:
                        self.states[number, chunk] = self.rounded(c), n
                intra, of_t, of_j, decay = _chunk_factors(walk.gates, rows[0], own, sequence.slot + chunk)
                query, key, value, e = (x[:, :, own] for x in (queries, keys, values, rows[1]))
                e = e if turned else torch.zeros_like(e)
                # e belongs to time t: the rows forward in time, else the columns
                scores = query @ key.mT + (e[..., :, None] if forward else e[..., None, :])
                weights = (intra if forward else intra.mT) * scores
                row, column = (of_t, of_j) if forward else (of_j, of_t)
                row_n, column_n = (e * row, column) if forward else (row, e * column)
                inter = row[..., None] * (query @ self.rounded(c)) + row_n[..., None] * n[..., None, :]
                whole = inter + self.rounded(weights) @ value
                out[:, :, own] = whole + out[:, :, own] if accumulate else whole
                if factor is not None and sums is not None:
                    of_tokens, of_chunks = (
                        [part.sum(-1) for part in (factor[:, :, own] * x).split(SUM_COLUMNS, dim=-1)]
                        for x in (whole, inter)
                    )
                    for panel, found in enumerate(of_tokens):
                        sums[0][panel, :, :, own] = found
                    for panel, found in enumerate(of_chunks):
                        both = torch.stack([found.sum(-1), found.square().sum(-1)], -1)
                        sums[1][panel, :, :, sequence.slot + chunk] = both
                c = decay[..., None, None] * c + self.rounded(column[..., None] * key).mT @ value
                n = decay[..., None] * n + (column_n[..., None] * value).sum(-2)
                if flow is not None and not forward:
                    left_c, left_n = self.states[number, chunk]
                    flow.copy_((left_c * c).sum((-2, -1)) + (left_n * n).sum(-1))
            for given, x in zip(leaving, (c.mT if turned else c, n), strict=True):
                if given is not None:
                    given[sequence.which] = x

    def of_gates(
        self,
        kernel: Any,
        gates: Gates,
        q_dq: RowSums,
        k_dk: RowSums,
        anchors: Tensor,
        di: Tensor,
        df: Tensor,
        *rest: Any,
    ) -> None:
        *states, (batch, heads, seq, _, _) = rest
        bounds = bounds_of(gates.cu_seqlens, seq)
        flows = []
        for c, dc, n, dn in states:
            flow = di.new_zeros(batch if gates.cu_seqlens is None else len(bounds), heads)
            for state, grad in ((c, dc), (n, dn)):
                if state is not None and grad is not None:
                    flow += (state * grad).flatten(2).sum(-1)
            flows.append(flow)
        sums = {name: (x.whole.sum(0), x.inter.sum(0)) for name, x in (("dq", q_dq), ("dk", k_dk))}
        known = anchors if self.anchored else None
        found = self.gate_gradients(*sums.values(), known, gates.i, gates.f, gates.chunk_m, flows, bounds)
        di.copy_(found[0]), df.copy_(found[1])
        self.row_sums = sums


@dataclass(frozen=True)
class Sequence:
    """A packed sequence, or the sequences of a batch together.

    Attributes:
        which: of the states of all sequences.
        start, end: its tokens.
        slot: of its first chunk.
        segments: the chunks of each.
        boundaries: its own of all.
        batch, heads: of what there is at a boundary.
    """

    which: slice
    start: int
    end: int
    slot: int
    segments: list[range]
    boundaries: slice
    batch: int
    heads: int

    def tokens(self, chunk: int) -> slice:
        first = self.start + chunk * CHUNK
        return slice(first, min(first + CHUNK, self.end))

    def at(self, x: Tensor, boundary: int) -> Tensor:
        """The entries [N, NH, *] at the boundary before a segment, of x [slots, *]."""
        own = x.unflatten(0, (-1, self.heads))[self.boundaries]
        return own.unflatten(0, (self.batch, -1))[:, boundary - 1]


def sequences_of(walk: Walk, seq: int) -> list[Sequence]:
    """The sequences as the kernels see them."""
    gates, chunks_of = walk.gates, walk.cut.chunks
    batch, heads, _ = gates.i.shape
    found = []
    behind = 0  # the boundaries of the sequences before
    for number, (start, end) in enumerate(bounds_of(gates.cu_seqlens, seq)):
        packed = gates.cu_seqlens is not None
        chunks = -(-(end - start) // CHUNK)
        pieces = [range(at, min(at + chunks_of, chunks)) for at in range(0, max(chunks, 1), chunks_of)]
        own = slice(behind, behind + batch * (len(pieces) - 1))
        behind = own.stop
        which = slice(number, number + 1) if packed else slice(None)
        slot = start // CHUNK + (number if packed else 0)
        found.append(Sequence(which, start, end, slot, pieces, own, batch, heads))
    return found


def bounds_of(cu_seqlens: Tensor | None, seq: int) -> list[tuple[int, int]]:
    """(start, end) of every sequence."""
    return [(0, seq)] if cu_seqlens is None else list(itertools.pairwise(cu_seqlens.tolist()))


def _chunk_factors(
    gates: Gates, log2_w: Tensor, own: slice, slot: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of one chunk s W_tj / w_t, s e^{b_t + m_in - m_t} / w_t, w^end_j, and the state's decay."""
    log_i = logsigmoid(gates.i[:, :, own]) if gates.sigmoid_gate else gates.i[:, :, own]
    log_f = logsigmoid(gates.f[:, :, own])
    intra, inter = segment_sum(log_f) + log_i[..., None, :], log_f.cumsum(-1)
    m_t = torch.zeros_like(inter)
    if gates.chunk_m is not None:
        inter = inter + gates.chunk_m[:, :, slot, None] * math.log(2)
        m_t = torch.maximum(inter, intra.amax(-1))
    row = m_t + log2_w[:, :, own] * math.log(2)
    end = m_t[..., -1:]
    return (
        gates.scale * torch.exp(intra - row[..., None]),
        gates.scale * torch.exp(inter - row),
        torch.exp(intra[..., -1, :] - end),
        torch.exp(inter[..., -1] - end[..., 0]),
    )


@pytest.fixture
def backward_formulas(
    monkeypatch: pytest.MonkeyPatch, row_factors: Callable[..., Any], gate_gradients: Callable[..., Any]
) -> BackwardFormulas:
    """tk_backward.mlstm_bwd with the formula of every kernel in its place."""
    found = BackwardFormulas(row_factors, gate_gradients)
    monkeypatch.setattr(build, "load", lambda instance: None)
    monkeypatch.setattr(tk_backward, "_row_factors", found.of_rows)
    monkeypatch.setattr(tk_backward, "_empty_sums", found.of_sums)
    monkeypatch.setattr(tk_backward, "_empty_anchors", found.of_anchors)
    monkeypatch.setattr(tk_backward, "_cut", found.of_cut)
    monkeypatch.setattr(tk_backward, "_empty_boundaries", found.of_boundaries)
    monkeypatch.setattr(tk_backward, "_sum_segments", found.of_segments)
    monkeypatch.setattr(tk_backward, "_combine", found.of_combine)
    monkeypatch.setattr(tk_backward, "_run_pass", found.of_pass)
    monkeypatch.setattr(tk_backward, "_gate_gradients", found.of_gates)
    return found
