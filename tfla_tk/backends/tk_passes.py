"""The plan of an mLSTM backward: its parts of V, and where its kernels leave what others of them read.

It follows from sizes alone, so calls of equal sizes share it; `tk_backward` allocates and launches by it.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

from tfla_tk import build
from tfla_tk.backends import segments
from tfla_tk.backends.segments import Cut
from tfla_tk.build import instances

ALIGNMENT = 256  # bytes
FLOAT, DOUBLE = 4, 8  # bytes
SUM_COLUMNS = 64  # kSumColumns of params_pass.h
ANCHOR_CHUNKS = 8  # kAnchorChunks of params.h

Sizes = tuple[int, int, int, int, int]  # batch, heads, seq, dim_qk, dim_v


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the columns of v, h and dh, as many as a pass for dq or dk takes.

    Attributes:
        number: 0 is the first part.
        start, width: its columns.
        kernel: the module of its passes.
        state: bytes from the start of a state [N, NH, K, V] to its columns.
        rows, dots, norms, sums, inter, flows: bytes from where `Memory` has something of the first part to
            where it has that of this one: log2_w and e, dots, grad_n, the row sums, their inter, and flows.
        dot_slices: slices of dots that are of its columns.
    """

    number: int
    start: int
    width: int
    kernel: ModuleType
    state: int
    rows: int
    dots: int
    norms: int
    sums: int
    inter: int
    flows: int
    dot_slices: int


class Memory(NamedTuple):
    """What kernels of a call leave for others: addresses, in a plan bytes from the start of the allocation.

    fp32 but for the decays and the anchors. P: parts of V. A boundary lies between two segments of a head, of
    packed sequences as many as there can be; uncut sequences have none.

    Attributes:
        log2_w, e: of every token, [P, B, NH, S], each part aligned; none without normaliser, when both are 0.
        dots: dh_t.h_t of every token where nothing is cut, by the slices of "dv", [slices, B, NH, S]; none
            without normaliser.
        state_c, state_n, state_decay: what enters the segments of "dq", [boundaries, K, V] and
            [boundaries, K], and log2 of the decay over the segment that the walk leaves, [boundaries] fp64.
        grad_c, grad_n, grad_decay: the same of "dk" and "dv", gradients of states. n has e in it, which every
            part of V has its own of: [P, boundaries, K].
        q_dq, q_dq_inter, k_dk, k_dk_inter: sums of q_t.dq_t and of k_t.dk_t, of every part of V and 64
            columns of K by itself: of every token, [sums, B, NH, S]; and of every chunk the part through the
            state that entered it, with the squares of the summands, [sums, B, NH, slots, 2].
        anchors: states that "dq" leaves for "dk" at some boundaries between chunks, in the middle of long
            sequences; every part of V overwrites them.
        flows: the exact flow of gradient over these boundaries, [B, NH, anchor slots, flow parts], to be
            summed over its parts; slots without an anchor are not written.
        workspace: of the kernels for the gates.
    """

    log2_w: int
    e: int
    dots: int
    state_c: int
    state_n: int
    state_decay: int
    grad_c: int
    grad_n: int
    grad_decay: int
    q_dq: int
    q_dq_inter: int
    k_dk: int
    k_dk_inter: int
    anchors: int
    flows: int
    workspace: int


@dataclass(frozen=True, slots=True)
class Plan:
    """How a backward is launched.

    Attributes:
        around, dv: the modules of the kernels around the passes and of the pass for dv.
        parts: of V, with the modules of the other passes.
        cut: of the sequences into segments.
        is_cut: whether there are boundaries between segments.
        sums, flow_parts: of the row sums and of the flows, as `Memory` has them.
        bytes: of the allocation.
        offsets: of what it holds.
    """

    around: ModuleType
    dv: ModuleType
    parts: tuple[Part, ...]
    cut: Cut
    is_cut: bool
    sums: int
    flow_parts: int
    bytes: int
    offsets: Memory

    def memory_at(self, address: int) -> Memory:
        """The addresses in an allocation."""
        return Memory._make([address + offset for offset in self.offsets])


@functools.cache
def instances_of(dim_qk: int, dim_v: int) -> tuple[build.Instance, ...]:
    """Around the passes, the pass for dv, and that for dq and dk over each part of V: both in one module."""
    of_parts = (instances.mlstm_pass("dq", width, dim_qk) for _, width in _columns(dim_v))
    return instances.mlstm_bwd(), instances.mlstm_pass("dv", dim_qk, dim_v), *of_parts


@functools.cache
def slices_of_a_pass(dim_qk: int, dim_v: int) -> int:
    """CTAs that the pass for dk has for one segment of a head: slices of K."""
    _, width = _columns(dim_v)[0]
    instance = instances.mlstm_pass("dk", width, dim_qk)
    return -(-dim_qk // _slice(instance))


def cut_sequences(sizes: Sizes, sequences: int, multiprocessors: int, *, packed: bool) -> Cut:
    """How sequences are cut: the same for all passes, by the CTAs that dk has for one segment."""
    _, heads, seq, *dims = sizes
    find = segments.cut_packed if packed else segments.cut
    return find(sequences, seq, heads * slices_of_a_pass(*dims), multiprocessors, segments.BACKWARD)


@functools.lru_cache(maxsize=1024)
def make_plan(
    kernels: tuple[ModuleType, ...],
    sizes: Sizes,
    sequences: int,
    chunk_slots: int,
    cut: Cut,
    *,
    normalize: bool,
    states_given: bool = False,
) -> Plan:
    """The plan of calls of these sizes.

    Args:
        kernels: the modules of `instances_of`.
        sequences: of the batch, or packed.
        chunk_slots: per head, of what there is once per chunk.
        normalize: whether there is a normaliser.
        states_given: the forward has left the states at the boundaries: state_c and state_n are in its
            workspace, not in this allocation, and nobody reads state_decay.
    """
    around, dv, *of_parts = kernels
    batch, heads, seq, dim_qk, dim_v = sizes
    boundaries = (cut.segments - sequences) * heads
    own_states = 0 if states_given else boundaries
    row_bytes = _aligned(FLOAT * batch * heads * seq) if normalize else 0
    norm_bytes = FLOAT * boundaries * dim_qk
    dots_slice = _slice(instances.mlstm_pass("dv", dim_qk, dim_v))
    dots_bytes = FLOAT * batch * heads * seq
    sums = -(-dim_qk // SUM_COLUMNS)
    sum_bytes = FLOAT * sums * batch * heads * seq
    inter_bytes = 2 * FLOAT * sums * batch * heads * chunk_slots
    parts = []
    flow_parts = 0
    for number, ((start, width), kernel) in enumerate(zip(_columns(dim_v), of_parts, strict=True)):
        parts.append(
            Part(
                number,
                start,
                width,
                kernel,
                state=FLOAT * start,
                rows=number * row_bytes,
                dots=start // dots_slice * dots_bytes,
                norms=number * norm_bytes,
                sums=number * sum_bytes,
                inter=number * inter_bytes,
                flows=FLOAT * flow_parts,
                dot_slices=-(-width // dots_slice),
            )
        )
        flow_parts += kernel.flow_parts(dim_qk)
    count = len(parts)
    taken = Memory(
        log2_w=count * row_bytes,
        e=count * row_bytes,
        dots=-(-dim_v // dots_slice) * dots_bytes if normalize and not boundaries else 0,
        state_c=own_states * dim_qk * dim_v * FLOAT,
        state_n=own_states * dim_qk * FLOAT,
        state_decay=DOUBLE * own_states,
        grad_c=boundaries * dim_qk * dim_v * FLOAT,
        grad_n=count * norm_bytes,
        grad_decay=DOUBLE * boundaries,
        q_dq=count * sum_bytes,
        q_dq_inter=count * inter_bytes,
        k_dk=count * sum_bytes,
        k_dk_inter=count * inter_bytes,
        anchors=max(kernel.anchor_bytes(batch, heads, chunk_slots, dim_qk) for kernel in of_parts),
        flows=FLOAT * batch * heads * (chunk_slots // ANCHOR_CHUNKS + 1) * flow_parts,
        workspace=around.mlstm_bwd_gates_workspace_bytes(heads, sequences),
    )
    *offsets, size = itertools.accumulate(map(_aligned, taken), initial=0)
    return Plan(
        around,
        dv,
        tuple(parts),
        cut,
        boundaries > 0,
        count * sums,
        flow_parts,
        size,
        Memory._make(offsets),
    )


def _slice(instance: build.Instance) -> int:
    """Columns of the values that a CTA of a pass owns."""
    return int(dict(instance.defines)["TFLA_SLICE"])


def _columns(dim_v: int) -> list[tuple[int, int]]:
    """Start and width of every part of V."""
    most = instances.MAX_DIM_QK
    return [(start, min(most, dim_v - start)) for start in range(0, dim_v, most)]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
