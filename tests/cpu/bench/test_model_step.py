"""Whole models, Triton against tk: the command at toy size, and what becomes of variants that fail."""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tfla_tk import UnsupportedError
from tfla_tk.bench import model_phases, model_step, text
from tfla_tk.bench.model_phases import AGREEMENT, NOISE, TRUTH, Losses, Outcome, Task, perform
from tfla_tk.bench.model_step import failures, limits
from tfla_tk.integrations import xlstm
from tfla_tk.integrations.xlstm import kernels

OURS, THEIRS = "reference:chunkwise", "native"
XL = model_phases.TRITON
LOSSES = Losses(layers=1, batch=1, length=64, steps=3, rate=1e-3)


@pytest.fixture(autouse=True)
def with_xlstm() -> Iterator[None]:
    """Needs the packages; whatever was registered is undone."""
    pytest.importorskip("mlstm_kernels.torch", reason="mlstm-kernels is not installed")
    pytest.importorskip("xlstm", reason="xlstm is not installed")
    yield
    xlstm.unregister()


def make_task(phase: str = "decode", **changes: Any) -> Task:
    sizes = {"layers": 2, "width": 32, "heads": 2, "vocabulary": 256, "length": 64, "repeats": 2}
    return Task(phase, **{**sizes, "variants": (OURS, THEIRS), "batches": (1,), "tokens": 3, **changes})


def test_the_command_at_toy_size(monkeypatch, command) -> None:
    """Errors of the agreement go into the rows of all other phases."""
    small = [dataclasses.replace(task, layers=1, repeats=2) for task in model_step.CPU]
    small[-1] = dataclasses.replace(small[-1], losses=LOSSES)
    monkeypatch.setattr(model_step, "CPU", small)
    status, rows, out, _ = command("model", "--commit", "abc")
    assert status == 0 and "not everything" not in out and "tokens/s" in out
    assert [(row["pass"], row["backend"], row["shape"]["B"]) for row in rows] == [
        *(("train", name, 2) for name in (OURS, THEIRS)),
        *(("prefill", name, 1) for name in (OURS, THEIRS)),
        *(("decode", name, batch) for name in (OURS, THEIRS) for batch in (1, 2)),
    ]
    for row in rows:
        assert set(row["rel_err"]) == {TRUTH} and row["rel_err"][TRUTH] < 1e-4
        assert (row["op"], row["commit"], row["repeats"]) == ("model_step", "abc", 2)
        assert row["ms"] > 0 and row["tflops"] is None
    assert rows[-1]["shape"] == {"B": 2, "T": 1, "H": 2, "K": 16, "V": 32, "layers": 1, "width": 64}
    assert "decode, B2 T1, 1 layers of 64, H2 16/32" in out
    assert [row["pass"] for row in command("model", "--phases", "prefill").rows] == ["prefill"] * 2


@pytest.mark.parametrize("phase", ["train", "prefill", "decode"])
def test_each_phase_runs_every_variant_on_its_kernels(monkeypatch, phase: str) -> None:
    """Once to warm up and once a round, in turn."""
    called: list[str] = []

    def spied(function: Callable[..., Any], label: str) -> Callable[..., Any]:
        return lambda *x, **y: (called.append(label), function(*x, **y))[1]

    native = importlib.import_module("mlstm_kernels.torch")
    registry, key, ours = native.chunkwise.registry, "native_autograd", "chunkwise"
    if phase == "decode":
        registry, key, ours = native.recurrent.registry_step, "native", "step"
    monkeypatch.setitem(registry, key, spied(registry[key], THEIRS))
    monkeypatch.setattr(kernels, ours, spied(getattr(kernels, ours), OURS))
    _, outcomes = perform(make_task(phase))
    assert [outcome.variant for outcome in outcomes] == [OURS, THEIRS]
    for outcome in outcomes:
        row = outcome.rows[1]
        assert row["repeats"] == 2 and 0 < row["ms_p20"] <= row["ms"] <= row["ms_p80"]
    # two layers, computed a second time in the backward pass of a training step
    layers = 4 if phase == "train" else 2
    assert called == [name for _ in range(3) for name in (OURS, THEIRS) for _ in range(layers)]


def test_a_training_step_is_that_of_the_model_as_a_whole(monkeypatch) -> None:
    """Blocks computed twice and the loss in pieces: the gradients of the plain forward pass."""
    task = make_task("train", length=96)
    tokens = task.random_tokens(2, task.length + 1)
    plain, (pieced, _) = model_phases.build(task, "train", torch.float32), model_phases.prepare(task)
    for model in (plain, pieced):
        model_phases.use(model, OURS)
    logits, _ = plain(tokens[:, :-1])
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    grads: list[Tensor] = []

    class Keep(torch.optim.SGD):
        def step(self) -> None:
            grads.extend(p.grad.clone() for p in pieced.parameters())

    monkeypatch.setattr(model_phases, "LOSS_TOKENS", 40)
    model_phases._training_step(pieced, Keep(pieced.parameters(), 0.1), tokens, autocast=False)
    for found, parameter in zip(grads, plain.parameters(), strict=True):
        torch.testing.assert_close(found, parameter.grad, atol=1e-6, rtol=1e-4)


def test_a_decoding_step_goes_on_from_its_state() -> None:
    """Equal to the model's own generation from the same token."""
    task = make_task()
    model = model_phases.build(task, "inference", torch.float32).eval()
    step = model_phases.decoding_step(task, model, 2)
    expected, _ = model.generate(task.random_tokens(2, 1), 3)
    token = next(x.cell_contents for x in step.__wrapped__.__closure__ if isinstance(x.cell_contents, Tensor))
    found = [(step(), token.clone())[1] for _ in range(3)]
    assert torch.equal(torch.cat(found, dim=1), expected)


def test_a_variant_that_raises_is_out_and_the_others_go_on(monkeypatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise UnsupportedError("mlstm_step", "no such state", "use another")

    monkeypatch.setattr(kernels, "step", refuse)
    _, (unknown, ours, theirs) = perform(make_task(variants=("nonsense", OURS, THEIRS), batches=(1, 2)))
    assert "got 'nonsense'" in unknown.reason
    assert (ours.status, ours.reason) == ("unsupported", "no such state (use another)")
    assert not ours.rows and set(theirs.rows) == {1, 2} and theirs.status == "ok"
    assert failures("decode", [ours, theirs]) == [f"{OURS}: no such state (use another)"]


@pytest.mark.parametrize(("fits", "tried"), [(2, [8, 4, 2]), (0, [8, 4, 2, 1])])
def test_the_largest_batch_that_fits(monkeypatch, fits: int, tried: list[int]) -> None:
    seen: list[int] = []

    def measure(task: Task) -> list[Outcome]:
        seen.append(task.batches[0])
        if seen[-1] > fits:
            raise torch.OutOfMemoryError("CUDA out of memory\nmore")
        return [Outcome(OURS)]

    monkeypatch.setattr(model_phases, "measure", measure)
    task, outcomes = perform(make_task("train", batches=(8,)))
    assert seen == tried and task.batches == (tried[-1],)
    assert failures("train", outcomes) == [f"{OURS}: CUDA out of memory"] * (not fits)


def test_gates_of_the_chunked_triton_kernels_are_cast(monkeypatch) -> None:
    """Over 16-bit gates their compiler aborts; autocast would cast them back."""
    module = importlib.import_module("mlstm_kernels.torch.chunkwise")
    seen: list[tuple[Any, ...]] = []

    def kernel(q: Tensor, i: Tensor, f: Tensor, chunk_size: int, **rest: Any) -> Any:
        seen.append((q.dtype, i.dtype, f.dtype, chunk_size, torch.is_autocast_enabled("cpu")))
        raise RuntimeError("seen")

    monkeypatch.setitem(module.registry, "triton_xl_chunk", kernel)
    model = model_phases.build(make_task(), "train", torch.bfloat16)
    model_phases.use(model, XL)
    with pytest.raises(RuntimeError, match="seen"), torch.autocast("cpu", torch.bfloat16):
        model(torch.zeros(1, 64, dtype=torch.long))
    assert seen == [(torch.bfloat16, torch.float32, torch.float32, 128, False)]


def test_agreement_finds_a_wrong_kernel(monkeypatch) -> None:
    right = kernels.mlstm_chunkwise

    def wrong(q: Tensor, *args: Any, backend: str, **options: Any) -> Any:
        return right(q if backend == NOISE else q.flip(2), *args, backend=backend, **options)

    monkeypatch.setattr(kernels, "mlstm_chunkwise", wrong)
    _, outcomes = perform(make_task(AGREEMENT, losses=LOSSES))
    errors = {outcome.variant: outcome.errors for outcome in outcomes}
    assert errors[OURS]["prefill"] > 0.05 and max(errors[NOISE].values()) < 1e-4
    lines = failures(AGREEMENT, outcomes)
    assert lines and all(line.startswith(f"{OURS}, ") for line in lines)


def test_limits_come_from_the_noise_of_the_same_dtypes() -> None:
    noise = {"prefill": 1e-2, "decode": 1e-4, "train": 2e-2}
    good = {"prefill": 1.9e-2, "decode": 4e-3, "train": 5e-2}

    def told(errors: dict[str, float]) -> list[str]:
        # that a baseline is off is no failure
        of = {NOISE: noise, "tk": errors, XL: {"train": 9.0}}
        found = [Outcome(variant, errors=own) for variant, own in of.items()]
        assert limits(found) == {"prefill": 2e-2, "decode": 5e-3, "train": pytest.approx(6e-2)}
        return failures(AGREEMENT, found)

    assert told(good) == []
    assert told(good | {"decode": 6e-3}) == ["tk, decode: 6.0e-03 is past the limit"]
    assert told(good | {"train": math.nan}) == ["tk, train: nan is past the limit"]
    del good["train"]
    assert told(good) == [f"tk: not everything was compared with the {TRUTH} path"]


def test_text_follows_from_the_seed() -> None:
    made = text.make_text(5000, 0)
    assert len(made) == 5000 and made == text.make_text(6000, 0)[:5000] != text.make_text(5000, 1)
    windows = text.windows(made, (3, 2), 40, 1)
    assert windows.shape == (3, 2, 40) and all(bytes(row.tolist()) in made for row in windows.flatten(0, 1))
