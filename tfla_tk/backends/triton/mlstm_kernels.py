"""Adapters onto mlstm_kernels' Triton kernels of mLSTM.

A variant is a kernel family with a chunk size, "triton:xl_chunk_128"; without the size, "triton:xl_chunk",
it takes the call's chunk_size. Plain "triton" is `default_variant`.
"""

import importlib
import re
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tfla_tk.backends.triton import installation
from tfla_tk.calls.mlstm import MLSTMCall
from tfla_tk.core.checks import fail, shown_name
from tfla_tk.core.support import SUPPORTED, Support, together
from tfla_tk.ops import mlstm_decode

INT32_LIMIT = 2**31  # elements that an int32 offset reaches

_TRANSFORMED = Support(
    False, "mlstm_kernels has no rules for torch.func transforms", "use backend 'tk' or 'reference'"
)
_MIN_TILE = 16
_MAX_TILE = 64
# Chunk sizes in the order in which `default_variant` tries them: the fastest, the smaller ones for lengths
# that it does not divide, the larger ones for more chunks than a grid or an int32 offset reaches. With chunks
# of 4096 every tensor that int32 offsets reach fits the grid: 2^31 elements are 2^27 tokens of 16, which are
# 32,768 chunks. limit_chunk has no larger ones: a block holds a whole chunk.
_CHUNK_SIZES = {
    "xl_chunk": (128, 64, 32, 16, 256, 512, 1024, 2048, 4096),
    "siging_xl": (128, 64, 32, 16, 256, 512, 1024, 2048, 4096),
    "limit_chunk": (64, 32, 16),
}


class Family(NamedTuple):
    """One mLSTM kernel family of mlstm_kernels and the chunk sizes worth timing."""

    module: str
    function: str
    sigmoid_gate: bool
    chunk_sizes: tuple[int, ...]


FAMILIES = {
    "limit_chunk": Family("triton_limit_chunk", "mlstm_chunkwise__limit_chunk", False, (64,)),
    "xl_chunk": Family("triton_xl_chunk", "mlstm_chunkwise__xl_chunk", False, (64, 128, 256)),
    "siging_xl": Family("triton_xl_chunk_siging", "mlstm_siging_chunkwise__xl_chunk", True, (64, 128, 256)),
}

_STEP_MODULE = "mlstm_kernels.torch.recurrent.triton_step"

# looked up once at import, so that torch.compile sees a constant
MLSTM_KERNELS_MISSING = installation.missing("mlstm_kernels", "mlstm-kernels")


def variants(op: str) -> list[str]:
    """The variants of "mlstm_chunkwise" or "mlstm_siging_chunkwise" that are worth timing, as `backend=`
    takes them."""
    sigmoid_gate = op == "mlstm_siging_chunkwise"
    return [
        f"triton:{name}_{size}"
        for name, family in FAMILIES.items()
        if family.sigmoid_gate == sigmoid_gate
        for size in family.chunk_sizes
    ]


def parse_variant(variant: str, call: MLSTMCall) -> tuple[str, int]:
    """(family, chunk size) of "family" or "family_size"; ValueError for anything else."""
    match = re.fullmatch(r"(.+?)(?:_(\d+))?", variant)
    name, size = (match[1], match[2]) if match else (variant, None)
    if name not in FAMILIES:
        known = [f"triton:{family}" for family in FAMILIES]
        fail("backend", f"'triton:' and one of {', '.join(FAMILIES)}", shown_name(f"triton:{variant}", known))
    return name, int(size) if size else call.chunk_size


def default_variant(call: MLSTMCall) -> tuple[str, int]:
    """The fastest family and chunk size that are correct for the call: 128 where length and grid allow."""
    families = ["siging_xl"] if call.sigmoid_gate else ["xl_chunk", "limit_chunk"]
    for name in families:
        for size in _CHUNK_SIZES[name]:
            if _refusal(call, name, size) is None:
                return name, size
    # none: the smallest chunk tells what is wrong
    return families[-1], 16


def supports_mlstm(call: MLSTMCall, variant: str | None = None) -> Support:
    """Whether mlstm_kernels serves the call correctly; gradients that are not exact are "by name only"."""
    name, chunk_size = default_variant(call) if variant is None else parse_variant(variant, call)
    refusal = together(_TRANSFORMED if call.transformed else None, _refusal(call, name, chunk_size))
    if refusal is not None:
        return refusal
    if installation.is_interpreted(call.device):
        return installation.IN_THE_INTERPRETER
    inexact = ""
    if call.requires_grad and call.normalize:
        inexact = "its gradients leave out the normaliser: exact only where a scale-invariant norm follows h"
    elif call.requires_grad and call.return_last_states:
        inexact = "its forget gate gradient leaves out the last state"
    remedy = "name the backend to use it nevertheless"
    return Support(True, inexact, remedy, auto=False) if inexact else SUPPORTED


def mlstm(call: MLSTMCall, variant: str | None, *tensors: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    """h [B, NH, S, V] and the last state, (c, n, m) or with the sigmoid gate (c, n); () unless asked for.
    tensors: q, k, v, i, f, c_initial, n_initial, m_initial, and cu_seqlens, which is None: `supports_mlstm`
    refuses variable length."""
    *tokens, c_initial, n_initial, m_initial, _ = tensors
    name, chunk_size = default_variant(call) if variant is None else parse_variant(variant, call)
    family = FAMILIES[name]
    function = getattr(importlib.import_module(_module_of(name)), family.function)
    if c_initial is not None and n_initial is None:
        # the unnormalised kernel takes an n and ignores it
        n_initial = c_initial.new_zeros(c_initial.shape[:3])
    states = {"c_initial": c_initial, "n_initial": n_initial, "m_initial": m_initial}
    options: dict[str, Any] = {key: None if t is None else t.float() for key, t in states.items()}
    options |= {"return_last_states": call.return_last_states, "eps": call.eps, "chunk_size": chunk_size}
    if name != "limit_chunk":
        options["recompute_states_in_bw"] = call.recompute_states
    if call.sigmoid_gate:
        options["normalize"] = call.normalize
    # its launches go to the current device
    device = torch.cuda.device(call.device) if call.device.type == "cuda" else nullcontext()
    with device, torch.autocast(call.device.type, enabled=False):
        out = function(*tokens, **options)
    if not call.return_last_states:
        return out, ()
    h, last = out
    if not call.normalize:
        # comes back uninitialised
        last = (last[0], torch.zeros_like(last[1]))
    return h, last


def load(kernel: str, call: MLSTMCall, variant: str | None = None) -> Support:
    if kernel != "mlstm":
        return installation.load_module(_STEP_MODULE)
    name, _ = default_variant(call) if variant is None else parse_variant(variant, call)
    return installation.load_module(_module_of(name))


def _module_of(name: str) -> str:
    return f"mlstm_kernels.torch.chunkwise.{FAMILIES[name].module}"


def supports_mlstm_step(call: MLSTMCall, variant: str | None = None) -> Support:
    """Whether mlstm_kernels' Triton step serves one token; ValueError for a variant: it has one form."""
    if variant is not None:
        fail("backend", "'triton' for a step", repr(f"triton:{variant}"))
    found = [installation.unusable(call.device, MLSTM_KERNELS_MISSING), _refusal_of_dtype(call)]
    if call.sigmoid_gate:
        reason = "mlstm_kernels has no step with sigmoid input gate"
        found.append(Support(False, reason, "use backend='reference'"))
    if call.transformed:
        found.append(_TRANSFORMED)
    if call.requires_grad:
        remedy = "use torch.no_grad() or backend='reference'"
        found.append(Support(False, "its step has no gradients", remedy))
    for label, dim in (("DHQK", call.dim_qk), ("DHHV", call.dim_v)):
        if dim < _MIN_TILE or dim % min(_MAX_TILE, _next_power_of_2(dim)) != 0:
            reason = f"{label} = {dim} makes the step read and write out of bounds"
            found.append(Support(False, reason, f"pad {label} to 16, 32, 64 or a multiple of 64"))
    refusal = together(*found)
    if refusal is not None:
        return refusal
    elements = call.batch * call.heads * call.dim_qk * call.dim_v
    if elements > INT32_LIMIT:
        return Support(False, f"its int32 offsets wrap: {elements:,} elements in c", "split the batch")
    rows = call.batch * call.heads
    if rows > installation.GRID_LIMIT:
        return installation.too_many("batch x heads", rows, "split the batch or the heads")
    if installation.is_interpreted(call.device):
        return installation.IN_THE_INTERPRETER
    return SUPPORTED


def mlstm_step(call: MLSTMCall, variant: str | None, *tensors: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    """h [B, NH, V] and the next state (c, n, m) as the call wants it, by mlstm_kernels' Triton step. tensors:
    q, k, v, i, f, c, n, m."""
    module = importlib.import_module(_STEP_MODULE)
    device = torch.cuda.device(call.device) if call.device.type == "cuda" else nullcontext()
    with device:
        h, state = module.mlstm_recurrent_step__triton(*tensors, eps=call.eps, dtype_state=torch.float32)
    return h, mlstm_decode.stored(call, state, tensors[5:])


def supports_mlstm_sequence(call: MLSTMCall, variant: str | None = None) -> Support:
    """Never; ValueError for a variant."""
    if variant is not None:
        fail("backend", "'triton' for a few tokens", repr(f"triton:{variant}"))
    reason = "mlstm_kernels has no Triton kernel for a few tokens"
    return Support(False, reason, "use mlstm_chunkwise, mlstm_step or backend='reference'")


def _refusal(call: MLSTMCall, name: str, chunk_size: int) -> Support | None:
    family = FAMILIES[name]
    if family.sigmoid_gate != call.sigmoid_gate:
        gate = "sigmoid" if family.sigmoid_gate else "exponential"
        known = [each for each, other in FAMILIES.items() if other.sigmoid_gate == call.sigmoid_gate]
        return Support(False, f"{name} has the {gate} input gate", f"variants: {', '.join(known)}")
    found = [installation.unusable(call.device, MLSTM_KERNELS_MISSING), _refusal_of_dtype(call)]
    if call.varlen:
        remedy = "call once per sequence, or use backend 'tk' or 'reference'"
        found.append(Support(False, "mlstm_kernels has no variable length", remedy))
    for label, dim in (("DHQK", call.dim_qk), ("DHHV", call.dim_v)):
        if dim < _MIN_TILE:
            reason = f"{label} = {dim} is below Triton's smallest tile"
            found.append(Support(False, reason, f"pad {label} to {_MIN_TILE}"))
    if call.dim_qk % min(_MAX_TILE, _next_power_of_2(call.dim_qk)) != 0:
        reason = f"DHQK = {call.dim_qk} makes the kernels read and write out of bounds"
        found.append(Support(False, reason, "pad DHQK to 16, 32, 64 or a multiple of 64"))
    of_gradients = None
    if name == "xl_chunk" and call.requires_grad and chunk_size > 128 and call.seq > chunk_size:
        reason = f"xl_chunk computes wrong gradients for chunk_size = {chunk_size} > 128"
        of_gradients = Support(False, reason, "use chunk_size 64 or 128, or torch.no_grad()")
    return together(*found) or together(_length_refusal(call, name, chunk_size), of_gradients)


def _refusal_of_dtype(call: MLSTMCall) -> Support | None:
    if call.dtype != torch.float64:
        return None
    return Support(False, "Triton kernels have no float64", "use float32 or backend='reference'")


def _length_refusal(call: MLSTMCall, name: str, chunk_size: int) -> Support | None:
    seq = call.seq
    if chunk_size < _MIN_TILE or chunk_size & (chunk_size - 1):
        return Support(False, f"chunk_size = {chunk_size}", "use a power of two of at least 16")
    if name != "limit_chunk" and _MIN_TILE <= seq < 128 and seq & (seq - 1) == 0:
        # one chunk of S, whatever chunk_size says
        chunk_size = seq
    elif name != "limit_chunk" and seq < 128:
        return Support(False, f"{name} needs S >= 128 or a power of two of at least 16, S = {seq}", "pad S")
    if seq % chunk_size != 0:
        return Support(False, f"S = {seq} is no multiple of the chunk size {chunk_size}", "pad S")
    rows = call.batch * call.heads
    if rows > installation.GRID_LIMIT:
        return installation.too_many("batch x heads", rows, "split the batch or the heads")
    states = rows * (seq // chunk_size + 1) * call.dim_qk * call.dim_v
    # limit_chunk sums dv over slices of the query head dimension
    slices = call.dim_qk // _MAX_TILE if name == "limit_chunk" and call.requires_grad else 1
    largest = max(states, rows * seq * max(call.dim_qk, max(slices, 1) * call.dim_v))
    if largest > INT32_LIMIT:
        reason = f"its int32 offsets wrap: {largest:,} elements in one tensor"
        return Support(False, reason, "split the batch or the heads")
    return _grid_refusal(name, rows, seq // chunk_size, chunk_size)


def _grid_refusal(name: str, rows: int, chunks: int, chunk_size: int) -> Support | None:
    """Whether a launch exceeds CUDA's grid by its chunks: its blocks along y and z, forward and backward.
    The kernels over the states have batch x heads along z. Those over the outputs and gradients have, in
    limit_chunk, the chunks along y and batch x heads along z; in the others the tiles of a chunk along y
    and chunks x batch x heads along z. Head dimensions lie along x, or along y in tiles of 64. rows: batch
    times heads. chunks: of one sequence."""
    if name == "limit_chunk":
        return (
            installation.too_many("chunks", chunks, "use larger chunks")
            if chunks > installation.GRID_LIMIT
            else None
        )
    if chunks * rows > installation.GRID_LIMIT:
        remedy = "use larger chunks, or split the batch or the heads"
        return installation.too_many("chunks x batch x heads", chunks * rows, remedy)
    tiles = chunk_size // min(chunk_size, _MAX_TILE)
    return (
        installation.too_many("tiles of a chunk", tiles, "use smaller chunks")
        if tiles > installation.GRID_LIMIT
        else None
    )


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
