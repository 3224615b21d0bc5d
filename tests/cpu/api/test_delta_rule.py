"""chunk_delta_rule and chunk_gated_delta_rule: results, gradients, errors, and the choice of the backend."""

from __future__ import annotations

import pytest
import torch

from tfla_tk import (
    chunk_delta_rule,
    chunk_gated_delta_rule,
    reference,
)

from .delta_rule import FLAGS, draw, draw_raw, from_raw
from .linear import assert_same, gradients
from .linear_checks import (
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
