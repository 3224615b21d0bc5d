"""Records what the forward's host side hands to its kernels."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tfla_tk.build import Instance

# of the class Forward, as scalar_gate/bindings/forward.cpp names them
OF_ALL = (
    *(
        "q",
        "k",
        "v",
        "h",
        "i",
        "f",
        "cut",
        "sizes",
        "group",
        "scale",
        "eps",
        "half",
        "sigmoid_gate",
        "normalize",
    ),
    "device",
)
OF_A_LAUNCH = (*("q", "k", "v", "h", "i", "f", "initial", "last", "rows", "offsets", "workspace", "stream"),)


class Launches(list[SimpleNamespace]):
    """Stands for a kernel module and records its launches, with the instance they were loaded for.

    A launch has what a `Forward` was made with and, as q, k, v, h, i, f, addresses before the strides.
    """

    instance: Instance
    forwards = 0
    write: Callable[[SimpleNamespace], None] | None = None

    def load(self, instance: Instance) -> Launches:
        self.instance = instance
        return self

    CTAS_PER_MULTIPROCESSOR = 1

    def mlstm_fwd_workspace_bytes(self, slots: int, dim_qk: int, dim_v: int) -> int:
        return 4 * slots * (dim_qk * dim_v + dim_qk + 5)

    def workspace_offsets(self, slots: int, dim_qk: int, dim_v: int) -> tuple[int, int]:
        return 24 * slots, 32 * slots

    def Forward(self, *arguments: Any) -> SimpleNamespace:
        self.forwards += 1
        of_all = dict(zip(OF_ALL, arguments, strict=True))

        def launch(*arguments: Any) -> None:
            given = dict(zip(OF_A_LAUNCH, arguments, strict=True))
            operands = {name: (given[name], *of_all[name]) for name in ("q", "k", "v", "h", "i", "f")}
            self.append(SimpleNamespace(**(of_all | given | operands)))
            if self.write is not None:
                self.write(self[-1])

        return SimpleNamespace(launch=launch)
