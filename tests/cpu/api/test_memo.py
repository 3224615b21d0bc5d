"""What is remembered between calls, what makes a call a new one, and when the kernels are called directly."""

from __future__ import annotations

import gc
import itertools
import re
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import tfla_tk
from tfla_tk import Support, UnsupportedError, mlstm, mlstm_chunkwise, mlstm_siging_chunkwise
from tfla_tk.calls.mlstm import MLSTMCall
from tfla_tk.core import memo
from tfla_tk.ops import mlstm as ops

Make = Callable[..., dict[str, Any]]
STATES = ("c_initial", "n_initial", "m_initial")


class Served:
    """A tk backend that serves everything, with counts of what was asked of it."""

    def __init__(self, fake_tk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.checked = 0
        self.direct = 0
        self.dispatched = 0
        self.real, self.kernel = ops.mlstm, fake_tk.forward.mlstm_fwd
        fake_tk.supports_mlstm = self._supports
        fake_tk.forward.mlstm_fwd = self._kernel
        monkeypatch.setattr(ops, "mlstm", self._serve)

    def _supports(self, call: MLSTMCall, variant: str | None = None) -> Support:
        self.checked += 1
        return Support(True)

    def _kernel(self, *args: Any) -> Any:
        self.direct += 1
        return self.kernel(*args)

    def _serve(self, *args: Any) -> Any:
        self.dispatched += 1
        return self.real(*args)


@pytest.fixture
def served(fake_tk: Any, monkeypatch: pytest.MonkeyPatch) -> Served:
    return Served(fake_tk, monkeypatch)


def test_an_equal_call_is_checked_once(served: Served, make_inputs: Make) -> None:
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


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("cpu")
    try:
        yield
    finally:
        torch.set_default_device(None)


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
    "recompute_states_in_bw": lambda x: x | {"recompute_states_in_bw": False},
    "autocast_kernel_dtype": lambda x: x | {"autocast_kernel_dtype": torch.float16},
    "backend": lambda x: x | {"backend": "tk"},
    "variant": lambda x: x | {"backend": "tk:pingpong"},
}


def key_of(x: dict[str, Any], sigmoid_gate: bool = False, strided: bool = False) -> Any:
    defaults = {"return_last_states": False, "eps": 1e-6, "chunk_size": 64, "recompute_states_in_bw": True}
    defaults |= {"autocast_kernel_dtype": None, "backend": "auto"}
    options = (sigmoid_gate, True, *(x.get(name, default) for name, default in defaults.items()))
    return memo.signature(tuple(x.get(name) for name in mlstm._chunkwise.arguments[:9]), options, strided)


def test_every_ingredient_makes_a_new_key(make_inputs: Make) -> None:
    x = make_inputs(states=STATES)
    keys = {"": key_of(x), "gate": key_of(x, sigmoid_gate=True)}
    keys |= {name: key_of(change(x)) for name, change in CHANGES.items()}
    leaf = x | {"m_initial": x["m_initial"].clone().requires_grad_()}
    keys["m is a leaf"] = key_of(leaf)
    keys["m has a graph"] = key_of(leaf | {"m_initial": leaf["m_initial"] * 1})
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            keys[f"autocast {dtype}"] = key_of(x)
    with torch.autograd.profiler.profile():
        keys["profiler"] = key_of(x)
    assert None not in keys.values()
    assert len(set(keys.values())) == len(keys)
    assert key_of(make_inputs(states=STATES, seed=1)) == keys[""]


def call_of(x: dict[str, Any], **options: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    names = [name for name in mlstm._chunkwise.arguments[:9] if name not in ("q", "k", "v")]
    given = {"return_last_states": False, "eps": 1e-6, "chunk_size": 64, "backend": "auto"} | options
    given |= {name: x[name] for name in x if name in given}
    return (*(x[name] for name in "qkv"), *(x.get(name) for name in names)), tuple(given.values())


@pytest.mark.parametrize("strided", [False, True])
def test_the_latest_call_is_told_from_others(strided: bool, make_inputs: Make) -> None:
    """Every call comes right after every other one."""
    x = make_inputs(states=STATES)
    leaf = x | {"m_initial": x["m_initial"].clone().requires_grad_()}
    calls = {name: change(x) for name, change in CHANGES.items()}
    for name in ("recompute_states_in_bw", "autocast_kernel_dtype"):
        del calls[name]
    calls |= {"": x, "m is a leaf": leaf, "m has a graph": leaf | {"m_initial": leaf["m_initial"] * 1}}
    calls |= {"eps is 1": x | {"eps": 1}, "eps is 1.0": x | {"eps": 1.0}}
    if strided:
        calls["strides"] = {n: t.transpose(0, 1).contiguous().transpose(0, 1) for n, t in x.items()}
    results: memo.CallMemo[str] = memo.CallMemo(strided)

    def ask(name: str) -> str:
        return results.of(*call_of(calls[name]), lambda *args, eager: name)

    assert [ask(name) for pair in itertools.product(calls, calls) for name in pair] == [
        name for pair in itertools.product(calls, calls) for name in pair
    ]
    assert len(results) == len(calls)


def test_the_latest_call_is_told_from_others_by_what_is_around_it(make_inputs: Make) -> None:
    x = {n: t.clone().requires_grad_() for n, t in make_inputs().items()}
    contexts: dict[str, Callable[[], Any]] = {
        "": nullcontext,
        "no_grad": torch.no_grad,
        "bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
        "float16": lambda: torch.autocast("cpu", torch.float16),
        "profiler": torch.autograd.profiler.profile,
        "batch_invariant": tfla_tk.batch_invariant,
    }
    results: memo.CallMemo[str] = memo.CallMemo()
    for name in [name for pair in itertools.product(contexts, contexts) for name in pair]:
        with contexts[name]():
            assert results.of(*call_of(x), lambda *args, eager, name=name: name) == name
    for context in (Functions, Operators):
        with context():
            assert results.of(*call_of(x), lambda *args, eager: str(eager)) == "False"


def test_a_call_like_the_latest_one_takes_no_signature(
    make_inputs: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: memo.CallMemo[int] = memo.CallMemo()
    results.of(*call_of(make_inputs()), lambda *args, eager: 1)
    monkeypatch.setattr(memo, "signature", lambda *args: pytest.fail("asked for"))
    assert results.of(*call_of(make_inputs(seed=1)), lambda *args, eager: 2) == 1
    results.clear()
    with pytest.raises(pytest.fail.Exception):
        results.of(*call_of(make_inputs()), lambda *args, eager: 3)


def test_inference_mode_does_not_hide_the_latest_call(
    make_inputs: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: memo.CallMemo[int] = memo.CallMemo()
    call = call_of(make_inputs())
    assert results.of(*call, lambda *args, eager: 1) == 1
    with torch.inference_mode():
        assert results.of(*call, lambda *args, eager: 2) == 1
        monkeypatch.setattr(memo, "signature", lambda *args: pytest.fail("asked for"))
        assert results.of(*call, lambda *args, eager: 3) == 1


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_after_a_call_like_it(layout: torch.layout, make_inputs: Make) -> None:
    """torch's guards would end the process."""
    x = make_inputs()
    mlstm_chunkwise(**x, backend="reference")
    nested = torch.nested.nested_tensor([x["q"][0], x["q"][1]], layout=layout)
    with pytest.raises(TypeError, match="nested"):
        mlstm_chunkwise(**x | {"q": nested}, backend="reference")
    with pytest.raises(TypeError):
        mlstm_chunkwise(**x | {"k": x["k"].to_mkldnn()}, backend="reference")


def test_strides_are_part_of_the_key_where_they_are_asked_for(make_inputs: Make) -> None:
    x = make_inputs()
    other = {n: t.transpose(0, 1).contiguous().transpose(0, 1) for n, t in x.items()}
    assert key_of(other) == key_of(x)
    assert key_of(other, strided=True) != key_of(x, strided=True)
    assert key_of(make_inputs(seed=1), strided=True) == key_of(x, strided=True)


def test_what_is_not_strided_has_no_key(make_inputs: Make) -> None:
    x = make_inputs()
    x["k"] = x["k"].to_sparse()
    assert key_of(x) is None and key_of(x, strided=True) is None


def test_grad_mode_is_part_of_the_key_where_it_matters(make_inputs: Make) -> None:
    x = make_inputs()
    trained = {n: t.clone().requires_grad_() for n, t in x.items()}
    with torch.no_grad():
        assert key_of(trained) == key_of(x)
    assert key_of(trained) != key_of(x)
    parameters = {n: torch.nn.Parameter(t) for n, t in x.items()}
    assert key_of(parameters) == key_of(trained)


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
    good: dict[str, Any], bad: dict[str, Any], message: str, served: Served, make_inputs: Make
) -> None:
    """1 == True == 1.0, but only one of them is right; what is bad stays bad."""
    for _ in range(2):
        mlstm_chunkwise(**make_inputs(), **good)
        with pytest.raises((TypeError, ValueError), match=message):
            mlstm_chunkwise(**make_inputs(), **bad)


def test_a_bad_tensor_is_told_from_a_good_one(served: Served, make_inputs: Make) -> None:
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


def test_refusals_are_not_remembered(fake_tk: Any, make_inputs: Make) -> None:
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="no GPU of compute capability"):
            mlstm_chunkwise(**make_inputs(), backend="tk")
    fake_tk.verdict = Support(True)
    mlstm_chunkwise(**make_inputs(), backend="tk")


def test_the_memo_holds_no_tensor_and_is_bounded(served: Served, make_inputs: Make) -> None:
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


# names that torch keeps to itself

PRIVATE_NAMES = (
    "torch._C._any_requires_grad",
    "torch._C._dispatch_keys",
    "torch._C._get_tracing_state",
    "torch._C._is_any_autocast_enabled",
    "torch._C._len_torch_dispatch_stack",
    "torch._C._len_torch_function_stack",
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "torch._C._dynamo.guards.TensorGuards",
    "torch._C._functorch.peek_interpreter_stack",
    "torch.autograd._profiler_enabled",
    "torch._C._AutoDispatchBelowAutograd",
    "torch._C._cuda_getCurrentRawStream",
    "torch._C._AutoDispatchBelowADInplaceOrView",
    "torch._C._functorch.get_unwrapped",
    "torch._C._functorch.is_functorch_wrapped_tensor",
)
# what torch itself takes by these names
TORCH = """
import functools, torch
import torch._dynamo, torch.autograd.function, torch._library.autograd, torch._functorch.eager_transforms
"""
WITHOUT_A_NAME = """
owner, _, name = HIDDEN.rpartition(".")
hidden = functools.reduce(getattr, owner.split(".")[1:], torch)
had = hasattr(hidden, name)
if had:
    delattr(hidden, name)
import tfla_tk
from tfla_tk import Support, ops
from tfla_tk.core import memo
from tfla_tk.backends.tk import mlstm as tk

tk.supports_mlstm = lambda call, variant=None: Support(True)
tk.load = lambda kernel, call, variant=None: Support(True)
torch.manual_seed(0)
x = [torch.randn(1, 2, 80, 16) for _ in range(3)] + [torch.randn(1, 2, 80) for _ in range(2)]
for t in x:
    t.requires_grad_()
found = []
for backend in ("tk", "reference"):
    if backend == "tk" and memo.KNOWS_EAGER_CALLS:
        # not the kernels, which a CPU has not: the op that stands for them
        memo.KNOWS_EAGER_CALLS = False
    h = tfla_tk.mlstm_chunkwise(*x, backend=backend)
    found.append((h, *torch.autograd.grad(h.square().sum(), x)))
with torch.no_grad():
    found[0] += (tfla_tk.mlstm_chunkwise(*x, backend="tk"),)
    found[1] += (tfla_tk.mlstm_chunkwise(*x, backend="reference"),)
for a, b in zip(*found):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
print("agree", had)
"""


def test_a_private_name_of_torch_may_go(in_forks: Callable[..., dict[str, str]]) -> None:
    """Any one of them: the package imports and calls go through the ops, with the same results."""
    found = in_forks(TORCH, {name: f"HIDDEN = {name!r}" + WITHOUT_A_NAME for name in PRIVATE_NAMES})
    assert {name: out.split()[0] for name, out in found.items()} == dict.fromkeys(PRIVATE_NAMES, "agree")


def test_every_private_name_is_known() -> None:
    """Those that the package reads are those that the test above hides."""
    package = Path(tfla_tk.__file__).parent
    text = "\n".join(path.read_text(encoding="utf-8") for path in package.rglob("*.py"))
    names = re.findall(r"torch\._C\.(_\w+)", text)
    private = r"from torch(?:\._C[\w.]*|\.autograd) import (?!forward_ad)(?:\(([^)]*)\)|(.*))"
    names += [name for found in re.findall(private, text) for name in re.findall(r"\w+", "".join(found))]
    names += re.findall(r'getattr\(\s*torch\._C, "(\w+)"', text)
    known = {name.rpartition(".")[2] for name in PRIVATE_NAMES}
    # a substitute, and three modules
    others = {"_ExcludeDispatchKeyGuard", "_autograd", "_dynamo", "_functorch"}
    assert set(names) - others == known


# when the kernels are called directly


def test_both_paths_agree(served: Served, make_inputs: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    x = make_inputs(1, sequences=3, dtype=torch.bfloat16, states=STATES)
    x |= {"f": x["f"].double(), "cu_seqlens": torch.tensor([0, 5, 5, 40])}
    for function in (mlstm_chunkwise, mlstm_siging_chunkwise):
        h, last = function(**x, return_last_states=True)
        assert served.direct and not served.dispatched
        with monkeypatch.context() as patch:
            patch.setattr(memo, "KNOWS_EAGER_CALLS", False)
            h_op, last_op = function(**x, return_last_states=True)
        assert served.direct == served.dispatched
        assert all(torch.equal(a, b) for a, b in zip((h, *last), (h_op, *last_op), strict=True))
        served.direct = served.dispatched = 0


@pytest.mark.parametrize(
    "context", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)]
)
def test_direct_in_plain_contexts(context: Callable[[], Any], served: Served, make_inputs: Make) -> None:
    x = make_inputs()
    with context():
        mlstm_chunkwise(**x)
        mlstm_chunkwise(**x)
    assert (served.direct, served.dispatched, served.checked) == (2, 0, 1)


def test_parameters_are_plain(served: Served, make_inputs: Make) -> None:
    x = {n: torch.nn.Parameter(t) for n, t in make_inputs().items()}
    with torch.no_grad():
        mlstm_chunkwise(**x)
    assert (served.direct, served.dispatched) == (1, 0)


def test_gradients_are_recorded_around_the_kernels(served: Served, make_inputs: Make) -> None:
    """Another plan than that without them; test_direct.py has the backward."""
    x = make_inputs()
    mlstm_chunkwise(**x)
    trained = x | {"v": x["v"].clone().requires_grad_()}
    for _ in range(2):
        h = mlstm_chunkwise(**trained)
        assert h.requires_grad
    assert (served.direct, served.dispatched, served.checked) == (3, 0, 2)


class Functions(TorchFunctionMode):
    """Notes every torch function."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """Notes every operator that is dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Functions, Operators])
@pytest.mark.parametrize("before", [False, True])
def test_modes_see_the_op(mode: Any, before: bool, served: Served, make_inputs: Make) -> None:
    """Whether or not the call is remembered already."""
    x = make_inputs()
    if before:
        mlstm_chunkwise(**x)
    with mode() as active:
        mlstm_chunkwise(**x)
    assert any("tfla_tk.mlstm_fwd" in name for name in active.seen)
    assert served.dispatched == 1


class Wrapper(Tensor):
    """A tensor subclass with torch functions of its own."""

    seen: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(str(func))
        return super().__torch_function__(func, types, args, kwargs or {})


def test_subclasses_go_through_the_op(served: Served, make_inputs: Make) -> None:
    x = make_inputs()
    mlstm_chunkwise(**x)
    h = mlstm_chunkwise(**x | {"q": x["q"].as_subclass(Wrapper)})
    assert type(h) is Wrapper and any("mlstm_fwd" in name for name in Wrapper.seen)
    assert (served.direct, served.dispatched) == (1, 1)


def test_a_negation_to_come_is_done_by_the_dispatcher(served: Served, make_inputs: Make) -> None:
    x = make_inputs()
    mlstm_chunkwise(**x)
    h = mlstm_chunkwise(**x | {"v": torch._neg_view(x["v"])})
    assert (served.direct, served.dispatched) == (1, 1)
    torch.testing.assert_close(h, -mlstm_chunkwise(**x))


def test_profiles_name_the_op(served: Served, make_inputs: Make) -> None:
    x = make_inputs()
    mlstm_chunkwise(**x)
    with torch.profiler.profile() as profile:
        mlstm_chunkwise(**x)
    assert "tfla_tk::mlstm_fwd" in {event.key for event in profile.key_averages()}
    mlstm_chunkwise(**x)
    assert (served.direct, served.dispatched) == (2, 1)


def test_fake_tensors_and_make_fx(served: Served, make_inputs: Make) -> None:
    x = make_inputs()
    mlstm_chunkwise(**x)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert mlstm_chunkwise(**{n: mode.from_tensor(t) for n, t in x.items()}).shape == x["v"].shape
        # plain tensors under an active mode
        assert mlstm_chunkwise(**x).shape == x["v"].shape
    for tracing in ("real", "fake", "symbolic"):
        graph = make_fx(lambda *t: mlstm_chunkwise(*t), tracing_mode=tracing)(*x.values())
        assert "tfla_tk.mlstm_fwd" in graph.code
    assert served.direct == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_functorch_and_jit_tracing(served: Served, make_inputs: Make) -> None:
    x = make_inputs()
    mlstm_chunkwise(**x)
    seen: list[Tensor] = []

    def loss(v: Tensor) -> Tensor:
        # plain tensors inside a transform
        seen.append(mlstm_chunkwise(**x))
        return (v * seen[-1]).sum()

    torch.testing.assert_close(torch.func.grad(loss)(x["v"]), seen[0])
    assert (served.direct, served.dispatched) == (1, 1)
    traced = torch.jit.trace(lambda *t: mlstm_chunkwise(*t), tuple(x.values()), check_trace=False)
    assert "tfla_tk::mlstm_fwd" in str(traced.graph)
    assert served.direct == 1


def test_compiled_calls_leave_the_memo_alone(served: Served, make_inputs: Make) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda **x: mlstm_chunkwise(**x), fullgraph=True, backend="aot_eager")
    x = make_inputs()
    torch.testing.assert_close(compiled(**x), mlstm_chunkwise(**x, backend="reference"))
    assert served.direct == 0 and len(mlstm._chunkwise.plans) == 1
    exported = torch.export.export(Module(), tuple(x.values()), strict=False)
    assert "tfla_tk.mlstm_fwd" in exported.graph_module.code and served.direct == 0


class Module(torch.nn.Module):
    """A model that is nothing but the operator."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> Tensor:
        return mlstm_chunkwise(q, k, v, i, f)


def test_default_device_is_a_mode_like_any_other(served: Served, make_inputs: Make) -> None:
    for context in (default_device, nullcontext):
        with context():
            mlstm_chunkwise(**make_inputs())
    assert (served.direct, served.dispatched) == (1, 1)


def test_eager_calls_do_not_make_torch_compile_anew(make_inputs: Make) -> None:
    """What is remembered of them is nothing that a compiled call depends on."""
    import torch._dynamo.testing

    graphs = torch._dynamo.testing.CompileCounter()
    call = partial(mlstm_chunkwise, backend="reference")
    compiled = torch.compile(lambda **x: call(**x), fullgraph=True, backend=graphs)
    x = make_inputs()
    expected = compiled(**x)
    for other in (x, {n: t[:1] for n, t in x.items()}, x):
        call(**other)
        torch.testing.assert_close(compiled(**x), expected)
    assert graphs.frame_count == 1
    torch._dynamo.reset()
