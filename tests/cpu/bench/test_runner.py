from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from tfla_tk import UnsupportedError, reference
from tfla_tk.bench import results, runner, timing
from tfla_tk.bench.ceilings import Ceilings
from tfla_tk.bench.operators import OPERATORS, Operator
from tfla_tk.bench.runner import FAILED, OK, UNSUPPORTED, run_contest
from tfla_tk.bench.shapes import Shape
from tfla_tk.bench.timing import Timing
from tfla_tk.bench.variants import Variant

SHAPE = Shape(1, 64, 2, 16, 32)
Backend = Callable[..., torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Faked(Operator):
    """mLSTM whose backends are functions of this test."""

    backends: dict[str, Backend] = dataclasses.field(default_factory=dict)

    def call(self, backend: str, *tensors: torch.Tensor) -> torch.Tensor:
        return self.backends[backend](*tensors)


def faked(**backends: Backend) -> Faked:
    names = {name.replace("__", ":"): call for name, call in backends.items()}
    fields = {f.name: getattr(OPERATORS["mlstm_exp"], f.name) for f in dataclasses.fields(Operator)}
    return Faked(**fields, backends=names)


def exact(*tensors: torch.Tensor) -> torch.Tensor:
    return reference.mlstm_chunkwise(*tensors)


def wrong(*tensors: torch.Tensor) -> torch.Tensor:
    return 1.1 * reference.mlstm_chunkwise(*tensors)


def broken(*tensors: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("illegal memory access\nsecond line")


def refusing(*tensors: torch.Tensor) -> torch.Tensor:
    raise UnsupportedError("mlstm_chunkwise", "S = 64 is too short", "pad S")


@pytest.mark.parametrize("which", ["fwd", "fwdbwd"])
def test_rows_are_valid_and_share_the_run(settings, which: str) -> None:
    variants = [Variant("tk", "tk"), Variant("triton:xl_chunk_64", "triton:xl_chunk_64")]
    operator = faked(tk=exact, triton__xl_chunk_64=exact)
    outcomes = run_contest(operator, SHAPE, which, variants, settings)
    assert [outcome.status for outcome in outcomes] == [OK, OK]
    for outcome in outcomes:
        results.validate(outcome.row)
        assert outcome.row["run"] == "run-a" and outcome.row["pass"] == which
    names = ["h"] if which == "fwd" else ["h", "dq", "dk", "dv", "di", "df"]
    assert list(outcomes[0].row["rel_err"]) == names


@pytest.mark.slow
def test_a_wrong_backend_is_refused_and_the_others_are_timed(settings) -> None:
    timed: list[str] = []

    def counted(*tensors: torch.Tensor) -> torch.Tensor:
        timed.append("wrong")
        return wrong(*tensors)

    variants = [Variant(name, name) for name in ("tk", "triton:a", "triton:b", "triton:c")]
    operator = faked(tk=counted, triton__a=exact, triton__b=broken, triton__c=refusing)
    outcomes = run_contest(operator, SHAPE, "fwd", variants, settings)
    assert [outcome.status for outcome in outcomes] == [FAILED, OK, FAILED, UNSUPPORTED]
    assert timed == ["wrong"]
    assert [outcome.row is not None for outcome in outcomes] == [False, True, False, False]
    assert outcomes[0].reason == "error against fp64: h 1.0e-01 > 1.0e-04"
    assert outcomes[0].errors["h"] == pytest.approx(0.1, rel=1e-4)
    assert outcomes[2].reason == "RuntimeError: illegal memory access"
    assert outcomes[3].reason == "S = 64 is too short (pad S)"


def test_nan_in_one_element_is_refused(settings) -> None:
    def poisoned(*tensors: torch.Tensor) -> torch.Tensor:
        h = exact(*tensors)
        h[0, 1, 63, 31] = float("nan")
        return h

    outcome = run_contest(faked(tk=poisoned), SHAPE, "fwd", [Variant("tk", "tk")], settings)[0]
    assert (outcome.status, outcome.reason) == (FAILED, "error against fp64: h is not finite")


def test_a_wrong_gradient_is_refused(settings) -> None:
    def shifted(q, k, v, i, f) -> torch.Tensor:
        # right output, gradient of f doubled
        return exact(q, k, v, i, f + f - f.detach())

    outcome = run_contest(faked(tk=shifted), SHAPE, "fwdbwd", [Variant("tk", "tk")], settings)[0]
    assert outcome.status == FAILED
    assert outcome.errors["df"] == pytest.approx(1.0, rel=1e-4)
    assert "df 1.0e+00" in outcome.reason and "dq" not in outcome.reason


def test_gradients_do_not_accumulate(settings) -> None:
    inputs = OPERATORS["mlstm_exp"].inputs(SHAPE, torch.float32, torch.device("cpu"), "bnsd", 0)
    step = runner.make_step(faked(tk=exact), Variant("tk", "tk"), inputs, torch.ones(1, 2, 64, 32))
    first, second = step(), step()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not any(tensor.requires_grad for tensor in inputs.values())


def test_forward_pass_records_no_graph(settings) -> None:
    inputs = OPERATORS["mlstm_exp"].inputs(SHAPE, torch.float32, torch.device("cpu"), "bnsd", 0)
    recording: list[bool] = []

    def spy(*tensors: torch.Tensor) -> torch.Tensor:
        recording.append(torch.is_grad_enabled())
        return exact(*tensors)

    runner.make_step(faked(tk=spy), Variant("tk", "tk"), inputs, None)()
    assert recording == [False]


def test_the_baselines_gradients_are_checked_without_the_normaliser(settings) -> None:
    variants = [Variant("tk", "tk"), Variant("triton:a", "triton:a")]
    kinds = [runner.cotangent_kind(OPERATORS["mlstm_exp"], variant, "fwdbwd") for variant in variants]
    assert kinds == ["random", "orthogonal"]
    assert runner.cotangent_kind(OPERATORS["mlstm_exp"], variants[1], "fwd") == "random"
    assert runner.cotangent_kind(OPERATORS["mlstm_sig"], variants[1], "fwdbwd") == "random"
    outcomes = run_contest(faked(tk=exact, triton__a=exact), SHAPE, "fwdbwd", variants, settings)
    assert "note" not in outcomes[0].row
    assert "orthogonal" in outcomes[1].row["note"]


def test_advance_is_called_as_often_as_announced(settings) -> None:
    variants = [Variant(name, name) for name in ("tk", "triton:a")]
    labels: list[str] = []
    run_contest(faked(tk=exact, triton__a=broken), SHAPE, "fwd", variants, settings, labels.append)
    assert labels == ["fp64 reference", "tk", "triton:a", "tk", "triton:a"]
    assert len(labels) == runner.steps_of(variants)


def test_figures_of_a_row(settings) -> None:
    shape = Shape(8, 8192, 16, 128, 256)
    settings = dataclasses.replace(settings, dtype="bf16", ceilings=Ceilings(copy=4.27e12, gemm=699e12))
    outcome = runner.Outcome("mlstm_exp", shape, "fwd", Variant("tk:sequential", "tk", "sequential"))
    outcome.errors = {"h": 0.00234567}
    operator = OPERATORS["mlstm_exp"]
    graph = runner.GraphTimes(0.4)
    row = runner.make_row(operator, outcome, settings, Timing(0.5, 0.49, 0.52, 50), 3 * 2**20, graph)
    results.validate(row)
    assert (row["backend"], row["schedule"]) == ("tk", "sequential")
    # 180,224 FLOP and 1548 bytes for each of 1,048,576 tokens and heads in 0.5 ms
    assert row["tflops"] == pytest.approx(377.96, abs=0.01)
    assert row["gbps"] == pytest.approx(3246.4, abs=0.1)
    assert row["roofline"] == pytest.approx(0.76)
    assert (row["peak_mem_mb"], row["graph_ms"], row["rel_err"]) == (3.0, 0.4, {"h": 0.00235})
    assert "repeats" not in row
    assert not {"layout", "forget_bias", "host_us"} & row.keys()
    few = runner.make_row(operator, outcome, settings, Timing(0.5, 0.5, 0.5, 12), None)
    assert few["repeats"] == 12 and few["peak_mem_mb"] is None and "graph_ms" not in few
    counted = runner.GraphTimes(0.4, 3, 7.891)
    told = runner.make_row(operator, outcome, settings, Timing(0.5, 0.5, 0.5, 50), None, counted, 41.2)
    results.validate(told)
    assert (told["launches"], told["launch_us"], told["host_us"]) == (3, 7.89, 41.2)
    assert "launches" not in row


def test_inputs_other_than_the_default_ones_are_in_the_row(settings) -> None:
    settings = dataclasses.replace(settings, layout="bsnd", forget_bias=12.0)
    outcome = runner.Outcome("mlstm_exp", SHAPE, "fwd", Variant("tk", "tk"))
    row = runner.make_row(
        OPERATORS["mlstm_exp"], outcome, settings, Timing(0.5, 0.5, 0.5, 50), None, host_us=41.234
    )
    results.validate(row)
    assert (row["layout"], row["forget_bias"], row["host_us"]) == ("bsnd", 12.0, 41.2)


def test_host_time_of_short_calls_on_a_gpu(settings, stopwatch, monkeypatch: pytest.MonkeyPatch) -> None:
    step = stopwatch.step("a")
    limit = runner.timing.HOST_BELOW_MS
    short, long = (Timing(ms, ms, ms, 50) for ms in (0.9 * limit, limit))
    assert runner._host_us(step, short, settings) is None
    on_gpu = dataclasses.replace(settings, device=torch.device("cuda"))
    assert runner._host_us(step, long, on_gpu) is None and stopwatch.ran == []
    assert runner._host_us(step, short, on_gpu) > 0
    # enqueued without being read, and drained by the stopwatch
    assert len(stopwatch.ran) >= 100 and set(stopwatch.log) == {"|"}


@pytest.mark.parametrize(
    ("ms", "host_us", "measured"),
    [(0.49, 10.0, True), (0.8, 390.0, False), (0.8, 410.0, True), (0.8, None, False)],
)
def test_graph_replay_where_launches_may_dominate(
    settings, stopwatch, monkeypatch: pytest.MonkeyPatch, ms: float, host_us: float | None, measured: bool
) -> None:
    stopwatch.times["replay"] = 0.05
    captured = timing.Captured(stopwatch.step("replay"), 3)
    monkeypatch.setattr(timing, "capture", lambda step, device: captured)
    monkeypatch.setattr(timing, "launch_us", lambda wait: 2.5)
    timed = Timing(ms, ms, ms, 50)
    assert runner._graph(stopwatch.step("a"), timed, host_us, settings) is None
    on_gpu = dataclasses.replace(settings, device=torch.device("cuda"))
    found = runner._graph(stopwatch.step("a"), timed, host_us, on_gpu)
    assert (found is not None) == measured
    assert found is None or found[1:] == (3, 7.5)
    assert "a" not in stopwatch.ran
    always = [runner._graph(stopwatch.step("a"), timed, host_us, x, always=True) for x in (settings, on_gpu)]
    assert always[0] is None and always[1] is not None


def test_the_parallel_form_refuses_long_sequences(settings) -> None:
    variant = Variant("reference:parallel", "reference:parallel")
    outcome = runner.Outcome("mlstm_exp", Shape(8, 8192, 16, 16, 16), "fwd", variant)
    with pytest.raises(UnsupportedError, match=r"matrices takes 34 GB"):
        runner.refuse_quadratic(outcome)
