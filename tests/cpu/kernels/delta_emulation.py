"""The delta rule's kernels by the recurrence, on what lies at the addresses that they are given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from tfla_tk import reference
from tfla_tk.backends.tk.delta_rule import call, inputs, launch
from tfla_tk.core.layout import (
    DELTA_ANCHOR_CHUNKS,
    DELTA_DECAY_CHUNKS,
    DELTA_KEYS_WARPS,
    DELTA_SLICE_COLUMNS,
)
from tfla_tk.core.memo import Memo

from .addresses import CHUNK, bounds_at, chunk_slots
from .delta_arguments import (
    ARGUMENTS,
    OF_CODE,
    Arguments,
    Piece,
    chunks_of,
    pieces_of,
    sequences_in,
)
from .delta_before_walks import BeforeWalks, HeadsOfLead
from .stand_in import launch_instead

WARP, WALKER = 16, 64  # columns that a warp's sums are over, and those of a walker
ANCHOR_BYTES = 1000
LOW_BYTES = WALKER * CHUNK  # of a walker's result in a chunk, one of each number


def makes_scores(x: Arguments) -> bool:
    """Whether a walk without makers beside it makes P."""
    return x.dim_k <= 64 or (x.dim_k <= 128 and x.of.walkers == 2)


class SumsOfWalk:
    """What a walk leaves for dg: sums over K by token and through the states, of which only the former are
    computed; nothing where none are wanted. Fills the places of the others, and of the flows at anchors.

    Args:
        sums: whole, inter, anchors, and flows where the launch has a place for them.
        is_first: the walk leaves the states at anchors. The other one looks at them and leaves the flows.
    """

    FILL = 7  # of what is not computed

    def __init__(self, x: Arguments, sums: tuple[int, ...], *, is_first: bool) -> None:
        self._whole: Tensor | None = None
        assert all(sums) or not any(sums)
        if not any(sums):
            return
        whole, inter, at_anchors, *others = sums
        heads = x.slices * -(-x.dim_k // WARP), x.batch, x.heads
        self._whole = x.floats(whole, *heads, x.seq).zero_()
        x.floats(inter, *heads, x.slots, 2).fill_(torch.nan)
        anchors = x.tensor(at_anchors, torch.uint8, (ANCHOR_BYTES,))
        if is_first:
            anchors.fill_(self.FILL)
            return
        assert (anchors == self.FILL).all()
        size = (x.batch, x.heads, x.slots // DELTA_ANCHOR_CHUNKS + 1, x.slices * -(-x.dim_k // WARP))
        after = x.floats(others[0], *size).fill_(self.FILL)
        x.floats(others[0] + after.numel() * after.itemsize, *size).fill_(self.FILL)

    def add(self, row: int, t: int, products: Tensor) -> None:
        """The products [heads, K] of a token."""
        if self._whole is not None:
            for part, columns in enumerate(products.split(WARP, -1)):
                self._whole[part, row, :, t] = columns.sum(-1)


class Kernel(BeforeWalks):
    """Stands for the launchers of the delta rule.

    Attributes:
        begun: where the walks over the states began: walk, sequence, first token of the segment.
        anchor_shapes: what the size of the anchors was asked for.
        regions: prepared addresses of all that launches have looked at, each with the address behind it.
    """

    ARGUMENTS = ARGUMENTS
    INPUT_TOKENS = 16  # of a part of the sums for A_log and dt_bias

    def __init__(self, segment: int) -> None:
        super().__init__(segment)
        self.begun: list[tuple[str, int, int]] = []
        self.anchor_shapes: list[tuple[int, ...]] = []
        self.regions: set[tuple[int, int]] = set()

    def anchor_bytes(self, shape: tuple[int, ...]) -> int:
        assert len(shape) == 13
        self.anchor_shapes.append(shape)
        return ANCHOR_BYTES

    def written_bytes(self, shape: tuple[int, ...], shared: int) -> int:
        slices, segments, heads = -(-shape[9] // DELTA_SLICE_COLUMNS), shape[3], shape[6]
        return 4 * (1 + segments * heads * slices * 2) if slices * shared > 1 else 0

    def low_bytes(self, shape: tuple[int, ...], shared: int) -> int:
        slices, (batch, heads, seq, dim_k) = -(-shape[9] // DELTA_SLICE_COLUMNS), shape[5:9]
        if slices == 1:
            return 0
        results = 1 if slices * shared == 2 else 2
        return (
            results
            * LOW_BYTES
            * batch
            * (heads // shared)
            * -(-dim_k // (2 * WALKER))
            * 2
            * chunk_slots(shape, seq)
        )

    def mlstm_bwd_gates_workspace_bytes(self, heads: int, sequences: int) -> int:
        return 128 * heads * sequences

    def compute(self, launch: SimpleNamespace, starts: list[int]) -> None:
        x = Arguments(launch, starts)
        getattr(self, f"compute_{launch.name}")(x)
        self.regions |= x.regions

    def compute_inputs(self, x: Arguments) -> None:
        for given, unit in ((x.of.q, x.of.unit_q), (x.of.k, x.of.unit_k)):
            assert (given[0] == 0) == (unit[0] == 0)
            if unit[0]:
                x.rows(unit).copy_(reference.l2_norm(x.rows(given)))
        if x.of.strength:
            x.tokens(x.of.strength).copy_(reference.writing_strength(x.gate(x.of.beta), x.of.twice))
        if x.of.log_decay:
            made = reference.delta_log_decay(x.gate(x.of.g), x.of_heads(x.of.a_log), x.of_heads(x.of.dt_bias))
            x.tokens(x.of.log_decay).copy_(made)

    def compute_inputs_backward(self, x: Arguments) -> None:
        for given, gradient in ((x.of.q, x.of.dq), (x.of.k, x.of.dk)):
            if gradient[0]:
                d_unit = x.rows(gradient)
                d_unit.copy_(reference.l2_norm_backward(x.rows(given), d_unit.clone()))
        if x.of.d_strength:
            d_beta, d_strength = x.written_gate(x.of.d_beta), x.tokens(x.of.d_strength)
            d_beta.copy_(reference.writing_strength_backward(x.gate(x.of.beta), d_strength, x.of.twice))
        if x.of.d_log_decay:
            log_decay = x.gate(x.of.g), x.of_heads(x.of.a_log), x.of_heads(x.of.dt_bias)
            dg, da_log, ddt_bias = reference.delta_log_decay_backward(*log_decay, x.tokens(x.of.d_log_decay))
            x.written_gate(x.of.d_g).copy_(dg)
            sums = x.floats(x.of.sums, 2, -(-x.batch * x.seq // self.INPUT_TOKENS), x.heads)
            sums.zero_()
            sums[0, 0], sums[1, -1] = da_log, ddt_bias

    def make_in_walk(self, x: Arguments) -> None:
        """Of a walk that makes the matrices itself: it leaves A where there is an address for it."""
        a, p, flags = x.of.matrices
        assert x.of.walkers == 2 and 64 < x.dim_k <= 128  # else the kernels refuse
        assert p == flags == x.of.makers == x.of.carried == 0
        assert x.cut[3] == x.cut[2], "a split needs A before the walk"
        assert (a != 0) == (x.of.writes[0] != 0), "a backward reads both"
        if a:
            self.make_matrices(x, a)

    def start_makers(self, x: Arguments) -> None:
        """Of a walk: it has flags where it has makers."""
        a, p, flags = x.of.matrices
        assert (x.of.makers > 0) == (flags != 0)
        if x.of.makers == 0:
            return
        made = x.tensor(flags, torch.int32, (x.batch * x.heads * x.slots + 2,))  # and tickets
        made.fill_(1)
        self.make_matrices(x, a, p)

    def compute_forward(self, x: Arguments) -> None:
        if x.of.makes_matrices:
            self.make_in_walk(x)
        else:
            self.start_makers(x)
            assert x.of.matrices[0] != 0
            self.check_matrices(x, *x.of.matrices[:2])
            assert x.of.matrices[1] != 0 or (makes_scores(x) and (x.dim_k <= 64 or x.of.makers == 0))
        self.check_cut(x)
        q, k, g, beta = x.keys(x.of.q), x.keys(x.of.k), x.gate(x.of.g), x.gate(x.of.beta)
        v, o = x.operand(x.of.v, x.dim_v), x.operand(x.of.o, x.dim_v)
        writes = x.operand(x.of.writes, x.dim_v) if x.of.writes[0] else None
        assert (x.of.states != 0) == (writes is not None and not x.is_wide)
        assert x.is_wide or not x.of.borders
        kept = x.kept_states(x.of.states) if x.of.states else None
        initial, last = x.states(x.of.initial, x.cut[2]), x.states(x.of.last, x.cut[2])
        carried = x.states(x.of.carried, x.carried)
        leads = self.leads_of(x, behind=False)
        for piece in pieces_of(x):
            first, count = self.slots(x, piece.sequence, piece.start)
            borders, row = x.states(x.of.borders, count), piece.row
            for of_lead in self.heads_by_lead(leads, piece, behind=False):
                heads, lead = of_lead.heads, max(of_lead.lead, 0) * CHUNK
                state = torch.zeros(x.heads, x.dim_k, x.dim_v)[heads]
                if of_lead.are_carried:
                    assert carried is not None
                    state = carried[piece.slot + piece.number - 1, heads]
                elif lead == piece.begun and initial is not None:
                    state = initial[piece.sequence, heads]
                for t in range(piece.tokens.start - lead, piece.tokens.stop):
                    own, is_first = t - piece.start, t == piece.tokens.start - lead
                    if borders is not None and t in piece.tokens and own % self.segment == 0 and not is_first:
                        borders[first + own // self.segment - 1, heads] = state
                    if kept is not None and t in piece.tokens and own % CHUNK == 0:
                        kept[row, heads, piece.slot_of(x, t)] = state.mT.to(kept.dtype)
                    key = k[row, t, heads]
                    state = state * g[row, t, heads, None, None].exp()
                    write = v[row, t, heads] - torch.einsum("hkv,hk->hv", state, key)
                    state = state + torch.einsum("hk,hv->hkv", key, beta[row, t, heads, None] * write)
                    if t not in piece.tokens:
                        continue
                    read = torch.einsum("hk,hkv->hv", q[row, t, heads], state)
                    o[row, t, heads] = (x.of.scale * read).to(o.dtype)
                    if writes is not None:
                        writes[row, t, heads] = write.to(writes.dtype)
                if last is not None and piece.is_last:
                    last[piece.sequence, heads] = state

    def compute_mirror(self, x: Arguments) -> None:
        self.check_matrices(x, *x.of.matrices)
        assert x.of.walkers in ((1, 2) if x.is_wide else (2,))
        assert x.of.matrices[1] != 0 or makes_scores(x)
        self.check_cut(x)
        if x.is_wide:
            assert not x.of.carried
            return self.walk_back(x)
        assert not any((x.of.writes[0], x.of.dv[0], x.of.strengths, x.of.d_initial, x.of.borders))
        carried, leads, before = x.states(x.of.carried, x.carried), self.leads_of(x, behind=True), None
        assert carried is not None and leads is not None
        for piece in pieces_of(x):
            before, previous = piece, before
            if piece.number > 0:
                assert previous is not None
                heads = self.carried_heads(leads, previous)
                state = self.gradient_behind(x, piece, HeadsOfLead(0, heads), None)
                for t in reversed(piece.tokens):
                    *_, state = self.step_back(x, piece.row, t, heads, state)
                carried[piece.slot + piece.number - 1, heads] = state
        return None

    def gradient_behind(
        self, x: Arguments, piece: Piece, of_lead: HeadsOfLead, carried: Tensor | None
    ) -> Tensor:
        """That of the state with which a walk back over a segment begins."""
        d_last = x.states(x.of.d_last, x.cut[2])
        if of_lead.are_carried:
            assert carried is not None
            return carried[piece.slot + piece.number, of_lead.heads]
        if d_last is not None and piece.tokens.stop + max(of_lead.lead, 0) * CHUNK >= piece.end:
            return d_last[piece.sequence, of_lead.heads]
        return torch.zeros(x.heads, x.dim_k, x.dim_v)[of_lead.heads]

    @staticmethod
    def step_back(x: Arguments, row: int, t: int, heads: Any, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of a token: the gradient of the state behind it with what its output adds, dY, and the gradient of
        the state before it."""
        q, k, g, beta = x.inputs
        key, of_o = k[row, t, heads], x.dout[row, t, heads]
        behind = state + x.of.scale * torch.einsum("hk,hv->hkv", q[row, t, heads], of_o)
        dy = torch.einsum("hkv,hk->hv", behind, key)
        before = behind - torch.einsum("hk,hv->hkv", key, beta[row, t, heads, None] * dy)
        return behind, dy, before * g[row, t, heads, None, None].exp()

    def walk_back(self, x: Arguments) -> None:
        """The mirror with a wide K: the gradients of the values."""
        beta, writes, dv = x.gate(x.of.beta), x.operand(x.of.writes, x.dim_v), x.operand(x.of.dv, x.dim_v)
        strengths, d_initial = (
            x.floats(x.of.strengths, -(-x.dim_v // WARP), x.batch, x.heads, x.seq),
            x.states(x.of.d_initial, x.cut[2]),
        )
        for piece in pieces_of(x):
            first, count = self.slots(x, piece.sequence, piece.start)
            borders, row, every = x.states(x.of.borders, count), piece.row, slice(None)
            state = self.gradient_behind(x, piece, HeadsOfLead(0, every), None)
            for t in reversed(piece.tokens):
                _, dy, state = self.step_back(x, row, t, every, state)
                dv[row, t] = (beta[row, t, :, None] * dy).to(dv.dtype)
                self.leave_strengths(strengths[:, row, :, t], dy * writes[row, t])
                own = t - piece.start
                if borders is not None and own > 0 and own % self.segment == 0:
                    borders[first + own // self.segment - 1] = state
            if d_initial is not None:
                d_initial[piece.sequence] = state

    @staticmethod
    def leave_strengths(to: Tensor, products: Tensor, heads: Any = slice(None)) -> None:
        for part, of_part in enumerate(products.split(WARP, -1)):
            to[part, heads] = of_part.sum(-1)

    def compute_gradients(self, x: Arguments) -> None:
        """dq, dk and dv in one walk."""
        assert not x.is_wide
        self.check_matrices(x, x.of.a)
        self.check_cut(x)
        carried, leads = x.states(x.of.carried, x.carried), self.leads_of(x, behind=True)
        d_initial = x.states(x.of.d_initial, x.cut[2])
        for piece in pieces_of(x):
            for of_lead in self.heads_by_lead(leads, piece, behind=True):
                heads, row = of_lead.heads, piece.row
                state = self.gradient_behind(x, piece, of_lead, carried)
                end = min(piece.tokens.stop + max(of_lead.lead, 0) * CHUNK, piece.end)
                for t in reversed(range(piece.tokens.stop, end)):
                    *_, state = self.step_back(x, row, t, heads, state)
                for first in reversed(range(piece.tokens.start, piece.tokens.stop, CHUNK)):
                    chunk = range(first, min(first + CHUNK, piece.tokens.stop))
                    state = self.walk_chunk_back(x, row, chunk, piece.slot_of(x, first), heads, state)
                if d_initial is not None and piece.number == 0:
                    d_initial[piece.sequence, heads] = state

    def walk_chunk_back(
        self, x: Arguments, row: int, chunk: range, slot: int, heads: Any, gradient: Tensor
    ) -> Tensor:
        """From the gradient of the state behind a chunk to that of the state before it."""
        q, k, g, beta = x.inputs
        writes, dv = (x.operand(y, x.dim_v) for y in (x.of.writes, x.of.dv))
        dq, dk = x.results(x.of.dq), x.results(x.of.dk)
        assert bool(x.of.turns) == (x.slices > 1)
        if x.of.turns:
            x.tensor(x.of.turns, torch.int32, (1 + x.batch * x.heads * x.slots,)).zero_()
        strengths = x.floats(x.of.strengths, -(-x.dim_v // WARP), x.batch, x.heads, x.seq)
        assert bool(x.of.token_sums) == bool(x.of.flows)
        sums = x.floats(x.of.token_sums, 3, x.slices, x.batch, x.heads, x.seq) if x.of.flows else None
        state = x.kept_states(x.of.states)[row, heads, slot].float().mT
        kept = (
            g[row, chunk.start : chunk.stop, heads].flip(0).cumsum(0).flip(0).exp()
        )  # over later tokens, too
        if x.of.flows:
            flows = x.floats(x.of.flows, DELTA_KEYS_WARPS * x.slices, x.batch, x.heads, x.slots)
            flow = (kept[0, :, None, None] * state * gradient).sum(1)
            columns = DELTA_SLICE_COLUMNS // DELTA_KEYS_WARPS
            flow = pad(flow, (0, x.slices * DELTA_SLICE_COLUMNS - x.dim_v)).unflatten(1, (-1, columns))
            flows[:, row, heads, slot] = flow.sum(2).mT
        states, behind_chunk = [], gradient  # before each token with its decay, and behind it
        for t in chunk:
            before = state * g[row, t, heads, None, None].exp()
            u = beta[row, t, heads, None] * writes[row, t, heads]
            state = before + torch.einsum("hk,hv->hkv", k[row, t, heads], u)
            states.append((before, state))

        def of_slices(states: Tensor, values: Tensor) -> Tensor:
            """[H, slices, K] of the products."""
            parts = (states * values[:, None]).split(DELTA_SLICE_COLUMNS, -1)
            return torch.stack([part.sum(-1) for part in parts], 1)

        for t, (before, behind) in zip(reversed(chunk), reversed(states), strict=True):
            of_behind, dy, gradient = self.step_back(x, row, t, heads, gradient)
            u, by = writes[row, t, heads].float(), beta[row, t, heads, None]
            dv[row, t, heads] = (by * dy).to(dv.dtype)
            self.leave_strengths(strengths[:, row, :, t], dy * u, heads)
            of_q = x.of.scale * of_slices(behind, x.dout[row, t, heads])
            left, right = -of_slices(before, by * dy), of_slices(of_behind, by * u)
            dq[row, t, heads] = of_q.sum(1).to(dq.dtype)
            dk[row, t, heads] = (left + right).sum(1).to(dk.dtype)
            if sums is not None:
                later = kept[t - chunk.start] / g[row, t, heads].exp()
                through = later[:, None, None] * of_slices(behind_chunk, by * u)
                for which, (factor, products) in enumerate(((q, of_q), (k, left - right), (k, through))):
                    sums[which, :, row, heads, t] = (factor[row, t, heads, None] * products).sum(-1).mT
        return gradient

    def compute_decay(self, x: Arguments) -> None:
        assert x.of.slots == x.slots and x.cut[4] == DELTA_DECAY_CHUNKS
        of_q, of_k, through = x.floats(x.of.token_sums, 3, x.slices, x.batch, x.heads, x.seq).sum(1)
        flows = x.floats(x.of.flows, DELTA_KEYS_WARPS * x.slices, x.batch, x.heads, x.slots).sum(0)
        dg = x.written_gate(x.of.dg)
        for row, tokens, slot in chunks_of(x):
            own = (of_q + of_k)[row, :, tokens].flip(-1).cumsum(-1).flip(-1)
            flow = flows[row, :, slot] + through[row, :, tokens].sum(-1)
            dg[row, tokens] = (flow[:, None] + own).mT.to(dg.dtype)

    def segments(self, x: Arguments, forward: bool) -> Any:
        """Of a walk over the states: row of the batch, sequence, tokens, the state that the segment begins
        with, and whether it is the last one of its sequence in the walk's direction."""
        assert x.cut[4] * CHUNK == self.segment
        assert x.cut[3] == x.cut[2] + self.slots(x, 0, 0)[1]
        ends = x.states(x.of.entering, x.cut[2])
        for row, number, start, end in sequences_in(x):
            first, count = self.slots(x, number, start)
            borders = x.states(x.of.borders, count)
            assert (borders is None) == (count == 0)
            pieces = [range(at, min(at + self.segment, end)) for at in range(start, end, self.segment)]
            for index, tokens in enumerate(pieces):
                at_end = index == (0 if forward else len(pieces) - 1)
                if at_end:
                    state = torch.zeros(x.heads, x.dim_k, x.dim_v) if ends is None else ends[number]
                else:
                    assert borders is not None
                    state = borders[first + (index - 1 if forward else index)]
                self.begun.append((x.of.name, number, tokens.start - start))
                yield row, number, tokens, state.clone(), index == (len(pieces) - 1 if forward else 0)

    def compute_left(self, x: Arguments) -> None:
        self.walk(x, forward=True)

    def compute_right(self, x: Arguments) -> None:
        self.walk(x, forward=False)

    def walk(self, x: Arguments, *, forward: bool) -> None:
        q, k, g, beta = x.keys(x.of.q), x.keys(x.of.k), x.gate(x.of.g), x.gate(x.of.beta)
        writes, dout, dv = (x.operand(y, x.dim_v).float() for y in (x.of.writes, x.of.dout, x.of.dv))
        shared = x.of.shared
        assert x.group % shared == 0
        dq, left, dk = (x.operand(y, x.dim_k, x.heads // shared) for y in (x.of.dq, x.of.left, x.of.dk))
        assert x.is_wide
        if x.slices * shared > 1:
            x.tensor(x.of.written, torch.int32, (1 + x.cut[3] * x.heads * x.slices * 2,)).zero_()
        else:
            assert x.of.written == 0
        low = self.low_bytes(x.of.shape, shared)
        assert bool(x.of.low) == bool(low)
        if low:
            x.tensor(x.of.low, torch.uint8, (low,)).fill_(SumsOfWalk.FILL)
        sums = SumsOfWalk(x, x.of.sums, is_first=forward)
        leaving = x.states(x.of.leaving, x.cut[2])

        def of_heads(parts: Tensor) -> Tensor:
            return parts.unflatten(0, (-1, shared)).sum(1)

        for row, number, tokens, state, leaves in self.segments(x, forward):
            for t in tokens if forward else reversed(tokens):
                decay, u = g[row, t, :, None, None].exp(), beta[row, t, :, None] * writes[row, t]
                if forward:
                    state = decay * state
                    of_k = -torch.einsum("hkv,hv->hk", state, dv[row, t])
                    state = state + torch.einsum("hk,hv->hkv", k[row, t], u)
                    of_q = x.of.scale * torch.einsum("hkv,hv->hk", state, dout[row, t])
                    sums.add(row, t, q[row, t] * of_q + k[row, t] * of_k)
                    dq[row, t], left[row, t] = of_heads(of_q), of_heads(of_k)
                else:
                    state = state + x.of.scale * torch.einsum("hk,hv->hkv", q[row, t], dout[row, t])
                    of_k = torch.einsum("hkv,hv->hk", state, u)
                    dk[row, t] = left[row, t] + of_heads(of_k)
                    sums.add(row, t, k[row, t] * of_k)
                    state = decay * (state - torch.einsum("hk,hv->hkv", k[row, t], dv[row, t]))
            if leaving is not None and leaves:
                leaving[number] = state

    def compute_combine(self, x: Arguments) -> None:
        for of_parts, whole in ((x.of.dq_parts, x.of.dq), (x.of.dk_parts, x.of.dk)):
            dtype = torch.float32 if x.of.of_floats else x.dtype
            parts = x.operand(of_parts, x.dim_k, dtype=dtype).unflatten(2, (-1, x.group))
            x.operand(whole, x.dim_k, x.heads // x.group).copy_(parts.float().sum(3))

    def compute_strength(self, x: Arguments) -> None:
        sums = x.floats(x.of.sums, x.of.parts, x.batch, x.heads, x.seq)
        x.written_gate(x.of.dbeta).copy_(sums.sum(0).mT)

    def compute_mlstm_bwd_gates(self, x: Arguments) -> None:
        """Without the flows at anchors: from the ends of sequences alone. The starts have to agree."""
        batch, heads, seq, dim_k, dim_v = x.of.sizes
        after, before, parts, every = x.of.anchors
        slots = chunk_slots((x.address(x.of.offsets[0]), *x.of.offsets[1:]), seq)
        assert every == DELTA_ANCHOR_CHUNKS
        for at in (after, before):
            assert (x.floats(at, batch, heads, slots // every + 1, parts) == SumsOfWalk.FILL).all()

        def sums(of: tuple[int, int, int]) -> Tensor:
            return x.floats(of[0], of[2], batch, heads, seq).sum(0)

        own = sums(x.of.q_dq) - sums(x.of.k_dk)
        at, *strides, dtype = x.of.df
        batch_stride, head_stride, row_stride = strides
        df = x.tensor(at, OF_CODE[dtype], (batch, heads, seq), batch_stride, head_stride, row_stride)
        count = x.of.offsets[2]

        def flows_of(states: tuple[int, ...]) -> Tensor:
            state, gradient = (
                x.floats(at, count, heads, dim_k, dim_v) if at else torch.zeros(count, heads, 1, 1)
                for at in states[:2]
            )
            return (state * gradient).sum((2, 3))

        flows, first_flows = flows_of(x.of.last), flows_of(x.of.initial)
        offsets = (x.address(x.of.offsets[0]), *x.of.offsets[1:])
        for number, (start, end) in enumerate(bounds_at(offsets, seq)):
            flow = flows[number] if offsets[0] else flows
            tokens = slice(start, end)
            df[..., tokens] = own[..., tokens].flip(-1).cumsum(-1).flip(-1) + flow[..., None]
            if start < end:
                found, first = df[..., start].float(), first_flows[number] if offsets[0] else first_flows
                assert (found - first).norm() <= 0.05 * df[..., tokens].float().norm(), "flows at the starts"


def launch_delta_instead(monkeypatch: pytest.MonkeyPatch, segment_chunks: int = 1) -> Kernel:
    """Have the host side launch this, on a GPU of 132 multiprocessors.

    Args:
        segment_chunks: of a segment of the walks over the states.
    """
    found = Kernel(segment_chunks * CHUNK)
    launch_instead(monkeypatch, found, call, inputs, launch)
    for memo in ("_forwards", "_backwards"):
        monkeypatch.setattr(launch, memo, Memo())
    monkeypatch.setattr(call, "SEGMENT_CHUNKS", segment_chunks)
    return found


@contextmanager
def uninitialised_memory_is_nan() -> Iterator[None]:
    """PyTorch fills whatever it allocates with NaN: what a launch reads that none has written shows."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1000, dtype=torch.bfloat16).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)
