"""Where several layers must agree on data: chunks, segments, dtypes of states, forms."""

from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

# The kernels' modules export these, and a module whose own differ is not loaded (build/instances.py).
CHUNK = 64  # tokens
ANCHOR_CHUNKS = 8  # from one anchor of the backward to the next
STATE_CHUNKS = 2  # from one state that a forward with one decay per token leaves to the next
FLOW_PARTS = 9  # of the flow of gradient through a chunk
DELTA_ANCHOR_CHUNKS = 4  # the same of the delta rule
SEGMENT_CHUNKS = 16  # of a segment of the delta rule's walks over the states
DELTA_SLICE_COLUMNS = 128  # of V, of a CTA of the delta rule's walks for dq and dk
DELTA_DECAY_CHUNKS = 8  # of a CTA of the kernel that makes dg
DELTA_KEYS_WARPS = 4  # of a CTA of the one walk that makes dq, dk and dv: those that make dq and dk
GRADIENTS = {"dq": 0, "dk": 1, "dv": 2}  # codes
GATE_KINDS = {"exponential": 0, "sigmoid": 1, "decay": 2}  # codes
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # codes
DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}  # of kernels' instances
MAX_SLICES = 16  # of V in decoding, each a CTA
ADDRESS_BITS = 48  # of a prepared address: bytes from the start of the tensor whose number is above them
FORMS = ("chunkwise", "parallel", "recurrent")  # of the reference

MaybeTensor: TypeAlias = Tensor | None


class Cut(NamedTuple):
    """How the sequences of a call are cut, as the kernels take it. segments: of all sequences together;
    with packed sequences the numbers that there are for them (segments.cuh): one for each sequence and one
    for every whole segment of tokens. chunks: per segment; the last segment of a sequence may have fewer."""

    segments: int
    chunks: int


class Kept(NamedTuple):
    """What a forward's kernels leave for their backward. tensors: saved by autograd; None where there is
    none. layout: what is in them: plain data."""

    tensors: tuple[MaybeTensor, ...]
    layout: Any = None


def state_dtype(q: Tensor) -> torch.dtype:
    """dtype of states and rows: fp32, or fp64 for fp64 inputs."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def chunk_slots(seq: int, cu_seqlens: MaybeTensor) -> int:
    """Entries per head for what is stored once per chunk; packed sequences begin a chunk each."""
    return (seq + CHUNK - 1) // CHUNK + (0 if cu_seqlens is None else cu_seqlens.shape[0] - 1)


def state_slots(seq: int, cu_seqlens: MaybeTensor) -> int:
    """The same for what is stored once per STATE_CHUNKS chunks."""
    tokens = CHUNK * STATE_CHUNKS
    return (seq + tokens - 1) // tokens + (0 if cu_seqlens is None else cu_seqlens.shape[0] - 1)


def dense_like(x: Tensor, device: str | None = None) -> Tensor:
    """Uninitialised and contiguous, of the shape and dtype of x."""
    return torch.empty_like(x, device=device, memory_format=torch.contiguous_format)


def grads_like(*inputs: MaybeTensor) -> tuple[Any, ...]:
    """Uninitialised gradients, each like its input; None where there is none."""
    return tuple(None if x is None else torch.empty_like(x) for x in inputs)


def present(x: MaybeTensor, q: Tensor) -> Tensor:
    """x, or the empty tensor that stands for none among an op's results."""
    return q.new_empty(0, dtype=state_dtype(q)) if x is None else x


def as_dtype(x: MaybeTensor, dtype: torch.dtype) -> MaybeTensor:
    """x in a dtype; Tensor.to costs a microsecond even where there is nothing to do."""
    return x if x is None or x.dtype == dtype else x.to(dtype)
