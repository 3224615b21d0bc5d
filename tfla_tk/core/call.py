"""What the descriptions of the calls of all families have."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call as backends judge it: metadata, no tensors.

    Attributes:
        device, dtype: of q, k and v, after autocast.
        batch: entries of the batch; 1 with packed sequences.
        sequences: the leading dimension of the states: batch, or the number of packed sequences.
        heads, seq: of q: heads of one batch entry, tokens.
        dim_qk, dim_v: the head dims of q and k, and of v.
        varlen: sequences are packed (cu_seqlens is given).
        chunk_size: of the reference and of Triton kernels.
        requires_grad: a gradient will be recorded.
        forward_mode: an input has a tangent.
        transformed: an input is in a torch.func transform.
        batch_invariant: the option of that name.
    """

    device: torch.device
    dtype: torch.dtype
    batch: int
    sequences: int
    heads: int
    seq: int
    dim_qk: int
    dim_v: int
    varlen: bool
    requires_grad: bool
    chunk_size: int
    forward_mode: bool = False
    transformed: bool = False
    batch_invariant: bool = False

    @property
    def is_empty(self) -> bool:
        """True when there is no token to compute."""
        return self.batch * self.heads * self.seq == 0
