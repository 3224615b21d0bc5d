"""A few tokens of the operators in [B, T, H, D] on the decoding kernels, which read a state once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tfla_tk import build
from tfla_tk.backends.tk import device, refusals
from tfla_tk.backends.tk.operands import as_state, current_stream, pointer
from tfla_tk.build import instances
from tfla_tk.calls.delta_rule import DeltaRuleCall
from tfla_tk.calls.linear import LinearCall
from tfla_tk.calls.recurrent import FEW, RecurrentCore
from tfla_tk.core.layout import DTYPES, MaybeTensor
from tfla_tk.core.support import SUPPORTED, Support, together

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def serves(call: LinearCall) -> bool:
    """Whether a call is one of theirs, and not of the chunk kernels."""
    return call.goes_by_token(FEW)


def supports(call: LinearCall, variant: str | None) -> Support:
    """Whether the kernels serve one of their calls; ValueError for a variant."""
    refusals.check_variant(variant)
    return together(
        refusals.of_place(call.device), _of_dtype(call), _of_head_dims(call), _of_packed(call)
    ) or device.supports(call.device, _kernels_of, *_key(call))


def load(call: LinearCall) -> Support:
    """Load the kernels of a call that is supported, and compile what the cache lacks."""
    return SUPPORTED if call.is_empty else device.load(_kernels_of, *_key(call))


def _of_dtype(call: LinearCall) -> Support | None:
    if call.dtype in _DTYPES:
        return None
    return Support(False, f"q, k, v are {call.dtype}", "use torch.bfloat16, torch.float16 or torch.float32")


def _of_head_dims(call: LinearCall) -> Support | None:
    if call.dim_qk in instances.RECURRENT_KEYS:
        columns = instances.recurrent_columns(call.dim_qk, call.state_v_first)
        if call.dim_v % columns == 0:
            return None
        reason = f"for up to {FEW} tokens V is a multiple of {columns}, this is {call.dim_v}"
    else:
        keys = ", ".join(map(str, instances.RECURRENT_KEYS))
        reason = f"for up to {FEW} tokens K is one of {keys}, this is {call.dim_qk}"
    return Support(False, reason, "call the chunk function, or use backend 'triton'")


def _of_packed(call: LinearCall) -> Support | None:
    if not call.varlen:
        return None
    return Support(False, f"packed sequences of up to {FEW} tokens in all", "call the chunk function")


def _key(call: LinearCall) -> tuple[int, bool, bool, bool]:
    return call.dim_qk, call.state_v_first, call.gate == "channel", isinstance(call, DeltaRuleCall)


def _kernels_of(dim_k: int, v_first: bool, by_channel: bool, delta_rule: bool) -> device.Kernels:
    return instances.RECURRENT, (instances.recurrent("fp32", v_first, by_channel, delta_rule, dim_k),)


def launch(core: RecurrentCore) -> tuple[Tensor, Tensor]:
    """o [B, T, HV, V], and the state after the last token in fp32, [0] where it is not wanted; on the current
    stream."""
    q, k, v = core.q, core.k, core.v
    batch, tokens, heads, dim_k = q.shape
    value_heads, dim_v = v.shape[2:]
    where = q.get_device()
    by_channel, delta_rule = core.by_channel, core.beta is not None
    launcher, kernels = _kernels_of(dim_k, core.state_v_first, by_channel, delta_rule)
    kernel = build.load(launcher, *kernels)
    most = instances.RECURRENT_TOKENS
    o = torch.empty(v.shape, dtype=q.dtype, device=q.device)
    before = as_state(_as_fp32(core.initial_state))
    after = None
    if core.output_final_state or tokens > most:
        after = torch.empty(core.state_shape, dtype=torch.float32, device=q.device)
    # to be held until the launches, which get addresses alone
    rows = [_with_dense_rows(x) for x in (q, k, v, o)]
    g = None if core.g is None else _narrowed(core.g)
    gates = [None if x is None else _with_dense_rows(_narrowed(x)) for x in (g, core.beta)]
    per_head = [None if x is None else _narrowed(x).contiguous() for x in (core.A_log, core.dt_bias)]
    slot = value_heads * dim_k * dim_v
    for first in range(0, tokens, most):
        kernel.decode(
            *(None if x is None else _numbers(x, first) for x in (*rows, *gates)),
            *(None if x is None else (x.data_ptr(), DTYPES[x.dtype]) for x in per_head),
            (pointer(before if first == 0 else after), slot),
            (pointer(after), slot),
            DTYPES[torch.float32],
            0,
            (batch, heads, value_heads, dim_k, dim_v, min(most, tokens - first)),
            core.scale,
            core.state_v_first,
            by_channel,
            delta_rule,
            core.qk_l2norm,
            core.beta_sigmoid,
            core.neg_eigval,
            where,
            current_stream(where),
        )
    last = after if core.output_final_state else None
    return o, o.new_empty(0, dtype=torch.float32) if last is None else last


def _numbers(x: Tensor, first: int) -> tuple[int, ...]:
    """x from a token on, as the launcher takes it; x [HV] is the same for all tokens."""
    batch, token, head = (0, 0, x.stride(0)) if x.dim() == 1 else x.stride()[:3]
    return x.data_ptr() + first * token * x.itemsize, batch, token, head, DTYPES[x.dtype]


def _with_dense_rows(x: Tensor) -> Tensor:
    """x itself, or a copy where the numbers of a row [B, T, H, D] do not lie side by side."""
    return x if x.dim() < 4 or x.stride(-1) == 1 else x.contiguous()


def _narrowed(x: Tensor) -> Tensor:
    return x.float() if x.dtype == torch.float64 else x


def _as_fp32(x: MaybeTensor) -> Any:
    return x if x is None or x.dtype == torch.float32 else x.float()
