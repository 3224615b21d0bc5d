"""Kimi Delta Attention (KDA): the public function, with fla 0.6.0's signature.

Of its further keywords A_log, dt_bias and chunk_size are taken.
"""

from typing import Any

import torch
from torch import Tensor

from tfla_tk.calls.delta_rule import check_kda
from tfla_tk.calls.linear import check_same_offsets
from tfla_tk.core.checks import fail
from tfla_tk.core.dispatch import CallPath, operator
from tfla_tk.delta_rule import TENSORS, check_no_context, checking

# those of a call token by token, and those of a chunkwise one beside them
OPTIONS = (
    *("scale", "output_final_state", "use_qk_l2norm_in_kernel", "use_gate_in_kernel"),
    *("use_beta_sigmoid_in_kernel", "allow_neg_eigval", "lower_bound", "state_v_first"),
)
_CHUNK_OPTIONS = (
    *("safe_gate", "disable_recompute", "return_intermediate_states"),
    *("use_graph", "max_num_seqs", "chunk_size"),
)
_path = CallPath("kda", TENSORS, (*OPTIONS, *_CHUNK_OPTIONS, "backend"), check_kda)


@operator
def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int | None = None,
    backend: str = "auto",
) -> tuple[Any, ...]:
    """Kimi Delta Attention (KDA): the delta rule with a decay per key channel, chunkwise.

    Per head, with log decay g_t in R^K, writing strength beta_t and scale s::

        S_t = diag(e^{g_t}) S_{t-1} + beta_t k_t (v_t - (diag(e^{g_t}) S_{t-1})^T k_t)^T
        o_t = s q_t^T S_t

    Source: Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture" (2025).

    Gradients reach q, k, v, g, beta, A_log, dt_bias and initial_state as they were given. Log decays of any
    size are exact, 0 and -1e5 in one token, too. What makes the state grow is as in `chunk_gated_delta_rule`.

    Args:
        q, k, v, beta: as in `chunk_gated_delta_rule`.
        g: natural log of the decay [B, T, HV, K], any floating dtype (fp32 is best); with use_gate_in_kernel
            what it is made from.
        scale, initial_state, output_final_state, state_v_first, cu_seqlens, cu_seqlens_cpu: as there.
        use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval: as there.
        use_gate_in_kernel: take -exp(A_log) softplus(g + dt_bias) in place of g, or with lower_bound
            lower_bound sigmoid(exp(A_log) (g + dt_bias)).
        A_log, dt_bias: [HV] and [HV K], any floating dtype; dt_bias may be None, and so may A_log with
            lower_bound, which stands for 0. Not looked at without use_gate_in_kernel.
        lower_bound: of the log decay, a number; not looked at without use_gate_in_kernel.
        safe_gate: fla's scheme for log decays from -5 on; with use_gate_in_kernel it takes a lower_bound from
            -5 to less than 0. Results are the same; used by fla alone.
        disable_recompute: fla keeps what its backward would compute again.
        return_intermediate_states: within torch.inference_mode() also return the state before every chunk.
        cp_context: None: there is no context parallelism.
        use_graph, max_num_seqs: fla makes its lists of chunks on the device, for CUDA graphs; max_num_seqs is
            then the number of sequences or None.
        chunk_size: tokens per chunk, 32 or 64; None is 64. The result does not depend on it beyond rounding.
        backend: as in `chunk_simple_gla`.

    Returns:
        (o, final_state) as in `chunk_gated_delta_rule`, and with return_intermediate_states a third tensor in
        q's dtype [B, NT, HV, K, V], or [B, NT, HV, V, K] with state_v_first. NT is the number of chunks; of
        packed sequences they follow one another.

    Raises:
        TypeError, ValueError, UnsupportedError: as in `chunk_simple_gla`.
    """
    if cp_context is not None:
        check_no_context(cp_context)
    if return_intermediate_states and not torch.is_inference_mode_enabled():
        fail("return_intermediate_states", "False outside of torch.inference_mode()", True)
    check_same_offsets(cu_seqlens, cu_seqlens_cpu)
    flags = use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval
    of_chunks = safe_gate, disable_recompute, return_intermediate_states, use_graph, max_num_seqs, chunk_size
    return _path.serve(
        "chunk_kda",
        (q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu),
        (scale, output_final_state, *flags, lower_bound, state_v_first, *of_chunks, backend),
    )


check_chunk_kda = checking(chunk_kda, _path)
