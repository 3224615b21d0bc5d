"""The backward of cut sequences: what its kernels are given then, and the memory between them; no GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tfla_tk.backends.tk import segments
from tfla_tk.backends.tk.scalar_gate import backward as tk_backward
from tfla_tk.build.instances import mlstm_pass
from tfla_tk.core.layout import KeptStates, chunk_slots

from .addresses import CHUNK
from .backward_launches import (
    EPS,
    GATES,
    NH,
    PART,
    K,
    Launches,
    S,
    V,
    assert_e_from,
    assert_gates_from,
    draw,
    memory_of,
    named,
    operand,
    parts_of,
    pointer,
)


@pytest.mark.parametrize("dim_v", [V, 2 * V])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("gate", GATES)
def test_the_states_of_the_forward_are_not_made_again(
    gate: str, packed: bool, dim_v: int, cut_every_chunk: None, launches: Launches
) -> None:
    given = draw(gate, packed, dim_v=dim_v)
    x, normalize = named(given), gate != "sig_unnormalised"
    sequences = x.c_initial.shape[0]
    slots = NH * (x.q.shape[2] // CHUNK if packed else sequences * (-(-S // CHUNK) - 1))
    workspace = torch.empty(slots * (4 + K * dim_v + K + 1))
    cut, places = segments.Cut(slots // NH + sequences, 1), (16 * slots, 4 * slots * (4 + K * dim_v))

    tk_backward.mlstm_bwd(*given, KeptStates(workspace, cut, places))
    expected = [*["rows"] * normalize, "scan", "segments_dk", "combine", "dv", "dq", "dk", "gates"]
    assert [launch.name for launch in launches] == expected
    (of_dq,) = launches.of("dq")
    c, n, _ = of_dq.boundaries
    assert c - workspace.data_ptr() == 16 * slots
    # which without normaliser no kernel has written
    assert n == (workspace.data_ptr() + 4 * slots * (4 + K * dim_v) if normalize else 0)

    # those of another cut do not fit, though they are as many
    launches.clear()
    tk_backward.mlstm_bwd(*given, KeptStates(workspace, cut._replace(chunks=2), places))
    assert len(launches.of("segments_dq")) == 1


@pytest.mark.parametrize("dim_v", [V, 2 * V])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("gate", GATES)
def test_cut_sequences(
    gate: str, packed: bool, dim_v: int, cut_every_chunk: None, launches: Launches
) -> None:
    given = draw(gate, packed, dim_v=dim_v)
    x = named(given)
    tk_backward.mlstm_bwd(*given)
    normalize, sigmoid_gate = gate != "sig_unnormalised", gate != "exp"
    before = ["segments_dq", "combine", "segments_dk", "combine"]
    expected = [*["rows"] * normalize, "scan", *before, "dv", "dq", "dk", "gates"]
    assert [launch.name for launch in launches] == expected
    sequences = x.c_initial.shape[0]
    all_segments = sequences + x.q.shape[2] // CHUNK if packed else sequences * -(-S // CHUNK)
    cut = (pointer(x.offsets), packed, sequences, all_segments, 1)
    of_states, of_grads = launches.of("combine")
    parts = parts_of(dim_v)

    rows = launches.of("rows")[0] if normalize else None
    if rows is not None:
        assert rows.rows == (x.row_n.data_ptr(), pointer(x.row_m, not sigmoid_gate))
        assert (rows.eps, rows.device, rows.stream) == (EPS, -1, 7)
        assert (rows.dh, rows.h) == (operand(x.dh), operand(x.h))
        assert (rows.sizes, rows.half) == ((*x.h.shape, PART), False)
        assert len({0, *rows.factors}) == 4 and rows.factors[2] >= x.i.numel()
    (scan,), chunk_m = launches.of("scan"), pointer(x.chunk_m, not sigmoid_gate)
    for launch in launches.walks:
        assert_gates_from(launch, scan, rows)
    for launch in launches.of("segments_dq", "segments_dk"):
        assert launch.rows == (*((0, 0, 0) if rows is None else rows.factors), chunk_m)
        assert len(launch.log2_w_read) == (0 if rows is None else x.i.numel())
        assert rows is None or (launch.log2_w_read == rows.number).all()
        assert_e_from(launch, rows)

    kinds = (("dq", x.v, x.k, of_states), ("dk", x.dh, x.q, of_grads))
    for gradient, (name, keys, values, combine) in enumerate(kinds):
        (of_segments,), (of_walk,) = launches.of(f"segments_{name}"), launches.of(name)
        assert len({0, *combine.boundaries}) == 4
        assert of_segments.gradient == gradient
        assert (of_segments.keys, of_segments.values) == (operand(keys), operand(values))
        assert of_segments.instance == mlstm_pass(name, min(dim_v, PART), K)
        assert of_segments.i == (x.i.data_ptr(), *x.i.stride(), 0)
        assert of_segments.f == (x.f.data_ptr(), *x.f.stride(), 0)
        assert of_segments.sizes == (*x.q.shape[:3], dim_v, K)
        assert math.isclose(of_segments.scale, K**-0.5)
        assert (of_segments.half, of_segments.sigmoid_gate) == (False, sigmoid_gate)
        assert of_segments.stream == combine.stream == 7
        assert (combine.norm_parts, combine.backward) == (1 if name == "dq" else parts, name == "dk")
        assert combine.sizes == (*x.q.shape[1:], dim_v)
        assert of_segments.cut == of_walk.cut == combine.cut == cut
        assert of_segments.boundaries == of_walk.boundaries == combine.boundaries
        # what arrives, and n of every part
        carried = launches.OWN[gradient] + launches.CARRIED
        assert (of_walk.boundary_c == carried).all()
        assert len(of_walk.boundary_n) == combine.norm_parts
        assert all((n == carried + part).all() for part, n in enumerate(of_walk.boundary_n))
    assert of_states.entering == (pointer(x.c_initial), pointer(x.n_initial))
    assert of_grads.entering == (pointer(x.dc_last), pointer(x.dn_last, normalize))
    (of_dv,) = launches.of("dv")
    assert (of_dv.cut, of_dv.boundaries) == (cut, (of_grads.boundaries[0], 0, of_grads.boundaries[2]))
    assert of_dv.sums == (0, 0)
    assert (of_dv.boundary_c == launches.OWN[1] + launches.CARRIED).all()


@pytest.mark.parametrize("dim_v", [64, V, 2 * V])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
def test_memory_between_kernels(
    cut: bool,
    packed: bool,
    dim_v: int,
    launches: Launches,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One allocation, in which everything lies by itself, aligned, and which holds nothing else.

    Dots only where nothing is cut.
    """
    if cut:
        request.getfixturevalue("cut_every_chunk")
    size = (1, 8, 12 * CHUNK - 5)
    q, v, i = torch.zeros(*size, K).bfloat16(), torch.zeros(*size, dim_v).bfloat16(), torch.zeros(size)
    offsets = torch.tensor([0, 70, size[-1]]) if packed else None
    rows = (i, i, torch.zeros(*size[:2], chunk_slots(size[-1], offsets), dtype=torch.float64))
    allocated = []
    new_empty = Tensor.new_empty

    def record(*args: Any, **options: Any) -> Tensor:
        found = new_empty(*args, **options)
        if found.dim() == 1:
            allocated.append(found)
        return found

    monkeypatch.setattr(Tensor, "new_empty", record)
    states = (None, None, None)
    tk_backward.mlstm_bwd(
        q, q, v, i, i, *states, offsets, v, *rows, None, None, v, None, None, False, True, EPS
    )
    (memory,) = allocated
    taken = sorted(set().union(*map(memory_of, launches)))
    # gates and e; log2_w and states, or dots; tickets of several parts; the rest
    assert len(taken) == 2 + (1 + 6 if cut else 1) + (parts_of(dim_v) > 1) + 7
    behind = memory.data_ptr()
    for address, bytes_taken in taken:
        assert address == behind
        behind = address + -(-bytes_taken // 256) * 256
    assert behind == memory.data_ptr() + memory.nbytes


def test_the_rule_is_asked_with_the_ctas_of_dk(monkeypatch: pytest.MonkeyPatch, launches: Launches) -> None:
    """One cut for all walks: heads times slices of K times parts of V, with the backward's costs."""
    asked = []

    def find(sequences: int, tokens: int, *options: Any) -> segments.Cut:
        asked.append((sequences, tokens, *options))
        return segments.Cut(sequences, tokens)

    monkeypatch.setattr(segments, "cut", find)
    monkeypatch.setattr(segments, "cut_packed", find)
    for dim_qk, dim_v, ctas in ((K, V, 1), (256, V, 2), (256, 2 * V, 4)):
        for packed in (False, True):
            given = draw("exp", packed, dim_qk=dim_qk, dim_v=dim_v)
            tk_backward.mlstm_bwd(*given)
            seq = given[0].shape[2]
            assert asked.pop() == (given[5].shape[0], seq, NH * ctas, 132, segments.BACKWARD)
            assert not asked
