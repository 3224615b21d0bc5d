"""Linear attention with a scalar decay by the mLSTM kernels, which have a gate for it.

Tensors are [B, T, H, D], as fla has them. q and k may have fewer heads than v: value head h reads key head
h // (HV // H). The protocol is that of `ops.linear`.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tfla_tk.backends.tk.scalar_gate import backward as tk_backward
from tfla_tk.backends.tk.scalar_gate import forward as tk_forward
from tfla_tk.calls.linear import SimpleGLACore
from tfla_tk.core.layout import Kept, MaybeTensor
from tfla_tk.core.memo import kept_on_device

# o [B, T, HV, V], the state after the last token or None, and what a backward can use or None
FwdResult: TypeAlias = tuple[Tensor, MaybeTensor, Kept | None]


def forward(core: SimpleGLACore, *, output_final_state: bool, keep: bool) -> FwdResult:
    """o_t = scale q_t^T S_t with S_t = e^{g_t} S_{t-1} + k_t v_t^T, on the current stream."""
    found = tk_forward.run(_tensors(*core[:6]), _options(core, output_final_state, keep))
    return found[0], found[1], found[7]


def prepare(core: SimpleGLACore, *, output_final_state: bool, keep: bool) -> Callable[..., FwdResult]:
    """`forward` of the tensors of all calls whose tensors have the metadata of these, strides included."""
    launch = tk_forward.prepare(_tensors(*core[:6]), _options(core, output_final_state, keep))

    def run(*tensors: Any) -> FwdResult:
        found = launch(*_tensors(*tensors))
        return found[0], found[1], found[7]

    return run


def backward(
    core: SimpleGLACore,
    kept: Kept | None,
    do: Tensor,
    d_final: MaybeTensor,
    *,
    needs_gates: bool,
    final_state: MaybeTensor = None,
) -> tuple[Tensor, Tensor, Tensor, MaybeTensor, MaybeTensor]:
    """dq, dk, dv, dg and d_initial; dg is None without needs_gates, else g is [B, T, HV]; d_initial is
    None without initial state. final_state: of the forward, where d_final is given."""
    h, rows = do, (None, None, None)  # which are read with a normaliser alone
    outputs = h, *rows, final_state, None, do, d_final, None
    tensors = tk_backward.Tensors._make((*_tensors(*core[:6]), *outputs))
    options = _options(core, False, False, needs_gates)
    dq, dk, dv, _, dg, d_initial, _ = tk_backward.run(tensors, options, kept)
    if core.q.shape[2] != core.v.shape[2]:
        # those of every value head, summed over those that share one of q and k
        dq, dk = (x.unflatten(2, (core.q.shape[2], -1)).sum(3) for x in (dq, dk))
    return dq, dk, dv, dg, d_initial


def _tensors(
    q: Tensor, k: Tensor, v: Tensor, g: MaybeTensor, initial_state: MaybeTensor, cu_seqlens: MaybeTensor
) -> tuple[Any, ...]:
    """As mLSTM's kernels have them; without a decay there is a zero."""
    if g is None:
        g = kept_on_device(
            _zeros, q.device, q.device, lambda device: torch.zeros((), dtype=torch.float32, device=device)
        )
    return q, k, v, None, g, initial_state, None, None, cu_seqlens


def _options(core: SimpleGLACore, output_final_state: bool, keep: bool, needs_dg: bool = True) -> Any:
    return _options_of(core.scale, core.batch_invariant, output_final_state, keep, needs_dg)


@functools.lru_cache(maxsize=1024)
def _options_of(
    scale: float, batch_invariant: bool, output_final_state: bool, keep: bool, needs_dg: bool
) -> tk_forward.Options:
    of_forward = output_final_state, False, batch_invariant, keep, scale
    return tk_forward.Options(True, False, 1.0, *of_forward, decay=True, heads_last=True, needs_df=needs_dg)


_zeros: dict[torch.device, Tensor] = {}
