"""One token of mLSTM, or a few, with exponential and with sigmoid input gate: the functions of decoding.

Signatures follow mlstm_kernels' step functions; its tile parameters are not taken. The state is read once and
written once (docs/decode.md).
"""

from typing import Any

import torch
from torch import Tensor

from tfla_tk.calls.mlstm import check_mlstm_sequence, check_mlstm_step
from tfla_tk.core.dispatch import CallPath, operator

_TENSORS = ("q", "k", "v", "i", "f", "c", "n", "m")
_OPTIONS = ("sigmoid_gate", "normalize", "eps", "dtype_state", "inplace", "backend")
_AS_GIVEN: dict[str, Any] = {"cast": 0, "strided": False, "layout": ""}
_step = CallPath("mlstm_step", _TENSORS, _OPTIONS, check_mlstm_step, **_AS_GIVEN)
_sequence = CallPath("mlstm_sequence", _TENSORS, _OPTIONS, check_mlstm_sequence, **_AS_GIVEN)


@operator
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
    inplace: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """One token of mLSTM with exponential input gate (mLSTMexp): the recurrence of `mlstm_chunkwise`.

    Source: Beck et al., "xLSTM: Extended Long Short-Term Memory" (2024).

    Args:
        q, k: query and key [B, NH, DHQK] of one dtype: float16, bfloat16, float32 or float64.
        v: value [B, NH, DHHV], q's dtype.
        i, f: pre-activations of input and forget gate [B, NH, 1], any floating dtype.
        c, n, m: state before the token [B, NH, DHQK, DHHV], [B, NH, DHQK], [B, NH, 1], any floating dtype;
            not modified, unless `inplace`. m = -inf is an empty state, as in `mlstm_chunkwise`.
        eps: added to the normaliser after the maximum; positive.
        dtype_state: dtype of the state returned; None for fp32 (fp64 for fp64 q, k, v). A state in 16 bits
            has its m rounded, and c and n rescaled to it: c e^m and n e^m, all that matters, keep their
            value up to their own rounding. There m is no less than -16384, or -inf.
        inplace: overwrite c, n and m with the state after the token and return them, each in its own dtype;
            dtype_state is then None or theirs. Not where a gradient is recorded, and not under vmap. As after
            any write in place, a backward that would read what autograd has saved of them raises.
        backend: "auto" takes the first of tk, triton, reference that serves the call exactly
            (`tfla_tk.which` says which and why). "triton" has no gradients. "tk" takes them from the
            chunkwise kernel over a sequence of one token, by name only.

    Returns:
        h [B, NH, DHHV] in q's dtype and the state after the token (c, n, m), new tensors unless `inplace`.

    Raises:
        TypeError, ValueError: bad arguments, before anything is computed.
        UnsupportedError: a backend asked for by name cannot serve the call; has .reason and .remedy.
    """
    options = (False, True, eps, dtype_state, inplace, backend)
    return _step.serve("mlstm_step", (q, k, v, i, f, c, n, m), options)


@operator
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
    inplace: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """One token of mLSTM with sigmoid input gate (mLSTMsig): the recurrence of `mlstm_siging_chunkwise`.

    Arguments, errors and the choice of the backend as in `mlstm_step`; there is no m, and mlstm_kernels has
    no such step. Source: Beck et al., "Tiled Flash Linear Attention" (2025).

    Args:
        normalize: divide by the normaliser; without it n is passed through.

    Returns:
        h [B, NH, DHHV] in q's dtype and the state after the token (c, n), new tensors unless `inplace`.
    """
    options = (True, normalize, eps, dtype_state, inplace, backend)
    return _step.serve("mlstm_siging_step", (q, k, v, i, f, c, n, None), options)


@operator
def mlstm_sequence(
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
    inplace: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """A few tokens of mLSTMexp that go on from a state: what as many calls of `mlstm_step` compute.

    The state is read and written once, and rounded once, at the end. For speculative decoding and short
    prompts; longer sequences are what `mlstm_chunkwise` is for (docs/decode.md).

    Args:
        q, k: queries and keys [B, NH, S, DHQK] of one dtype: float16, bfloat16, float32 or float64.
        v: values [B, NH, S, DHHV], q's dtype.
        i, f: pre-activations of input and forget gate [B, NH, S], any floating dtype.
        c, n, m: state before the first token, as in `mlstm_step`; not modified, unless `inplace`.
        eps, dtype_state, inplace: as in `mlstm_step`.
        backend: as in `mlstm_step`. "tk" takes up to 16 tokens and has no gradients, "reference" takes any
            number of them and records gradients, "triton" has no such kernel.

    Returns:
        h [B, NH, S, DHHV] in q's dtype and the state after the last token (c, n, m), new tensors unless
        `inplace`. Errors as in `mlstm_step`.
    """
    options = (False, True, eps, dtype_state, inplace, backend)
    return _sequence.serve("mlstm_sequence", (q, k, v, i, f, c, n, m), options)


@operator
def mlstm_siging_sequence(
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
    inplace: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """A few tokens of mLSTMsig that go on from a state: what as many calls of `mlstm_siging_step` compute.

    Arguments, errors and the choice of the backend as in `mlstm_sequence`, normalize as in
    `mlstm_siging_step`; there is no m.

    Returns:
        h [B, NH, S, DHHV] in q's dtype and the state after the last token (c, n), new tensors unless
        `inplace`.
    """
    options = (True, normalize, eps, dtype_state, inplace, backend)
    return _sequence.serve("mlstm_siging_sequence", (q, k, v, i, f, c, n, None), options)


def is_sequence_on_tk(
    tensors: Any, *, sigmoid_gate: bool, normalize: bool, eps: float, dtype_state: torch.dtype | None
) -> bool:
    """Whether `mlstm_sequence` or `mlstm_siging_sequence` under "auto" takes the tk backend: the plan that
    the call itself finds again. Bad arguments raise what the call would raise. tensors: q, k, v, i, f, c, n,
    m; m is None with the sigmoid gate."""
    op = "mlstm_siging_sequence" if sigmoid_gate else "mlstm_sequence"
    options = (sigmoid_gate, normalize, eps, dtype_state, False, "auto")
    return _sequence.plan(op, tensors, options).backend == "tk"
