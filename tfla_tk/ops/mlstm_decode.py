"""The registered ops of one token of mLSTM and of a few, for CPU, CUDA and fake tensors; no gradients.

Like those of whole sequences (mlstm.py) they are the path of the tk backend and the reference on a CPU, and
their arguments are not validated here.

tfla_tk::mlstm_step is one token: q, k [B, NH, K], v [B, NH, V], i, f [B, NH, 1], and the state c, n, m in any
    dtypes, m null with the sigmoid gate. It returns (h, c, n, m): h [B, NH, V] in q's dtype and the state in
    dtype_state; in 16 bits m is rounded, and c and n are relative to the rounded m. m is an empty tensor [0]
    with the sigmoid gate; without normaliser n is copied.
tfla_tk::mlstm_step_ writes the state over the one it read, each part in its own dtype, and returns h.
tfla_tk::mlstm_sequence and tfla_tk::mlstm_sequence_ take q, k [B, NH, S, K], v [B, NH, S, V], i, f [B, NH, S]
    and are otherwise alike: h is [B, NH, S, V], and the state is the one after the last token, rounded once.
batch_invariant is the option of that name; implementations may get one argument less, as of mlstm.py.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tfla_tk.calls.mlstm import MLSTMCall
from tfla_tk.core import flops, library, transforms
from tfla_tk.core.eager import is_direct
from tfla_tk.ops import autograd

StepOutput: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]
Decoded: TypeAlias = tuple[Tensor, tuple[Tensor, ...]]

_TOKENS = "Tensor q, Tensor k, Tensor v, Tensor i, Tensor f, "
_OPTIONS = "bool sigmoid_gate, bool normalize, float eps, "
_COUNT = 8  # of the tensors: q, k, v, i, f, c, n, m


class DecodingOps:
    """The registered ops `name`, which returns a new state, and `name_`, which overwrites the given one.
    new_state, in_place: these ops."""

    def __init__(self, name: str) -> None:
        our_library = library.get()
        our_library.define(
            f"{name}({_TOKENS}Tensor c, Tensor n, Tensor? m, {_OPTIONS}ScalarType dtype_state, "
            "bool batch_invariant=False) -> (Tensor h, Tensor c_next, Tensor n_next, Tensor m_next)"
        )
        our_library.define(
            f"{name}_({_TOKENS}Tensor(a!) c, Tensor(b!) n, Tensor(c!)? m, {_OPTIONS}"
            "bool batch_invariant=False) -> Tensor h"
        )
        self.new_state = getattr(torch.ops.tfla_tk, name).default
        self.in_place = getattr(torch.ops.tfla_tk, f"{name}_").default
        self._direct_in_place = autograd.noting_writes(self._in_place_on_cuda, _written)
        writing = autograd.noting_writes(autograd.below_versions(self.in_place), _written)
        our_library.impl(f"{name}_", writing, "ADInplaceOrView")
        for each, op, on_cpu_, on_cuda, fake in (
            (name, self.new_state, on_cpu, self._on_cuda, as_fake),
            (
                f"{name}_",
                self.in_place,
                in_place_on_cpu,
                self._in_place_on_cuda,
                lambda q, k, v, *_: q.new_empty(v.shape),
            ),
        ):
            our_library.impl(each, on_cpu_, "CPU")
            our_library.impl(each, on_cuda, "CUDA")
            # no gradients: 7 of the tensors would have them, m is a constant of the differentiation
            our_library.impl(each, autograd.without_gradients(each, op, 7), "Autograd")
            our_library.register_fake(each, fake)
            flops.register(each, flops.step)
        our_library.register_vmap(name, transforms.merge_into_batch(self.new_state))
        our_library.register_vmap(f"{name}_", _refuse_vmap)

    # What the tk backend has: h and the next state, (c, n, m) or with the sigmoid gate (c, n), as the call
    # wants it stored

    def serve(self, call: MLSTMCall, variant: str | None, *tensors: Any) -> Decoded:
        """`name`, or `name_` in place; tensors are q, k, v, i, f, c, n, m."""
        return self._decode(call, tensors, self.new_state, self.in_place)

    def prepare(
        self, call: MLSTMCall, variant: str | None, tensors: tuple[Any, ...]
    ) -> Callable[..., Decoded] | None:
        """`serve` without the op, for plain eager calls with tensors like these; they record no gradient."""
        if not is_direct(tensors):
            return None
        new_state, in_place = self._kernel, self._direct_in_place
        return lambda *tensors: self._decode(call, tensors, new_state, in_place)

    def _decode(self, call: MLSTMCall, tensors: tuple[Any, ...], new_state: Any, in_place: Any) -> Decoded:
        """By one of a pair of ops, or of their kernels."""
        *token, c, n, m = tensors
        m = None if call.sigmoid_gate else m
        options = (call.sigmoid_gate, call.normalize, call.eps)
        if call.inplace:
            h = in_place(*token, c, n, m, *options, call.batch_invariant)
            return h, (c, n) if m is None else (c, n, m)
        # no kernel writes fp64
        written = torch.float32 if call.dtype_state == torch.float64 else call.dtype_state
        h, c, n, m_next = new_state(*token, c, n, m, *options, written, call.batch_invariant)
        state = (c, n) if m is None else (c, n, m_next)
        return h, state if written == call.dtype_state else tuple(x.to(call.dtype_state) for x in state)

    def _kernel(self, *args: Any) -> Any:
        return _kernels()[0](*args)

    def _on_cuda(self, *args: Any) -> StepOutput:
        h, c, n, m = self._kernel(*args)
        return h, c, n, c.new_empty(0) if m is None else m

    def _in_place_on_cuda(self, *args: Any) -> Tensor:
        return _kernels()[1](*args)


def _refuse_vmap(info: Any, in_dims: Any, *args: Any) -> Any:
    raise RuntimeError("vmap of a step in place: expected inplace=False, got True")


def _written(args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """What mlstm_step_ writes; without normaliser n stays as it is."""
    c, n, m, sigmoid_gate, normalize = args[5:10]
    if not sigmoid_gate:
        return c, n, m
    return (c, n) if normalize else (c,)


# The least finite m of a state in 16 bits. e^m is 0 far above it, and numbers below it are so far apart that
# the rounding error of m would take c beyond the range of its dtype.
_LEAST_M = -16384.0


def representable(c: Tensor, n: Tensor, m: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The same state, c [B, NH, DHQK, DHHV], n [B, NH, DHQK], m [B, NH, 1] in the dtypes they came in, with
    an m that dtype, of 16 bits, holds exactly; what m loses in rounding goes into c and n. Rounding m alone
    would scale everything remembered by e^(error): 3 % at m = 8 in bfloat16, and a decay of less than that
    would never happen. A finite m below -16384 becomes -16384; m = -inf, of an empty state, stays."""
    kept = m.clamp(min=_LEAST_M).to(dtype).to(m.dtype)
    kept = torch.where(m == -torch.inf, m, kept)
    scale = torch.where(kept == m, 1.0, torch.exp(m - kept)).to(c.dtype)
    return c * scale[..., None], n * scale, kept


def stored(call: MLSTMCall, state: tuple[Tensor, ...], given: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """A new state, (c, n, m) or with the sigmoid gate (c, n), as the call wants it: in its dtype_state, or
    over the given one."""
    given = given[: len(state)]
    dtypes = [x.dtype if call.inplace else call.dtype_state for x in given]
    if len(state) == 3 and dtypes[2].itemsize == 2:
        state = representable(*state, dtypes[2])
    if not call.inplace:
        # the sigmoid gate without normaliser hands n through
        return tuple(
            x.clone() if x is old and x.dtype == dtype else x.to(dtype)
            for x, old, dtype in zip(state, given, dtypes, strict=True)
        )
    for old, x in zip(given, state, strict=True):
        if old is not x:
            old.copy_(x)
    return given


# CPU: the reference. These and the fake tensors serve one token and several


def on_cpu(*args: Any) -> StepOutput:
    tensors, (_, normalize, eps, dtype_state, *_) = args[:_COUNT], args[_COUNT:]
    out = as_fake(*args)
    # own memory: a result may be one of the inputs
    for buffer, value in zip(out, _reference(tensors, normalize, eps, dtype_state), strict=False):
        buffer.copy_(value)
    return out


def in_place_on_cpu(*args: Any) -> Tensor:
    tensors, (_, normalize, eps, *_) = args[:_COUNT], args[_COUNT:]
    *_, c, n, m = tensors
    h, *state = _reference(tensors, normalize, eps, c.dtype if m is None else m.dtype)
    for target, value in zip((c, n, m), state, strict=False):
        if target is not None and value is not target:
            target.copy_(value)
    return h


def _reference(
    tensors: tuple[Any, ...], normalize: bool, eps: float, dtype_m: torch.dtype
) -> tuple[Tensor, ...]:
    """h and (c, n) or (c, n, m) of at least fp32, relative to an m that dtype_m holds."""
    h, (c, n, *last_m) = by_reference(tensors, normalize, eps)
    if last_m and dtype_m.itemsize == 2:
        return h, *representable(c, n, last_m[0], dtype_m)
    return h, c, n, *last_m


def by_reference(tensors: tuple[Any, ...], normalize: bool, eps: float) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One token, q [B, NH, K], or several, q [B, NH, S, K], from a state on, m None with the sigmoid gate:
    h like v, and the last state, (c, n, m) or (c, n), of at least fp32; n itself without normaliser."""
    import tfla_tk.reference as forms

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


# Fake: shapes, dtypes and strides alone


def as_fake(*args: Any) -> StepOutput:
    q, _, v, *_ = args
    sigmoid_gate, _, _, dtype_state, *_ = args[_COUNT:]
    (batch, heads), dim_qk = q.shape[:2], q.shape[-1]

    def empty(*shape: int) -> Tensor:
        return q.new_empty(shape, dtype=dtype_state)

    return (
        q.new_empty(v.shape),
        empty(batch, heads, dim_qk, v.shape[-1]),
        empty(batch, heads, dim_qk),
        empty(0) if sigmoid_gate else empty(batch, heads, 1),
    )


def _kernels() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What computes a new state on CUDA, with m None where it is empty, and what overwrites the given one."""
    from tfla_tk.backends.tk.scalar_gate import decoding

    return decoding.with_new_state, decoding.in_place


step = DecodingOps("mlstm_step")
sequence = DecodingOps("mlstm_sequence")
