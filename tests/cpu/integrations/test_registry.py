"""Kernel names: what is added, what they resolve to, and the way back."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import pytest
from torch import nn

from tfla_tk.integrations import xlstm
from tfla_tk.integrations.xlstm import kernels

# of other tests' models
pytestmark = pytest.mark.filterwarnings("ignore:.* mLSTM layers were built before")

Make = Callable[..., nn.Module]
XL = "chunkwise--triton_xl_chunk"


def is_ours(function: Any) -> bool:
    return isinstance(function, partial) and function.func.__module__ == kernels.__name__


def resolved(mlstm_kernels: Any) -> dict[str, Any]:
    """Every name of every registry and what it resolves to."""
    names = mlstm_kernels.get_available_mlstm_kernels()
    steps = mlstm_kernels.get_available_mlstm_step_kernels()
    return {name: mlstm_kernels.get_mlstm_kernel(name) for name in names} | {
        name: mlstm_kernels.get_mlstm_step_kernel(name) for name in steps
    }


def test_register_adds_names_and_changes_none(mlstm_kernels: Any) -> None:
    before = resolved(mlstm_kernels)
    xlstm.register()
    after = resolved(mlstm_kernels)
    xlstm.register()
    assert resolved(mlstm_kernels) == after
    assert {name: after[name] for name in before} == before
    added = after.keys() - before.keys()
    ours = {"chunkwise--tfla_tk", "chunkwise--tfla_tk_siging", "tfla_tk", "tfla_tk_siging"}
    assert ours <= added and all(is_ours(after[name]) for name in ours)
    assert added - ours == {f"{name}_original" for name in before if not name.startswith("parallel--")}


def test_unregister_leaves_nothing(mlstm_kernels: Any) -> None:
    module = sys.modules["mlstm_kernels.torch.backend_module"]
    before = resolved(mlstm_kernels), get_args(module.ChunkwiseKernelType), module.mLSTMBackend.__init__
    xlstm.register()
    assert "chunkwise--tfla_tk" in get_args(module.ChunkwiseKernelType)
    assert "tfla_tk" in get_args(module.StepKernelType)
    xlstm.replace()
    xlstm.unregister()
    xlstm.unregister()
    after = resolved(mlstm_kernels), get_args(module.ChunkwiseKernelType), module.mLSTMBackend.__init__
    assert after == before


def test_replace_and_restore(mlstm_kernels: Any) -> None:
    before = resolved(mlstm_kernels)
    switched = xlstm.replace(backend="reference")
    assert XL in switched and "chunkwise--native_autograd" in switched and "triton" in switched
    assert not [name for name in switched if name.startswith("parallel--")]
    after = resolved(mlstm_kernels)
    for name in switched:
        assert is_ours(after[name]) and after[name].keywords == {"backend": "reference"}
        assert after[f"{name}_original"] is xlstm.original(name) is before[name]
    assert after[f"{XL}_siging"].func is kernels.chunkwise_siging and after[XL].func is kernels.chunkwise
    assert xlstm.replace() == switched  # once more, with another backend
    assert resolved(mlstm_kernels)[XL].keywords == {"backend": "auto"}
    assert xlstm.original(XL) is before[XL]
    assert xlstm.restore() == switched
    assert xlstm.restore() == []
    assert before.items() <= resolved(mlstm_kernels).items()


RELOADED = ("registry", "modules", "kernels", "")


@pytest.mark.parametrize("hf", [False, True])
def test_reload(mlstm_kernels: Any, make_backend: Make, hf: bool) -> None:
    """Nothing is registered twice, models follow, the way back leads to what was there at first."""
    if hf:
        pytest.importorskip("transformers.models.xlstm.configuration_xlstm")
    config = getattr(sys.modules.get("transformers.models.xlstm.configuration_xlstm"), "xLSTMConfig", None)
    module = sys.modules["mlstm_kernels.torch.backend_module"]

    def state() -> Any:
        validators = {k: list(v) for k, v in config.__validators__.items()} if config else None
        types = get_args(module.ChunkwiseKernelType), get_args(module.StepKernelType)
        return resolved(mlstm_kernels), types, module.mLSTMBackend.__init__, validators

    before = state()
    xlstm.replace(backend="reference")
    old = make_backend()
    registered = state()
    for name in RELOADED:
        full = f"tfla_tk.integrations.xlstm.{name}".rstrip(".")
        importlib.reload(sys.modules[full])
        xlstm.register()
        assert state() == registered, full
    new = make_backend()
    for made in (old, new):
        assert is_ours(made.chunkwise_kernel_fn) and is_ours(made.step_kernel_fn)
    if config is not None:
        config(chunkwise_kernel="chunkwise--tfla_tk", step_kernel="tfla_tk")
    with pytest.warns(UserWarning, match="built before restore"):
        assert XL in xlstm.restore()
    assert before[0].items() <= resolved(mlstm_kernels).items()
    for made in (old, new):
        xlstm.restore(made)
        assert made.chunkwise_kernel_fn is before[0]["chunkwise--native_autograd"]
    xlstm.unregister()
    assert state() == before


def test_import_afresh(mlstm_kernels: Any, make_backend: Make) -> None:
    """sys.modules without this package, as some notebooks reload: the same."""
    module = sys.modules["mlstm_kernels.torch.backend_module"]
    before = resolved(mlstm_kernels), module.mLSTMBackend.__init__
    xlstm.replace(backend="reference")
    kept = {name: x for name, x in sys.modules.items() if name.startswith("tfla_tk.integrations")}
    for name in kept:
        del sys.modules[name]
    try:
        afresh = importlib.import_module("tfla_tk.integrations.xlstm")
        assert afresh is not xlstm
        afresh.register()
        made = make_backend()
        assert is_ours(made.chunkwise_kernel_fn)
        with pytest.warns(UserWarning, match="built before restore"):
            assert XL in afresh.restore()
        afresh.restore(made)
        assert made.chunkwise_kernel_fn is before[0]["chunkwise--native_autograd"]
        afresh.unregister()
        assert (resolved(mlstm_kernels), module.mLSTMBackend.__init__) == before
    finally:
        sys.modules.update(kept)


def test_replace_some(mlstm_kernels: Any) -> None:
    assert xlstm.replace(kernels=[XL]) == [XL]
    found = resolved(mlstm_kernels)
    assert is_ours(found[XL]) and not is_ours(found["triton"])


def test_kernels_of_others_are_replaced_by_name_only(mlstm_kernels: Any) -> None:
    registry = sys.modules["mlstm_kernels.torch.chunkwise"].registry
    registry["theirs"] = theirs = partial(print)
    try:
        assert "chunkwise--theirs" not in xlstm.replace()
        assert xlstm.replace(kernels=["chunkwise--theirs"]) == ["chunkwise--theirs"]
        xlstm.restore()
        assert registry["theirs"] is theirs
    finally:
        xlstm.unregister()
        del registry["theirs"]


def test_contexts_nest(mlstm_kernels: Any) -> None:
    before = resolved(mlstm_kernels)

    def backend() -> Any:
        function = mlstm_kernels.get_mlstm_kernel(XL)
        return function.keywords["backend"] if is_ours(function) else "original"

    with xlstm.replaced():
        with xlstm.replaced(backend="reference"):
            with xlstm.restored():
                assert backend() == "original"
            assert backend() == "reference"
        assert backend() == "auto"
        with pytest.raises(KeyError), xlstm.restored():
            raise KeyError
        assert backend() == "auto"
    assert before.items() <= resolved(mlstm_kernels).items()


def test_threads(mlstm_kernels: Any) -> None:
    """Names are always there and resolve to one side or the other while others switch."""
    xlstm.register()
    original, wrong = xlstm.original(XL), []

    def switch() -> None:
        for _ in range(50):
            xlstm.replace(kernels=[XL])
            function = mlstm_kernels.get_mlstm_kernel(XL)
            if function is not original and not is_ours(function):
                wrong.append(function)
            xlstm.restore()
            xlstm.register()

    threads = [threading.Thread(target=switch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and mlstm_kernels.get_mlstm_kernel(XL) is original


@pytest.mark.parametrize("call", [lambda: xlstm.original("xl"), lambda: xlstm.replace(kernels=["xl"])])
def test_unknown_names_list_the_known_ones(mlstm_kernels: Any, call: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=r"kernel: expected one of .*chunkwise--triton_xl_chunk.*, got 'xl'"):
        call()


def test_bad_arguments(mlstm_kernels: Any, make_backend: Make) -> None:
    before = resolved(mlstm_kernels)
    with pytest.raises(ValueError, match="backend: expected one of auto, tk, triton, reference"):
        xlstm.replace(backend="cuda")
    with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module, got str"):
        xlstm.replace("model")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="found none in Linear"):
        xlstm.restore(nn.Linear(1, 1))
    with pytest.raises(ValueError, match="kernels: expected None together with a model"):
        xlstm.replace(make_backend(), kernels=[XL])
    with pytest.raises(TypeError, match=f"kernels: expected a list of names, got '{XL}'"):
        xlstm.replace(kernels=XL)
    assert resolved(mlstm_kernels) == before


@pytest.mark.parametrize("call", [xlstm.register, xlstm.replace, xlstm.restore, lambda: xlstm.original(XL)])
def test_without_the_package(monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any]) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "mlstm_kernels"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mlstm_kernels", None)
    with pytest.raises(ImportError, match=r"pip install 'tfla_tk\[xlstm\]'"):
        call()


def test_models_built_before_are_told(mlstm_kernels: Any, make_backend: Make) -> None:
    old = make_backend()
    with pytest.warns(UserWarning, match=r"built before replace\(\).*replace\(model\) switches"):
        xlstm.replace()
    new = make_backend()
    assert not is_ours(old.chunkwise_kernel_fn) and is_ours(new.chunkwise_kernel_fn)
    assert xlstm.replace(old) == [""] and is_ours(old.chunkwise_kernel_fn)
    with pytest.warns(UserWarning, match=r"built before restore\(\).*restore\(model\) switches"):
        xlstm.restore()
    for module in (old, new):
        xlstm.restore(module)
        assert module.chunkwise_kernel_fn is xlstm.original("chunkwise--native_autograd")


def test_restore_of_a_model_under_replaced_names(mlstm_kernels: Any, make_backend: Make) -> None:
    with xlstm.replaced():
        module = make_backend()
        assert is_ours(module.chunkwise_kernel_fn)
        xlstm.restore(module)
        assert module.chunkwise_kernel_fn is xlstm.original("chunkwise--native_autograd")
        assert is_ours(mlstm_kernels.get_mlstm_kernel("chunkwise--native_autograd"))
