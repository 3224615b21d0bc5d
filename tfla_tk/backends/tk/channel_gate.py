"""Gated linear attention on the ThunderKittens kernels: what they support, and their launches on the current
stream. The protocol is that of `ops.linear`.

The forward is one kernel, a walk over the chunks of every segment, head and slice of V, launched once for
every 128 channels of K: all but the last leave their part of o for the next one.

The backward is three walks. The forward's mirror is backward in time, for dv and the initial state's
gradient; these are sums over K, as the forward's are. Two walks are over the states of every segment, head
and slice of K: forward in time for dq, and backward in time for dk and dg, which needs q dq of the other one.
They make sums over V and are launched once for every 256 columns of it: the last launch makes the results,
the others leave their sums.

Where sequences are cut into segments (`segments`), a launch before the walks gives the states at the borders
between segments, and one before the backward's walks the gradients of these; so all walks begin at once. One
allocation has, in fp32, the states [slots, heads, K, V], then the decays [slots, heads, K] by which they are
carried from border to border. Slots are the segments less the sequences (sequence/segments.cuh). A training
call keeps it for its backward, which else makes it again; beside it the backward needs the forward's inputs
alone.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tfla_tk import build
from tfla_tk.backends.tk import device, prepared, refusals, segments
from tfla_tk.backends.tk.prepared import (
    ADDRESS_ALIGNMENT,
    FLOAT,
    Gradients,
    Launch,
    Operand,
    Sizes,
    current_stream,
    multiprocessors,
    operand_at,
    starts,
)
from tfla_tk.build import instances
from tfla_tk.build.instances import Instance
from tfla_tk.calls.linear import GLACore, LinearCall
from tfla_tk.core.layout import DTYPES, Cut, Kept, MaybeTensor, dense_like
from tfla_tk.core.memo import Memo
from tfla_tk.core.support import Support

_OPERANDS = ("q", "k", "v", "g")  # of a `GLACore`
_WALKER_COLUMNS = 64  # of V that a walker owns; of K in the walks over the states
_TWO_WALKERS_DIM_V = 128  # at most, in the walks over the states
_SLICE_V = 128  # of V, of a CTA of the forward, at most
# By the tile of K, in chunks of the forward's walk: 6,900 cycles with K = 128, 3,000 with 64. The other walks
# are a little slower. Estimates (docs/log/gla.md, "Segments").
_COSTS = {
    64: segments.Costs(states_chunk=0.5, prologue=3.0, launches=4.5),
    128: segments.Costs(states_chunk=0.45, prologue=1.5, launches=2.0),
}


class Shape(Sizes):
    """Sizes of a call, as the kernels take them with its cut."""

    @classmethod
    def of(cls, core: GLACore, *, trains: bool = False) -> "Shape":
        """With the cut of its walks."""
        sizes = super().of(core)
        cut = segments.choose_cut(
            sizes.sequences,
            sizes.seq,
            ctas=sizes.heads * -(-sizes.dim_v // _SLICE_V),
            multiprocessors=multiprocessors(sizes.device),
            costs=_COSTS[64 if sizes.dim_k <= 64 else 128],
            packed=sizes.packed,
            batch_invariant=sizes.batch_invariant,
        )
        return sizes._replace(walks_cut=cut)

    @property
    def of_tensors(self) -> tuple[int, ...]:
        """Without the group: q and k have a head for each of v."""
        *sizes, _, half, device = super().of_tensors
        return *sizes, half, device

    @property
    def cut(self) -> Cut:
        assert self.walks_cut is not None
        return self.walks_cut

    @property
    def borders(self) -> int:
        """Slots for states at borders; 0 where every sequence is one segment."""
        return self.cut.segments - self.sequences

    @property
    def borders_bytes(self) -> int:
        """Of the allocation of the states at the borders; 0 where there are none."""
        return self.borders * self.heads * self.dim_k * (self.dim_v + 1) * FLOAT

    @property
    def walkers(self) -> int:
        """Per CTA: two share the work of the gate warps, which bound the time."""
        return 1 if self.dim_v <= _WALKER_COLUMNS else 2

    @property
    def walkers_of_states(self) -> int:
        """Per CTA of the walks over the states, of 64 columns of K each: two share the loads of v and do, one
        alone is done earlier where there are multiprocessors for all. Which it is would depend on the batch,
        so with batch_invariant there are always two. Ignored with V > 128, where two walkers split V."""
        columns = -(-self.dim_k // _WALKER_COLUMNS)
        if columns == 1 or self.dim_v > _TWO_WALKERS_DIM_V:
            return 1
        if self.batch_invariant:
            return 2
        return 1 if self.cut.segments * self.heads * columns <= multiprocessors(self.device) else 2

    @property
    def tile_k(self) -> int:
        """Channels of the kernels of the forward and of its mirror, of one launch."""
        return instances.tile_of(_slices_of_k(self.dim_k)[0].dim, instances.GLA_TILES)

    @property
    def tile_v(self) -> int:
        """Columns of V of the walks over the states, of one launch."""
        return instances.tile_of(_slices_of_v(self.dim_v)[0].dim, instances.GLA_STATES_TILES)

    def walk(self, which: str) -> Instance:
        """The kernel of the "forward", or of its "mirror": CTAs take turns where slices of V are even in
        number."""
        slices = -(-self.dim_v // _SLICE_V)
        makers = 2 if self.walkers == 2 and slices % 2 == 0 else 1
        return instances.gla_walk(which, self.tile_k, self.half, self.walkers, makers)

    def states_walk(self, walk: str) -> Instance:
        walkers = 2 if self.tile_v == 256 else self.walkers_of_states
        return instances.kernel_of(f"gla_{walk}", self.half, tile=self.tile_v, walkers=walkers)


class Slice(NamedTuple):
    """Columns of K or of V that a launch takes, of those of a call. first: the first of them. dim: how
    many they are. others: columns of the call's other launches."""

    first: int
    dim: int
    others: int

    def of(self, x: Operand, dtype: torch.dtype) -> Operand:
        return x[0] + self.first * dtype.itemsize, *x[1:]

    def of_states(self, address: int, row: int = 1) -> int:
        """Where they begin in states [N, H, K, V] in fp32, whose rows have `row` numbers; 0 for none."""
        return address and address + self.first * row * FLOAT

    def with_part(self, part_at: int) -> tuple[int, int, bool, bool]:
        """As a launch takes it, with the address of what it leaves of its sums over K for the next one."""
        end = self.first + self.dim
        return self.others, part_at, self.first == 0, end == self.dim + self.others


def _slices(dim: int, most: int) -> list[Slice]:
    """The columns of a call, for launches of `most` columns at most."""
    return [Slice(n, min(dim - n, most), dim - min(dim - n, most)) for n in range(0, dim, most)]


def _slices_of_k(dim_k: int) -> list[Slice]:
    """Of the forward and of its mirror, which are sums over K."""
    return _slices(dim_k, max(instances.GLA_TILES))


def _slices_of_v(dim_v: int) -> list[Slice]:
    """Of the walks over the states, which make sums over V."""
    return _slices(dim_v, max(instances.GLA_STATES_TILES))


def _launch_segments(
    shape: Shape,
    offsets_at: int,
    operands: tuple[Operand, Operand, Operand, int],
    entering_at: int,
    borders_at: int,
    scale: float,
    *,
    backward: bool,
) -> Launch:
    """The launch that gives the states at the borders, from k and v, or backward in time their gradients,
    from q and do; then g and the code of its dtype. entering_at: the first states, or the last ones'
    gradients; 0 for none."""
    tile = 64 if shape.dim_v <= 64 else 128
    of_segments = instances.kernel_of("gla_segments", shape.half, tile=tile, backward=backward)
    kernel = build.load(instances.GLA, of_segments)
    states = shape.borders * shape.heads * shape.dim_k * shape.dim_v
    decays_at = borders_at + states * FLOAT
    return kernel.segments(
        shape.with_offsets(offsets_at), *operands, entering_at, borders_at, decays_at, scale, backward
    )


def supports_gla(call: LinearCall, variant: str | None = None) -> Support:
    of_heads = None
    if call.value_heads != call.heads:
        reason = f"v has {call.value_heads} heads, q and k {call.heads}"
        of_heads = Support(False, reason, "repeat q, k and g")
    most = instances.MAX_DIM_QK, instances.MAX_DIM_V
    refusal = refusals.of_call(call, variant, most, of_heads)
    return refusal or device.supports(call.device, *_kernels_for(call))


def load(call: LinearCall) -> Support:
    return device.load(*_kernels_for(call))


def _kernels_for(call: LinearCall) -> tuple[Any, ...]:
    """What tells the kernels of a call, for `device.load`: plain numbers, also where torch.compile has the
    sizes as symbols."""
    dims = refusals.power_of_two(call.dim_qk), refusals.power_of_two(call.dim_v)
    return _kernels_of, *dims, call.dtype == torch.float16, call.requires_grad


def _kernels_of(dim_k: int, dim_v: int, half: bool, gradients: bool) -> device.Kernels:
    """The kernels that most such calls take; what others take is loaded when they are launched."""
    sizes = 8, 128, 8, 16, 8192, dim_k, dim_v, 1  # of any large batch, as `Sizes` has them
    shape = Shape(*sizes, half, 0, False, batch_invariant=True, walks_cut=Cut(8, 8192))
    found = [shape.walk("forward")]
    if gradients:
        found += [shape.walk("mirror"), shape.states_walk("left"), shape.states_walk("right")]
    return instances.GLA, tuple(found)


class Forward:
    """The forward of calls whose tensors lie alike, as `readable` leaves them but for odd addresses: o [B, T,
    H, V], the final state [N, H, K, V] or None, and with `keep` the states at the borders and the cut, None
    where there are none."""

    def __init__(self, core: GLACore, *, output_final_state: bool, keep: bool) -> None:
        shape = Shape.of(core)
        self._options = core[6:]
        self._device, self._cut = shape.device, shape.cut
        self._last_shape = shape.state_shape
        # allocated in v's dtype: torch needs no dtype then, which halves the time of an allocation
        self._borders_size = shape.borders_bytes // core.v.itemsize
        self._output_final_state, self._keep = output_final_state, keep
        of_k = _slices_of_k(shape.dim_k)
        kernel = build.load(instances.GLA, shape.walk("forward"))
        addresses = prepared.Addresses()
        q, k, v, g = (operand_at(addresses.next(), x) for x in (core.q, core.k, core.v, core.g))
        initial_at = addresses.next(given=core.initial_state is not None)
        offsets_at = addresses.next(given=core.cu_seqlens is not None)
        o_at, last_at = addresses.next(), addresses.next(given=output_final_state)
        borders_at = addresses.next(given=self._borders_size > 0)
        part_at = addresses.next(given=len(of_k) > 1)
        part_bytes = kernel.part_bytes(shape.with_offsets(offsets_at), shape.walkers) if len(of_k) > 1 else 0
        self._part_size = part_bytes // core.v.itemsize
        o = operand_at(o_at, dense_like(core.v, "meta"))
        of_gates = DTYPES[core.g.dtype]

        def launch(of: Slice) -> Any:
            return kernel.forward(
                shape._replace(dim_k=of.dim).with_offsets(offsets_at),
                of.of(q, core.q.dtype), of.of(k, core.k.dtype), v, o, of.of(g, core.g.dtype), of_gates,
                of.of_states(initial_at, shape.dim_v), of.of_states(last_at, shape.dim_v),
                core.scale, shape.tile_k, shape.walkers, of.of_states(borders_at, shape.dim_v),
                of.with_part(part_at) if len(of_k) > 1 else None,
            )  # fmt: skip

        launches = [launch(of) for of in of_k]
        if borders_at:
            operands = k, v, g, of_gates
            of_states = initial_at, borders_at, 1.0
            launches = [_launch_segments(shape, offsets_at, operands, *of_states, backward=False), *launches]
        self._run = build.launches(launches)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial_state: MaybeTensor, cu_seqlens: MaybeTensor
    ) -> tuple[Tensor, MaybeTensor, Kept | None]:
        at = starts(q, k, v, g, initial_state, cu_seqlens)
        if (at[0] | at[1] | at[2] | at[3] | at[4]) % ADDRESS_ALIGNMENT:
            core = GLACore(q, k, v, g, initial_state, cu_seqlens, *self._options)
            return forward(core, output_final_state=self._output_final_state, keep=self._keep)
        o = dense_like(v)
        last = v.new_empty(self._last_shape, dtype=torch.float32) if self._output_final_state else None
        borders = v.new_empty(self._borders_size) if self._borders_size else None
        part = v.new_empty(self._part_size) if self._part_size else None
        at += starts(o, last, borders, part)
        self._run(at, current_stream(self._device))
        kept = Kept((borders,), self._cut) if self._keep and borders is not None else None
        return o, last, kept


def backward(
    core: GLACore, kept: Kept | None, do: Tensor, dht: MaybeTensor, *, needs_gates: bool
) -> Gradients:
    """dq, dk, dv, dg, dh0."""
    return _run(needs_gates, core, core, kept, do, dht)


def _run(
    needs_dg: bool, given: GLACore, core: GLACore, kept: Kept | None, do: Tensor, dht: MaybeTensor
) -> Gradients:
    """`backward`, where the tensors of core may be copies of those given, which gradients are like."""
    likes = None if given is core else prepared.strides(*given[:4])
    cut = None if kept is None else kept.layout
    key = needs_dg, likes, prepared.strides(do, dht), cut, prepared.layout_of(core)
    run = _backwards.get(key)
    if run is None:
        read, dout, last = prepared.readable(core, _OPERANDS), prepared.as_operand(do), prepared.as_state(dht)
        if not prepared.are_same((*core, do, dht), (*read, dout, last)):
            # not kept: a key does not tell addresses, and tensors like these may need no copy
            return _run(needs_dg, given, read, kept, dout, last)
        run = Backward(given, core, do, dht, needs_dg=needs_dg, kept_cut=cut)
        _backwards.keep(key, run)
    return run(given, core, kept, do, dht)


class Backward:
    """The backward of calls whose tensors lie alike. given: q, k, v and g as the gradients are like them.
    core: as `readable` leaves it but for odd addresses; so are do and dht. kept_cut: the cut of the
    forward that has kept the states at the borders; None where they are made again."""

    def __init__(
        self,
        given: GLACore,
        core: GLACore,
        do: Tensor,
        dht: MaybeTensor,
        *,
        needs_dg: bool,
        kept_cut: Cut | None,
    ) -> None:
        shape = Shape.of(core)
        if kept_cut is not None:
            shape = shape._replace(walks_cut=kept_cut)
        self._device, self._needs_dg = shape.device, needs_dg
        of_k, of_v = _slices_of_k(shape.dim_k), _slices_of_v(shape.dim_v)
        has_sums = len(of_v) > 1
        walks = [shape.walk("mirror"), shape.states_walk("left"), shape.states_walk("right")]
        kernel = build.load(instances.GLA, *walks)
        addresses = prepared.Addresses()
        q, k, v, g = (operand_at(addresses.next(), x) for x in (core.q, core.k, core.v, core.g))
        initial_at = addresses.next(given=core.initial_state is not None)
        offsets_at = addresses.next(given=core.cu_seqlens is not None)
        dout = operand_at(addresses.next(), do)
        dht_at = addresses.next(given=dht is not None)
        self._results = prepared.Results(given[:4], addresses)
        dq, dk, dv, dg = self._results.operands
        dh0_at = addresses.next(given=core.initial_state is not None)
        kept_at, scratch = addresses.next(), prepared.Scratch(addresses.next())
        of, of_gates = shape.with_offsets(offsets_at), DTYPES[core.g.dtype]
        inflow, flows_at, anchors_at, anchor_bytes = dg, 0, 0, 0
        if needs_dg:
            if core.g.dtype != torch.float32:  # else it is where dg is
                inflow_at = scratch.take(core.g.numel() * FLOAT)
                inflow = operand_at(inflow_at, torch.empty(core.g.shape, device="meta"))
            if dht is not None:
                flows_at = scratch.take(shape.sequences * shape.heads * shape.dim_k * FLOAT)
            anchor_bytes = kernel.anchor_bytes(of, shape.tile_v)  # of a slice of V
            anchors_at = scratch.take(anchor_bytes * len(of_v))
        # the mirror is done when the walks over the states begin
        part_bytes = kernel.part_bytes(of, shape.walkers) if len(of_k) > 1 else 0
        sums_at = part_at = scratch.take(max(part_bytes, kernel.sums_bytes(of) if has_sums else 0))
        d_borders_at = scratch.take(shape.borders_bytes)
        borders_at = kept_at if kept_cut is not None else scratch.take(shape.borders_bytes)
        self._scratch_size = scratch.bytes // core.q.itemsize

        def mirror_of(k_of: Slice) -> Any:
            return kernel.mirror(
                shape._replace(dim_k=k_of.dim).with_offsets(offsets_at),
                k_of.of(q, core.q.dtype), k_of.of(k, core.k.dtype), dout, dv,
                k_of.of(g, core.g.dtype), of_gates,
                k_of.of_states(dht_at, shape.dim_v), k_of.of_states(dh0_at, shape.dim_v),
                core.scale, shape.tile_k, shape.walkers, k_of.of_states(d_borders_at, shape.dim_v),
                k_of.with_part(part_at) if len(of_k) > 1 else None,
            )  # fmt: skip

        def states_of(walk: Any, result: Operand, entering_at: int, number: int) -> Any:
            v_of = of_v[number]
            is_first, is_last = number == 0, number == len(of_v) - 1
            gates = None
            if needs_dg:
                at_anchors = anchors_at + number * anchor_bytes
                gates = inflow, dg, (v_of.of_states(dht_at), flows_at, at_anchors)
            return walk(
                shape._replace(dim_v=v_of.dim).with_offsets(offsets_at),
                q, k, v_of.of(v, core.v.dtype), v_of.of(dout, do.dtype), g, of_gates,
                result, gates, v_of.of_states(entering_at), core.scale, shape.tile_v, shape.walkers_of_states,
                (v_of.of_states(borders_at), v_of.of_states(d_borders_at)),
                (v_of.others, sums_at, is_first, is_last) if has_sums else None,
            )  # fmt: skip

        def borders_of(x: Operand, y: Operand, entering_at: int, at: int, scale: float, back: bool) -> Any:
            operands = x, y, g, of_gates
            return _launch_segments(shape, offsets_at, operands, entering_at, at, scale, backward=back)

        before = []
        if borders_at and kept_cut is None:
            before += [borders_of(k, v, initial_at, borders_at, 1.0, False)]
        if d_borders_at:
            before += [borders_of(q, dout, dht_at, d_borders_at, core.scale, True)]
        numbers = range(len(of_v))
        self._run = build.launches(
            [
                *before,
                *(mirror_of(k_of) for k_of in of_k),
                *(states_of(kernel.left, dq, initial_at, n) for n in numbers),
                *(states_of(kernel.right, dk, dht_at, n) for n in numbers),
            ]
        )

    def __call__(
        self, given: GLACore, core: GLACore, kept: Kept | None, do: Tensor, dht: MaybeTensor
    ) -> Gradients:
        at = starts(*core[:6], do, dht)
        if (at[0] | at[1] | at[2] | at[3] | at[4] | at[6] | at[7]) % ADDRESS_ALIGNMENT:
            return _run(
                self._needs_dg,
                given,
                prepared.readable(core, _OPERANDS),
                kept,
                prepared.as_operand(do),
                prepared.as_state(dht),
            )
        results, written = self._results.allocate(given[: 4 if self._needs_dg else 3])
        *of_operands, dg = written if self._needs_dg else (*written, None)
        initial = given.initial_state
        dh0 = None if initial is None else torch.empty_like(initial)
        # of q's dtype because that need not be said to torch, which is half of the time
        scratch = core.q.new_empty(self._scratch_size) if self._scratch_size else None
        dh0_written, borders = prepared.writable_state(dh0), None if kept is None else kept.tensors[0]
        at += starts(*of_operands, dg, dh0_written, borders, scratch)
        self._run(at, current_stream(self._device))
        prepared.Results.fill(results, written)
        dq, dk, dv, dg = results if self._needs_dg else (*results, None)
        return dq, dk, dv, dg, prepared.filled(dh0, dh0_written)


_forwards = prepared.Forwards(Forward, _OPERANDS)
forward, prepare = _forwards.run, _forwards.prepare
_backwards: Memo[Backward] = Memo()
