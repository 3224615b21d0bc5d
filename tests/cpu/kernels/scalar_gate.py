"""The kernels of mLSTM and of a scalar decay by the reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from tfla_tk import reference
from tfla_tk.core.layout import ANCHOR_CHUNKS, CHUNK, FLOW_PARTS, GATE_KINDS, GRADIENTS, STATE_CHUNKS

from .stand_in import Kernels, bounds_of, floats_at, gate_at, offsets_at, operand_at, slots_of, tensor_at

FLOAT, DOUBLE = 4, 8  # bytes
UNIT = -3.0  # of the states that a forward leaves: the binary logarithm of a factor
# what a walk and the sums of its segments have in common
WALK = (
    *("gradient", "tile", "slice", "keys", "values", "e", "e_stride", "boundaries", "cut", "sizes", "group"),
    *("half", "device"),
)


class Inputs(NamedTuple):
    """What a forward is computed from; there is no i, n and m with a scalar decay."""

    q: Tensor
    k: Tensor
    v: Tensor
    i: Tensor | None
    f: Tensor
    c: Tensor | None
    n: Tensor | None
    m: Tensor | None


class ScalarGate(Kernels):
    """Stands for the launchers of both."""

    ARGUMENTS: ClassVar = {
        "forward": (
            *("q", "k", "v", "h", "i", "f", "states", "rows", "left", "cut", "workspace", "sizes"),
            *("group", "tile", "scale", "eps", "half", "gate_kind", "normalize", "device"),
        ),
        "mlstm_bwd_scan": (
            *("i", "f", "rows", "chunk_m", "gates", "tickets", "cut", "sizes", "scale"),
            *("gate_kind", "device"),
        ),
        "mlstm_bwd_rows": ("dh", "h", "rows", "factors", "sizes", "half", "device"),
        "mlstm_bwd_factors": ("dots", "rows", "factors", "count", "device"),
        "mlstm_bwd_combine": ("boundaries", "norm_parts", "entering", "cut", "sizes", "backward", "device"),
        "segments": ("of_walk", "i", "f", "log2_w", "chunk_m", "scale", "gate_kind"),
        "walk": (
            *("of_walk", "gates", "queries", "out", "factor", "entering", "leaving", "sums", "anchors"),
            "ticket",
        ),
        "gradients": (
            *("q", "k", "v", "dh", "left", "gates", "e", "boundaries", "entering", "leaving"),
            *("dq", "dk", "dv", "sums", "cut", "sizes", "group", "tile", "half", "device"),
        ),
        "gate_gradients": (
            *("sums", "parts", "i", "f", "di", "df", "chunk_m", "cut", "sizes", "gate_kind", "device"),
        ),
        "mlstm_bwd_gates": (
            *("q_dq", "k_dk", "anchors", "i", "f", "di", "df", "chunk_m", "initial", "last", "workspace"),
            *("cut", "sizes", "gate_kind", "device"),
        ),
    }

    def __init__(self) -> None:
        super().__init__()
        self._scans: dict[int, SimpleNamespace] = {}  # by the address of their gates
        self._walks: dict[int, SimpleNamespace] = {}  # the last one of each gradient
        self._found: Any = None  # gradients of gates
        self._ends: list[Any] = []  # states and their gradients at both ends

    # Sizes that launchers tell

    def workspace_bytes(self, slots: int, dim_qk: int, dim_v: int) -> int:
        return slots * (2 * DOUBLE + FLOAT * (dim_qk * dim_v + dim_qk + 1))

    def workspace_offsets(self, slots: int, dim_qk: int, dim_v: int) -> tuple[int, int]:
        return 2 * DOUBLE * slots, 2 * DOUBLE * slots + FLOAT * slots * dim_qk * dim_v

    def ctas_per_multiprocessor(self, tile_qk: int, slice_v: int) -> int:
        return 1

    def mlstm_bwd_gates_workspace_bytes(self, heads: int, sequences: int) -> int:
        return 64 * heads * sequences

    def chunk_gates_bytes(self) -> int:
        return 64

    def flow_parts(self, batch: int, heads: int, keys: int, values: int, tile: int, slice_: int) -> int:
        return -(-keys // tile) * -(-values // slice_)

    def anchor_bytes(self, batch: int, heads: int, *sizes: int) -> int:
        return (
            64 * batch * heads * self.flow_parts(batch, heads, *sizes[:4]) * (sizes[4] // ANCHOR_CHUNKS + 1)
        )

    # Forward

    def run_forward(self, x: SimpleNamespace) -> None:
        batch, heads, seq, dim_qk, dim_v = x.sizes
        count, borders = x.cut[2], (x.cut[3] - x.cut[2]) * heads
        assert x.tile[0] >= dim_qk and (x.workspace != 0) == (borders > 0)
        assert x.normalize or x.states[4] == 0, "n of no normaliser"
        shapes = (count, heads, dim_qk, dim_v), (count, heads, dim_qk), (count, heads, 1)
        c, n, m, *last = (floats_at(at, *shape) for at, shape in zip(x.states, shapes * 2, strict=True))
        q, k, v = read(x, x.q, x.k, x.v, x.group)
        inputs = Inputs(q, k, v, gate_of(x.i, x), gate_at(x.f, x.sizes[:3]), c, n, m)
        chunks, _ = slots_of(x.cut, seq, CHUNK)
        rows = [
            floats_at(at, *shape)
            for at, shape in zip(
                x.rows, ((batch, heads, seq), (batch, heads, seq), (batch, heads, chunks, 2)), strict=True
            )
        ]
        found = forward_of(inputs, x)
        h = operand_at(x.h, v.dtype, v.shape)
        for place, value in zip((h, *last, *rows), found, strict=True):
            if place is not None:
                place.copy_(value)
        if borders:
            for what, place, size in self._in_workspace(x, borders):
                self.leave(what, x.workspace + place, size)
        if x.left[0]:
            self._leave_states(x, inputs)

    def _in_workspace(self, x: SimpleNamespace, borders: int) -> list[tuple[str, int, int]]:
        *_, dim_qk, dim_v = x.sizes
        of_c, of_n = self.workspace_offsets(borders, dim_qk, dim_v)
        return [
            ("decays of segments", 0, of_c),
            ("c at borders", of_c, FLOAT * borders * dim_qk * dim_v),
            ("n at borders", of_n, FLOAT * borders * dim_qk if x.normalize else 0),
        ]

    def _leave_states(self, x: SimpleNamespace, inputs: Inputs) -> None:
        """In each place of a sequence its initial state."""
        states, units, norms, slots = left_at(x)
        units.fill_(UNIT)
        for (row, *_), own, number in slots:
            c = 0 if inputs.c is None else inputs.c[number, :, None].mT
            states[row, :, own] = c / 2**UNIT
            if norms is not None:
                norms[row, :, own] = 0 if inputs.n is None else inputs.n[number, :, None] / 2**UNIT

    # Backward

    def run_mlstm_bwd_rows(self, x: SimpleNamespace) -> None:
        """Leaves dh_t.h_t of every part of V in the place of e."""
        batch, heads, seq, dim_v, part = x.sizes
        dtype = torch.float16 if x.half else torch.bfloat16
        dh, h = (operand_at(y, dtype, (batch, heads, seq, dim_v)).float() for y in (x.dh, x.h))
        log2_w, e, stride = x.factors
        if log2_w:
            self.leave("log2 w", log2_w, FLOAT * batch * heads * seq)
        for number, products in enumerate((dh * h).split(part, -1)):
            place = floats_at(e + FLOAT * stride * number, batch, heads, seq)
            assert place is not None
            place.copy_(products.sum(-1))

    def run_mlstm_bwd_factors(self, x: SimpleNamespace) -> None:
        """The same of the dots of slices."""
        dots, rows, slices, of_part = x.dots
        _, e, stride = x.factors
        found = tensor_at(dots, torch.float32, (slices, rows))
        for number, of_slices in enumerate(found.split(of_part)):
            tensor_at(e + FLOAT * stride * number, torch.float32, (rows,)).copy_(of_slices.sum(0))

    def run_mlstm_bwd_scan(self, x: SimpleNamespace) -> None:
        batch, heads, seq = x.sizes
        chunks, _ = slots_of(x.cut, seq, CHUNK)
        self.leave("gates of chunks", x.gates, self.chunk_gates_bytes() * batch * heads * chunks)
        if x.tickets:
            self.leave("tickets", x.tickets, 8)
        self._scans[x.gates] = x

    def run_segments(self, x: SimpleNamespace) -> None:
        vars(x).update(zip(WALK, x.of_walk, strict=True))
        made_of = x.gradient, x.keys, x.values, x.e, x.i, x.f, x.chunk_m, x.scale
        if x.log2_w:
            self.expect("log2 w", x.log2_w, FLOAT * math.prod(x.sizes[:3]))
        for place, size in self._at_boundaries(x):
            self.leave("sums of segments", place, size, *made_of)

    def run_mlstm_bwd_combine(self, x: SimpleNamespace) -> None:
        heads, _, dim_qk, dim_v = x.sizes
        slots = (x.cut[3] - x.cut[2]) * heads
        sizes = slots * dim_qk * dim_v * FLOAT, slots * dim_qk * x.norm_parts * FLOAT, slots * DOUBLE
        made_of = self._made_of[x.boundaries[0]]
        assert made_of[0] == GRADIENTS["dk" if x.backward else "dq"]
        for place, size in zip(x.boundaries, sizes, strict=True):
            if place:
                self.expect("sums of segments", place, size, *made_of)
                self.leave("states at boundaries", place, size, *made_of, x.entering)

    def _at_boundaries(self, x: SimpleNamespace) -> list[tuple[int, int]]:
        """Places and sizes of c, n and decays of a walk, in whose sizes the columns of keys come first."""
        _, heads, _, keys, values = x.sizes
        slots = (x.cut[3] - x.cut[2]) * heads
        of_n = slots * values * (-(-keys // x.tile) if x.gradient == GRADIENTS["dk"] else 1)
        sizes = slots * keys * values * FLOAT, of_n * FLOAT, slots * DOUBLE
        return [(place, size) for place, size in zip(x.boundaries, sizes, strict=True) if place]

    def run_walk(self, x: SimpleNamespace) -> None:
        """One of three; the last one computes all gradients of those before it, too."""
        vars(x).update(zip(WALK, x.of_walk, strict=True))
        name = next(name for name, code in GRADIENTS.items() if code == x.gradient)
        batch, heads, seq, _, dim_values = x.sizes
        scan = self._scan_of(x)
        if x.cut[3] > x.cut[2]:
            self._expect_boundaries(x, scan, name)
        self._walks[x.gradient] = x
        if name != "dv" and x.sizes[3] > x.tile:  # parts of V
            assert x.ticket == scan.tickets + 4 * (name == "dk")
            self.expect("tickets", x.ticket, 4)
        dtype = torch.float16 if x.half else torch.bfloat16
        if name == "dv":
            if x.sums[0]:  # dots of dh and h
                shape = batch, heads, seq, dim_values
                dh, h = (operand_at(y, dtype, shape).float() for y in (x.values, x.factor))
                parts = (dh * h).split(x.slice, -1)
                tensor_at(x.sums[0], torch.float32, (len(parts), *shape[:3])).copy_(
                    torch.stack([part.sum(-1) for part in parts])
                )
            return
        for what, place, size in self._sums_of(x, name):
            self.leave(what, place, size)
        if name == "dq":
            self.leave("anchors", x.anchors[0], self._bytes_of_anchors(x))
            return
        self.expect("anchors", x.anchors[0], self._bytes_of_anchors(x))
        self._write_three(x, scan)

    def _scan_of(self, x: SimpleNamespace) -> SimpleNamespace:
        scan = self._scans[x.gates]
        chunks, _ = slots_of(x.cut, x.sizes[2], CHUNK)
        size = self.chunk_gates_bytes() * x.sizes[0] * x.sizes[1] * chunks
        self.expect("gates of chunks", x.gates, size)
        assert scan.cut == x.cut[:3] and scan.sizes == x.sizes[:3]
        return scan

    def _expect_boundaries(self, x: SimpleNamespace, scan: SimpleNamespace, name: str) -> None:
        """States that the walk's segments begin with: of a launch of the backward, or the forward's."""
        given = self._made_of.get(x.boundaries[0])
        places = self._at_boundaries(x)
        if given:  # else by the forward, which leaves no decays
            gradient, keys, values, *others, entering = given
            assert (gradient == GRADIENTS["dq"]) == (name == "dq") and others[1:] == gates_of(scan)
            assert entering[0] == x.entering[0]
            assert (keys, values) == ((x.values, x.keys) if name == "dv" else (x.keys, x.values))
            for place, size in places:
                self.expect("states at boundaries", place, size)
            return
        assert name == "dq"
        for what, (place, size) in zip(("c at borders", "n at borders"), places, strict=False):
            if place != x.boundaries[2]:
                self.expect(what, place, size)

    def _sums_of(self, x: SimpleNamespace, name: str) -> list[tuple[str, int, int]]:
        """Of dq and dk: row sums of a walk, and those of its chunks, of every part of V and slice of K."""
        batch, heads, seq, keys, values = x.sizes
        count = -(-keys // x.tile) * -(-values // x.slice) * batch * heads
        chunks, _ = slots_of(x.cut, seq, CHUNK)
        found = [
            (f"sums of {name}", x.sums[0], count * seq * FLOAT),
            (f"chunks' sums of {name}", x.sums[1], 2 * count * chunks * FLOAT),
        ]
        if name == "dk":
            flows = FLOAT * batch * heads * (chunks // ANCHOR_CHUNKS + 1)
            found.append(
                ("flows", x.anchors[1], flows * self.flow_parts(batch, heads, keys, values, x.tile, x.slice))
            )
        return found

    def _bytes_of_anchors(self, x: SimpleNamespace) -> int:
        batch, heads, seq, keys, values = x.sizes
        chunks, _ = slots_of(x.cut, seq, CHUNK)
        return self.anchor_bytes(batch, heads, keys, values, x.tile, x.slice, chunks)

    def _write_three(self, of_dk: SimpleNamespace, scan: SimpleNamespace) -> None:
        """The gradients of three walks."""
        of_dq, of_dv = self._walks[GRADIENTS["dq"]], self._walks[GRADIENTS["dv"]]
        assert of_dq.gates == of_dv.gates == of_dk.gates
        assert of_dq.queries == of_dk.keys == of_dv.values and of_dq.keys == of_dk.queries  # dh, v
        assert of_dq.values == of_dk.factor == of_dv.queries  # k
        assert of_dk.values == of_dq.factor == of_dv.keys  # q
        assert of_dk.entering[0] == of_dv.entering[0]
        batch, heads, seq, dim_v, dim_qk = of_dk.sizes
        x = SimpleNamespace(**vars(of_dk) | {"sizes": (batch, heads, seq, dim_qk, dim_v)})
        count = x.cut[2]
        shapes = (count, heads, dim_qk, dim_v), (count, heads, dim_qk)
        c, n = (floats_at(at, *shape) for at, shape in zip(of_dq.entering, shapes, strict=True))
        dc, dn = (floats_at(at, *shape) for at, shape in zip(of_dk.entering, shapes, strict=True))
        q, k, v = read(x, of_dk.values, of_dk.factor, of_dk.queries, x.group)
        dh = operand_at(of_dk.keys, v.dtype, v.shape)
        parts = -(-dim_v // x.tile)
        inputs = Inputs(
            q,
            k,
            v,
            gate_of(scan.i, scan),
            gate_at(scan.f, scan.sizes),
            c,
            n,
            None if c is None else first_m(scan),
        )
        grads = self._gradients(scan, inputs, dh, dc, dn, x, parts)
        for walk, grad in ((of_dq, grads.q), (of_dk, grads.k), (of_dv, grads.v)):
            operand_at(walk.out, v.dtype, grad.shape).copy_(grad)
        if of_dv.leaving[0]:
            floats_at(of_dv.leaving[0], *shapes[0]).copy_(grads.c_initial)
        if of_dk.leaving[1]:  # of each part of V
            floats_at(of_dk.leaving[1], parts, *shapes[1]).copy_(grads.n_initial / parts)

    def run_gradients(self, x: SimpleNamespace) -> None:
        """dq, dk and dv in one walk."""
        _, heads, _, dim_qk, dim_v = x.sizes
        scan, count = self._scan_of(x), x.cut[2]
        states, units, norms, slots = left_at(x)
        c, n = (states.new_zeros(count, heads, *y, dtype=torch.float32) for y in ((dim_qk, dim_v), (dim_qk,)))
        for (row, *_), own, number in slots:
            first = own.start
            assert bool((states[row, :, own] == states[row, :, first : first + 1]).all())
            if own.stop > first:
                factor = 2 ** units[row, :, first, None]
                c[number] = factor[..., None] * states[row, :, first].mT.float()
                if norms is not None:
                    n[number] = factor * norms[row, :, first]
        borders = (x.cut[3] - x.cut[2]) * heads
        if borders:
            assert x.cut[4] % STATE_CHUNKS == 0, "a segment begins with a state of the forward's"
            *made_of, entering = self._made_of[x.boundaries[0]]
            assert made_of[0] == GRADIENTS["dk"] and entering == x.entering
            assert made_of[1:3] == [x.dh, x.q] and made_of[4:] == gates_of(scan)
            sizes = borders * dim_qk * dim_v * FLOAT, borders * dim_qk * FLOAT, borders * DOUBLE
            for place, size in zip(x.boundaries, sizes, strict=True):
                if place:
                    self.expect("states at boundaries", place, size)
        shapes = (count, heads, dim_qk, dim_v), (count, heads, dim_qk)
        dc, dn = (floats_at(at, *shape) for at, shape in zip(x.entering, shapes, strict=True))
        q, k, v = read(x, x.q, x.k, x.v, x.group)
        dh = operand_at(x.dh, v.dtype, v.shape)
        i, f = gate_of(scan.i, scan), gate_at(scan.f, scan.sizes)
        x.e_stride = 0
        inputs = Inputs(q, k, v, i, f, c, n if norms is not None else None, first_m(scan))
        grads = self._gradients(scan, inputs, dh, dc, dn, x, parts=1)
        for place, grad in ((x.dq, grads.q), (x.dk, grads.k), (x.dv, grads.v)):
            operand_at(place, v.dtype, grad.shape).copy_(grad)
        for at, shape, grad in zip(x.leaving, shapes, (grads.c_initial, grads.n_initial), strict=True):
            if at:
                floats_at(at, *shape).copy_(grad)
        if x.sums[0]:
            for what, place, size in self._sums_of_one_walk(x.sums, x.sizes[:3], x.cut):
                self.leave(what, place, size)

    def _sums_of_one_walk(self, sums: Any, sizes: Any, cut: Any) -> list[tuple[str, int, int]]:
        tokens, (chunks, _) = math.prod(sizes) * FLOAT, slots_of(cut, sizes[2], CHUNK)
        flows = FLOAT * sizes[0] * sizes[1] * chunks * FLOW_PARTS
        names = "sums of dq", "sums of dk", "flows"
        return [*zip(names, sums, (tokens, tokens, flows), strict=True)]

    def _gradients(
        self,
        scan: SimpleNamespace,
        inputs: Inputs,
        dh: Tensor,
        dc: Tensor | None,
        dn: Tensor | None,
        x: SimpleNamespace,
        parts: int,
    ) -> Any:
        """By the reference. The rows of the forward and e are compared with what launches were given."""
        x.gate_kind, x.scale, *_, x.eps = scan.gate_kind, scan.scale, *scan.rows
        x.normalize = x.e != 0
        offsets = offsets_at(x.cut)
        if inputs.i is None:
            assert x.gate_kind == GATE_KINDS["decay"]
            tensors = (y.transpose(1, 2) for y in (inputs.q, inputs.k, inputs.v, inputs.f, dh))
            found = reference.simple_gla_backward(
                *tensors, dc, scale=scan.scale, initial_state=inputs.c, cu_seqlens=offsets
            )
            dq, dk, dv, dg = (y.transpose(1, 2) for y in (found.dq, found.dk, found.dv, found.dg))
            self._found, self._ends = (None, dg), []
            return SimpleNamespace(q=dq, k=dk, v=dv, c_initial=found.dh0, n_initial=None)
        h, c, n, _, *rows = forward_of(inputs, x)
        for at, row in zip((*scan.rows[:2], scan.chunk_m), rows, strict=True):
            if at and row.numel():
                torch.testing.assert_close(floats_at(at, *row.shape), row)
        if x.normalize:
            given = [floats_at(x.e + FLOAT * x.e_stride * part, *scan.sizes) for part in range(parts)]
            wanted = (dh.float() * h.float()).sum(-1)
            torch.testing.assert_close(torch.stack(given).sum(0), wanted, rtol=1e-2, atol=0.5)
        of_gates = {"sigmoid_gate": x.gate_kind == GATE_KINDS["sigmoid"], "normalize": x.normalize}
        grads = reference.mlstm_backward(*inputs, dh, dc, dn, x.eps, **of_gates, cu_seqlens=offsets)
        assert of_gates["sigmoid_gate"] == (scan.chunk_m == 0)
        self._found = grads.i, grads.f
        self._ends = [(inputs.c, grads.c_initial, inputs.n, grads.n_initial), (c, dc, n, dn)]
        return grads

    def run_gate_gradients(self, x: SimpleNamespace) -> None:
        for what, place, size in self._sums_of_one_walk(x.sums, x.sizes, x.cut):
            self.expect(what, place, size)
        self._write_gates(x)

    def run_mlstm_bwd_gates(self, x: SimpleNamespace) -> None:
        of_dq, of_dk = self._walks[GRADIENTS["dq"]], self._walks[GRADIENTS["dk"]]
        for walk, name, given in ((of_dq, "dq", x.q_dq), (of_dk, "dk", x.k_dk)):
            assert given[:2] == walk.sums
            for what, place, size in self._sums_of(walk, name):
                self.expect(what, place, size)
        flows, before, parts, every = x.anchors
        assert flows == before == of_dk.anchors[1] and every == ANCHOR_CHUNKS
        assert parts == self.flow_parts(*x.sizes[:2], *of_dk.sizes[3:], of_dk.tile, of_dk.slice)
        self.leave(
            "workspace of gates", x.workspace, self.mlstm_bwd_gates_workspace_bytes(x.sizes[1], x.cut[2])
        )
        for given, known in zip((x.initial, x.last), self._ends, strict=False):
            for at, y in zip(given, known, strict=True):
                if at:
                    torch.testing.assert_close(floats_at(at, *y.shape), y, rtol=1e-2, atol=1e-2)
        self._write_gates(x)

    def _write_gates(self, x: SimpleNamespace) -> None:
        di, df = self._found
        gate_at(x.df, x.sizes[:3]).copy_(df)
        if di is not None:
            gate_at(x.di, x.sizes[:3]).copy_(di)


def read(x: SimpleNamespace, q: Any, k: Any, v: Any, group: int) -> tuple[Tensor, ...]:
    """q, k and v of a launch; q and k for every head of v."""
    batch, heads, seq, dim_qk, dim_v = x.sizes
    dtype = torch.float16 if x.half else torch.bfloat16
    shape = batch, heads // group, seq, dim_qk
    return (
        *(operand_at(y, dtype, shape).repeat_interleave(group, 1) for y in (q, k)),
        operand_at(v, dtype, (batch, heads, seq, dim_v)),
    )


def gate_of(gate: tuple[int, ...], x: SimpleNamespace) -> Tensor | None:
    """None with a scalar decay."""
    return gate_at(gate, x.sizes[:3]) if gate[0] else None


def gates_of(scan: SimpleNamespace) -> list[Any]:
    return [scan.i, scan.f, scan.chunk_m, scan.scale]


def first_m(scan: SimpleNamespace) -> Tensor | None:
    """The stabilisers that enter sequences [N, NH, 1]."""
    if scan.chunk_m == 0:
        return None
    batch, heads, seq = scan.sizes
    slots, own = slots_of(scan.cut, seq, CHUNK)
    log2 = tensor_at(scan.chunk_m, torch.float32, (batch, heads, slots, 2)).double().sum(-1)
    found = torch.zeros(len(own), heads, 1)
    for number, ((row, start, end), of_sequence) in enumerate(
        zip(bounds_of(scan.cut, seq), own, strict=True)
    ):
        if end > start:
            found[number, :, 0] = log2[row, :, of_sequence.start] * math.log(2)
    return found


def left_at(x: SimpleNamespace) -> tuple[Tensor, Tensor, Tensor | None, list[Any]]:
    """Transposed states [B, NH, slots, V, K], their units and n [B, NH, slots, K] that a forward leaves; of
    every sequence its bounds, slots and number."""
    batch, heads, seq, dim_qk, dim_v = x.sizes
    slots, own = slots_of(x.cut, seq, CHUNK * STATE_CHUNKS)
    states, units, norms = x.left
    size, dtype = (batch, heads, slots), torch.float16 if x.half else torch.bfloat16
    bounds = bounds_of(x.cut, seq)
    return (
        tensor_at(states, dtype, (*size, dim_v, dim_qk)),
        tensor_at(units, torch.float32, size),
        floats_at(norms, *size, dim_qk),
        [*zip(bounds, own, range(len(bounds)), strict=True)],
    )


def forward_of(x: Inputs, of: SimpleNamespace) -> list[Any]:
    """h, c, n, m, row_n, row_m and chunk_m by the reference."""
    offsets = offsets_at(of.cut)
    if x.i is None:
        tensors = (y.transpose(1, 2) for y in (x.q, x.k, x.v, x.f))
        o, c = reference.simple_gla_chunkwise(
            *tensors, None, of.scale, x.c, output_final_state=True, cu_seqlens=offsets
        )
        return [o.transpose(1, 2), c, *[None] * 5]
    assert of.scale == x.q.shape[-1] ** -0.5
    options = of.gate_kind == GATE_KINDS["sigmoid"], of.normalize, of.eps, True, True
    return [*torch.ops.tfla_tk.mlstm_fwd(*x, offsets, *options)]


class Decoding(Kernels):
    """Stands for the launcher of decoding: mLSTM's launches, not prepared, run on the CPU.

    Attributes:
        run: launches, by the kernels' sources.
    """

    ARGUMENTS: ClassVar = {
        "mlstm": (
            *("q", "k", "v", "dtype", "i", "f", "before", "after", "h", "tiling", "sizes", "scale", "eps"),
            *("sigmoid_gate", "normalize", "in_place", "device", "stream"),
        )
    }

    def __init__(self, run: Callable[..., None]) -> None:
        super().__init__()
        self.run = run

    def __getattr__(self, name: str) -> Any:
        prepare = super().__getattr__(name)

        def launch(*arguments: Any) -> None:
            self.launches.append(prepare(*arguments))
            if self.computes:
                self.run(*arguments)
            self.check_guards()

        return launch
