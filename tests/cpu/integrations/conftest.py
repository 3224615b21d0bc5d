"""Small models of the real packages, and what the kernels of the packages compute."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tfla_tk import decode, delta_rule, gla, kda, simple_gla
from tfla_tk.backends.tk import device
from tfla_tk.backends.tk import mlstm as tk
from tfla_tk.calls.mlstm import MLSTMCall
from tfla_tk.core.support import SUPPORTED
from tfla_tk.integrations import fla, xlstm
from tfla_tk.integrations.xlstm import kernels
from tfla_tk.ops import mlstm_decode

NATIVE = {
    "chunkwise_kernel": "chunkwise--native_autograd",
    "sequence_kernel": "native_sequence__native",
    "step_kernel": "native",
}
OURS = NATIVE | {"chunkwise_kernel": "chunkwise--tfla_tk", "step_kernel": "tfla_tk"}
OURS_SIGING = NATIVE | {"chunkwise_kernel": "chunkwise--tfla_tk_siging", "step_kernel": "tfla_tk_siging"}


@pytest.fixture
def mlstm_kernels() -> Iterator[Any]:
    """mlstm_kernels.torch; whatever a test registers or replaces is undone after it."""
    yield pytest.importorskip("mlstm_kernels.torch", reason="mlstm-kernels is not installed")
    xlstm.unregister()


@pytest.fixture
def make_backend(mlstm_kernels: Any) -> Callable[..., nn.Module]:
    """Builds an mLSTMBackend from fields of its configuration, native kernels by default."""
    module = importlib.import_module("mlstm_kernels.torch.backend_module")

    def make(**fields: Any) -> nn.Module:
        return module.mLSTMBackend(module.mLSTMBackendConfig(**NATIVE | fields))

    return make


@pytest.fixture
def make_large(mlstm_kernels: Any) -> Callable[..., nn.Module]:
    """Builds an xLSTMLarge of two blocks with random gates."""
    model = pytest.importorskip("xlstm.xlstm_large.model", reason="xlstm is not installed")

    def make(**fields: Any) -> nn.Module:
        torch.manual_seed(0)
        sizes = {"embedding_dim": 64, "num_heads": 2, "num_blocks": 2, "vocab_size": 50}
        config = model.xLSTMLargeConfig(**sizes | {"return_last_states": True} | NATIVE | fields)
        return _random_gates(model.xLSTMLarge(config))

    return make


@pytest.fixture
def make_hf(mlstm_kernels: Any) -> Callable[..., nn.Module]:
    """Builds transformers' xLSTMForCausalLM of two blocks with random gates."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("xlstm", reason="xlstm is not installed")

    def make(**fields: Any) -> nn.Module:
        torch.manual_seed(0)
        sizes = {"hidden_size": 128, "num_heads": 2, "num_hidden_layers": 2, "vocab_size": 50}
        return _random_gates(transformers.xLSTMForCausalLM(transformers.xLSTMConfig(**sizes | fields)))

    return make


def _random_gates(model: nn.Module) -> nn.Module:
    """Gates that open and forget, so that states and layers matter; transformers starts with closed ones."""
    for name, parameter in model.named_parameters():
        if "gate" in name:
            forget_bias = "fgate" in name and name.endswith("bias")
            of_state = "igate" in name or "fgate" in name
            nn.init.normal_(parameter, 1.0 if forget_bias else 0.0, 0.3 if of_state else 0.05)
    return model


@pytest.fixture
def tokens() -> Tensor:
    """Token ids [2, 64] below 50."""
    return torch.randint(50, (2, 64), generator=torch.Generator().manual_seed(1))


def draw(seq: int, dims: tuple[int, int] = (16, 32), dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """q, k, v, i, f of a backend module with two heads, as models pass them: [B, S, NH, D] in memory."""
    generator = torch.Generator().manual_seed(seq)

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, seq, 2, *shape, generator=generator, dtype=torch.float64).to(dtype)

    q, k, v = (normal(dim).transpose(1, 2) for dim in (dims[0], *dims))
    i, f = normal().transpose(1, 2), normal().transpose(1, 2) + 2
    return {"q": q, "k": k, "v": v, "i": i, "f": f}


def relative_error(found: Any, truth: Any) -> float:
    """Relative Frobenius error, of several tensors the largest."""
    if not isinstance(truth, Tensor):
        return max(relative_error(*pair) for pair in zip(found, truth, strict=True))
    assert found.shape == truth.shape
    return ((found.double() - truth.double()).norm() / truth.double().norm()).item()


def gradients(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    """The gradients of every parameter, after `loss(model)`."""
    model.train()
    model.zero_grad()
    loss(model).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(found: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    """Every gradient is there, not zero, and agrees."""
    assert found.keys() == truth.keys() and found
    errors = {name: relative_error(x, truth[name]) for name, x in found.items()}
    assert not {name: error for name, error in errors.items() if not error <= 2e-4}


@pytest.fixture(params=["named", "switched"])
def switched(request: pytest.FixtureRequest) -> Callable[..., nn.Module]:
    """Gives a model of `make` on these kernels: configured with their names, or switched when built."""

    def build(make: Callable[..., nn.Module], **fields: Any) -> nn.Module:
        if request.param == "named":
            xlstm.register()
            return make(**OURS | fields)
        model = make(**fields)
        assert xlstm.replace(model)
        return model

    return build


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has a function of the tk backend that says what it supports answer as on a Hopper GPU, by its name."""

    def pretend(name: str) -> None:
        supports, gpu = getattr(tk, name), torch.device("cuda", 0)

        def answer(call: MLSTMCall, variant: str | None = None) -> Any:
            return supports(dataclasses.replace(call, device=gpu), variant)

        monkeypatch.setattr(device, "device_fault", lambda index: ("", ""))
        monkeypatch.setattr(tk, "load", lambda *args: SUPPORTED)
        monkeypatch.setattr(tk, name, answer)

    return pretend


@pytest.fixture
def sequence_calls(
    monkeypatch: pytest.MonkeyPatch, on_a_gpu: Callable[[str], None]
) -> Iterator[list[tuple[str, str]]]:
    """What is called for sequences, with its backend=, on a CPU that passes for a Hopper GPU.

    The tk backend says of a few tokens what it would there; its kernel for them, and every chunkwise backend,
    is the reference.
    """
    found: list[tuple[str, str]] = []

    def recorded(name: str, **changes: Any) -> Callable[..., Any]:
        function = getattr(kernels, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            found.append((name, kwargs.get("backend", "auto")))
            return function(*args, **kwargs | changes)

        return call

    for gate in ("", "siging_"):
        for name, changes in (("chunkwise", {"backend": "reference"}), ("sequence", {})):
            monkeypatch.setattr(kernels, f"mlstm_{gate}{name}", recorded(f"mlstm_{gate}{name}", **changes))
    on_a_gpu("supports_mlstm_sequence")
    on_cpu = mlstm_decode.on_cpu, mlstm_decode.in_place_on_cpu
    monkeypatch.setattr(mlstm_decode, "_kernels", lambda: on_cpu)
    decode._step.plans.clear()
    decode._sequence.plans.clear()
    yield found
    decode._step.plans.clear()
    decode._sequence.plans.clear()


# fla


@pytest.fixture
def restored() -> Iterator[None]:
    """fla as it was, before and after."""
    # not for every worker process that collects such tests: it takes five seconds
    pytest.importorskip("fla.ops", reason="fla-core is not installed")
    paths = (simple_gla._path, gla._path, delta_rule._path, kda._path)
    for path in paths:
        path.plans.clear()
    fla._told.clear()
    yield
    fla.restore(filter(fla.is_accelerated, fla.FUNCTIONS))  # each function takes a look at all modules
    for path in paths:
        path.plans.clear()


@pytest.fixture
def accelerated(restored: None) -> list[str]:
    return fla.accelerate()
