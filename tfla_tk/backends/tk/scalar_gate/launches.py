"""The launches of a backward: what its kernels are given, address by address.

They are prepared once for all calls of a kind, so the addresses here are prepared ones, `Addresses`.
"""

from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from tfla_tk import build
from tfla_tk.backends.tk.prepared import Gate, Launch, Operand
from tfla_tk.backends.tk.scalar_gate import walks
from tfla_tk.backends.tk.scalar_gate.walks import INT, PART_COLUMNS, Options, Plan, Sizes, tile_of_both
from tfla_tk.build import instances
from tfla_tk.core.layout import ANCHOR_CHUNKS, GRADIENTS

# prepared addresses, of states or their gradients 0 where there is none
Pair = tuple[int, int]  # c and n, row sums and their inter, or anchors: states and flows
Triple = tuple[int, int, int]  # c, n and log2_decay at boundaries


@dataclass(slots=True)
class Call:
    """What all kernels read, in the same way: tensors by their addresses, 0 where there is none. at: the
    backward's `Tensors` with what kernels take in their place: operands for q, k, v, h, dh [B, NH, S, *],
    rows aligned for TMA; gates for i, f [B, NH, S]; else addresses. row_n is 0 without normaliser alone,
    states and their gradients are fp32 and contiguous."""

    plan: Plan  # what is launched, and where it leaves what
    sizes: Sizes  # batch, heads, seq, dim_qk, dim_v
    at: Any
    # address of the offsets of packed sequences, whether they are 64-bit, number of sequences; the cut
    cut: tuple[int, bool, int, int, int]
    left: Triple  # by the forward for one walk: states, their units, n; 0 for three
    options: Options
    group: int  # heads that share one of q and k
    half: bool
    device: int

    def kernels(self, *of_launch: instances.Instance) -> ModuleType:
        return build.load(instances.CHUNKWISE, *of_launch)

    @property
    def memory(self) -> SimpleNamespace:
        return self.plan.memory

    @property
    def dims(self) -> tuple[int, int]:
        return self.sizes[3:]

    @property
    def is_narrow(self) -> bool:
        return walks.is_narrow(*self.dims)

    @property
    def row_terms(self) -> tuple[int, int, float]:
        """What gives w of every token."""
        return self.at.row_n, self.at.row_m, self.options.eps

    @property
    def normalize(self) -> bool:
        return bool(self.at.row_n != 0)

    @property
    def gates(self) -> instances.Instance:
        return instances.mlstm_bwd_gates(self.options.sigmoid_gate, self.options.decay)


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
    found: list[Launch] = []
    if x.normalize and x.plan.has_rows:
        # e_t of every token, from dh and h, and log2 w_t
        found.append(x.kernels(instances.mlstm_bwd_rows(x.half)).mlstm_bwd_rows(
            x.at.dh, x.at.h, x.row_terms, (x.memory.log2_w, x.memory.e, x.plan.e_stride),
            (*x.sizes[:3], x.sizes[4], PART_COLUMNS), x.half, x.device,
        ))  # fmt: skip
    # the gates of every chunk as the walks take them
    found.append(x.kernels(x.gates).mlstm_bwd_scan(
        x.at.i, x.at.f, x.row_terms, x.at.chunk_m, x.memory.gates,
        x.memory.tickets if walks.parts_of(x.dims[1]) > 1 else 0,
        x.cut[:3], x.sizes[:3], x.options.scale_of(x.dims[0]), x.options.gate_kind, x.device,
    ))  # fmt: skip
    if x.plan.is_cut:
        m, at = x.memory, x.at
        if not (states_given or x.is_narrow):
            states = m.state_c, m.state_n, m.state_decay
            found += _of_segments(x, "dq", (at.v, at.k), states, 1, (at.c_initial, at.n_initial))
        grads, parts = (m.grad_c, m.grad_n, m.grad_decay), walks.parts_of(x.dims[1])
        found += _of_segments(x, "dk", (at.dh, at.q), grads, parts, (at.dc_last, at.dn_last))
    return found


def of_gradients(x: Call, written: Grads) -> list[Launch]:
    """The walks. Of three that for dv leaves dh_t.h_t, but where the plan has rows: e before the walks."""
    if x.is_narrow:
        return [_of_one_walk(x, written)]
    dots = x.at.row_n != 0 and not x.plan.has_rows
    found = [_of_walk(x, "dv", written, dots=dots)]
    if dots:
        # e_t of every token, from the dots of "dv"
        rows = x.sizes[0] * x.sizes[1] * x.sizes[2]
        found.append(x.kernels(instances.mlstm_bwd_rows(x.half)).mlstm_bwd_factors(
            (x.memory.dots, rows, *walks.slices_of_dots(*x.dims)), x.row_terms,
            (0, x.memory.e, x.plan.e_stride), rows, x.device,
        ))  # fmt: skip
    return [*found, *(_of_walk(x, name, written) for name in ("dq", "dk"))]


def _of_one_walk(x: Call, written: Grads) -> Launch:
    """dq, dk and dv, and the sums for the gates where these have gradients."""
    memory, needs_df, tile = x.memory, written.df[0] != 0, tile_of_both(*x.dims)
    kernels = instances.mlstm_gradients(tile, x.half, x.normalize, needs_df)
    return x.kernels(kernels).gradients(
        x.at.q, x.at.k, x.at.v, x.at.dh, x.left, memory.gates, _e(x)[0],
        _boundary(x, memory.grad_c, memory.grad_n if x.normalize else 0, memory.grad_decay),
        (x.at.dc_last, x.at.dn_last), (written.dc_initial, written.dn_initial),
        written.dq, written.dk, written.dv,
        (memory.q_dq, memory.k_dk, memory.flows) if needs_df else (0, 0, 0),
        x.cut, x.sizes, x.group, tile, x.half, x.device,
    )  # fmt: skip


def _of_segments(
    x: Call,
    name: str,
    operands: tuple[Operand, Operand],
    boundary: Triple,
    norm_parts: int,
    entering: Pair,
) -> list[Launch]:
    """What the walk for dq, or those for dk and dv, begin those segments with that follow others: what every
    segment adds by itself at the boundary over which the walk leaves it, and what carries on over these, in
    place, what enters the sequences. operands: keys and values."""
    *size, dim_qk, dim_v = x.sizes
    _, tile = walks.tiles_of(dim_qk, dim_v)
    of_sums = instances.mlstm_walk_segments(tile, x.half)
    sums = x.kernels(of_sums).segments(
        _walk(x, name, tile, *operands, boundary, (*size, dim_v, dim_qk)), x.at.i, x.at.f,
        x.memory.log2_w if x.normalize else 0, x.at.chunk_m, x.options.scale_of(dim_qk),
        x.options.gate_kind,
    )  # fmt: skip
    carry = x.kernels(instances.mlstm_bwd_combine()).mlstm_bwd_combine(
        boundary, norm_parts, entering, x.cut, x.sizes[1:], name == "dk", x.device
    )
    return [sums, carry]


def _walk(
    x: Call, name: str, tile: tuple[int, int], keys: Operand, values: Operand, *rest: tuple[int, ...]
) -> tuple[object, ...]:
    """What a walk and the sums of its segments have in common; rest: the boundary, and the sizes."""
    boundary, sizes = rest
    return GRADIENTS[name], *tile, keys, values, *_e(x), boundary, x.cut, sizes, x.group, x.half, x.device


def _of_walk(x: Call, name: str, written: Grads, *, dots: bool = False) -> Launch:
    """One walk over the chunks: "dq" goes forward in time, "dv" and "dk" backward. Those for dq and dk are
    over all parts of V, the shares of their keys, that for dv is over all of V: the state's columns are those
    of its values. dots: "dv" leaves dh_t.h_t."""
    m, at, (*size, dim_qk, dim_v) = x.memory, x.at, x.sizes
    values_first = *size, dim_v, dim_qk
    # the states that "dq" leaves for "dk", and the flows that "dk" makes of them
    anchors = m.anchors, m.flows
    # queries, keys, values, the gradient, which is like these, and what its rows are multiplied with for the
    # row sums, those of the values for "dv"; sizes with the columns of the keys and of the values; c, n and
    # log2_decay for the segments that follow others in the walk
    queries, keys, values, out, factor, sizes, boundary = {
        "dq": (at.dh, at.v, at.k, written.dq, at.q, values_first, (m.state_c, m.state_n, m.state_decay)),
        "dk": (at.v, at.dh, at.q, written.dk, at.k, values_first, (m.grad_c, m.grad_n, m.grad_decay)),
        "dv": (at.k, at.q, at.dh, written.dv, at.h, x.sizes, (m.grad_c, 0, m.grad_decay)),
    }[name]
    # what a sequence's walk begins with, (c, n) for "dq", (dc, dn) for the others, fp32; 0 is zero. c and dc
    # are [N, NH, K, V] always, contiguous: the state of "dv"; those of "dq" and "dk" are its transpose. n and
    # dn [N, NH, K] go with the values' columns and are 0 for "dv". Then gradients of the initial state, to be
    # written at the walk's end where there is an address: "dv" has that of c, "dk" those of n, [P, N, NH, K].
    # Then where the row sums are written, whole and inter; "dv" has no inter. Then the anchors, and by which
    # the CTAs of several parts of V count themselves
    more = {
        "dq": ((at.c_initial, at.n_initial), (0, 0), (m.q_dq, m.q_dq_inter), anchors, m.tickets),
        "dk": (
            *((at.dc_last, at.dn_last), (0, written.dn_of_parts or written.dn_initial)),
            *((m.k_dk, m.k_dk_inter), anchors, m.tickets + INT),
        ),
        "dv": ((at.dc_last, 0), (written.dc_initial, 0), (m.dots if dots else 0, 0), (0, 0), 0),
    }[name]
    of_dv, of_others = walks.tiles_of(*x.dims)
    tile, gradients = (of_dv, "dv") if name == "dv" else (of_others, "dq and dk")
    return x.kernels(instances.mlstm_walk(gradients, tile, x.half, x.normalize)).walk(
        _walk(x, name, tile, keys, values, _boundary(x, *boundary), sizes),
        m.gates,
        queries,
        out,
        factor,
        *more,
    )


def of_gates(x: Call, written: Grads) -> Launch:
    """di and df from the walks' row sums."""
    memory, sums = x.memory, walks.ctas_of_a_walk(*x.dims)
    if x.is_narrow:
        parts = tile_of_both(*x.dims) // 16 + x.normalize  # a warp has 16 columns of V
        return x.kernels(x.gates).gate_gradients(
            (memory.q_dq, memory.k_dk, memory.flows), parts, x.at.i, x.at.f, written.di, written.df,
            x.at.chunk_m, x.cut[:3], x.sizes[:3], x.options.gate_kind, x.device,
        )  # fmt: skip
    return x.kernels(x.gates).mlstm_bwd_gates(
        (memory.q_dq, memory.q_dq_inter, sums),
        (memory.k_dk, memory.k_dk_inter, sums),
        (memory.flows, memory.flows, x.plan.flow_parts, ANCHOR_CHUNKS),
        x.at.i, x.at.f, written.di, written.df, x.at.chunk_m,
        _with_gradient(x.at.c_initial, written.dc_initial)
        + _with_gradient(x.at.n_initial, written.dn_initial),
        _with_gradient(x.at.c_last, x.at.dc_last) + _with_gradient(x.at.n_last, x.at.dn_last),
        memory.workspace, x.cut[:3], x.sizes, x.options.gate_kind, x.device,
    )  # fmt: skip


def _e(x: Call) -> tuple[int, int]:
    """e, and from a part's to the next one's; none without normaliser."""
    return (x.memory.e, x.plan.e_stride) if x.normalize else (0, 0)


def _boundary(x: Call, c: int, n: int, log2_decay: int) -> Triple:
    return (c, n, log2_decay) if x.plan.is_cut else (0, 0, 0)


def _with_gradient(state: int, grad: int) -> Pair:
    """A state and its gradient; neither where one of them is missing."""
    return (state, grad) if state and grad else (0, 0)
