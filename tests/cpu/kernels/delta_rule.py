"""The delta rule's kernels by the reference."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from tfla_tk import reference
from tfla_tk.backends.tk.delta_rule import call
from tfla_tk.core.layout import (
    CHUNK,
    DELTA_ANCHOR_CHUNKS,
    DELTA_DECAY_CHUNKS,
    DELTA_KEYS_WARPS,
    DELTA_SLICE_COLUMNS,
)

from .scalar_gate import ScalarGate
from .stand_in import Kernels, bounds_of, floats_at, gate_at, operand_at, slots_of, tensor_at

FLOAT, HALF = 4, 2  # bytes
WARP = 16  # columns that a warp's sums are over
GATES = ("g", "beta")
WALK_OVER_STATES = (
    *("shape", "q", "k", "writes", "dout", "dv", "dq", "left", "dk", *GATES),
    *("entering", "leaving", "borders", "sums", "written", "low", "scale", "shared"),
)


class Shape(NamedTuple):
    """Offsets, how sequences are cut, and sizes, as launches have them. Sizes in bytes."""

    offsets: int
    is_64bit: bool
    sequences: int
    segments: int
    chunks: int
    batch: int
    heads: int
    seq: int
    dim_k: int
    dim_v: int
    group: int = 1
    half: bool = False
    device: int = 0

    @property
    def slots(self) -> int:
        """Of the chunks of a head."""
        return -(-self.seq // CHUNK) + (self.sequences if self.offsets else 0)

    @property
    def slices(self) -> int:
        """Of V."""
        return -(-self.dim_v // DELTA_SLICE_COLUMNS)

    @property
    def matrices(self) -> int:
        return HALF * CHUNK * CHUNK * self.batch * self.heads * self.slots

    @property
    def bounds(self) -> int:
        return 8 * FLOAT * self.batch * self.heads * self.slots

    @property
    def leads(self) -> int:
        """Before segments, or behind them."""
        return FLOAT * self.segments * self.heads

    @property
    def maps(self) -> int:
        """Between segments."""
        return FLOAT * (self.segments - self.sequences) * self.heads * self.dim_k * self.dim_k

    @property
    def carried(self) -> int:
        """States between segments."""
        return FLOAT * (self.segments - self.sequences) * self.heads * self.dim_k * self.dim_v

    @property
    def strengths(self) -> int:
        return FLOAT * self.batch * self.heads * self.seq * -(-self.dim_v // WARP)

    @property
    def sums(self) -> int:
        """Over K and V of a walk over the states, of one token."""
        return FLOAT * self.batch * self.heads * self.slices * -(-self.dim_k // WARP)


class Piece(NamedTuple):
    """Some tokens of a sequence that a walk begins with a state of their own.

    Attributes:
        row: of the batch. sequence: its number.
        tokens: of the row.
        is_first, is_last: of the sequence.
        slot: of its state, where every piece has one.
        border: slot of the state that enters it, where only those have one that follow others.
    """

    row: int
    sequence: int
    tokens: slice
    is_first: bool
    is_last: bool
    slot: int
    border: int

    @property
    def start(self) -> tuple[int, int]:
        return self.row, self.tokens.start


class DeltaRule(Kernels):
    """Stands for the launchers of the delta rule."""

    ARGUMENTS: ClassVar = {
        "matrices": ("shape", "q", "k", *GATES, "matrices", "scale", "bounds"),
        "leads": ("shape", "bounds", "leads", "longest", "both"),
        "forward": (
            *("shape", "q", "k", "v", "o", "writes", *GATES, "matrices", "initial", "last", "carried"),
            *("leads", "borders", "states", "scale", "walkers", "makers", "makes_matrices"),
        ),
        "maps": ("shape", "k", "v", *GATES, "a", "initial", "carried", "leads", "maps"),
        "carry": ("shape", "carried", "leads", "maps", "backward"),
        "mirror": (
            *("shape", "q", "k", "dout", "writes", "dv", *GATES, "matrices", "strengths", "d_last"),
            *("d_initial", "carried", "leads", "borders", "scale", "walkers"),
        ),
        "gradients": (
            *("shape", "q", "k", "dout", "writes", "dq", "dk", "turns", "dv", *GATES, "a", "states"),
            *("d_last", "d_initial", "carried", "leads", "strengths", "token_sums", "flows", "scale"),
        ),
        "decay": ("shape", "slots", "g", "dg", "token_sums", "flows"),
        "inputs": (
            *("shape", "q", "k", "unit_q", "unit_k", "beta", "g", "a_log", "dt_bias", "strength"),
            *("log_decay", "twice"),
        ),
        "inputs_backward": (
            *("shape", "q", "k", "dq", "dk", "beta", "g", "a_log", "dt_bias", "d_strength"),
            *("d_log_decay", "d_beta", "d_g", "sums", "twice"),
        ),
        "combine": ("shape", "dq_parts", "dk_parts", "dq", "dk", "of_floats"),
        "strength": ("shape", "sums", "parts", "dbeta"),
        "left": WALK_OVER_STATES,
        "right": WALK_OVER_STATES,
        "mlstm_bwd_gates": ScalarGate.ARGUMENTS["mlstm_bwd_gates"],
    }
    SHAPE = Shape
    INPUT_TOKENS = 16  # of a part of the sums for A_log and dt_bias

    def __init__(self) -> None:
        super().__init__()
        self._dg, self._dbeta = torch.empty(0), torch.empty(0)  # of the walk before
        self._ends: dict[str, Any] = {}  # that walks over the states were given and have left

    # Sizes that launchers tell

    def anchor_bytes(self, shape: tuple[int, ...]) -> int:
        return 1024 * (Shape(*shape).slots // DELTA_ANCHOR_CHUNKS + 1)

    def written_bytes(self, shape: tuple[int, ...], shared: int) -> int:
        of = Shape(*shape)
        return 4 * (1 + of.segments * of.heads * of.slices * 2) if of.slices * shared > 1 else 0

    def low_bytes(self, shape: tuple[int, ...], shared: int) -> int:
        of = Shape(*shape)
        return 64 * of.slots * of.heads // shared if of.slices > 1 else 0

    def mlstm_bwd_gates_workspace_bytes(self, heads: int, sequences: int) -> int:
        return 128 * heads * sequences

    # Before and behind all walks

    def run_inputs(self, x: SimpleNamespace) -> None:
        for given, unit in ((x.q, x.unit_q), (x.k, x.unit_k)):
            assert (given[0] == 0) == (unit[0] == 0)
            if unit[0]:
                rows_at(x, unit).copy_(reference.l2_norm(rows_at(x, given)))
        if x.strength:
            tokens_at(x, x.strength).copy_(reference.writing_strength(gate_of(x, x.beta), x.twice))
        if x.log_decay:
            tokens_at(x, x.log_decay).copy_(reference.delta_log_decay(*of_log_decay(x)))

    def run_inputs_backward(self, x: SimpleNamespace) -> None:
        for given, gradient in ((x.q, x.dq), (x.k, x.dk)):
            if gradient[0]:
                d_unit = rows_at(x, gradient)
                d_unit.copy_(reference.l2_norm_backward(rows_at(x, given), d_unit.clone()))
        if x.d_strength:
            beta, d_strength = gate_of(x, x.beta), tokens_at(x, x.d_strength)
            gate_in_place(x, x.d_beta).copy_(reference.writing_strength_backward(beta, d_strength, x.twice))
        if x.d_log_decay:
            given = tokens_at(x, x.d_log_decay)
            dg, da_log, ddt_bias = reference.delta_log_decay_backward(*of_log_decay(x), given)
            gate_in_place(x, x.d_g).copy_(dg)
            batch, heads, seq = sizes_of(x)[:3]
            parts = -(-batch * seq // self.INPUT_TOKENS)
            sums = tensor_at(x.sums, torch.float32, (2, parts, heads)).zero_()
            sums[0, 0], sums[1, -1] = da_log, ddt_bias

    def run_matrices(self, x: SimpleNamespace) -> None:
        self._leave_matrices(x, *x.matrices)
        if x.bounds:
            self.leave("bounds", x.bounds, x.shape.bounds)

    def _leave_matrices(self, x: SimpleNamespace, a: int, p: int = 0) -> None:
        if a:
            self.leave("A", a, x.shape.matrices, x.k, x.g, x.beta)
        if p:
            self.leave("P", p, x.shape.matrices, x.q, x.k, x.g, x.scale)

    def _expect_matrices(self, x: SimpleNamespace, a: int, p: int) -> None:
        self.expect("A", a, x.shape.matrices)
        if p:
            self.expect("P", p, x.shape.matrices)

    def run_combine(self, x: SimpleNamespace) -> None:
        batch, heads, seq, dim_k, *_ = sizes_of(x)
        dtype = torch.float32 if x.of_floats else dtype_of(x)
        for of_parts, whole in ((x.dq_parts, x.dq), (x.dk_parts, x.dk)):
            parts = operand_at(of_parts, dtype, (batch, heads, seq, dim_k)).unflatten(1, (-1, x.shape.group))
            operand_at(whole, dtype_of(x), (batch, heads // x.shape.group, seq, dim_k)).copy_(
                parts.float().sum(2)
            )

    def run_strength(self, x: SimpleNamespace) -> None:
        assert x.parts == -(-x.shape.dim_v // WARP)
        self.expect("sums for dbeta", x.sums, x.shape.strengths)
        gate_in_place(x, x.dbeta).copy_(self._dbeta)

    def run_decay(self, x: SimpleNamespace) -> None:
        assert x.slots == x.shape.slots and x.shape.chunks == DELTA_DECAY_CHUNKS
        for what, place, size in self._sums_of_one_walk(x):
            self.expect(what, place, size)
        gate_in_place(x, x.dg).copy_(self._dg)

    # A split

    def run_leads(self, x: SimpleNamespace) -> None:
        self.expect("bounds", x.bounds, x.shape.bounds)
        assert x.longest >= 0
        self.leave("leads before segments", x.leads, x.shape.leads)
        if x.both:
            self.leave("leads behind segments", x.leads + x.shape.leads, x.shape.leads)

    def run_maps(self, x: SimpleNamespace) -> None:
        self.expect("A", x.a, x.shape.matrices, x.k, x.g, x.beta)
        self.expect("leads before segments", x.leads, x.shape.leads)
        of_maps = x.shape.maps
        self.leave("states of segments", x.carried, x.shape.carried, x.v, x.initial)
        self.leave("transposed maps", x.maps[1], of_maps)
        if x.maps[0]:
            self.expect("leads behind segments", x.leads + x.shape.leads, x.shape.leads)
            self.leave("maps", x.maps[0], of_maps)

    def run_carry(self, x: SimpleNamespace) -> None:
        of_states, of_maps = x.shape.carried, x.shape.maps
        where = "behind" if x.backward else "before"
        self.expect(f"leads {where} segments", x.leads, x.shape.leads)
        self.expect("maps" if x.backward else "transposed maps", x.maps, of_maps)
        self.expect("gradients of segments" if x.backward else "states of segments", x.carried, of_states)
        made_of = self._made_of[x.carried]
        self.leave("carried gradients" if x.backward else "carried states", x.carried, of_states, *made_of)

    def _expect_carried(self, x: SimpleNamespace, what: str, where: str, *made_of: Any) -> None:
        """Of a walk, where it is split."""
        size = x.shape.carried
        assert (x.carried != 0) == (size > 0)
        if size:
            self.expect(what, x.carried, size, *made_of)
            self.expect(f"leads {where} segments", x.leads, x.shape.leads)

    # Walks

    def run_forward(self, x: SimpleNamespace) -> None:
        """The writes have v in their place."""
        a, p, flags = x.matrices
        batch, heads, _, dim_k, _ = sizes_of(x)
        if x.makes_matrices:
            assert x.walkers == 2 and 64 < dim_k <= 128 and x.shape.segments == x.shape.sequences, (
                "else kernels refuse"
            )
            assert p == flags == x.makers == x.carried == 0
            self._leave_matrices(x, a)
        elif x.makers:
            self._leave_matrices(x, a, p)
            self.leave("flags", flags, 4 * (batch * heads * x.shape.slots + 2))
            assert p or dim_k <= 64
        else:
            self.expect("A", a, x.shape.matrices, x.k, x.g, x.beta)
            assert flags == 0 and (p or dim_k <= 64 or (dim_k <= 128 and x.walkers == 2))
            if p:
                self.expect("P", p, x.shape.matrices, x.q, x.k, x.g, x.scale)
        self._expect_carried(x, "carried states", "before", x.v, x.initial)
        v, o = values_at(x, x.v), values_at(x, x.o)
        if x.writes[0]:
            values_at(x, x.writes).copy_(v)
        assert (x.states != 0) == (x.writes[0] != 0 and dim_k <= 128)
        kept = tensor_at(x.states, dtype_of(x), states_size(x)) if x.states else None
        initial, last = (states_at(x, at, x.shape.sequences) for at in (x.initial, x.last))
        borders = states_at(x, x.borders, borders_of(x))
        state = torch.empty(0)
        for piece in pieces(x, CHUNK):
            if piece.is_first:
                state = zeros(x) if initial is None else initial[piece.sequence]
            if kept is not None:
                kept[piece.row, :, piece.slot] = state.mT.to(kept.dtype)
            border = border_before(x, piece)
            if borders is not None and border is not None:
                borders[border] = state
            own = [y[piece.row : piece.row + 1, piece.tokens] for y in (*inputs_of(x), v)]
            found, states = reference.gated_delta_rule_chunkwise(
                *own[:2], own[4], *own[2:4], scale=x.scale, initial_state=state[None], output_final_state=True
            )
            o[piece.row, piece.tokens], state = found[0], states[0]
            if last is not None and piece.is_last:
                last[piece.sequence] = state

    def run_mirror(self, x: SimpleNamespace) -> None:
        """Of a split, what is carried backward; with a wide K dv."""
        self._expect_matrices(x, *x.matrices)
        if x.shape.dim_k <= 128:
            assert not any((x.writes[0], x.dv[0], x.strengths, x.d_initial, x.borders)) and x.walkers == 2
            self.expect("leads behind segments", x.leads, x.shape.leads)
            size = x.shape.carried
            self.leave("gradients of segments", x.carried, size, x.dout, x.d_last)
            return
        assert x.matrices[1] and x.walkers in (1, 2) and not x.carried
        dv, borders = values_at(x, x.dv), states_at(x, x.borders, borders_of(x))
        for piece, found in self._walk_back(x, CHUNK, lambda piece: zeros(x)):
            dv[piece.row, piece.tokens] = found.dv[0].to(dv.dtype)
            border = border_before(x, piece)
            if borders is not None and border is not None:
                borders[border] = found.dh0[0]
        self.leave("sums for dbeta", x.strengths, x.shape.strengths)

    def _walk_back(self, x: SimpleNamespace, tokens: int, entering: Any) -> Iterator[tuple[Piece, Any]]:
        """Gradients of every head of v by pieces of so many tokens. Writes those of the initial states.

        Args:
            entering: the state that enters a piece.
        """
        d_last = states_at(x, x.d_last, x.shape.sequences)
        d_initial = states_at(x, x.d_initial, x.shape.sequences)
        q, k, g, beta = inputs_of(x)
        v, dout = values_at(x, x.writes), values_at(x, x.dout)
        gradient = torch.empty(0)
        for piece in reversed([*pieces(x, tokens)]):
            if piece.is_last:
                gradient = zeros(x) if d_last is None else d_last[piece.sequence]
            own = [y[piece.row : piece.row + 1, piece.tokens] for y in (q, k, v, g, beta, dout)]
            state = entering(piece)[None].float()
            found = reference.gated_delta_rule_backward(
                *own, gradient[None], scale=x.scale, initial_state=state
            )
            gradient = found.dh0[0]
            yield piece, found
            if d_initial is not None and piece.is_first:
                d_initial[piece.sequence] = gradient

    def run_gradients(self, x: SimpleNamespace) -> None:
        """dq, dk and dv in one walk."""
        assert x.shape.dim_k <= 128
        self._expect_matrices(x, x.a, 0)
        self._expect_carried(x, "carried gradients", "behind", x.dout, x.d_last)
        kept = tensor_at(x.states, dtype_of(x), states_size(x))
        batch, heads, seq, dim_k, dim_v, *_ = sizes_of(x)
        is_sum = dim_v > DELTA_SLICE_COLUMNS
        dtype = torch.float32 if is_sum else dtype_of(x)
        dq, dk = (operand_at(y, dtype, (batch, heads, seq, dim_k)).transpose(1, 2) for y in (x.dq, x.dk))
        assert bool(x.turns) == is_sum and bool(x.token_sums) == bool(x.flows)
        if is_sum:
            self.leave("turns", x.turns, 4 * (1 + batch * heads * x.shape.slots))
        dv = values_at(x, x.dv)
        self._dg, self._dbeta = torch.zeros(batch, seq, heads), torch.zeros(batch, seq, heads)
        for piece, found in self._walk_back(x, CHUNK, lambda piece: kept[piece.row, :, piece.slot].mT):
            places = dq, dk, dv, self._dg, self._dbeta
            grads = found.dq, found.dk, found.dv, found.dg, found.dbeta
            for place, grad in zip(places, grads, strict=True):
                place[piece.row, piece.tokens] = grad[0].to(place.dtype)
        self.leave("sums for dbeta", x.strengths, x.shape.strengths)
        if x.flows:
            for what, place, size in self._sums_of_one_walk(x):
                self.leave(what, place, size)

    def _sums_of_one_walk(self, x: SimpleNamespace) -> list[tuple[str, int, int]]:
        of_slices = FLOAT * x.shape.slices * x.shape.batch * x.shape.heads
        return [
            ("sums of tokens", x.token_sums, 3 * of_slices * x.shape.seq),
            ("flows", x.flows, DELTA_KEYS_WARPS * of_slices * x.shape.slots),
        ]

    def run_left(self, x: SimpleNamespace) -> None:
        """dq, and a part of dk. The states at borders are the forward's."""
        dq = self._results(x, x.dq)
        entering, borders = (
            states_at(x, x.entering, x.shape.sequences),
            states_at(x, x.borders, borders_of(x)),
        )
        leaving = states_at(x, x.leaving, x.shape.sequences)
        states: dict[tuple[int, int], Tensor] = {}
        for piece in pieces(x, x.shape.chunks * CHUNK):
            if piece.is_first:
                states[piece.start] = zeros(x) if entering is None else entering[piece.sequence]
            else:
                assert borders is not None
                states[piece.start] = borders[piece.border]
            q, k, g, beta, v, dout = (
                y[piece.row : piece.row + 1, piece.tokens]
                for y in (*inputs_of(x), values_at(x, x.writes), values_at(x, x.dout))
            )
            found = reference.gated_delta_rule_backward(
                q, k, v, g, beta, dout, None, scale=x.scale, initial_state=states[piece.start][None]
            )
            dq[piece.row, piece.tokens] = self._of_shared(x, found.dq[0]).to(dq.dtype)
            if leaving is not None and piece.is_last:
                _, last = reference.gated_delta_rule_chunkwise(
                    q, k, v, g, beta, x.scale, states[piece.start][None], output_final_state=True
                )
                leaving[piece.sequence] = last[0]
        batch, _, seq, dim_k, *_ = sizes_of(x)
        self.leave("part of dk", x.left[0], HALF * batch * seq * x.shape.heads // x.shared * dim_k, x.q, x.dv)
        self._ends = {"states": states, "initial": x.entering, "last": x.leaving}
        self._turns(x)
        if x.sums[0]:
            for what, place, size in self._sums_of_walks(x.sums, x, "forward"):
                self.leave(what, place, size)
            self.leave("anchors", x.sums[2], self.anchor_bytes(x.shape))

    def run_right(self, x: SimpleNamespace) -> None:
        batch, heads, seq, dim_k, *_ = sizes_of(x)
        self.expect("part of dk", x.left[0], HALF * batch * seq * heads // x.shared * dim_k, x.q, x.dv)
        dk, borders = self._results(x, x.dk), states_at(x, x.borders, borders_of(x))
        self._dg, self._dbeta = torch.zeros(batch, seq, heads), torch.zeros(batch, seq, heads)
        x.d_last, x.d_initial = x.entering, x.leaving
        length = x.shape.chunks * CHUNK
        for piece, found in self._walk_back(x, length, lambda piece: self._ends["states"][piece.start]):
            if not piece.is_first:  # the gradient at the border is that of the mirror
                assert borders is not None
                torch.testing.assert_close(borders[piece.border], found.dh0[0], rtol=1e-2, atol=1e-2)
            dk[piece.row, piece.tokens] = self._of_shared(x, found.dk[0]).to(dk.dtype)
            for place, grad in ((self._dg, found.dg), (self._dbeta, found.dbeta)):
                place[piece.row, piece.tokens] = grad[0]
        self._ends |= {"d_last": x.entering, "d_initial": x.leaving}
        self._turns(x)
        if x.sums[0]:
            self.expect("anchors", x.sums[2], self.anchor_bytes(x.shape))
            for what, place, size in self._sums_of_walks(x.sums, x, "backward"):
                self.leave(what, place, size)
            for place in self._flows_of(x.sums[3], x):
                self.leave("flows at anchors", *place)

    def _turns(self, x: SimpleNamespace) -> None:
        """By which the CTAs of a walk take turns, and the low bytes of what they add up."""
        self.leave("turns", x.written, self.written_bytes(x.shape, x.shared))
        self.leave("low bytes", x.low, self.low_bytes(x.shape, x.shared))

    def _results(self, x: SimpleNamespace, at: tuple[int, ...]) -> Tensor:
        """[B, T, parts, K]."""
        batch, heads, seq, dim_k, *_ = sizes_of(x)
        assert x.shape.group % x.shared == 0 and dim_k > 128
        return operand_at(at, dtype_of(x), (batch, heads // x.shared, seq, dim_k)).transpose(1, 2)

    def _of_shared(self, x: SimpleNamespace, grad: Tensor) -> Tensor:
        """[T, parts, K]: sums over heads of v."""
        return grad.unflatten(1, (-1, x.shared)).sum(2)

    def _sums_of_walks(
        self, sums: tuple[int, ...], x: SimpleNamespace, walk: str
    ) -> list[tuple[str, int, int]]:
        return [
            (f"sums of tokens {walk}", sums[0], x.shape.sums * x.shape.seq),
            (f"sums of chunks {walk}", sums[1], x.shape.sums * x.shape.slots * 2),
        ]

    def _flows_of(self, at: int, x: SimpleNamespace) -> list[tuple[int, int]]:
        """Behind an anchor and before it."""
        size = x.shape.sums * (x.shape.slots // DELTA_ANCHOR_CHUNKS + 1)
        return [(at, size), (at + size, size)]

    def run_mlstm_bwd_gates(self, x: SimpleNamespace) -> None:
        """dg of two walks over the states."""
        batch, heads, seq, dim_k, dim_v = x.sizes
        x.shape = Shape(*x.cut, 0, 0, *x.sizes)
        for (whole, inter, _), walk in ((x.q_dq, "forward"), (x.k_dk, "backward")):
            for what, place, size in self._sums_of_walks((whole, inter), x, walk):
                self.expect(what, place, size)
        after, before, parts, every = x.anchors
        assert every == DELTA_ANCHOR_CHUNKS and {parts, x.q_dq[2], x.k_dk[2]} == {
            -(-dim_v // DELTA_SLICE_COLUMNS) * -(-dim_k // WARP)
        }
        for (at, size), given in zip(self._flows_of(after, x), (after, before), strict=True):
            assert at == given
            self.expect("flows at anchors", at, size)
        for given, names in ((x.initial, ("initial", "d_initial")), (x.last, ("last", "d_last"))):
            assert given == (*(self._ends[name] for name in names), 0, 0)
        size = self.mlstm_bwd_gates_workspace_bytes(heads, x.cut[2])
        self.leave("workspace of gates", x.workspace, size)
        gate_at(x.df, (batch, heads, seq)).copy_(self._dg.transpose(1, 2))


# What a launch is given: x.shape is offsets, segments and sizes


def sizes_of(x: SimpleNamespace) -> tuple[int, ...]:
    """Batch, heads of v, tokens, K, V."""
    return tuple(x.shape[5:10])


def dtype_of(x: SimpleNamespace) -> torch.dtype:
    return torch.float16 if x.shape.half else torch.bfloat16


def rows_at(x: SimpleNamespace, at: tuple[int, ...]) -> Tensor:
    """[B, T, H, K] of a tensor whose heads are shared."""
    batch, heads, seq, dim_k, _ = sizes_of(x)
    return operand_at(at, dtype_of(x), (batch, heads // x.shape.group, seq, dim_k)).transpose(1, 2)


def values_at(x: SimpleNamespace, at: tuple[int, ...]) -> Tensor:
    """[B, T, HV, V]."""
    batch, heads, seq, _, dim_v = sizes_of(x)
    return operand_at(at, dtype_of(x), (batch, heads, seq, dim_v)).transpose(1, 2)


def gate_in_place(x: SimpleNamespace, at: tuple[int, ...]) -> Tensor:
    """[B, T, HV]."""
    return gate_at(at, sizes_of(x)[:3]).transpose(1, 2)


def gate_of(x: SimpleNamespace, at: tuple[int, ...]) -> Tensor:
    """The same in fp32; zeros without an address."""
    batch, heads, seq = sizes_of(x)[:3]
    return gate_in_place(x, at).float() if at[0] else torch.zeros(batch, seq, heads)


def tokens_at(x: SimpleNamespace, at: int) -> Tensor:
    """fp32 [B, T, HV]."""
    batch, heads, seq = sizes_of(x)[:3]
    return tensor_at(at, torch.float32, (batch, seq, heads))


def of_log_decay(x: SimpleNamespace) -> tuple[Tensor, Tensor, Tensor]:
    """g, A_log and dt_bias, zeros where there is none."""
    heads = x.shape.heads

    def of_heads(at: tuple[int, ...]) -> Tensor:
        address, _, stride, _, code = at
        return gate_at((address, stride, code), (heads,)).float() if address else torch.zeros(heads)

    return gate_of(x, x.g), of_heads(x.a_log), of_heads(x.dt_bias)


def inputs_of(x: SimpleNamespace) -> tuple[Tensor, ...]:
    """q, k, g and beta of every head of v."""
    q, k = (rows_at(x, at).repeat_interleave(x.shape.group, 2) for at in (x.q, x.k))
    return q, k, gate_of(x, x.g), gate_of(x, x.beta)


def states_at(x: SimpleNamespace, at: int, count: int) -> Tensor | None:
    return floats_at(at, count, x.shape.heads, *x.shape[8:10]) if count else None


def states_size(x: SimpleNamespace) -> tuple[int, ...]:
    """Of the states that enter chunks [B, HV, slots, V, K]."""
    batch, heads, _, dim_k, dim_v = sizes_of(x)
    return batch, heads, x.shape.slots, dim_v, dim_k


def zeros(x: SimpleNamespace) -> Tensor:
    """In the place of a state."""
    return torch.zeros(x.shape.heads, *x.shape[8:10])


def pieces(x: SimpleNamespace, tokens: int) -> Iterator[Piece]:
    """Of so many tokens, of all sequences; an empty sequence has an empty one."""
    cut, seq = x.shape[:5], x.shape.seq
    _, slots = slots_of(cut, seq, tokens)
    for number, (row, start, end) in enumerate(bounds_of(cut, seq)):
        border = start // tokens if cut[0] else number * (-(-seq // tokens) - 1)
        for n, at in enumerate(range(start, max(end, start + 1), tokens)):
            own = slice(at, min(at + tokens, end))
            slot = slots[number].start + n
            yield Piece(row, number, own, n == 0, own.stop == end, slot, border + n - 1)


def segment_tokens() -> int:
    """Of a segment of the walks over the states."""
    return call.SEGMENT_CHUNKS * CHUNK


def borders_of(x: SimpleNamespace) -> int:
    """Slots of the borders between these segments, of all sequences."""
    seq, packed = x.shape.seq, x.shape.offsets != 0
    return seq // segment_tokens() if packed else x.shape.sequences * ((seq - 1) // segment_tokens())


def border_before(x: SimpleNamespace, chunk: Piece) -> int | None:
    """The slot of one, where a chunk begins a segment that follows another."""
    _, start, _ = bounds_of(x.shape[:5], x.shape.seq)[chunk.sequence]
    number, rest = divmod(chunk.tokens.start - start, segment_tokens())
    if rest or number == 0:
        return None
    first = (
        start // segment_tokens() if x.shape.offsets else chunk.sequence * borders_of(x) // x.shape.sequences
    )
    return first + number - 1
