"""Modules that are loaded again, as notebooks do: calls, errors and the registered ops go on working."""

from __future__ import annotations

from collections.abc import Callable

import pytest

PRELUDE = """
import importlib, pkgutil, sys
import torch
import tfla_tk
for info in pkgutil.walk_packages(tfla_tk.__path__, "tfla_tk."):
    if not info.name.endswith("__main__"):
        importlib.import_module(info.name)

def check(package):
    q, g = torch.randn(1, 2, 20, 16, requires_grad=True), torch.randn(1, 2, 20)
    package.mlstm_chunkwise(q, q, q, g, g).sum().backward()
    assert q.grad is not None
    for function in (package.mlstm_chunkwise, package.mlstm_siging_chunkwise):
        assert package.which(function, q, q, q, g, g).backend == "reference"
    token = [q[:, :, 0]] * 3 + [g[:, :, :1]] * 2 + [torch.zeros(1, 2, 16, 16), torch.zeros(1, 2, 16)]
    assert package.which("mlstm_siging_step", *token).backend == "reference"
    package.mlstm_siging_step(*token)
    try:
        package.mlstm_chunkwise(q, q, q, g, g, backend="tk")
    except package.UnsupportedError as error:
        assert "GPU" in error.reason
    else:
        raise AssertionError("tk has served a call on a CPU")
    options = None, None, None, None, False, True, 1e-6, True, False
    h, *_ = torch.ops.tfla_tk.mlstm_fwd(q, q, q, g, g, *options)
    assert torch.autograd.grad(h.sum(), q)[0].shape == q.shape
    options = None, True, True, 1e-6, torch.float32
    with torch.no_grad():
        h, *_ = torch.ops.tfla_tk.mlstm_step(*(x.to("meta") for x in token), *options)
    assert h.shape == (1, 2, 16)

names = [name for name in sys.modules if name.split(".")[0] == "tfla_tk" and not name.endswith("__main__")]
assert len(names) > 50
"""

EACH = """
for name in names:
    importlib.reload(sys.modules[name])
    check(tfla_tk)
"""

TWICE = """
for _ in range(2):
    for name in reversed(names):
        importlib.reload(sys.modules[name])
check(tfla_tk)
"""

DROPPED = """
old = tfla_tk
for name in names:
    del sys.modules[name]
import tfla_tk
assert tfla_tk is not old
check(tfla_tk)
check(old)
"""

NEWEST = """
from tfla_tk.core import library
found = library.get()
found.define("reload_probe(Tensor x) -> Tensor")
found.impl("reload_probe", lambda x: x + 1, "CPU")
importlib.reload(library)
assert library.get() is found
found.impl("reload_probe", lambda x: x + 2, "CPU")
assert torch.ops.tfla_tk.reload_probe(torch.zeros(1)).item() == 2
try:
    found.define("reload_probe(Tensor x, Tensor y) -> Tensor")
except RuntimeError as error:
    assert "restart Python" in str(error)
else:
    raise AssertionError("another schema was taken")
"""


@pytest.mark.slow
def test_reload(in_forks: Callable[..., dict[str, str]]) -> None:
    in_forks(PRELUDE, {"each": EACH, "twice": TWICE, "dropped": DROPPED, "newest": NEWEST})
