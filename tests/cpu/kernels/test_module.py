"""The Python module of one instance, compiled and imported as on a GPU machine; nothing is launched here."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from tfla_tk import build, env
from tfla_tk.build import builder
from tfla_tk.build.instances import mlstm_fwd


@pytest.fixture(scope="module")
def module(kernel_compiler: None, tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("THUNDERKITTENS_ROOT", str(build.find_thunderkittens(clone=False).root))
        patch.setenv(env.CACHE_DIR.name, str(tmp_path_factory.mktemp("cache")))
        patch.setattr(builder, "_loaded", {})
        return build.load(mlstm_fwd(64, 64))


def test_it_tells_how_many_ctas_fit(module: ModuleType) -> None:
    assert module.CTAS_PER_MULTIPROCESSOR == 2


def test_the_workspace_holds_a_state_and_two_doubles_per_slot(module: ModuleType) -> None:
    for slots, dim_qk, dim_v in ((1, 64, 64), (12, 48, 80), (3, 16, 16)):
        state = dim_qk * dim_v + dim_qk + 1
        assert module.mlstm_fwd_workspace_bytes(slots, dim_qk, dim_v) == slots * (4 * state + 16)
    # past 2^31
    assert module.mlstm_fwd_workspace_bytes(200_000, 64, 64) > 2**31


@pytest.mark.skipif(torch.cuda.is_available(), reason="the launch would be real")
def test_a_launch_without_a_driver_is_an_error(module: ModuleType) -> None:
    operand, gate, none = (16, 4096, 4096, 64), (16, 64, 64, 1, 0), (0, 0, 0)
    with pytest.raises(RuntimeError, match="no CUDA driver is installed"):
        module.mlstm_fwd(
            *([operand] * 4),
            *([gate] * 2),
            none,
            none,
            (0, 0),
            (0, False, 1, 1, 1),
            0,
            (1, 1, 64, 64, 64),
            0.125,
            1e-6,
            False,
            False,
            True,
            0,
            0,
        )
