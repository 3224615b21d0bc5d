"""The forward of mLSTM and of a scalar decay by the reference, on what lies at the addresses given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from tfla_tk import reference
from tfla_tk.core.layout import DTYPES

from .addresses import tensor_at
from .stand_in import Kernels, placed

OF_CODE = {code: dtype for dtype, code in DTYPES.items()}


class ForwardFormulas(Kernels):
    """Stands for the launchers of the forward.

    A launch has what it was prepared with, at the addresses of the call, and `initial` and `last`.

    Attributes:
        computes: whether results are written.
    """

    ARGUMENTS: ClassVar = {
        "forward": (
            *(
                "q",
                "k",
                "v",
                "h",
                "i",
                "f",
                "states",
                "rows",
                "left",
                "cut",
                "workspace",
                "sizes",
                "group",
                "tile",
            ),
            *("scale", "eps", "half", "sigmoid_gate", "normalize", "device"),
        )
    }
    computes = True

    def workspace_bytes(self, slots: int, dim_qk: int, dim_v: int) -> int:
        return 4 * slots * (dim_qk * dim_v + dim_qk + 5)

    def workspace_offsets(self, slots: int, dim_qk: int, dim_v: int) -> tuple[int, int]:
        return 24 * slots, 32 * slots

    def ctas_per_multiprocessor(self, tile_qk: int, slice_v: int) -> int:
        return 1

    def compute(self, launch: SimpleNamespace, starts: list[int]) -> None:
        vars(launch).update({name: placed(x, starts) for name, x in vars(launch).items()})
        launch.initial, launch.last = launch.states[:3], launch.states[3:]
        _, _, sequences, segments, _ = launch.cut
        assert (launch.workspace != 0) == (segments > sequences)
        assert launch.tile[0] >= launch.sizes[3] and all(x[0] % 16 == 0 for x in operands_of(launch))
        if self.computes:
            write_results(launch)


def operands_of(x: SimpleNamespace) -> tuple[tuple[int, ...], ...]:
    return x.q, x.k, x.v, x.h


def write_results(x: SimpleNamespace) -> None:
    """What the kernel of a launch writes."""
    batch, heads, seq, dim_qk, dim_v = x.sizes
    offsets, is_64bit, count, *_ = x.cut
    dtype = torch.float16 if x.half else torch.bfloat16

    def operand(of: tuple[int, ...], heads: int, dim: int) -> Tensor:
        address, *strides = of
        return tensor_at(address, dtype, (batch, heads, seq, dim), *strides, 1)

    def gate(of: tuple[int, ...]) -> Tensor:
        address, *strides, code = of
        return tensor_at(address, OF_CODE[code], (batch, heads, seq), *strides)

    def floats(addresses: tuple[int, ...], shapes: Any) -> list[Tensor | None]:
        pairs = zip(addresses, shapes, strict=True)
        return [tensor_at(at, torch.float32, shape) if at else None for at, shape in pairs]

    q, k = (operand(of, heads // x.group, dim_qk).repeat_interleave(x.group, 1) for of in (x.q, x.k))
    v, h, f = operand(x.v, heads, dim_v), operand(x.h, heads, dim_v), gate(x.f)
    index = torch.int64 if is_64bit else torch.int32
    cu_seqlens = tensor_at(offsets, index, (count + 1,)) if offsets else None
    states = (count, heads, dim_qk, dim_v), (count, heads, dim_qk), (count, heads, 1)
    initial, last = floats(x.initial, states), floats(x.last, states)
    slots = -(-seq // 64) + (count if offsets else 0)
    rows = floats(x.rows, ((batch, heads, seq), (batch, heads, seq), (batch, heads, slots, 2)))
    found: list[Tensor | None]
    if x.i[0] == 0:  # a scalar decay
        assert (x.sigmoid_gate, x.normalize) == (True, False)
        tensors = (t.transpose(1, 2) for t in (q, k, v, f))
        o, c = reference.simple_gla_chunkwise(
            *tensors, None, x.scale, initial[0], output_final_state=True, cu_seqlens=cu_seqlens
        )
        found = [o.transpose(1, 2), c, None, None, None, None, None]
    else:
        assert x.scale == dim_qk**-0.5
        options = x.sigmoid_gate, x.normalize, x.eps, True, True
        found = [*torch.ops.tfla_tk.mlstm_fwd(q, k, v, gate(x.i), f, *initial, cu_seqlens, *options)]
    for place, value in zip((h, *last, *rows), found, strict=True):
        if place is not None:
            assert value is not None
            place.copy_(value)
