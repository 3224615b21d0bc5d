"""mLSTM on the ThunderKittens kernels: what `family_module` finds of it in this backend."""

from typing import Any

from torch import Tensor

from tfla_tk.backends.tk.scalar_gate import support
from tfla_tk.calls.mlstm import MLSTMCall
from tfla_tk.ops import mlstm as ops
from tfla_tk.ops import mlstm_decode

load, supports_mlstm = support.load, support.supports_mlstm
supports_mlstm_step, supports_mlstm_sequence = support.supports_mlstm_step, support.supports_mlstm_sequence
mlstm, prepare_mlstm = ops.mlstm, ops.prepare_mlstm
mlstm_sequence, prepare_mlstm_sequence = mlstm_decode.sequence.serve, mlstm_decode.sequence.prepare
prepare_mlstm_step = mlstm_decode.step.prepare


def mlstm_step(call: MLSTMCall, variant: str | None, *tensors: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    """h [B, NH, V] and the next state, (c, n, m) or (c, n). tensors: q, k, v, i, f, c, n, m."""
    if not call.requires_grad:
        return mlstm_decode.step.serve(call, variant, *tensors)
    # the chunkwise kernel over a sequence of one token: it has gradients
    q, k, v, i, f, c, n, m = tensors
    q, k, v = (x.unsqueeze(2) for x in (q, k, v))
    h, state = ops.mlstm(call, variant, q, k, v, i, f, c, n, m, None)
    if call.sigmoid_gate and not call.normalize:
        state = (state[0], n)
    return h.squeeze(2), mlstm_decode.stored(call, state, tensors[5:])
