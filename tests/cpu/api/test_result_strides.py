"""Results of the operators in [B, T, H, D] are contiguous, as fla's are, whatever the inputs' strides."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tfla_tk import chunk_lightning_attn, chunk_retention, reference

from .families import GATED, GLA, KDA, SIMPLE_GLA, UNGATED
from .linear import Inputs

OFFSETS = torch.tensor([0, 5, 5, 40])
FAMILIES = {
    "simple_gla": (SIMPLE_GLA, SIMPLE_GLA.function),
    "retention": (SIMPLE_GLA, chunk_retention),
    "lightning_attn": (SIMPLE_GLA, chunk_lightning_attn),
    "gla": (GLA, GLA.function),
    "delta_rule": (UNGATED, UNGATED.function),
    "gated_delta_rule": (GATED, GATED.function),
    "kda": (KDA, KDA.function),
}
V_FIRST = ("simple_gla", "gla", "gated_delta_rule", "kda")
CALLS = [(name, v_first) for name in FAMILIES for v_first in (False, True) if name in V_FIRST or not v_first]


def draw(name: str, *, packed: bool, v_first: bool, **sizes: Any) -> Inputs:
    """The arguments of a call, contiguous."""
    x: Inputs = FAMILIES[name][0].draw(**sizes, **{"batch": 1, "rows": 3} if packed else {})
    if name in ("retention", "lightning_attn"):
        del x["g"]
    if name == "lightning_attn":
        x |= {"layer_idx": 1, "num_layers": 4}
    if packed:
        x["cu_seqlens"] = OFFSETS
    if v_first:
        x |= {"initial_state": x["initial_state"].mT.contiguous(), "state_v_first": True}
    return x


def heads_first(x: Inputs) -> Inputs:
    """The same numbers with dimensions 1 and 2 swapped in memory, of the initial state the last two."""

    def turned(name: str, t: Any) -> Any:
        if not isinstance(t, Tensor) or t.dim() < 3:
            return t
        dims = (2, 3) if name == "initial_state" else (1, 2)
        return t.transpose(*dims).contiguous().transpose(*dims)

    return {name: turned(name, t) for name, t in x.items()}


def check(call: Callable[..., Any], x: Inputs, expected: Any = None) -> None:
    """That o and the final state are contiguous, and what they are of contiguous inputs."""
    o, last = call(**x, output_final_state=True)
    assert o.shape == x["v"].shape and last.shape == x["initial_state"].shape
    assert o.is_contiguous() and last.is_contiguous()
    if expected is not None:
        torch.testing.assert_close((o, last), expected)


@pytest.fixture
def function(name: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Of the name; the tk backend serves every call, on the CPU."""
    family, function = FAMILIES[name]
    family.serve(monkeypatch)
    return function


@pytest.mark.parametrize(
    ("backend", "packed"),
    [
        *itertools.product(("reference", "tk"), (False, True)),
        ("reference:recurrent", True),
        ("reference:parallel", True),
    ],
)
@pytest.mark.parametrize(("name", "v_first"), CALLS)
def test_eager(name: str, v_first: bool, backend: str, packed: bool, function: Callable[..., Any]) -> None:
    x = draw(name, packed=packed, v_first=v_first)
    expected = function(**x, output_final_state=True, backend="reference:recurrent")
    for inputs in (x, heads_first(x)):
        check(lambda **x: function(**x, backend=backend), inputs, expected)


@pytest.mark.parametrize("dims", [(16, 20), (12, 32)])
@pytest.mark.parametrize("name", V_FIRST)
def test_head_dims_that_are_padded(name: str, dims: tuple[int, int], function: Callable[..., Any]) -> None:
    for v_first in (False, True):
        x = heads_first(draw(name, packed=False, v_first=v_first, dims=dims))
        check(lambda **x: function(**x, backend="tk"), x, function(**x, output_final_state=True))


@pytest.mark.parametrize(("backend", "packed"), [("reference", False), ("tk", True)])
@pytest.mark.parametrize(("name", "v_first"), [call for call in CALLS if call[1] or call[0] not in V_FIRST])
def test_compiled_and_fake(
    name: str, v_first: bool, backend: str, packed: bool, function: Callable[..., Any]
) -> None:
    """Also within the graph, where callers reshape o."""
    x = heads_first(draw(name, packed=packed, v_first=v_first))

    def call(**x: Any) -> Any:
        o, last = function(**x, backend=backend)
        return o.view(*o.shape[:2], -1).view(o.shape), last.view(last.shape[0], -1).view(last.shape)

    check(torch.compile(call, backend="aot_eager", fullgraph=True), x, function(**x, output_final_state=True))
    torch._dynamo.reset()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        check(call, {n: mode.from_tensor(t) if isinstance(t, Tensor) else t for n, t in x.items()})


@pytest.mark.parametrize("form", ["recurrent", "parallel", "chunkwise"])
def test_the_reference_itself(form: str) -> None:
    check(
        getattr(reference, f"simple_gla_{form}"), heads_first(draw("simple_gla", packed=False, v_first=True))
    )
    check(getattr(reference, f"gla_{form}"), heads_first(draw("gla", packed=True, v_first=False)))


@pytest.mark.parametrize("name", V_FIRST)
def test_without_a_token(name: str, function: Callable[..., Any]) -> None:
    """The final state is a copy of the initial one, which may lie anyhow."""
    x = heads_first(draw(name, packed=False, v_first=True, seq=0))
    check(function, x, (x["v"], x["initial_state"]))
