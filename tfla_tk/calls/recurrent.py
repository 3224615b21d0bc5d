"""A few tokens of the operators in [B, T, H, D] by a recurrence: the call of its kernels."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tfla_tk.calls.linear import LinearCall
from tfla_tk.core.checks import check_bool, check_device, check_tensor, fail
from tfla_tk.core.layout import MaybeTensor

FEW = 8  # tokens that the decoding kernels take


class RecurrentCore(NamedTuple):
    """A call of the kernels; the arguments of the registered op tfla_tk::recurrent in their order. What has
    no comment is as of `DeltaRuleCore`."""

    q: Tensor
    k: Tensor
    v: Tensor
    # log decay [B, T, HV] or [B, T, HV, K], or what it is made from, as of a `KDACore`; None: nothing decays
    g: MaybeTensor
    beta: MaybeTensor  # writing strength [B, T, HV], or with beta_sigmoid its logit; None: not the delta rule
    A_log: MaybeTensor  # [HV], or None
    dt_bias: MaybeTensor  # [HV], with a decay per key channel [HV K], or None
    # [N, HV, K, V], or [N, HV, V, K] with state_v_first; None: zeros. N is B, or the number of packed
    # sequences
    initial_state: MaybeTensor
    cu_seqlens: MaybeTensor
    scale: float
    state_v_first: bool
    qk_l2norm: bool
    beta_sigmoid: bool
    neg_eigval: bool
    lower_bound: float | None  # as of a `KDACore`
    output_final_state: bool  # the state after the last token is wanted

    @property
    def by_channel(self) -> bool:
        return self.g is not None and self.g.dim() == 4

    @property
    def is_raw(self) -> bool:
        return self.g is not None and (self.A_log is not None or self.lower_bound is not None)

    @property
    def sequences(self) -> int:
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        dims = self.q.shape[-1], self.v.shape[-1]
        return self.sequences, self.v.shape[2], *(dims[::-1] if self.state_v_first else dims)


class Slots(NamedTuple):
    """Which states of a pool a call in place overwrites."""

    # int32 [N], the states of the sequences, or [N, columns], contiguous rows: the states behind their
    # tokens, one after the other; from the first token without one on, o is 0. None: no pool, but a state per
    # sequence
    indices: MaybeTensor = None
    # int32 [N], with indices [N, columns]: a sequence goes on from the state of its column accepted - 1.
    # None: from that of column 0
    accepted: MaybeTensor = None
    first: int = 0  # indices below it name no state

    @property
    def of_tokens(self) -> bool:
        """The state behind every token is kept."""
        return self.indices is not None and self.indices.dim() == 2


def check_recurrent(
    check: Callable[..., LinearCall],
    *,
    initial_state: Any,
    state_indices: Any,
    inplace: Any,
    **arguments: Any,
) -> LinearCall:
    """Check one call token by token and describe it. check: of the family's chunkwise functions.
    initial_state: as there, or with state_indices a pool [slots, HV, K, V]. state_indices: [N] int32, or
    None. inplace: the state is overwritten."""
    in_place = check_bool("inplace", inplace)
    if state_indices is not None:
        if not in_place:
            fail("inplace", "True with state_indices, which name the states to overwrite", inplace)
        check_tensor("initial_state", initial_state, 4, "[slots, HV, K, V] with state_indices")
        check_indices("state_indices", state_indices, initial_state)
        of_calls = initial_state[:1].expand(state_indices.shape[0], -1, -1, -1)
    else:
        of_calls = initial_state
    call = replace(check(initial_state=of_calls, **arguments), recurrent=True)
    if not in_place:
        return call
    if initial_state is None:
        fail("initial_state", "a tensor to overwrite with inplace=True", "None")
    if call.requires_grad:
        fail("inplace", "False where a gradient is recorded", in_place)
    if call.transformed:
        fail("inplace", "False under transforms of torch.func", in_place)
    *_, rows, columns = initial_state.shape
    if initial_state.stride()[1:] != (rows * columns, columns, 1):
        fail(
            "initial_state",
            "contiguous states [HV, K, V] with inplace=True",
            f"strides {initial_state.stride()}",
        )
    if not call.output_final_state:
        fail("output_final_state", "True with inplace=True, which returns the state", False)
    return replace(call, state_in_place=initial_state.dtype)


def check_indices(name: str, indices: Any, pool: Tensor, *, rank: int = 1, layout: str = "[N]") -> None:
    """Integers of 32 bits on the device of the pool."""
    if not isinstance(indices, Tensor):
        fail(name, f"a tensor {layout} or None", type(indices).__name__, TypeError)
    if indices.dtype != torch.int32:
        fail(name, "dtype int32", indices.dtype, TypeError)
    if indices.dim() != rank:
        fail(name, f"shape {layout}", f"{tuple(indices.shape)}")
    check_device(name, indices, pool.device)


def through_a_copy(serve: Callable[..., Any], at: int, *tensors: Any) -> tuple[Tensor, Tensor]:
    """A call in place by a backend that returns a new state: read what the indices name, and write it
    back. It waits for the GPU where there are indices. serve: the call that returns a new state. at: the
    place of the state; cu_seqlens and the indices are the last tensors."""
    pool, offsets, indices = tensors[at], *tensors[-2:]
    named = pool if indices is None else pool[indices.clamp(min=0)]
    o, last = serve(*tensors[:at], named, *tensors[at + 1 : -1], None)
    if indices is None:
        return o, pool.copy_(last)
    valid = indices >= 0
    pool[indices[valid]] = last[valid].to(pool.dtype)
    if offsets is None:
        of_tokens = valid[:, None]
    else:
        of_tokens = valid.repeat_interleave(offsets.diff(), output_size=o.shape[1])[None]
    return o.masked_fill(~of_tokens[..., None, None], 0), pool
