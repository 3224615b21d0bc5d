"""The support table: what auto takes, what a named backend does, what which() tells."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import traceback
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tfla_tk import Support, UnsupportedError, mlstm_chunkwise, which
from tfla_tk.backends.triton import fla, installation
from tfla_tk.backends.triton import mlstm_kernels as triton
from tfla_tk.calls.mlstm import MLSTMCall
from tfla_tk.core import dispatch

from .conftest import make_inputs


@pytest.fixture
def gpu_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """mlstm_kernels and fla count as installed."""
    monkeypatch.setattr(triton, "MLSTM_KERNELS_MISSING", None)
    monkeypatch.setattr(fla, "FLA_MISSING", None)
    monkeypatch.setattr(installation, "INTERPRETED", False)


def gpu_call(**changes: Any) -> MLSTMCall:
    """A call as validation describes it for tensors on a GPU."""
    fields: dict[str, Any] = {
        "device": torch.device("cuda", 0),
        "dtype": torch.bfloat16,
        "batch": 8,
        "sequences": 8,
        "heads": 16,
        "seq": 8192,
        "dim_qk": 128,
        "dim_v": 256,
        "sigmoid_gate": False,
        "normalize": True,
        "return_last_states": False,
        "varlen": False,
        "requires_grad": False,
        "chunk_size": 64,
        "eps": 1e-6,
    }
    return MLSTMCall(**fields | changes)


def test_auto_on_cpu_is_the_reference() -> None:
    choice = which("mlstm_chunkwise", **make_inputs())
    assert choice.backend == "reference"
    assert list(choice.reasons) == ["tk", "triton", "reference"]
    assert "compute capability" in choice.reasons["tk"].reason
    assert "GPU" in choice.reasons["triton"].reason and choice.reasons["triton"].remedy
    assert choice.reasons["reference"].ok


def test_which_reads_as_a_table() -> None:
    lines = str(which(mlstm_chunkwise, **make_inputs())).splitlines()
    assert lines[0] == "reference"
    assert lines[1] == "  tk         no: no GPU of compute capability 9.0 (run on a Hopper GPU)"
    assert lines[3] == "  reference  yes"


def test_which_takes_positional_arguments_and_variants() -> None:
    inputs = make_inputs()
    choice = which("mlstm_siging_chunkwise", *inputs.values(), backend="reference:parallel")
    assert choice.backend == "reference:parallel" and choice.reasons["reference:parallel"].ok


def test_which_rejects_unknown_operators() -> None:
    with pytest.raises(ValueError, match=r"op: expected one of .*mlstm_chunkwise, .*, got 'softmax'$"):
        which("softmax", **make_inputs())
    with pytest.raises(ValueError, match="op: expected one of"):
        which(torch.softmax, **make_inputs())


def test_auto_takes_tk_first(fake_tk: Any) -> None:
    fake_tk.verdict = Support(True)
    assert which("mlstm_chunkwise", **make_inputs()).backend == "tk"


def test_auto_skips_results_that_are_not_exact(fake_tk: Any) -> None:
    fake_tk.verdict = Support(True, "its gradient is rounded", auto=False)
    inputs = make_inputs()
    choice = which("mlstm_chunkwise", **inputs)
    assert choice.backend == "reference"
    assert str(choice.reasons["tk"]) == "by name only: its gradient is rounded"
    assert which("mlstm_chunkwise", **inputs, backend="tk").backend == "tk"


@pytest.mark.parametrize("backend", ["tk", "triton", "triton:limit_chunk_64"])
def test_named_backend_that_cannot_serve_raises(backend: str) -> None:
    with pytest.raises(UnsupportedError, match=f"mlstm_chunkwise on backend '{backend}'") as caught:
        mlstm_chunkwise(**make_inputs(), backend=backend)
    assert caught.value.reason and caught.value.remedy
    assert caught.value.reason in str(caught.value) and caught.value.remedy in str(caught.value)
    with pytest.raises(UnsupportedError):
        which("mlstm_chunkwise", **make_inputs(), backend=backend)


def test_unsupported_error_is_public_and_a_runtime_error() -> None:
    error = UnsupportedError("mlstm_chunkwise on backend 'tk'", "no nvcc")
    assert isinstance(error, RuntimeError) and error.remedy == ""
    assert str(error) == "mlstm_chunkwise on backend 'tk': no nvcc"
    (shown,) = traceback.format_exception_only(type(error), error)
    assert shown == f"tfla_tk.UnsupportedError: {error}\n"


def test_reasons_of_the_machine_reach_the_user(fake_tk: Any) -> None:
    fake_tk.verdict = Support(False, "no nvcc", "install the CUDA toolkit")
    with pytest.raises(UnsupportedError) as caught:
        mlstm_chunkwise(**make_inputs(), backend="tk")
    assert (caught.value.reason, caught.value.remedy) == ("no nvcc", "install the CUDA toolkit")
    assert mlstm_chunkwise(**make_inputs()).shape == make_inputs()["v"].shape


def test_which_names_the_function_whose_arguments_are_wrong() -> None:
    x = make_inputs()
    with pytest.raises(TypeError, match="mlstm_chunkwise: missing a required argument: 'k'"):
        which("mlstm_chunkwise", x["q"])
    with pytest.raises(TypeError, match="mlstm_chunkwise: got an unexpected keyword argument 'nix'"):
        which("mlstm_chunkwise", **x, nix=1)


def test_which_takes_packed_sequences(fake_tk: Any) -> None:
    arguments = make_inputs(1) | {"cu_seqlens": torch.tensor([0, 40])}
    choice = which("mlstm_chunkwise", **arguments)
    assert choice.backend == "reference"
    assert "mlstm_kernels has no variable length" in choice.reasons["triton"].reason
    fake_tk.verdict = Support(True)
    assert which("mlstm_siging_chunkwise", **arguments).backend == "tk"
    with pytest.raises(UnsupportedError, match="no variable length"):
        mlstm_chunkwise(**arguments, backend="triton")


# the Triton backend's table


def test_triton_serves_inference(gpu_triton: None) -> None:
    for gate in (False, True):
        assert triton.supports_mlstm(gpu_call(sigmoid_gate=gate)) == Support(True)


@pytest.mark.parametrize(
    ("changes", "auto"),
    [
        ({"requires_grad": True}, False),
        ({"requires_grad": True, "sigmoid_gate": True}, False),
        ({"requires_grad": True, "sigmoid_gate": True, "normalize": False}, True),
        (
            {"requires_grad": True, "sigmoid_gate": True, "normalize": False, "return_last_states": True},
            False,
        ),
    ],
)
def test_triton_gradients_that_are_not_exact_are_by_name_only(
    changes: dict[str, Any], auto: bool, gpu_triton: None
) -> None:
    verdict = triton.supports_mlstm(gpu_call(**changes))
    assert verdict.ok and verdict.auto == auto
    assert bool(verdict.reason) != auto


# 131,072 tokens at 256/512 in chunks of 64: one past the last safe length
ONE_PAST = {"batch": 1, "heads": 8, "seq": 131072, "dim_qk": 256, "dim_v": 512}
LONG, MANY = {"seq": 65536, "dim_v": 128}, {"batch": 70000, "heads": 1, "seq": 128, "dim_qk": 64, "dim_v": 64}


@pytest.mark.parametrize(
    ("changes", "variant", "reason"),
    [
        ({"device": torch.device("cpu")}, None, "the tensors are on cpu"),
        ({"dtype": torch.float64}, None, "float64"),
        ({"batch": 1, "sequences": 8, "varlen": True}, None, "no variable length"),
        ({"batch": 1, "sequences": 8, "varlen": True}, "limit_chunk_64", "no variable length"),
        ({"dim_qk": 24}, None, "DHQK = 24"),
        ({"dim_qk": 160}, None, "DHQK = 160"),
        ({"dim_qk": 8}, None, "DHQK = 8 is below"),
        ({"dim_v": 8}, None, "DHHV = 8 is below"),
        ({"seq": 63}, None, "S = 63 is no multiple"),
        ({"seq": 1000}, None, "S = 1000 is no multiple"),
        ({"seq": 1, "sigmoid_gate": True}, None, "S = 1"),
        ({"seq": 192}, "xl_chunk_128", "S = 192 is no multiple of the chunk size 128"),
        ({"seq": 48}, "xl_chunk_16", "xl_chunk needs S >= 128"),
        ({"chunk_size": 48}, "limit_chunk", "chunk_size = 48"),
        ({"requires_grad": True}, "xl_chunk_256", "wrong gradients"),
        ({"requires_grad": True, "chunk_size": 512}, "xl_chunk", "wrong gradients"),
        ({"sigmoid_gate": True}, "xl_chunk_64", "exponential input gate"),
        ({}, "siging_xl_64", "sigmoid input gate"),
        (ONE_PAST, "limit_chunk_64", "int32 offsets wrap"),
        ({"batch": 64, "heads": 16, "seq": 16384}, None, "int32 offsets wrap"),
        # grids: (x, tiles of a chunk, chunks x batch x heads) in xl_chunk and siging_xl, (x, chunks, batch x
        # heads) in limit_chunk, of at most 65,535 along y and z
        (LONG, "xl_chunk_128", "chunks x batch x heads = 65,536, a CUDA grid takes 65,535"),
        (LONG | {"sigmoid_gate": True}, "siging_xl_128", "chunks x batch x heads = 65,536"),
        ({"batch": 1, "heads": 1, "seq": 2**20, "dim_qk": 16}, "limit_chunk_16", "chunks = 65,536"),
        (MANY, None, "batch x heads = 70,000"),
        ({"batch": 65536, "heads": 1, "seq": 16, "dim_v": 64}, "limit_chunk_16", "batch x heads = 65,536"),
        (MANY | {"sigmoid_gate": True}, None, "batch x heads = 70,000"),
    ],
)
def test_triton_refuses(changes: dict[str, Any], variant: str | None, reason: str, gpu_triton: None) -> None:
    verdict = triton.supports_mlstm(gpu_call(**changes), variant)
    assert not verdict.ok and reason in verdict.reason and verdict.remedy


@pytest.mark.parametrize(
    ("changes", "variant"),
    [
        ({"dim_qk": 16}, None),
        ({"dim_qk": 192, "dim_v": 48}, None),
        ({"seq": 16}, None),
        ({"seq": 48}, None),
        ({"seq": 8192 + 64}, None),
        ({"requires_grad": True, "seq": 256}, "xl_chunk_256"),
        ({"requires_grad": True, "sigmoid_gate": True}, "siging_xl_256"),
        (ONE_PAST | {"seq": 131072 - 64}, "limit_chunk_64"),
        (ONE_PAST, "xl_chunk_128"),
        # the largest grids
        ({"batch": 1, "heads": 1, "seq": 65535 * 128}, "xl_chunk_128"),
        ({"batch": 1, "heads": 1, "seq": 65535 * 128, "sigmoid_gate": True}, "siging_xl_128"),
        ({"batch": 1, "heads": 1, "seq": 65535 * 16, "dim_qk": 16}, "limit_chunk_16"),
        ({"batch": 65535, "heads": 1, "seq": 64, "dim_v": 64}, "limit_chunk_64"),
    ],
)
def test_triton_accepts(changes: dict[str, Any], variant: str | None, gpu_triton: None) -> None:
    assert triton.supports_mlstm(gpu_call(**changes), variant).ok


@pytest.mark.parametrize(
    ("changes", "variant"),
    [
        ({}, ("xl_chunk", 128)),
        ({"sigmoid_gate": True}, ("siging_xl", 128)),
        ({"seq": 192}, ("xl_chunk", 64)),
        ({"seq": 96}, ("limit_chunk", 32)),
        ({"seq": 48}, ("limit_chunk", 16)),
        # 512 chunks of 128 for each of 128 heads are one too many
        ({"seq": 65536}, ("xl_chunk", 256)),
        ({"seq": 65536, "sigmoid_gate": True}, ("siging_xl", 256)),
        ({"batch": 257, "heads": 255, "seq": 1024, "dim_qk": 16, "dim_v": 16}, ("xl_chunk", 1024)),
        ({"batch": 257, "heads": 255, "seq": 1088, "dim_qk": 16, "dim_v": 16}, ("limit_chunk", 64)),
        ({"batch": 32, "heads": 1, "seq": 2**22, "dim_qk": 16, "dim_v": 16}, ("xl_chunk", 4096)),
        # the chunk states of 128 exceed int32 offsets
        ({"batch": 2, "heads": 8, "seq": 131072, "dim_qk": 256, "dim_v": 512}, ("xl_chunk", 256)),
        # gradients: xl_chunk's are wrong with larger chunks, limit_chunk has the chunks along y
        ({"seq": 65536, "dim_qk": 64, "dim_v": 64, "requires_grad": True}, ("limit_chunk", 64)),
        ({"seq": 65536, "requires_grad": True, "sigmoid_gate": True}, ("siging_xl", 256)),
    ],
)
def test_triton_default_follows_length_and_grid(
    changes: dict[str, Any], variant: tuple[str, int], gpu_triton: None
) -> None:
    assert triton.default_variant(gpu_call(**changes)) == variant
    assert triton.supports_mlstm(gpu_call(**changes)).ok


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("batch", "heads"), [(70000, 1), (1, 70000), (256, 256)])
def test_triton_steps_follow_the_grid(batch: int, heads: int, dtype: torch.dtype, gpu_triton: None) -> None:
    """(1, V / 64, batch x heads)."""
    call = gpu_call(batch=batch, heads=heads, seq=1, dtype=dtype, dim_qk=64, dim_v=64)
    verdict = triton.supports_mlstm_step(call)
    assert not verdict.ok and verdict.remedy == "split the batch or the heads"
    assert verdict.reason == f"batch x heads = {batch * heads:,}, a CUDA grid takes 65,535 there"
    assert triton.supports_mlstm_step(replace(call, batch=257, heads=255)).ok


def test_auto_moves_on_where_no_grid_holds_the_call(gpu_triton: None) -> None:
    for changes in ({"batch": 70000, "heads": 1, "seq": 128}, {"batch": 1, "heads": 70000, "seq": 128}):
        call = gpu_call(**changes, dtype=torch.float32, dim_qk=16, dim_v=16)
        assert dispatch.choose("mlstm_chunkwise", "mlstm", call, "auto") == ("reference", None)
        step = replace(call, seq=1)
        assert dispatch.choose("mlstm_step", "mlstm_step", step, "auto") == ("reference", None)


def test_triton_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = installation.missing("no_such_package", "no-such-package")
    assert (
        missing is not None
        and missing.reason == "no-such-package is not installed"
        and "pip" in missing.remedy
    )
    monkeypatch.setattr(triton, "MLSTM_KERNELS_MISSING", missing)
    assert triton.supports_mlstm(gpu_call()) == missing
    monkeypatch.setattr(installation.importlib.metadata, "version", lambda _: "3.9.0")
    too_new = installation.missing("torch", "mlstm-kernels")
    if importlib.util.find_spec("triton") is not None:
        assert too_new is not None and "triton 3.9.0 has no block pointers" in too_new.reason


STAND_INS = ("triton", "mlstm_kernels", "fla", "nvidia", "xlstm", "transformers")
CALL_WITH_STAND_INS = """
import sys, types, torch
for name in sys.argv[1:]:
    sys.modules[name] = types.ModuleType(name)
import tfla_tk
from tfla_tk.backends.tk import mlstm as tk
from tfla_tk.backends.triton import fla, mlstm_kernels as triton
from tfla_tk.build.toolchain import pip_toolkits

x = [torch.ones(1, 1, 16, 16) for _ in range(3)] + [torch.ones(1, 1, 16) for _ in range(2)]
assert tfla_tk.mlstm_chunkwise(*x).shape == x[2].shape
print(tfla_tk.which("mlstm_chunkwise", *x))
print(triton.MLSTM_KERNELS_MISSING, fla.FLA_MISSING, pip_toolkits(), sep="; ")
"""


def test_modules_that_stand_for_packages_are_not_installed() -> None:
    """As test suites and documentation builds put them into sys.modules, without a spec."""
    command = [sys.executable, "-c", CALL_WITH_STAND_INS, *STAND_INS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    choice, *_, missing = done.stdout.splitlines()
    assert choice == "reference"
    assert missing.startswith("no: triton is not installed (pip install") and missing.endswith("; []")


def test_one_stand_in_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mlstm_kernels", "fla"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setattr(installation, "triton_version", lambda: "3.6.0")
        missing = installation.missing(name, "its-distribution")
        assert missing is not None and missing.reason == "its-distribution is not installed"
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    assert installation.triton_version() is None


def test_auto_moves_on_where_the_triton_kernels_do_not_import(
    gpu_triton: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Installed, but made for another release of what they import; logged once."""

    def broken(name: str) -> ModuleType:
        raise ImportError(f"cannot import something in {name}")

    installation.import_fault.cache_clear()
    monkeypatch.setattr(triton.importlib, "import_module", broken)
    try:
        for kernel, seq in (("mlstm", 128), ("mlstm_step", 1)) * 2:
            call = gpu_call(batch=1, heads=1, seq=seq, dtype=torch.float32)
            assert dispatch.choose(kernel, kernel, call, "auto") == ("reference", None)
            with pytest.raises(
                UnsupportedError, match="does not import: ImportError: cannot import"
            ) as caught:
                dispatch.choose(kernel, kernel, call, "triton")
            assert caught.value.failed and caught.value.remedy
    finally:
        installation.import_fault.cache_clear()
    assert len(caplog.records) == 2


def test_fla_table(gpu_triton: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "INTERPRETED", True)
    device = torch.device("cpu")

    def refusal(op: str, dtype: torch.dtype = torch.float32, requires_grad: bool = False) -> str:
        call: Any = SimpleNamespace(
            device=device, dtype=dtype, requires_grad=requires_grad, transformed=False
        )
        return getattr(fla.refusal_of_call(op, call, None), "reason", "")

    assert not refusal("chunk_gla")
    assert "float64" in refusal("chunk_gla", torch.float64)
    assert "float32" in refusal("chunk_delta_rule")
    assert not refusal("chunk_delta_rule", torch.bfloat16)
    monkeypatch.setattr(fla, "gated_backward_is_guarded", lambda: True)
    assert "miscompiles" in refusal("chunk_simple_gla", requires_grad=True)
    assert not refusal("chunk_retention", requires_grad=True)
    assert not refusal("chunk_simple_gla")
