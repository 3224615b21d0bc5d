"""What the tk backend refuses, and how it says so; a GPU is only pretended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tfla_tk
from tfla_tk import UnsupportedError, build
from tfla_tk.backends.tk import device
from tfla_tk.backends.tk.scalar_gate import support as tk
from tfla_tk.build import Instance, Launcher, cache
from tfla_tk.build.instances import MAX_DIM_QK, MAX_DIM_V, MAX_TOKENS
from tfla_tk.build.toolchain import Toolchain
from tfla_tk.calls.mlstm import MLSTMCall
from tfla_tk.core import dispatch
from tfla_tk.core.support import SUPPORTED, Support

from .calls import OPS, Op, draw, results
from .stand_in import Kernels

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


TOOLCHAIN = Toolchain(Path("nvcc"), Path("include"), Path("lib"), (13, 0), "nvcc 13.0.88; g++ 13", "PATH")


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine that has all it takes; each probe starts afresh."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "pretended GPU")
    monkeypatch.setattr(build, "find_toolchain", lambda: TOOLCHAIN)
    monkeypatch.setattr(build, "check_cache", lambda: True)
    monkeypatch.setattr(build, "find_thunderkittens", lambda clone: None)
    monkeypatch.setattr(device, "_driver_version", lambda: (13, 0))
    monkeypatch.setattr(device, "_failed", {})
    monkeypatch.setattr(device, "_told", set())
    monkeypatch.setattr(device, "_try_again", lambda: None)
    probes = (device._probe_device, device._can_add_kernels, device._is_cached)
    for probe in probes:
        probe.cache_clear()
    yield
    for probe in probes:
        probe.cache_clear()


SUPPORTS = {
    "chunkwise": tk.supports_mlstm,
    "step": tk.supports_mlstm_step,
    "sequence": tk.supports_mlstm_sequence,
}
DECODING = ("step", "sequence")
OF_EVERY_KERNEL = pytest.mark.parametrize("name", SUPPORTS)


def verdict_of(name: str, **changes: Any) -> Support:
    return SUPPORTS[name](replace(CALL, **({"seq": 8} if name == "sequence" else {}) | changes))


MOST = {"dim_qk": MAX_DIM_QK, "dim_v": MAX_DIM_V}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *(("chunkwise", {"dtype": dtype, **MOST}) for dtype in (torch.bfloat16, torch.float16)),
        *(("chunkwise", {"dim_qk": dims[0], "dim_v": dims[1]}) for dims in ((16, 16), (80, 48))),
        *(("chunkwise", {"requires_grad": True, **dims}) for dims in ({"dim_qk": 16, "dim_v": 16}, MOST)),
        *((name, {"dtype": torch.float32, "dim_qk": 1, "dim_v": 1}) for name in DECODING),
        *((name, {"dtype": torch.float16, "dim_qk": 17, "dim_v": 31}) for name in DECODING),
        *(("sequence", {"seq": seq, **MOST}) for seq in (1, MAX_TOKENS)),
        *((name, {"batch": 2**27 - 1, "sequences": 2**27 - 1, "heads": 1}) for name in DECODING),
        *((name, {"heads": 2**27 - 1}) for name in DECODING),
    ],
)
def test_serves(name: str, changes: dict[str, Any]) -> None:
    assert verdict_of(name, **changes) == SUPPORTED


@pytest.mark.parametrize(
    ("names", "change", "reason", "remedy"),
    [
        (tuple(SUPPORTS), {"device": torch.device("cpu")}, "the tensors are on cpu", "move them to a GPU"),
        (("chunkwise",), {"dtype": torch.float32}, "q, k, v are torch.float32", "torch.float16"),
        (("chunkwise",), {"dim_qk": 272}, "head dims are 272/256", "multiples of 16 up to 256/512"),
        (("chunkwise",), {"dim_v": 528}, "head dims are 128/528", "multiples of 16 up to 256/512"),
        (("chunkwise",), {"dim_qk": 24}, "head dims are 24/256", "multiples of 16 up to 256/512"),
        (("chunkwise",), {"sequences": 2**30, "heads": 4}, "sequences x heads = 4,294,967,296", "split"),
        (DECODING, {"dtype": torch.float64}, "q, k, v are torch.float64", "use torch.float32"),
        (DECODING, {"dim_qk": 257}, "head dims are 257/256", "use at most 256/512"),
        (DECODING, {"dim_v": 513}, "head dims are 128/513", "use at most 256/512"),
        # 16 slices of each along x of a grid, which ends at 2^31 - 1
        (DECODING, {"batch": 1 << 26}, "batch x heads = 134,217,728, the kernels take 134,217,727", "split"),
        (("step",), {"requires_grad": True, "dtype": torch.float32}, "are torch.float32", "torch.bfloat16"),
        (("sequence",), {"seq": 17}, "17 tokens, the kernel takes 16", "use mlstm_chunkwise"),
        (("sequence",), {"requires_grad": True}, "no gradients", "use mlstm_chunkwise or torch.no_grad()"),
    ],
)
def test_refuses(names: tuple[str, ...], change: dict[str, Any], reason: str, remedy: str) -> None:
    for name in names:
        verdict = verdict_of(name, **change)
        assert not verdict.ok and reason in verdict.reason and remedy in verdict.remedy, name


@OF_EVERY_KERNEL
def test_a_gpu_that_is_not_sm_90(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
    verdict = verdict_of(name)
    assert not verdict.ok and verdict.remedy == "use an H100, H200 or GH200"
    assert verdict.reason == "pretended GPU has compute capability 8.0, the kernels need 9.0"


def test_an_amd_gpu_of_the_same_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    """ROCm tells gfx90a's as (9, 0)."""
    monkeypatch.setattr(torch.version, "hip", "6.2.41133")
    verdict = tk.supports_mlstm(CALL)
    assert (verdict.ok, verdict.remedy) == (False, "use an H100, H200 or GH200")
    assert verdict.reason == "pretended GPU is an AMD GPU, the kernels are CUDA"


@pytest.mark.parametrize(
    ("driver", "toolkit", "serves"),
    [
        ((13, 0), (13, 0), True),
        ((13, 0), (13, 2), True),
        ((13, 1), (12, 8), True),
        ((12, 4), (12, 9), True),
        ((12, 9), (13, 0), False),
        ((12, 0), (13, 1), False),
        (None, (13, 0), True),
    ],
)
def test_a_driver_of_an_older_major_version_is_refused(
    driver: tuple[int, int] | None,
    toolkit: tuple[int, int],
    serves: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "_driver_version", lambda: driver)
    monkeypatch.setattr(build, "find_toolchain", lambda: replace(TOOLCHAIN, version=toolkit))
    for verdict in map(verdict_of, SUPPORTS):
        assert verdict.ok == serves
        if driver is not None and not serves:
            told = f"CUDA {driver[0]}.{driver[1]}, the kernels are compiled by CUDA {toolkit[0]}.{toolkit[1]}"
            assert told in verdict.reason
            assert "update the driver" in verdict.remedy and "TFLA_TK_NVCC" in verdict.remedy


@pytest.mark.parametrize(
    ("answer", "version"), [((0, 13000), (13, 0)), ((0, 12080), (12, 8)), ((100, 0), None), (None, None)]
)
def test_the_driver_is_asked_for_its_version(
    answer: tuple[int, int] | None, version: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()

    def library(name: str) -> Any:
        if answer is None:
            raise OSError(f"{name}: cannot open shared object file")

        def get_version(pointer: Any) -> int:
            pointer._obj.value = answer[1]
            return answer[0]

        return SimpleNamespace(cuDriverGetVersion=get_version)

    monkeypatch.setattr(device.ctypes, "CDLL", library)
    assert device._driver_version() == version


@pytest.mark.parametrize("finder", ["find_toolchain", "check_cache", "find_thunderkittens"])
def test_no_compiler_or_no_thunderkittens(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, finder: str
) -> None:
    """Which "auto" passes over without a word: so it is logged, once."""

    def missing(**options: object) -> None:
        raise build.BuildError(f"{finder} found nothing", "install it")

    monkeypatch.setattr(build, finder, missing)
    for _ in range(2):
        verdict = tk.supports_mlstm(CALL)
    assert (verdict.ok, verdict.reason, verdict.remedy) == (False, f"{finder} found nothing", "install it")
    assert [record.message for record in caplog.records] == [
        f"the tk kernels cannot be used: {finder} found nothing\nRemedy: install it"
    ]


UNUSABLE: dict[str, tuple[str, Callable[[Path, pytest.MonkeyPatch], None]]] = {
    "a file": ("is not a directory", lambda cache, patch: cache.touch()),
    "closed": ("cannot be written, and no kernel can be read", lambda cache, patch: cache.mkdir(mode=0)),
    "not writable": ("cannot be written, and no kernel", lambda cache, patch: cache.mkdir(mode=0o500)),
    "below a file": (
        "is not a directory",
        lambda cache, patch: (cache.touch(), patch.setenv("TFLA_TK_CACHE_DIR", str(cache / "below"))),
    ),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_a_cache_that_cannot_be_used(
    case: str, of_nobody: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Auto moves on from each kernel, by name it is an error, and both tell the reason."""
    reason, make = UNUSABLE[case]
    monkeypatch.setattr(build, "check_cache", cache.check_cache)
    monkeypatch.setattr(dispatch, "BACKENDS", ("tk", "reference"))
    monkeypatch.setenv("TFLA_TK_CACHE_DIR", str(of_nobody / "cache"))
    make(of_nobody / "cache", monkeypatch)
    for kernel, call in KINDS.items():
        assert dispatch.choose(kernel, kernel, call, "auto") == ("reference", None)
        with pytest.raises(UnsupportedError, match=reason) as caught:
            dispatch.choose(kernel, kernel, call, "tk")
        assert "set TFLA_TK_CACHE_DIR to a directory that you own" in caught.value.remedy
    assert len(caplog.records) == 1 and reason in caplog.text


# a cache that can only be read, and kernels that cannot be loaded

KINDS: dict[str, MLSTMCall] = {
    "mlstm": replace(CALL, dim_qk=80, dim_v=400),
    "mlstm_step": replace(CALL, seq=1),
    "mlstm_sequence": replace(CALL, seq=9),
}
GRADIENTS = replace(CALL, dim_qk=80, dim_v=400, requires_grad=True)


def needed_by(kernel: str, call: MLSTMCall) -> list[Instance]:
    """The machine code that is loaded before such a call."""
    kernels_of, *key = tk.kernels_for(kernel, call)
    return list(kernels_of(*key)[1])


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Instance]:
    """What is loaded."""
    found: list[Instance] = []
    monkeypatch.setattr(build, "load", lambda launcher, *instances: found.extend(instances))
    return found


def fail_to_load(monkeypatch: pytest.MonkeyPatch, error: Exception) -> list[Instance]:
    """What was tried."""
    tried: list[Instance] = []

    def load(launcher: Launcher, *instances: Instance) -> None:
        tried.extend(instances)
        raise error

    monkeypatch.setattr(build, "load", load)
    return tried


@pytest.mark.parametrize("op", [OPS["sig"], OPS["sig unnormalised"]], ids=["normalised", "unnormalised"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim_v", [16, 80, 192, 272, 512])
@pytest.mark.parametrize("dim_qk", [16, 80, 192, 256])
def test_what_a_call_launches_is_loaded_before(
    dim_qk: int, dim_v: int, dtype: torch.dtype, op: Op, kernels: Kernels
) -> None:
    """By a call that was supported: nothing is compiled between two launches."""
    kernels.computes = False
    results(op, draw(op, (dim_qk, dim_v), dtype=dtype))
    call = replace(CALL, dim_qk=dim_qk, dim_v=dim_v, dtype=dtype, sigmoid_gate=True, requires_grad=True)
    call = replace(call, normalize=op is OPS["sig"])
    for kernel in ("mlstm", "mlstm_step"):
        assert set(needed_by(kernel, call)) == {*kernels.loaded}


@pytest.mark.parametrize("kernel", KINDS)
def test_a_cache_that_can_only_be_read_serves_what_it_holds(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, held = KINDS[kernel], list[Instance | Launcher]()
    kernels_of, *key = tk.kernels_for(kernel, call)
    launcher, needed = kernels_of(*key)
    monkeypatch.setattr(build, "check_cache", lambda: False)
    monkeypatch.setattr(build, "is_cached", lambda artifact: artifact in held)
    for missing in (launcher, *needed):
        verdict = dispatch.support("tk", kernel, call)
        assert not verdict.ok and "set TFLA_TK_CACHE_DIR" in verdict.remedy
        told = f"{missing.name} is not compiled, and the cache directory cannot be written"
        assert verdict.reason == told
        held.append(missing)
        device._is_cached.cache_clear()
    assert dispatch.support("tk", kernel, call) == Support(True)
    if kernel == "mlstm":
        assert not tk.supports_mlstm(GRADIENTS).ok
        held += needed_by("mlstm", GRADIENTS)
        device._is_cached.cache_clear()
        assert tk.supports_mlstm(GRADIENTS).ok


@pytest.mark.parametrize("kernel", KINDS)
def test_auto_moves_on_where_a_kernel_cannot_be_loaded(
    kernel: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is tried and logged once; from then on `which` knows, and by name it is an error with the reason.

    When the cause may be gone it is tried again.
    """
    call = KINDS[kernel]
    tried = fail_to_load(monkeypatch, build.BuildError("no space left on device", "make room"))
    monkeypatch.setattr(dispatch, "BACKENDS", ("tk", "reference"))
    assert dispatch.choose(kernel, kernel, call, "auto", load=False) == ("tk", None)
    for _ in range(2):
        assert dispatch.choose(kernel, kernel, call, "auto") == ("reference", None)
        assert dispatch.choose(kernel, kernel, call, "auto", load=False) == ("reference", None)
    assert tried == needed_by(kernel, call)
    assert [record.message for record in caplog.records] == [
        "the tk kernels cannot be used: no space left on device\nRemedy: make room"
    ]
    with pytest.raises(
        UnsupportedError, match=f"{kernel} on backend 'tk': no space left on device"
    ) as caught:
        dispatch.choose(kernel, kernel, call, "tk")
    assert caught.value.failed and caught.value.remedy == "make room"
    device.forget_failures()
    monkeypatch.setattr(build, "load", lambda *wanted: None)
    assert dispatch.choose(kernel, kernel, call, "auto") == ("tk", None)


def test_what_is_first_asked_for_by_name_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_to_load(monkeypatch, build.BuildError("no space left on device"))
    with pytest.raises(UnsupportedError, match="no space left on device") as caught:
        dispatch.choose("mlstm_chunkwise", "mlstm", replace(CALL, dim_qk=256), "tk")
    assert caught.value.failed
    # other kernels are not concerned
    assert tk.supports_mlstm(CALL).ok


def test_a_call_that_records_gradients_loads_the_backward_too(loaded: list[Instance]) -> None:
    assert dispatch.choose("mlstm_chunkwise", "mlstm", GRADIENTS, "auto") == ("tk", None)
    assert loaded == needed_by("mlstm", GRADIENTS)
    loaded.clear()
    dispatch.choose("mlstm_chunkwise", "mlstm", replace(CALL, batch=0), "auto")
    assert loaded == []


@pytest.mark.parametrize("kernel", KINDS)
def test_the_choice_is_made_while_a_call_is_compiled(kernel: str, loaded: list[Instance]) -> None:
    """Kernels are loaded then: a graph cannot move on later. Sizes may be symbols."""

    def call_of(batch: int, heads: int, seq: int, dim: int) -> MLSTMCall:
        sizes = {"batch": batch, "sequences": batch, "heads": heads, "seq": seq, "dim_qk": dim, "dim_v": dim}
        return replace(CALL, **sizes)

    def serve(x: torch.Tensor) -> torch.Tensor:
        name, _ = dispatch.choose(kernel, kernel, call_of(*x.shape), "auto")
        return x + 1 if name == "tk" else x - 1

    torch._dynamo.reset()
    compiled = torch.compile(serve, fullgraph=True, backend="eager", dynamic=True)
    expected = set()
    for seq, dim in ((9, 128), (12, 64)):
        assert (compiled(torch.zeros(2, 3, seq, dim)) == 1).all()
        expected |= set(needed_by(kernel, call_of(2, 3, seq, dim)))
    assert set(loaded) == expected


def test_a_capture_is_no_reason_to_move_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph would hold another backend's kernels for good; before the capture the kernel can be had."""
    with monkeypatch.context() as patch:
        fail_to_load(patch, build.CaptureError("while a CUDA graph is being captured", "call it once before"))
        with pytest.raises(build.CaptureError):
            dispatch.choose("mlstm_chunkwise", "mlstm", CALL, "auto")
    monkeypatch.setattr(build, "load", lambda *wanted: None)
    assert dispatch.choose("mlstm_chunkwise", "mlstm", CALL, "auto") == ("tk", None)


def test_a_cpu_call_never_touches_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def touched(index: int) -> None:
        raise AssertionError("CUDA was asked")

    monkeypatch.setattr(torch.cuda, "get_device_capability", touched)
    assert not tk.supports_mlstm(replace(CALL, device=torch.device("cpu"))).ok


def test_a_gpu_that_this_machine_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """`which` answers about fake tensors on one, with a build of torch without CUDA too."""
    monkeypatch.undo()
    device._probe_device.cache_clear()
    with FakeTensorMode():

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(1, 2, *shape, dtype=torch.bfloat16, device="cuda:77")

        for name, given in {
            "mlstm_chunkwise": [empty(128, 64)] * 3 + [empty(128)] * 2,
            "mlstm_step": [empty(64)] * 3 + [empty(1)] * 2 + [empty(64, 64), empty(64), empty(1)],
            "mlstm_siging_sequence": [empty(4, 64)] * 3 + [empty(4)] * 2 + [empty(64, 64), empty(64)],
        }.items():
            choice = tfla_tk.which(name, *given)
            verdict = choice.reasons["tk"]
            assert choice.backend != "tk" and not verdict.ok
            assert verdict.reason.startswith("torch cannot use GPU 77: ") and verdict.remedy
