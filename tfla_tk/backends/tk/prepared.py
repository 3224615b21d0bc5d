"""Launches that are prepared once for all calls of a kind, and what calls of every family hand to them.

A prepared launch lacks nothing but where the tensors of a call begin (kernels/common/prepared_launches.h).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from tfla_tk.backends.tk.operands import (
    ADDRESS_ALIGNMENT,
    Gate,
    Operand,
    as_operand,
    as_state,
    descriptor_strides,
    laid_out,
)
from tfla_tk.core.layout import ADDRESS_BITS, CHUNK, DTYPES, Cut, Kept, MaybeTensor, chunk_slots
from tfla_tk.core.memo import Memo

# what a launcher has prepared: all but the addresses at which the tensors of a call begin
Launch: TypeAlias = Any

NO_OPERAND: Operand = (0, 0, 0, 0)
NO_GATE: Gate = (0, 0, 0, 0, 0)
_SCRATCH_ALIGNMENT = 256  # bytes


class Sizes(NamedTuple):
    """Of a call in [B, T, H, D], as the kernels are told them. Heads are those of v."""

    sequences: int
    slots: int  # of chunks, per head
    batch: int
    heads: int
    seq: int
    dim_k: int
    dim_v: int
    group: int  # heads that share one of q and k
    half: bool
    device: int
    packed_64bit: bool
    packed: bool = False
    batch_invariant: bool = False
    decays: bool = True  # has gates
    trains: bool = False  # a backward, or a forward that keeps what one reads
    walks_cut: Cut | None = None  # of all walks, where they have the same

    @classmethod
    def of(cls, core: Any, *, trains: bool = False) -> Any:
        q, v, offsets = core.q, core.v, core.cu_seqlens
        batch, seq, heads, dim_v = v.shape
        return cls(
            sequences=batch if offsets is None else offsets.shape[0] - 1,
            slots=chunk_slots(seq, offsets),
            batch=batch,
            heads=heads,
            seq=seq,
            dim_k=q.shape[3],
            dim_v=dim_v,
            group=heads // q.shape[2],
            half=q.dtype == torch.float16,
            device=q.get_device(),
            packed_64bit=offsets is not None and offsets.dtype == torch.int64,
            packed=offsets is not None,
            batch_invariant=core.batch_invariant,
            decays=core.g is not None,
            trains=trains,
        )

    @property
    def uncut(self) -> Cut:
        """Every sequence is one segment."""
        return Cut(self.sequences, self.seq // CHUNK + 1)

    def with_offsets(self, address: int, cut: Cut | None = None) -> tuple[int, ...]:
        """As the kernels take them, with the address of the offsets, 0 for none, and a cut."""
        chosen = cut or self.walks_cut or self.uncut
        return (address, self.packed_64bit, self.sequences, *chosen, *self.of_tensors)

    @property
    def of_tensors(self) -> tuple[int, ...]:
        """What the kernels are told behind a cut."""
        sizes = self.batch, self.heads, self.seq, self.dim_k, self.dim_v
        return *sizes, self.group, self.half, self.device

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        return self.sequences, self.heads, self.dim_k, self.dim_v


def readable(
    core: Any, operands: Sequence[str] = ("q", "k", "v"), states: Sequence[str] = ("initial_state",)
) -> Any:
    """The call of a family itself where the kernels can take its tensors as they lie, else with copies."""
    offsets = core.cu_seqlens
    read = core._replace(
        **{name: as_operand(getattr(core, name)) for name in operands},
        **{name: as_state(getattr(core, name)) for name in states},
        cu_seqlens=None if offsets is None else offsets.contiguous(),
    )
    return core if are_same(read, core) else read


def layout_of(core: Any) -> Any:
    """All that the launches of a call depend on but for addresses."""
    count = core._fields.index("cu_seqlens") + 1
    return laid_out(core.q, core.v, core.cu_seqlens, *core[:count]), core[count:]


class Forwards:
    """The forwards of a family, each for calls whose tensors lie alike, by what their launches depend on.

    Args:
        make: `Forward` of a core that is as `readable` leaves it, of output_final_state and keep: a function
            of the core's tensors. It has to look at their addresses, which may be odd.
        operands: of the core, which a TMA descriptor has to address.
    """

    def __init__(self, make: Callable[..., Callable[..., Any]], operands: Sequence[str]) -> None:
        self._make, self._operands = make, operands
        self._known: Memo[Callable[..., Any]] = Memo()
        self.clear = self._known.clear

    def run(self, core: Any, *, output_final_state: bool, keep: bool) -> Any:
        """The forward of a call; tensors that the kernels cannot read are copied."""
        read = readable(core, self._operands)
        options = {"output_final_state": output_final_state, "keep": keep}
        key = output_final_state, keep, layout_of(read)
        forward = self._known.of(key, lambda: self._make(read, **options))
        return forward(*read[: core._fields.index("cu_seqlens") + 1])

    def prepare(self, core: Any, *, output_final_state: bool, keep: bool) -> Callable[..., Any]:
        """`run` of the tensors of all calls whose tensors lie like these."""
        options: dict[str, Any] = {"output_final_state": output_final_state, "keep": keep}
        if readable(core, self._operands) is core:
            return self._make(core, **options)
        others = core[core._fields.index("cu_seqlens") + 1 :]
        return lambda *tensors: self.run(core._make((*tensors, *others)), **options)


def left_for(kept: Kept | None, layout: tuple[int, ...], forward: Callable[[], Kept | None]) -> Tensor:
    """What a forward has left for its backward, where the kernels can read it. It is made again where its
    layout is another, or its elements are not as many as that says first."""
    left = kept.tensors[0] if kept is not None and kept.layout == layout else None
    if left is None or left.numel() != layout[0]:
        kept = forward()
        assert kept is not None
        left = kept.tensors[0]
    assert left is not None
    # by a hook on saved tensors
    is_moved = left.data_ptr() % ADDRESS_ALIGNMENT or not left.is_contiguous()
    return left.clone(memory_format=torch.contiguous_format) if is_moved else left


class Addresses:
    """Numbers the tensors of a call, in the order in which a launch is told where they begin."""

    def __init__(self) -> None:
        self._count = 0

    def next(self, *, given: bool = True) -> int:
        """The prepared address of the next tensor's first byte, to which bytes may be added; 0 for none."""
        self._count += 1
        return self._count << ADDRESS_BITS if given else 0


def number(core: Any) -> tuple[Any, Addresses]:
    """The prepared addresses of a call's tensors, the last of which is cu_seqlens, in the place of these,
    and what numbers further ones."""
    addresses, count = Addresses(), core._fields.index("cu_seqlens") + 1
    at = [addresses.next(given=x is not None) for x in core[:count]]
    return core._make([*at, *core[count:]]), addresses


def aligned(size: int) -> int:
    """So many bytes, up to where the next place of an allocation begins."""
    return -(-size // _SCRATCH_ALIGNMENT) * _SCRATCH_ALIGNMENT


class Scratch:
    """Places in one allocation, at a prepared address, of what kernels of a call leave for others. bytes: of
    the allocation."""

    def __init__(self, address: int) -> None:
        self._address = address
        self.bytes = 0

    def take(self, size: int) -> int:
        """The prepared address of the next so many bytes; 0 for none."""
        at = self._address + self.bytes
        self.bytes += aligned(size)
        return at if size else 0

    def take_dense(self, size: tuple[int, ...], element_bytes: int) -> Operand:
        """The next place of a dense tensor [B, T, H, D]."""
        like = torch.empty(size, device="meta")
        return operand_at(self.take(like.numel() * element_bytes), like)


class Result(NamedTuple):
    """A result like an input, and what the kernels write: the same, or a dense tensor to be copied."""

    result: Tensor
    written: Tensor

    @staticmethod
    def like(x: Tensor, device: str | None = None) -> "Result":
        """Uninitialised, like x [B, T, H, D] in memory order."""
        return Result.of(torch.empty_like(x, device=device))

    @staticmethod
    def of(result: Tensor) -> "Result":
        """With itself, or a dense tensor, to be written."""
        if descriptor_strides(result.shape, result.stride()) is None:
            return Result(result, result.new_empty(result.shape))
        return Result(result, result)

    @staticmethod
    def of_state(result: Tensor) -> "Result":
        """With itself where it is contiguous, or a contiguous tensor, to be written."""
        return Result(result, result if result.is_contiguous() else result.new_empty(result.shape))

    @property
    def is_direct(self) -> bool:
        return self.written is self.result

    def filled(self) -> Tensor:
        """The result, once what is written is there."""
        return self.result if self.is_direct else self.result.copy_(self.written)


class Results:
    """Those of calls whose tensors lie alike that are like an input [B, T, H, D] each. likes: these
    inputs. addresses: number the results. operands: what the kernels write, at prepared addresses."""

    def __init__(self, likes: Sequence[Any], addresses: Addresses) -> None:
        results = [Result.like(x, "meta") for x in likes]
        self._are_direct = all(x.is_direct for x in results)
        self.operands = [operand_at(addresses.next(), x.written) for x in results]

    def allocate(self, likes: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
        """The results of a call, and what the kernels write."""
        results = [torch.empty_like(x) for x in likes]
        return results, results if self._are_direct else [Result.of(x).written for x in results]

    @staticmethod
    def fill(results: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        """Once what is written is there."""
        for result, found in zip(results, written, strict=True):
            if found is not result:
                result.copy_(found)


def are_same(tensors: Iterable[Any], others: Iterable[Any]) -> bool:
    """Whether they are the same objects: nothing had to be copied."""
    return all(x is y for x, y in zip(tensors, others, strict=True))


def starts(*tensors: MaybeTensor) -> list[int]:
    """Where the tensors of a call begin, in the order of their numbers; 0 for none."""
    return [0 if x is None else x.data_ptr() for x in tensors]


def operand_at(address: int, x: Tensor) -> Operand:
    """x [B, T, H, D], which a TMA descriptor can address, at a prepared address."""
    strides = descriptor_strides(x.shape, x.stride())
    assert strides is not None
    batch, row, head = strides
    return address, batch, head, row


def gate_at(address: int, x: MaybeTensor) -> Gate:
    """x [B, T, HV] at a prepared address."""
    if x is None:
        return NO_GATE
    batch, row, head = x.stride()
    return address, batch, head, row, DTYPES[x.dtype]


def per_head_at(address: int, x: MaybeTensor, channels: int = 1) -> Gate:
    """x [HV channels] at a prepared address; channels of a head are its rows."""
    return NO_GATE if x is None else (address, 0, channels * x.stride(0), x.stride(0), DTYPES[x.dtype])
