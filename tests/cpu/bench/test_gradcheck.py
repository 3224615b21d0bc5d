from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tfla_tk
from tfla_tk import UnsupportedError, reference
from tfla_tk.bench import accuracy, gradcheck, gradcheck_cases
from tfla_tk.bench.gradcheck_cases import (
    CASES,
    PROBLEMS,
    Case,
    Settings,
    compute_truth,
    gradients,
    make_case,
)
from tfla_tk.bench.operators import OPERATORS
from tfla_tk.bench.shapes import Shape
from tfla_tk.cli import main

SMALL = ("--shapes", "1x40x2x16x16")
EXP = ("--op", "mlstm_exp", *SMALL)
FORMS = [f"reference:{form}" for form in ("recurrent", "parallel", "chunkwise")]
Result = tuple[Tensor, tuple[Tensor, ...]]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradcheck.torch.cuda, "is_available", lambda: False)


@pytest.fixture
def break_backends(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Result]], None]:
    """Every backend of mLSTMexp becomes a function of the reference's (h, states) and of the inputs."""

    def patch(distort: Callable[..., Result]) -> None:
        def broken(*, backend: str, return_last_states: bool, **tensors: Tensor) -> Any:
            h, state = distort(backend, tensors)
            return (h, state) if return_last_states else h

        monkeypatch.setattr(tfla_tk, "mlstm_chunkwise", broken)

    return patch


def exact(backend: str, tensors: dict[str, Tensor]) -> Result:
    result: Result = reference.mlstm_chunkwise(**tensors, return_last_states=True)
    return result


def scaled_forget_gate_gradient(backend: str, tensors: dict[str, Tensor]) -> Result:
    f = tensors["f"]
    # the value of f, 1.02 times its gradient
    return exact(backend, {**tensors, "f": f.detach() + 1.02 * (f - f.detach())})


def no_gradient_of_the_last_state(backend: str, tensors: dict[str, Tensor]) -> Result:
    h, (c, n, m) = exact(backend, tensors)
    return h, (c.detach() + 0 * c, n, m)


def no_gradient_of_the_initial_state(backend: str, tensors: dict[str, Tensor]) -> Result:
    return exact(backend, {**tensors, "n_initial": tensors["n_initial"].detach()})


def not_finite(backend: str, tensors: dict[str, Tensor]) -> Result:
    h, state = exact(backend, tensors)
    # sqrt has an infinite slope at zero
    return h + (0 * tensors["q"].sum()).sqrt(), state


def refuse(backend: str, tensors: dict[str, Tensor]) -> Result:
    raise UnsupportedError("mlstm_chunkwise", "the kernels have no backward yet", "use the reference")


def refuse_states(backend: str, tensors: dict[str, Tensor]) -> Result:
    return refuse(backend, tensors) if "c_initial" in tensors else exact(backend, tensors)


def crash(backend: str, tensors: dict[str, Tensor]) -> Result:
    raise RuntimeError("illegal memory access\nsecond line")


def test_the_forms_of_the_reference_and_the_op_pass(tmp_path: Path, capsys) -> None:
    path = tmp_path / "errors.json"
    cases = "default,normal+last,extreme+initial+last"
    options = ["--op", "mlstm_exp,mlstm_sig", *SMALL, "--cases", cases, "--json", str(path)]
    assert main(["gradcheck", *options]) == 0
    rows = json.loads(path.read_text())
    assert [row["backend"] for row in rows[:4]] == [*FORMS, "op"]
    assert len(rows) == 3 * 3 * 4
    assert {(row["op"], row["normalize"]) for row in rows} == {
        ("mlstm_exp", True),
        ("mlstm_sig", True),
        ("mlstm_sig", False),
    }
    for row in rows:
        assert row["status"] == "ok" and row["reason"] == "" and not row["partial"]
        assert row["dtype"] == "fp32" and row["truth"] == "recurrent" and row["gpu"] is None
        assert row["shape"] == {"B": 1, "T": 40, "H": 2, "K": 16, "V": 16}
        initial = ["dc_initial", "dn_initial"][: 1 + row["normalize"]] if "initial" in row["case"] else []
        assert list(row["rel_err"]) == ["dq", "dk", "dv", "di", "df", *initial]
        assert all(0 < error < row["tolerance"][name] for name, error in row["rel_err"].items())
    out = capsys.readouterr().out
    assert "mLSTM, exponential input gate, gradients, B1 T40 H2 16/16; truth: recurrent in fp64" in out
    assert "normalize=False" in out and "!" not in out.split("\n\n", 1)[1]
    assert "36 checks: 36 within tolerance, 0 failed, 0 not served." in out


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_other_dtypes_pass(dtype: str, capsys) -> None:
    assert main(["gradcheck", *SMALL, "--dtype", dtype, "--cases", "default+initial+last"]) == 0
    assert f"; {dtype}" in capsys.readouterr().out


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
    break_backends, tmp_path: Path, capsys, broken, caught: str, passed: str | None, wrong: set[str]
) -> None:
    break_backends(broken)
    path = tmp_path / "errors.json"
    options = ("gradcheck", *EXP, "--backends", "reference:chunkwise", "--json", str(path))
    assert main([*options, "--cases", caught]) == 1
    (row,) = json.loads(path.read_text())
    found, limits = row["rel_err"], row["tolerance"]
    assert {name for name in found if found[name] is None or found[name] > limits[name]} == wrong
    assert row["status"] == "FAILED" and all(name in row["reason"] for name in wrong)
    assert capsys.readouterr().out.split("\n\n", 1)[1].count("!") == len(wrong)
    if passed is not None:
        assert main([*options, "--cases", passed]) == 0


@pytest.mark.parametrize(
    ("broken", "backends", "status"),
    [
        # a baseline counts only where it was named
        (scaled_forget_gate_gradient, "triton", 0),
        (scaled_forget_gate_gradient, "triton:xl_chunk_64", 1),
        (scaled_forget_gate_gradient, "tk", 1),
        (crash, "triton", 0),
        (crash, "triton:xl_chunk_64", 1),
        (crash, "tk", 1),
        # what is not served counts where it was named and nothing of it was checked
        (refuse, "triton", 1),
        (refuse, "triton:xl_chunk_64", 1),
        (refuse, "tk", 1),
        (refuse_states, "triton", 0),
        (refuse_states, "triton:xl_chunk_64", 0),
        (refuse_states, "tk", 0),
        (exact, "triton:xl_chunk_64,tk,reference", 0),
    ],
)
def test_exit_status(break_backends, broken, backends: str, status: int) -> None:
    break_backends(broken)
    cases = "default,default+initial"
    assert main(["gradcheck", *EXP, "--backends", backends, "--cases", cases]) == status


def test_what_is_not_served_is_told_with_its_reason(break_backends, tmp_path: Path, capsys) -> None:
    break_backends(lambda backend, x: (refuse if backend != "tk" else refuse_states)(backend, x))
    path = tmp_path / "errors.json"
    options = ("--backends", "tk,triton:xl_chunk_64", "--cases", "default,default+initial")
    assert main(["gradcheck", *EXP, *options, "--json", str(path)]) == 1
    out = capsys.readouterr().out
    reason = "the kernels have no backward yet (use the reference)"
    assert f"  triton:xl_chunk_64: unsupported: {reason}\n" in out
    assert f"  tk: unsupported: {reason} [default+initial]\n" in out
    assert "4 checks: 1 within tolerance, 0 failed, 3 not served." in out
    rows = json.loads(path.read_text())
    assert [row["status"] for row in rows] == ["ok", "unsupported", "unsupported", "unsupported"]
    assert rows[1]["rel_err"] == {} and rows[1]["reason"] == reason


def test_a_crash_is_told(break_backends, capsys) -> None:
    break_backends(crash)
    assert main(["gradcheck", *EXP, "--backends", "tk", "--cases", "default"]) == 1
    assert "tk: FAILED: RuntimeError: illegal memory access\n" in capsys.readouterr().out


@pytest.mark.slow
def test_long_sequences_are_judged_by_the_chunkwise_form(monkeypatch, capsys) -> None:
    monkeypatch.setattr(gradcheck_cases, "RECURRENT_TOKENS", 39)
    options = ("--backends", "reference:recurrent,op", "--cases", "extreme+initial+last")
    assert main(["gradcheck", *SMALL, *options]) == 0
    assert "truth: chunkwise in fp64" in capsys.readouterr().out


def retention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    gamma = reference.retention_log_decay(v.shape[2], torch.float64)
    return reference.simple_gla_parallel(q, k, v, g_gamma=gamma, **options)


def lightning(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    layer = OPERATORS["lightning"].decay_options
    gamma = reference.lightning_log_decay(v.shape[2], **layer, dtype=torch.float64)
    return reference.simple_gla_parallel(q, k, v, g_gamma=gamma, **options)


PARALLEL: dict[str, Callable[..., Any]] = {
    "mlstm_exp": reference.mlstm_parallel,
    "mlstm_sig": reference.mlstm_siging_parallel,
    "simple_gla": reference.simple_gla_parallel,
    "retention": retention,
    "lightning": lightning,
    "delta_rule": reference.delta_rule_parallel,
    "gla": reference.gla_parallel,
}


def parallel_of(problem: Any) -> Callable[..., Any]:
    """The parallel form of the reference, of raw inputs where the options say so."""
    name = problem.operator.name
    if name != "gated_delta_rule":
        return PARALLEL[name]

    def function(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        A_log: Tensor | None = None,
        dt_bias: Tensor | None = None,
        **options: Any,
    ) -> Any:
        if options.pop("use_gate_in_kernel", False):
            g = -A_log.exp() * torch.nn.functional.softplus(g + dt_bias)
        if options.pop("use_qk_l2norm_in_kernel", False):
            q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        if options.pop("use_beta_sigmoid_in_kernel", False):
            beta = torch.sigmoid(beta) * (2 if options.pop("allow_neg_eigval") else 1)
        return reference.gated_delta_rule_parallel(q, k, v, g, beta, **options)

    return function


@pytest.mark.parametrize("slice_bytes", [2**28, 3 * 8 * 4 * 40 * 16 * 32, 1])
@pytest.mark.parametrize(
    "problem", [one for both in PROBLEMS.values() for one in both], ids=lambda p: p.title
)
def test_the_truth_is_the_whole_gradient_in_slices(monkeypatch, slice_bytes: int, problem) -> None:
    monkeypatch.setitem(accuracy.SLICE_BYTES, "cpu", slice_bytes)
    shape = Shape(2, 40, 2, 16, 32)
    settings = Settings(torch.device("cpu"), "fp32", 3)
    (case,) = problem.cases([CASES["normal+initial+last"]])
    tensors, cotangents = make_case(problem, shape, case, settings)
    form, truth = compute_truth(problem, shape, tensors, cotangents)
    assert form == ("chunkwise" if slice_bytes == 1 else "recurrent") and not truth.partial
    exact64 = [{name: x.double() for name, x in group.items()} for group in (tensors, cotangents)]

    def parallel(**arguments: Any) -> Any:
        return parallel_of(problem)(**arguments, **problem.operator.options)

    errors = truth.errors(accuracy.RANDOM, gradients(parallel, problem.operator, *exact64))
    assert list(errors) == [f"d{name}" for name in tensors if name != "m_initial"]
    assert max(errors.values()) < 1e-11


def test_cases() -> None:
    assert len(CASES) == 12 and set(gradcheck.DEFAULT_CASES) < set(CASES)
    assert CASES["extreme+initial+last"] == Case("extreme", True, True)
    assert CASES["normal"] == Case("normal")
    (problem,) = PROBLEMS["mlstm_exp"]
    shape, settings = Shape(1, 256, 4, 16, 16), Settings(torch.device("cpu"), "bf16", 0)
    default, plain = make_case(problem, shape, CASES["default"], settings)
    normal, both = make_case(problem, shape, CASES["normal+initial+last"], settings)
    assert [*default] == ["q", "k", "v", "i", "f"] and [*plain] == ["h"]
    assert [*both] == ["h", "c_initial", "n_initial"]
    assert [*normal][5:] == ["c_initial", "n_initial", "m_initial"]
    assert torch.allclose(normal["f"], default["f"] - 3, atol=1e-5) and torch.equal(plain["h"], both["h"])
    assert plain["h"].dtype == torch.bfloat16 and normal["c_initial"].dtype == torch.float32
    extreme, _ = make_case(problem, shape, CASES["extreme"], settings)
    assert extreme["f"].min() == -30 and extreme["f"].max() == 30 and extreme["q"].min() >= 0


def test_every_gradient_has_a_tolerance() -> None:
    for problem in (one for both in PROBLEMS.values() for one in both):
        settings = Settings(torch.device("cpu"), "bf16", 0)
        (case,) = problem.cases([CASES["default+initial+last"]])
        tensors, cotangents = make_case(problem, Shape(1, 32, 2, 16, 16), case, settings)
        wanted = {f"d{name}" for name in tensors if name not in problem.operator.constants}
        for dtype in ("bf16", "fp16", "fp32"):
            limits = problem.operator.tolerances(dtype)
            assert set(limits) == {*wanted, next(iter(cotangents))}


def test_an_operator_without_a_gate_has_no_patterns_of_gates() -> None:
    (problem,) = PROBLEMS["retention"]
    found = problem.cases([CASES["default"], CASES["extreme"], CASES["normal+last"]])
    assert found == [CASES["default"], CASES["default+last"]]


def test_extreme_gates_of_the_scalar_decay() -> None:
    (problem,) = PROBLEMS["simple_gla"]
    shape, settings = Shape(1, 64, 2, 16, 16), Settings(torch.device("cpu"), "fp32", 0)
    tensors, _ = make_case(problem, shape, CASES["extreme"], settings)
    assert (tensors["g"][:, 6::7] == -30).all() and (tensors["g"][:, 3::7] == 0).all()
    assert tensors["g"].max() == 0 and tensors["q"].min() < 0


GATES = {"simple_gla": ["dg"], "gla": ["dg"], "delta_rule": ["dbeta"], "gated_delta_rule": ["dg", "dbeta"]}


@pytest.mark.parametrize("op", ["retention", "lightning", *GATES])
@pytest.mark.parametrize("shapes", ["1x40x2x16x16", "1x64x2x16x32xN5"])
def test_the_operators_of_fla(op: str, shapes: str, tmp_path: Path, capsys) -> None:
    path, packed = tmp_path / "errors.json", "N" in shapes
    options = ["--op", op, "--shapes", shapes, "--json", str(path)]
    if packed:
        options += ["--cases", "default,normal+initial"]
    assert main(["gradcheck", *options]) == 0
    rows = json.loads(path.read_text())
    assert {row["backend"] for row in rows} == set(FORMS)
    for row in rows:
        initial = ["dinitial_state"] * ("initial" in row["case"])
        parameters = ["dA_log", "ddt_bias"] * row["options"].get("use_gate_in_kernel", False)
        assert list(row["rel_err"]) == ["dq", "dk", "dv", *GATES.get(op, []), *parameters, *initial]
    assert ("extreme+initial+last" in {row["case"] for row in rows}) == (op in GATES and not packed)
    assert "truth: recurrent in fp64" in capsys.readouterr().out


def test_extreme_gates_of_channels() -> None:
    """Tokens that forget all or nothing, and channels of them; neither all of them."""
    (problem,) = PROBLEMS["gla"]
    shape, settings = Shape(1, 64, 2, 16, 16), Settings(torch.device("cpu"), "fp32", 0)
    g = make_case(problem, shape, CASES["extreme"], settings)[0]["g"]
    assert (g[:, 6::7, :, 0] == -30).all() and (g[..., 2::5] == -30).all() and (g[..., 4::5] == 0).all()
    assert ((g < 0) & (g > -30)).any()


def test_a_wrong_gate_gradient_of_the_scalar_decay_is_caught(monkeypatch, capsys) -> None:
    right = tfla_tk.chunk_simple_gla

    def wrong(q: Tensor, k: Tensor, v: Tensor, g: Tensor, **options: Any) -> Any:
        return right(q, k, v, g.detach() + 1.02 * (g - g.detach()), **options)

    monkeypatch.setattr(tfla_tk, "chunk_simple_gla", wrong)
    options = ["--op", "simple_gla", *SMALL, "--backends", "reference:chunkwise", "--cases", "default"]
    assert main(["gradcheck", *options]) == 1
    assert "2.0e-02!" in capsys.readouterr().out


def test_value_heads_are_checked_against_the_repeated_heads(monkeypatch, capsys) -> None:
    options = ["--op", "simple_gla", "--shapes", "2x40x2x16x32xHV6", "--backends", "reference:chunkwise"]
    assert main(["gradcheck", *options]) == 0
    right = tfla_tk.chunk_simple_gla

    def swapped(q: Tensor, k: Tensor, v: Tensor, g: Tensor, **options: Any) -> Any:
        return right(q.flip(2), k.flip(2), v, g, **options)

    monkeypatch.setattr(tfla_tk, "chunk_simple_gla", swapped)
    assert main(["gradcheck", *options, "--cases", "default"]) == 1


def test_variants() -> None:
    def names(backends: list[str] | None, on_gpu: bool) -> list[str]:
        found = gradcheck.find_checked(OPERATORS["mlstm_sig"], backends, on_gpu=on_gpu)
        return [variant.call for variant in found]

    triton = [f"triton:siging_xl_{size}" for size in (64, 128, 256)]
    assert names(None, True) == ["tk", *triton, "reference"]
    assert names(None, False) == [*FORMS, "op"]
    assert names(["op"], False) == ["op"]
    assert names(["op", "reference:parallel"], False) == ["reference:parallel", "op"]
    with pytest.raises(ValueError, match="on a GPU that is tk"):
        names(["op"], True)


@pytest.mark.parametrize(
    "options",
    [
        ("--op", "softmax"),
        ("--shapes", "large"),
        ("--cases", "default+middle"),
        ("--dtype", "fp8"),
    ],
)
def test_wrong_usage(options: tuple[str, str], capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["gradcheck", *options])
    assert stop.value.code == 2
    assert options[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--backends", "cuda"), "--backends: expected tk, triton, reference"),
        (("--shapes", "1x1x1x16x16"), "--shapes: expected at least 2 tokens"),
        (
            ("--shapes", "1x64x1x16x16xN4", "--cases", "default+last"),
            "--cases: expected none with +last for packed sequences",
        ),
        (("--shapes", "1x64x2x16x16xHV4"), "shape HV: expected 2, mlstm_exp has no more value heads, got 4"),
    ],
)
def test_what_cannot_be_checked(options: tuple[str, str], message: str, capsys) -> None:
    assert main(["gradcheck", *options]) == 2
    assert message in capsys.readouterr().err


def test_defaults() -> None:
    parser = argparse.ArgumentParser()
    gradcheck.add_arguments(parser)
    args = parser.parse_args([])
    assert args.op == list(OPERATORS) and args.shapes is None and args.backends is None
    assert args.cases is None and args.seed == 0


def test_the_default_cases_of_packed_sequences_have_no_gradients_of_last_states(
    tmp_path: Path, capsys
) -> None:
    shape = Shape(1, 64, 2, 16, 16, N=5)
    expected = ["default", "default+initial", "normal+initial", "extreme+initial"]
    assert [str(case) for case in gradcheck.default_cases(shape)] == expected
    plain = [str(case) for case in gradcheck.default_cases(Shape(1, 64, 2, 16, 16))]
    assert plain == gradcheck_cases.DEFAULT_CASES
    path = tmp_path / "errors.json"
    options = ["--op", "gla", "--shapes", "1x40x1x16x16,1x40x1x16x16xN3", "--json", str(path)]
    assert main(["gradcheck", *options, "--backends", "reference:chunkwise"]) == 0
    rows = json.loads(path.read_text())
    assert [row["case"] for row in rows if "N" in row["shape"]] == expected
    assert [row["case"] for row in rows if "N" not in row["shape"]] == plain


@pytest.mark.slow
def test_the_gate_parameters_are_checked(tmp_path: Path, monkeypatch, capsys) -> None:
    """dA_log and ddt_bias are sums over batch and tokens; a slight error of one of them is found."""
    path = tmp_path / "errors.json"
    options = ["--op", "gated_delta_rule", "--shapes", "2x40x1x16x16xHV2", "--json", str(path)]
    options += ["--backends", "reference:chunkwise", "--cases", "default,extreme+initial+last"]
    assert main(["gradcheck", *options]) == 0
    rows = [row for row in json.loads(path.read_text()) if row["options"].get("use_gate_in_kernel")]
    assert len(rows) == 2
    for row in rows:
        assert list(row["rel_err"])[3:7] == ["dg", "dbeta", "dA_log", "ddt_bias"]
    assert "use_gate_in_kernel=True" in capsys.readouterr().out
    right = tfla_tk.chunk_gated_delta_rule

    def wrong(*, A_log: Tensor | None = None, **arguments: Any) -> Any:
        if A_log is not None:
            A_log = A_log.detach() + 1.02 * (A_log - A_log.detach())
        return right(A_log=A_log, **arguments)

    monkeypatch.setattr(tfla_tk, "chunk_gated_delta_rule", wrong)
    assert main(["gradcheck", *options, "--dtype", "fp32"]) == 1
    failed = [row["reason"] for row in json.loads(path.read_text()) if row["status"] == "FAILED"]
    assert failed and all("dA_log 2.0e-02" in reason and "ddt_bias" not in reason for reason in failed)


def test_parameters_are_left_out_where_not_all_is_picked(monkeypatch) -> None:
    monkeypatch.setitem(accuracy.FLOP_LIMIT, "cpu", 1.0)
    problem = PROBLEMS["gated_delta_rule"][-1]
    settings = Settings(torch.device("cpu"), "fp32", 0)
    shape = Shape(2, 40, 2, 16, 16)
    tensors, cotangents = make_case(problem, shape, CASES["default"], settings)
    _, truth = compute_truth(problem, shape, tensors, cotangents)
    options = {"chunk_size": 16, **problem.operator.options}

    def form(**arguments: Any) -> Any:
        return problem.operator.truth(**arguments, **options)

    errors = truth.errors(accuracy.RANDOM, gradients(form, problem.operator, tensors, cotangents))
    assert list(errors) == ["dq", "dk", "dv", "dg", "dbeta"] and max(errors.values()) < 1e-4
