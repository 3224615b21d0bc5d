"""Whatever is imported first, in processes of their own; and transformers where xlstm is not installed."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable

import pytest

MODEL = """
import torch
from torch.nn.functional import cross_entropy
def check(model, tokens=torch.arange(40)[None] % 7):
    from tfla_tk.integrations.xlstm import replaced, restored
    found = {}
    for name, context in (("ours", replaced(model)), ("native", restored(model))):
        with context:
            model.zero_grad()
            out = model(tokens, labels=tokens, use_cache=False)
            out.loss.backward()
            with torch.no_grad():
                text = model.eval().generate(tokens[:, :5], max_new_tokens=5, do_sample=False)
            model.train()
            grads = [p.grad.flatten().double() for p in model.parameters() if p.grad is not None]
            found[name] = out.loss.item(), torch.cat(grads), text.tolist()
    (loss, gradient, text), (native_loss, native_gradient, native_text) = found["ours"], found["native"]
    assert abs(loss - native_loss) < 1e-5 and text == native_text
    assert (gradient - native_gradient).norm() < 1e-4 * native_gradient.norm()
def build(**fields):
    from transformers import xLSTMConfig, xLSTMForCausalLM
    torch.manual_seed(0)
    sizes = dict(hidden_size=128, num_heads=1, num_hidden_layers=1, vocab_size=7, eos_token_id=None)
    return xLSTMForCausalLM(xLSTMConfig(**sizes, **fields))
OURS = dict(chunkwise_kernel="chunkwise--tfla_tk", step_kernel="tfla_tk")
def kernel(model):
    return model.backbone.blocks[0].mlstm_layer.mlstm_backend.chunkwise_kernel_fn
"""

FIRST = """
from tfla_tk.integrations import xlstm
light = [name for name in ("mlstm_kernels", "xlstm", "transformers", "triton") if name in sys.modules]
xlstm.register()
mine = [name for name in ("xlstm", "transformers") if name in sys.modules]
model = build(**OURS)
check(model)
print(json.dumps({"light": light, "mine": mine, "kernel": kernel(model).func.__module__}))
"""

LAST = """
import transformers.models.xlstm.modeling_xlstm
import xlstm.xlstm_large.model
old = build()
from tfla_tk.integrations import xlstm
xlstm.register()
model = build(**OURS)
check(model)
check(old)
xlstm.replace(old)
with xlstm.replaced():
    new = build()
print(json.dumps([kernel(x).func.__module__ for x in (model, old, new)]))
"""

# as transformers decides it: by asking for the installed package
NATIVE = """
import transformers.utils
transformers.utils.is_xlstm_available = lambda: False
sys.modules["mlstm_kernels"] = sys.modules["xlstm"] = None
from transformers.models.xlstm import modeling_xlstm
assert not modeling_xlstm.external_xlstm
from tfla_tk.integrations import xlstm
model = build()
before = kernel(model)
check(model)
tokens = torch.arange(40)[None] % 7
xlstm.replace(model)
model.zero_grad()
model(tokens, labels=tokens, use_cache=True).loss.backward()
cached = [p.grad.clone() for p in model.parameters()]
model.zero_grad()
model(tokens, labels=tokens, use_cache=False).loss.backward()
torch.testing.assert_close(cached, [p.grad for p in model.parameters()])
choice = xlstm.which(model).backend
switched = kernel(model).func.__module__
xlstm.restore(model)
try:
    xlstm.replace()
    message = ""
except ImportError as error:
    message = str(error)
print(json.dumps([choice, switched, kernel(model) is before, message]))
"""

KERNELS = "tfla_tk.integrations.xlstm.kernels"


@pytest.mark.slow
def test_import_order(in_forks: Callable[..., dict[str, str]]) -> None:
    """Register first and last; and without xlstm and mlstm_kernels, where replace(model) works, and
    replace() tells what to install.
    """
    for package in ("mlstm_kernels", "xlstm", "transformers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    scripts = {"first": FIRST, "last": LAST, "native": NATIVE}
    written = in_forks("import json, sys\n" + MODEL, scripts)
    found = {name: json.loads(out.splitlines()[-1]) for name, out in written.items()}
    assert found["first"] == {"light": [], "mine": [], "kernel": KERNELS}
    assert found["last"] == [KERNELS] * 3
    choice, switched, back, message = found["native"]
    assert (choice, switched, back) == ("reference", KERNELS, True)
    assert "pip install 'tfla_tk[xlstm]'" in message
