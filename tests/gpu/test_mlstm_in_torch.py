"""mLSTM as PyTorch sees it on the GPU: capture, threads, devices, compilation, autograd, torch.func."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from tfla_tk import env, which
from tfla_tk.build import CaptureError, builder, find_thunderkittens

from .accuracy import relative_error
from .memory import LENGTHS, TOKENS, relayout, transposed
from .mlstm import assert_gradients, draw_packed, make_inputs

Tensors = dict[str, Tensor]


def test_nothing_is_compiled_during_capture(
    exponential: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_calls: None
) -> None:
    x = make_inputs()
    # from here on as in a process that has not compiled yet
    monkeypatch.setenv("THUNDERKITTENS_ROOT", str(find_thunderkittens(clone=False).root))
    monkeypatch.setenv(env.CACHE_DIR.name, str(tmp_path / "cache"))
    for kept in ("_launchers", "_attached", "_files"):
        monkeypatch.setattr(builder, kept, {})
    torch.cuda.synchronize()
    with (
        pytest.raises(CaptureError, match="while a CUDA graph is being captured"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        torch.zeros(1, device="cuda")
        exponential(x)
    # nothing of it is kept
    monkeypatch.undo()
    assert exponential(x).isfinite().all()


def test_other_threads_run_while_the_launch_queue_is_full(exponential: Any) -> None:
    """A launch into a full queue waits for the GPU, without Python's lock."""
    x = make_inputs(1, 1, 64, (64, 64))
    exponential(x)
    torch.cuda.synchronize()
    ticks, done = 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not done.is_set():
            time.sleep(0.002)
            ticks += 1

    thread = threading.Thread(target=tick)
    torch.cuda._sleep(2_000_000_000)  # about a second
    thread.start()
    started = time.perf_counter()
    for _ in range(3000):  # a queue holds about a thousand launches
        exponential(x)
    waited = time.perf_counter() - started
    done.set()
    thread.join()
    torch.cuda.synchronize()
    assert waited > 0.5, "the queue was never full"
    assert ticks > 0.25 * waited / 0.002


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_the_current_one(operator: Any) -> None:
    x = make_inputs(states=operator.states)
    expected = operator.run(x)
    found = operator.run({name: t.to("cuda:1") for name, t in x.items()})
    assert {t.device for t in found.values()} == {torch.device("cuda", 1)}
    assert torch.cuda.current_device() == 0
    assert all(torch.equal(found[name].to("cuda:0"), t) for name, t in expected.items())


@pytest.mark.parametrize("size", [(0, 3, 300), (2, 0, 300), (2, 3, 0)])
def test_empty(operator: Any, size: tuple[int, int, int]) -> None:
    x = make_inputs(*size, states=operator.states)
    found, cotangents = operator.run(x), operator.draw_cotangents(x, last=True)
    grads = operator.gradients(x, cotangents)
    assert found["h"].shape == x["v"].shape
    assert all(t.shape == x[name].shape for name, t in grads.items())
    if size[-1] == 0:
        assert torch.equal(found["c"], x["c_initial"]) and torch.equal(grads["c_initial"], cotangents["c"])


def test_auto_takes_the_kernels(operator: Any) -> None:
    x = make_inputs()
    assert which(operator.function, **x, **operator.options).backend == "tk"
    assert torch.equal(operator(x, "auto"), operator(x, "tk"))


def test_a_thread_that_has_not_used_the_gpu(exponential: Any) -> None:
    """No context of the device is current there yet."""
    x = make_inputs(1, 2, 200, (64, 64))
    expected, found = exponential.run(x), []
    thread = threading.Thread(target=lambda: found.append(exponential.run(x)))
    thread.start()
    thread.join()
    assert all(torch.equal(found[0][name], t) for name, t in expected.items())


# autograd


@pytest.mark.parametrize("last", [False, True], ids=["h", "h_and_state"])
def test_torch_compile_of_packed_sequences(operator: Any, last: bool) -> None:
    """Forward and backward in one graph each. Not the same bits, as without packing (test_calls.py): plain
    calls have the cut of the backward, and keep the states there."""
    torch._dynamo.reset()
    x = draw_packed(operator, LENGTHS, (128, 256))
    cotangents = operator.draw_cotangents(x, last)

    def run(leaves: Tensors) -> list[Tensor]:
        outputs = operator.run(leaves) if last else {"h": operator(leaves)}
        return [outputs[name] for name in cotangents]

    results = []
    for function in (run, torch.compile(run, fullgraph=True)):
        leaves = {
            name: t.clone().requires_grad_(name not in ("m_initial", "cu_seqlens")) for name, t in x.items()
        }
        outputs = function(leaves)
        torch.autograd.backward(outputs, list(cotangents.values()))
        results.append((outputs, {name: t.grad for name, t in leaves.items() if t.requires_grad}))
    (expected_outputs, expected), (outputs, found) = results
    assert all(relative_error(a, b) <= 5e-3 for a, b in zip(outputs, expected_outputs, strict=True))
    assert_gradients(found, expected, torch.bfloat16)


@pytest.mark.parametrize("kind", ["batch", "transposed", "packed"])
@pytest.mark.parametrize("last", [False, True], ids=["h", "h_and_state"])
@pytest.mark.parametrize("rows", [False, True])
def test_opcheck(operator: Any, rows: bool, last: bool, kind: str) -> None:
    """Of both ops; rows: the forward leaves what a backward reads."""
    x = make_inputs(2, 3, 70, (64, 128), states=operator.states)
    if kind == "packed":
        x = draw_packed(operator, [70, 0, 65], (64, 128))
    elif kind == "transposed":
        x = relayout(x, transposed)
    tensors = [x.get(name) for name in (*TOKENS, "c_initial", "n_initial", "m_initial", "cu_seqlens")]
    sigmoid_gate = operator.function == "mlstm_siging_chunkwise"
    options = (sigmoid_gate, operator.options.get("normalize", True), 1e-6)
    opcheck(torch.ops.tfla_tk.mlstm_fwd.default, (*tensors, *options, last, rows))
    h, c, n, _, *kept = torch.ops.tfla_tk.mlstm_fwd(*tensors, *options, True, True)
    grads = [torch.randn_like(t) for t in (h, c, n)]
    given = (c, n, *grads) if last else (None, None, grads[0], None, None)
    opcheck(torch.ops.tfla_tk.mlstm_bwd.default, (*tensors, h, *kept, *given, *options))
