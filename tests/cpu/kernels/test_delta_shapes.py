"""How the host cuts a call of the delta rule, and what its walks and makers are: sizes and costs; no GPU."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import pytest
import torch

from tfla_tk.backends.tk import operands
from tfla_tk.backends.tk.delta_rule import call, split
from tfla_tk.backends.tk.delta_rule.call import Shape
from tfla_tk.backends.tk.prepared import Scratch
from tfla_tk.core.layout import ADDRESS_BITS, CHUNK, DELTA_ANCHOR_CHUNKS, SEGMENT_CHUNKS

from .addresses import sequences_of


def shape_of(sequences: int, seq: int, *, packed: bool = False, heads: int = 16, dim: int = 128) -> Shape:
    batch = 1 if packed else sequences
    slots = -(-seq // CHUNK) + (sequences if packed else 0)
    return Shape(sequences, slots, batch, heads, seq, dim, dim, 1, False, 0, packed, packed)


def test_borders_are_anchors() -> None:
    segment_tokens = SEGMENT_CHUNKS * CHUNK
    assert SEGMENT_CHUNKS % DELTA_ANCHOR_CHUNKS == 0
    assert [shape_of(1, segment_tokens + more, dim=256).borders for more in (0, 1)] == [0, 1]
    assert shape_of(1, segment_tokens + 1).borders == 0


@pytest.mark.parametrize("seq", [1, 64, 1023, 1024, 1025, 2048, 5000, 8192, 100_000])
def test_a_sequence_is_cut_alike_in_any_call(seq: int) -> None:
    """By its length alone: in any batch, and packed among others, whose borders have slots of their own."""

    def pieces(cut: tuple[int, ...], tokens: int) -> list[list[range]]:
        return [sequence.segments for sequence in sequences_of(cut, 1, tokens)]

    chunks = -(-seq // CHUNK)
    expected = [range(at, min(at + SEGMENT_CHUNKS, chunks)) for at in range(0, chunks, SEGMENT_CHUNKS)]
    for batch, heads in itertools.product((1, 2, 300), (1, 16, 64)):
        shape = shape_of(batch, seq, heads=heads, dim=256)
        assert pieces(shape.with_offsets(0, shape.cut)[:5], seq) == [expected]
        assert shape.cut.segments == batch * len(expected)
        assert shape.borders == batch * (len(expected) - 1)
    generator = random.Random(seq)
    for count in (1, 3, 50):
        lengths = [generator.choice((0, 1, 1024, generator.randint(0, 10_000))) for _ in range(count)]
        place = generator.randrange(count)
        lengths[place] = seq
        offsets = torch.tensor([0, *itertools.accumulate(lengths)])
        shape = shape_of(count, sum(lengths), packed=True, dim=256)
        found = sequences_of(shape.with_offsets(offsets.data_ptr(), shape.cut)[:5], 1, shape.seq)
        assert found[place].segments == expected
        slots = [
            slot for sequence in found for slot in range(sequence.boundaries.start, sequence.boundaries.stop)
        ]
        assert len(set(slots)) == len(slots) and all(0 <= slot < shape.borders for slot in slots)


def test_walkers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two per CTA where heads fill the GPU, else one."""
    monkeypatch.setattr(call, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(Shape, "split", None)
    assert [shape_of(n, 8192).walkers for n in (1, 8)] == [1, 2]
    wide = shape_of(4, 4096, heads=6)._replace(dim_k=256, dim_v=512)
    assert (wide.walkers, wide.makers) == (2, 0)
    assert shape_of(1, 8192)._replace(dim_k=144).makers == 0 < shape_of(1, 8192).makers
    for count in (1, 8):
        fixed = shape_of(count, 1000)._replace(batch_invariant=True)
        assert fixed.walkers == fixed._replace(dim_k=256, dim_v=512).walkers == 2
        assert fixed._replace(dim_k=64, dim_v=64).walkers == 1


def test_makers(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the multiprocessors that the forward's walk leaves idle, where these are enough."""
    monkeypatch.setattr(call, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(Shape, "split", None)
    found = {heads: shape_of(1, 8192, heads=heads).makers for heads in (1, 16, 32)}
    assert found == {1: 128, 16: 100, 32: 68}
    assert shape_of(2, 4096, dim=64).makers == 100
    assert shape_of(3, 300, packed=True, heads=4).makers == 32  # no more than there are slots
    assert shape_of(1, 1, heads=2).makers == 2
    for heads in range(1, 200):
        shape = shape_of(1, 8192, heads=heads)
        ctas = heads * -(-2 // shape.forward_walkers)
        assert shape.makers == 0 or (shape.makers > 0 and shape.makers + ctas <= 132)


def test_two_walkers_leave_room_for_makers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mirror has no makers."""
    monkeypatch.setattr(call, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(Shape, "split", None)
    shape = shape_of(4, 8192)
    assert shape.forward_walkers == 2 and shape.makers == 132 - 64 and shape.walkers == 1
    # one block of 64 columns has one walker
    assert shape_of(8, 8192, dim=64).forward_walkers == 1
    fixed = shape._replace(batch_invariant=True)
    assert fixed.forward_walkers == fixed.walkers == 2


def test_who_makes_the_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Walks of two walkers that fill the GPU, and all with small K; a large state leaves no registers."""
    monkeypatch.setattr(call, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(Shape, "split", None)
    for count, heads, dim, makers, matrices in (
        (8, 16, 128, False, 1),
        (8, 32, 128, False, 1),
        (1, 32, 128, True, 2),
        (1, 48, 128, True, 2),
        (4, 16, 64, True, 1),
        (8, 16, 64, False, 1),
        (8, 16, 256, False, 2),
    ):
        shape = shape_of(count, 8192, heads=heads, dim=dim)
        assert (shape.makers > 0, shape.matrices) == (makers, matrices), (count, heads, dim)
        _, p, flags = shape.matrices_at(1024, 2048)
        assert (p > 0, flags > 0) == (matrices == 2, makers)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("has_makers", [False, True])
def test_a_walk_that_does_not_make_the_scores_is_given_them(
    dim: int, has_makers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward's walk and the mirror, which may have another number of walkers, with makers or without."""
    monkeypatch.setattr(call, "multiprocessors", lambda device: 132)
    if not has_makers:
        monkeypatch.setattr(Shape, "makers", 0)
    for heads, fixed in itertools.product(range(1, 300), (False, True)):
        shape = shape_of(1, 4096, heads=heads, dim=dim)._replace(batch_invariant=fixed)
        for walkers, makers in ((shape.forward_walkers, shape.makers), (shape.mirror_walkers, 0)):
            assert shape.matrices >= split.matrices_before(dim, walkers, makers), (heads, fixed)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "multiprocessors", lambda device: 132)


def test_few_long_sequences_are_split(hopper: None) -> None:
    """Into segments that end at borders of the walks over the states, and without makers."""
    for sequences, seq, heads in ((1, 65536, 16), (1, 32768, 8), (1, 32768, 4), (2, 16384, 2), (1, 16384, 1)):
        shape = shape_of(sequences, seq, heads=heads)
        assert shape.split is not None and shape.makers == 0
        assert shape.split.chunks % SEGMENT_CHUNKS == 0
        count = -(-seq // (shape.split.chunks * CHUNK))
        assert shape.split.segments == sequences * count and count > 1
        assert shape.carried == sequences * (count - 1)
    packed = shape_of(1, 65536, packed=True)
    assert packed.split is not None and packed.split.chunks == shape_of(1, 65536).split.chunks


def test_leads_are_short_beside_a_segment(hopper: None) -> None:
    """So that walks take little longer; and multiples of segments of the walks over the states."""
    longest = set()
    for heads, seq in itertools.product((1, 2, 4, 8, 16), (8192, 16384, 65536, 262_144)):
        shape = shape_of(1, seq, heads=heads)
        if shape.split is None:
            continue
        assert shape.longest_lead % SEGMENT_CHUNKS == 0
        assert shape.longest_lead <= max(shape.split.chunks / 4, SEGMENT_CHUNKS)
        assert shape.longest_lead <= shape.split.chunks / 2
        assert (shape.longest_lead == 0) == (shape.split.chunks == SEGMENT_CHUNKS)
        longest.add(shape.longest_lead)
    assert len(longest) > 2


def test_what_a_split_is_told_of_chunks_has_room(hopper: None) -> None:
    """Eight numbers of each chunk, and a lead of each segment in either direction; none without a split."""
    for packed in (False, True):
        shape = shape_of(2, 65536, packed=packed, heads=3)
        assert shape.split is not None
        assert shape.bounds_bytes == 32 * shape.batch * 3 * shape.slots
        assert shape.leads_bytes == 4 * 3 * shape.split.segments
        left = call.Left.of(shape, Scratch(1 << ADDRESS_BITS))
        room = Scratch(left.leads)
        room.take(2 * shape.leads_bytes)
        assert left.leads + room.bytes == left.states
    whole = shape_of(8, 8192)
    assert whole.split is None and whole.bounds_bytes == whole.leads_bytes == 0
    assert call.Left.of(whole, Scratch(1 << ADDRESS_BITS)).leads == 0


def test_others_are_left_whole(hopper: None) -> None:
    """Short ones, and those that fill the GPU; and in any case where results may not follow from the call."""
    for sequences, seq, heads in ((1, 2125, 2), (1, 1, 1), (8, 8192, 16), (1, 32768, 64), (16, 2048, 4)):
        assert shape_of(sequences, seq, heads=heads).split is None
    # many packed ones of unknown lengths
    assert shape_of(16, 65536, packed=True).split is None
    assert shape_of(1, 65536)._replace(batch_invariant=True).split is None
    # what the kernels carry
    assert shape_of(1, 65536, dim=256).split is None


def test_a_call_for_a_backward_counts_its_time(hopper: None) -> None:
    """So it is split where the backward gains by it. None of these is left whole that is split as a forward
    alone."""
    for heads, seq, dim in itertools.product(
        (2, 8, 16, 32, 64), (2048, 8192, 16384, 32768, 65536), (64, 128)
    ):
        alone = shape_of(1, seq, heads=heads, dim=dim)
        assert alone.split is None or alone._replace(trains=True).split is not None
    more = shape_of(1, 16384, heads=32)
    assert more.split is None and more._replace(trains=True).split is not None
    filling = shape_of(8, 8192)._replace(trains=True)
    assert filling.split is None


def test_without_gates_every_head_is_carried(hopper: None) -> None:
    """So a split costs more: what is split without gates is split with them, too. Segments may be longer
    then, so that leads have room."""
    split_ones = 0
    for heads, seq in itertools.product((1, 2, 4, 8, 16, 32), (4096, 8192, 16384, 32768, 65536, 131072)):
        gated, ungated = (shape_of(1, seq, heads=heads)._replace(decays=x) for x in (True, False))
        if ungated.split is None:
            continue
        split_ones += 1
        assert gated.split is not None
        assert ungated.longest_lead == 0
    assert split_ones > 8


def test_more_multiprocessors_take_shorter_segments(hopper: None) -> None:
    """Or as long ones."""
    for heads, seq in itertools.product((1, 2, 4, 8, 16), (8192, 16384, 65536)):
        machines = [split.Machine(count, 3.35e6) for count in (66, 132, 264)]
        lengths = [split.segment_chunks(1, seq, heads, 1, split.Slices(2, 2), of) or seq for of in machines]
        assert lengths == sorted(lengths, reverse=True)


def test_faster_memory_takes_no_longer() -> None:
    sizes = {"pairs": 256, "chunks": 16, "dims": (128, 128), "walkers": (1, 2)}
    slow, fast = (split.forward(**sizes, group=1, machine=split.Machine(132, rate)) for rate in (2e6, 5e6))
    assert fast.time < slow.time


def test_makers_leave_room_for_packed_walks(hopper: None) -> None:
    """CTAs of the walk and makers run at once, or the chunk matrices are made before."""
    for sequences in (32, 120):
        shape = shape_of(sequences, 65536, heads=4, packed=True)
        walks = sequences * 4 * -(-shape.dim_v // (64 * shape.forward_walkers))
        assert shape.makers == 0 or shape.makers + walks <= 132


def makes_matrices(shape: Shape) -> tuple[bool, bool]:
    """Whether the forward's walk makes the matrices, of a call alone and of one for a backward."""
    alone, trained = (shape._replace(trains=x).walk_makes_matrices for x in (False, True))
    return alone, trained


def test_when_a_walk_makes_its_matrices(hopper: None) -> None:
    """Where CTAs of two walkers fill the GPU with whole sequences, and a launch before them takes longer."""
    filling = shape_of(8, 8192)
    assert makes_matrices(filling) == makes_matrices(shape_of(8, 100)) == (True, True)
    never = {
        "packed sequences may be uneven": shape_of(64, 65536, packed=True),
        "bits may not depend on the call": filling._replace(batch_invariant=True),
        "makers beside the walk": shape_of(4, 8192),
        "few heads": shape_of(1, 2048),
        "one walker": filling._replace(dim_v=64),
        "one walker in fewer waves": shape_of(9, 8192),
        "the scorer of a small K": filling._replace(dim_k=64),
        "a wide state": filling._replace(dim_k=256),
        "a split": shape_of(1, 65536),
    }
    assert not filling._replace(dim_v=256).walk_makes_matrices  # a second CTA would make the same
    assert {name: makes_matrices(shape) for name, shape in never.items()} == dict.fromkeys(
        never, (False, False)
    )
    # these are what the names say
    assert shape_of(4, 8192).makers > 0 and shape_of(1, 2048).makers > 0
    assert filling._replace(dim_v=64).forward_walkers == shape_of(9, 8192).forward_walkers == 1
    assert shape_of(1, 65536).split is not None


def test_a_walk_is_asked_for_no_matrices_that_kernels_refuse(
    hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the costs: these make them with two walkers of whole sequences, where 64 < K <= 128, and have
    no makers then. The mirror has P from nobody else."""
    monkeypatch.setattr(split, "walk_makes_matrices", lambda *_: True)
    sizes = itertools.product((16, 64, 80, 128, 144, 256), (16, 64, 80, 128, 144, 256, 512), (1, 2, 4))
    is_made, has_makers, is_split = set(), 0, 0
    for (dim_k, dim_v, group), packed, fixed in itertools.product(sizes, (False, True), (False, True)):
        for sequences, heads in ((1, 4), (4, 4), (4, 16), (4, 20), (4, 32), (4, 128)):
            shape = shape_of(sequences, 16384, packed=packed, heads=heads)
            shape = shape._replace(dim_k=dim_k, dim_v=dim_v, group=group, batch_invariant=fixed)
            made = makes_matrices(shape)
            has_makers += shape.makers > 0 and shape.forward_walkers == 2
            is_split += shape.split is not None
            if not any(made):
                continue
            is_made.add((dim_k, dim_v))
            assert all(made) and 64 < dim_k <= 128 and dim_v > 64 and not fixed
            assert shape.forward_walkers == shape.mirror_walkers == 2
            assert shape.makers == 0 and shape.split is None
            assert shape.matrices_at(1024, 0) == (1024, 0, 0) and shape.matrices_at(0, 0) == (0, 0, 0)
    assert is_made == set(itertools.product((80, 128), (80, 128, 144, 256, 512)))
    assert has_makers and is_split


def test_slices_and_heads_share_the_turns(hopper: None) -> None:
    assert [shape_of(1, 512)._replace(group=4, dim_v=v).shared for v in (128, 256, 512)] == [4, 2, 1]


@pytest.mark.parametrize(
    ("told", "rate"), [({}, 3.35e6), ({"memory_clock_rate": 2_619_000, "memory_bus_width": 5120}, 3.352e6)]
)
def test_memory_rate(told: dict[str, int], rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of an H100 where torch does not tell."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**told))
    assert operands.memory_rate.__wrapped__(0) == pytest.approx(rate, rel=1e-3)
