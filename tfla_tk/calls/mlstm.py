"""Calls of mLSTM: their description, and the checks of their arguments, on metadata alone."""

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tfla_tk.core import checks, transforms
from tfla_tk.core.invariance import is_batch_invariant
from tfla_tk.core.layout import MaybeTensor, state_dtype
from tfla_tk.core.support import Call

# of q, k, v, i, f, c_initial and n_initial
Grads: TypeAlias = tuple[Tensor, ...]
MaybeGrads: TypeAlias = tuple[MaybeTensor, ...]


@dataclass(frozen=True, kw_only=True)
class MLSTMCall(Call):
    """What a backend needs to know about one mLSTM call to accept or refuse it. recompute_states: for the
    Triton kernels' backward. dtype_state: of the state that is returned; of a step and a few tokens alone,
    as inplace. inplace: each part of the given state is overwritten in the dtype it has."""

    sigmoid_gate: bool
    normalize: bool
    return_last_states: bool
    eps: float
    recompute_states: bool = True
    dtype_state: torch.dtype = torch.float32
    inplace: bool = False


def check_mlstm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c_initial: Tensor | None,
    n_initial: Tensor | None,
    m_initial: Tensor | None,
    cu_seqlens: Tensor | None = None,
    *,
    sigmoid_gate: bool,
    normalize: bool,
    return_last_states: bool,
    eps: float,
    chunk_size: int,
    autocast_kernel_dtype: torch.dtype | None = None,
    recompute_states_in_bw: bool = True,
) -> MLSTMCall:
    """Check one call of `mlstm_chunkwise` or `mlstm_siging_chunkwise`, whose arguments it has, and
    describe it."""
    checks.check_optional_dtype("autocast_kernel_dtype", autocast_kernel_dtype, checks.KERNEL_DTYPES)
    recompute_states = checks.check_bool("recompute_states_in_bw", recompute_states_in_bw)
    dtype = checks.autocast_dtype(q, autocast_kernel_dtype)
    sizes = _check_tokens(q, k, v, i, f, "B, NH, S", dtype)
    batch, heads, dim_qk, dim_v = (sizes[name] for name in ("batch", "heads", "dim_qk", "dim_v"))
    if cu_seqlens is not None:
        checks.check_cu_seqlens(cu_seqlens, q)
    normalize = checks.check_bool("normalize", normalize)
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    rows, label = (sequences, heads, dim_qk, dim_v), "B" if cu_seqlens is None else "N"
    _check_initial_state(
        q, rows, label, c_initial, n_initial, m_initial, needs_n=normalize, needs_m=not sigmoid_gate
    )
    return_last_states = checks.check_bool("return_last_states", return_last_states)
    eps = checks.check_eps(eps)
    chunk_size = checks.check_chunk_size(chunk_size)
    return MLSTMCall(
        **transforms.of_call((q, k, v, i, f, c_initial, n_initial), (m_initial,)),
        **sizes,
        sequences=sequences,
        sigmoid_gate=sigmoid_gate,
        normalize=normalize,
        return_last_states=return_last_states,
        varlen=cu_seqlens is not None,
        chunk_size=chunk_size,
        eps=eps,
        recompute_states=recompute_states,
        batch_invariant=is_batch_invariant(),
    )


def check_mlstm_step(*tensors: Any, **arguments: Any) -> MLSTMCall:
    """Check one step: as `check_mlstm_sequence`, but for q, k [B, NH, DHQK], v [B, NH, DHHV] and i, f [B,
    NH, 1]."""
    return check_mlstm_sequence(*tensors, **arguments, of_tokens="B, NH")


def check_mlstm_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c: Tensor,
    n: Tensor,
    m: Tensor | None,
    *,
    sigmoid_gate: bool,
    normalize: bool,
    eps: float,
    dtype_state: torch.dtype | None,
    inplace: bool = False,
    of_tokens: str = "B, NH, S",
) -> MLSTMCall:
    """Check a few tokens of mLSTM that go on from a state, as `mlstm_sequence` has them, and describe
    them; m is None with the sigmoid gate. of_tokens: the dimensions before the head dims."""
    sizes = _check_tokens(q, k, v, i, f, of_tokens)
    batch, heads, dim_qk, dim_v = (sizes[name] for name in ("batch", "heads", "dim_qk", "dim_v"))
    state: list[checks.ExpectedTensor] = [
        ("c", c, (batch, heads, dim_qk, dim_v), "[B, NH, DHQK, DHHV]"),
        ("n", n, (batch, heads, dim_qk), "[B, NH, DHQK]"),
    ]
    if not sigmoid_gate:
        state.append(("m", m, (batch, heads, 1), "[B, NH, 1]"))
    checks.check_expected(q, state)
    normalize = checks.check_bool("normalize", normalize)
    eps = checks.check_eps(eps)
    checks.check_optional_dtype("dtype_state", dtype_state, checks.FLOAT_DTYPES)
    of_transforms = transforms.of_call((q, k, v, i, f, c, n), (m,))
    inplace = checks.check_bool("inplace", inplace)
    if inplace and of_transforms["requires_grad"]:
        checks.fail("inplace", "False where a gradient is recorded (torch.no_grad() records none)", inplace)
    checks.check_constant("m", m)
    for name, value in (("c", c), ("n", n), ("m", m)):
        if not inplace or value is None:
            continue
        if any(step == 0 and size > 1 for step, size in zip(value.stride(), value.shape, strict=True)):
            checks.fail(name, "a place for every element, in place", f"strides {tuple(value.stride())}")
        if dtype_state not in (None, value.dtype):
            checks.fail("dtype_state", f"None or {value.dtype}, the dtype of {name}, in place", dtype_state)
    return MLSTMCall(
        **of_transforms,
        **sizes,
        sequences=batch,
        sigmoid_gate=sigmoid_gate,
        normalize=normalize,
        return_last_states=True,
        varlen=False,
        chunk_size=checks.CHUNK_MULTIPLE,
        eps=eps,
        batch_invariant=is_batch_invariant(),
        dtype_state=dtype_state or state_dtype(q),
        inplace=inplace,
    )


def _check_tokens(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, of_tokens: str, dtype: torch.dtype | None = None
) -> dict[str, Any]:
    """Check what there is of every token; sizes, dtype and device as fields of an `MLSTMCall`. of_tokens: the
    dimensions before the head dims; without S there is one token, with gates [B, NH, 1]. dtype: that q, k and
    v are cast to; None: they have q's."""
    rank = of_tokens.count(",") + 2
    checks.check_tensor("q", q, rank, f"[{of_tokens}, DHQK]")
    checks.check_tensor("v", v, rank, f"[{of_tokens}, DHHV]")
    sizes, dim_v = q.shape[:-1], v.shape[-1]
    gates, of_gates = (sizes, f"[{of_tokens}] of q") if rank == 4 else ((*sizes, 1), "[B, NH, 1]")
    checks.check_expected(
        q,
        [
            ("k", k, q.shape, f"[{of_tokens}, DHQK] of q"),
            ("v", v, (*sizes, dim_v), f"[{of_tokens}] of q and [DHHV]"),
            ("i", i, gates, of_gates),
            ("f", f, gates, of_gates),
        ],
    )
    checks.check_head_dim("q", q)
    checks.check_head_dim("v", v)
    if dtype is None:
        for name, value in (("k", k), ("v", v)):
            checks.check_dtype_of_q(name, value, q.dtype)
    batch, heads, seq = (*sizes, 1)[:3]
    of_heads = {"heads": heads, "dim_qk": q.shape[-1], "dim_v": dim_v}
    return {"device": q.device, "dtype": dtype or q.dtype, "batch": batch, "seq": seq, **of_heads}


def _check_initial_state(
    q: Tensor,
    shape: tuple[int, int, int, int],
    rows: str,
    c: Tensor | None,
    n: Tensor | None,
    m: Tensor | None,
    *,
    needs_n: bool,
    needs_m: bool,
) -> None:
    """All of the state or none of it, c of the given shape."""
    given = [name for name, t in (("c_initial", c), ("n_initial", n), ("m_initial", m)) if t is not None]
    needed = ["c_initial"] + ["n_initial"] * needs_n + ["m_initial"] * needs_m
    if given and not set(needed) <= set(given):
        wanted = f"all of {', '.join(needed)} or none" if len(needed) > 1 else f"{needed[0]} or none"
        if m is not None and not needs_m:
            wanted += " (the sigmoid gate has no m_initial)"
        checks.fail("initial state", wanted, f"only {', '.join(given)}")
    states: list[checks.ExpectedTensor] = [
        ("c_initial", c, shape, f"[{rows}, NH, DHQK, DHHV]"),
        ("n_initial", n, shape[:3], f"[{rows}, NH, DHQK]"),
        ("m_initial", m, (*shape[:2], 1), f"[{rows}, NH, 1]"),
    ]
    checks.check_expected(q, [state for state in states if state[1] is not None])
    checks.check_constant("m_initial", m)
