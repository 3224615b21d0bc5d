"""Inputs and a stand-in for the tk backend, shared by the API tests."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import tfla_tk.backends.tk.scalar_gate.backward
import tfla_tk.backends.tk.scalar_gate.decoding
from tfla_tk import Support, decode, mlstm
from tfla_tk.backends.tk import device, scalar_gate
from tfla_tk.backends.tk import mlstm as tk
from tfla_tk.backends.tk.scalar_gate import forward
from tfla_tk.backends.triton import fla, installation, mlstm_kernels
from tfla_tk.calls.mlstm import MLSTMCall
from tfla_tk.core.layout import Cut, Kept
from tfla_tk.core.support import SUPPORTED
from tfla_tk.ops import mlstm as ops
from tfla_tk.ops import mlstm_decode

from .families import FAMILIES, UNGATED, serve_simple_gla
from .served import Served
from .simple_gla_calls import Kernels

Inputs = dict[str, Tensor]
STATES = ("c_initial", "n_initial", "m_initial")
# how the names of mLSTM's functions begin, and their options
BY_GATE: dict[str, tuple[str, dict[str, Any]]] = {
    "exp": ("mlstm", {}),
    "sig": ("mlstm_siging", {}),
    "unnormalised": ("mlstm_siging", {"normalize": False}),
}


def make_inputs(
    batch: int = 2,
    heads: int = 3,
    seq: int = 40,
    dim_qk: int = 16,
    dim_v: int = 32,
    dtype: torch.dtype = torch.float32,
    states: tuple[str, ...] = (),
    sequences: int | None = None,
    seed: int = 0,
) -> Inputs:
    """Random q, k, v, i, f by name, and on request an initial state, of packed sequences where they are."""
    rows = batch if sequences is None else sequences
    g = torch.Generator().manual_seed(seed)
    shapes = {
        "q": (batch, heads, seq, dim_qk),
        "k": (batch, heads, seq, dim_qk),
        "v": (batch, heads, seq, dim_v),
        "i": (batch, heads, seq),
        "f": (batch, heads, seq),
        "c_initial": (rows, heads, dim_qk, dim_v),
        "n_initial": (rows, heads, dim_qk),
        "m_initial": (rows, heads, 1),
    }
    wanted = ("q", "k", "v", "i", "f", *states)
    inputs = {name: torch.randn(shapes[name], generator=g, dtype=torch.float64) for name in wanted}
    inputs["f"] += 3
    return {name: t.to(dtype) for name, t in inputs.items()}


def leaves(x: dict[str, Any]) -> dict[str, Any]:
    """The inputs with requires_grad, but for those that have no gradient."""
    return {n: t.detach().clone().requires_grad_(n not in ("m_initial", "cu_seqlens")) for n, t in x.items()}


LEFT = Kept((torch.arange(3.0),), forward.Left(Cut(4, 2), (8, 16)))  # what a forward leaves for its backward


def forward_kernel(*args: Any) -> tuple[Tensor | None, ...]:
    """The op's CPU code as the kernels return it: None in place of empty tensors, and what they leave."""
    args, keep_states = args[:15], args[15:] == (True,)
    found = (None if x.numel() == 0 else x for x in ops._fwd_cpu(*args))
    return *found, LEFT._replace(tensors=(LEFT.tensors[0].clone(),)) if keep_states else None


def backward_kernels(*args: Any) -> tuple[Tensor | None, ...]:
    """Likewise; the plain call gets the states that its forward has left, if any."""
    *args, states = args
    assert states is None or (
        torch.equal(states.tensors[0], LEFT.tensors[0]) and states.layout == LEFT.layout
    )
    return tuple(None if x.numel() == 0 else x for x in ops._bwd_cpu(*args))


def chosen_verdict(supports: Callable[..., Support]) -> Callable[..., Support]:
    """In place of `supports`, but for the variants that it refuses."""

    def supports_by_choice(self: FakeTk, call: MLSTMCall, variant: str | None = None) -> Support:
        if variant is not None:
            supports(dataclasses.replace(call, device=torch.device("cpu")), variant)
        return self.verdict

    return supports_by_choice


class FakeForward(ModuleType):
    """The launches of the forward with the op's CPU code as its kernel; `prepare` leads to it, too."""

    Options = forward.Options
    mlstm_fwd = staticmethod(forward_kernel)

    def prepare(self, tensors: tuple[Any, ...], options: forward.Options) -> Callable[..., Any]:
        def layouts(tensors: tuple[Any, ...]) -> list[Any]:
            return [None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors]

        expected = layouts(tensors)

        def run(*tensors: Any) -> Any:
            assert layouts(tensors) == expected
            keeps = (True,) if options.keep_states else ()
            return self.mlstm_fwd(*tensors, *options[:6], *keeps)  # as the op takes them

        return run


class FakeTk(ModuleType):
    """The tk backend's module for mLSTM with a verdict that a test chooses, and its launches."""

    verdict = Support(False, "no GPU of compute capability 9.0", "run on a Hopper GPU")
    forward: FakeForward
    backward: ModuleType
    decoding: ModuleType
    states_left = LEFT

    supports_mlstm = chosen_verdict(tk.supports_mlstm)
    supports_mlstm_step = chosen_verdict(tk.supports_mlstm_step)
    supports_mlstm_sequence = chosen_verdict(tk.supports_mlstm_sequence)

    def load(self, kernel: str, call: MLSTMCall, variant: str | None = None) -> Support:
        return Support(True)


@pytest.fixture(autouse=True)
def fake_tk(monkeypatch: pytest.MonkeyPatch) -> FakeTk:
    """Replaces what asks the machine, and the kernels; it refuses every call."""
    for path in (mlstm._chunkwise, decode._step, decode._sequence):
        path.plans.clear()
    module = FakeTk(tk.__name__)
    for name, value in vars(tk).items():
        if name not in vars(FakeTk):
            setattr(module, name, value)
    module.forward = FakeForward(f"{scalar_gate.__name__}.forward")
    for name in ("backward", "decoding"):
        setattr(module, name, ModuleType(f"{scalar_gate.__name__}.{name}"))
    module.backward.mlstm_bwd = backward_kernels  # type: ignore[attr-defined]
    module.decoding.with_new_state = mlstm_decode.on_cpu  # type: ignore[attr-defined]
    module.decoding.in_place = mlstm_decode.in_place_on_cpu  # type: ignore[attr-defined]
    for package, name, fake in [
        (tfla_tk.backends.tk, "mlstm", module),
        *((scalar_gate, name, getattr(module, name)) for name in ("forward", "backward", "decoding")),
    ]:
        monkeypatch.setitem(sys.modules, fake.__name__, fake)
        monkeypatch.setattr(package, name, fake)
    return module


@pytest.fixture
def served(fake_tk: Any) -> Served:
    return Served(fake_tk)


# one token, a few tokens


@pytest.fixture
def passes_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What asks the machine finds a Hopper GPU, and mlstm_kernels."""
    monkeypatch.setattr(mlstm_kernels, "MLSTM_KERNELS_MISSING", None)
    monkeypatch.setattr(installation, "INTERPRETED", False)
    monkeypatch.setattr(device, "device_fault", lambda index: ("", ""))


@pytest.fixture(params=["reference", "tk"])
def reference_or_tk(request: pytest.FixtureRequest, fake_tk: FakeTk) -> str:
    """A backend's name; tk is the op on the CPU."""
    fake_tk.verdict = SUPPORTED
    return request.param


# operators in [B, T, H, D]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """The tk backend serves every call, on the CPU."""
    return serve_simple_gla(monkeypatch)


@pytest.fixture
def given_to_fla(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the adapter onto fla passes on: `op`, `args`, and keywords by their names."""
    got: dict[str, Any] = {}

    def call_fla(op: str, device: torch.device, *args: Any, **kwargs: Any) -> tuple[Any, None]:
        got.update(kwargs, op=op, args=args)
        return args[2], None

    monkeypatch.setattr(fla, "call_fla", call_fla)
    return got


@pytest.fixture(autouse=True)
def no_plans() -> None:
    for family in (*FAMILIES, UNGATED):
        family.path.plans.clear()
