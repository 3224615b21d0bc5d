"""Every operator in [B, T, H, D]: results and gradients, which calls its kernels get, its registered ops."""

from __future__ import annotations

import importlib
import inspect
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend, EagerAndRecordGraphs
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import tfla_tk
from tfla_tk import UnsupportedError, doctor, which
from tfla_tk.backends.triton import fla

from .families import FAMILIES, GATED, GLA, INTRA, PLAIN, RAW, RAW_KDA, SIMPLE_GLA, STATE, UNGATED, Family
from .linear import Inputs, assert_same, gradients, heads_first, leaves

OFFSETS = torch.tensor([0, 5, 5, 40])


@pytest.fixture(params=FAMILIES, ids=str)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


@pytest.fixture
def kernels(family: Family, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tk backend serves every call, on the CPU."""
    return family.serve(monkeypatch)


def of_families(*families: Family) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("family", families, indirect=True, ids=str)


# What is computed


@pytest.mark.parametrize(
    "backend", ["auto", "reference:recurrent", "reference:parallel", "reference:chunkwise"]
)
@pytest.mark.parametrize("heads", [(2, 2), (2, 6)])
@of_families(*FAMILIES, UNGATED)
def test_forms_agree_with_the_recurrence(family: Family, backend: str, heads: tuple[int, int]) -> None:
    """Results are contiguous, as fla's are, whatever the inputs' strides."""
    x = family.draw(heads=heads)
    expected = gradients(family.recurrent, x, scale=0.3)
    for inputs in (x, heads_first(x)):
        assert_same(gradients(family.function, inputs, scale=0.3, backend=backend), expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("with_cpu", [False, True])
@of_families(*PLAIN)
def test_packed_sequences(family: Family, dtype: torch.dtype, with_cpu: bool) -> None:
    """They give what the recurrence gives, and what each of them gives alone; an empty one returns its own
    initial state."""
    x, bounds = family.draw(batch=1, rows=5), [0, 0, 1, 23, 23, 40]
    offsets = torch.tensor(bounds, dtype=dtype)
    expected = gradients(family.recurrent, x, cu_seqlens=offsets)
    options = {"cu_seqlens_cpu": offsets} if with_cpu else {}
    assert_same(gradients(family.function, heads_first(x), cu_seqlens=offsets, **options), expected)
    o, last = family.function(**x, cu_seqlens=offsets, output_final_state=True)
    for j, (start, end) in enumerate(itertools.pairwise(bounds)):
        own = {name: t[:, start:end] for name, t in x.items() if name != "initial_state"}
        state = x["initial_state"][j : j + 1]
        alone, alone_last = family.function(**own, initial_state=state, output_final_state=True)
        torch.testing.assert_close(o[:, start:end], alone)
        torch.testing.assert_close(last[j : j + 1], alone_last)


@pytest.mark.parametrize("backend", ["auto", "reference:recurrent", "reference:parallel"])
@pytest.mark.parametrize("v_first", [False, True])
def test_without_a_token_the_final_state_is_a_copy(family: Family, v_first: bool, backend: str) -> None:
    """It is no view of the initial one, as caches are updated in place; or zeros."""
    x, options = family.draw(seq=0), {"backend": backend, "output_final_state": True}
    for given in (x["initial_state"], heads_first(x)["initial_state"]):
        given = given.mT if v_first else given
        before = given.clone()
        o, last = family.function(**x | {"initial_state": given}, **options, state_v_first=v_first)
        assert o.shape == x["v"].shape and torch.equal(last, given) and last.is_contiguous()
        last.add_(1)
        assert torch.equal(given, before)
    _, last = family.function(**x | {"initial_state": None}, **options)
    assert last.shape == x["initial_state"].shape and not last.any()


@pytest.mark.parametrize("sizes", [{"batch": 1, "heads": (0, 0)}, {"batch": 0}], ids=["heads", "batch"])
def test_no_head_and_no_batch(family: Family, sizes: dict[str, Any]) -> None:
    if family is GLA and "heads" in sizes:
        sizes = {"batch": 0, "seq": 0}
    x = family.draw(**sizes)
    o, last = family.function(**x, output_final_state=True)
    assert o.shape == x["v"].shape and last.shape == x["initial_state"].shape


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes(family: Family, dtype: torch.dtype) -> None:
    """o has q's dtype, the state fp32, and every gradient that of its input."""
    x = leaves({name: t.to(dtype if name in "qkv" else torch.float32) for name, t in family.draw().items()})
    o, last = family.function(**x, output_final_state=True)
    assert (o.dtype, last.dtype) == (dtype, torch.float32)
    (o.float().sum() + last.sum()).backward()
    assert all(t.grad is not None and t.grad.dtype == t.dtype for t in x.values())


def test_autocast(family: Family) -> None:
    """q, k, v are cast, which may differ in dtype; gates and states are not."""
    x = {name: t.float() for name, t in family.draw().items()}
    cast = x | {name: x[name].bfloat16() for name in "qkv"}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, last = family.function(**x | {"k": cast["k"]}, output_final_state=True)
    expected, expected_last = family.function(**cast, output_final_state=True)
    assert o.dtype == torch.bfloat16 and last.dtype == torch.float32
    assert torch.equal(o, expected) and torch.equal(last, expected_last)


@of_families(*PLAIN)
def test_why_tk_does_not_serve(family: Family) -> None:
    x = family.draw()
    choice = which(family.function, **x)
    assert choice.backend == "reference" and list(choice.reasons) == ["tk", "triton", "reference"]
    assert not choice.reasons["tk"].ok and choice.reasons["tk"].remedy
    with pytest.raises(UnsupportedError, match=f"{family.function.__name__} on backend 'tk': "):
        family.function(**x, backend="tk")


@of_families(*PLAIN)
def test_unknown_variants(family: Family) -> None:
    for backend, expected in (
        ("reference:fast", r"'reference:chunkwise' or .* got 'reference:fast'"),
        ("triton:xl", "backend: expected 'triton' or 'triton:fla', got 'triton:xl'"),
    ):
        with pytest.raises(ValueError, match=expected):
            family.function(**family.draw(), backend=backend)


def test_signatures_are_those_of_fla() -> None:
    """Every argument of fla's function, in its order; ours behind, by keyword."""
    pytest.importorskip("fla")
    for name, module in fla.FLA_OPS.items():
        if name.startswith("chunk_"):
            function = getattr(importlib.import_module(module), name)
            found = inspect.signature(getattr(function, "tfla_tk_original", function)).parameters.values()
            expected = [(p.name, p.default) for p in found if p.kind is not p.VAR_KEYWORD]
            if name == "chunk_lightning_attn":
                # may be left out beside g_gamma
                expected = [(n, None if n in ("layer_idx", "num_layers") else d) for n, d in expected]
            ours = inspect.signature(getattr(tfla_tk, name)).parameters.values()
            assert [(p.name, p.default) for p in ours if p.kind is not p.KEYWORD_ONLY] == expected, name


# The path of the kernels


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_kernels_get_what_they_read(family: Family, kernels: Any, v_first: bool, packed: bool) -> None:
    x = family.draw(batch=1, rows=3 if packed else 1)
    options: dict[str, Any] = {"cu_seqlens": OFFSETS} if packed else {}
    shape = x["initial_state"].shape
    if v_first:
        x["initial_state"] = x["initial_state"].mT.contiguous()
    options["state_v_first"] = v_first
    expected = gradients(family.function, x, **options, backend="reference:recurrent")
    for inputs in (x, heads_first(x)):
        kernels.calls.clear()
        assert_same(gradients(family.function, inputs, **options, backend="tk"), expected)
        assert kernels.calls == ["forward, kept", "backward, kept"]
        assert kernels.read()[3].shape == shape


@pytest.mark.parametrize(
    ("dims", "compiled"), [((20, 25), True), ((20, 25), False), ((16, 9), False), ((60, 32), False)]
)
def test_other_head_dims_are_padded(
    family: Family, kernels: Any, dims: tuple[int, int], compiled: bool
) -> None:
    """Kernels, or the op in a graph, get multiples of 16, and nobody who calls them notices."""
    x, whole = heads_first(family.draw(dims=dims)), [dim + -dim % 16 for dim in dims]
    graphs = EagerAndRecordGraphs()
    called = torch.compile(family.function, backend=graphs, fullgraph=True) if compiled else family.function
    for v_first in (False, True):
        if v_first:
            x["initial_state"] = x["initial_state"].mT
        expected = gradients(family.function, x, state_v_first=v_first, backend="reference")
        found = gradients(called, x, state_v_first=v_first, backend="tk")
        assert_same(found, expected)
        q, k, v, state = read_by_op(graphs.graphs[-1]) if compiled else kernels.read()
        assert q.shape == k.shape
        assert [q.shape[-1], v.shape[-1]] == list(state.shape[-2:]) == whole
        o, last = called(**x, state_v_first=v_first, output_final_state=True, backend="tk")
        assert o.untyped_storage().nbytes() == o.nbytes and last.untyped_storage().nbytes() == last.nbytes
        o, last = called(**x, state_v_first=v_first, backend="tk")
        assert last is None and torch.equal(o, found["o"])
    torch._dynamo.reset()


def read_by_op(graph: torch.fx.GraphModule) -> tuple[Tensor, ...]:
    """q, k, v and the initial state, without data, of a registered op in a graph."""
    (node,) = (n for n in graph.graph.nodes if getattr(n.target, "namespace", "") == "tfla_tk")
    names = [argument.name for argument in node.target._schema.arguments]
    given = dict(zip(names, node.args, strict=False))
    q, k, v, state = (given[name].meta["example_value"] for name in ("q", "k", "v", "initial_state"))
    return q, k, v, state


@pytest.mark.parametrize("with_grad", [False, True])
@of_families(*PLAIN)
def test_plain_calls_go_to_the_kernels_and_others_to_the_op(
    family: Family, kernels: Any, with_grad: bool
) -> None:
    x = leaves(family.draw()) if with_grad else family.draw()
    family.function(**x)
    assert kernels.calls == (["forward, kept"] if with_grad else ["forward"])
    with FlopCounterMode(display=False) as counter:
        o, _ = family.function(**x)
        if with_grad:
            o.sum().backward()
    assert len(kernels.calls) == 1  # the op's CPU code
    of_state = family.state_flops[with_grad] * STATE
    per_token = 4 * INTRA + of_state if with_grad else INTRA + of_state
    assert counter.get_total_flops() == 2 * 40 * x["v"].shape[2] * per_token


@of_families(*PLAIN)
def test_a_profile_shows_the_kernels_that_run_without_it(family: Family, kernels: Any) -> None:
    """Under the names of the ops."""
    x = family.draw()
    expected, plain = gradients(family.function, x), kernels.calls.copy()
    kernels.calls.clear()
    with torch.profiler.profile() as profile:
        found = gradients(family.function, x)
    assert kernels.calls == plain == ["forward, kept", "backward, kept"]
    names = {event.key for event in profile.key_averages() if "tfla_tk" in event.key}
    assert names == {f"tfla_tk::{family.op}_fwd", f"tfla_tk::{family.op}_bwd"}
    assert all(torch.equal(found[name], x) for name, x in expected.items())


@of_families(*PLAIN)
def test_gates_that_need_no_gradient_get_none(family: Family, kernels: Any) -> None:
    x = family.draw()
    x["q"].requires_grad_()
    family.function(**x)[0].sum().backward()
    g = x["g"].clone().requires_grad_()
    family.function(**x | {"g": g})[0].sum().backward()
    assert kernels.needs_gates == [False, True] and g.grad is not None


@of_families(*PLAIN)
def test_a_call_is_batch_invariant_as_it_began(family: Family, kernels: Any) -> None:
    """Whatever is set when its backward runs; a plan for each."""
    for value in (True, False, True):
        with tfla_tk.batch_invariant(value):
            o, _ = family.function(**leaves(family.draw()))
        with tfla_tk.batch_invariant(not value):
            o.sum().backward()
    tfla_tk.batch_invariant(False)
    assert kernels.batch_invariant == [True, True, False, False, True, True]
    assert len(family.path.plans) == 2


@of_families(GLA, GATED, RAW, RAW_KDA)
def test_a_final_state_that_is_overwritten(family: Family, kernels: Any) -> None:
    """In place, as a cache is: it leaves the gradients as they are."""
    x = leaves(family.draw())
    o, _ = family.function(**x, output_final_state=True)
    expected = torch.autograd.grad(o.sum(), list(x.values()))
    o, last = family.function(**x, output_final_state=True)
    with torch.no_grad():
        last.zero_()
    assert all(map(torch.equal, torch.autograd.grad(o.sum(), list(x.values())), expected))


@of_families(*PLAIN)
def test_an_initial_state_that_is_overwritten_keeps_the_gradient(family: Family, kernels: Any) -> None:
    """As a cache of states is."""
    x = family.draw()
    cache = x.pop("initial_state")
    q = x["q"].requires_grad_()
    (expected,) = torch.autograd.grad(family.function(**x, initial_state=cache.clone())[0].sum(), q)
    o, _ = family.function(**x, initial_state=cache)
    cache.zero_()
    assert torch.equal(torch.autograd.grad(o.sum(), q)[0], expected)


def test_checkpointing_and_hooks(family: Family, kernels: Any) -> None:
    x = leaves(family.draw())
    expected = torch.autograd.grad(family.function(**x)[0].square().sum(), list(x.values()))
    o, _ = checkpoint(lambda: family.function(**x), use_reentrant=False)
    found = torch.autograd.grad(o.square().sum(), list(x.values()))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    if family.op == "delta_rule":  # which makes again what is kept
        again = ["forward, kept"] * 2
        assert kernels.calls == ["forward, kept", "backward, kept", *again, "backward, kept"]


@of_families(*PLAIN)
def test_double_backward_and_forward_mode(family: Family, kernels: Any) -> None:
    x = leaves(family.draw(seq=10))
    o, _ = family.function(**x)
    (dq,) = torch.autograd.grad(o.square().sum(), x["q"], create_graph=True)
    with pytest.raises(RuntimeError, match=f"double backward of {family.told} .* backend='reference'"):
        dq.sum().backward()
    with pytest.raises(RuntimeError, match=f"{family.op}_fwd has no forward-mode derivative .*reference"):
        torch.func.jvp(lambda q: op(family, {**x, "q": q}), (x["q"].detach(),), (x["q"].detach(),))

    # under "auto" the reference serves both
    def run(q: Tensor) -> Tensor:
        return family.function(**{**x, "q": q, "initial_state": None})[0]

    q = x["q"].detach()
    torch.testing.assert_close(torch.func.jvp(run, (q,), (q,))[1], run(q))
    o, _ = family.function(**x, backend="reference")
    (dq,) = torch.autograd.grad(o.square().sum(), x["q"], create_graph=True)
    dq.sum().backward()


def op(family: Family, x: Inputs) -> Tensor:
    """o of the registered op, of plain inputs."""
    registered = getattr(torch.ops.tfla_tk, f"{family.op}_fwd")
    given = {"scale": 0.25} | {name: t.detach() if name != "q" else t for name, t in x.items()}
    found: Tensor = registered(*arguments_of(registered, given))[0]
    return found


def arguments_of(registered: Any, given: dict[str, Any]) -> list[Any]:
    """Of a registered op, in the order of its schema; None or False where nothing is given."""
    return [
        given.get(argument.name, False if str(argument.type) == "bool" else None)
        for argument in registered.default._schema.arguments
    ]


def test_doctor_tells(family: Family, kernels: Any) -> None:
    for name in family.public:
        for use in doctor._choices(name).values():
            assert use["backend"] == "tk", use


# The registered ops


def test_a_state_of_another_dtype(family: Family) -> None:
    """An op refuses it: kernels would read beyond its end. Public functions convert it."""
    x = family.draw(dtype=torch.bfloat16)
    x["initial_state"] = x["initial_state"].bfloat16()
    with pytest.raises(TypeError, match=r"initial_state: expected dtype torch.float32, got torch.bfloat16"):
        op(family, x)
    assert family.function(**x)[0].isfinite().all()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("last", [False, True])
@of_families(*FAMILIES, UNGATED)
def test_opcheck(family: Family, packed: bool, with_state: bool, last: bool) -> None:
    x = leaves(family.draw(batch=1 if packed else 2, seq=20, rows=3 if packed else None, dtype=torch.float32))
    given = x | {"cu_seqlens": torch.tensor([0, 5, 5, 20]) if packed else None, "output_final_state": last}
    given |= {"scale": 0.25, "form": "chunkwise", "chunk_size": 16, "needs_gates": family is not UNGATED}
    given |= dict.fromkeys(("qk_l2norm", "beta_sigmoid"), family in (RAW, RAW_KDA))
    if not with_state:
        del given["initial_state"]

    def check(name: str) -> Any:
        registered = getattr(torch.ops.tfla_tk, name)
        arguments = arguments_of(registered, given)
        torch.library.opcheck(registered, arguments)
        return registered(*arguments)

    o, state = check(f"{family.op}_fwd")
    check(f"packed_{family.op}")
    given = {name: t.detach() if isinstance(t, Tensor) else t for name, t in given.items()}
    given |= {"do": torch.randn_like(o), "dht": torch.randn_like(state) if last else None}
    given["final_state"] = state.detach() if last else None
    check(f"{family.op}_bwd")
    check(f"packed_{family.op}_bwd")


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("backend", ["reference", "tk"])
@of_families(SIMPLE_GLA, GLA, RAW, RAW_KDA)
def test_compile(family: Family, kernels: Any, packed: bool, backend: str) -> None:
    """Results are contiguous within the graph, too, where callers reshape them."""
    x = heads_first(family.draw(batch=1, rows=3 if packed else 1))
    options: dict[str, Any] = {"cu_seqlens": OFFSETS} if packed else {}
    if packed:
        x["initial_state"], options["state_v_first"] = x["initial_state"].mT, True

    def call(**x: Any) -> Any:
        o, last = family.function(**x, backend=backend)
        return o.view(*o.shape[:2], -1).view(o.shape), last.view(last.shape[0], -1).view(last.shape)

    found = gradients(torch.compile(call, backend="aot_eager", fullgraph=True), x, **options)
    assert_same(found, gradients(family.function, x, **options, backend="reference:recurrent"))
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "backend"),
    [*((family, "tk") for family in PLAIN), (GLA, "reference")],
    indirect=["family"],
    ids=str,
)
def test_compile_with_sizes_as_symbols(family: Family, kernels: Any, backend: str) -> None:
    """Of tokens and head dims: on the kernels one graph serves others, of multiples of 16. The reference has
    a graph of its own for every number of tokens."""
    counted = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(family.function, backend=counted, fullgraph=True, dynamic=True)
    graphs = set()
    for seq, dims in ((40, (16, 32)), (56, (32, 48)))[: 1 if backend == "reference" else 2]:
        x = family.draw(seq=seq, heads=(2, 4), dims=dims)
        expected = gradients(family.recurrent, x, scale=0.3)
        assert_same(gradients(compiled, x, scale=0.3, backend=backend), expected)
        graphs.add(counted.frame_count)
    assert len(graphs) == 1
    torch._dynamo.reset()


@of_families(SIMPLE_GLA, GLA, UNGATED)
def test_export(family: Family) -> None:
    """Packed sequences: the exported program reads the offsets when it runs."""
    x = family.draw(batch=1)
    del x["initial_state"]

    class Model(torch.nn.Module):
        def forward(self, cu_seqlens: Tensor, *tensors: Tensor) -> Tensor:
            given = dict(zip(x, tensors, strict=True))
            return family.function(**given, cu_seqlens=cu_seqlens, backend="reference")[0]

    program = torch.export.export(Model(), (torch.tensor([0, 7, 40]), *x.values())).module()
    offsets = torch.tensor([0, 20, 40])
    torch.testing.assert_close(program(offsets, *x.values()), Model()(offsets, *x.values()))


def test_fake_and_meta_tensors(family: Family) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = heads_first(family.draw(batch=1, rows=2))
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(t) for name, t in x.items()}
        offsets = mode.from_tensor(torch.tensor([0, 5, 40]))
        o, last = family.function(**fake, cu_seqlens=offsets, output_final_state=True)
    assert o.shape == x["v"].shape and last.shape == x["initial_state"].shape
    assert o.is_contiguous() and last.is_contiguous()
    meta = {name: t.to("meta") for name, t in x.items()}
    o, last = family.function(**meta, cu_seqlens=torch.zeros(3, device="meta", dtype=torch.int32))
    assert o.shape == x["v"].shape and o.device.type == "meta" and last is None


@pytest.mark.parametrize("packed", [False, True])
@of_families(*FAMILIES)
def test_vmap(family: Family, kernels: Any, packed: bool) -> None:
    """One call over a batch of calls: results and gradients of each, of parameters per head, too."""
    x = family.draw(batch=1, seq=20, rows=2 if packed else 1)
    options: dict[str, Any] = {"cu_seqlens": torch.tensor([0, 5, 20]) if packed else None}
    options["output_final_state"] = True
    gate = "A_log" if family in (RAW, RAW_KDA) else "g"
    names = ("q", gate, "initial_state")
    q, state = torch.stack([x["q"], 2 * x["q"], -x["q"]]), x["initial_state"]
    gates = torch.stack([x[gate], 2 * x[gate], 3 * x[gate]], dim=1)

    def run(*tensors: Tensor) -> Tensor:
        o, last = family.function(**x | dict(zip(names, tensors, strict=True)), **options)
        return o.square().sum() + last.sum()

    found = torch.func.vmap(torch.func.grad(run, argnums=(0, 1, 2)), (0, 1, None))(q, gates, state)
    for j in range(3):
        alone = leaves(dict(zip(names, (q[j], gates[:, j], state), strict=True)))
        o, last = family.recurrent(**x | alone, **options)
        expected = torch.autograd.grad(o.square().sum() + last.sum(), list(alone.values()))
        for actual, want in zip(found, expected, strict=True):
            torch.testing.assert_close(actual[j], want)
