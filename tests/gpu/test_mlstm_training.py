"""The op as a PyTorch citizen in training: leaves, graphs, compilation, checkpoints, autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

from tfla_tk.core import memo

from .accuracy import relative_error
from .memory import LENGTHS, OPERANDS, TOKENS, relayout, transposed
from .mlstm import assert_gradients, draw_packed, make_inputs

Tensors = dict[str, Tensor]


@pytest.mark.parametrize("name", [*TOKENS, "c_initial", "n_initial"])
def test_one_gradient_alone(name: str, exponential: Any) -> None:
    x = make_inputs(states=exponential.states)
    cotangents = exponential.draw_cotangents(x, last=False)
    expected = exponential.gradients(x, cotangents)
    (found,) = exponential.gradients(x, cotangents, names=(name,)).values()
    assert torch.equal(found, expected[name])


def test_gradients_land_in_leaves(operator: Any) -> None:
    """Layout, dtype and hooks as DDP expects them; a second backward adds to the first."""
    x = relayout(make_inputs(states=operator.states), transposed)
    leaves = {name: t.detach().requires_grad_(name != "m_initial") for name, t in x.items()}
    called: list[str] = []
    for name, t in leaves.items():
        if t.requires_grad:
            t.register_post_accumulate_grad_hook(lambda t, name=name: called.append(name))
    dh = torch.randn_like(x["v"])
    operator(leaves).backward(dh)
    assert sorted(called) == sorted(name for name, t in leaves.items() if t.requires_grad)
    once = {name: leaves[name].grad.clone() for name in called}
    for name, grad in once.items():
        assert (grad.dtype, leaves[name].grad.stride()) == (x[name].dtype, x[name].stride()), name
    operator(leaves).backward(dh)
    assert all(torch.equal(leaves[name].grad, grad + grad) for name, grad in once.items())


def test_a_cache_that_is_updated_in_place(operator: Any) -> None:
    x = make_inputs(states=operator.states)
    dh = torch.randn_like(x["v"])
    expected = operator.gradients(x, {"h": dh}, names=TOKENS)
    leaves = {name: t.detach().clone().requires_grad_(name in TOKENS) for name, t in x.items()}
    h = operator(leaves)
    for name in operator.states:
        leaves[name].zero_()
    h.backward(dh)
    assert all(torch.equal(leaves[name].grad, t) for name, t in expected.items())


def test_two_calls_with_the_state_passed(operator: Any) -> None:
    """The gradient of the first call comes through the state alone where its h is not used."""
    x = make_inputs(2, 3, 500, states=operator.states)
    dh = torch.randn_like(x["v"])
    dh[:, :, :200] = 0

    def in_two(leaves: Tensors) -> Tensor:
        parts = [
            {name: t[:, :, where] if name in TOKENS else t for name, t in leaves.items()}
            for where in (slice(0, 200), slice(200, None))
        ]
        first = operator.run(parts[0])
        state = {name: first[name[0]] for name in operator.states}
        return torch.cat((first["h"], operator(parts[1] | state)), dim=2)

    leaves = {name: t.clone().requires_grad_(name != "m_initial") for name, t in x.items()}
    in_two(leaves).backward(dh)
    found = {name: t.grad for name, t in leaves.items() if t.requires_grad}
    assert_gradients(found, operator.true_gradients(x, {"h": dh}), x["q"].dtype)


def test_cuda_graph_of_a_training_step(operator: Any) -> None:
    x = make_inputs(states=operator.states)
    dh = torch.randn_like(x["v"])
    weights = {name: x[name].clone().requires_grad_() for name in TOKENS}
    fixed = {name: x[name] for name in operator.states}

    def step() -> None:
        for t in weights.values():
            t.grad = None
        operator(weights | fixed).backward(dh)
        with torch.no_grad():
            for t in weights.values():
                t -= 0.01 * t.grad

    start = {name: t.detach().clone() for name, t in weights.items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(4):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    expected = {name: t.detach().clone() for name, t in weights.items()}
    with torch.no_grad():
        for name, t in weights.items():
            t.copy_(start[name])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(4):
        graph.replay()
    assert all(torch.equal(t, expected[name]) for name, t in weights.items())


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("last", [False, True], ids=["h", "h_and_state"])
def test_torch_compile(operator: Any, last: bool, packed: bool) -> None:
    """Forward and backward in one graph each, the same bits as without.

    But where sequences are cut: plain calls have the cut of the backward, and keep the states there.
    """
    torch._dynamo.reset()
    x = draw_packed(operator, LENGTHS, (128, 256)) if packed else make_inputs(states=operator.states)
    cotangents = operator.draw_cotangents(x, last)
    fixed = ("m_initial", "cu_seqlens")

    def run(leaves: Tensors) -> list[Tensor]:
        outputs = operator.run(leaves) if last else {"h": operator(leaves)}
        return [outputs[name] for name in cotangents]

    results = []
    for function in (run, torch.compile(run, fullgraph=True)):
        leaves = {name: t.clone().requires_grad_(name not in fixed) for name, t in x.items()}
        outputs = function(leaves)
        torch.autograd.backward(outputs, list(cotangents.values()))
        results.append((outputs, {name: t.grad for name, t in leaves.items() if t.requires_grad}))
    (expected_outputs, expected), (outputs, found) = results
    if packed:
        assert all(relative_error(a, b) <= 5e-3 for a, b in zip(outputs, expected_outputs, strict=True))
        assert_gradients(found, expected, torch.bfloat16)
    else:
        assert all(torch.equal(a, b) for a, b in zip(outputs, expected_outputs, strict=True))
        assert all(torch.equal(found[name], grad) for name, grad in expected.items())


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("last", [False, True], ids=["h", "h_and_state"])
def test_opcheck(operator: Any, last: bool, packed: bool) -> None:
    x = draw_packed(operator, [70, 0, 65], (64, 128)) if packed else make_inputs(2, 3, 70, (64, 128))
    tensors = [x.get(name) for name in (*TOKENS, "c_initial", "n_initial", "m_initial", "cu_seqlens")]
    sigmoid_gate = operator.function == "mlstm_siging_chunkwise"
    options = (sigmoid_gate, operator.options.get("normalize", True), 1e-6)
    h, c, n, _, *rows = torch.ops.tfla_tk.mlstm_fwd(*tensors, *options, True, True)
    grads = [torch.randn_like(t) for t in (h, c, n)]
    given = (c, n, *grads) if last else (None, None, grads[0], None, None)
    opcheck(torch.ops.tfla_tk.mlstm_bwd.default, (*tensors, h, *rows, *given, *options))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(operator: Any, reentrant: bool) -> None:
    x = make_inputs(states=operator.states)
    dh = torch.randn_like(x["v"])
    expected = operator.gradients(x, {"h": dh}, names=TOKENS)
    leaves = {name: t.detach().requires_grad_(name in TOKENS) for name, t in x.items()}

    def run(*tensors: Tensor) -> Tensor:
        h: Tensor = operator(dict(zip(leaves, tensors, strict=True)))
        return h

    checkpoint(run, *leaves.values(), use_reentrant=reentrant).backward(dh)
    assert all(torch.equal(leaves[name].grad, t) for name, t in expected.items())


@pytest.mark.parametrize("last", [False, True], ids=["h", "h_and_state"])
def test_the_ops_give_the_same_bits(operator: Any, last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernels that plain eager calls go to without them."""
    x = make_inputs(states=operator.states)
    cotangents = operator.draw_cotangents(x, last)
    direct = operator.gradients(x, cotangents)
    monkeypatch.setattr(memo, "KNOWS_EAGER_CALLS", False)
    dispatched = operator.gradients(x, cotangents)
    assert all(torch.equal(direct[name], t) for name, t in dispatched.items())


def test_a_profile_names_the_backward(operator: Any) -> None:
    """Also where the forward was not profiled."""
    leaves = {name: t.requires_grad_() for name, t in make_inputs(seq=70).items()}
    h = operator(leaves)
    with torch.profiler.profile() as profile:
        h.sum().backward()
    assert "tfla_tk::mlstm_bwd" in {event.key for event in profile.key_averages()}


def test_what_is_saved_may_be_kept_on_the_host(operator: Any) -> None:
    x = make_inputs(states=operator.states)
    cotangents = operator.draw_cotangents(x, last=True)
    expected = operator.gradients(x, cotangents)
    with torch.autograd.graph.save_on_cpu():
        found = operator.gradients(x, cotangents)
    assert all(torch.equal(found[name], t) for name, t in expected.items())


def test_autocast(operator: Any) -> None:
    """Gradients of fp32 operands in fp32, as exact as those of the operands that the kernels saw."""
    x = make_inputs(dtype=torch.float32)
    dh = torch.randn_like(x["v"]).bfloat16()
    leaves = {name: t.clone().requires_grad_() for name, t in x.items()}
    with torch.autocast("cuda", torch.bfloat16):
        h = operator(leaves)
    h.backward(dh)
    found = {name: t.grad for name, t in leaves.items()}
    assert {t.dtype for t in found.values()} == {torch.float32}
    rounded = {name: t.bfloat16() if name in OPERANDS else t for name, t in x.items()}
    assert_gradients(found, operator.true_gradients(rounded, {"h": dh}), torch.bfloat16)


def test_double_backward_is_refused(operator: Any) -> None:
    leaves = {name: t.requires_grad_() for name, t in make_inputs(seq=70).items()}
    (dq,) = torch.autograd.grad(operator(leaves).float().square().sum(), leaves["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward of mLSTM is not implemented"):
        dq.float().sum().backward()
