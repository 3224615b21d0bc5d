from __future__ import annotations

import itertools
import math

import pytest
import torch

from tfla_tk import reference
from tfla_tk.bench import accuracy
from tfla_tk.bench.accuracy import ORTHOGONAL, RANDOM, Truth, compute_truth, failures
from tfla_tk.bench.inputs import cotangent_like
from tfla_tk.bench.operators import OPERATORS, parts_of, split_offsets
from tfla_tk.bench.shapes import SETS, Shape, cost

CPU = torch.device("cpu")
SHAPE = Shape(2, 80, 3, 16, 32)
EXP, SIG = OPERATORS["mlstm_exp"], OPERATORS["mlstm_sig"]


def inputs_of(operator, shape: Shape = SHAPE, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    return operator.inputs(shape, dtype, CPU, "bnsd", 3, 3.0)


@pytest.fixture
def inputs() -> dict[str, torch.Tensor]:
    return inputs_of(EXP)


def truth_of(operator, inputs, shape, which: str, **options) -> Truth:
    """The truth of inputs; "fwdbwd" with a random gradient of the output."""
    cotangents = {operator.output: cotangent_like(inputs["v"], 9)} if which == "fwdbwd" else {}
    return compute_truth(operator, shape, inputs, cotangents, **options)


def test_error_of_an_exact_result_is_zero_and_of_a_scaled_one_known(inputs, monkeypatch) -> None:
    right = reference.mlstm_chunkwise(*(tensor.double() for tensor in inputs.values()))
    # with one byte every pair is its own slice
    for slice_bytes in (1, 2**28):
        monkeypatch.setitem(accuracy.SLICE_BYTES, "cpu", slice_bytes)
        truth, h = truth_of(EXP, inputs, SHAPE, "fwd"), right.clone()
        assert not truth.picks.left_out
        assert truth.errors({"h": h})["h"] < 1e-14
        assert truth.errors({"h": 1.25 * h})["h"] == pytest.approx(0.25)
        for bad in (math.nan, math.inf):
            h[1, 2, 79, 31] = bad
            errors = truth.errors({"h": h})
            assert math.isnan(errors["h"]) and failures(errors, {"h": 1e9}) == ["h is not finite"]


def test_no_gradient_is_taken_where_it_jumps() -> None:
    """In one row |s q.n| is brought to its floor, where rounding of q decides dq and dk."""
    inputs = inputs_of(EXP, dtype=torch.float32)
    usual = truth_of(EXP, inputs, SHAPE, "fwdbwd").cotangents["h"]
    terms = reference.mlstm_forward_terms(*(x.double() for x in inputs.values()))
    relative = terms.d.abs() * terms.m_t.exp()
    row = tuple(int(x) for x in torch.unravel_index(relative.argmax(), relative.shape))
    inputs["q"][row] /= relative[row]  # m does not depend on q
    found = truth_of(EXP, inputs, SHAPE, "fwdbwd").cotangents["h"]
    assert usual[row].any()
    assert torch.equal(found, usual.index_put(tuple(map(torch.tensor, row)), torch.zeros(())))

    def jump(cotangent: torch.Tensor) -> float:
        """How far dq is from itself across the floor."""
        sides = []
        for factor in (1 - 1e-6, 1 + 1e-6):
            q, *others = (x.double() for x in inputs.values())
            q = (q * factor).requires_grad_()
            sides += torch.autograd.grad(reference.mlstm_recurrent(q, *others), q, cotangent.double())
        return ((sides[0] - sides[1]).norm() / sides[0].norm()).item()

    assert jump(usual) > 1e-2 and jump(found) < 1e-4


def test_orthogonal_cotangent_hides_the_normaliser(inputs) -> None:
    # a backward without the normaliser's part, as the Triton kernels have it
    leaves = {f"d{name}": tensor.double().requires_grad_() for name, tensor in inputs.items()}
    h = _without_normaliser_gradient(*leaves.values())
    found, along = {}, {}
    for kind in (RANDOM, ORTHOGONAL):
        truth = truth_of(EXP, inputs, SHAPE, "fwdbwd", kind=kind)
        given = truth.cotangents["h"].double()
        along[kind] = (given * truth.values["h"].unflatten(0, (2, 3))).sum(-1).norm()
        grads = torch.autograd.grad(h, list(leaves.values()), given, retain_graph=True)
        found[kind] = truth.errors(dict(zip(leaves, grads, strict=True)))
    assert along[ORTHOGONAL] < 0.01 * along[RANDOM]
    assert found[RANDOM]["dq"] > 0.1 and found[RANDOM]["dk"] > 0.1
    assert found[ORTHOGONAL]["dq"] < 0.01 and found[ORTHOGONAL]["dk"] < 0.01
    assert found[RANDOM]["dv"] < 1e-10


def _without_normaliser_gradient(q, k, v, i, f) -> torch.Tensor:
    # the numerator by its definition, divided by a normaliser that is held constant
    h = reference.mlstm_chunkwise(q, k, v, i, f)
    log_f = torch.nn.functional.logsigmoid(f).cumsum(-1)
    log_gate = (log_f[..., :, None] - log_f[..., None, :] + i[..., None, :]).tril()
    gate = torch.exp(log_gate).tril()
    num = (q.shape[-1] ** -0.5 * q @ k.transpose(-1, -2) * gate) @ v
    return num * (h / num).detach()


def test_a_part_of_the_heads_where_all_would_take_too_long(inputs, monkeypatch) -> None:
    monkeypatch.setitem(accuracy.FLOP_LIMIT, "cpu", cost("mlstm_exp", SHAPE, "fwd").flops / 2)
    truth = truth_of(EXP, inputs, SHAPE, "fwd")
    assert truth.picks.left_out == "error on a part of the heads"
    pairs = list(zip(truth.picks.batch.tolist(), truth.picks.head.tolist(), strict=True))
    assert pairs == [(0, 0), (0, 2), (1, 1)]
    h = reference.mlstm_chunkwise(*(tensor.double() for tensor in inputs.values()))
    # what was not picked is not looked at
    h[0, 1] = 0
    assert truth.errors({"h": h})["h"] < 1e-14
    h[1, 1] = 0
    assert truth.errors({"h": h})["h"] > 0.1


PACKED = Shape(1, 90, 2, 16, 32, N=9)


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=list(OPERATORS))
def test_packed_sequences_are_judged_each_for_itself(monkeypatch, operator) -> None:
    inputs = inputs_of(operator, PACKED)
    tensors, offsets = split_offsets(inputs)
    leaves = [tensor.double().requires_grad_() for tensor in tensors.values()]
    decay = {} if operator.decay is None else {"g_gamma": operator.decay(2)}
    output = parts_of(operator.truth(*leaves, **offsets, **operator.options, **decay))[0]
    # one sequence in place of all
    whole = parts_of(operator.truth(*leaves, **operator.options, **decay))[0]
    for slice_bytes in (1, 2**28):
        monkeypatch.setitem(accuracy.SLICE_BYTES, "cpu", slice_bytes)
        truth = truth_of(operator, inputs, PACKED, "fwdbwd")
        given = truth.cotangents[operator.output].double()
        grads = torch.autograd.grad(output, leaves, given, retain_graph=True)
        errors = truth.errors(
            {operator.output: output, **dict(zip((f"d{x}" for x in tensors), grads, strict=True))}
        )
        assert list(errors) == [operator.output, *(f"d{x}" for x in tensors)] and max(errors.values()) < 1e-10
        assert truth.errors({operator.output: whole})[operator.output] > 0.1
        assert not truth.picks.left_out


def test_a_sample_of_many_packed_sequences(monkeypatch) -> None:
    """The first, the last and one in the middle; elsewhere any finite value passes."""
    monkeypatch.setattr(accuracy, "SEQUENCES", 3)
    inputs = inputs_of(EXP, PACKED)
    truth = truth_of(EXP, inputs, PACKED, "fwd")
    assert truth.picks.left_out == "error on a part of the sequences"
    ends = inputs["cu_seqlens"].tolist()
    h = reference.mlstm_chunkwise(
        *(x.double() if x.is_floating_point() else x for x in list(inputs.values())[:5]),
        cu_seqlens=inputs["cu_seqlens"],
    )
    assert truth.errors({"h": h})["h"] < 1e-13
    for sequence in range(9):
        changed = h.clone()
        changed[:, 1, ends[sequence]] += 1
        assert (truth.errors({"h": changed})["h"] > 0.01) == (sequence in (0, 4, 8))
        changed[:, 1, ends[sequence]] = math.nan
        assert math.isnan(truth.errors({"h": changed})["h"])


def test_failures_name_what_exceeds() -> None:
    errors = {"h": 4e-3, "dq": 2e-2, "df": 0.5}
    assert failures(errors, EXP.tolerances("bf16")) == ["dq 2.0e-02 > 8.0e-03", "df 5.0e-01 > 1.0e-02"]
    # the baselines' df is not checked
    assert failures(errors, EXP.tolerances("bf16", baseline=True)) == []


def test_every_head_of_the_shapes_on_record_is_checked() -> None:
    for name, which in itertools.product(("main", "sweep", "heads", "tiny", "packed"), ("fwd", "fwdbwd")):
        for shape in SETS[name]:
            assert len(accuracy.pick_pairs(EXP, shape, which, torch.device("cuda"))) == shape.B * shape.H
