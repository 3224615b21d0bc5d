"""What the backward's host side hands to its walks and the kernels around them; no GPU is touched.

Cut sequences and the memory between kernels: test_backward_cuts.py; calls that are alike:
test_backward_prepared.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tfla_tk.backends.tk.scalar_gate import backward as tk_backward
from tfla_tk.build import sources
from tfla_tk.build.instances import mlstm_pass
from tfla_tk.core.layout import ANCHOR_CHUNKS, chunk_slots

from .addresses import CHUNK, slices_of
from .backward_emulation import ARGUMENTS
from .backward_launches import (
    EPS,
    GATES,
    NAMES,
    NH,
    PART,
    SLICES,
    K,
    Launches,
    S,
    V,
    assert_gates_from,
    draw,
    flow_parts,
    named,
    operand,
    pointer,
    transposed,
)


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
    assert states != 0 and gates.anchors == (flows, flows, flow_parts(V, K), ANCHOR_CHUNKS)
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
    assert gates.anchors == (*2 * of_dq.anchors[1:], flow_parts(dim_v, K), ANCHOR_CHUNKS)
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
