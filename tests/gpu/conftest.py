"""Inputs, the operators under test, their fp64 truth and the errors against it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import tfla_tk
from tfla_tk.backends import segments

DEVICE = "cuda"

Tensors = dict[str, Tensor]

# relative Frobenius error of h and c; n and m are fp32 sums that never pass through the operands' dtype
TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 1.25e-3}
NORM_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Operator:
    """A public function with one choice of its gate and normaliser."""

    function: str
    states: tuple[str, ...]
    options: dict[str, Any]

    def __call__(self, inputs: Tensors, backend: str = "tk", **options: Any) -> Any:
        """The public function's own result; ``inputs`` are its tensors by argument name."""
        return getattr(tfla_tk, self.function)(**inputs, **self.options, **options, backend=backend)

    def run(self, inputs: Tensors, backend: str = "tk") -> Tensors:
        """h and the last state by name."""
        h, last = self(inputs, backend, return_last_states=True)
        return {"h": h, **dict(zip(("c", "n", "m"), last, strict=False))}

    def truth(self, inputs: Tensors) -> Tensors:
        """The chunkwise reference in fp64 on the same rounded inputs."""
        exact = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
        return self.run(exact, "reference")


OPERATORS = {
    "exp": Operator("mlstm_chunkwise", ("c_initial", "n_initial", "m_initial"), {}),
    "sig": Operator("mlstm_siging_chunkwise", ("c_initial", "n_initial"), {"normalize": True}),
    "sig_unnormalised": Operator("mlstm_siging_chunkwise", ("c_initial",), {"normalize": False}),
}


@pytest.fixture(params=OPERATORS)
def operator(request: pytest.FixtureRequest) -> Operator:
    """mLSTM with exponential gate, with sigmoid gate, and without normaliser."""
    return OPERATORS[request.param]


@pytest.fixture
def exponential() -> Operator:
    """mLSTM with exponential gate."""
    return OPERATORS["exp"]


@pytest.fixture(params=list(TOLERANCE), ids=["bf16", "fp16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """The operands' dtypes."""
    return request.param


@pytest.fixture
def make_inputs() -> Callable[..., Tensors]:
    """Draws q, k, v, i, f and the initial state's tensors that are named."""

    def make(
        batch: int = 2,
        heads: int = 3,
        seq: int = 300,
        dims: tuple[int, int] = (128, 256),
        dtype: torch.dtype = torch.bfloat16,
        states: tuple[str, ...] = (),
        seed: int = 0,
        device: str = DEVICE,
    ) -> Tensors:
        generator = torch.Generator(device).manual_seed(seed)
        dim_qk, dim_v = dims
        rows = (batch, heads, seq)

        def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=dtype, device=device)

        found = {name: normal(*rows, dim_qk, dtype=dtype) for name in ("q", "k")}
        found["v"] = normal(*rows, dim_v, dtype=dtype)
        found["i"] = normal(*rows)
        found["f"] = normal(*rows) + 3
        shapes: dict[str, tuple[int, ...]] = {
            "c_initial": (dim_qk, dim_v),
            "n_initial": (dim_qk,),
            "m_initial": (1,),
        }
        return found | {name: normal(batch, heads, *shapes[name]) for name in states}

    return make


def relative_error(found: Tensor, truth: Tensor) -> float:
    """Relative Frobenius error; 0 where both are zero, inf or NaN where only the truth is, or one is NaN."""
    assert found.shape == truth.shape
    difference = (found.double() - truth.double()).norm().item()
    norm = truth.double().norm().item()
    if difference == 0:
        return 0.0
    return difference / norm if norm else math.inf


@pytest.fixture
def rel_err() -> Callable[[Tensor, Tensor], float]:
    return relative_error


@pytest.fixture
def assert_accurate() -> Callable[..., None]:
    """Holds every result against the truth: dtypes, shapes, errors (n and m within ``norm_tolerance``)."""

    def check(found: Tensors, truth: Tensors, norm_tolerance: float = NORM_TOLERANCE) -> None:
        assert found.keys() == truth.keys()
        dtype = found["h"].dtype
        assert {x.dtype for name, x in found.items() if name != "h"} <= {torch.float32}
        errors = {name: relative_error(x, truth[name]) for name, x in found.items()}
        limits = {name: TOLERANCE[dtype] if name in "hc" else norm_tolerance for name in found}
        # not(<=): NaN fails
        failed = {name: error for name, error in errors.items() if not error <= limits[name]}
        assert not failed, f"relative errors {failed} exceed {limits}"

    return check


@pytest.fixture
def cut_every(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Cuts every sequence into segments of so many chunks."""

    def cut_every(chunks: int) -> None:
        def cut(sequences: int, tokens: int, *_: int) -> segments.Cut:
            return segments.Cut(sequences * -(-tokens // (chunks * segments.CHUNK)), chunks)

        def cut_packed(sequences: int, tokens: int, *_: int) -> segments.Cut:
            return segments.Cut(sequences + tokens // (chunks * segments.CHUNK), chunks)

        monkeypatch.setattr(segments, "cut", cut)
        monkeypatch.setattr(segments, "cut_packed", cut_packed)

    return cut_every
