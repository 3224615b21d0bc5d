"""One contest: what is checked, timed and told of each variant."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tfla_tk import UnsupportedError
from tfla_tk.bench import results, runner, timing
from tfla_tk.bench.operators import OPERATORS
from tfla_tk.bench.runner import OK, Contest, run_contest
from tfla_tk.bench.shapes import Shape
from tfla_tk.bench.timing import Ceilings, Timing
from tfla_tk.bench.variants import Variant

from .conftest import Result, exact

SHAPE = Shape(1, 64, 2, 16, 32)
EXP = OPERATORS["mlstm_exp"]
VARIANTS = [Variant("tk"), Variant("triton:xl_chunk_64")]


@pytest.mark.parametrize("which", ["fwd", "fwdbwd"])
def test_rows_are_valid_and_share_the_run(settings, break_backends, which: str) -> None:
    break_backends(exact)
    outcomes = run_contest(Contest(EXP, which, SHAPE, VARIANTS), settings)
    names = ["h"] if which == "fwd" else ["h", "dq", "dk", "dv", "di", "df"]
    for outcome in outcomes:
        assert outcome.status == OK
        results.validate(outcome.row)
        assert outcome.row["run"] == "run-a" and outcome.row["pass"] == which
        assert list(outcome.row["rel_err"]) == names
    # the baseline's gradients are checked without the normaliser's part
    assert "note" not in outcomes[0].row
    assert ("orthogonal" in outcomes[1].row.get("note", "")) == (which == "fwdbwd")


def test_a_step_accumulates_nothing_and_the_forward_records_no_graph(break_backends) -> None:
    inputs = EXP.inputs(SHAPE, torch.float32, torch.device("cpu"), "bnsd", 0, 3.0)
    recording: list[bool] = []

    def spy(backend: str, tensors: dict[str, torch.Tensor]) -> Result:
        recording.append(torch.is_grad_enabled())
        return exact(backend, tensors)

    break_backends(spy)
    runner.make_step(EXP, VARIANTS[0], inputs, {})()
    assert recording == [False]
    step = runner.make_step(EXP, VARIANTS[0], inputs, {"h": torch.ones(1, 2, 64, 32)})
    first, second = step(), step()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not any(tensor.requires_grad for tensor in inputs.values())


def test_figures_of_a_row(settings) -> None:
    shape = Shape(8, 8192, 16, 128, 256)
    ceilings = Ceilings(copy=4.27e12, gemm=699e12)
    settings = dataclasses.replace(settings, dtype="bf16", ceilings=ceilings, layout="bsnd", forget_bias=12.0)
    contest = Contest(EXP, "fwd", shape, ())
    outcome = runner.Outcome(Variant("tk:sequential", "sequential"), errors={"h": 0.00234567})
    row = runner.make_row(contest, outcome, settings, Timing(0.5, 0.49, 0.52, 50), 3 * 2**20, graph_ms=0.4)
    results.validate(row)
    assert (row["backend"], row["schedule"]) == ("tk", "sequential")
    # 180,224 FLOP and 1548 bytes for each of 1,048,576 tokens and heads in 0.5 ms
    assert row["tflops"] == pytest.approx(377.96, abs=0.01)
    assert row["gbps"] == pytest.approx(3246.4, abs=0.1)
    assert (row["ms"], row["ms_p20"], row["ms_p80"]) == (0.5, 0.49, 0.52)
    assert row["roofline"] == pytest.approx(0.76)
    assert (row["peak_mem_mb"], row["graph_ms"], row["rel_err"]) == (3.0, 0.4, {"h": 0.00235})
    assert (row["layout"], row["forget_bias"]) == ("bsnd", 12.0)
    assert not {"repeats", "host_us", "launches", "note"} & row.keys()
    few = runner.make_row(contest, outcome, settings, Timing(0.5, 0.5, 0.5, 12), None)
    assert few["repeats"] == 12 and few["peak_mem_mb"] is None and "graph_ms" not in few


LIMIT = timing.HOST_BELOW_MS


@pytest.mark.parametrize(
    ("ms", "host_us", "always", "keys"),
    [
        (0.49, 10.0, False, {"host_us", "graph_ms", "launches", "launch_us"}),
        # launches may dominate where the host takes more than half of a call
        (0.8, 390.0, False, {"host_us"}),
        (0.8, 410.0, False, {"host_us", "graph_ms", "launches", "launch_us"}),
        (LIMIT, 9e9, False, set()),
        (LIMIT, 9e9, True, {"graph_ms", "launches", "launch_us"}),
    ],
)
def test_times_of_the_host_and_of_graphs(
    settings, stopwatch, monkeypatch: pytest.MonkeyPatch, ms: float, host_us: float, always: bool, keys: set
) -> None:
    stopwatch.times["replay"] = 0.05
    captured = timing.Captured(stopwatch.step("replay"), 3)
    monkeypatch.setattr(timing, "capture", lambda step, device: captured)
    monkeypatch.setattr(timing, "launch_us", lambda wait: 2.5)
    monkeypatch.setattr(timing, "host_us", lambda step, wait: host_us)
    step = stopwatch.step("a")
    assert runner._other_times(step, ms, settings, always_graph=always) == {}
    on_gpu = dataclasses.replace(settings, device=torch.device("cuda"))
    more = runner._other_times(step, ms, on_gpu, always_graph=always)
    assert set(more) == keys and "a" not in stopwatch.ran
    assert "launches" not in more or (more["launches"], more["launch_us"]) == (3, 7.5)


def test_the_parallel_form_refuses_long_sequences() -> None:
    with pytest.raises(UnsupportedError, match=r"matrices takes 34 GB"):
        runner.refuse_quadratic(Variant("reference:parallel"), Shape(8, 8192, 16, 16, 16))
