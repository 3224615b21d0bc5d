"""nvcc is looked up by TFLA_TK_NVCC, CUDA_HOME, the pip-installed toolkit, PATH; only with its headers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tfla_tk.build import BuildError, find_toolchain, toolchain

Make = Callable[..., Path]
OnPath = Callable[..., None]


@pytest.fixture(autouse=True)
def only_fakes(isolated_environment: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(toolchain, "pip_toolkits", list)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))


def test_each_look_up_comes_before_the_next(
    make_toolkit: Make, monkeypatch: pytest.MonkeyPatch, on_path: OnPath, tmp_path: Path
) -> None:
    named, home, pip, path = (make_toolkit(tmp_path / name) for name in ("named", "home", "pip", "path"))
    on_path(path / "bin")
    assert find_toolchain().origin == "PATH"
    monkeypatch.setattr(toolchain, "pip_toolkits", lambda: [pip])
    assert find_toolchain().nvcc == pip / "bin/nvcc"
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert find_toolchain().nvcc == home / "bin/nvcc"
    monkeypatch.setenv("TFLA_TK_NVCC", str(named / "bin/nvcc"))
    found = find_toolchain()
    assert (found.nvcc, found.origin) == (named / "bin/nvcc", "TFLA_TK_NVCC")
    assert found.version == (13, 0)
    assert found.include == named / "include"
    assert "13.0.88" in found.identity


def test_a_toolkit_without_headers_is_passed_over(
    make_toolkit: Make, monkeypatch: pytest.MonkeyPatch, on_path: OnPath, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(make_toolkit(tmp_path / "bare", headers=False)))
    on_path(make_toolkit(tmp_path / "full") / "bin")
    assert find_toolchain().nvcc == tmp_path / "full/bin/nvcc"


def test_a_wrapper_on_path_leads_to_the_toolkit_behind_it(
    make_toolkit: Make, on_path: OnPath, tmp_path: Path
) -> None:
    real = make_toolkit(tmp_path / "real")
    wrapper = tmp_path / "wrappers/nvcc"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {real}/bin/nvcc "$@"\n')
    wrapper.chmod(0o755)
    on_path(wrapper.parent)
    found = find_toolchain()
    assert found.nvcc == wrapper
    assert found.include == real / "include"


def test_an_nvcc_asked_for_by_name_is_never_replaced(
    make_toolkit: Make, monkeypatch: pytest.MonkeyPatch, on_path: OnPath, tmp_path: Path
) -> None:
    on_path(make_toolkit(tmp_path / "path") / "bin")
    monkeypatch.setenv("TFLA_TK_NVCC", str(tmp_path / "nowhere/nvcc"))
    with pytest.raises(BuildError, match=r"TFLA_TK_NVCC: .*nowhere/nvcc does not exist") as caught:
        find_toolchain()
    assert "unset" in caught.value.remedy and "CUDA_HOME" not in caught.value.remedy


def test_an_old_toolkit_is_refused_with_both_versions(
    make_toolkit: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(make_toolkit(tmp_path / "old", version="12.4")))
    with pytest.raises(BuildError, match=r"is CUDA 12\.4, ThunderKittens needs 12\.8"):
        find_toolchain()


@pytest.mark.parametrize("body, said", [("exit 3", "fails"), ("echo hello", "does not name a CUDA release")])
def test_a_broken_nvcc_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str, said: str
) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(f"#!/bin/sh\n{body}\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("TFLA_TK_NVCC", str(nvcc))
    with pytest.raises(BuildError, match=said):
        find_toolchain()


def test_without_nvcc_the_error_names_the_look_ups_and_the_remedy() -> None:
    with pytest.raises(BuildError) as caught:
        find_toolchain()
    for place in ("TFLA_TK_NVCC", "CUDA_HOME", "pip-installed toolkit", "PATH"):
        assert place in caught.value.reason
    assert "CUDA_HOME" in caught.value.remedy


HOSTLESS = """#!/bin/sh
[ "$1" = --version ] && echo "Cuda compilation tools, release 13.0, V13.0.88" && exit 0
echo "gcc: No such file or directory" >&2
echo "nvcc fatal   : Failed to preprocess host compiler properties." >&2
exit 1
"""


@pytest.mark.parametrize("chosen", [True, False])
def test_a_missing_host_compiler_is_no_missing_cuda(
    chosen: bool, make_toolkit: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As nvcc says where there is no gcc."""
    home = make_toolkit(tmp_path / "home")
    usable = (home / "bin/nvcc").read_text()
    (home / "bin/nvcc").write_text(HOSTLESS)
    monkeypatch.setenv(*("TFLA_TK_NVCC", str(home / "bin/nvcc")) if chosen else ("CUDA_HOME", str(home)))
    with pytest.raises(BuildError, match="finds no host compiler: nvcc fatal") as caught:
        find_toolchain()
    assert "install g++" in caught.value.remedy and "NVCC_CCBIN" in caught.value.remedy
    assert "install CUDA" not in caught.value.remedy
    # found once there is one
    (home / "bin/nvcc").write_text(usable)
    assert find_toolchain().nvcc == home / "bin/nvcc"


def test_nvcc_links_with_gxx(
    make_toolkit: Make, monkeypatch: pytest.MonkeyPatch, on_path: OnPath, tmp_path: Path
) -> None:
    """gcc may be there without it; a compiler of another name serves for both."""
    home = make_toolkit(tmp_path / "home")
    text = (home / "bin/nvcc").read_text()
    monkeypatch.setenv("TFLA_TK_NVCC", str(home / "bin/nvcc"))
    for compiler, serves in (("gcc", False), ("clang", True)):
        (home / "bin/nvcc").write_text(
            text.replace("echo '#$ TOP", f"echo '#$ {compiler} -E' >&2; echo '#$ TOP")
        )
        if serves:
            assert find_toolchain().nvcc == home / "bin/nvcc"
            continue
        with pytest.raises(BuildError, match=r"links with g\+\+, which is not on PATH") as caught:
            find_toolchain()
        assert "install g++" in caught.value.remedy


def test_a_toolkit_that_cannot_be_read_is_passed_over(
    make_toolkit: Make, monkeypatch: pytest.MonkeyPatch, on_path: OnPath, of_nobody: Path
) -> None:
    closed = make_toolkit(of_nobody / "closed")
    closed.chmod(0)
    monkeypatch.setenv("CUDA_HOME", str(closed))
    on_path(make_toolkit(of_nobody / "open") / "bin")
    assert find_toolchain().nvcc == of_nobody / "open/bin/nvcc"
    monkeypatch.setenv("TFLA_TK_NVCC", str(closed / "bin/nvcc"))
    with pytest.raises(
        BuildError, match=r"TFLA_TK_NVCC: the toolkit of .* cannot be read: .*Permission denied"
    ):
        find_toolchain()


def test_a_stand_in_for_nvidia_holds_no_toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "nvidia", ModuleType("nvidia"))
    assert toolchain.pip_toolkits() == []


def test_pip_toolkits_are_found_newest_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    for name in ("cu98", "cu99"):
        (tmp_path / "nvidia" / name).mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert toolchain.pip_toolkits()[:2] == [tmp_path / "nvidia/cu99", tmp_path / "nvidia/cu98"]
