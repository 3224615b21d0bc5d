"""The registered ops of the delta rule and the path of its tk backend, with the op's CPU code as kernels."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tfla_tk import chunk_delta_rule, chunk_gated_delta_rule, delta_rule, doctor, reference
from tfla_tk.backends.tk import delta
from tfla_tk.calls.delta_rule import DeltaRuleCore
from tfla_tk.ops import delta_rule as ops

from .delta_rule import FLAGS, LAUNCH, draw, draw_raw, from_raw, serve_by
from .linear import Inputs, Kernels, assert_same, gradients, leaves
from .linear_checks import (
    assert_final_state_may_change,
    assert_pads_head_dims,
    assert_profiles_show_what_runs,
)

ALL = frozenset({"qk_l2norm", "beta_sigmoid", "gate"})
INTRA, STATE = (64 + 64) * (16 + 32), 16 * 32  # FLOPs per token and head


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    module = Kernels(ops, LAUNCH)
    serve_by(module, monkeypatch)
    return module


@pytest.fixture(autouse=True)
def no_plans() -> None:
    delta_rule._path.plans.clear()


# The tk backend's path


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_kernels_get_what_they_read(kernels: Kernels, v_first: bool, packed: bool) -> None:
    x = draw(batch=1, rows=3 if packed else 1)
    options: dict[str, Any] = {"cu_seqlens": torch.tensor([0, 5, 5, 40])} if packed else {}
    expected = gradients(reference.gated_delta_rule_recurrent, x, **options)
    if v_first:
        x["initial_state"] = x["initial_state"].mT.contiguous()
        expected |= {name: expected[name].mT for name in ("last", "initial_state")}
        options["state_v_first"] = True
        # the loss is over the state as it is returned
        found = gradients(chunk_gated_delta_rule, x, **options, backend="reference")
        assert_same({"o": found["o"], "last": found["last"]}, {n: expected[n] for n in ("o", "last")})
        expected = found
    found = gradients(chunk_gated_delta_rule, x, **options, backend="tk")
    assert kernels.calls == ["forward, kept", "backward, kept"]
    assert_same(found, expected)
    assert kernels.core.initial_state.shape == (3 if packed else 1, 4, 16, 32)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dims", [(20, 25), (16, 9), (60, 32)], ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("raw", [False, True])
def test_other_head_dims_are_padded(
    kernels: Kernels, raw: bool, dims: tuple[int, int], compiled: bool
) -> None:
    def read() -> tuple[Tensor, ...]:
        return kernels.core.q, kernels.core.k, kernels.core.v, kernels.core.initial_state

    x, flags = (draw_raw(dims=dims), FLAGS) if raw else (draw(dims=dims), {})
    function = functools.partial(chunk_gated_delta_rule, **flags)
    assert_pads_head_dims(function, x, read, compiled=compiled)


@pytest.mark.parametrize("native", [frozenset(), ALL, frozenset({"gate"}), frozenset({"qk_l2norm"})])
def test_what_is_not_native_is_made_by_torch(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, native: frozenset[str]
) -> None:
    monkeypatch.setattr(delta, "NATIVE", native)
    x = draw_raw()
    found = gradients(chunk_gated_delta_rule, x, **FLAGS, backend="tk")
    assert kernels.calls == ["forward, kept", "backward, kept"]
    core = kernels.core
    assert core.qk_l2norm == ("qk_l2norm" in native)
    assert core.beta_sigmoid == core.neg_eigval == ("beta_sigmoid" in native)
    assert (core.A_log is not None) == (core.dt_bias is not None) == ("gate" in native)
    assert_same(found, gradients(from_raw, x))


def test_a_final_state_that_is_overwritten(kernels: Kernels) -> None:
    assert_final_state_may_change(chunk_gated_delta_rule, draw())


def test_inputs_made_by_torch_have_the_dtypes_that_kernels_read(kernels: Kernels) -> None:
    """q and k are rounded again, gates and states are fp32; fp64 beside them is not handed over."""
    x = {name: t.bfloat16() if name in ("q", "k", "v") else t for name, t in draw_raw().items()}
    chunk_gated_delta_rule(**x, **FLAGS)
    core = kernels.core
    assert {core.q.dtype, core.k.dtype, core.v.dtype} == {torch.bfloat16}
    assert {core.g.dtype, core.beta.dtype, core.initial_state.dtype} == {torch.float32}
    torch.testing.assert_close(core.k, reference.l2_norm(x["k"]).bfloat16())
    del x["A_log"], x["dt_bias"]
    chunk_gated_delta_rule(**x)
    assert {kernels.core.g.dtype, kernels.core.beta.dtype} == {torch.float32}
    chunk_gated_delta_rule(**x | {"beta": x["beta"].bfloat16()})
    assert kernels.core.beta.dtype == torch.bfloat16


def test_the_core_has_the_arguments_of_the_op() -> None:
    names = [argument.name for argument in torch.ops.tfla_tk.delta_rule_fwd.default._schema.arguments]
    assert names == [*DeltaRuleCore._fields, "output_final_state"]


def test_without_decay(kernels: Kernels) -> None:
    x = draw()
    del x["g"]
    found = gradients(chunk_delta_rule, x, backend="tk")
    assert kernels.core.g is None and kernels.needs_gates == [False]
    assert_same(found, gradients(reference.delta_rule_recurrent, x))


@pytest.mark.parametrize("with_grad", [False, True])
def test_plain_calls_go_to_the_kernels_and_others_to_the_op(kernels: Kernels, with_grad: bool) -> None:
    x = leaves(draw()) if with_grad else draw()
    chunk_gated_delta_rule(**x)
    assert kernels.calls == (["forward, kept"] if with_grad else ["forward"])
    with FlopCounterMode(display=False) as counter:
        chunk_gated_delta_rule(**x)
    assert len(kernels.calls) == 1  # the op's CPU code
    assert counter.get_total_flops() == 2 * 40 * 4 * (INTRA + 6 * STATE)


def test_a_profile_shows_the_kernels_that_run_without_it(kernels: Kernels) -> None:
    assert_profiles_show_what_runs(chunk_gated_delta_rule, draw(), kernels.calls, "delta_rule")


def test_flops_of_the_backward(kernels: Kernels) -> None:
    x = leaves(draw())
    with FlopCounterMode(display=False) as counter:
        chunk_gated_delta_rule(**x)[0].sum().backward()
    assert counter.get_total_flops() == 2 * 40 * 4 * (4 * INTRA + 24 * STATE)


def test_plans_are_kept_by_what_matters(kernels: Kernels) -> None:
    x = draw()
    for _ in range(3):
        chunk_gated_delta_rule(**x)
    assert len(delta_rule._path.plans) == 1
    chunk_gated_delta_rule(**x, scale=1.0)
    chunk_gated_delta_rule(**x, use_qk_l2norm_in_kernel=True)
    chunk_gated_delta_rule(**x | {"v": x["v"].transpose(0, 1).contiguous().transpose(0, 1)})
    chunk_gated_delta_rule(**leaves(x))
    assert len(delta_rule._path.plans) == 5
    del x["g"]
    chunk_delta_rule(**x)
    with pytest.raises(TypeError, match="g: expected a tensor"):
        chunk_gated_delta_rule(**x, g=None)


def test_gates_that_need_no_gradient_get_none(kernels: Kernels) -> None:
    x = draw()
    q = x.pop("q").requires_grad_()
    chunk_gated_delta_rule(q, **x)[0].sum().backward()
    g = x["g"].clone().requires_grad_()
    chunk_gated_delta_rule(q, **x | {"g": g})[0].sum().backward()
    assert kernels.needs_gates == [False, True] and g.grad is not None


def test_an_initial_state_that_is_overwritten_keeps_the_gradient(kernels: Kernels) -> None:
    """As a cache of states is."""
    x = draw()
    cache = x.pop("initial_state")
    q = x.pop("q").requires_grad_()
    o, _ = chunk_gated_delta_rule(q, **x, initial_state=cache.clone())
    (expected,) = torch.autograd.grad(o.sum(), q)
    o, _ = chunk_gated_delta_rule(q, **x, initial_state=cache)
    cache.zero_()
    assert torch.equal(torch.autograd.grad(o.sum(), q)[0], expected)


def test_checkpointing_and_hooks(kernels: Kernels) -> None:
    from torch.utils.checkpoint import checkpoint

    x = leaves(draw_raw())
    expected = torch.autograd.grad(chunk_gated_delta_rule(**x, **FLAGS)[0].square().sum(), list(x.values()))
    o, _ = checkpoint(lambda: chunk_gated_delta_rule(**x, **FLAGS), use_reentrant=False)
    found = torch.autograd.grad(o.square().sum(), list(x.values()))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert kernels.calls == ["forward, kept", "backward, kept", *["forward, kept"] * 2, "backward, kept"]


def test_double_backward_and_forward_mode(kernels: Kernels) -> None:
    x = leaves(draw(seq=10))
    o, _ = chunk_gated_delta_rule(**x)
    (dq,) = torch.autograd.grad(o.square().sum(), x["q"], create_graph=True)
    with pytest.raises(RuntimeError, match=r"double backward of the delta rule .* backend='reference'"):
        dq.sum().backward()

    def op(q: Tensor) -> Tensor:
        tensors = (q, x["k"], x["v"], x["g"], x["beta"], None, None, None, None)
        o: Tensor = torch.ops.tfla_tk.delta_rule_fwd(*tensors, 0.25, False, False, False, False, False)[0]
        return o

    q = x["q"].detach()
    with pytest.raises(RuntimeError, match=r"delta_rule_fwd has no forward-mode derivative .*reference"):
        torch.func.jvp(op, (q,), (q,))

    # under "auto" the reference serves both
    def run(q: Tensor) -> Tensor:
        return chunk_gated_delta_rule(q, x["k"], x["v"], x["g"], x["beta"])[0]

    tangent = torch.func.jvp(run, (q,), (q,))[1]
    torch.testing.assert_close(tangent, run(q))
    o, _ = chunk_gated_delta_rule(**x, backend="reference")
    (dq,) = torch.autograd.grad(o.square().sum(), x["q"], create_graph=True)
    dq.sum().backward()


def test_doctor_tells(kernels: Kernels) -> None:
    for name in ("chunk_delta_rule", "chunk_gated_delta_rule"):
        for use in doctor._choices(name).values():
            assert use["backend"] == "tk", use


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


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("backend", ["reference", "tk"])
def test_compile(kernels: Kernels, packed: bool, backend: str) -> None:
    x = draw_raw(batch=1, rows=3 if packed else 1)
    options: dict[str, Any] = {"cu_seqlens": torch.tensor([0, 5, 5, 40])} if packed else {}
    compiled = torch.compile(chunk_gated_delta_rule, backend="aot_eager", fullgraph=True)
    found = gradients(compiled, x, **FLAGS, **options, backend=backend)
    assert_same(found, gradients(from_raw, x, **options))
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "tk"])
def test_compile_with_sizes_as_symbols(kernels: Kernels, backend: str) -> None:
    """Tokens, heads, groups, head dims and the scale: one graph serves another size."""
    compiled = torch.compile(chunk_gated_delta_rule, backend="aot_eager", fullgraph=True, dynamic=True)
    for seq, heads, dims, scale in ((40, (2, 4), (16, 32), 0.3), (56, (3, 9), (24, 8), 0.7)):
        x = draw(seq=seq, heads=heads, dims=dims)
        expected = gradients(reference.gated_delta_rule_recurrent, x, scale=scale)
        assert_same(gradients(compiled, x, scale=scale, backend=backend), expected)
    torch._dynamo.reset()


def test_export() -> None:
    """Packed sequences: the exported program reads the offsets when it runs."""

    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, cu_seqlens: Tensor) -> Tensor:
            return chunk_delta_rule(q, k, v, beta, cu_seqlens=cu_seqlens, backend="reference")[0]

    drawn = draw(batch=1)
    x = [drawn[name] for name in ("q", "k", "v", "beta")]
    program = torch.export.export(Model(), (*x, torch.tensor([0, 7, 40]))).module()
    offsets = torch.tensor([0, 20, 40])
    torch.testing.assert_close(program(*x, offsets), Model()(*x, offsets))


def test_fake_and_meta_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = draw_raw(batch=1, rows=2)
    with FakeTensorMode() as mode:
        fake: Inputs = {name: mode.from_tensor(t) for name, t in x.items()}
        offsets = mode.from_tensor(torch.tensor([0, 5, 40]))
        o, last = chunk_gated_delta_rule(**fake, **FLAGS, cu_seqlens=offsets, output_final_state=True)
    assert o.shape == x["v"].shape and last.shape == x["initial_state"].shape
    meta: Inputs = {name: t.to("meta") for name, t in x.items()}
    offsets = torch.zeros(3, device="meta", dtype=torch.int32)
    o, last = chunk_gated_delta_rule(**meta, **FLAGS, cu_seqlens=offsets)
    assert o.shape == x["v"].shape and o.device.type == "meta" and last is None


@pytest.mark.parametrize("native", [frozenset(), ALL])
@pytest.mark.parametrize("packed", [False, True])
def test_vmap(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, packed: bool, native: frozenset[str]
) -> None:
    """One call over a batch of calls: results and gradients of each, of parameters per head, too."""
    monkeypatch.setattr(delta, "NATIVE", native)
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
