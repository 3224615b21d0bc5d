"""Head dims that the kernels lack: q, k, v and states with zeros up to multiples of 16, results without them.

Channels of zeros change nothing in the others, forward or backward. torch's operations copy the tensors, and
autograd cuts the gradients.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tfla_tk.calls.linear import LinearCall
from tfla_tk.core.layout import MaybeTensor

STEP = 16


def fits(call: LinearCall) -> bool:
    """Whether the kernels have the call's head dims; asked by every call, so of numbers, not of tensors."""
    return not (call.dim_qk % STEP or call.dim_v % STEP)


def padded(q: Tensor, k: Tensor, v: Tensor, initial_state: MaybeTensor, *gates: MaybeTensor) -> Any:
    """q, k, v, states, and gates [B, T, H, K] among the gates, with head dims that are multiples of 16."""
    more_k, more_v = -q.shape[-1] % STEP, -v.shape[-1] % STEP
    if initial_state is not None:
        initial_state = pad(initial_state, (0, more_v, 0, more_k))
    gates = tuple(pad(x, (0, more_k)) if x is not None and x.dim() == 4 else x for x in gates)
    return pad(q, (0, more_k)), pad(k, (0, more_k)), pad(v, (0, more_v)), initial_state, *gates


def unpadded(call: LinearCall, o: Tensor, last: MaybeTensor) -> tuple[Tensor, MaybeTensor]:
    """o and the final state without the zeros, as tensors of their own; as they are where the dims fit."""
    dim_k, dim_v = call.dim_qk, call.dim_v
    if fits(call):
        return o, last
    if dim_v % STEP:
        o = o.narrow(-1, 0, dim_v).clone(memory_format=torch.contiguous_format)
    if call.output_final_state and last is not None:
        last = last.narrow(-2, 0, dim_k).narrow(-1, 0, dim_v).clone(memory_format=torch.contiguous_format)
    return o, last


def as_asked(call: LinearCall, last: MaybeTensor) -> MaybeTensor:
    """The final state as the call wants it, contiguous."""
    if not call.output_final_state or last is None:
        return None
    return last.mT.contiguous() if call.state_v_first else last
