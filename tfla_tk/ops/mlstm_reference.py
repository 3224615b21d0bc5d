"""The reference as ops and the reference backend compute it: a form by its name, one token or several."""

from typing import Any

from torch import Tensor

import tfla_tk.reference as forms


def apply(
    tensors: tuple[Any, ...], form: str, chunk_size: int, sigmoid_gate: bool, normalize: bool, eps: float
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One form (layout.FORMS) of the reference of q, k, v, i, f, c_initial, n_initial, m_initial,
    cu_seqlens: h [B, NH, S, V] and the last state, (c, n, m) or with the sigmoid gate (c, n), in the
    widest dtype of the inputs."""
    *inputs, m_initial, cu_seqlens = tensors
    options: dict[str, Any] = {"return_last_states": True, "eps": eps, "cu_seqlens": cu_seqlens}
    if form == "chunkwise":
        options["chunk_size"] = chunk_size
    if sigmoid_gate:
        h, last = getattr(forms, f"mlstm_siging_{form}")(*inputs, **options, normalize=normalize)
    else:
        h, last = getattr(forms, f"mlstm_{form}")(*inputs, m_initial, **options)
    return h, last


def decode(tensors: tuple[Any, ...], normalize: bool, eps: float) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One token, q [B, NH, K], or several, q [B, NH, S, K], from a state on, m None with the sigmoid gate:
    h like v, and the last state, (c, n, m) or (c, n), of at least fp32; n itself without normaliser."""
    q, k, v, i, f, c, n, m = tensors
    one_token = q.dim() == 3
    if m is None and one_token:
        return forms.mlstm_siging_step(q, k, v, i, f, c, n, eps, normalize)
    if m is None:
        h, (c, n_last) = forms.mlstm_siging_recurrent(q, k, v, i, f, c, n, True, eps, normalize)
        return h, (c, n_last if normalize else n)
    if one_token:
        return forms.mlstm_step(q, k, v, i, f, c, n, m, eps)
    return forms.mlstm_recurrent(q, k, v, i, f, c, n, m, True, eps)  # type: ignore[return-value]
