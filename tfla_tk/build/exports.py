"""What Python and the kernels must agree on: what a launcher tells of it is compared when it is loaded."""

from typing import Any

from tfla_tk.build.errors import BuildError
from tfla_tk.build.instances import MAX_DIM_QK, MAX_TOKENS, RECURRENT_TOKENS, Launcher
from tfla_tk.core import layout

_OF_LAYOUT = (
    *("CHUNK", "ANCHOR_CHUNKS", "STATE_CHUNKS", "FLOW_PARTS", "DELTA_ANCHOR_CHUNKS", "SEGMENT_CHUNKS"),
    *("DELTA_SLICE_COLUMNS", "DELTA_DECAY_CHUNKS", "DELTA_KEYS_WARPS", "GRADIENTS", "ADDRESS_BITS"),
    "MAX_SLICES",
)
EXPECTED: dict[str, Any] = {
    **{name: getattr(layout, name) for name in _OF_LAYOUT},
    "DTYPES": {str(dtype).removeprefix("torch."): code for dtype, code in layout.DTYPES.items()},
    "MAX_KEYS": MAX_DIM_QK,
    "MAX_TOKENS": MAX_TOKENS,
    "DECODE_TOKENS": RECURRENT_TOKENS,
}


def check_exports(launcher: Launcher, found: dict[str, Any]) -> None:
    """Compare the constants that a launcher tells with what Python takes for them."""
    for name in launcher.exports:
        value = found.get(name, "nothing")
        if value != EXPECTED[name]:
            raise BuildError(
                f"{launcher.name}: the kernels have {name} = {value}, the Python package {EXPECTED[name]}",
                "reinstall tfla_tk, so that both are of one version",
            )
