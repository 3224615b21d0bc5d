"""mLSTMBackend on these kernels: training, inference at any length, the step, both gates."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tfla_tk import mlstm_chunkwise, mlstm_siging_chunkwise
from tfla_tk.integrations import xlstm

from .conftest import OURS_SIGING, draw, relative_error

Make = Callable[..., nn.Module]
Switched = Callable[..., nn.Module]


def truth(inputs: dict[str, Tensor], **options: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The recurrence in fp64: h and the last state."""
    function = mlstm_siging_chunkwise if "normalize" in options else mlstm_chunkwise
    exact = {name: x.detach().double() for name, x in inputs.items()}
    return function(**exact, return_last_states=True, backend="reference:recurrent", **options)


@pytest.mark.parametrize("seq", [64, 37])
def test_training(make_backend: Make, switched: Switched, seq: int) -> None:
    """Also at lengths that are no multiple of the chunk, where the native kernels raise."""
    inputs = draw(seq)
    module = switched(make_backend)
    expected, state = truth(inputs)
    h, last = module(**inputs)
    assert relative_error(h, expected) < 1e-5
    assert relative_error(last, state) < 1e-5
    assert torch.equal(module(**inputs, return_last_states=False), h)


def test_training_with_padding(make_backend: Make, switched: Switched) -> None:
    inputs = draw(37)
    module = switched(make_backend, mode="train_with_padding", return_last_states=False)
    assert relative_error(module(**inputs), truth(inputs)[0]) < 1e-5


@pytest.mark.parametrize("seq", [1, 2, 15, 64, 100])
def test_inference(make_backend: Make, switched: Switched, seq: int) -> None:
    inputs = draw(seq)
    module = switched(make_backend, mode="inference")
    expected, state = truth(inputs)
    h, last = module(**inputs)
    assert h.shape == expected.shape and relative_error(h, expected) < 1e-5
    assert relative_error(last, state) < 1e-5
    with xlstm.replaced(module, backend="reference:parallel"):
        assert relative_error(module(**inputs)[0], expected) < 1e-5


def run_in_pieces(module: nn.Module, inputs: dict[str, Tensor], pieces: list[int]) -> tuple[Tensor, Any]:
    """Piece after piece in inference mode, the state handed on."""
    outputs, state, start = [], (None, None, None), 0
    for length in pieces:
        part = {name: x[:, :, start : start + length] for name, x in inputs.items()}
        initial = dict(zip(("c_initial", "n_initial", "m_initial"), state, strict=True))
        h, state = module(**part, **initial, mode="inference")
        outputs.append(h)
        start += length
    return torch.cat(outputs, dim=2), state


@pytest.mark.parametrize("pieces", [[40, 1, 1, 22], [1, 1, 62], [17, 30, 17]])
def test_pieces_equal_one_pass(make_backend: Make, switched: Switched, pieces: list[int]) -> None:
    inputs = draw(64)
    expected, state = truth(inputs)
    h, last = run_in_pieces(switched(make_backend), inputs, pieces)
    assert relative_error(h, expected) < 1e-5
    assert relative_error(last, state) < 1e-5


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("pieces", [[64], [37, 27], [30, 1, 1, 32]])
def test_sigmoid_gate(make_backend: Make, normalize: bool, pieces: list[int]) -> None:
    """mlstm_kernels raises in inference, drops normalize_siging there and has no step for this gate."""
    xlstm.register()
    inputs = draw(64)
    expected, (c, _) = truth(inputs, normalize=normalize)
    named = make_backend(**OURS_SIGING, normalize_siging=normalize)
    # the step kernel of the default configuration, which is for the other gate, is not taken
    other = make_backend(
        **OURS_SIGING | {"step_kernel": "native"}, normalize_siging=normalize, mode="inference"
    )
    for module in (named, other):
        h, (c_last, _, m) = run_in_pieces(module, inputs, pieces)
        assert relative_error(h, expected) < 1e-5 and relative_error(c_last, c) < 1e-5
        assert m.shape == (2, 2, 1) and not m.any()
        assert relative_error(module(**inputs, mode="train")[0], expected) < 1e-5


def test_pieces_of_a_few_tokens_compiled(make_backend: Make, sequence_calls: list[tuple[str, str]]) -> None:
    """One graph."""
    module = make_backend(mode="inference")
    xlstm.replace(module)
    inputs = draw(12)
    prompt, rest = ({name: x[:, :, part] for name, x in inputs.items()} for part in (slice(8), slice(8, 12)))
    _, state = module(**prompt)
    given = rest | dict(zip(("c_initial", "n_initial", "m_initial"), state, strict=True))
    expected, last = module(**given)
    h, found = torch.compile(module, backend="eager", fullgraph=True)(**given)
    torch.testing.assert_close((h, *found), (expected, *last))
    assert [name for name, _ in sequence_calls[1:]] == ["mlstm_sequence"] * len(sequence_calls[1:])


def test_configured_step_is_kept(make_backend: Make) -> None:
    """Names mean what they say: only the chunkwise kernel was asked for."""
    xlstm.register()
    module = make_backend(chunkwise_kernel="chunkwise--tfla_tk", step_kernel="native")
    assert module.step_kernel_fn is xlstm.original("native")
    assert module._inference_fn.keywords["one_token"].func is xlstm.original("native")


def test_step_alone(make_backend: Make) -> None:
    """The step kernel by name, under mlstm_kernels' own wrapper."""
    xlstm.register()
    inputs = draw(66)
    h, _ = run_in_pieces(make_backend(step_kernel="tfla_tk"), inputs, [64, 1, 1])
    assert relative_error(h, truth(inputs)[0]) < 1e-5


def test_state_dtype(make_backend: Make, switched: Switched) -> None:
    module = switched(make_backend, mode="inference", inference_state_dtype="bfloat16")
    inputs = draw(40)
    expected, _ = truth(inputs)
    h, state = run_in_pieces(module, inputs, [20, 1, 19])
    assert {x.dtype for x in state} == {torch.bfloat16} and h.dtype == torch.float32
    assert relative_error(h, expected) < 2e-2
    exact = draw(40, dtype=torch.float64)
    h, state = switched(make_backend)(**exact, mode="inference")
    assert {x.dtype for x in state} == {torch.float64} and relative_error(h, truth(exact)[0]) < 1e-12


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_stay_switched_and_can_be_restored(
    make_backend: Make, duplicate: Callable[[nn.Module], nn.Module]
) -> None:
    module = make_backend()
    xlstm.replace(module, backend="reference")
    twin = duplicate(module)
    assert twin._train_fn.keywords["backend"] == "reference"
    xlstm.restore(twin)
    assert twin.chunkwise_kernel_fn is xlstm.original("chunkwise--native_autograd")
    assert module._train_fn.keywords["backend"] == "reference"


def test_contexts_of_a_module_nest(make_backend: Make) -> None:
    module = make_backend()
    own = dict(vars(module))
    with xlstm.replaced(module):
        with xlstm.replaced(module, backend="reference"):
            assert module._train_fn.keywords["backend"] == "reference"
            with xlstm.restored(module):
                assert module.chunkwise_kernel_fn is own["chunkwise_kernel_fn"]
            assert module._train_fn.keywords["backend"] == "reference"
        assert module._train_fn.keywords["backend"] == "auto"
    assert vars(module) == own


def test_parallel_kernels_can_be_switched(make_backend: Make) -> None:
    fields = {"chunkwise_kernel": "parallel--native_stablef_autograd", "return_last_states": False}
    module, inputs = make_backend(**fields), draw(64)
    before = module(**inputs)
    with xlstm.replaced(module):
        assert relative_error(module(**inputs), before) < 1e-5


@pytest.mark.slow
def test_compiled_module(make_backend: Make) -> None:
    """One graph in training, and a new one after the switch."""
    module, inputs = make_backend(return_last_states=False), draw(64)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    expected = truth(inputs)[0]
    xlstm.replace(module)
    assert relative_error(compiled(**inputs), expected) < 1e-5
    with torch.no_grad():
        xlstm.restore(module)
        assert relative_error(compiled(**inputs), expected) < 1e-5
