"""Bad input raises before any backend runs; the message names the argument, what was expected, what came."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import tfla_tk
import tfla_tk.reference
from tfla_tk import mlstm_chunkwise, mlstm_siging_chunkwise

from .conftest import STATES, make_inputs

meta = torch.device("meta")

Case = tuple[dict[str, Any], type[Exception], str]

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of")  # nested and masked tensors

# argument replacements (a callable takes the good inputs), exception, pattern of the message
CASES: dict[str, Case] = {
    "q is no tensor": ({"q": [1.0]}, TypeError, "q: expected a tensor .*, got list"),
    "q of rank 3": ({"q": lambda x: x["q"][0]}, ValueError, "q: expected 4 dimensions .*, got 3 with shape"),
    "i of rank 4": ({"i": lambda x: x["i"][..., None]}, ValueError,
        r"i: expected 3 dimensions \[B, NH, S\] of q, got 4"),
    "k of another B": ({"k": lambda x: x["k"][:1]}, ValueError,
        r"k: expected shape .* = \(2, 3, 40, 16\), got \(1, 3"),
    "v of another S": ({"v": lambda x: x["v"][:, :, 1:]}, ValueError, r"v: .* got \(2, 3, 39, 32\)"),
    "i of another S": ({"i": lambda x: x["i"][..., 1:]}, ValueError,
        r"i: expected shape .* got \(2, 3, 39\)"),
    "no DHQK": ({n: lambda x, n=n: x[n][..., :0] for n in "qk"}, ValueError,
        "q: expected a head dimension of at least 1"),
    "no DHHV": ({"v": lambda x: x["v"][..., :0]}, ValueError, "v: expected a head dimension of at least 1"),
    "integer q": ({"q": lambda x: x["q"].int()}, TypeError, "q: expected dtype .*, got torch.int32"),
    "sparse k": ({"k": lambda x: x["k"].to_sparse()}, TypeError,
        "k: expected a dense .*, got torch.sparse_coo"),
    "mixed dtypes": ({"v": lambda x: x["v"].bfloat16()}, TypeError,
        "v: expected dtype torch.float32.*got torch.bfloat16"),
    "k on another device": ({"k": lambda x: x["k"].to(meta)}, ValueError,
        "k: expected device cpu.*, got meta"),
    "state on another device": ({"n_initial": lambda x: x["n_initial"].to(meta)}, ValueError,
        "n_initial: expected device cpu.*, got meta"),
    "c of the wrong shape": ({"c_initial": lambda x: x["c_initial"].mT}, ValueError,
        r"c_initial: expected shape \[B, NH, DHQK, DHHV\] = \(2, 3, 16, 32\), got \(2, 3, 32, 16\)"),
    "n of the wrong rank": ({"n_initial": lambda x: x["n_initial"][..., None]}, ValueError,
        "n_initial: expected 3 dim"),
    "m without its last dimension": ({"m_initial": lambda x: x["m_initial"][..., 0]}, ValueError,
        "m_initial: expected 3"),
    "integer state": ({"c_initial": lambda x: x["c_initial"].long()}, TypeError, "c_initial: expected dtype"),
    "only c": ({"n_initial": None, "m_initial": None}, ValueError,
        "initial state: expected all of .*, got only c_initial"),
    "no m": ({"m_initial": None}, ValueError, "initial state: .* got only c_initial, n_initial"),
    "m requires grad": ({"m_initial": lambda x: x["m_initial"].requires_grad_()}, ValueError,
        "m_initial: expected no requires_grad"),
    "cu_seqlens is a list": ({"cu_seqlens": [0, 40]}, TypeError, r"cu_seqlens: .* \[N \+ 1\], got list"),
    "float offsets": ({"cu_seqlens": torch.zeros(3)}, TypeError,
        "cu_seqlens: expected dtype int32 or int64, got torch.float32"),
    "sparse offsets": ({"cu_seqlens": torch.zeros(3, dtype=torch.int64).to_sparse()}, TypeError,
        "cu_seqlens: expected a dense .*, got torch.sparse_coo"),
    "offsets of rank 2": ({"cu_seqlens": torch.zeros(1, 3, dtype=torch.int32)}, ValueError,
        r"cu_seqlens: expected 1 dimension \[N \+ 1\], got 2 with shape \(1, 3\)"),
    "one offset": ({"cu_seqlens": torch.zeros(1, dtype=torch.int32)}, ValueError,
        "cu_seqlens: expected at least 2 entries, got 1"),
    "offsets on another device": ({"cu_seqlens": torch.zeros(3, dtype=torch.int32, device=meta)}, ValueError,
        "cu_seqlens: expected device cpu.*, got meta"),
    "offsets for a batch of two": ({"cu_seqlens": torch.zeros(3, dtype=torch.int32)}, ValueError,
        r"cu_seqlens: expected a batch of 1 in q \(packed sequences: .*\), got a batch of 2"),
    "chunk_size 0": ({"chunk_size": 0}, ValueError, "chunk_size: expected a positive multiple of 16, got 0"),
    "chunk_size 40": ({"chunk_size": 40}, ValueError, "chunk_size: .* got 40"),
    "chunk_size 64.0": ({"chunk_size": 64.0}, TypeError,
        "chunk_size: expected an int, got 64.0 of type float"),
    "eps 0": ({"eps": 0.0}, ValueError, "eps: expected a positive finite number, got 0.0"),
    "eps nan": ({"eps": float("nan")}, ValueError, "eps: .* got nan"),
    "eps is text": ({"eps": "1e-6"}, TypeError, "eps: expected a number, got '1e-6' of type str"),
    "return_last_states 1": ({"return_last_states": 1}, TypeError,
        "return_last_states: expected a bool, got 1"),
    "recompute 0": ({"recompute_states_in_bw": 0}, TypeError,
        "recompute_states_in_bw: expected a bool, got 0"),
    "kernel dtype": ({"autocast_kernel_dtype": torch.float64}, ValueError,
        "autocast_kernel_dtype: .* got torch.float64"),
    "kernel dtype is text": ({"autocast_kernel_dtype": "bfloat16"}, TypeError,
        "autocast_kernel_dtype: expected None, torch.float16, .* torch.float32, got 'bfloat16' of type str"),
    "NumPy chunk_size 64.0": ({"chunk_size": np.float32(64)}, TypeError, "chunk_size: expected an int"),
    "NumPy eps True": ({"eps": np.bool_(True)}, TypeError, "eps: expected a number"),
    "array for eps": ({"eps": np.full(1, 1e-6)}, TypeError, "eps: expected a number.* of type ndarray"),
    "tensor for eps": ({"eps": torch.zeros(2, 3)}, TypeError,
        r"eps: expected a number, got a tensor of shape \(2, 3\) and dtype torch.float32$"),
    "return_last_states is a NumPy 1": ({"return_last_states": np.int64(1)}, TypeError,
        "return_last_states: expected a bool, got .*1"),
    "nested v": ({"v": lambda x: torch.nested.nested_tensor(list(x["v"]))}, TypeError,
        "v: expected a dense .* tensor; cu_seqlens packs .*, got a nested tensor"),
    "masked k": ({"k": lambda x: torch.masked.masked_tensor(x["k"], x["k"] > 0)}, TypeError,
        r"k: expected a plain tensor, such as x.to_tensor\(0\), got a MaskedTensor"),
    "backend cuda": ({"backend": "cuda"}, ValueError,
        "backend: expected one of auto, tk, triton, reference.*'cuda'"),
    "backend None": ({"backend": None}, TypeError, "backend: expected a str, got None"),
    "variant of tk": ({"backend": "tk:fast"}, ValueError, "backend: expected 'tk', got 'tk:fast'"),
    "unknown form": ({"backend": "reference:fast"}, ValueError,
        "backend: expected 'reference:chunkwise'.*got"),
    "unknown family": ({"backend": "triton:fast_64"}, ValueError,
        "backend: expected 'triton:' and one of .*fast_64"),
}  # fmt: skip


def replaced(inputs: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return inputs | {name: change(inputs) if callable(change) else change for name, change in changes.items()}


@pytest.mark.parametrize("name", CASES)
def test_mlstm_rejects(name: str) -> None:
    changes, error, pattern = CASES[name]
    arguments = replaced(make_inputs(states=STATES), changes)
    functions = [mlstm_chunkwise]
    if name not in ("only c", "no m"):
        functions.append(mlstm_siging_chunkwise)
    for function in functions:
        # the second time as the first: a good call may be remembered, a bad one is not
        for _ in range(2):
            with pytest.raises(error, match=pattern) as caught:
                function(**arguments)
            assert re.fullmatch(r"[\w ]+: expected .+, got .+", str(caught.value)), str(caught.value)
        with pytest.raises(error, match=pattern):
            tfla_tk.which(function, **arguments)


def test_siging_initial_state_is_c_and_n() -> None:
    inputs = make_inputs(states=("c_initial",))
    with pytest.raises(
        ValueError, match="initial state: expected all of c_initial, n_initial or none, got only c_initial"
    ):
        mlstm_siging_chunkwise(**inputs)
    with pytest.raises(ValueError, match="got only n_initial"):
        mlstm_siging_chunkwise(**make_inputs(states=("n_initial",)))
    for normalize, needed in ((True, "all of c_initial, n_initial"), (False, "c_initial")):
        expected = rf"expected {needed} or none \(the sigmoid gate has no m_initial\), got only m_initial"
        with pytest.raises(ValueError, match=expected):
            mlstm_siging_chunkwise(**make_inputs(states=("m_initial",)), normalize=normalize)
    with pytest.raises(TypeError, match="normalize: expected a bool, got 1"):
        mlstm_siging_chunkwise(**make_inputs(), normalize=1)
    # without the normaliser there is no n
    h = mlstm_siging_chunkwise(**inputs, normalize=False)
    assert h.shape == inputs["v"].shape


def test_states_of_packed_sequences() -> None:
    """One row of the state per sequence, whatever the batch."""
    inputs = make_inputs(1, sequences=3, states=STATES)
    offsets = torch.tensor([0, 10, 10, 40])
    h, last = mlstm_chunkwise(**inputs, cu_seqlens=offsets, return_last_states=True)
    assert h.shape == inputs["v"].shape and [t.shape[0] for t in last] == [3, 3, 3]
    for name, layout in (("c_initial", "DHQK, DHHV"), ("n_initial", "DHQK"), ("m_initial", "1")):
        changed = inputs | {name: inputs[name][:1]}
        with pytest.raises(ValueError, match=rf"{name}: expected shape \[N, NH, {layout}\] = \(3, 3, "):
            mlstm_chunkwise(**changed, cu_seqlens=offsets)
    with pytest.raises(ValueError, match=r"c_initial: expected shape \[B, NH, DHQK, DHHV\] = \(1, 3, "):
        mlstm_chunkwise(**inputs)


@pytest.mark.parametrize("offsets", [[0, 39], [1, 40], [0, 30, 20, 40], [0, 50]])
def test_offsets_that_do_not_fit(offsets: list[int]) -> None:
    """The reference reads them; metadata alone, as `which` sees it, is fine."""
    arguments = make_inputs(1) | {"cu_seqlens": torch.tensor(offsets)}
    assert tfla_tk.which("mlstm_chunkwise", **arguments).backend == "reference"
    for function in (mlstm_chunkwise, mlstm_siging_chunkwise):
        with pytest.raises(ValueError, match="cu_seqlens: expected offsets rising from 0 to 40, got"):
            function(**arguments)


def test_stabiliser_of_an_earlier_call_is_accepted() -> None:
    inputs = {name: t.requires_grad_() for name, t in make_inputs().items()}
    _, (c, n, m) = mlstm_chunkwise(**inputs, return_last_states=True)
    graphed = m + 0 * c.sum()
    h = mlstm_chunkwise(**inputs, c_initial=c, n_initial=n, m_initial=graphed)
    h.sum().backward()
    assert inputs["q"].grad is not None and bool(inputs["q"].grad.isfinite().all())


def test_validation_reads_no_data() -> None:
    """Meta tensors have none; NaN and infinity pass through."""
    inputs = {name: t.to(meta) for name, t in make_inputs(1, sequences=2, states=STATES).items()}
    offsets = torch.empty(3, dtype=torch.int32, device=meta)
    assert tfla_tk.which("mlstm_chunkwise", **inputs, cu_seqlens=offsets).backend == "reference"
    inputs = make_inputs()
    inputs["q"][0, 0, 0, 0] = float("nan")
    h = mlstm_chunkwise(**inputs)
    assert bool(h[0, 0].isnan().any()) and not bool(h[1].isnan().any())


def test_numpy_scalars_count_as_python_numbers() -> None:
    inputs = make_inputs(1)
    options = {"eps": 0.25, "chunk_size": 16, "normalize": False, "return_last_states": True}
    expected, last = mlstm_chunkwise(**inputs, eps=0.25, chunk_size=16, return_last_states=True)
    for eps, chunk_size in ((np.float16(0.25), np.int32(16)), (np.float64(0.25), np.uint8(16))):
        of_numpy = {"eps": eps, "chunk_size": chunk_size, "return_last_states": np.True_}
        h, found = mlstm_chunkwise(**inputs, **of_numpy, recompute_states_in_bw=np.False_)
        assert torch.equal(h, expected) and all(map(torch.equal, found, last))
    of_numpy = {name: np.array(value)[()] for name, value in options.items()}
    assert {type(value).__module__ for value in of_numpy.values()} == {"numpy"}
    h, last = mlstm_siging_chunkwise(**inputs, **of_numpy)
    expected, expected_last = mlstm_siging_chunkwise(**inputs, **options)
    assert torch.equal(h, expected) and all(map(torch.equal, last, expected_last))
    token = {name: x[:, :, 0] if name in "qkv" else x[:, :, :1] for name, x in inputs.items()}
    for function, tokens in ((tfla_tk.mlstm_siging_step, token), (tfla_tk.mlstm_siging_sequence, inputs)):
        state = {"c": torch.ones(1, 3, 16, 32), "n": torch.ones(1, 3, 16)}
        plain = function(**tokens, **state, eps=0.25, normalize=False)
        found = function(**tokens, **state, eps=np.float32(0.25), normalize=np.False_, inplace=np.True_)
        assert torch.equal(found[0], plain[0]) and torch.equal(state["c"], plain[1][0])


def test_numpy_scalars_in_the_reference() -> None:
    """Its functions for themselves, with the sizes that they cut by."""
    inputs = make_inputs(1, dtype=torch.float64)
    states = dict.fromkeys(STATES)
    of_python = {"chunk_size": 32, "eps": 0.25}
    of_numpy = {"chunk_size": np.int64(32), "eps": np.float32(0.25)}
    for function, found in (
        (tfla_tk.reference.mlstm_siging_chunkwise, lambda h: h),
        (tfla_tk.reference.mlstm_forward_terms, lambda terms: terms.h),
        (partial(tfla_tk.reference.mlstm_backward, **states, dh=inputs["v"]), lambda gradients: gradients.f),
    ):
        assert torch.equal(found(function(**inputs, **of_numpy)), found(function(**inputs, **of_python)))


class Tagged(torch.Tensor):
    """A subclass as packages make them: a tensor with another name."""


@pytest.mark.parametrize("wrap", [torch.nn.Parameter, torch.nn.Buffer, lambda x: x.as_subclass(Tagged)])
def test_other_subclasses_may_come(wrap: Any) -> None:
    inputs = make_inputs(states=("c_initial", "n_initial"))
    expected = mlstm_siging_chunkwise(**inputs)
    found = mlstm_siging_chunkwise(**{name: wrap(x) for name, x in inputs.items()})
    assert isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor)
    assert torch.equal(found.detach().as_subclass(torch.Tensor), expected)


def test_functorch_wrappers_may_come() -> None:
    """vmap and grad of the reference."""
    inputs = make_inputs(3)
    expected = mlstm_chunkwise(**inputs)
    found = torch.vmap(lambda x: mlstm_chunkwise(**{name: t[None] for name, t in x.items()})[0])(inputs)
    torch.testing.assert_close(found, expected)
    dq = torch.func.grad(lambda q: mlstm_chunkwise(**inputs | {"q": q}).sum())(inputs["q"])
    q = inputs["q"].requires_grad_()
    torch.testing.assert_close(dq, torch.autograd.grad(mlstm_chunkwise(**inputs).sum(), q)[0])
