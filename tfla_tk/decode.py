"""One token of mLSTM, with exponential and with sigmoid input gate: the public functions of decoding.

Signatures follow mlstm_kernels' step functions; its tile parameters are not taken. There is no ThunderKittens
step kernel yet: "auto" takes mlstm_kernels' Triton step where it serves the call, else the reference.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tfla_tk import ops
from tfla_tk.dispatch import choose, load_backend, operator
from tfla_tk.memo import Memo, signature
from tfla_tk.validation import MLSTMCall, check_mlstm_step

_TENSORS = ("q", "k", "v", "i", "f", "c", "n", "m")
_OPTIONS = ("sigmoid_gate", "normalize", "eps", "dtype_state", "backend")


def _describe_exp(*, backend: str, **arguments: Any) -> tuple[str, MLSTMCall]:
    return "mlstm_step", check_mlstm_step(sigmoid_gate=False, normalize=True, **arguments)


def _describe_sig(*, backend: str, **arguments: Any) -> tuple[str, MLSTMCall]:
    return "mlstm_step", check_mlstm_step(sigmoid_gate=True, m=None, **arguments)


@operator(_describe_exp)
def mlstm_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c: Tensor,
    n: Tensor,
    m: Tensor,
    eps: float = 1e-6,
    dtype_state: torch.dtype | None = None,
    *,
    backend: str = "auto",
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """One token of mLSTM with exponential input gate (mLSTMexp): the recurrence of `mlstm_chunkwise`.

    Source: Beck et al., "xLSTM: Extended Long Short-Term Memory" (2024).

    Args:
        q, k: query and key [B, NH, DHQK] of one dtype: float16, bfloat16, float32 or float64.
        v: value [B, NH, DHHV], q's dtype.
        i, f: pre-activations of input and forget gate [B, NH, 1], any floating dtype.
        c, n, m: state before the token [B, NH, DHQK, DHHV], [B, NH, DHQK], [B, NH, 1], any floating dtype;
            not modified.
        eps: added to the normaliser after the maximum; positive.
        dtype_state: dtype of the state returned; None for fp32 (fp64 for fp64 q, k, v). A state in 16 bits
            has its m rounded, and c and n rescaled to it: c e^m and n e^m, all that matters, keep their
            value up to their own rounding.
        backend: "auto" takes the first of tk, triton, reference that serves the call exactly
            (`tfla_tk.which` says which and why). "triton" has no gradients. "tk" is so far the chunkwise
            kernel over a sequence of one token, and is taken by name only.

    Returns:
        h [B, NH, DHHV] in q's dtype and the state after the token (c, n, m), new tensors.

    Raises:
        TypeError, ValueError: bad arguments, before anything is computed.
        UnsupportedError: a backend asked for by name cannot serve the call; has .reason and .remedy.
    """
    h, (c, n, m) = _run("mlstm_step", (q, k, v, i, f, c, n, m), (False, True, eps, dtype_state, backend))
    kept = _state_dtype(q, dtype_state)
    if kept.itemsize == 2:
        c, n, m = representable(c, n, m, kept)
    return h, (c.to(kept), n.to(kept), m.to(kept))


@operator(_describe_sig)
def mlstm_siging_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c: Tensor,
    n: Tensor,
    eps: float = 1e-6,
    dtype_state: torch.dtype | None = None,
    normalize: bool = True,
    *,
    backend: str = "auto",
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """One token of mLSTM with sigmoid input gate (mLSTMsig): the recurrence of `mlstm_siging_chunkwise`.

    Arguments, errors and the choice of the backend as in `mlstm_step`; there is no m, and mlstm_kernels has
    no such step. Source: Beck et al., "Tiled Flash Linear Attention" (2025).

    Args:
        normalize: divide by the normaliser; without it n is passed through.

    Returns:
        h [B, NH, DHHV] in q's dtype and the state after the token (c, n), new tensors.
    """
    options = (True, normalize, eps, dtype_state, backend)
    h, state = _run("mlstm_siging_step", (q, k, v, i, f, c, n, None), options)
    kept = _state_dtype(q, dtype_state)
    c_next, n_next = state[0].to(kept), state[1].to(kept)
    return h, (c_next, n_next.clone() if n_next is n else n_next)


def representable(c: Tensor, n: Tensor, m: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The same state with an m that dtype holds exactly; what m loses in rounding goes into c and n.

    Rounding m alone would scale everything remembered by e^(error): 3 % at m = 8 in bfloat16, and a decay of
    less than that would never happen.

    Args:
        c: [B, NH, DHQK, DHHV]. n: [B, NH, DHQK]. m: [B, NH, 1]. dtype: a dtype of 16 bits.

    Returns:
        (c, n, m) in the dtypes they came in.
    """
    kept = m.to(dtype).to(m.dtype)
    scale = torch.where(kept == m, 1.0, torch.exp(m - kept)).to(c.dtype)
    return c * scale[..., None], n * scale, kept


def _state_dtype(q: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return ops.state_dtype(q) if dtype is None else dtype


class _Plan(NamedTuple):
    """How a step is served."""

    call: MLSTMCall
    backend: str
    variant: str | None


_plans: Memo[_Plan] = Memo()


def _run(op: str, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Validate, choose the backend, apply: h and the next state in the backend's dtype.

    Args:
        op: name of the public function.
        tensors: in the order of _TENSORS. options: in the order of _OPTIONS; they tell the operators apart.
    """
    key = signature(tensors, options)
    plan = None if key is None else _plans.get(key)
    if plan is None:
        arguments = dict(zip(_TENSORS + _OPTIONS, tensors + options, strict=True))
        backend = arguments.pop("backend")
        call = check_mlstm_step(**arguments)
        plan = _Plan(call, *choose(op, "mlstm_step", call, backend))
        if key is not None:
            _plans.keep(key, plan)
    if plan.backend == "tk":
        return _chunk_of_one(plan, tensors)
    result: tuple[Tensor, tuple[Tensor, ...]] = load_backend(plan.backend).mlstm_step(plan.call, *tensors)
    return result


def _chunk_of_one(plan: _Plan, tensors: tuple[Any, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The chunkwise kernel over a sequence of one token."""
    q, k, v, i, f, c, n, m = tensors
    q, k, v = (x.unsqueeze(2) for x in (q, k, v))
    h, state = ops.mlstm(plan.call, plan.variant or "auto", q, k, v, i, f, c, n, m, None)
    if plan.call.sigmoid_gate and not plan.call.normalize:
        state = (state[0], n)
    return h.squeeze(2), state
