"""KDA by the ThunderKittens kernels, on the current stream.

The forward has two kernels: the matrices kernel makes of every chunk in parallel what the walk needs of q, k,
g and beta (kernels/kda/bindings/params.h); the walk over the chunks reads that and v alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tfla_tk import build
from tfla_tk.backends.tk.kda.call import Call, Shape, beta_at, number, per_head_at
from tfla_tk.backends.tk.operands import ADDRESS_ALIGNMENT, current_stream
from tfla_tk.backends.tk.prepared import Scratch, operand_at, starts
from tfla_tk.build import instances
from tfla_tk.core.layout import DTYPES, MaybeTensor, dense_like
from tfla_tk.core.memo import Memo


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float,
    A_log: MaybeTensor = None,
    dt_bias: MaybeTensor = None,
    lower_bound: float | None = None,
    qk_l2norm: bool = False,
    beta_sigmoid: bool = False,
    neg_eigval: bool = False,
    initial_state: MaybeTensor = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: MaybeTensor = None,
) -> tuple[Tensor, MaybeTensor]:
    """KDA's forward of tensors as `Call` has them, K up to 128, both head dims multiples of 16.

    Returns:
        o [B, T, HV, V] and the final state, like the initial one, or None.

    Raises:
        BuildError: A kernel is not compiled yet and cannot be.
        RuntimeError: A launch was refused.
    """
    call = Call(
        q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, scale, lower_bound, qk_l2norm,
        beta_sigmoid, neg_eigval, state_v_first,
    ).readable()  # fmt: skip
    key = output_final_state, call.layout()
    prepared = _forwards.get(key)
    if prepared is None:
        prepared = Forward(call, output_final_state=output_final_state)
        _forwards.keep(key, prepared)
    return prepared(*call.tensors)


class Forward:
    """The forward of calls whose tensors lie alike, as `Call.readable` leaves them."""

    def __init__(self, call: Call, *, output_final_state: bool) -> None:
        shape = Shape.of(call)
        self._device = shape.device
        of_state = (shape.dim_v, shape.dim_k) if call.state_v_first else (shape.dim_k, shape.dim_v)
        self._last_shape = (shape.sequences, shape.heads, *of_state) if output_final_state else None
        kernel = build.load(instances.KDA, *shape.kernels)
        at, addresses = number(call)
        o_at, last_at = addresses.next(), addresses.next(given=output_final_state)
        left = Scratch(addresses.next())
        sizes = shape.with_offsets(at.cu_seqlens)
        of_tiles, of_factors, of_matrix = kernel.tiles_bytes(sizes)
        tiles = tuple(left.take(size) for size in (of_tiles, of_factors, of_matrix, of_matrix))
        self._left_size = left.bytes // call.v.itemsize
        q, k, v, g = (operand_at(address, x) for address, x in zip(at[:4], call[:4], strict=True))
        self._run = build.launches(
            [
                kernel.matrices(
                    sizes, q, k, g, DTYPES[call.g.dtype], beta_at(at.beta, call.beta),
                    per_head_at(at.A_log, call.A_log), per_head_at(at.dt_bias, call.dt_bias, shape.dim_k),
                    *call.gate, call.scale, call.qk_l2norm, call.beta_sigmoid, call.neg_eigval, tiles,
                ),
                kernel.forward(
                    sizes, v, operand_at(o_at, dense_like(call.v, "meta")), tiles, at.initial_state, last_at,
                    call.state_v_first, shape.walkers,
                ),
            ]
        )  # fmt: skip

    def __call__(self, *tensors: MaybeTensor) -> tuple[Tensor, MaybeTensor]:
        """`forward` of these tensors, the first ones of a `Call`."""
        v = tensors[2]
        assert v is not None
        o = dense_like(v)
        last = None if self._last_shape is None else v.new_empty(self._last_shape, dtype=torch.float32)
        # of v's dtype because that need not be said to torch, which is half of the time
        left = v.new_empty(self._left_size)
        at = starts(*tensors, o, last, left)
        assert not (at[0] | at[1] | at[2] | at[3] | at[7]) % ADDRESS_ALIGNMENT
        self._run(at, current_stream(self._device))
        return o, last


_forwards: Memo[Forward] = Memo()
