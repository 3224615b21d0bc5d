"""Importing the package, and a reference call, load no kernel library and touch no GPU."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

SCRIPT = """
touched = []
for name in ("_lazy_init", "is_available", "device_count", "get_device_capability", "current_device"):
    setattr(torch.cuda, name, lambda *a, _name=name, **k: touched.append(_name))
import tfla_tk
heavy = ("triton", "mlstm_kernels", "fla", "xlstm", "transformers")
print(json.dumps({"loaded": [m for m in heavy if m in sys.modules], "touched": touched,
    "initialised": torch.cuda.is_initialized(),
    "undefined": sorted(n for n in tfla_tk.__all__ if not hasattr(tfla_tk, n))}))
"""


CALL = SCRIPT.replace(
    "heavy =",
    "x = [torch.randn(1, 1, 20, 16) for _ in range(3)] + [torch.randn(1, 1, 20)] * 2\n"
    "h = tfla_tk.mlstm_chunkwise(*x)\n"
    "assert h.shape == (1, 1, 20, 16) and tfla_tk.which('mlstm_chunkwise', *x).backend == 'reference'\n"
    "heavy =",
)
OLD_TORCH = """
import warnings
torch.__version__ = {!r}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import tfla_tk
print(json.dumps([str(w.message) for w in caught if "tfla_tk" in str(w.message)]))
"""


@pytest.mark.slow
def test_import(in_forks: Callable[..., dict[str, str]]) -> None:
    """It is light, and so is a call on the CPU; an old torch is told."""
    scripts = {"import": SCRIPT, "call": CALL}
    scripts |= {version: OLD_TORCH.format(version) for version in ("2.10.1+cu128", "2.11.0a0+git1")}
    written = in_forks("import json, sys, torch", scripts)
    found = {name: json.loads(out) for name, out in written.items()}
    assert found["import"] == {"loaded": [], "touched": [], "initialised": False, "undefined": []}
    assert found["call"]["loaded"] == [] and found["call"]["initialised"] is False
    assert found["2.11.0a0+git1"] == []
    (said,) = found["2.10.1+cu128"]
    assert said.startswith("tfla_tk needs torch 2.11 or newer, found 2.10.1+cu128")
