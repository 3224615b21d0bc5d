"""The frame around the operators in [B, T, H, D]: scale, default state, packed sequences, layout."""

from typing import NamedTuple

from einops import rearrange, repeat
from torch import Tensor

from . import common


def run_linear(
    form: common.Form,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: tuple[Tensor, ...],
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    state_v_first: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Apply ``form`` over (scale * q, k, v, *gates) and a state, head-first and promoted, to every sequence.

    Args:
        form: maps tokens [N, HV, T, ...] and a state [N, HV, K, V] to (o [N, HV, T, V], (state,)).
        gates: [B, T, HV, ...]. state_v_first: initial_state and the last state are [N, HV, V, K].
        others and errors: as of :func:`~.simple_gla.simple_gla_recurrent`.

    Returns:
        (o [B, T, HV, V] in q's dtype, state [N, HV, K, V] of at least fp32 or None), contiguous.
    """
    q, k = repeat_heads(q, k, v)
    batch, _, heads, dim_v = v.shape
    dim_qk = q.shape[-1]
    if initial_state is None:
        count = common.sequence_count(batch, cu_seqlens)
        initial_state = q.new_zeros(count, heads, dim_qk, dim_v, dtype=common.compute_dtype(q, k, v, *gates))
    elif state_v_first:
        initial_state = initial_state.mT
    *tokens, state = common.promote(q, k, v, *gates, initial_state)
    tokens = [rearrange(x, "b t h ... -> b h t ...") for x in tokens]
    tokens[0] = tokens[0] * (dim_qk**-0.5 if scale is None else scale)
    o, (last,) = common.scan_sequences(form, tuple(tokens), (state,), cu_seqlens)
    o = rearrange(o, "b h t v -> b t h v").to(q.dtype).contiguous()
    if not output_final_state:
        return o, None
    return o, (last.mT if state_v_first else last).contiguous()


def head_groups(q: Tensor, v: Tensor) -> int:
    """How many heads of v [B, T, HV, V] every head of q [B, T, H, K] serves; ValueError for a fraction."""
    heads, value_heads = q.shape[2], v.shape[2]
    if heads == value_heads:
        return 1
    # torch.compile, which may have the sizes as symbols, does not know divmod
    if heads == 0 or value_heads == 0 or value_heads % heads != 0:
        raise ValueError(f"v: expected a multiple of q's {heads} heads, got {value_heads}")
    return value_heads // heads


def repeat_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """q and k with the heads of v: head h of q and k serves heads h n to (h + 1) n - 1 of v, n = HV / H."""
    groups = head_groups(q, v)
    if groups == 1:
        return q, k
    return repeat(q, "b t h k -> b t (h n) k", n=groups), repeat(k, "b t h k -> b t (h n) k", n=groups)


class LinearGrads(NamedTuple):
    """Gradients of linear attention, each in the dtype and shape of its input.

    Attributes:
        dq, dk: [B, T, H, K], summed over the heads of v that a head of q and k serves. dv: [B, T, HV, V].
        dg: that of the log decay, [B, T, HV], or [B, T, HV, K] per channel; its sum over B and T is that of a
            decay per head.
        dh0: that of the initial state.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dg: Tensor
    dh0: Tensor


def run_backward(
    form: common.BackwardForm,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: tuple[Tensor, ...],
    do: Tensor,
    dht: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk_size: int,
    state_v_first: bool = False,
) -> tuple[Tensor, ...]:
    """Gradients by explicit formulas, chunk by chunk, of tokens (scale * q, k, v, *gates) and one state.

    Args:
        others: as in :func:`run_linear`; HV is a multiple of H. do: [B, T, HV, V] gradient of o. dht: that of
            the last state, shaped like it; None is zero.

    Returns:
        (dq, dk, dv, *dgates, dh0), each in the dtype and shape of its input; dh0 without an initial state in
        the compute dtype.
    """
    groups = head_groups(q, v)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    tokens = (*repeat_heads(q, k, v), v, *gates, do)
    shape = (common.sequence_count(v.shape[0], cu_seqlens), v.shape[2], q.shape[-1], v.shape[-1])
    zero = q.new_zeros(shape, dtype=common.compute_dtype(*tokens))
    states = (_state_k_first(x, zero, state_v_first) for x in (initial_state, dht))
    *promoted, h0, ds = common.promote(*tokens, *states)
    promoted = [rearrange(x, "b t h ... -> b h t ...") for x in promoted]
    promoted[0] = promoted[0] * scale
    sequences = common.split_sequences(promoted, (h0, ds), cu_seqlens)
    parts = [common.sequence_backward(form, chunk_size, own, (s,), (ds,)) for own, (s, ds) in sequences]
    *columns, dh0 = common.join_sequences(parts, len(tokens) - 1)
    found = [rearrange(x, "b h t ... -> b t h ...") for x in columns]
    found[0] = scale * found[0]
    found[:2] = [rearrange(x, "b t (h n) k -> b t h n k", n=groups).sum(3) for x in found[:2]]
    dh0 = dh0.mT if state_v_first else dh0
    like = (q, k, v, *gates, dh0 if initial_state is None else initial_state)
    return tuple(x.to(y.dtype) for x, y in zip((*found, dh0), like, strict=True))


def _state_k_first(state: Tensor | None, zero: Tensor, state_v_first: bool) -> Tensor:
    """A state or its gradient as [N, HV, K, V]; None is zero."""
    if state is None:
        return zero
    return state.mT if state_v_first else state
