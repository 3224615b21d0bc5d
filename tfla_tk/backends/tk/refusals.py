"""What the kernels over whole sequences of every family refuse alike, and how their modules are chosen."""

import torch

from tfla_tk.backends.tk import device
from tfla_tk.calls.linear import LinearCall
from tfla_tk.calls.mlstm import MLSTMCall
from tfla_tk.core.checks import fail
from tfla_tk.core.support import Support, together

_OPERAND_DTYPES = (torch.bfloat16, torch.float16)
_MOST_SEQUENCE_HEADS = 2**31 - 1  # of all heads, which the kernels count in an int


def check_variant(variant: str | None) -> None:
    """ValueError for any: the kernels have none."""
    if variant is not None:
        fail("backend", "'tk'", repr(f"tk:{variant}"))


def of_operands(call: MLSTMCall | LinearCall) -> Support | None:
    """Why the kernels do not read q, k and v where and as they are, or None."""
    of_dtype = None
    if call.dtype not in _OPERAND_DTYPES:
        of_dtype = Support(False, f"q, k, v are {call.dtype}", "use torch.bfloat16 or torch.float16")
    return together(of_place(call.device), of_dtype)


def of_place(where: torch.device) -> Support | None:
    """Why no kernel can run where the tensors are, or None."""
    if where.type != "cuda":
        reason = f"the kernels run on a GPU, the tensors are on {where}"
        return Support(False, reason, "move them to a GPU")
    reason, remedy = device.device_fault(where.index)
    return Support(False, reason, remedy) if reason else None


def of_head_dims(call: LinearCall, max_k: int, max_v: int) -> Support | None:
    """Why no tile holds the head dims, or None. Any below the largest are held (`linear._padded`)."""
    if call.dim_qk <= max_k and call.dim_v <= max_v:
        return None
    return Support(
        False, f"head dims are K = {call.dim_qk}, V = {call.dim_v}", f"use up to K = {max_k}, V = {max_v}"
    )


def of_scale(call: LinearCall) -> Support | None:
    if call.scale > 0:
        return None
    remedy = "scale q by -1" if call.scale < 0 else "take the reference backend"
    return Support(False, f"scale = {call.scale}, the kernels take positive ones", remedy)


def of_call(
    call: LinearCall, variant: str | None, most: tuple[int, int], *more: Support | None
) -> Support | None:
    """Why the kernels of an operator in [B, T, H, D] do not take a call, or None; ValueError for a
    variant. most: K and V."""
    check_variant(variant)
    of_metadata = together(of_operands(call), of_head_dims(call, *most), *more)
    return of_metadata or of_count("value heads", call.sequences * call.value_heads)


def of_count(heads: str, count: int) -> Support | None:
    """Why there are too many sequences of all heads, or None; packed ones may be empty. To be asked last:
    where the sizes are symbols it bounds them, which torch.export refuses."""
    if count <= _MOST_SEQUENCE_HEADS:
        return None
    reason = f"sequences x {heads} = {count:,}, the kernels take {_MOST_SEQUENCE_HEADS:,}"
    return Support(False, reason, "split the batch or the heads")


def power_of_two(dim: int) -> int:
    """The smallest one from 64 on that holds a head dim: kernels are loaded by it. No tile of a kernel."""
    size = 64
    while size < dim:
        size *= 2
    return size
