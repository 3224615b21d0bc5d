"""With batch_invariant nothing that launches take of a sequence follows from what else is in the call."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tfla_tk import build
from tfla_tk.backends.tk import segments
from tfla_tk.backends.tk.delta_rule.call import Shape
from tfla_tk.backends.tk.scalar_gate import backward as tk_backward
from tfla_tk.backends.tk.scalar_gate import forward as tk_forward
from tfla_tk.backends.tk.scalar_gate import scalar_decay, walks
from tfla_tk.backends.tk.scalar_gate import sequence as tk_sequence
from tfla_tk.backends.tk.scalar_gate import step as tk_step
from tfla_tk.backends.tk.segments import INVARIANT_CHUNKS
from tfla_tk.calls.linear import SimpleGLACore
from tfla_tk.core.layout import ANCHOR_CHUNKS, CHUNK, STATE_CHUNKS, Cut
from tfla_tk.core.memo import Memo

from .forward_emulation import ForwardFormulas
from .stand_in import launch_instead, pretend_a_gpu
from .test_backward_formulas import (
    GATES,
    WALKS,
    WIDE,
    arguments,
    assert_gradients,
    draw,
    states_left_by_a_forward,
)
from .test_backward_formulas import LENGTHS as PACKED

SEGMENT = INVARIANT_CHUNKS * CHUNK
LENGTHS = (0, 1, 63, 64, 65, 1000, SEGMENT - 1, SEGMENT, SEGMENT + 1, 5000, 4 * SEGMENT, 65536)
Borders = list[list[int]]  # of every sequence, where its segments begin, from its own start


# How a family cuts sequences of the given lengths, a batch of equal ones or packed


def cut_scalar_gate(lengths: tuple[int, ...], packed: bool, heads: int, multiprocessors: int) -> Cut:
    batch, seq = (1, sum(lengths)) if packed else (len(lengths), lengths[0])
    sizes = (batch, heads, seq, 128, 256)
    return walks.cut_sequences(sizes, len(lengths), multiprocessors, packed=packed, batch_invariant=True)


def cut_delta(lengths: tuple[int, ...], packed: bool, heads: int, multiprocessors: int) -> Cut:
    batch, seq = (1, sum(lengths)) if packed else (len(lengths), lengths[0])
    return Shape(len(lengths), 0, batch, heads, seq, 128, 128, 1, False, 0, False, packed).cut


def cut_gla(lengths: tuple[int, ...], packed: bool, heads: int, multiprocessors: int) -> Cut:
    seq = sum(lengths) if packed else lengths[0]
    of = (len(lengths), seq, heads, multiprocessors, segments.FORWARD)
    return segments.find(*of, packed=packed, batch_invariant=True)


FAMILIES = {"scalar gate": cut_scalar_gate, "delta rule": cut_delta, "gla": cut_gla}


def borders_of(cut: Cut, lengths: tuple[int, ...], packed: bool) -> Borders:
    """By the numbering of segments.cuh; asserts that every segment has a number and a slot of its own."""
    tokens, count = cut.chunks * CHUNK, len(lengths)
    offsets = list(itertools.accumulate(lengths, initial=0))
    numbers: list[int] = []
    slots: list[int] = []
    found: Borders = []
    for sequence, length in enumerate(lengths):
        if packed:
            own = max(-(-length // tokens), 1)
            first, slot = offsets[sequence] // tokens + sequence, offsets[sequence] // tokens
        else:
            own = cut.segments // count
            first, slot = sequence * own, sequence * (own - 1)
        numbers += range(first, first + own)
        slots += range(slot, slot + own - 1)
        found.append([number * tokens for number in range(own)])
        assert own * tokens >= length
    assert len(set(numbers)) == len(numbers) and max(numbers) < cut.segments
    assert len(set(slots)) == len(slots) and all(slot < cut.segments - count for slot in slots)
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("heads", [1, 16])
@pytest.mark.parametrize("multiprocessors", [78, 132])
def test_borders_follow_from_the_length(family: str, heads: int, multiprocessors: int) -> None:
    """Of a sequence alone, in a batch, and packed with others before and behind it."""
    find: Callable[..., Cut] = FAMILIES[family]

    def borders(lengths: tuple[int, ...], packed: bool) -> Borders:
        return borders_of(find(lengths, packed, heads, multiprocessors), lengths, packed)

    for length in LENGTHS:
        (alone,) = borders((length,), False)
        for batch in (2, 3, 40, 300):
            assert borders((length,) * batch, False) == [alone] * batch
        for before, behind in ((), ()), ((1, 5000), (64, 0)), ((0, 65536, 63), ()), ((), (2 * SEGMENT, 7)):
            assert borders((*before, length, *behind), True)[len(before)] == alone


def test_a_segment_is_of_whole_stretches_between_anchors_and_states() -> None:
    assert INVARIANT_CHUNKS % ANCHOR_CHUNKS == 0 and INVARIANT_CHUNKS % STATE_CHUNKS == 0


def test_the_length_costs_the_least_on_average() -> None:
    """Of all powers of two, over calls from 8 k to 256 k tokens, against the cut that fits each call."""

    def cost(sequences: int, tokens: int, ctas: int, costs: segments.Costs, length: int) -> float:
        count = -(-tokens // (length * CHUNK))
        length = min(length, tokens // CHUNK)
        own = segments.waves_of(sequences * count * ctas, 132) * (length + costs.prologue)
        if count == 1:
            return own
        sums = segments.waves_of(sequences * (count - 1) * ctas, 132)
        return own + sums * (costs.states_chunk * length + costs.prologue) + costs.launches

    calls = [
        (batch, tokens, heads)
        for batch in (1, 2, 4, 8, 16, 32)
        for tokens in (1024 << n for n in range(8))
        for heads in (4, 8, 16, 32)
        if 8192 <= batch * tokens <= 262144
    ]
    for costs in (segments.FORWARD, segments.BACKWARD):
        means = {}
        for length in (8, 16, 32, 64, 128, 256):
            product = 1.0
            for call in calls:
                best = segments.cut(*call, 132, costs).chunks
                product *= cost(*call, costs, length) / cost(*call, costs, best)
            means[length] = product ** (1 / len(calls))
        assert min(means, key=means.__getitem__) == INVARIANT_CHUNKS


# What is launched


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> ForwardFormulas:
    found = ForwardFormulas()
    found.computes = False
    launch_instead(monkeypatch, found, tk_forward)
    monkeypatch.setattr(tk_forward, "_forwards", Memo())
    return found


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("seq", [40, 5000])
@pytest.mark.parametrize("dim_v", [128, 144])
def test_forwards_of_inference_and_training_are_cut_alike(
    dim_v: int, seq: int, packed: bool, forwards: ForwardFormulas
) -> None:
    """mLSTM and a scalar decay; not as without the option, and not as for another GPU."""
    q, v = torch.empty(1, 2, seq, 64).bfloat16(), torch.empty(1, 2, seq, dim_v).bfloat16()
    gate, offsets = torch.empty(1, 2, seq), torch.tensor([0, seq // 2, seq]) if packed else None
    options = (None, None, None, offsets, False, True, 1e-6, False, True)
    decayed = [x.transpose(1, 2).contiguous() for x in (q, q, v, gate)]
    for keeps in (False, True):
        found = tk_forward.mlstm_fwd(q, q, v, gate, gate, *options, True, keeps)
        assert (found[-1] is not None) == (keeps and (dim_v <= 128 or seq > SEGMENT))
        core = SimpleGLACore(*decayed, None, offsets, 0.1, batch_invariant=True)
        scalar_decay.forward(core, output_final_state=False, keep=keeps)
    sequences = 2 if packed else 1
    expected = segments.cut_invariant(sequences, seq, packed=packed)
    assert [launch.cut[-2:] for launch in forwards.launches] == [expected] * 4
    tk_forward.mlstm_fwd(q, q, v, gate, gate, *options)
    assert forwards.launches[-1].cut[-2:] != expected


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("lengths", [None, PACKED], ids=["batch", "packed"])
def test_e_of_a_token_is_always_made_by_the_same_kernel(
    gate: str, lengths: list[int] | None, backward_formulas: Any
) -> None:
    """Also where nothing is cut: a longer sequence in the call would be."""
    *given, _ = arguments(gate, draw(gate, lengths=lengths))
    tk_backward.mlstm_bwd(*given, True)
    names = [launch.name for launch in backward_formulas.launches]
    assert "segments" not in names and "mlstm_bwd_factors" not in names
    assert names.count("mlstm_bwd_rows") == (gate != "sig_unnormalised")


def test_a_backward_takes_the_cut_of_its_forward(
    backward_formulas: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with it the states that the forward has kept."""
    monkeypatch.setattr(segments, "INVARIANT_CHUNKS", 2)
    x = draw("exp", (2, 2, 600), dims=WIDE)
    *given, _ = arguments("exp", x)
    kept = states_left_by_a_forward("exp", x, 2)
    assert kept.layout.cut == segments.cut_invariant(2, 600, packed=False)
    assert_gradients(backward_formulas(*given, True, kept), torch.ops.tfla_tk.mlstm_bwd(*given, True))
    assert backward_formulas.summed == {"dk"}


@pytest.mark.parametrize("lengths", [None, PACKED], ids=["batch", "packed"])
@pytest.mark.parametrize("chunks", [2, 4, INVARIANT_CHUNKS])
@pytest.mark.parametrize("gate", GATES)
@WALKS
def test_gradients(
    dims: tuple[int, int],
    gate: str,
    chunks: int,
    lengths: list[int] | None,
    backward_formulas: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the formulas of the kernels, with and without borders."""
    monkeypatch.setattr(segments, "INVARIANT_CHUNKS", chunks)
    *given, _ = arguments(gate, draw(gate, (2, 2, 300), lengths=lengths, dims=dims), last=True)
    assert_gradients(backward_formulas(*given, True), torch.ops.tfla_tk.mlstm_bwd(*given, True))


@pytest.mark.parametrize("kernel", ["step", "sequence"])
def test_decoding_shares_a_state_in_one_way(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the batch; without the option few heads take narrower slices."""
    seen: list[tuple[int, int]] = []
    place = 8 if kernel == "step" else 9
    module = tk_step if kernel == "step" else tk_sequence
    stand_in = SimpleNamespace(**{f"mlstm_{kernel}": lambda *given: seen.append(given[place])})
    monkeypatch.setattr(build, "load", lambda *wanted: stand_in)
    pretend_a_gpu(monkeypatch, module)
    tokens = () if kernel == "step" else (5,)
    for batch_invariant in (False, True):
        for batch in (1, 3, 300):
            q, v = torch.empty(batch, 2, *tokens, 64), torch.empty(batch, 2, *tokens, 256)
            gate = torch.empty(batch, 2, *(tokens or (1,)))
            state = torch.empty(batch, 2, 64, 256), torch.empty(batch, 2, 64), torch.empty(batch, 2, 1)
            step = getattr(module, f"mlstm_{kernel}")
            step(q, q, v, gate, gate, *state, False, True, 1e-6, torch.float32, batch_invariant)
    assert len(set(seen[:3])) > 1
    assert set(seen[3:]) == {seen[2]}
