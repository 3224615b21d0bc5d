"""The registered ops of a few tokens of mLSTM that go on from a state; no gradients.

tfla_tk::mlstm_sequence and tfla_tk::mlstm_sequence_ take q, k [B, NH, S, K], v [B, NH, S, V], i, f [B, NH, S]
and are otherwise like those of one token (step_ops.py), whose definitions they share: h is [B, NH, S, V], and
the state is the one after the last token, rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tfla_tk import step_ops
from tfla_tk.calls.mlstm import MLSTMCall

step_ops.define("mlstm_sequence")
_sequence = torch.ops.tfla_tk.mlstm_sequence.default
_sequence_in_place = torch.ops.tfla_tk.mlstm_sequence_.default


def mlstm_sequence(call: MLSTMCall, *tensors: Any, direct: bool = False) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The tk backend's sequence; arguments and results as of `step_ops.mlstm_step`."""
    if direct:
        return step_ops.apply(call, tensors, _kernel_sequence, _direct_sequence_in_place)
    return step_ops.apply(call, tensors, _sequence, _sequence_in_place)


# CUDA: the ThunderKittens kernels, imported on the first call


def _kernel_sequence(*args: Any) -> Any:
    """The op's outputs, m None where it is empty."""
    from tfla_tk.backends import tk_sequence

    return tk_sequence.mlstm_sequence(*args)


def _kernel_sequence_in_place(*args: Any) -> Tensor:
    from tfla_tk.backends import tk_sequence

    return tk_sequence.mlstm_sequence_(*args)


_direct_sequence_in_place = step_ops.noting_writes(_kernel_sequence_in_place)


step_ops.register("mlstm_sequence", _kernel_sequence, _kernel_sequence_in_place)
