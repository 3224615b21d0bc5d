"""Gated linear attention: the public function, with fla 0.6.0's signature."""

from __future__ import annotations

from torch import Tensor

from tfla_tk.calls.gla import check_gla
from tfla_tk.calls.linear import check_same_offsets
from tfla_tk.core.dispatch import operator
from tfla_tk.core.plan import CallPath

_path = CallPath(
    "gla",
    ("q", "k", "v", "g", "initial_state", "cu_seqlens", "cu_seqlens_cpu"),
    ("scale", "output_final_state", "state_v_first", "backend"),
    check_gla,
    cast=3,
    strided=True,
    layout="[B, T, H, K]",
)


@operator(_path.describe)
def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Gated linear attention (GLA), with a decay per key channel, chunkwise.

    Per head, with log decay g_t in R^K and scale s::

        S_t = diag(e^{g_t}) S_{t-1} + k_t v_t^T
        o_t = s q_t^T S_t

    Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (2024).

    Log decays are computed as given: positive ones let the state grow, and it may overflow. -inf forgets a
    channel of the state. The tk kernels take bf16 and fp16, K up to 256 and V up to 512.

    Args:
        q, k: queries and keys [B, T, H, K], any view, of one dtype: float16, bfloat16, float32 or float64.
        v: values [B, T, H, V], q's dtype.
        g: natural log of the decay [B, T, H, K], any floating dtype (fp32 is best).
        scale: factor on q, a finite number; None is K^-1/2. Numbers and bools may be NumPy's.
        initial_state: state before the first token [N, H, K, V], any floating dtype; None is zeros. N is B,
            or with cu_seqlens the number of sequences.
        output_final_state: also return the state after the last token.
        state_v_first: initial and final state are [N, H, V, K].
        cu_seqlens: offsets [N + 1], int32 or int64, of N sequences packed along T in a batch of one, rising
            from 0 to T; sequence j is tokens cu_seqlens[j] to cu_seqlens[j + 1] - 1. Empty sequences are
            allowed and return their initial state. The reference and fla read the offsets on the host; the tk
            kernels read them on the GPU, unchecked.
        cu_seqlens_cpu: the same offsets on the CPU, which spares the reference and fla a wait for the GPU.
            Both must be equal; that is checked where cu_seqlens is on the CPU, not on a GPU.
        backend: "auto" takes the first of tk, triton (fla's kernels), reference that serves the call exactly
            (`tfla_tk.which` says which and why); a name, or name:variant such as "reference:recurrent", takes
            that one or raises. Forward-mode and second derivatives are the reference's alone: "auto" takes it
            where an input has a tangent, and a second derivative through tk raises.

    Returns:
        (o, final_state): o [B, T, H, V] in q's dtype, under autocast in the autocast region's; final_state
        shaped like initial_state, in fp32 (fp64 for fp64 q, k, v), or None without output_final_state. Empty
        inputs give an empty o and, for T = 0, a copy of the initial state. Both are contiguous, whatever the
        strides of the inputs.

    Raises:
        TypeError, ValueError: bad arguments, before anything is computed; DTensors are among them.
        UnsupportedError: a backend asked for by name cannot serve the call; has .reason and .remedy.
    """
    check_same_offsets(cu_seqlens, cu_seqlens_cpu)
    result: tuple[Tensor, Tensor | None] = _path.serve(
        "chunk_gla",
        (q, k, v, g, initial_state, cu_seqlens, cu_seqlens_cpu),
        (scale, output_final_state, state_v_first, backend),
    )
    return result
