"""The ThunderKittens kernels: what they support, and their launch from tensors."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tfla_tk import build
from tfla_tk.build import instances
from tfla_tk.dispatch import SUPPORTED, Support
from tfla_tk.validation import MLSTMCall

HOPPER = (9, 0)
_OPERAND_DTYPES = (torch.bfloat16, torch.float16)
_GATE_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # enum class DType of params.h
_ROW_ALIGNMENT = 8  # elements: TMA needs rows that start at multiples of 16 bytes


def supports_mlstm(call: MLSTMCall) -> Support:
    """Whether the mLSTM kernels serve a call. CUDA is only touched for calls on a CUDA device."""
    if call.device.type != "cuda":
        return Support(
            False, f"the kernels run on a GPU, the tensors are on {call.device}", "move them to a GPU"
        )
    if call.dtype not in _OPERAND_DTYPES:
        return Support(False, f"q, k, v are {call.dtype}", "use torch.bfloat16 or torch.float16")
    if (
        call.dim_qk > instances.MAX_DIM_QK
        or call.dim_v > instances.MAX_DIM_V
        or call.dim_qk % 16
        or call.dim_v % 16
    ):
        return Support(
            False,
            f"head dims are {call.dim_qk}/{call.dim_v}",
            f"use multiples of 16 up to {instances.MAX_DIM_QK}/{instances.MAX_DIM_V}",
        )
    if call.requires_grad:
        return Support(
            False,
            "the mLSTM kernels have no backward yet",
            "call under torch.no_grad(), or use backend='reference' (exact gradients)",
        )
    reason, remedy = _device_fault(call.device.index)
    return Support(False, reason, remedy) if reason else SUPPORTED


def _device_fault(index: int | None) -> tuple[str, str]:
    """Why no kernel can run on this GPU of this machine, and the remedy; empty when it can."""
    return _probe_device(index)


# what torch.compiler.assume_constant_result sets; calling that here would import torch._dynamo and triton
_device_fault._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _probe_device(index: int | None) -> tuple[str, str]:
    capability = torch.cuda.get_device_capability(index)
    if capability != HOPPER:
        name = torch.cuda.get_device_name(index)
        found = ".".join(map(str, capability))
        return f"{name} has compute capability {found}, the kernels need 9.0", "use an H100, H200 or GH200"
    try:
        build.find_toolchain()
        build.find_thunderkittens(clone=False)
    except build.BuildError as error:
        return error.reason, error.remedy
    return "", ""


def mlstm_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c_initial: Tensor | None,
    n_initial: Tensor | None,
    m_initial: Tensor | None,
    sigmoid_gate: bool,
    normalize: bool,
    eps: float,
    return_last_states: bool,
    schedule: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the mLSTM forward on the current stream; arguments and results are those of tfla_tk::mlstm_fwd.

    q, k, v are read in place where their rows are 16-byte aligned, whatever the order of B, NH and S.

    Raises:
        BuildError: The kernel is not compiled yet and cannot be.
        RuntimeError: The launch was refused.
    """
    batch, heads, seq, dim_qk = q.shape
    dim_v = v.shape[-1]
    if schedule == "auto":
        schedule = instances.DEFAULT_SCHEDULE
    kernel = build.load(instances.mlstm_fwd(dim_qk, dim_v, schedule))
    h = torch.empty_like(v)
    q, k, v = (_rows_aligned(x) for x in (q, k, v))
    out = h if _has_aligned_rows(h) else torch.empty(v.shape, dtype=v.dtype, device=v.device)
    initial = [None if x is None else _state_aligned(x) for x in (c_initial, n_initial, m_initial)]
    last = _last_states(q, dim_v, sigmoid_gate, normalize, return_last_states)
    device = q.device.index
    with torch.cuda.device(device):
        kernel.mlstm_fwd(
            *(_operand(x) for x in (q, k, v, out)),
            *((x.data_ptr(), *x.stride(), _GATE_DTYPES[x.dtype]) for x in (i, f)),
            initial=tuple(0 if x is None else x.data_ptr() for x in initial),
            last=tuple(x.data_ptr() if x.numel() else 0 for x in last),
            sizes=(batch, heads, seq, dim_qk, dim_v),
            scale=dim_qk**-0.5,
            eps=eps,
            half=q.dtype == torch.float16,
            sigmoid_gate=sigmoid_gate,
            normalize=normalize,
            device=device,
            stream=torch.cuda.current_stream().cuda_stream,
        )
    if out is not h:
        h.copy_(out)
    return h, last[0], last[1], last[2]


def _last_states(q: Tensor, dim_v: int, sigmoid_gate: bool, normalize: bool, wanted: bool) -> list[Tensor]:
    """c, n, m for the kernel to fill; n is zeros without a normaliser, m empty with the sigmoid gate."""
    batch, heads, _, dim_qk = q.shape
    none = (0,)
    c = q.new_empty((batch, heads, dim_qk, dim_v) if wanted else none, dtype=torch.float32)
    n = (q.new_empty if normalize else q.new_zeros)(c.shape[:3], dtype=torch.float32)
    m = q.new_empty((batch, heads, 1) if wanted and not sigmoid_gate else none, dtype=torch.float32)
    return [c, n, m]


def _has_aligned_rows(x: Tensor) -> bool:
    """Whether TMA can address x as it lies; strides of dimensions of size 1 do not matter."""
    *outer, last = zip(x.shape, x.stride(), strict=True)
    return (
        (last[1] == 1 or last[0] == 1)
        and x.data_ptr() % 16 == 0
        and all(size == 1 or (stride > 0 and stride % _ROW_ALIGNMENT == 0) for size, stride in outer)
    )


def _rows_aligned(x: Tensor) -> Tensor:
    return x if _has_aligned_rows(x) else x.clone(memory_format=torch.contiguous_format)


def _state_aligned(x: Tensor) -> Tensor:
    """x contiguous and at an address that 16-byte loads can take."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _operand(x: Tensor) -> tuple[int, ...]:
    strides = (
        stride if size > 1 else _ROW_ALIGNMENT for size, stride in zip(x.shape, x.stride(), strict=True)
    )
    batch, head, row, _ = strides
    return x.data_ptr(), batch, head, row
