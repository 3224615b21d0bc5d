"""mLSTM forward on the GPU as a PyTorch citizen: capture, threads, devices, compilation."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from tfla_tk import UnsupportedError, env, which
from tfla_tk.build import CaptureError, builder, find_thunderkittens

from .mlstm import assert_accurate, make_inputs


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


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "shifted"])
def test_torch_compile(layout: str, operator: Any) -> None:
    def laid_out(seq: int) -> dict[str, Tensor]:
        x = make_inputs(seq=seq, states=operator.states)
        if layout != "contiguous":
            rows = 0 if layout == "transposed" else 1
            for name in ("q", "k", "v"):
                dim = x[name].shape[-1]
                wide = torch.nn.functional.pad(x[name].transpose(1, 2), (rows, 8 * rows - rows))
                x[name] = wide.contiguous()[..., rows : dim + rows].transpose(1, 2)
        return x

    torch._dynamo.reset()
    compiled = torch.compile(operator.run, fullgraph=True)
    with torch.no_grad():
        # the second length is traced with symbolic shapes
        for seq in (300, 211):
            x = laid_out(seq)
            expected, found = operator.run(x), compiled(x)
            assert all(torch.equal(found[name], t) for name, t in expected.items())
            assert found["h"].stride() == expected["h"].stride()


@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_opcheck(operator: Any, transposed: bool, last: bool, rows: bool) -> None:
    x = make_inputs(seq=70, states=operator.states)
    if transposed:
        x |= {name: x[name].transpose(1, 2).contiguous().transpose(1, 2) for name in ("q", "k", "v")}
    tensors = [x.get(name) for name in ("q", "k", "v", "i", "f", "c_initial", "n_initial", "m_initial")]
    sigmoid_gate = operator.function == "mlstm_siging_chunkwise"
    normalize = operator.options.get("normalize", True)
    opcheck(
        torch.ops.tfla_tk.mlstm_fwd.default,
        (*tensors, None, sigmoid_gate, normalize, 1e-6, last, rows),
    )


def test_autocast(operator: Any) -> None:
    x = make_inputs(dtype=torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        found = operator.run(x)
    assert found["h"].dtype == torch.bfloat16
    rounded = {name: t.bfloat16() if name in ("q", "k", "v") else t for name, t in x.items()}
    assert_accurate(found, operator.truth(rounded))


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


@pytest.mark.parametrize(
    ("changed", "reason", "remedy"),
    [
        ({"dtype": torch.float32}, "float32", "bfloat16"),
        ({"dims": (20, 64)}, "20/64", "multiples of 16 up to 256/512"),
        ({"dims": (64, 24)}, "64/24", "multiples of 16 up to 256/512"),
        ({"dims": (272, 64)}, "272/64", "multiples of 16 up to 256/512"),
        ({"dims": (64, 528)}, "64/528", "multiples of 16 up to 256/512"),
    ],
)
def test_unsupported_operands(operator: Any, changed: dict[str, Any], reason: str, remedy: str) -> None:
    with pytest.raises(UnsupportedError) as refused:
        operator(make_inputs(seq=10, **changed))
    assert reason in refused.value.reason
    assert remedy in refused.value.remedy


def test_a_thread_that_has_not_used_the_gpu(exponential: Any) -> None:
    """No context of the device is current there yet."""
    x = make_inputs(1, 2, 200, (64, 64))
    expected, found = exponential.run(x), []
    thread = threading.Thread(target=lambda: found.append(exponential.run(x)))
    thread.start()
    thread.join()
    assert all(torch.equal(found[0][name], t) for name, t in expected.items())
