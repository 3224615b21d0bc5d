"""Up to 16 tokens of mLSTM by the sequence kernel, from tensors: one launch, any strides of q, k and v.

The state is read once and written once, as in the step, which this shares the handling of states with.
docs/mlstm-decode.md tells how the tensor cores get it.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tfla_tk import build
from tfla_tk.backends.tk.operands import current_stream, gate, multiprocessors
from tfla_tk.backends.tk.scalar_gate.step import (
    State,
    in_place,
    readable_gates,
    state_dtypes,
    stored,
    width_of,
    with_new_state,
)
from tfla_tk.build import instances
from tfla_tk.core.layout import DTYPES

_FEWEST_COLUMNS = 4  # of a thread
_MOST_WARPS = 2  # side by side in a row of C
_FULL = 0.75  # CTAs per multiprocessor from which on rows are not cut further


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    before: State,
    after: State,
    sigmoid_gate: bool,
    normalize: bool,
    eps: float,
    batch_invariant: bool = False,
) -> Tensor:
    batch, heads, tokens, dim_qk = q.shape
    dim_v = v.shape[-1]
    device = q.get_device()
    fp32, dtypes = q.dtype == torch.float32, state_dtypes(before, after)
    kernel = build.load(instances.DECODING, instances.mlstm_sequence(tokens, *dtypes, fp32))
    i, f = readable_gates(i, f)
    h = torch.empty((batch, heads, tokens, dim_v), dtype=q.dtype, device=q.device)
    width = width_of(before[0], after[0], dim_v, _widest(tokens, q.dtype))
    # as in a large batch
    filling = 0 if batch_invariant else multiprocessors(device)
    kernel.mlstm_sequence(
        _rows(q),
        _rows(k),
        _rows(v),
        DTYPES[q.dtype],
        gate(i),
        gate(f),
        stored(before),
        stored(after),
        h.data_ptr(),
        (_warps(batch * heads, dim_v, width, filling), width),
        (batch, heads, tokens, dim_qk, dim_v),
        dim_qk**-0.5,
        eps,
        sigmoid_gate,
        normalize,
        after is before,
        device,
        current_stream(device),
    )
    return h


# on the current stream
mlstm_sequence = functools.partial(with_new_state, _launch)
mlstm_sequence_ = functools.partial(in_place, _launch)


def _rows(x: Tensor) -> tuple[int, ...]:
    return x.data_ptr(), *x.stride()


def _widest(tokens: int, dtype: torch.dtype) -> int:
    """Columns of a thread at most: the registers hold v of eight columns only if it is short and narrow."""
    return 2 * _FEWEST_COLUMNS if tokens <= 8 and dtype.itemsize == 2 else _FEWEST_COLUMNS


@functools.lru_cache(maxsize=1024)
def _warps(heads: int, dim_v: int, width: int, multiprocessors: int) -> int:
    """Warps side by side in a row of C: as many as the row fills, fewer where CTAs are.

    Args:
        heads: of the whole batch. width: columns that a thread moves at a time.
        multiprocessors: that CTAs are to fill; 0: the number follows from dim_v and width alone.
    """
    columns = 8 * max(width, _FEWEST_COLUMNS)
    found = min(_MOST_WARPS, 1 << (-(-dim_v // columns) - 1).bit_length())
    while found > 1 and heads * -(-dim_v // (found * columns)) < _FULL * multiprocessors:
        found //= 2
    return found
