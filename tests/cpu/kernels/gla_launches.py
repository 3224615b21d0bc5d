"""GLA's kernels by the reference, on what lies at the addresses that they are given."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tfla_tk import reference
from tfla_tk.core.layout import ADDRESS_BITS, DTYPES

from .addresses import tensor_at
from .stand_in import Kernels

OF_CODE = {code: dtype for dtype, code in DTYPES.items()}
# of the modules' functions, as channel_gate/bindings name them
ARGUMENTS = {
    "forward": ("shape", "q", "k", "v", "o", "g", "g_dtype", "initial", "last", "scale", "tile"),
    "mirror": ("shape", "q", "k", "do", "dv", "g", "g_dtype", "d_last", "d_initial", "scale", "tile"),
}
ARGUMENTS["forward"] += ("walkers", "borders", "slice_of_k")
ARGUMENTS["mirror"] += ("walkers", "borders", "slice_of_k")
ARGUMENTS["left"] = ARGUMENTS["right"] = (
    *("shape", "q", "k", "v", "do", "g", "g_dtype", "result", "gates", "entering", "scale", "tile"),
    *("walkers", "borders", "slice"),
)
ARGUMENTS["segments"] = (
    *("shape", "keys", "values", "g", "g_dtype", "entering", "borders", "decays", "scale", "backward"),
)
ANCHOR_BYTES = 48  # anything


class Kernel(Kernels):
    """Computes the reference of what lies at the addresses."""

    ARGUMENTS = ARGUMENTS

    def __init__(self) -> None:
        super().__init__()
        self.of_anchors: list[tuple[int, ...]] = []  # shapes that anchor_bytes was asked for
        self.of_sums: list[tuple[int, ...]] = []  # likewise sums_bytes
        self.of_parts: list[tuple[int, ...]] = []  # likewise part_bytes

    def anchor_bytes(self, shape: tuple[int, ...], tile: int) -> int:
        self.of_anchors.append(shape)
        return ANCHOR_BYTES

    def sums_bytes(self, shape: tuple[int, ...]) -> int:
        self.of_sums.append(shape)
        batch, heads, seq, dim_k = shape[5:9]
        return 2 * 4 * batch * heads * seq * dim_k

    def part_bytes(self, shape: tuple[int, ...], walkers: int) -> int:
        assert walkers == (1 if shape[9] <= 64 else 2)
        self.of_parts.append(shape)
        batch, heads, seq, _, dim_v = shape[5:10]
        return 4 * batch * heads * seq * dim_v

    def compute(self, launch: SimpleNamespace, starts: list[int]) -> None:
        compute(launch, starts)


class Call:
    """What a launch finds at its addresses."""

    def __init__(self, x: SimpleNamespace, starts: list[int]) -> None:
        self.x, self.starts = x, starts
        self.offsets, self.wide, self.sequences, self.segments, chunks, *sizes, half, _ = x.shape
        self.batch, self.heads, self.seq, self.dim_k, self.dim_v = sizes
        self.dtype = torch.float16 if half else torch.bfloat16
        self.slice: tuple[int, int, bool, bool] | None = getattr(x, "slice", None)
        self.is_first, self.is_last = self.slice[2:] if self.slice else (True, True)
        # of K: channels of others, the part's address, whether it is the first one, the last one
        of_k: tuple[int, int, bool, bool] | None = getattr(x, "slice_of_k", None)
        self.other_dim_k, self.part, self.begins, self.ends = of_k or (0, 0, True, True)
        self.segment = 64 * chunks
        assert self.segments > self.sequences or self.segment >= self.seq

    def address(self, prepared: int) -> int:
        start = self.starts[(prepared >> ADDRESS_BITS) - 1]
        assert start
        return start + (prepared & ((1 << ADDRESS_BITS) - 1))

    def tensor(self, operand: tuple[int, ...], dim: int, dtype: torch.dtype | None = None) -> Tensor:
        at, of_batch, of_head, of_row = operand
        # in a batch of one, which TMA wants aligned strides of all the same
        strides = (of_batch if self.batch > 1 else 0, of_row, of_head, 1)
        shape = (self.batch, self.seq, self.heads, dim)
        return tensor_at(self.address(at), dtype or self.dtype, shape, *strides)

    def keys(self, operand: tuple[int, ...]) -> Tensor:
        return self.tensor(operand, self.dim_k)

    def values(self, operand: tuple[int, ...]) -> Tensor:
        return self.tensor(operand, self.dim_v)

    def gates(self) -> Tensor:
        return self.tensor(self.x.g, self.dim_k, OF_CODE[self.x.g_dtype])

    def numbers(self, at: int, *shape: int) -> Tensor | None:
        """Of every sequence and head."""
        shape = (self.sequences, self.heads, *shape)
        return tensor_at(self.address(at), torch.float32, shape) if at else None

    def state(self, at: int) -> Tensor | None:
        """Of a launch's channels and columns, between those of others."""
        return self.states(at, self.sequences) if at else None

    def states(self, at: int, count: int) -> Tensor:
        row = self.dim_v + (self.slice[0] if self.slice else 0)
        of_head = (self.dim_k + self.other_dim_k) * row
        shape = (count, self.heads, self.dim_k, self.dim_v)
        strides = (self.heads * of_head, of_head, row, 1)
        return tensor_at(self.address(at), torch.float32, shape, *strides)

    def sum_up(self, *parts: Tensor) -> list[Tensor]:
        """The sums over V up to and with this slice's, which are left for the next one."""
        if self.slice is None:
            return [part.float() for part in parts]
        shape = (2, self.batch, self.seq, self.heads, self.dim_k)
        sums = tensor_at(self.address(self.slice[1]), torch.float32, shape)
        found = [
            part.float() if self.is_first else old + part for old, part in zip(sums, parts, strict=False)
        ]
        for old, new in zip(sums, found, strict=False):
            old.copy_(torch.nan if self.is_last else new)  # nothing else may be needed of them
        return found

    def write_sum_over_k(self, to: tuple[int, ...], part: Tensor) -> None:
        """Of all slices up to and with this one, in fp32; only the last one writes the result."""
        if self.part:
            shape = (self.batch, self.seq, self.heads, self.dim_v)
            left = tensor_at(self.address(self.part), torch.float32, shape)
            part = part if self.begins else left + part
            left.copy_(torch.nan if self.ends else part)  # nothing else may be needed of it
        if self.ends:
            self.values(to).copy_(part)

    def borders(self, at: int) -> Tensor | None:
        """Of a launch's channels and columns; None where there are none."""
        count = self.segments - self.sequences
        assert (at != 0) == (count > 0)
        return self.states(at, count) if count else None

    def in_sequences(self) -> Iterator[tuple[int, int, slice, list[tuple[int, int]]]]:
        """Of every sequence its number, batch entry and rows, and of its borders slots and tokens before."""
        offsets = [0, self.seq] * self.sequences
        if self.offsets:
            offsets = self.options()["cu_seqlens"].tolist()
        for n in range(self.sequences):
            begin, end = (0, self.seq) if not self.offsets else offsets[n : n + 2]
            count = max(-(-(end - begin) // self.segment), 1) - 1
            slot = begin // self.segment if self.offsets else n * count
            rows = slice(begin, end)
            found = [(slot + i, (i + 1) * self.segment) for i in range(count)]
            yield n, 0 if self.offsets else n, rows, found

    def options(self) -> dict[str, Any]:
        dtype, at = torch.int64 if self.wide else torch.int32, self.offsets
        cu_seqlens = tensor_at(self.address(at), dtype, (self.sequences + 1,)) if at else None
        return {"scale": self.x.scale, "cu_seqlens": cu_seqlens}


def write(to: Tensor | None, x: Tensor | None) -> None:
    if to is not None:
        assert x is not None
        to.copy_(x)


def states_at_borders(
    of: Call, keys: Any, values: Any, entering_at: int, *, backward: bool
) -> dict[int, Tensor]:
    """By their slots; backward in time their gradients.

    Args:
        keys, values: k and v, or q and do, as a launch has them.
    """
    tokens = (of.keys(keys), of.values(values), of.gates())
    entering, found = of.state(entering_at), {}
    for n, entry, rows, borders in of.in_sequences():
        first = None if entering is None else entering[n : n + 1]
        for slot, before in borders:
            of_part = slice(before, None) if backward else slice(before)
            k, v, g = (t[entry : entry + 1, rows][:, of_part] for t in tokens)
            if backward:
                zero = torch.zeros(1, of.heads, of.dim_k, of.dim_v)
                scale = of.x.scale
                found[slot] = reference.gla_backward(
                    k, k, v, g, v, first, scale=scale, initial_state=zero
                ).dh0[0]
            else:
                found[slot] = reference.gla_chunkwise(
                    k, k, v, g, scale=1.0, initial_state=first, output_final_state=True
                )[1][0]
    return found


def write_borders(of: Call) -> None:
    x = of.x
    to = of.borders(x.borders)
    assert to is not None
    assert x.decays == x.borders + to.numel() * 4 and of.address(x.decays)
    states = states_at_borders(of, x.keys, x.values, x.entering, backward=x.backward)
    for slot, state in states.items():
        to[slot] = state


def check_borders(of: Call, at: int, *operands: Any, backward: bool) -> None:
    """That a walk finds there what it needs."""
    found = of.borders(at)
    if found is not None:
        for slot, state in states_at_borders(of, *operands, backward=backward).items():
            torch.testing.assert_close(found[slot], state)


def compute(x: SimpleNamespace, starts: list[int]) -> None:
    """What a launch leaves. The walks over the states hand on what tells which inputs they were given."""
    of = Call(x, starts)
    if x.name == "segments":
        write_borders(of)
        return
    assert x.tile >= (of.dim_k if x.name in ("forward", "mirror") else of.dim_v)
    options = of.options()
    if x.name == "forward":
        q, k, v = (t.float() if of.part else t for t in (of.keys(x.q), of.keys(x.k), of.values(x.v)))
        check_borders(of, x.borders, x.k, x.v, x.initial, backward=False)
        options |= {"initial_state": of.state(x.initial), "output_final_state": True}
        o, last = reference.gla_chunkwise(q, k, v, of.gates(), **options)
        of.write_sum_over_k(x.o, o)
        write(of.state(x.last), last)
        return
    q, k, do, g = of.keys(x.q), of.keys(x.k), of.values(x.do), of.gates()
    initial = torch.zeros(of.sequences, of.heads, of.dim_k, of.dim_v)
    if x.name == "mirror":  # of these gradients alone, neither depends on v or the first state
        d_last = of.state(x.d_last)
        check_borders(of, x.borders, x.q, x.do, x.d_last, backward=True)
        if of.part:  # sums are rounded once they are complete
            q, k, do = q.float(), k.float(), do.float()
        found = reference.gla_backward(q, k, do, g, do, d_last, initial_state=initial, **options)
        of.write_sum_over_k(x.dv, found.dv)
        write(of.state(x.d_initial), found.dh0)
        return
    v = of.values(x.v)
    if x.name == "left":
        check_borders(of, x.borders[0], x.k, x.v, x.entering, backward=False)
    else:
        check_borders(of, x.borders[1], x.q, x.do, x.entering, backward=True)
        assert (x.borders[0] != 0) == (x.borders[1] != 0)
    if x.slice is not None:  # sums are rounded once they are complete
        q, k, v, do, g = (t.float() for t in (q, k, v, do, g))
    inflow, d_last = None, of.state(x.entering) if x.name == "right" else None
    if x.gates is not None:
        inflow_at, dg_at, (d_last_at, flows_at, anchors_at) = x.gates
        inflow = of.tensor(inflow_at, of.dim_k, torch.float32)
        dg = of.tensor(dg_at, of.dim_k, OF_CODE[x.g_dtype])
        flows, d_last = of.numbers(flows_at, of.dim_k), of.state(d_last_at)
        anchors = tensor_at(of.address(anchors_at), torch.uint8, (ANCHOR_BYTES,))
    if x.name == "left":
        entering = of.state(x.entering)
        found = reference.gla_backward(q, k, v, g, do, d_last, initial_state=entering, **options)
        dq, dg = of.sum_up(found.dq, found.dg)
        if x.gates is not None:
            anchors.fill_(7)
            if flows is not None:
                flows.copy_(3.0 if of.is_first else flows + 3.0)
        if of.is_last:
            write(of.keys(x.result), dq)
            if x.gates is not None:
                inflow.copy_(dg)
        return
    found = reference.gla_backward(q, k, v, g, do, d_last, **options)
    (dk,) = of.sum_up(found.dk)
    if x.gates is not None:  # of the left walk's, in place or not
        assert anchors.eq(7).all()
        of_slices = 1 if of.slice is None else -(-(of.dim_v + of.slice[0]) // 256)
        assert flows is None or flows.eq(3.0 * of_slices).all()
    if of.is_last:
        write(of.keys(x.result), dk)
        if x.gates is not None:
            dg.copy_(inflow.clone())
