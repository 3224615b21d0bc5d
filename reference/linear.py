"""The frame around the operators in [B, T, H, D]: scale, default state, packed sequences, layout."""

from __future__ import annotations

from einops import rearrange, repeat
from torch import Tensor

from .common import Form, compute_dtype, promote, scan_sequences, sequence_count


def run_linear(
    form: Form,
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
    """Apply ``form`` over (scale * q, k, v, *gates, state), head-first and promoted, to every sequence.

    Args:
        form: maps tokens [N, H, T, ...] and a state [N, H, K, V] to (o [N, H, T, V], (state,)).
        q, k: [B, T, H, K]. v: [B, T, H, V]. gates: each [B, T, H, ...].
        scale: factor on q; None is K^-1/2.
        initial_state: [N, H, K, V] or None (zeros); N is B, or the number of sequences with ``cu_seqlens``.
        output_final_state: return the last state instead of None.
        cu_seqlens: [N + 1] offsets of sequences packed in a batch of one.
        state_v_first: initial_state and the last state are [N, H, V, K].

    Returns:
        (o [B, T, H, V] in q's dtype, state [N, H, K, V] of at least fp32 or None).
    """
    batch, _, heads, dim_v = v.shape
    dim_qk = q.shape[-1]
    if initial_state is None:
        count = sequence_count(batch, cu_seqlens)
        initial_state = q.new_zeros(count, heads, dim_qk, dim_v, dtype=compute_dtype(q, k, v, *gates))
    elif state_v_first:
        initial_state = initial_state.mT
    *tokens, state = promote(q, k, v, *gates, initial_state)
    tokens = [rearrange(x, "b t h ... -> b h t ...") for x in tokens]
    tokens[0] = tokens[0] * (dim_qk**-0.5 if scale is None else scale)
    o, (last,) = scan_sequences(form, tokens, (state,), cu_seqlens)
    o = rearrange(o, "b h t v -> b t h v").to(q.dtype)
    if not output_final_state:
        return o, None
    return o, last.mT if state_v_first else last


def head_groups(q: Tensor, v: Tensor) -> int:
    """How many heads of v [B, T, HV, V] every head of q [B, T, H, K] serves.

    Raises:
        ValueError: HV is no multiple of H.
    """
    heads, value_heads = q.shape[2], v.shape[2]
    groups, rest = divmod(value_heads, max(heads, 1))
    if rest or (value_heads > 0) != (heads > 0):
        raise ValueError(f"v: expected a multiple of q's {heads} heads, got {value_heads}")
    return max(groups, 1)


def repeat_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """q and k with the heads of v: head h of q and k serves heads h n to (h + 1) n - 1 of v, n = HV / H."""
    groups = head_groups(q, v)
    if groups == 1:
        return q, k
    return repeat(q, "b t h k -> b t (h n) k", n=groups), repeat(k, "b t h k -> b t (h n) k", n=groups)
