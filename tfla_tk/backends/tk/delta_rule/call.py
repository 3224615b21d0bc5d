"""A call of the delta rule as its kernels take it: sizes, readable tensors, prepared addresses."""

from functools import cached_property
from typing import Any, NamedTuple

import torch

from tfla_tk.backends.tk import prepared, segments
from tfla_tk.backends.tk.delta_rule import split as costs
from tfla_tk.backends.tk.delta_rule.split import MOST_NARROW_K, WALKER_COLUMNS
from tfla_tk.backends.tk.prepared import Scratch, Sizes, memory_rate, multiprocessors
from tfla_tk.calls.delta_rule import DeltaRuleCore
from tfla_tk.core.layout import CHUNK, DELTA_SLICE_COLUMNS, SEGMENT_CHUNKS, Cut

# parts of dq and dk, of heads of v and slices of V, that are added up in turns where K > 128: parts of heads
# are rounded in each where V is one slice, so more turns would round too often. Slices take turns in any case
MOST_TURNS = 4
WARP_COLUMNS = 16  # of V or K that a warp's sums are over
# cycles of a chunk of the forward's walk with one walker on a multiprocessor and with two, set on 2026-11-26.
# Times that were measured since then: docs/log/delta-rule.md, "Costs in the host's estimates"
_CYCLES = {1: 1830, 2: 2770}
# where K > 128, of the mirror, too: estimates, of which only the ratio counts. So two walkers in one wave go
# before one walker in two
_WIDE_CYCLES = {1: 3000, 2: 4000}
_HALF = 2  # bytes of a number of 16 bits


class Shape(Sizes):
    """Sizes of a call, as the kernels take them with its cut."""

    @cached_property
    def machine(self) -> costs.Machine:
        return costs.Machine(multiprocessors(self.device), memory_rate(self.device))

    @cached_property
    def split(self) -> Cut | None:
        """The cut of the walks of the forward and the backward; None where they take whole sequences."""
        if self.batch_invariant or self.is_wide:
            return None
        # the host does not know the lengths of packed sequences
        tokens = -(-self.seq // self.sequences) if self.packed else self.seq
        slices = costs.Slices(*(-(-dim // WALKER_COLUMNS) for dim in (self.dim_v, self.dim_k)))
        sizes = self.sequences, tokens, self.heads, self.group
        length = costs.segment_chunks(*sizes, slices, self.machine, self.decays, self.trains)
        return None if length is None else self.cut_into(length)

    def cut_into(self, chunks: int) -> Cut:
        return segments.cut_into(self.sequences, self.seq, chunks, packed=self.packed)

    @property
    def carried(self) -> int:
        """Slots for the states between the segments of a split, of all sequences; 0 without one."""
        return 0 if self.split is None else self.split.segments - self.sequences

    @property
    def borders(self) -> int:
        """Slots for the borders between segments of the walks over the states, of all sequences."""
        return self.cut.segments - self.sequences if self.is_wide else 0

    @property
    def cut(self) -> Cut:
        """Of the walks over the states. It follows from the length of each sequence alone, so that what they
        make of a sequence does not depend on what else is in the call."""
        return self.cut_into(SEGMENT_CHUNKS)

    @property
    def leads_bytes(self) -> int:
        """Of the leads before the segments of a split, and of those behind them."""
        return self.split.segments * self.heads * torch.int32.itemsize if self.split else 0

    @property
    def longest_lead(self) -> int:
        """Chunks that the walks of a split may begin ahead."""
        assert self.split is not None
        return costs.longest_lead(self.split.chunks, self.decays)

    def states_bytes(self, slots: int, dim: int) -> int:
        return slots * self.heads * self.dim_k * dim * torch.float32.itemsize

    @property
    def sum_parts(self) -> int:
        """Of the sums over K that a walk over the states leaves for dg, and of an anchor."""
        return self.value_slices * -(-self.dim_k // WARP_COLUMNS)

    @property
    def value_slices(self) -> int:
        """Of V, of which a CTA of the walk for dq and dk has one."""
        return -(-self.dim_v // DELTA_SLICE_COLUMNS)

    @cached_property
    def shared(self) -> int:
        """Heads of v of a group that add up their dq and dk in the walks over the states; of larger groups a
        launch behind these adds up the rest."""
        most = max(MOST_TURNS // self.value_slices, 1)
        return max(heads for heads in range(1, most + 1) if self.group % heads == 0)

    @property
    def turns(self) -> int:
        """CTAs of the walks over the states that take turns to add up a result."""
        return self.shared * self.value_slices

    @property
    def parts(self) -> int:
        """Of dq and of dk, of heads of v, which a launch behind the walks adds up."""
        return self.group // self.shared if self.is_wide else self.group

    @property
    def sums_floats(self) -> bool:
        """Whether slices of V add up dq and dk in fp32, for the launch behind the walk to round."""
        return self.value_slices > 1 and not self.is_wide

    @property
    def combines(self) -> bool:
        """Whether a launch behind the walks makes dq and dk of what these leave."""
        return self.parts > 1 or self.sums_floats

    @property
    def partial(self) -> tuple[int, int, int, int]:
        """Of what the walks leave of dq and dk, [B, T, parts of all heads of q, K]."""
        return self.batch, self.seq, self.heads // self.group * self.parts, self.dim_k

    @property
    def of_parts(self) -> "Shape":
        """As the launch that adds them up takes it."""
        return self._replace(heads=self.partial[2], group=self.parts)

    @property
    def matrix_bytes(self) -> int:
        """Of A, and of P, of every chunk."""
        return _HALF * CHUNK * CHUNK * self.batch * self.heads * self.slots

    @property
    def kept_matrices(self) -> int:
        """Those that a backward reads: A, with a wide K also P."""
        return 2 if self.is_wide else 1

    @property
    def other_matrices_bytes(self) -> int:
        """Of P where no backward reads it, and of the flags and two tickets of makers."""
        flags = self.batch * self.heads * self.slots + 2 if self.makers else 0
        p = max(self.matrices - self.kept_matrices, 0) * self.matrix_bytes
        return p + flags * torch.int32.itemsize

    def matrices_at(self, kept: int, others: int) -> tuple[int, int, int]:
        """A, P where the walks do not make it, and the flags of makers; 0 for none. kept: the address of
        what a backward reads. others: of the rest."""
        if self.is_wide:
            return kept, kept + self.matrix_bytes, 0
        p = self.matrix_bytes if self.matrices == 2 else 0
        return kept, others if p else 0, others + p if self.makers else 0

    @cached_property
    def matrices(self) -> int:
        """That are made for the walks: A alone where the forward's walk makes P, else both."""
        return costs.matrices_before(self.dim_k, self.forward_walkers, self.makers)

    @property
    def walk_makes_matrices(self) -> bool:
        """Whether the forward's walk makes A and P itself, where that is faster than a launch before it.
        A differs by a rounding then. Not for packed sequences: the longest one would bound the speed, at
        almost twice the time per chunk."""
        if self.batch_invariant or self.packed or self.split is not None:
            return False
        # with P from memory the walk has one walker, or makers beside it
        if not WALKER_COLUMNS < self.dim_k <= MOST_NARROW_K or self.matrices != 1:
            return False
        return costs.walk_makes_matrices(
            self.sequences * self.heads, (self.dim_k, self.dim_v), self.group, self.trains, self.machine
        )

    @property
    def is_wide(self) -> bool:
        """Whether a state takes half of a walker's registers. Then there are no makers, no scorer, no
        split, and three walks backward in the place of one."""
        return self.dim_k > MOST_NARROW_K

    @cached_property
    def walkers(self) -> int:
        """Of a CTA of the forward's walk without makers, and of the mirror's with a wide K."""
        columns = -(-self.dim_v // WALKER_COLUMNS)
        # two share what they load, one alone is done earlier where there are few CTAs. Their instances sum in
        # other orders, so an option fixes the number
        if self.batch_invariant or columns == 1:
            return min(columns, 2)

        def cycles(walkers: int) -> int:
            ctas = (self.split or self.uncut).segments * self.heads * -(-columns // walkers)
            of_chunk = _WIDE_CYCLES if self.is_wide else _CYCLES
            return -(-ctas // multiprocessors(self.device)) * of_chunk[walkers]

        return 1 if cycles(1) <= cycles(2) else 2

    @cached_property
    def makers(self) -> int:
        """CTAs that make the chunk matrices beside the forward's walk, on multiprocessors that it leaves
        idle; 0 where a launch before the walk makes them, or the walk itself."""
        found = self._forward
        return min(found.makers, self.batch * self.heads * self.slots) if found else 0

    @property
    def forward_walkers(self) -> int:
        found = self._forward
        return found.walkers if found and self.makers else self.walkers

    @cached_property
    def _forward(self) -> costs.Forward | None:
        """As it runs where it can have makers."""
        if self.is_wide or self.split is not None:
            return None
        pairs, chunks = self.sequences * self.heads, -(-self.batch * self.seq // (self.sequences * CHUNK))
        of_cta = (1,) if self.dim_v <= WALKER_COLUMNS else (self.walkers,) if self.batch_invariant else (1, 2)
        return costs.forward(pairs, chunks, (self.dim_k, self.dim_v), self.group, of_cta, self.machine)

    @property
    def mirror_walkers(self) -> int:
        return self.walkers if self.is_wide else 2


class Places(NamedTuple):
    """What the backward reads and leaves, at prepared addresses."""

    q: prepared.Operand
    k: prepared.Operand
    gates: tuple[prepared.Gate, prepared.Gate]  # the log decay and beta
    writes: prepared.Operand  # those that the forward has kept
    do: prepared.Operand
    dht: int  # 0 for none
    dq: prepared.Operand  # this and dk: the results, or what `combining` makes them of
    dk: prepared.Operand
    combining: list[prepared.Launch]  # behind the walks, if there is one
    dv: prepared.Operand
    dg: prepared.Gate | None  # None where it is not wanted
    dh0: int  # 0 for none
    strengths: int  # sums for dbeta


class Left(NamedTuple):
    """Where the forward leaves what its backward reads, prepared addresses in one allocation."""

    matrices: int  # A of every chunk; with a wide K P behind it
    writes: int = 0  # of the walk, like a dense v
    borders: int = 0  # the states between segments of the walks over the states; 0 but for a wide K
    maps: int = 0  # M of the segments of a split; 0 without one
    leads: int = 0  # before the segments of a split, and right behind these the ones behind them; 0 without
    states: int = 0  # that enter chunks; 0 with a wide K

    @staticmethod
    def of(shape: Shape, scratch: Scratch) -> "Left":
        of_slots = shape.batch * shape.heads * shape.slots
        return Left(
            scratch.take(shape.kept_matrices * shape.matrix_bytes),
            scratch.take(_HALF * shape.batch * shape.seq * shape.heads * shape.dim_v),
            scratch.take(shape.states_bytes(shape.borders, shape.dim_v)),
            scratch.take(shape.states_bytes(shape.carried, shape.dim_k)),
            scratch.take(2 * shape.leads_bytes),
            # rounded
            scratch.take(0 if shape.is_wide else _HALF * of_slots * shape.dim_k * shape.dim_v),
        )


def layout(core: DeltaRuleCore, read: DeltaRuleCore) -> Any:
    """All that the launches of a call, read as `readable` leaves it, depend on but for addresses and
    gradients."""
    likes = None if read is core else prepared.strides(*core[:8])
    return likes, prepared.layout_of(read)
