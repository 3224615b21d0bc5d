"""The public mLSTM functions on a CPU: values, states, layouts, empty inputs, autocast."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import tfla_tk
from tfla_tk import Support, mlstm_chunkwise, mlstm_siging_chunkwise, reference

from .conftest import BY_GATE, STATES, leaves, make_inputs

GATES = {"exp": mlstm_chunkwise, "sig": mlstm_siging_chunkwise}


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("form", ["chunkwise", "parallel", "recurrent"])
@pytest.mark.parametrize("gate", BY_GATE)
def test_reference_forms_by_name(gate: str, form: str) -> None:
    name, options = BY_GATE[gate]
    options = options | {"return_last_states": True}
    x = make_inputs(dtype=torch.float64, states=STATES if gate == "exp" else STATES[:2])
    expected, states = getattr(reference, f"{name}_recurrent")(**x, **options)
    function = getattr(tfla_tk, f"{name}_chunkwise")
    h, last = function(**x, **options, backend=f"reference:{form}", chunk_size=16)
    close(h, expected)
    for actual, state in zip(last, states, strict=True):
        close(actual, state)


def test_positional_order_is_that_of_mlstm_kernels() -> None:
    x = make_inputs(dtype=torch.float64, states=STATES)
    named = mlstm_chunkwise(**x, return_last_states=True, eps=1e-3, chunk_size=32)
    positional = mlstm_chunkwise(*x.values(), True, 1e-3, 32)
    assert torch.equal(named[0], positional[0])
    named_sig = mlstm_siging_chunkwise(**x, return_last_states=True, eps=1e-3, normalize=False, chunk_size=32)
    positional_sig = mlstm_siging_chunkwise(*x.values(), True, 1e-3, False, 32)
    assert torch.equal(named_sig[0], positional_sig[0])


WIDER = {
    "gates": ("i", "f"),
    "forget gate": ("f",),
    "initial state": STATES,
    "one part of it": ("n_initial",),
    "all but q, k, v": ("i", "f", *STATES),
}


@pytest.mark.parametrize("seq", [0, 40])
@pytest.mark.parametrize("wider", WIDER)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "backend", ["auto", "tk", "reference:chunkwise", "reference:parallel", "reference:recurrent"]
)
@pytest.mark.parametrize("gate", ["exp", "sig"])
def test_last_states_have_one_dtype(
    gate: str, backend: str, dtype: torch.dtype, wider: str, seq: int, fake_tk: Any
) -> None:
    """fp32, or fp64 for fp64 q, k, v, whatever dtypes gates and initial state have, on every backend."""
    fake_tk.verdict = Support(backend == "tk")
    x = make_inputs(seq=seq, dtype=dtype, states=STATES)
    x |= {name: x[name].double() for name in WIDER[wider]}
    h, last = GATES[gate](**x, return_last_states=True, backend=backend)
    assert h.dtype == dtype
    assert {t.dtype for t in last} == {torch.float64 if dtype == torch.float64 else torch.float32}


@pytest.mark.parametrize("backend", ["auto", "tk"])
@pytest.mark.parametrize("gate", GATES)
def test_two_calls_equal_one(gate: str, backend: str, fake_tk: Any) -> None:
    fake_tk.verdict = Support(backend == "tk")
    x = make_inputs(dtype=torch.float64)
    first, second = ({n: t[:, :, s] for n, t in x.items()} for s in (slice(0, 23), slice(23, 40)))
    whole, last = GATES[gate](**x, return_last_states=True, backend=backend)
    h1, state = GATES[gate](**first, return_last_states=True, backend=backend)
    h2, last2 = GATES[gate](
        **second, **dict(zip(STATES, state, strict=False)), return_last_states=True, backend=backend
    )
    close(torch.cat([h1, h2], 2), whole)
    for actual, expected in zip(last2, last, strict=True):
        close(actual, expected)


@pytest.mark.parametrize("backend", ["reference", "tk"])
@pytest.mark.parametrize("gate", GATES)
def test_gates_and_states_of_any_dtype(gate: str, backend: str, fake_tk: Any) -> None:
    """They are read in fp32 whatever they come in; q, k, v decide the dtype of h."""
    fake_tk.verdict = Support(True)
    x = make_inputs(dtype=torch.bfloat16, states=STATES)
    wide = {n: t if n in "qkv" else t.float() for n, t in x.items()}
    h, last = GATES[gate](**x, return_last_states=True, backend=backend)
    expected, expected_last = GATES[gate](**wide, return_last_states=True, backend="reference")
    assert h.dtype == torch.bfloat16 and all(t.dtype == torch.float32 for t in last)
    close(h, expected, 1e-2)
    for actual, state in zip(last, expected_last, strict=True):
        close(actual, state, 1e-5)


@pytest.mark.parametrize("shape", [{"batch": 0}, {"heads": 0}, {"seq": 0}, {"batch": 0, "seq": 0}])
@pytest.mark.parametrize("backend", ["auto", "tk"])
@pytest.mark.parametrize("gate", GATES)
def test_empty_inputs(gate: str, backend: str, shape: dict[str, int], fake_tk: Any) -> None:
    """An empty h that keeps the graph, and for S = 0 a copy of the initial state: a cache that is updated in
    place must not write into what was given."""
    fake_tk.verdict = Support(backend == "tk")
    names = STATES if gate == "exp" else STATES[:2]
    x = make_inputs(**shape, states=names)
    x = {n: t if n == "m_initial" else t.requires_grad_() for n, t in x.items()}
    h, last = GATES[gate](**x, return_last_states=True, backend=backend)
    assert h.shape == x["v"].shape and h.numel() == 0 and h.requires_grad
    for name, state in zip(names, last, strict=True):
        torch.testing.assert_close(state, x[name])
    (h.sum() + last[0].sum()).backward()
    torch.testing.assert_close(x["c_initial"].grad, torch.ones_like(x["c_initial"]))
    if last[0].numel():
        with torch.no_grad():
            _, plain = GATES[gate](**x, return_last_states=True, backend=backend)
        assert not {x[name].data_ptr() for name in names} & {state.data_ptr() for state in (*last, *plain)}


@pytest.mark.parametrize("backend", ["reference", "tk"])
@pytest.mark.parametrize("gate", GATES)
def test_backends_agree_on_gradients(gate: str, backend: str, fake_tk: Any) -> None:
    """tk's op takes the explicit formulas on a CPU, the recurrence plain autograd; states included."""
    fake_tk.verdict = Support(True)
    names = STATES if gate == "exp" else STATES[:2]
    x = make_inputs(dtype=torch.float64, states=names)
    weights = [torch.randn_like(x[n]) for n in ("v", "c_initial", "n_initial")]

    def gradients(which: str) -> list[Tensor | None]:
        leaves = {n: t.clone().requires_grad_(n != "m_initial") for n, t in x.items()}
        h, (c, n, *_) = GATES[gate](**leaves, return_last_states=True, backend=which)
        sum((a * w).sum() for a, w in zip((h, c, n), weights, strict=True)).backward()
        return [t.grad for n, t in leaves.items() if n != "m_initial"]

    for actual, expected in zip(gradients(backend), gradients("reference:recurrent"), strict=True):
        assert actual is not None and expected is not None
        close(actual, expected, 1e-9)


# packed sequences

OFFSETS = [0, 0, 17, 17, 18, 40]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("states", [True, False])
@pytest.mark.parametrize("backend", ["reference", "reference:parallel", "reference:recurrent", "tk"])
@pytest.mark.parametrize("gate", GATES)
def test_packed_sequences_equal_separate_calls(
    gate: str, backend: str, states: bool, dtype: torch.dtype, fake_tk: Any
) -> None:
    """Values and gradients; two of the five sequences are empty."""
    fake_tk.verdict = Support(True)
    names = (STATES if gate == "exp" else STATES[:2]) if states else ()
    x = make_inputs(1, sequences=5, dtype=torch.float64, states=names)
    differentiable = [n for n in x if n != "m_initial"]
    weights = make_inputs(1, sequences=5, dtype=torch.float64, states=STATES, seed=1)

    def grads(leaves: dict[str, Tensor], h: Tensor, last: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        c, n, *_ = last
        reached = (h * weights["v"]).sum() + (c * weights["c_initial"]).sum()
        return torch.autograd.grad(
            reached + (n * weights["n_initial"]).sum(), [leaves[n] for n in differentiable]
        )

    packed = {n: t.clone().requires_grad_(n in differentiable) for n, t in x.items()}
    cu_seqlens = torch.tensor(OFFSETS, dtype=dtype)
    h, last = GATES[gate](**packed, cu_seqlens=cu_seqlens, return_last_states=True, backend=backend)
    assert h.shape == x["v"].shape and all(t.shape[0] == 5 for t in last)

    apart = {n: t.clone().requires_grad_(n in differentiable) for n, t in x.items()}
    pieces = []
    for row, (start, end) in enumerate(pairwise(OFFSETS)):
        own = {n: t[row : row + 1] if n in STATES else t[:, :, start:end] for n, t in apart.items()}
        pieces.append(GATES[gate](**own, return_last_states=True, backend="reference"))
    expected = torch.cat([piece[0] for piece in pieces], 2)
    expected_last = tuple(map(torch.cat, zip(*(piece[1] for piece in pieces), strict=True)))
    for actual, wanted in zip((h, *last), (expected, *expected_last), strict=True):
        close(actual, wanted)
    for actual, wanted in zip(grads(packed, h, last), grads(apart, expected, expected_last), strict=True):
        close(actual, wanted, 1e-9)


@pytest.mark.parametrize("states", [True, False])
@pytest.mark.parametrize("backend", ["auto", "tk"])
@pytest.mark.parametrize("gate", GATES)
def test_packed_sequences_that_are_all_empty(gate: str, backend: str, states: bool, fake_tk: Any) -> None:
    fake_tk.verdict = Support(backend == "tk")
    names = STATES if gate == "exp" else STATES[:2]
    x = make_inputs(1, seq=0, sequences=3, states=names)
    given = x if states else make_inputs(1, seq=0)
    cu_seqlens = torch.zeros(4, dtype=torch.int32)
    h, last = GATES[gate](**given, cu_seqlens=cu_seqlens, return_last_states=True, backend=backend)
    assert h.shape == (1, 3, 0, 32)
    for name, state in zip(names, last, strict=True):
        torch.testing.assert_close(state, x[name] if states else torch.zeros_like(x[name]))


# autocast


def test_autocast_casts_q_k_v() -> None:
    """To the region's dtype, or autocast_kernel_dtype; the arithmetic inside stays the backend's own, and
    gradients reach what was not cast."""
    x = leaves(make_inputs())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h, (c, _, _) = mlstm_chunkwise(**x, return_last_states=True)
        half = mlstm_chunkwise(**x, autocast_kernel_dtype=torch.float16)
        full = mlstm_chunkwise(**x, autocast_kernel_dtype=torch.float32)
    assert (h.dtype, c.dtype, half.dtype) == (torch.bfloat16, torch.float32, torch.float16)
    cast = {n: t.bfloat16() if n in "qkv" else t for n, t in x.items()}
    assert torch.equal(h, mlstm_chunkwise(**cast))
    assert torch.equal(full, mlstm_chunkwise(**x))
    h.sum().backward()
    assert all(t.grad is not None and t.grad.dtype == torch.float32 for t in x.values())


def test_autocast_accepts_mixed_dtypes(fake_tk: Any) -> None:
    x = make_inputs()
    mixed = x | {"v": x["v"].bfloat16(), "q": x["q"].half()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert mlstm_siging_chunkwise(**mixed).dtype == torch.bfloat16
        fake_tk.verdict = Support(True)
        assert mlstm_chunkwise(**mixed, backend="tk").dtype == torch.bfloat16
    with pytest.raises(TypeError, match="expected dtype"):
        mlstm_chunkwise(**mixed)


def test_autocast_leaves_float64_alone_and_kernel_dtype_is_for_autocast() -> None:
    x = make_inputs(dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert mlstm_chunkwise(**x).dtype == torch.float64
    assert mlstm_chunkwise(**make_inputs(), autocast_kernel_dtype=torch.bfloat16).dtype == torch.float32
