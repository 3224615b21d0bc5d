"""chunk_gla: what test_linear.py does not ask of every operator; errors, what fla refuses, its ops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tfla_tk import chunk_gla, reference
from tfla_tk.calls.gla import GLACore

from .families import draw_gla as draw
from .linear import assert_same, gradients, leaves
from .linear_checks import (
    parameters_by_place,
    parameters_of_fla,
)

# What is computed


def test_arguments_in_the_order_of_fla() -> None:
    x = draw()
    expected, last = reference.gla_recurrent(**x, scale=0.5, output_final_state=True)
    q, k, v, g, state = x.values()
    o, final = chunk_gla(q, k, v, g, 0.5, state.mT, True, True)
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(final.mT, last)
    assert chunk_gla(q, k, v, g)[1] is None


def test_signature_is_that_of_fla() -> None:
    pytest.importorskip("fla")
    from fla.ops.gla import chunk_gla as theirs

    assert parameters_by_place(chunk_gla) == parameters_of_fla(theirs)


@pytest.mark.parametrize("decay", [-1e3, -math.inf, 0.0])
def test_gates_that_close_one_channel(decay: float) -> None:
    x = draw()
    x["g"][:, ::3, :, 5] = decay
    assert_same(gradients(chunk_gla, x), gradients(reference.gla_recurrent, x))


# The path of the kernels


def test_the_core_has_the_arguments_of_the_op() -> None:
    names = [argument.name for argument in torch.ops.tfla_tk.gla_fwd.default._schema.arguments]
    assert names == [*GLACore._fields, "output_final_state"]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
def test_opcheck(packed: bool, with_state: bool) -> None:
    x = leaves(draw(batch=1 if packed else 2, seq=20, rows=3 if packed else None, dtype=torch.float32))
    inputs: list[Any] = [x[name] for name in ("q", "k", "v", "g")]
    inputs += [
        x["initial_state"] if with_state else None,
        torch.tensor([0, 5, 5, 20]) if packed else None,
    ]
    registered = torch.ops.tfla_tk
    torch.library.opcheck(registered.gla_fwd, (*inputs, 0.25, False, with_state))
    torch.library.opcheck(registered.packed_gla, (*inputs, 0.25, False, "chunkwise", 16, with_state))
    detached = [t.detach() if isinstance(t, Tensor) else t for t in inputs]
    o, state = registered.gla_fwd(*detached, 0.25, False, with_state)
    given = (torch.randn_like(o), torch.randn_like(state) if with_state else None)
    torch.library.opcheck(registered.gla_bwd, (*detached, *given, 0.25, False, True))
    torch.library.opcheck(registered.packed_gla_bwd, (*detached, *given, 0.25, False, 16, True))
