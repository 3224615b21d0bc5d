"""A call, what a backend says about it, and what came of it: plain data."""

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call as backends judge it: metadata, no tensors."""

    device: torch.device  # of q, k and v
    dtype: torch.dtype  # of q, k and v, after autocast
    batch: int  # entries; 1 with packed sequences
    sequences: int  # the leading dimension of the states: batch, or the number of packed sequences
    heads: int  # of q, of one batch entry
    seq: int  # tokens
    dim_qk: int  # the head dim of q and k
    dim_v: int  # that of v
    varlen: bool  # sequences are packed (cu_seqlens is given)
    requires_grad: bool  # a gradient will be recorded
    chunk_size: int  # of the reference and of Triton kernels
    forward_mode: bool = False  # an input has a tangent
    transformed: bool = False  # an input is in a torch.func transform
    batch_invariant: bool = False  # the option of that name

    @property
    def is_empty(self) -> bool:
        return self.batch * self.heads * self.seq == 0


@dataclass(frozen=True)
class Support:
    """Whether a backend serves a call.

    Attributes:
        ok: it does, when asked for by name.
        reason: what stands in the way; with ok, what to know about the result.
        remedy: what to change; empty where nothing helps.
        auto: "auto" may take it too. False for results that are not exact: those are never chosen silently.
        failed: the backend takes such calls, but what serves them could not be built or loaded here.
    """

    ok: bool
    reason: str = ""
    remedy: str = ""
    auto: bool = True
    failed: bool = False

    def __str__(self) -> str:
        verdict = "no" if not self.ok else "yes" if self.auto else "by name only"
        detail = self.reason + (f" ({self.remedy})" if self.remedy else "")
        return f"{verdict}: {detail}" if detail else verdict


SUPPORTED = Support(True)


def together(*refusals: Support | None) -> Support | None:
    """All reasons why a backend does not serve a call, and what to change; None where there is none."""
    found = [refusal for refusal in refusals if refusal is not None]
    if len(found) < 2:
        return found[0] if found else None
    reasons = [refusal.reason for refusal in found]
    remedies = [refusal.remedy for refusal in found if refusal.remedy]
    return Support(False, "; ".join(reasons), "; ".join(remedies), failed=all(x.failed for x in found))


@dataclass(frozen=True)
class Choice:
    """The backend that serves a call, with the verdict on each one that was considered.

    Attributes:
        backend: as it can be passed to `backend=`, for example "reference" or "triton:xl_chunk_128".
        reasons: verdict per backend name, in the order they are tried.
    """

    backend: str
    reasons: dict[str, Support] = field(default_factory=dict)

    def __str__(self) -> str:
        width = max((len(name) for name in self.reasons), default=0)
        table = [f"  {name:<{width}}  {support}" for name, support in self.reasons.items()]
        return "\n".join([self.backend, *table])
