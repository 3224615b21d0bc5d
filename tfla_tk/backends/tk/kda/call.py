"""A call of KDA as its kernels take it: sizes, prepared addresses; and what they support."""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch

from tfla_tk.backends.tk import device, prepared, refusals
from tfla_tk.backends.tk.prepared import Scratch, Sizes, multiprocessors, operand_at
from tfla_tk.build import instances
from tfla_tk.build.instances import Instance
from tfla_tk.calls.delta_rule import KDACall, KDACore
from tfla_tk.core.layout import DTYPES
from tfla_tk.core.support import Support

WALKER_COLUMNS = 64  # of V that a walker owns
MOST_TRAINED_V = 128  # of the backward, where a CTA has the whole of V
# cycles of a chunk of the walk with one walker on a multiprocessor and with two: those of the delta rule
_CYCLES = {1: 1830, 2: 2770}


class Shape(Sizes):
    """Sizes of a call, as the kernels take them."""

    @cached_property
    def walkers(self) -> int:
        """Of a CTA of the walk: two share what they load, one alone is done earlier where there are few
        CTAs. Results are the same, so calls that are to be batch invariant have either, too."""
        columns = -(-self.dim_v // WALKER_COLUMNS)

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


def inputs_at(at: Any, core: KDACore, dim_k: int) -> tuple[Any, ...]:
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
