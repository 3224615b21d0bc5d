"""chunk_simple_gla, chunk_retention, chunk_lightning_attn: results, gradients, errors, ops, and the direct
path."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from torch.utils.flop_counter import FlopCounterMode

from tfla_tk import (
    UnsupportedError,
    chunk_lightning_attn,
    chunk_retention,
    chunk_simple_gla,
    reference,
    simple_gla,
    which,
)
from tfla_tk.backends.tk import linear as tk_linear
from tfla_tk.backends.tk import scalar_gate
from tfla_tk.backends.tk.scalar_gate import support
from tfla_tk.backends.triton import fla
from tfla_tk.calls.linear import LinearCall, check_simple_gla
from tfla_tk.core.layout import Cut, KeptStates
from tfla_tk.core.support import SUPPORTED
from tfla_tk.ops import simple_gla as simple_gla_ops

Inputs = dict[str, Tensor]
LEFT = KeptStates(torch.arange(3.0), Cut(4, 2), (8, 16))  # what a forward leaves for its backward


def draw(
    *, batch: int = 2, seq: int = 40, heads: tuple[int, int] = (2, 4), dims: tuple[int, int] = (16, 32),
    dtype: torch.dtype = torch.float64, rows: int | None = None,
) -> Inputs:  # fmt: skip
    """q, k, v, g and initial_state."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    q, k = (normal(batch, seq, heads[0], dims[0]) for _ in range(2))
    v = normal(batch, seq, heads[1], dims[1])
    g = logsigmoid(normal(batch, seq, heads[1]))
    state = normal(batch if rows is None else rows, heads[1], *dims)
    return {"q": q, "k": k, "v": v, "g": g, "initial_state": state}


def leaves(inputs: Inputs) -> Inputs:
    return {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}


def gradients(function: Callable[..., Any], inputs: Inputs, **options: Any) -> Inputs:
    """o, the final state, and the gradients of a loss that reaches both."""
    x = leaves(inputs)
    o, last = function(**x, **options, output_final_state=True)
    generator = torch.Generator().manual_seed(7)
    loss = sum((y * torch.randn(y.shape, generator=generator).to(y.dtype)).sum() for y in (o, last))
    assert isinstance(loss, Tensor)
    grads = torch.autograd.grad(loss, list(x.values()))
    return {"o": o.detach(), "last": last.detach(), **dict(zip(x, grads, strict=True))}


def assert_same(actual: Inputs, expected: Inputs, tol: float = 1e-9) -> None:
    assert actual.keys() == expected.keys()
    for name, want in expected.items():
        assert actual[name].shape == want.shape, name
        error = (actual[name].double() - want.double()).norm() / want.double().norm()
        assert error <= tol, (name, error)


def layout(x: Tensor | None) -> Any:
    return None if x is None else (x.shape, x.stride(), x.dtype, x.device)


class Kernels(ModuleType):
    """The launches with the op's CPU code: None in place of empty tensors, and a log of the calls."""

    def __init__(self) -> None:
        super().__init__(f"{scalar_gate.__name__}.scalar_decay")
        self.calls: list[str] = []
        self.tensors: tuple[Any, ...] = ()

    def simple_gla_fwd(self, *args: Any) -> tuple[Tensor | None, ...]:
        args, keeps = args[:9], args[9:] == (True,)
        self.calls.append("forward, kept" if keeps else "forward")
        self.tensors = args[:6]
        o, last = simple_gla_ops._fwd_cpu(*args)
        kept = LEFT._replace(workspace=LEFT.workspace.clone()) if keeps else None
        return o, last if args[7] else None, kept

    def prepare_simple_gla_fwd(self, *args: Any) -> Callable[..., Any]:
        """Calls `simple_gla_fwd`; a decay per head comes as [HV]."""
        (*expected, options), keeps = (*map(layout, args[:6]), args[6:9]), args[9]

        def run(*tensors: Any) -> Any:
            assert [*map(layout, tensors)] == expected
            q, k, v, g, *others = tensors
            g = g if g is None or g.dim() == 3 else g.expand(v.shape[:3])
            return self.simple_gla_fwd(q, k, v, g, *others, *options, *([True] if keeps else []))

        return run

    def simple_gla_bwd(self, *args: Any) -> tuple[Tensor | None, ...]:
        *args, kept = args
        if args[3] is not None and args[3].dim() == 1:
            args[3] = args[3].expand(args[2].shape[:3])
        assert kept is None or (torch.equal(kept.workspace, LEFT.workspace) and kept.cut == LEFT.cut)
        self.calls.append("backward" if kept is None else "backward, kept")
        return tuple(None if x.numel() == 0 else x for x in simple_gla_ops._bwd_cpu(*args))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """The tk backend serves every call, on the CPU."""
    simple_gla._path.plans.clear()
    module = Kernels()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(scalar_gate, "scalar_decay", module, raising=False)
    monkeypatch.setattr(tk_linear, "supports_simple_gla", lambda call, variant=None: SUPPORTED)
    monkeypatch.setattr(tk_linear, "load", lambda kernel, call, variant=None: SUPPORTED)
    return module


@pytest.fixture(autouse=True)
def no_plans() -> None:
    simple_gla._path.plans.clear()


# What is computed


@pytest.mark.parametrize(
    "backend", ["auto", "reference:recurrent", "reference:parallel", "reference:chunkwise"]
)
@pytest.mark.parametrize("heads", [(2, 2), (2, 6)])
def test_forms_agree_with_the_recurrence(backend: str, heads: tuple[int, int]) -> None:
    inputs = draw(heads=heads)
    expected = gradients(reference.simple_gla_recurrent, inputs, scale=0.3)
    assert_same(gradients(chunk_simple_gla, inputs, scale=0.3, backend=backend), expected)


def test_arguments_in_the_order_of_fla() -> None:
    x = draw()
    state = x["initial_state"].mT
    expected, last = reference.simple_gla_recurrent(**x, scale=0.5, output_final_state=True)
    o, final = chunk_simple_gla(x["q"], x["k"], x["v"], x["g"], None, 0.5, state, True, True)
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(final, last.mT)
    assert chunk_simple_gla(x["q"], x["k"], x["v"], x["g"])[1] is None


def test_signatures_are_those_of_fla() -> None:
    """Every argument of fla's function, in its order; ours behind, by keyword."""
    pytest.importorskip("fla")
    import inspect

    from fla.ops.lightning_attn import chunk_lightning_attn as lightning
    from fla.ops.retention import chunk_retention as retention
    from fla.ops.simple_gla import chunk_simple_gla as gla

    pairs = [(chunk_simple_gla, gla), (chunk_retention, retention), (chunk_lightning_attn, lightning)]
    for ours, theirs in pairs:
        own = inspect.signature(getattr(theirs, "tfla_tk_original", theirs)).parameters.values()
        expected = [(p.name, p.default) for p in own if p.kind is not p.VAR_KEYWORD]
        if ours is chunk_lightning_attn:
            # may be left out beside g_gamma
            expected = [(n, None if n in ("layer_idx", "num_layers") else d) for n, d in expected]
        found = inspect.signature(ours).parameters.values()
        assert [(p.name, p.default) for p in found if p.kind is not p.KEYWORD_ONLY] == expected


def test_retention() -> None:
    x = draw()
    del x["g"]
    decay = reference.retention_log_decay(4, dtype=torch.float32)
    expected = gradients(reference.simple_gla_recurrent, x, g_gamma=decay)
    assert_same(gradients(chunk_retention, x), expected)


@pytest.mark.parametrize("layer", [(0, 12), (3, 12), (11, 12)])
def test_lightning(layer: tuple[int, int]) -> None:
    x = draw()
    del x["g"]
    decay = reference.lightning_log_decay(4, *layer, dtype=torch.float32)
    expected = gradients(reference.simple_gla_recurrent, x, g_gamma=decay)
    assert_same(gradients(chunk_lightning_attn, x, layer_idx=layer[0], num_layers=layer[1]), expected)


def test_lightning_with_slopes() -> None:
    x = draw()
    del x["g"]
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    expected = gradients(reference.simple_gla_recurrent, x, g_gamma=-slopes)
    assert_same(gradients(chunk_lightning_attn, x, g_gamma=-slopes), expected)


def test_decays_are_kept_but_not_in_a_trace() -> None:
    x = draw(dtype=torch.float32)
    simple_gla._decays.clear()
    compiled = torch.compile(chunk_retention, backend="eager", fullgraph=True)
    compiled(x["q"], x["k"], x["v"], backend="reference")
    assert not simple_gla._decays
    with torch.inference_mode():
        chunk_retention(x["q"], x["k"], x["v"])
    (decay,) = simple_gla._decays.values()
    assert not decay.is_inference()
    chunk_retention(*(x[n].clone().requires_grad_() for n in "qkv"))[0].sum().backward()
    assert list(simple_gla._decays.values()) == [decay]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("with_cpu", [False, True])
def test_packed_sequences(dtype: torch.dtype, with_cpu: bool) -> None:
    offsets = torch.tensor([0, 0, 1, 23, 23, 40], dtype=dtype)
    x = draw(batch=1, rows=5)
    expected = gradients(reference.simple_gla_recurrent, x, cu_seqlens=offsets)
    options = {"cu_seqlens_cpu": offsets} if with_cpu else {}
    assert_same(gradients(chunk_simple_gla, x, cu_seqlens=offsets, **options), expected)
    o, last = chunk_simple_gla(**x, cu_seqlens=offsets, output_final_state=True)
    # each sequence alone; an empty one returns its initial state
    for j, (start, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        own = {name: t[:, start:end] for name, t in x.items() if name != "initial_state"}
        state = x["initial_state"][j : j + 1]
        alone, alone_last = chunk_simple_gla(**own, initial_state=state, output_final_state=True)
        torch.testing.assert_close(o[:, start:end], alone)
        torch.testing.assert_close(last[j : j + 1], alone_last)


@pytest.mark.parametrize("with_state", [False, True])
def test_no_token(with_state: bool) -> None:
    x = draw(seq=0)
    state = x.pop("initial_state")
    o, last = chunk_simple_gla(
        **x, initial_state=state if with_state else None, output_final_state=True, backend="auto"
    )
    assert o.shape == (2, 0, 4, 32)
    torch.testing.assert_close(last, state if with_state else torch.zeros_like(state))


@pytest.mark.parametrize("backend", ["auto", "reference:recurrent", "reference:parallel"])
@pytest.mark.parametrize("v_first", [False, True])
def test_without_a_token_the_final_state_is_a_copy(v_first: bool, backend: str) -> None:
    """A cache that is updated in place must not write into the state that was given."""
    x = draw(seq=0)
    given = x["initial_state"] = x["initial_state"].mT.contiguous() if v_first else x["initial_state"]
    before = given.clone()
    _, last = chunk_simple_gla(**x, output_final_state=True, state_v_first=v_first, backend=backend)
    last.add_(1)
    torch.testing.assert_close(given, before, rtol=0, atol=0)


@pytest.mark.parametrize("heads", [(0, 0), (2, 2)])
def test_no_head_and_no_batch(heads: tuple[int, int]) -> None:
    x = draw(batch=1 if heads[0] == 0 else 0, heads=heads)
    o, last = chunk_simple_gla(**x, output_final_state=True)
    assert o.shape == x["v"].shape and last.shape == x["initial_state"].shape
    x = [x[name] for name in ("q", "k", "v")]
    for o, final in (
        chunk_retention(*x, output_final_state=True),
        chunk_lightning_attn(*x, 1, 3, output_final_state=True),
    ):
        assert o.shape == x[2].shape and final.shape == last.shape


def test_positive_decay_is_computed_as_given() -> None:
    x = draw(seq=20)
    x["g"] = x["g"].neg()
    expected = gradients(reference.simple_gla_recurrent, x)
    assert_same(gradients(chunk_simple_gla, x), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes(dtype: torch.dtype) -> None:
    """o in q's dtype, the state in fp32, gradients in their inputs'."""
    x = draw()
    x = {name: t.to(dtype if name in "qkv" else torch.float32) for name, t in x.items()}
    inputs = leaves(x)
    o, last = chunk_simple_gla(**inputs, output_final_state=True)
    assert (o.dtype, last.dtype) == (dtype, torch.float32)
    (o.float().sum() + last.sum()).backward()
    assert all(t.grad is not None and t.grad.dtype == t.dtype for t in inputs.values())
    o, last = chunk_simple_gla(x["q"], x["k"], x["v"], x["g"].double(), output_final_state=True)
    assert (o.dtype, last.dtype) == (dtype, torch.float32)


def test_autocast() -> None:
    """q, k, v are cast, gates and states are not; they may differ."""
    x = {name: t.float() for name, t in draw().items()}
    cast = x | {name: x[name].bfloat16() for name in "qkv"}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, last = chunk_simple_gla(**x | {"k": cast["k"]}, output_final_state=True)
    expected, expected_last = chunk_simple_gla(**cast, output_final_state=True)
    assert o.dtype == torch.bfloat16 and last.dtype == torch.float32
    assert torch.equal(o, expected) and torch.equal(last, expected_last)


def test_options_of_numpy() -> None:
    numpy = pytest.importorskip("numpy")
    x = draw()
    options = {"scale": numpy.float64(0.5), "output_final_state": numpy.bool_(True)}
    options["chunk_size"] = numpy.int64(16)
    o, last = chunk_simple_gla(**x, **options)
    expected, expected_last = chunk_simple_gla(**x, scale=0.5, output_final_state=True, chunk_size=16)
    assert torch.equal(o, expected) and torch.equal(last, expected_last)


# What is refused


def bad(name: str, value: Callable[[Inputs], Any], message: str, error: type[Exception] = ValueError) -> Any:
    return pytest.param(name, value, error, message, id=f"{name}-{message[:30]}")


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
    bad("initial_state", lambda x: x["initial_state"].mT, r"initial_state: expected shape \[B, HV"),
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
    with pytest.raises(error, match=message):
        chunk_simple_gla(**x | {name: value(x)})
    with pytest.raises(error, match=message):
        which("chunk_simple_gla", **x | {name: value(x)})


def test_bad_packing() -> None:
    x = draw(batch=1)
    state = x["initial_state"]
    with pytest.raises(ValueError, match=r"initial_state: expected shape \[N, HV, K, V\] = \(2, 4, 16, 32\)"):
        chunk_simple_gla(**x, cu_seqlens=torch.tensor([0, 10, 40]))
    with pytest.raises(ValueError, match=r"initial_state: expected shape \[B, HV, V, K\] = \(1, 4, 32, 16\)"):
        chunk_simple_gla(**x, state_v_first=True)
    options = {"initial_state": state, "cu_seqlens": torch.tensor([0, 40])}
    with pytest.raises(ValueError, match=r"cu_seqlens_cpu: expected shape \[N \+ 1\] of cu_seqlens = \(2,\)"):
        chunk_simple_gla(**x | options, cu_seqlens_cpu=torch.tensor([0, 10, 40]))
    with pytest.raises(ValueError, match="cu_seqlens: expected offsets rising from 0 to 40"):
        chunk_simple_gla(**x | {"cu_seqlens": torch.tensor([0, 41])})


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
    for shape in ((2,), (4, 1)):
        with pytest.raises(ValueError, match="g_gamma: expected"):
            chunk_simple_gla(**x, g_gamma=torch.zeros(shape))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, TypeError, "layer_idx: expected an int, or g_gamma in its place, got None"),
        ({"layer_idx": 1}, TypeError, "num_layers: expected an int, or g_gamma in its place, got None"),
        ({"layer_idx": 5, "num_layers": 4}, ValueError, "layer_idx: expected 0 to num_layers = 4, got 5"),
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
        ({"dim_qk": 20}, "head dims are K = 20, V = 32"),
        ({"scale": 0.0}, "scale = 0.0, the kernels take positive ones"),
        ({"sequences": 2**30, "value_heads": 4}, "sequences x value heads = 4,294,967,296"),
    ],
)
def test_tk_refuses(changes: dict[str, Any], reason: str) -> None:
    verdict = support.supports_simple_gla(describe(**{"device": "cuda", **changes}))
    assert not verdict.ok and reason in verdict.reason and verdict.remedy


def test_tk_variants_are_schedules() -> None:
    with pytest.raises(ValueError, match=r"backend: expected 'tk' or 'tk:' and one of .* got 'tk:fast'"):
        chunk_simple_gla(**draw(), backend="tk:fast")
    with pytest.raises(UnsupportedError, match="chunk_simple_gla on backend 'tk:pingpong'"):
        chunk_simple_gla(**draw(), backend="tk:pingpong")


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
    with pytest.raises(ValueError, match="backend: expected 'triton' or 'triton:fla', got 'triton:xl'"):
        chunk_simple_gla(**draw(), backend="triton:xl")
    with pytest.raises(UnsupportedError, match="Triton kernels run on a GPU"):
        chunk_simple_gla(**draw(), backend="triton:fla")


def test_unknown_form() -> None:
    with pytest.raises(ValueError, match=r"'reference:chunkwise' or .* got 'reference:fast'"):
        chunk_simple_gla(**draw(), backend="reference:fast")


def test_which_says_why() -> None:
    choice = which(chunk_simple_gla, **draw())
    assert choice.backend == "reference" and list(choice.reasons) == ["tk", "triton", "reference"]


# The tk backend's path


def test_the_launches_take_what_the_ops_take() -> None:
    """By name and in this order; behind it what a plain call keeps for its backward."""
    import inspect

    from tfla_tk.backends.tk.scalar_gate import scalar_decay

    for op, launch, more in (
        (torch.ops.tfla_tk.simple_gla_fwd, scalar_decay.simple_gla_fwd, "keep_states"),
        (torch.ops.tfla_tk.simple_gla_bwd, scalar_decay.simple_gla_bwd, "kept"),
    ):
        names = [argument.name.replace("dht", "d_final") for argument in op.default._schema.arguments]
        assert list(inspect.signature(launch).parameters) == [*names, more]


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_kernels_get_what_they_read(kernels: Kernels, v_first: bool, packed: bool) -> None:
    x = draw(batch=1, rows=3 if packed else 1)
    options: dict[str, Any] = {"cu_seqlens": torch.tensor([0, 5, 5, 40])} if packed else {}
    options["state_v_first"] = v_first
    if v_first:
        x["initial_state"] = x["initial_state"].mT.contiguous()
    expected = gradients(reference.simple_gla_recurrent, x, **options)
    found = gradients(chunk_simple_gla, x, **options, backend="tk")
    assert kernels.calls == ["forward, kept", "backward, kept"]
    assert_same(found, expected)
    assert kernels.tensors[4].shape == (3 if packed else 1, 4, 16, 32)


def test_a_decay_per_head_comes_with_strides_of_zero(kernels: Kernels) -> None:
    x = draw(dtype=torch.float32)
    chunk_retention(x["q"], x["k"], x["v"])
    g = kernels.tensors[3]
    assert g.shape == (2, 40, 4) and g.stride()[:2] == (0, 0) and g.dtype == torch.float32
    chunk_simple_gla(x["q"], x["k"], x["v"])
    assert kernels.tensors[3] is None


@pytest.mark.parametrize("with_grad", [False, True])
def test_plain_calls_go_to_the_kernels_and_others_to_the_op(
    kernels: Kernels, with_grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = leaves(draw()) if with_grad else draw()
    chunk_simple_gla(**x)
    assert kernels.calls == (["forward, kept"] if with_grad else ["forward"])
    with FlopCounterMode(display=False) as counter:
        chunk_simple_gla(**x)
    assert len(kernels.calls) == 1  # the op's CPU code
    per_token = (64 + 64) * (16 + 32) + 4 * 16 * 32
    assert counter.get_total_flops() == 2 * 40 * 4 * per_token


def test_plans_are_kept_by_what_matters(kernels: Kernels) -> None:
    x = draw()
    for _ in range(3):
        chunk_simple_gla(**x)
    assert len(simple_gla._path.plans) == 1
    chunk_simple_gla(**x, scale=1.0)
    chunk_simple_gla(**x | {"v": x["v"].transpose(0, 1).contiguous().transpose(0, 1)})
    chunk_simple_gla(**leaves(x))
    assert len(simple_gla._path.plans) == 4


Change = Callable[[dict[str, Any]], dict[str, Any]]
CHANGES: dict[str, Change] = {
    "other memory": lambda x: {n: t.clone() for n, t in x.items()},
    "scale": lambda x: x | {"scale": 0.5},
    "g_gamma": lambda x: without(x, "g") | {"g_gamma": torch.tensor([-0.5, -0.1, 0.0, -2.0])},
    "g_gamma in fp64": lambda x: (
        without(x, "g") | {"g_gamma": torch.tensor([-0.5, -0.1, 0.0, -2.0], dtype=torch.float64)}
    ),
    "no gate": lambda x: without(x, "g"),
    "gate in bf16": lambda x: x | {"g": x["g"].bfloat16()},
    "gate in fp64": lambda x: x | {"g": x["g"].double()},
    "no state": lambda x: without(x, "initial_state"),
    "state in bf16": lambda x: x | {"initial_state": x["initial_state"].bfloat16()},
    "state with V first": lambda x: (
        x | {"initial_state": x["initial_state"].mT.contiguous(), "state_v_first": True}
    ),
    "heads": lambda x: x | {n: x[n][:, :, :1] for n in "qk"},
    "strides": lambda x: x | {n: x[n].transpose(1, 2).contiguous().transpose(1, 2) for n in "qkv"},
    "strides of g": lambda x: x | {"g": x["g"].mT.contiguous().mT},
    "length": lambda x: x | {n: x[n][:, 1:] for n in ("q", "k", "v", "g")},
    "packed": lambda x: (
        {n: t.flatten(0, 1)[None] for n, t in x.items() if n != "initial_state"}
        | {"initial_state": x["initial_state"], "cu_seqlens": torch.tensor([0, 30, 80])}
    ),
}


def without(x: dict[str, Any], name: str) -> dict[str, Any]:
    return {n: t for n, t in x.items() if n != name}


def train(x: dict[str, Any], function: Callable[..., Any], *, last: bool) -> list[Tensor]:
    """Results, and gradients of all that has them."""
    inputs = {
        n: t.detach().requires_grad_() for n, t in x.items() if n in ("q", "k", "v", "g", "initial_state")
    }
    found = function(**x | inputs, output_final_state=last)
    outputs = [o for o in found if o is not None]
    loss = sum(o.float().square().sum() for o in outputs)
    return [*outputs, *torch.autograd.grad(loss, list(inputs.values()))]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_nothing_of_another_call_is_taken(name: str, last: bool, kernels: Kernels) -> None:
    """With and without gradients, between two calls that are alike; the kernels serve every one of them."""
    x = draw(dtype=torch.float32)
    other = CHANGES[name](x)
    count = 0
    for call in (x, other, x, other):
        found = chunk_simple_gla(**call, output_final_state=last, backend="tk")
        expected = chunk_simple_gla(**call, output_final_state=last, backend="reference")
        torch.testing.assert_close(found, expected)
        count += 1
        assert (len(kernels.calls), kernels.calls[-1]) == (count, "forward")
        found = train(call, partial(chunk_simple_gla, backend="tk"), last=last)
        expected = train(call, partial(chunk_simple_gla, backend="reference"), last=last)
        for a, b in zip(found, expected, strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            assert (a - b).float().norm() <= (1e-4 if a.dtype == torch.float32 else 1e-2) * b.float().norm()
        count += 2
        assert kernels.calls[-2:] == ["forward, kept", "backward, kept"] and len(kernels.calls) == count


def test_requires_grad_flips(kernels: Kernels) -> None:
    """The same tensors: every combination has its own plan, and only what asks gets a gradient."""
    x = draw(dtype=torch.float32)
    for flags in 2 * [(), ("q",), ("g",), ("q", "g"), ("initial_state",)]:
        for n, t in x.items():
            t.requires_grad_(n in flags)
            t.grad = None
        o, _ = chunk_simple_gla(**x, backend="tk")
        assert o.requires_grad == bool(flags)
        if flags:
            o.square().sum().backward()
        assert {n for n, t in x.items() if t.grad is not None} == set(flags)
        with torch.no_grad():
            assert not chunk_simple_gla(**x, backend="tk")[0].requires_grad
    assert len(simple_gla._path.plans) == 5


@pytest.mark.parametrize("gate", ["token", "head", "none"])
@pytest.mark.parametrize("watched", ["backward", "saved"])
def test_a_backward_that_is_not_plain(watched: str, gate: str, kernels: Kernels) -> None:
    """The op, which wants a decay per head of every token; hooks see what the op would save."""
    x = CHANGES[{"token": "other memory", "head": "g_gamma", "none": "no gate"}[gate]](draw())
    inputs = {n: t.clone().requires_grad_(n != "g_gamma") for n, t in x.items()}
    wanted = [t for t in inputs.values() if t.requires_grad]
    o, _ = chunk_simple_gla(**inputs, backend="tk")
    expected = torch.autograd.grad(o.square().sum(), wanted)
    kernels.calls.clear()
    saved: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
    with hooks if watched == "saved" else nullcontext():
        o, _ = chunk_simple_gla(**inputs, backend="tk")
    loss = o.square().sum()
    with torch.profiler.profile() if watched == "backward" else nullcontext():
        found = torch.autograd.grad(loss, wanted)
    if watched == "backward":
        assert kernels.calls == ["forward, kept"]
    else:
        assert kernels.calls == ["forward", "backward"]
        shapes = [t.shape for t in saved]
        assert len(shapes) == (4 if gate == "none" else 5) and shapes.count((2, 40, 4)) == (gate != "none")
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_gates_that_need_no_gradient_get_none(kernels: Kernels) -> None:
    x = draw()
    needs = []
    backward = kernels.simple_gla_bwd
    kernels.simple_gla_bwd = lambda *a: (needs.append(a[10]), backward(*a))[1]  # type: ignore[method-assign]
    q = x["q"].clone().requires_grad_()
    chunk_simple_gla(q, x["k"], x["v"], x["g"])[0].sum().backward()
    g = x["g"].clone().requires_grad_()
    chunk_simple_gla(q, x["k"], x["v"], g)[0].sum().backward()
    chunk_retention(q, x["k"], x["v"])[0].sum().backward()
    assert needs == [False, True, False] and g.grad is not None


def test_an_initial_state_that_is_overwritten_keeps_the_gradient(kernels: Kernels) -> None:
    """As a cache of states is."""
    x = draw()
    cache = x.pop("initial_state")
    q = x.pop("q").requires_grad_()
    (expected,) = torch.autograd.grad(chunk_simple_gla(q, **x, initial_state=cache.clone())[0].sum(), q)
    o, _ = chunk_simple_gla(q, **x, initial_state=cache)
    cache.zero_()
    assert torch.equal(torch.autograd.grad(o.sum(), q)[0], expected)


def test_checkpointing_and_hooks(kernels: Kernels) -> None:
    from torch.utils.checkpoint import checkpoint

    x = leaves(draw())
    expected = torch.autograd.grad(chunk_simple_gla(**x)[0].square().sum(), list(x.values()))
    o, _ = checkpoint(lambda: chunk_simple_gla(**x), use_reentrant=False)
    found = torch.autograd.grad(o.square().sum(), list(x.values()))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_double_backward_and_forward_mode(kernels: Kernels) -> None:
    x = leaves(draw(seq=10))
    o, _ = chunk_simple_gla(**x)
    (dq,) = torch.autograd.grad(o.square().sum(), x["q"], create_graph=True)
    with pytest.raises(RuntimeError, match=r"double backward of simple GLA .* backend='reference'"):
        dq.sum().backward()
    fwd = torch.ops.tfla_tk.simple_gla_fwd
    with pytest.raises(RuntimeError, match=r"simple_gla_fwd has no forward-mode derivative .*reference"):
        torch.func.jvp(
            lambda q: fwd(q, x["k"], x["v"], x["g"], None, None, 0.25, False, "auto")[0],
            (x["q"].detach(),),
            (x["q"].detach(),),
        )
    # under "auto" the reference serves both
    tangent = torch.func.jvp(
        lambda q: chunk_simple_gla(q, x["k"], x["v"], x["g"])[0], (x["q"].detach(),), (x["q"].detach(),)
    )[1]
    torch.testing.assert_close(tangent, chunk_simple_gla(**x | {"initial_state": None})[0])
    o, _ = chunk_simple_gla(**x, backend="reference")
    (dq,) = torch.autograd.grad(o.square().sum(), x["q"], create_graph=True)
    dq.sum().backward()


# The registered ops


def op_arguments(packed: bool, gate: str, with_state: bool, last: bool) -> tuple[Any, ...]:
    x = draw(batch=1 if packed else 2, seq=20, rows=3 if packed else None, dtype=torch.float32)
    offsets = torch.tensor([0, 5, 5, 20]) if packed else None
    g = {"token": x["g"], "none": None}.get(gate)
    x = leaves({name: x[name] for name in ("q", "k", "v", "initial_state")}) | {"g": g}
    state = x["initial_state"] if with_state else None
    g = None if g is None else g.clone().requires_grad_()
    if gate == "head":
        g = reference.retention_log_decay(4).expand(x["v"].shape[:3])
    return x["q"], x["k"], x["v"], g, state, offsets, 0.25, last, "auto"


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("gate", "with_state", "last"),
    [("token", True, True), ("token", False, False), ("none", True, False), ("head", False, True)],
)
def test_opcheck(packed: bool, gate: str, with_state: bool, last: bool) -> None:
    args = op_arguments(packed, gate, with_state, last)
    torch.library.opcheck(torch.ops.tfla_tk.simple_gla_fwd, args)
    torch.library.opcheck(torch.ops.tfla_tk.packed_simple_gla, (*args[:-1], "chunkwise", 16))
    detached = [x.detach() if isinstance(x, Tensor) else x for x in args[:6]]
    o, state = torch.ops.tfla_tk.simple_gla_fwd(*detached, 0.25, last, "auto")
    dht = torch.randn_like(state) if last else None
    rest = (torch.randn_like(o), dht, 0.25, gate == "token")
    torch.library.opcheck(
        torch.ops.tfla_tk.simple_gla_bwd, (*detached, state if last else None, *rest, "auto")
    )
    torch.library.opcheck(torch.ops.tfla_tk.packed_simple_gla_bwd, (*detached, *rest, 16))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("backend", ["reference", "tk"])
def test_compile(kernels: Kernels, packed: bool, backend: str) -> None:
    x = draw(batch=1, rows=3 if packed else 1)
    options: dict[str, Any] = {"cu_seqlens": torch.tensor([0, 5, 5, 40])} if packed else {}
    expected = gradients(reference.simple_gla_recurrent, x, **options)
    compiled = torch.compile(chunk_simple_gla, backend="aot_eager", fullgraph=True)
    assert_same(gradients(compiled, x, **options, backend=backend), expected)
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["reference", "tk"])
def test_compile_with_sizes_as_symbols(kernels: Kernels, backend: str) -> None:
    """Tokens, heads, groups and head dims: one graph serves another size."""
    compiled = torch.compile(chunk_simple_gla, backend="aot_eager", fullgraph=True, dynamic=True)
    for seq, heads, dims in ((40, (2, 4), (16, 32)), (56, (3, 9), (24, 8))):
        x = draw(seq=seq, heads=heads, dims=dims)
        expected = gradients(reference.simple_gla_recurrent, x)
        assert_same(gradients(compiled, x, backend=backend), expected)
    torch._dynamo.reset()


def test_export() -> None:
    """Packed sequences: the exported program reads the offsets when it runs."""

    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, cu_seqlens: Tensor) -> Tensor:
            return chunk_simple_gla(q, k, v, g, cu_seqlens=cu_seqlens, backend="reference")[0]

    x = [t for name, t in draw(batch=1).items() if name != "initial_state"]
    program = torch.export.export(Model(), (*x, torch.tensor([0, 7, 40]))).module()
    offsets = torch.tensor([0, 20, 40])
    torch.testing.assert_close(program(*x, offsets), Model()(*x, offsets))


def test_fake_and_meta_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = draw(batch=1, rows=2)
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(t) for name, t in x.items()}
        o, last = chunk_simple_gla(
            **fake, cu_seqlens=mode.from_tensor(torch.tensor([0, 5, 40])), output_final_state=True
        )
    assert o.shape == x["v"].shape and last.shape == x["initial_state"].shape
    meta = {name: t.to("meta") for name, t in x.items()}
    o, last = chunk_simple_gla(**meta, cu_seqlens=torch.zeros(3, device="meta", dtype=torch.int32))
    assert o.shape == x["v"].shape and o.device.type == "meta" and last is None


@pytest.mark.parametrize("packed", [False, True])
def test_vmap(kernels: Kernels, packed: bool) -> None:
    """One call over a batch of calls: results and gradients of each."""
    x = draw(batch=1, seq=20, rows=2 if packed else 1, dtype=torch.float64)
    offsets = torch.tensor([0, 5, 20]) if packed else None
    q = torch.stack([x["q"], 2 * x["q"], -x["q"]])
    g = torch.stack([x["g"], 2 * x["g"], 3 * x["g"]], dim=1)

    def run(q: Tensor, g: Tensor, state: Tensor) -> Tensor:
        o, last = chunk_simple_gla(
            q, x["k"], x["v"], g, initial_state=state, cu_seqlens=offsets, output_final_state=True
        )
        return o.square().sum() + last.sum()

    found = torch.func.vmap(torch.func.grad(run, argnums=(0, 1, 2)), (0, 1, None))(q, g, x["initial_state"])
    for j in range(3):
        alone = leaves({"q": q[j], "g": g[:, j], "state": x["initial_state"]})
        options: dict[str, Any] = {"cu_seqlens": offsets, "output_final_state": True}
        o, last = reference.simple_gla_recurrent(
            alone["q"], x["k"], x["v"], alone["g"], initial_state=alone["state"], **options
        )
        expected = torch.autograd.grad(o.square().sum() + last.sum(), list(alone.values()))
        for actual, want in zip(found, expected, strict=True):
            torch.testing.assert_close(actual[j], want)


def test_flops_of_the_backward(kernels: Kernels) -> None:
    x = leaves(draw())
    with FlopCounterMode(display=False) as counter:
        chunk_simple_gla(**x)[0].sum().backward()
    intra, state = (64 + 64) * (16 + 32), 16 * 32
    assert counter.get_total_flops() == 2 * 40 * 4 * (4 * intra + 14 * state)


def test_doctor_tells(kernels: Kernels) -> None:
    from tfla_tk import doctor

    for name in ("chunk_simple_gla", "chunk_retention", "chunk_lightning_attn"):
        for use in doctor._choices(name).values():
            assert use["backend"] == "tk", use
