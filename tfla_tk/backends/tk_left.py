"""What a forward by the kernels leaves for its backward, in one allocation: rows, and states at the cuts."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from tfla_tk.backends import tk_passes
from tfla_tk.ops import chunk_slots


class Left(NamedTuple):
    """Where it lies: bytes from the start of the allocation.

    Attributes:
        row_n, row_m: of every token, [B, NH, S] fp32, and chunk_m of every chunk, [B, NH, slots] fp64, as
            tfla_tk::mlstm_fwd returns them; None for what there is none of.
        workspace: of the forward's kernels; of 0 bytes where nothing is cut.
        state_c, state_n: in it, the states at the cuts, [states, K, V] and [states, K] fp32; state_n is None
            without normaliser, when nobody writes n.
        bytes: of the allocation.
    """

    row_n: int | None
    row_m: int | None
    chunk_m: int | None
    workspace: int
    state_c: int
    state_n: int | None
    bytes: int

    def rows_at(self, address: int) -> tuple[int, int, int]:
        """Addresses of row_n, row_m and chunk_m in an allocation, or 0."""
        return (
            0 if self.row_n is None else address + self.row_n,
            0 if self.row_m is None else address + self.row_m,
            0 if self.chunk_m is None else address + self.chunk_m,
        )

    def states_at(self, address: int) -> tuple[int, int] | None:
        """Addresses of C and n at the cuts, or 0; None where nothing is cut."""
        if self.workspace == self.bytes:
            return None
        return address + self.state_c, 0 if self.state_n is None else address + self.state_n


@functools.lru_cache(maxsize=1024)
def left_by_forward(
    sizes: tk_passes.Sizes, slots: int, states: int, *, sigmoid_gate: bool, normalize: bool
) -> Left:
    """Where the forward of a call of these sizes leaves what; rows lie alike for any number of states.

    Args:
        slots: `chunk_slots`.
        states: boundaries between segments, of all heads.
    """
    batch, heads, seq, dim_qk, dim_v = sizes
    end = 0

    def take(size: int) -> int:
        nonlocal end
        start, end = end, end + tk_passes.aligned(size)
        return start

    row_bytes = tk_passes.FLOAT * batch * heads * seq
    row_n = take(row_bytes) if normalize else None
    row_m = None if sigmoid_gate else take(row_bytes)
    chunk_m = None if sigmoid_gate else take(tk_passes.DOUBLE * batch * heads * slots)
    workspace = end
    # struct Workspace of mlstm_fwd_globals.cuh: two doubles per state, C, n, m
    state_c = workspace + 2 * tk_passes.DOUBLE * states
    state_n = state_c + tk_passes.FLOAT * states * dim_qk * dim_v
    end = state_n + tk_passes.FLOAT * states * (dim_qk + 1)
    return Left(row_n, row_m, chunk_m, workspace, state_c, state_n if normalize else None, end)


def rows_in(
    left: Tensor, q: Tensor, v: Tensor, cu_seqlens: Tensor | None, *, sigmoid_gate: bool, normalize: bool
) -> tuple[Tensor | None, ...]:
    """row_n, row_m and chunk_m as tensors, None for what there is none of."""
    batch, heads, seq, dim_qk = q.shape
    slots = chunk_slots(seq, cu_seqlens)
    sizes = (batch, heads, seq, dim_qk, v.shape[-1])
    # not from the cache: compiled autograd traces this
    lies = left_by_forward.__wrapped__(sizes, slots, 0, sigmoid_gate=sigmoid_gate, normalize=normalize)

    def view(start: int | None, last: int, dtype: torch.dtype) -> Tensor | None:
        if start is None:
            return None
        size = batch * heads * last * dtype.itemsize
        return left[start : start + size].view(dtype).view(batch, heads, last)

    return (
        view(lies.row_n, seq, torch.float32),
        view(lies.row_m, seq, torch.float32),
        view(lies.chunk_m, slots, torch.float64),
    )
