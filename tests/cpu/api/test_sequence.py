"""A few tokens from a state on: against as many steps, dtypes and errors, and which backend serves them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

import tfla_tk
from tfla_tk import (
    UnsupportedError,
    decode,
    mlstm_chunkwise,
    mlstm_sequence,
    mlstm_siging_chunkwise,
    mlstm_siging_sequence,
    mlstm_siging_step,
    mlstm_step,
)
from tfla_tk.backends.tk import device
from tfla_tk.backends.tk import mlstm as tk
from tfla_tk.backends.triton import installation
from tfla_tk.backends.triton import mlstm_kernels as triton
from tfla_tk.calls.mlstm import check_mlstm_sequence

NAMES = ("q", "k", "v", "i", "f", "c", "n", "m")
SEQUENCE, IN_PLACE = torch.ops.tfla_tk.mlstm_sequence.default, torch.ops.tfla_tk.mlstm_sequence_.default


@pytest.fixture
def tokens() -> Callable[..., dict[str, Tensor]]:
    """The arguments of five tokens: two heads, dims 16/32."""

    def draw(dtype: torch.dtype = torch.float32, seq: int = 5, **replaced: Any) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(0)
        shapes = ((seq, 16), (seq, 16), (seq, 32), (seq,), (seq,), (16, 32), (16,), (1,))
        drawn = {
            name: torch.randn(3, 2, *shape, generator=generator, dtype=torch.float64)
            for name, shape in zip(NAMES, shapes, strict=True)
        }
        return {name: x.to(dtype) if name in "qkv" else x.float() for name, x in drawn.items()} | replaced

    return draw


Tokens = Callable[..., dict[str, Any]]


def token_of(tokens: dict[str, Tensor], t: int) -> dict[str, Tensor]:
    """The arguments of the step of one token, but for the state."""
    return {
        name: tokens[name][:, :, t] if name in "qkv" else tokens[name][:, :, t : t + 1] for name in NAMES[:5]
    }


@pytest.mark.parametrize("seq", [1, 2, 16, 40])
def test_a_sequence_is_as_many_steps(tokens: Tokens, seq: int) -> None:
    """The reference takes any number of tokens."""
    inputs = tokens(torch.float64, seq)
    h, state = mlstm_sequence(**inputs)
    expected = [inputs[name] for name in "cnm"]
    for t in range(seq):
        out, expected = mlstm_step(**token_of(inputs, t), **dict(zip("cnm", expected, strict=True)))
        torch.testing.assert_close(h[:, :, t], out)
    torch.testing.assert_close(state, tuple(expected))
    assert {x.dtype for x in (h, *state)} == {torch.float64}


@pytest.mark.parametrize("normalize", [True, False])
def test_a_siging_sequence_is_as_many_steps(tokens: Tokens, normalize: bool) -> None:
    inputs = tokens(torch.float64)
    del inputs["m"]
    h, state = mlstm_siging_sequence(**inputs, normalize=normalize)
    c, n = inputs["c"], inputs["n"]
    for t in range(5):
        out, (c, n) = mlstm_siging_step(**token_of(inputs, t), c=c, n=n, normalize=normalize)
        torch.testing.assert_close(h[:, :, t], out)
    torch.testing.assert_close(state, (c, n))
    assert state[1].data_ptr() != inputs["n"].data_ptr()


def test_a_sequence_is_a_chunk(tokens: Tokens) -> None:
    inputs = tokens(torch.float64)
    renamed = {name if name in "qkvif" else f"{name}_initial": x for name, x in inputs.items()}
    h, state = mlstm_sequence(**inputs)
    expected, last = mlstm_chunkwise(**renamed, return_last_states=True)
    torch.testing.assert_close((h, *state), (expected, *last))
    del inputs["m"], renamed["m_initial"]
    h, state = mlstm_siging_sequence(**inputs)
    expected, last = mlstm_siging_chunkwise(**renamed, return_last_states=True)
    torch.testing.assert_close((h, *state), (expected, *last))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(tokens: Tokens, dtype: torch.dtype) -> None:
    h, state = mlstm_sequence(**tokens(dtype))
    assert h.dtype == dtype and {x.dtype for x in state} == {torch.float32}
    exact, truth = mlstm_sequence(**{name: x.double() for name, x in tokens(dtype).items()})
    assert (h.double() - exact).norm() < 5e-3 * exact.norm()
    _, kept = mlstm_sequence(**tokens(dtype), dtype_state=torch.bfloat16)
    assert {x.dtype for x in kept} == {torch.bfloat16}
    c, _, m = (x.double() for x in kept)
    memory = truth[0] * truth[2][..., None].exp()
    assert (c * m[..., None].exp() - memory).norm() < 4e-3 * memory.norm()


def test_gradients(tokens: Tokens) -> None:
    """By the reference."""
    inputs = {name: x.double().requires_grad_() for name, x in tokens(seq=2).items()}
    m = inputs.pop("m").detach()

    def run(*tensors: Tensor) -> Tensor:
        return mlstm_sequence(*tensors, m)[0]

    assert torch.autograd.gradcheck(run, tuple(inputs.values()), atol=1e-5, fast_mode=True)


def test_steps_and_sequences_keep_plans_of_their_own(tokens: Tokens) -> None:
    """A plan of the one does not let arguments of the other pass."""
    inputs = tokens(seq=1)
    state = {name: inputs[name] for name in "cnm"}
    token = token_of(inputs, 0)
    for _ in range(2):
        mlstm_step(**token, **state)
        mlstm_sequence(**inputs)
    with pytest.raises(ValueError, match="q: expected 4 dimensions"):
        mlstm_sequence(**token, **state)
    with pytest.raises(ValueError, match="q: expected 3 dimensions"):
        mlstm_step(**inputs)


@pytest.mark.parametrize(
    "name, change, error",
    [
        ("q", lambda x: x[:, :, 0], (ValueError, r"q: expected 4 dimensions \[B, NH, S, DHQK\]")),
        ("k", lambda x: x[..., :8], (ValueError, r"k: expected shape \[B, NH, S, DHQK\] of q")),
        ("k", lambda x: x[:, :, :4], (ValueError, "k: expected shape")),
        ("v", lambda x: x.double(), (TypeError, "v: expected dtype torch.float32, the dtype of q")),
        ("v", lambda x: x[:2], (ValueError, r"v: expected shape \[B, NH, S\] of q and \[DHHV\]")),
        ("i", lambda x: x.unsqueeze(3), (ValueError, r"i: expected 3 dimensions \[B, NH, S\] of q")),
        ("f", lambda x: x.long(), (TypeError, "f: expected dtype float16")),
        ("f", lambda x: x[..., :1], (ValueError, r"f: expected shape \[B, NH, S\] of q")),
        ("c", lambda x: x.mT, (ValueError, r"c: expected shape \[B, NH, DHQK, DHHV\]")),
        ("n", lambda x: x.to("meta"), (ValueError, "n: expected device cpu")),
        ("m", lambda x: None, (TypeError, r"m: expected a tensor \[B, NH, 1\], got NoneType")),
    ],
)
def test_bad_arguments(
    tokens: Tokens, name: str, change: Callable[[Tensor], Any], error: tuple[type[Exception], str]
) -> None:
    inputs = tokens()
    with pytest.raises(error[0], match=error[1]):
        mlstm_sequence(**inputs | {name: change(inputs[name])})


def test_bad_options(tokens: Tokens) -> None:
    with pytest.raises(ValueError, match="eps"):
        mlstm_sequence(**tokens(), eps=-1.0)
    with pytest.raises(ValueError, match="dtype_state"):
        mlstm_sequence(**tokens(), dtype_state=torch.int8)
    with pytest.raises(ValueError, match="backend: expected 'reference' for a few tokens"):
        mlstm_sequence(**tokens(), backend="reference:parallel")
    with pytest.raises(ValueError, match="backend: expected 'tk' for a few tokens, got 'tk:pingpong'"):
        mlstm_sequence(**tokens(), backend="tk:pingpong")
    with pytest.raises(ValueError, match="backend: expected 'triton' for a few tokens"):
        mlstm_sequence(**tokens(), backend="triton:xl_chunk")
    with pytest.raises(UnsupportedError, match="has no Triton kernel for a few tokens"):
        mlstm_sequence(**tokens(), backend="triton")
    with pytest.raises(UnsupportedError, match="mlstm_sequence on backend 'tk'"):
        mlstm_sequence(**tokens(), backend="tk")


def test_in_place_is_refused(tokens: Tokens) -> None:
    with pytest.raises(TypeError, match="inplace: expected a bool"):
        mlstm_sequence(**tokens(), inplace=1)
    with pytest.raises(ValueError, match=r"dtype_state: expected None or torch.float32, the dtype of c"):
        mlstm_sequence(**tokens(), inplace=True, dtype_state=torch.bfloat16)
    inputs = tokens()
    inputs["q"].requires_grad_()
    with pytest.raises(ValueError, match="inplace: expected False where a gradient is recorded"):
        mlstm_sequence(**inputs, inplace=True)
    with torch.no_grad():
        mlstm_sequence(**inputs, inplace=True)


def test_compile(tokens: Tokens) -> None:
    inputs = tokens(torch.bfloat16)
    compiled = torch.compile(mlstm_sequence, backend="eager", fullgraph=True)
    h, state = compiled(**inputs)
    expected, last = mlstm_sequence(**inputs)
    torch.testing.assert_close((h, *state), (expected, *last))


# on a GPU, as far as it can be asked without one


def on_gpu(tokens: dict[str, Tensor], **changes: Any) -> Any:
    options = {"sigmoid_gate": False, "normalize": True, "eps": 1e-6, "dtype_state": None}
    call = check_mlstm_sequence(**tokens, **options)
    return dataclasses.replace(call, device=torch.device("cuda", 0), **changes)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "MLSTM_KERNELS_MISSING", None)
    monkeypatch.setattr(installation, "INTERPRETED", False)
    monkeypatch.setattr(device, "device_fault", lambda index: ("", ""))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["auto", "tk"])
def test_tk_serves_sequences(
    tokens: Tokens, gpu: None, fake_tk: Any, dtype: torch.dtype, backend: str
) -> None:
    inputs = tokens(dtype)
    fake_tk.verdict = tk.supports_mlstm_sequence(on_gpu(inputs))
    choice = tfla_tk.which("mlstm_sequence", **inputs, backend=backend)
    assert choice.backend == "tk" and not choice.reasons["triton"].ok
    expected = mlstm_sequence(**inputs, backend="reference")
    h, state = mlstm_sequence(**inputs, backend=backend)  # the op computes the reference on a CPU
    torch.testing.assert_close((h, *state), (expected[0], *expected[1]))


@pytest.mark.parametrize("sigmoid_gate", [False, True])
def test_whether_a_sequence_is_on_tk(tokens: Tokens, fake_tk: Any, sigmoid_gate: bool) -> None:
    """What the call does, from the plan that it keeps."""
    inputs = tokens()
    if sigmoid_gate:
        inputs["m"] = None
    options = {"eps": 1e-6, "dtype_state": None}
    rest = {"sigmoid_gate": sigmoid_gate, "normalize": True}
    for serves in (False, True):
        fake_tk.verdict = tfla_tk.Support(serves)
        decode._sequence.plans.clear()
        assert decode.is_sequence_on_tk(tuple(inputs.values()), **rest, **options) == serves
        given = {name: x for name, x in inputs.items() if x is not None}
        (mlstm_siging_sequence if sigmoid_gate else mlstm_sequence)(**given, **options)
        assert len(decode._sequence.plans) == 1


@pytest.mark.parametrize("changes", [{"seq": 17}, {"requires_grad": True}])
def test_what_tk_leaves_to_the_chunkwise_kernel(
    tokens: Tokens, gpu: None, fake_tk: Any, changes: dict[str, Any]
) -> None:
    fake_tk.verdict = tk.supports_mlstm_sequence(on_gpu(tokens(torch.bfloat16), **changes))
    inputs = tokens(torch.bfloat16)
    assert tfla_tk.which("mlstm_sequence", **inputs).backend == "reference"
    with pytest.raises(UnsupportedError, match="use mlstm_chunkwise"):
        mlstm_sequence(**inputs, backend="tk")


@pytest.fixture(params=["reference", "tk"])
def backend(request: pytest.FixtureRequest, fake_tk: Any) -> str:
    """tk is the op on the CPU."""
    fake_tk.verdict = tfla_tk.Support(True)
    return request.param


@pytest.mark.parametrize("dtypes", [("float32",) * 3, ("bfloat16", "float32", "bfloat16"), ("float16",) * 3])
@pytest.mark.parametrize("contiguous", [True, False])
def test_in_place(tokens: Tokens, backend: str, dtypes: tuple[str, ...], contiguous: bool) -> None:
    """The given tensors hold what a call otherwise returns, each part in its own dtype."""
    inputs = tokens(torch.bfloat16)
    kinds = [getattr(torch, name) for name in dtypes]
    state = [inputs.pop(name).to(kind) for name, kind in zip("cnm", kinds, strict=True)]
    if not contiguous:
        state = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in state]
    before = [x.clone() for x in state]
    h, expected = mlstm_sequence(**inputs, **dict(zip("cnm", before, strict=True)), backend="reference")
    found, returned = mlstm_sequence(
        **inputs, **dict(zip("cnm", state, strict=True)), inplace=True, backend=backend
    )
    assert all(x is y for x, y in zip(returned, state, strict=True))
    assert [x.dtype for x in state] == kinds
    torch.testing.assert_close(found, h)
    memory, truth = (x[0].double() * x[2].double()[..., None].exp() for x in (state, expected))
    assert (memory - truth).norm() < (1e-6 if kinds[0] == torch.float32 else 4e-3) * truth.norm()


@pytest.mark.parametrize("normalize", [True, False])
def test_siging_in_place(tokens: Tokens, backend: str, normalize: bool) -> None:
    inputs = tokens(torch.bfloat16)
    del inputs["m"]
    expected = mlstm_siging_sequence(**inputs, normalize=normalize, backend="reference")
    n_before = inputs["n"].clone()
    h, (c, n) = mlstm_siging_sequence(**inputs, normalize=normalize, inplace=True, backend=backend)
    assert c is inputs["c"] and n is inputs["n"]
    torch.testing.assert_close((h, c, n), (expected[0], *expected[1]))
    assert torch.equal(n, n_before) != normalize


@pytest.mark.parametrize("dtype_state", [None, torch.float16, torch.bfloat16, torch.float64])
def test_dtype_of_the_state_returned(tokens: Tokens, backend: str, dtype_state: torch.dtype | None) -> None:
    inputs = tokens(torch.bfloat16)
    _, state = mlstm_sequence(**inputs, dtype_state=dtype_state, backend=backend)
    assert {x.dtype for x in state} == {dtype_state or torch.float32}
    _, expected = mlstm_sequence(**inputs, dtype_state=dtype_state, backend="reference")
    torch.testing.assert_close(state, expected)


@pytest.mark.parametrize("inplace", [False, True])
def test_nothing_to_compute(tokens: Tokens, backend: str, inplace: bool) -> None:
    """No head, and no token: the state stays as it is."""
    inputs = {name: x[:0] for name, x in tokens().items()}
    h, (c, _, _) = mlstm_sequence(**inputs, backend=backend)
    assert h.shape == (0, 2, 5, 32) and c.shape == (0, 2, 16, 32)
    inputs = tokens(seq=0)
    h, state = mlstm_sequence(**inputs, inplace=inplace, backend=backend)
    assert h.shape == (3, 2, 0, 32)
    for name, x in zip("cnm", state, strict=True):
        assert torch.equal(x, inputs[name]) and (x is inputs[name]) == inplace


def arguments(tokens: dict[str, Tensor], sigmoid_gate: bool, *rest: Any) -> tuple[Any, ...]:
    """Of the ops."""
    tensors = [tokens[name] for name in NAMES]
    return (*tensors[:7], None if sigmoid_gate else tensors[7], sigmoid_gate, True, 1e-6, *rest)


@pytest.mark.parametrize("sigmoid_gate", [False, True])
def test_opcheck(tokens: Tokens, sigmoid_gate: bool) -> None:
    """Schemas, fake tensors, and what the ops write."""
    for kind in (torch.float32, torch.bfloat16):
        opcheck(SEQUENCE, arguments(tokens(torch.bfloat16), sigmoid_gate, kind))
    inputs = tokens(torch.bfloat16)
    inputs["v"] = inputs["v"].transpose(1, 2).contiguous().transpose(1, 2)
    opcheck(IN_PLACE, arguments(inputs, sigmoid_gate))
    inputs["c"] = inputs["c"].bfloat16()
    opcheck(IN_PLACE, arguments(inputs, sigmoid_gate))


@pytest.mark.parametrize("inplace", [False, True])
def test_compile_the_op(tokens: Tokens, fake_tk: Any, inplace: bool) -> None:
    fake_tk.verdict = tfla_tk.Support(True)
    inputs, again = tokens(torch.bfloat16), tokens(torch.bfloat16)

    def run(**x: Tensor) -> Any:
        h, (c, n, m) = mlstm_sequence(**x, inplace=inplace, backend="tk")
        return 2 * h, c + 1, n, m

    expected = run(**inputs)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(**again), expected)
    for name in "cnm":
        torch.testing.assert_close(again[name], inputs[name])
