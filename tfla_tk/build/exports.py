"""What Python and the kernels must agree on: what a module exports of it is compared when it is loaded."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from tfla_tk.build.errors import BuildError
from tfla_tk.build.instances import MAX_DIM_QK, Instance
from tfla_tk.core import layout

EXPECTED: dict[str, Any] = {
    "CHUNK": layout.CHUNK,
    "ANCHOR_CHUNKS": layout.ANCHOR_CHUNKS,
    "DELTA_ANCHOR_CHUNKS": layout.DELTA_ANCHOR_CHUNKS,
    "SEGMENT_CHUNKS": layout.SEGMENT_CHUNKS,
    "GRADIENTS": layout.GRADIENTS,
    "DTYPES": {str(dtype).removeprefix("torch."): code for dtype, code in layout.DTYPES.items()},
    "ADDRESS_BITS": layout.ADDRESS_BITS,
    "MAX_KEYS": MAX_DIM_QK,
    "MAX_SLICES": layout.MAX_SLICES,
}


def check_exports(instance: Instance, module: ModuleType) -> None:
    """Compare what a module exports with what Python takes for it.

    Raises:
        BuildError: They differ, or the module lacks one that its instance names.
    """
    for name in instance.exports:
        found = getattr(module, name, "nothing")
        if found != EXPECTED[name]:
            raise BuildError(
                f"{instance.name}: the kernels have {name} = {found}, the Python package {EXPECTED[name]}",
                "reinstall tfla_tk, so that both are of one version",
            )
