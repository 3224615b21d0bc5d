"""What is remembered between calls, and what makes a call a new one."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import tfla_tk
from tfla_tk import Support, UnsupportedError, mlstm, mlstm_chunkwise
from tfla_tk.core import dispatch, memo

from .conftest import STATES, make_inputs
from .served import Functions, Operators, Served


def test_an_equal_call_is_checked_once(served: Served) -> None:
    expected = mlstm_chunkwise(**make_inputs(), backend="reference")
    for _ in range(3):
        # other tensors, other memory
        torch.testing.assert_close(mlstm_chunkwise(**make_inputs()), expected)
    assert (served.checked, served.direct, served.dispatched) == (1, 3, 0)
    for _ in range(2):
        # other strides
        x = {n: t.transpose(0, 1).contiguous().transpose(0, 1) for n, t in make_inputs().items()}
        torch.testing.assert_close(mlstm_chunkwise(**x), expected)
    assert (served.checked, served.direct, served.dispatched) == (2, 5, 0)


CHANGES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "batch": lambda x: {n: t[:1] for n, t in x.items()},
    "length": lambda x: {n: t if n in STATES else t[:, :, 1:] for n, t in x.items()},
    "head dim": lambda x: x | {"v": x["v"][..., :16], "c_initial": x["c_initial"][..., :16]},
    "dtype of q, k, v": lambda x: x | {n: x[n].bfloat16() for n in "qkv"},
    "dtype of a gate": lambda x: x | {"f": x["f"].bfloat16()},
    "dtype of a state": lambda x: x | {"n_initial": x["n_initial"].bfloat16()},
    "no states": lambda x: {n: t for n, t in x.items() if n not in STATES},
    "device": lambda x: {n: t.to("meta") for n, t in x.items()},
    "negation": lambda x: x | {"v": torch._neg_view(x["v"])},
    "requires_grad": lambda x: x | {"i": x["i"].clone().requires_grad_()},
    "requires_grad of another": lambda x: x | {"f": x["f"].clone().requires_grad_()},
    "offsets": lambda x: {n: t[:1] for n, t in x.items()} | {"cu_seqlens": torch.tensor([0, 40])},
    "32-bit offsets": lambda x: (
        {n: t[:1] for n, t in x.items()} | {"cu_seqlens": torch.tensor([0, 40], dtype=torch.int32)}
    ),
    "return_last_states": lambda x: x | {"return_last_states": True},
    "eps": lambda x: x | {"eps": 1e-5},
    "chunk_size": lambda x: x | {"chunk_size": 32},
    "backend": lambda x: x | {"backend": "tk"},
    "variant": lambda x: x | {"backend": "reference:recurrent"},
}


def call_of(x: dict[str, Any], **options: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    names = [name for name in mlstm._chunkwise.arguments[:9] if name not in ("q", "k", "v")]
    given = {"return_last_states": False, "eps": 1e-6, "chunk_size": 64, "backend": "auto"} | options
    given |= {name: x[name] for name in x if name in given}
    return (*(x[name] for name in "qkv"), *(x.get(name) for name in names)), tuple(given.values())


@pytest.mark.parametrize("strided", [False, True])
def test_the_latest_call_is_told_from_others(strided: bool) -> None:
    """Every call comes right after every other one."""
    x = make_inputs(states=STATES)
    leaf = x | {"m_initial": x["m_initial"].clone().requires_grad_()}
    calls = {name: change(x) for name, change in CHANGES.items()}
    calls |= {"": x, "m is a leaf": leaf, "m has a graph": leaf | {"m_initial": leaf["m_initial"] * 1}}
    calls |= {"eps is 1": x | {"eps": 1}, "eps is 1.0": x | {"eps": 1.0}}
    if strided:
        calls["strides"] = {n: t.transpose(0, 1).contiguous().transpose(0, 1) for n, t in x.items()}
    results: dispatch.CallMemo[str] = dispatch.CallMemo(strided)

    def ask(name: str) -> str:
        return results.of(*call_of(calls[name]), lambda *args, eager: name)

    assert [ask(name) for pair in itertools.product(calls, calls) for name in pair] == [
        name for pair in itertools.product(calls, calls) for name in pair
    ]
    assert len(results) == len(calls)


def test_the_latest_call_is_told_from_others_by_what_is_around_it() -> None:
    x = {n: t.clone().requires_grad_() for n, t in make_inputs().items()}
    contexts: dict[str, Callable[[], Any]] = {
        "": nullcontext,
        "no_grad": torch.no_grad,
        "bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
        "float16": lambda: torch.autocast("cpu", torch.float16),
        "profiler": torch.autograd.profiler.profile,
        "batch_invariant": tfla_tk.batch_invariant,
    }
    results: dispatch.CallMemo[str] = dispatch.CallMemo()
    for name in [name for pair in itertools.product(contexts, contexts) for name in pair]:
        with contexts[name]():
            assert results.of(*call_of(x), lambda *args, eager, name=name: name) == name
    for context in (Functions, Operators):
        with context():
            assert results.of(*call_of(x), lambda *args, eager: str(eager)) == "False"


def test_a_call_like_the_latest_one_takes_no_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    results: dispatch.CallMemo[int] = dispatch.CallMemo()
    results.of(*call_of(make_inputs()), lambda *args, eager: 1)
    monkeypatch.setattr(dispatch, "signature", lambda *args: pytest.fail("asked for"))
    assert results.of(*call_of(make_inputs(seed=1)), lambda *args, eager: 2) == 1
    results.clear()
    with pytest.raises(pytest.fail.Exception):
        results.of(*call_of(make_inputs()), lambda *args, eager: 3)


def test_inference_mode_does_not_hide_the_latest_call(monkeypatch: pytest.MonkeyPatch) -> None:
    results: dispatch.CallMemo[int] = dispatch.CallMemo()
    call = call_of(make_inputs())
    assert results.of(*call, lambda *args, eager: 1) == 1
    with torch.inference_mode():
        assert results.of(*call, lambda *args, eager: 2) == 1
        monkeypatch.setattr(dispatch, "signature", lambda *args: pytest.fail("asked for"))
        assert results.of(*call, lambda *args, eager: 3) == 1


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_after_a_call_like_it(layout: torch.layout) -> None:
    """torch's guards would end the process."""
    x = make_inputs()
    mlstm_chunkwise(**x, backend="reference")
    nested = torch.nested.nested_tensor([x["q"][0], x["q"][1]], layout=layout)
    with pytest.raises(TypeError, match="nested"):
        mlstm_chunkwise(**x | {"q": nested}, backend="reference")
    with pytest.raises(TypeError):
        mlstm_chunkwise(**x | {"k": x["k"].to_mkldnn()}, backend="reference")


@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [
        ({"return_last_states": True}, {"return_last_states": 1}, "return_last_states: expected a bool"),
        ({"eps": 1.0}, {"eps": True}, "eps: expected a number"),
        ({"chunk_size": 64}, {"chunk_size": 64.0}, "chunk_size: expected an int"),
        ({"recompute_states_in_bw": True}, {"recompute_states_in_bw": 1}, "recompute_states_in_bw: expected"),
        ({"backend": "tk"}, {"backend": ["tk"]}, "backend: expected a str"),
        ({"autocast_kernel_dtype": None}, {"autocast_kernel_dtype": "float16"}, "autocast_kernel_dtype: "),
    ],
)
def test_equal_is_not_the_same(
    good: dict[str, Any], bad: dict[str, Any], message: str, served: Served
) -> None:
    """1 == True == 1.0, but only one of them is right; what is bad stays bad."""
    for _ in range(2):
        mlstm_chunkwise(**make_inputs(), **good)
        with pytest.raises((TypeError, ValueError), match=message):
            mlstm_chunkwise(**make_inputs(), **bad)


def test_a_bad_tensor_is_told_from_a_good_one(served: Served) -> None:
    x = make_inputs(states=STATES)
    bad = {
        "sparse": (x | {"k": x["k"].to_sparse()}, TypeError),
        "m is a leaf": (x | {"m_initial": x["m_initial"].clone().requires_grad_()}, ValueError),
        "another device": (x | {"v": x["v"].to("meta")}, ValueError),
        "no tensor": (x | {"q": None}, TypeError),
    }
    for _ in range(2):
        mlstm_chunkwise(**x)
        for arguments, error in bad.values():
            with pytest.raises(error):
                mlstm_chunkwise(**arguments)


def test_refusals_are_not_remembered(fake_tk: Any) -> None:
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="no GPU of compute capability"):
            mlstm_chunkwise(**make_inputs(), backend="tk")
    fake_tk.verdict = Support(True)
    mlstm_chunkwise(**make_inputs(), backend="tk")


def test_the_memo_holds_no_tensor_and_is_bounded(served: Served) -> None:
    x = make_inputs(states=STATES)
    references = [weakref.ref(t) for t in x.values()]
    mlstm_chunkwise(**x)
    del x
    gc.collect()
    assert not any(reference() is not None for reference in references)

    results: memo.Memo[int] = memo.Memo()
    for number in range(3 * memo.LIMIT):
        results.keep(number, number)
        assert results.get(number) == number and len(results) <= memo.LIMIT
    # the oldest went, one for one
    kept = [number for number in range(3 * memo.LIMIT) if results.get(number) is not None]
    assert kept == list(range(2 * memo.LIMIT, 3 * memo.LIMIT))
    results.keep(kept[0], -1)
    assert results.get(kept[0]) == -1 and results.get(kept[1]) == kept[1]
    results.clear()
    assert results.get(0) is None


def test_threads_keep_results_at_once() -> None:
    results: memo.Memo[int] = memo.Memo()

    def keep(first: int) -> None:
        for number in range(first, first + 3 * memo.LIMIT):
            results.keep(number, number)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(keep, range(0, 40 * memo.LIMIT, 10 * memo.LIMIT)))
    assert len(results) == memo.LIMIT
