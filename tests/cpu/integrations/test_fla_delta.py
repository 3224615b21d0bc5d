"""The delta rule of fla by these kernels: its dispatch and its layers."""

from __future__ import annotations

import importlib
import itertools
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tfla_tk import delta_rule, reference
from tfla_tk.backends.tk import linear as tk_linear
from tfla_tk.backends.triton import fla_own, installation
from tfla_tk.core.support import SUPPORTED, Support
from tfla_tk.integrations import fla as integration

from .fla_calls import assert_layer_goes_on_from_a_cache, assert_layer_trains_alike, own

pytestmark = [
    pytest.mark.usefixtures("restored"),
    pytest.mark.filterwarnings("ignore:Triton is not supported"),
    pytest.mark.filterwarnings("ignore:ShortConvolution is crucial"),
]

ON_A_CPU = integration.Path("chunk_gated_delta_rule", "reference", "the tensors are on a CPU")


def draw(batch: int = 2, seq: int = 70, rows: int | None = None) -> dict[str, Tensor]:
    """Raw inputs: q, k, v, g, beta, A_log, dt_bias, initial_state."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (batch, seq, 2, 16), "k": (batch, seq, 2, 16), "v": (batch, seq, 4, 32)}
    shapes |= {"g": (batch, seq, 4), "beta": (batch, seq, 4), "A_log": (4,), "dt_bias": (4,)}
    shapes["initial_state"] = (rows or batch, 4, 16, 32)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


FLAGS = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "allow_neg_eigval": True,
}


def expected_of(x: dict[str, Tensor], **options: Any) -> Any:
    """The recurrence of what FLAGS make of raw inputs."""
    g = reference.delta_log_decay(x["g"], x["A_log"], x["dt_bias"])
    q, k = (reference.l2_norm(x[name]) for name in "qk")
    beta = reference.writing_strength(x["beta"], True)
    return reference.gated_delta_rule_recurrent(
        q, k, x["v"], g, beta, initial_state=x["initial_state"], **options
    )


# fla's dispatch


def test_a_reference_taken_before_reaches_these_kernels() -> None:
    """A closure keeps fla's function; fla itself hands the call over, and no more after `restore`."""
    function, x = own("chunk_gated_delta_rule"), draw()
    integration.accelerate()
    assert own("chunk_gated_delta_rule") is not function
    o, last = function(**x, **FLAGS, output_final_state=True)
    assert integration.last_path() == ON_A_CPU
    expected, expected_last = expected_of(x, output_final_state=True)
    torch.testing.assert_close(o, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last, expected_last, rtol=1e-4, atol=1e-5)
    integration.restore()
    registry = importlib.import_module("fla.backends")._operation_registries["gated_delta_rule"]
    assert not registry._backends["tfla_tk"].is_available()


def test_a_reference_taken_while_accelerated_is_fla_s_after_restore(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    integration.accelerate()
    function = own("chunk_gated_delta_rule")
    integration.restore()
    module = importlib.import_module("fla.ops.gated_delta_rule.chunk")
    monkeypatch.setattr(module.ChunkGatedDeltaRuleFunction, "apply", lambda *args: ("fla's", None))
    assert function(**draw(), **FLAGS) == ("fla's", None)


RELOADED = """
import importlib, torch
from fla.ops.gated_delta_rule import chunk_gated_delta_rule as kept
from tfla_tk.integrations import fla
fla.accelerate()
importlib.reload(fla)
from fla.ops.gated_delta_rule import chunk_gated_delta_rule as replaced
q, gate = torch.randn(1, 70, 2, 16), torch.zeros(1, 70, 2)
for function in (kept, replaced):
    function(q, q, q, gate, gate)
    assert fla.last_path().backend == "reference"
    fla._last = None
"""


@pytest.mark.slow
def test_a_reload_keeps_what_is_accelerated() -> None:
    script = [sys.executable, "-W", "ignore", "-c", RELOADED]
    done = subprocess.run(script, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_compiled_calls_have_no_graph_break() -> None:
    integration.accelerate()
    function, x = own("chunk_gated_delta_rule"), draw()
    compiled = torch.compile(lambda **x: function(**x, **FLAGS), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(**x)[0], expected_of(x)[0], rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()


def test_it_comes_before_flash_qla() -> None:
    integration.accelerate("chunk_gated_delta_rule")
    importlib.import_module("fla.ops.gated_delta_rule")
    registry = importlib.import_module("fla.backends")._operation_registries["gated_delta_rule"]
    order = [backend.backend_type for backend in registry._get_sorted_backends()]
    assert order.index("tfla_tk") < order.index("flash_qla")
    integration.accelerate()  # again: still one
    assert [b.backend_type for b in registry._get_sorted_backends()] == order


def test_flags_that_are_no_bools() -> None:
    """fla asks no more of a flag than that it is true or not."""
    function, x = own("chunk_gated_delta_rule"), draw()
    integration.accelerate()
    given = (x[name] for name in ("q", "k", "v", "g", "beta"))
    options = {"use_gate_in_kernel": 1, "A_log": x["A_log"], "dt_bias": x["dt_bias"]}
    o, last = function(*given, None, x["initial_state"].mT, 1, 1, 1, 1, 1, **options)
    expected, expected_last = expected_of(x, output_final_state=True)
    torch.testing.assert_close(o, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last.mT, expected_last, rtol=1e-4, atol=1e-5)
    assert function(**x, **FLAGS, output_final_state=None)[1] is None


# Where fla's own function can run


@pytest.fixture
def tk_says(monkeypatch: pytest.MonkeyPatch) -> Callable[[Support], None]:
    """Sets what the tk backend says of every call; the reference computes. fla's own functions can run."""

    def say(verdict: Support) -> None:
        monkeypatch.setattr(tk_linear, "supports_delta_rule", lambda call, variant=None: verdict)

    def compute(call: Any, variant: Any, *tensors: Any) -> Any:
        from tfla_tk.backends.reference import linear

        return linear.delta_rule(call, None, *tensors)

    monkeypatch.setattr(tk_linear, "load", lambda *args: SUPPORTED)
    monkeypatch.setattr(tk_linear, "delta_rule", compute)
    monkeypatch.setattr(tk_linear, "prepare_delta_rule", lambda *args: None)
    monkeypatch.setattr(installation, "INTERPRETED", True)
    for module, name in (("delta_rule", "ChunkDeltaRule"), ("gated_delta_rule", "ChunkGatedDeltaRule")):
        found = importlib.import_module(f"fla.ops.{module}.chunk")
        monkeypatch.setattr(getattr(found, f"{name}Function"), "apply", lambda *args: ("fla's", None))
    return say


@pytest.mark.parametrize("taken", ["before", "after"])
def test_tk_serves_or_says_why_not(
    tk_says: Callable[[Support], None], taken: str, caplog: pytest.LogCaptureFixture
) -> None:
    """By the function in fla's place, and by fla's dispatch to a caller that has kept fla's function."""
    function, x = own("chunk_gated_delta_rule"), draw()
    integration.accelerate()
    function = own("chunk_gated_delta_rule") if taken == "after" else function
    tk_says(SUPPORTED)
    o, _ = function(**x, **FLAGS)
    assert integration.last_path() == integration.Path("chunk_gated_delta_rule", "tk")
    torch.testing.assert_close(o, expected_of(x)[0], rtol=1e-4, atol=1e-5)

    delta_rule._path.plans.clear()
    tk_says(Support(False, "head dims are K = 272, V = 32", "use fewer"))
    for _ in range(2):
        assert function(**x, **FLAGS) == ("fla's", None)
    path = integration.last_path()
    assert path == integration.Path("chunk_gated_delta_rule", "fla", "head dims are K = 272, V = 32")
    told = [r.message for r in caplog.records if r.name == "tfla_tk"]
    assert told == ["chunk_gated_delta_rule is served by fla: head dims are K = 272, V = 32"]


@pytest.mark.parametrize("taken", ["before", "after"])
def test_an_error_of_ours_is_raised(
    tk_says: Callable[[Support], None], taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a launch and by what prepares it; the next call is served. fla's dispatch takes whatever is raised
    while it asks for a refusal."""
    function, x = own("chunk_gated_delta_rule"), draw()
    integration.accelerate()
    function = own("chunk_gated_delta_rule") if taken == "after" else function
    tk_says(SUPPORTED)

    def fail(*args: Any) -> Any:
        raise error

    for place in ("delta_rule", "prepare_delta_rule"):
        for error in (TypeError("ours"), ValueError("ours"), RuntimeError("ours")):
            delta_rule._path.plans.clear()
            with monkeypatch.context() as patch, pytest.raises(type(error), match="ours"):
                patch.setattr(tk_linear, place, fail)
                function(**x, **FLAGS)
            delta_rule._path.plans.clear()
            function(**x, **FLAGS)
            assert integration.last_path() == integration.Path("chunk_gated_delta_rule", "tk")


@pytest.mark.parametrize("taken", ["before", "after"])
def test_fla_says_what_is_wrong_with_an_argument(tk_says: Callable[[Support], None], taken: str) -> None:
    function, x = own("chunk_gated_delta_rule"), draw()
    integration.accelerate()
    function = own("chunk_gated_delta_rule") if taken == "after" else function
    tk_says(SUPPORTED)
    with pytest.raises(ValueError, match="must be 16, 32, or 64 for Gated Delta Rule, got 48"):
        function(**x, **FLAGS, chunk_size=48)
    with pytest.raises(AssertionError, match="A_log must be provided"):
        function(**x | {"A_log": None}, **FLAGS)
    # one that it lets pass
    assert function(**x | {"beta": x["beta"].long()}, **FLAGS) == ("fla's", None)


@pytest.mark.parametrize("taken", ["before", "after"])
def test_calls_that_raise_leave_the_last_path(
    tk_says: Callable[[Support], None], taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that the kernels take, and those that go to fla; there and on a CPU. What goes back to fla's own
    dispatch is not seen to return."""
    function, x = own("chunk_gated_delta_rule"), draw()
    integration.accelerate()
    function = own("chunk_gated_delta_rule") if taken == "after" else function
    served = integration.Path("chunk_gated_delta_rule", "tk")
    tk_says(SUPPORTED)
    function(**x, **FLAGS)
    assert integration.last_path() == served

    def fail(*args: Any) -> Any:
        raise RuntimeError("out of memory")

    delta_rule._path.plans.clear()
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of memory"):
        patch.setattr(tk_linear, "delta_rule", fail)
        function(**x)
    assert integration.last_path() == served
    delta_rule._path.plans.clear()
    tk_says(Support(False, "too large", "use less"))
    module = importlib.import_module("fla.ops.gated_delta_rule.chunk")
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of memory"):
        patch.setattr(module.ChunkGatedDeltaRuleFunction, "apply", fail)
        function(**x, **FLAGS)
    if taken == "before":
        path = integration.last_path()
        assert path is not None and (path.backend, "too large" in path.reason) == ("fla", True)
        served = path
    assert integration.last_path() == served
    monkeypatch.setattr(installation, "INTERPRETED", False)
    with pytest.raises(TypeError, match="beta: expected dtype"):
        function(**x | {"beta": x["beta"].long()})
    assert integration.last_path() == served


def test_within_fla_its_own_functions_are_called(tk_says: Callable[[Support], None]) -> None:
    function = own("chunk_gated_delta_rule")
    integration.accelerate()
    tk_says(SUPPORTED)
    with fla_own.on_its_own():
        assert function(**draw(), **FLAGS) == ("fla's", None)
        assert own("chunk_gated_delta_rule")(**draw(), **FLAGS) == ("fla's", None)


def test_the_delta_rule_without_decay(tk_says: Callable[[Support], None]) -> None:
    x = {name: t.half() for name, t in draw().items()}
    given = [x[name] for name in ("q", "k", "v", "beta")]
    integration.accelerate()
    tk_says(SUPPORTED)
    o, _ = own("chunk_delta_rule")(*given, use_qk_l2norm_in_kernel=1, output_final_state=None)
    assert integration.last_path() == integration.Path("chunk_delta_rule", "tk")
    unit = [reference.l2_norm(x[name]) for name in "qk"]
    expected, _ = reference.delta_rule_recurrent(*unit, *given[2:])
    torch.testing.assert_close(o.float(), expected, rtol=1e-2, atol=1e-2)
    delta_rule._path.plans.clear()
    tk_says(Support(False, "no"))
    assert own("chunk_delta_rule")(*given) == ("fla's", None)


# fla's layers


class GatedNorm(nn.RMSNorm):
    """What fla's FusedRMSNormGated computes, in PyTorch."""

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        normed = super().forward(x)
        return normed if gate is None else normed * nn.functional.silu(gate)


def make_layer(kind: str) -> nn.Module:
    """A small layer of fla, its convolutions off and its norm, a GPU kernel, in PyTorch."""
    torch.manual_seed(0)
    reason = "flash-linear-attention is not installed"
    if kind == "delta":
        module = pytest.importorskip("fla.layers.delta_net", reason=reason)
        layer = module.DeltaNet(hidden_size=32, num_heads=2, use_short_conv=False)
    else:
        module = pytest.importorskip("fla.layers.gated_deltanet", reason=reason)
        layer = module.GatedDeltaNet(
            hidden_size=32, num_heads=2, num_v_heads=4, head_dim=16, expand_v=1, use_short_conv=False,
            allow_neg_eigval=True,
        )  # fmt: skip
    layer.o_norm = GatedNorm(layer.head_v_dim, eps=1e-5)
    layer.layer_idx = 0
    return layer


LAYERS = {
    "delta": ("fla.layers.delta_net", "chunk_delta_rule"),
    "gated": ("fla.layers.gated_deltanet", "chunk_gated_delta_rule"),
}


def plain(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> Tensor:
    """The recurrence in so many words, for tensors [B, T, H, D] and g, beta [B, T, H]."""
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    rows = []
    for t in range(q.shape[1]):
        state = g[:, t, :, None, None].exp() * state
        write = beta[:, t, :, None] * (v[:, t] - (k[:, t, :, :, None] * state).sum(-2))
        state = state + k[:, t, :, :, None] * write[:, :, None, :]
        rows.append((q[:, t, :, :, None] * state).sum(-2) * q.shape[-1] ** -0.5)
    return torch.stack(rows, dim=1)


def plain_function(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Any = None, **options: Any) -> Any:
    """In place of fla's functions in the layers' modules."""
    if options.get("use_beta_sigmoid_in_kernel"):
        beta = beta.sigmoid() * (2 if options["allow_neg_eigval"] else 1)
    if options.get("use_gate_in_kernel"):
        g = -options["A_log"].exp() * nn.functional.softplus(g + options["dt_bias"])
    g = torch.zeros_like(beta) if g is None else g
    assert options["use_qk_l2norm_in_kernel"] and options["initial_state"] is None
    q, k = (
        (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(v.shape[2] // q.shape[2], 2)
        for x in (q, k)
    )
    offsets = options["cu_seqlens"]
    bounds = [0, q.shape[1]] if offsets is None else offsets.tolist()
    parts = [plain(*(x[:, a:b] for x in (q, k, v, beta, g))) for a, b in itertools.pairwise(bounds)]
    return torch.cat(parts, dim=1), None


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_layers_train_to_the_same_loss(kind: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    make = partial(make_layer, kind)
    assert_layer_trains_alike(make, LAYERS[kind], plain_function, monkeypatch, packed=packed)


@pytest.mark.parametrize("kind", LAYERS)
def test_layers_go_on_from_a_cache(kind: str) -> None:
    assert_layer_goes_on_from_a_cache(make_layer(kind))
