"""Forward mode and torch.func: no tangent is lost, and the ops serve the transforms that they can.

The tk backend is the op, which computes the reference on a CPU, and in plain eager calls its stand-in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import tfla_tk
from tfla_tk import Support, UnsupportedError, mlstm_chunkwise, mlstm_siging_chunkwise, which
from tfla_tk.backends.triton import installation
from tfla_tk.backends.triton import mlstm_kernels as triton

FUNCTIONS = [f"mlstm_{gate}{kind}" for kind in ("chunkwise", "step", "sequence") for gate in ("", "siging_")]

Function = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def tk(fake_tk: Any) -> Any:
    """The tk backend serves everything."""
    fake_tk.verdict = Support(True)
    return fake_tk


def draw(function: str, *batch: int, seq: int = 5) -> dict[str, Tensor]:
    """The tensors of one of FUNCTIONS in fp64: two heads, dims 4/6, with the state before."""
    generator = torch.Generator().manual_seed(0)
    step, tokens = "step" in function, ((1,) if "step" in function else (seq,))
    head = () if step else tokens
    shapes = {"q": (*head, 4), "k": (*head, 4), "v": (*head, 6), "i": tokens, "f": tokens}
    state = {"c": (4, 6), "n": (4,), "m": (1,)}
    if "siging" in function:
        del state["m"]
    suffix = "_initial" if "chunkwise" in function else ""
    shapes |= {name + suffix: shape for name, shape in state.items()}
    return {
        name: torch.randn(*batch, 2, 2, *shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }


def all_of(function: str, x: dict[str, Tensor], backend: str) -> tuple[Tensor, ...]:
    """h and the last state."""
    options = {"return_last_states": True} if "chunkwise" in function else {}
    h, last = getattr(tfla_tk, function)(**x, **options, backend=backend)
    return h, *last


def tangents_of(
    function: str, x: dict[str, Tensor], t: dict[str, Tensor], backend: str
) -> tuple[Tensor, ...]:
    """The tangents of h, c and n for those of some inputs; m is a constant of the differentiation."""

    def run(changed: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return all_of(function, x | changed, backend)[:3]

    found: tuple[Tensor, ...] = jvp(run, ({name: x[name] for name in t},), (t,))[1]
    return found


# forward mode


@pytest.mark.parametrize("function", FUNCTIONS)
def test_auto_takes_the_reference_for_tangents(function: str) -> None:
    """Its derivative is that of finite differences, of h and of what the state stands for."""
    x = draw(function)
    assert which(function, **x).backend == "tk"
    torch.manual_seed(0)
    t = {name: torch.randn_like(tensor) for name, tensor in x.items() if not name.startswith("m")}

    def run(step: float) -> tuple[Tensor, ...]:
        moved = x | {name: x[name] + step * t[name] for name in t}
        h, c, n, *m = all_of(function, moved, "reference")
        scale = m[0].exp() if m else torch.ones(())
        return h, c * scale[..., None], n * scale

    def in_forward_mode(changed: dict[str, Tensor]) -> tuple[Tensor, ...]:
        assert which(function, **x | changed).backend == "reference"
        h, c, n, *m = all_of(function, x | changed, "auto")
        scale = m[0].detach().exp() if m else torch.ones(())
        return h, c * scale[..., None], n * scale

    _, found = jvp(in_forward_mode, ({name: x[name] for name in t},), (t,))
    eps = 1e-6
    for tangent, up, down in zip(found, run(eps), run(-eps), strict=True):
        torch.testing.assert_close(tangent, (up - down) / (2 * eps), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("before", [False, True], ids=["first", "again"])
@pytest.mark.parametrize("backend", ["tk", "triton"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_backend_without_forward_mode_refuses(
    function: str, backend: str, before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For one input with a tangent, whichever, also if a call like it has been served before."""
    for kernel in ("mlstm", "mlstm_step", "mlstm_sequence"):
        monkeypatch.setattr(triton, f"supports_{kernel}", lambda call, variant=None: Support(True))
    x = draw(function)
    if before and backend == "tk":
        all_of(function, x, backend)
    for name in x:
        with pytest.raises(UnsupportedError) as refused:
            tangents_of(function, x, {name: torch.ones_like(x[name])}, backend)
        assert "forward-mode" in refused.value.reason and "backend='reference'" in refused.value.remedy
        with forward_ad.dual_level(), pytest.raises(UnsupportedError, match="backend='reference'"):
            all_of(function, x | {name: forward_ad.make_dual(x[name], torch.ones_like(x[name]))}, backend)


def test_tangents_of_a_recorded_call() -> None:
    """A tangent beside a gradient, and one of the gradient that comes back to the kernels."""
    x = draw("mlstm_chunkwise")
    leaf = x["q"].clone().requires_grad_()
    h = mlstm_chunkwise(**x | {"q": leaf}, backend="tk")
    with forward_ad.dual_level():
        with pytest.raises(UnsupportedError, match="backend='reference'"):
            mlstm_chunkwise(**x | {"q": forward_ad.make_dual(leaf, torch.ones_like(leaf))}, backend="tk")
        with pytest.raises(RuntimeError, match=r"tfla_tk::mlstm_bwd has no forward-mode.*'reference'"):
            torch.autograd.grad(h, leaf, forward_ad.make_dual(torch.ones_like(h), torch.ones_like(h)))


@pytest.mark.parametrize("level", [False, True], ids=["inside", "outside"])
def test_without_a_tangent_nothing_is_refused(level: bool) -> None:
    """In a transform's scope, and beside dual numbers."""
    x = draw("mlstm_chunkwise")
    expected = mlstm_chunkwise(**x, backend="reference")

    def scaled(factor: Tensor) -> Tensor:
        # wrapped by the transform, but independent of what it differentiates
        inputs = x if level else {name: t * 1 for name, t in x.items()}
        return factor * mlstm_chunkwise(**inputs, backend="tk")

    one = torch.ones((), dtype=torch.float64)
    value, tangent = jvp(scaled, (one,), (one,))
    torch.testing.assert_close((value, tangent), (expected, expected))


@pytest.mark.parametrize("name", ["mlstm_step", "mlstm_sequence", "mlstm_step_", "mlstm_sequence_"])
def test_ops_of_decoding_refuse_tangents_and_gradients(name: str) -> None:
    op = getattr(torch.ops.tfla_tk, name)
    x = draw(name.removesuffix("_"))
    rest = (False, True, 1e-6) if name.endswith("_") else (False, True, 1e-6, torch.float64)
    before = {part: t.clone() for part, t in x.items()}
    for part in x:
        with pytest.raises(RuntimeError, match=f"tfla_tk::{name} has no forward-mode.*backend='reference'"):
            jvp(lambda t, part=part: op(*(x | {part: t}).values(), *rest), (x[part],), (x[part],))
    with pytest.raises(RuntimeError, match=f"tfla_tk::{name} has no gradients; .*backend='reference'"):
        op(*(x | {"k": x["k"].clone().requires_grad_()}).values(), *rest)
    assert all(torch.equal(x[part], t) for part, t in before.items())
    with torch.no_grad():
        op(*(x | {"k": x["k"].clone().requires_grad_()}).values(), *rest)


@pytest.mark.parametrize("sigmoid_gate", [False, True])
def test_the_op_refuses_tangents(sigmoid_gate: bool) -> None:
    x = draw("mlstm_chunkwise")
    op = torch.ops.tfla_tk.mlstm_fwd.default
    for part in x:

        def run(t: Tensor, part: str = part) -> Tensor:
            out: Tensor = op(*(x | {part: t}).values(), None, sigmoid_gate, True, 1e-6, True, False)[0]
            return out

        with pytest.raises(RuntimeError, match=r"tfla_tk::mlstm_fwd has no forward-mode.*'reference'"):
            jvp(run, (x[part],), (x[part],))


def test_compiled_forward_mode_is_refused() -> None:
    """At the latest by the op."""
    torch._dynamo.reset()
    x = draw("mlstm_chunkwise")

    def tangent(q: Tensor) -> Tensor:
        found: Tensor = jvp(lambda q: mlstm_chunkwise(**x | {"q": q}, backend="tk"), (q,), (q,))[1]
        return found

    with pytest.raises(Exception, match="backend='reference'"):
        torch.compile(tangent, backend="aot_eager")(x["q"])


# the other transforms, against the reference


def loss(function: str, backend: str, state: bool = True) -> Function:
    """Of a call's tensors, through h and, of the state, through what it stands for."""

    def run(x: dict[str, Tensor]) -> Tensor:
        h, c, n, *m = all_of(function, x, backend)
        scale = m[0].detach().exp() if m else torch.ones(())
        found = h.square().sum()
        return found + (c * scale[..., None]).sum() + (n * scale).square().sum() if state else found

    return run


def without_m(x: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t for name, t in x.items() if not name.startswith("m")}


TRANSFORMS: dict[str, Callable[[Callable[[dict[str, Tensor]], Tensor], dict[str, Tensor]], Any]] = {
    "grad": lambda run, x: grad(run)(x),
    "vjp": lambda run, x: vjp(run, x)[1](torch.ones((), dtype=torch.float64)),
    "jacrev": lambda run, x: jacrev(run)(x),
    "vmap": lambda run, x: vmap(run)(batched(x)),
    "vmap of grad": lambda run, x: vmap(grad(run))(batched(x)),
    "grad of vmap": lambda run, x: grad(lambda x: vmap(run)(x).square().sum())(batched(x)),
    "vmap of vmap": lambda run, x: vmap(vmap(run))(batched(batched(x))),
    "vmap and autograd": lambda run, x: recorded(lambda x: vmap(run)(x).square().sum(), batched(x)),
    "vmap of one input": lambda run, x: vmap(lambda k: run(x | {"k": k}), in_dims=1)(
        torch.stack([x["k"], 2 * x["k"]], dim=1)
    ),
    "vmap of grad of one input": lambda run, x: vmap(lambda f: grad(run)(x | {"f": f}))(
        torch.stack([x["f"], -x["f"]])
    ),
}


def batched(x: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.stack([t, 0.5 * t, -t]) for name, t in x.items()}


def recorded(run: Callable[[dict[str, Tensor]], Tensor], x: dict[str, Tensor]) -> dict[str, Tensor]:
    leaves = {name: t.clone().requires_grad_() for name, t in x.items()}
    return dict(zip(leaves, torch.autograd.grad(run(leaves), list(leaves.values())), strict=True))


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("error:There is a performance drop")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("function", ["mlstm_chunkwise", "mlstm_siging_chunkwise"])
def test_transforms(function: str, transform: str, packed: bool) -> None:
    """The same as of the reference; what is batched by vmap is one call."""
    x = draw(function, seq=70)
    if packed:
        # two sequences in a batch of one
        x = {name: t if name.endswith("_initial") else t[:1] for name, t in x.items()}
    fixed = {name: t for name, t in x.items() if name.startswith("m")}
    if packed:
        fixed["cu_seqlens"] = torch.tensor([0, 30, 70])

    def run(backend: str) -> Any:
        return TRANSFORMS[transform](lambda x: loss(function, backend)(x | fixed), without_m(x))

    assert_same(run("tk"), run("reference"))


@pytest.mark.parametrize("function", [name for name in FUNCTIONS if "chunkwise" not in name])
def test_vmap_of_decoding(function: str) -> None:
    """Of all inputs, and of some; in place it is refused."""
    # the kernels' states are fp32
    x, first = ({name: t.float() for name, t in y.items()} for y in (draw(function, 3), draw(function)))
    for names in (list(x), ["q", "f"], ["c"]):
        inputs = {name: x[name] if name in names else first[name] for name in x}
        dims = ({name: 0 if name in names else None for name in x},)
        found, expected = (
            vmap(lambda x, b=backend: all_of(function, x, b), in_dims=dims)(inputs)
            for backend in ("tk", "reference")
        )
        torch.testing.assert_close(found, expected)
    before = x["c"].clone()
    with pytest.raises(RuntimeError, match="expected inplace=False"):
        vmap(lambda x: getattr(tfla_tk, function)(**x, inplace=True, backend="tk")[0])(x)
    assert torch.equal(x["c"], before)


def test_a_batch_of_offsets_is_refused() -> None:
    x = without_m({name: t[:1] for name, t in draw("mlstm_siging_chunkwise").items() if name in "qkvif"})
    offsets = torch.tensor([[0, 2, 5], [0, 3, 5]])
    with pytest.raises(RuntimeError, match="vmap over cu_seqlens: expected the same offsets"):
        vmap(lambda o: mlstm_siging_chunkwise(**x, cu_seqlens=o, backend="tk"))(offsets)


def test_second_derivatives() -> None:
    """Those in forward mode come from the reference under auto; the others say where they come from."""
    x = draw("mlstm_chunkwise", seq=2)

    def of_q(backend: str) -> Callable[[Tensor], Tensor]:
        return lambda q: loss("mlstm_chunkwise", backend, state=False)(x | {"q": q})

    expected = hessian(of_q("reference"))(x["q"])
    assert expected.abs().sum() > 0
    assert_same(hessian(of_q("auto"))(x["q"]), expected)
    for backward in (jacfwd, jacrev):
        with pytest.raises((RuntimeError, UnsupportedError), match="backend='reference'"):
            backward(grad(of_q("tk")))(x["q"])
    with pytest.raises(RuntimeError, match="double backward of mLSTM is not implemented; backend='refer"):
        grad(lambda q: grad(of_q("tk"))(q).sum())(x["q"])
    with pytest.raises(UnsupportedError, match="backend='reference'"):
        grad(lambda q: jvp(of_q("tk"), (q,), (x["q"],))[1])(x["q"])


def test_gradients_in_a_vmap_are_seen_by_the_choice(fake_tk: Any) -> None:
    """vmap hides that an input requires a gradient; the step's kernel has none."""
    x = without_m(draw("mlstm_siging_step", 3))
    seen = []

    def supports(call: Any, variant: str | None = None) -> Support:
        seen.append(call.requires_grad)
        return Support(not call.requires_grad, "its step has no gradients", "use torch.no_grad()")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake_tk, "supports_mlstm_step", supports)
        found = grad(lambda q: vmap(lambda x: all_of("mlstm_siging_step", x, "auto")[0])(x | {"q": q}).sum())(
            x["q"]
        )
    assert seen == [True] and found.abs().sum() > 0


@pytest.mark.parametrize("function", [name for name in FUNCTIONS if "sequence" not in name])
def test_triton_is_left_to_calls_without_transforms(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """mlstm_kernels' functions have no rules for them: refused before they run, and auto goes on."""
    monkeypatch.setattr(installation, "unusable", lambda device, missing: None)
    monkeypatch.setattr(installation, "INTERPRETED", False)
    x = {name: t.float() for name, t in draw(function).items()}
    reasons = []

    def run(q: Tensor) -> Tensor:
        reasons.append(which(function, **x | {"q": q}).reasons["triton"])
        return q.sum()

    grad(run)(x["q"])
    vmap(run)(x["q"][None])
    run(x["q"])
    if function == "mlstm_siging_step":
        assert all("no step with sigmoid" in support.reason for support in reasons)
        return
    for support in reasons[:2]:
        assert not support.ok and "torch.func" in support.reason and "reference" in support.remedy
    assert "torch.func" not in reasons[2].reason
