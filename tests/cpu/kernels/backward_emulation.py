"""The kernels of the mLSTM backward by their formulas, in fp64, on what lies at the addresses given."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tfla_tk.backends.tk import segments
from tfla_tk.backends.tk.scalar_gate import backward as tk_backward
from tfla_tk.backends.tk.scalar_gate import forward as tk_forward
from tfla_tk.core.layout import ANCHOR_CHUNKS, FLOW_PARTS, STATE_CHUNKS
from tfla_tk.ops import mlstm as ops
from tfla_tk.reference.common import segment_sum

from .addresses import (
    CHUNK,
    Sequence,
    boundary_slots,
    bounds_at,
    chunk_slots,
    flows_at,
    gate_at,
    operand_at,
    sequences_of,
    slices_of,
    state_slots,
    states_at,
    sums_at,
    tensor_at,
)
from .forward_emulation import ForwardFormulas
from .stand_in import placed

SLOW_DECAY = 2.0**-12  # kSlowDecay
SLOW_TOKENS = 16  # of a slow chunk, whose squares are summed
FORGOTTEN = {False: 12.0, True: 24.0}  # kForgotten, by whether gates are stabilised
CLOSED = -30 * math.log(2)  # kClosed
LEAST_LOG_GATE = -2e5  # kLeastLogGate
UNIT = -3.0  # of the states that a forward leaves

# what a walk and the sums of its segments have in common
WALK = (
    *("gradient", "tile", "slice", "keys", "values", "e", "e_stride", "boundaries", "cut", "sizes", "group"),
    *("half", "device"),
)


def shares_of(launch: SimpleNamespace) -> Iterator[SimpleNamespace]:
    """What the CTAs of each share of the keys see of a walk or its segments kernel, all of it in fp64.

    Beside what the launch has, `share` and `state_columns`, from one row of a state to the next; flows and
    their parts are (address, parts of a flow).
    """
    batch, heads, seq, dim_keys, dim_values = launch.sizes
    of_dv, of_dk = launch.gradient == 2, launch.gradient == 1
    width = launch.tile
    c, n, log2_decay = launch.boundaries
    (_, slices), slots = slices_of(launch), chunk_slots(launch.cut, seq)
    starts = range(0, dim_keys, width)

    def behind(pointer: int, elements: int) -> int:
        return pointer and pointer + torch.float64.itemsize * elements

    for share, start in enumerate(starts):
        seen = SimpleNamespace(**vars(launch))
        seen.share, seen.state_columns = share, dim_values if of_dv else dim_keys
        seen.sizes = (batch, heads, seq, min(width, dim_keys - start), dim_values)
        seen.keys = (behind(launch.keys[0], start), *launch.keys[1:])
        seen.e = behind(launch.e, share * launch.e_stride)
        own_n = share * boundary_slots(launch) * dim_values if of_dk else 0
        seen.boundaries = (behind(c, start), behind(n, own_n), log2_decay)
        if hasattr(launch, "out"):
            seen.queries = (behind(launch.queries[0], start), *launch.queries[1:])
            entering_c, entering_n = launch.entering
            seen.entering = (behind(entering_c, start), 0 if of_dk and share > 0 else entering_n)
            leaving_c, leaving_n = launch.leaving
            seen.leaving = (leaving_c, behind(leaving_n, share * launch.cut[2] * heads * dim_values))
            whole, inter = launch.sums
            rows_before = share * slices * batch * heads
            seen.sums = (behind(whole, rows_before * seq), behind(inter, 2 * rows_before * slots))
            seen.flows = (behind(launch.anchors[1], share), len(starts))
        yield seen


def tokens_at(launch: SimpleNamespace, name: str, dim: int) -> Tensor:
    """An operand of a walk or its segments kernel, [B, NH, S, dim]; heads may share one of q and of k."""
    batch, heads, seq, *_ = launch.sizes
    if name in (("queries", "keys") if launch.gradient == 2 else ("values", "factor")):
        found = operand_at(getattr(launch, name), (batch, heads // launch.group, seq, dim))
        return found if launch.group == 1 else found.repeat_interleave(launch.group, 1)
    return operand_at(getattr(launch, name), (batch, heads, seq, dim))


class BackwardFormulas(ForwardFormulas):
    """tk_backward.mlstm_bwd with the formula of every kernel in its place, in fp64.

    Attributes:
        segment_chunks: of which sequences are cut into segments.
        computes: whether results are written.
        summed: the gradients for which segments have been summed.
    """

    ARGUMENTS: ClassVar = {
        "mlstm_bwd_scan": (
            *("i", "f", "rows", "chunk_m", "gates", "tickets", "offsets", "sizes", "scale"),
            *("sigmoid_gate", "device"),
        ),
        "mlstm_bwd_rows": ("dh", "h", "rows", "factors", "sizes", "half", "device"),
        "mlstm_bwd_factors": ("dots", "rows", "factors", "count", "device"),
        "mlstm_bwd_combine": ("boundaries", "norm_parts", "entering", "cut", "sizes", "backward", "device"),
        "mlstm_bwd_gates": (
            *("q_dq", "k_dk", "anchors", "i", "f", "di", "df", "chunk_m", "initial", "last", "workspace"),
            *("offsets", "sizes", "sigmoid_gate", "device"),
        ),
        "walk": (
            *("of_walk", "gates", "queries", "out", "factor", "entering", "leaving", "sums", "anchors"),
            "ticket",
        ),
        "segments": ("of_walk", "i", "f", "log2_w", "chunk_m", "scale", "sigmoid_gate"),
        "gradients": (
            *(
                "q",
                "k",
                "v",
                "dh",
                "left",
                "gates",
                "e",
                "boundaries",
                "entering",
                "leaving",
                "dq",
                "dk",
                "dv",
            ),
            *("sums", "cut", "sizes", "group", "tile", "half", "device"),
        ),
        "gate_gradients": (
            *("sums", "parts", "i", "f", "di", "df", "chunk_m", "offsets", "sizes", "sigmoid_gate"),
            "device",
        ),
        **ForwardFormulas.ARGUMENTS,
    }

    def __init__(self, row_factors: Callable[..., Any], gate_gradients: Callable[..., Any]) -> None:
        super().__init__()
        self.row_factors, self.from_anchors = row_factors, gate_gradients
        self.segment_chunks = 10_000
        self.computes = True
        self.scanned: dict[int, tuple[SimpleNamespace, Tensor | None]] = {}  # and log2_w, by their address
        self.states: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}  # left at the anchors by dq
        self.summed: set[str] = set()

    def __call__(self, *arguments: Any) -> ops.Grads:
        """The op; what no kernel writes is not a number."""
        self.scanned.clear()
        for memo in (tk_backward._backwards, tk_forward._forwards):  # for another cut, perhaps
            memo.clear()
        torch.use_deterministic_algorithms(True)
        try:
            return ops._bwd_cuda(*arguments)
        finally:
            torch.use_deterministic_algorithms(False)

    def workspace_bytes(self, slots: int, dim_qk: int, dim_v: int) -> int:
        return 8 * slots

    def mlstm_bwd_gates_workspace_bytes(self, heads: int, sequences: int) -> int:
        return 1

    def chunk_gates_bytes(self) -> int:
        return 1

    def anchor_bytes(self, *sizes: int) -> int:
        return 1

    def flow_parts(
        self, batch: int, heads: int, dim_keys: int, dim_values: int, tile: int, slice_: int
    ) -> int:
        return -(-dim_keys // tile)

    def compute(self, launch: SimpleNamespace, starts: list[int]) -> None:
        vars(launch).update({name: placed(x, starts) for name, x in vars(launch).items()})
        if hasattr(launch, "of_walk"):
            vars(launch).update(zip(WALK, launch.of_walk, strict=True))
        if self.computes:
            getattr(self, f"compute_{launch.name}")(launch)

    def cut(self, sequences: int, tokens: int, *_: Any) -> segments.Cut:
        """For `segments.cut`."""
        return segments.Cut(sequences * -(-tokens // (CHUNK * self.segment_chunks)), self.segment_chunks)

    def cut_packed(self, sequences: int, tokens: int, *_: Any) -> segments.Cut:
        """For `segments.cut_packed`."""
        return segments.Cut(sequences + tokens // (CHUNK * self.segment_chunks), self.segment_chunks)

    def compute_mlstm_bwd_scan(self, x: SimpleNamespace) -> None:
        """Kept as it was asked for: the walks' weights are computed where they are used."""
        log2_w = None
        *rows, eps = x.rows
        if rows[0]:
            d, m = (tensor_at(row, torch.float64, x.sizes) if row else None for row in rows)
            log2_w, _ = self.row_factors(torch.zeros(x.sizes, dtype=torch.float64), d, m, eps)
        self.scanned[x.gates] = x, log2_w

    def compute_mlstm_bwd_rows(self, x: SimpleNamespace) -> None:
        assert x.rows[0] != 0  # without normaliser there is nothing to read dh and h for
        *_, part_columns = x.sizes
        dh, h = (operand_at(operand, x.sizes[:4]) for operand in (x.dh, x.h))
        products = (dh * h).split(part_columns, dim=-1)
        self.write_factors(x, [of_part.sum(-1) for of_part in products])

    def compute_mlstm_bwd_factors(self, x: SimpleNamespace) -> None:
        pointer, stride, slices, part_slices = x.dots
        found = [torch.zeros(x.count, dtype=torch.float64) for _ in range(0, slices, part_slices)]
        for number in range(slices):
            own = pointer + torch.float64.itemsize * stride * number
            found[number // part_slices] += tensor_at(own, torch.float64, (x.count,))
        self.write_factors(x, found)

    def write_factors(self, x: SimpleNamespace, dh_h: list[Tensor]) -> None:
        """e of every part of V, from dh_t.h_t of the parts, and log2 w of every row where it is wanted."""
        log2_w, e, e_stride = x.factors
        *rows, eps = x.rows
        size = dh_h[0].shape
        for part, of_part in enumerate(dh_h):
            given = (tensor_at(row, torch.float64, size) if row else None for row in rows)
            own_e = e + torch.float64.itemsize * part * e_stride
            for at, factor in zip((log2_w, own_e), self.row_factors(of_part, *given, eps), strict=True):
                if at:
                    tensor_at(at, torch.float64, size).copy_(factor)

    def compute_segments(self, x: SimpleNamespace) -> None:
        self.summed.add(("dq", "dk")[x.gradient])
        for share in shares_of(x):
            self.sum_segments(share)

    def sum_segments(self, x: SimpleNamespace) -> None:
        """A share's, from the boundary away, until all is forgotten."""
        forward = x.gradient == 0
        walk = Walk.of(x)
        log2_w, e_of_rows = walk.factors
        all_keys, all_values = (
            tokens_at(x, name, dim) for name, dim in zip(("keys", "values"), x.sizes[3:], strict=True)
        )
        boundary = walk.boundary(x)
        for sequence in walk.sequences:
            for g in range(1, len(sequence.segments)):
                chunks = sequence.segments[g - 1][::-1] if forward else sequence.segments[g]
                c, n, log2_decay = (None if part is None else sequence.at(part, g) for part in boundary)
                assert c is not None and log2_decay is not None
                c.zero_(), log2_decay.zero_()
                own_n = torch.zeros_like(c[..., 0])
                tokens = slice(sequence.tokens(min(chunks)).start, sequence.tokens(max(chunks)).stop)
                largest = 0.0 if forward else (-log2_w[:, :, tokens]).amax(-1).clamp(min=0)
                for chunk in chunks:
                    own = sequence.tokens(chunk)
                    forgotten = log2_decay + largest <= -150.0
                    _, of_t, of_j, decay = walk.chunk_factors(own, sequence.slot + chunk)
                    scale = (of_j if forward else of_t) * torch.exp2(log2_decay)[..., None]
                    scale = torch.where(forgotten[..., None], 0.0, scale)
                    key, value, e = (part[:, :, own] for part in (all_keys, all_values, e_of_rows))
                    c += value.mT @ (scale[..., None] * key)
                    own_n += ((scale if forward else e * scale)[..., None] * value).sum(-2)
                    log2_decay += torch.where(forgotten, 0.0, torch.log2(decay))
                if n is not None and not (forward and x.share > 0):  # the same for all
                    n.copy_(own_n)

    def compute_mlstm_bwd_combine(self, x: SimpleNamespace) -> None:
        heads, seq, dim_qk, dim_v = x.sizes
        _, _, sequences, count, _ = x.cut
        slots = (count - sequences) * heads
        pointers = x.boundaries
        boundary_c = tensor_at(pointers[0], torch.float64, (slots, dim_qk, dim_v))
        boundary_n = tensor_at(pointers[1], torch.float64, (x.norm_parts, slots, dim_qk))
        decays = tensor_at(pointers[2], torch.float64, (slots,))
        shapes = ((sequences, heads, dim_qk, dim_v), (sequences, heads, dim_qk))
        entering_c, entering_n = (
            tensor_at(pointer, torch.float64, shape) if pointer else None
            for pointer, shape in zip(x.entering, shapes, strict=True)
        )
        for sequence in sequences_of(x.cut, heads, seq):
            along = range(1, len(sequence.segments))
            of_n = ((part, entering_n if number == 0 else None) for number, part in enumerate(boundary_n))
            for states, given in ((boundary_c, entering_c), *of_n):
                carried = torch.zeros(()) if given is None else given[sequence.which]
                for g in reversed(along) if x.backward else along:
                    own, log2_decay = sequence.at(states, g), sequence.at(decays, g)
                    decay = torch.exp2(log2_decay).reshape(*log2_decay.shape, *(1,) * (own.ndim - 2))
                    carried = own + decay * carried
                    own.copy_(carried)

    def compute_walk(self, x: SimpleNamespace) -> None:
        scan, log2_w = self.scanned[x.gates]
        assert scan.offsets == x.cut[:3] and scan.sizes == x.sizes[:3]
        x.i, x.f, x.scale, x.sigmoid_gate = scan.i, scan.f, scan.scale, scan.sigmoid_gate
        x.log2_w, x.chunk_m = 0 if log2_w is None else log2_w.data_ptr(), scan.chunk_m
        for share in shares_of(x):
            self.walk_share(share)

    def walk_share(self, x: SimpleNamespace) -> None:
        """A share of a walk, which adds to what the ones before have written."""
        forward, turned = x.gradient == 0, x.gradient != 2
        walk = Walk.of(x)
        batch, heads, seq, dim_keys, dim_values = x.sizes
        queries, keys = (tokens_at(x, name, dim_keys) for name in ("queries", "keys"))
        values, out, factor = (tokens_at(x, name, dim_values) for name in ("values", "out", "factor"))
        states = (x.cut[2], heads)
        entering = states_at(x.entering, states, x, torch.float64)
        leaving = states_at(x.leaving, states, x, torch.float64)
        boundary = walk.boundary(x)
        anchors = sums = dots = None
        slice_width, slices = slices_of(x)
        if turned:
            anchors = flows_at(*x.flows, 1, (batch, heads), walk.slots)
            sums = sums_at((*x.sums, slices), (batch, heads, seq), walk.slots)
        elif x.sums[0]:
            dots = tensor_at(x.sums[0], torch.float64, (slices, batch, heads, seq))

        def state(c: Tensor | None, n: Tensor | None) -> tuple[Tensor, Tensor]:
            zero = keys.new_zeros(dim_keys, dim_values)
            return zero if c is None else c.mT if turned else c, zero[0] if n is None else n

        for number, sequence in enumerate(walk.sequences):
            c, n = state(*(None if y is None else y[sequence.which] for y in entering))
            along = list(enumerate(sequence.segments))[:: 1 if forward else -1]
            for chunk, g in ((chunk, g) for g, chunks in along for chunk in chunks[:: 1 if forward else -1]):
                first = sequence.segments[g][0 if forward else -1] == chunk
                if first and boundary[0] is not None and g != along[0][0]:
                    at = (None if y is None else sequence.at(y, g + (not forward)) for y in boundary[:2])
                    c, n = state(*at)
                own = sequence.tokens(chunk)
                flow = None  # to be written, where there is an anchor before the chunk
                if anchors is not None and chunk > 0 and chunk % ANCHOR_CHUNKS == 0:
                    flow = anchors[:, :, (sequence.slot + chunk) // ANCHOR_CHUNKS]
                    if forward:
                        self.states[x.anchors[0], x.share, number, chunk] = c, n
                intra, of_t, of_j, decay = walk.chunk_factors(own, sequence.slot + chunk)
                query, key, value, e = (y[:, :, own] for y in (queries, keys, values, walk.factors[1]))
                e = e if turned else torch.zeros_like(e)
                # e belongs to time t: the rows forward in time, else the columns
                scores = query @ key.mT + (e[..., :, None] if forward else e[..., None, :])
                weights = (intra if forward else intra.mT) * scores
                row, column = (of_t, of_j) if forward else (of_j, of_t)
                of_n = (e * row if forward else row)[..., None] * n[..., None, :]
                inter = row[..., None] * (query @ c) + of_n
                whole = inter + weights @ value
                out[:, :, own] = whole + out[:, :, own] if x.share > 0 else whole
                if sums is not None:
                    of_tokens, of_chunks = (
                        [part.sum(-1) for part in (factor[:, :, own] * y).split(slice_width, dim=-1)]
                        for y in (whole, inter)
                    )
                    for own_slice, found in enumerate(of_tokens):
                        sums[0][own_slice, :, :, own] = found
                    slow = (decay > SLOW_DECAY)[..., None] & (key.shape[-2] == CHUNK)
                    for own_slice, found in enumerate(of_chunks):
                        both = torch.stack([found.sum(-1), found.square().sum(-1)], -1)
                        next_to_state = found[..., :SLOW_TOKENS] if forward else found[..., -SLOW_TOKENS:]
                        fading = decay.sqrt()  # of squares, over 16 tokens
                        of_all = 1 + fading + fading**2 + fading**3
                        squares = of_all * next_to_state.square().sum(-1)
                        not_summed = torch.stack([torch.full_like(squares, math.inf), squares], -1)
                        sums[1][own_slice, :, :, sequence.slot + chunk] = torch.where(slow, not_summed, both)
                if dots is not None:
                    products = value * factor[:, :, own]
                    for dot, of_slice in zip(dots, products.split(slice_width, dim=-1), strict=True):
                        dot[:, :, own] = of_slice.sum(-1)
                c = decay[..., None, None] * c + (column[..., None] * key).mT @ value
                column_n = column if forward else e * column
                n = decay[..., None] * n + (column_n[..., None] * value).sum(-2)
                if flow is not None and not forward:
                    left_c, left_n = self.states[x.anchors[0], x.share, number, chunk]
                    flow[..., 0] = (left_c * c).sum((-2, -1)) + (left_n * n).sum(-1)
            for given, y in zip(leaving, (c.mT if turned else c, n), strict=True):
                if given is not None:
                    given[sequence.which] = y

    def compute_mlstm_bwd_gates(self, x: SimpleNamespace) -> None:
        batch, heads, seq, dim_qk, dim_v = x.sizes
        bounds = bounds_at(x.offsets, seq)
        sequences = x.offsets[2]
        slots = chunk_slots(x.offsets, seq)
        flows = []
        for c, dc, n, dn in (x.initial, x.last):
            flow = torch.zeros(sequences, heads, dtype=torch.float64)
            for pair, shape in (((c, dc), (dim_qk, dim_v)), ((n, dn), (dim_qk,))):
                if all(pair):
                    state, grad = (tensor_at(y, torch.float64, (sequences, heads, *shape)) for y in pair)
                    flow += (state * grad).flatten(2).sum(-1)
            flows.append(flow)
        size = (batch, heads, seq)
        sums = {
            name: tuple(y.sum(0) for y in sums_at(given, size, slots))
            for name, given in (("dq", x.q_dq), ("dk", x.k_dk))
        }
        f, df = gate_at(x.f, size), gate_at(x.df, size)
        is_decay = x.i[0] == 0
        i, di = (torch.empty_like(f), None) if is_decay else (gate_at(gate, size) for gate in (x.i, x.di))
        if is_decay:  # as gates: sigmoid(i) = 1, and log sigmoid(f) is what is given
            i.fill_(math.inf)
            f = f - torch.log(-torch.expm1(f))
        chunk_m = chunk_m_at(x.chunk_m, (batch, heads, slots))
        pointer, before, parts, chunks = x.anchors
        assert before == pointer and chunks == ANCHOR_CHUNKS
        known = flows_at(pointer, parts, parts, (batch, heads), slots)
        found = self.from_anchors(*sums.values(), known, i, f, chunk_m, flows, bounds)
        if is_decay:
            df.copy_(found[1] / torch.sigmoid(-f))
        else:
            di.copy_(found[0]), df.copy_(found[1])

    def compute_forward(self, x: SimpleNamespace) -> None:
        """What a forward leaves for the backward: states in units of their own, transposed."""
        batch, heads, seq, dim_qk, dim_v = x.sizes
        k, v = (
            operand_at(of, (batch, heads // group, seq, dim)).repeat_interleave(group, 1)
            for of, dim, group in ((x.k, dim_qk, x.group), (x.v, dim_v, 1))
        )
        log_i, log_f = log_gates(x)
        left, units, norms = left_at(x.left, x)
        count = x.cut[2]
        shapes = (count, heads, dim_qk, dim_v), (count, heads, dim_qk), (count, heads, 1)
        initial = [
            tensor_at(at, torch.float64, shape) if at else torch.zeros(shape, dtype=torch.float64)
            for at, shape in zip(x.states[:3], shapes, strict=True)
        ]
        for sequence in sequences_of(x.cut, heads, seq):
            c, n, m = (state[sequence.which] for state in initial)
            for chunk in (chunk for chunks in sequence.segments for chunk in chunks):
                if chunk % STATE_CHUNKS == 0:
                    slot = sequence.state + chunk // STATE_CHUNKS
                    units[:, :, slot] = UNIT
                    left[:, :, slot] = c.mT / 2**UNIT
                    if norms is not None:
                        norms[:, :, slot] = n / 2**UNIT
                own = sequence.tokens(chunk)
                b = log_f[:, :, own].cumsum(-1)
                a = log_i[:, :, own] - b
                most = -b[..., -1:] if x.sigmoid_gate else torch.maximum(m, a.amax(-1, keepdim=True))
                key = torch.exp(a - most)[..., None] * k[:, :, own]
                decay = torch.exp(m - most)
                c = decay[..., None] * c + key.mT @ v[:, :, own]
                n = decay * n + key.sum(-2)
                if not x.sigmoid_gate:
                    m = b[..., -1:] + most

    def compute_gradients(self, x: SimpleNamespace) -> None:
        """The walk that makes dq, dk and dv at once."""
        scan, log2_w = self.scanned[x.gates]
        assert scan.offsets == x.cut[:3] and scan.sizes == x.sizes[:3]
        x.i, x.f, x.scale, x.sigmoid_gate = scan.i, scan.f, scan.scale, scan.sigmoid_gate
        x.log2_w, x.chunk_m = 0 if log2_w is None else log2_w.data_ptr(), scan.chunk_m
        walk = Walk.of(x)
        batch, heads, seq, dim_qk, dim_v = x.sizes
        q, k = (
            operand_at(of, (batch, heads // x.group, seq, dim_qk)).repeat_interleave(x.group, 1)
            for of in (x.q, x.k)
        )
        v, dh, dv = (operand_at(of, (batch, heads, seq, dim_v)) for of in (x.v, x.dh, x.dv))
        dq, dk = (operand_at(of, (batch, heads, seq, dim_qk)) for of in (x.dq, x.dk))
        states, units, norms = left_at(x.left, x)
        count, boundaries = x.cut[2], boundary_slots(x)

        def pair(addresses: tuple[int, ...], *size: int) -> list[Tensor | None]:
            shapes = ((*size, dim_qk, dim_v), (*size, dim_qk))
            return [
                tensor_at(at, torch.float64, shape) if at else None
                for at, shape in zip(addresses, shapes, strict=True)
            ]

        entering, leaving = pair(x.entering, count, heads), pair(x.leaving, count, heads)
        boundary = pair(x.boundaries[:2], boundaries)
        q_dq, k_dk, flows = (
            tensor_at(at, torch.float64, (batch, heads, *shape)) if at else None
            for at, shape in zip(x.sums, ((seq,), (seq,), (walk.slots, FLOW_PARTS)), strict=True)
        )
        zero = torch.zeros(dim_qk, dim_v, dtype=torch.float64)
        for sequence in walk.sequences:
            for segment, chunks in reversed([*enumerate(sequence.segments)]):
                assert chunks.start % STATE_CHUNKS == 0
                if segment + 1 < len(sequence.segments):
                    given = [None if y is None else sequence.at(y, segment + 1) for y in boundary]
                    assert given[0] is not None
                else:
                    given = [None if y is None else y[sequence.which] for y in entering]
                dc, dn = (y if of is None else of for y, of in zip((zero, zero[:, 0]), given, strict=True))
                for chunk in reversed(chunks):
                    own, slot = sequence.tokens(chunk), sequence.slot + chunk
                    intra, of_t, of_j, decay = walk.chunk_factors(own, slot)
                    query, key, value, out, e = (y[:, :, own] for y in (q, k, v, dh, walk.factors[1]))
                    state = sequence.state + chunk // STATE_CHUNKS
                    of_state = 2 ** units[:, :, state, None, None]
                    c = states[:, :, state].mT
                    n = torch.zeros_like(c[..., 0]) if norms is None else norms[:, :, state]
                    rounded = dc.expand_as(c)
                    reads = intra * (out @ value.mT + e[..., None])
                    through = key @ rounded
                    of_v = of_j[..., None] * through + (intra * (query @ key.mT)).mT @ out
                    of_k = of_j[..., None] * (value @ rounded.mT + dn[..., None, :]) + reads.mT @ query
                    of_q = of_state * (out @ c.mT + e[..., None] * n[..., None, :])
                    sent = (of_j * ((value * through).sum(-1) + (key * dn[..., None, :]).sum(-1))).sum(-1)
                    passing = torch.zeros_like(decay)
                    if chunk % STATE_CHUNKS == 0:
                        of_q = of_t[..., None] * of_q
                        passing = (
                            decay * of_state[..., 0, 0] * ((c * rounded).sum((-2, -1)) + (n * dn).sum(-1))
                        )
                    else:
                        before = sequence.tokens(chunk - 1)
                        _, _, of_before, decay_before = walk.chunk_factors(before, slot - 1)
                        scores = out @ v[:, :, before].mT + e[..., None]
                        scores = of_t[..., None] * scores * of_before[..., None, :]
                        of_q = of_t[..., None] * decay_before[..., None, None] * of_q
                        of_q = of_q + scores @ k[:, :, before]
                    of_q = of_q + reads @ key
                    dq[:, :, own], dk[:, :, own], dv[:, :, own] = of_q, of_k, of_v
                    if flows is not None:
                        assert q_dq is not None and k_dk is not None
                        q_dq[:, :, own], k_dk[:, :, own] = (query * of_q).sum(-1), (key * of_k).sum(-1)
                        parts = x.tile // 16 + (norms is not None)
                        flows[:, :, slot] = math.nan
                        flows[:, :, slot, :parts] = (sent + passing)[..., None] / parts
                    dc = decay[..., None, None] * dc + query.mT @ (of_t[..., None] * out)
                    dn = decay[..., None] * dn + ((of_t * e)[..., None] * query).sum(-2)
                if segment == 0:
                    for to, y in zip(leaving, (dc, dn), strict=True):
                        if to is not None:
                            to[sequence.which] = y

    def compute_gate_gradients(self, x: SimpleNamespace) -> None:
        batch, heads, seq = x.sizes
        slots = chunk_slots(x.offsets, seq)
        size = batch, heads, seq
        q_dq, k_dk = (tensor_at(at, torch.float64, size) for at in x.sums[:2])
        flows = tensor_at(x.sums[2], torch.float64, (batch, heads, slots, FLOW_PARTS))
        flows = flows[..., : x.parts].sum(-1)
        is_decay, chunk_m = x.i[0] == 0, chunk_m_at(x.chunk_m, (batch, heads, slots))
        log_i, log_f = log_gates(x)
        f, df = gate_at(x.f, size), gate_at(x.df, size)
        of_f = torch.where(f < CLOSED, 0.0, 1.0) if is_decay else torch.sigmoid(-f)
        if not is_decay:
            of_i = torch.sigmoid(-gate_at(x.i, size)) if x.sigmoid_gate else 1.0
            gate_at(x.di, size).copy_(k_dk * of_i)
        for sequence in sequences_of((*x.offsets, 0, -(-seq // CHUNK) or 1), heads, seq):
            for chunk in sequence.segments[0]:
                own, slot = sequence.tokens(chunk), sequence.slot + chunk
                given = (q_dq - k_dk)[:, :, own]
                flow = flows[:, :, slot, None]
                if chunk % STATE_CHUNKS:
                    most = (log_i[:, :, own] - log_f[:, :, own].cumsum(-1)).amax(-1, keepdim=True) / math.log(
                        2
                    )
                    m_in = 0.0 if chunk_m is None else chunk_m[:, :, slot, None]
                    forgets = most - m_in > FORGOTTEN[chunk_m is not None]
                    from_before = flows[:, :, slot - 1, None] - given.sum(-1, keepdim=True)
                    flow = torch.where(forgets, flow, from_before)
                dlf = flow + given.flip(-1).cumsum(-1).flip(-1)
                df[:, :, own] = of_f[:, :, own] * dlf


def log_gates(x: SimpleNamespace) -> tuple[Tensor, Tensor]:
    """Natural logs of the input and forget gates of a launch, [B, NH, S]."""
    f = gate_at(x.f, x.sizes[:3])
    if x.i[0] == 0:  # a scalar decay
        log_i, log_f = torch.zeros_like(f), f
    else:
        i, log_f = gate_at(x.i, x.sizes[:3]), logsigmoid(f)
        log_i = logsigmoid(i) if x.sigmoid_gate else i
    return log_i.clamp(min=LEAST_LOG_GATE), log_f.clamp(min=LEAST_LOG_GATE)


def left_at(left: tuple[int, ...], x: SimpleNamespace) -> tuple[Tensor, Tensor, Tensor | None]:
    """Transposed states [B, NH, slots, V, K], their units and n [B, NH, slots, K] that a forward leaves."""
    batch, heads, seq, dim_qk, dim_v = x.sizes
    size = batch, heads, state_slots(x.cut, seq)
    states, units, norms = left
    return (
        tensor_at(states, torch.float64, (*size, dim_v, dim_qk)),
        tensor_at(units, torch.float64, size),
        tensor_at(norms, torch.float64, (*size, dim_qk)) if norms else None,
    )


def chunk_m_at(pointer: int, size: tuple[int, ...]) -> Tensor | None:
    """The sum of the two parts."""
    return tensor_at(pointer, torch.float64, (*size, 2)).sum(-1) if pointer else None


@dataclass(frozen=True)
class Walk:
    """What a walk and its segments kernel walk over.

    Attributes:
        log_i, log_f: [B, NH, S].
        factors: log2_w and e, [B, NH, S].
        chunk_m: [B, NH, slots], None with the sigmoid gate.
        slots: per head, of what there is once per chunk.
        sequences: as the kernels see them.
        scale: of q k^T.
    """

    log_i: Tensor
    log_f: Tensor
    factors: tuple[Tensor, Tensor]
    chunk_m: Tensor | None
    slots: int
    sequences: list[Sequence]
    scale: float

    @classmethod
    def of(cls, x: SimpleNamespace) -> Walk:
        """Of a share."""
        batch, heads, seq, *_ = x.sizes
        size, slots = (batch, heads, seq), chunk_slots(x.cut, seq)
        assert x.sigmoid_gate == (x.chunk_m == 0)
        log2_w, e = (
            tensor_at(pointer, torch.float64, size) if pointer else torch.zeros(size, dtype=torch.float64)
            for pointer in (x.log2_w, x.e)
        )
        chunk_m = chunk_m_at(x.chunk_m, (batch, heads, slots))
        return cls(
            *log_gates(x),
            (log2_w, e),
            chunk_m,
            slots,
            sequences_of(x.cut, heads, seq),
            x.scale,
        )

    def boundary(self, x: SimpleNamespace) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """c, n and log2_decay at the boundaries between segments; None where there is none."""
        slots = boundary_slots(x)
        log2_decay = tensor_at(x.boundaries[2], torch.float64, (slots,)) if x.boundaries[2] else None
        return *states_at(x.boundaries[:2], (slots,), x, torch.float64), log2_decay

    def chunk_factors(self, own: slice, slot: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of one chunk s W_tj / w_t, s e^{b_t + m_in - m_t} / w_t, w^end_j, and the state's decay."""
        log_i, log_f = self.log_i[:, :, own], self.log_f[:, :, own]
        intra, inter = segment_sum(log_f) + log_i[..., None, :], log_f.cumsum(-1)
        m_t = torch.zeros_like(inter)
        if self.chunk_m is not None:
            inter = inter + self.chunk_m[:, :, slot, None] * math.log(2)
            m_t = torch.maximum(inter, intra.amax(-1))
        row = m_t + self.factors[0][:, :, own] * math.log(2)
        end = m_t[..., -1:]
        return (
            self.scale * torch.exp(intra - row[..., None]),
            self.scale * torch.exp(inter - row),
            torch.exp(intra[..., -1, :] - end),
            torch.exp(inter[..., -1] - end[..., 0]),
        )
