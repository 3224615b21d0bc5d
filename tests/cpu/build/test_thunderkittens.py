"""ThunderKittens is looked up by THUNDERKITTENS_ROOT, the cache, a clone of the pinned commit."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tfla_tk.build import BuildError, find_thunderkittens, sources, thunderkittens
from tfla_tk.build.thunderkittens import cached_root


def make_tree(root: Path, content: str = "") -> Path:
    (root / "include").mkdir(parents=True)
    (root / "include/kittens.cuh").write_text(content)
    return root


def git(tree: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    done = subprocess.run(
        ["git", "-C", str(tree), *identity, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A git repository whose first commit is the pinned one; a later commit has no kittens.cuh."""
    tree = make_tree(tmp_path / "origin", "pinned")
    git(tree, "init", "--quiet")
    git(tree, "add", ".")
    git(tree, "commit", "--quiet", "-m", "pinned")
    commit = git(tree, "rev-parse", "HEAD")
    git(tree, "rm", "--quiet", "include/kittens.cuh")
    git(tree, "commit", "--quiet", "-m", "later")
    monkeypatch.setattr(sources, "thunderkittens_commit", lambda: commit)
    monkeypatch.setenv("TFLA_TK_THUNDERKITTENS_URL", str(tree))
    return tree


def test_the_pinned_commit_is_a_full_hash() -> None:
    commit = sources.thunderkittens_commit()
    assert len(commit) == 40
    assert int(commit, 16)


def test_a_cache_of_another_user_is_refused(
    isolated_environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_tree(cached_root(sources.thunderkittens_commit()))
    root.parent.chmod(0o777)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(BuildError, match="belongs to user id"):
        find_thunderkittens()


def test_the_named_root_comes_before_the_cache(
    isolated_environment: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_tree(cached_root(sources.thunderkittens_commit()))
    found = find_thunderkittens()
    assert (found.origin, found.identity) == ("cache", sources.thunderkittens_commit())
    named = make_tree(tmp_path / "named")
    monkeypatch.setenv("THUNDERKITTENS_ROOT", str(named))
    found = find_thunderkittens()
    assert (found.origin, found.include) == ("THUNDERKITTENS_ROOT", named / "include")


def test_the_identity_of_a_named_root_is_its_headers(
    isolated_environment: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    identities = []
    for name, content in (("a", "x"), ("b", "x"), ("c", "y")):
        monkeypatch.setenv("THUNDERKITTENS_ROOT", str(make_tree(tmp_path / name, content)))
        identities.append(find_thunderkittens().identity)
    assert identities[0] == identities[1] != identities[2]


def test_a_named_root_without_thunderkittens_is_an_error(
    isolated_environment: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_tree(cached_root(sources.thunderkittens_commit()))
    monkeypatch.setenv("THUNDERKITTENS_ROOT", str(tmp_path))
    with pytest.raises(BuildError, match=r"THUNDERKITTENS_ROOT=.* holds no include/kittens.cuh"):
        find_thunderkittens()


def test_the_pinned_commit_is_cloned_into_the_cache(isolated_environment: Path, repository: Path) -> None:
    found = find_thunderkittens()
    assert found.origin == "git clone"
    assert found.root == isolated_environment / "thunderkittens" / sources.thunderkittens_commit()
    assert (found.include / "kittens.cuh").read_text() == "pinned"
    assert find_thunderkittens().origin == "cache"
    assert not list(found.root.parent.glob(".*"))


def test_a_half_made_tree_is_replaced(isolated_environment: Path, repository: Path) -> None:
    cached_root(sources.thunderkittens_commit()).mkdir(parents=True)
    assert (find_thunderkittens().include / "kittens.cuh").is_file()


@pytest.mark.parametrize("clone", [True, False])
def test_offline_the_error_names_all_three_look_ups(
    isolated_environment: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clone: bool
) -> None:
    monkeypatch.setenv("TFLA_TK_THUNDERKITTENS_URL", str(tmp_path / "nowhere"))
    with pytest.raises(BuildError) as caught:
        find_thunderkittens(clone=clone)
    for part in ("THUNDERKITTENS_ROOT", str(isolated_environment / "thunderkittens"), "git clone"):
        assert part in caught.value.reason
    assert sources.thunderkittens_commit() in caught.value.remedy


def test_a_url_that_cannot_be_cloned_is_named_with_its_variable(
    isolated_environment: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name, url = "TFLA_TK_THUNDERKITTENS_URL", str(tmp_path / "nowhere")
    monkeypatch.setenv(name, url)
    with pytest.raises(BuildError, match=re.escape(f"{name}={url}: fatal: ")) as caught:
        find_thunderkittens()
    assert caught.value.remedy.startswith(f"correct or unset {name}; ")
    monkeypatch.delenv(name)
    monkeypatch.setattr(thunderkittens, "URL", url)
    with pytest.raises(BuildError) as caught:
        find_thunderkittens()
    assert name not in str(caught.value)


def test_a_cache_that_cannot_be_read_is_an_error(monkeypatch: pytest.MonkeyPatch, of_nobody: Path) -> None:
    (of_nobody / "cache").mkdir(mode=0o000)
    monkeypatch.delenv("THUNDERKITTENS_ROOT", raising=False)
    monkeypatch.setenv("TFLA_TK_CACHE_DIR", str(of_nobody / "cache"))
    for clone in (True, False):
        with pytest.raises(BuildError, match=r"cannot be used: .*Permission denied") as caught:
            find_thunderkittens(clone)
        assert "set TFLA_TK_CACHE_DIR" in caught.value.remedy


def test_a_named_root_that_cannot_be_read_is_an_error(
    monkeypatch: pytest.MonkeyPatch, of_nobody: Path
) -> None:
    make_tree(of_nobody / "named")
    (of_nobody / "named").chmod(0)
    monkeypatch.setenv("THUNDERKITTENS_ROOT", str(of_nobody / "named"))
    with pytest.raises(BuildError, match=r"THUNDERKITTENS_ROOT=.* cannot be read: .*Permission denied"):
        find_thunderkittens()


def test_a_named_root_below_no_home_is_an_error(monkeypatch: pytest.MonkeyPatch, no_home: None) -> None:
    monkeypatch.setenv("THUNDERKITTENS_ROOT", "~/kittens")
    with pytest.raises(BuildError, match=r"THUNDERKITTENS_ROOT=~/kittens cannot be read"):
        find_thunderkittens()


def test_without_git_the_error_says_so(
    isolated_environment: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match="git is not installed"):
        find_thunderkittens()
