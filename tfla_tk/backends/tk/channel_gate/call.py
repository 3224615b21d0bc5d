"""A call of gated linear attention as its kernels take it: sizes, slices of columns, the launch that
gives the states at the borders between segments, and what they support.

One allocation has, in fp32, the states at the borders [slots, heads, K, V], then the decays [slots, heads, K]
by which they are carried from border to border. Slots are the segments less the sequences (segments.cuh).
"""

from typing import Any, NamedTuple

import torch

from tfla_tk import build
from tfla_tk.backends.tk import device, refusals, segments
from tfla_tk.backends.tk.prepared import FLOAT, Launch, Operand, Sizes, multiprocessors
from tfla_tk.build import instances
from tfla_tk.build.instances import Instance
from tfla_tk.calls.linear import GLACore, LinearCall
from tfla_tk.core.layout import Cut
from tfla_tk.core.support import Support

OPERANDS = ("q", "k", "v", "g")  # of a `GLACore`
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
        cut = segments.find(
            sizes.sequences,
            sizes.seq,
            sizes.heads * -(-sizes.dim_v // _SLICE_V),
            multiprocessors(sizes.device),
            _COSTS[64 if sizes.dim_k <= 64 else 128],
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
        alone is done earlier where there are multiprocessors for all. They are other instances, so an option
        fixes the number. Ignored with V > 128, where two walkers split V."""
        columns = -(-self.dim_k // _WALKER_COLUMNS)
        if columns == 1 or self.dim_v > _TWO_WALKERS_DIM_V:
            return 1
        if self.batch_invariant:
            return 2
        return 1 if self.cut.segments * self.heads * columns <= multiprocessors(self.device) else 2

    @property
    def tile_k(self) -> int:
        """Channels of the kernels of the forward and of its mirror, of one launch."""
        return instances.tile_of(slices_of_k(self.dim_k)[0].dim, instances.GLA_TILES)

    @property
    def tile_v(self) -> int:
        """Columns of V of the walks over the states, of one launch."""
        return instances.tile_of(slices_of_v(self.dim_v)[0].dim, instances.GLA_STATES_TILES)

    def walk(self, direction: str) -> Instance:
        """The kernel of the forward, or of its mirror: CTAs take turns where slices of V are even in
        number."""
        slices = -(-self.dim_v // _SLICE_V)
        makers = 2 if self.walkers == 2 and slices % 2 == 0 else 1
        return instances.gla_walk(direction, self.tile_k, self.half, self.walkers, makers)

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


def slices(dim: int, most: int) -> list[Slice]:
    """The columns of a call, for launches of `most` columns at most."""
    return [Slice(n, min(dim - n, most), dim - min(dim - n, most)) for n in range(0, dim, most)]


def slices_of_k(dim_k: int) -> list[Slice]:
    """Of the forward and of its mirror, which are sums over K."""
    return slices(dim_k, max(instances.GLA_TILES))


def slices_of_v(dim_v: int) -> list[Slice]:
    """Of the walks over the states, which make sums over V."""
    return slices(dim_v, max(instances.GLA_STATES_TILES))


def launch_segments(
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
    return refusals.of_call(call, variant, most, of_heads) or device.supports(call.device, *kernels_for(call))


def kernels_for(call: LinearCall) -> tuple[Any, ...]:
    """What tells the kernels of a call, for `device.load`: plain numbers, also where torch.compile has the
    sizes as symbols."""
    dims = refusals.power_of_two(call.dim_qk), refusals.power_of_two(call.dim_v)
    return _kernels_of, *dims, call.dtype == torch.float16, call.requires_grad


def _kernels_of(dim_k: int, dim_v: int, half: bool, gradients: bool) -> device.Kernels:
    """The kernels that most such calls take; what others take is loaded when they are launched."""
    sizes = 8, 128, 8, 16, 8192, dim_k, dim_v, 1
    shape = Shape(*sizes, half, 0, False, batch_invariant=True, walks_cut=Cut(8, 8192))
    found = [shape.walk("forward")]
    if gradients:
        found += [shape.walk("backward"), shape.states_walk("left"), shape.states_walk("right")]
    return instances.GLA, tuple(found)
