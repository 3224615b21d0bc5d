"""The functions that mlstm_kernels' registries and the models' backend modules call.

All of them return the state as (c, n, m), with zeros for m with the sigmoid gate, as the models expect.

Models copy each new state over the one they passed in and hand out (xLSTM's block stack, Hugging Face's
cache), while autograd may still need both. Where a gradient is recorded, the functions therefore compute from
copies of the initial state and return copies of the last one.

A few tokens that go on from a state, without gradients, are `tfla_tk.mlstm_sequence` where its tk kernel
serves them (docs/decode.md), else `tfla_tk.mlstm_chunkwise` like every other sequence.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from tfla_tk.build.instances import MAX_TOKENS
from tfla_tk.core.checks import CHUNK_MULTIPLE, autocast_dtype
from tfla_tk.core.dispatch import split_backend
from tfla_tk.core.layout import state_dtype
from tfla_tk.decode import (
    is_sequence_on_tk,
    mlstm_sequence,
    mlstm_siging_sequence,
    mlstm_siging_step,
    mlstm_step,
)
from tfla_tk.mlstm import mlstm_chunkwise, mlstm_siging_chunkwise
from tfla_tk.ops.mlstm_decode import representable

State = tuple[Tensor, Tensor, Tensor]
MaybeTensor = TypeVar("MaybeTensor", Tensor, Tensor | None)

# tile sizes and the like of mlstm_kernels' functions: nothing here depends on them
TUNING = frozenset((
    *("chunk_size_inter", "chunk_size_intra", "num_stages", "num_stages_inter", "num_stages_intra"),
    *("num_warps", "num_warps_inter", "num_warps_intra", "recompute_states_in_bw", "siz_b_DHHV"),
    *("siz_b_DHQK", "siz_b_DH_loop", "siz_b_DH_parallel", "siz_b_L_loop", "siz_b_L_parallel"),
))  # fmt: skip


def chunkwise(
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
    autocast_kernel_dtype: torch.dtype | None = None,
    backend: str = "auto",
    dtype_state: torch.dtype = torch.float32,
    **tuning: Any,
) -> Tensor | tuple[Tensor, State]:
    """`tfla_tk.mlstm_chunkwise` as mlstm_kernels' registry expects it: any S, any chunk_size, state as
    above. An initial state in 16 bits gets a last state whose m those 16 bits hold (`representable`),
    since it is going to be stored in them. dtype_state: of the state returned; fp64 for fp64 q. TypeError:
    an argument that neither this package nor mlstm_kernels knows."""
    options: dict[str, Any] = {"eps": eps, "autocast_kernel_dtype": autocast_kernel_dtype, "backend": backend}
    options |= {"return_last_states": return_last_states, "chunk_size": chunk_size}
    return _serve((q, k, v, i, f), (c_initial, n_initial, m_initial), None, dtype_state, options, tuning)


def chunkwise_siging(
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
    autocast_kernel_dtype: torch.dtype | None = None,
    backend: str = "auto",
    dtype_state: torch.dtype = torch.float32,
    **tuning: Any,
) -> Tensor | tuple[Tensor, State]:
    """`tfla_tk.mlstm_siging_chunkwise` as mlstm_kernels' registry expects it; see `chunkwise`."""
    options: dict[str, Any] = {"eps": eps, "autocast_kernel_dtype": autocast_kernel_dtype, "backend": backend}
    options |= {"return_last_states": return_last_states, "chunk_size": chunk_size}
    return _serve((q, k, v, i, f), (c_initial, n_initial), normalize, dtype_state, options, tuning)


def _serve(
    tokens: tuple[Tensor, ...],
    given: tuple[Tensor | None, ...],
    normalize: bool | None,
    dtype_state: torch.dtype,
    options: dict[str, Any],
    tuning: dict[str, Any],
) -> Tensor | tuple[Tensor, State]:
    """`chunkwise` and `chunkwise_siging`. tokens: q, k, v, i, f. given: the initial state, c, n, m or with
    the sigmoid gate c, n. normalize: of the sigmoid gate; None is the exponential gate. options: the
    others of `mlstm_chunkwise`."""
    _check_tuning(tuning)
    q, sigmoid_gate = tokens[0], normalize is not None
    kept = _kept_dtype(q, dtype_state)
    recorded = _records((*tokens, *given[:2]))
    of_gate: dict[str, Any] = {"normalize": normalize} if sigmoid_gate else {}
    # tokens that go on from a state, few enough for the tk backend's kernel, but more than a step's one.
    # Variants are the chunkwise kernels': with them too, the kernel for a few tokens has the name alone
    few_tokens = 1 < q.shape[-2] <= MAX_TOKENS and all(x is not None for x in given)
    may_be_few = few_tokens and split_backend(options["backend"])[0] in ("auto", "tk")
    if options["return_last_states"] and not recorded and may_be_few:
        tensors: tuple[Any, ...] = (*_cast(tokens[:3], options["autocast_kernel_dtype"]), *tokens[3:], *given)
        of_few: dict[str, Any] = {"eps": options["eps"], "dtype_state": kept}
        asked = (*tensors, None)[:8]
        if is_sequence_on_tk(asked, sigmoid_gate=sigmoid_gate, normalize=normalize is not False, **of_few):
            few: Any = mlstm_siging_sequence if sigmoid_gate else mlstm_sequence
            h, last = few(*tensors, **of_few, **of_gate)
            if normalize is False:
                last = (last[0], torch.zeros_like(last[1]))
            return h, _with_m(last, given[0])
    state = tuple(_private(q, x) for x in given) if recorded else given
    # the next one that the public functions take; the result does not depend on it
    options["chunk_size"] = -(-options["chunk_size"] // CHUNK_MULTIPLE) * CHUNK_MULTIPLE
    function: Any = mlstm_siging_chunkwise if sigmoid_gate else mlstm_chunkwise
    out = function(*tokens, *state, **options, **of_gate)
    if not options["return_last_states"]:
        return out
    h, last = out
    last = _with_m(last, given[0])
    c, n, m = _handed_out(last) if recorded else last
    if kept.itemsize == 2:
        c, n, m = representable(c, n, m, kept)
    return h, (c.to(kept), n.to(kept), m.to(kept))


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c: Tensor,
    n: Tensor,
    m: Tensor,
    eps: float = 1e-6,
    dtype_state: torch.dtype = torch.float32,
    backend: str = "auto",
    **tuning: Any,
) -> tuple[Tensor, State]:
    """`tfla_tk.mlstm_step` as mlstm_kernels' registry expects it. A state that comes in 16 bits is taken to
    be stored in them, as in `chunkwise`."""
    _check_tuning(tuning)
    given = c
    recorded = _records((q, k, v, i, f, c, n))
    if recorded:
        c, n, m = (_private(q, x) for x in (c, n, m))
    h, last = mlstm_step(q, k, v, i, f, c, n, m, eps, _kept_dtype(q, dtype_state), backend=backend)
    last = _as_stored(last, given)
    return h, _handed_out(last) if recorded else last


def step_siging(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c: Tensor,
    n: Tensor,
    m: Tensor | None = None,
    eps: float = 1e-6,
    dtype_state: torch.dtype = torch.float32,
    normalize: bool = True,
    backend: str = "auto",
    **tuning: Any,
) -> tuple[Tensor, State]:
    """`tfla_tk.mlstm_siging_step` in the form of mlstm_kernels' step functions; m is not read."""
    _check_tuning(tuning)
    recorded = _records((q, k, v, i, f, c, n))
    if recorded:
        c, n = (_private(q, x) for x in (c, n))
    dtype = _kept_dtype(q, dtype_state)
    h, (c, n) = mlstm_siging_step(q, k, v, i, f, c, n, eps, dtype, normalize, backend=backend)
    last = _with_m((c, n), None)
    return h, _handed_out(last) if recorded else last


def inference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c_initial: Tensor | None = None,
    n_initial: Tensor | None = None,
    m_initial: Tensor | None = None,
    *,
    sequence: Callable[..., Any],
    one_token: Callable[..., Any],
    dtype_state: torch.dtype,
) -> tuple[Tensor, State]:
    """A backend module's pass in inference: `one_token` for S = 1, else `sequence`, unpadded; h [B, NH, S,
    DHHV] and the state after the last token, of dtype_state, or fp64 for fp64 q. Tensors as in `chunkwise`.
    sequence: chunkwise function without further arguments but return_last_states and dtype_state. one_token:
    step function without further arguments but dtype_state."""
    if q.shape[2] != 1:
        state = (c_initial, n_initial, m_initial)
        return sequence(q, k, v, i, f, *state, return_last_states=True, dtype_state=dtype_state)
    dtype = _kept_dtype(q, dtype_state)
    if c_initial is None:
        batch, heads, _, dim_qk = q.shape
        c_initial = q.new_zeros(batch, heads, dim_qk, v.shape[-1], dtype=dtype)
        n_initial, m_initial = c_initial[..., 0].contiguous(), c_initial[..., 0, :1].contiguous()
    token = (q.squeeze(2), k.squeeze(2), v.squeeze(2), i, f)
    h, last = one_token(*token, c_initial, n_initial, m_initial, dtype_state=dtype)
    return h.unsqueeze(2), last


_NAMES = {"query": "q", "key": "k", "value": "v", "igate": "i", "fgate": "f"}


def renamed(function: Callable[..., Any], **given: Any) -> Any:
    """Call `function` under the argument names of transformers' own xLSTM backend."""
    return function(**{_NAMES.get(name, name): x for name, x in given.items()})


def _check_tuning(tuning: dict[str, Any]) -> None:
    unknown = sorted(set(tuning) - TUNING)
    if unknown:
        raise TypeError(f"unexpected arguments {', '.join(unknown)}")


def _kept_dtype(q: Tensor, dtype: torch.dtype) -> torch.dtype:
    return state_dtype(q) if dtype == torch.float32 else dtype


def _cast(operands: tuple[Tensor, ...], kernel_dtype: torch.dtype | None) -> tuple[Tensor, ...]:
    """q, k, v as `mlstm_chunkwise` casts them under autocast."""
    dtype = autocast_dtype(operands[0], kernel_dtype)
    return operands if dtype is None else tuple(x.to(dtype) for x in operands)


def _with_m(last: tuple[Tensor, ...], given: Tensor | None) -> State:
    """A last state as models have it: with zeros for m with the sigmoid gate, else `_as_stored`."""
    if len(last) == 2:
        c, n = last
        return c, n, n.new_zeros(*n.shape[:2], 1)
    c, n, m = last
    return _as_stored((c, n, m), given)


def _as_stored(state: State, given: Tensor | None) -> State:
    """The last state of the exponential gate with an m that the dtype of the given state holds."""
    if given is None or given.dtype.itemsize != 2 or state[0].dtype == given.dtype:
        return state
    return representable(*state, given.dtype)


def _records(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether autograd records operations on the tensors; torch.compile follows this one."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _private(q: Tensor, state: MaybeTensor) -> MaybeTensor:
    """A copy of a part of the state, in the dtype that the kernels read."""
    return None if state is None else state.to(state_dtype(q), copy=True)


def _handed_out(state: State) -> State:
    c, n, m = state
    return c.clone(), n.clone(), m.clone()
