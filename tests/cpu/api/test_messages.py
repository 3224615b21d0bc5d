"""What messages tell: every reason of a refusal, what a name was meant to be, layouts that look swapped."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

import tfla_tk
from tfla_tk import UnsupportedError, delta_rule, gla, mlstm, simple_gla, which
from tfla_tk.backends.tk import device
from tfla_tk.backends.tk.channel_gate import supports_gla
from tfla_tk.backends.triton import fla, installation, mlstm_kernels
from tfla_tk.core import dispatch

LINEAR = ("chunk_simple_gla", "chunk_retention", "chunk_gla", "chunk_delta_rule", "chunk_gated_delta_rule")
MLSTM = ("mlstm_chunkwise", "mlstm_siging_chunkwise")


def draw(op: str, tokens: int = 40, heads: int = 2, dim: int = 16, **kwargs: Any) -> dict[str, Tensor]:
    """The tensors of a call by name."""
    shape = (1, heads, tokens) if op in MLSTM else (1, tokens, heads)
    x = {name: torch.randn(*shape, dim, **kwargs) for name in "qkv"}
    gates = {"chunk_retention": "", "chunk_gla": "g", "chunk_simple_gla": "g", "chunk_delta_rule": "beta"}
    for name in ["i", "f"] if op in MLSTM else gates.get(op, "g beta").split():
        x[name] = -torch.rand(*shape, *([dim] if op == "chunk_gla" else []))
    return x


# refusals


@pytest.mark.parametrize("op", LINEAR)
def test_a_refusal_has_all_of_its_reasons(op: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        getattr(tfla_tk, op)(**draw(op, dim=513), backend="tk")
    for told in ("tensors are on cpu", "q, k, v are torch.float32", "K = 513, V = 513"):
        assert told in caught.value.reason
    for told in ("move them to a GPU", "torch.bfloat16", "use up to K = "):
        assert told in caught.value.remedy


def test_a_refusal_of_tritons_kernels_has_all_of_its_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "INTERPRETED", False)
    for module, name in ((mlstm_kernels, "MLSTM_KERNELS_MISSING"), (fla, "FLA_MISSING")):
        monkeypatch.setattr(module, name, installation.missing("no_such_package", "a package"))
    x = draw("mlstm_chunkwise", dim=8, dtype=torch.float64)
    reason = which("mlstm_chunkwise", **x, cu_seqlens=torch.tensor([0, 40])).reasons["triton"].reason
    for told in ("on cpu", "a package is not installed", "no float64", "variable length", "DHHV = 8"):
        assert told in reason
    x = draw("chunk_delta_rule", dim=264, dtype=torch.float64)
    reason = which("chunk_delta_rule", **x).reasons["triton"].reason
    for told in ("on cpu", "a package is not installed", "no float64", "K = 264"):
        assert told in reason


def test_the_machine_is_among_the_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "device_fault", lambda index: ("this is an A100", "use an H100"))
    *_, call = dispatch.describe("chunk_gla", **draw("chunk_gla", dim=513))
    verdict = supports_gla(dataclasses.replace(call, device=torch.device("cuda", 0)))
    for told in ("this is an A100", "q, k, v are torch.float32", "K = 513"):
        assert told in verdict.reason


def test_what_no_kernel_has_is_among_the_reasons() -> None:
    x = draw("chunk_gla")
    with torch.autograd.forward_ad.dual_level(), tfla_tk.batch_invariant():
        x["q"] = torch.autograd.forward_ad.make_dual(x["q"], x["q"])
        reasons = which("chunk_gla", **x).reasons
    for name in ("tk", "triton"):
        assert "tensors are on cpu" in reasons[name].reason and "forward-mode" in reasons[name].reason
    assert "batch_invariant is on" in reasons["triton"].reason


# names


@pytest.mark.parametrize(
    ("backend", "meant"),
    [
        ("tirton", "triton"),
        ("referense", "reference"),
        ("reference:recurent", "reference:recurrent"),
        ("TK", "tk"),
    ],
)
def test_a_name_that_is_close_to_a_backend(backend: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"got '{backend}' .did you mean '{meant}'.."):
        tfla_tk.chunk_gla(**draw("chunk_gla"), backend=backend)


def test_a_name_that_is_close_to_an_operator() -> None:
    with pytest.raises(ValueError, match=r"got 'chunk_gated_delta' .did you mean 'chunk_gated_delta_rule'.."):
        which("chunk_gated_delta")


# numbers and options that no call can have

NUMBERS = {"an int": 10**400, "a fraction": Fraction(10**400), "an int that Python does not print": 10**5000}


def expect_message(error: type[Exception], name: str, call: Callable[..., Any], **arguments: Any) -> None:
    with pytest.raises(error, match=rf"^{name}: expected .+, got .+") as caught:
        call(**arguments)
    assert caught.type is error and len(str(caught.value)) < 300


@pytest.mark.parametrize("value", NUMBERS.values(), ids=NUMBERS)
def test_numbers_that_no_float_holds(value: Any) -> None:
    for op in LINEAR:
        expect_message(ValueError, "scale", getattr(tfla_tk, op), **draw(op), scale=value)
    for op in MLSTM:
        expect_message(ValueError, "eps", getattr(tfla_tk, op), **draw(op), eps=value)


@pytest.mark.parametrize("size", [2**63, 2**5000, 2**20000], ids=["63", "5000", "20000"])
def test_integers_that_torch_cannot_take(size: int) -> None:
    for op in ("chunk_simple_gla", "chunk_gated_delta_rule", *MLSTM):
        expect_message(ValueError, "chunk_size", getattr(tfla_tk, op), **draw(op), chunk_size=size)


@pytest.mark.filterwarnings("ignore:The PyTorch API of")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_as_an_option(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=layout)
    options = ("scale", "output_final_state", "state_v_first", "chunk_size", "backend")
    for name in options:
        function = tfla_tk.chunk_simple_gla
        expect_message(TypeError, name, function, **draw("chunk_simple_gla"), **{name: nested})
    for name in ("eps", "return_last_states", "autocast_kernel_dtype"):
        expect_message(TypeError, name, tfla_tk.mlstm_chunkwise, **draw(MLSTM[0]), **{name: nested})


# layouts


@pytest.fixture(autouse=True)
def nothing_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (mlstm._chunkwise, simple_gla._path, gla._path, delta_rule._path):
        monkeypatch.setattr(path, "_warned", set())
        path.plans.clear()


@pytest.mark.parametrize("op", [*LINEAR, *MLSTM])
def test_more_heads_than_tokens_are_told_once(op: str) -> None:
    function = getattr(tfla_tk, op)
    layout = r"\[B, NH, S, DHQK\]" if op in MLSTM else r"\[B, T, H, K\]"
    with pytest.warns(UserWarning, match=rf"^{op}: q has 32 heads and 8 tokens, read as {layout}") as caught:
        function(**draw(op, tokens=8, heads=32))
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        function(**draw(op, tokens=7, heads=32))


@pytest.mark.filterwarnings("error")
def test_what_is_not_told() -> None:
    x = draw("chunk_gla", tokens=32, heads=32)
    tfla_tk.chunk_gla(**x)
    few = {name: t[:, :4] for name, t in x.items()}
    # a state has the heads
    tfla_tk.chunk_gla(**few, initial_state=torch.zeros(1, 32, 16, 16))
    which("chunk_gla", **few)
    torch.compile(tfla_tk.chunk_gla, backend="eager", fullgraph=True)(**few)
    tfla_tk.chunk_gla(**{name: t[:, :0] for name, t in x.items()})
