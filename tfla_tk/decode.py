"""One token of mLSTM, or a few, with exponential and with sigmoid input gate: the functions of decoding.

Signatures follow mlstm_kernels' step functions; its tile parameters are not taken. The state is read once and
written once (docs/mlstm-step.md, docs/mlstm-sequence.md).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tfla_tk import ops, sequence_ops, step_ops
from tfla_tk.dispatch import choose, load_backend, operator
from tfla_tk.memo import Memo, is_direct
from tfla_tk.validation import MLSTMCall, check_mlstm_sequence, check_mlstm_step

_TENSORS = ("q", "k", "v", "i", "f", "c", "n", "m")
_CHECKS = {"mlstm_step": check_mlstm_step, "mlstm_sequence": check_mlstm_sequence}
_KERNELS: dict[str, Callable[..., tuple[Tensor, tuple[Tensor, ...]]]]
_KERNELS = {"mlstm_step": step_ops.mlstm_step, "mlstm_sequence": sequence_ops.mlstm_sequence}
_OPTIONS = ("kernel", "sigmoid_gate", "normalize", "eps", "dtype_state", "inplace", "backend")


def _description(kernel: str, sigmoid_gate: bool) -> Callable[..., tuple[str, MLSTMCall]]:
    """What `which` makes of a public function's arguments."""
    check = _CHECKS[kernel]

    def describe(*, backend: str, **arguments: Any) -> tuple[str, MLSTMCall]:
        fixed = {"m": None} if sigmoid_gate else {"normalize": True}
        return kernel, check(sigmoid_gate=sigmoid_gate, **fixed, **arguments)

    return describe


@operator(_description("mlstm_step", sigmoid_gate=False))
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
            chunkwise kernel over a sequence of one token, by name only; "tk:<schedule>" chooses that
            kernel's, the step kernel has one.

    Returns:
        h [B, NH, DHHV] in q's dtype and the state after the token (c, n, m), new tensors unless `inplace`.

    Raises:
        TypeError, ValueError: bad arguments, before anything is computed.
        UnsupportedError: a backend asked for by name cannot serve the call; has .reason and .remedy.
    """
    options = ("mlstm_step", False, True, eps, dtype_state, inplace, backend)
    h, (c, n, m) = _run("mlstm_step", (q, k, v, i, f, c, n, m), options)
    return h, (c, n, m)


@operator(_description("mlstm_step", sigmoid_gate=True))
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
    options = ("mlstm_step", True, normalize, eps, dtype_state, inplace, backend)
    h, (c, n) = _run("mlstm_siging_step", (q, k, v, i, f, c, n, None), options)
    return h, (c, n)


@operator(_description("mlstm_sequence", sigmoid_gate=False))
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
    prompts; longer sequences are what `mlstm_chunkwise` is for, and a single token goes through `mlstm_step`,
    which is faster: this takes some 1.3 times as long for one (docs/mlstm-sequence.md).

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
        `inplace`.

    Raises:
        TypeError, ValueError: bad arguments, before anything is computed.
        UnsupportedError: a backend asked for by name cannot serve the call; has .reason and .remedy.
    """
    options = ("mlstm_sequence", False, True, eps, dtype_state, inplace, backend)
    h, (c, n, m) = _run("mlstm_sequence", (q, k, v, i, f, c, n, m), options)
    return h, (c, n, m)


@operator(_description("mlstm_sequence", sigmoid_gate=True))
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

    Arguments, errors and the choice of the backend as in `mlstm_sequence`; there is no m.

    Args:
        normalize: divide by the normaliser; without it n is passed through.

    Returns:
        h [B, NH, S, DHHV] in q's dtype and the state after the last token (c, n), new tensors unless
        `inplace`.
    """
    options = ("mlstm_sequence", True, normalize, eps, dtype_state, inplace, backend)
    h, (c, n) = _run("mlstm_siging_sequence", (q, k, v, i, f, c, n, None), options)
    return h, (c, n)


def is_sequence_on_tk(
    tensors: tuple[Any, ...],
    *,
    sigmoid_gate: bool,
    normalize: bool,
    eps: float,
    dtype_state: torch.dtype | None,
) -> bool:
    """Whether `mlstm_sequence` or `mlstm_siging_sequence` under "auto" takes the tk backend.

    The answer is the plan that the call itself finds again. Bad arguments raise what the call would raise.

    Args:
        tensors: q, k, v, i, f, c, n, m; m is None with the sigmoid gate.
    """
    op = "mlstm_siging_sequence" if sigmoid_gate else "mlstm_sequence"
    options = ("mlstm_sequence", sigmoid_gate, normalize, eps, dtype_state, False, "auto")
    return _plans.of(tensors, options, partial(_make_plan, op)).backend == "tk"


class _Plan(NamedTuple):
    """How a call is served; direct: the kernel is called without the op."""

    call: MLSTMCall
    backend: str
    variant: str | None
    direct: bool


_plans: Memo[_Plan] = Memo()


def _run(op: str, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Validate, choose the backend, apply: h and the next state as the public function returns it.

    Args:
        op: name of the public function.
        tensors: in the order of _TENSORS. options: in the order of _OPTIONS; they tell the operators apart.
    """
    call, name, variant, direct = _plans.of(tensors, options, partial(_make_plan, op))
    kernel, *_, dtype_state, inplace, _ = options
    kept = None if inplace else dtype_state or ops.state_dtype(tensors[0])
    if name == "tk" and not call.requires_grad:
        written = torch.float32 if kept == torch.float64 else kept
        h, state = _KERNELS[kernel](call, written, *tensors, direct=direct)
        return h, state if written == kept else tuple(x.to(kept) for x in state)
    if name == "tk":
        h, state = _chunk_of_one(call, variant, tensors)
    else:
        h, state = getattr(load_backend(name), kernel)(call, *tensors)
    return h, _as_stored(state, tensors[5 : 5 + len(state)], kept)


def _make_plan(op: str, tensors: tuple[Any, ...], options: tuple[Any, ...], *, eager: bool) -> _Plan:
    """Validate a call and choose its backend; `eager` says that nothing traces or intercepts it."""
    arguments = dict(zip(_TENSORS + _OPTIONS, tensors + options, strict=True))
    kernel, backend = arguments.pop("kernel"), arguments.pop("backend")
    call = _CHECKS[kernel](**arguments)
    name, variant = choose(op, kernel, call, backend)
    if call.is_empty:
        # nothing to launch
        name, variant = "reference", None
    return _Plan(call, name, variant, direct=eager and name == "tk" and is_direct(tensors))


def _as_stored(
    state: tuple[Tensor, ...], given: tuple[Tensor, ...], kept: torch.dtype | None
) -> tuple[Tensor, ...]:
    """A new state in the dtype that is kept, or over the given one where that is None."""
    dtypes = [x.dtype if kept is None else kept for x in given]
    if len(state) == 3 and dtypes[2].itemsize == 2:
        state = step_ops.representable(*state, dtypes[2])
    if kept is not None:
        # the sigmoid gate without normaliser hands n through
        return tuple(
            x.clone() if x is old and x.dtype == kept else x.to(kept)
            for x, old in zip(state, given, strict=True)
        )
    for old, x in zip(given, state, strict=True):
        if old is not x:
            old.copy_(x)
    return given


def _chunk_of_one(
    call: MLSTMCall, variant: str | None, tensors: tuple[Any, ...]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The chunkwise kernel over a sequence of one token: it has gradients."""
    q, k, v, i, f, c, n, m = tensors
    q, k, v = (x.unsqueeze(2) for x in (q, k, v))
    h, state = ops.mlstm(call, variant or "auto", q, k, v, i, f, c, n, m, None)
    if call.sigmoid_gate and not call.normalize:
        state = (state[0], n)
    return h.squeeze(2), state
