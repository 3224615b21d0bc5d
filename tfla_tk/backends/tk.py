"""The ThunderKittens kernels: what they support, and their launch from tensors."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from tfla_tk import build
from tfla_tk.backends import segments, tk_passes
from tfla_tk.backends.tk_intra import GRID_LIMIT
from tfla_tk.backends.tk_intra import mlstm_intra as mlstm_intra
from tfla_tk.build import instances
from tfla_tk.dispatch import SUPPORTED, Support
from tfla_tk.ops import SCHEDULES, MaybeTensor, chunk_slots
from tfla_tk.validation import MLSTMCall, fail

Operand = tuple[int, int, int, int]  # address, strides of B, NH and S in elements
Gate = tuple[int, ...]  # the same of [B, NH, S], and the code of the dtype

# What tfla_tk::mlstm_fwd returns, None for what was not asked for, and the workspace that a backward can use.
FwdResult = tuple[
    Tensor,
    MaybeTensor,
    MaybeTensor,
    MaybeTensor,
    MaybeTensor,
    MaybeTensor,
    MaybeTensor,
    MaybeTensor,
]

HOPPER = (9, 0)
_log = logging.getLogger("tfla_tk")
_OPERAND_DTYPES = (torch.bfloat16, torch.float16)
_GATE_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # enum class DType of params.h
_MOST_HEADS = 2**31 - 1  # that an int of the kernels counts
_ROW_ALIGNMENT = 8  # elements: TMA needs rows that start at multiples of 16 bytes


def supports_mlstm(call: MLSTMCall, variant: str | None = None) -> Support:
    """Whether the mLSTM kernels serve a call; ValueError for a variant that is no schedule.

    CUDA is only touched for calls on a CUDA device.
    """
    _check_schedule(variant)
    if call.device.type != "cuda":
        return _not_on_a_gpu(call.device)
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
    reason, remedy = _device_fault(call.device.index)
    return Support(False, reason, remedy) if reason else SUPPORTED


def supports_mlstm_step(call: MLSTMCall, variant: str | None = None) -> Support:
    """Whether the step kernel serves a call; gradients come from the chunkwise kernel, by name.

    ValueError for a variant that is no schedule: the chunkwise kernel has them.
    """
    _check_schedule(variant)
    if call.requires_grad:
        support = supports_mlstm(call)
        if not support.ok:
            return support
        reason = "its step has no gradients, they come from the chunkwise kernel over one token"
        return Support(True, reason, "name it, or use torch.no_grad()", auto=False)
    return _supports_decoding(call)


def supports_mlstm_sequence(call: MLSTMCall, variant: str | None = None) -> Support:
    """Whether the kernel for a few tokens serves a call; ValueError for a variant: it has one schedule."""
    if variant is not None:
        fail("backend", "'tk' for a few tokens", repr(f"tk:{variant}"))
    if call.seq > instances.MAX_TOKENS:
        return Support(
            False,
            f"{call.seq} tokens, the kernel takes {instances.MAX_TOKENS}",
            "use mlstm_chunkwise",
        )
    if call.requires_grad:
        return Support(
            False, "its kernel for a few tokens has no gradients", "use mlstm_chunkwise or torch.no_grad()"
        )
    return _supports_decoding(call)


def _check_schedule(variant: str | None) -> None:
    if variant is not None and variant not in SCHEDULES:
        fail("backend", f"'tk' or 'tk:' and one of {', '.join(SCHEDULES)}", repr(f"tk:{variant}"))


def _supports_decoding(call: MLSTMCall) -> Support:
    """What the kernels of decoding have in common; they take no gradients."""
    if call.device.type != "cuda":
        return _not_on_a_gpu(call.device)
    if call.dtype == torch.float64:
        return Support(
            False, "q, k, v are torch.float64", "use torch.float32, torch.bfloat16 or torch.float16"
        )
    if call.dim_qk > instances.MAX_DIM_QK or call.dim_v > instances.MAX_DIM_V:
        return Support(
            False,
            f"head dims are {call.dim_qk}/{call.dim_v}",
            f"use at most {instances.MAX_DIM_QK}/{instances.MAX_DIM_V}",
        )
    if max(call.batch, call.heads) > GRID_LIMIT or call.batch * call.heads > _MOST_HEADS:
        return Support(
            False,
            f"batch and heads are {call.batch} and {call.heads}",
            f"use at most {GRID_LIMIT} of each and {_MOST_HEADS} together",
        )
    reason, remedy = _device_fault(call.device.index)
    return Support(False, reason, remedy) if reason else SUPPORTED


def _not_on_a_gpu(device: torch.device) -> Support:
    return Support(False, f"the kernels run on a GPU, the tensors are on {device}", "move them to a GPU")


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
        # "auto" goes on without a word, and this is looked up once in a process
        _log.warning("the tk kernels cannot be used: %s", error)
        return error.reason, f"{error.remedy}; then start Python anew"
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
    cu_seqlens: Tensor | None,
    sigmoid_gate: bool,
    normalize: bool,
    eps: float,
    return_last_states: bool,
    return_rows: bool,
    schedule: str,
    keep_states: bool = False,
) -> FwdResult:
    """Launch the mLSTM forward on the current stream; arguments and results are those of tfla_tk::mlstm_fwd.

    What was not asked for is None. One launch, or three where sequences are cut (`segments`).
    q, k, v are read in place where their rows are 16-byte aligned, whatever the order of B, NH and S.

    Args:
        keep_states: where the backward will cut the sequences, cut them the same way and return the
            workspace, which has the states at the cuts (`states_at_cuts`), as the last result.

    Raises:
        BuildError: The kernel is not compiled yet and cannot be.
        RuntimeError: The launch was refused.
    """
    batch, heads, seq, dim_qk = q.shape
    dim_v = v.shape[-1]
    device = q.get_device()
    instance, slices = _instance(dim_qk, dim_v, schedule)
    kernel = build.load(instance)
    operands = Operands()
    offsets = operands.offsets(cu_seqlens, batch)
    *_, sequences = offsets
    sizes = (batch, heads, seq, dim_qk, dim_v)
    multiprocessors, packed = _multiprocessors(device), cu_seqlens is not None
    kept = False
    if keep_states:
        cut = tk_passes.cut_sequences(sizes, sequences, multiprocessors, packed=packed)
        kept = cut.segments > sequences
    if not kept:
        find = segments.cut_packed if packed else segments.cut
        cut = find(sequences, seq, heads * slices, multiprocessors * kernel.CTAS_PER_MULTIPROCESSOR)
    keys_and_values = operands.read(k), operands.read(v)
    gates = _gate(i), _gate(f)
    initial = operands.state(c_initial), operands.state(n_initial), operands.state(m_initial)
    cut_of_offsets = (*offsets, *cut)
    options = (q.dtype == torch.float16, sigmoid_gate, normalize, device, _current_stream(device))
    workspace = None
    if cut.segments > sequences:
        slots = (cut.segments - sequences) * heads
        workspace = _fp32(q, (_workspace_floats(kernel, slots, dim_qk, dim_v),))
        # before the results are allocated, so that a GPU that waits for the host has work early
        kernel.mlstm_fwd_states(
            *keys_and_values, *gates, initial, cut_of_offsets, workspace.data_ptr(), sizes, *options
        )
    h = torch.empty_like(v)
    c = n = m = row_n = row_m = chunk_m = None
    if return_last_states:
        c = _fp32(q, (sequences, heads, dim_qk, dim_v))
        n = _fp32(q, (sequences, heads, dim_qk))
        if not normalize:
            n.zero_()
        if not sigmoid_gate:
            m = _fp32(q, (sequences, heads, 1))
    if return_rows:
        row_n = _fp32(q, (batch, heads, seq)) if normalize else None
        if not sigmoid_gate:
            row_m = _fp32(q, (batch, heads, seq))
            slots = chunk_slots(seq, cu_seqlens)
            chunk_m = _fp32(q, (batch, heads, slots, 2))
    kernel.mlstm_fwd(
        operands.read(q),
        *keys_and_values,
        operands.write(h),
        *gates,
        initial,
        (_pointer(c), _pointer(n) if normalize else 0, _pointer(m)),
        (_pointer(row_n), _pointer(row_m), _pointer(chunk_m)),
        cut_of_offsets,
        _pointer(workspace),
        sizes,
        dim_qk**-0.5,
        eps,
        *options,
    )
    operands.copy_back()
    return h, c, n, m, row_n, row_m, chunk_m, workspace if kept else None


@functools.cache
def _instance(dim_qk: int, dim_v: int, schedule: str) -> tuple[build.Instance, int]:
    """The kernel instance and in how many slices of V its CTAs share a head."""
    instance = instances.mlstm_fwd(
        dim_qk, dim_v, instances.DEFAULT_SCHEDULE if schedule == "auto" else schedule
    )
    slice_v = int(dict(instance.defines)["TFLA_SLICE_V"])
    return instance, -(-dim_v // slice_v)


@functools.lru_cache(maxsize=1024)
def _workspace_floats(kernel: ModuleType, slots: int, dim_qk: int, dim_v: int) -> int:
    """Size of the memory between the kernels of a cut call, for so many states."""
    return -(-int(kernel.mlstm_fwd_workspace_bytes(slots, dim_qk, dim_v)) // 4)


def states_at_cuts(workspace: Tensor, slots: int, dim_qk: int, dim_v: int) -> tuple[int, int] | None:
    """Addresses of C [slots, K, V] and n [slots, K] in a workspace; None if it has not so many slots.

    n is written with a normaliser only.
    """
    # struct Workspace of mlstm_fwd_globals.cuh: two doubles per slot, C, n, m
    c = 2 * tk_passes.DOUBLE * slots
    n = c + tk_passes.FLOAT * slots * dim_qk * dim_v
    if tk_passes.FLOAT * workspace.numel() != n + tk_passes.FLOAT * slots * (dim_qk + 1):
        return None
    address = workspace.data_ptr()
    return address + c, address + n


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _current_stream(device: int) -> int:
    """The raw handle of the device's current stream; torch.cuda.current_stream would wrap it in an object."""
    return torch._C._cuda_getCurrentRawStream(device)


def _fp32(like: Tensor, shape: Sequence[int]) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32)


def _pointer(x: Tensor | None) -> int:
    """Address of the data; 0 where there is none."""
    return 0 if x is None else x.data_ptr()


def _gate(x: Tensor) -> Gate:
    return x.data_ptr(), *x.stride(), _GATE_DTYPES[x.dtype]


@functools.lru_cache(maxsize=4096)
def _descriptor_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int, int] | None:
    """Strides of B, NH and S for a TMA descriptor, or None where it cannot address the rows.

    The strides of dimensions of size 1 do not matter, but TMA wants multiples of 16 bytes there too.
    """
    if shape[-1] > 1 and strides[-1] != 1:
        return None
    outer = tuple(
        stride if size > 1 else _ROW_ALIGNMENT for size, stride in zip(shape[:-1], strides[:-1], strict=True)
    )
    if any(stride <= 0 or stride % _ROW_ALIGNMENT for stride in outer):
        return None
    batch, head, row = outer
    return batch, head, row


def _operand(x: Tensor) -> Operand | None:
    """Address of x [B, NH, S, D] and its strides for a TMA descriptor; None where it cannot address x."""
    pointer = x.data_ptr()
    strides = _descriptor_strides(x.shape, x.stride())
    return None if strides is None or pointer % 16 else (pointer, *strides)


class Operands:
    """The tensors of a call as its kernels take them: as they lie if that is possible, else copied.

    It keeps what it allocates, so that nothing else takes that memory before the last kernel is launched.
    """

    def __init__(self) -> None:
        self._copies: list[Tensor] = []
        self._results: list[tuple[Tensor, Tensor]] = []

    def read(self, x: Tensor) -> Operand:
        """x [B, NH, S, D]."""
        found = _operand(x)
        return self._operand_of(x.clone(memory_format=torch.contiguous_format)) if found is None else found

    def write(self, result: Tensor) -> Operand:
        """A result [B, NH, S, D] to be written."""
        found = _operand(result)
        return self._operand_of(self._in_place_of(result)) if found is None else found

    def state(self, x: Tensor | None) -> int:
        """Address of x, contiguous and where 16-byte loads can take it; 0 for None."""
        if x is None:
            return 0
        pointer = x.data_ptr()
        if x.is_contiguous() and pointer % 16 == 0:
            return pointer
        self._copies.append(x.clone(memory_format=torch.contiguous_format))
        return self._copies[-1].data_ptr()

    def state_result(self, result: Tensor | None) -> Tensor | None:
        """A state to be written, contiguous."""
        return result if result is None or result.is_contiguous() else self._in_place_of(result)

    def offsets(self, cu_seqlens: Tensor | None, batch: int) -> tuple[int, bool, int]:
        """cu_seqlens: address or 0, whether 64-bit, number of sequences."""
        if cu_seqlens is None:
            return 0, False, batch
        contiguous = cu_seqlens.contiguous()
        self._copies.append(contiguous)
        return contiguous.data_ptr(), contiguous.dtype == torch.int64, contiguous.shape[0] - 1

    def copy_back(self) -> None:
        """After the last launch: fill the results that no kernel could write as they lie."""
        for result, written in self._results:
            result.copy_(written)

    def _operand_of(self, dense: Tensor) -> Operand:
        self._copies.append(dense)
        found = _operand(dense)
        assert found is not None  # rows of multiples of 16 bytes
        return found

    def _in_place_of(self, result: Tensor) -> Tensor:
        written = torch.empty(result.shape, dtype=result.dtype, device=result.device)
        self._results.append((result, written))
        return written
