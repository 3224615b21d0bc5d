"""Argument checks of the public functions, on metadata alone: no tensor data is read, no device is touched.

Every message names the argument, what was expected and what came.
"""

import difflib
import math
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from typing import Any, NoReturn, TypeAlias

import numpy as np
import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
OFFSET_DTYPES = (torch.int32, torch.int64)
KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CHUNK_MULTIPLE = 16

_LARGEST_INT = 2**63  # which torch's operators no longer take
_LONGEST_TEXT = 100  # of a value in a message

ExpectedTensor: TypeAlias = tuple[str, Any, tuple[int, ...], str]  # name, value, shape, layout


def fail(name: str, expected: str, got: Any, error: type[Exception] = ValueError) -> NoReturn:
    """Raise `error` with the one message format of this package."""
    raise error(f"{name}: expected {expected}, got {got if isinstance(got, str) else _brief(str, got)}")


def shown_name(name: str, known: Iterable[str]) -> str:
    """A name that is not known, with the one that it is close to, if any; case does not count."""
    by_lower = {str(each).lower(): str(each) for each in known}
    close = difflib.get_close_matches(str(name).lower(), by_lower, 1)
    return f"{name!r} (did you mean {by_lower[close[0]]!r}?)" if close else repr(name)


def check_tensor(name: str, value: Any, rank: int, layout: str) -> None:
    """A dense floating-point tensor of the given rank; `layout` spells its dimensions for the message."""
    _check_dense(name, value, rank, layout, FLOAT_DTYPES, "float16, bfloat16, float32 or float64")


def _check_dense(
    name: str, value: Any, rank: int, layout: str, dtypes: tuple[torch.dtype, ...], of_dtypes: str
) -> None:
    """A dense tensor of one of the dtypes, which `of_dtypes` spells."""
    if not isinstance(value, Tensor):
        fail(name, f"a tensor {layout}", type(value).__name__, TypeError)
    _check_subclass(name, value)
    if value.dtype not in dtypes:
        fail(name, f"dtype {of_dtypes}", value.dtype, TypeError)
    if value.layout is not torch.strided:
        fail(name, "a dense (strided) tensor", value.layout, TypeError)
    if value.dim() != rank:
        expected = f"{counted(rank, 'dimension')} {layout}"
        fail(name, expected, f"{value.dim()} with shape {tuple(value.shape)}")


def counted(number: int, noun: str) -> str:
    """The number and the noun, with an s unless there is one of it."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _check_subclass(name: str, value: Tensor) -> None:
    """No tensor that holds something else than its shape says; other subclasses of Tensor may come."""
    if value.is_nested:
        expected = "a dense (strided) tensor; cu_seqlens packs sequences of several lengths"
        fail(name, expected, "a nested tensor", TypeError)
    # by name: importing torch.distributed.tensor or torch.masked would cost every process its time
    kind = type(value).__name__
    if kind == "DTensor":
        expected = (
            "a local tensor (shard over batch and heads alone, pass x.to_local() of every tensor, and make "
            "the results DTensors again by DTensor.from_local(result, x.device_mesh, x.placements))"
        )
        fail(name, expected, "a DTensor", TypeError)
    if kind == "MaskedTensor":
        fail(name, "a plain tensor, such as x.to_tensor(0)", "a MaskedTensor", TypeError)


def check_shape(name: str, value: Tensor, expected: tuple[int, ...], layout: str, hint: str = "") -> None:
    """The exact shape; `layout` spells its dimensions for the message, which ends with the hint."""
    if value.shape != expected:
        fail(name, f"shape {layout} = {tuple(expected)}", f"{tuple(value.shape)}{hint}")


def check_device(name: str, value: Tensor, device: torch.device) -> None:
    if value.device != device:
        fail(name, f"device {device}, the device of q", value.device)


def check_expected(q: Tensor, expected: Iterable[ExpectedTensor]) -> None:
    """Dense floating-point tensors of these shapes on q's device."""
    for name, value, shape, layout in expected:
        check_tensor(name, value, len(shape), layout)
        check_shape(name, value, shape, layout)
        check_device(name, value, q.device)


def check_dtype_of_q(name: str, value: Tensor, dtype: torch.dtype) -> None:
    if value.dtype != dtype:
        fail(name, f"dtype {dtype}, the dtype of q", value.dtype, TypeError)


def check_head_dim(name: str, value: Tensor) -> None:
    """A last dimension that is not empty."""
    if value.shape[-1] == 0:
        fail(name, "a head dimension of at least 1", f"shape {tuple(value.shape)}")


def shown(value: Any) -> str:
    """Of a tensor its shape and dtype alone: to print numbers would wait for the GPU."""
    if isinstance(value, Tensor):
        # a nested one has no shape
        kind = "a nested tensor of" if value.is_nested else f"a tensor of shape {tuple(value.shape)} and"
        return f"{kind} dtype {value.dtype}"
    return f"{_brief(repr, value)} of type {type(value).__name__}"


def _brief(text_of: Callable[[Any], str], value: Any) -> str:
    """The text of a value, cut where it is long."""
    try:
        text = text_of(value)
    except ValueError:  # Python does not print integers of thousands of digits
        return "a number of too many digits to print"
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."


def check_int(name: str, value: Any, expected: str = "an int") -> int:
    """An integer, Python's or NumPy's, and no bool; returned as Python's."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        fail(name, expected, shown(value), TypeError)
    number = int(value)
    if not -_LARGEST_INT <= number < _LARGEST_INT:
        fail(name, f"{expected} of at most 64 bits", number)
    return number


def check_number(name: str, value: Any, expected: str = "a number") -> float:
    """A real number, Python's or NumPy's, and no bool; returned as a float."""
    if isinstance(value, bool) or not isinstance(value, Real):
        fail(name, expected, shown(value), TypeError)
    try:
        return float(value)
    except OverflowError:
        fail(name, "a number that a float can hold", value)


def check_bool(name: str, value: Any) -> bool:
    """A bool, Python's or NumPy's, not merely something truthy; returned as Python's."""
    if not isinstance(value, (bool, np.bool_)):
        fail(name, "a bool", shown(value), TypeError)
    return bool(value)


def check_chunk_size(value: Any) -> int:
    """A positive multiple of CHUNK_MULTIPLE, of Python's or NumPy's integers; returned as Python's."""
    size = check_int("chunk_size", value)
    if size <= 0 or size % CHUNK_MULTIPLE != 0:
        fail("chunk_size", f"a positive multiple of {CHUNK_MULTIPLE}", value)
    return size


def check_eps(value: Any) -> float:
    """A positive finite number, Python's or NumPy's; returned as a float."""
    eps = check_number("eps", value)
    if not 0 < eps < math.inf:
        fail("eps", "a positive finite number", value)
    return eps


def check_cu_seqlens(value: Any, q: Tensor) -> None:
    """Offsets [N + 1] of sequences packed in q's batch of one; their values are not read."""
    name = "cu_seqlens"
    _check_dense(name, value, 1, "[N + 1]", OFFSET_DTYPES, "int32 or int64")
    if value.shape[0] < 2:
        fail(name, "at least 2 entries", value.shape[0])
    check_device(name, value, q.device)
    if q.shape[0] != 1:
        expected = "a batch of 1 in q (packed sequences: x.flatten(0, 1)[None])"
        fail(name, expected, f"a batch of {q.shape[0]}")


def check_optional_dtype(name: str, value: Any, dtypes: tuple[torch.dtype, ...]) -> None:
    if value is None or (isinstance(value, torch.dtype) and value in dtypes):
        return
    *others, last = map(str, dtypes)
    expected = f"None, {', '.join(others)} or {last}"
    if not isinstance(value, torch.dtype):
        fail(name, expected, shown(value), TypeError)
    fail(name, expected, value)


def autocast_dtype(q: Any, kernel_dtype: torch.dtype | None) -> torch.dtype | None:
    """The dtype that q, k, v are cast to; None where autocast is off for q's device; fp64 is never cast."""
    if not isinstance(q, Tensor) or q.dtype == torch.float64:
        return None
    device = q.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return kernel_dtype or torch.get_autocast_dtype(device)


def check_constant(name: str, value: Tensor | None) -> None:
    """No leaf that asks for a gradient: none is computed for it."""
    if value is not None and value.requires_grad and value.is_leaf and torch.is_grad_enabled():
        fail(name, f"no requires_grad ({name} is a constant of the differentiation)", "a leaf that has it")
