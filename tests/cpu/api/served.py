"""A tk backend that serves every call and counts, and modes of torch that note what happens under them."""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tfla_tk import Support
from tfla_tk.calls.mlstm import MLSTMCall


class Served:
    """A tk backend that serves everything, with counts of what was asked of it."""

    def __init__(self, fake_tk: Any) -> None:
        self.checked = 0
        self.direct = 0
        self.dispatched = 0
        self.real, self.kernel = fake_tk.mlstm, fake_tk.forward.mlstm_fwd
        fake_tk.supports_mlstm = self._supports
        fake_tk.forward.mlstm_fwd = self._kernel
        fake_tk.mlstm = self._serve

    def _supports(self, call: MLSTMCall, variant: str | None = None) -> Support:
        self.checked += 1
        return Support(True)

    def _kernel(self, *args: Any) -> Any:
        self.direct += 1
        return self.kernel(*args)

    def _serve(self, *args: Any) -> Any:
        self.dispatched += 1
        return self.real(*args)


class Functions(TorchFunctionMode):
    """Notes every torch function."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """Notes every operator that is dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))
