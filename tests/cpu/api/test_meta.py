"""Tensors without data, meta and fake ones: every reference function gives shapes and gradients."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import tfla_tk
from tfla_tk import reference

from .conftest import make_inputs
from .decode_calls import draw_for

Inputs = dict[str, Tensor]
HEADS, SEQ, DIM_QK, DIM_V = 2, 70, 16, 32
FEW = 25  # tokens of a recurrence


def leaves(device: str, heads_first: bool, batch: int, rows: int, seq: int = SEQ) -> Inputs:
    """Every argument that is a tensor of some reference function, by name."""
    layout = (batch, HEADS, seq) if heads_first else (batch, seq, HEADS)
    shapes = {
        "q": (*layout, DIM_QK),
        "k": (*layout, DIM_QK),
        "v": (*layout, DIM_V),
        "i": layout,
        "f": layout,
        "g": layout,
        "beta": layout,
        "g_gamma": (HEADS,),
        "c_initial": (rows, HEADS, DIM_QK, DIM_V),
        "n_initial": (rows, HEADS, DIM_QK),
        "m_initial": (rows, HEADS, 1),
        "initial_state": (rows, HEADS, DIM_QK, DIM_V),
    }
    return {
        name: torch.randn(shape, device=device, requires_grad=name != "m_initial")
        for name, shape in shapes.items()
    }


def shapes_of(out: Any) -> list[tuple[torch.Size, torch.dtype]]:
    tensors = [out[0], *(out[1] if isinstance(out[1], tuple) else [out[1]])]
    return [(x.shape, x.dtype) for x in tensors]


def differentiate(out: Any, inputs: Inputs) -> None:
    """Through the output and the last c; gradients arrive, on the inputs' device."""
    last = out[1][0] if isinstance(out[1], tuple) else out[1]
    (out[0].sum() + last.sum()).backward()
    for name, x in inputs.items():
        assert not x.requires_grad or (x.grad is not None and x.grad.device == x.device), name


def offsets(device: str, seq: int = SEQ) -> Tensor:
    return torch.tensor([0, 20, 20, seq], dtype=torch.int32, device="cpu").to(device)


FORMS = {
    name: getattr(reference, name)
    for name in reference.__all__
    if name.endswith(("_recurrent", "_parallel", "_chunkwise"))
}
PUBLIC = {
    f"{function.__name__} {backend}": partial(function, backend=backend)
    for function in (tfla_tk.mlstm_chunkwise, tfla_tk.mlstm_siging_chunkwise)
    for backend in ("auto", "reference:parallel")
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("name", "without_data"),
    [*((name, "meta") for name in FORMS | PUBLIC), *((name, "fake") for name in PUBLIC)],
)
def test_functions(name: str, without_data: str, packed: bool) -> None:
    """The functions of tfla_tk.reference themselves, of every operator, and the public ones of mLSTM."""
    function = (FORMS | PUBLIC)[name]
    taken = inspect.signature(function).parameters
    option = "return_last_states" if "return_last_states" in taken else "output_final_state"
    seq = FEW if name.endswith("_recurrent") else SEQ

    def call(device: str) -> tuple[Any, Inputs]:
        found = leaves(device, "mlstm" in name, *((1, 3) if packed else (2, 2)), seq)
        inputs = {x: t for x, t in found.items() if x in taken}
        if name.startswith("gla"):  # a gate per channel
            inputs["g"] = torch.randn(inputs["k"].shape, device=device, requires_grad=True)
        out = function(**inputs, **{option: True}, cu_seqlens=offsets(device, seq) if packed else None)
        return out, inputs

    expected = shapes_of(call("cpu")[0])
    with FakeTensorMode() if without_data == "fake" else nullcontext():
        out, inputs = call("cpu" if without_data == "fake" else "meta")
        assert without_data == "fake" or out[0].device.type == "meta"
        differentiate(out, inputs)
    assert shapes_of(out) == expected


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    "name", ["mlstm_step", "mlstm_siging_step", "mlstm_sequence", "mlstm_siging_sequence"]
)
def test_decoding(name: str, inplace: bool) -> None:
    def call(device: str) -> tuple[Any, Inputs]:
        x = {part: t.to(device) for part, t in draw_for(name).items()}
        inputs = {part: x.pop(part).requires_grad_(not inplace) for part in "qkvif"}
        return getattr(tfla_tk, name)(**inputs, **x, inplace=inplace, backend="reference"), inputs

    out, inputs = call("meta")
    assert shapes_of(out) == shapes_of(call("cpu")[0]) and out[0].device.type == "meta"
    if not inplace:
        differentiate(out, inputs)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("sigmoid_gate", [False, True])
def test_explicit_backward(sigmoid_gate: bool, packed: bool) -> None:
    def call(device: str) -> list[tuple[torch.Size, torch.dtype]]:
        x = leaves(device, True, *((1, 3) if packed else (2, 2)))
        states = [x["c_initial"], x["n_initial"], x["m_initial"]]
        grads = reference.mlstm_backward(
            *(x[name] for name in "qkvif"), *states, torch.ones_like(x["v"]), sigmoid_gate=sigmoid_gate,
            cu_seqlens=offsets(device) if packed else None,
        )  # fmt: skip
        return [(grad.shape, grad.dtype) for grad in grads]

    assert call("meta") == call("cpu")


def test_offsets_on_meta_are_checked_as_far_as_they_can_be() -> None:
    inputs = {name: x.to("meta") for name, x in make_inputs(2).items()}
    with pytest.raises(ValueError, match="expected batch 1"):
        reference.mlstm_chunkwise(**inputs, cu_seqlens=offsets("meta"))
