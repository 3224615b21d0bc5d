"""The ThunderKittens kernels: what they support, and their launch from tensors."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tfla_tk import build, env, ops, sequence_ops, step_ops
from tfla_tk.backends.tk_intra import mlstm_intra as mlstm_intra
from tfla_tk.build import Instance, instances
from tfla_tk.calls.linear import LinearCall
from tfla_tk.calls.mlstm import MLSTMCall
from tfla_tk.core.checks import fail
from tfla_tk.core.layout import SCHEDULES, MaybeTensor
from tfla_tk.core.memo import is_direct, is_plain
from tfla_tk.core.support import SUPPORTED, Support

Operand = tuple[int, int, int, int]  # address, strides of B, NH and S in elements
Gate = tuple[int, ...]  # the same of [B, NH, S], and the code of the dtype

HOPPER = (9, 0)
_log = logging.getLogger("tfla_tk")
_OPERAND_DTYPES = (torch.bfloat16, torch.float16)
_GATE_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # enum class DType of params.h
_DECODING_SLICES = 16  # of V at most, each a CTA: kDecodeMaxSlices of params_decode.h
_MOST_HEADS = (2**31 - 1) // _DECODING_SLICES  # of all sequences, which the kernels count in an int
ADDRESS_ALIGNMENT = 16  # bytes: of what TMA and vector loads read
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
    return _on_this_machine("mlstm", call, variant)


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
    return _supports_decoding("mlstm_step", call)


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
    return _supports_decoding("mlstm_sequence", call)


def mlstm(call: MLSTMCall, variant: str | None, *tensors: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    """h [B, NH, S, V] and the last state, (c, n, m) or with the sigmoid gate (c, n).

    Args:
        tensors: q, k, v of the call's dtype, i, f, c_initial, n_initial, m_initial, cu_seqlens.
    """
    return ops.mlstm(call, variant or "auto", *tensors)


def prepare_mlstm(
    call: MLSTMCall, variant: str | None, tensors: tuple[Any, ...]
) -> Callable[..., Any] | None:
    """`mlstm` without the op, for plain eager calls with tensors like these."""
    return ops.prepare_mlstm(call, variant or "auto", tensors) if is_plain(tensors) else None


def mlstm_step(call: MLSTMCall, variant: str | None, *tensors: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    """h [B, NH, V] and the next state, (c, n, m) or with the sigmoid gate (c, n).

    Args:
        tensors: q, k, v, i, f, c, n, m.
    """
    if not call.requires_grad:
        return step_ops.mlstm_step(call, *tensors)
    h, state = _chunk_of_one(call, variant, tensors)
    return h, step_ops.stored(call, state, tensors[5:])


def prepare_mlstm_step(
    call: MLSTMCall, variant: str | None, tensors: tuple[Any, ...]
) -> Callable[..., Any] | None:
    """`mlstm_step` without the op, for plain eager calls with tensors like these; they record no gradient."""
    return functools.partial(step_ops.mlstm_step, call, direct=True) if is_direct(tensors) else None


def mlstm_sequence(call: MLSTMCall, variant: str | None, *tensors: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    """h [B, NH, S, V] and the state after the last token; tensors and state as of `mlstm_step`."""
    return sequence_ops.mlstm_sequence(call, *tensors)


def prepare_mlstm_sequence(
    call: MLSTMCall, variant: str | None, tensors: tuple[Any, ...]
) -> Callable[..., Any] | None:
    """`mlstm_sequence` without the op, for plain eager calls with tensors like these."""
    return functools.partial(sequence_ops.mlstm_sequence, call, direct=True) if is_direct(tensors) else None


def _chunk_of_one(
    call: MLSTMCall, variant: str | None, tensors: tuple[Any, ...]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The chunkwise kernel over a sequence of one token: it has gradients."""
    q, k, v, i, f, c, n, m = tensors
    q, k, v = (x.unsqueeze(2) for x in (q, k, v))
    h, state = ops.mlstm(call, variant or "auto", q, k, v, i, f, c, n, m, None)
    if call.sigmoid_gate and not call.normalize:
        state = (state[0], n)
    return h.squeeze(2), state


def _check_schedule(variant: str | None) -> None:
    if variant is not None and variant not in SCHEDULES:
        fail("backend", f"'tk' or 'tk:' and one of {', '.join(SCHEDULES)}", repr(f"tk:{variant}"))


def _supports_decoding(kernel: str, call: MLSTMCall) -> Support:
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
    if call.batch * call.heads > _MOST_HEADS:
        return Support(
            False,
            f"batch x heads = {call.batch * call.heads:,}, the kernels take {_MOST_HEADS:,}",
            "split the batch or the heads",
        )
    return _on_this_machine(kernel, call)


def _not_on_a_gpu(device: torch.device) -> Support:
    return Support(False, f"the kernels run on a GPU, the tensors are on {device}", "move them to a GPU")


def load(kernel: str, call: MLSTMCall | LinearCall, variant: str | None = None) -> Support:
    """Load the kernels of a call that is supported, for its gradients too, and compile what the cache lacks.

    What cannot be loaded is logged, once, and not tried again in this process: from then on such calls are
    not supported.

    Args:
        kernel: "mlstm", "mlstm_step", "mlstm_sequence" or "simple_gla".

    Returns:
        Whether the call can be served.

    Raises:
        CaptureError: something would have to be compiled while a CUDA graph is being captured.
    """
    if call.is_empty:
        return SUPPORTED
    reason, remedy = _load_fault(*_kernel_key(kernel, call, variant))
    return Support(False, reason, remedy, failed=True) if reason else SUPPORTED


def _on_this_machine(kernel: str, call: MLSTMCall | LinearCall, variant: str | None = None) -> Support:
    """Whether the kernels of a call, which they take, can be had and run here; nothing is loaded."""
    reason, remedy = _device_fault(call.device.index)
    if reason:
        return Support(False, reason, remedy)
    reason, remedy = _kernel_fault(*_kernel_key(kernel, call, variant))
    return Support(False, reason, remedy, failed=True) if reason else SUPPORTED


KernelKey = tuple[str, int, int, str, bool]  # kernel, tiles of K and V or of tokens, schedule, gradients


def _kernel_key(kernel: str, call: MLSTMCall | LinearCall, variant: str | None) -> KernelKey:
    """What tells the kernels of a call: plain numbers, also where torch.compile has the sizes as symbols."""
    if call.requires_grad and kernel.startswith("mlstm"):
        # of one token, too: the chunkwise kernel has the gradients
        kernel = "mlstm"
    if kernel in ("mlstm", "simple_gla"):
        schedule = variant or instances.DEFAULT_SCHEDULE
        if schedule == "auto":
            schedule = instances.DEFAULT_SCHEDULE
        return kernel, _tile(call.dim_qk), _tile(call.dim_v), schedule, call.requires_grad
    tokens = 1
    for tile in instances.SEQUENCE_TILES:
        if tokens < call.seq:
            tokens = tile
    return kernel, tokens, 0, "", False


def _tile(dim: int) -> int:
    tile = 64
    while tile < dim:
        tile *= 2
    return tile


def _instances_of(kernel: str, first: int, second: int, schedule: str, gradients: bool) -> list[Instance]:
    """The modules that the kernels of a call are in."""
    from tfla_tk.backends import tk_passes

    if kernel == "simple_gla":
        from tfla_tk.backends import tk_scalar_decay

        return tk_scalar_decay.instances_of(first, second, schedule, gradients)
    if kernel == "mlstm_step":
        return [instances.mlstm_step()]
    if kernel == "mlstm_sequence":
        return [instances.mlstm_sequence(first)]
    forward = instances.mlstm_fwd(first, second, schedule)
    return [forward, *tk_passes.instances_of(first, second)] if gradients else [forward]


_failed: dict[Instance, tuple[str, str]] = {}  # what could not be loaded, why, and the remedy


def _load_fault(*key: Any) -> tuple[str, str]:
    """Why the kernels of this `_kernel_key` cannot be loaded, and the remedy; empty when they are loaded."""
    for instance in _instances_of(*key):
        if instance in _failed:
            return _failed[instance]
        try:
            build.load(instance)
        except build.CaptureError:
            raise
        except build.BuildError as error:
            # "auto" goes on without a word
            _log.warning("%s cannot be used: %s", instance.name, error)
            _failed[instance] = error.reason, _anew(error)
            return _failed[instance]
    return "", ""


def _kernel_fault(*key: Any) -> tuple[str, str]:
    """Why they cannot be had, as far as that is known without loading them: `_device_fault` is empty."""
    for instance in _instances_of(*key):
        if instance in _failed:
            return _failed[instance]
        if not (_can_add_kernels() or _is_cached(instance)):
            reason = f"{instance.name} is not compiled, and the cache directory cannot be written"
            return reason, f"set {env.CACHE_DIR.name} to a directory that you own and can write"
    return "", ""


@functools.cache
def _can_add_kernels() -> bool:
    try:
        return build.check_cache()
    except build.BuildError:
        return False


@functools.cache
def _is_cached(instance: Instance) -> bool:
    try:
        return build.is_cached(instance)
    except build.BuildError:
        return False


def _device_fault(index: int | None) -> tuple[str, str]:
    """Why no kernel can run on this GPU of this machine, and the remedy; empty when it can."""
    return _probe_device(index)


# what torch.compiler.assume_constant_result sets; calling that here would import torch._dynamo and triton
_CONSTANT: tuple[Any, ...] = (_device_fault, _kernel_fault, _load_fault)
for _function in _CONSTANT:
    _function._dynamo_marked_constant = True


@functools.cache
def _probe_device(index: int | None) -> tuple[str, str]:
    try:
        name = torch.cuda.get_device_name(index)
        capability = torch.cuda.get_device_capability(index)
    except (AssertionError, RuntimeError) as error:
        # fake tensors may be on a GPU that this machine does not have
        reason = str(error).partition("\n")[0]
        return f"torch cannot use GPU {index or 0}: {reason}", "run on a machine that has it"
    if torch.version.hip is not None:
        return f"{name} is an AMD GPU, the kernels are CUDA", "use an H100, H200 or GH200"
    if capability != HOPPER:
        found = ".".join(map(str, capability))
        return f"{name} has compute capability {found}, the kernels need 9.0", "use an H100, H200 or GH200"
    try:
        toolchain = build.find_toolchain()
        build.check_cache()
        build.find_thunderkittens(clone=False)
    except build.BuildError as error:
        # "auto" goes on without a word, and this is looked up once in a process
        _log.warning("the tk kernels cannot be used: %s", error)
        return error.reason, _anew(error)
    return _driver_fault(toolchain.version)


def _anew(error: build.BuildError) -> str:
    """The remedy of what is looked up once in a process."""
    return f"{error.remedy}; then start Python anew" if error.remedy else "start Python anew to try again"


def _driver_fault(toolkit: tuple[int, int]) -> tuple[str, str]:
    """Why the driver is too old: a module of CUDA X.Y, machine code alone, needs a driver of X.0 or later."""
    driver = _driver_version()
    if driver is None or driver[0] >= toolkit[0]:
        return "", ""
    return (
        f"the driver runs CUDA {driver[0]}.{driver[1]}, the nvcc that was found is CUDA "
        f"{toolkit[0]}.{toolkit[1]}",
        f"update the driver, or name an nvcc of CUDA 12.8 or 12.9 in {env.NVCC.name}; then start Python anew",
    )


def _driver_version() -> tuple[int, int] | None:
    """The newest CUDA that the driver runs, as (major, minor); None where it cannot be asked."""
    version = ctypes.c_int(0)
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return divmod(version.value // 10, 100) if status == 0 else None


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _current_stream(device: int) -> int:
    """The raw handle of the device's current stream."""
    return _raw_stream(device)


# not public: torch.cuda.current_stream wraps the handle in an object, which takes longer
_raw_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda device: torch.cuda.current_stream(device).cuda_stream
)


def _pointer(x: Tensor | None) -> int:
    """Address of the data; 0 where there is none."""
    return 0 if x is None else x.data_ptr()


def _gate(x: Tensor) -> Gate:
    return x.data_ptr(), *x.stride(), _GATE_DTYPES[x.dtype]


@functools.lru_cache(maxsize=4096)
def descriptor_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int, int] | None:
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
    strides = descriptor_strides(x.shape, x.stride())
    return None if strides is None or pointer % ADDRESS_ALIGNMENT else (pointer, *strides)


def as_operand(x: Tensor) -> Tensor:
    """x [B, NH, S, D] as it lies where a TMA descriptor can address it, else a copy."""
    return _dense(x) if _operand(x) is None else x


def as_state(x: MaybeTensor) -> MaybeTensor:
    """x as it lies where it is contiguous and vector loads can take it, else a copy."""
    if x is None or (x.is_contiguous() and x.data_ptr() % ADDRESS_ALIGNMENT == 0):
        return x
    return _dense(x)


def _dense(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


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
        return self._operand_of(_dense(x)) if found is None else found

    def write(self, result: Tensor) -> Operand:
        """A result [B, NH, S, D] to be written."""
        found = _operand(result)
        return self._operand_of(self._in_place_of(result)) if found is None else found

    def state(self, x: Tensor | None) -> int:
        """Address of x, contiguous and where 16-byte loads can take it; 0 for None."""
        readable = as_state(x)
        if readable is not None and readable is not x:
            self._copies.append(readable)
        return _pointer(readable)

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
