"""Results of the operators in [B, T, H, D] are contiguous, as fla's are, whatever the inputs' strides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import tfla_tk
from tfla_tk import delta_rule, gla, reference, simple_gla
from tfla_tk.backends.tk import linear as tk_linear
from tfla_tk.core.support import SUPPORTED

from .linear import Inputs

OFFSETS = [0, 5, 5, 40]
FAMILIES = [(simple_gla, "simple_gla"), (gla, "gla"), (delta_rule, "delta_rule")]
# the gates of each function, by how many dimensions they have
GATES: dict[str, dict[str, int]] = {
    "chunk_simple_gla": {"g": 3},
    "chunk_retention": {},
    "chunk_lightning_attn": {},
    "chunk_gla": {"g": 4},
    "chunk_delta_rule": {"beta": 3},
    "chunk_gated_delta_rule": {"g": 3, "beta": 3},
}
WITH_V_FIRST = ("chunk_simple_gla", "chunk_gla", "chunk_gated_delta_rule")
CALLS = [(name, v_first) for name in GATES for v_first in (False, True)[: 1 + (name in WITH_V_FIRST)]]


@pytest.fixture
def tk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The tk backend serves every call, by the registered ops."""
    for family, name in FAMILIES:
        family._path.plans.clear()
        monkeypatch.setattr(tk_linear, f"supports_{name}", lambda call, variant=None: SUPPORTED)
        monkeypatch.setattr(tk_linear, "load", lambda kernel, call, variant=None: SUPPORTED)
        monkeypatch.setattr(tk_linear, f"prepare_{name}", lambda *args: None)
    yield
    for family, _ in FAMILIES:
        family._path.plans.clear()


def draw(name: str, *, packed: bool, v_first: bool, dims: tuple[int, int] = (16, 32)) -> Inputs:
    """The arguments of a call, contiguous."""
    generator = torch.Generator().manual_seed(0)
    batch, rows = (1, len(OFFSETS) - 1) if packed else (2, 2)
    shapes = {"q": (batch, 40, 3, dims[0]), "k": (batch, 40, 3, dims[0]), "v": (batch, 40, 3, dims[1])}
    shapes |= {gate: (batch, 40, 3, dims[0])[:rank] for gate, rank in GATES[name].items()}
    shapes["initial_state"] = (rows, 3, *(dims[::-1] if v_first else dims))
    x: Inputs = {n: torch.randn(shape, generator=generator) for n, shape in shapes.items()}
    x |= {n: x[n].sigmoid().log() if n == "g" else x[n].sigmoid() for n in GATES[name]}
    x["k"] = torch.nn.functional.normalize(x["k"], dim=-1)
    if packed:
        x["cu_seqlens"] = torch.tensor(OFFSETS)
    if name == "chunk_lightning_attn":
        x |= {"layer_idx": 1, "num_layers": 4}
    return x | ({"state_v_first": True} if v_first else {})


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


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("backend", ["reference", "reference:recurrent", "reference:parallel", "tk"])
@pytest.mark.parametrize(("name", "v_first"), CALLS)
def test_eager(name: str, v_first: bool, backend: str, packed: bool, tk: None) -> None:
    x, function = draw(name, packed=packed, v_first=v_first), getattr(tfla_tk, name)
    expected = function(**x, output_final_state=True, backend="reference:recurrent")
    for inputs in (x, heads_first(x)):
        check(lambda **x: function(**x, backend=backend), inputs, expected)


@pytest.mark.parametrize("dims", [(16, 20), (12, 32)])
@pytest.mark.parametrize("name", ["chunk_simple_gla", "chunk_gla", "chunk_gated_delta_rule"])
def test_head_dims_that_are_padded(name: str, dims: tuple[int, int], tk: None) -> None:
    function = getattr(tfla_tk, name)
    for v_first in (False, True):
        x = heads_first(draw(name, packed=False, v_first=v_first, dims=dims))
        check(lambda **x: function(**x, backend="tk"), x, function(**x, output_final_state=True))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("backend", ["reference", "tk"])
@pytest.mark.parametrize(
    ("name", "v_first"), [call for call in CALLS if call[1] or call[0] not in WITH_V_FIRST]
)
def test_compiled_and_fake(name: str, v_first: bool, backend: str, packed: bool, tk: None) -> None:
    """Also within the graph, where callers reshape o."""
    function = getattr(tfla_tk, name)
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
    x = heads_first(draw("chunk_simple_gla", packed=False, v_first=True))
    check(getattr(reference, f"simple_gla_{form}"), x)
    x = heads_first(draw("chunk_gla", packed=True, v_first=False))
    check(getattr(reference, f"gla_{form}"), x)


@pytest.mark.parametrize("name", WITH_V_FIRST)
def test_without_a_token(name: str) -> None:
    """The final state is a copy of the initial one, which may lie anyhow."""
    x = heads_first(draw(name, packed=False, v_first=True))
    x |= {n: x[n][:, :0] for n in ("q", "k", "v", *GATES[name])}
    check(getattr(tfla_tk, name), x, (x["v"], x["initial_state"]))
