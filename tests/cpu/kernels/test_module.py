"""The Python module of one instance, compiled and imported as on a GPU machine; nothing is launched here."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from tfla_tk.build.instances import Instance, for_scalar_decay, mlstm_bwd, mlstm_fwd, mlstm_pass
from tfla_tk.core.layout import ADDRESS_BITS

Load = Callable[[Instance], ModuleType]
AT = 1 << ADDRESS_BITS  # where the only tensor begins


def run(module: ModuleType, launch: Any) -> None:
    """A prepared launch, with a tensor that begins at 16."""
    module.Launches([launch.handle]).run([16], 0)


@pytest.fixture
def module(load_once: Load) -> ModuleType:
    return load_once(mlstm_fwd(64, 64))


def test_it_tells_how_many_ctas_fit(module: ModuleType) -> None:
    assert module.CTAS_PER_MULTIPROCESSOR == 2


def test_the_workspace_holds_a_state_and_two_doubles_per_slot(module: ModuleType) -> None:
    for slots, dim_qk, dim_v in ((1, 64, 64), (12, 48, 80), (3, 16, 16)):
        state = dim_qk * dim_v + dim_qk + 1
        c, n = module.workspace_offsets(slots, dim_qk, dim_v)
        assert (c, n) == (16 * slots, 16 * slots + 4 * slots * dim_qk * dim_v)
        assert module.mlstm_fwd_workspace_bytes(slots, dim_qk, dim_v) == slots * (4 * state + 16)
    # past 2^31
    assert module.mlstm_fwd_workspace_bytes(200_000, 64, 64) > 2**31


@pytest.mark.skipif(torch.cuda.is_available(), reason="the launch would be real")
@pytest.mark.parametrize("segments", [1, 2])
def test_a_launch_without_a_driver_is_an_error(segments: int, module: ModuleType) -> None:
    """The first of one, or of three."""
    strides, gate, none = (8192, 8192, 64), (128, 128, 1, 0), (0, 0, 0)
    forward = module.Forward(
        *([strides] * 4),
        *([gate] * 2),
        (False, 1, segments, 2 // segments),
        (1, 1, 128, 64, 64),
        1,
        0.125,
        1e-6,
        False,
        False,
        True,
        0,
    )
    with pytest.raises(RuntimeError, match="CUDA driver version is insufficient"):
        forward.launch(*[16] * 6, none, none, none, 0, 0 if segments == 1 else 16, 0)


def test_modules_of_two_instances_in_one_process(module: ModuleType, load_once: Load) -> None:
    """Each has a Forward of its own."""
    other = load_once(for_scalar_decay(mlstm_fwd(64, 64)))
    assert other.Forward is not module.Forward


def test_the_module_around_the_backward_walks(load_once: Load) -> None:
    """A workspace of 16 doubles per sequence and head; six numbers per token of a chunk, and its decay."""
    module = load_once(mlstm_bwd())
    assert module.chunk_gates_bytes() == 4 * (6 * 64 + 12)
    for heads, sequences in ((3, 2), (4, 7)):
        assert module.mlstm_bwd_gates_workspace_bytes(heads, sequences) == 8 * 16 * heads * sequences
    if torch.cuda.is_available():
        return  # the launch would be real
    operand, gate, cut = (AT, 4096, 4096, 64), (AT, 64, 64, 1, 0), (0, False, 1, 2, 1)
    for name, arguments in {
        "rows": (operand, operand, (AT, 0), (AT, AT, 64), (1, 1, 64, 64, 256), 1e-6, False, 0),
        "factors": ((AT, 64, 1, 1), (AT, 0), (0, AT, 64), 64, 1e-6, 0),
        "scan": (gate, gate, (AT, AT), AT, AT, 0, (0, 0, 1), (1, 1, 64), 1e-6, 0.125, False, 0),
        "combine": ((AT, AT, AT), 1, (0, 0), cut, (1, 128, 64, 64), False, 0),
    }.items():
        launch = getattr(module, f"mlstm_bwd_{name}")(*arguments)
        with pytest.raises(RuntimeError, match=f"mlstm_bwd_{name}: CUDA driver version is insufficient"):
            run(module, launch)
    with pytest.raises(IndexError):  # of a tensor that there is not
        module.Launches([launch.handle]).run([], 0)
    module.Launches([]).run([], 0)


def test_the_module_of_a_walk(load_once: Load) -> None:
    """At an anchor a state of 16-bit numbers and n per slice of 128 values, a flow per warp of the state.

    Both per share of 64 columns of the keys.
    """
    module = load_once(mlstm_pass("dq", 64, 128))
    for batch, heads, slots, dims, parts in (
        (1, 2, 7, (48, 80), 1),
        (3, 4, 8, (64, 128), 1),
        (2, 1, 100, (64, 256), 2),
        (1, 3, 9, (80, 256), 4),
    ):
        expected = batch * heads * (slots // 8 + 1) * parts * 128 * (64 * 2 + 4)
        assert module.anchor_bytes(batch, heads, slots, *dims) == expected
        assert module.flow_parts(*dims) == 8 * parts
    # past 2^31
    assert module.anchor_bytes(8, 16, 10_000, 64, 256) > 2**31
    if torch.cuda.is_available():
        return  # the launch would be real
    operand, none = (AT, 4096, 4096, 64), (0, 0)
    gates_and_rows = (*([(AT, 64, 64, 1, 0)] * 2), (AT, AT, 64, AT))
    cut, sizes = (0, False, 1, 1, 1), (1, 1, 64, 64, 64)
    of_walks = (*([operand] * 5), (AT, AT, 64), none, none, (0, 0, 0), none, none, 0, cut)
    for gradient in range(3):
        with pytest.raises(RuntimeError, match="CUDA driver version is insufficient"):
            run(module, module.mlstm_pass(gradient, *of_walks, sizes, 1, False, 0))
        fault = "CUDA driver version is insufficient" if gradient < 2 else "has none for this gradient"
        with pytest.raises(RuntimeError, match=fault):
            segments = module.mlstm_pass_segments(
                *(gradient, operand, operand, *gates_and_rows, (AT, AT, AT), cut, sizes, 1),
                *(0.125, False, False, 0),
            )
            run(module, segments)
    with pytest.raises(RuntimeError, match="dv takes one share of the keys"):
        run(module, module.mlstm_pass(2, *of_walks, (1, 1, 64, 80, 64), 1, False, 0))
