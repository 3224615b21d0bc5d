"""chunk_gla: results, gradients, errors, the choice of the backend, its ops, and the path of its kernels."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from torch.utils.flop_counter import FlopCounterMode

from tfla_tk import UnsupportedError, chunk_gla, doctor, gla, reference, which
from tfla_tk.backends.tk import gla as tk_gla
from tfla_tk.backends.triton import fla, fla_gla
from tfla_tk.calls.gla import GLACore
from tfla_tk.calls.linear import LinearCall
from tfla_tk.core.support import SUPPORTED
from tfla_tk.ops import gla as ops

from .linear import Inputs, Kernels, assert_same, gradients, leaves
from .linear_checks import (
    assert_dtypes,
    assert_final_state_is_a_copy,
    assert_final_state_may_change,
    assert_packs_sequences,
    assert_pads_head_dims,
    assert_profiles_show_what_runs,
    assert_refused,
    bad,
    parameters_by_place,
    parameters_of_fla,
)

INTRA, STATE = (64 + 64) * (16 + 32), 16 * 32  # FLOPs per token and head


def draw(
    *, batch: int = 2, seq: int = 40, heads: int = 2, dims: tuple[int, int] = (16, 32),
    dtype: torch.dtype = torch.float64, rows: int | None = None,
) -> Inputs:  # fmt: skip
    """q, k, v, g and initial_state."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    q, k, g = (normal(batch, seq, heads, dims[0]) for _ in range(3))
    state = normal(batch if rows is None else rows, heads, *dims)
    return {
        "q": q,
        "k": k,
        "v": normal(batch, seq, heads, dims[1]),
        "g": logsigmoid(g),
        "initial_state": state,
    }


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """The tk backend serves every call, on the CPU."""
    module = Kernels(ops, ops.KERNELS)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(tk_gla, "supports_gla", lambda call, variant=None: SUPPORTED)
    monkeypatch.setattr(tk_gla, "load", lambda kernel, call, variant=None: SUPPORTED)
    return module


@pytest.fixture(autouse=True)
def no_plans() -> None:
    gla._path.plans.clear()


# What is computed


@pytest.mark.parametrize(
    "backend", ["auto", "reference:recurrent", "reference:parallel", "reference:chunkwise"]
)
def test_forms_agree_with_the_recurrence(backend: str) -> None:
    inputs = draw()
    expected = gradients(reference.gla_recurrent, inputs, scale=0.3)
    assert_same(gradients(chunk_gla, inputs, scale=0.3, backend=backend), expected)


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


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("with_cpu", [False, True])
def test_packed_sequences(dtype: torch.dtype, with_cpu: bool) -> None:
    x = draw(batch=1, rows=5)
    assert_packs_sequences(chunk_gla, reference.gla_recurrent, x, dtype, with_cpu=with_cpu)


@pytest.mark.parametrize("v_first", [False, True])
def test_without_a_token_the_final_state_is_a_copy(v_first: bool) -> None:
    assert_final_state_is_a_copy(chunk_gla, draw(seq=0), v_first=v_first)


def test_no_batch() -> None:
    x = draw(batch=0)
    o, last = chunk_gla(**x, output_final_state=True)
    assert o.shape == x["v"].shape and last.shape == x["initial_state"].shape


@pytest.mark.parametrize("decay", [-1e3, -math.inf, 0.0])
def test_gates_that_close_one_channel(decay: float) -> None:
    x = draw()
    x["g"][:, ::3, :, 5] = decay
    assert_same(gradients(chunk_gla, x), gradients(reference.gla_recurrent, x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes(dtype: torch.dtype) -> None:
    assert_dtypes(chunk_gla, draw(), dtype)


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


def test_tk_says_that_it_has_no_kernels() -> None:
    choice = which(chunk_gla, **draw())
    assert choice.backend == "reference" and list(choice.reasons) == ["tk", "triton", "reference"]
    with pytest.raises(UnsupportedError, match="chunk_gla on backend 'tk': "):
        chunk_gla(**draw(), backend="tk")


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
    assert fla_gla.supports_gla(describe()) == SUPPORTED
    verdict = fla_gla.supports_gla(describe(**changes))
    assert not verdict.ok and reason in verdict.reason and verdict.remedy


# The path of the kernels


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_kernels_get_what_they_read(kernels: Kernels, v_first: bool, packed: bool) -> None:
    x = draw(batch=1, rows=3 if packed else 1)
    options: dict[str, Any] = {"cu_seqlens": torch.tensor([0, 5, 5, 40])} if packed else {}
    if v_first:
        x["initial_state"] = x["initial_state"].mT.contiguous()
    options["state_v_first"] = v_first
    expected = gradients(chunk_gla, x, **options, backend="reference:recurrent")
    found = gradients(chunk_gla, x, **options, backend="tk")
    assert kernels.calls == ["forward, kept", "backward, kept"]
    assert_same(found, expected)
    assert kernels.core.initial_state.shape == (3 if packed else 1, 2, 16, 32)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dims", [(20, 25), (16, 9), (60, 32)], ids="{0[0]}_{0[1]}".format)
def test_other_head_dims_are_padded(kernels: Kernels, dims: tuple[int, int], compiled: bool) -> None:
    def read() -> tuple[Tensor, ...]:
        core = kernels.core
        assert core.g.shape == core.k.shape
        return core.q, core.k, core.v, core.initial_state

    assert_pads_head_dims(chunk_gla, draw(dims=dims), read, compiled=compiled)


def test_the_core_has_the_arguments_of_the_op() -> None:
    names = [argument.name for argument in torch.ops.tfla_tk.gla_fwd.default._schema.arguments]
    assert names == [*GLACore._fields, "output_final_state"]


def test_plain_calls_go_to_the_kernels_and_others_to_the_op(kernels: Kernels) -> None:
    x = leaves(draw())
    chunk_gla(**x)
    assert kernels.calls == ["forward, kept"]
    with FlopCounterMode(display=False) as counter:
        chunk_gla(**x)[0].sum().backward()
    assert len(kernels.calls) == 1  # the op's CPU code
    assert counter.get_total_flops() == 2 * 40 * 2 * (4 * INTRA + 12 * STATE)


def test_a_profile_shows_the_kernels_that_run_without_it(kernels: Kernels) -> None:
    assert_profiles_show_what_runs(chunk_gla, draw(), kernels.calls, "gla")


def test_gates_that_need_no_gradient_get_none(kernels: Kernels) -> None:
    x = draw()
    q = x.pop("q").requires_grad_()
    chunk_gla(q, **x)[0].sum().backward()
    chunk_gla(q, **x | {"g": x["g"].clone().requires_grad_()})[0].sum().backward()
    assert kernels.needs_gates == [False, True]


def test_a_final_state_that_is_overwritten(kernels: Kernels) -> None:
    assert_final_state_may_change(chunk_gla, draw())


def test_double_backward(kernels: Kernels) -> None:
    x = leaves(draw(seq=10))
    (dq,) = torch.autograd.grad(chunk_gla(**x)[0].square().sum(), x["q"], create_graph=True)
    with pytest.raises(RuntimeError, match=r"double backward of GLA .* backend='reference'"):
        dq.sum().backward()


def test_doctor_tells(kernels: Kernels) -> None:
    for use in doctor._choices("chunk_gla").values():
        assert use["backend"] == "tk", use


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


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("backend", ["reference", "tk"])
def test_compile(kernels: Kernels, packed: bool, backend: str) -> None:
    x = draw(batch=1, rows=3 if packed else 1)
    options: dict[str, Any] = {"cu_seqlens": torch.tensor([0, 5, 5, 40])} if packed else {}
    compiled = torch.compile(chunk_gla, backend="aot_eager", fullgraph=True)
    found = gradients(compiled, x, **options, backend=backend)
    assert_same(found, gradients(reference.gla_recurrent, x, **options))
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "tk"])
def test_compile_with_sizes_as_symbols(kernels: Kernels, backend: str) -> None:
    """Tokens, heads, head dims and the scale: one graph serves another size."""
    compiled = torch.compile(chunk_gla, backend="aot_eager", fullgraph=True, dynamic=True)
    for seq, heads, dims, scale in ((40, 2, (16, 32), 0.3), (56, 3, (24, 8), 0.7)):
        x = draw(seq=seq, heads=heads, dims=dims)
        expected = gradients(reference.gla_recurrent, x, scale=scale)
        assert_same(gradients(compiled, x, scale=scale, backend=backend), expected)
    torch._dynamo.reset()


def test_fake_and_meta_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = draw(batch=1, rows=2)
    with FakeTensorMode() as mode:
        fake: Inputs = {name: mode.from_tensor(t) for name, t in x.items()}
        offsets = mode.from_tensor(torch.tensor([0, 5, 40]))
        o, last = chunk_gla(**fake, cu_seqlens=offsets, output_final_state=True)
    assert o.shape == x["v"].shape and last.shape == x["initial_state"].shape
    meta: Inputs = {name: t.to("meta") for name, t in x.items()}
    o, last = chunk_gla(**meta, cu_seqlens=torch.zeros(3, device="meta", dtype=torch.int32))
    assert o.shape == x["v"].shape and o.device.type == "meta" and last is None


@pytest.mark.parametrize("packed", [False, True])
def test_vmap(kernels: Kernels, packed: bool) -> None:
    """One call over a batch of calls: results and gradients of each."""
    x = draw(batch=1, seq=20, rows=2 if packed else 1)
    options: dict[str, Any] = {"cu_seqlens": torch.tensor([0, 5, 20]) if packed else None}
    options["output_final_state"] = True
    g = torch.stack([x["g"], 2 * x["g"], 3 * x["g"]], dim=1)

    def run(g: Tensor, state: Tensor) -> Tensor:
        o, last = chunk_gla(**x | {"g": g, "initial_state": state}, **options)
        return o.square().sum() + last.sum()

    state = x["initial_state"]
    found = torch.func.vmap(torch.func.grad(run, argnums=(0, 1)), (1, None))(g, state)
    for j in range(3):
        alone = leaves({"g": g[:, j], "initial_state": state})
        o, last = reference.gla_recurrent(**x | alone, **options)
        expected = torch.autograd.grad(o.square().sum() + last.sum(), list(alone.values()))
        for actual, want in zip(found, expected, strict=True):
            torch.testing.assert_close(actual[j], want)
