"""What the backward's host side hands to its walks and the kernels around them; no GPU is touched."""

from __future__ import annotations

import gc
import math
import re
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tfla_tk.backends.tk import segments
from tfla_tk.backends.tk.scalar_gate import backward as tk_backward
from tfla_tk.build import sources
from tfla_tk.build.instances import mlstm_pass
from tfla_tk.core.layout import KeptStates, chunk_slots

from .addresses import CHUNK, slices_of
from .backward_emulation import ARGUMENTS
from .backward_launches import (
    EPS,
    GATES,
    NAMES,
    NH,
    PART,
    SLICES,
    B,
    K,
    Launches,
    S,
    V,
    draw,
    flow_parts,
    memory_of,
    named,
    operand,
    parts_of,
    pointer,
)


def assert_e_from(reader: SimpleNamespace, writer: SimpleNamespace | None) -> None:
    """That a walk, or its segments kernel, has read e of every part of V as this launch wrote it; or none.

    "dv" reads none.
    """
    e = reader.e_read
    assert len(e) == (0 if reader.name == "dv" or writer is None else parts_of(reader.sizes[3]))
    assert all((x == writer.number + part / 8).all() for part, x in enumerate(e))


def assert_gates_from(reader: SimpleNamespace, scan: SimpleNamespace, writer: SimpleNamespace | None) -> None:
    """That a walk is given what these launches wrote of chunks and of e, and has read it."""
    assert reader.gates == (scan.gates, *((0, 0) if writer is None else writer.factors[1:]))
    assert (reader.gates_read == scan.number).all()
    assert_e_from(reader, writer)


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
    assert [x.name for x in launches] == ["scan", "dv", *factors, "dq", "dk", "gates"]

    count = i.numel()
    rows = (pointer(row_n, normalize), pointer(row_m, normalize and not sigmoid_gate))
    for launch in launches.of("factors"):
        assert launch.dots[1:] == (count, 1, 1)  # one slice
        assert launch.rows == rows
        assert (launch.count, launch.eps, launch.device, launch.stream) == (count, EPS, -1, 7)
        assert launch.factors[0] == 0 and launch.factors[1] != 0

    scan = launches[0]
    assert (scan.i, scan.f) == ((i.data_ptr(), *i.stride(), 0), (f.data_ptr(), *f.stride(), 0))
    assert (scan.rows, scan.chunk_m) == (rows, pointer(chunk_m, not sigmoid_gate))
    assert (scan.offsets, scan.sizes) == ((pointer(offsets), packed, c.shape[0]), q.shape[:3])
    assert (scan.eps, scan.sigmoid_gate, scan.stream) == (EPS, sigmoid_gate, 7)
    assert math.isclose(scan.scale, K**-0.5)

    gates = launches[-1]
    assert gates.i == (i.data_ptr(), *i.stride(), 0) and gates.f[0] == f.data_ptr()
    assert gates.chunk_m == pointer(chunk_m, not sigmoid_gate)
    assert gates.last[:2] == (c_last.data_ptr(), dc.data_ptr())
    assert gates.last[2:] == (pointer(n_last, normalize), pointer(dn, normalize))
    assert gates.initial[0] == c.data_ptr() and gates.initial[2] == pointer(n)
    assert [x != 0 for x in gates.initial[1::2]] == [True, normalize]
    assert gates.q_dq[2] == gates.k_dk[2] == SLICES
    assert gates.offsets == (pointer(offsets), packed, c.shape[0])
    assert gates.sizes == (*q.shape, v.shape[-1])
    assert (gates.sigmoid_gate, gates.stream) == (sigmoid_gate, 7)


@pytest.mark.parametrize("layout", [contiguous, transposed])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("gate", GATES)
def test_three_walks(gate: str, packed: bool, layout: Callable[[Tensor], Tensor], launches: Launches) -> None:
    given = list(draw(gate, packed))
    for name in ("q", "k", "v", "h", "dh"):
        given[NAMES.index(name)] = layout(given[NAMES.index(name)])
    x = named(tuple(given))
    dq, dk, dv, _, _, dc, dn = tk_backward.mlstm_bwd(*given)
    (of_dv,), (of_dq,), (of_dk,), (gates,) = map(launches.of, ("dv", "dq", "dk", "gates"))
    normalize = gate != "sig_unnormalised"
    (scan,), factors = launches.of("scan"), launches.of("factors")[0] if normalize else None

    expected = ((of_dq, x.dh, x.v, x.k, dq), (of_dk, x.v, x.dh, x.q, dk), (of_dv, x.k, x.q, x.dh, dv))
    for launch, *tensors in expected:
        queries, keys, values, _ = tensors
        found = launch.queries, launch.keys, launch.values, launch.out
        assert found == tuple(map(operand, tensors))
        assert launch.sizes == (*keys.shape, values.shape[-1])
        assert launch.instance == mlstm_pass(launch.name, keys.shape[-1], values.shape[-1])
        assert queries.shape == keys.shape
        # of every walk the same
        assert_gates_from(launch, scan, factors)
        count = x.c_initial.shape[0]
        assert launch.cut[:4] == (pointer(x.offsets), packed, count, count)
        assert launch.cut[4] >= -(-x.q.shape[2] // CHUNK)
        assert launch.boundaries == (0, 0, 0)
        assert (launch.half, launch.stream) == (False, 7)
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

    dots = factors.dots[0] if normalize else 0
    assert (of_dq.sums, of_dk.sums, of_dv.sums) == (gates.q_dq[:2], gates.k_dk[:2], (dots, 0))
    assert len({*of_dq.sums, *of_dk.sums, dots}) == 5
    # what dq leaves, dk reads
    states, flows = of_dq.anchors
    assert of_dk.anchors == of_dq.anchors and of_dv.anchors == (0, 0)
    assert states != 0 and gates.anchors == (flows, flow_parts(V, K))
    slots = chunk_slots(x.q.shape[2], x.offsets)
    assert launches.anchor_sizes == [(*x.q.shape[:2], slots, V, K)]


@pytest.mark.parametrize("dim_v", [272, 512])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("gate", GATES)
def test_two_parts_of_v(gate: str, packed: bool, dim_v: int, launches: Launches) -> None:
    given = draw(gate, packed, dim_v=dim_v)
    x = named(given)
    dq, dk, dv, _, _, dc, dn = tk_backward.mlstm_bwd(*given)
    normalize = gate != "sig_unnormalised"
    expected_launches = ["scan", "dv", *["factors"] * normalize, "dq", "dk", "gates"]
    assert [launch.name for launch in launches] == expected_launches
    (of_dv,), (of_dq,), (of_dk,), (gates,) = map(launches.of, ("dv", "dq", "dk", "gates"))
    (scan,), factors = launches.of("scan"), launches.of("factors")[0] if normalize else None
    if normalize:
        # a slice for each part, and memory for e of each
        assert factors.dots[1:] == (x.i.numel(), 2, 1)
        assert factors.factors[2] >= x.i.numel()
        assert of_dv.sums == (factors.dots[0], 0)

    # both walks over all of V
    expected = ((of_dq, x.dh, x.v, x.k, x.q, dq), (of_dk, x.v, x.dh, x.q, x.k, dk))
    for launch, *tensors in expected:
        found = launch.queries, launch.keys, launch.values, launch.factor, launch.out
        assert found == tuple(map(operand, tensors))
        assert launch.sizes == (*x.q.shape[:3], dim_v, K)
        assert launch.instance == mlstm_pass(launch.name, PART, K)
        assert_gates_from(launch, scan, factors)
    assert torch.equal(of_dq.entering_c, x.c_initial) and torch.equal(of_dk.entering_c, x.dc_last)
    assert of_dq.entering[1] == pointer(x.n_initial)
    assert of_dk.entering[1] == pointer(x.dn_last, normalize)
    assert of_dq.leaving == (0, 0) and of_dk.leaving[0] == 0
    assert (of_dk.leaving[1] != 0) == normalize

    # row sums and flows of both
    assert (of_dq.sums, of_dk.sums) == (gates.q_dq[:2], gates.k_dk[:2])
    assert gates.q_dq[2] == gates.k_dk[2] == 2 * SLICES
    assert of_dq.anchors == of_dk.anchors
    assert gates.anchors == (of_dq.anchors[1], flow_parts(dim_v, K))
    assert gates.sizes == (*x.q.shape, dim_v)

    for grad in (dq, dk, dv, dc):
        assert (grad == Launches.WRITTEN).all()
    if normalize:  # the sum over the parts
        assert (dn == 2 * Launches.WRITTEN).all()


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
    (of_dv,), (of_dots,) = launches.of("dv"), launches.of("factors")
    width, slices = slices_of(of_dv)
    assert of_dots.dots[2:] == (slices, PART // width)
    assert torch.equal(torch.stack(of_dots.dots_read), of_dv.dots)


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
        q, q, v, i, i, *states, offsets, v, *rows, None, None, v, None, None, False, True, EPS, "auto"
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


def test_calls_of_equal_sizes_share_a_plan(launches: Launches) -> None:
    given = draw("exp")
    for _ in range(2):
        tk_backward.mlstm_bwd(*given)
    assert len(launches.anchor_sizes) == 1
    tk_backward.mlstm_bwd(*draw("exp", packed=True))
    assert len(launches.anchor_sizes) == 2


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


def test_gradients_that_no_walk_can_write_are_copied(launches: Launches) -> None:
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
            assert (grad == Launches.WRITTEN).all()
        assert grads[5].stride() == given[5].stride()
        assert (grads[5] == Launches.WRITTEN).all()
        (of_dq,) = launches.of("dq")
        assert torch.equal(of_dq.entering_c, given[5])


def test_fp16_and_gates_in_bf16(launches: Launches) -> None:
    given = draw("exp", False, torch.bfloat16, dtype=torch.float16)
    tk_backward.mlstm_bwd(*given)
    assert len(launches.walks) == 3
    assert all(launch.half for launch in launches.walks)
    (scan,) = launches.of("scan")
    assert scan.i[-1] == scan.f[-1] == 1


def test_gate_gradients_lie_as_their_gates(launches: Launches) -> None:
    given = list(draw("exp", False, torch.bfloat16))
    given[3] = given[3].transpose(1, 2).contiguous().transpose(1, 2)
    given[4] = given[4].repeat_interleave(2, dim=-1)[..., ::2]
    di, df = tk_backward.mlstm_bwd(*given)[3:5]
    assert launches[-1].f == (given[4].data_ptr(), *given[4].stride(), 1)
    assert launches[-1].di == (di.data_ptr(), *given[3].stride(), 1)
    assert launches[-1].df == (df.data_ptr(), NH * S, S, 1, 1)


def test_without_normaliser_n_is_not_read(launches: Launches) -> None:
    """Not even where the op is given one: a NaN in it would be in dq."""
    given = list(draw("sig_unnormalised"))
    c_initial = named(tuple(given)).c_initial
    given[NAMES.index("n_initial")] = torch.full_like(c_initial[..., 0], torch.nan)
    *_, dn_initial = tk_backward.mlstm_bwd(*given)
    (of_dq,) = launches.of("dq")
    assert of_dq.entering == (pointer(c_initial), 0)
    assert dn_initial.shape == (*c_initial.shape[:2], K)


def test_no_gradient_of_states(launches: Launches) -> None:
    given = list(draw("exp", False))
    for place in (5, 6, 7, 13, 14, 16, 17):
        given[place] = None
    *_, dc_initial, dn_initial = tk_backward.mlstm_bwd(*given)
    assert dc_initial is dn_initial is None
    assert launches[-1].initial == launches[-1].last == (0, 0, 0, 0)
    assert len(launches.walks) == 3
    for launch in launches.walks:
        assert launch.entering == launch.leaving == (0, 0)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_are_those_of_the_bindings(name: str) -> None:
    file = "scalar_gate/bindings/" + ("backward.cpp" if name.startswith("mlstm_bwd") else "walk.cpp")
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
    assert [launch.name for launch in launches] == ["scan", "dv", "dq", "dk", "gates"]
    assert launches[0].rows[0] == 0
    assert all(launch.gates[1:] == (0, 0) for launch in launches.walks)


# What is prepared for calls that are alike


def test_what_is_prepared_serves_every_call_like_it(launches: Launches) -> None:
    """With its own addresses, on the stream of its time; and it holds no tensor."""
    first = draw("exp")
    references = [weakref.ref(x) for x in first if isinstance(x, Tensor)]
    tk_backward.mlstm_bwd(*first)
    del first
    gc.collect()
    assert not any(reference() is not None for reference in references)
    prepared = launches.prepared
    for stream in (7, 8):
        launches.clear()
        tk_backward._current_stream = lambda device, stream=stream: stream  # the fixture puts it back
        x = named(given := draw("exp"))
        dq, dk, dv, *_ = tk_backward.mlstm_bwd(*given)
        assert [launch.name for launch in launches] == ["scan", "dv", "factors", "dq", "dk", "gates"]
        assert {launch.stream for launch in launches} == {stream}
        (of_dq,), (of_dk,), (of_dv,) = map(launches.of, ("dq", "dk", "dv"))
        for launch, *tensors in ((of_dq, x.dh, x.v, x.k, dq), (of_dk, x.v, x.dh, x.q, dk)):
            found = launch.queries, launch.keys, launch.values, launch.out
            assert found == tuple(map(operand, tensors))
        assert (of_dv.out, of_dv.factor) == (operand(dv), operand(x.h))
        assert launches.of("scan")[0].i[0] == x.i.data_ptr()
        assert torch.equal(of_dq.entering_c, x.c_initial) and torch.equal(of_dk.entering_c, x.dc_last)
    assert launches.prepared == prepared


def changed(given: tuple[Any, ...], **changes: Any) -> tuple[Any, ...]:
    return *(changes.get(name, x) for name, x in zip(NAMES, given, strict=False)), *given[len(NAMES) :]


def test_calls_that_are_not_alike_are_prepared_anew(launches: Launches) -> None:
    """Everything that a launch has but addresses makes another one."""
    given = draw("exp")
    x = named(given)
    no_states = dict.fromkeys(("c_initial", "n_initial", "m_initial"))
    calls = [
        given,
        *(changed(given, **{name: transposed(getattr(x, name))}) for name in ("q", "k", "v", "h", "dh")),
        *(changed(given, **{name: transposed(getattr(x, name))}) for name in ("i", "f")),
        *(changed(given, **{name: getattr(x, name).bfloat16()}) for name in ("i", "f")),
        changed(given, **no_states),
        changed(given, dc_last=None),
        changed(given, dn_last=None),
        (*given[:-3], 1e-3, *given[-2:]),
        (*given[:-1], True),
        draw("sig"),
        draw("sig_unnormalised"),
        draw("exp", packed=True),
        draw("exp", dtype=torch.float16),
        draw("exp", dim_v=128),
    ]
    for count, call in enumerate(calls):
        tk_backward.mlstm_bwd(*call)
        assert len(tk_backward._backwards) == count + 1
    prepared = launches.prepared
    for call in calls:
        tk_backward.mlstm_bwd(*call)
    assert (len(tk_backward._backwards), launches.prepared) == (len(calls), prepared)


def starting_late(x: Tensor) -> Tensor:
    """One element later than where TMA or vector loads can take it."""
    memory = torch.empty(x.numel() + 1, dtype=x.dtype)
    return memory[1:].view(x.shape).copy_(x)


@pytest.mark.parametrize("name", ["q", "k", "v", "h", "dh", "c_initial", "n_initial", "dc_last", "dn_last"])
def test_addresses_are_looked_at_in_every_call(name: str, launches: Launches) -> None:
    """What lies odd is copied, in the one call; its gradient lies as it does."""
    given = draw("exp")
    for odd in (False, True, False):
        launches.clear()
        x = named(given if not odd else changed(given, **{name: starting_late(getattr(named(given), name))}))
        grads = tk_backward.mlstm_bwd(*vars(x).values(), *given[len(NAMES) :])
        (of_dq,), (of_dk,), (of_dv,) = map(launches.of, ("dq", "dk", "dv"))
        read = {
            "q": of_dk.values, "k": of_dq.values, "v": of_dq.keys, "h": of_dv.factor, "dh": of_dq.queries,
            "c_initial": (of_dq.entering[0],), "n_initial": (of_dq.entering[1],),
            "dc_last": (of_dk.entering[0],), "dn_last": (of_dk.entering[1],),
        }  # fmt: skip
        for each, (address, *_) in read.items():
            as_given = address == getattr(x, each).data_ptr()
            assert as_given == (not odd or each != name) and address % 16 == 0
        assert torch.equal(of_dq.entering_c, x.c_initial) and torch.equal(of_dk.entering_c, x.dc_last)
        for grad, like in zip(grads, given, strict=False):
            assert grad.stride() == like.stride()


def test_the_states_of_a_forward_are_taken_from_every_call(cut_every_chunk: None, launches: Launches) -> None:
    """Calls with them and without them are of two kinds."""
    given, slots = draw("exp"), B * NH * 2
    for kept in (True, False, True):
        launches.clear()
        workspace = torch.empty(slots * (4 + K * V + K + 1))
        states = KeptStates(workspace, segments.Cut(B * 3, 1), (16 * slots, 64 * slots))
        tk_backward.mlstm_bwd(*given, states if kept else None)
        (of_dq,) = launches.of("dq")
        at_states = of_dq.boundaries[0] == workspace.data_ptr() + 16 * slots
        assert at_states == kept and len(launches.of("segments_dq")) == (not kept)
