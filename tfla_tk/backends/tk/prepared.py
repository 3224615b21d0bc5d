"""Tensors as kernels take them: addresses, strides, codes of dtypes, copies of what they cannot read; and
launches that are prepared once for all calls of a kind.

A prepared launch lacks nothing but where the tensors of a call begin (kernels/common/launcher.h).
"""

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from tfla_tk.core.layout import ADDRESS_BITS, CHUNK, DTYPES, Cut, Kept, MaybeTensor, chunk_slots
from tfla_tk.core.memo import Memo

Operand = tuple[int, int, int, int]  # address, strides of B, NH and S in elements
Gate = tuple[int, ...]  # the same of [B, NH, S], and the code of the dtype

_RATE_OF_AN_H100 = 3.35e6  # bytes per microsecond
ADDRESS_ALIGNMENT = 16  # bytes: of what TMA and vector loads read
_ROW_ALIGNMENT = 8  # elements: TMA needs rows that start at multiples of 16 bytes


@functools.cache
def multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def memory_rate(device: int) -> float:
    """What the device's memory gives at its peak, in bytes per microsecond."""
    found = torch.cuda.get_device_properties(device)
    # torch tells these since 2.10; a driver may not know them
    kilohertz, bits = getattr(found, "memory_clock_rate", 0), getattr(found, "memory_bus_width", 0)
    # two words a clock
    return kilohertz * 2 * bits / 8e3 or _RATE_OF_AN_H100


def current_stream(device: int) -> int:
    return _raw_stream(device)


# not public: torch.cuda.current_stream wraps the handle in an object, which takes longer
_raw_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda device: torch.cuda.current_stream(device).cuda_stream
)


def pointer(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def narrowed(x: Tensor) -> Tensor:
    """x in a dtype that the decoding kernels read."""
    return x.float() if x.dtype == torch.float64 else x


def gate(x: Tensor) -> Gate:
    return x.data_ptr(), *x.stride(), DTYPES[x.dtype]


@functools.lru_cache(maxsize=4096)
def descriptor_strides(shape: tuple[int, ...], of_x: tuple[int, ...]) -> tuple[int, int, int] | None:
    """Strides of B, NH and S for a TMA descriptor, or None where it cannot address the rows. The strides
    of dimensions of size 1 do not matter, but TMA wants multiples of 16 bytes there too."""
    if shape[-1] > 1 and of_x[-1] != 1:
        return None
    outer = tuple(
        stride if size > 1 else _ROW_ALIGNMENT for size, stride in zip(shape[:-1], of_x[:-1], strict=True)
    )
    if any(stride <= 0 or stride % _ROW_ALIGNMENT for stride in outer):
        return None
    batch, head, row = outer
    return batch, head, row


def operand(x: Tensor) -> Operand | None:
    """Address of x [B, NH, S, D] and its strides for a TMA descriptor; None where it cannot address x."""
    pointer = x.data_ptr()
    found = descriptor_strides(x.shape, x.stride())
    return None if found is None or pointer % ADDRESS_ALIGNMENT else (pointer, *found)


def as_operand(x: Tensor) -> Tensor:
    """x [B, NH, S, D] as it lies where a TMA descriptor can address it, else a copy."""
    return _dense(x) if operand(x) is None else x


def as_state(x: MaybeTensor) -> MaybeTensor:
    """x as it lies where it is contiguous and vector loads can take it, else a copy."""
    if x is None or (x.is_contiguous() and x.data_ptr() % ADDRESS_ALIGNMENT == 0):
        return x
    return _dense(x)


def log_decay(core: Any) -> tuple[int, float]:
    """How the log decay of a `KDACore` or a `RecurrentCore` follows from g: LogDecay in
    kernels/sequence/log_decay.h, and its lower bound, 0 for none."""
    if not core.is_raw:
        return 0, 0.0
    return (1, 0.0) if core.lower_bound is None else (2, core.lower_bound)


def laid_out(q: Tensor, v: Tensor, cu_seqlens: MaybeTensor, *tensors: MaybeTensor) -> tuple[Any, ...]:
    """What launches depend on of all their tensors but for addresses: the device, sizes, strides and
    dtypes."""
    sizes = q.get_device(), q.shape, v.shape, None if cu_seqlens is None else cu_seqlens.shape
    return *sizes, *[None if x is None else (x.stride(), x.dtype) for x in tensors]


def strides(*tensors: MaybeTensor) -> tuple[Any, ...]:
    return tuple(None if x is None else x.stride() for x in tensors)


def _dense(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


# what a launcher has prepared: all but the addresses at which the tensors of a call begin
Launch: TypeAlias = Any
Outputs: TypeAlias = tuple[Tensor, MaybeTensor, Kept | None]  # o, the final state, what is kept
Gradients: TypeAlias = tuple[Any, ...]  # in the order of the inputs; None for what was not asked for

NO_OPERAND: Operand = (0, 0, 0, 0)
NO_GATE: Gate = (0, 0, 0, 0, 0)
_SCRATCH_ALIGNMENT = 256  # bytes
FLOAT = torch.float32.itemsize


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


def parted(core: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The tensors of a call, the last of which is cu_seqlens, and its options."""
    count = core._fields.index("cu_seqlens") + 1
    return core[:count], core[count:]


def layout_of(core: Any) -> Any:
    """All that the launches of a call depend on but for addresses."""
    tensors, options = parted(core)
    return laid_out(core.q, core.v, core.cu_seqlens, *tensors), options


class Forwards:
    """The forwards of a family, each for calls whose tensors lie alike, by what their launches depend on.
    make: `Forward` of a core that is as `readable` leaves it, of output_final_state and keep: a function of
    the core's tensors. It has to look at their addresses, which may be odd. operands: of the core, which a
    TMA descriptor has to address."""

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
        return forward(*parted(read)[0])

    def prepare(self, core: Any, *, output_final_state: bool, keep: bool) -> Callable[..., Any]:
        """`run` of the tensors of all calls whose tensors lie like these."""
        options: dict[str, Any] = {"output_final_state": output_final_state, "keep": keep}
        if readable(core, self._operands) is core:
            return self._make(core, **options)
        _, others = parted(core)
        return lambda *tensors: self.run(core._make((*tensors, *others)), **options)


def left_for(kept: Kept | None, layout: tuple[int, ...], forward: Callable[[], Kept | None]) -> Tensor:
    """What a forward has left for its backward, where the kernels can read it. It is made again where its
    layout is another, or its elements are not as many as that says first."""
    left = kept.tensors[0] if kept is not None and kept.layout == layout else None
    if left is None or left.numel() != layout[0]:
        kept = forward()
        assert kept is not None
        left = kept.tensors[0]
    left = as_state(left)  # a hook on saved tensors may have moved it
    assert left is not None
    return left


class Addresses:
    """Numbers the tensors of a call, in the order in which a launch is told where they begin."""

    def __init__(self) -> None:
        self._count = 0

    def next(self, *, given: bool = True) -> int:
        """The prepared address of the next tensor's first byte, to which bytes may be added; 0 for none."""
        self._count += 1
        return self._count << ADDRESS_BITS if given else 0


def number(core: Any) -> tuple[Any, Addresses]:
    """The prepared addresses of a call's tensors in the place of these, and what numbers further ones."""
    addresses, (tensors, options) = Addresses(), parted(core)
    at = [addresses.next(given=x is not None) for x in tensors]
    return core._make([*at, *options]), addresses


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


def writable(result: Tensor) -> Tensor:
    """A result [B, T, H, D] where the kernels can write it, else a dense tensor, to be copied (`filled`)."""
    is_direct = descriptor_strides(result.shape, result.stride()) is not None
    return result if is_direct else result.new_empty(result.shape)


def writable_state(result: MaybeTensor) -> MaybeTensor:
    """The same of a state: where it is contiguous; None for none."""
    return result if result is None or result.is_contiguous() else result.new_empty(result.shape)


def filled(result: MaybeTensor, written: MaybeTensor) -> MaybeTensor:
    """The result, once what is written for it is there."""
    return result if result is None or written is None or written is result else result.copy_(written)


class Results:
    """Those of calls whose tensors lie alike that are like an input [B, T, H, D] each. likes: these
    inputs. addresses: number the results. operands: what the kernels write, at prepared addresses."""

    def __init__(self, likes: Sequence[Any], addresses: Addresses) -> None:
        results = [torch.empty_like(x, device="meta") for x in likes]
        written = [writable(x) for x in results]
        self._are_direct = are_same(results, written)
        self.operands = [operand_at(addresses.next(), x) for x in written]

    def allocate(self, likes: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
        """The results of a call, and what the kernels write."""
        results = [torch.empty_like(x) for x in likes]
        return results, results if self._are_direct else [writable(x) for x in results]

    @staticmethod
    def fill(results: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        """Once what is written is there."""
        for result, found in zip(results, written, strict=True):
            filled(result, found)


def are_same(tensors: Iterable[Any], others: Iterable[Any]) -> bool:
    """Whether they are the same objects: nothing had to be copied."""
    return all(map(operator.is_, tensors, others))


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
