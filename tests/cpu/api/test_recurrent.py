"""The functions that go token by token: they compute what the chunkwise functions compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tfla_tk
from tfla_tk import reference

from . import delta_rule as delta_inputs
from . import simple_gla_calls
from .families import draw_gla, draw_without_decay
from .linear import Inputs


def draw_of(name: str, **options: Any) -> Inputs:
    """Arguments of a function by keyword, as fla's name them."""
    if name == "gla":
        x = draw_gla(**options)
        return x | {"gk": x.pop("g")}
    if name == "simple_gla":
        return simple_gla_calls.draw(**options)
    if name == "retention":
        x = simple_gla_calls.draw(**options)
        del x["g"]
        return x
    if name == "delta_rule":
        return draw_without_decay(**options)
    return delta_inputs.draw(**options, by_channel=name == "kda")


def chunkwise(name: str, x: Inputs, **options: Any) -> tuple[Tensor, Tensor | None]:
    """What the chunkwise function computes of the same arguments."""
    function: Callable[..., Any] = getattr(tfla_tk, f"chunk_{name}")
    return function(**{"g" if key == "gk" else key: value for key, value in x.items()}, **options)


NAMES = ("gla", "simple_gla", "retention", "delta_rule", "gated_delta_rule", "kda")
of_every_name = pytest.mark.parametrize("name", NAMES)


@of_every_name
@pytest.mark.parametrize(
    ("seq", "options"),
    [
        (1, {"output_final_state": True}),
        (3, {"scale": 0.5}),
        (70, {"output_final_state": True}),
        (9, {"output_final_state": True, "cu_seqlens": torch.tensor([0, 4, 4, 9])}),
        (0, {"output_final_state": True}),
    ],
)
def test_as_the_chunkwise_function(name: str, seq: int, options: dict[str, Any]) -> None:
    packed = {"batch": 1, "rows": 3} if "cu_seqlens" in options else {}
    x = draw_of(name, seq=seq, **packed)
    found = getattr(tfla_tk, f"fused_recurrent_{name}")(**x, **options)
    torch.testing.assert_close(found, chunkwise(name, x, **options))


@of_every_name
def test_token_by_token_is_the_whole(name: str) -> None:
    function = getattr(tfla_tk, f"fused_recurrent_{name}")
    x = draw_of(name, seq=5)
    whole, last = function(**x, output_final_state=True)
    state, tokens = x.pop("initial_state"), []
    for t in range(5):
        token = {key: value[:, t : t + 1] for key, value in x.items()}
        o, state = function(**token, initial_state=state, output_final_state=True)
        tokens.append(o)
    torch.testing.assert_close(torch.cat(tokens, dim=1), whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, last, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "delta_rule"])
def test_states_of_v_first(name: str) -> None:
    function = getattr(tfla_tk, f"fused_recurrent_{name}")
    x = draw_of(name, seq=2)
    o, last = function(**x, output_final_state=True)
    state = x.pop("initial_state").mT
    found, found_last = function(**x, initial_state=state, output_final_state=True, state_v_first=True)
    torch.testing.assert_close((found, found_last), (o, last.mT))


@of_every_name
def test_gradients_are_those_of_the_chunkwise_function(name: str) -> None:
    x = {key: value.requires_grad_() for key, value in draw_of(name, seq=7).items()}
    inputs = tuple(x.values())
    o, last = getattr(tfla_tk, f"fused_recurrent_{name}")(**x, output_final_state=True)
    found = torch.autograd.grad(o.sum() + last.square().sum(), inputs)
    o, last = chunkwise(name, x, output_final_state=True)
    torch.testing.assert_close(found, torch.autograd.grad(o.sum() + last.square().sum(), inputs))


@pytest.mark.parametrize("name", ["gated_delta_rule", "kda"])
def test_raw_inputs(name: str) -> None:
    x = delta_inputs.draw_raw(seq=4, by_channel=name == "kda")
    found = getattr(tfla_tk, f"fused_recurrent_{name}")(**x, **delta_inputs.FLAGS)
    torch.testing.assert_close(found, delta_inputs.from_raw(**x))


def test_what_absent_gates_mean() -> None:
    x = delta_inputs.draw(seq=4)
    state, ones, zeros = x["initial_state"], torch.ones(2, 4, 4), torch.zeros(2, 4, 4)
    q, k, v = (x[key] for key in "qkv")
    expected = reference.gated_delta_rule_recurrent(q, k, v, zeros, ones, initial_state=state)[0]
    found = tfla_tk.fused_recurrent_gated_delta_rule(q, k, v, initial_state=state)[0]
    torch.testing.assert_close(found, expected)
    found = tfla_tk.fused_recurrent_delta_rule(q, k, v, initial_state=state)[0]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("gla", {"gk": None}, r"gk: expected a tensor \[B, T, H, K\], got NoneType"),
        ("gla", {"gv": torch.zeros(1)}, "gv: expected None .call fla's own function for it., got a tensor"),
        (
            "simple_gla",
            {"reverse": True},
            "reverse: expected False .call fla's own function for it., got True",
        ),
        ("retention", {"reverse": True}, "reverse: expected False"),
        ("gated_delta_rule", {"gk": torch.zeros(1)}, "gk: expected None"),
        ("delta_rule", {"beta": torch.zeros(2, 3, 5)}, r"beta: expected shape \[B, T, HV\] of v"),
        ("gated_delta_rule", {"v": None}, "v: expected a tensor"),
        ("kda", {"beta": None}, "beta: expected a tensor"),
        ("gated_delta_rule", {"g": None, "use_gate_in_kernel": True}, "g: expected a tensor"),
        ("delta_rule", {"v": torch.zeros(2)}, "v: expected 4 dimensions"),
    ],
)
def test_bad_arguments(name: str, changed: dict[str, Any], message: str) -> None:
    function = getattr(tfla_tk, f"fused_recurrent_{name}")
    for refused in (function, lambda **x: tfla_tk.which(function, **x)):
        with pytest.raises((TypeError, ValueError), match=message):
            refused(**draw_of(name, seq=3) | changed)


@of_every_name
def test_a_state_in_place(name: str) -> None:
    function = getattr(tfla_tk, f"fused_recurrent_{name}")
    x = draw_of(name, seq=3)
    o, last = function(**x, output_final_state=True)
    state = x["initial_state"]
    found, same = function(**x, output_final_state=True, inplace=True)
    torch.testing.assert_close((found, state), (o, last))
    assert same is state


@of_every_name
def test_states_of_a_pool(name: str) -> None:
    function = getattr(tfla_tk, f"fused_recurrent_{name}")
    x = draw_of(name, seq=3, batch=3)
    o, last = function(**x, output_final_state=True)
    states = x.pop("initial_state")
    pool = torch.randn(6, *states.shape[1:], dtype=states.dtype)
    before = pool.clone()
    pool[4], pool[1] = states[0], states[2]
    indices = torch.tensor([4, -1, 1], dtype=torch.int32)
    found, same = function(
        **x, initial_state=pool, state_indices=indices, inplace=True, output_final_state=True
    )
    assert same is pool
    torch.testing.assert_close(found[::2], o[::2])
    assert not found[1].any()
    torch.testing.assert_close(pool[[4, 1]], last[::2])
    assert torch.equal(pool[[0, 2, 3, 5]], before[[0, 2, 3, 5]])


@of_every_name
def test_packed_states_of_a_pool(name: str) -> None:
    """One sequence of no token, and one without a state."""
    function = getattr(tfla_tk, f"fused_recurrent_{name}")
    x = draw_of(name, seq=9, batch=1, rows=4) | {"cu_seqlens": torch.tensor([0, 4, 4, 6, 9])}
    o, last = function(**x, output_final_state=True)
    pool = x.pop("initial_state").flip(0).clone()
    before = pool.clone()
    indices = torch.tensor([3, 2, -1, 0], dtype=torch.int32)
    found, _ = function(**x, initial_state=pool, state_indices=indices, inplace=True, output_final_state=True)
    torch.testing.assert_close(found, torch.cat([o[:, :4], torch.zeros_like(o[:, 4:6]), o[:, 6:]], dim=1))
    torch.testing.assert_close(pool.flip(0)[[0, 1, 3]], last[[0, 1, 3]])
    assert torch.equal(pool[1], before[1])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"initial_state": None}, "initial_state: expected a tensor to overwrite"),
        ({"output_final_state": False}, "output_final_state: expected True with inplace=True"),
        ({"state_indices": torch.zeros(2, dtype=torch.int64)}, "state_indices: expected dtype int32"),
        ({"state_indices": [0, 1]}, "state_indices: expected a tensor"),
        ({"state_indices": torch.zeros(3, dtype=torch.int32)}, "initial_state: expected shape"),
        ({"inplace": False, "state_indices": torch.zeros(2, dtype=torch.int32)}, "inplace: expected True"),
        ({"initial_state": torch.zeros(2, 2, 32, 16).mT}, "initial_state: expected contiguous states"),
    ],
)
def test_bad_states_in_place(changed: dict[str, Any], message: str) -> None:
    x = draw_of("gla", seq=3) | {"output_final_state": True, "inplace": True}
    with pytest.raises((TypeError, ValueError), match=message):
        tfla_tk.fused_recurrent_gla(**x | changed)
    x["q"].requires_grad_()
    with pytest.raises(ValueError, match="inplace: expected False where a gradient is recorded"):
        tfla_tk.fused_recurrent_gla(**x)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("in_place", [False, True])
def test_the_registered_ops(name: str, in_place: bool) -> None:
    """Against the reference, and by opcheck; in place with a pool."""
    x = draw_of(name, seq=3, batch=2, dtype=torch.float32)
    gate = x.get("gk", x.get("g"))
    if name == "retention":
        gate = reference.retention_log_decay(4).expand(2, 3, 4)
    state = x["initial_state"]
    scale, flags = 16**-0.5, (False, False, False, False, None)
    given = *(x[key] for key in "qkv"), gate, x.get("beta"), None, None
    expected = getattr(tfla_tk, f"fused_recurrent_{name}")(**x, output_final_state=True)
    if not in_place:
        args: tuple[Any, ...] = *given, state, None, scale, *flags, True
        torch.testing.assert_close(torch.ops.tfla_tk.recurrent(*args), expected)
        torch.library.opcheck(torch.ops.tfla_tk.recurrent.default, args)
        return
    pool, indices = torch.cat([state, state]), torch.tensor([3, 0], dtype=torch.int32)
    pool[3], pool[0] = state[0].clone(), state[1].clone()
    o = torch.empty_like(x["v"])
    args = *given, pool, None, scale, *flags, o, indices, None, 0
    torch.library.opcheck(torch.ops.tfla_tk.recurrent_.default, args)
    torch.ops.tfla_tk.recurrent_(*args)
    torch.testing.assert_close((o, pool[[3, 0]]), expected)


def test_the_registered_ops_have_no_gradients() -> None:
    x = draw_of("gla", seq=3)
    x["q"].requires_grad_()
    args = *(x[key] for key in ("q", "k", "v", "gk")), None, None, None, x["initial_state"]
    with pytest.raises(RuntimeError, match="tfla_tk::recurrent has no gradients"):
        torch.ops.tfla_tk.recurrent(*args, None, 0.25, False, False, False, False, None, True)


@of_every_name
def test_compiled(name: str) -> None:
    x = draw_of(name, seq=1, dtype=torch.float32)
    function = getattr(tfla_tk, f"fused_recurrent_{name}")

    def step(x: dict[str, Tensor]) -> Any:
        return function(**x, output_final_state=True)

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), step(x))


def test_which_of_a_few_tokens() -> None:
    """The decoding kernels take a few tokens, unless gradients are wanted."""
    x = {key: value.bfloat16() for key, value in draw_of("gla", seq=8).items()}
    reason = "for up to 8 tokens K is one of 64, 96, 128, 256, this is 16"
    assert reason in str(tfla_tk.which("fused_recurrent_gla", **x).reasons["tk"])
    x["q"].requires_grad_()
    assert reason not in str(tfla_tk.which("fused_recurrent_gla", **x).reasons["tk"])
    x = {key: value.bfloat16() for key, value in draw_of("gla", seq=9).items()}
    assert reason not in str(tfla_tk.which("fused_recurrent_gla", **x).reasons["tk"])
    of_ten = draw_of("gla", seq=60, batch=1, rows=10)  # of six on average
    x = {key: value.bfloat16() for key, value in of_ten.items()} | {"cu_seqlens": torch.arange(0, 66, 6)}
    assert reason in str(tfla_tk.which("fused_recurrent_gla", **x).reasons["tk"])
