"""chunk_delta_rule and chunk_gated_delta_rule: results, gradients, errors, and the choice of the backend."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tfla_tk import (
    chunk_delta_rule,
    chunk_gated_delta_rule,
    delta_rule,
    reference,
)
from tfla_tk.backends.triton import fla
from tfla_tk.calls.delta_rule import DeltaRuleCall
from tfla_tk.core.support import SUPPORTED

from .delta_rule import FLAGS, draw, draw_raw, from_raw
from .linear import Inputs, assert_same, gradients
from .linear_checks import (
    assert_refused,
    bad,
    parameters_by_place,
    parameters_of_fla,
)

# What is computed


@pytest.mark.parametrize("backend", ["auto", "reference:recurrent"])
def test_raw_inputs(backend: str) -> None:
    """The flags of fla's layers; gradients reach what was given."""
    x = draw_raw()
    found = gradients(chunk_gated_delta_rule, x, **FLAGS, backend=backend)
    assert_same(found, gradients(from_raw, x))


def test_each_flag_alone() -> None:
    x = draw_raw()
    a_log, dt_bias = x.pop("A_log"), x.pop("dt_bias")
    run = reference.gated_delta_rule_recurrent
    made = {"g": reference.delta_log_decay(x["g"], a_log, dt_bias)}
    o, _ = chunk_gated_delta_rule(**x, use_gate_in_kernel=True, A_log=a_log, dt_bias=dt_bias)
    torch.testing.assert_close(o, run(**x | made)[0])
    made = {"g": reference.delta_log_decay(x["g"], a_log)}
    o, _ = chunk_gated_delta_rule(**x, use_gate_in_kernel=True, A_log=a_log)
    torch.testing.assert_close(o, run(**x | made)[0])
    made = {name: reference.l2_norm(x[name]) for name in "qk"}
    o, _ = chunk_gated_delta_rule(**x, use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(o, run(**x | made)[0])
    o, _ = chunk_gated_delta_rule(**x, use_beta_sigmoid_in_kernel=True)
    torch.testing.assert_close(o, run(**x | {"beta": x["beta"].sigmoid()})[0])
    # not looked at without its flag
    o, _ = chunk_gated_delta_rule(**x, A_log=a_log[:1], dt_bias=dt_bias)
    torch.testing.assert_close(o, run(**x)[0])


def test_keys_of_norm_0() -> None:
    x = draw()
    del x["g"]
    x["k"][:, 5:9] = 0
    found = gradients(chunk_delta_rule, x, use_qk_l2norm_in_kernel=True)
    assert all(t.isfinite().all() for t in found.values())


def test_arguments_in_the_order_of_fla() -> None:
    x = draw()
    q, k, v, g, beta, state = x.values()
    expected, last = reference.gated_delta_rule_recurrent(**x, scale=0.5, output_final_state=True)
    o, final = chunk_gated_delta_rule(q, k, v, g, beta, 0.5, state.mT, True, False, False, False, True)
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(final.mT, last)
    expected, last = reference.delta_rule_recurrent(q, k, v, beta, 0.5, state, True)
    o, final = chunk_delta_rule(q, k, v, beta, 0.5, state, True)
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(final, last)
    assert chunk_gated_delta_rule(q, k, v, g, beta)[1] is None


@pytest.mark.slow
def test_signatures_are_those_of_fla() -> None:
    """Every argument of fla's function, in its order; the others by keyword."""
    pytest.importorskip("fla")
    from fla.ops.delta_rule import chunk_delta_rule as delta
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule as gated

    for ours, theirs in ((chunk_delta_rule, delta), (chunk_gated_delta_rule, gated)):
        assert parameters_by_place(ours) == parameters_of_fla(theirs)


# What is refused


BAD = [
    bad("q", lambda x: None, r"q: expected a tensor \[B, T, H, K\], got NoneType", TypeError),
    bad("k", lambda x: x["k"][:, :, :1], r"k: expected shape \[B, T, H, K\] of q = .*, got \(2, 40, 1, 16\)"),
    bad("k", lambda x: x["k"].float(), "k: expected dtype torch.float64, the dtype of q", TypeError),
    bad("v", lambda x: x["v"][:, :, :3], r"v: expected a multiple of q's 2 heads, got 3 with shape"),
    bad("g", lambda x: x["g"][..., :2], r"g: expected shape \[B, T, HV\] of v = \(2, 40, 4\)"),
    bad("g", lambda x: x["g"][..., None], r"g: expected 3 dimensions \[B, T, HV\], got 4"),
    bad("g", lambda x: None, r"g: expected a tensor \[B, T, HV\], got NoneType", TypeError),
    bad("beta", lambda x: None, r"beta: expected a tensor \[B, T, HV\], got NoneType", TypeError),
    bad("beta", lambda x: x["beta"][..., :2], r"beta: expected shape \[B, T, HV\] of v = \(2, 40, 4\)"),
    bad("beta", lambda x: x["v"], r"beta: expected 3 dimensions \[B, T, HV\], got 4 with shape"),
    bad("beta", lambda x: x["beta"].to("meta"), "beta: expected device cpu, the device of q, got meta"),
    bad("initial_state", lambda x: x["initial_state"][:1], r"initial_state: expected shape \[B, HV"),
    bad("initial_state", lambda x: x["initial_state"].mT, r"initial_state: expected shape \[B, HV, K, V\] = "
        r".* \(state_v_first=True of chunk_gated_delta_rule takes \[B, HV, V, K\]\)"),
    bad("cu_seqlens", lambda x: torch.tensor([0, 40]), r"cu_seqlens: expected a batch of 1 in q \(packed"),
    bad("cu_seqlens_cpu", lambda x: torch.tensor([0, 40]), "cu_seqlens_cpu: expected None without"),
    bad("scale", lambda x: math.inf, "scale: expected a finite number, got inf"),
    bad("output_final_state", lambda x: 1, "output_final_state: expected a bool, got 1", TypeError),
    bad("use_qk_l2norm_in_kernel", lambda x: None, "use_qk_l2norm_in_kernel: expected a bool", TypeError),
    bad("use_gate_in_kernel", lambda x: True, r"A_log: expected a tensor \[HV\] with use_gate", TypeError),
    bad("use_gate_in_kernel", lambda x: "yes", "use_gate_in_kernel: expected a bool, got 'yes'", TypeError),
    bad("use_beta_sigmoid_in_kernel", lambda x: 0, "use_beta_sigmoid_in_kernel: expected a bool", TypeError),
    bad("allow_neg_eigval", lambda x: True, "allow_neg_eigval: expected False without use_beta_sigmoid"),
    bad("state_v_first", lambda x: None, "state_v_first: expected a bool", TypeError),
    bad("chunk_size", lambda x: 48, "chunk_size: expected 16, 32 or 64, got 48"),
    bad("chunk_size", lambda x: 64.0, "chunk_size: expected an int or None, got 64.0", TypeError),
    bad("cp_context", lambda x: object(), "cp_context: expected None .*fla.ops.gated_delta_rule.*got object"),
    bad("backend", lambda x: "cuda", "backend: expected one of auto, tk, triton, reference"),
    bad("head_first", lambda x: True, "unexpected keyword argument 'head_first'", TypeError),

]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "error", "message"), BAD)
def test_bad_arguments(
    name: str, value: Callable[[Inputs], Any], error: type[Exception], message: str
) -> None:
    x = draw()
    assert_refused(chunk_gated_delta_rule, x | {name: value(x)}, error, message)


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
        chunk_gated_delta_rule(**draw(), use_gate_in_kernel=True, **arguments)


def test_bad_packing() -> None:
    x = draw(batch=1)
    with pytest.raises(ValueError, match=r"initial_state: expected shape \[N, HV, K, V\] = \(2, 4, 16, 32\)"):
        chunk_gated_delta_rule(**x, cu_seqlens=torch.tensor([0, 10, 40]))
    with pytest.raises(ValueError, match="cu_seqlens: expected offsets rising from 0 to 40"):
        chunk_gated_delta_rule(**x | {"cu_seqlens": torch.tensor([0, 41])})


@pytest.mark.parametrize("function", [chunk_delta_rule, chunk_gated_delta_rule])
def test_offsets_on_the_cpu_that_differ(function: Callable[..., Any]) -> None:
    x = draw(batch=1) | {"cu_seqlens": torch.tensor([0, 10, 40])}
    del x["initial_state"]
    if function is chunk_delta_rule:
        del x["g"]
    function(**x, cu_seqlens_cpu=x["cu_seqlens"])  # the plan of a call like it looks at no offsets
    expected = "cu_seqlens_cpu: expected the offsets of cu_seqlens, got 20 at index 1, where .* has 10"
    assert_refused(function, x | {"cu_seqlens_cpu": torch.tensor([0, 20, 40])}, ValueError, expected)


def test_without_gate_there_are_no_gate_arguments() -> None:
    x = draw()
    del x["g"]
    for name in ("g", "state_v_first", "use_gate_in_kernel", "allow_neg_eigval", "cp_context"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            chunk_delta_rule(**x, **{name: None})
    with pytest.raises(ValueError, match=r"beta: expected shape \[B, T, HV\]"):
        chunk_delta_rule(**x | {"beta": x["beta"][:, :-1]})
    with pytest.raises(TypeError, match=r"scale: expected a number or None \(chunk_gated_delta_rule takes"):
        chunk_delta_rule(x["q"], x["k"], x["v"], -x["beta"], x["beta"])


# Backends


def describe(gated: bool = True, **changes: Any) -> DeltaRuleCall:
    x = {name: t.to("meta") for name, t in draw(dtype=torch.bfloat16, heads=(2, 2)).items()}
    if not gated:
        del x["g"]
    function = delta_rule._describe_gated if gated else delta_rule._describe_delta_rule
    public = chunk_gated_delta_rule if gated else chunk_delta_rule
    bound = inspect.signature(public).bind(**x)
    bound.apply_defaults()
    _, call = function(**bound.arguments)
    return dataclasses.replace(call, **{"device": torch.device("cuda"), **changes})


def test_description() -> None:
    call = describe()
    assert (call.heads, call.value_heads, call.sequences, call.seq) == (2, 2, 2, 40)
    assert (call.dim_qk, call.dim_v, call.scale, call.gate) == (16, 32, 0.25, "token")
    assert call.has_initial and not (call.requires_grad or call.varlen or call.is_empty)
    assert describe(gated=False).gate == "none"


@pytest.fixture
def fla_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """fla counts as installed, and this machine as one that it runs on."""
    monkeypatch.setattr(fla, "FLA_MISSING", None)
    monkeypatch.setattr(fla, "gated_backward_is_guarded", lambda: False)
    monkeypatch.setattr(fla, "_guard_is_lifted", lambda: False)


@pytest.mark.parametrize(
    ("gated", "changes", "reason"),
    [
        (False, {"value_heads": 4}, "fla takes as many heads of v as of q and k, these are 4 and 2"),
        (False, {"dtype": torch.float32}, "fla's chunk_delta_rule does not take float32"),
        (True, {"dtype": torch.float64}, "Triton kernels have no float64"),
        (True, {"dim_qk": 272}, "K = 272"),
        (True, {"batch": 70000}, "batch x value heads = 140,000"),
        (True, {"transformed": True}, "torch.func"),
    ],
)
def test_fla_refuses(fla_runs: None, gated: bool, changes: dict[str, Any], reason: str) -> None:
    assert fla.supports_delta_rule(describe(gated)) == SUPPORTED
    verdict = fla.supports_delta_rule(describe(gated, **changes))
    assert not verdict.ok and reason in verdict.reason and verdict.remedy


def test_fla_has_value_heads_with_a_gate(fla_runs: None) -> None:
    assert fla.supports_delta_rule(describe(value_heads=4)) == SUPPORTED


def test_fla_guard(fla_runs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gated backward on Hopper with a Triton that miscompiles it; without decay all is well."""
    monkeypatch.setattr(fla, "gated_backward_is_guarded", lambda: True)
    verdict = fla.supports_delta_rule(describe(requires_grad=True))
    assert not verdict.ok and "miscompiles" in verdict.reason
    assert fla.supports_delta_rule(describe(False, requires_grad=True)) == SUPPORTED
    assert fla.supports_delta_rule(describe()) == SUPPORTED


def test_fla_gets_the_flags_that_the_caller_gave(fla_runs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    got: dict[str, Any] = {}

    def call_fla(op: str, device: torch.device, *args: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        got.update(kwargs, op=op, args=args)
        return args[2], None

    monkeypatch.setattr(fla, "call_fla", call_fla)
    x = draw_raw(dtype=torch.float32)
    *tokens, state, a_log, dt_bias = x.values()
    call = describe(gate="raw", qk_l2norm=True, beta_sigmoid=True, neg_eigval=True, state_v_first=True)
    fla.delta_rule(call, None, *tokens, a_log, dt_bias, state, None, None)
    assert got["op"] == "chunk_gated_delta_rule" and got["A_log"] is a_log and got["dt_bias"] is dt_bias
    assert all(got[name] for name in (*FLAGS, "state_v_first"))
    q, k, v, _, beta = tokens
    fla.delta_rule(describe(False), None, q, k, v, None, beta, None, None, state, None, None)
    assert got["op"] == "chunk_delta_rule" and got["args"][3] is beta
