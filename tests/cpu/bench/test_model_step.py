"""Whole models, Triton against tk: the command at toy size, and what becomes of variants that fail."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tfla_tk import UnsupportedError
from tfla_tk.bench import model_agreement, model_phases, model_runs, model_step, model_task, readme, results
from tfla_tk.bench.__main__ import main
from tfla_tk.bench.model_runs import carry_out, failures, limits
from tfla_tk.bench.model_task import AGREEMENT, NOISE, TRUTH, Task, Training
from tfla_tk.bench.timing import CpuStopwatch
from tfla_tk.integrations import xlstm
from tfla_tk.integrations.xlstm import kernels

OURS, THEIRS = "reference:chunkwise", "native"
XL, LIMIT = model_runs.TRITON
TRAINING = Training(layers=1, batch=1, length=64, steps=3, rate=1e-3)
FIGURES = {"ms": 2.0, "p20": 1.9, "p80": 2.2, "repeats": 3}


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Needs the packages; whatever was registered is undone."""
    pytest.importorskip("mlstm_kernels.torch", reason="mlstm-kernels is not installed")
    pytest.importorskip("xlstm", reason="xlstm is not installed")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    yield
    xlstm.unregister()


@pytest.fixture
def make_task() -> Callable[..., Task]:
    def make(phase: str = "decode", **changes: Any) -> Task:
        sizes = {"layers": 2, "width": 32, "heads": 2, "vocabulary": 256, "length": 64, "repeats": 2}
        given = {"variants": (OURS, THEIRS), "batches": (1,), "device": "cpu", "tokens": 3}
        return Task(phase, **{**sizes, **given, **changes})

    return make


def perform(task: Task) -> list[dict[str, Any]]:
    """What the journal of the process would hold, but for the marks of what is running."""
    found: list[dict[str, Any]] = []
    model_phases.perform(task, lambda **fact: found.append(json.loads(json.dumps(fact))))
    return [fact for fact in found if "running" not in fact]


@pytest.mark.slow
def test_the_command_runs_a_phase_in_a_process_of_its_own(tmp_path: Path, capsys) -> None:
    path = tmp_path / "rows.json"
    assert main(["model", "--phases", "decode", "--layers", "1", "--json", str(path), "--commit", "abc"]) == 0
    rows = results.load(path)
    assert [(row["backend"], row["shape"]["B"]) for row in rows] == [
        (OURS, 1),
        (OURS, 2),
        (THEIRS, 1),
        (THEIRS, 2),
    ]
    assert {(row["op"], row["pass"], row["commit"], row["repeats"]) for row in rows} == {
        ("model_step", "decode", "abc", 3)
    }
    assert rows[0]["shape"] == {"B": 1, "T": 1, "H": 2, "K": 16, "V": 32, "layers": 1, "width": 64}
    assert rows[0]["ms"] > 0 and rows[0]["tflops"] is None and rows[0]["rel_err"] == {}
    out = capsys.readouterr().out
    assert "decode, B2 T1, 1 layers of 64, H2 16/32" in out and "tokens/s" in out


def test_a_run_that_is_cut_off_leaves_the_rows_that_it_has(monkeypatch, tmp_path: Path) -> None:
    carry_out = model_step.carry_out

    def cut_off(task: Task, run_task):
        if task.phase == "decode":
            raise KeyboardInterrupt
        facts = [{"variant": v, "batch": task.batches[0], **FIGURES} for v in task.variants]
        return carry_out(task, lambda task: (facts, ""))

    monkeypatch.setattr(model_step, "carry_out", cut_off)
    path = tmp_path / "rows.json"
    assert main(["model", "--phases", "train,decode", "--json", str(path), "--commit", "abc"]) == 130
    assert {row["pass"] for row in results.load(path)} == {"train"}


def test_errors_of_the_agreement_go_into_the_rows(monkeypatch, tmp_path: Path, capsys) -> None:
    preset = dataclasses.replace(model_step.CPU, decode=(1,), training=TRAINING)
    monkeypatch.setattr(model_step, "CPU", preset)

    def run_task(task: Task) -> tuple[list[dict[str, Any]], str]:
        if task.phase == AGREEMENT:
            return perform(task), ""
        return [{"variant": name, "batch": task.batches[0], **FIGURES} for name in task.variants], ""

    monkeypatch.setattr(model_step, "run_task", run_task)
    path = tmp_path / "rows.json"
    assert main(["model", "--json", str(path), "--commit", "abc"]) == 0
    rows = results.load(path)
    assert [(row["pass"], row["backend"]) for row in rows] == [
        (phase, name) for phase in ("train", "prefill", "decode") for name in (OURS, THEIRS)
    ]
    for row in rows:
        assert set(row["rel_err"]) == ({TRUTH, THEIRS} if row["backend"] == OURS else {TRUTH})
        assert row["rel_err"][TRUTH] < 1e-4 and (row["backend"] == OURS or not row["rel_err"][TRUTH])
    assert "not everything" not in capsys.readouterr().out


@pytest.mark.parametrize("phase", ["train", "prefill", "decode"])
def test_each_phase_runs_every_variant_on_its_kernels(make_task, monkeypatch, phase: str) -> None:
    """Once to warm up and once a round, in turn."""
    called: list[str] = []

    def spy(module: Any, name: str, label: str) -> None:
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *x, **y: (called.append(label), function(*x, **y))[1])

    step = phase == "decode"
    native = importlib.import_module(f"mlstm_kernels.torch.{'recurrent' if step else 'chunkwise'}")
    registry = native.registry_step if step else native.registry
    key = "native" if step else "native_autograd"
    original = registry[key]
    monkeypatch.setitem(registry, key, lambda *x, **y: (called.append(THEIRS), original(*x, **y))[1])
    spy(kernels, "step" if step else "chunkwise", OURS)
    facts = perform(make_task(phase))
    assert [(fact["variant"], fact["batch"], fact["repeats"]) for fact in facts] == [
        (OURS, 1, 2),
        (THEIRS, 1, 2),
    ]
    assert all(0 < fact["p20"] <= fact["ms"] <= fact["p80"] for fact in facts)
    # two layers, computed a second time in the backward pass of a training step
    layers = 4 if phase == "train" else 2
    assert called == [name for _ in range(3) for name in (OURS, THEIRS) for _ in range(layers)]


def test_a_training_step_is_that_of_the_model_as_a_whole(make_task) -> None:
    """Blocks computed twice and the loss in pieces: the gradients of the plain forward pass."""
    task = make_task("train", length=96)
    tokens = model_task.random_tokens(task, 2, task.length + 1)
    plain, pieced = (model_task.build(task, "train", torch.float32) for _ in range(2))
    for model in (plain, pieced):
        model_task.bind(model_task.bindings(model, OURS))
    logits, _ = plain(tokens[:, :-1])
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    grads: list[Tensor] = []

    class Keep(torch.optim.SGD):
        def step(self) -> None:
            grads.extend(p.grad.clone() for p in pieced.parameters())

    model_phases._training(task, pieced)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_phases, "LOSS_TOKENS", 40)
        model_phases._training_step(pieced, Keep(pieced.parameters(), 0.1), tokens, autocast=False)
    for found, parameter in zip(grads, plain.parameters(), strict=True):
        torch.testing.assert_close(found, parameter.grad, atol=1e-6, rtol=1e-4)


def test_a_decoding_step_goes_on_from_its_state(make_task) -> None:
    """Equal to the model's own generation from the same token."""
    task = make_task()
    model = model_task.build(task, "inference", torch.float32).eval()
    step = model_phases._decode(task, model)(2)
    first = model_task.random_tokens(task, 2, 1)
    expected, _ = model.generate(first, 3)
    token = next(x.cell_contents for x in step.__wrapped__.__closure__ if isinstance(x.cell_contents, Tensor))
    found = []
    for _ in range(3):
        step()
        found.append(token.clone())
    assert torch.equal(torch.cat(found, dim=1), expected)


def test_a_variant_that_raises_is_out_and_the_others_go_on(make_task, monkeypatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise UnsupportedError("mlstm_step", "no such state", "use another")

    monkeypatch.setattr(kernels, "step", refuse)
    facts = perform(make_task(batches=(1, 2)))
    assert facts[0] == {
        "variant": OURS,
        "batch": 1,
        "status": "unsupported",
        "reason": "no such state (use another)",
    }
    assert [(fact["variant"], fact["batch"]) for fact in facts[1:]] == [(THEIRS, 1), (THEIRS, 2)]


def test_unknown_variants_are_named(make_task) -> None:
    facts = perform(make_task(variants=("nonsense", THEIRS)))
    assert "got 'nonsense'" in facts[0]["reason"] and facts[1]["variant"] == THEIRS


def test_gates_of_the_chunked_triton_kernels_are_cast(make_task, monkeypatch) -> None:
    """Over 16-bit gates their compiler aborts; autocast would cast them back."""
    module = importlib.import_module("mlstm_kernels.torch.chunkwise")
    seen: list[tuple[Any, ...]] = []

    def kernel(q: Tensor, i: Tensor, f: Tensor, chunk_size: int, **rest: Any) -> Any:
        autocast = torch.is_autocast_enabled("cpu")
        seen.append((q.dtype, i.dtype, f.dtype, chunk_size, autocast))
        raise RuntimeError("seen")

    for key in ("triton_xl_chunk", "triton_limit_chunk"):
        monkeypatch.setitem(module.registry, key, kernel)
    model = model_task.build(make_task(), "train", torch.bfloat16)
    for variant in (XL, LIMIT):
        model_task.bind(model_task.bindings(model, variant))
        with pytest.raises(RuntimeError, match="seen"), torch.autocast("cpu", torch.bfloat16):
            model(torch.zeros(1, 64, dtype=torch.long))
    low, full = torch.bfloat16, torch.float32
    assert seen == [(low, full, full, 128, False), (low, low, low, 64, True)]


def test_agreement_finds_a_wrong_kernel(make_task, monkeypatch) -> None:
    right = kernels.mlstm_chunkwise

    def wrong(q: Tensor, *args: Any, backend: str, **options: Any) -> Any:
        return right(q if backend == NOISE else q.flip(2), *args, backend=backend, **options)

    monkeypatch.setattr(kernels, "mlstm_chunkwise", wrong)
    task = make_task(AGREEMENT, training=TRAINING)
    _, outcomes = carry_out(task, lambda task: (perform(task), ""))
    errors = outcomes[OURS].errors
    assert errors[TRUTH]["prefill"] > 0.05 and errors[THEIRS]["prefill"] == errors[TRUTH]["prefill"]
    assert max(outcomes[NOISE].errors[TRUTH].values()) < 1e-4
    lines = failures(AGREEMENT, outcomes)
    assert any(line.startswith(f"{OURS} against {TRUTH}, prefill: ") for line in lines)
    assert not any(line.startswith((f"{THEIRS} ", f"{NOISE} ")) for line in lines)


def outcomes_of(**errors: dict[str, dict[str, float]]) -> dict[str, model_runs.Outcome]:
    return {name: model_runs.Outcome(name, errors=found) for name, found in errors.items()}


def test_limits_come_from_the_noise_of_the_same_dtypes() -> None:
    noise = {"prefill": 1e-2, "decode": 1e-4, "train": 2e-2}
    good = {"prefill": 1.9e-2, "decode": 4e-3, "train": 5e-2}
    found = outcomes_of(**{NOISE: {TRUTH: noise}, "tk": {TRUTH: good, XL: good}, XL: {TRUTH: good}})
    assert limits(found) == {"prefill": 2e-2, "decode": 5e-3, "train": pytest.approx(6e-2)}
    assert failures(AGREEMENT, found) == []
    found["tk"].errors[TRUTH] = good | {"decode": 6e-3}
    assert failures(AGREEMENT, found) == [f"tk against {TRUTH}, decode: 6.0e-03 is past the limit"]
    found["tk"].errors[TRUTH] = good | {"train": float("nan")}
    assert failures(AGREEMENT, found) == [f"tk against {TRUTH}, train: nan is past the limit"]
    del found["tk"].errors[TRUTH]["train"]
    assert failures(AGREEMENT, found) == [f"tk: not everything was compared with the {TRUTH} path"]


def test_a_baseline_that_is_off_is_no_failure_of_this_package() -> None:
    good = dict.fromkeys(("prefill", "decode", "train"), 1e-3)
    found = outcomes_of(
        **{NOISE: {TRUTH: good}, "tk": {TRUTH: good, XL: good | {"decode": 0.1}}, XL: {TRUTH: good}}
    )
    assert failures(AGREEMENT, found) == [f"tk against {XL}, decode: 1.0e-01 is past the limit"]
    found[XL].errors[TRUTH] = good | {"decode": 0.1}
    assert failures(AGREEMENT, found) == []


class Process:
    """Runs tasks as given by a script: facts per variant, and over which it dies, once each."""

    def __init__(self, dies: tuple[str, ...] = (), fits: int = 99) -> None:
        self.dies, self.fits = dies, fits
        self.tasks: list[Task] = []

    def __call__(self, task: Task) -> tuple[list[dict[str, Any]], str]:
        self.tasks.append(task)
        facts: list[dict[str, Any]] = []
        for name in task.variants:
            facts.append({"variant": name, "running": True})
            if name in self.dies:
                return facts, "the process died of SIGABRT: Assertion"
            if task.batches[0] > self.fits:
                return [
                    *facts,
                    {"variant": name, "batch": 1, "status": "out of memory", "reason": "CUDA"},
                ], ""
        facts += [{"variant": name, "batch": task.batches[0], **FIGURES} for name in task.variants]
        return facts, ""


def test_a_process_that_dies_is_survived(make_task) -> None:
    process = Process(dies=(XL,))
    task, outcomes = carry_out(make_task("prefill", variants=("tk", XL)), process)
    # the other Triton kernels take its place, and all are measured side by side
    assert [task.variants for task in process.tasks] == [("tk", XL), ("tk", LIMIT)]
    assert task.variants == ("tk", LIMIT) and outcomes["tk"].facts == {1: FIGURES}
    assert (outcomes[XL].status, outcomes[XL].reason) == ("FAILED", "the process died of SIGABRT: Assertion")
    assert failures("prefill", outcomes) == []
    process = Process(dies=("tk", XL, LIMIT))
    _, outcomes = carry_out(make_task("prefill", variants=("tk", XL)), process)
    assert set(outcomes) == {"tk", XL, LIMIT} and not any(each.facts for each in outcomes.values())
    assert failures("prefill", outcomes) == ["tk: the process died of SIGABRT: Assertion"]


def test_a_process_that_dies_before_anything_runs_is_not_started_again(make_task) -> None:
    tasks: list[Task] = []
    _, outcomes = carry_out(make_task(), lambda task: (tasks.append(task), ([], "ended with 1"))[1])
    assert len(tasks) == 1 and {each.reason for each in outcomes.values()} == {"ended with 1"}


def test_figures_survive_a_process_that_dies_behind_them(make_task) -> None:
    facts = [{"variant": name, "batch": 1, **FIGURES} for name in ("tk", XL)]
    facts.append({"variant": "tk", "running": True})
    _, outcomes = carry_out(make_task("train", variants=("tk", XL)), lambda task: (facts, "no profiler"))
    assert {name: each.facts for name, each in outcomes.items()} == {"tk": {1: FIGURES}, XL: {1: FIGURES}}
    assert failures("train", outcomes) == ["tk: no profiler"]


def test_the_largest_batch_that_fits(make_task) -> None:
    process = Process(fits=2)
    task, outcomes = carry_out(make_task("train", batches=(8,)), process)
    assert [task.batches[0] for task in process.tasks] == [8, 4, 2] and task.batches == (2,)
    assert outcomes[OURS].facts == {2: FIGURES} and not outcomes[OURS].status
    process = Process(fits=0)
    _, outcomes = carry_out(make_task("train", batches=(2,)), process)
    assert failures("train", outcomes) == [f"{OURS}: CUDA"]


def test_a_real_process(tmp_path: Path) -> None:
    log = (tmp_path / "log").open("w")
    abort = [sys.executable, "-c", "import os; os.abort()"]
    assert model_runs.run_process(abort, log, 60) == "the process died of SIGABRT"
    assert model_runs.run_process([sys.executable, "-c", "1 / 0"], log, 60) == "the process ended with 1"
    assert "ZeroDivisionError" in (tmp_path / "log").read_text()
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert model_runs.run_process(sleep, log, 0.2) == "the process was stopped after 0 s"


def test_a_task_travels_as_json(make_task, tmp_path: Path) -> None:
    task = make_task(AGREEMENT, training=TRAINING, batches=(1, 8))
    task.save(tmp_path / "task")
    assert Task.load(tmp_path / "task") == task
    task = make_task()
    task.save(tmp_path / "task")
    assert Task.load(tmp_path / "task") == task


def test_share_of_the_kernels() -> None:
    kernels = [
        ("nvjet_tst_128x256", 5.0, 16.0),
        ("void tfla_tk::mlstm_fwd_kernel<Config>(Globals)", 0.0, 2.0),
        # waits for the one before, from its start on
        ("mlstm_chunkwise__parallel_fw_Hintra_kernel", 0.5, 3.0),
        ("recurrent_step_fw_kernel", 3.0, 3.5),
        ("triton_per_fused_cumsum_0", 4.0, 4.5),
        ("Memcpy DtoD (Device -> Device)", 15.0, 17.0),
    ]
    assert model_phases.share_of(kernels) == pytest.approx(0.25)
    assert model_phases.share_of([]) is None


def test_options(tmp_path: Path, capsys) -> None:
    assert main(["model", "--json", str(tmp_path)]) == 2
    assert f"--json: expected a writable file, got {tmp_path}" in capsys.readouterr().err
    assert main(["model", "--layers", "0"]) == 2
    assert "--layers: expected a positive number, got 0" in capsys.readouterr().err
    assert main(["model", "--update-results"]) == 2
    assert "expected a CUDA GPU" in capsys.readouterr().err
    for option, value in (("--phases", "sleep"), ("--baselines", "native")):
        with pytest.raises(SystemExit):
            main(["model", option, value])
        assert f"got '{value}'" in capsys.readouterr().err


def test_what_a_gpu_is_given(make_task) -> None:
    """The shape of xLSTM-7B; decoding has a baseline of its own."""
    tasks = {
        phase: model_step._task(model_step.GPU, phase, "cuda:0", 0) for phase in (*results.PHASES, AGREEMENT)
    }
    assert str(model_step.shape_of(tasks["train"], 8)) == "B8 T8192, 24 layers of 4096, H8 256/512"
    assert (tasks["prefill"].layers, tasks["prefill"].length) == (32, 65536)
    assert tasks["decode"].variants == ("tk", "triton:step") and tasks["decode"].batches == (1, 8, 64)
    assert tasks[AGREEMENT].training.steps == 50 and tasks["train"].training is None
    row = model_step._row(tasks["train"], 8, XL, {**FIGURES, "kernel_share": 0.2}, {}, {})
    assert row["dtype"] == "bf16" and "Triton 3.6 aborts" in row["note"] and row["kernel_share"] == 0.2
    assert isinstance(model_phases._stopwatch(make_task()), CpuStopwatch)


def test_the_step_has_the_errors_of_the_baseline_that_decoded_with_it() -> None:
    found = outcomes_of(**{"tk": {TRUTH: {"decode": 1e-3}}, XL: {TRUTH: {"decode": 2e-2, "train": 1.0}}})
    assert model_step._errors_of(found, "triton:step", "decode") == {TRUTH: 2e-2}
    assert model_step._errors_of(found, "tk", "decode") == {TRUTH: 1e-3}
    assert model_step._errors_of(found, "tk", "prefill") == {}
    found["tk"].errors[TRUTH]["decode"] = float("nan")
    assert model_step._errors_of(found, "tk", "decode") == {}


def test_readme_table(make_row) -> None:
    sizes = {"H": 8, "K": 256, "V": 512, "layers": 32, "width": 4096}

    def row(phase: str, backend: str, ms: float, batch: int, length: int, **more: Any) -> results.Row:
        none = {"tflops": None, "gbps": None, "roofline": None}
        shape = {"B": batch, "T": length, **sizes}
        return make_row(backend, ms, op="model_step", shape=shape, **{"pass": phase}, **none, **more)

    rows = [
        row("train", "tk", 4000.0, 8, 8192, kernel_share=0.05, rel_err={TRUTH: 3e-3}, peak_mem_mb=102400.0),
        row("train", XL, 5000.0, 8, 8192, kernel_share=0.21, rel_err={TRUTH: 4e-3}, peak_mem_mb=104448.0),
        row("train", LIMIT, 5200.0, 8, 8192, rel_err={}, peak_mem_mb=104448.0),
        row("decode", "tk", 10.0, 64, 1, graph_ms=4.0, rel_err={}),
        row("decode", "triton:step", 9.0, 64, 1, graph_ms=6.0, rel_err={}),
        row("decode", "tk", 10.0, 1, 1, graph_ms=4.0, rel_err={}),
        row("decode", "triton:step", 20.0, 1, 1, rel_err={}),
    ]
    text = readme.render(results.merge(rows, []))
    assert "### xLSTM, whole model\n" in text and text.count("###") == 1
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][2:]
    assert lines[0][:6] == [
        "training step",
        "B8 T8192, 32 layers of 4096, H8 256/512",
        "4000",
        "5000",
        "xl_chunk_128",
        "1.25x",
    ]
    assert lines[0][6:] == ["16,384", "13,107", "5.0%", "21.0%", "100.0", "102.0", "3.0e-03", "4.0e-03"]
    assert lines[1][0] == "decode, CUDA graph" and lines[1][2:8] == [
        "4",
        "6",
        "step",
        "1.50x",
        "16,000",
        "10,667",
    ]
    # one that was not captured: the times of plain calls
    assert lines[2][0] == "decode" and lines[2][2:6] == ["10", "20", "step", "2.00x"]
    assert lines[2][8] == lines[2][12] == "-"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tflops": 1.0}, "tflops"),
        ({"pass": "fwd"}, "pass"),
        ({"shape": {"B": 1, "T": 1, "H": 1, "K": 1, "V": 1}}, "layers and width"),
        ({"op": "mlstm_exp", "pass": "fwd"}, "shape"),
        ({"kernel_share": "half"}, "kernel_share"),
    ],
)
def test_rows_of_a_model(make_row, change: dict[str, Any], named: str) -> None:
    shape = {"B": 1, "T": 1, "H": 8, "K": 256, "V": 512, "layers": 32, "width": 4096}
    row = make_row(op="model_step", shape=shape, tflops=None, gbps=None, **{"pass": "decode"})
    results.validate(row)
    with pytest.raises(ValueError, match=named):
        results.validate({**row, **change})
    with pytest.raises(ValueError, match="tflops"):
        results.validate(make_row(tflops=None))


def test_differences() -> None:
    a, b = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 5.0])
    assert model_agreement.relative_error(b, a) == pytest.approx(0.2)
    assert model_agreement.largest_difference(b, a) == 1.0
    for wrong in (float("nan"), float("inf")):
        found = torch.tensor([wrong, 4.0])
        assert math.isnan(model_agreement.largest_difference(found, a))
        assert math.isnan(model_agreement.relative_error(found, a))
