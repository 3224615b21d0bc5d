"""The backward of mLSTM and of scalar decay by the ThunderKittens kernels: walks over the chunks.

The gates are scanned before the walks, and the gradients of the gates come after them
(docs/mlstm-backward.md). With head dims of at most 128 one walk makes all three large gradients, from the
last chunk to the first, and reads the states that the forward has left. Else they are three walks of the same
kernel, mlstm_pass, with other operands. It walks (queries, keys, values) chunk by chunk with a state keys x
values on chip, for dk and dv from the last chunk to the first. With the gates W_tj, the normaliser w_t, s =
K^-1/2 and e_t = -(dh_t.h_t) sign(d_t) [|d_t| > floor_t]::

                                                                            queries  keys  values
    dq_t = sum_{j <= t} s W_tj / w_t (dh_t.v_j + e_t) k_j + from the state    dh      v      k
    dk_j = sum_{t >= j} s W_tj / w_t (v_j.dh_t + e_t) q_t + from the state    v       dh     q
    dv_j = sum_{t >= j} s W_tj / w_t (k_j.q_t) dh_t       + from the state    k       q      dh

dq and dk are linear in the columns of v, dh and h, e_t among them: CTAs take as many as they hold, a part of
V, and those of different parts add to the same gradient.

Where a few long sequences would leave the GPU empty they are cut into segments, at the same places for all
walks. A kernel for the segments and a small kernel that carries states make the state with which a walk
begins a segment, or, for dq, the forward has left it. The one walk needs the gradients of states alone.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tfla_tk import build
from tfla_tk.backends.tk import prepared
from tfla_tk.backends.tk.prepared import ADDRESS_ALIGNMENT, current_stream, laid_out, multiprocessors, starts
from tfla_tk.backends.tk.scalar_gate import forward as tk_forward
from tfla_tk.backends.tk.scalar_gate import launches, walks
from tfla_tk.backends.tk.scalar_gate.forward import Left, heads_last
from tfla_tk.backends.tk.scalar_gate.launches import Call, Grads
from tfla_tk.backends.tk.scalar_gate.walks import Options
from tfla_tk.build import instances
from tfla_tk.calls.mlstm import MaybeGrads
from tfla_tk.core.layout import Kept, MaybeTensor, chunk_slots
from tfla_tk.core.memo import Memo


class Tensors(NamedTuple):
    """What a backward reads: the inputs of tfla_tk::mlstm_bwd; None for what there is not. With a decay
    there is no i, and f is its natural log; q and k may have fewer heads than v, each shared by as many
    neighbouring heads of v. h is read with a normaliser alone."""

    q: Tensor
    k: Tensor
    v: Tensor
    i: MaybeTensor
    f: Tensor
    c_initial: MaybeTensor
    n_initial: MaybeTensor
    m_initial: MaybeTensor
    cu_seqlens: MaybeTensor
    h: Tensor
    row_n: MaybeTensor
    row_m: MaybeTensor
    chunk_m: MaybeTensor
    c_last: MaybeTensor
    n_last: MaybeTensor
    dh: Tensor
    dc_last: MaybeTensor
    dn_last: MaybeTensor


_DEFAULTS: tuple[Any, ...] = (False, None)  # of batch_invariant, which torch may leave out, and of kept
_OPERANDS = ("q", "k", "v", "h", "dh")
_STATES = ("c_initial", "n_initial", "c_last", "n_last", "dc_last", "dn_last")


def mlstm_bwd(*args: Any) -> MaybeGrads:
    """Launch the mLSTM backward on the current stream; arguments and results are those of
    tfla_tk::mlstm_bwd, behind them what the forward has kept. Without an initial state its gradients are
    None."""
    tensors, (sigmoid_gate, normalize, eps, *others) = Tensors(*args[:18]), args[18:]
    batch_invariant, kept = *others, *_DEFAULTS[len(others) :]
    if not normalize:
        tensors = tensors._replace(n_last=None, dn_last=None, row_n=None)
    elif (tensors.row_n is None or tensors.row_n.numel() == 0) and tensors.v.numel() > 0:
        raise ValueError("mlstm_bwd with a normaliser needs row_n of its forward")
    return run(tensors, Options(sigmoid_gate, normalize, eps, False, False, batch_invariant), kept)


def run(
    tensors: Tensors, options: Options, kept: Kept | None = None, like: Tensors | None = None
) -> prepared.Gradients:
    """The gradients of mLSTM or of a scalar decay, on the current stream; dq and dk are of every head of
    v. kept: by the forward. like: what some of the tensors are copies of; gradients lie like these."""
    if tensors.v.numel() == 0:
        return _run_without_tokens(tensors, options)
    if kept is None and walks.is_narrow(tensors.q.shape[-1], tensors.v.shape[-1]):
        # of another forward: its own has kept no states
        kept = tk_forward.run(tensors[:9], options._replace(keep_states=True))[7]
    likes = None if like is None else prepared.strides(*like[:7])
    of_tensors = laid_out(tensors.q, tensors.v, tensors.cu_seqlens, *tensors)
    key = options, of_tensors, likes, None if kept is None else kept.layout
    backward = _backwards.get(key)
    if backward is None:
        read = prepared.readable(tensors, _OPERANDS, _STATES)
        if read is not tensors:
            # not kept: a key does not tell addresses, and tensors like these may need no copy
            return run(read, options, kept, tensors if like is None else like)
        backward = Backward(tensors, options, kept, like)
        _backwards.keep(key, backward)
    return backward(tensors, kept, like)


def _run_without_tokens(tensors: Tensors, options: Options) -> prepared.Gradients:
    """The state passes through, and so does its gradient."""
    grads = _allocate(tensors[:7], options)
    for grad, last in zip(grads[5:], tensors[-2:], strict=True):
        if grad is not None:
            grad.zero_() if last is None else grad.copy_(last)
    return grads


class Backward:
    """The backward of calls whose tensors lie alike, as `readable` leaves them but for odd
    addresses. kept: of such a call; the forwards of all of them are cut in the same way. like: as in
    `run`."""

    def __init__(self, tensors: Tensors, options: Options, kept: Kept | None, like: Tensors | None) -> None:
        self._options = options
        self._device = tensors.q.get_device()
        grads = _allocate((like or tensors)[:7], options, "meta")
        self._unwritable = [n for n, x in enumerate(grads) if x is not None and not _is_writable(x, n)]
        left = None if kept is None else kept.layout
        call, written, states_given = _describe(tensors, options, left, self._as_written(grads))
        self._memory_size = call.plan.bytes // tensors.q.itemsize
        self._parts = walks.parts_of(call.dims[1]) if written.dn_of_parts else 0
        before = launches.before_gradients(call, states_given=states_given)
        of_walks = launches.of_gradients(call, written)
        gates = [launches.of_gates(call, written)] if options.needs_df else []
        # the gates read dn_initial
        groups = (before, of_walks, gates) if self._parts else (before, of_walks + gates, [])
        self._before, self._walks, self._gates = (build.launches(group) for group in groups)

    def __call__(self, tensors: Tensors, kept: Kept | None, like: Tensors | None) -> prepared.Gradients:
        at = starts(*tensors)
        q, k, v, _, _, c, n, _, _, h, _, _, _, c_last, n_last, dh, dc_last, dn_last = at
        if (q | k | v | c | n | h | c_last | n_last | dh | dc_last | dn_last) % ADDRESS_ALIGNMENT:
            read = prepared.readable(tensors, _OPERANDS, _STATES)
            return run(read, self._options, kept, tensors if like is None else like)
        # of q's dtype because that need not be said, which is half of the time
        memory = tensors.q.new_empty(self._memory_size)
        at += starts(memory, None if kept is None else kept.tensors[0])
        stream = current_stream(self._device)
        # the gradients only then, so that a GPU that waits for the host has work early
        self._before(at, stream)
        grads = _allocate((like or tensors)[:7], self._options)
        written = self._as_written(grads) if self._unwritable else grads
        at += starts(*written)
        if self._parts:
            # the walks, which have a dn_initial for each part of V, their sum, and the gates
            of_parts = written[6].new_empty((self._parts, *written[6].shape))
            at += starts(of_parts)
            self._walks(at, stream)
            torch.sum(of_parts, dim=0, out=written[6])
            self._gates(at, stream)
        else:
            self._walks(at, stream)
        for place in self._unwritable:
            grads[place].copy_(written[place])
        return grads

    def _as_written(self, grads: prepared.Gradients) -> prepared.Gradients:
        """The gradients as they lie where the kernels can write them so, else contiguous ones."""
        return tuple(x.new_empty(x.shape) if n in self._unwritable else x for n, x in enumerate(grads))


def _allocate(like: Sequence[Any], options: Options, device: str | None = None) -> prepared.Gradients:
    """Uninitialised gradients, each like its input; those of q and k for every head of v. On the device
    "meta" they take no memory."""
    q, k, v, i, f, c_initial, n_initial = like
    dq = dk = di = df = dc = dn = None
    if q.shape[:3] == v.shape[:3]:
        dq, dk = torch.empty_like(q, device=device), torch.empty_like(k, device=device)
    else:
        shape = (*v.shape[:3], q.shape[3])
        dq, dk = q.new_empty(shape, device=device), k.new_empty(shape, device=device)
    if options.needs_df:
        di, df = None if i is None else torch.empty_like(i, device=device), torch.empty_like(f, device=device)
    if c_initial is not None:
        dc = torch.empty_like(c_initial, device=device)
    if n_initial is not None:
        dn = torch.empty_like(n_initial, device=device)
    return dq, dk, torch.empty_like(v, device=device), di, df, dc, dn


def _is_writable(grad: Tensor, place: int) -> bool:
    """Whether the kernels can write the gradient of this place among `Gradients` as it lies."""
    if place < 3:
        return prepared.descriptor_strides(grad.shape, grad.stride()) is not None
    return place < 5 or grad.is_contiguous()


def _describe(
    x: Tensors, options: Options, left: Left | None, grads: prepared.Gradients
) -> tuple[Call, Grads, bool]:
    """What the kernels of a call read and write (grads), and whether states are those that the forward has
    left. prepared.Addresses are numbered in the order in which `Backward` says where the tensors begin."""
    addresses, normalize = prepared.Addresses(), options.normalize
    at: Any = Tensors(*[addresses.next(given=tensor is not None) for tensor in x])  # type: ignore[arg-type]
    memory_at, kept_at = addresses.next(), addresses.next()
    to = [addresses.next(given=grad is not None) for grad in grads]
    grads = *heads_last(grads[:5], x.v, options), *grads[5:]
    q, k, v, h, dh, i, f = heads_last((x.q, x.k, x.v, x.h, x.dh, x.i, x.f), x.v, options)
    x = x._replace(q=q, k=k, v=v, h=h, dh=dh, i=i, f=f)
    batch, seq, heads, dim_v = x.v.shape
    sizes, group = (batch, heads, seq, x.q.shape[3], dim_v), heads // x.k.shape[2]
    half, device, offsets = x.q.dtype == torch.float16, x.q.get_device(), x.cu_seqlens
    sequences = sizes[0] if offsets is None else offsets.shape[0] - 1
    of_cut = {"packed": offsets is not None, "batch_invariant": options.batch_invariant}
    cut = walks.cut_sequences(sizes, sequences, multiprocessors(device), **of_cut)
    narrow = walks.is_narrow(*sizes[3:])
    states_given = left is not None and (narrow or left.cut == cut)
    kernels = walks.instances_of(
        *sizes[3:], half=half, normalize=normalize, sigmoid_gate=options.sigmoid_gate, decay=options.decay,
        needs_df=options.needs_df,
    )  # fmt: skip
    if cut.segments > sequences:
        kernels += walks.instances_of_cut(*sizes[3:], half=half)
    build.load(instances.CHUNKWISE, *kernels)
    slots = chunk_slots(seq, offsets)
    plan = walks.make_plan(sizes, sequences, slots, cut, memory_at, options, states_given=states_given)
    of_one_walk = 0, 0, 0
    if left is not None and states_given:
        first, second = (kept_at + offset for offset in left.offsets)
        of_n = second if normalize else 0
        if narrow:
            of_one_walk = kept_at, first, of_n
        else:
            plan.memory.state_c, plan.memory.state_n = first, of_n
    operands = {name: prepared.operand_at(getattr(at, name), getattr(x, name)) for name in _OPERANDS}
    gates = {name: prepared.gate_at(getattr(at, name), getattr(x, name)) for name in ("i", "f")}
    read = at._replace(**operands, **gates, n_initial=at.n_initial if normalize else 0)
    is_64bit = offsets is not None and offsets.dtype == torch.int64
    of_cut_at = at.cu_seqlens, is_64bit, sequences, *cut
    call = Call(plan, sizes, read, of_cut_at, of_one_walk, options, group, half, device)
    has_parts = grads[6] is not None and walks.parts_of(dim_v) > 1
    operands_of_grads = [prepared.operand_at(*of) for of in zip(to[:3], grads[:3], strict=True)]
    gates_of_grads = [prepared.gate_at(*of) for of in zip(to[3:5], grads[3:5], strict=True)]
    parts_at = addresses.next() if has_parts else 0
    written = Grads._make((*operands_of_grads, *gates_of_grads, *to[5:], parts_at))
    return call, written, states_given


_backwards: Memo[Backward] = Memo()
