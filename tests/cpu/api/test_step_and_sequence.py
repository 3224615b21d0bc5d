"""What one token and a few have in common: dtypes, calls in place, the ops, torch.compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from tfla_tk import Support

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
