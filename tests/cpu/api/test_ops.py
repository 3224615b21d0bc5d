"""The registered ops: schema, fakes, autograd, torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from tfla_tk import Support, mlstm_chunkwise, mlstm_siging_chunkwise, ops, reference, which

Make = Callable[..., dict[str, Tensor]]
STATES = ("c_initial", "n_initial", "m_initial")
FWD = torch.ops.tfla_tk.mlstm_fwd.default
BWD = torch.ops.tfla_tk.mlstm_bwd.default


def arguments(
    x: dict[str, Tensor], gate: str = "exp", normalize: bool = True, last: bool = True
) -> tuple[Any, ...]:
    tensors = [x.get(n) for n in ("q", "k", "v", "i", "f", *STATES)]
    return (*tensors, gate == "sig", normalize, 1e-6, last, "auto")


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize(("gate", "states"), [("exp", ()), ("exp", STATES), ("sig", ()), ("sig", STATES[:2])])
def test_opcheck_forward(gate: str, states: tuple[str, ...], last: bool, make_inputs: Make) -> None:
    x = make_inputs(seq=20, states=states)
    x = {n: t.requires_grad_(n != "m_initial") for n, t in x.items()}
    opcheck(FWD, arguments(x, gate, last=last))


@pytest.mark.parametrize(("gate", "states"), [("exp", STATES), ("sig", ())])
def test_opcheck_backward(gate: str, states: tuple[str, ...], make_inputs: Make) -> None:
    x = make_inputs(seq=20, states=states)
    tensors = [x.get(n) for n in ("q", "k", "v", "i", "f", *STATES)]
    dh, dc, dn = (torch.randn_like(t) for t in (x["v"], torch.empty(2, 3, 16, 32), torch.empty(2, 3, 16)))
    opcheck(BWD, (*tensors, dh, dc, dn, gate == "sig", True, 1e-6, "auto"))


@pytest.mark.parametrize("transposed", [False, True])
def test_opcheck_keeps_the_memory_order_of_v(transposed: bool, make_inputs: Make) -> None:
    x = make_inputs(seq=20)
    if transposed:
        x = {n: t.transpose(1, 2).contiguous().transpose(1, 2) for n, t in x.items()}
    opcheck(FWD, arguments(x))
    assert FWD(*arguments(x))[0].stride() == x["v"].stride()


def test_states_are_empty_unless_asked_for(make_inputs: Make) -> None:
    x = make_inputs()
    h, c, n, m = FWD(*arguments(x, last=False))
    assert [t.numel() for t in (c, n, m)] == [0, 0, 0]
    assert {t.dtype for t in (c, n, m)} == {torch.float32}
    assert torch.equal(h, FWD(*arguments(x))[0])
    _, c, n, m = FWD(*arguments(x, "sig"))
    assert (c.shape, n.shape, m.shape) == ((2, 3, 16, 32), (2, 3, 16), (0,))
    _, _, n, _ = FWD(*arguments(x, "sig", normalize=False))
    assert n.shape == (2, 3, 16) and bool((n == 0).all())


def test_no_output_is_an_input(make_inputs: Make) -> None:
    x = make_inputs(states=STATES)
    out = FWD(*arguments(x))
    inputs = {t.data_ptr() for t in x.values()}
    assert not inputs & {t.data_ptr() for t in out}


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("gate", ["exp", "sig"])
def test_fake_cuda_tensors(gate: str, last: bool, fake_tk: Any) -> None:
    """Shapes, dtypes, strides and device of a GPU call, on a machine without a GPU."""
    fake_tk.verdict = Support(True)
    with FakeTensorMode():
        q, k = (torch.empty(2, 100, 4, 64, dtype=torch.bfloat16, device="cuda").transpose(1, 2) for _ in "qk")
        v = torch.empty(2, 100, 4, 128, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
        i, f = (torch.empty(2, 4, 100, device="cuda") for _ in "if")
        h, c, n, m = FWD(q, k, v, i, f, None, None, None, gate == "sig", True, 1e-6, last, "auto")
        assert (h.shape, h.dtype, h.stride(), h.device) == (v.shape, torch.bfloat16, v.stride(), v.device)
        shapes = [(2, 4, 64, 128), (2, 4, 64), (2, 4, 1) if gate == "exp" else (0,)] if last else [(0,)] * 3
        assert [tuple(t.shape) for t in (c, n, m)] == shapes
        assert all(t.dtype == torch.float32 and t.device == v.device for t in (c, n, m))
        function = mlstm_chunkwise if gate == "exp" else mlstm_siging_chunkwise
        assert which(function, q, k, v, i, f).backend == "tk"
        out = function(q, k, v, i.bfloat16(), f, return_last_states=True)
        assert out[0].stride() == v.stride() and len(out[1]) == (3 if gate == "exp" else 2)
        grads = BWD(q, k, v, i, f, None, None, None, h, None, None, gate == "sig", True, 1e-6, "auto")
        assert [tuple(g.shape) for g in grads] == [tuple(t.shape) for t in (q, k, v, i, f)] + [(0,), (0,)]


@pytest.mark.parametrize(("gate", "normalize"), [("exp", True), ("sig", True), ("sig", False)])
def test_gradcheck(gate: str, normalize: bool, make_inputs: Make) -> None:
    """The autograd formula in fp64, through h and the last state, which is e^m (C, n) whatever m is."""
    x = make_inputs(
        1, 2, 5, 3, 4, dtype=torch.float64, states=STATES if gate == "exp" else STATES[:2] * normalize
    )
    m = x.pop("m_initial", None)

    def op(*tensors: Tensor) -> tuple[Tensor, ...]:
        values = dict(zip(x, tensors, strict=True)) | ({} if m is None else {"m_initial": m})
        h, c, n, m_last = FWD(*arguments(values, gate, normalize))
        scale = m_last.exp() if gate == "exp" else torch.ones(())
        return (h, c * scale[..., None], n * scale) if normalize else (h, c)

    assert torch.autograd.gradcheck(op, [t.requires_grad_() for t in x.values()])


def test_backward_without_a_gradient_of_h(make_inputs: Make) -> None:
    x = {n: t.requires_grad_() for n, t in make_inputs(dtype=torch.float64).items()}
    FWD(*arguments(x))[1].sum().backward()
    expected = {n: t.detach().clone().requires_grad_() for n, t in x.items()}
    reference.mlstm_recurrent(**expected, return_last_states=True)[1][0].sum().backward()
    for name in ("k", "v", "i", "f"):
        torch.testing.assert_close(x[name].grad, expected[name].grad)


def test_double_backward_is_refused(make_inputs: Make) -> None:
    x = {n: t.requires_grad_() for n, t in make_inputs().items()}
    h = FWD(*arguments(x))[0]
    (dq,) = torch.autograd.grad(h.square().sum(), x["q"], create_graph=True)
    with pytest.raises(
        RuntimeError, match="double backward of mLSTM is not implemented; backend='reference'"
    ):
        dq.sum().backward()
    # the reference is plain autograd
    h = mlstm_chunkwise(**x, backend="reference")
    (dq,) = torch.autograd.grad(h.square().sum(), x["q"], create_graph=True)
    dq.sum().backward()
    assert x["k"].grad is not None


# torch.compile


def compiled_agrees(
    function: Callable[..., Any], x: dict[str, Tensor], backend: str, dynamic: bool = False
) -> None:
    """Values and gradients of the compiled function, in one graph."""
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)
    results = []
    for run in (function, compiled):
        leaves = {n: t.clone().requires_grad_() for n, t in x.items()}
        h = run(**leaves)
        (h * h).sum().backward()
        results.append([h.detach(), *(t.grad for t in leaves.values())])
    for eager, graph in zip(*results, strict=True):
        torch.testing.assert_close(graph, eager, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["auto", "tk"])
@pytest.mark.parametrize("gate", ["exp", "sig"])
def test_compile_public_function(gate: str, backend: str, make_inputs: Make, fake_tk: Any) -> None:
    fake_tk.verdict = Support(backend == "tk")
    function = mlstm_chunkwise if gate == "exp" else mlstm_siging_chunkwise
    compiled_agrees(lambda **x: function(**x, backend=backend), make_inputs(), "aot_eager")


def test_compile_with_states_autocast_and_a_model_around(make_inputs: Make, fake_tk: Any) -> None:
    fake_tk.verdict = Support(True)

    def model(**x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h, (c, n, m) = mlstm_chunkwise(**x, return_last_states=True)
            h2, (_, _, m2) = mlstm_chunkwise(
                **x, c_initial=c, n_initial=n, m_initial=m, return_last_states=True, backend="reference"
            )
        return torch.nn.functional.silu((h + h2).float()) + m2[..., None]

    compiled_agrees(model, make_inputs(), "aot_eager")


def test_compile_dynamic_shapes(make_inputs: Make, fake_tk: Any) -> None:
    """One graph for every length: the op is not specialised."""
    fake_tk.verdict = Support(True)
    torch._dynamo.reset()
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(
        lambda **x: mlstm_chunkwise(**x, backend="tk"), fullgraph=True, backend=count, dynamic=True
    )
    for seq in (40, 57, 100):
        x = make_inputs(seq=seq)
        torch.testing.assert_close(compiled(**x), mlstm_chunkwise(**x, backend="reference"))
    assert len(graphs) == 1


def test_compile_with_inductor(make_inputs: Make, fake_tk: Any) -> None:
    fake_tk.verdict = Support(True)
    compiled_agrees(lambda **x: 2 * mlstm_chunkwise(**x, backend="tk"), make_inputs(), "inductor")


def test_schedules_are_the_ones_the_kernel_knows() -> None:
    assert ops.SCHEDULES == ("auto", "sequential", "overlapped", "pingpong")
