"""The plan of a backward: its walks, its parts of V, and where its kernels leave what others of them read.

It follows from sizes alone, so calls of equal sizes share it; `backward` allocates and launches by it. With
narrow head dims there is one walk, mlstm_gradients; else there are three, whose kernel is named mlstm_pass
(docs/mlstm-backward.md).
"""

import functools
from types import SimpleNamespace
from typing import NamedTuple

from tfla_tk import build
from tfla_tk.backends.tk import segments
from tfla_tk.backends.tk.prepared import Scratch, aligned
from tfla_tk.build import instances
from tfla_tk.build.instances import Instance
from tfla_tk.core.layout import ANCHOR_CHUNKS, FLOW_PARTS, GATE_KINDS, STATE_CHUNKS, Cut

INT, FLOAT, DOUBLE = 4, 4, 8  # bytes
# Of a part of V: the widest tile of the keys of a walk, to which a part is a share of them.
PART_COLUMNS = instances.MAX_DIM_QK

Sizes = tuple[int, int, int, int, int]  # batch, heads, seq, dim_qk, dim_v


class Options(NamedTuple):
    """The arguments of tfla_tk::mlstm_fwd that are no tensors, and more, of a forward and of its backward.

    keep_states: return states for the backward as the last result. With wide head dims these are those at the
    backward's cuts, where it will cut the sequences: then cut them the same way.
    """

    sigmoid_gate: bool
    normalize: bool
    eps: float
    return_last_states: bool
    return_rows: bool
    batch_invariant: bool = False  # cut sequences by their lengths alone
    keep_states: bool = False
    scale: float | None = None  # of q k^T; None for K^-1/2
    # f is the natural log of a scalar decay, and there is no i; sigmoid_gate is True then, and normalize
    # False
    decay: bool = False
    # q, k, v and h are [B, S, NH, D], h is contiguous, gates are [B, S, NH] or what expands to that
    heads_last: bool = False
    sequential: bool = False  # by the kernel of `instances.mlstm_fwd` of that name, for measurements alone
    needs_df: bool = True  # of the backward: without it di and df come back as None

    @property
    def gate_kind(self) -> int:
        kind = "decay" if self.decay else "sigmoid" if self.sigmoid_gate else "exponential"
        return GATE_KINDS[kind]

    def scale_of(self, dim_qk: int) -> float:
        return dim_qk**-0.5 if self.scale is None else self.scale


class Plan(NamedTuple):
    """How a backward is launched. memory: what kernels of a call leave for others (`make_plan`): prepared
    addresses in one allocation."""

    e_stride: int  # elements from a part's e to the next one's
    is_cut: bool  # there are boundaries between segments
    has_rows: bool  # e of every token is there before the walks; else the walk for dv leaves its dots
    flow_parts: int  # of the flows
    bytes: int  # of the allocation
    memory: SimpleNamespace


def is_narrow(dim_qk: int, dim_v: int) -> bool:
    """Whether one walk makes dq, dk and dv, from states that the forward leaves."""
    return max(dim_qk, dim_v) <= instances.MAX_NARROW


def tile_of_both(dim_qk: int, dim_v: int) -> int:
    return instances.tile_of(max(dim_qk, dim_v), instances.GRADIENTS_TILES)


def tiles_of(dim_qk: int, dim_v: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The tile of the walk for dv, and of those for dq and dk."""
    of_dv = instances.walk_tile("dv", dim_qk, dim_v)
    return of_dv, instances.walk_tile("dq", min(dim_v, PART_COLUMNS), dim_qk)


def instances_of(
    dim_qk: int,
    dim_v: int,
    *,
    half: bool,
    normalize: bool,
    sigmoid_gate: bool,
    decay: bool,
    needs_df: bool = True,
) -> list[Instance]:
    """The kernels of every backward; where sequences are cut it takes those of `instances_of_cut`, too."""
    of_dv, tile = tiles_of(dim_qk, dim_v)
    if is_narrow(dim_qk, dim_v):
        walks = [instances.mlstm_gradients(tile_of_both(dim_qk, dim_v), half, normalize, needs_df)]
    else:
        walks = [
            instances.mlstm_walk("dq and dk", tile, half, normalize),
            instances.mlstm_walk("dv", of_dv, half),
        ]
    return [
        *walks,
        instances.mlstm_bwd_gates(sigmoid_gate, decay),
        *([instances.mlstm_bwd_rows(half)] if normalize else []),
    ]


def instances_of_cut(dim_qk: int, dim_v: int, *, half: bool) -> list[Instance]:
    """What a backward takes besides where sequences are cut."""
    _, tile = tiles_of(dim_qk, dim_v)
    return [instances.mlstm_walk_segments(tile, half), instances.mlstm_bwd_combine()]


@functools.cache
def ctas_of_a_walk(dim_qk: int, dim_v: int) -> int:
    """CTAs that a walk has for one segment of a head: those for dq and dk slices of K times parts of V."""
    _, (_, slice_k) = tiles_of(dim_qk, dim_v)
    if is_narrow(dim_qk, dim_v):
        return 1
    return -(-dim_qk // slice_k) * parts_of(dim_v)


def parts_of(dim_v: int) -> int:
    """Parts of V: the shares of the walks for dq and dk."""
    return -(-dim_v // PART_COLUMNS)


def slices_of_dots(dim_qk: int, dim_v: int) -> tuple[int, int]:
    """Slices of V of the dots that the walk for dv leaves, all and of a part."""
    (_, columns), _ = tiles_of(dim_qk, dim_v)
    return -(-dim_v // columns), PART_COLUMNS // columns


def cut_sequences(
    sizes: Sizes, sequences: int, multiprocessors: int, *, packed: bool, batch_invariant: bool = False
) -> Cut:
    """How sequences are cut: the same for all walks, by the CTAs that dk has for one segment, or batch
    invariant by the length of each sequence alone."""
    _, heads, seq, *dims = sizes
    ctas = heads * ctas_of_a_walk(*dims)
    of = {"packed": packed, "batch_invariant": batch_invariant}
    cut = segments.choose_cut(sequences, seq, ctas, multiprocessors, segments.BACKWARD, **of)
    if batch_invariant or not is_narrow(*dims) or cut.segments == sequences or cut.chunks % STATE_CHUNKS == 0:
        return cut
    # a segment begins with a state of the forward's
    return segments.cut_into(sequences, seq, cut.chunks + 1, packed=packed)


def make_plan(
    sizes: Sizes,
    sequences: int,
    chunk_slots: int,
    cut: Cut,
    memory_at: int,
    options: Options,
    *,
    states_given: bool,
) -> Plan:
    """The plan of calls of these sizes. sequences: of the batch, or packed. chunk_slots: per head, of what
    there is once per chunk. memory_at: the prepared address of the allocation. options: batch invariant, e of
    every token comes from its kernel of rows, whether something is cut or not. states_given: the forward has
    left the states at the boundaries: state_c and state_n are in its workspace, not in this allocation, and
    nobody reads state_decay."""
    kernel = build.load(instances.CHUNKWISE)
    batch, heads, seq, dim_qk, dim_v = sizes
    boundaries = (cut.segments - sequences) * heads
    narrow, normalize = is_narrow(dim_qk, dim_v), options.normalize
    own_states = 0 if states_given or narrow else boundaries
    has_rows = normalize and (narrow or boundaries > 0 or options.batch_invariant)
    row_bytes = aligned(FLOAT * batch * heads * seq) if normalize else 0
    _, tile = tiles_of(dim_qk, dim_v)
    dot_slices, _ = slices_of_dots(dim_qk, dim_v)
    parts = parts_of(dim_v)
    sums = ctas_of_a_walk(dim_qk, dim_v)
    sum_bytes = FLOAT * sums * batch * heads * seq
    inter_bytes = 2 * FLOAT * sums * batch * heads * chunk_slots
    of_walks = batch, heads, dim_v, dim_qk, *tile
    if narrow:
        flow_parts, flow_slots = FLOW_PARTS, chunk_slots
        inter_bytes = anchor_bytes = workspace_bytes = 0
        sum_bytes = sum_bytes if options.needs_df else 0
    else:
        flow_parts, flow_slots = kernel.flow_parts(*of_walks), chunk_slots // ANCHOR_CHUNKS + 1
        anchor_bytes = kernel.anchor_bytes(*of_walks, chunk_slots)
        workspace_bytes = kernel.mlstm_bwd_gates_workspace_bytes(heads, sequences)
    # fp32 but for the decays and the anchors. P: parts of V. A boundary lies between two segments of a head,
    # of packed sequences as many as there can be; uncut sequences have none. One walk takes no dots, state_*,
    # *_inter, anchors, workspace and tickets
    of_memory = {
        # of every chunk as the walks take them, [B, NH, slots]
        "gates": kernel.chunk_gates_bytes() * batch * heads * chunk_slots,
        # of every token, [B, NH, S], where the plan has rows, and of every part, [P, B, NH, S], each aligned
        "log2_w": row_bytes if has_rows else 0,
        "e": parts * row_bytes,
        # dh_t.h_t of every token where it has none, by the slices of "dv", [slices, B, NH, S]
        "dots": FLOAT * dot_slices * batch * heads * seq if normalize and not has_rows else 0,
        # what enters the segments of "dq", [boundaries, K, V] and [boundaries, K], and log2 of the decay over
        # the segment that the walk leaves, [boundaries] fp64
        "state_c": own_states * dim_qk * dim_v * FLOAT,
        "state_n": own_states * dim_qk * FLOAT,
        "state_decay": DOUBLE * boundaries,
        # the same of "dk" and "dv", gradients of states. n has e in it, of which every part of V has its own:
        # [P, boundaries, K]
        "grad_c": boundaries * dim_qk * dim_v * FLOAT,
        "grad_n": parts * boundaries * dim_qk * FLOAT,
        "grad_decay": DOUBLE * boundaries,
        # sums of q_t.dq_t and of k_t.dk_t, of every part of V and slice of K by itself: of every token,
        # [sums, B, NH, S]; and of every chunk the part through the state that entered it, with the squares of
        # the summands, [sums, B, NH, slots, 2]
        "q_dq": sum_bytes,
        "q_dq_inter": inter_bytes,
        "k_dk": sum_bytes,
        "k_dk_inter": inter_bytes,
        # states that "dq" leaves for "dk" at some boundaries between chunks, in the middle of long sequences
        "anchors": anchor_bytes,
        # the exact flow of gradient over these boundaries, [B, NH, anchor slots, flow parts], to be summed
        # over its parts; slots without an anchor are not written. With one walk what it leaves of each
        # chunk's flow, [B, NH, slots, flow parts]
        "flows": FLOAT * batch * heads * flow_slots * flow_parts,
        "workspace": workspace_bytes,  # of the kernels for the gates
        "tickets": 2 * INT,  # by which the CTAs of "dq" and of "dk" count themselves, [2] int32
    }
    scratch = Scratch(memory_at)
    memory = SimpleNamespace(**{name: scratch.take(size) for name, size in of_memory.items()})
    return Plan(row_bytes // FLOAT, boundaries > 0, has_rows, flow_parts, scratch.bytes, memory)
