"""The delta rule's ops and kernels, beside what test_linear.py asks of every operator: raw inputs, flags."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tfla_tk import chunk_delta_rule, chunk_gated_delta_rule, delta_rule, reference
from tfla_tk.calls.delta_rule import DeltaRuleCore
from tfla_tk.ops import delta_rule as ops

from .delta_rule import FLAGS, LAUNCH, draw, draw_raw, from_raw, serve_by
from .linear import Kernels, assert_same, gradients, leaves


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    module = Kernels(ops, LAUNCH)
    serve_by(module, monkeypatch)
    return module


# The tk backend's path


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


def test_the_core_has_the_arguments_of_the_op() -> None:
    names = [argument.name for argument in torch.ops.tfla_tk.delta_rule_fwd.default._schema.arguments]
    assert names == [*DeltaRuleCore._fields, "output_final_state"]


def test_without_decay(kernels: Kernels) -> None:
    x = draw()
    del x["g"]
    found = gradients(chunk_delta_rule, x, backend="tk")
    assert kernels.core.g is None and kernels.needs_gates == [False]
    assert_same(found, gradients(reference.delta_rule_recurrent, x))


def test_plans_are_kept_by_flags(kernels: Kernels) -> None:
    x = draw()
    chunk_gated_delta_rule(**x)
    chunk_gated_delta_rule(**x, use_qk_l2norm_in_kernel=True)
    assert len(delta_rule._path.plans) == 2
    del x["g"]
    chunk_delta_rule(**x)
    with pytest.raises(TypeError, match="g: expected a tensor"):
        chunk_gated_delta_rule(**x, g=None)


# The registered ops


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("gate", "with_state", "last"),
    [("token", True, True), ("none", False, False), ("raw", True, True), ("raw without bias", False, True)],
)
def test_opcheck(packed: bool, gate: str, with_state: bool, last: bool) -> None:
    x = leaves(draw_raw(batch=1 if packed else 2, seq=20, rows=3 if packed else None, dtype=torch.float32))
    raw = gate.startswith("raw")
    inputs: list[Any] = [
        *(x[name] for name in ("q", "k", "v")),
        None if gate == "none" else x["g"],
        x["beta"],
        x["A_log"] if raw else None,
        x["dt_bias"] if gate == "raw" else None,
        x["initial_state"] if with_state else None,
        torch.tensor([0, 5, 5, 20]) if packed else None,
    ]
    options = (0.25, True, raw, raw, False)
    registered = torch.ops.tfla_tk
    torch.library.opcheck(registered.delta_rule_fwd, (*inputs, *options, last))
    torch.library.opcheck(registered.packed_delta_rule, (*inputs, *options, "chunkwise", 16, last))
    detached = [t.detach() if isinstance(t, Tensor) else t for t in inputs]
    o, state = registered.delta_rule_fwd(*detached, *options, last)
    given = (torch.randn_like(o), torch.randn_like(state) if last else None)
    needs = gate != "none"
    torch.library.opcheck(registered.delta_rule_bwd, (*detached, *given, *options, needs))
    torch.library.opcheck(registered.packed_delta_rule_bwd, (*detached, *given, *options, 16, needs))


@pytest.mark.parametrize("packed", [False, True])
def test_vmap(kernels: Kernels, packed: bool) -> None:
    """One call over a batch of calls: results and gradients of each, of parameters per head, too."""
    x = draw_raw(batch=1, seq=20, rows=2 if packed else 1)
    options: dict[str, Any] = {"cu_seqlens": torch.tensor([0, 5, 20]) if packed else None}
    options["output_final_state"] = True
    q = torch.stack([x["q"], 2 * x["q"], -x["q"]])
    a_log = torch.stack([x["A_log"], 2 * x["A_log"], -x["A_log"]], dim=1)

    def run(q: Tensor, a_log: Tensor, state: Tensor) -> Tensor:
        given = x | {"q": q, "A_log": a_log, "initial_state": state}
        o, last = chunk_gated_delta_rule(**given, **FLAGS, **options)
        return o.square().sum() + last.sum()

    state = x["initial_state"]
    found = torch.func.vmap(torch.func.grad(run, argnums=(0, 1, 2)), (0, 1, None))(q, a_log, state)
    for j in range(3):
        alone = leaves({"q": q[j], "A_log": a_log[:, j], "initial_state": state})
        o, last = from_raw(**x | alone, **options)
        expected = torch.autograd.grad(o.square().sum() + last.sum(), list(alone.values()))
        for actual, want in zip(found, expected, strict=True):
            torch.testing.assert_close(actual[j], want)
