"""Kernels of the tk backend that compute the reference: results as kernels return them, on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tfla_tk import ops
from tfla_tk.backends import tk_left


def forward_kernel(*args: Any) -> tuple[Tensor | None, ...]:
    """The op's CPU code as the kernels return it: None in place of empty tensors, and what they leave."""
    (q, _, v), cu_seqlens, (sigmoid_gate, normalize), trains = args[:3], args[8], args[9:11], args[15:]
    found = [None if x.numel() == 0 else x for x in ops._fwd_cpu(*args[:15])]
    if not trains:
        return *found, None
    options = {"sigmoid_gate": sigmoid_gate, "normalize": normalize}
    sizes = (*q.shape, v.shape[-1])
    lies = tk_left.left_by_forward(sizes, ops.chunk_slots(q.shape[2], cu_seqlens), 0, **options)
    left = torch.zeros(lies.bytes, dtype=torch.uint8)
    for x, row in zip(tk_left.rows_in(left, q, v, cu_seqlens, **options), found[4:], strict=True):
        if x is not None:
            x.copy_(row)
    return *found[:4], None, None, None, left


def backward_kernels(*args: Any) -> tuple[Tensor | None, ...]:
    """Likewise; a plain call gets what the forward has left."""
    return tuple(None if x.numel() == 0 else x for x in ops._bwd_cpu(*op_arguments(*args)))


def op_arguments(*args: Any) -> tuple[Any, ...]:
    """The op's arguments of a plain backward: the rows are in what the forward has left."""
    *args, left = args
    q, _, v, *_, cu_seqlens = args[:9]
    sigmoid_gate, normalize = args[18:20]
    assert args[10:13] == [None] * 3
    rows = tk_left.rows_in(left, q, v, cu_seqlens, sigmoid_gate=sigmoid_gate, normalize=normalize)
    return *args[:10], *rows, *args[13:]
