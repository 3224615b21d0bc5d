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

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from tfla_tk import build
from tfla_tk.backends.tk.operands import (
    ADDRESS_ALIGNMENT,
    Gate,
    Operand,
    as_operand,
    as_state,
    descriptor_strides,
)
from tfla_tk.backends.tk.operands import current_stream as _current_stream
from tfla_tk.backends.tk.operands import multiprocessors as _multiprocessors
from tfla_tk.backends.tk.prepared import Addresses
from tfla_tk.backends.tk.scalar_gate import forward as tk_forward
from tfla_tk.backends.tk.scalar_gate import launches
from tfla_tk.backends.tk.scalar_gate.launches import Call, Grads
from tfla_tk.backends.tk.scalar_gate.walks import (
    Sizes,
    cut_sequences,
    instances_of,
    instances_of_cut,
    is_narrow,
    make_plan,
)
from tfla_tk.build import instances
from tfla_tk.calls.mlstm import MaybeGrads
from tfla_tk.core.layout import DTYPES, KeptStates, MaybeTensor, chunk_slots
from tfla_tk.core.memo import Memo

# q, k, v, i, f, c_initial, n_initial, cu_seqlens,
# h, row_n, row_m, chunk_m, c_last, n_last, dh, dc_last, dn_last
Tensors: TypeAlias = tuple[Any, ...]

# of the first seven: dq, dk, dv, di, df, dc_initial, dn_initial
Gradients: TypeAlias = tuple[Any, ...]

_NO_GATE = (0, 0, 0, 0, 0)


class Options(NamedTuple):
    """What calls of a kind have in common beside how their tensors lie.

    Attributes:
        scale: of q k^T.
        needs_df: without it di and df come back as None.
        decay, heads_last: as in `forward.Options`.
        batch_invariant: nothing of a sequence's results depends on what else is in the call.
    """

    sigmoid_gate: bool
    normalize: bool
    eps: float
    scale: float
    needs_df: bool = True
    decay: bool = False
    heads_last: bool = False
    batch_invariant: bool = False


def mlstm_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c_initial: MaybeTensor,
    n_initial: MaybeTensor,
    m_initial: MaybeTensor,
    cu_seqlens: MaybeTensor,
    h: Tensor,
    row_n: MaybeTensor,
    row_m: MaybeTensor,
    chunk_m: MaybeTensor,
    c_last: MaybeTensor,
    n_last: MaybeTensor,
    dh: Tensor,
    dc_last: MaybeTensor,
    dn_last: MaybeTensor,
    sigmoid_gate: bool,
    normalize: bool,
    eps: float,
    batch_invariant: bool = False,
    states: KeptStates | None = None,
) -> MaybeGrads:
    """Launch the mLSTM backward on the current stream; arguments and results are those of tfla_tk::mlstm_bwd.

    Where no initial state is given its gradients are None.

    Args:
        batch_invariant: as in `Options`.
        states: the last result of `forward.mlstm_fwd`, which is then not made again.

    Raises:
        BuildError: A kernel is not compiled yet and cannot be.
        RuntimeError: A launch was refused.
    """
    if not normalize:
        n_last = dn_last = row_n = None
    elif (row_n is None or row_n.numel() == 0) and v.numel() > 0:
        raise ValueError("mlstm_bwd with a normaliser needs row_n of its forward")
    tensors = (
        *(q, k, v, i, f, c_initial, n_initial, cu_seqlens),
        *(h, row_n, row_m, chunk_m, c_last, n_last, dh, dc_last, dn_last),
    )
    options = Options(sigmoid_gate, normalize, eps, q.shape[-1] ** -0.5, batch_invariant=batch_invariant)
    return run(tensors, options, states, m_initial=m_initial)


def run(
    tensors: Tensors,
    options: Options,
    states: KeptStates | None = None,
    like: Tensors | None = None,
    m_initial: MaybeTensor = None,
) -> Gradients:
    """The gradients of mLSTM or of a scalar decay, on the current stream.

    Args:
        tensors: None for what there is not. With a decay there is no i, and f is its natural log; q and k may
            have fewer heads than v, each shared by as many neighbouring heads of v: dq and dk come back for
            every head of v then. h is read with a normaliser alone.
        states: what the forward has kept.
        like: what some of the tensors are copies of; gradients lie like these.
        m_initial: with stabilised gates and an initial state.

    Raises:
        BuildError: A kernel is not compiled yet and cannot be.
        RuntimeError: A launch was refused.
    """
    if tensors[2].numel() == 0:
        return _run_without_tokens(tensors, options)
    if states is None and is_narrow(tensors[0].shape[-1], tensors[2].shape[-1]):
        states = _states_of_another_forward(tensors, options, m_initial)
    key = _layout(tensors, options, states, like)
    backward = _backwards.get(key)
    if backward is None:
        backward = _prepare(tensors, options, states, like)
        _backwards.keep(key, backward)
    return backward(tensors, states, like)


def _prepare(
    tensors: Tensors, options: Options, states: KeptStates | None, like: Tensors | None
) -> Callable[[Tensors, KeptStates | None, Tensors | None], Gradients]:
    """`run` for all tensors that lie like these."""
    if all(x is given for x, given in zip(_readable(tensors), tensors, strict=True)):
        return Backward(tensors, options, states, like)
    return functools.partial(_run_copies, options)


def _run_copies(
    options: Options, tensors: Tensors, states: KeptStates | None, like: Tensors | None
) -> Gradients:
    return run(_readable(tensors), options, states, tensors if like is None else like)


def _states_of_another_forward(
    tensors: Tensors, options: Options, m_initial: MaybeTensor
) -> KeptStates | None:
    """The states of a call whose own forward has kept none."""
    q, k, v, i, f, c, n, cu_seqlens, *_ = tensors
    return tk_forward.run((q, k, v, i, f, c, n, m_initial, cu_seqlens), _keeping(options))[7]


@functools.lru_cache(maxsize=1024)
def _keeping(options: Options) -> tk_forward.Options:
    """Of a forward that keeps states for a backward of these options."""
    return tk_forward.Options(
        options.sigmoid_gate,
        options.normalize,
        options.eps,
        return_last_states=False,
        return_rows=False,
        batch_invariant=options.batch_invariant,
        keep_states=True,
        scale=options.scale,
        decay=options.decay,
        heads_last=options.heads_last,
    )


def _run_without_tokens(tensors: Tensors, options: Options) -> Gradients:
    """The state passes through, and so does its gradient."""
    grads = _allocate(tensors, options)
    for grad, last in zip(grads[5:], tensors[-2:], strict=True):
        if grad is not None:
            grad.zero_() if last is None else grad.copy_(last)
    return grads


def _layout(tensors: Tensors, options: Options, states: KeptStates | None, like: Tensors | None) -> Any:
    """All that the launches of a call depend on but for addresses."""
    q, k, v, i, f, c, n, cu_seqlens, h, _, _, _, c_last, n_last, dh, dc_last, dn_last = tensors
    key = (
        options,
        q.get_device(),
        q.dtype,
        q.shape,
        v.shape,
        q.stride(),
        k.stride(),
        v.stride(),
        h.stride(),
        dh.stride(),
        f.stride(),
        f.dtype,
        None if i is None else (i.stride(), i.dtype),
        None if cu_seqlens is None else (cu_seqlens.shape, cu_seqlens.stride(), cu_seqlens.dtype),
        None if c is None else c.stride(),
        None if n is None else n.stride(),
        None if c_last is None else c_last.stride(),
        None if n_last is None else n_last.stride(),
        None if dc_last is None else dc_last.stride(),
        None if dn_last is None else dn_last.stride(),
        None if states is None else states[1:],
    )
    return key if like is None else (*key, *(None if x is None else x.stride() for x in like[:7]))


def _readable(tensors: Tensors) -> Tensors:
    """The tensors as they lie where the kernels can take them so, else copies."""
    q, k, v, i, f, c, n, cu_seqlens, h, row_n, row_m, chunk_m, c_last, n_last, dh, dc_last, dn_last = tensors
    return (
        *(as_operand(q), as_operand(k), as_operand(v), i, f, as_state(c), as_state(n)),
        None if cu_seqlens is None else cu_seqlens.contiguous(),
        *(as_operand(h), row_n, row_m, chunk_m, as_state(c_last), as_state(n_last)),
        *(as_operand(dh), as_state(dc_last), as_state(dn_last)),
    )


class Backward:
    """The backward of calls whose tensors lie alike, as `_readable` leaves them but for odd addresses.

    Args:
        states: of such a call; the forwards of all of them are cut in the same way.
        like: as in `run`.
    """

    def __init__(
        self, tensors: Tensors, options: Options, states: KeptStates | None, like: Tensors | None
    ) -> None:
        q: Tensor = tensors[0]
        self._options = options
        self._device = q.get_device()
        grads = _allocate(tensors if like is None else like, options, "meta")
        self._unwritable = [n for n, x in enumerate(grads) if x is not None and not _is_writable(x, n)]
        call, written, states_given = _describe(tensors, options, states, self._as_written(grads))
        self._memory_size = call.plan.bytes // q.itemsize
        self._parts = call.plan.parts if written.dn_of_parts else 0
        before = launches.before_gradients(call, states_given=states_given)
        walks = launches.of_gradients(call, written)
        gates = [launches.of_gates(call, written)] if options.needs_df else []
        # the gates read dn_initial
        groups = (before, walks, gates) if self._parts else (before, walks + gates, [])
        self._before, self._walks, self._gates = (build.launches(group) for group in groups)

    def __call__(self, tensors: Tensors, states: KeptStates | None, like: Tensors | None) -> Gradients:
        """`run` of these tensors."""
        starts = [0 if x is None else x.data_ptr() for x in tensors]
        q, k, v, _, _, c, n, _, h, _, _, _, c_last, n_last, dh, dc_last, dn_last = starts
        if (q | k | v | c | n | h | c_last | n_last | dh | dc_last | dn_last) % ADDRESS_ALIGNMENT:
            return _run_copies(self._options, tensors, states, like)
        # of q's dtype because that need not be said, which is half of the time
        memory = tensors[0].new_empty(self._memory_size)
        starts.append(memory.data_ptr())
        starts.append(0 if states is None else states.workspace.data_ptr())
        stream = _current_stream(self._device)
        # the gradients only then, so that a GPU that waits for the host has work early
        self._before(starts, stream)
        grads = _allocate(tensors if like is None else like, self._options)
        written = self._as_written(grads) if self._unwritable else grads
        starts += [0 if x is None else x.data_ptr() for x in written]
        if self._parts:
            self._run_parts(starts, stream, written[6])
        else:
            self._walks(starts, stream)
        for place in self._unwritable:
            grads[place].copy_(written[place])
        return grads

    def _run_parts(self, starts: list[int], stream: int, dn_initial: Tensor) -> None:
        """The walks, which have a dn_initial for each part of V, their sum, and the gates."""
        of_parts = dn_initial.new_empty((self._parts, *dn_initial.shape))
        starts.append(of_parts.data_ptr())
        self._walks(starts, stream)
        torch.sum(of_parts, dim=0, out=dn_initial)
        self._gates(starts, stream)

    def _as_written(self, grads: Gradients) -> Gradients:
        """The gradients as they lie where the kernels can write them so, else contiguous ones."""
        return tuple(x.new_empty(x.shape) if n in self._unwritable else x for n, x in enumerate(grads))


def _allocate(like: Sequence[Any], options: Options, device: str | None = None) -> Gradients:
    """Uninitialised gradients, each like its input; those of q and k for every head of v.

    Args:
        device: in place of theirs: on "meta" they take no memory.
    """
    q, k, v, i, f, c_initial, n_initial = like[:7]
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
        return descriptor_strides(grad.shape, grad.stride()) is not None
    return place < 5 or grad.is_contiguous()


def _describe(
    tensors: Tensors, options: Options, states: KeptStates | None, grads: Gradients
) -> tuple[Call, Grads, bool]:
    """What the kernels of a call read, what they write, and whether states are those that the forward kept.

    Addresses are numbered in the order in which `Backward` says where the tensors begin.

    Args:
        grads: as the kernels write them.
    """
    q, k, v, i, f, _, _, cu_seqlens, h, _, _, _, _, _, dh, _, _ = tensors
    addresses, normalize, last = Addresses(), options.normalize, options.heads_last
    at = [addresses.next(given=x is not None) for x in tensors]
    memory_at, kept_at = addresses.next(), addresses.next()
    to = [addresses.next(given=x is not None) for x in grads]
    sizes, group = _sizes(q, k, v, heads_last=last)
    sequences = sizes[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    invariant = options.batch_invariant
    cut = cut_sequences(
        sizes,
        sequences,
        _multiprocessors(q.get_device()),
        packed=cu_seqlens is not None,
        batch_invariant=invariant,
    )
    narrow = is_narrow(*sizes[3:])
    states_given = states is not None and (narrow or states.cut == cut)
    kinds = {"half": q.dtype == torch.float16, "normalize": normalize, "decay": options.decay}
    kernels = instances_of(
        *sizes[3:],
        **kinds,
        sigmoid_gate=options.sigmoid_gate and not options.decay,
        needs_df=options.needs_df,
    )
    if cut.segments > sequences:
        kernels += instances_of_cut(*sizes[3:], **kinds)
    build.load(instances.CHUNKWISE[options.decay], *kernels)
    plan = make_plan(
        sizes,
        sequences,
        chunk_slots(sizes[2], cu_seqlens),
        cut,
        normalize=normalize,
        decay=options.decay,
        states_given=states_given,
        batch_invariant=invariant,
        needs_df=options.needs_df,
    )
    memory, left = plan.memory_at(memory_at), (0, 0, 0)
    if narrow:
        assert states is not None
        of_units, of_norms = states.offsets
        left = (kept_at, kept_at + of_units, kept_at + of_norms if normalize else 0)
    elif states is not None and states_given:
        of_c, of_n = states.offsets
        memory = memory._replace(state_c=kept_at + of_c, state_n=kept_at + of_n if normalize else 0)
    call = Call(
        plan=plan,
        memory=memory,
        sizes=sizes,
        q=_operand(at[0], q, heads_last=last),
        k=_operand(at[1], k, heads_last=last),
        v=_operand(at[2], v, heads_last=last),
        i=_gate(at[3], i, v, heads_last=last),
        f=_gate(at[4], f, v, heads_last=last),
        c_initial=at[5],
        n_initial=at[6] if normalize else 0,
        cut=(at[7], cu_seqlens is not None and cu_seqlens.dtype == torch.int64, sequences, *cut),
        left=left,
        h=_operand(at[8], h, heads_last=last),
        row_n=at[9],
        row_m=at[10],
        chunk_m=at[11],
        c_last=at[12],
        n_last=at[13],
        dh=_operand(at[14], dh, heads_last=last),
        dc_last=at[15],
        dn_last=at[16],
        eps=options.eps,
        scale=options.scale,
        sigmoid_gate=options.sigmoid_gate,
        group=group,
        half=q.dtype == torch.float16,
        device=q.get_device(),
        decay=options.decay,
    )
    dq, dk, dv, di, df, _, dn_initial = grads
    written = Grads(
        _operand(to[0], dq, heads_last=last),
        _operand(to[1], dk, heads_last=last),
        _operand(to[2], dv, heads_last=last),
        _gate(to[3], di, v, heads_last=last),
        _gate(to[4], df, v, heads_last=last),
        to[5],
        to[6],
        addresses.next() if dn_initial is not None and plan.parts > 1 else 0,
    )
    return call, written, states_given


def _sizes(q: Tensor, k: Tensor, v: Tensor, *, heads_last: bool) -> tuple[Sizes, int]:
    """Sizes of a call, and how many heads of v share one of q and k."""
    batch, heads, seq, dim_v = v.shape
    key_heads = k.shape[1]
    if heads_last:
        heads, seq, key_heads = seq, heads, k.shape[2]
    return (batch, heads, seq, q.shape[3], dim_v), heads // key_heads


def _operand(address: int, x: Tensor, *, heads_last: bool) -> Operand:
    strides = descriptor_strides(x.shape, x.stride())
    assert strides is not None
    batch, head, row = strides
    return (address, batch, row, head) if heads_last else (address, batch, head, row)


def _gate(address: int, x: MaybeTensor, v: Tensor, *, heads_last: bool) -> Gate:
    """A gate or its gradient as the kernels take it; with the heads last its sizes may be fewer than v's."""
    if x is None:
        return _NO_GATE
    if heads_last:
        x = x.expand(v.shape[:3]).transpose(1, 2)
    return address, *x.stride(), DTYPES[x.dtype]


_backwards: Memo[Callable[[Tensors, KeptStates | None, Tensors | None], Gradients]] = Memo()
