"""Calls of fla's functions with a scalar decay on a CPU, where the reference stands in their place."""

from __future__ import annotations

import pytest
import torch

import tfla_tk
from tfla_tk import reference
from tfla_tk.integrations import fla as integration

from .fla_calls import MARKS, draw_call, draw_scalar_decay, own

pytestmark = MARKS


def test_calls_on_a_cpu(accelerated: list[str]) -> None:
    x = draw_scalar_decay()
    o, last = own("chunk_simple_gla")(**x, output_final_state=True)
    expected, expected_last = reference.simple_gla_recurrent(**x, output_final_state=True)
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(last, expected_last)
    path = integration.last_path()
    assert path == integration.Path("chunk_simple_gla", "reference", "the tensors are on a CPU")

    del x["g"]
    o, last = own("chunk_retention")(*(x[n] for n in "qkv"), initial_state=x["initial_state"])
    decay = reference.retention_log_decay(2)
    torch.testing.assert_close(o, reference.simple_gla_recurrent(**x, g_gamma=decay)[0])
    assert last is None and integration.last_path().function == "chunk_retention"
    o, _ = own("chunk_lightning_attn")(*(x[n] for n in "qkv"), 1, 4, initial_state=x["initial_state"])
    decay = reference.lightning_log_decay(2, 1, 4)
    torch.testing.assert_close(o, reference.simple_gla_recurrent(**x, g_gamma=decay)[0])


@pytest.mark.filterwarnings("error:chunk_simple_gla. q has")
def test_nothing_is_told_of_the_layout(accelerated: list[str]) -> None:
    x = draw_scalar_decay(seq=1)
    own("chunk_simple_gla")(x["q"], x["k"], x["v"], x["g"])


def test_the_last_path_is_of_a_call_that_has_returned(accelerated: list[str]) -> None:
    x = draw_scalar_decay()
    with pytest.raises(TypeError, match="g: expected dtype"):
        own("chunk_simple_gla")(**x | {"g": x["g"].long()})
    assert integration.last_path() is None
    own("chunk_simple_gla")(**x)
    path = integration.last_path()
    with pytest.raises(TypeError, match="k: expected a tensor"):
        own("chunk_retention")(x["q"], None, x["v"])
    assert integration.last_path() == path is not None


def test_restoring_a_function_forgets_its_call(accelerated: list[str]) -> None:
    own("chunk_simple_gla")(**draw_scalar_decay())
    integration.restore("chunk_retention")
    assert integration.last_path() is not None
    integration.restore()
    assert integration.last_path() is None


def test_packed_calls_with_states(accelerated: list[str]) -> None:
    """As fla's layers make them: V first, packed sequences, None for a flag that is off."""
    x = draw_scalar_decay(batch=1, rows=3)
    offsets = torch.tensor([0, 7, 7, 40])
    expected, expected_last = reference.simple_gla_recurrent(**x, cu_seqlens=offsets, output_final_state=True)
    x["initial_state"] = x["initial_state"].mT.contiguous()
    o, last = own("chunk_simple_gla")(
        **x, cu_seqlens=offsets, output_final_state=True, state_v_first=True, cu_seqlens_cpu=offsets
    )
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(last.mT, expected_last)
    o, last = own("chunk_simple_gla")(**x, cu_seqlens=offsets, output_final_state=None, state_v_first=1)
    torch.testing.assert_close(o, expected)
    assert last is None


def test_flags_by_position(accelerated: list[str]) -> None:
    """fla asks no more of a flag than that it is true or not."""
    x = draw_scalar_decay()
    positions = [x[name] for name in ("q", "k", "v", "g")] + [None] * 3
    for off in (None, 0):
        assert own("chunk_simple_gla")(*positions, off, off)[1] is None
    expected = reference.simple_gla_recurrent(**(x | {"initial_state": None}), output_final_state=True)
    torch.testing.assert_close(own("chunk_simple_gla")(*positions, 1, 1)[1].mT, expected[1])
    torch.testing.assert_close(own("chunk_simple_gla")(*positions, 1, None)[1], expected[1])
    q, k, v = positions[:3]
    assert own("chunk_retention")(q, k, v, None, None, 1)[1].shape == expected[1].shape
    assert own("chunk_retention")(q, k, v, None, None, None)[1] is None
    assert own("chunk_lightning_attn")(q, k, v, 1, 4, None, None, 1)[1].shape == expected[1].shape


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chunk_simple_gla", "chunk_gated_delta_rule", "chunk_kda"])
def test_compiled_calls_have_no_graph_break(name: str, accelerated: list[str]) -> None:
    """fla's own function is kept out of torch.compile; what is in its place is not."""
    function, x = own(name), draw_call(name)
    ignored = {"something": 1} if name == "chunk_simple_gla" else {}  # by fla
    q = x.pop("q").requires_grad_()
    compiled = torch.compile(lambda q: function(q, **x, **ignored), backend="aot_eager", fullgraph=True)
    o, _ = compiled(q)
    o.sum().backward()
    expected, _ = getattr(tfla_tk, name)(q, **x, backend="reference:recurrent")
    torch.testing.assert_close(o, expected, rtol=1e-4, atol=1e-5)
    assert q.grad is not None
    torch._dynamo.reset()
