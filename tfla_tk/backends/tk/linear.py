"""The operators in [B, T, H, D] on the ThunderKittens kernels: which calls they serve, and how.

A few tokens of a recurrent function (fused_recurrent_*) without gradients are served by the decoding kernels
of all families (recurrent.py), all other calls by the chunk kernels of their family, a module or package
beside this one: scalar_gate of simple GLA, delta_rule, channel_gate of GLA, kda. It says which calls it
serves, and loads what they launch. Plain eager calls launch these kernels themselves (`_prepare`), all others
by a registered op (`_serve`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tfla_tk.backends.tk import channel_gate, recurrent
from tfla_tk.backends.tk import kda as of_kda
from tfla_tk.backends.tk.delta_rule import support as of_delta_rule
from tfla_tk.backends.tk.scalar_gate import support as of_scalar_gate
from tfla_tk.calls.linear import LinearCall
from tfla_tk.calls.recurrent import FEW
from tfla_tk.core import eager
from tfla_tk.core.layout import MaybeTensor
from tfla_tk.core.support import SUPPORTED, Support
from tfla_tk.ops import delta_rule as delta_rule_ops
from tfla_tk.ops import linear as linear_ops
from tfla_tk.ops import recurrent as steps
from tfla_tk.ops.linear import LinearOps, Result, as_asked

_STEP = 16  # head dims of the kernels are multiples of it


def _served_by(
    kernel: str, supports: Callable[..., Support], chunkwise: LinearOps
) -> tuple[Callable[..., Support], Callable[..., Result], Callable[..., Any]]:
    """supports_<kernel>, <kernel> and prepare_<kernel> of a family, from those of its chunk kernels."""

    def supports_either(call: LinearCall, variant: str | None = None) -> Support:
        return recurrent.supports(call, variant) if call.goes_by_token(FEW) else supports(call, variant)

    def serve(call: LinearCall, variant: str | None, *tensors: Any) -> Result:
        if call.goes_by_token(FEW):
            return steps.serve(kernel, call, *tensors)
        return _serve(chunkwise, call, tensors)

    def prepare(call: LinearCall, variant: str | None, tensors: Sequence[Any]) -> Any:
        if not eager.is_plain(tuple(tensors)):
            return None
        if call.goes_by_token(FEW):
            return partial(steps.serve, kernel, call, direct=True)
        return _prepare(chunkwise, call, tensors)

    return supports_either, serve, prepare


def _serve(of: LinearOps, call: LinearCall, tensors: Sequence[Any]) -> Result:
    """o, and the final state as the call wants it, by <name>_fwd; the last tensor is cu_seqlens_cpu."""
    core = _padded(call, of.as_op_takes(of.read(call, tensors)))
    o, last = _unpadded(call, *of.fwd(*core, call.output_final_state))
    return o, as_asked(call, last)


def _prepare(of: LinearOps, call: LinearCall, tensors: Sequence[Any]) -> Callable[..., Result]:
    """`_serve` without the op: the kernels themselves, for plain eager calls with tensors like these. Like
    these are tensors of the same metadata, strides included, that autograd records or not as these."""
    core, count = _padded(call, of.read(call, tensors)), of.count
    recorded = eager.records(tuple(tensors))
    kernels = of.family.kernels()
    forward = kernels.prepare(core, output_final_state=call.output_final_state, keep=recorded)
    constants = forward, kernels, core[count:], call.output_final_state, of.needs_gates(core)
    # then nothing is to be done but to leave out what is no input, for the host's time
    places = of.family.places
    inputs_of = itemgetter(*(range(count) if places is None else places(tensors)))
    reads_as_given = all(x is y for x, y in zip(core[:count], inputs_of(tensors), strict=True))
    direct = of.direct

    def run(*tensors: Any) -> Result:
        inputs = inputs_of(tensors) if reads_as_given else _padded(call, of.read(call, tensors))[:count]
        if recorded:
            o, last = direct(*inputs, constants)
        else:
            o, last, _ = forward(*inputs)
        o, last = _unpadded(call, o, last)
        return o, as_asked(call, last)

    return eager.named_in_profiles(f"tfla_tk::{of.family.name}_fwd", run)


# Head dims that the kernels lack: q, k, v and states with zeros up to multiples of 16, results without them.
# Channels of zeros change nothing in the others, forward or backward. torch's operations copy the tensors,
# and autograd cuts the gradients.


def _fits(call: LinearCall) -> bool:
    """Whether the kernels have the call's head dims; asked by every call, so of numbers, not of tensors."""
    return not (call.dim_qk % _STEP or call.dim_v % _STEP)


def _padded(call: LinearCall, core: Any) -> Any:
    """The core with q, k, v, states, and what gates have of every key channel, of such head dims."""
    if _fits(call):
        return core
    more_k, more_v = -call.dim_qk % _STEP, -call.dim_v % _STEP
    found = {"q": pad(core.q, (0, more_k)), "k": pad(core.k, (0, more_k)), "v": pad(core.v, (0, more_v))}
    if core.initial_state is not None:
        found["initial_state"] = pad(core.initial_state, (0, more_v, 0, more_k))
    if call.by_channel:
        found["g"] = pad(core.g, (0, more_k))
        of_bias = getattr(core, "dt_bias", None)
        if of_bias is not None and more_k:
            found["dt_bias"] = pad(of_bias.view(-1, call.dim_qk), (0, more_k)).flatten()
    return core._replace(**found)


def _unpadded(call: LinearCall, o: Tensor, last: MaybeTensor) -> tuple[Tensor, MaybeTensor]:
    """o and the final state without the zeros, as tensors of their own; as they are where the dims fit."""
    if _fits(call):
        return o, last
    dim_k, dim_v = call.dim_qk, call.dim_v
    if dim_v % _STEP:
        o = o.narrow(-1, 0, dim_v).clone(memory_format=torch.contiguous_format)
    if call.output_final_state and last is not None:
        last = last.narrow(-2, 0, dim_k).narrow(-1, 0, dim_v).clone(memory_format=torch.contiguous_format)
    return o, last


supports_simple_gla, simple_gla, prepare_simple_gla = _served_by(
    "simple_gla", of_scalar_gate.supports_simple_gla, linear_ops.simple_gla
)
supports_delta_rule, delta_rule, prepare_delta_rule = _served_by(
    "delta_rule", of_delta_rule.supports_delta_rule, delta_rule_ops.delta_rule
)
supports_gla, gla, prepare_gla = _served_by("gla", channel_gate.supports_gla, linear_ops.gla)
supports_kda, kda, prepare_kda = _served_by("kda", of_kda.supports_kda, delta_rule_ops.kda)


def load(kernel: str, call: LinearCall, variant: str | None = None) -> Support:
    if call.is_empty:
        return SUPPORTED
    return recurrent.load(call) if call.goes_by_token(FEW) else _LOADS[kernel](call)


_LOADS: dict[str, Callable[[Any], Support]] = {
    "simple_gla": partial(of_scalar_gate.load, "simple_gla"),
    "delta_rule": of_delta_rule.load,
    "gla": channel_gate.load,
    "kda": of_kda.load,
}
