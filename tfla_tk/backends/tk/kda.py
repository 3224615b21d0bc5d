"""KDA on the ThunderKittens kernels: what they support, and their launches on the current stream. The
protocol is that of `ops.linear`.

The forward has two kernels: the matrices kernel makes of every chunk in parallel what the walk needs of q, k,
g and beta (kernels/kda/bindings/params.h); the walk over the chunks reads that and v alone. A training call
keeps what the first has made, and the states that enter chunks, which its walk leaves then.

The backward has two as well: the mirror of the walk, backward in time, leaves R', of which dv follows, and
the gradients of the states that leave chunks; with these and the forward's states the kernel of the gradients
makes those of every chunk in parallel. Heads of v that share a head of q and k have a dq and a dk each, which
the delta rule's kernel adds up. Gradients of A_log and dt_bias are sums over what every chunk leaves of them.
"""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tfla_tk import build
from tfla_tk.backends.tk import device, prepared, refusals
from tfla_tk.backends.tk.prepared import (
    ADDRESS_ALIGNMENT,
    Scratch,
    Sizes,
    current_stream,
    multiprocessors,
    operand_at,
    starts,
)
from tfla_tk.build import instances
from tfla_tk.build.instances import Instance
from tfla_tk.calls.delta_rule import KDACall, KDACore
from tfla_tk.core.errors import UnsupportedError
from tfla_tk.core.layout import DTYPES, Kept, MaybeTensor, dense_like
from tfla_tk.core.memo import Memo
from tfla_tk.core.support import Support

_OPERANDS = ("q", "k", "v", "g")  # of a `KDACore`
_WALKER_COLUMNS = 64  # of V that a walker owns
MOST_TRAINED_V = 128  # of the backward, where a CTA has the whole of V
# cycles of a chunk of the walk with one walker on a multiprocessor and with two: those of the delta rule
_CYCLES = {1: 1830, 2: 2770}


class Shape(Sizes):
    """Sizes of a call, as the kernels take them."""

    @cached_property
    def walkers(self) -> int:
        """Of a CTA of the walk: two share what they load, one alone is done earlier where there are few
        CTAs. Results are the same, so calls that are to be batch invariant have either, too."""
        columns = -(-self.dim_v // _WALKER_COLUMNS)

        def cycles(walkers: int) -> int:
            ctas = self.sequences * self.heads * -(-columns // walkers)
            return -(-ctas // multiprocessors(self.device)) * _CYCLES[walkers]

        return 1 if columns == 1 or cycles(1) <= cycles(2) else 2

    def kernels_of(self, plain: str, walk: str) -> tuple[Instance, Instance]:
        """One without walkers and a walk."""
        of: dict[str, Any] = {"half": self.half, "tile": instances.tile_of(self.dim_k, instances.KDA_TILES)}
        return instances.kernel_of(plain, **of), instances.kernel_of(walk, **of, walkers=self.walkers)

    @property
    def kernels(self) -> tuple[Instance, Instance]:
        return self.kernels_of("kda_matrices", "kda_forward")

    @property
    def backward_kernels(self) -> tuple[Instance, Instance]:
        """But for what adds up dq and dk of heads."""
        return self.kernels_of("kda_gradients", "kda_mirror")


class Left(NamedTuple):
    """Where the kernels of the forward leave what others read, prepared addresses in one allocation.
    tiles: the tiles, the factors, A and P: all that the walks read of q, k, g and beta. states: that enter
    chunks, for a backward; 0 for none."""

    tiles: tuple[int, ...]
    states: int

    @staticmethod
    def of(kernel: Any, sizes: tuple[int, ...], scratch: Scratch, *, keep: bool) -> "Left":
        """Takes the places; kernel: what launches the kernels. keep: for a backward."""
        of_tiles, of_factors, of_matrix = kernel.tiles_bytes(sizes)
        tiles = tuple(scratch.take(size) for size in (of_tiles, of_factors, of_matrix, of_matrix))
        return Left(tiles, scratch.take(kernel.states_bytes(sizes)) if keep else 0)


def _inputs_at(at: Any, core: KDACore, dim_k: int) -> tuple[Any, ...]:
    """What the kernels that read q, k, g and beta take of them, at prepared addresses, and of the options."""
    q, k, g = (operand_at(address, x) for address, x in ((at.q, core.q), (at.k, core.k), (at.g, core.g)))
    return (
        *(q, k, g, DTYPES[core.g.dtype], prepared.gate_at(at.beta, core.beta)),
        *(prepared.per_head_at(at.A_log, core.A_log), prepared.per_head_at(at.dt_bias, core.dt_bias, dim_k)),
        *(*prepared.log_decay(core), core.scale),
        *(core.qk_l2norm, core.beta_sigmoid, core.neg_eigval),
    )


def supports_kda(call: KDACall, variant: str | None = None) -> Support:
    of_gradients = of_states = None
    if call.requires_grad and call.dim_v > MOST_TRAINED_V:
        reason = f"V = {call.dim_v}, of a call with gradients the kernels take {MOST_TRAINED_V}"
        of_gradients = Support(False, reason, "use backend 'triton', or torch.no_grad()")
    if call.intermediate_states:
        reason = "return_intermediate_states: the kernels keep no states between chunks for the caller"
        of_states = Support(False, reason, "use backend 'triton'")
    most = max(instances.KDA_TILES), instances.MAX_DIM_V
    refusal = refusals.of_call(call, variant, most, of_gradients, of_states)
    return refusal or _of_kernels(call, partial(device.supports, call.device))


def load(call: KDACall) -> Support:
    return _of_kernels(call, device.load)


def _of_kernels(call: KDACall, judge: Callable[..., Support]) -> Support:
    """What `judge` says of the kernels of a call, and of the one of another launcher that it may take."""
    found = judge(_kernels_of, *_key(call))
    if found.ok and call.requires_grad and call.value_heads > call.heads:
        return judge(_combine_of, call.dtype == torch.float16)
    return found


def _key(call: KDACall) -> tuple[Any, ...]:
    """The arguments of `_kernels_of`: plain numbers, the head dims alone where torch.compile has sizes as
    symbols."""
    dims = refusals.power_of_two(call.dim_qk), refusals.power_of_two(call.dim_v)
    known = device.known_sizes(call.device, call.sequences, call.value_heads, call.seq)
    return dims, (call.dtype == torch.float16, call.requires_grad), known


def _kernels_of(
    dims: tuple[int, int], options: tuple[bool, bool], sizes: tuple[int, ...] | None
) -> device.Kernels:
    """The kernels of a call; without sizes those that most such calls take. What others take is loaded when
    they are launched."""
    half, trains = options
    sequences, heads, seq, where = sizes or (8, 16, 8192, 0)
    shape = Shape(sequences, 0, sequences, heads, seq, *dims, 1, half, where, False)
    return instances.KDA, (*shape.kernels, *(shape.backward_kernels if trains else ()))


def _combine_of(half: bool) -> device.Kernels:
    """What adds up dq and dk of heads that share one."""
    return instances.DELTA_RULE, (instances.kernel_of("delta_combine", half),)


def kept_layout(core: KDACore) -> tuple[int, ...]:
    """What says how things lie in what the forward of a call leaves with `keep`, beside the call itself: its
    elements of v's dtype."""
    shape, scratch = Shape.of(core), Scratch(0)
    kernel = build.load(instances.KDA)
    Left.of(kernel, shape.with_offsets(0 if core.cu_seqlens is None else 1), scratch, keep=True)
    return (scratch.bytes // core.v.itemsize,)


def backward(
    core: KDACore, kept: Kept | None, do: Tensor, dht: MaybeTensor, *, needs_gates: bool
) -> prepared.Gradients:
    """dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dh0. What was kept with another layout than `kept_layout`
    is made again."""
    _check_trainable(core)
    read, dout, last = prepared.readable(core, _OPERANDS), prepared.as_operand(do), prepared.as_state(dht)
    likes = None if read is core else tuple(x.stride() for x in core[:4])
    key = needs_gates, likes, dout.stride(), last is None, prepared.layout_of(read)
    found = _backwards.of(key, lambda: Backward(core, read, dout, last, needs_gates=needs_gates))
    return found(core, read, kept, dout, last)


def _check_trainable(core: KDACore) -> None:
    dim_v = core.v.shape[3]
    if dim_v > MOST_TRAINED_V:
        reason = f"V = {dim_v}, with gradients the kernels take {MOST_TRAINED_V}"
        raise UnsupportedError("KDA's backward", reason, "use backend 'triton' or 'reference'")


class Forward:
    """The forward of calls whose tensors lie alike, as `readable` leaves them but for odd addresses: o [B, T,
    HV, V], the final state [N, HV, K, V] or None, and with `keep` one allocation of what the backward reads
    (`Left`). K up to 128, both head dims multiples of 16."""

    def __init__(self, core: KDACore, *, output_final_state: bool, keep: bool) -> None:
        if keep:
            _check_trainable(core)
        shape = Shape.of(core)
        self._device, self._others = shape.device, core[9:]
        self._options: dict[str, Any] = {"output_final_state": output_final_state, "keep": keep}
        self._last_shape = shape.state_shape if output_final_state else None
        kernel = build.load(instances.KDA, *shape.kernels)
        at, addresses = prepared.number(core)
        o_at, last_at = addresses.next(), addresses.next(given=output_final_state)
        scratch = Scratch(addresses.next())
        sizes = shape.with_offsets(at.cu_seqlens)
        left = Left.of(kernel, sizes, scratch, keep=keep)
        self._left_size = scratch.bytes // core.v.itemsize
        self._kept_layout = (self._left_size,) if keep else None
        o = operand_at(o_at, dense_like(core.v, "meta"))
        self._run = build.launches(
            [
                kernel.matrices(sizes, *_inputs_at(at, core, shape.dim_k), left.tiles),
                kernel.forward(
                    sizes, operand_at(at.v, core.v), o, left.tiles, at.initial_state, last_at,
                    left.states, shape.walkers,
                ),
            ]
        )  # fmt: skip

    def __call__(self, *tensors: Any) -> prepared.Outputs:
        at = starts(*tensors)
        if (at[0] | at[1] | at[2] | at[3] | at[7]) % ADDRESS_ALIGNMENT:
            return forward(KDACore._make((*tensors, *self._others)), **self._options)
        v = tensors[2]
        o = dense_like(v)
        last = None if self._last_shape is None else v.new_empty(self._last_shape, dtype=torch.float32)
        # of v's dtype because that need not be said to torch, which is half of the time
        left = v.new_empty(self._left_size)
        at += starts(o, last, left)
        self._run(at, current_stream(self._device))
        return o, last, Kept((left,), self._kept_layout) if self._kept_layout else None


class Backward:
    """The backward of calls whose tensors and gradients lie alike. given: the call as gradients are like
    it. core: as `readable` leaves it; so are do and dht."""

    def __init__(
        self, given: KDACore, core: KDACore, do: Tensor, dht: MaybeTensor, *, needs_gates: bool
    ) -> None:
        shape = Shape.of(core)
        self._device, self._needs_gates = shape.device, needs_gates
        kernel = build.load(instances.KDA, *shape.backward_kernels)
        at, addresses = prepared.number(core)
        dout, dht_at = operand_at(addresses.next(), do), addresses.next(given=dht is not None)
        sizes, kept = shape.with_offsets(at.cu_seqlens), Scratch(addresses.next())
        left = Left.of(kernel, sizes, kept, keep=True)
        self._kept_layout = (kept.bytes // core.v.itemsize,)
        self._results = prepared.Results(given[:4], addresses)
        dq, dk, dv, dg = self._results.operands
        dbeta_at, dh0_at = addresses.next(), addresses.next(given=core.initial_state is not None)
        # parts of what chunks leave for dA_log and ddt_bias. Packed sequences leave some slots empty
        per_chunk = (shape.batch, shape.heads, shape.slots)
        wanted = [needs_gates and core.is_raw and x is not None for x in (core.A_log, core.dt_bias)]
        sizes_of_parts = per_chunk, (*per_chunk, shape.dim_k)
        self._parts = [size if given else None for size, given in zip(sizes_of_parts, wanted, strict=True)]
        self._has_empty_slots = core.cu_seqlens is not None
        of_rate_at, of_bias_at = (addresses.next(given=x is not None) for x in self._parts)
        scratch = Scratch(addresses.next())
        state_gradients = scratch.take(kernel.states_bytes(sizes))
        of_heads, combining = [dq, dk], list[prepared.Launch]()
        if shape.group > 1:
            size = (shape.batch, shape.seq, shape.heads, shape.dim_k)
            of_heads = [scratch.take_dense(size, core.q.itemsize) for _ in range(2)]
            delta_rule = build.load(instances.DELTA_RULE, instances.kernel_of("delta_combine", shape.half))
            combining = [delta_rule.combine(shape.with_offsets(0), *of_heads, dq, dk, False)]
        # of q's dtype because that need not be said to torch, which is half of the time
        self._scratch_size = scratch.bytes // core.q.itemsize
        self._run = build.launches(
            [
                kernel.mirror(
                    sizes, dout, dv, left.tiles, dht_at, dh0_at, state_gradients, shape.walkers,
                ),
                kernel.gradients(
                    sizes, *_inputs_at(at, core, shape.dim_k), left.tiles, operand_at(at.v, core.v),
                    left.states, state_gradients, dout, dv, *of_heads, dg, dbeta_at, of_bias_at, of_rate_at,
                ),
                *combining,
            ]
        )  # fmt: skip

    def __call__(
        self, given: KDACore, core: KDACore, kept: Kept | None, do: Tensor, dht: MaybeTensor
    ) -> prepared.Gradients:
        left = prepared.left_for(
            kept, self._kept_layout, lambda: forward(core, output_final_state=False, keep=True)[2]
        )
        results, written = self._results.allocate(given[:4])
        dbeta = core.beta.new_empty(core.beta.shape, dtype=torch.float32)
        initial = given.initial_state
        dh0 = None if initial is None else torch.empty_like(initial)
        dh0_written = prepared.writable_state(dh0)
        make = core.q.new_zeros if self._has_empty_slots else core.q.new_empty
        parts = [None if size is None else make(size, dtype=torch.float32) for size in self._parts]
        scratch = core.q.new_empty(self._scratch_size)
        at = starts(
            *core[:9], do, dht, left, *written, dbeta, dh0_written, *parts,
            scratch,
        )  # fmt: skip
        assert not (at[0] | at[1] | at[2] | at[3] | at[7] | at[9] | at[10]) % ADDRESS_ALIGNMENT
        self._run(at, current_stream(self._device))
        prepared.Results.fill(results, written)
        *of_operands, dg = results
        return (
            *of_operands,
            dg if self._needs_gates else None,
            _as(dbeta, given.beta),
            *map(_total, parts, (given.A_log, given.dt_bias)),
            prepared.filled(dh0, dh0_written),
        )


def _as(x: Tensor, like: Tensor) -> Tensor:
    """x, or where its dtype or strides are not those of `like`, the same numbers in such a tensor."""
    if x.dtype == like.dtype and x.stride() == like.stride():
        return x
    return torch.empty_like(like).copy_(x)


def _total(parts: MaybeTensor, like: MaybeTensor) -> MaybeTensor:
    """The sum of parts [B, HV, slots, ...] over sequences and chunks, like an input [HV ...]."""
    if parts is None or like is None:
        return None
    return _as(parts.sum((0, 2)).flatten(), like)


_forwards = prepared.Forwards(Forward, _OPERANDS)
forward, prepare = _forwards.run, _forwards.prepare
_backwards: Memo[Backward] = Memo()
