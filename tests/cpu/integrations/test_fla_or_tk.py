"""Which calls of fla's functions the kernels serve, and which go to fla's own function, with the reason."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tfla_tk
from tfla_tk import delta_rule, gla, kda, simple_gla
from tfla_tk.backends.reference import forms as reference_backend
from tfla_tk.backends.tk import linear as tk_linear
from tfla_tk.backends.triton import fla, fla_own, installation
from tfla_tk.core.support import SUPPORTED, Support
from tfla_tk.integrations import fla as integration

from .fla_calls import CHUNKWISE, DISPATCHED, ENDS, MARKS, draw_call, draw_scalar_decay, own

pytestmark = MARKS

GATED = "chunk_gated_delta_rule"
FAMILIES = ("simple_gla", "gla", "delta_rule", "kda")

FLA_S = ("fla's", None)  # what fla's own functions return here
REFUSED = Support(False, "head dims are K = 272, V = 32", "use fewer")


def forget_plans() -> None:
    for path in (simple_gla._path, gla._path, delta_rule._path, kda._path):
        path.plans.clear()


class Machine:
    """One on which both can run: the tk backend as far as it says so, computed by the reference; fla.

    Attributes:
        own_calls: of fla's own functions.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch, self.own_calls = monkeypatch, 0
        monkeypatch.setattr(installation, "INTERPRETED", True)
        monkeypatch.setattr(tk_linear, "load", lambda *args: SUPPORTED)
        for family in FAMILIES:
            monkeypatch.setattr(tk_linear, family, self._computed_by(family))
            monkeypatch.setattr(tk_linear, f"prepare_{family}", lambda *args: None)
        for module, name in ENDS.items():
            monkeypatch.setattr(getattr(importlib.import_module(module), name), "apply", self._own)

    def _computed_by(self, family: str) -> Callable[..., Any]:
        compute = getattr(reference_backend, family)
        return lambda call, variant, *tensors: compute(call, None, *tensors)

    def _own(self, *args: Any) -> Any:
        self.own_calls += 1
        return FLA_S

    def say(self, verdict: Support) -> None:
        """What the tk backend says of every call from now on."""
        forget_plans()
        for family in FAMILIES:
            self.patch.setattr(tk_linear, f"supports_{family}", lambda call, variant=None: verdict)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, restored: None) -> Machine:
    found = Machine(monkeypatch)
    found.say(SUPPORTED)
    return found


@pytest.fixture(
    params=[*((name, "after") for name in CHUNKWISE), *((name, "before") for name in DISPATCHED)],
    ids="-".join,
)
def call(request: pytest.FixtureRequest, machine: Machine) -> Callable[..., Any]:
    """Calls one of fla's functions: what is in its place, or fla's own as kept from before, which hands over.

    The name of the function is the call's `__name__`, what is kept its `taken`.
    """
    name, taken = request.param
    function = own(name)
    integration.accelerate([name, "chunk_simple_gla"])  # which fla's retention and Lightning attention call
    function = own(name) if taken == "after" else function

    def run(**changed: Any) -> Any:
        return function(**draw_call(name) | changed)

    run.__name__, run.taken = name, taken  # type: ignore[attr-defined]
    return run


def served_by(backend: str, call: Any, reason: str = "") -> bool:
    """Whether the latest call was."""
    return integration.last_path() == integration.Path(call.__name__, backend, reason)


def test_the_kernels_serve(call: Any, machine: Machine) -> None:
    found = call(output_final_state=True)
    assert served_by("tk", call) and machine.own_calls == 0
    x = draw_call(call.__name__) | {"output_final_state": True, "backend": "reference:recurrent"}
    expected = getattr(tfla_tk, call.__name__)(**x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_what_they_cannot_serve_goes_to_fla(
    call: Any, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    """With the reason, told once; fla's retention calls fla's simple GLA then, not what is in its place."""
    machine.say(REFUSED)
    if call.__name__ == "chunk_delta_rule":  # of which fla takes no fp32
        half = {name: t.half() for name, t in draw_call("chunk_delta_rule").items() if torch.is_tensor(t)}
        results = [call(**half) for _ in range(2)]
    else:
        results = [call() for _ in range(2)]
    assert results == [FLA_S] * 2 and machine.own_calls == 2
    assert served_by("fla", call, REFUSED.reason)
    told = [r.message for r in caplog.records if r.name == "tfla_tk"]
    assert told == [f"{call.__name__} is served by fla: {REFUSED.reason}"]


def test_an_error_of_ours_is_raised(call: Any, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a launch and by what prepares it, once the arguments are checked; the next call is served. fla's
    dispatch takes whatever is raised while it asks for a refusal."""
    for error, place in itertools.product((TypeError, ValueError, RuntimeError), ("{}", "prepare_{}")):

        def fail(*args: Any, error: type[Exception] = error) -> Any:
            raise error("ours")

        forget_plans()
        with monkeypatch.context() as patch:
            for family in FAMILIES:
                patch.setattr(tk_linear, place.format(family), fail)
            for _ in range(2):
                with pytest.raises(error, match="ours"):
                    call()
    forget_plans()
    call()
    assert served_by("tk", call) and machine.own_calls == 0


def test_calls_that_raise_leave_the_last_path(
    call: Any, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that the kernels take, and those that go to fla; there and on a CPU. What goes back to fla's own
    dispatch is not seen to return."""
    call()
    assert served_by("tk", call)

    def fail(*args: Any) -> Any:
        raise RuntimeError("out of memory")

    forget_plans()
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of memory"):
        for family in FAMILIES:
            patch.setattr(tk_linear, family, fail)
        call()
    assert served_by("tk", call)
    machine.say(REFUSED)
    with monkeypatch.context() as patch, pytest.raises((RuntimeError, AssertionError)):
        for module, name in ENDS.items():
            patch.setattr(getattr(importlib.import_module(module), name), "apply", fail)
        call()
    after = ("fla", REFUSED.reason) if call.taken == "before" else ("tk", "")
    assert served_by(after[0], call, after[1])
    monkeypatch.setattr(installation, "INTERPRETED", False)
    with pytest.raises(TypeError, match="v: expected"):
        call(v=draw_call(call.__name__)["v"].long())
    assert served_by(after[0], call, after[1])


def test_a_refusal_is_remembered(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """For calls that are alike; those of another kind are checked, and served if they can be."""
    checked: list[Any] = []

    def supports(call: Any, variant: str | None = None) -> Support:
        checked.append(call)
        return Support(call.requires_grad or call.seq == 30, "for a reason", "none")

    integration.accelerate()
    monkeypatch.setattr(tk_linear, "supports_simple_gla", supports)
    x = draw_scalar_decay()

    def expect(backend: str, checks: int, **options: Any) -> None:
        before = len(checked), machine.own_calls
        own("chunk_simple_gla")(**x, **options)
        path = integration.last_path()
        assert path == integration.Path("chunk_simple_gla", backend, "for a reason" * (backend == "fla"))
        assert (len(checked), machine.own_calls) == (before[0] + checks, before[1] + (backend == "fla"))

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
    with torch.autocast("cpu", torch.bfloat16):
        before = len(checked)
        own("chunk_simple_gla")(**x)
        assert len(checked) == before + 1
    integration.restore()
    integration.accelerate()
    expect("fla", 1)


def test_what_could_not_be_built_is_tried_again(call: Any, machine: Machine) -> None:
    if call.__name__ == "chunk_delta_rule":
        pytest.skip("fla takes no fp32")
    # without `say`, which forgets plans
    for verdict, backend in ((Support(False, "the disk is full", failed=True), "fla"), (SUPPORTED, "tk")):
        for family in FAMILIES:
            machine.patch.setattr(tk_linear, f"supports_{family}", lambda call, variant=None, v=verdict: v)
        call()
        path = integration.last_path()
        assert path is not None and path.backend == backend


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        (GATED, {"chunk_size": 48}, ValueError, "must be 16, 32, or 64 for Gated Delta Rule, got 48"),
        (GATED, {"A_log": None}, AssertionError, "A_log must be provided"),
        (
            "chunk_kda",
            {"safe_gate": True},
            ValueError,
            "`lower_bound` must be specified when `safe_gate=True`",
        ),
        ("chunk_simple_gla", {"cu_seqlens": torch.tensor([0, 4.0])}, ValueError, "batch size is expected"),
    ],
)
@pytest.mark.parametrize("taken", ["before", "after"])
def test_fla_says_what_is_wrong_with_an_argument(
    name: str, change: dict[str, Any], error: type[Exception], message: str, taken: str, machine: Machine
) -> None:
    function = own(name)
    integration.accelerate()
    with pytest.raises(error, match=message):
        (own(name) if taken == "after" else function)(**draw_call(name) | change)
    assert taken == "before" or integration.last_path() is None


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        (GATED, {"beta": torch.ones(2, 70, 4, dtype=torch.long)}, "beta: expected dtype"),
        ("chunk_simple_gla", {"g_gamma": torch.zeros(2)}, "g_gamma: expected None where g is given"),
    ],
)
def test_arguments_that_fla_lets_pass(
    name: str, change: dict[str, Any], reason: str, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that this package refuses are fla's to judge; the log has the reason."""
    integration.accelerate()
    assert own(name)(**draw_call(name) | change) == FLA_S
    path = integration.last_path()
    assert path is not None and path.backend == "fla" and reason in path.reason
    assert [reason in record.message for record in caplog.records] == [True]


def test_within_fla_its_own_functions_are_called(call: Any, machine: Machine) -> None:
    if call.__name__ == "chunk_delta_rule":
        pytest.skip("fla takes no fp32")
    with fla_own.on_its_own():
        assert call() == FLA_S


def test_flags_of_the_delta_rule_that_are_no_bools(machine: Machine) -> None:
    """fla asks no more of a flag than that it is true or not."""
    x = {name: t.half() for name, t in draw_call("chunk_delta_rule").items() if torch.is_tensor(t)}
    integration.accelerate()
    o, last = own("chunk_delta_rule")(**x, use_qk_l2norm_in_kernel=1, output_final_state=None)
    assert last is None and integration.last_path() == integration.Path("chunk_delta_rule", "tk")
    expected, _ = tfla_tk.chunk_delta_rule(**x, use_qk_l2norm_in_kernel=True, backend="reference:recurrent")
    torch.testing.assert_close(o, expected, rtol=1e-2, atol=1e-2)


def test_the_triton_backend_is_fla_itself(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """backend="triton" calls fla's own function, whatever is in its place."""
    integration.accelerate()
    monkeypatch.setattr(fla, "FLA_MISSING", None)
    x = draw_scalar_decay()
    tfla_tk.chunk_simple_gla(**x, backend="triton")
    fla.call_fla("chunk_retention", x["q"].device, *(x[n] for n in "qkv"))
    assert machine.own_calls == 2
