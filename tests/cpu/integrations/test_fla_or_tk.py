"""Which calls with a scalar decay the kernels serve, and which go to fla's own function, with the reason."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tfla_tk import reference, simple_gla
from tfla_tk.backends.tk import linear as tk_linear
from tfla_tk.backends.triton import fla, installation
from tfla_tk.core.support import SUPPORTED, Support
from tfla_tk.integrations import fla as integration

from .fla_calls import SCALAR_DECAY, draw_scalar_decay, own

pytestmark = [
    pytest.mark.usefixtures("restored"),
    pytest.mark.filterwarnings("ignore:Triton is not supported"),
]


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


@pytest.mark.parametrize("name", SCALAR_DECAY)
def test_the_kernels_serve(
    name: str, runs_fla: Own, tk_serves: Callable[[Support], None], accelerated: list[str]
) -> None:
    tk_serves(SUPPORTED)
    x = draw_scalar_decay()
    o, last = call(name, x, output_final_state=True)
    assert integration.last_path() == integration.Path(name, "tk") and runs_fla.calls == 0
    integration.restore()
    expected, expected_last = call(name, x, output_final_state=True)
    assert runs_fla.calls == 1
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(last, expected_last)


@pytest.mark.parametrize("name", SCALAR_DECAY)
def test_what_they_cannot_serve_goes_to_fla(
    name: str,
    runs_fla: Own,
    tk_serves: Callable[[Support], None],
    accelerated: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With the reason, told once; fla's retention calls fla's simple GLA then, not what is in its place."""
    tk_serves(Support(False, "head dims are K = 272, V = 32", "use fewer"))
    x = draw_scalar_decay()
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
    x, own_calls = draw_scalar_decay(), 0

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
    x = draw_scalar_decay(seq=30)
    expect("tk", 1)
    x = draw_scalar_decay(seq=20)
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


def test_what_could_not_be_built_is_tried_again(
    runs_fla: Own, tk_serves: Callable[[Support], None], accelerated: list[str]
) -> None:
    x = draw_scalar_decay()
    for verdict, backend in ((Support(False, "the disk is full", failed=True), "fla"), (SUPPORTED, "tk")):
        tk_serves(verdict)
        call("chunk_simple_gla", x)
        assert integration.last_path().backend == backend


@pytest.mark.parametrize("place", ["simple_gla", "prepare_simple_gla"])
@pytest.mark.parametrize("error", [TypeError, ValueError])
@pytest.mark.parametrize("name", SCALAR_DECAY)
def test_an_error_of_ours_is_raised(
    name: str,
    error: type[Exception],
    place: str,
    runs_fla: Own,
    tk_serves: Callable[[Support], None],
    accelerated: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a launch and by what prepares it, once the arguments are checked; the next call is served."""

    def fail(*args: Any) -> Any:
        raise error("ours")

    tk_serves(SUPPORTED)
    x = draw_scalar_decay()
    with monkeypatch.context() as patch:
        patch.setattr(tk_linear, place, fail)
        for _ in range(2):
            with pytest.raises(error, match="ours"):
                call(name, x)
    simple_gla._path.plans.clear()
    call(name, x)
    assert integration.last_path() == integration.Path(name, "tk") and runs_fla.calls == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
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
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Those that this package refuses are fla's to judge; the log has the reason, whatever fla says."""
    tk_serves(SUPPORTED)
    monkeypatch.setattr(runs_fla, "apply", lambda *args: ("fla's", None))
    if "cu_seqlens" in change:
        # fla wants a batch of one
        with pytest.raises(ValueError, match="batch size is expected to be 1"):
            call("chunk_simple_gla", draw_scalar_decay(), **change)
        assert integration.last_path() is None
    else:
        assert call("chunk_simple_gla", draw_scalar_decay(), **change)[0] == "fla's"
        path = integration.last_path()
        assert path.backend == "fla" and reason in path.reason
    assert [reason in record.message for record in caplog.records] == [True]


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
    x = draw_scalar_decay()
    o, _ = tfla_tk.chunk_simple_gla(**x, backend="triton")
    assert runs_fla.calls == 1
    torch.testing.assert_close(o, reference.simple_gla_recurrent(**x)[0])
    o, _ = fla.fla_op("chunk_retention", *(x[n] for n in "qkv"))
    assert runs_fla.calls == 2
