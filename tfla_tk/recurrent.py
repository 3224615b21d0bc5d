"""Linear attention token by token, as a model generates: the public functions, with fla 0.6.0's signatures.

Each computes what the chunkwise function of its family computes. A backend takes what is fastest for a few
tokens; a call with gradients, or with many tokens, is computed chunkwise.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tfla_tk import delta_rule, gla, kda, simple_gla
from tfla_tk.calls.delta_rule import check_delta_rule, check_kda
from tfla_tk.calls.linear import LinearCall, check_gla, check_simple_gla
from tfla_tk.calls.recurrent import check_recurrent, through_a_copy
from tfla_tk.core.checks import fail, shown
from tfla_tk.core.dispatch import CallPath, Plan, operator

Result = tuple[Tensor, Tensor | None]


class _Path(CallPath):
    """The calls of a family token by token: those of its chunkwise functions, with states in place of them.
    The last of their tensors, the offsets on the CPU, gives way to state_indices. options: without `backend`;
    None: those of the chunkwise functions."""

    def __init__(
        self,
        chunkwise: CallPath,
        check: Callable[..., LinearCall],
        options: tuple[str, ...] | None = None,
        **fixed: Any,
    ) -> None:
        tensors = *chunkwise.tensors[:-1], "state_indices"
        self._state = tensors.index("initial_state")
        options = *(options or chunkwise.options[:-1]), "inplace", "backend"

        def check_call(**arguments: Any) -> LinearCall:
            return check_recurrent(partial(check, cu_seqlens_cpu=None, **fixed), **arguments)

        super().__init__(chunkwise.name, tensors, options, check_call, layout="")

    def _make_plan(self, op: str, tensors: tuple[Any, ...], options: tuple[Any, ...], *, eager: bool) -> Plan:
        plan = super()._make_plan(op, tensors, options, eager=eager)
        if plan.call.state_in_place is None or plan.backend == "tk":
            return plan
        return plan._replace(serve=partial(through_a_copy, plan.serve, self._state))


_gla = _Path(gla._path, check_gla, gate="gk")
_simple_gla = _Path(simple_gla._path, check_simple_gla)
_delta_rule = _Path(delta_rule._path, check_delta_rule)
_kda = _Path(kda._path, check_kda, kda.OPTIONS)


@operator
def fused_recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None = None,
    gv: None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    state_indices: Tensor | None = None,
    inplace: bool = False,
    backend: str = "auto",
) -> Result:
    """Gated linear attention token by token: what `chunk_gla` computes, with its gate g named gk.

    Args:
        gk: natural log of the decay [B, T, H, K], any floating dtype; not None.
        gv: None: a decay per channel of v is fla's own.
        reverse: False: a recurrence backward in time is fla's own.
        state_indices: [B] int32, with inplace: initial_state is a pool [slots, H, K, V], and these are the
            states of the batch entries, or with cu_seqlens of the sequences. Where an index is below 0, o is
            0 and nothing is written. No two name the same state.
        inplace: overwrite initial_state, whose states are contiguous, in its dtype, and return it as the
            final state. It needs output_final_state, and no gradient is recorded.
        others, result and errors: as in `chunk_gla`.
    """
    _check_none(gv=gv, reverse=reverse)
    return _gla.serve(
        "fused_recurrent_gla",
        (q, k, v, gk, initial_state, cu_seqlens, state_indices),
        (scale, output_final_state, state_v_first, inplace, backend),
    )


@operator
def fused_recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    state_indices: Tensor | None = None,
    inplace: bool = False,
    backend: str = "auto",
) -> Result:
    """Linear attention with a scalar decay token by token: what `chunk_simple_gla` computes.

    Args:
        reverse: False: a recurrence backward in time is fla's own.
        state_indices, inplace: as in `fused_recurrent_gla`.
        others, result and errors: as in `chunk_simple_gla`.
    """
    _check_none(reverse=reverse)
    return _simple_gla.serve(
        "fused_recurrent_simple_gla",
        (q, k, v, g, g_gamma, initial_state, cu_seqlens, state_indices),
        (scale, output_final_state, state_v_first, None, inplace, backend),
    )


@operator
def fused_recurrent_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    state_indices: Tensor | None = None,
    inplace: bool = False,
    backend: str = "auto",
) -> Result:
    """Retention token by token: what `chunk_retention` computes.

    Args:
        reverse: False: a recurrence backward in time is fla's own.
        state_v_first: initial and final state are [N, HV, V, K].
        state_indices, inplace: as in `fused_recurrent_gla`.
        others, result and errors: as in `chunk_retention`.
    """
    _check_none(reverse=reverse)
    return _simple_gla.serve(
        "fused_recurrent_retention",
        (q, k, v, None, simple_gla.decay_of_heads(v), initial_state, cu_seqlens, state_indices),
        (scale, output_final_state, state_v_first, None, inplace, backend),
    )


@operator
def fused_recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    state_indices: Tensor | None = None,
    inplace: bool = False,
    backend: str = "auto",
) -> Result:
    """The delta rule token by token: what `chunk_delta_rule` computes.

    Args:
        beta: writing strength [B, T, HV], any floating dtype; None is 1.
        state_indices, inplace: as in `fused_recurrent_gla`.
        others, result and errors: as in `chunk_delta_rule`.
    """
    flags = use_qk_l2norm_in_kernel, False, False, False
    return _delta_rule.serve(
        "fused_recurrent_delta_rule",
        (q, k, v, None, _given(beta, v, 1.0), None, None, initial_state, cu_seqlens, state_indices),
        (scale, output_final_state, *flags, False, None, False, inplace, backend),
    )


@operator
def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: None = None,
    gv: None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    state_indices: Tensor | None = None,
    inplace: bool = False,
    backend: str = "auto",
) -> Result:
    """The gated delta rule token by token: what `chunk_gated_delta_rule` computes.

    Args:
        g: natural log of the decay per token [B, T, HV], any floating dtype; None is 0: nothing decays. With
            use_gate_in_kernel what it is made from.
        gk, gv: None: a decay per channel of k or of v is fla's own.
        beta: writing strength [B, T, HV], any floating dtype; None is 1.
        state_indices, inplace: as in `fused_recurrent_gla`.
        others, result and errors: as in `chunk_gated_delta_rule`.
    """
    _check_none(gk=gk, gv=gv)
    flags = use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval
    gates = g if use_gate_in_kernel else _given(g, v, 0.0), _given(beta, v, 1.0)
    return _delta_rule.serve(
        "fused_recurrent_gated_delta_rule",
        (q, k, v, *gates, A_log, dt_bias, initial_state, cu_seqlens, state_indices),
        (scale, output_final_state, *flags, state_v_first, None, True, inplace, backend),
    )


@operator
def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    state_indices: Tensor | None = None,
    inplace: bool = False,
    backend: str = "auto",
) -> Result:
    """Kimi Delta Attention token by token: what `chunk_kda` computes.

    Args:
        state_indices, inplace: as in `fused_recurrent_gla`.
        others, result and errors: as in `chunk_kda`.
    """
    flags = use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval
    return _kda.serve(
        "fused_recurrent_kda",
        (q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, state_indices),
        (scale, output_final_state, *flags, lower_bound, state_v_first, inplace, backend),
    )


def _given(value: Any, v: Any, default: float) -> Any:
    """A number per token and head of v, or what an absent one means; v is checked later."""
    if value is not None or not isinstance(v, Tensor) or v.dim() != 4:
        return value
    return torch.full(v.shape[:3], default, device=v.device)


def _check_none(**arguments: Any) -> None:
    """Arguments of fla's functions that only fla's own serve."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            expected = f"{'False' if name == 'reverse' else 'None'} (call fla's own function for it)"
            fail(name, expected, shown(value))
