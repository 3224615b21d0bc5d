"""The delta rule, beside what test_linear.py asks of every operator: raw inputs, flags."""

from __future__ import annotations

import pytest
import torch

from tfla_tk import chunk_gated_delta_rule, reference
from tfla_tk.ops import delta_rule as ops

from .delta_rule import FLAGS, LAUNCH, draw_raw, from_raw, serve_by
from .linear import Kernels, assert_same, gradients

# What is computed


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


# The path of the kernels


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    module = Kernels(ops.delta_rule, LAUNCH)
    serve_by(module, monkeypatch)
    return module


def test_the_kernels_get_raw_inputs(kernels: Kernels) -> None:
    """As they are, but for what is of fp64 beside operands of less."""
    x = draw_raw()
    found = gradients(chunk_gated_delta_rule, x, **FLAGS, backend="tk")
    assert kernels.calls == ["forward, kept", "backward, kept"]
    core = kernels.core
    assert core.qk_l2norm and core.beta_sigmoid and core.neg_eigval
    assert core.A_log is not None and core.dt_bias is not None
    assert_same(found, gradients(from_raw, x))
    x = {name: t.bfloat16() if name in ("q", "k", "v") else t for name, t in x.items()}
    chunk_gated_delta_rule(**x | {"beta": x["beta"].bfloat16()}, **FLAGS)
    core = kernels.core
    assert {core.q.dtype, core.k.dtype, core.v.dtype, core.beta.dtype} == {torch.bfloat16}
    assert {core.g.dtype, core.A_log.dtype, core.initial_state.dtype} == {torch.float32}
