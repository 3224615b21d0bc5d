"""chunk_gla: what test_linear.py does not ask of every operator; errors, what fla refuses, its ops."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tfla_tk import chunk_gla, gla, reference
from tfla_tk.backends.triton import fla
from tfla_tk.calls.gla import GLACore
from tfla_tk.calls.linear import LinearCall
from tfla_tk.core.support import SUPPORTED

from .families import draw_gla as draw
from .linear import Inputs, assert_same, gradients, leaves
from .linear_checks import (
    assert_refused,
    bad,
    parameters_by_place,
    parameters_of_fla,
)

# What is computed


def test_arguments_in_the_order_of_fla() -> None:
    x = draw()
    expected, last = reference.gla_recurrent(**x, scale=0.5, output_final_state=True)
    q, k, v, g, state = x.values()
    o, final = chunk_gla(q, k, v, g, 0.5, state.mT, True, True)
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(final.mT, last)
    assert chunk_gla(q, k, v, g)[1] is None


def test_signature_is_that_of_fla() -> None:
    pytest.importorskip("fla")
    from fla.ops.gla import chunk_gla as theirs

    assert parameters_by_place(chunk_gla) == parameters_of_fla(theirs)


@pytest.mark.parametrize("decay", [-1e3, -math.inf, 0.0])
def test_gates_that_close_one_channel(decay: float) -> None:
    x = draw()
    x["g"][:, ::3, :, 5] = decay
    assert_same(gradients(chunk_gla, x), gradients(reference.gla_recurrent, x))


# What is refused


BAD = [
    bad("q", lambda x: None, r"q: expected a tensor \[B, T, H, K\], got NoneType", TypeError),
    bad("k", lambda x: x["k"].float(), "k: expected dtype torch.float64, the dtype of q", TypeError),
    bad("v", lambda x: x["v"][:, :, [0, 1, 0, 1]], r"v: expected the 2 heads of q \(repeat .* got 4"),
    bad("g", lambda x: x["g"][..., :2], r"g: expected shape \[B, T, H, K\] of q = \(2, 40, 2, 16\)"),
    bad("g", lambda x: x["g"][..., 0], r"g: expected 4 dimensions \[B, T, H, K\], got 3"),
    bad("g", lambda x: x["g"].long(), "g: expected dtype float16", TypeError),
    bad("g", lambda x: None, r"g: expected a tensor \[B, T, H, K\], got NoneType", TypeError),
    bad("initial_state", lambda x: x["initial_state"][:1], r"initial_state: expected shape \[B, H, K, V\]"),
    bad("initial_state", lambda x: x["initial_state"].mT, r"initial_state: expected shape \[B, H, K, V\] = "
        r"\(2, 2, 16, 32\), got \(2, 2, 32, 16\) \(state_v_first=True of chunk_gla takes \[B, H, V, K\]\)"),
    bad("cu_seqlens", lambda x: torch.tensor([0, 40]), r"cu_seqlens: expected a batch of 1 in q \(packed"),
    bad("scale", lambda x: math.inf, "scale: expected a finite number, got inf"),
    bad("output_final_state", lambda x: 1, "output_final_state: expected a bool, got 1", TypeError),
    bad("backend", lambda x: "cuda", "backend: expected one of auto, tk, triton, reference"),
    bad("chunk_size", lambda x: 64, "unexpected keyword argument 'chunk_size'", TypeError),

]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "error", "message"), BAD)
def test_bad_arguments(
    name: str, value: Callable[[Inputs], Any], error: type[Exception], message: str
) -> None:
    x = draw()
    assert_refused(chunk_gla, x | {name: value(x)}, error, message)


def test_bad_packing() -> None:
    x = draw(batch=1) | {"cu_seqlens": torch.tensor([0, 10, 40])}
    with pytest.raises(ValueError, match=r"initial_state: expected shape \[N, H, K, V\] = \(2, 2, 16, 32\)"):
        chunk_gla(**x)
    expected = r"\[N, H, V, K\] .* \(state_v_first=False of chunk_gla takes \[N, H, K, V\]\)"
    with pytest.raises(ValueError, match=expected):
        chunk_gla(**x, state_v_first=True)
    x["initial_state"] = x["initial_state"].repeat(2, 1, 1, 1)
    chunk_gla(**x, cu_seqlens_cpu=x["cu_seqlens"])  # the plan of a call like it looks at no offsets
    expected = "cu_seqlens_cpu: expected the offsets of cu_seqlens, got 20 at index 1, where .* has 10"
    assert_refused(chunk_gla, x | {"cu_seqlens_cpu": torch.tensor([0, 20, 40])}, ValueError, expected)


def test_one_head_is_not_called_heads() -> None:
    x = {name: t[:, :1] if name == "initial_state" else t[:, :, :1] for name, t in draw().items()}
    with pytest.raises(ValueError, match=r"v: expected the 1 head of q \(repeat"):
        chunk_gla(**x | {"v": x["v"].repeat(1, 1, 2, 1)})


# Backends


def describe(**changes: Any) -> LinearCall:
    x = {name: t.to("meta") for name, t in draw(dtype=torch.bfloat16).items()}
    options = {"scale": None, "output_final_state": False, "state_v_first": False}
    _, call = gla._path.describe(**x, cu_seqlens=None, cu_seqlens_cpu=None, **options)
    return dataclasses.replace(call, **{"device": torch.device("cuda"), **changes})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float64}, "Triton kernels have no float64"),
        ({"batch": 70000}, "batch x value heads = 140,000"),
        ({"transformed": True}, "torch.func"),
    ],
)
def test_fla_refuses(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], reason: str) -> None:
    monkeypatch.setattr(fla, "FLA_MISSING", None)
    assert fla.supports_gla(describe()) == SUPPORTED
    verdict = fla.supports_gla(describe(**changes))
    assert not verdict.ok and reason in verdict.reason and verdict.remedy


# The path of the kernels


def test_the_core_has_the_arguments_of_the_op() -> None:
    names = [argument.name for argument in torch.ops.tfla_tk.gla_fwd.default._schema.arguments]
    assert names == [*GLACore._fields, "output_final_state"]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
def test_opcheck(packed: bool, with_state: bool) -> None:
    x = leaves(draw(batch=1 if packed else 2, seq=20, rows=3 if packed else None, dtype=torch.float32))
    inputs: list[Any] = [x[name] for name in ("q", "k", "v", "g")]
    inputs += [
        x["initial_state"] if with_state else None,
        torch.tensor([0, 5, 5, 20]) if packed else None,
    ]
    registered = torch.ops.tfla_tk
    torch.library.opcheck(registered.gla_fwd, (*inputs, 0.25, False, with_state))
    torch.library.opcheck(registered.packed_gla, (*inputs, 0.25, False, "chunkwise", 16, with_state))
    detached = [t.detach() if isinstance(t, Tensor) else t for t in inputs]
    o, state = registered.gla_fwd(*detached, 0.25, False, with_state)
    given = (torch.randn_like(o), torch.randn_like(state) if with_state else None)
    torch.library.opcheck(registered.gla_bwd, (*detached, *given, 0.25, False, True))
    torch.library.opcheck(registered.packed_gla_bwd, (*detached, *given, 0.25, False, 16, True))
