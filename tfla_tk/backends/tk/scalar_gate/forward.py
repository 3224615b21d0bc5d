"""The forward of mLSTM and of a scalar decay by the ThunderKittens kernels: what calls have in common once,
then its launches.

Most calls of a process are like an earlier one but for the addresses: a `Forward` is what they share.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from tfla_tk import build
from tfla_tk.backends.tk import prepared, segments
from tfla_tk.backends.tk.prepared import ADDRESS_ALIGNMENT, current_stream, multiprocessors, pointer
from tfla_tk.backends.tk.scalar_gate import walks as tk_walks
from tfla_tk.backends.tk.scalar_gate.walks import FLOAT, Options
from tfla_tk.build import instances
from tfla_tk.core.layout import Cut, Kept, MaybeTensor, chunk_slots, state_slots
from tfla_tk.core.memo import Memo


class Tensors(NamedTuple):
    """What a forward reads: the inputs of tfla_tk::mlstm_fwd; with a scalar decay there is no i."""

    q: Tensor
    k: Tensor
    v: Tensor
    i: MaybeTensor
    f: Tensor
    c_initial: MaybeTensor
    n_initial: MaybeTensor
    m_initial: MaybeTensor
    cu_seqlens: MaybeTensor


class Left(NamedTuple):
    """What is in the one tensor that a forward leaves for its backward: with head dims of at most 128 the
    states before every second chunk of 64 tokens, transposed and in 16 bits, else those at the cuts of its
    sequences. cut: of the forward's sequences. offsets: bytes from the start of the tensor to the states,
    or with narrow head dims to their units, and to n, which is written with a normaliser only."""

    cut: Cut
    offsets: tuple[int, int]


# What tfla_tk::mlstm_fwd returns, None for what was not asked for, and what a backward can use: a `Kept` with
# the layout `Left`, or None
FwdResult: TypeAlias = tuple[Any, ...]

NARROW_SLICE = 64
STATES = ("c_initial", "n_initial", "m_initial")
_NONE = (0, 0, 0)  # the addresses of three tensors that there are not


def mlstm_fwd(*args: Any) -> FwdResult:
    """Launch the mLSTM forward on the current stream; arguments and results are those of
    tfla_tk::mlstm_fwd, behind them keep_states of `Options`. What was not asked for is None. One launch,
    or three where sequences are cut (`segments`). q, k, v are read in place where their rows are 16-byte
    aligned, whatever the order of B, NH and S."""
    return run(args[:9], Options(*args[9:]))


def prepare(tensors: Sequence[Any], options: Options) -> Callable[..., FwdResult]:
    """`mlstm_fwd` for all tensors that have the devices, dtypes, shapes and strides of these."""
    given = Tensors(*tensors)
    if prepared.readable(given, states=STATES) is given:
        return Forward(given, given.v, options)
    return lambda *tensors: run(tensors, options)


def run(tensors: Sequence[Any], options: Options) -> FwdResult:
    """`mlstm_fwd` of tensors that may have to be copied first."""
    v = tensors[2]
    read = prepared.readable(Tensors(*tensors), states=STATES)
    key = options, v.stride(), prepared.laid_out(read.q, read.v, read.cu_seqlens, *read)
    return _forwards.of(key, lambda: Forward(read, v, options))(*read, h_like=v)


class Forward:
    """The forward of calls whose tensors lie alike, as `readable` leaves them but for odd
    addresses. h_like: h gets the memory order of this one, but with heads_last; v, or what v is a copy of."""

    def __init__(self, tensors: Tensors, h_like: Tensor, options: Options) -> None:
        q, k, v, i, f, *initial, cu_seqlens = tensors
        self._h_order = torch.contiguous_format if options.heads_last else torch.preserve_format
        h = torch.empty_like(h_like, device="meta", memory_format=self._h_order)
        self._h_in_place = prepared.descriptor_strides(h.shape, h.stride()) is not None
        if not self._h_in_place:
            h = torch.empty(h.shape, device="meta")
        q, k, v, h, i, f = heads_last((q, k, v, h, i, f), v, options)
        batch, seq, heads, dim_v = v.shape
        key_heads, dim_qk = q.shape[2:]
        device = q.get_device()
        packed = cu_seqlens is not None
        sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
        sizes = (batch, heads, seq, dim_qk, dim_v)
        processors, invariant, kept = multiprocessors(device), options.batch_invariant, False
        # two CTAs share the heads of a scalar decay, in slices of 64 columns of V. Both make the scores, but
        # their walk is shorter: it pays with K = V = 128 where one wave of CTAs holds all heads of all
        # sequences
        fits = 64 < dim_qk <= 128 and NARROW_SLICE < dim_v <= 2 * NARROW_SLICE
        narrow = options.decay and not invariant and fits and 2 * sequences * heads <= processors
        tile = instances.mlstm_tile(dim_qk, NARROW_SLICE if narrow else dim_v)
        slices, launcher = -(-dim_v // tile[1]), instances.CHUNKWISE
        if options.sequential:
            launcher = instances.SEQUENTIAL
        half = q.dtype == torch.float16
        of_walk = tile, half, options.normalize, options.sigmoid_gate, options.sequential
        kernel = build.load(launcher, instances.mlstm_fwd(*of_walk))
        one_walk = tk_walks.is_narrow(dim_qk, dim_v)
        of_cut = {"packed": packed, "batch_invariant": invariant}
        if (options.keep_states and not one_walk) or invariant:
            cut = tk_walks.cut_sequences(sizes, sequences, processors, **of_cut)
            kept = options.keep_states and not one_walk and cut.segments > sequences
        if not (kept or invariant):
            running = processors * kernel.ctas_per_multiprocessor(*tile)
            cut = segments.choose_cut(sequences, seq, heads * slices, running, segments.FORWARD, **of_cut)
        slots = (cut.segments - sequences) * heads
        self._options = options
        self._device = device
        self._has_initial = any(x is not None for x in initial)
        if slots:
            build.load(launcher, instances.mlstm_fwd_states(tile, half), instances.mlstm_fwd_combine())
        self._workspace_size = -(-kernel.workspace_bytes(slots, dim_qk, dim_v) // q.itemsize)
        # what a forward leaves, but for the memory that has it
        self._left: Left | None = None
        self._left_size = of_units = of_norms = 0
        if kept:
            self._left = Left(cut, kernel.workspace_offsets(slots, dim_qk, dim_v))
        if options.keep_states and one_walk:
            count, in_left = batch * heads * state_slots(seq, cu_seqlens), prepared.Scratch(0)
            in_left.take(count * dim_qk * dim_v * q.itemsize)
            of_units, of_norms = [in_left.take(FLOAT * count * each) for each in (1, dim_qk)]
            self._left = Left(cut, (of_units, of_norms))
            self._left_size = -(-in_left.bytes // q.itemsize)
        self._state = (sequences, heads, dim_qk, dim_v)
        addresses = prepared.Addresses()
        operands = [prepared.operand_at(addresses.next(), x) for x in (q, k, v, h)]
        gates = [prepared.gate_at(addresses.next(), x) for x in (i, f)]
        states = [addresses.next() for _ in range(6)]  # c, n, m of the initial and of the last state
        rows = [addresses.next() for _ in range(3)]
        offsets, workspace = addresses.next(given=packed), addresses.next(given=slots > 0)
        left = addresses.next(given=self._left_size > 0)
        is_64bit = cu_seqlens is not None and cu_seqlens.dtype == torch.int64
        launch = kernel.forward(
            *operands, *gates, states, rows,
            (left, left and left + of_units, left + of_norms if left and options.normalize else 0),
            (offsets, is_64bit, sequences, *cut), workspace, sizes,
            heads // key_heads, tile, options.scale_of(dim_qk),
            options.eps, half, options.gate_kind, options.normalize, device,
        )  # fmt: skip
        self._launch = build.launches([launch])

    def __call__(self, *tensors: Any, h_like: MaybeTensor = None) -> FwdResult:
        """`mlstm_fwd` of these tensors; h_like is v unless it is given."""
        q, k, v, i, f, c_initial, n_initial, m_initial, cu_seqlens = tensors
        options = self._options
        at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        initial = _NONE
        if self._has_initial:
            initial = pointer(c_initial), pointer(n_initial), pointer(m_initial)
        if (at_q | at_k | at_v | initial[0] | initial[1] | initial[2]) % ADDRESS_ALIGNMENT:
            return run(tensors, options)
        h = torch.empty_like(v if h_like is None else h_like, memory_format=self._h_order)
        written = h if self._h_in_place else torch.empty(v.shape, dtype=v.dtype, device=v.device)
        # of q's dtype because that need not be said, which is half of the time
        workspace = q.new_empty(self._workspace_size) if self._workspace_size else None
        left = q.new_empty(self._left_size) if self._left_size else None
        c = n = m = row_n = row_m = chunk_m = None
        last = rows = _NONE
        if options.return_last_states:
            c, n, m = self._last_states(q)
            last = c.data_ptr(), pointer(n) if options.normalize else 0, pointer(m)
        if options.return_rows:
            row_n, row_m, chunk_m = self._rows(q, cu_seqlens)
            rows = pointer(row_n), pointer(row_m), pointer(chunk_m)
        others = pointer(i), f.data_ptr(), *initial, *last, *rows
        scratch = pointer(cu_seqlens), pointer(workspace), pointer(left)
        at = [at_q, at_k, at_v, written.data_ptr(), *others, *scratch]
        self._launch(at, current_stream(self._device))
        if written is not h:
            h.copy_(written)
        kept = None
        memory = workspace if left is None else left
        if self._left is not None and memory is not None:
            kept = Kept((memory,), self._left)
        return h, c, n, m, row_n, row_m, chunk_m, kept

    def _last_states(self, q: Tensor) -> tuple[Tensor, MaybeTensor, MaybeTensor]:
        """Memory for c, n and m; without normaliser, n is what it will be: zeros, or none with a decay."""
        c = _fp32(q, *self._state)
        if self._options.decay:
            return c, None, None
        n = _fp32(q, *self._state[:3])
        if not self._options.normalize:
            n.zero_()
        return c, n, None if self._options.sigmoid_gate else _fp32(q, *self._state[:2], 1)

    def _rows(self, q: Tensor, cu_seqlens: MaybeTensor) -> tuple[MaybeTensor, MaybeTensor, MaybeTensor]:
        batch, heads, seq, _ = q.shape
        row_n = _fp32(q, batch, heads, seq) if self._options.normalize else None
        if self._options.sigmoid_gate:
            return row_n, None, None
        # empty_like takes half of the time of a shape and a dtype
        row_m = _fp32(q, batch, heads, seq) if row_n is None else torch.empty_like(row_n)
        return row_n, row_m, _fp32(q, batch, heads, chunk_slots(seq, cu_seqlens), 2)


def heads_last(tensors: Sequence[MaybeTensor], v: Tensor, options: Options) -> list[Any]:
    """Tensors [B, S, NH, ...], from ones that lie as the options say; the sizes of a gate may be fewer than
    v's."""
    if options.heads_last:
        return [x if x is None or x.dim() == 4 else x.expand(v.shape[:3]) for x in tensors]
    return [None if x is None else x.transpose(1, 2) for x in tensors]


def _fp32(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32)


_forwards: Memo[Forward] = Memo()
