"""Gated linear attention (GLA): the public function, with fla 0.6.0's signature."""

from torch import Tensor

from tfla_tk.calls.linear import check_gla, check_same_offsets
from tfla_tk.core.dispatch import CallPath, operator

_path = CallPath(
    "gla",
    ("q", "k", "v", "g", "initial_state", "cu_seqlens", "cu_seqlens_cpu"),
    ("scale", "output_final_state", "state_v_first", "backend"),
    check_gla,
)


@operator
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
        scale, initial_state, output_final_state, state_v_first, cu_seqlens, cu_seqlens_cpu, backend: as in
            `chunk_simple_gla`, HV = H.

    Returns:
        (o, final_state) as in `chunk_simple_gla`: o [B, T, H, V] in q's dtype, final_state shaped like
        initial_state in fp32 (fp64 for fp64 q, k, v), or None without output_final_state.

    Raises:
        TypeError, ValueError, UnsupportedError: as in `chunk_simple_gla`.
    """
    check_same_offsets(cu_seqlens, cu_seqlens_cpu)
    return _path.serve(
        "chunk_gla",
        (q, k, v, g, initial_state, cu_seqlens, cu_seqlens_cpu),
        (scale, output_final_state, state_v_first, backend),
    )
