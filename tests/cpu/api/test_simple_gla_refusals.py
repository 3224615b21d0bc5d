"""What chunk_simple_gla and its kin refuse, and which backend takes what."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tfla_tk import (
    UnsupportedError,
    chunk_lightning_attn,
    chunk_retention,
    chunk_simple_gla,
    which,
)
from tfla_tk.backends.tk.scalar_gate import support
from tfla_tk.backends.triton import fla
from tfla_tk.calls.linear import LinearCall, check_simple_gla
from tfla_tk.core.support import SUPPORTED

from .linear import Inputs
from .linear_checks import assert_refused, bad
from .simple_gla_calls import draw

BAD = [
    bad("q", lambda x: None, r"q: expected a tensor \[B, T, H, K\], got NoneType", TypeError),
    bad("q", lambda x: x["q"][0], r"q: expected 4 dimensions \[B, T, H, K\], got 3 with shape"),
    bad("q", lambda x: x["q"].int(), "q: expected dtype float16, .* got torch.int32", TypeError),
    bad("k", lambda x: x["k"][:, :-1], r"k: expected shape \[B, T, H, K\] of q = .*, got \(2, 39, 2, 16\)"),
    bad("k", lambda x: x["k"].float(), "k: expected dtype torch.float64, the dtype of q", TypeError),
    bad("v", lambda x: x["v"][:, :, :3], r"v: expected a multiple of q's 2 heads, got 3 with shape"),
    bad("v", lambda x: x["v"][:, :, :0], r"v: expected a multiple of q's 2 heads, got 0 with shape"),
    bad("v", lambda x: x["v"][:, :-1], r"v: expected shape \[B, T\] of q and \[HV, V\] = "),
    bad("v", lambda x: x["v"][..., :0], r"v: expected a head dimension of at least 1"),
    bad("v", lambda x: x["v"].to("meta"), "v: expected device cpu, the device of q, got meta"),
    bad("g", lambda x: x["g"][..., :2], r"g: expected shape \[B, T, HV\] of v = \(2, 40, 4\)"),
    bad("g", lambda x: x["g"][..., None], r"g: expected 3 dimensions \[B, T, HV\], got 4"),
    bad("g", lambda x: x["g"].long(), "g: expected dtype float16", TypeError),
    bad("g_gamma", lambda x: torch.zeros(4), "g_gamma: expected None where g is given .*, got both"),
    bad("initial_state", lambda x: x["initial_state"][:1], r"initial_state: expected shape \[B, HV"),
    bad("initial_state", lambda x: x["initial_state"].mT, r"initial_state: expected shape \[B, HV, K, V\] = "
        r"\(2, 4, 16, 32\), got \(2, 4, 32, 16\) \(state_v_first=True of chunk_simple_gla takes "
        r"\[B, HV, V, K\]\)"),
    bad("cu_seqlens", lambda x: torch.tensor([0, 40]), r"cu_seqlens: expected a batch of 1 in q \(packed"),
    bad("cu_seqlens", lambda x: [0, 40], r"cu_seqlens: expected a tensor \[N \+ 1\], got list", TypeError),
    bad("cu_seqlens_cpu", lambda x: torch.tensor([0, 40]), "cu_seqlens_cpu: expected None without"),
    bad("scale", lambda x: "1", "scale: expected a number or None, got '1' of type str", TypeError),
    bad("scale", lambda x: math.inf, "scale: expected a finite number, got inf"),
    bad("output_final_state", lambda x: 1, "output_final_state: expected a bool, got 1", TypeError),
    bad("state_v_first", lambda x: None, "state_v_first: expected a bool", TypeError),
    bad("chunk_size", lambda x: 48, "chunk_size: expected a power of two, got 48"),
    bad("chunk_size", lambda x: 64.0, "chunk_size: expected an int or None, got 64.0", TypeError),
    bad("backend", lambda x: "cuda", "backend: expected one of auto, tk, triton, reference"),
    bad("head_first", lambda x: True, "unexpected keyword argument 'head_first'", TypeError),

]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "error", "message"), BAD)
def test_bad_arguments(
    name: str, value: Callable[[Inputs], Any], error: type[Exception], message: str
) -> None:
    x = draw()
    assert_refused(chunk_simple_gla, x | {name: value(x)}, error, message)


def test_bad_packing() -> None:
    x = draw(batch=1)
    state = x["initial_state"]
    with pytest.raises(ValueError, match=r"initial_state: expected shape \[N, HV, K, V\] = \(2, 4, 16, 32\)"):
        chunk_simple_gla(**x, cu_seqlens=torch.tensor([0, 10, 40]))
    with pytest.raises(ValueError, match=r"initial_state: expected shape \[B, HV, V, K\] = \(1, 4, 32, 16\), "
                       r".*\(state_v_first=False of chunk_simple_gla takes \[B, HV, K, V\]\)"):  # fmt: skip
        chunk_simple_gla(**x, state_v_first=True)
    options = {"initial_state": state, "cu_seqlens": torch.tensor([0, 40])}
    with pytest.raises(ValueError, match=r"cu_seqlens_cpu: expected shape \[N \+ 1\] of cu_seqlens = \(2,\)"):
        chunk_simple_gla(**x | options, cu_seqlens_cpu=torch.tensor([0, 10, 40]))
    with pytest.raises(ValueError, match="cu_seqlens: expected offsets rising from 0 to 40"):
        chunk_simple_gla(**x | {"cu_seqlens": torch.tensor([0, 41])})


def test_no_hint_where_a_state_is_not_swapped() -> None:
    x = draw()
    square = {name: x[name][..., :16] for name in ("v", "initial_state")}
    with pytest.raises(ValueError, match=r"got \(1, 4, 16, 16\)$"):
        chunk_simple_gla(**x | square | {"initial_state": square["initial_state"][:1].mT})
    with pytest.raises(ValueError, match=r"got \(2, 4, 16, 8\)$"):
        chunk_simple_gla(**x | {"initial_state": x["initial_state"][..., :8]})


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_on_the_cpu_that_differ(dtype: torch.dtype, state_v_first: bool) -> None:
    """Also after a good call of the same kind."""
    x = draw(batch=1) | {"cu_seqlens": torch.tensor([0, 10, 40])}
    del x["initial_state"]
    options = {"state_v_first": state_v_first, "output_final_state": True}
    for wrong in (20, 99):
        good = chunk_simple_gla(**x, **options, cu_seqlens_cpu=x["cu_seqlens"].to(dtype))
        expected = f"cu_seqlens_cpu: expected the .* cu_seqlens, got {wrong} at index 1, where .* has 10"
        arguments = x | options | {"cu_seqlens_cpu": torch.tensor([0, wrong, 40], dtype=dtype)}
        assert_refused(chunk_simple_gla, arguments, ValueError, expected)
    torch.testing.assert_close(good, chunk_simple_gla(**x, **options))


def test_a_decay_per_head_has_no_gradient() -> None:
    x = draw()
    del x["g"]
    g_gamma = torch.full((4,), -0.1, dtype=torch.float64, requires_grad=True)
    with pytest.raises(ValueError, match=r"g_gamma: expected no requires_grad .* g_gamma.expand"):
        chunk_simple_gla(**x, g_gamma=g_gamma)
    with torch.no_grad():
        o, _ = chunk_simple_gla(**x, g_gamma=g_gamma)
    # the remedy of the message
    same, _ = chunk_simple_gla(**x, g=g_gamma.expand(2, 40, 4))
    torch.testing.assert_close(same, o)
    assert torch.autograd.grad(same.sum(), g_gamma)[0].abs().min() > 0
    for shape, expected in (((2,), r"shape \[HV\] of v"), ((4, 1), r"1 dimension \[HV\], got 2 with shape")):
        with pytest.raises(ValueError, match=f"g_gamma: expected {expected}"):
            chunk_simple_gla(**x, g_gamma=torch.zeros(shape))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, TypeError, "layer_idx: expected an int, or g_gamma in its place, got None"),
        ({"layer_idx": 1}, TypeError, "num_layers: expected an int, or g_gamma in its place, got None"),
        ({"layer_idx": 4, "num_layers": 4}, ValueError, "layer_idx: .* 0 to num_layers - 1 = 3, got 4"),
        ({"layer_idx": -1, "num_layers": 4}, ValueError, "layer_idx: .* 0 to num_layers - 1 = 3, got -1"),
        ({"layer_idx": 0, "num_layers": 0}, ValueError, "num_layers: expected at least 1, got 0"),
        ({"layer_idx": 1.0, "num_layers": 4}, TypeError, "layer_idx: expected an int, .*got 1.0"),
        ({"layer_idx": 1, "g_gamma": torch.zeros(4)}, ValueError, "layer_idx: expected None where g_gamma"),
        ({"g_gamma": torch.zeros(2)}, ValueError, r"g_gamma: expected shape \[HV\] of v = "),
    ],
)  # fmt: skip
def test_bad_layers(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    x = draw()
    for call in (chunk_lightning_attn, lambda *a, **kw: which("chunk_lightning_attn", *a, **kw)):
        with pytest.raises(error, match=message):
            call(x["q"], x["k"], x["v"], **arguments)


@pytest.mark.parametrize("function", [chunk_retention, chunk_lightning_attn])
def test_the_others_check_alike(function: Callable[..., Any]) -> None:
    x = draw()
    layer = {} if function is chunk_retention else {"layer_idx": 0, "num_layers": 1}
    with pytest.raises(ValueError, match="v: expected a multiple of q's 2 heads, got 3"):
        function(x["q"], x["k"], x["v"][:, :, :3], **layer)
    with pytest.raises(ValueError, match="v: expected a multiple of q's 1 head, got 0 with shape"):
        function(x["q"][:, :, :1], x["k"][:, :, :1], x["v"][:, :, :0], **layer)
    with pytest.raises(TypeError, match=r"v: expected a tensor \[B, T, HV, V\], got NoneType"):
        function(x["q"], x["k"], None, **layer)
    with pytest.raises(TypeError, match="unexpected keyword argument 'state_v_first'"):
        function(x["q"], x["k"], x["v"], **layer, state_v_first=True)
    assert which(function, x["q"], x["k"], x["v"], **layer).backend == "reference"


# Backends


def describe(*, device: str = "cpu", heads: tuple[int, int] = (2, 2), **changes: Any) -> LinearCall:
    x = {name: t.to("meta") for name, t in draw(dtype=torch.bfloat16, heads=heads).items()}
    call = check_simple_gla(
        **x, g_gamma=None, cu_seqlens=None, cu_seqlens_cpu=None, scale=None, output_final_state=False,
        state_v_first=False, chunk_size=None,
    )  # fmt: skip
    return dataclasses.replace(call, device=torch.device(device), **changes)


def test_description() -> None:
    call = describe(heads=(2, 6))
    assert (call.heads, call.value_heads, call.sequences, call.seq) == (2, 6, 2, 40)
    assert (call.dim_qk, call.dim_v, call.scale, call.gate) == (16, 32, 0.25, "token")
    assert call.has_initial and not (call.requires_grad or call.varlen or call.is_empty)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "cpu"}, "the kernels run on a GPU"),
        ({"dtype": torch.float32}, "q, k, v are torch.float32"),
        ({"dim_qk": 272}, "head dims are K = 272, V = 32"),
        ({"dim_v": 528}, "head dims are K = 16, V = 528"),
        ({"scale": 0.0}, "scale = 0.0, the kernels take positive ones"),
        ({"sequences": 2**30, "value_heads": 4}, "sequences x value heads = 4,294,967,296"),
    ],
)
@pytest.mark.usefixtures("passes_for_a_gpu")
def test_tk_refuses(changes: dict[str, Any], reason: str) -> None:
    verdict = support.supports_simple_gla(describe(**{"device": "cuda", **changes}))
    assert not verdict.ok and reason in verdict.reason and verdict.remedy


def test_tk_has_no_variants() -> None:
    for variant in ("auto", "overlapped", ""):
        with pytest.raises(ValueError, match=f"backend: expected 'tk', got 'tk:{variant}'"):
            chunk_simple_gla(**draw(), backend=f"tk:{variant}")


@pytest.fixture
def fla_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """fla counts as installed, and this machine as one that it runs on."""
    monkeypatch.setattr(fla, "FLA_MISSING", None)
    monkeypatch.setattr(fla, "gated_backward_is_guarded", lambda: False)
    monkeypatch.setattr(fla, "_guard_is_lifted", lambda: False)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"value_heads": 4}, "fla takes as many heads of v as of q and k, these are 4 and 2"),
        ({"dtype": torch.float64}, "Triton kernels have no float64"),
        ({"chunk_size": 8}, "chunk_size = 8"),
        ({"requires_grad": True, "dim_v": 33}, "even head dims in 16 bits"),
        ({"batch": 70000}, "batch x value heads = 140,000"),
        ({"transformed": True}, "torch.func"),
    ],
)
def test_fla_refuses(fla_runs: None, changes: dict[str, Any], reason: str) -> None:
    assert fla.supports_simple_gla(describe(device="cuda")) == SUPPORTED
    verdict = fla.supports_simple_gla(describe(device="cuda", **changes))
    assert not verdict.ok and reason in verdict.reason and verdict.remedy


def test_fla_guard(fla_runs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gated backward on Hopper with a Triton that miscompiles it; without gate gradients all is well."""
    monkeypatch.setattr(fla, "gated_backward_is_guarded", lambda: True)
    call = describe(device="cuda", requires_grad=True)
    verdict = fla.supports_simple_gla(call)
    assert not verdict.ok and "miscompiles" in verdict.reason and "triton >= 3.7.1" in verdict.remedy
    for gate in ("head", "none"):
        assert fla.supports_simple_gla(dataclasses.replace(call, gate=gate)) == SUPPORTED
    assert fla.supports_simple_gla(describe(device="cuda")) == SUPPORTED
    # lifted: by name only
    monkeypatch.setattr(fla, "gated_backward_is_guarded", lambda: False)
    monkeypatch.setattr(fla, "_guard_is_lifted", lambda: True)
    verdict = fla.supports_simple_gla(call)
    assert verdict.ok and not verdict.auto and "guard is lifted" in verdict.reason


def test_fla_variants() -> None:
    with pytest.raises(UnsupportedError, match="Triton kernels run on a GPU"):
        chunk_simple_gla(**draw(), backend="triton:fla")
