"""What the tk backend refuses, and how it says so; a GPU is only pretended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tfla_tk
from tfla_tk import build
from tfla_tk.backends import tk, tk_intra
from tfla_tk.build.instances import MAX_DIM_QK, MAX_DIM_V
from tfla_tk.validation import MLSTMCall

CALL = MLSTMCall(
    device=torch.device("cuda", 0),
    dtype=torch.bfloat16,
    batch=1,
    sequences=1,
    heads=2,
    seq=100,
    dim_qk=128,
    dim_v=256,
    sigmoid_gate=False,
    normalize=True,
    return_last_states=False,
    varlen=False,
    requires_grad=False,
    chunk_size=64,
    eps=1e-6,
)


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine that has all it takes; each probe starts afresh."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "pretended GPU")
    monkeypatch.setattr(build, "find_toolchain", lambda: None)
    monkeypatch.setattr(build, "find_thunderkittens", lambda clone: None)
    tk._probe_device.cache_clear()
    yield
    tk._probe_device.cache_clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dims", [(16, 16), (80, 48), (256, 512)])
def test_serves(dtype: torch.dtype, dims: tuple[int, int]) -> None:
    verdict = tk.supports_mlstm(replace(CALL, dtype=dtype, dim_qk=dims[0], dim_v=dims[1]))
    assert verdict.ok and verdict.auto and not verdict.reason


@pytest.mark.parametrize("dims", [(16, 16), (MAX_DIM_QK, MAX_DIM_V)])
def test_serves_gradients(dims: tuple[int, int]) -> None:
    verdict = tk.supports_mlstm(replace(CALL, requires_grad=True, dim_qk=dims[0], dim_v=dims[1]))
    assert verdict.ok and verdict.auto and not verdict.reason


@pytest.mark.parametrize(
    ("change", "reason", "remedy"),
    [
        ({"device": torch.device("cpu")}, "the tensors are on cpu", "move them to a GPU"),
        ({"dtype": torch.float32}, "q, k, v are torch.float32", "torch.bfloat16 or torch.float16"),
        ({"dim_qk": 272}, "head dims are 272/256", "multiples of 16 up to 256/512"),
        ({"dim_v": 528}, "head dims are 128/528", "multiples of 16 up to 256/512"),
        ({"dim_qk": 24}, "head dims are 24/256", "multiples of 16 up to 256/512"),
    ],
)
def test_refuses(change: dict[str, object], reason: str, remedy: str) -> None:
    verdict = tk.supports_mlstm(replace(CALL, **change))  # type: ignore[arg-type]
    assert not verdict.ok
    assert reason in verdict.reason and remedy in verdict.remedy


def test_a_gpu_that_is_not_sm_90(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
    verdict = tk.supports_mlstm(CALL)
    assert not verdict.ok and verdict.remedy == "use an H100, H200 or GH200"
    assert verdict.reason == "pretended GPU has compute capability 8.0, the kernels need 9.0"


@pytest.mark.parametrize("finder", ["find_toolchain", "find_thunderkittens"])
def test_no_compiler_or_no_thunderkittens(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, finder: str
) -> None:
    """Which "auto" passes over without a word: so it is logged, once."""

    def missing(**options: object) -> None:
        raise build.BuildError(f"{finder} found nothing", "install it")

    monkeypatch.setattr(build, finder, missing)
    for _ in range(2):
        verdict = tk.supports_mlstm(CALL)
    remedy = "install it; then start Python anew"
    assert (verdict.ok, verdict.reason, verdict.remedy) == (False, f"{finder} found nothing", remedy)
    assert [record.message for record in caplog.records] == [
        f"the tk kernels cannot be used: {finder} found nothing\nRemedy: install it"
    ]


def test_a_cpu_call_never_touches_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def touched(index: int) -> None:
        raise AssertionError("CUDA was asked")

    monkeypatch.setattr(torch.cuda, "get_device_capability", touched)
    assert not tk.supports_mlstm(replace(CALL, device=torch.device("cpu"))).ok


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": (1, 2, 8, 16)}, r"k: expected shape \[B, NH, S, K\] = \(1, 2, 64, 16\), got \(1, 2, 8, 16\)"),
        ({"v": (1, 2, 8, 16)}, "v: expected shape"),
        ({"i": (1, 2, 8)}, "i: expected shape"),
        ({"f": (1, 64)}, "f: expected shape"),
        ({name: (1, 65536, 1, 16)[: 4 - (name in "if")] for name in "qkvif"}, "batch times heads: .* 65536"),
        ({}, "expected torch.bfloat16 on a GPU, got torch.bfloat16 on cpu"),
    ],
)
def test_the_intra_chunk_kernel_refuses(change: dict[str, tuple[int, ...]], message: str) -> None:
    shapes = dict.fromkeys("qkv", (1, 2, 64, 16)) | dict.fromkeys("if", (1, 2, 64)) | change
    tensors = [torch.zeros(shapes[name], dtype=torch.bfloat16) for name in "qkvif"]
    with pytest.raises(ValueError, match=message):
        tk_intra.mlstm_intra(*tensors)
    assert tk.mlstm_intra is tk_intra.mlstm_intra


def test_a_gpu_that_this_machine_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """`which` answers about fake tensors on one, with a build of torch without CUDA too."""
    monkeypatch.undo()
    tk._probe_device.cache_clear()
    with FakeTensorMode():

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(1, 2, *shape, dtype=torch.bfloat16, device="cuda:77")

        state = empty(64, 64), empty(64), empty(1)
        calls: dict[str, list[torch.Tensor]] = {
            "mlstm_chunkwise": [empty(128, 64)] * 3 + [empty(128)] * 2,
            "mlstm_step": [empty(64)] * 3 + [empty(1)] * 2,
            "mlstm_sequence": [empty(4, 64)] * 3 + [empty(4)] * 2,
        }
        for name, tokens in calls.items():
            with_state = [] if name == "mlstm_chunkwise" else state
            for op in (name, name.replace("mlstm", "mlstm_siging")):
                given = with_state[:2] if "siging" in op else with_state
                choice = tfla_tk.which(op, *tokens, *given)
                verdict = choice.reasons["tk"]
                assert choice.backend != "tk" and not verdict.ok
                assert verdict.reason.startswith("torch cannot use GPU 77: ") and verdict.remedy
