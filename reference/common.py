"""What every operator family shares: compute dtype, gate sums, walks over tokens, chunks and sequences.

Inside the reference every tensor is head-first: tokens are [B, H, T, ...] and states [B, H, ...].
A step of one token and one chunk map ``(*tokens, *states)`` to ``(output, states)``, a form of a whole
sequence ``(tokens, states)`` to ``(output [B, H, T, V], states)``; tokens start with q, k, v.
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from tfla_tk.core import transforms

States = tuple[Tensor, ...]
Step = Callable[..., tuple[Tensor, States]]  # one token, or one chunk
Form = Callable[[States, States], tuple[Tensor, States]]

# chunk sizes of the forms: one that no sequence exceeds, and what stands for no chunks
_SIZES: dict[str, Any] = {"parallel": 2**40, "recurrent": "token by token"}

P = ParamSpec("P")
R = TypeVar("R")


def full_precision(function: Callable[P, R]) -> Callable[P, R]:
    """Keep autocast out of ``function``: products accumulate in the promoted dtype, at least fp32."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        device = next(a.device.type for a in (*args, *kwargs.values()) if isinstance(a, Tensor))
        # torch refuses the question for meta tensors
        if device == "meta" or not torch.is_autocast_enabled(device):
            return function(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return wrapped


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """The common dtype of ``tensors``, at least float32."""
    dtype = torch.float32
    for tensor in tensors:
        if tensor is not None:
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def promote(*tensors: Tensor) -> tuple[Tensor, ...]:
    """All of ``tensors`` in their common dtype, at least float32."""
    dtype = compute_dtype(*tensors)
    return tuple(x.to(dtype) for x in tensors)


def segment_sum(x: Tensor) -> Tensor:
    """Log decay from token j to token t: ``out[..., t, j] = x[..., j+1] + ... + x[..., t]``, -inf for j > t.

    Summed directly, not as a difference of cumulative sums, so that -inf and 1e4 cost no precision.

    Args:
        x: [..., L] log gates.

    Returns:
        [..., L, L].
    """
    ones = torch.ones(x.shape[-1], x.shape[-1], dtype=torch.bool, device=x.device)
    sums = torch.where(ones.tril(-1), x[..., :, None], 0.0).cumsum(-2)
    return torch.where(ones.tril(), sums, -torch.inf)


def log_decay_gradient(pairs: Tensor, received: Tensor, sent: Tensor, through: Tensor) -> Tensor:
    """The gradient of every token's log decay in a chunk: the flow of gradient over the boundary before it.

    A sum of what crosses the boundary. All of it has the token's decay as a factor, so the result is as exact
    however small that is. A difference of what the tokens behind the boundary receive and send is not: it
    keeps the rounding errors of flows that do not cross.

    Args:
        pairs: [..., L, L], at [t, j] the flow from token j to token t, of which those with j < t count.
        received: [..., L] the flow to every token from the state that enters the chunk.
        sent: [..., L] that from every token to the state that leaves it.
        through: [...] that from the one state to the other.

    Returns:
        [..., L].
    """
    # place t is the boundary behind token t
    behind = pairs.tril(-1).cumsum(-1).tril(-1).sum(-2) + sent.cumsum(-1)
    return pad(behind[..., :-1], (1, 0)) + received.flip(-1).cumsum(-1).flip(-1) + through[..., None]


def scan_tokens(step: Step, tokens: States, states: States) -> tuple[Tensor, States]:
    """Apply ``step`` token by token; its tokens are [B, H, ...] without the time dimension."""
    outputs = []
    for t in range(tokens[0].shape[2]):
        out, states = step(*(x[:, :, t] for x in tokens), *states)
        outputs.append(out)
    # no token: v stands for the empty output
    return (torch.stack(outputs, dim=2) if outputs else tokens[2].clone()), states


def scan_chunks(chunk: Step, size: int, tokens: States, states: States) -> tuple[Tensor, States]:
    """Apply ``chunk`` to pieces of ``size`` tokens; the last piece may be shorter."""
    outputs = []
    for piece in split_chunks(tokens, size):
        out, states = chunk(*piece, *states)
        outputs.append(out)
    return (torch.cat(outputs, dim=2) if outputs else tokens[2].clone()), states


def recomputed(chunk: Step) -> Step:
    """``chunk``, whose backward pass computes its terms again instead of keeping them; not under torch.func,
    whose transforms a checkpoint may lack rules for, nor where hooks on saved tensors are off."""
    if transforms.are_active() or transforms.is_forward_mode_on():
        return chunk
    is_enabled = getattr(torch._C._autograd, "_saved_tensors_hooks_is_enabled", None)
    if not (torch.compiler.is_compiling() or is_enabled is None or is_enabled()):
        return chunk
    return partial(checkpoint, chunk, use_reentrant=False, preserve_rng_state=False)


def split_chunks(tokens: States, size: int) -> list[States]:
    """The tokens of one sequence chunk by chunk; the last one may be shorter, and there may be none.
    ValueError: ``size`` is not positive."""
    if size < 1:
        raise ValueError(f"chunk_size: expected a positive integer, got {size}")
    if tokens[0].shape[2] == 0:
        return []
    return list(zip(*(x.split(int(size), dim=2) for x in tokens), strict=True))


def is_by_token(size: int) -> bool:
    """Whether a chunk size stands for the recurrent form (`other_form`)."""
    return size == _SIZES["recurrent"]


def scan(step: Step, chunk: Step, size: int) -> Form:
    """The form of a whole sequence by chunks of so many tokens, or by tokens in the recurrent form."""
    return partial(scan_tokens, step) if is_by_token(size) else partial(scan_chunks, chunk, size)


def other_form(name: str, chunkwise: Callable[..., R], doc: str) -> Callable[..., R]:
    """The "parallel" or "recurrent" form of an operator from its chunkwise one, which has all tokens in one
    chunk there, or goes token by token. doc: docstring of the form, whose arguments are the same but for
    chunk_size."""

    def form(*args: Any, **kwargs: Any) -> R:
        return chunkwise(*args, **kwargs, chunk_size=_SIZES[name])

    return described(form, chunkwise, ("chunkwise", name), "chunk_size", doc)


def described(
    function: Callable[..., R], form: Callable[..., R], rename: tuple[str, str], without: str, doc: str
) -> Callable[..., R]:
    """Give a function the name, renamed, and the signature, without an argument, of the form it calls."""
    own = inspect.signature(function).parameters
    named: Any = functools.wraps(form)(function)
    named.__name__ = named.__qualname__ = form.__name__.replace(*rename)
    named.__doc__ = doc
    signature = inspect.signature(form)
    kept = [own.get(name, x) for name, x in signature.parameters.items() if name != without]
    named.__signature__ = signature.replace(parameters=kept)
    return named


def sequence_bounds(cu_seqlens: Tensor, batch: int, length: int) -> list[tuple[int, int]]:
    """(start, end) of every packed sequence; reads the offsets on the host. Offsets on the meta device
    hold no values; the first sequence then has all of the tokens, which gives results their shapes.
    ValueError: batch is not 1, or ``cu_seqlens`` does not rise from 0 to ``length``."""
    if batch != 1:
        raise ValueError(f"cu_seqlens: expected batch 1 (packed sequences), got batch {batch}")
    if length == 0 and cu_seqlens.device.type != "cpu":
        # nothing to learn that is worth a wait for the device
        return [(0, 0)] * (cu_seqlens.numel() - 1)
    if cu_seqlens.device.type == "meta" and cu_seqlens.numel() >= 2:
        return [(0, length)] + [(length, length)] * (cu_seqlens.numel() - 2)
    ends = [int(x) for x in cu_seqlens.tolist()]
    if len(ends) < 2 or ends[0] != 0 or ends[-1] != length or ends != sorted(ends):
        raise ValueError(f"cu_seqlens: expected offsets rising from 0 to {length}, got {ends}")
    return list(itertools.pairwise(ends))


def split_sequences(
    tokens: Sequence[Tensor], states: Sequence[Tensor], cu_seqlens: Tensor | None
) -> list[tuple[States, States]]:
    """(tokens, states) of the batch, or of each packed sequence with its own row of the states."""
    if cu_seqlens is None:
        return [(tuple(tokens), tuple(states))]
    bounds = sequence_bounds(cu_seqlens, tokens[0].shape[0], tokens[0].shape[2])
    return [
        (tuple(x[:, :, start:end] for x in tokens), tuple(s[row : row + 1] for s in states))
        for row, (start, end) in enumerate(bounds)
    ]


def scan_sequences(
    form: Form, tokens: States, states: States, cu_seqlens: Tensor | None
) -> tuple[Tensor, States]:
    """Apply ``form`` to the batch, or to each packed sequence with its own row of the states."""
    if cu_seqlens is None:
        return form(tokens, states)
    results = [form(own, state) for own, state in split_sequences(tokens, states, cu_seqlens)]
    outputs, lasts = zip(*results, strict=True)
    return torch.cat(outputs, dim=2), tuple(torch.cat(rows) for rows in zip(*lasts, strict=True))


class BackwardForm(NamedTuple):
    """Explicit formulas of an operator, for chunks of one sequence, head-first and promoted. forward: from
    (*tokens, *states) with the states that enter a chunk what ``backward`` reads of the chunk, and the
    states that leave it. backward: from (what ``forward`` found, *tokens, do, *states, *dstates), with the
    gradients of the output and of the states that leave, the gradients of the tokens and of the states
    that enter."""

    forward: Callable[..., tuple[Any, States]]
    backward: Callable[..., States]


def sequence_backward(
    form: BackwardForm, size: int, tokens: States, states: States, dstates: States
) -> list[Tensor]:
    """The gradients of the tokens and of the initial states of one sequence of any length. tokens: and, as
    the last one, the gradient of the output. size: tokens of a chunk. states: before the first token.
    dstates: gradients of those after the last one."""
    # forward in time
    chunks = []
    for piece in split_chunks(tokens, size):
        found, leaving = form.forward(*piece[:-1], *states)
        chunks.append((found, *piece, *states))
        states = leaving
    # backward in time; an empty piece at the end: there may be no token
    rows: list[States] = []
    for chunk in reversed(chunks):
        grads = form.backward(*chunk, *dstates)
        rows.append(grads[: len(tokens) - 1])
        dstates = grads[len(tokens) - 1 :]
    rows.append(tuple(x[:, :, :0] for x in tokens[:-1]))
    return [*(torch.cat(column[::-1], dim=2) for column in zip(*rows, strict=True)), *dstates]


def join_sequences(parts: Sequence[Sequence[Tensor]], tokens: int) -> list[Tensor]:
    """The sequences' results as one: the first ``tokens`` of them per token, the others per sequence."""
    columns = zip(*parts, strict=True)
    return [torch.cat(column, dim=2 if place < tokens else 0) for place, column in enumerate(columns)]


def sequence_count(batch: int, cu_seqlens: Tensor | None) -> int:
    """Leading dimension of the states: the batch, or the number of packed sequences."""
    return batch if cu_seqlens is None else cu_seqlens.numel() - 1
