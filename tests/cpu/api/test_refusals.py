"""What the operators in [B, T, H, D] refuse, and which of them fla's kernels serve."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tfla_tk import (
    UnsupportedError,
    chunk_delta_rule,
    chunk_gated_delta_rule,
    chunk_gla,
    chunk_lightning_attn,
    chunk_retention,
    chunk_simple_gla,
    which,
)
from tfla_tk.backends.tk.scalar_gate import support
from tfla_tk.backends.triton import fla
from tfla_tk.core import dispatch
from tfla_tk.core.support import SUPPORTED

from .families import GATED, GLA, KDA, PLAIN, SIMPLE_GLA, UNGATED, Family
from .linear import Inputs, assert_refused

PUBLIC = (*PLAIN, UNGATED)
of_public = pytest.mark.parametrize("family", PUBLIC, ids=str)


def bad(
    name: str, value: Callable[[Inputs], Any], message: str, error: type[Exception] = ValueError,
    families: tuple[Family, ...] = PUBLIC,
) -> list[Any]:  # fmt: skip
    """A bad value for an argument, made of good inputs, with the error and message that it must raise.

    In the message {H} is the name of the heads of v and the state, {state} the shape of the state.
    """
    return [
        pytest.param(family, name, value, error, message, id=f"{family}-{name}-{message[:30]}")
        for family in families
    ]


GROUPED, DELTA, FLAGGED = (SIMPLE_GLA, GATED, KDA, UNGATED), (GATED, KDA, UNGATED), (GATED, KDA)
DECAYING, V_FIRST, CHUNKED = PLAIN, PLAIN, (SIMPLE_GLA, GATED, KDA)
FLAGS = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "output_final_state")
BAD = [
    *bad("q", lambda x: None, r"q: expected a tensor \[B, T, H, K\], got NoneType", TypeError),
    *bad("q", lambda x: x["q"][0], r"q: expected 4 dimensions \[B, T, H, K\], got 3 with shape"),
    *bad("q", lambda x: x["q"].int(), "q: expected dtype float16, .* got torch.int32", TypeError),
    *bad("k", lambda x: x["k"][:, :-1], r"k: expected shape \[B, T, H, K\] of q = .* got \(2, 39, 2, 16\)"),
    *bad("k", lambda x: x["k"].float(), "k: expected dtype torch.float64, the dtype of q", TypeError),
    *bad("v", lambda x: x["v"][:, :-1], r"v: expected shape \[B, T(, H)?\] of q and "),
    *bad("v", lambda x: x["v"][..., :0], r"v: expected a head dimension of at least 1"),
    *bad("v", lambda x: x["v"].to("meta"), "v: expected device cpu, the device of q, got meta"),
    *bad("v", lambda x: x["v"][:, :, [0, 1, 0]], r"v: expected a multiple of q's 2 heads, got 3 with shape",
         families=GROUPED),
    *bad("v", lambda x: x["v"][:, :, :0], r"v: expected a multiple of q's 2 heads, got 0 with shape",
         families=GROUPED),
    *bad("v", lambda x: x["v"][:, :, [0, 1, 0, 1]], r"v: expected the 2 heads of q \(repeat .* got 4",
         families=(GLA,)),
    *bad("g", lambda x: x["g"][:, :-1], r"g: expected shape \[B, T, .*\] of [qv].* = \(2, 40, ",
         families=DECAYING),
    *bad("g", lambda x: x["g"][..., None], r"g: expected . dimensions \[B, T, .*\], got", families=DECAYING),
    *bad("g", lambda x: x["g"].long(), "g: expected dtype float16", TypeError, DECAYING),
    *bad("g", lambda x: None, r"g: expected a tensor \[B, T, ", TypeError, (GLA, GATED, KDA)),
    *bad("g_gamma", lambda x: torch.zeros(4), "g_gamma: expected None where g is given .*, got both",
         families=(SIMPLE_GLA,)),
    *bad("beta", lambda x: None, r"beta: expected a tensor \[B, T, HV\], got NoneType", TypeError, DELTA),
    *bad("beta", lambda x: x["beta"][..., :2], r"beta: expected shape \[B, T, HV\] of v = \(2, 40, 4\)",
         families=DELTA),
    *bad("beta", lambda x: x["v"], r"beta: expected 3 dimensions \[B, T, HV\], got 4 with shape",
         families=DELTA),
    *bad("beta", lambda x: x["beta"].to("meta"), "beta: expected device cpu, the device of q, got meta",
         families=DELTA),
    *bad("initial_state", lambda x: x["initial_state"][:1],
         r"initial_state: expected shape \[B, {H}, K, V\] = \(2, ., 16, 32\), got \(1, ., 16, 32\)"),
    *bad("initial_state", lambda x: x["initial_state"].mT,
         r"initial_state: expected shape \[B, {H}, K, V\] = "
         r"\(2, ., 16, 32\), got \(2, ., 32, 16\) \(state_v_first=True of {name} takes \[B, {H}, V, K\]\)",
         families=V_FIRST),
    *bad("initial_state", lambda x: x["initial_state"].to("meta"), "initial_state: expected device cpu, the"),
    *bad("cu_seqlens", lambda x: torch.tensor([0, 40]), r"cu_seqlens: expected a batch of 1 in q \(packed"),
    *bad("cu_seqlens", lambda x: [0, 40], r"cu_seqlens: expected a tensor \[N \+ 1\], got list", TypeError),
    *bad("cu_seqlens_cpu", lambda x: torch.tensor([0, 40]), "cu_seqlens_cpu: expected None without"),
    *bad("scale", lambda x: "1", "scale: expected a number or None.*, got '1' of type str", TypeError),
    *bad("scale", lambda x: -x["beta"], r"scale: expected a number or None \(chunk_gated_delta_rule takes",
         TypeError, (UNGATED,)),
    *bad("scale", lambda x: math.inf, "scale: expected a finite number, got inf"),
    *bad("output_final_state", lambda x: 1, "output_final_state: expected a bool, got 1", TypeError),
    *bad("state_v_first", lambda x: None, "state_v_first: expected a bool", TypeError, V_FIRST),
    *bad("chunk_size", lambda x: 48, "chunk_size: expected (a power of two|(16, )?32 or 64), got 48",
         families=CHUNKED),
    *bad("chunk_size", lambda x: 64.0, "chunk_size: expected an int or None, got 64.0", TypeError, CHUNKED),
    *bad("chunk_size", lambda x: 64, "unexpected keyword argument 'chunk_size'", TypeError, (GLA,)),
    *bad("use_qk_l2norm_in_kernel", lambda x: None, "use_qk_l2norm_in_kernel: expected a bool", TypeError,
         DELTA),
    *bad("use_gate_in_kernel", lambda x: True, r"A_log: expected a tensor \[HV\] with use_gate", TypeError,
         FLAGGED),
    *bad("use_gate_in_kernel", lambda x: "yes", "use_gate_in_kernel: expected a bool, got 'yes'", TypeError,
         FLAGGED),
    *bad("use_beta_sigmoid_in_kernel", lambda x: 0, "use_beta_sigmoid_in_kernel: expected a bool", TypeError,
         FLAGGED),
    *bad("allow_neg_eigval", lambda x: True, "allow_neg_eigval: expected False without use_beta_sigmoid",
         families=FLAGGED),
    *bad("cp_context", lambda x: object(), "cp_context: expected None .*fla.s own.*got object",
         families=FLAGGED),
    *(case for name in ("g", "state_v_first", "use_gate_in_kernel", "allow_neg_eigval", "cp_context")
      for case in bad(name, lambda x: None, f"unexpected keyword argument '{name}'", TypeError, (UNGATED,))),
    *bad("backend", lambda x: "cuda", "backend: expected one of auto, tk, triton, reference"),
    *bad("backend", lambda x: "tk:overlapped", "backend: expected 'tk', got 'tk:overlapped'"),
    *bad("head_first", lambda x: True, "unexpected keyword argument 'head_first'", TypeError),
]  # fmt: skip


@pytest.mark.parametrize(("family", "name", "value", "error", "message"), BAD)
def test_bad_arguments(
    family: Family, name: str, value: Callable[[Inputs], Any], error: type[Exception], message: str
) -> None:
    x = family.draw()
    function = family.function
    message = message.replace("{H}", "H" if family is GLA else "HV").replace("{name}", function.__name__)
    assert_refused(function, x | {name: value(x)}, error, message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"A_log": torch.zeros(2)}, r"A_log: expected shape \[HV\] of v = \(4,\), got \(2,\)"),
        ({"A_log": torch.zeros(4, 1)}, r"A_log: expected 1 dimension \[HV\] with use_gate_in_kernel, got 2"),
        ({"A_log": torch.zeros(4), "dt_bias": torch.zeros(8)}, r"dt_bias: expected shape \[HV\] of v"),
        ({"A_log": torch.zeros(4, device="meta")}, "A_log: expected device cpu, the device of q, got meta"),
    ],
)
def test_bad_gate_parameters(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chunk_gated_delta_rule(**GATED.draw(), use_gate_in_kernel=True, **arguments)


@of_public
def test_bad_packing(family: Family) -> None:
    x = family.draw(batch=1)
    heads = "H" if family is GLA else "HV"
    found = rf"initial_state: expected shape \[N, {heads}, K, V\] = \(2, ., 16, 32\)"
    offsets = torch.tensor([0, 10, 40])
    assert_refused(family.function, x | {"cu_seqlens": offsets}, ValueError, found)
    if family is not UNGATED:
        shown = rf"\[N, {heads}, V, K\] .* \(state_v_first=False of .* takes \[N, {heads}, K, V\]\)"
        arguments = x | {"cu_seqlens": offsets, "state_v_first": True}
        assert_refused(family.function, arguments, ValueError, shown)
    packed = x | {"cu_seqlens": torch.tensor([0, 40])}
    with pytest.raises(ValueError, match=r"cu_seqlens_cpu: expected shape \[N \+ 1\] of cu_seqlens = \(2,\)"):
        family.function(**packed, cu_seqlens_cpu=offsets)
    with pytest.raises(ValueError, match="cu_seqlens: expected offsets rising from 0 to 40"):
        family.function(**x | {"cu_seqlens": torch.tensor([0, 41])})


@of_public
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_on_the_cpu_that_differ(family: Family, dtype: torch.dtype) -> None:
    """Also after a good call of the same kind, whose plan looks at no offsets."""
    x = family.draw(batch=1) | {"cu_seqlens": torch.tensor([0, 10, 40]), "output_final_state": True}
    del x["initial_state"]
    for wrong in (20, 99):
        good = family.function(**x, cu_seqlens_cpu=x["cu_seqlens"].to(dtype))
        expected = f"cu_seqlens_cpu: expected the .* cu_seqlens, got {wrong} at index 1, where .* has 10"
        arguments = x | {"cu_seqlens_cpu": torch.tensor([0, wrong, 40], dtype=dtype)}
        assert_refused(family.function, arguments, ValueError, expected)
    torch.testing.assert_close(good, family.function(**x))


def test_no_hint_where_a_state_is_not_swapped() -> None:
    x = SIMPLE_GLA.draw()
    square = {name: x[name][..., :16] for name in ("v", "initial_state")}
    with pytest.raises(ValueError, match=r"got \(1, 4, 16, 16\)$"):
        chunk_simple_gla(**x | square | {"initial_state": square["initial_state"][:1].mT})
    with pytest.raises(ValueError, match=r"got \(2, 4, 16, 8\)$"):
        chunk_simple_gla(**x | {"initial_state": x["initial_state"][..., :8]})


def test_one_head_is_not_called_heads() -> None:
    x = {name: t[:, :1] if name == "initial_state" else t[:, :, :1] for name, t in GLA.draw().items()}
    with pytest.raises(ValueError, match=r"v: expected the 1 head of q \(repeat"):
        chunk_gla(**x | {"v": x["v"].repeat(1, 1, 2, 1)})


# Decays per head


def test_a_decay_per_head_has_no_gradient() -> None:
    x = SIMPLE_GLA.draw()
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
    x = {name: t for name, t in SIMPLE_GLA.draw().items() if name in "qkv"}
    assert_refused(chunk_lightning_attn, x | arguments, error, message)


@pytest.mark.parametrize("function", [chunk_retention, chunk_lightning_attn])
def test_the_others_check_alike(function: Callable[..., Any]) -> None:
    x = {name: t for name, t in SIMPLE_GLA.draw().items() if name in "qkv"}
    if function is chunk_lightning_attn:
        x |= {"layer_idx": 0, "num_layers": 1}
    none = {"q": x["q"][:, :, :1], "k": x["k"][:, :, :1], "v": x["v"][:, :, :0]}
    assert_refused(function, x | none, ValueError, "v: expected a multiple of q's 1 head, got 0 with shape")
    unknown = "unexpected keyword argument 'state_v_first'"
    assert_refused(function, x | {"state_v_first": True}, TypeError, unknown)
    assert which(function, **x).backend == "reference"


# Backends


def describe(family: Family, *, heads: tuple[int, int] = (2, 2), **changes: Any) -> Any:
    """A call of bf16 tensors, as on a GPU where nothing else is said."""
    x = {name: t.to("meta") for name, t in family.draw(dtype=torch.bfloat16, heads=heads).items()}
    *_, call = dispatch.describe(family.function.__name__, **x)
    return dataclasses.replace(call, **{"device": torch.device("cuda"), **changes})


@of_public
def test_description(family: Family) -> None:
    heads = (2, 2) if family is GLA else (2, 6)
    call = describe(family, heads=heads)
    assert (call.heads, call.value_heads, call.sequences, call.seq) == (*heads, 2, 40)
    assert (call.dim_qk, call.dim_v, call.scale) == (16, 32, 0.25)
    assert call.has_initial and not (call.requires_grad or call.varlen or call.is_empty)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": torch.device("cpu")}, "the kernels run on a GPU"),
        ({"dtype": torch.float32}, "q, k, v are torch.float32"),
        ({"dim_qk": 272}, "head dims are K = 272, V = 32"),
        ({"dim_v": 528}, "head dims are K = 16, V = 528"),
        ({"scale": 0.0}, "scale = 0.0, the kernels take positive ones"),
        ({"sequences": 2**30, "value_heads": 4}, "sequences x value heads = 4,294,967,296"),
    ],
)
@pytest.mark.usefixtures("passes_for_a_gpu")
def test_tk_refuses(changes: dict[str, Any], reason: str) -> None:
    verdict = support.supports_simple_gla(describe(SIMPLE_GLA, **changes))
    assert not verdict.ok and reason in verdict.reason and verdict.remedy


@pytest.fixture
def fla_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """fla counts as installed, and this machine as one that it runs on."""
    monkeypatch.setattr(fla, "FLA_MISSING", None)
    monkeypatch.setattr(fla, "gated_backward_is_guarded", lambda: False)
    monkeypatch.setattr(fla, "_guard_is_lifted", lambda: False)


def supports(family: Family, **changes: Any) -> Any:
    """What fla's adapter says of such a call."""
    return getattr(fla, f"supports_{family.op}")(describe(family, **changes))


@pytest.mark.parametrize(
    ("families", "changes", "reason"),
    [
        (PUBLIC, {}, ""),
        (PUBLIC, {"dtype": torch.float64}, "Triton kernels have no float64"),
        (PUBLIC, {"batch": 70000}, "batch x value heads = 140,000"),
        (PUBLIC, {"transformed": True}, "torch.func"),
        (
            (SIMPLE_GLA, UNGATED),
            {"value_heads": 4},
            "fla takes as many heads of v as of q and k, these are 4",
        ),
        (FLAGGED, {"value_heads": 4}, ""),
        ((SIMPLE_GLA,), {"chunk_size": 8}, "chunk_size = 8"),
        ((SIMPLE_GLA,), {"requires_grad": True, "dim_v": 33}, "even head dims in 16 bits"),
        ((UNGATED,), {"dtype": torch.float32}, "fla's chunk_delta_rule does not take float32"),
        (DELTA, {"dim_qk": 272}, "K = 272"),
    ],
)
def test_what_fla_serves(
    fla_runs: None, families: tuple[Family, ...], changes: dict[str, Any], reason: str
) -> None:
    for family in families:
        verdict = supports(family, **changes)
        assert verdict == SUPPORTED if not reason else not verdict.ok, family
        assert re.search(re.escape(reason), verdict.reason) and bool(verdict.remedy) == bool(reason), family


@pytest.mark.parametrize("family", [SIMPLE_GLA, GATED], ids=str)
def test_fla_guard(family: Family, fla_runs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gated backward on Hopper with a Triton that miscompiles it; without gate gradients all is well."""
    monkeypatch.setattr(fla, "gated_backward_is_guarded", lambda: True)
    verdict = supports(family, requires_grad=True)
    assert not verdict.ok and "miscompiles" in verdict.reason and "triton >= 3.7.1" in verdict.remedy
    assert supports(family) == SUPPORTED
    if family is GATED:
        assert supports(UNGATED, requires_grad=True) == SUPPORTED
        return
    for gate in ("head", "none"):
        assert supports(family, requires_grad=True, gate=gate) == SUPPORTED
    # lifted: by name only
    monkeypatch.setattr(fla, "gated_backward_is_guarded", lambda: False)
    monkeypatch.setattr(fla, "_guard_is_lifted", lambda: True)
    verdict = supports(family, requires_grad=True)
    assert verdict.ok and not verdict.auto and "guard is lifted" in verdict.reason


def test_fla_variants() -> None:
    with pytest.raises(UnsupportedError, match="Triton kernels run on a GPU"):
        chunk_simple_gla(**SIMPLE_GLA.draw(), backend="triton:fla")


def test_fla_gets_the_flags_that_the_caller_gave(fla_runs: None, given_to_fla: dict[str, Any]) -> None:
    got, x = given_to_fla, GATED.draw(dtype=torch.float32)
    q, k, v, g, beta, state = x.values()
    a_log, dt_bias = g[0, 0], g[0, 1]
    flags = {"qk_l2norm": True, "beta_sigmoid": True, "neg_eigval": True, "state_v_first": True}
    call = describe(GATED, gate="raw", **flags)
    fla.delta_rule(call, None, q, k, v, g, beta, a_log, dt_bias, state, None, None)
    assert got["op"] == "chunk_gated_delta_rule" and got["A_log"] is a_log and got["dt_bias"] is dt_bias
    assert all(got[name] for name in (*FLAGS[:3], "allow_neg_eigval", "state_v_first"))
    fla.delta_rule(describe(UNGATED), None, q, k, v, None, beta, None, None, state, None, None)
    assert got["op"] == chunk_delta_rule.__name__ and got["args"][3] is beta
