"""The launches of an mLSTM backward: what its kernels are given, address by address."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

from tfla_tk.backends.tk import Gate, Operand
from tfla_tk.backends.tk_passes import Memory, Part, Plan, Sizes

GRADIENTS = {"dq": 0, "dk": 1, "dv": 2}  # enum class Gradient of params_pass.h

# addresses, of states or their gradients 0 where there is none
Pair = tuple[int, int]  # c and n, or row sums and their inter
Triple = tuple[int, int, int]  # c, n and log2_decay at boundaries, or log2_w, e and chunk_m


@dataclass(slots=True)
class RowCall:
    """What the kernels for log2_w and e read: tensors by their addresses, 0 where there is none.

    Attributes:
        plan, memory: what is launched, and where it leaves what.
        sizes: batch, heads, seq, dim_qk, dim_v.
        h, dh: [B, NH, S, V], rows aligned for TMA.
        itemsize: bytes of an element of them.
        row_n, row_m: as the forward returns them; row_n is 0 without normaliser alone.
    """

    plan: Plan
    memory: Memory
    sizes: Sizes
    h: Operand
    dh: Operand
    itemsize: int
    row_n: int
    row_m: int
    eps: float
    half: bool
    device: int
    stream: int


@dataclass(slots=True)
class Call(RowCall):
    """What all kernels read, in the same way.

    Attributes:
        q, k, v: [B, NH, S, *], rows aligned for TMA. i, f: [B, NH, S].
        chunk_m: as the forward returns it.
        cut: address of the offsets of packed sequences, whether they are 64-bit, number of sequences; the
            plan's cut.
        c_initial to dn_last: [N, NH, K, V] and [N, NH, K], fp32, contiguous.
        scale: of q k^T.
    """

    q: Operand
    k: Operand
    v: Operand
    i: Gate
    f: Gate
    chunk_m: int
    cut: tuple[int, bool, int, int, int]
    c_initial: int
    n_initial: int
    c_last: int
    n_last: int
    dc_last: int
    dn_last: int
    scale: float
    sigmoid_gate: bool


class Grads(NamedTuple):
    """What they write, in the same way: each like what it is the gradient of."""

    dq: Operand
    dk: Operand
    dv: Operand
    di: Gate
    df: Gate
    dc_initial: int
    dn_initial: int


def launch_rows(x: RowCall, part: Part) -> None:
    """log2 w_t and e_t of every token, from dh and h."""
    x.plan.around.mlstm_bwd_rows(
        _columns(x, x.dh, part),
        _columns(x, x.h, part),
        (x.row_n, x.row_m),
        (x.memory.log2_w + part.rows, x.memory.e + part.rows),
        (*x.sizes[:3], part.width),
        x.eps,
        x.half,
        x.device,
        x.stream,
    )


def launch_factors(x: RowCall, part: Part, *, slices: int) -> None:
    """log2 w_t and e_t of every token, from the dots of so many slices of "dv"; without any e_t is 0."""
    batch, heads, seq, *_ = x.sizes
    rows = batch * heads * seq
    x.plan.around.mlstm_bwd_factors(
        (x.memory.dots + part.dots, rows, slices),
        (x.row_n, x.row_m),
        (x.memory.log2_w + part.rows, x.memory.e + part.rows),
        rows,
        x.eps,
        x.device,
        x.stream,
    )


def launch_segments_of_dq(x: Call) -> None:
    """The states that the passes for dq begin those segments with that follow others."""
    memory = x.memory
    for part in x.plan.parts:
        # n is a sum over keys, the same for every part
        n = memory.state_n if part.number == 0 else 0
        boundary = (memory.state_c + part.state, n, memory.state_decay)
        _sum_segments(x, "dq", part, _columns(x, x.v, part), x.k, boundary)
    states = (memory.state_c, memory.state_n, memory.state_decay)
    _combine(x, states, 1, (x.c_initial, x.n_initial), backward=False)


def launch_segments_of_dk(x: Call) -> None:
    """The gradients of states that the passes for dk and dv begin those segments with that others follow."""
    memory, parts = x.memory, x.plan.parts
    for part in parts:
        boundary = (memory.grad_c + part.state, memory.grad_n + part.norms, memory.grad_decay)
        _sum_segments(x, "dk", part, _columns(x, x.dh, part), x.q, boundary)
    grads = (memory.grad_c, memory.grad_n, memory.grad_decay)
    _combine(x, grads, len(parts), (x.dc_last, x.dn_last), backward=True)


def _sum_segments(x: Call, name: str, part: Part, keys: Operand, values: Operand, boundary: Triple) -> None:
    """What every segment adds by itself at the boundary over which the pass leaves it."""
    *size, dim_qk, dim_v = x.sizes
    part.kernel.mlstm_pass_segments(
        GRADIENTS[name],
        keys,
        values,
        x.i,
        x.f,
        _rows(x, part),
        boundary,
        x.cut,
        (*size, part.width, dim_qk, dim_v),
        x.scale,
        x.half,
        x.sigmoid_gate,
        x.device,
        x.stream,
    )


def _combine(x: Call, boundaries: Triple, norm_parts: int, entering: Pair, *, backward: bool) -> None:
    """Carries what enters the sequences on over the boundaries, in place."""
    x.plan.around.mlstm_bwd_combine(
        boundaries,
        norm_parts,
        entering,
        x.cut,
        x.sizes[1:],
        backward,
        x.device,
        x.stream,
    )


def launch_dq_and_dk(x: Call, written: Grads, part: Part, dn: int) -> None:
    """The passes over a part of V, which add to what those before have made.

    Args:
        dn: address of the gradient of n_initial, of this part alone; or 0.
    """
    memory = x.memory
    *size, dim_qk, dim_v = x.sizes
    first = part.number == 0
    v, dh, rows = _columns(x, x.v, part), _columns(x, x.dh, part), _rows(x, part)
    sizes = (*size, part.width, dim_qk, dim_v)
    anchors = (memory.anchors, memory.flows + part.flows, x.plan.flow_parts)
    _run_pass(
        x, "dq", part.kernel, dh, v, x.k, written.dq, rows, sizes,
        entering=(_state(x.c_initial, part), x.n_initial),
        boundary=_boundary(x, memory.state_c + part.state, memory.state_n, memory.state_decay),
        factor=x.q, sums=(memory.q_dq + part.sums, memory.q_dq_inter + part.inter), anchors=anchors,
        accumulate=not first,
    )  # fmt: skip
    _run_pass(
        x, "dk", part.kernel, v, dh, x.q, written.dk, rows, sizes,
        entering=(_state(x.dc_last, part), x.dn_last if first else 0),
        leaving=(0, dn),
        boundary=_boundary(x, memory.grad_c + part.state, memory.grad_n + part.norms, memory.grad_decay),
        factor=x.k, sums=(memory.k_dk + part.sums, memory.k_dk_inter + part.inter), anchors=anchors,
        accumulate=not first,
    )  # fmt: skip


def launch_dv(x: Call, written: Grads, *, dots: bool) -> None:
    """The pass over all of V: the state's columns are those of its values.

    Args:
        dots: whether dh_t.h_t is wanted.
    """
    memory = x.memory
    *size, dim_qk, dim_v = x.sizes
    rows, sizes = _rows(x, x.plan.parts[0]), (*size, dim_qk, dim_v, dim_v)
    _run_pass(
        x, "dv", x.plan.dv, x.k, x.q, x.dh, written.dv, rows, sizes,
        entering=(x.dc_last, 0),
        leaving=(written.dc_initial, 0),
        boundary=_boundary(x, memory.grad_c, 0, memory.grad_decay),
        factor=x.h,
        sums=(memory.dots if dots else 0, 0),
    )  # fmt: skip


def _run_pass(
    x: Call,
    name: str,
    kernel: ModuleType,
    queries: Operand,
    keys: Operand,
    values: Operand,
    out: Operand,
    rows: Triple,
    sizes: tuple[int, ...],
    *,
    entering: Pair,
    leaving: Pair = (0, 0),
    boundary: Triple,
    factor: Operand,
    sums: Pair = (0, 0),
    anchors: Triple = (0, 0, 0),
    accumulate: bool = False,
) -> None:
    """One pass over the chunks, on the current stream.

    Args:
        name: "dq", which walks forward in time, "dv" or "dk", which walk backward.
        out: the gradient, to be written; like `values`.
        rows: log2_w and e, of the part of V, 0 without normaliser, and chunk_m.
        sizes: batch, heads, seq, columns of the keys, of the values, of a whole state.
        entering: what a sequence's walk begins with, (c, n) for "dq", (dc, dn) for the others, fp32; 0 is
            zero. c and dc are [N, NH, K, V] always, contiguous or columns of a contiguous one: the state of
            "dv"; those of "dq" and "dk" are its transpose. n and dn [N, NH, K] go with the values' columns
            and are 0 for "dv".
        leaving: gradients of the initial state, to be written at the walk's end where there is an address:
            "dv" has that of c, "dk" that of n.
        boundary: c, n and log2_decay for the segments that follow others in the walk; 0 where nothing is cut.
        factor: like `out`, what its rows are multiplied with for the row sums, those of `values` for "dv".
        sums: where these are written, whole and inter; "dv" has no inter, and none at all where whole is 0.
        anchors: the states that "dq" leaves for "dk" and the flows that "dk" makes of them, and the parts of
            a flow.
        accumulate: whether the gradient is added to what `out` holds; not for "dv".
    """
    kernel.mlstm_pass(
        GRADIENTS[name],
        queries,
        keys,
        values,
        out,
        factor,
        x.i,
        x.f,
        rows,
        entering,
        leaving,
        boundary,
        sums,
        anchors,
        x.cut,
        sizes,
        x.scale,
        accumulate,
        x.half,
        x.sigmoid_gate,
        x.device,
        x.stream,
    )


def launch_gates(x: Call, written: Grads) -> None:
    """di and df from the passes' row sums."""
    memory, plan = x.memory, x.plan
    x.plan.around.mlstm_bwd_gates(
        (memory.q_dq, memory.q_dq_inter, plan.sums),
        (memory.k_dk, memory.k_dk_inter, plan.sums),
        (memory.flows, plan.flow_parts),
        x.i,
        x.f,
        written.di,
        written.df,
        x.chunk_m,
        _with_gradient(x.c_initial, written.dc_initial) + _with_gradient(x.n_initial, written.dn_initial),
        _with_gradient(x.c_last, x.dc_last) + _with_gradient(x.n_last, x.dn_last),
        memory.workspace,
        x.cut[:3],
        x.sizes,
        x.sigmoid_gate,
        x.device,
        x.stream,
    )


def _columns(x: RowCall, operand: Operand, part: Part) -> Operand:
    """A part of the columns of v, h or dh."""
    pointer, batch, head, row = operand
    return pointer + x.itemsize * part.start, batch, head, row


def _state(pointer: int, part: Part) -> int:
    """A part of the columns of a state; 0 where there is none."""
    return pointer and pointer + part.state


def _rows(x: Call, part: Part) -> Triple:
    """What the passes read of every token and chunk: log2_w, e and chunk_m."""
    if not x.row_n:
        return 0, 0, x.chunk_m
    return x.memory.log2_w + part.rows, x.memory.e + part.rows, x.chunk_m


def _boundary(x: Call, c: int, n: int, log2_decay: int) -> Triple:
    return (c, n, log2_decay) if x.plan.is_cut else (0, 0, 0)


def _with_gradient(state: int, grad: int) -> Pair:
    """A state and its gradient; neither where one of them is missing."""
    return (state, grad) if state and grad else (0, 0)
