"""A call of KDA as its kernels take it: sizes, readable tensors, prepared addresses."""

from functools import cached_property
from typing import Any, NamedTuple

from tfla_tk.backends.tk.operands import log_decay, multiprocessors
from tfla_tk.backends.tk.prepared import Scratch, Sizes, gate_at, operand_at, per_head_at
from tfla_tk.build import instances
from tfla_tk.build.instances import Instance
from tfla_tk.calls.kda import KDACore
from tfla_tk.core.layout import DTYPES

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

    @property
    def kernels(self) -> tuple[Instance, Instance]:
        """Those of the forward."""
        tile = instances.tile_of(self.dim_k, instances.KDA_TILES)
        return instances.kda("matrices", tile, self.half), instances.kda(
            "forward", tile, self.half, self.walkers
        )

    @property
    def backward_kernels(self) -> tuple[Instance, Instance]:
        """Those of the backward, but for what adds up dq and dk of heads."""
        tile = instances.tile_of(self.dim_k, instances.KDA_TILES)
        mirror = instances.kda("mirror", tile, self.half, self.walkers)
        return mirror, instances.kda("gradients", tile, self.half)


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
        *(q, k, g, DTYPES[core.g.dtype], gate_at(at.beta, core.beta)),
        *(per_head_at(at.A_log, core.A_log), per_head_at(at.dt_bias, core.dt_bias, dim_k)),
        *(*log_decay(core), core.scale),
        *(core.qk_l2norm, core.beta_sigmoid, core.neg_eigval),
    )
