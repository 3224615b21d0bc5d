"""Linear attention with a scalar decay per token and head, or per head: the public functions.

Signatures follow fla 0.6.0's; chunk_size is the one of its further keywords that is taken.
"""

from typing import Any

import torch
from torch import Tensor

from tfla_tk.calls.linear import check_layer, check_same_offsets, check_simple_gla
from tfla_tk.core.checks import fail
from tfla_tk.core.dispatch import CallPath, operator
from tfla_tk.core.eager import is_eager
from tfla_tk.core.memo import kept_on_device

_path = CallPath(
    "simple_gla",
    ("q", "k", "v", "g", "g_gamma", "initial_state", "cu_seqlens", "cu_seqlens_cpu"),
    ("scale", "output_final_state", "state_v_first", "chunk_size", "backend"),
    check_simple_gla,
)


@operator
def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    chunk_size: int | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Linear attention with a scalar decay (simple GLA; the core of Mamba-2), chunkwise.

    Per head, with log decay g_t and scale s::

        S_t = e^{g_t} S_{t-1} + k_t v_t^T
        o_t = s q_t^T S_t

    Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (2024); Dao
    and Gu, "Transformers are SSMs" (2024). docs/scalar-decay.md says how Mamba-2's dt, A, x, B, C become q,
    k, v, g.

    Log decays are computed as given: positive ones let the state grow, and it may overflow. -inf forgets the
    state; fla's kernels return NaN there.

    Args:
        q, k: queries and keys [B, T, H, K], any view, of one dtype: float16, bfloat16, float32 or float64.
        v: values [B, T, HV, V], q's dtype. HV = n H; head h of v reads head h // n of q and k.
        g: natural log of the decay per token [B, T, HV], any floating dtype (fp32 is best).
        g_gamma: natural log of the decay per head [HV], any floating dtype, in place of g. It is a constant:
            it has no gradient. Without both nothing decays.
        scale: factor on q, a finite number; None is K^-1/2. Numbers and bools may be NumPy's.
        initial_state: state before the first token [N, HV, K, V], any floating dtype; None is zeros. N is B,
            or with cu_seqlens the number of sequences.
        output_final_state: also return the state after the last token.
        state_v_first: initial and final state are [N, HV, V, K].
        cu_seqlens: offsets [N + 1], int32 or int64, of N sequences packed along T in a batch of one, rising
            from 0 to T; sequence j is tokens cu_seqlens[j] to cu_seqlens[j + 1] - 1. Empty sequences are
            allowed and return their initial state. The reference and fla read the offsets on the host; the tk
            kernels read them on the GPU, unchecked.
        cu_seqlens_cpu: the same offsets on the CPU, which spares the reference and fla a wait for the GPU.
            Both must be equal; that is checked where cu_seqlens is on the CPU, not on a GPU.
        chunk_size: tokens per chunk, a power of two; None is 64. The result does not depend on it beyond
            rounding. Used by the reference and by fla (from 16 on); the tk kernels choose their own.
        backend: "auto" takes the first of tk, triton (fla's kernels), reference that serves the call exactly
            (`tfla_tk.which` says which and why); a name, or name:variant such as "reference:recurrent", takes
            that one or raises. Forward-mode and second derivatives are the reference's alone: "auto" takes it
            where an input has a tangent, and a second derivative through tk raises.

    Returns:
        (o, final_state): o [B, T, HV, V] in q's dtype, under autocast in the autocast region's; final_state
        shaped like initial_state, in fp32 (fp64 for fp64 q, k, v), or None without output_final_state. Empty
        inputs give an empty o and, for T = 0, a copy of the initial state. Both are contiguous, whatever the
        strides of the inputs.

    Raises:
        TypeError, ValueError: bad arguments, before anything is computed; DTensors are among them.
        UnsupportedError: a backend asked for by name cannot serve the call; has .reason and .remedy.
    """
    check_same_offsets(cu_seqlens, cu_seqlens_cpu)
    return _path.serve(
        "chunk_simple_gla",
        (q, k, v, g, g_gamma, initial_state, cu_seqlens, cu_seqlens_cpu),
        (scale, output_final_state, state_v_first, chunk_size, backend),
    )


@operator
def chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    chunk_size: int | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Retention (RetNet): `chunk_simple_gla` with the decay 1 - 2^(-5-h) of head h of v.

    Source: Sun et al., "Retentive Network" (2023). Arguments, result, errors and the choice of the backend as
    in `chunk_simple_gla`.
    """
    return _path.serve(
        "chunk_retention",
        (q, k, v, None, decay_of_heads(v), initial_state, cu_seqlens, None),
        (scale, output_final_state, False, chunk_size, backend),
    )


@operator
def chunk_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int | None = None,
    num_layers: int | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    g_gamma: Tensor | None = None,
    chunk_size: int | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Lightning Attention: `chunk_simple_gla` with a decay per head that falls with the layer.

    The log decay of head h of v is -(8 / HV) (1 - layer_idx / num_layers) h, fla's formula, or g_gamma:
    models differ (docs/scalar-decay.md has MiniMax's slopes).

    Source: Qin et al., "Lightning Attention-2" (2024). Other arguments, result, errors and the choice of the
    backend as in `chunk_simple_gla`.

    Args:
        layer_idx, num_layers: the layer, from 0 to num_layers - 1, and how many there are; both, or neither
            with g_gamma.
        g_gamma: log decay per head [HV]: minus the slopes.
    """
    g_gamma = _lightning_decay(v, layer_idx, num_layers, g_gamma)
    return _path.serve(
        "chunk_lightning_attn",
        (q, k, v, None, g_gamma, initial_state, cu_seqlens, None),
        (scale, output_final_state, False, chunk_size, backend),
    )


def _lightning_decay(v: Any, layer_idx: Any, num_layers: Any, g_gamma: Any) -> Any:
    """g_gamma, or what the layer makes of it."""
    if g_gamma is None:
        return decay_of_heads(v, check_layer(layer_idx, num_layers))
    for name, value in (("layer_idx", layer_idx), ("num_layers", num_layers)):
        if value is not None:
            fail(name, "None where g_gamma is given", value)
    return g_gamma


_decays: dict[tuple[Any, ...], Tensor] = {}  # by heads, device and layer; a model has a few of them


def decay_of_heads(v: Any, layer: tuple[int, int] | None = None) -> Tensor | None:
    """Retention's log decays for the heads of v, or Lightning's for a layer (its number and that of all), in
    fp32.

    None where v is not what the checks let pass.
    """
    if not isinstance(v, Tensor) or v.dim() != 4:
        return None
    heads, device = v.shape[2], v.device
    if not is_eager((v,)):
        return _make_decays(heads, device, layer)
    key = (heads, device, layer)
    return kept_on_device(_decays, key, device, lambda device: _make_decays(heads, device, layer))


def _make_decays(heads: int, device: torch.device, layer: tuple[int, int] | None) -> Tensor:
    import tfla_tk.reference as forms

    if layer is None:
        return forms.retention_log_decay(heads, device=device)
    return forms.lightning_log_decay(heads, *layer, device=device)
