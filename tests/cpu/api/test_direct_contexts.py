"""In which contexts, and for which tensors, the kernels are called directly and not through the op."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tfla_tk import mlstm, mlstm_chunkwise

from .conftest import make_inputs
from .served import Functions, Operators, Served


@pytest.mark.parametrize(
    "context", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)]
)
def test_direct_in_plain_contexts(context: Callable[[], Any], served: Served) -> None:
    x = make_inputs()
    with context():
        mlstm_chunkwise(**x)
        mlstm_chunkwise(**x)
    assert (served.direct, served.dispatched, served.checked) == (2, 0, 1)


def test_parameters_are_plain(served: Served) -> None:
    x = {n: torch.nn.Parameter(t) for n, t in make_inputs().items()}
    with torch.no_grad():
        mlstm_chunkwise(**x)
    assert (served.direct, served.dispatched) == (1, 0)


def test_gradients_are_recorded_around_the_kernels(served: Served) -> None:
    """Another plan than that without them; test_direct.py has the backward."""
    x = make_inputs()
    mlstm_chunkwise(**x)
    trained = x | {"v": x["v"].clone().requires_grad_()}
    for _ in range(2):
        h = mlstm_chunkwise(**trained)
        assert h.requires_grad
    assert (served.direct, served.dispatched, served.checked) == (3, 0, 2)


@pytest.mark.parametrize("mode", [Functions, Operators])
@pytest.mark.parametrize("before", [False, True])
def test_modes_see_the_op(mode: Any, before: bool, served: Served) -> None:
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


def test_subclasses_go_through_the_op(served: Served) -> None:
    x = make_inputs()
    mlstm_chunkwise(**x)
    h = mlstm_chunkwise(**x | {"q": x["q"].as_subclass(Wrapper)})
    assert type(h) is Wrapper and any("mlstm_fwd" in name for name in Wrapper.seen)
    assert (served.direct, served.dispatched) == (1, 1)


def test_a_negation_to_come_is_done_by_the_dispatcher(served: Served) -> None:
    x = make_inputs()
    mlstm_chunkwise(**x)
    h = mlstm_chunkwise(**x | {"v": torch._neg_view(x["v"])})
    assert (served.direct, served.dispatched) == (1, 1)
    torch.testing.assert_close(h, -mlstm_chunkwise(**x))


def test_fake_tensors_and_make_fx(served: Served) -> None:
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
def test_functorch_and_jit_tracing(served: Served) -> None:
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


def test_compiled_calls_leave_the_memo_alone(served: Served) -> None:
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


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("cpu")
    try:
        yield
    finally:
        torch.set_default_device(None)


def test_default_device_is_a_mode_like_any_other(served: Served) -> None:
    for context in (default_device, nullcontext):
        with context():
            mlstm_chunkwise(**make_inputs())
    assert (served.direct, served.dispatched) == (1, 1)


def test_eager_calls_do_not_make_torch_compile_anew() -> None:
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
