"""What is kept for later calls: results by key, tensors on a device."""

import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

LIMIT = 1024

Result = TypeVar("Result")


class Memo(Generic[Result]):
    """Results by key, at most LIMIT of them: when it is full the oldest goes."""

    def __init__(self) -> None:
        self._results: dict[Hashable, Result] = {}
        self._lock = threading.Lock()
        self.get = self._results.get
        self.clear = self._results.clear

    def __len__(self) -> int:
        return len(self._results)

    def keep(self, key: Hashable, result: Result) -> None:
        with self._lock:
            while len(self._results) >= LIMIT and key not in self._results:
                del self._results[next(iter(self._results))]
            self._results[key] = result

    def of(self, key: Hashable, make: Callable[[], Result]) -> Result:
        """What there is for a key, made and kept where there is nothing yet."""
        found = self.get(key)
        if found is None:
            found = make()
            self.keep(key, found)
        return found


def kept_on_device(
    kept: dict[Any, Tensor], key: Hashable, device: torch.device, make: Callable[[torch.device], Tensor]
) -> Tensor:
    """What `kept` has under a key, which tells the device, else what `make(device)` returns, kept for the
    next time."""
    found = kept.get(key)
    if found is not None:
        return found
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # the graph's memory is not for keeping
        return make(device)
    with torch.inference_mode(False), torch.no_grad():
        # from the CPU: it is there for every stream when the copy returns
        kept[key] = make(torch.device("cpu")).to(device)
    return kept[key]


# the memos of plain eager calls (`CallMemo` of core/dispatch.py); here, so that backends need not import that
call_memos: "weakref.WeakSet[Any]" = weakref.WeakSet()


def forget_calls() -> None:
    """Drop all plans: something that they depend on has changed, as which kernels can be had."""
    for kept in list(call_memos):
        kept.clear()
