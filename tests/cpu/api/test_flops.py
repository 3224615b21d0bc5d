"""FLOPs as torch's counter counts them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import tfla_tk
from tfla_tk import Support
from tfla_tk.bench.shapes import Shape, cost

from .conftest import make_inputs

SHAPE = Shape(2, 40, 3, 16, 32)
FORWARD, BOTH = (cost("mlstm_exp", SHAPE, which).flops for which in ("fwd", "fwdbwd"))


def counted(run: Callable[[], Any]) -> dict[str, int]:
    """FLOPs of a call by op."""
    with FlopCounterMode(display=False) as counter:
        run()
    return {
        str(op).removeprefix("tfla_tk."): n for op, n in counter.get_flop_counts().get("Global", {}).items()
    }


@pytest.mark.parametrize(
    ("function", "compiler"),
    [("mlstm_chunkwise", None), ("mlstm_siging_chunkwise", None), ("mlstm_siging_chunkwise", "aot_eager")],
)
def test_training(function: str, compiler: str | None, fake_tk: Any) -> None:
    """What the benchmarks count, after calls that were not counted as well."""
    fake_tk.verdict = Support(True)
    torch._dynamo.reset()
    x = {name: t.requires_grad_() for name, t in make_inputs().items()}

    def forward(**x: Tensor) -> Tensor:
        h: Tensor = getattr(tfla_tk, function)(**x, backend="tk")
        return h

    run = forward if compiler is None else torch.compile(forward, backend=compiler)
    for _ in range(2):
        with torch.no_grad():
            assert counted(lambda: run(**x)) == {"mlstm_fwd": FORWARD}
        both = {"mlstm_fwd": FORWARD, "mlstm_bwd": BOTH - FORWARD}
        assert counted(lambda: run(**x).sum().backward()) == both
        run(**x).sum().backward()
    h = run(**x)
    assert counted(lambda: h.sum().backward()) == {"mlstm_bwd": BOTH - FORWARD}


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("tokens", [1, 5])
def test_decoding(tokens: int, inplace: bool, fake_tk: Any) -> None:
    """One token costs what the benchmarks count, five cost five times as much."""
    fake_tk.verdict = Support(True)
    dims = ((), (1,)) if tokens == 1 else ((tokens,), (tokens,))
    shapes = [(*dims[0], 16), (*dims[0], 16), (*dims[0], 32), dims[1], dims[1], (16, 32), (16,), (1,)]
    tensors = [torch.randn(2, 3, *shape) for shape in shapes]
    name = "mlstm_step" if tokens == 1 else "mlstm_sequence"
    once = cost("mlstm_step", Shape(2, 1, 3, 16, 32), "fwd").flops
    found = counted(lambda: getattr(tfla_tk, name)(*tensors, inplace=inplace, backend="tk"))
    assert found == {name + "_" * inplace: tokens * once}


def test_every_op_has_a_formula() -> None:
    registered_ops = (name.partition("::") for name in torch._C._dispatch_get_all_op_names())
    names = {name for namespace, _, name in registered_ops if namespace == "tfla_tk"}
    assert len(names) >= 6
    assert all(getattr(torch.ops.tfla_tk, name) in flop_registry for name in names)


@pytest.mark.slow
def test_whichever_is_imported_first(in_forks: Callable[..., dict[str, str]]) -> None:
    count = """
with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
    x = [torch.ones(1, 1, 2, 16)] * 3 + [torch.ones(1, 1, 2)] * 2
    torch.ops.tfla_tk.mlstm_fwd(*x, None, None, None, None, False, True, 1e-6, False, False)
print(counter.get_total_flops())
"""
    orders = ("tfla_tk, torch.utils.flop_counter", "torch.utils.flop_counter, tfla_tk")
    found = in_forks("import torch._dynamo", {order: f"import {order}" + count for order in orders})
    expected = cost("mlstm_exp", Shape(1, 2, 1, 16, 16), "fwd").flops
    assert {order: int(out) for order, out in found.items()} == dict.fromkeys(orders, expected)
