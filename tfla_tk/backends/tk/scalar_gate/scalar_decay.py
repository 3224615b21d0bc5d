"""Linear attention with a scalar decay by the mLSTM kernels, which are compiled for it with another gate.

Tensors are [B, T, H, D] here, as fla has them, and [B, H, T, D] to the kernels: views, read in place. q and k
may have fewer heads than v: value head h reads key head h // (HV // H).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tfla_tk.backends.tk.scalar_gate import backward as tk_backward
from tfla_tk.backends.tk.scalar_gate import forward as tk_forward
from tfla_tk.core.layout import KeptStates, MaybeTensor


class Gradients(NamedTuple):
    """Like the inputs; dg and d_initial are None where nobody asks for them or nothing was given."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dg: MaybeTensor
    d_initial: MaybeTensor


def simple_gla_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: MaybeTensor,
    initial_state: MaybeTensor,
    cu_seqlens: MaybeTensor,
    scale: float,
    output_final_state: bool,
    schedule: str,
    keep_states: bool = False,
) -> tuple[Tensor, MaybeTensor, KeptStates | None]:
    """o_t = scale q_t^T S_t with S_t = e^{g_t} S_{t-1} + k_t v_t^T, on the current stream.

    Args:
        q, k: [B, T, H, K], bfloat16 or float16. v: [B, T, HV, V], q's dtype.
        g: natural log of the decay, [B, T, HV], in fp32 or 16 bits, any strides; None: nothing decays.
        initial_state: [N, HV, K, V] in fp32, or None for zeros.
        cu_seqlens: [N + 1] offsets of sequences packed in a batch of one, or None.
        scale: of q k^T, positive.
        keep_states: as in `tk_forward.Options`.

    Returns:
        o [B, T, HV, V], the state after the last token or None, and what a backward can use or None.

    Raises:
        BuildError: The kernel is not compiled yet and cannot be.
        RuntimeError: The launch was refused.
    """
    options = tk_forward.Options(
        sigmoid_gate=True,
        normalize=False,
        eps=1.0,
        return_last_states=output_final_state,
        return_rows=False,
        schedule=schedule,
        keep_states=keep_states,
        scale=scale,
        decay=True,
    )
    q, k, v = (_head_first(x) for x in (q, k, v))
    tensors = (q, k, v, None, _log_decay(g, v), initial_state, None, None, cu_seqlens)
    o, final_state, *_, kept = tk_forward.run(tensors, options)
    return _head_first(o), final_state, kept


def simple_gla_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: MaybeTensor,
    initial_state: MaybeTensor,
    cu_seqlens: MaybeTensor,
    final_state: MaybeTensor,
    do: Tensor,
    d_final: MaybeTensor,
    scale: float,
    needs_dg: bool,
    schedule: str,
    kept: KeptStates | None = None,
) -> Gradients:
    """The gradients of `simple_gla_fwd`; arguments as there.

    Args:
        final_state: of the forward, where d_final is given.
        do: [B, T, HV, V]. d_final: [N, HV, K, V] in fp32, or None for zeros.
        needs_dg: whether dg is wanted.
        kept: what the forward has kept.
    """
    key_heads = q.shape[2]
    q, k, v, do = (_head_first(x) for x in (q, k, v, do))
    dq, dk, dv, _, dg, d_initial, _ = tk_backward.scalar_gate_bwd(
        *(q, k, v, None, _log_decay(g, v), initial_state, None, None, cu_seqlens, do, None, None, None),
        *(final_state, None, do, d_final, None),
        sigmoid_gate=True,
        normalize=False,
        eps=1.0,
        scale=scale,
        states=kept,
        decay=True,
        needs_df=needs_dg,
    )
    assert dq is not None and dk is not None and dv is not None
    dq, dk = (_sum_over_groups(_head_first(x), key_heads) for x in (dq, dk))
    return Gradients(dq, dk, _head_first(dv), None if dg is None else dg.transpose(1, 2), d_initial)


def _head_first(x: Tensor) -> Tensor:
    """[B, T, H, D] as [B, H, T, D], and back."""
    return x.transpose(1, 2)


def _log_decay(g: MaybeTensor, v: Tensor) -> Tensor:
    """g as [B, HV, T]; zeros that take no memory where there is none."""
    if g is None:
        return torch.zeros((), dtype=torch.float32, device=v.device).expand(v.shape[:3])
    return g.transpose(1, 2)


def _sum_over_groups(grad: Tensor, heads: int) -> Tensor:
    """The gradient [B, T, HV, K] of q or k of every value head, summed over those that share one."""
    if grad.shape[2] == heads:
        return grad
    return grad.unflatten(2, (heads, -1)).sum(3)
