"""Linear attention with a scalar decay by the mLSTM kernels, which are compiled for it with another gate.

Tensors are [B, T, H, D], as fla has them. q and k may have fewer heads than v: value head h reads key head
h // (HV // H).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from tfla_tk.backends.tk.scalar_gate import backward as tk_backward
from tfla_tk.backends.tk.scalar_gate import forward as tk_forward
from tfla_tk.core.constants import kept_on_device
from tfla_tk.core.layout import KeptStates, MaybeTensor

# o [B, T, HV, V], the state after the last token or None, and what a backward can use or None
FwdResult: TypeAlias = tuple[Tensor, MaybeTensor, KeptStates | None]


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
    batch_invariant: bool = False,
    keep_states: bool = False,
) -> FwdResult:
    """o_t = scale q_t^T S_t with S_t = e^{g_t} S_{t-1} + k_t v_t^T, on the current stream.

    Args:
        q, k: [B, T, H, K], bfloat16 or float16. v: [B, T, HV, V], q's dtype.
        g: natural log of the decay, in fp32 or 16 bits, [B, T, HV] of any strides, or [HV] of every token;
            None: nothing decays.
        initial_state: [N, HV, K, V] in fp32, or None for zeros.
        cu_seqlens: [N + 1] offsets of sequences packed in a batch of one, or None.
        scale: of q k^T, positive.
        batch_invariant, keep_states: as in `forward.Options`.

    Raises:
        BuildError: The kernel is not compiled yet and cannot be.
        RuntimeError: The launch was refused.
    """
    tensors = (q, k, v, None, _log_decay(g, q), initial_state, None, None, cu_seqlens)
    found = tk_forward.run(tensors, _options(scale, output_final_state, batch_invariant, keep_states))
    return found[0], found[1], found[7]


def prepare_simple_gla_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: MaybeTensor,
    initial_state: MaybeTensor,
    cu_seqlens: MaybeTensor,
    scale: float,
    output_final_state: bool,
    batch_invariant: bool = False,
    keep_states: bool = False,
) -> Callable[[Tensor, Tensor, Tensor, MaybeTensor, MaybeTensor, MaybeTensor], FwdResult]:
    """`simple_gla_fwd` for all tensors that have the devices, dtypes, shapes and strides of these."""
    tensors = (q, k, v, None, _log_decay(g, q), initial_state, None, None, cu_seqlens)
    forward = tk_forward.prepare(tensors, _options(scale, output_final_state, batch_invariant, keep_states))

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: MaybeTensor,
        initial_state: MaybeTensor,
        cu_seqlens: MaybeTensor,
    ) -> FwdResult:
        g = _log_decay(g, q)
        found = forward(q, k, v, None, g, initial_state, None, None, cu_seqlens)
        return found[0], found[1], found[7]

    return run


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
    batch_invariant: bool = False,
    kept: KeptStates | None = None,
) -> Gradients:
    """The gradients of `simple_gla_fwd`; arguments as there.

    Args:
        final_state: of the forward, where d_final is given.
        do: [B, T, HV, V]. d_final: [N, HV, K, V] in fp32, or None for zeros.
        needs_dg: whether dg is wanted; g is [B, T, HV] then.
        kept: what the forward has kept.
    """
    # h, which is read with a normaliser alone, and row_n, row_m, chunk_m
    rows = (do, None, None, None)
    dq, dk, dv, _, dg, d_initial, _ = tk_backward.run(
        (
            *(q, k, v, None, _log_decay(g, q), initial_state, None, cu_seqlens),
            *(*rows, final_state, None, do, d_final, None),
        ),
        _backward_options(scale, needs_dg, batch_invariant),
        kept,
    )
    if q.shape[2] != v.shape[2]:
        dq, dk = (_sum_over_groups(x, q.shape[2]) for x in (dq, dk))
    return Gradients(dq, dk, dv, dg, d_initial)


def _options(
    scale: float, output_final_state: bool, batch_invariant: bool, keep_states: bool
) -> tk_forward.Options:
    return tk_forward.Options(
        sigmoid_gate=True,
        normalize=False,
        eps=1.0,
        return_last_states=output_final_state,
        return_rows=False,
        batch_invariant=batch_invariant,
        keep_states=keep_states,
        scale=scale,
        decay=True,
        heads_last=True,
    )


@functools.lru_cache(maxsize=1024)
def _backward_options(scale: float, needs_dg: bool, batch_invariant: bool) -> tk_backward.Options:
    return tk_backward.Options(
        sigmoid_gate=True,
        normalize=False,
        eps=1.0,
        scale=scale,
        needs_df=needs_dg,
        decay=True,
        heads_last=True,
        batch_invariant=batch_invariant,
    )


_zeros: dict[torch.device, Tensor] = {}


def _log_decay(g: MaybeTensor, q: Tensor) -> Tensor:
    """g, or a zero where there is none."""
    return kept_on_device(_zeros, q.device, q.device, _zero) if g is None else g


def _zero(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.float32, device=device)


def _sum_over_groups(grad: Tensor, heads: int) -> Tensor:
    """The gradient [B, T, HV, K] of q or k of every value head, summed over those that share one."""
    return grad.unflatten(2, (heads, -1)).sum(3)
