"""The decoding kernels, whose sources run on a CPU here, behind the public functions."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

import tfla_tk
from tfla_tk import build
from tfla_tk.backends.tk import recurrent
from tfla_tk.build import instances
from tfla_tk.calls.recurrent import RecurrentCore, Slots
from tfla_tk.core.support import SUPPORTED
from tfla_tk.ops import recurrent as ops

HALF = torch.bfloat16
FLAGS = ("use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "use_gate_in_kernel")


@pytest.fixture(autouse=True)
def served(emulated: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of up to 8 tokens are served by the kernels, on the CPU; plain ones and through the op."""
    monkeypatch.setattr(build, "load", lambda launcher, *instances: emulated)
    monkeypatch.setattr(recurrent, "current_stream", lambda device: 0)
    monkeypatch.setattr(recurrent.refusals, "of_place", lambda device: None)
    monkeypatch.setattr(recurrent.device, "supports", lambda *args: SUPPORTED)
    monkeypatch.setattr(recurrent.device, "load", lambda *args: SUPPORTED)
    monkeypatch.setattr(ops, "_on_cpu", None)


def draw(
    name: str, *, tokens: int = 1, batch: int = 2, heads: tuple[int, int] = (1, 2),
    dims: tuple[int, int] = (64, 64), dtype: torch.dtype = HALF, v_first: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Arguments of a function, fp32 gates and state."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    keys, values = heads if name != "gla" else (heads[1], heads[1])
    x: dict[str, Any] = {
        "q": normal(batch, tokens, keys, dims[0]).to(dtype),
        "k": normalize(normal(batch, tokens, keys, dims[0]), dim=-1).to(dtype),
        "v": normal(batch, tokens, values, dims[1]).to(dtype),
        "initial_state": normal(batch, values, *(dims[::-1] if v_first else dims)),
        "output_final_state": True,
    }
    gate = logsigmoid(normal(batch, tokens, values) + 2)
    if name in ("gla", "kda"):
        x["gk" if name == "gla" else "g"] = logsigmoid(normal(batch, tokens, values, dims[0]) + 2)
    elif "gate" in name or name == "simple_gla":
        x["g"] = gate
    if "delta" in name or name == "kda":
        x["beta"] = torch.sigmoid(normal(batch, tokens, values))
    return x | ({"state_v_first": True} if v_first else {})


def call(name: str, x: dict[str, Any], backend: str = "tk") -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = getattr(tfla_tk, f"fused_recurrent_{name}")(**x, backend=backend)
    return result


def exact(name: str, x: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """By the reference in fp64."""
    wide = {
        key: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for key, value in x.items()
    }
    return call(name, wide, "reference:recurrent")


def assert_close(name: str, x: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """That the kernels' results are exact, as far as fp32 and the rounding of o allow."""
    o, last = call(name, x)
    expected, expected_last = exact(name, x)
    torch.testing.assert_close(last.double(), expected_last, rtol=1e-5, atol=1e-5)
    limits = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[x["q"].dtype]
    assert o.dtype == x["q"].dtype
    torch.testing.assert_close(o.double(), expected, rtol=limits, atol=limits)
    return o, last


NAMES = ("gla", "simple_gla", "retention", "delta_rule", "gated_delta_rule", "kda")
DIMS = ((64, 64), (96, 192), (128, 128), (256, 64))
TOKENS = (1, 4, 3, 7)
CASES = [
    (
        name,
        DIMS[(n + m) % 4] if name != "kda" else ((64, 64), (128, 128))[m // 2],
        TOKENS[(n + 2 * m) % 4],
        (HALF, torch.float32, torch.float16)[(n + m) % 3],
        m % 2 == 1,
    )
    for n, name in enumerate(NAMES)
    for m in range(4)
]


@pytest.mark.parametrize(("name", "dims", "tokens", "dtype", "v_first"), CASES, ids=str)
def test_against_fp64(
    name: str, dims: tuple[int, int], tokens: int, dtype: torch.dtype, v_first: bool
) -> None:
    v_first = v_first and name != "delta_rule"  # fla's has K first alone
    assert_close(name, draw(name, tokens=tokens, dims=dims, dtype=dtype, v_first=v_first))


@pytest.mark.parametrize(
    ("name", "v_first"),
    [("gla", True), ("gated_delta_rule", False), ("gated_delta_rule", True), ("kda", True)],
)
def test_tokens_of_one_call_are_those_of_single_calls(name: str, v_first: bool) -> None:
    """Bitwise."""
    x = draw(name, tokens=7, dims=(64, 128), v_first=v_first)
    o, last = call(name, x)
    rows = []
    for t in range(7):
        token = {
            k: v[:, t : t + 1] if isinstance(v, Tensor) and k != "initial_state" else v for k, v in x.items()
        }
        row, state = call(name, token)
        x["initial_state"] = state
        rows.append(row)
    assert torch.equal(torch.cat(rows, dim=1), o) and torch.equal(state, last)


@pytest.mark.parametrize("flags", [FLAGS, FLAGS[:1], FLAGS[1:2]], ids=str)
@pytest.mark.parametrize("v_first", [False, True])
def test_raw_inputs(flags: tuple[str, ...], v_first: bool) -> None:
    x = draw("gated_delta_rule", tokens=2, v_first=v_first) | dict.fromkeys(flags, True)
    x["k"] = 3 * x["k"]
    x["beta"] = x["beta"].half() if len(flags) > 1 else x["beta"]
    x["A_log"], x["dt_bias"] = torch.tensor([0.5, -1.0]), torch.tensor([0.3, 30.0]).bfloat16()
    if "use_qk_l2norm_in_kernel" not in flags:
        x["k"] = normalize(x["k"].float(), dim=-1).to(HALF)
    assert_close("gated_delta_rule", x)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("tokens", [1, 7])
def test_raw_inputs_of_kda(tokens: int, lower_bound: float | None) -> None:
    """As fla's layer passes them: in bf16, V first."""
    x = draw("kda", tokens=tokens, v_first=True) | dict.fromkeys(FLAGS, True) | {"lower_bound": lower_bound}
    x |= {"k": 3 * x["k"], "g": 4 * x["g"].to(HALF), "beta": x["beta"].to(HALF)}
    x |= {"A_log": torch.tensor([0.5, -1.0]), "dt_bias": torch.linspace(-2, 5, 128)}
    assert_close("kda", x)


def test_views_of_one_projection() -> None:
    """q, k and v are parts of one tensor, beta and g of another."""
    x = draw("gated_delta_rule", tokens=2, heads=(2, 2))
    joined = torch.cat([x["q"], x["k"], x["v"]], dim=-1)
    gates = torch.stack([x["g"], x["beta"]], dim=-1)
    views = dict(zip("qkv", joined.split(64, dim=-1), strict=True))
    views |= {"g": gates[..., 0], "beta": gates[..., 1]}
    assert not any(view.is_contiguous() for view in views.values())
    assert all(map(torch.equal, call("gated_delta_rule", x | views), call("gated_delta_rule", x)))


@pytest.mark.parametrize("v_first", [False, True])
def test_states_that_are_not_there(v_first: bool) -> None:
    """None before: zeros. None behind: the same outputs."""
    x = draw("gated_delta_rule", tokens=5, v_first=v_first)
    zeros = x | {"initial_state": torch.zeros_like(x["initial_state"])}
    o, last = call("gated_delta_rule", zeros)
    found, found_last = call("gated_delta_rule", x | {"initial_state": None})
    assert torch.equal(found, o) and torch.equal(found_last, last)
    found, nothing = call("gated_delta_rule", x | {"initial_state": None, "output_final_state": False})
    assert torch.equal(found, o) and nothing is None


@pytest.mark.parametrize("dtype", [torch.float32, HALF, torch.float16])
@pytest.mark.parametrize("v_first", [False, True])
def test_states_of_a_pool(dtype: torch.dtype, v_first: bool) -> None:
    """In place, between states that stay as they are; states of 16 bits are rounded after each token."""
    x = draw("gated_delta_rule", tokens=6, batch=3, v_first=v_first)
    states = x.pop("initial_state")
    pool = torch.randn(5, 2, 2, 64, 64).to(dtype)[:, 0]  # every second state of a wider one
    pool[4], pool[1] = states[0], states[2]
    before = pool.clone()
    indices = torch.tensor([4, -1, 1], dtype=torch.int32)
    in_pool = {"initial_state": pool, "state_indices": indices, "inplace": True}
    o, last = call("gated_delta_rule", x | in_pool)
    assert last is pool and not o[1].any()
    assert torch.equal(pool[[0, 2, 3]], before[[0, 2, 3]])
    expected, expected_last = exact("gated_delta_rule", x | {"initial_state": before[[4, 0, 1]]})
    limit = {torch.float32: 1e-5, torch.float16: 2e-3, HALF: 2e-2}[dtype]
    torch.testing.assert_close(pool[[4, 1]].double(), expected_last[::2], rtol=limit, atol=limit)
    torch.testing.assert_close(o[::2].double(), expected[::2], rtol=2e-2, atol=2e-2)
    again = before.clone()
    rows = []
    for t in range(6):
        token = {k: v[:, t : t + 1] if isinstance(v, Tensor) else v for k, v in x.items()}
        rows.append(call("gated_delta_rule", token | in_pool | {"initial_state": again})[0])
    assert torch.equal(torch.cat(rows, dim=1), o) and torch.equal(again, pool)


def test_a_state_at_an_odd_address() -> None:
    """Which no vector load takes: through a copy."""
    x = draw("gla", tokens=2)
    o, last = call("gla", x)
    shifted = torch.cat([torch.zeros(1), x["initial_state"].flatten()])[1:].view_as(x["initial_state"])
    found, state = call("gla", x | {"initial_state": shifted, "inplace": True})
    assert torch.equal(found, o) and torch.equal(state, last) and state is shifted


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("name", ["gla", "gated_delta_rule", "kda"])
def test_packed_sequences(name: str, v_first: bool, dtype: torch.dtype) -> None:
    """Of 3, 0, 1, 10 and 4 tokens, each as alone; in a pool one of them has no state."""
    x = draw(name, tokens=18, batch=1, v_first=v_first)
    states = draw(name, batch=5, v_first=v_first)["initial_state"]
    offsets = torch.tensor([0, 3, 3, 4, 14, 18])
    packed = x | {"cu_seqlens": offsets.to(dtype), "initial_state": states}
    o, last = assert_close(name, packed)
    for n, (start, end) in enumerate(itertools.pairwise(offsets.tolist())):
        alone = {k: v[:, start:end] if isinstance(v, Tensor) else v for k, v in x.items()}
        if start == end:
            assert torch.equal(last[n], states[n])
        elif end - start <= 8:  # as many as a call of these kernels has on average
            found, found_last = call(name, alone | {"initial_state": states[n : n + 1]})
            assert torch.equal(found, o[:, start:end]) and torch.equal(found_last[0], last[n])
    pool, indices = torch.cat([states, states]), torch.tensor([5, 1, 7, -1, 9], dtype=torch.int32)
    before = pool.clone()
    found, _ = call(name, packed | {"initial_state": pool, "state_indices": indices, "inplace": True})
    assert torch.equal(found[:, :4], o[:, :4]) and not found[:, 4:14].any()
    assert torch.equal(pool[[0, 2, 3, 4, 6, 8]], before[[0, 2, 3, 4, 6, 8]])


@pytest.mark.parametrize(
    ("name", "v_first", "tokens", "dtype"),
    [
        ("gated_delta_rule", True, 3, torch.float32),
        ("gated_delta_rule", False, 7, HALF),  # in two turns
        ("gla", True, 7, torch.float16),
        ("gla", False, 1, torch.float32),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_the_state_behind_every_token(
    name: str, v_first: bool, tokens: int, dtype: torch.dtype, packed: bool
) -> None:
    """From the state that the accepted tokens tell; bitwise as calls of one token. Slot 0 is no state."""
    x = draw(name, tokens=tokens, batch=3, dims=(64, 128), v_first=v_first)
    slots = torch.randperm(3 * 8, generator=torch.Generator().manual_seed(1)).int().view(3, 8) + 1
    slots[1] = 0
    accepted = torch.tensor([8, 1, 2], dtype=torch.int32)
    pool = torch.randn(25, 2, *x.pop("initial_state").shape[1:]).to(dtype)[:, 0]
    before, expected = pool.clone(), pool.clone()
    rows = torch.zeros_like(x["v"])
    for n in (0, 2):
        state = before[slots[n, accepted[n] - 1]]
        for t in range(tokens):
            token = {k: v[n : n + 1, t : t + 1] if isinstance(v, Tensor) else v for k, v in x.items()}
            kept = state[None].clone()
            rows[n, t] = call(name, token | {"initial_state": kept, "inplace": True})[0][0, 0]
            expected[slots[n, t]] = state = kept[0]
    given = [x["q"], x["k"], x["v"], x.get("gk", x.get("g")), x.get("beta")]
    offsets = None
    if packed:
        given = [None if part is None else part.flatten(0, 1)[None] for part in given]
        offsets = torch.arange(4) * tokens
    core = RecurrentCore(
        *given, None, None, pool, offsets, 64**-0.5, v_first, False, False, False, None, True
    )
    o = torch.full_like(core.v, torch.nan)
    recurrent.launch_in_place(core, o, Slots(slots, accepted, 1))
    assert torch.equal(pool, expected) and torch.equal(o.view_as(rows), rows)
    accepted[:] = 1
    recurrent.launch_in_place(core, o, Slots(slots[:, :2], accepted, 1))  # states of two tokens
    assert o.view_as(rows)[0, :2].any() and not o.view_as(rows)[:, 2:].any()


@pytest.mark.parametrize("log", [0.0, -1e-4, -50.0, -1e3, -1e5, -torch.inf])
def test_extreme_gates(log: float) -> None:
    for name, gate in (("gla", "gk"), ("gated_delta_rule", "g"), ("kda", "g")):
        x = draw(name, tokens=2)
        x[gate] = torch.full_like(x[gate], log)
        x[gate][..., ::2] = -0.1
        assert_close(name, x)


@pytest.mark.parametrize(("name", "v_first"), [("delta_rule", False), ("gla", True)])
def test_many_batch_entries(name: str, v_first: bool) -> None:
    """So many that a CTA takes several slices of V, one after the other."""
    assert_close(name, draw(name, dims=(64, 256), batch=9, v_first=v_first))


def test_the_columns_of_a_launch(emulated: SimpleNamespace) -> None:
    for keys, v_first in itertools.product(instances.RECURRENT_KEYS, (False, True)):
        assert emulated.decode_columns(keys, v_first) == instances.recurrent_columns(keys, v_first)


def test_what_the_kernels_refuse() -> None:
    for changes, reason in (
        ({"dims": (80, 64)}, "K is one of 64, 96, 128, 256, this is 80"),
        ({"dims": (64, 48)}, "V is a multiple of 32, this is 48"),
        ({"dtype": torch.float64}, "q, k, v are torch.float64"),
    ):
        with pytest.raises(tfla_tk.UnsupportedError, match=reason):
            call("gla", draw("gla", **changes))
    with pytest.raises(tfla_tk.UnsupportedError, match="K is one of 64, 128, this is 96"):
        call("kda", draw("kda", dims=(96, 64)))
