"""GLA's kernels by the reference. A segment is a sequence to it, which begins with the state at a border."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from tfla_tk import reference
from tfla_tk.core.layout import CHUNK

from .stand_in import OF_CODE, Kernels, bounds_of, floats_at, operand_at, tensor_at

FLOAT = 4  # bytes
ANCHOR_BYTES = 48  # of a slot: anything
BLOCK = 16  # tokens of a chunk of the reference, which is faster then


class GLA(Kernels):
    """Stands for the launcher of GLA."""

    _OPERANDS = ("g", "g_dtype")
    ARGUMENTS: ClassVar = {
        "forward": (
            *("shape", "q", "k", "v", "o", *_OPERANDS, "initial", "last", "scale", "tile"),
            *("walkers", "borders", "slice_of_k"),
        ),
        "mirror": (
            *("shape", "q", "k", "do", "dv", *_OPERANDS, "d_last", "d_initial", "scale", "tile"),
            *("walkers", "borders", "slice_of_k"),
        ),
        "left": (
            *("shape", "q", "k", "v", "do", *_OPERANDS, "result", "gates", "entering", "scale", "tile"),
            *("walkers", "borders", "slice"),
        ),
        "segments": (
            *("shape", "keys", "values", *_OPERANDS, "entering", "borders", "decays", "scale", "backward"),
        ),
    }
    ARGUMENTS["right"] = ARGUMENTS["left"]

    def anchor_bytes(self, shape: tuple[int, ...], tile: int) -> int:
        return ANCHOR_BYTES * chunks_of(shape)

    def sums_bytes(self, shape: tuple[int, ...]) -> int:
        batch, heads, seq, dim_k = shape[5:9]
        return 2 * FLOAT * batch * heads * seq * dim_k

    def part_bytes(self, shape: tuple[int, ...], walkers: int) -> int:
        batch, heads, seq, _, dim_v = shape[5:10]
        assert walkers == (1 if dim_v <= 64 else 2)
        return FLOAT * batch * heads * seq * dim_v

    def run_segments(self, x: SimpleNamespace) -> None:
        of = Call(x)
        k, v = of.operand(x.keys, of.dim_k), of.operand(x.values, of.dim_v)
        entering, borders = of.states(x.entering), of.borders(x.borders)
        slots = of.segments - of.sequences
        decays = FLOAT * slots * of.heads * of.dim_k
        assert x.decays == x.borders + decays * of.dim_v
        self.leave("decays of segments", x.decays, decays)
        for number, ((row, *_), own) in enumerate(zip(of.bounds, of.pieces, strict=True)):
            state = torch.zeros(1, of.heads, of.dim_k, of.dim_v) if entering is None else entering[[number]]
            for tokens, slot in reversed(own[1:]) if x.backward else own[:-1]:
                tensors = (y[row : row + 1, tokens] for y in (k, k, v, of.gates))
                if x.backward:
                    state = reference.gla_backward(
                        *tensors,
                        v[row : row + 1, tokens],
                        state,
                        scale=x.scale,
                        initial_state=state,
                        chunk_size=BLOCK,
                    ).dh0
                    borders[slot] = state[0]
                else:
                    _, state = reference.gla_chunkwise(
                        *tensors, scale=1.0, initial_state=state, output_final_state=True, chunk_size=BLOCK
                    )
                    borders[slot + 1] = state[0]

    def run_forward(self, x: SimpleNamespace) -> None:
        of = Call(x)
        assert x.tile >= of.dim_k
        q, k, v = of.operand(x.q, of.dim_k), of.operand(x.k, of.dim_k), of.operand(x.v, of.dim_v)
        states = of.entering(x.initial, x.borders, backward=False)
        o, last = of.by_segment(
            lambda tokens, state: reference.gla_chunkwise(
                *tokens, scale=x.scale, initial_state=state[None], output_final_state=True, chunk_size=BLOCK
            ),
            (q, k, v, of.gates),
            states,
        )
        of.write_sum_over_k(x.o, o)
        of.write_states(x.last, last, -1)

    def run_mirror(self, x: SimpleNamespace) -> None:
        """dv and the first states' gradients, of which neither depends on v or the first states."""
        of = Call(x)
        assert x.tile >= of.dim_k
        q, k, do = of.operand(x.q, of.dim_k), of.operand(x.k, of.dim_k), of.operand(x.do, of.dim_v)
        gradients = of.entering(x.d_last, x.borders, backward=True)

        def backward(tokens: Any, d_last: Tensor) -> tuple[Tensor, Tensor]:
            q, k, do, g = tokens
            found = reference.gla_backward(
                q,
                k,
                do,
                g,
                do,
                d_last[None],
                scale=x.scale,
                initial_state=torch.zeros_like(d_last[None]),
                chunk_size=BLOCK,
            )
            return found.dv, found.dh0

        dv, d_initial = of.by_segment(backward, (q, k, do, of.gates), gradients)
        of.write_sum_over_k(x.dv, dv)
        of.write_states(x.d_initial, d_initial, 0)

    def run_left(self, x: SimpleNamespace) -> None:
        """dq, and all of dg for the right walk."""
        of = Call(x)
        entering, d_last = of.entering(x.entering, x.borders[0], backward=False), None
        if x.gates is not None:
            inflow, _, (d_last_at, flows_at, anchors) = x.gates
            d_last, flows = of.entering(d_last_at, x.borders[1], backward=True), of.flows(flows_at)
            self.leave("anchors", anchors, self.anchor_bytes(x.shape, x.tile), x.v)  # of each slice
            if flows is not None:
                flows.copy_(1 if of.is_first else flows + 1)
        found = of.sum_over_v(*of.gradients(entering, d_last, "dq", "dg"))
        if found is not None:
            of.operand(x.result, of.dim_k).copy_(found[0])
            if x.gates is not None:
                of.operand(inflow, of.dim_k, torch.float32).copy_(found[1])

    def run_right(self, x: SimpleNamespace) -> None:
        """dk, and dg of what the left walk has left in its place or another."""
        of = Call(x)
        assert (x.borders[0] != 0) == (x.borders[1] != 0)
        found = of.sum_over_v(*of.gradients(None, of.entering(x.entering, x.borders[1], backward=True), "dk"))
        if x.gates is not None:
            inflow, dg, (d_last_at, flows_at, anchors) = x.gates
            assert d_last_at == x.entering
            self.expect("anchors", anchors, self.anchor_bytes(x.shape, x.tile), x.v)
            flows, slices = of.flows(flows_at), 1 if of.slice is None else -(-(of.dim_v + of.slice[0]) // 256)
            assert flows is None or bool(flows.eq(slices).all())
            if found is not None:
                of_left = of.operand(inflow, of.dim_k, torch.float32).clone()
                of.operand(dg, of.dim_k, OF_CODE[x.g_dtype]).copy_(of_left)
        if found is not None:
            of.operand(x.result, of.dim_k).copy_(found[0])


def chunks_of(shape: tuple[int, ...]) -> int:
    """Slots of them, of all heads."""
    offsets, _, sequences, *_ = shape
    batch, heads, seq = shape[5:8]
    return heads * batch * (-(-seq // CHUNK) + (sequences if offsets else 0))


class Call:
    """What a launch finds at its addresses.

    Attributes:
        slice: of V: columns of others, the address of sums, whether it is the first one, the last one.
        slice_of_k: of K: channels of others, the part's address, and the same.
        bounds: row, start and end of every sequence. pieces: tokens of its segments, and the slot of the
            state that enters each of them.
    """

    def __init__(self, x: SimpleNamespace) -> None:
        self.x = x
        cut, seq = x.shape[:5], x.shape[7]
        _, _, self.sequences, self.segments, chunks = cut
        self.batch, self.heads, self.seq, self.dim_k, self.dim_v, half, _ = x.shape[5:]
        self.dtype = torch.float16 if half else torch.bfloat16
        self.slice = getattr(x, "slice", None)
        self.slice_of_k = getattr(x, "slice_of_k", None)
        assert self.segments > self.sequences or CHUNK * chunks >= seq
        self.bounds, self.pieces = bounds_of(cut, seq), []
        for number, (_, start, end) in enumerate(self.bounds):
            length = CHUNK * chunks
            first = start // length if cut[0] else number * (-(-seq // length) - 1)
            begins = range(start, max(end, start + 1), length)
            own = [(slice(at, min(at + length, end)), first + n - 1) for n, at in enumerate(begins)]
            self.pieces.append(own)
        self.gates = self.operand(x.g, self.dim_k, OF_CODE[x.g_dtype])

    def operand(self, at: tuple[int, ...], dim: int, dtype: torch.dtype | None = None) -> Tensor:
        """[B, T, H, D]."""
        shape = (self.batch, self.heads, self.seq, dim)
        return operand_at(at, dtype or self.dtype, shape).transpose(1, 2)

    def states(self, at: int, count: int | None = None) -> Tensor | None:
        """Of a launch's channels and columns, between those of others."""
        assert at % 16 == 0
        row = self.dim_v + (self.slice[0] if self.slice else 0)
        of_head = (self.dim_k + (self.slice_of_k[0] if self.slice_of_k else 0)) * row
        shape = (self.sequences if count is None else count, self.heads, self.dim_k, self.dim_v)
        return tensor_at(at, torch.float32, shape, self.heads * of_head, of_head, row, 1) if at else None

    def borders(self, at: int) -> Any:
        """None where there are none."""
        count = self.segments - self.sequences
        assert (at != 0) == (count > 0)
        return self.states(at, count)

    def entering(self, at: int, borders_at: int, *, backward: bool) -> list[list[Tensor]]:
        """The state that enters every segment, or the gradient of the one that leaves it."""
        ends, borders = self.states(at), self.borders(borders_at)
        zero = torch.zeros(self.heads, self.dim_k, self.dim_v)
        found = []
        for number, own in enumerate(self.pieces):
            end = zero if ends is None else ends[number]
            inner = [borders[slot] for _, slot in own[1:]]
            found.append([*inner, end] if backward else [end, *inner])
        return found

    def by_segment(self, function: Any, tokens: Any, states: list[list[Tensor]]) -> tuple[Tensor, Any]:
        """What is computed of every segment: of all tokens, and a state of each segment."""
        whole, ends = None, []
        for (row, *_), own, given in zip(self.bounds, self.pieces, states, strict=True):
            ends.append([])
            for (part, _), state in zip(own, given, strict=True):
                if part.start == part.stop:
                    ends[-1].append(state)  # of an empty sequence
                    continue
                found, end = function([y[row : row + 1, part] for y in tokens], state)
                whole = found.new_zeros(self.batch, self.seq, *found.shape[2:]) if whole is None else whole
                whole[row, part] = found[0]
                ends[-1].append(end[0])
        assert whole is not None
        return whole, ends

    def gradients(self, entering: Any, d_last: Any, *names: str) -> list[Tensor]:
        """Of a walk over the states; without states where None is given for these or their gradients."""
        x, zero = self.x, torch.zeros(self.heads, self.dim_k, self.dim_v)
        tokens = [self.operand(y, dim) for y, dim in ((x.q, self.dim_k), (x.k, self.dim_k))]
        tokens += [self.operand(x.v, self.dim_v), self.gates, self.operand(x.do, self.dim_v)]
        states, gradients = (
            [[zero] * len(own) for own in self.pieces] if y is None else y for y in (entering, d_last)
        )
        both = [[*zip(*pair, strict=True)] for pair in zip(states, gradients, strict=True)]

        def backward(tokens: Any, ends: Any) -> tuple[Tensor, Any]:
            state, d_last = ends
            found = reference.gla_backward(
                *(y.float() for y in tokens),
                d_last[None],
                scale=x.scale,
                initial_state=state[None],
                chunk_size=BLOCK,
            )
            return torch.cat([getattr(found, name) for name in names], -1), [found.dh0[0]]

        found, _ = self.by_segment(backward, tokens, both)
        return [*found.split(self.dim_k, -1)]

    def sum_over_v(self, *parts: Tensor) -> list[Tensor] | None:
        """The sums over the slices of V up to and with this one; None where another launch has the next."""
        if self.slice is None:
            return [*parts]
        shape = (2, self.batch, self.seq, self.heads, self.dim_k)
        sums = tensor_at(self.slice[1], torch.float32, shape)
        found = [part if self.is_first else old + part for old, part in zip(sums, parts, strict=False)]
        for old, new in zip(sums, found, strict=False):
            old.copy_(torch.nan if self.slice[3] else new)  # nothing else may be needed of them
        return found if self.slice[3] else None

    def write_sum_over_k(self, at: tuple[int, ...], part: Tensor) -> None:
        """The same over slices of K, in fp32; the last one writes the result."""
        _, left, begins, ends = self.slice_of_k or (0, 0, True, True)
        if left:
            sums = tensor_at(left, torch.float32, (self.batch, self.seq, self.heads, self.dim_v))
            part = part if begins else sums + part
            sums.copy_(torch.nan if ends else part)
        if ends:
            self.operand(at, self.dim_v).copy_(part)

    def write_states(self, at: int, of_segments: list[list[Tensor]], which: int) -> None:
        """Of the first or the last segment of every sequence."""
        states = self.states(at)
        if states is not None:
            states.copy_(torch.stack([own[which] for own in of_segments]))

    @property
    def is_first(self) -> bool:
        """Of the slices of V."""
        return self.slice is None or self.slice[2]

    def flows(self, at: int) -> Tensor | None:
        return floats_at(at, self.sequences, self.heads, self.dim_k)
