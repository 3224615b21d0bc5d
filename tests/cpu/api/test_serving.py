"""The calls of engines that generate: states of a pool, drafts of several tokens."""

from __future__ import annotations

import itertools
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tfla_tk import UnsupportedError, reference, serving

from . import delta_rule as inputs

SLOTS = 9


def draw(
    *, batch: int, seq: int, dtype: torch.dtype = torch.float64, heads: tuple[int, int] = (2, 4),
    dims: tuple[int, int] = (16, 32),
) -> dict[str, Tensor]:  # fmt: skip
    """Raw inputs under the engines' names, and a pool of SLOTS states [HV, V, K]."""
    x = inputs.draw_raw(batch=batch, seq=seq, rows=SLOTS, dtype=dtype, heads=heads, dims=dims)
    found = {"a": x.pop("g"), "b": x.pop("beta"), "initial_state": x.pop("initial_state").mT.contiguous()}
    return found | x


def exact(x: dict[str, Tensor], row: int, tokens: slice, state: Tensor) -> tuple[Tensor, Tensor]:
    """o [T, HV, V] of one sequence from a state [HV, V, K], and the state behind its last token."""
    q, k, v, a, b = (x[name][row : row + 1, tokens].double() for name in "qkvab")
    o, last = reference.gated_delta_rule_recurrent(
        reference.l2_norm(q),
        reference.l2_norm(k),
        v,
        reference.delta_log_decay(a, x["A_log"].double(), x["dt_bias"].double()),
        torch.sigmoid(b),
        initial_state=state.double().mT[None],
        output_final_state=True,
    )
    return o[0], last[0].mT


def packed_decode(x: dict[str, Tensor], indices: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Of one token, from views of one projection and of another one for a and b."""
    mixed = torch.cat([x[name].flatten(1) for name in "qkv"], dim=1)
    wider = torch.cat([mixed, mixed], dim=1)[:, : mixed.shape[1]]
    gates = torch.cat([x["b"][:, 0], x["a"][:, 0]], dim=1)
    b, a = gates.chunk(2, dim=1)
    out = torch.full_like(x["v"], torch.nan)
    found = serving.fused_recurrent_gated_delta_rule_packed_decode(
        mixed_qkv=wider, a=a, b=b, A_log=x["A_log"], dt_bias=x["dt_bias"], scale=x["q"].shape[-1] ** -0.5,
        initial_state=x["initial_state"], out=out, ssm_state_indices=indices, use_qk_l2norm_in_kernel=True,
        **options,
    )  # fmt: skip
    assert found[0] is out and found[1] is x["initial_state"]
    return found


def update(x: dict[str, Tensor], indices: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return serving.fused_sigmoid_gating_delta_rule_update(
        **x, ssm_state_indices=indices, use_qk_l2norm_in_kernel=True, **options
    )


def ints(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def assert_others_untouched(pool: Tensor, before: Tensor, written: list[int]) -> None:
    others = [slot for slot in range(SLOTS) if slot not in written]
    assert torch.equal(pool[others], before[others])


@pytest.mark.parametrize(
    ("first_index", "indices"), [(0, [3, -1, 0, 8]), (1, [3, 0, 1, 8])], ids=["sglang", "vllm"]
)
@pytest.mark.parametrize("call", [packed_decode, update])
def test_one_token(call: Callable[..., Any], first_index: int, indices: list[int]) -> None:
    """Unused rows have an index below the first one: their output is 0."""
    x = draw(batch=4, seq=1)
    before = x["initial_state"].clone()
    o, pool = call(x, ints(indices), first_index=first_index)
    for row, slot in enumerate(indices):
        if slot < first_index:
            assert not o[row].any()
            continue
        expected, state = exact(x, row, slice(None), before[slot])
        torch.testing.assert_close((o[row], pool[slot]), (expected, state))
    assert_others_untouched(pool, before, [slot for slot in indices if slot >= first_index])


def test_a_pool_of_16_bits_with_gaps() -> None:
    """Pages are longer than their state; the state is rounded, the output is not made of the rounded one."""
    x = draw(batch=2, seq=1, dtype=torch.float32)
    pages = torch.zeros(SLOTS, 2 * x["initial_state"][0].numel(), dtype=torch.bfloat16)
    pool = pages[:, : pages.shape[1] // 2].unflatten(1, x["initial_state"].shape[1:])
    pool.copy_(x["initial_state"])
    x["initial_state"] = pool
    before = pool.clone()
    o, _ = packed_decode(x, ints([5, 2]))
    for row, slot in enumerate([5, 2]):
        expected, state = exact(x, row, slice(None), before[slot])
        torch.testing.assert_close(o[row].double(), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(pool[slot], state.bfloat16(), rtol=1e-2, atol=1e-2)
    assert not pages[:, pages.shape[1] // 2 :].any()


def test_packed_sequences_go_on_from_their_last_state() -> None:
    """Of 3, 0, 1, 2 and 2 tokens; more indices than sequences."""
    x, lengths, indices = draw(batch=1, seq=8), [3, 0, 1, 2, 2], [4, 6, 2, 0, 7]
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    before = x["initial_state"].clone()
    flat = x | {"a": x["a"][0], "b": x["b"][0]}
    o, pool = update(flat, ints([*indices, 8, 8]), cu_seqlens=offsets, first_index=1)
    for slot, (start, end) in zip(indices, itertools.pairwise(offsets.tolist()), strict=True):
        if slot == 0:
            assert not o[0, start:end].any()
        elif end > start:
            expected, state = exact(x, 0, slice(start, end), before[slot])
            torch.testing.assert_close((o[0, start:end], pool[slot]), (expected, state))
    assert_others_untouched(pool, before, [4, 2, 7])


@pytest.mark.parametrize("packed", [False, True])
def test_drafts(packed: bool) -> None:
    """Two drafts, of which some tokens are accepted: the second one goes on from the state behind these."""
    table = ints([[3, 4, 5], [-1, -1, -1], [8, 7, 6]])
    x = draw(batch=3, seq=6)
    first, second = ({n: t[:, at] if t.dim() > 2 and n != "initial_state" else t for n, t in x.items()}
                     for at in (slice(3), slice(3, 6)))  # fmt: skip
    pool = x["initial_state"]
    states = {row: pool[slot].clone() for row, slot in ((0, 4), (2, 8))}
    before = pool.clone()
    accepted = ints([2, 1, 1])  # so the first draft begins at columns 1 and 0
    options: dict[str, Any] = {}
    for draft, number in ((first, 0), (second, 1)):
        given = draft
        if packed:
            joined = {
                n: t.flatten(0, 1)[None] for n, t in draft.items() if t.dim() > 2 and n != "initial_state"
            }
            given = draft | joined
            options["cu_seqlens"] = torch.tensor([0, 3, 6, 9])
        o, _ = update(given, table, num_accepted_tokens=accepted, **options)
        o = o.view(3, 3, *o.shape[2:])
        assert not o[1].any()
        for row in (0, 2):
            state = states[row]
            for t in range(3):
                expected, state = exact(draft, row, slice(t, t + 1), state)
                torch.testing.assert_close((o[row, t], pool[table[row, t]]), (expected[0], state))
                if number == 0 and t == (0, 0, 2)[row]:
                    states[row] = state
        accepted = ints([1, 1, 3])
    assert_others_untouched(pool, before, [3, 4, 5, 6, 7, 8])


def test_a_draft_with_too_few_states() -> None:
    """It ends before the first token without one."""
    x = draw(batch=2, seq=4)
    before = x["initial_state"].clone()
    o, pool = update(x, ints([[1, 2], [4, -1]]))
    for row, count in ((0, 2), (1, 1)):
        expected, state = exact(x, row, slice(count), before[(1, 4)[row]])
        torch.testing.assert_close((o[row, :count], pool[(2, 4)[row]]), (expected, state))
        assert not o[row, count:].any()
    assert_others_untouched(pool, before, [1, 2, 4])


@pytest.mark.parametrize("accepted", [0, 4, 100])
def test_an_accepted_count_of_no_column(accepted: int) -> None:
    """Nothing is read beyond the row of indices."""
    x = draw(batch=2, seq=2)
    before = x["initial_state"].clone()
    o, pool = update(x, ints([[1, 2, 3], [4, 5, 6]]), num_accepted_tokens=ints([accepted, 1]))
    assert not o[0].any() and o[1].any()
    assert_others_untouched(pool, before, [4, 5])


def test_without_autograd_and_compiled() -> None:
    """As engines run: under inference mode; and traced, where the pool and the output are written, too."""
    x = draw(batch=2, seq=1, dtype=torch.float32)
    expected, pool = packed_decode({**x, "initial_state": x["initial_state"].clone()}, ints([1, 3]))
    with torch.inference_mode():
        found, own = packed_decode({n: t.clone() for n, t in x.items()}, ints([1, 3]))
    assert torch.equal(found, expected) and torch.equal(own, pool)

    def step(x: dict[str, Tensor], indices: Tensor) -> Tensor:
        return update(x, indices)[0]

    x["initial_state"] = own = x["initial_state"].clone()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, ints([1, 3])), expected)
    torch.testing.assert_close(own, pool)


MODULES = {
    "in_vllm": "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn",
    "in_sglang": "sglang.srt.layers.attention.linear.kernels.gdn_triton",
}


@pytest.mark.parametrize(("recipe", "padding"), [("in_vllm", 0), ("in_sglang", -1)])
def test_the_recipes(recipe: str, padding: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of docs/engines.md put the call into a module in the place of the engine's."""
    text = (Path(__file__).parents[3] / "docs/engines.md").read_text()
    blocks = re.findall(r"(?:^    .*\n|^\n)+", text, re.MULTILINE)
    names: dict[str, Any] = {}
    exec("".join(textwrap.dedent(block) for block in blocks if "def " in block), names)
    engine = SimpleNamespace(**dict.fromkeys(serving.__all__, lambda **x: "the engine's own"))
    package, _, last = MODULES[recipe].rpartition(".")
    parts = package.split(".")
    for n in range(len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[: n + 1]), ModuleType(parts[n]))
    setattr(sys.modules[package], last, engine)
    names[recipe]()
    x = draw(batch=2, seq=1, dtype=torch.float32)
    given = {
        "mixed_qkv": torch.cat([x[name].flatten(1) for name in "qkv"], dim=1), "a": x["a"], "b": x["b"],
        "A_log": x["A_log"], "dt_bias": x["dt_bias"], "scale": None, "initial_state": x["initial_state"],
        "out": torch.empty_like(x["v"]), "ssm_state_indices": ints([3, padding]),
    }  # fmt: skip
    out, _ = engine.fused_recurrent_gated_delta_rule_packed_decode(**given)
    assert out[0].any() and not out[1].any()

    def refuse(*args: Any) -> None:
        raise UnsupportedError("the call", "no such kernel")

    monkeypatch.setattr(serving, "_serve", refuse)
    assert engine.fused_recurrent_gated_delta_rule_packed_decode(**given) == "the engine's own"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"beta": 2.0}, "beta: expected 1.0 .call the engine's own function"),
        ({"threshold": 30.0}, "threshold: expected 20.0"),
        ({"is_kda": True}, "is_kda: expected False"),
        ({"inplace_final_state": False}, "inplace_final_state: expected True"),
        ({"initial_state": None}, r"initial_state: expected a tensor \[slots, HV, V, K\]"),
        ({"initial_state": torch.zeros(SLOTS, 4, 16, 32)}, "initial_state: expected shape"),
        ({"initial_state": torch.zeros(SLOTS, 4, 16, 32).mT}, "initial_state: expected contiguous states"),
        ({"dt_bias": None}, r"dt_bias: expected a tensor \[HV\], got None"),
        ({"a": torch.zeros(5, 4)}, r"a: expected shape \[B T, HV\] = \(6, 4\)"),
        ({"b": torch.zeros(2, 3, 5)}, r"b: expected shape \[B, T, HV\] of v"),
        ({"ssm_state_indices": None}, r"ssm_state_indices: expected a tensor \[N\] or None"),
        ({"ssm_state_indices": torch.zeros(2, dtype=torch.int64)}, "ssm_state_indices: expected dtype int32"),
        ({"ssm_state_indices": ints([1])}, "ssm_state_indices: expected an index, or a row"),
        ({"ssm_state_indices": ints([[1, 2], [4, 5]]).mT}, "ssm_state_indices: expected contiguous rows"),
        ({"num_accepted_tokens": ints([1, 1])}, "num_accepted_tokens: expected None with ssm_state_indices"),
        ({"first_index": -1}, "first_index: expected 0 or more, got -1"),
        ({"q": torch.zeros(2, 3, 16, 2).mT}, "q: expected contiguous rows"),
    ],
)  # fmt: skip
def test_bad_arguments_of_an_update(changed: dict[str, Any], message: str) -> None:
    x: dict[str, Any] = draw(batch=2, seq=3, dtype=torch.float32)
    indices = changed.pop("ssm_state_indices", ints([1, 2]))
    with pytest.raises((TypeError, ValueError), match=message):
        update(x | changed, indices)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"mixed_qkv": torch.zeros(2, 191)}, r"mixed_qkv: expected \[B, 2 H K \+ HV V\] with K = 16, HV = 4"),
        ({"mixed_qkv": torch.zeros(2, 128)}, "mixed_qkv: expected"),
        ({"out": torch.zeros(2, 4, 32)}, "out: expected 4 dimensions"),
        ({"out": torch.zeros(2, 1, 4, 16)}, r"out: expected shape \[B, 1, HV, V\]"),
        ({"out": torch.zeros(2, 1, 32, 4).mT}, "out: expected contiguous rows"),
        ({"a": torch.zeros(3, 4)}, r"a: expected shape \[B T, HV\]"),
        ({"ssm_state_indices": ints([[1], [2]])}, r"ssm_state_indices: expected shape \[B\]"),
        ({"A_log": torch.zeros(5)}, "A_log: expected shape"),
    ],
)
def test_bad_arguments_of_a_packed_decode(changed: dict[str, Any], message: str) -> None:
    x: dict[str, Any] = {
        "mixed_qkv": torch.randn(2, 192), "a": torch.zeros(2, 4), "b": torch.zeros(2, 4),
        "A_log": torch.zeros(4), "dt_bias": torch.zeros(4), "scale": None,
        "initial_state": torch.zeros(SLOTS, 4, 32, 16), "out": torch.zeros(2, 1, 4, 32),
        "ssm_state_indices": ints([1, 2]),
    }  # fmt: skip
    with pytest.raises((TypeError, ValueError), match=message):
        serving.fused_recurrent_gated_delta_rule_packed_decode(**x | changed)
