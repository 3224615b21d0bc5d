"""What the kernels with one decay per token and head support, and the modules that a call of them takes."""

from typing import Any

import torch

from tfla_tk.backends.tk import device, refusals
from tfla_tk.backends.tk.scalar_gate import walks
from tfla_tk.build import instances
from tfla_tk.calls.linear import LinearCall
from tfla_tk.calls.mlstm import MLSTMCall
from tfla_tk.core.layout import MAX_SLICES
from tfla_tk.core.support import SUPPORTED, Support, together

_MOST_HEADS = (2**31 - 1) // MAX_SLICES  # of all sequences, which the kernels count in an int


def supports_mlstm(call: MLSTMCall, variant: str | None = None) -> Support:
    """Whether the mLSTM kernels serve a call, on a CUDA device alone; ValueError for a variant."""
    refusals.check_variant(variant)
    of_head_dims = None
    too_large = call.dim_qk > instances.MAX_DIM_QK or call.dim_v > instances.MAX_DIM_V
    if too_large or call.dim_qk % 16 or call.dim_v % 16:
        remedy = f"use multiples of 16 up to {instances.MAX_DIM_QK}/{instances.MAX_DIM_V}"
        of_head_dims = Support(False, f"head dims are {call.dim_qk}/{call.dim_v}", remedy)
    return (
        together(refusals.of_operands(call), of_head_dims)
        or refusals.of_count("heads", call.sequences * call.heads)
        or _on_this_machine("mlstm", call)
    )


def supports_simple_gla(call: LinearCall, variant: str | None = None) -> Support:
    """The same of the kernels for a scalar decay."""
    most = instances.MAX_DIM_QK, instances.MAX_DIM_V
    refusal = refusals.of_call(call, variant, most, refusals.of_scale(call))
    return refusal or _on_this_machine("simple_gla", call)


def supports_mlstm_step(call: MLSTMCall, variant: str | None = None) -> Support:
    """The same of the step kernel; gradients come from the chunkwise kernel, by name."""
    refusals.check_variant(variant)
    if call.requires_grad:
        support = supports_mlstm(call)
        if not support.ok:
            return support
        reason = "its step has no gradients, they come from the chunkwise kernel over one token"
        return Support(True, reason, "name it, or use torch.no_grad()", auto=False)
    return _supports_decoding("mlstm_step", call)


def supports_mlstm_sequence(call: MLSTMCall, variant: str | None = None) -> Support:
    """The same of the kernel for a few tokens."""
    refusals.check_variant(variant)
    found = []
    if call.seq > instances.MAX_TOKENS:
        reason = f"{call.seq} tokens, the kernel takes {instances.MAX_TOKENS}"
        found.append(Support(False, reason, "use mlstm_chunkwise"))
    if call.requires_grad:
        reason = "its kernel for a few tokens has no gradients"
        found.append(Support(False, reason, "use mlstm_chunkwise or torch.no_grad()"))
    return _supports_decoding("mlstm_sequence", call, *found)


def _supports_decoding(kernel: str, call: MLSTMCall, *found: Support) -> Support:
    """What the kernels of decoding have in common; they take no gradients. found: what refuses the call
    already."""
    of_call = [*found]
    if call.dtype == torch.float64:
        remedy = "use torch.float32, torch.bfloat16 or torch.float16"
        of_call.append(Support(False, "q, k, v are torch.float64", remedy))
    if call.dim_qk > instances.MAX_DIM_QK or call.dim_v > instances.MAX_DIM_V:
        remedy = f"use at most {instances.MAX_DIM_QK}/{instances.MAX_DIM_V}"
        of_call.append(Support(False, f"head dims are {call.dim_qk}/{call.dim_v}", remedy))
    refusal = together(refusals.of_place(call.device), *of_call)
    if refusal is None and call.batch * call.heads > _MOST_HEADS:
        reason = f"batch x heads = {call.batch * call.heads:,}, the kernels take {_MOST_HEADS:,}"
        refusal = Support(False, reason, "split the batch or the heads")
    return refusal or _on_this_machine(kernel, call)


def load(kernel: str, call: MLSTMCall | LinearCall, variant: str | None = None) -> Support:
    """`device.load` of a call that is supported, for its gradients too."""
    if call.is_empty:
        return SUPPORTED
    return device.load(*kernels_for(kernel, call))


def _on_this_machine(kernel: str, call: MLSTMCall | LinearCall) -> Support:
    """Whether the kernels of a call, which they take, can be had and run here; nothing is loaded."""
    return device.supports(call.device, *kernels_for(kernel, call))


def kernels_for(kernel: str, call: MLSTMCall | LinearCall) -> tuple[Any, ...]:
    """What tells the kernels of a call, for `device.load`: plain numbers, also where torch.compile has the
    sizes as symbols."""
    tiles = refusals.power_of_two(call.dim_qk), refusals.power_of_two(call.dim_v)
    half, gradients = call.dtype == torch.float16, call.requires_grad
    if isinstance(call, LinearCall):
        return _chunkwise, tiles, False, False, True, half, gradients, call.gate == "token"
    if kernel == "mlstm" or gradients:  # of one token, too: the chunkwise kernel has the gradients
        return _chunkwise, tiles, call.normalize, call.sigmoid_gate, False, half, gradients, True
    tokens = 1
    for tile in instances.SEQUENCE_TILES:
        if tokens < call.seq:
            tokens = tile
    return _decoding, tokens, call.dtype == torch.float32


def _decoding(tokens: int, fp32: bool) -> device.Kernels:
    """The kernel that nearly every such call takes; what others take is loaded when they are launched."""
    state = ("fp32", "fp32")
    of_step, of_sequence = instances.mlstm_step, instances.mlstm_sequence
    return instances.DECODING, (of_step(*state) if tokens == 1 else of_sequence(tokens, *state, fp32),)


def _chunkwise(tiles: tuple[int, int], *flags: bool) -> device.Kernels:
    """The kernels of K and V of these tiles that nearly every such call takes, as of `_decoding`."""
    normalize, sigmoid_gate, decay, half, gradients, needs_df = flags
    of_call = {"half": half, "normalize": normalize, "sigmoid_gate": sigmoid_gate}
    forward = instances.mlstm_fwd(instances.mlstm_tile(*tiles), **of_call)
    of_backward = walks.instances_of(*tiles, **of_call, decay=decay, needs_df=needs_df) if gradients else ()
    return instances.CHUNKWISE, (forward, *of_backward)
