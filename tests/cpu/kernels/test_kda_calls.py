"""Calls of KDA's kernels: what the host gives them, and what it makes of what they leave."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from tfla_tk import UnsupportedError
from tfla_tk.backends.tk.kda import call as kda_call
from tfla_tk.backends.tk.kda import launch
from tfla_tk.backends.tk.kda.call import Call
from tfla_tk.core.layout import Kept

from .kda import KDA, LOG, SIGMOID, SOFTPLUS, Inputs, Options, outputs
from .stand_in import at_odd_address, launch_instead, watched_memory

OFFSETS = [0, 70, 70, 100]
NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
RAW = {"A_log": True, "dt_bias": True, "qk_l2norm": True, "beta_sigmoid": True}
TOLERANCE = 5e-3  # of rounding to 16 bits


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[KDA]:
    found = KDA()
    launch_instead(monkeypatch, found, kda_call, launch)
    with watched_memory(found, monkeypatch):
        yield found
    launch._forwards.clear()
    launch._backwards.clear()


def draw(
    *,
    heads: tuple[int, int] = (2, 2),
    dims: tuple[int, int] = (64, 48),
    dtype: torch.dtype = torch.bfloat16,
    of_gates: torch.dtype = torch.float32,
    state: bool = True,
    packed: bool = False,
    v_first: bool = False,
    A_log: bool = False,
    dt_bias: bool = False,
    lower_bound: float | None = None,
    **flags: bool,
) -> Call:
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    tokens = (1, OFFSETS[-1]) if packed else (2, 70)
    q, k = (normalize(normal(*tokens, heads[0], dims[0]), dim=-1).to(dtype) for _ in range(2))
    v = normal(*tokens, heads[1], dims[1]).to(dtype)
    g = logsigmoid(normal(*tokens, heads[1], dims[0])).to(of_gates)
    beta = torch.sigmoid(normal(*tokens, heads[1])).to(of_gates)
    sequences = len(OFFSETS) - 1 if packed else tokens[0]
    return Call(
        *(q, k, v, g, beta),
        normal(heads[1]) if A_log else None,
        normal(heads[1] * dims[0]) if dt_bias else None,
        normal(sequences, heads[1], *(dims[::-1] if v_first else dims)) if state else None,
        torch.tensor(OFFSETS) if packed else None,
        0.2,
        lower_bound,
        *(flags.get(name, False) for name in ("qk_l2norm", "beta_sigmoid", "neg_eigval")),
        v_first,
    )


def given_to(call: Call) -> tuple[Tensor, Tensor]:
    """Gradients of o and of the last state."""
    generator = torch.Generator().manual_seed(1)
    do = torch.randn(call.v.shape, generator=generator).to(call.v.dtype)
    rows = len(call.v) if call.cu_seqlens is None else len(call.cu_seqlens) - 1
    dims = call.q.shape[3], call.v.shape[3]
    dht = torch.randn(
        rows, call.v.shape[2], *(dims[::-1] if call.state_v_first else dims), generator=generator
    )
    return do, dht


def train(call: Call) -> dict[str, Tensor]:
    """o, the last state, and the gradients of all inputs."""
    o, last, kept = launch.forward(call, output_final_state=True, keep=True)
    found = launch.backward(call, kept, *given_to(call), needs_gates=True)
    results = {"o": o, "last": last} | {f"d{name}": x for name, x in zip(NAMES, found, strict=True)}
    return {name: x for name, x in results.items() if x is not None}


def truth_of(call: Call) -> dict[str, Tensor]:
    leaves = {
        name: x.double().requires_grad_() for name, x in zip(NAMES, call[:8], strict=True) if x is not None
    }
    batch, _, heads, dim_v = call.v.shape
    group, dim_k = heads // call.q.shape[2], call.q.shape[3]
    packed = call.cu_seqlens is not None
    bounds = [(0, *pair) for pair in pairwise(OFFSETS)] if packed else [(row, 0, 70) for row in range(batch)]
    initial = leaves.get("initial_state", torch.zeros(len(bounds), heads, dim_k, dim_v, dtype=torch.float64))
    initial = initial.mT if call.state_v_first and "initial_state" in leaves else initial
    a_log, dt_bias = leaves.get("A_log"), leaves.get("dt_bias")
    inputs = Inputs(
        *(leaves[name].repeat_interleave(group, 2) for name in ("q", "k")),
        *(leaves[name] for name in ("v", "g", "beta")),
        None if a_log is None else a_log.expand(batch, -1),
        None if dt_bias is None else dt_bias.view(1, heads, dim_k).expand(batch, -1, -1),
        initial,
    )
    gate = SIGMOID if call.lower_bound is not None else LOG if a_log is None else SOFTPLUS
    flags = call.qk_l2norm, call.beta_sigmoid, call.neg_eigval
    o, last = outputs(inputs, Options(gate, call.lower_bound or 0.0, call.scale, *flags), bounds)
    do, dht = given_to(call)
    last = last.mT if call.state_v_first else last
    grads = torch.autograd.grad((o, last), list(leaves.values()), (do.double(), dht.double()))
    return {"o": o, "last": last} | {f"d{name}": x for name, x in zip(leaves, grads, strict=True)}


def check(call: Call) -> None:
    found, truth = train(call), truth_of(call)
    assert found.keys() == truth.keys()
    for name, x in truth.items():
        error = ((found[name].double() - x).norm() / x.norm()).item()
        assert error <= TOLERANCE, f"{name}: {error}"
    for name, x in zip(NAMES, call[:8], strict=True):
        if x is not None:
            grad = found[f"d{name}"]
            assert (grad.dtype, grad.stride()) == (x.dtype, torch.empty_like(x).stride()), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("of_gates", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [(2, 2), (1, 3)], ids=["own heads", "shared heads"])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("v_first", [False, True], ids=["K first", "V first"])
@pytest.mark.parametrize(
    "raw",
    [{}, RAW, {"lower_bound": -5.0, "neg_eigval": True, "beta_sigmoid": True}],
    ids=["made", "raw", "bounded"],
)
def test_training(
    raw: dict[str, Any],
    v_first: bool,
    packed: bool,
    heads: tuple[int, int],
    of_gates: torch.dtype,
    dtype: torch.dtype,
) -> None:
    check(draw(heads=heads, dtype=dtype, of_gates=of_gates, packed=packed, v_first=v_first, **raw))


def test_without_states() -> None:
    call = draw(state=False, dims=(128, 80))
    o, last, kept = launch.forward(call, output_final_state=False, keep=True)
    assert last is None
    found = launch.backward(call, kept, torch.ones_like(o), None, needs_gates=False)
    assert [x is None for x in found] == [False, False, False, True, False, True, True, True]


@pytest.mark.parametrize("place", ["q", "k", "v", "g", "beta", "initial_state"])
def test_tensors_as_they_lie(place: str) -> None:
    """Odd addresses, and strides that no descriptor has: read from copies; gradients are like the inputs."""
    call = draw(packed=True, heads=(1, 2))
    x = getattr(call, place)
    check(call._replace(**{place: at_odd_address(x)}))
    check(call._replace(**{place: x.mT.contiguous().mT}))


def test_what_is_kept(kernels: KDA) -> None:
    """A forward that does not train keeps nothing. What is of another layout is made again."""
    call, (do, dht) = draw(), given_to(draw())
    _, _, none = launch.forward(call, output_final_state=True, keep=False)
    assert none is None and kernels.launches[-1].states == 0
    _, _, kept = launch.forward(call, output_final_state=True, keep=True)
    assert kept is not None and kept.layout == launch.kept_layout(call)
    kernels.launches.clear()
    expected = launch.backward(call, kept, do, dht, needs_gates=True)
    assert kernels.names() == ["mirror", "gradients"]
    for other in (None, Kept((torch.zeros(3),), (3,)), Kept((torch.zeros(3),), kept.layout)):
        found = launch.backward(call, other, do, dht, needs_gates=True)
        assert kernels.names() == ["matrices", "forward", "mirror", "gradients"]
        assert all(x is y or torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_prepared_calls() -> None:
    call = draw(packed=True)
    run = launch.prepare(call, output_final_state=True, keep=False)
    expected = launch.forward(call, output_final_state=True, keep=False)
    for tensors in (call.tensors, (at_odd_address(call.q), *call.tensors[1:])):
        found = run(*tensors)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_v_of_more_than_the_backward_takes() -> None:
    call = draw(dims=(64, 192))
    launch.forward(call, output_final_state=False, keep=False)
    with pytest.raises(UnsupportedError, match="V = 192"):
        launch.forward(call, output_final_state=False, keep=True)
    with pytest.raises(UnsupportedError, match="V = 192"):
        launch.backward(call, None, *given_to(call), needs_gates=True)
