"""Kimi Delta Attention (KDA): the gated delta rule with a decay per key channel.

Source: Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture" (2025). Its forms are those
of the gated delta rule with g [B, T, HV, K] (`delta_rule`, `delta_rule_backward`), and so are its raw inputs
(`delta_rule_inputs`). Its own are the states between chunks.
"""

from functools import partial

import torch
from torch import Tensor

from .common import States, full_precision, scan_chunks
from .delta_rule import (
    gated_delta_chunk,
    gated_delta_rule_chunkwise,
    gated_delta_rule_parallel,
    gated_delta_rule_recurrent,
)
from .delta_rule_backward import gated_delta_rule_backward
from .linear import run_linear

kda_recurrent = gated_delta_rule_recurrent
kda_chunkwise = gated_delta_rule_chunkwise
kda_parallel = gated_delta_rule_parallel
kda_backward = gated_delta_rule_backward


@full_precision
def kda_with_states(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """:func:`kda_chunkwise` with the state that enters every chunk.

    Returns:
        (o, last state or None, states [B, NT, HV, K, V] of at least fp32). NT counts the chunks of a
        sequence, or those of all packed sequences, one sequence after the other.
    """
    states: list[Tensor] = []

    def chunk(*tokens_and_state: Tensor) -> tuple[Tensor, States]:
        states.append(tokens_and_state[-1])
        return gated_delta_chunk(*tokens_and_state)

    form = partial(scan_chunks, chunk, chunk_size)
    o, last = run_linear(form, q, k, v, (g, beta), scale, initial_state, True, cu_seqlens)
    assert last is not None
    none = last.new_empty(v.shape[0], 0, *last.shape[1:])
    between = torch.stack(states, dim=1) if states else none
    return o, last if output_final_state else None, between
