"""What one token and a few have in common: dtypes, calls in place, the ops, torch.compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from tfla_tk import Support, UnsupportedError, which
from tfla_tk.backends.tk import mlstm as tk

from .decode_calls import DECODES, Decode, op_arguments


@pytest.fixture(params=DECODES)
def decode(request: pytest.FixtureRequest) -> Decode:
    return DECODES[request.param]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(decode: Decode, dtype: torch.dtype) -> None:
    h, state = decode.mlstm(**decode.draw(dtype))
    assert h.dtype == dtype and {x.dtype for x in state} == {torch.float32}
    exact, truth = decode.mlstm(**{name: x.double() for name, x in decode.draw(dtype).items()})
    assert (h.double() - exact).norm() < 5e-3 * exact.norm()
    _, kept = decode.mlstm(**decode.draw(dtype), dtype_state=torch.bfloat16)
    assert {x.dtype for x in kept} == {torch.bfloat16}
    c, _, m = (x.double() for x in kept)
    memory = truth[0] * truth[2][..., None].exp()
    assert (c * m[..., None].exp() - memory).norm() < 4e-3 * memory.norm()


def test_compile(decode: Decode) -> None:
    inputs = decode.draw(torch.bfloat16)
    compiled = torch.compile(decode.mlstm, backend="eager", fullgraph=True)
    h, state = compiled(**inputs)
    expected, last = decode.mlstm(**inputs)
    torch.testing.assert_close((h, *state), (expected, *last))


@pytest.mark.parametrize("dtypes", [("float32",) * 3, ("bfloat16", "float32", "bfloat16"), ("float16",) * 3])
@pytest.mark.parametrize("contiguous", [True, False])
def test_in_place(decode: Decode, reference_or_tk: str, dtypes: tuple[str, ...], contiguous: bool) -> None:
    """The given tensors hold what a call otherwise returns, each part in its own dtype."""
    inputs = decode.draw(torch.bfloat16)
    kinds = [getattr(torch, name) for name in dtypes]
    state = [inputs.pop(name).to(kind) for name, kind in zip("cnm", kinds, strict=True)]
    if not contiguous:
        state = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in state]
    before = [x.clone() for x in state]
    h, expected = decode.mlstm(**inputs, **dict(zip("cnm", before, strict=True)), backend="reference")
    found, returned = decode.mlstm(
        **inputs, **dict(zip("cnm", state, strict=True)), inplace=True, backend=reference_or_tk
    )
    assert all(x is y for x, y in zip(returned, state, strict=True))
    assert [x.dtype for x in state] == kinds
    torch.testing.assert_close(found, h)
    memory, truth = (x[0].double() * x[2].double()[..., None].exp() for x in (state, expected))
    assert (memory - truth).norm() < (1e-6 if kinds[0] == torch.float32 else 4e-3) * truth.norm()


@pytest.mark.parametrize("normalize", [True, False])
def test_siging_in_place(decode: Decode, reference_or_tk: str, normalize: bool) -> None:
    inputs = decode.draw(torch.bfloat16)
    del inputs["m"]
    expected = decode.siging(**inputs, normalize=normalize, backend="reference")
    n_before = inputs["n"].clone()
    h, (c, n) = decode.siging(**inputs, normalize=normalize, inplace=True, backend=reference_or_tk)
    assert c is inputs["c"] and n is inputs["n"]
    torch.testing.assert_close((h, c, n), (expected[0], *expected[1]))
    assert torch.equal(n, n_before) != normalize


@pytest.mark.parametrize("dtype_state", [None, torch.float16, torch.bfloat16, torch.float64])
def test_dtype_of_the_state_returned(
    decode: Decode, reference_or_tk: str, dtype_state: torch.dtype | None
) -> None:
    inputs = decode.draw(torch.bfloat16)
    _, state = decode.mlstm(**inputs, dtype_state=dtype_state, backend=reference_or_tk)
    assert {x.dtype for x in state} == {dtype_state or torch.float32}
    _, expected = decode.mlstm(**inputs, dtype_state=dtype_state, backend="reference")
    torch.testing.assert_close(state, expected)


def test_in_place_is_refused(decode: Decode) -> None:
    with pytest.raises(TypeError, match="inplace: expected a bool"):
        decode.mlstm(**decode.draw(), inplace=1)
    with pytest.raises(ValueError, match=r"dtype_state: expected None or torch.float32, the dtype of c"):
        decode.mlstm(**decode.draw(), inplace=True, dtype_state=torch.bfloat16)
    inputs = decode.draw()
    inputs["q"].requires_grad_()
    with pytest.raises(ValueError, match="inplace: expected False where a gradient is recorded"):
        decode.mlstm(**inputs, inplace=True)
    with torch.no_grad():
        decode.mlstm(**inputs, inplace=True)


@pytest.mark.parametrize("name", ["c", "n", "m"])
def test_in_place_needs_a_place_for_every_element(decode: Decode, reference_or_tk: str, name: str) -> None:
    """Before anything is written."""
    inputs = decode.draw()
    inputs[name] = inputs[name][:1].expand_as(inputs[name])
    before = {key: x.clone() for key, x in inputs.items()}
    with pytest.raises(ValueError, match=f"{name}: expected a place for every element, in place"):
        decode.mlstm(**inputs, inplace=True, backend=reference_or_tk)
    assert all(torch.equal(x, before[key]) for key, x in inputs.items())
    decode.mlstm(**inputs, backend=reference_or_tk)


@pytest.mark.parametrize("inplace", [False, True])
def test_m_is_no_leaf_with_a_gradient(decode: Decode, reference_or_tk: str, inplace: bool) -> None:
    inputs = decode.draw()
    inputs["m"].requires_grad_()
    with pytest.raises(ValueError, match="m: expected no requires_grad"):
        decode.mlstm(**inputs, inplace=inplace, backend=reference_or_tk)


@pytest.mark.parametrize("sigmoid_gate", [False, True])
def test_opcheck(decode: Decode, sigmoid_gate: bool) -> None:
    """Schemas, fake tensors, and what the ops write."""
    for kind in (torch.float32, torch.bfloat16):
        opcheck(decode.op, op_arguments(decode.draw(torch.bfloat16), sigmoid_gate, kind))
    inputs = decode.draw(torch.bfloat16)
    inputs["v"] = inputs["v"].transpose(1, 2).contiguous().transpose(1, 2)
    opcheck(decode.op_in_place, op_arguments(inputs, sigmoid_gate))
    inputs["c"] = inputs["c"].bfloat16()
    opcheck(decode.op_in_place, op_arguments(inputs, sigmoid_gate))


@pytest.mark.parametrize("inplace", [False, True])
def test_compile_the_op(decode: Decode, fake_tk: Any, inplace: bool) -> None:
    fake_tk.verdict = Support(True)
    inputs, again = decode.draw(torch.bfloat16), decode.draw(torch.bfloat16)

    def run(**x: Tensor) -> Any:
        h, (c, n, m) = decode.mlstm(**x, inplace=inplace, backend="tk")
        return 2 * h, c + 1, n, m

    expected = run(**inputs)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(**again), expected)
    for name in "cnm":
        torch.testing.assert_close(again[name], inputs[name])


# refusals

OF_TOKENS = {"step": ("3", r"\[B, NH, DHQK\]"), "sequence": ("4", r"\[B, NH, S, DHQK\]")}
BAD = [
    ("q", lambda x: x[..., 0], ValueError, "q: expected {0} dimensions {1}, got "),
    ("k", lambda x: x[..., :8], ValueError, "k: expected shape {1} of q"),
    ("k", lambda x: x[:, :1], ValueError, "k: expected shape {1} of q"),
    ("v", lambda x: x.double(), TypeError, "v: expected dtype torch.float32, the dtype of q"),
    ("v", lambda x: x[:2], ValueError, r"v: expected shape \[B, NH.*\] of q and \[DHHV\]"),
    ("i", lambda x: x.unsqueeze(3), ValueError, r"i: expected 3 dimensions \[B, NH, .\].*, got 4"),
    ("f", lambda x: x.long(), TypeError, "f: expected dtype float16"),
    ("f", lambda x: x[:1], ValueError, r"f: expected shape \[B, NH, .\].* got \(1, "),
    ("c", lambda x: x.mT, ValueError, r"c: expected shape \[B, NH, DHQK, DHHV\]"),
    ("n", lambda x: x.to("meta"), ValueError, "n: expected device cpu"),
    ("m", lambda x: None, TypeError, r"m: expected a tensor \[B, NH, 1\], got NoneType"),
]


@pytest.mark.parametrize(("name", "change", "error", "message"), BAD)
@pytest.mark.parametrize("kind", DECODES)
def test_bad_arguments(kind: str, name: str, change: Any, error: type[Exception], message: str) -> None:
    decode = DECODES[kind]
    inputs = decode.draw()
    for part, of_kind in enumerate(OF_TOKENS[kind]):
        message = message.replace(f"{{{part}}}", of_kind)
    with pytest.raises(error, match=message):
        decode.mlstm(**inputs | {name: change(inputs[name])})


def test_bad_options(decode: Decode) -> None:
    expected = "None, torch.float16, torch.bfloat16, torch.float32 or torch.float64"
    inputs = decode.draw()
    without_m = {name: x for name, x in inputs.items() if name != "m"}
    for function, given in ((decode.mlstm, inputs), (decode.siging, without_m)):
        for options, error, message in (
            ({"eps": -1.0}, ValueError, "eps: expected"),
            ({"dtype_state": torch.int8}, ValueError, f"dtype_state: expected {expected}, got torch.int8"),
            (
                {"dtype_state": "float32"},
                TypeError,
                f"dtype_state: expected {expected}, got 'float32' of type",
            ),
            ({"backend": "reference:parallel"}, ValueError, "backend: expected 'reference' for a "),
            ({"backend": "tk:fast"}, ValueError, "backend: expected 'tk', got 'tk:fast'"),
            ({"backend": "triton:xl_chunk"}, ValueError, "backend: expected 'triton' for a "),
            (
                {"backend": "triton"},
                UnsupportedError,
                f"{function.__name__} on backend 'triton': .*(cpu|has no)",
            ),
            ({"backend": "tk"}, UnsupportedError, f"{function.__name__} on backend 'tk'"),
        ):
            function(**given)  # a plan of a good call lets no other pass
            with pytest.raises(error, match=message):
                function(**given, **options)


# on a GPU, as far as it can be asked without one


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["auto", "tk"])
def test_tk_serves(
    decode: Decode, passes_for_a_gpu: None, fake_tk: Any, dtype: torch.dtype, backend: str
) -> None:
    inputs = decode.draw(dtype)
    fake_tk.verdict = getattr(tk, decode.supports)(decode.on_gpu(inputs))
    assert which(decode.mlstm, **inputs, backend=backend).backend == "tk"
    expected = decode.mlstm(**inputs, backend="reference")
    h, state = decode.mlstm(**inputs, backend=backend)  # the op computes the reference on a CPU
    torch.testing.assert_close((h, *state), (expected[0], *expected[1]))
    nothing = {name: x[:0] for name, x in inputs.items()}
    h, (c, _, _) = decode.mlstm(**nothing, backend=backend)
    assert h.shape == nothing["v"].shape and c.shape == (0, 2, 16, 32)


@pytest.mark.slow
def test_gradients(decode: Decode) -> None:
    """By the reference: exact for h; m is a constant of the differentiation."""
    inputs = {name: x.double().requires_grad_() for name, x in decode.draw().items()}
    m = inputs.pop("m").detach()

    def run(*tensors: Tensor) -> Tensor:
        return decode.mlstm(*tensors, m)[0]

    assert torch.autograd.gradcheck(run, tuple(inputs.values()), atol=1e-5, fast_mode=True)
    _, (c, n, last) = decode.mlstm(*inputs.values(), m)
    assert not last.requires_grad and c.requires_grad and n.requires_grad
