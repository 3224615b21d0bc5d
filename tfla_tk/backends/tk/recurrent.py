"""A few tokens of the operators in [B, T, H, D] on the decoding kernels, which read a state once."""

from typing import Any

import torch
from torch import Tensor

from tfla_tk import build
from tfla_tk.backends.tk import device, refusals
from tfla_tk.backends.tk.prepared import (
    ADDRESS_ALIGNMENT,
    as_state,
    current_stream,
    log_decay,
    narrowed,
    pointer,
)
from tfla_tk.build import instances
from tfla_tk.calls.delta_rule import DeltaRuleCall
from tfla_tk.calls.linear import LinearCall
from tfla_tk.calls.recurrent import FEW, RecurrentCore, Slots, through_a_copy
from tfla_tk.core.layout import DTYPE_NAMES, DTYPES, MaybeTensor
from tfla_tk.core.support import SUPPORTED, Support, together

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def supports(call: LinearCall, variant: str | None) -> Support:
    """Whether the kernels serve one of their calls; ValueError for a variant."""
    refusals.check_variant(variant)
    found = [refusals.of_place(call.device)]
    if call.dtype not in _DTYPES:
        remedy = "use torch.bfloat16, torch.float16 or torch.float32"
        found.append(Support(False, f"q, k, v are {call.dtype}", remedy))
    found.append(_of_head_dims(call))
    if call.state_in_place not in (None, *_DTYPES):
        remedy = "use torch.float32, or inplace=False"
        found.append(Support(False, f"a state in {call.state_in_place} in place", remedy))
    return together(*found) or device.supports(call.device, _kernels_of, *_key(call))


def load(call: LinearCall) -> Support:
    return SUPPORTED if call.is_empty else device.load(_kernels_of, *_key(call))


def _of_head_dims(call: LinearCall) -> Support | None:
    possible = instances.recurrent_keys(call.by_channel, isinstance(call, DeltaRuleCall))
    if call.dim_qk in possible:
        columns = instances.recurrent_columns(call.dim_qk, call.state_v_first)
        if call.dim_v % columns == 0:
            return None
        reason = f"for up to {FEW} tokens V is a multiple of {columns}, this is {call.dim_v}"
    else:
        keys = ", ".join(map(str, possible))
        reason = f"for up to {FEW} tokens K is one of {keys}, this is {call.dim_qk}"
    return Support(False, reason, "call the chunk function, or use backend 'triton'")


def _key(call: LinearCall) -> tuple[int, bool, bool, bool, torch.dtype]:
    delta_rule, dtype = isinstance(call, DeltaRuleCall), call.state_in_place or torch.float32
    return call.dim_qk, call.state_v_first, call.by_channel, delta_rule, dtype


def _kernels_of(
    dim_k: int, v_first: bool, by_channel: bool, delta_rule: bool, dtype: torch.dtype
) -> device.Kernels:
    name = DTYPE_NAMES[dtype]
    return instances.DECODING, (instances.recurrent(name, v_first, by_channel, delta_rule, dim_k),)


def launch(core: RecurrentCore) -> tuple[Tensor, Tensor]:
    """o [B, T, HV, V], and the state after the last token in fp32, [0] where it is not wanted; on the current
    stream."""
    before = as_state(None if core.initial_state is None else core.initial_state.float())
    after = None
    # the state lies there between turns, too
    if core.output_final_state or core.q.shape[1] > instances.RECURRENT_TOKENS:
        after = torch.empty(core.state_shape, dtype=torch.float32, device=core.q.device)
    o = torch.empty(core.v.shape, dtype=core.q.dtype, device=core.q.device)
    _launch(core, o, before, after, Slots())
    last = after if core.output_final_state else None
    return o, o.new_empty(0, dtype=torch.float32) if last is None else last


def launch_in_place(core: RecurrentCore, o: Tensor, slots: Slots) -> None:
    """o and the states are overwritten, with indices those of a pool that they name."""
    state = core.initial_state
    assert state is not None
    if is_aligned(state):
        _launch(core, o, state, state, slots)
        return
    # the public functions alone make such calls, without a first index
    found, _ = through_a_copy(
        lambda named, *_: launch(core._replace(initial_state=named)), 0, state, core.cu_seqlens, slots.indices
    )
    o.copy_(found)


def is_aligned(states: Tensor) -> bool:
    """Whether the kernels can read and write states in place."""
    return (
        states.data_ptr() % ADDRESS_ALIGNMENT == 0 == states.stride(0) * states.itemsize % ADDRESS_ALIGNMENT
    )


def _launch(core: RecurrentCore, o: Tensor, before: MaybeTensor, after: MaybeTensor, slots: Slots) -> None:
    q, k, v = core.q, core.k, core.v
    _, tokens, heads, dim_k = q.shape
    value_heads, dim_v = v.shape[2:]
    where = q.get_device()
    stored = before if after is None else after
    dtype = torch.float32 if stored is None else stored.dtype
    by_channel, delta_rule = core.by_channel, core.beta is not None
    launcher, kernels = _kernels_of(dim_k, core.state_v_first, by_channel, delta_rule, dtype)
    kernel = build.load(launcher, *kernels)
    # to be held until the launches, which get addresses alone
    g = None if core.g is None else narrowed(core.g)
    # those of o are dense
    rows = [x if x is None or x.dim() < 4 or x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, o, g)]
    beta = None if core.beta is None else narrowed(core.beta)
    per_head = [None if x is None else narrowed(x).contiguous() for x in (core.A_log, core.dt_bias)]
    offsets = None if core.cu_seqlens is None else core.cu_seqlens.contiguous()
    columns: tuple[Any, ...] | None = None
    if slots.indices is not None:
        width = slots.indices.shape[1] if slots.of_tokens else 1
        of_pool = slots.of_tokens, pointer(slots.accepted), slots.first
        columns = slots.indices.data_ptr(), slots.indices.stride(0), width, *of_pool
    kernel.decode(
        *(None if x is None else (x.data_ptr(), *x.stride()[:3], DTYPES[x.dtype]) for x in (*rows, beta)),
        *(None if x is None else (x.data_ptr(), DTYPES[x.dtype]) for x in per_head),
        # where states begin, and elements from one to the next
        *((0, 0) if x is None else (x.data_ptr(), x.stride(0)) for x in (before, after)),
        DTYPES[dtype], columns, (pointer(offsets), offsets is not None and offsets.dtype == torch.int64),
        (core.sequences, heads, value_heads, dim_k, dim_v, tokens), core.scale,
        core.state_v_first, by_channel, delta_rule, core.qk_l2norm, core.beta_sigmoid, core.neg_eigval,
        *log_decay(core), where, current_stream(where),
    )  # fmt: skip
