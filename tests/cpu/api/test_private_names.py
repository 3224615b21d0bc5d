"""The package works without any one of the names that torch keeps to itself."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import tfla_tk

PRIVATE_NAMES = (
    "torch._C._any_requires_grad",
    "torch._C._dispatch_keys",
    "torch._C._get_tracing_state",
    "torch._C._is_any_autocast_enabled",
    "torch._C._len_torch_dispatch_stack",
    "torch._C._len_torch_function_stack",
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "torch._C._dynamo.eval_frame.get_eval_frame_callback",
    "torch._C._dynamo.guards.TensorGuards",
    "torch._C._functorch.peek_interpreter_stack",
    "torch.autograd._profiler_enabled",
    "torch._C._AutoDispatchBelowAutograd",
    "torch._C._cuda_getCurrentRawStream",
    "torch._C._AutoDispatchBelowADInplaceOrView",
    "torch._C._functorch.get_unwrapped",
    "torch._C._functorch.is_functorch_wrapped_tensor",
)
# what torch itself takes by these names
TORCH = """
import functools, torch
import torch._dynamo, torch.autograd.function, torch._library.autograd, torch._functorch.eager_transforms
"""
WITHOUT_A_NAME = """
owner, _, name = HIDDEN.rpartition(".")
hidden = functools.reduce(getattr, owner.split(".")[1:], torch)
had = hasattr(hidden, name)
if had:
    delattr(hidden, name)
import tfla_tk
from tfla_tk import Support, ops
from tfla_tk.core import eager
from tfla_tk.backends.tk import linear, mlstm as tk

tk.supports_mlstm = linear.supports_delta_rule = lambda call, variant=None: Support(True)
tk.load = linear.load = lambda kernel, call, variant=None: Support(True)
torch.manual_seed(0)
x = [torch.randn(1, 2, 80, 16) for _ in range(3)] + [torch.randn(1, 2, 80) for _ in range(2)]
for t in x:
    t.requires_grad_()
found = []
for backend in ("tk", "reference"):
    if backend == "tk" and eager.KNOWS_EAGER_CALLS:
        # not the kernels, which a CPU has not: the op that stands for them
        eager.KNOWS_EAGER_CALLS = False
    h = tfla_tk.mlstm_chunkwise(*x, backend=backend)
    found.append((h, *torch.autograd.grad(h.square().sum(), x)))
    o, _ = tfla_tk.chunk_delta_rule(*(0.1 * t for t in x[:3]), x[2][..., 0], backend=backend)
    found[-1] += torch.autograd.grad(o.square().sum(), x[:3])
with torch.no_grad():
    found[0] += (tfla_tk.mlstm_chunkwise(*x, backend="tk"),)
    found[1] += (tfla_tk.mlstm_chunkwise(*x, backend="reference"),)
for a, b in zip(*found):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
print("agree", had)
"""


@pytest.mark.slow
def test_a_private_name_of_torch_may_go(in_forks: Callable[..., dict[str, str]]) -> None:
    """Any one of them: the package imports and calls go through the ops, with the same results."""
    found = in_forks(TORCH, {name: f"HIDDEN = {name!r}" + WITHOUT_A_NAME for name in PRIVATE_NAMES})
    assert {name: out.split()[0] for name, out in found.items()} == dict.fromkeys(PRIVATE_NAMES, "agree")


def test_every_private_name_is_known() -> None:
    """Those that the package reads are those that the test above hides."""
    package = Path(tfla_tk.__file__).parent
    text = "\n".join(path.read_text(encoding="utf-8") for path in package.rglob("*.py"))
    names = re.findall(r"torch\._C\.(_\w+)", text)
    private = r"from torch(?:\._C[\w.]*|\.autograd) import (?!forward_ad)(?:\(([^)]*)\)|(.*))"
    names += [name for found in re.findall(private, text) for name in re.findall(r"\w+", "".join(found))]
    names += re.findall(r'getattr\(\s*torch\._C, "(\w+)"', text)
    known = {name.rpartition(".")[2] for name in PRIVATE_NAMES}
    # a substitute, and three modules
    others = {"_ExcludeDispatchKeyGuard", "_autograd", "_dynamo", "_functorch"}
    assert set(names) - others == known
