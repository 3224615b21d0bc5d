"""KDA beyond what its family has: lower bounds, states between chunks, and what only fla looks at."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tfla_tk
from tfla_tk import chunk_kda, delta_rule, fused_recurrent_kda, reference
from tfla_tk.backends.triton import fla

from .delta_rule import FLAGS, draw, draw_raw, from_raw
from .families import serve_kda
from .linear import assert_same, gradients
from .linear_checks import assert_refused

OFFSETS = torch.tensor([0, 5, 5, 40])
STATES = {"return_intermediate_states": True}


@pytest.mark.parametrize("backend", ["reference:recurrent", "reference:chunkwise", "tk"])
@pytest.mark.parametrize("parameters", [("A_log", "dt_bias"), ("dt_bias",), ()], ids=str)
def test_a_lower_bound(parameters: tuple[str, ...], backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what makes the log decay in part or in whole; the kernels get it raw."""
    kernels = serve_kda(monkeypatch)
    x = draw_raw(by_channel=True)
    x = {name: t for name, t in x.items() if name in parameters or name not in ("A_log", "dt_bias")}
    found = gradients(chunk_kda, x, **FLAGS, lower_bound=-5, safe_gate=True, backend=backend)
    assert_same(found, gradients(from_raw, x, lower_bound=-5))
    if backend == "tk":
        core = kernels.core
        assert (
            core.lower_bound == -5.0 and core.is_raw and (core.A_log is None) == ("A_log" not in parameters)
        )


def test_what_makes_gates_is_not_looked_at_without_its_flag() -> None:
    x = draw(by_channel=True)
    expected = reference.kda_recurrent(**x)[0]
    for more in ({"lower_bound": "low"}, {"A_log": torch.zeros(1)}, {"safe_gate": True}):
        torch.testing.assert_close(chunk_kda(**x, **more)[0], expected)
    found = fused_recurrent_kda(**x, lower_bound="low", dt_bias=torch.zeros(1))  # type: ignore[arg-type]
    torch.testing.assert_close(found[0], expected)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"A_log": None}, TypeError, r"A_log: expected a tensor \[HV\] with use_gate_in_kernel, got None"),
        ({"dt_bias": torch.zeros(4)}, ValueError, r"dt_bias: expected shape \[HV K\] of v = \(64,\)"),
        ({"safe_gate": True}, TypeError, "lower_bound: expected a number with safe_gate, got None"),
        (
            {"safe_gate": True, "lower_bound": -6},
            ValueError,
            "lower_bound: expected a number from -5 to less",
        ),
        ({"lower_bound": float("-inf")}, ValueError, "lower_bound: expected a finite number"),
        ({"lower_bound": True}, TypeError, "lower_bound: expected a number or None, got True"),
        ({"chunk_size": 16}, ValueError, "chunk_size: expected 32 or 64, got 16"),
        ({"use_graph": 1}, TypeError, "use_graph: expected a bool, got 1"),
        ({"max_num_seqs": 1.0}, TypeError, "max_num_seqs: expected an int or None"),
        ({"disable_recompute": None}, TypeError, "disable_recompute: expected a bool"),
        (STATES, ValueError, "return_intermediate_states: expected False outside of torch.inference_mode"),
    ],
)
def test_bad_arguments(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    x = draw_raw(by_channel=True) | {"use_gate_in_kernel": True}
    assert_refused(chunk_kda, x | changes, error, message)


def test_the_number_of_sequences_of_a_graph() -> None:
    x = draw(by_channel=True, batch=1, rows=3) | {"cu_seqlens": OFFSETS, "use_graph": True}
    expected = chunk_kda(**x)[0]
    torch.testing.assert_close(chunk_kda(**x, max_num_seqs=3)[0], expected)
    with pytest.raises(ValueError, match="max_num_seqs: expected the 3 sequences of cu_seqlens, got 4"):
        chunk_kda(**x, max_num_seqs=4)


# States between chunks


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("v_first", [False, True])
def test_states_between_chunks(v_first: bool, packed: bool) -> None:
    x = draw(by_channel=True, seq=40, **{"batch": 1, "rows": 3} if packed else {})
    options: dict[str, Any] = {"cu_seqlens": OFFSETS} if packed else {}
    expected = reference.kda_with_states(**x, **options, chunk_size=32, output_final_state=True)
    narrow = {name: t.bfloat16() if name in "qkv" else t for name, t in x.items()}
    if v_first:
        narrow["initial_state"] = narrow["initial_state"].mT.contiguous()
        expected = expected[0], *(t.mT for t in expected[1:])
    with torch.inference_mode():
        found = chunk_kda(
            **narrow, **options, **STATES, chunk_size=32, output_final_state=True, state_v_first=v_first
        )
        assert chunk_kda(**narrow, **options, **STATES, state_v_first=v_first)[1] is None
    assert [t.dtype for t in found] == [torch.bfloat16, torch.float32, torch.bfloat16]
    for actual, want in zip(found, expected, strict=True):
        assert actual.is_contiguous() and actual.shape == want.shape
        torch.testing.assert_close(actual.double(), want, rtol=5e-2, atol=5e-2)


def test_states_without_a_token() -> None:
    """The final state is a copy of the initial one: a cache is updated in place."""
    x = draw(by_channel=True, seq=0)
    with torch.inference_mode():
        _, last, between = chunk_kda(**x, **STATES, output_final_state=True)
        assert torch.equal(last, x["initial_state"]) and between.shape == (2, 0, 4, 16, 32)
        last.add_(1)
    assert not torch.equal(last, x["initial_state"])


# Backends


def _described(x: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """The description of a call, and its tensors in their order."""
    _, call = tfla_tk.core.dispatch.describe("chunk_kda", **x)[1:]
    return call, tuple(x.get(name) for name in delta_rule._kda_path.tensors)


@pytest.mark.parametrize("seq", [4, 40])
def test_fla_gets_the_flags_that_the_caller_gave(seq: int, given_to_fla: dict[str, Any]) -> None:
    """And a few tokens dense: fla's function itself would make them so."""
    got, x = given_to_fla, draw_raw(by_channel=True, seq=seq)
    x["q"] = x["q"].transpose(1, 2).contiguous().transpose(1, 2)
    flags = {**FLAGS, "safe_gate": True, "disable_recompute": True, "use_graph": True}
    call, tensors = _described(x | flags | {"lower_bound": -2.0})
    fla.kda(call, None, *tensors)
    assert got["op"] == "chunk_kda" and got["args"][0] is x["q"] and got["chunk_size"] == 64
    assert all(got[name] is True for name in flags) and got["lower_bound"] == -2.0
    for name in ("g", "beta", "A_log", "dt_bias"):
        assert got[name] is x[name]
    got.clear()
    step = tfla_tk.core.dispatch.describe("fused_recurrent_kda", **x, **FLAGS, lower_bound=-2.0)[2]
    fla.kda(step, None, *tensors)
    assert got["op"] == "fused_recurrent_kda" and not {"safe_gate", "chunk_size"} & got.keys()
    assert got["args"][0].is_contiguous() and got["lower_bound"] == -2.0
