"""One token of mLSTM by the step kernel, from tensors: one launch, whatever strides q, k and v have.

The state is read once and written once. docs/mlstm-decode.md tells how the kernel's threads share it.
What becomes of a state, new or in place, is the same for a few tokens (sequence.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tfla_tk import build
from tfla_tk.backends.tk.operands import current_stream, gate, multiprocessors, pointer
from tfla_tk.build import instances
from tfla_tk.core.layout import DTYPE_NAMES, DTYPES, MAX_SLICES, MaybeTensor

_VECTOR = 16  # bytes of a thread's load
_MOST_LANES, _FEWEST_LANES = 16, 4  # threads side by side in a row of C
_FULL = 0.75  # CTAs per multiprocessor from which on rows are not cut further

State = tuple[Tensor, Tensor, MaybeTensor]
# h from q, k, v, i, f, the state before and the state to write, sigmoid_gate, normalize, eps, batch_invariant
Launch = Callable[..., Tensor]


def with_new_state(launch: Launch, *args: Any) -> tuple[Tensor, Tensor, Tensor, MaybeTensor]:
    """Launch a kernel of decoding; arguments and results are those of tfla_tk::mlstm_step and _sequence.

    m is None with the sigmoid gate.

    Raises:
        BuildError: The kernel is not compiled yet and cannot be.
        RuntimeError: The launch was refused.
    """
    *tokens, c, n, m, sigmoid_gate, normalize, eps, dtype_state = args[:12]
    before, after = states(c, n, None if sigmoid_gate else m, dtype_state)
    h = launch(*tokens, before, after, sigmoid_gate, normalize, eps, *args[12:])
    return h, *after


def in_place(launch: Launch, *args: Any) -> Tensor:
    """`with_new_state` that writes the state over the one it read, each part in its own dtype; returns h."""
    *tokens, c, n, m, sigmoid_gate, normalize, eps = args[:11]
    given = (c, n, None if sigmoid_gate else m)
    state = readable(given)
    h = launch(*tokens, state, state, sigmoid_gate, normalize, eps, *args[11:])
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
    return _readable(c), _readable(n), None if m is None else _readable(m)


def state_dtypes(before: State, after: State) -> tuple[str, str]:
    """Of C, as the kernels' instances name them."""
    return DTYPE_NAMES[before[0].dtype], DTYPE_NAMES[after[0].dtype]


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
    batch, heads, dim_qk = q.shape
    dim_v = v.shape[-1]
    device = q.get_device()
    kernel = build.load(instances.DECODING, instances.mlstm_step(*state_dtypes(before, after)))
    i, f = readable_gates(i, f)
    h = torch.empty((batch, heads, dim_v), dtype=q.dtype, device=q.device)
    width = width_of(before[0], after[0], dim_v)
    # as in a large batch
    filling = 0 if batch_invariant else multiprocessors(device)
    kernel.mlstm_step(
        gate(q),
        gate(k),
        gate(v),
        gate(i),
        gate(f),
        stored(before),
        stored(after),
        h.data_ptr(),
        (_lanes(batch * heads, dim_v, width, filling), width),
        (batch, heads, dim_qk, dim_v),
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
mlstm_step = functools.partial(with_new_state, _launch)
mlstm_step_ = functools.partial(in_place, _launch)


def readable_gates(i: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
    """Gates in dtypes that the kernels read; to be held until the launch, which gets addresses alone."""
    return _narrowed(i), _narrowed(f)


def _readable(x: Tensor) -> Tensor:
    """x contiguous and in a dtype that the kernel reads; x itself where it is that already."""
    return _narrowed(x).contiguous()


def _narrowed(x: Tensor) -> Tensor:
    return x.float() if x.dtype == torch.float64 else x


def stored(state: State) -> tuple[int, ...]:
    """Addresses and dtypes as the bindings take them."""
    pointers = (pointer(x) for x in state)
    return *pointers, *(0 if x is None else DTYPES[x.dtype] for x in state)


def width_of(before: Tensor, after: Tensor, dim_v: int, widest: int = _VECTOR) -> int:
    """Columns of C that a thread moves at a time: 16 bytes of the wider dtype, 1 where rows forbid that.

    Args:
        widest: columns that a thread takes at most.
    """
    width = min(_VECTOR // max(before.itemsize, after.itemsize), widest)
    aligned = all(x.data_ptr() % (width * x.itemsize) == 0 for x in (before, after))
    return width if aligned and dim_v % width == 0 else 1


@functools.lru_cache(maxsize=1024)
def _lanes(heads: int, dim_v: int, width: int, multiprocessors: int) -> int:
    """Threads side by side in a row of C: as many as the row fills, fewer where CTAs are.

    Args:
        heads: of the whole batch. width: columns of a thread.
        multiprocessors: that CTAs are to fill; 0: the number follows from dim_v and width alone.
    """
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
