"""Into how many segments the walks of the forward and the backward cut a sequence, so that a few long
sequences fill the GPU, too.

A split costs the forward three more launches. A small one tells how many chunks ahead of its segment a walk
has to begin. For heads where these are too many, walks leave what each segment makes of the state, a matrix
and a state, and a small kernel carries the states over the segments. A has to be there before, so that no
makers run beside a walk. The backward has A and M from the forward and makes the states alone. For a call
with a backward its time counts, too.

The host does not know which heads are carried. It takes the mean of two times: with no head carried, and with
every second one carried. Without gates, and where segments are too short for leads, it takes the time with
all heads carried. Leads are taken to be as long as a segment of the walks over the states.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

from tfla_tk.backends.tk.segments import waves_of
from tfla_tk.core.layout import CHUNK, DELTA_SLICE_COLUMNS, SEGMENT_CHUNKS

WALKER_COLUMNS = 64  # of V that a walker owns; of K in the walks for dq and dk
MOST_NARROW_K = 128  # of walks that can have makers beside them, or be split; and of the one walk back

# Microseconds per chunk, K = V = 128 (docs/log/delta-rule.md, "Costs in the host's estimates"). By walkers of
# a CTA: the walk alone, with makers beside it. By matrices on a multiprocessor (1: A, 2: A and P): made
# before the walk, beside it (1: measured with K = 64)
_WALKED, _WALKED_BESIDE = {1: 1.33, 2: 2.1}, {1: 1.31, 2: 2.0}
# of two walkers whose CTA makes the matrices; where they leave what a backward reads (H200)
_WALKED_MAKING, _WALKED_MAKING_AND_KEEPING = 3.8, 4.6
_MADE_BEFORE, _MADE_BESIDE = {1: 1.25, 2: 1.77}, {1: 1.6, 2: 1.55}
# what kernels that wait for nothing else get of the memory's peak, and the most that they get, in bytes per
# microsecond
_SHARE, _MOST_BYTES = 0.865, 3.66e6
_WAVE = 7.0  # the start of a wave's CTAs
_MATRIX = 2 * CHUNK * CHUNK  # bytes
_SECOND = 4.0  # an estimate: the end of a launch and the start of the one behind it
# the start of a launch with that of its first wave, fitted to forwards on an H100 (the same log). An
# estimate: a segment that is carried
_LAUNCH, _CARRIED = 15.0, 1.3
# kernel times of K = V = 128 (the same log), per chunk: two walkers that leave states alone, in the forward
# and in the mirror, on an H100; a CTA of the one walk back, on an H200
_MAPPED, _MAPPED_BACK = 1.3, 2.4
_WALKED_BACK = 7.0
_KEEPING = 1.6  # of the time of a forward with makers: where it leaves what a backward reads (the same log)
# what differs less the estimates do not tell apart, as a share of a time. A split has to be so much faster
_MARGIN = 0.05
_WALKERS = 2  # of a CTA that leaves states alone; assumed of the walks of a split


class Slices(NamedTuple):
    """Of 64 columns, each owned by a walker."""

    values: int
    keys: int


class Machine(NamedTuple):
    """What a device has. memory_rate: of its memory at its peak, in bytes per microsecond."""

    multiprocessors: int
    memory_rate: float

    def bytes_in(self, size: float) -> float:
        """Microseconds that so many bytes take."""
        return size / min(_SHARE * self.memory_rate, _MOST_BYTES)


class Forward(NamedTuple):
    """How a forward runs that is not split."""

    walkers: int  # of a CTA of the walk
    makers: int  # CTAs that make the chunk matrices beside it; 0: they are made before or in the walk
    time: float


def matrices_before(dim_k: int, walkers: int, makers: int) -> int:
    """How many matrices are made for a walk, the forward's or the mirror, which has no makers: A alone where
    a warpgroup of the walk makes P, else both (kMakesScores in kernels/delta_rule/scores.cuh)."""
    has_scorer = dim_k <= 64 or (dim_k <= 128 and walkers == 2 and makers == 0)
    return 1 if has_scorer else 2


class _Chunks(NamedTuple):
    """A chunk of all pairs of a sequence and a head."""

    pairs: int
    dims: tuple[int, int]  # K, V
    group: int  # heads of v per head of q and k
    machine: Machine

    @property
    def _keys(self) -> float:
        """Bytes of k, and of q, per pair."""
        return 2 * CHUNK * self.dims[0] / self.group

    def moved(self, matrices: int, *, keep: bool = False) -> float:
        """What a walk moves, as a time: q, k, v, o, so many matrices, of which about a half leaves L2, and
        the writes and the state where they are kept."""
        dim_k, dim_v = self.dims
        values = 2 * CHUNK * dim_v * (3 if keep else 2) + (2 * dim_k * dim_v if keep else 0)
        return self.machine.bytes_in(self.pairs * (2 * self._keys + values + matrices * _MATRIX / 2))

    def made_before(self, matrices: int) -> float:
        """The time of a launch before the walk that makes so many matrices."""
        of_bytes = self.machine.bytes_in(self.pairs * matrices * (self._keys + _MATRIX))
        return max(of_bytes, _MADE_BEFORE[matrices] * self.pairs / self.machine.multiprocessors)

    def ctas(self, walkers: int) -> int:
        return self.pairs * -(-self.dims[1] // (walkers * WALKER_COLUMNS))

    def waves(self, walkers: int, segments: int = 1) -> int:
        return waves_of(segments * self.ctas(walkers), self.machine.multiprocessors)

    def in_two_launches(
        self, walkers: int, *, keep: bool = False, segments: int = 1, share: float = 1.0
    ) -> float:
        """The time of a launch that makes the matrices, and of the walk behind it. segments: of each
        sequence, walked at the same time. share: of a sequence's chunks that each of them walks."""
        matrices = matrices_before(self.dims[0], walkers, 0)
        of_walkers = self.waves(walkers, segments) * share * _WALKED[walkers]
        walked = max(of_walkers, self.moved(matrices, keep=keep))
        return walked + self.made_before(matrices)

    def backward(self, chunks: int, *, segments: int = 1, share: float = 1.0) -> float:
        """The time, of so many chunks, of the one walk back. Other arguments as of `in_two_launches`."""
        dim_k, dim_v = self.dims
        slices = -(-dim_v // DELTA_SLICE_COLUMNS)
        waves = waves_of(segments * self.pairs * slices, self.machine.multiprocessors)
        # q, k, dq, dk; dO, the writes, dv; the state; A
        keys, values = 2 * CHUNK * dim_k * 4 * slices, 2 * CHUNK * dim_v * 3
        of_bytes = self.machine.bytes_in(self.pairs * (keys + values + 2 * dim_k * dim_v + _MATRIX))
        return chunks * share * max(waves * _WALKED_BACK, segments * of_bytes) + _LAUNCH


@functools.lru_cache(maxsize=4096)
def walk_makes_matrices(pairs: int, dims: tuple[int, int], group: int, keep: bool, machine: Machine) -> bool:
    """Whether a forward of two walkers is faster whose CTAs make A and P themselves; keep: it leaves A and
    its writes."""
    chunks = _Chunks(pairs, dims, group, machine)
    # half of each matrix is counted, and A is written whole where it is kept
    walked = _WALKED_MAKING_AND_KEEPING if keep else _WALKED_MAKING
    making = max(chunks.waves(2) * walked, chunks.moved(2 if keep else 0, keep=keep))
    return making < chunks.in_two_launches(2, keep=keep)


@functools.lru_cache(maxsize=4096)
def forward(
    pairs: int, chunks: int, dims: tuple[int, int], group: int, walkers: tuple[int, ...], machine: Machine
) -> Forward:
    """The fastest of one sequence length, with makers, on the multiprocessors that a walk leaves idle, or
    without. pairs: sequences times heads, of so many chunks. dims: K, at most 128, and V. group: heads of
    v per head of q and k. walkers: of a CTA, to choose among."""
    of_all = _Chunks(pairs, dims, group, machine)

    def runs(count: int) -> Iterator[Forward]:
        of_chunk = of_all.in_two_launches(count)
        yield Forward(count, 0, chunks * of_chunk + of_all.waves(count) * _WAVE + _SECOND)
        makers = machine.multiprocessors - of_all.ctas(count)
        if makers > 0:
            matrices = matrices_before(dims[0], count, makers)
            made = _MADE_BESIDE[matrices] * pairs / makers
            of_chunk = max(_WALKED_BESIDE[count], made, of_all.moved(matrices))
            yield Forward(count, makers, chunks * of_chunk + _WAVE)

    return min((run for count in walkers for run in runs(count)), key=lambda run: run.time)


def longest_lead(chunks: int, decays: bool) -> int:
    """Of walks of a split into segments of so many chunks. Where other heads are carried, a lead is walked
    beside these launches, so it is short: a quarter of a segment, half of the shortest segments that have
    leads; 0 where all heads are carried. decays: whether there are gates."""
    if not decays:
        return 0
    pieces = chunks // SEGMENT_CHUNKS
    return max(pieces // 4, min(pieces - 1, 1)) * SEGMENT_CHUNKS


@functools.lru_cache(maxsize=4096)
def segment_chunks(
    sequences: int,
    tokens: int,
    heads: int,
    group: int,
    slices: Slices,
    machine: Machine,
    decays: bool = True,
    trains: bool = False,
) -> int | None:
    """Chunks of a segment, a multiple of SEGMENT_CHUNKS; None where sequences, of so many tokens each, are
    better left whole. Without decays no head forgets. trains: there is a backward, which is split alike."""
    chunks, pairs, multiprocessors = -(-tokens // CHUNK), sequences * heads, machine.multiprocessors
    dims = (WALKER_COLUMNS * slices.keys, WALKER_COLUMNS * slices.values)
    of_all = _Chunks(pairs, dims, group, machine)
    of_values, of_both = (-(-count // _WALKERS) for count in (slices.values, sum(slices)))

    def later_waves(waves: int) -> float:
        """The start of all waves but the first one, which a launch counts."""
        return max(waves - 1, 0) * _WAVE

    def walked(length: int) -> float:
        """The time with segments of so many chunks, where no head is carried."""
        segments = -(-chunks // length)
        share = (length + min(longest_lead(length, decays), SEGMENT_CHUNKS)) / chunks
        more = later_waves(of_all.waves(_WALKERS, segments))
        walk = functools.partial(of_all.in_two_launches, segments=segments, share=share, keep=trains)
        time = chunks * min(map(walk, _WALKED)) + more + 4 * _LAUNCH
        if trains:
            time += of_all.backward(chunks, segments=segments, share=share) + more + 2 * _LAUNCH
        return time

    def carried(length: int, heads: int) -> float:
        """What the states between segments take, of so many heads that are carried."""
        segments = -(-chunks // length)
        carrying = _CARRIED * waves_of(heads * slices.values, multiprocessors) * (segments - 2)

        def mapped(ctas: int, of_chunk: float) -> float:
            """By so many CTAs for each head."""
            waves = waves_of(heads * ctas, multiprocessors)
            return waves * length * of_chunk + later_waves(waves) + carrying

        time = mapped((segments - 2) * of_both + of_values, _MAPPED)
        return time + mapped((segments - 1) * of_values, _MAPPED_BACK) if trains else time

    def times(length: int) -> tuple[float, float]:
        """With no head carried and with every second one; twice with all where there are no leads."""
        least = walked(length)
        if longest_lead(length, decays) == 0:
            return (least + carried(length, pairs),) * 2
        return least, least + carried(length, -(-pairs // 2))

    unsplit = forward(pairs, chunks, dims, group, tuple(_WALKED), machine)
    whole = unsplit.time + _LAUNCH
    if trains:
        whole = whole * (_KEEPING if unsplit.makers else 1.0) + of_all.backward(chunks)
    pieces = -(-chunks // SEGMENT_CHUNKS)
    lengths = {-(-pieces // segments) * SEGMENT_CHUNKS for segments in range(2, pieces + 1)}
    found = {length: times(length) for length in sorted(lengths)}
    means = {length: sum(both) / 2 for length, both in found.items()}
    # a split that would be slower than no split where every second head is carried is not worth it
    worth = [x for x in found if means[x] < (1 - _MARGIN) * whole and max(found[x]) < whole]
    least = min((means[x] for x in worth), default=0.0)
    # among those alike, the fastest for heads that forget soon
    return min(
        (x for x in worth if means[x] <= (1 + _MARGIN) * least), key=lambda x: found[x][0], default=None
    )
