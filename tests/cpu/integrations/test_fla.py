"""fla's functions replaced by this package's, with the real package: layers, callers, and the way back."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tfla_tk import reference, simple_gla
from tfla_tk.backends.tk import linear as tk_linear
from tfla_tk.backends.triton import fla, fla_own, installation
from tfla_tk.core.support import SUPPORTED, Support
from tfla_tk.integrations import fla as integration

pytestmark = pytest.mark.filterwarnings("ignore:Triton is not supported")

NAMES = ["chunk_simple_gla", "chunk_retention", "chunk_lightning_attn"]
ALL = [*NAMES, "chunk_gla", "chunk_delta_rule", "chunk_gated_delta_rule"]


def own(name: str) -> Callable[..., Any]:
    """fla's function by its name, as fla's module has it now."""
    function: Callable[..., Any] = getattr(importlib.import_module(fla.FLA_OPS[name]), name)
    return function


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """fla as it was, before and after."""
    # not for every worker process that collects this file: it takes five seconds
    pytest.importorskip("fla.ops", reason="fla-core is not installed")
    integration.restore()
    simple_gla._path.plans.clear()
    integration._told.clear()
    yield
    integration.restore()
    simple_gla._path.plans.clear()


@pytest.fixture
def accelerated() -> list[str]:
    return integration.accelerate()


def draw(batch: int = 2, seq: int = 40, rows: int | None = None) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    x = {"q": normal(batch, seq, 2, 16), "k": normal(batch, seq, 2, 16), "v": normal(batch, seq, 2, 32)}
    x["g"] = torch.nn.functional.logsigmoid(normal(batch, seq, 2))
    return x | {"initial_state": normal(rows or batch, 2, 16, 32)}


# Replacing and restoring


def holders(function: Any) -> set[str]:
    """Every attribute of a module that is this function."""
    return {
        f"{name}.{attribute}"
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType)
        for attribute, value in list(vars(module).items())
        if value is function
    }


def test_every_attribute_of_a_module_is_replaced_and_put_back() -> None:
    functions = {name: own(name) for name in ALL}
    before = {name: holders(function) for name, function in functions.items()}
    assert {"fla.ops.chunk_retention", "fla.ops.retention.chunk.chunk_retention"} <= before["chunk_retention"]
    assert "fla.ops.retention.chunk.chunk_simple_gla" in before["chunk_simple_gla"]
    assert not any(map(integration.is_accelerated, ALL))

    found = integration.accelerate()
    assert set(found) == set().union(*before.values())
    assert not any(map(holders, functions.values()))
    assert {name: holders(own(name)) for name in ALL} == before
    assert integration.is_accelerated() and all(map(integration.is_accelerated, ALL))
    assert integration.accelerate() == []  # again: nothing to do
    assert {name: holders(own(name)) for name in ALL} == before

    assert set(integration.restore()) == set(found)
    assert {name: own(name) for name in ALL} == functions
    assert {name: holders(function) for name, function in functions.items()} == before
    assert not integration.is_accelerated() and integration.restore() == []


def test_some_of_them() -> None:
    integration.accelerate(["chunk_retention"])
    assert [integration.is_accelerated(name) for name in ALL] == [name == "chunk_retention" for name in ALL]
    assert not integration.is_accelerated()
    integration.accelerate()
    integration.restore("chunk_simple_gla")
    assert [integration.is_accelerated(name) for name in ALL] == [name != "chunk_simple_gla" for name in ALL]
    for function in (integration.accelerate, integration.restore):
        with pytest.raises(ValueError, match="names: expected some of chunk_simple_gla, .* got 'chunk_kda'"):  # noqa: RUF043
            function(["chunk_kda"])
    with pytest.raises(ValueError, match="names: expected some of"):
        integration.is_accelerated("softmax")


def test_later_imports_find_it_and_are_restored(
    accelerated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("a_model_of_somebody")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec("from fla.ops.simple_gla import chunk_simple_gla as attention", vars(module))
    assert module.attention is own("chunk_simple_gla")
    integration.restore()
    assert module.attention is own("chunk_simple_gla")
    assert not hasattr(module.attention, fla_own.ORIGINAL)


def test_a_module_that_has_got_hold_of_the_original(
    accelerated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("another_model")
    module.attention = fla_own.original(own("chunk_simple_gla"))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert integration.accelerate() == ["another_model.attention"]


def test_looks_like_the_original(accelerated: list[str]) -> None:
    import inspect

    function = own("chunk_simple_gla")
    original = fla_own.original(function)
    assert function is not original
    assert inspect.signature(function) == inspect.signature(original)
    assert function.__doc__ == original.__doc__


def test_fla_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla.ops.simple_gla", None)
    with pytest.raises(ImportError, match=r"fla cannot be imported: .* pip install 'tfla_tk\[baselines\]'"):
        integration.accelerate()


def test_fla_fails_to_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """By whatever a package raises: a stand-in for triton has none of its attributes."""

    def fail(name: str) -> Any:
        raise AttributeError("module 'triton' has no attribute 'language'")

    monkeypatch.setattr(integration.importlib, "import_module", fail)
    with pytest.raises(ImportError, match="fla cannot be imported: AttributeError: module 'triton' has no"):
        integration.accelerate()


# Calls on a CPU: the reference


def test_calls_on_a_cpu(accelerated: list[str]) -> None:
    x = draw()
    o, last = own("chunk_simple_gla")(**x, output_final_state=True)
    expected, expected_last = reference.simple_gla_recurrent(**x, output_final_state=True)
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(last, expected_last)
    path = integration.last_path()
    assert path == integration.Path("chunk_simple_gla", "reference", "the tensors are on a CPU")

    del x["g"]
    o, last = own("chunk_retention")(*(x[n] for n in "qkv"), initial_state=x["initial_state"])
    decay = reference.retention_log_decay(2)
    torch.testing.assert_close(o, reference.simple_gla_recurrent(**x, g_gamma=decay)[0])
    assert last is None and integration.last_path().function == "chunk_retention"
    o, _ = own("chunk_lightning_attn")(*(x[n] for n in "qkv"), 1, 4, initial_state=x["initial_state"])
    decay = reference.lightning_log_decay(2, 1, 4)
    torch.testing.assert_close(o, reference.simple_gla_recurrent(**x, g_gamma=decay)[0])


def test_packed_calls_with_states(accelerated: list[str]) -> None:
    """As fla's layers make them: V first, packed sequences, None for a flag that is off."""
    x = draw(batch=1, rows=3)
    offsets = torch.tensor([0, 7, 7, 40])
    expected, expected_last = reference.simple_gla_recurrent(**x, cu_seqlens=offsets, output_final_state=True)
    x["initial_state"] = x["initial_state"].mT.contiguous()
    o, last = own("chunk_simple_gla")(
        **x, cu_seqlens=offsets, output_final_state=True, state_v_first=True, cu_seqlens_cpu=offsets
    )
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(last.mT, expected_last)
    o, last = own("chunk_simple_gla")(**x, cu_seqlens=offsets, output_final_state=None, state_v_first=1)
    torch.testing.assert_close(o, expected)
    assert last is None


def test_flags_by_position(accelerated: list[str]) -> None:
    """fla asks no more of a flag than that it is true or not."""
    x = draw()
    positions = [x[name] for name in ("q", "k", "v", "g")] + [None] * 3
    for off in (None, 0):
        assert own("chunk_simple_gla")(*positions, off, off)[1] is None
    expected = reference.simple_gla_recurrent(**(x | {"initial_state": None}), output_final_state=True)
    torch.testing.assert_close(own("chunk_simple_gla")(*positions, 1, 1)[1].mT, expected[1])
    torch.testing.assert_close(own("chunk_simple_gla")(*positions, 1, None)[1], expected[1])
    q, k, v = positions[:3]
    assert own("chunk_retention")(q, k, v, None, None, 1)[1].shape == expected[1].shape
    assert own("chunk_retention")(q, k, v, None, None, None)[1] is None
    assert own("chunk_lightning_attn")(q, k, v, 1, 4, None, None, 1)[1].shape == expected[1].shape


def test_compiled_calls_have_no_graph_break(accelerated: list[str]) -> None:
    """fla's own function is kept out of torch.compile; what is in its place is not."""
    function, x = own("chunk_simple_gla"), draw()
    q = x["q"].clone().requires_grad_()
    o, _ = torch.compile(lambda q: function(q, x["k"], x["v"], x["g"]), backend="aot_eager", fullgraph=True)(
        q
    )
    o.sum().backward()
    torch.testing.assert_close(o, reference.simple_gla_recurrent(q, x["k"], x["v"], x["g"])[0])
    assert q.grad is not None
    torch._dynamo.reset()


# Where fla's own function can run


class Own:
    """In the place of the autograd function that fla's functions end in: the reference, and how often."""

    def __init__(self) -> None:
        self.calls = 0

    def apply(self, q: Tensor, k: Tensor, v: Tensor, g: Any, g_gamma: Any, scale: float, *rest: Any) -> Any:
        self.calls += 1
        initial_state, output_final_state, state_v_first, cu_seqlens, _, _ = rest
        return reference.simple_gla_recurrent(
            q, k, v, g, g_gamma, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens,
            output_final_state=output_final_state, state_v_first=state_v_first,
        )  # fmt: skip


@pytest.fixture
def runs_fla(monkeypatch: pytest.MonkeyPatch) -> Own:
    """fla's own functions can run here, down to `Own`."""
    module = importlib.import_module("fla.ops.simple_gla.chunk")
    stand_in = Own()
    monkeypatch.setattr(module, "ChunkSimpleGLAFunction", stand_in)
    monkeypatch.setattr(installation, "INTERPRETED", True)
    return stand_in


@pytest.fixture
def tk_serves(monkeypatch: pytest.MonkeyPatch) -> Callable[[Support], None]:
    """Sets what the tk backend says of every call; the reference computes."""

    def say(verdict: Support) -> None:
        monkeypatch.setattr(tk_linear, "supports_simple_gla", lambda call, variant=None: verdict)

    def compute(call: Any, variant: Any, *tensors: Any) -> Any:
        from tfla_tk.backends.reference import linear

        return linear.simple_gla(call, None, *tensors)

    monkeypatch.setattr(tk_linear, "load", lambda kernel, call, variant=None: SUPPORTED)
    monkeypatch.setattr(tk_linear, "simple_gla", compute)
    monkeypatch.setattr(tk_linear, "prepare_simple_gla", lambda *args: None)
    return say


def call(name: str, x: dict[str, Tensor], **options: Any) -> Any:
    layer = {"layer_idx": 1, "num_layers": 4} if name == "chunk_lightning_attn" else {}
    tensors = {n: t for n, t in x.items() if n != "g" or name == "chunk_simple_gla"}
    return own(name)(**tensors, **layer, **options)


@pytest.mark.parametrize("name", NAMES)
def test_the_kernels_serve(
    name: str, runs_fla: Own, tk_serves: Callable[[Support], None], accelerated: list[str]
) -> None:
    tk_serves(SUPPORTED)
    x = draw()
    o, last = call(name, x, output_final_state=True)
    assert integration.last_path() == integration.Path(name, "tk") and runs_fla.calls == 0
    integration.restore()
    expected, expected_last = call(name, x, output_final_state=True)
    assert runs_fla.calls == 1
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(last, expected_last)


@pytest.mark.parametrize("name", NAMES)
def test_what_they_cannot_serve_goes_to_fla(
    name: str,
    runs_fla: Own,
    tk_serves: Callable[[Support], None],
    accelerated: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With the reason, told once; fla's retention calls fla's simple GLA then, not what is in its place."""
    tk_serves(Support(False, "head dims are K = 272, V = 32", "use fewer"))
    x = draw()
    for _ in range(2):
        o, _ = call(name, x)
    assert integration.last_path() == integration.Path(name, "fla", "head dims are K = 272, V = 32")
    assert runs_fla.calls == 2
    assert [r.message for r in caplog.records] == [f"{name} is served by fla: head dims are K = 272, V = 32"]
    integration.restore()
    torch.testing.assert_close(o, call(name, x)[0])


def test_a_refusal_is_remembered(
    runs_fla: Own,
    tk_serves: Callable[[Support], None],
    accelerated: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For calls that are alike; those of another kind are checked, and served if they can be."""
    checked: list[tuple[Any, ...]] = []

    def supports(call: Any, variant: str | None = None) -> Support:
        checked.append((call.seq, call.requires_grad, call.dtype, call.scale))
        return Support(call.requires_grad or call.seq == 30, "for a reason", "none")

    monkeypatch.setattr(tk_linear, "supports_simple_gla", supports)
    x, own_calls = draw(), 0

    def expect(backend: str, checks: int, **options: Any) -> None:
        nonlocal own_calls
        before = len(checked)
        o, _ = call("chunk_simple_gla", x, **options)
        own_calls += backend == "fla"
        assert (integration.last_path().backend, len(checked) - before) == (backend, checks)
        assert runs_fla.calls == own_calls
        assert integration.last_path().reason == ("for a reason" if backend == "fla" else "")
        torch.testing.assert_close(o, reference.simple_gla_recurrent(**x, **options)[0], check_dtype=False)

    expect("fla", 1)
    x = {n: t.clone() for n, t in x.items()}
    expect("fla", 0)
    expect("fla", 1, scale=0.5)
    expect("fla", 0, scale=0.5)
    x["v"].requires_grad_()
    expect("tk", 1)
    expect("tk", 0)
    with torch.no_grad():
        expect("fla", 0)
        expect("fla", 1, output_final_state=True)
    x = draw(seq=30)
    expect("tk", 1)
    x = draw(seq=20)
    expect("fla", 1)
    with torch.autocast("cpu", torch.bfloat16), monkeypatch.context() as patch:
        patch.setattr(integration, "_record", lambda *args: None)
        before = len(checked)
        call("chunk_simple_gla", x)
        own_calls += 1
        assert len(checked) == before + 1
    integration.restore()
    integration.accelerate()
    expect("fla", 1)


@pytest.mark.parametrize("name", NAMES)
def test_refused_arguments_are_told_apart(
    name: str, runs_fla: Own, tk_serves: Callable[[Support], None], accelerated: list[str]
) -> None:
    """Also where they are passed by place: what refuses one call does not refuse another."""
    tk_serves(SUPPORTED)
    x, layer = draw(), (1, 4) if name == "chunk_lightning_attn" else ()
    given = (x["q"], x["k"], x["v"], *layer)
    function = own(name)
    for _ in range(2):
        assert function(*given, scale=0.5)[1] is None
        assert integration.last_path().backend == "tk"
        function(*given, scale=0.5, something=1)
        assert "unexpected keyword" in integration.last_path().reason
        function(*given, something=0.5, scale=1)
        assert "unexpected keyword" in integration.last_path().reason
        function(*given, scale=1)
        assert integration.last_path().backend == "tk"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"something": 1}, "unexpected keyword argument 'something'"),
        ({"g_gamma": torch.zeros(2)}, "g_gamma: expected None where g is given"),
        ({"cu_seqlens": torch.tensor([0, 4.0])}, "cu_seqlens: expected dtype int32 or int64"),
    ],
)  # fmt: skip
def test_arguments_that_fla_lets_pass(
    change: dict[str, Any],
    reason: str,
    runs_fla: Own,
    tk_serves: Callable[[Support], None],
    accelerated: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that this package refuses are fla's to judge."""
    tk_serves(SUPPORTED)
    monkeypatch.setattr(runs_fla, "apply", lambda *args: ("fla's", None))
    if "cu_seqlens" in change:
        # fla wants a batch of one
        with pytest.raises(ValueError, match="batch size is expected to be 1"):
            call("chunk_simple_gla", draw(), **change)
    else:
        assert call("chunk_simple_gla", draw(), **change)[0] == "fla's"
    path = integration.last_path()
    assert path.backend == "fla" and reason in path.reason


def test_the_triton_backend_is_fla_itself(
    runs_fla: Own,
    tk_serves: Callable[[Support], None],
    accelerated: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """backend="triton" calls fla's own function, whatever is in its place."""
    import tfla_tk

    tk_serves(SUPPORTED)
    monkeypatch.setattr(fla, "FLA_MISSING", None)
    x = draw()
    o, _ = tfla_tk.chunk_simple_gla(**x, backend="triton")
    assert runs_fla.calls == 1
    torch.testing.assert_close(o, reference.simple_gla_recurrent(**x)[0])
    o, _ = fla.fla_op("chunk_retention", *(x[n] for n in "qkv"))
    assert runs_fla.calls == 2


# fla's layers


class Rotary(nn.Module):
    """What fla's RotaryEmbedding computes without a cache, in plain PyTorch."""

    def forward(self, q: Tensor, k: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        half = q.shape[-1] // 2
        frequencies = 10000.0 ** -(torch.arange(half) / half)
        angles = torch.outer(torch.arange(q.shape[1]), frequencies)[:, None]
        cos, sin = angles.cos(), angles.sin()

        def turned(x: Tensor) -> Tensor:
            a, b = x.split(half, dim=-1)
            return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)

        return turned(q), turned(k)


def make_layer(kind: str) -> nn.Module:
    """A small layer of fla; its normalisation, output gate and rotary embedding, GPU kernels, in PyTorch."""
    torch.manual_seed(0)
    if kind == "simple_gla":
        module = pytest.importorskip(
            "fla.layers.simple_gla", reason="flash-linear-attention is not installed"
        )
        layer = module.SimpleGatedLinearAttention(
            hidden_size=32, num_heads=2, use_short_conv=False, fuse_norm=False, gate_logit_normalizer=1
        )
        layer.gate_fn = nn.functional.silu
    else:
        module = pytest.importorskip(
            "fla.layers.multiscale_retention", reason="flash-linear-attention is not installed"
        )
        layer = module.MultiScaleRetention(hidden_size=32, num_heads=2, fuse_norm=False)
        layer.rotary = Rotary()
    layer.g_norm = nn.RMSNorm(layer.head_v_dim, eps=1e-5)
    return layer


def losses(layer: nn.Module, **options: Any) -> list[float]:
    """Of a few steps of training."""
    generator = torch.Generator().manual_seed(1)
    x, target = (torch.randn(options.pop("batch", 2), 70, 32, generator=generator) for _ in range(2))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    found = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = (layer(x, **options)[0] - target).square().mean()
        loss.backward()
        assert all(p.grad is not None and p.grad.abs().max() > 0 for p in layer.parameters())
        optimizer.step()
        found.append(loss.item())
    return found


def plain(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """The recurrence in so many words, for tensors [B, T, H, D] and g [B, T, H]."""
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3]) if state is None else state
    rows = []
    for t in range(q.shape[1]):
        state = g[:, t, :, None, None].exp() * state + k[:, t, :, :, None] * v[:, t, :, None, :]
        rows.append((q[:, t, :, :, None] * state).sum(-2) * q.shape[-1] ** -0.5)
    return torch.stack(rows, dim=1), state


def plain_function(kind: str) -> Callable[..., Any]:
    """In place of fla's function in the layer's module."""

    def function(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        state_v_first: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        if kind == "retention":
            decay = torch.log(1 - 2.0 ** (-5 - torch.arange(q.shape[2])))
            g = decay.expand(q.shape[:3])
        assert g is not None
        if initial_state is not None and state_v_first:
            initial_state = initial_state.mT
        bounds = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
        parts = [
            plain(*(x[:, a:b] for x in (q, k, v, g)), initial_state) for a, b in itertools.pairwise(bounds)
        ]
        o = torch.cat([part[0] for part in parts], dim=1)
        last = torch.cat([part[1] for part in parts])
        if not output_final_state:
            return o, None
        return o, last.mT if state_v_first else last

    return function


LAYERS = {
    "simple_gla": ("fla.layers.simple_gla", "chunk_simple_gla"),
    "retention": ("fla.layers.multiscale_retention", "chunk_retention"),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_layers_train_to_the_same_loss(kind: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"batch": 1, "cu_seqlens": torch.tensor([0, 20, 70])} if packed else {}
    layer = make_layer(kind)
    module, name = LAYERS[kind]
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[module], name, plain_function(kind))
        expected = losses(layer, **options)
    assert f"{module}.{name}" in integration.accelerate()
    found = losses(make_layer(kind), **options)
    assert integration.last_path() == integration.Path(name, "reference", "the tensors are on a CPU")
    assert expected[-1] < 0.98 * expected[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", LAYERS)
def test_layers_go_on_from_a_cache(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a cache the layer passes the state on: two halves are the whole."""
    layer = make_layer(kind)
    if kind == "retention":
        layer.rotary = nn.Module()
        layer.rotary.forward = lambda q, k, **options: (q, k)  # type: ignore[method-assign]
    cache = importlib.import_module("fla.models.utils").Cache
    layer.layer_idx = 0
    x = torch.randn(2, 140, 32)
    integration.accelerate()
    whole, _, _ = layer(x)
    state = cache()
    halves = [layer(part, past_key_values=state, use_cache=True)[0] for part in x.split(70, dim=1)]
    torch.testing.assert_close(torch.cat(halves, dim=1), whole, rtol=1e-4, atol=1e-5)
