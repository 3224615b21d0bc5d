"""mLSTM gradients on the GPU: accuracy against fp64 autograd, and the op as a PyTorch citizen in training."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

from tfla_tk import memo, reference

from .memory import head_last, relayout, shifted, transposed, uninitialised_memory_is_nan

Tensors = dict[str, Tensor]
Make = Callable[..., Tensors]
Check = Callable[..., None]
Error = Callable[[Tensor, Tensor], float]
Change = Callable[[Tensors], None]

NATIVE = list(itertools.product((64, 128, 256), (64, 128, 256, 512)))
PADDED = [(16, 16), (48, 80), (96, 96), (160, 384), (208, 176)]
MAIN = [(64, 64), (128, 256), (256, 512)]
TOKENS = ("q", "k", "v", "i", "f")
OPERANDS = ("q", "k", "v")
LENGTHS = [200, 0, 1, 64, 63, 65, 0, 450, 128]


def ids(dims: tuple[int, int]) -> str:
    return f"{dims[0]}_{dims[1]}"


# accuracy


@pytest.mark.parametrize("dims", NATIVE, ids=ids)
@pytest.mark.parametrize("size", [(1, 2, 63), (2, 3, 300)], ids="B{0[0]}_NH{0[1]}_S{0[2]}".format)
def test_native_head_dims(
    operator: Any,
    dtype: torch.dtype,
    size: tuple[int, int, int],
    dims: tuple[int, int],
    make_inputs: Make,
    compare: Make,
) -> None:
    compare(operator, make_inputs(*size, dims, dtype, operator.states))


@pytest.mark.parametrize("dims", PADDED, ids=ids)
@pytest.mark.parametrize("seq", [64, 130])
def test_padded_head_dims(
    operator: Any,
    dtype: torch.dtype,
    seq: int,
    dims: tuple[int, int],
    make_inputs: Make,
    compare: Make,
) -> None:
    compare(operator, make_inputs(2, 3, seq, dims, dtype, operator.states))


@pytest.mark.parametrize("dims", MAIN, ids=ids)
@pytest.mark.parametrize("seq", [1, 2, 64, 65, 127, 129, 1000])
def test_lengths(operator: Any, seq: int, dims: tuple[int, int], make_inputs: Make, compare: Make) -> None:
    x = make_inputs(2, 3, seq, dims, states=operator.states)
    compare(operator, x, vanishing=seq < 64)


@pytest.mark.parametrize("dims", MAIN, ids=ids)
@pytest.mark.parametrize("initial", [False, True], ids=["zeros", "initial"])
@pytest.mark.parametrize("last", [False, True], ids=["h", "h_and_state"])
def test_with_and_without_states(
    operator: Any,
    dtype: torch.dtype,
    last: bool,
    initial: bool,
    dims: tuple[int, int],
    make_inputs: Make,
    compare: Make,
) -> None:
    x = make_inputs(2, 3, 300, dims, dtype, operator.states if initial else ())
    compare(operator, x, last=last)


@pytest.mark.parametrize("dims", MAIN, ids=ids)
def test_only_through_the_last_state(
    operator: Any, dims: tuple[int, int], make_inputs: Make, assert_gradients: Check
) -> None:
    """h is not used: the gradient of q is none, or zero."""
    x = make_inputs(2, 3, 300, dims, states=operator.states)
    cotangents = operator.draw_cotangents(x, last=True)
    del cotangents["h"]
    found = operator.gradients(x, cotangents)
    assert not found["q"].any()
    assert_gradients(found, operator.true_gradients(x, cotangents), x["q"].dtype)


@pytest.mark.parametrize("dims", MAIN, ids=ids)
def test_against_the_recurrence(
    exponential: Any,
    dtype: torch.dtype,
    dims: tuple[int, int],
    make_inputs: Make,
    assert_gradients: Check,
) -> None:
    """The specification itself, token by token."""
    x = make_inputs(1, 2, 150, dims, dtype, exponential.states)
    cotangents = exponential.draw_cotangents(x, last=True)
    expected = exponential.true_gradients(x, cotangents, "reference:recurrent")
    assert_gradients(exponential.gradients(x, cotangents), expected, dtype)


@pytest.mark.parametrize("forget_bias", [0.0, 3.0, 12.0])
def test_forget_gates_of_a_long_sequence(
    operator: Any,
    dtype: torch.dtype,
    forget_bias: float,
    make_inputs: Make,
    compare: Make,
) -> None:
    """df is a sum over tokens: the noise of all of them must not collect in it."""
    x = make_inputs(1, 4, 4096, (128, 256), dtype)
    x["f"] += forget_bias - 3
    compare(operator, x, last=False)


# gates


def constant(i: float, f: float) -> Change:
    def set_gates(x: Tensors) -> None:
        x["i"].fill_(i)
        x["f"].fill_(f)

    return set_gates


def halves(first: float, second: float) -> Change:
    def set_gates(x: Tensors) -> None:
        x["i"].fill_(first)
        x["i"][..., x["i"].shape[-1] // 2 :] = second

    return set_gates


def slope(per_chunk: float) -> Change:
    def set_gates(x: Tensors) -> None:
        x["i"] += torch.arange(x["i"].shape[-1], device="cuda") * (per_chunk / 64)

    return set_gates


def resets(x: Tensors) -> None:
    x["f"][..., ::7] = -1e4
    x["f"][..., 100] = -torch.inf
    x["i"][..., ::5] = -1e4
    x["i"][..., 63] = -torch.inf


def closed_at_start(x: Tensors) -> None:
    """Gates of a model before training: the input gate's bias is -10."""
    x["i"] -= 10.0


# whether gradients vanish there
EXTREME: dict[str, tuple[Change, bool]] = {
    "forget_nothing": (constant(0.0, 1e4), False),
    "forget_everything": (constant(0.0, -1e4), True),
    "i_high_f_high": (constant(1e4, 1e4), False),
    "i_high_f_low": (constant(1e4, -1e4), True),
    "i_low_f_high": (constant(-1e4, 1e4), True),
    "i_low_f_low": (constant(-1e4, -1e4), True),
    "spike": (halves(80.0, -80.0), True),
    "late_spike": (halves(-80.0, 80.0), True),
    "growing": (slope(200.0), True),
    "falling": (slope(-200.0), True),
    "resets": (resets, True),
    "closed_at_start": (closed_at_start, False),
}


@pytest.mark.parametrize("dims", MAIN, ids=ids)
@pytest.mark.parametrize("case", EXTREME)
def test_extreme_gates(
    operator: Any, case: str, dims: tuple[int, int], make_inputs: Make, compare: Make
) -> None:
    x = make_inputs(2, 3, 450, dims)
    for name in ("q", "k"):  # keeps q.n away from zero
        x[name].abs_()
    change, vanishing = EXTREME[case]
    change(x)
    found = compare(operator, x, vanishing=vanishing)
    assert all(t.isfinite().all() for t in found.values())


@pytest.mark.parametrize("gate_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_gates_of_any_dtype_and_strides(
    operator: Any, gate_dtype: torch.dtype, make_inputs: Make, compare: Make
) -> None:
    x = make_inputs()
    i = x["i"].to(gate_dtype).transpose(1, 2).contiguous().transpose(1, 2)
    f = x["f"].to(gate_dtype).repeat_interleave(2, dim=-1)[..., ::2]
    compare(operator, x | {"i": i, "f": f})


# memory


@pytest.mark.parametrize("dims", [*MAIN, (48, 80)], ids=ids)
@pytest.mark.parametrize("layout", [transposed, shifted, head_last], ids=lambda layout: layout.__name__)
def test_layouts(
    operator: Any, layout: Callable[[Tensor], Tensor], dims: tuple[int, int], make_inputs: Make
) -> None:
    """The same bits, whatever the layout of the operands and of dh; gradients lie as their inputs do."""
    x = make_inputs(2, 3, 200, dims, states=operator.states)
    cotangents = operator.draw_cotangents(x, last=True)
    expected = operator.gradients(x, cotangents)
    view = relayout(x, layout)
    found = operator.gradients(view, cotangents | {"h": layout(cotangents["h"])})
    for name, t in found.items():
        assert torch.equal(t, expected[name]), name
        assert t.stride() == torch.empty_like(view[name]).stride(), name


def test_a_cotangent_of_ones(operator: Any, make_inputs: Make, assert_gradients: Check) -> None:
    """h.sum(): one element, expanded."""
    x = make_inputs()
    leaves = {name: t.clone().requires_grad_() for name, t in x.items()}
    operator(leaves).sum().backward()
    expected = operator.true_gradients(x, {"h": torch.ones_like(x["v"])})
    assert_gradients({name: t.grad for name, t in leaves.items()}, expected, x["q"].dtype)


@pytest.mark.parametrize("dims", [*MAIN, (48, 80)], ids=ids)
@pytest.mark.parametrize("seq", [1, 63, 129])
def test_every_element_is_written(
    operator: Any, seq: int, dims: tuple[int, int], make_inputs: Make, assert_gradients: Check
) -> None:
    x = make_inputs(2, 3, seq, dims, states=operator.states)
    for view in (x, relayout(x, transposed)):
        cotangents = operator.draw_cotangents(view, last=True)
        with uninitialised_memory_is_nan():
            found = operator.gradients(view, cotangents)
        assert_gradients(found, operator.true_gradients(view, cotangents), x["q"].dtype, cotangents["h"])


def test_inputs_are_left_alone(operator: Any, make_inputs: Make) -> None:
    x = make_inputs(states=operator.states)
    cotangents = operator.draw_cotangents(x, last=True)
    before = {name: t.clone() for name, t in (x | cotangents).items()}
    operator.gradients(x, cotangents)
    assert all(torch.equal(t, before[name]) for name, t in (x | cotangents).items())


@pytest.mark.parametrize("size", [(0, 3, 300), (2, 0, 300), (2, 3, 0)])
def test_empty(operator: Any, size: tuple[int, int, int], make_inputs: Make) -> None:
    x = make_inputs(*size, states=operator.states)
    cotangents = operator.draw_cotangents(x, last=True)
    found = operator.gradients(x, cotangents)
    assert all(t.shape == x[name].shape for name, t in found.items())
    if size[-1] == 0:
        assert torch.equal(found["c_initial"], cotangents["c"])


# repeatability and PyTorch


@pytest.mark.parametrize("name", [*TOKENS, "c_initial", "n_initial"])
def test_one_gradient_alone(name: str, exponential: Any, make_inputs: Make) -> None:
    x = make_inputs(states=exponential.states)
    cotangents = exponential.draw_cotangents(x, last=False)
    expected = exponential.gradients(x, cotangents)
    (found,) = exponential.gradients(x, cotangents, names=(name,)).values()
    assert torch.equal(found, expected[name])


def test_gradients_land_in_leaves(operator: Any, make_inputs: Make) -> None:
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


def test_a_cache_that_is_updated_in_place(operator: Any, make_inputs: Make) -> None:
    x = make_inputs(states=operator.states)
    dh = torch.randn_like(x["v"])
    expected = operator.gradients(x, {"h": dh}, names=TOKENS)
    leaves = {name: t.detach().clone().requires_grad_(name in TOKENS) for name, t in x.items()}
    h = operator(leaves)
    for name in operator.states:
        leaves[name].zero_()
    h.backward(dh)
    assert all(torch.equal(leaves[name].grad, t) for name, t in expected.items())


def test_two_calls_with_the_state_passed(operator: Any, make_inputs: Make, assert_gradients: Check) -> None:
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


def test_cuda_graph_of_a_training_step(operator: Any, make_inputs: Make) -> None:
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


def test_no_host_synchronisation(operator: Any, make_inputs: Make) -> None:
    x = make_inputs(states=operator.states)
    cotangents = operator.draw_cotangents(x, last=True)
    operator.gradients(x, cotangents)
    torch.cuda.set_sync_debug_mode("error")
    try:
        operator.gradients(x, cotangents)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("last", [False, True], ids=["h", "h_and_state"])
def test_torch_compile(
    operator: Any,
    last: bool,
    packed: bool,
    make_inputs: Make,
    draw_packed: Make,
    assert_gradients: Check,
    rel_err: Error,
) -> None:
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
        assert all(rel_err(a, b) <= 5e-3 for a, b in zip(outputs, expected_outputs, strict=True))
        assert_gradients(found, expected, torch.bfloat16)
    else:
        assert all(torch.equal(a, b) for a, b in zip(outputs, expected_outputs, strict=True))
        assert all(torch.equal(found[name], grad) for name, grad in expected.items())


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("last", [False, True], ids=["h", "h_and_state"])
def test_opcheck(operator: Any, last: bool, packed: bool, make_inputs: Make, draw_packed: Make) -> None:
    x = draw_packed(operator, [70, 0, 65], (64, 128)) if packed else make_inputs(2, 3, 70, (64, 128))
    tensors = [x.get(name) for name in (*TOKENS, "c_initial", "n_initial", "m_initial", "cu_seqlens")]
    sigmoid_gate = operator.function == "mlstm_siging_chunkwise"
    options = (sigmoid_gate, operator.options.get("normalize", True), 1e-6)
    h, c, n, _, *rows = torch.ops.tfla_tk.mlstm_fwd(*tensors, *options, True, True, "auto")
    grads = [torch.randn_like(t) for t in (h, c, n)]
    given = (c, n, *grads) if last else (None, None, grads[0], None, None)
    opcheck(torch.ops.tfla_tk.mlstm_bwd.default, (*tensors, h, *rows, *given, *options, "auto"))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(operator: Any, reentrant: bool, make_inputs: Make) -> None:
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
def test_the_ops_give_the_same_bits(
    operator: Any, last: bool, make_inputs: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the kernels that plain eager calls go to without them."""
    x = make_inputs(states=operator.states)
    cotangents = operator.draw_cotangents(x, last)
    direct = operator.gradients(x, cotangents)
    monkeypatch.setattr(memo, "is_eager", lambda tensors: False)
    dispatched = operator.gradients(x, cotangents)
    assert all(torch.equal(direct[name], t) for name, t in dispatched.items())


def test_a_profile_names_the_backward(operator: Any, make_inputs: Make) -> None:
    """Also where the forward was not profiled."""
    leaves = {name: t.requires_grad_() for name, t in make_inputs(seq=70).items()}
    h = operator(leaves)
    with torch.profiler.profile() as profile:
        h.sum().backward()
    assert "tfla_tk::mlstm_bwd" in {event.key for event in profile.key_averages()}


def test_what_is_saved_may_be_kept_on_the_host(operator: Any, make_inputs: Make) -> None:
    x = make_inputs(states=operator.states)
    cotangents = operator.draw_cotangents(x, last=True)
    expected = operator.gradients(x, cotangents)
    with torch.autograd.graph.save_on_cpu():
        found = operator.gradients(x, cotangents)
    assert all(torch.equal(found[name], t) for name, t in expected.items())


def test_autocast(operator: Any, make_inputs: Make, assert_gradients: Check) -> None:
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


def test_double_backward_is_refused(operator: Any, make_inputs: Make) -> None:
    leaves = {name: t.requires_grad_() for name, t in make_inputs(seq=70).items()}
    (dq,) = torch.autograd.grad(operator(leaves).float().square().sum(), leaves["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward of mLSTM is not implemented"):
        dq.float().sum().backward()


def test_the_explicit_formulas_agree(exponential: Any, make_inputs: Make, rel_err: Error) -> None:
    """The op on the GPU and the op on the CPU, which computes the reference, from the same saved rows."""
    x = make_inputs(1, 2, 200, (64, 64), states=exponential.states)
    cotangents = exponential.draw_cotangents(x, last=True)
    found = exponential.gradients(x, cotangents)
    names = (*TOKENS, "c_initial", "n_initial")
    expected = reference.mlstm_backward(
        *(x[name].double() for name in (*names, "m_initial")), *(t.double() for t in cotangents.values())
    )
    for name, t in zip(names, expected, strict=True):
        assert rel_err(found[name], t) <= 1e-2, name


@pytest.mark.sanitize
@pytest.mark.parametrize("dims", MAIN, ids=ids)
def test_small(operator: Any, dims: tuple[int, int], make_inputs: Make, compare: Make) -> None:
    """Five chunks, the last one short, from an initial state: for compute-sanitizer. Every place of every
    ring is used twice.
    """
    compare(operator, make_inputs(1, 2, 290, dims, states=operator.states))
