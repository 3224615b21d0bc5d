from __future__ import annotations

import pytest
import torch

from tfla_tk.bench import timing
from tfla_tk.bench.timing import Plan, Timing, interleave, warm_up


def test_statistics() -> None:
    found = Timing.of([5.0, 1.0, 2.0, 3.0, 4.0, 100.0])
    assert found.ms == 3.5
    # linear interpolation between order statistics: positions 1 and 4 of 0..5
    assert (found.p20, found.p80) == (2.0, 5.0)
    assert found.repeats == 6
    assert Timing.of([7.0]) == Timing(7.0, 7.0, 7.0, 1)


def test_rounds_are_interleaved_and_a_slow_step_is_spread_over_them(stopwatch) -> None:
    steps = {name: stopwatch.step(name) for name in "abc"}
    found = interleave(steps, {"a": 6, "b": 6, "c": 2}, stopwatch)
    assert "".join(stopwatch.log) == "ab|ab|abc|ab|ab|abc|"
    assert [found[name].repeats for name in "abc"] == [6, 6, 2]
    # 1.01, 1.02
    assert found["c"].ms == pytest.approx(1.015)


def test_repeats_within_the_budget() -> None:
    expected = {0.0: 30, 1.0: 30, 50.0: 20, 400.0: 3, 1000.0: 3, 1001.0: 1}
    plan = Plan(repeats=30, budget_ms=1000)
    assert {estimate: plan.repeats_for(estimate) for estimate in expected} == expected


def test_host_time_is_the_median_call_and_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    log: list[str] = []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def step() -> None:
        log.append("s")
        # 40 us, and one call in ten meets an idle GPU
        now[0] += 400e-6 if log[-2] == "w" else 40e-6

    def wait() -> None:
        log.append("w")
        now[0] += 1.0

    assert timing.host_us(step, wait) == pytest.approx(40.0)
    assert log.count("s") >= 100
    bursts = "".join(log).split("w")
    assert log[0] == log[-1] == "w" and {len(burst) for burst in bursts[1:-1]} == {timing.HOST_BURST}


def test_warm_up_runs_until_a_step_is_warm(stopwatch) -> None:
    assert warm_up(stopwatch.step("a"), stopwatch) == pytest.approx(1.03)
    assert stopwatch.ran == ["a"] * 3
    stopwatch.times["b"] = 500.0  # which is more than the budget
    assert warm_up(stopwatch.step("b"), stopwatch, budget_ms=100) == pytest.approx(500.01)
    assert stopwatch.ran[3:] == ["b"]


def test_cuda_stopwatch_flushes_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("event")

        def elapsed_time(self, end: Event) -> float:
            assert end is not self
            return 0.25

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("wait"))
    monkeypatch.setattr(timing, "FLUSH_BYTES", 64)
    stopwatch = timing.CudaStopwatch(torch.device("cpu"))
    monkeypatch.setattr(stopwatch.flush, "zero_", lambda: log.append("flush"), raising=False)
    found = interleave(
        {"a": lambda: log.append("a"), "b": lambda: log.append("b")}, {"a": 1, "b": 1}, stopwatch
    )
    untimed = ["flush", "a"]
    one = ["flush", "event", "a", "event"]
    assert log == [*untimed, *one, "flush", "event", "b", "event", "wait"]
    assert found["a"] == Timing(0.25, 0.25, 0.25, 1)
