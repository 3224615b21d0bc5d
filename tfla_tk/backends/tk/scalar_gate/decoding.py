"""One token of mLSTM by the step kernel, or 2 to 16 by the sequence kernel, from tensors.

One launch, whatever strides q, k and v have, on the current stream (docs/decode.md).
"""

import functools
from typing import Any

import torch
from torch import Tensor

from tfla_tk import build
from tfla_tk.backends.tk.prepared import current_stream, gate, multiprocessors, narrowed, pointer
from tfla_tk.build import instances
from tfla_tk.core.layout import DTYPE_NAMES, DTYPES, MAX_SLICES, MaybeTensor

_VECTOR = 16  # bytes of a thread's load
_MOST_LANES, _FEWEST_LANES = 16, 4  # threads side by side in a row of C
_FEWEST_COLUMNS = 4  # of a thread of the sequence kernel
_MOST_WARPS = 2  # of it, side by side in a row of C
_FULL = 0.75  # CTAs per multiprocessor from which on rows are not cut further

State = tuple[Tensor, Tensor, MaybeTensor]


def with_new_state(*args: Any) -> tuple[Tensor, Tensor, Tensor, MaybeTensor]:
    """Launch a kernel; arguments and results are those of tfla_tk::mlstm_step where q is [B, NH, K], of
    tfla_tk::mlstm_sequence where it is [B, NH, S, K]. m is None with the sigmoid gate."""
    c, n, m, sigmoid_gate, normalize, eps, dtype_state = args[5:12]
    before, after = states(c, n, None if sigmoid_gate else m, dtype_state)
    return _launch(args, before, after, sigmoid_gate, normalize, eps, *args[12:]), *after


def in_place(*args: Any) -> Tensor:
    """`with_new_state` that writes the state over the one it read, each part in its own dtype; returns h."""
    c, n, m, sigmoid_gate, *options = args[5:]
    given = (c, n, None if sigmoid_gate else m)
    state = readable(given)
    h = _launch(args, state, state, sigmoid_gate, *options)
    # what had to be copied
    for target, result in zip(given, state, strict=True):
        if target is not None and result is not None and result is not target:
            target.copy_(result)
    return h


def states(c: Tensor, n: Tensor, m: MaybeTensor, dtype_state: torch.dtype) -> tuple[State, State]:
    """The state before, as a kernel of decoding reads it, and an uninitialised one for it to write."""
    c = c if dtype_state in (c.dtype, torch.float32) or c.dtype == torch.float32 else c.float()
    before = readable((c, n, m))
    after = (
        torch.empty_like(before[0], dtype=dtype_state),
        torch.empty_like(before[1], dtype=dtype_state),
        None if before[2] is None else torch.empty_like(before[2], dtype=dtype_state),
    )
    return before, after


def readable(state: State) -> State:
    """The state contiguous and in dtypes that the kernels read; parts that are so already are themselves."""
    c, n, m = state
    m = None if m is None else narrowed(m).contiguous()
    return narrowed(c).contiguous(), narrowed(n).contiguous(), m


def _launch(args: Any, before: State, after: State, *options: Any) -> Tensor:
    """args: of a call, which begin with q, k, v, i, f. options: sigmoid_gate, normalize, eps, and
    batch_invariant or nothing."""
    q, k, v, i, f, *_ = args
    sigmoid_gate, normalize, eps, *invariant = options
    batch, heads, *tokens, dim_qk = q.shape
    dim_v, device = v.shape[-1], q.get_device()
    dtypes = DTYPE_NAMES[before[0].dtype], DTYPE_NAMES[after[0].dtype]
    count = tokens[0] if tokens else 1
    if count == 1:
        instance, widest, across = instances.mlstm_step(*dtypes), _VECTOR, _lanes
    else:
        instance = instances.mlstm_sequence(count, *dtypes, q.dtype == torch.float32)
        # columns of a thread at most: the registers hold v of eight columns only if it is short and narrow
        widest = 2 * _FEWEST_COLUMNS if count <= 8 and q.dtype.itemsize == 2 else _FEWEST_COLUMNS
        across = _warps
    launch = build.load(instances.DECODING, instance).mlstm
    # to be held until the launch, which gets addresses alone
    i, f = narrowed(i), narrowed(f)
    h = torch.empty(v.shape, dtype=q.dtype, device=q.device)
    width = _width_of(before[0], after[0], dim_v, widest)
    # as in a large batch
    filling = 0 if any(invariant) else multiprocessors(device)
    launch(
        _rows(q), _rows(k), _rows(v), DTYPES[q.dtype], gate(i), gate(f), _stored(before), _stored(after),
        h.data_ptr(), (across(batch * heads, dim_v, width, filling), width),
        (batch, heads, count, dim_qk, dim_v), dim_qk**-0.5, eps, sigmoid_gate, normalize, after is before,
        device, current_stream(device),
    )  # fmt: skip
    return h


def _stored(state: State) -> tuple[int, ...]:
    pointers = (pointer(x) for x in state)
    return *pointers, *(0 if x is None else DTYPES[x.dtype] for x in state)


def _rows(x: Tensor) -> tuple[int, ...]:
    """Address and strides of batch, head, token and column."""
    batch, head, *token, column = x.stride()
    return x.data_ptr(), batch, head, *(token or (0,)), column


def _width_of(before: Tensor, after: Tensor, dim_v: int, widest: int) -> int:
    """Columns of C that a thread moves at a time: 16 bytes of the wider dtype, at most `widest`, 1 where
    rows forbid that."""
    width = min(_VECTOR // max(before.itemsize, after.itemsize), widest)
    aligned = all(x.data_ptr() % (width * x.itemsize) == 0 for x in (before, after))
    return width if aligned and dim_v % width == 0 else 1


@functools.lru_cache(maxsize=1024)
def _lanes(heads: int, dim_v: int, width: int, multiprocessors: int) -> int:
    """Threads, each with `width` columns, side by side in a row of C: as many as the row fills, fewer
    where CTAs of all heads of the batch are fewer than these multiprocessors; 0 of them: for any batch."""
    found = min(_MOST_LANES, 1 << (-(-dim_v // width) - 1).bit_length())

    def slices(lanes: int) -> int:
        return -(-dim_v // (lanes * width))

    while slices(found) > MAX_SLICES:
        found *= 2
    while (
        found > _FEWEST_LANES
        and heads * slices(found) < _FULL * multiprocessors
        and slices(found // 2) <= MAX_SLICES
    ):
        found //= 2
    return found


@functools.lru_cache(maxsize=1024)
def _warps(heads: int, dim_v: int, width: int, multiprocessors: int) -> int:
    """Warps, whose threads move `width` columns at a time, side by side in a row of C; others as of
    `_lanes`."""
    columns = 8 * max(width, _FEWEST_COLUMNS)
    found = min(_MOST_WARPS, 1 << (-(-dim_v // columns) - 1).bit_length())
    while found > 1 and heads * -(-dim_v // (found * columns)) < _FULL * multiprocessors:
        found //= 2
    return found
