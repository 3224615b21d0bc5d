"""What tk_backward.mlstm_bwd hands to its passes and the kernels around them; no GPU is touched."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tfla_tk.backends import segments, tk_backward
from tfla_tk.build import sources
from tfla_tk.build.instances import mlstm_pass
from tfla_tk.ops import chunk_slots

from .backward_emulation import ARGUMENTS, slices_of
from .backward_launches import (
    CHUNK,
    EPS,
    GATES,
    NAMES,
    NH,
    PANELS,
    PART,
    K,
    Launches,
    S,
    V,
    draw,
    flow_parts,
    named,
    operand,
    pointer,
)


def assert_factors_from(reader: SimpleNamespace, writer: SimpleNamespace | None, chunk_m: int) -> None:
    """That a pass is given chunk_m and what this launch wrote, and reads it; or no factors of rows."""
    assert reader.rows == (*((0, 0) if writer is None else writer.factors), chunk_m)
    assert len(reader.factors_read) == (0 if writer is None else 2)
    assert all((x == writer.number).all() for x in reader.factors_read)


def transposed(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def contiguous(x: Tensor) -> Tensor:
    return x


def columns_inside(x: Tensor) -> Tensor:
    """Tokens innermost in memory: nothing that TMA can address."""
    return x.mT.contiguous().mT


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_launches(gate: str, packed: bool, launches: Launches) -> None:
    given = draw(gate, packed)
    tk_backward.mlstm_bwd(*given)
    q, _, v, i, f, c, n, _, offsets, _, row_n, row_m, chunk_m, c_last, n_last, _, dc, dn = given[:18]
    normalize, sigmoid_gate = gate != "sig_unnormalised", gate != "exp"
    factors = ["factors"] * normalize
    assert [x.name for x in launches] == [*factors, "dv", *factors, "dq", "dk", "gates"]

    count = i.numel()
    for number, launch in enumerate(launches.of("factors")):
        assert launch.dots[1:] == (count, number)  # without dots, then with the one slice
        assert launch.rows == (row_n.data_ptr(), pointer(row_m, not sigmoid_gate))
        assert (launch.count, launch.eps, launch.device, launch.stream) == (count, EPS, -1, 7)
        assert launch.factors == launches[0].factors and len({0, *launch.factors}) == 3

    gates = launches[-1]
    assert gates.i == (i.data_ptr(), *i.stride(), 0) and gates.f[0] == f.data_ptr()
    assert gates.chunk_m == pointer(chunk_m, not sigmoid_gate)
    assert gates.last[:2] == (c_last.data_ptr(), dc.data_ptr())
    assert gates.last[2:] == (pointer(n_last, normalize), pointer(dn, normalize))
    assert gates.initial[0] == c.data_ptr() and gates.initial[2] == pointer(n)
    assert [x != 0 for x in gates.initial[1::2]] == [True, normalize]
    assert gates.q_dq[2] == gates.k_dk[2] == PANELS
    assert gates.offsets == (pointer(offsets), packed, c.shape[0])
    assert gates.sizes == (*q.shape, v.shape[-1])
    assert (gates.sigmoid_gate, gates.stream) == (sigmoid_gate, 7)


@pytest.mark.parametrize("layout", [contiguous, transposed])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("gate", GATES)
def test_three_passes(
    gate: str, packed: bool, layout: Callable[[Tensor], Tensor], launches: Launches
) -> None:
    given = list(draw(gate, packed))
    for name in ("q", "k", "v", "h", "dh"):
        given[NAMES.index(name)] = layout(given[NAMES.index(name)])
    x = named(tuple(given))
    dq, dk, dv, _, _, dc, dn = tk_backward.mlstm_bwd(*given)
    (of_dv,), (of_dq,), (of_dk,), (gates,) = map(launches.of, ("dv", "dq", "dk", "gates"))
    normalize, sigmoid_gate = gate != "sig_unnormalised", gate != "exp"
    first, last = launches.of("factors") if normalize else (None, None)  # without dots, then with them

    expected = ((of_dq, x.dh, x.v, x.k, dq), (of_dk, x.v, x.dh, x.q, dk), (of_dv, x.k, x.q, x.dh, dv))
    for launch, *tensors in expected:
        queries, keys, values, _ = tensors
        found = launch.queries, launch.keys, launch.values, launch.out
        assert found == tuple(map(operand, tensors))
        assert launch.sizes == (*keys.shape, values.shape[-1], V)
        assert launch.instance == mlstm_pass(launch.name, keys.shape[-1], values.shape[-1])
        assert queries.shape == keys.shape
        # of every pass the same
        assert launch.i == (x.i.data_ptr(), *x.i.stride(), 0)
        assert launch.f == (x.f.data_ptr(), *x.f.stride(), 0)
        chunk_m = pointer(x.chunk_m, not sigmoid_gate)
        assert_factors_from(launch, first if launch is of_dv else last, chunk_m)
        count = x.c_initial.shape[0]
        assert launch.cut[:4] == (pointer(x.offsets), packed, count, count)
        assert launch.cut[4] >= -(-x.q.shape[2] // CHUNK)
        assert launch.boundaries == (0, 0, 0) and not launch.accumulate
        assert math.isclose(launch.scale, K**-0.5)
        assert (launch.half, launch.sigmoid_gate, launch.stream) == (False, sigmoid_gate, 7)
    assert (of_dq.factor, of_dk.factor, of_dv.factor) == (operand(x.q), operand(x.k), operand(x.h))

    # states as dq walks forward in time, their gradients as the others walk back
    assert of_dq.entering == (pointer(x.c_initial), pointer(x.n_initial))
    assert of_dk.entering == (pointer(x.dc_last), pointer(x.dn_last, normalize))
    assert of_dv.entering == (pointer(x.dc_last), 0)
    assert of_dq.leaving == (0, 0)
    assert of_dk.leaving == (0, pointer(dn, normalize))
    assert of_dv.leaving == (pointer(dc), 0)
    for grad in (dq, dk, dv, dc, *([dn] if normalize else [])):
        assert (grad == Launches.WRITTEN).all()

    dots = last.dots[0] if normalize else 0
    assert (of_dq.sums, of_dk.sums, of_dv.sums) == (gates.q_dq[:2], gates.k_dk[:2], (dots, 0))
    assert len({*of_dq.sums, *of_dk.sums, dots}) == 5
    # what dq leaves, dk reads
    states, *flows = of_dq.anchors
    assert of_dk.anchors == of_dq.anchors and of_dv.anchors == (0, 0, 0)
    assert states != 0 and tuple(flows) == gates.anchors
    assert gates.anchors[1] == flow_parts(of_dq.instance)
    slots = chunk_slots(x.q.shape[2], x.offsets)
    assert launches.anchor_sizes == [(*x.q.shape[:2], slots, K)]


@pytest.mark.parametrize("dim_v", [272, 512])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("gate", GATES)
def test_two_parts_of_v(gate: str, packed: bool, dim_v: int, launches: Launches) -> None:
    given = draw(gate, packed, dim_v=dim_v)
    x = named(given)
    dq, dk, dv, _, _, dc, dn = tk_backward.mlstm_bwd(*given)
    normalize, sigmoid_gate = gate != "sig_unnormalised", gate != "exp"
    factors = ["factors"] * normalize
    order = [*factors, "dv", *2 * [*factors, "dq", "dk"], "gates"]
    assert [launch.name for launch in launches] == order
    (of_dv,), (gates,) = launches.of("dv"), launches.of("gates")
    # what dv reads, and what dq and dk of every part do
    first, *of_passes = launches.of("factors") if normalize else 3 * [None]
    chunk_m = pointer(x.chunk_m, not sigmoid_gate)

    # dv: whole, and once
    assert (of_dv.queries, of_dv.keys, of_dv.values) == (operand(x.k), operand(x.q), operand(x.dh))
    assert (of_dv.out, of_dv.sizes) == (operand(dv), (*x.q.shape, dim_v, dim_v))
    assert_factors_from(of_dv, first, chunk_m)
    assert (of_dv.entering, of_dv.leaving) == ((pointer(x.dc_last), 0), (pointer(dc), 0))
    assert (of_dv.factor, of_dv.anchors) == (operand(x.h), (0, 0, 0))
    assert of_dv.sums == ((of_passes[0].dots[0], 0) if normalize else (0, 0))
    if normalize:
        assert first.dots[2] == 0 and first.factors == of_passes[0].factors
        assert not {*of_passes[0].factors} & {*of_passes[1].factors}
        for launch in of_passes:
            assert launch.dots[1:] == (x.i.numel(), 1)
            assert launch.rows == (x.row_n.data_ptr(), pointer(x.row_m, not sigmoid_gate))
            assert (launch.count, launch.eps, launch.stream) == (x.i.numel(), EPS, 7)

    columns = 0  # of the flows at the anchors, of the parts before
    of_parts = zip(of_passes, launches.of("dq"), launches.of("dk"), strict=True)
    for part, (factors_of_part, of_dq, of_dk) in enumerate(of_parts):
        own = slice(part * PART, (part + 1) * PART)
        # views: the rows of the whole, from a column on
        dh, v = (operand(t[..., own]) for t in (x.dh, x.v))
        assert dh[0] == x.dh.data_ptr() + 2 * own.start and dh[3] == dim_v
        width = x.v[..., own].shape[-1]
        assert (of_dq.queries, of_dq.keys, of_dq.values, of_dq.factor) == (dh, v, *map(operand, (x.k, x.q)))
        assert (of_dk.queries, of_dk.keys, of_dk.values, of_dk.factor) == (v, dh, *map(operand, (x.q, x.k)))
        for launch in (of_dq, of_dk):
            assert_factors_from(launch, factors_of_part, chunk_m)
            assert launch.sizes == (*x.q.shape[:3], width, K, dim_v)
            assert launch.boundaries == (0, 0, 0) and launch.accumulate == (part > 0)
            assert launch.instance == mlstm_pass(launch.name, width, K)
        assert (of_dq.out, of_dk.out) == (operand(dq), operand(dk))

        # columns of the states as they lie
        assert of_dq.entering[0] == x.c_initial.data_ptr() + 4 * own.start
        assert of_dk.entering[0] == x.dc_last.data_ptr() + 4 * own.start
        assert torch.equal(of_dq.entering_c, x.c_initial[..., own])
        assert torch.equal(of_dk.entering_c, x.dc_last[..., own])
        assert of_dq.entering[1] == pointer(x.n_initial)
        assert of_dk.entering[1] == pointer(x.dn_last, normalize and part == 0)
        assert of_dq.leaving == (0, 0) and of_dk.leaving[0] == 0
        assert (of_dk.leaving[1] != 0) == normalize
        assert (of_dk.leaving[1] == pointer(dn)) == (part == 0 or not normalize)

        rows_behind = 4 * part * PANELS * x.q.shape[0] * NH
        behind = (rows_behind * x.q.shape[2], rows_behind * 2 * chunk_slots(x.q.shape[2], x.offsets))
        for launch, sums in ((of_dq, gates.q_dq), (of_dk, gates.k_dk)):
            assert launch.sums == tuple(at + own for at, own in zip(sums, behind, strict=False))
        flows, count = gates.anchors
        assert of_dq.anchors == of_dk.anchors
        assert of_dq.anchors[0] == launches.of("dq")[0].anchors[0]
        assert of_dq.anchors[1:] == (flows + 4 * columns, count)
        columns += flow_parts(of_dq.instance)
    assert gates.q_dq[2] == gates.k_dk[2] == 2 * PANELS
    assert gates.anchors[1] == columns
    assert gates.sizes == (*x.q.shape, dim_v)

    for grad, passes in ((dq, 3), (dk, 3), (dv, 1), (dc, 1), *([(dn, 3)] if normalize else [])):
        assert (grad == passes * Launches.WRITTEN).all()


@pytest.mark.parametrize("dim_v", [64, V, 272, 2 * V])
@pytest.mark.parametrize("dim_qk", [K, 256])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("gate", ["exp", "sig"])
def test_every_part_of_v_has_its_slices_of_dots(
    gate: str, packed: bool, dim_qk: int, dim_v: int, launches: Launches
) -> None:
    """Those that lie in its columns, with every row of them."""
    given = draw(gate, packed, dim_qk=dim_qk, dim_v=dim_v)
    tk_backward.mlstm_bwd(*given)
    (of_dv,), of_dots = launches.of("dv"), [x for x in launches.of("factors") if x.dots[2] > 0]
    width, slices = slices_of(of_dv)
    starts = range(0, slices * width, width)
    assert len(of_dots) == len(launches.of("dq")) == -(-dim_v // PART)
    for part, launch in enumerate(of_dots):
        own = [number for number, start in enumerate(starts) if start // PART == part]
        assert torch.equal(torch.stack(launch.dots_read), of_dv.dots[own])


@pytest.fixture
def cut_every_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts every sequence into segments of one chunk."""

    def cut(sequences: int, tokens: int, *_: Any) -> segments.Cut:
        return segments.Cut(sequences * -(-tokens // CHUNK), 1)

    def cut_packed(sequences: int, tokens: int, *_: Any) -> segments.Cut:
        return segments.Cut(sequences + tokens // CHUNK, 1)

    monkeypatch.setattr(segments, "cut", cut)
    monkeypatch.setattr(segments, "cut_packed", cut_packed)


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
    states = torch.empty(slots * (4 + K * dim_v + K + 1))
    count = -(-dim_v // PART)

    tk_backward.mlstm_bwd(*given, states)
    before = [*["segments_dk"] * count, "combine"]
    assert [launch.name for launch in launches] == [
        *["rows"] * count * normalize,
        *before,
        "dv",
        *["dq", "dk"] * count,
        "gates",
    ]
    for part, launch in enumerate(launches.of("dq")):
        c, n, _ = launch.boundaries
        assert c - states.data_ptr() == 16 * slots + 4 * part * PART
        # which without normaliser no kernel has written
        assert n == (states.data_ptr() + 4 * slots * (4 + K * dim_v) if normalize else 0)

    # those of another cut do not fit
    launches.clear()
    tk_backward.mlstm_bwd(*given, states[1:])
    assert len(launches.of("segments_dq")) == count


@pytest.mark.parametrize("dim_v", [V, 2 * V])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("gate", GATES)
def test_cut_sequences(
    gate: str, packed: bool, dim_v: int, cut_every_chunk: None, launches: Launches
) -> None:
    given = draw(gate, packed, dim_v=dim_v)
    x = named(given)
    tk_backward.mlstm_bwd(*given)
    parts = [slice(at, at + PART) for at in range(0, dim_v, PART)]
    count = len(parts)
    before = [*["segments_dq"] * count, "combine", *["segments_dk"] * count, "combine"]
    normalize, sigmoid_gate = gate != "sig_unnormalised", gate != "exp"
    expected = [*["rows"] * count * normalize, *before, "dv", *["dq", "dk"] * count, "gates"]
    assert [launch.name for launch in launches] == expected
    sequences = x.c_initial.shape[0]
    all_segments = sequences + x.q.shape[2] // CHUNK if packed else sequences * -(-S // CHUNK)
    cut = (pointer(x.offsets), packed, sequences, all_segments, 1)
    rows, (of_states, of_grads) = launches.of("rows"), launches.of("combine")

    for own, launch in zip(parts, rows, strict=normalize):
        assert launch.rows == (x.row_n.data_ptr(), pointer(x.row_m, not sigmoid_gate))
        assert (launch.eps, launch.device, launch.stream) == (EPS, -1, 7)
        assert (launch.dh, launch.h) == (operand(x.dh[..., own]), operand(x.h[..., own]))
        assert (launch.sizes, launch.half) == ((*x.h.shape[:3], PART), False)
    assert len({pointer for launch in rows for pointer in launch.factors}) == 2 * len(rows)
    for launch in (*launches.passes, *launches.of("segments_dq", "segments_dk")):
        part = 0 if launch.name == "dv" else launches.of(launch.name).index(launch)
        assert_factors_from(launch, rows[part] if normalize else None, pointer(x.chunk_m, not sigmoid_gate))

    kinds = (("dq", x.v, x.k, of_states), ("dk", x.dh, x.q, of_grads))
    for gradient, (name, keys, values, combine) in enumerate(kinds):
        c, n, log2_decay = combine.boundaries
        assert len({0, c, n, log2_decay}) == 4
        own_n = [n + 4 * part * launches.slots(launches.of(name)[0]) * K for part in range(count)]
        if name == "dq":  # that of the first part is that of all
            own_n = [n, *[0] * (count - 1)]
        for part, launch in enumerate(launches.of(f"segments_{name}")):
            own = keys[..., parts[part]]
            assert (launch.gradient, launch.keys, launch.values) == (gradient, *map(operand, (own, values)))
            assert launch.instance == mlstm_pass(name, own.shape[-1], K)
            assert launch.i == (x.i.data_ptr(), *x.i.stride(), 0)
            assert launch.f == (x.f.data_ptr(), *x.f.stride(), 0)
            assert launch.boundaries == (c + 4 * parts[part].start, own_n[part], log2_decay)
            assert launch.cut == cut
            assert launch.sizes == (*x.q.shape[:3], own.shape[-1], K, dim_v)
            assert math.isclose(launch.scale, K**-0.5)
            assert (launch.half, launch.sigmoid_gate, launch.stream) == (False, sigmoid_gate, 7)
        assert (combine.norm_parts, combine.backward) == (1 if name == "dq" else count, name == "dk")
        assert (combine.cut, combine.sizes) == (cut, (*x.q.shape[1:], dim_v))
        assert combine.stream == 7
        for part, launch in enumerate(launches.of(name)):
            assert launch.cut == cut
            assert launch.boundaries[2] == log2_decay
            # columns of what arrives, and n of the part
            carried = launches.own(gradient, part) + launches.CARRIED
            assert (launch.boundary_c == carried).all()
            n_part = 0 if name == "dq" else part
            assert (launch.boundary_n == launches.own(gradient, n_part) + launches.CARRIED).all()
    assert of_states.entering == (pointer(x.c_initial), pointer(x.n_initial))
    assert of_grads.entering == (pointer(x.dc_last), pointer(x.dn_last, normalize))
    (of_dv,) = launches.of("dv")
    assert (of_dv.cut, of_dv.boundaries) == (cut, (of_grads.boundaries[0], 0, of_grads.boundaries[2]))
    assert of_dv.sums == (0, 0)
    for part, columns in enumerate(parts):
        assert (of_dv.boundary_c[..., columns] == launches.own(1, part) + launches.CARRIED).all()


def memory_of(x: SimpleNamespace) -> set[tuple[int, int]]:
    """What a launch takes of the memory between kernels: address and bytes, of parts all that they have."""
    if x.name == "rows":
        return {(pointer, 4 * math.prod(x.sizes[:3])) for pointer in x.factors}
    if x.name == "factors":
        return {(pointer, 4 * x.count) for pointer in x.factors}
    if x.name == "dv" and x.sums[0]:
        return {(x.sums[0], 4 * slices_of(x)[1] * math.prod(x.sizes[:3]))}
    if x.name == "combine":
        slots = (x.cut[3] - x.cut[2]) * x.sizes[0]
        dim_qk, dim_v = x.sizes[2:]
        sizes = (4 * slots * dim_qk * dim_v, 4 * x.norm_parts * slots * dim_qk, 8 * slots)
        return set(zip(x.boundaries, sizes, strict=True))
    if x.name == "dq":
        return {(x.anchors[0], 1000 * flow_parts(x.instance))}
    if x.name != "gates":
        return set()
    batch, heads, seq, *_ = x.sizes
    pointer, _, sequences = x.offsets
    slots = -(-seq // CHUNK) + (sequences if pointer else 0)
    found = {(x.workspace, 128 * heads * sequences)}
    for whole, inter, count in (x.q_dq, x.k_dk):
        found |= {(whole, 4 * count * batch * heads * seq), (inter, 8 * count * batch * heads * slots)}
    flows, parts = x.anchors
    return found | {(flows, 4 * batch * heads * (slots // 8 + 1) * parts)}


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
    empty = torch.empty

    def record(*args: Any, **options: Any) -> Tensor:
        found = empty(*args, **options)
        if found.dtype == torch.uint8:
            allocated.append(found)
        return found

    monkeypatch.setattr(torch, "empty", record)
    states = (None, None, None)
    tk_backward.mlstm_bwd(
        q, q, v, i, i, *states, offsets, v, *rows, None, None, v, None, None, False, True, EPS, "auto"
    )
    (memory,) = allocated
    taken = sorted(set().union(*map(memory_of, launches)))
    parts = -(-dim_v // PART)
    assert len(taken) == 2 * parts + (6 if cut else 1) + 7
    behind = memory.data_ptr()
    for address, bytes_taken in taken:
        assert address == behind
        behind = address + -(-bytes_taken // 256) * 256
    assert behind == memory.data_ptr() + memory.numel()


def test_calls_of_equal_sizes_share_a_plan(launches: Launches) -> None:
    given = draw("exp")
    for _ in range(2):
        tk_backward.mlstm_bwd(*given)
    assert len(launches.anchor_sizes) == 1
    tk_backward.mlstm_bwd(*draw("exp", packed=True))
    assert len(launches.anchor_sizes) == 2


def test_the_rule_is_asked_with_the_ctas_of_dk(monkeypatch: pytest.MonkeyPatch, launches: Launches) -> None:
    """One cut for all passes: heads times slices of K, with the backward's costs."""
    asked = []

    def find(sequences: int, tokens: int, *options: Any) -> segments.Cut:
        asked.append((sequences, tokens, *options))
        return segments.Cut(sequences, tokens)

    monkeypatch.setattr(segments, "cut", find)
    monkeypatch.setattr(segments, "cut_packed", find)
    for dim_qk, slices in ((K, 1), (256, 2)):
        for packed in (False, True):
            given = draw("exp", packed, dim_qk=dim_qk)
            tk_backward.mlstm_bwd(*given)
            seq = given[0].shape[2]
            assert asked.pop() == (given[5].shape[0], seq, NH * slices, 132, segments.BACKWARD)
            assert not asked


def test_gradients_that_no_pass_can_write_are_copied(launches: Launches) -> None:
    """As they lie; in one part of V and in two."""
    for dim_v in (V, 2 * V):
        given = list(draw("exp", dim_v=dim_v))
        for name in ("q", "k", "v", "dh", "c_initial"):
            given[NAMES.index(name)] = columns_inside(given[NAMES.index(name)])
        launches.clear()
        grads = tk_backward.mlstm_bwd(*given)
        for name, grad, x in zip(("dq", "dk", "dv"), grads, given, strict=False):
            assert grad.stride() == x.stride()
            for launch in launches.of(name):
                assert launch.out[0] != grad.data_ptr()
            assert (grad == Launches.WRITTEN * (3 if len(launches.of(name)) == 2 else 1)).all()
        assert grads[5].stride() == given[5].stride()
        assert (grads[5] == Launches.WRITTEN).all()
        for launch in launches.of("dq")[:1]:
            assert torch.equal(launch.entering_c, given[5][..., :PART])


def test_fp16_and_gates_in_bf16(launches: Launches) -> None:
    given = draw("exp", False, torch.bfloat16, dtype=torch.float16)
    tk_backward.mlstm_bwd(*given)
    assert len(launches.passes) == 3
    for launch in launches.passes:
        assert launch.half and launch.i[-1] == launch.f[-1] == 1


def test_gate_gradients_lie_as_their_gates(launches: Launches) -> None:
    given = list(draw("exp", False, torch.bfloat16))
    given[3] = given[3].transpose(1, 2).contiguous().transpose(1, 2)
    given[4] = given[4].repeat_interleave(2, dim=-1)[..., ::2]
    di, df = tk_backward.mlstm_bwd(*given)[3:5]
    assert launches[-1].f == (given[4].data_ptr(), *given[4].stride(), 1)
    assert launches[-1].di == (di.data_ptr(), *given[3].stride(), 1)
    assert launches[-1].df == (df.data_ptr(), NH * S, S, 1, 1)


def test_no_gradient_of_states(launches: Launches) -> None:
    given = list(draw("exp", False))
    for place in (5, 6, 7, 13, 14, 16, 17):
        given[place] = None
    *_, dc_initial, dn_initial = tk_backward.mlstm_bwd(*given)
    assert dc_initial is dn_initial is None
    assert launches[-1].initial == launches[-1].last == (0, 0, 0, 0)
    assert len(launches.passes) == 3
    for launch in launches.passes:
        assert launch.entering == launch.leaving == (0, 0)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_are_those_of_the_bindings(name: str) -> None:
    file = "bindings_bwd.cpp" if name.startswith("mlstm_bwd") else "bindings_pass.cpp"
    text = (sources.kernels_root() / file).read_text()
    definition = re.search(rf'm\.def\(\s*"{name}",.*?\);', text, re.DOTALL)
    assert definition and tuple(re.findall(r'py::arg\("(\w+)"\)', definition[0])) == ARGUMENTS[name]


def test_rows_go_with_the_normaliser(launches: Launches) -> None:
    """The op leaves both open: without its rows a normaliser cannot be, and rows without it are not read."""
    given, at = list(draw("exp")), NAMES.index("row_n")
    for missing in (None, torch.empty(0)):
        given[at] = missing
        with pytest.raises(ValueError, match="with a normaliser needs row_n of its forward"):
            tk_backward.mlstm_bwd(*given)
    assert not launches
    given = list(draw("sig_unnormalised"))
    given[at] = torch.randn(given[3].shape)
    tk_backward.mlstm_bwd(*given)
    assert [launch.name for launch in launches] == ["dv", "dq", "dk", "gates"]
    assert all(launch.rows == (0, 0, 0) for launch in launches.passes)
