from __future__ import annotations

import math

import pytest
import torch

from tfla_tk import reference
from tfla_tk.bench import accuracy
from tfla_tk.bench.accuracy import ORTHOGONAL, RANDOM, compute_truth, failures
from tfla_tk.bench.inputs import DTYPES, mlstm_inputs
from tfla_tk.bench.operators import BASELINE_LIMITS, LIMITS, OPERATORS, output_of, split_offsets
from tfla_tk.bench.shapes import SETS, Shape

CPU = torch.device("cpu")
SHAPE = Shape(2, 80, 3, 16, 32)
EXP, SIG = OPERATORS["mlstm_exp"], OPERATORS["mlstm_sig"]


@pytest.fixture
def inputs() -> dict[str, torch.Tensor]:
    return mlstm_inputs(SHAPE, torch.bfloat16, CPU, seed=3)


def test_inputs_do_not_depend_on_the_layout() -> None:
    plain = mlstm_inputs(SHAPE, torch.bfloat16, CPU, "bnsd", seed=1)
    swapped = mlstm_inputs(SHAPE, torch.bfloat16, CPU, "bsnd", seed=1)
    for name, tensor in plain.items():
        assert torch.equal(tensor, swapped[name])
    assert plain["q"].is_contiguous() and swapped["q"].transpose(1, 2).is_contiguous()
    assert swapped["v"].shape == (2, 3, 80, 32)
    assert plain["i"].dtype == plain["f"].dtype == torch.float32
    assert plain["f"].mean().item() == pytest.approx(3.0, abs=0.3)
    assert not torch.equal(plain["q"], mlstm_inputs(SHAPE, torch.bfloat16, CPU, seed=2)["q"])
    biased = mlstm_inputs(SHAPE, torch.bfloat16, CPU, seed=1, forget_bias=12.0)
    assert torch.allclose(biased["f"], plain["f"] + 9.0, atol=1e-5)
    assert all(torch.equal(biased[name], plain[name]) for name in "qkvi")
    with pytest.raises(ValueError, match="layout"):
        mlstm_inputs(SHAPE, torch.bfloat16, CPU, "sbnd")


@pytest.mark.parametrize("slice_bytes", [1, 2**28])
def test_error_of_an_exact_result_is_zero_and_of_a_scaled_one_known(inputs, monkeypatch, slice_bytes) -> None:
    # with one byte every pair is its own slice
    monkeypatch.setitem(accuracy.SLICE_BYTES, "cpu", slice_bytes)
    truth = compute_truth(EXP, inputs, SHAPE, "fwd")
    h = reference.mlstm_chunkwise(*(tensor.double() for tensor in inputs.values()))
    assert not truth.partial
    assert truth.errors(RANDOM, {"h": h})["h"] < 1e-14
    assert truth.errors(RANDOM, {"h": 1.25 * h})["h"] == pytest.approx(0.25)


def test_the_truth_sees_the_rounded_inputs(inputs) -> None:
    truth = compute_truth(SIG, inputs, SHAPE, "fwd")
    h = reference.mlstm_siging_recurrent(*(tensor.double() for tensor in inputs.values()), normalize=False)
    assert truth.errors(RANDOM, {"h": h})["h"] < 1e-12


def test_gradients_are_those_of_the_cotangent(inputs) -> None:
    truth = compute_truth(EXP, inputs, SHAPE, "fwdbwd", seed=9)
    leaves = {name: tensor.double().requires_grad_() for name, tensor in inputs.items()}
    h = reference.mlstm_recurrent(*leaves.values())
    grads = torch.autograd.grad(h, list(leaves.values()), truth.cotangents[RANDOM].double())
    errors = truth.errors(RANDOM, {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)})
    assert list(errors) == ["dq", "dk", "dv", "di", "df"]
    assert max(errors.values()) < 1e-10


def test_no_gradient_is_taken_where_it_jumps() -> None:
    """In one row |s q.n| is brought to its floor, where rounding of q decides dq and dk."""
    inputs = mlstm_inputs(SHAPE, torch.float32, CPU, seed=3)
    usual = compute_truth(EXP, inputs, SHAPE, "fwdbwd", seed=9).cotangents[RANDOM]
    terms = reference.mlstm_forward_terms(*(x.double() for x in inputs.values()))
    relative = terms.d.abs() * terms.m_t.exp()
    row = tuple(int(x) for x in torch.unravel_index(relative.argmax(), relative.shape))
    inputs["q"][row] /= relative[row]  # m does not depend on q
    found = compute_truth(EXP, inputs, SHAPE, "fwdbwd", seed=9).cotangents[RANDOM]
    assert usual[row].any()
    assert torch.equal(found, usual.index_put(tuple(map(torch.tensor, row)), torch.zeros(())))

    def jump(cotangent: torch.Tensor) -> float:
        """How far dq is from itself across the floor."""
        sides = []
        for factor in (1 - 1e-6, 1 + 1e-6):
            q, *others = (x.double() for x in inputs.values())
            q = (q * factor).requires_grad_()
            h = reference.mlstm_recurrent(q, *others)
            sides += torch.autograd.grad(h, q, cotangent.double())
        return ((sides[0] - sides[1]).norm() / sides[0].norm()).item()

    assert jump(usual) > 1e-2
    assert jump(found) < 1e-4


def test_orthogonal_cotangent_hides_the_normaliser(inputs) -> None:
    truth = compute_truth(EXP, inputs, SHAPE, "fwdbwd", kinds=(RANDOM, ORTHOGONAL))
    along = (truth.cotangents[ORTHOGONAL].double() * truth.values[RANDOM]["h"].unflatten(0, (2, 3))).sum(-1)
    random = (truth.cotangents[RANDOM].double() * truth.values[RANDOM]["h"].unflatten(0, (2, 3))).sum(-1)
    assert along.norm() < 0.01 * random.norm()
    # a backward without the normaliser's part, as the Triton kernels have it
    leaves = {name: tensor.double().requires_grad_() for name, tensor in inputs.items()}
    found = {}
    for kind in (RANDOM, ORTHOGONAL):
        h = _without_normaliser_gradient(*leaves.values())
        grads = torch.autograd.grad(h, list(leaves.values()), truth.cotangents[kind].double())
        found[kind] = truth.errors(kind, {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)})
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
    flops = EXP.cost(SHAPE, "fwd", 2).flops
    monkeypatch.setitem(accuracy.FLOP_LIMIT, "cpu", flops / 2)
    truth = compute_truth(EXP, inputs, SHAPE, "fwd")
    assert truth.partial
    pairs = list(zip(truth.picks.batch.tolist(), truth.picks.head.tolist(), strict=True))
    assert pairs == [(0, 0), (0, 2), (1, 1)]
    h = reference.mlstm_chunkwise(*(tensor.double() for tensor in inputs.values()))
    # what was not picked is not looked at
    h[0, 1] = 0
    assert truth.errors(RANDOM, {"h": h})["h"] < 1e-14
    h[1, 1] = 0
    assert truth.errors(RANDOM, {"h": h})["h"] > 0.1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_result_that_is_not_finite_never_passes(inputs, bad: float) -> None:
    truth = compute_truth(EXP, inputs, SHAPE, "fwd")
    h = torch.zeros(2, 3, 80, 32)
    h[1, 2, 79, 31] = bad
    errors = truth.errors(RANDOM, {"h": h})
    assert math.isnan(errors["h"])
    assert failures(errors, {"h": 1e9}) == ["h is not finite"]


PACKED = Shape(1, 90, 2, 16, 32, N=9)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("slice_bytes", [1, 2**28])
def test_packed_sequences_are_judged_each_for_itself(monkeypatch, name: str, slice_bytes: int) -> None:
    monkeypatch.setitem(accuracy.SLICE_BYTES, "cpu", slice_bytes)
    operator = OPERATORS[name]
    inputs = operator.inputs(PACKED, torch.bfloat16, CPU, "bnsd", 3, 3.0)
    truth = compute_truth(operator, inputs, PACKED, "fwdbwd", seed=9)
    assert not truth.partial
    tensors, offsets = split_offsets(inputs)
    leaves = [tensor.double().requires_grad_() for tensor in tensors.values()]
    decay = {} if operator.decay is None else {"g_gamma": operator.decay(2, CPU)}
    output = output_of(operator.truth(*leaves, **offsets, **operator.options, **decay))
    grads = torch.autograd.grad(output, leaves, truth.cotangents[RANDOM].double())
    found = {operator.output: output, **dict(zip((f"d{x}" for x in tensors), grads, strict=True))}
    errors = truth.errors(RANDOM, found)
    assert list(errors) == [operator.output, *(f"d{x}" for x in tensors)] and max(errors.values()) < 1e-10
    # one sequence in place of all
    whole = output_of(operator.truth(*leaves, **operator.options, **decay))
    assert truth.errors(RANDOM, {operator.output: whole})[operator.output] > 0.1


def test_a_sample_of_many_packed_sequences(monkeypatch) -> None:
    """The first, the last and one in the middle; elsewhere any finite value passes."""
    monkeypatch.setattr(accuracy, "SEQUENCES", 3)
    inputs = mlstm_inputs(PACKED, torch.bfloat16, CPU, seed=3)
    truth = compute_truth(EXP, inputs, PACKED, "fwd")
    assert truth.partial and truth.picks.left_out == "error on a part of the sequences"
    ends = inputs["cu_seqlens"].tolist()
    h = reference.mlstm_chunkwise(
        *(x.double() if x.is_floating_point() else x for x in list(inputs.values())[:5]),
        cu_seqlens=inputs["cu_seqlens"],
    )
    assert truth.errors(RANDOM, {"h": h})["h"] < 1e-13
    for sequence in range(9):
        changed = h.clone()
        changed[:, 1, ends[sequence]] += 1
        assert (truth.errors(RANDOM, {"h": changed})["h"] > 0.01) == (sequence in (0, 4, 8))
        changed[:, 1, ends[sequence]] = math.nan
        assert math.isnan(truth.errors(RANDOM, {"h": changed})["h"])


def test_the_longest_of_packed_sequences_bounds_a_slice() -> None:
    cuda = torch.device("cuda")
    for shape in SETS["packed"]:
        assert len(accuracy.pick_pairs(EXP, shape, "fwdbwd", cuda)) == shape.H
    kept = 8 * 1024 * (15 * (6 * 128 + 6 * 64) + 1 * 4 * 64 * 64)
    found = accuracy.slice_size(SETS["packed"][1], "fwdbwd", cuda, (1024, 15))
    assert found == 16 * 2**30 // kept >= 4


@pytest.mark.parametrize("which", ["fwd", "fwdbwd"])
def test_heads_of_v_are_judged_with_the_head_of_q_and_k_that_they_share(monkeypatch, which: str) -> None:
    operator, shape = OPERATORS["simple_gla"], Shape(2, 40, 3, 16, 32, HV=6)
    inputs = operator.inputs(shape, torch.float32, CPU, "bnsd", 3, 3.0)
    monkeypatch.setitem(accuracy.FLOP_LIMIT, "cpu", operator.cost(shape, which, 2).flops / 2)
    truth = compute_truth(operator, inputs, shape, which, seed=9)
    assert list(zip(truth.picks.batch.tolist(), truth.picks.head.tolist(), strict=True)) == [
        (0, 0),
        (0, 2),
        (1, 1),
    ]
    leaves = [tensor.double().requires_grad_() for tensor in inputs.values()]
    o, _ = reference.simple_gla_recurrent(*(x.repeat_interleave(2, 2) for x in leaves[:2]), *leaves[2:])
    found = {"o": o.detach()}
    if which == "fwdbwd":
        grads = torch.autograd.grad(o, leaves, truth.cotangents[RANDOM].double())
        found |= dict(zip(("dq", "dk", "dv", "dg"), grads, strict=True))
    assert max(truth.errors(RANDOM, found).values()) < 1e-12
    changed = found["o"].clone()
    changed[0, :, 2:4] = 0  # of a head that was not picked
    assert truth.errors(RANDOM, {"o": changed})["o"] < 1e-12
    changed[1, :, 3] = 0
    assert truth.errors(RANDOM, {"o": changed})["o"] > 0.1


def test_failures_name_what_exceeds() -> None:
    errors = {"h": 4e-3, "dq": 2e-2, "df": 0.5}
    assert failures(errors, EXP.tolerances("bf16")) == ["dq 2.0e-02 > 8.0e-03", "df 5.0e-01 > 1.0e-02"]
    # the baselines' df is not checked
    assert failures(errors, EXP.tolerances("bf16", baseline=True)) == []


def test_every_dtype_has_tolerances() -> None:
    assert set(LIMITS) == set(DTYPES) == set(BASELINE_LIMITS)


def test_benchmark_shapes_fit_in_memory_slices() -> None:
    long, cuda = Shape(1, 65536, 16, 128, 256), torch.device("cuda")
    assert accuracy.pick_pairs(EXP, long, "fwdbwd", cuda) == list(range(16))
    kept = 8 * (65536 * (6 * 384 + 6 * 64) + 1025 * 4 * 128 * 256)
    assert accuracy.slice_size(long, "fwdbwd", cuda) == 16 * 2**30 // kept == 6
    # without gradients all heads at once: q, k, v, i, f, h in pieces and as a whole, one chunk's states
    kept = 8 * (65536 * (2 * 129 + 3 * 256) + 4 * 128 * 256)
    assert accuracy.slice_size(long, "fwd", cuda) == 16 * 2**30 // kept >= 16


@pytest.mark.parametrize(
    "shape", [shape for name in ("main", "sweep", "heads", "tiny") for shape in SETS[name]]
)
def test_every_head_of_the_shapes_on_record_is_checked(shape: Shape) -> None:
    cuda = torch.device("cuda")
    assert len(accuracy.pick_pairs(EXP, shape, "fwd", cuda)) == shape.B * shape.H
    assert len(accuracy.pick_pairs(EXP, shape, "fwdbwd", cuda)) == shape.B * shape.H
