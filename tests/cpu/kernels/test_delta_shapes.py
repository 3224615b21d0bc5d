"""How the host cuts a call of the delta rule, and what its walks and makers are; no GPU."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from tfla_tk.backends.tk import prepared
from tfla_tk.backends.tk.delta_rule import call, split
from tfla_tk.backends.tk.delta_rule.call import Shape
from tfla_tk.core.layout import CHUNK, DELTA_ANCHOR_CHUNKS, SEGMENT_CHUNKS

SMS = 132


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "multiprocessors", lambda device: SMS)


def shape_of(
    sequences: int, seq: int, heads: int = 16, dims: tuple[int, int] = (128, 128), *, packed: bool = False
) -> Shape:
    batch = 1 if packed else sequences
    slots = -(-seq // CHUNK) + (sequences if packed else 0)
    return Shape(sequences, slots, batch, heads, seq, *dims, 1, False, 0, packed, packed)


def shapes() -> list[Shape]:
    """Of all kinds."""
    found = []
    for dims in itertools.product((16, 64, 80, 128, 144, 256), (16, 64, 80, 128, 144, 512)):
        for (sequences, seq), heads in itertools.product(
            ((1, 16384), (4, 4096), (32, 4096)), (1, 4, 16, 33, 128)
        ):
            for packed, fixed, group in itertools.product((False, True), (False, True), (1, 2)):
                shape = shape_of(sequences, seq, heads, dims, packed=packed)
                found.append(shape._replace(batch_invariant=fixed, group=group))
    return found


def ctas_of_walk(shape: Shape) -> int:
    return shape.sequences * shape.heads * -(-shape.dim_v // (CHUNK * shape.forward_walkers))


def test_makers_and_the_walk_run_at_once() -> None:
    """Else each would wait for the other. With a wide K or a split there are none."""
    with_makers = [shape for shape in shapes() if shape.makers]
    assert {shape.forward_walkers for shape in with_makers} == {1, 2} and any(x.packed for x in with_makers)
    for shape in with_makers:
        assert shape.makers + ctas_of_walk(shape) <= SMS and shape.dim_k <= 128 and shape.split is None
        assert shape.makers <= shape.batch * shape.heads * shape.slots


def test_a_walk_that_does_not_make_the_scores_is_given_them() -> None:
    """The forward's walk and the mirror, which may have another number of walkers, with makers or without."""
    for shape in shapes():
        for walkers, makers in ((shape.forward_walkers, shape.makers), (shape.mirror_walkers, 0)):
            assert shape.matrices >= split.matrices_before(shape.dim_k, walkers, makers)


def test_a_walk_is_asked_for_no_matrices_that_kernels_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the costs: these make them with two walkers of whole sequences, where 64 < K <= 128, and have
    no makers then. Bits may not depend on the call, and packed sequences may be uneven."""
    monkeypatch.setattr(split, "walk_makes_matrices", lambda *_: True)
    made = [shape for shape in shapes() if shape.walk_makes_matrices]
    assert {(x.dim_k, x.dim_v) for x in made} == {*itertools.product((80, 128), (80, 128, 144, 512))}
    for shape in made:
        assert not shape.batch_invariant and not shape.packed and shape.split is None
        assert shape.forward_walkers == shape.mirror_walkers == 2 and shape.makers == 0
        assert shape.matrices_at(1024, 0) == (1024, 0, 0)


# Splits


@pytest.mark.parametrize(
    ("sequences", "seq", "heads", "dims"),
    [
        (1, 65536, 16, (128, 128)),
        (1, 32768, 4, (128, 256)),
        (2, 16384, 2, (80, 64)),
        (1, 65536, 4, (64, 512)),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_few_long_sequences_are_split(
    sequences: int, seq: int, heads: int, dims: tuple[int, int], packed: bool
) -> None:
    """Into segments, and with leads, of whole segments of the walks over the states. Walks take little longer
    with their leads; without gates every head is carried."""
    assert SEGMENT_CHUNKS % DELTA_ANCHOR_CHUNKS == 0
    shape = shape_of(sequences, seq * sequences if packed else seq, heads, dims, packed=packed)
    assert shape.split is not None and shape.carried > 0
    assert shape.split.chunks % SEGMENT_CHUNKS == shape.longest_lead % SEGMENT_CHUNKS == 0
    assert shape.longest_lead <= shape.split.chunks / 2
    without_gates = shape._replace(decays=False)
    assert without_gates.split is None or without_gates.longest_lead == 0


@pytest.mark.parametrize(
    ("told", "rate"), [({}, 3.35e6), ({"memory_clock_rate": 2_619_000, "memory_bus_width": 5120}, 3.352e6)]
)
def test_memory_rate(told: dict[str, int], rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of an H100 where torch does not tell."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**told))
    assert prepared.memory_rate.__wrapped__(0) == pytest.approx(rate, rel=1e-3)
