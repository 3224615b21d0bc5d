"""Kernels get addresses: what the host converts for them lives until they are launched."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tfla_tk.backends.tk.scalar_gate import decoding

B, NH, K, V = 2, 3, 16, 32


@pytest.mark.parametrize("tokens", [(), (4,)])
def test_gates_in_float64(monkeypatch: pytest.MonkeyPatch, tokens: tuple[int, ...]) -> None:
    converted: list[weakref.ref[torch.Tensor]] = []
    addresses: list[int] = []
    alive: list[bool] = []
    to_float = torch.Tensor.float

    def float_(x: torch.Tensor) -> torch.Tensor:
        found = to_float(x)
        converted.append(weakref.ref(found))
        addresses.append(found.data_ptr())
        return found

    def launch(*arguments: Any) -> None:
        alive.extend(reference() is not None for reference in converted)
        given = [x[0] for x in arguments if isinstance(x, tuple)]
        assert all(address in given for address in addresses)

    kernels = SimpleNamespace(mlstm=launch)
    monkeypatch.setattr(decoding.build, "load", lambda *of: kernels)
    monkeypatch.setattr(decoding, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(decoding, "current_stream", lambda device: 0)
    q, k = (torch.randn(B, NH, *tokens, K) for _ in range(2))
    v = torch.randn(B, NH, *tokens, V)
    gates = [torch.randn(B, NH, *(tokens or (1,)), dtype=torch.float64) for _ in range(2)]
    state = (torch.zeros(B, NH, K, V), torch.zeros(B, NH, K), torch.zeros(B, NH, 1))
    monkeypatch.setattr(torch.Tensor, "float", float_)
    decoding._launch((q, k, v, *gates), state, state, False, True, 1e-6, False)
    assert alive == [True, True] and len(set(addresses)) == 2
