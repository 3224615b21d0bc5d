"""mLSTM with exponential and with sigmoid input gate: the public functions.

Signatures follow mlstm_kernels' chunkwise functions up to chunk_size; its tile parameters are not taken.
"""

from typing import TypeAlias

import torch
from torch import Tensor

from tfla_tk.calls.mlstm import check_mlstm
from tfla_tk.core.dispatch import CallPath, operator

ExpState: TypeAlias = tuple[Tensor, Tensor, Tensor]
SigState: TypeAlias = tuple[Tensor, Tensor]

_OPTIONS = (
    *("sigmoid_gate", "normalize", "return_last_states", "eps", "chunk_size"),
    *("recompute_states_in_bw", "autocast_kernel_dtype", "backend"),
)
_TENSORS = ("q", "k", "v", "i", "f", "c_initial", "n_initial", "m_initial", "cu_seqlens")
_chunkwise = CallPath("mlstm", _TENSORS, _OPTIONS, check_mlstm, layout="[B, NH, S, DHQK]")


@operator
def mlstm_chunkwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c_initial: Tensor | None = None,
    n_initial: Tensor | None = None,
    m_initial: Tensor | None = None,
    return_last_states: bool = False,
    eps: float = 1e-6,
    chunk_size: int = 64,
    *,
    cu_seqlens: Tensor | None = None,
    recompute_states_in_bw: bool = True,
    autocast_kernel_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, ExpState]:
    """mLSTM with exponential input gate (mLSTMexp), chunkwise.

    Per head, with s = DHQK^-1/2 and m only a stabiliser::

        m_t = max(logsigmoid(f_t) + m_{t-1}, i_t)
        C_t = e^{logsigmoid(f_t) + m_{t-1} - m_t} C_{t-1} + e^{i_t - m_t} k_t v_t^T   (n_t likewise from k_t)
        h_t = s q_t^T C_t / (max(|s q_t.n_t|, e^{-m_t}) + eps)

    Source: Beck et al., "Tiled Flash Linear Attention" (2025).

    A gate of -inf is closed: h = 0 and no gradient passes where nothing has been added since the state was
    forgotten. m = -inf, given or returned, is an empty state, whatever numbers c and n hold; the tk kernels
    return an m below -1e5 there, and Triton NaN (docs/triton-baselines.md). A NaN or inf in a token may
    make h of earlier tokens of its chunk NaN (of 64 tokens in the tk kernels), and gradients in all of its
    sequence and head; tokens of earlier chunks, other heads and sequences, packed or not, and later calls
    stay as they were.

    Args:
        q, k: queries and keys [B, NH, S, DHQK], any view, of one dtype: float16, bfloat16, float32 or
            float64.
        v: values [B, NH, S, DHHV], q's dtype.
        i, f: pre-activations of input and forget gate [B, NH, S], any floating dtype (fp32 is best).
        c_initial, n_initial, m_initial: state before the first step, any floating dtype, [B, NH, DHQK, DHHV],
            [B, NH, DHQK], [B, NH, 1]; all or none (zeros). m_initial is a constant of the differentiation.
            With cu_seqlens, N stands in place of B.
        return_last_states: also return the state after the last step.
        eps: added to the normaliser after the maximum; positive. Numbers and bools may be NumPy's.
        chunk_size: time steps per chunk, a positive multiple of 16. The result does not depend on it beyond
            rounding. Used by the reference and by the Triton variants named without a size; the tk kernels
            and backend="triton" choose their own.
        cu_seqlens: offsets [N + 1], int32 or int64, of N sequences packed along S in a batch of one, rising
            from 0 to S; sequence j is tokens cu_seqlens[j] to cu_seqlens[j + 1] - 1. Empty sequences are
            allowed and return their initial state. The reference reads the offsets on the host and refuses
            others; the tk kernels read them on the GPU, unchecked: with others the results of the call mean
            nothing, and no memory outside of the call is touched. Triton has no variable length.
        recompute_states_in_bw: Triton only: recompute the chunk states in the backward pass instead of
            storing them.
        autocast_kernel_dtype: dtype of q, k, v under torch.autocast: float16, bfloat16, float32, or None
            for the autocast region's dtype. Gates and states keep theirs. Without autocast it has no
            effect.
        backend: "auto" takes the first of tk, triton, reference that serves the call exactly
            (`tfla_tk.which` says which and why); a name, or name:variant such as "triton:xl_chunk_128", takes
            that one or raises. Forward-mode and second derivatives are the reference's alone: "auto" takes it
            where an input has a tangent, and a second derivative through tk raises.

    Returns:
        h [B, NH, S, DHHV] in q's dtype, or (h, (c, n, m)) with the state after the last step (of every
        sequence), shaped as above, in fp32 (fp64 for fp64 q, k, v), whatever dtypes gates and initial state
        have. Empty inputs give an empty h and, for S = 0, a copy of the initial state.

    Raises:
        TypeError, ValueError: bad arguments, before anything is computed. DTensors are among them: every
            process calls with its local tensors, sharded over batch and heads.
        UnsupportedError: a backend asked for by name cannot serve the call; has .reason and .remedy.
    """
    of_backends = recompute_states_in_bw, autocast_kernel_dtype
    h, state = _chunkwise.serve(
        "mlstm_chunkwise",
        (q, k, v, i, f, c_initial, n_initial, m_initial, cu_seqlens),
        (False, True, return_last_states, eps, chunk_size, *of_backends, backend),
    )
    return (h, state) if return_last_states else h


@operator
def mlstm_siging_chunkwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c_initial: Tensor | None = None,
    n_initial: Tensor | None = None,
    m_initial: Tensor | None = None,
    return_last_states: bool = False,
    eps: float = 1e-6,
    normalize: bool = True,
    chunk_size: int = 64,
    *,
    cu_seqlens: Tensor | None = None,
    recompute_states_in_bw: bool = True,
    autocast_kernel_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, SigState]:
    """mLSTM with sigmoid input gate (mLSTMsig), chunkwise.

    Per head, with s = DHQK^-1/2::

        C_t = sigmoid(f_t) C_{t-1} + sigmoid(i_t) k_t v_t^T     (n_t likewise, from k_t)
        h_t = s q_t^T C_t / (max(|s q_t.n_t|, 1) + eps)         normalize=True
        h_t = s q_t^T C_t                                       normalize=False

    Arguments, errors and the choice of the backend as in `mlstm_chunkwise`; m_initial is checked but unused
    (it keeps the positional order), and with normalize=False n_initial may be left out and is unused.

    Args:
        normalize: divide by the normaliser.

    Returns:
        h [B, NH, S, DHHV] in q's dtype, or (h, (c, n)) with c [B, NH, DHQK, DHHV] and n [B, NH, DHQK] (N in
        place of B with cu_seqlens) in fp32 (fp64 for fp64 q, k, v), whatever dtypes gates and initial state
        have; n is zeros with normalize=False.
    """
    of_backends = recompute_states_in_bw, autocast_kernel_dtype
    h, state = _chunkwise.serve(
        "mlstm_siging_chunkwise",
        (q, k, v, i, f, c_initial, n_initial, m_initial, cu_seqlens),
        (True, normalize, return_last_states, eps, chunk_size, *of_backends, backend),
    )
    return (h, state) if return_last_states else h
