"""`tfla-tk gradcheck` through its options, its exit status and the file that it writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tfla_tk
from tfla_tk.bench import accuracy
from tfla_tk.bench.gradcheck import CASES, DEFAULT_CASES, PROBLEMS, cases_of, make_case
from tfla_tk.bench.operators import OPERATORS
from tfla_tk.bench.shapes import Shape

from .conftest import FORMS, GATES, Result, crash, exact, refuse

CPU = torch.device("cpu")
EXP = ("gradcheck", "--op", "mlstm_exp", "--shapes", "1x40x2x16x16")


def scaled_forget_gate_gradient(backend: str, tensors: dict[str, Tensor]) -> Result:
    return exact(backend, tensors | {"f": scaled(tensors["f"])})


def scaled(x: Tensor) -> Tensor:
    """x with 1.02 times its gradient."""
    return x.detach() + 1.02 * (x - x.detach())


def no_gradient_of_the_last_state(backend: str, tensors: dict[str, Tensor]) -> Result:
    h, (c, n, m) = exact(backend, tensors)
    return h, (c.detach() + 0 * c, n, m)


def no_gradient_of_the_initial_state(backend: str, tensors: dict[str, Tensor]) -> Result:
    return exact(backend, tensors | {"n_initial": tensors["n_initial"].detach()})


def not_finite(backend: str, tensors: dict[str, Tensor]) -> Result:
    h, state = exact(backend, tensors)
    # sqrt has an infinite slope at zero
    return h + (0 * tensors["q"].sum()).sqrt(), state


def refuse_states(backend: str, tensors: dict[str, Tensor]) -> Result:
    return refuse(backend, tensors) if "c_initial" in tensors else exact(backend, tensors)


@pytest.mark.parametrize("op", GATES)
def test_the_forms_of_the_reference_pass_the_default_cases(op: str, command) -> None:
    status, rows, out, _ = command("gradcheck", "--op", op, "--shapes", "1x40x2x16x16,1x64x2x16x32xN5")
    assert status == 0 and {row["backend"] for row in rows} == set(FORMS)
    # of packed sequences those without gradients of the last states, of an operator without gates the plain
    packed = ["default", "default+initial", "normal+initial", "extreme+initial"]
    for expected, is_packed in ((DEFAULT_CASES, False), (packed, True)):
        cases = expected if GATES[op] else [case for case in expected if case.startswith("default")]
        assert list(dict.fromkeys(row["case"] for row in rows if ("N" in row["shape"]) == is_packed)) == cases
    for row in rows:
        assert (row["status"], row["reason"], row["partial"]) == ("ok", "", False)
        assert (row["dtype"], row["truth"], row["gpu"]) == ("fp32", "recurrent", None)
        parameters = ["dA_log", "ddt_bias"] * row["options"].get("use_gate_in_kernel", False)
        states = ["dinitial_state"]
        if op.startswith("mlstm"):
            states = ["dc_initial", "dn_initial"][: 1 + row["normalize"]]
        initial = states * ("initial" in row["case"])
        assert list(row["rel_err"]) == ["dq", "dk", "dv", *GATES[op], *parameters, *initial]
        assert all(0 < error < row["tolerance"][name] for name, error in row["rel_err"].items())
    assert f"{len(rows)} checks: {len(rows)} within tolerance, 0 failed, 0 not served." in out
    assert "; truth: recurrent in fp64\n" in out and "!" not in out.split("\n\n", 1)[1]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_other_dtypes_pass(dtype: str, command) -> None:
    ran = command(
        "gradcheck", "--shapes", "1x40x2x16x16", "--dtype", dtype, "--cases", "default+initial+last"
    )
    assert ran.status == 0 and f"; {dtype}" in ran.out


@pytest.mark.parametrize(
    ("broken", "caught", "passed", "wrong"),
    [
        (scaled_forget_gate_gradient, "default", None, {"df"}),
        (no_gradient_of_the_last_state, "default+last", "default", {"dk", "dv", "di", "df"}),
        (no_gradient_of_the_initial_state, "default+initial", None, {"dn_initial"}),
        (not_finite, "default", None, {"dq"}),
    ],
)
def test_a_wrong_gradient_is_caught(
    break_backends, command, broken, caught: str, passed: str | None, wrong: set[str]
) -> None:
    break_backends(broken)
    options = (*EXP, "--backends", "reference:chunkwise")
    status, (row,), out, _ = command(*options, "--cases", caught)
    found, limits = row["rel_err"], row["tolerance"]
    assert {name for name in found if found[name] is None or found[name] > limits[name]} == wrong
    assert status == 1 and row["status"] == "FAILED" and all(name in row["reason"] for name in wrong)
    assert out.split("\n\n", 1)[1].count("!") == len(wrong)
    assert passed is None or command(*options, "--cases", passed).status == 0


@pytest.mark.parametrize(
    ("broken", "backends", "status"),
    [
        # a baseline counts only where it was named
        (scaled_forget_gate_gradient, "triton", 0),
        (scaled_forget_gate_gradient, "triton:xl_chunk_64", 1),
        (scaled_forget_gate_gradient, "tk", 1),
        (crash, "triton", 0),
        (crash, "tk", 1),
        # what is not served counts where it was named and nothing of it was checked
        (refuse, "triton", 1),
        (refuse, "triton:xl_chunk_64", 1),
        (refuse, "tk", 1),
        (refuse_states, "triton", 0),
        (refuse_states, "tk", 0),
        (exact, "triton:xl_chunk_64,tk,reference", 0),
    ],
)
def test_exit_status(break_backends, command, broken, backends: str, status: int) -> None:
    break_backends(broken)
    ran = command(*EXP, "--backends", backends, "--cases", "default,default+initial")
    assert ran.status == status
    if broken is crash:
        assert ": FAILED: RuntimeError: illegal memory access\n" in ran.out


def test_what_is_not_served_is_told_with_its_reason(break_backends, command) -> None:
    break_backends(lambda backend, x: (refuse if backend != "tk" else refuse_states)(backend, x))
    options = ("--backends", "tk,triton:xl_chunk_64", "--cases", "default,default+initial")
    status, rows, out, _ = command(*EXP, *options)
    reason = "the kernels have no backward yet (use the reference)"
    assert status == 1 and f"  triton:xl_chunk_64: unsupported: {reason}\n" in out
    assert f"  tk: unsupported: {reason} [default+initial]\n" in out
    assert "4 checks: 1 within tolerance, 0 failed, 3 not served." in out
    assert [row["status"] for row in rows] == ["ok", "unsupported", "unsupported", "unsupported"]
    assert rows[1]["rel_err"] == {} and rows[1]["reason"] == reason


def test_the_gate_parameters_are_checked(monkeypatch, command) -> None:
    """dA_log and ddt_bias are sums over batch and tokens; a slight error of one of them is found."""
    right = tfla_tk.chunk_gated_delta_rule

    def wrong(*operands: Tensor, A_log: Tensor | None = None, **arguments: Any) -> Any:
        return right(*operands, A_log=A_log if A_log is None else scaled(A_log), **arguments)

    monkeypatch.setattr(tfla_tk, "chunk_gated_delta_rule", wrong)
    options = ("--shapes", "2x40x1x16x16xHV2", "--backends", "reference:chunkwise", "--cases", "default")
    status, rows, _, _ = command("gradcheck", "--op", "gated_delta_rule", *options)
    failed = [row["reason"] for row in rows if row["status"] == "FAILED"]
    assert status == 1 and len(failed) == 1 and "dA_log 2.0e-02" in failed[0] and "dt_bias" not in failed[0]


@pytest.mark.parametrize("operator", [one for each in PROBLEMS.values() for one in each])
def test_the_truth_is_the_whole_gradient_in_slices(monkeypatch, operator) -> None:
    """By the recurrent form, or the chunkwise one where that takes too much memory."""
    shape = Shape(2, 40, 2, 16, 32)
    (case,) = cases_of(operator, shape, ["normal+initial+last"])
    tensors, cotangents = make_case(operator, shape, case, CPU, "fp32", 3)
    given = {"kind": accuracy.AS_GIVEN, "recurrent": True}
    leaves = {name: x.double().requires_grad_(name not in operator.constants) for name, x in tensors.items()}
    decay = {} if operator.decay is None else {"g_gamma": operator.decay(2)}
    output, state = operator.recurrent(**leaves, **operator.options, **decay, **{operator.last: True})
    results = [output, *([state] if isinstance(state, Tensor) else state)][: len(cotangents)]
    wanted = {f"d{name}": leaf for name, leaf in leaves.items() if leaf.requires_grad}
    grads = torch.autograd.grad(results, list(wanted.values()), [x.double() for x in cotangents.values()])
    found = dict(zip(wanted, grads, strict=True))
    for slice_bytes in (2**28, 3 * 8 * 4 * 40 * 16 * 32, 1):
        monkeypatch.setitem(accuracy.SLICE_BYTES, "cpu", slice_bytes)
        truth = accuracy.compute_truth(operator, shape, tensors, cotangents, **given)
        assert truth.form == ("chunkwise" if slice_bytes == 1 else "recurrent") and not truth.picks.left_out
        errors = truth.errors(found)
        assert list(errors) == [f"d{name}" for name in tensors if name != "m_initial"]
        assert max(errors.values()) < 1e-11
    # which all have a tolerance in every dtype
    assert all(set(errors) < set(operator.tolerances(dtype)) for dtype in ("bf16", "fp16", "fp32"))
    # a sum over the whole call is told where all of it is picked
    monkeypatch.setitem(accuracy.FLOP_LIMIT, "cpu", 1.0)
    truth = accuracy.compute_truth(operator, shape, tensors, cotangents, **given)
    errors = truth.errors(found)
    assert truth.picks.left_out and max(errors.values()) < 1e-11
    assert not {f"d{name}" for name in operator.parameters} & set(errors)


def test_patterns_of_gates() -> None:
    operator, shape = OPERATORS["mlstm_exp"], Shape(1, 256, 4, 16, 16)
    default, plain = make_case(operator, shape, CASES["default"], CPU, "bf16", 0)
    normal, both = make_case(operator, shape, CASES["normal+initial+last"], CPU, "bf16", 0)
    assert [*default] == ["q", "k", "v", "i", "f"] and [*plain] == ["h"]
    assert [*both] == ["h", "c_initial", "n_initial"]
    assert [*normal][5:] == ["c_initial", "n_initial", "m_initial"]
    assert torch.allclose(normal["f"], default["f"] - 3, atol=1e-5) and torch.equal(plain["h"], both["h"])
    assert plain["h"].dtype == torch.bfloat16 and normal["c_initial"].dtype == torch.float32
    extreme, _ = make_case(operator, shape, CASES["extreme"], CPU, "bf16", 0)
    assert extreme["f"].min() == -30 and extreme["f"].max() == 30 and extreme["q"].min() >= 0
    # tokens that forget all or nothing; of GLA also some channels of every token
    for name in ("simple_gla", "gla"):
        default, normal, extreme = (
            make_case(OPERATORS[name], shape, CASES[case], CPU, "fp32", 0)[0]["g"]
            for case in ("default", "normal", "extreme")
        )
        assert -0.1 < default.mean() < 0 and normal.mean() == pytest.approx(-0.8, abs=0.1)
        assert (extreme[:, 6::7] == -30).flatten(2)[..., 0].all() and extreme.max() == 0
        assert ((extreme < 0) & (extreme > -30)).any()
    assert (extreme[..., 2::5] == -30).all() and (extreme[..., 4::5] == 0).all()
