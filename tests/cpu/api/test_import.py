"""Importing the package, and a reference call, load no kernel library and touch no GPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys
import torch
touched = []
for name in ("_lazy_init", "is_available", "device_count", "get_device_capability", "current_device"):
    setattr(torch.cuda, name, lambda *a, _name=name, **k: touched.append(_name))
import tfla_tk
heavy = ("triton", "mlstm_kernels", "fla", "xlstm", "transformers")
print(json.dumps({"loaded": [m for m in heavy if m in sys.modules], "touched": touched,
    "initialised": torch.cuda.is_initialized(),
    "undefined": sorted(n for n in tfla_tk.__all__ if not hasattr(tfla_tk, n))}))
"""


def run(script: str) -> dict[str, object]:
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    result: dict[str, object] = json.loads(out)
    return result


def test_import_is_light() -> None:
    assert run(SCRIPT) == {"loaded": [], "touched": [], "initialised": False, "undefined": []}


def test_cpu_call_loads_no_kernel_library() -> None:
    script = SCRIPT.replace(
        "heavy =",
        "x = [torch.randn(1, 1, 20, 16) for _ in range(3)] + [torch.randn(1, 1, 20)] * 2\n"
        "h = tfla_tk.mlstm_chunkwise(*x)\n"
        "assert h.shape == (1, 1, 20, 16) and tfla_tk.which('mlstm_chunkwise', *x).backend == 'reference'\n"
        "heavy =",
    )
    result = run(script)
    assert result["loaded"] == [] and result["initialised"] is False


@pytest.mark.slow
@pytest.mark.parametrize(("version", "warned"), [("2.10.1+cu128", True), ("2.11.0a0+git1", False)])
def test_an_old_torch(version: str, warned: bool) -> None:
    """It is told at import, with what it needs and what there is."""
    result = run(
        f"import json, warnings, torch\ntorch.__version__ = {version!r}\n"
        "with warnings.catch_warnings(record=True) as caught:\n    import tfla_tk\n"
        "print(json.dumps({'said': [str(w.message) for w in caught if 'tfla_tk' in str(w.message)]}))"
    )
    said = result["said"]
    assert isinstance(said, list) and len(said) == warned
    assert not warned or said[0].startswith("tfla_tk needs torch 2.11 or newer, found 2.10.1+cu128")
