"""The launches of a backward: what its kernels are given, address by address.

They are prepared once for all calls of a kind, so the addresses here are prepared ones, `Addresses`.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

from tfla_tk import build
from tfla_tk.backends.tk.operands import Gate, Operand
from tfla_tk.backends.tk.prepared import Launch
from tfla_tk.backends.tk.scalar_gate import walks
from tfla_tk.backends.tk.scalar_gate.forward import Options
from tfla_tk.backends.tk.scalar_gate.walks import INT, PART_COLUMNS, Memory, Plan, Sizes, tile_of_both
from tfla_tk.build import instances
from tfla_tk.core.layout import ANCHOR_CHUNKS, GRADIENTS

# prepared addresses, of states or their gradients 0 where there is none
Pair = tuple[int, int]  # c and n, row sums and their inter, or anchors: states and flows
Triple = tuple[int, int, int]  # c, n and log2_decay at boundaries


@dataclass(slots=True)
class Call:
    """What all kernels read, in the same way: tensors by their addresses, 0 where there is none.

    Attributes:
        plan: what is launched, and where it leaves what.
        sizes: batch, heads, seq, dim_qk, dim_v.
        at: the backward's `Tensors` with what kernels take in their place: operands for q, k, v, h, dh
            [B, NH, S, *], rows aligned for TMA; gates for i, f [B, NH, S]; else addresses. row_n is 0 without
            normaliser alone, states and their gradients are fp32 and contiguous.
        cut: address of the offsets of packed sequences, whether they are 64-bit, number of sequences; the
            cut.
        left: what the forward has left for one walk: states, their units, n; 0 for three.
        group: heads that share one of q and k.
    """

    plan: Plan
    sizes: Sizes
    at: Any
    cut: tuple[int, bool, int, int, int]
    left: Triple
    options: Options
    group: int
    half: bool
    device: int

    def kernels(self, *of_launch: instances.Instance) -> ModuleType:
        """What launches these kernels."""
        return build.load(instances.CHUNKWISE[self.options.decay], *of_launch)

    @property
    def memory(self) -> Memory:
        """Where kernels leave what others read."""
        return self.plan.memory

    @property
    def dims(self) -> tuple[int, int]:
        """K and V."""
        return self.sizes[3:]

    @property
    def is_narrow(self) -> bool:
        """Whether one walk makes dq, dk and dv."""
        return walks.is_narrow(*self.dims)

    @property
    def row_terms(self) -> tuple[int, int, float]:
        """What gives w of every token."""
        return self.at.row_n, self.at.row_m, self.options.eps

    @property
    def normalize(self) -> bool:
        """Whether there is a normaliser."""
        return bool(self.at.row_n != 0)

    @property
    def gates(self) -> instances.Instance:
        """The kernels for the gates."""
        sigmoid_gate, decay = self.options.sigmoid_gate, self.options.decay
        return instances.mlstm_bwd_gates(sigmoid_gate and not decay, decay)


class Grads(NamedTuple):
    """What they write, in the same way: each like what it is the gradient of."""

    dq: Operand
    dk: Operand
    dv: Operand
    di: Gate
    df: Gate
    dc_initial: int
    dn_initial: int
    dn_of_parts: int  # of several parts of V, whose sum dn_initial is


def before_gradients(x: Call, *, states_given: bool) -> list[Launch]:
    """What needs no memory for gradients. states_given: the forward has kept the states at the cuts."""
    found = [_of_rows(x)] if x.at.row_n and x.plan.has_rows else []
    found.append(_of_scan(x))
    if x.plan.is_cut:
        if not (states_given or x.is_narrow):
            found += _of_segments_of_dq(x)
        found += _of_segments_of_dk(x)
    return found


def of_gradients(x: Call, written: Grads) -> list[Launch]:
    """The walks. Of three that for dv leaves dh_t.h_t, but where the plan has rows: e before the walks."""
    if x.is_narrow:
        return [_of_one_walk(x, written)]
    dots = x.at.row_n != 0 and not x.plan.has_rows
    found = [_of_dv(x, written, dots=dots)]
    if dots:
        found.append(_of_factors(x))
    return found + _of_dq_and_dk(x, written)


def _of_one_walk(x: Call, written: Grads) -> Launch:
    """dq, dk and dv, and the sums for the gates where these have gradients."""
    memory, needs_df, tile = x.memory, written.df[0] != 0, tile_of_both(*x.dims)
    kernels = instances.mlstm_gradients(tile, x.half, x.normalize, needs_df, x.options.decay)
    return x.kernels(kernels).gradients(
        x.at.q, x.at.k, x.at.v, x.at.dh, x.left, memory.gates, _e(x)[0],
        _boundary(x, memory.grad_c, memory.grad_n if x.normalize else 0, memory.grad_decay),
        (x.at.dc_last, x.at.dn_last), (written.dc_initial, written.dn_initial),
        written.dq, written.dk, written.dv,
        (memory.q_dq, memory.k_dk, memory.flows) if needs_df else (0, 0, 0),
        x.cut, x.sizes, x.group, tile, x.half, x.device,
    )  # fmt: skip


def _of_rows(x: Call) -> Launch:
    """e_t of every token, from dh and h, and log2 w_t."""
    return x.kernels(instances.mlstm_bwd_rows(x.half)).mlstm_bwd_rows(
        x.at.dh,
        x.at.h,
        x.row_terms,
        (x.memory.log2_w, x.memory.e, x.plan.e_stride),
        (*x.sizes[:3], x.sizes[4], PART_COLUMNS),
        x.half,
        x.device,
    )


def _of_scan(x: Call) -> Launch:
    """The gates of every chunk as the walks take them."""
    return x.kernels(x.gates).mlstm_bwd_scan(
        x.at.i, x.at.f, x.row_terms, x.at.chunk_m, x.memory.gates,
        x.memory.tickets if walks.parts_of(x.dims[1]) > 1 else 0,
        x.cut[:3], x.sizes[:3], x.options.scale_of(x.dims[0]), x.options.sigmoid_gate, x.device,
    )  # fmt: skip


def _of_factors(x: Call) -> Launch:
    """e_t of every token, from the dots of "dv"."""
    batch, heads, seq, *_ = x.sizes
    rows = batch * heads * seq
    return x.kernels(instances.mlstm_bwd_rows(x.half)).mlstm_bwd_factors(
        (x.memory.dots, rows, *walks.slices_of_dots(*x.dims)),
        x.row_terms,
        (0, x.memory.e, x.plan.e_stride),
        rows,
        x.device,
    )


def _of_segments_of_dq(x: Call) -> list[Launch]:
    """The states that the walk for dq begins those segments with that follow others."""
    memory = x.memory
    states = (memory.state_c, memory.state_n, memory.state_decay)
    return [
        _sum_segments(x, "dq", x.at.v, x.at.k, states),
        _combine(x, states, 1, (x.at.c_initial, x.at.n_initial), backward=False),
    ]


def _of_segments_of_dk(x: Call) -> list[Launch]:
    """The gradients of states that the walks for dk and dv begin those segments with that others follow."""
    memory = x.memory
    grads = (memory.grad_c, memory.grad_n, memory.grad_decay)
    return [
        _sum_segments(x, "dk", x.at.dh, x.at.q, grads),
        _combine(x, grads, walks.parts_of(x.dims[1]), (x.at.dc_last, x.at.dn_last), backward=True),
    ]


def _sum_segments(x: Call, name: str, keys: Operand, values: Operand, boundary: Triple) -> Launch:
    """What every segment adds by itself at the boundary over which the walk leaves it."""
    *size, dim_qk, dim_v = x.sizes
    _, tile = walks.tiles_of(dim_qk, dim_v)
    kernels = instances.mlstm_walk_segments(tile, x.half, x.normalize, x.options.decay)
    return x.kernels(kernels).segments(
        _walk(x, name, tile, keys, values, boundary, (*size, dim_v, dim_qk)),
        x.at.i,
        x.at.f,
        x.memory.log2_w if x.normalize else 0,
        x.at.chunk_m,
        x.options.scale_of(dim_qk),
        x.options.sigmoid_gate,
    )


def _walk(
    x: Call,
    name: str,
    tile: tuple[int, int],
    keys: Operand,
    values: Operand,
    boundary: Triple,
    sizes: tuple[int, ...],
) -> tuple[object, ...]:
    """What a walk and the sums of its segments have in common."""
    return GRADIENTS[name], *tile, keys, values, *_e(x), boundary, x.cut, sizes, x.group, x.half, x.device


def _combine(x: Call, boundaries: Triple, norm_parts: int, entering: Pair, *, backward: bool) -> Launch:
    """Carries what enters the sequences on over the boundaries, in place."""
    return x.kernels(instances.mlstm_bwd_combine(x.options.decay)).mlstm_bwd_combine(
        boundaries, norm_parts, entering, x.cut, x.sizes[1:], backward, x.device
    )


def _of_dq_and_dk(x: Call, written: Grads) -> list[Launch]:
    """The walks over all parts of V, the shares of their keys."""
    memory = x.memory
    batch, heads, seq, dim_qk, dim_v = x.sizes
    sizes = (batch, heads, seq, dim_v, dim_qk)
    anchors = (memory.anchors, memory.flows)
    of_dq = _prepare_walk(
        x, "dq", x.at.dh, x.at.v, x.at.k, written.dq, sizes,
        entering=(x.at.c_initial, x.at.n_initial),
        boundary=_boundary(x, memory.state_c, memory.state_n, memory.state_decay),
        factor=x.at.q, sums=(memory.q_dq, memory.q_dq_inter), anchors=anchors, ticket=memory.tickets,
    )  # fmt: skip
    of_dk = _prepare_walk(
        x, "dk", x.at.v, x.at.dh, x.at.q, written.dk, sizes,
        entering=(x.at.dc_last, x.at.dn_last),
        leaving=(0, written.dn_of_parts or written.dn_initial),
        boundary=_boundary(x, memory.grad_c, memory.grad_n, memory.grad_decay),
        factor=x.at.k, sums=(memory.k_dk, memory.k_dk_inter), anchors=anchors, ticket=memory.tickets + INT,
    )  # fmt: skip
    return [of_dq, of_dk]


def _of_dv(x: Call, written: Grads, *, dots: bool) -> Launch:
    """The walk over all of V: the state's columns are those of its values. dots: whether dh_t.h_t is
    wanted."""
    memory = x.memory
    return _prepare_walk(
        x, "dv", x.at.k, x.at.q, x.at.dh, written.dv, x.sizes,
        entering=(x.at.dc_last, 0),
        leaving=(written.dc_initial, 0),
        boundary=_boundary(x, memory.grad_c, 0, memory.grad_decay),
        factor=x.at.h,
        sums=(memory.dots if dots else 0, 0),
    )  # fmt: skip


def _prepare_walk(
    x: Call,
    name: str,
    queries: Operand,
    keys: Operand,
    values: Operand,
    out: Operand,
    sizes: Sizes,
    *,
    entering: Pair,
    leaving: Pair = (0, 0),
    boundary: Triple,
    factor: Operand,
    sums: Pair = (0, 0),
    anchors: Pair = (0, 0),
    ticket: int = 0,
) -> Launch:
    """One walk over the chunks.

    Args:
        name: "dq", which walks forward in time, "dv" or "dk", which walk backward.
        out: the gradient, to be written; like `values`.
        sizes: batch, heads, seq, columns of the keys and of the values.
        entering: what a sequence's walk begins with, (c, n) for "dq", (dc, dn) for the others, fp32; 0 is
            zero. c and dc are [N, NH, K, V] always, contiguous: the state of "dv"; those of "dq" and "dk" are
            its transpose. n and dn [N, NH, K] go with the values' columns and are 0 for "dv".
        leaving: gradients of the initial state, to be written at the walk's end where there is an address:
            "dv" has that of c, "dk" those of n, [P, N, NH, K].
        boundary: c, n and log2_decay for the segments that follow others in the walk; 0 where nothing is cut.
        factor: like `out`, what its rows are multiplied with for the row sums, those of `values` for "dv".
        sums: where these are written, whole and inter; "dv" has no inter, and none at all where whole is 0.
        anchors: the states that "dq" leaves for "dk" and the flows that "dk" makes of them.
        ticket: by which the CTAs of several parts of V count themselves.
    """
    of_dv, of_others = walks.tiles_of(*x.dims)
    tile, gradients = (of_dv, "dv") if name == "dv" else (of_others, "dq and dk")
    return x.kernels(instances.mlstm_walk(gradients, tile, x.half, x.normalize, x.options.decay)).walk(
        _walk(x, name, tile, keys, values, boundary, sizes), x.memory.gates,
        queries, out, factor,
        entering, leaving, sums, anchors, ticket,
    )  # fmt: skip


def of_gates(x: Call, written: Grads) -> Launch:
    """di and df from the walks' row sums."""
    memory, sums = x.memory, walks.ctas_of_a_walk(*x.dims)
    if x.is_narrow:
        parts = tile_of_both(*x.dims) // 16 + x.normalize  # a warp has 16 columns of V
        return x.kernels(x.gates).gate_gradients(
            (memory.q_dq, memory.k_dk, memory.flows), parts, x.at.i, x.at.f, written.di, written.df,
            x.at.chunk_m, x.cut[:3], x.sizes[:3], x.options.sigmoid_gate, x.device,
        )  # fmt: skip
    return x.kernels(x.gates).mlstm_bwd_gates(
        (memory.q_dq, memory.q_dq_inter, sums),
        (memory.k_dk, memory.k_dk_inter, sums),
        (memory.flows, memory.flows, x.plan.flow_parts, ANCHOR_CHUNKS),
        x.at.i, x.at.f, written.di, written.df, x.at.chunk_m,
        _with_gradient(x.at.c_initial, written.dc_initial)
        + _with_gradient(x.at.n_initial, written.dn_initial),
        _with_gradient(x.at.c_last, x.at.dc_last) + _with_gradient(x.at.n_last, x.at.dn_last),
        memory.workspace, x.cut[:3], x.sizes, x.options.sigmoid_gate, x.device,
    )  # fmt: skip


def _e(x: Call) -> tuple[int, int]:
    """e, and from a part's to the next one's; none without normaliser."""
    return (x.memory.e, x.plan.e_stride) if x.normalize else (0, 0)


def _boundary(x: Call, c: int, n: int, log2_decay: int) -> Triple:
    return (c, n, log2_decay) if x.plan.is_cut else (0, 0, 0)


def _with_gradient(state: int, grad: int) -> Pair:
    """A state and its gradient; neither where one of them is missing."""
    return (state, grad) if state and grad else (0, 0)
