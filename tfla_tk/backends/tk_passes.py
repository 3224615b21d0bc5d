"""What the passes of the mLSTM backward share and hand on: gates, cuts, boundaries, row sums, anchors.

Described as the kernels take them; `tk_backward` allocates them and has them filled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tfla_tk.backends import segments
from tfla_tk.ops import MaybeTensor

Rows = tuple[Tensor, Tensor]  # log2_w and e of every token, [B, NH, S] fp32
State = tuple[MaybeTensor, MaybeTensor]  # c and n, or their gradients
StateGradient = tuple[MaybeTensor, MaybeTensor, MaybeTensor, MaybeTensor]  # c, dc, n, dn
Boundary = tuple[Tensor, MaybeTensor, Tensor]  # `Boundaries` of one part of v


@dataclass(frozen=True)
class Gates:
    """What every pass reads of the forward.

    Attributes:
        i, f: [B, NH, S] pre-activations of the gates, any strides, fp32, bf16 or fp16.
        chunk_m: [B, NH, slots] fp64, as the forward op returns it; None with the sigmoid gate.
        cu_seqlens: contiguous offsets [N + 1] of packed sequences, or None.
        scale: of q k^T.
    """

    i: Tensor
    f: Tensor
    chunk_m: MaybeTensor
    cu_seqlens: MaybeTensor
    scale: float

    @property
    def sigmoid_gate(self) -> bool:
        return self.chunk_m is None

    @property
    def offsets(self) -> tuple[int, bool, int]:
        """cu_seqlens for the kernels: address or 0, whether 64-bit, number of sequences."""
        if self.cu_seqlens is None:
            return 0, False, self.i.shape[0]
        return self.cu_seqlens.data_ptr(), self.cu_seqlens.dtype == torch.int64, self.cu_seqlens.numel() - 1


@dataclass(frozen=True)
class Walk:
    """What all passes of a call have in common.

    Attributes:
        gates: what they read of the forward.
        cut: of the sequences into segments.
        dim_v: columns of every state, of which a pass may see a part.
    """

    gates: Gates
    cut: segments.Cut
    dim_v: int

    @property
    def segments(self) -> tuple[int, bool, int, int, int]:
        """The cut for the kernels: the offsets, all segments together, chunks of one."""
        return (*self.gates.offsets, self.cut.segments, self.cut.chunks)

    @property
    def slots(self) -> int:
        """Boundaries between segments times heads; an upper bound with packed sequences."""
        *_, sequences = self.gates.offsets
        return (self.cut.segments - sequences) * self.gates.i.shape[1]


@dataclass(frozen=True)
class Boundaries:
    """What enters every segment of a pass that follows another one in its walk: states, or their gradients.

    Attributes:
        c: [slots, K, V] fp32.
        n: [P, slots, K] fp32, of each part of v its own, or one for all.
        log2_decay: [slots] fp64, of the segment that the walk leaves there.
    """

    c: Tensor
    n: Tensor
    log2_decay: Tensor

    def made_by(self, number: int, columns: slice) -> Boundary:
        """What the segments kernel over one part of v writes."""
        n = self.n[number] if number < self.n.shape[0] else None
        return self.c[..., columns], n, self.log2_decay

    def read_by(self, number: int, columns: slice) -> Boundary:
        """What the pass over one part of v begins its segments with."""
        return self.c[..., columns], self.n[min(number, self.n.shape[0] - 1)], self.log2_decay


@dataclass(frozen=True)
class RowSums:
    """Sums of q_t.dq_t or k_t.dk_t, fp32: of every part of v and 64 columns of K by itself.

    Attributes:
        whole: of every token, [P, B, NH, S].
        inter: the part through the state that entered a chunk of 64 tokens, of all its tokens together,
            and the squares of the summands, [P, B, NH, slots, 2].
        parts: of v.
    """

    whole: Tensor
    inter: Tensor
    parts: int

    def part(self, number: int) -> tuple[Tensor, Tensor]:
        """Where the pass over one part of v writes its sums."""
        size = self.whole.shape[0] // self.parts
        own = slice(number * size, (number + 1) * size)
        return self.whole[own], self.inter[own]


@dataclass(frozen=True)
class Anchors:
    """The exact flow of gradient over some boundaries between chunks, in the middle of long sequences.

    Attributes:
        states: uint8, what "dq" leaves there for "dk"; every part of v overwrites it.
        flows: [B, NH, slots, P] fp32, to be summed over P; slots without an anchor are not written.
        parts: how many of P each part of v writes.
    """

    states: Tensor
    flows: Tensor
    parts: tuple[int, ...]

    def part(self, number: int) -> tuple[int, int, int]:
        """The passes' argument for one part of v."""
        flows = self.flows.data_ptr() + self.flows.element_size() * sum(self.parts[:number])
        return self.states.data_ptr(), flows, self.flows.shape[-1]
