"""Markers and fixtures that every test shares."""

from __future__ import annotations

import gc
import json
import math
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tfla_tk import env
from tfla_tk.build import BuildError, find_thunderkittens, find_toolchain

# inductor writes no vector code here: it would compile C++ to find out which the machine has
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

GPU_TESTS = Path(__file__).parent / "gpu"
LONG = ("slow", "compiles", "gpu")  # markers of what --quick leaves out


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-sass-summary", action="store_true", help="record what is compiled (make sass-summary)"
    )
    parser.addoption(
        "--every-kernel",
        action="store_true",
        help="compile all unchanged kernels, not some of them by turns",
    )
    parser.addoption(
        "--quick", action="store_true", help="one case of each test that is short and compiles nothing"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark all of tests/gpu, and skip what needs a Hopper GPU where there is none; --quick takes a few."""
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.gpu)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not has_hopper():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a Hopper (sm_90) GPU"))
    if config.getoption("--quick"):
        short = [item for item in items if not _is_long(item)]
        quick = {*{item.nodeid.partition("[")[0]: item for item in reversed(short)}.values()}
        config.hook.pytest_deselected(items=[item for item in items if item not in quick])
        items[:] = [item for item in items if item in quick]


def _is_long(item: pytest.Item) -> bool:
    """Whether --quick leaves it out; nvcc takes ten seconds and more."""
    return any(map(item.get_closest_marker, LONG)) or "kernel_compiler" in getattr(item, "fixturenames", ())


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """In one line what was skipped, by reasons."""
    skipped = terminalreporter.stats.get("skipped", [])
    counts = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    if counts:
        of_reasons = "; ".join(f"{count:,}: {reason}" for reason, count in counts.most_common())
        terminalreporter.write_line(f"skipped: {of_reasons}")


def pytest_collection_finish() -> None:
    """Keep the garbage collector off what is there for the whole run: benchmarks call it again and again."""
    gc.collect()
    gc.freeze()


def has_hopper() -> bool:
    """Whether torch sees a GPU of compute capability 9.0."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.fixture
def isolated_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """None of tfla_tk's environment variables, and an empty cache directory (returned; not yet made)."""
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    cache = tmp_path / "the cache"
    monkeypatch.setenv(env.CACHE_DIR.name, str(cache))
    return cache


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """No HOME, and a user without a passwd entry, as in containers that run as any user id."""

    def unknown(user: object) -> None:
        raise KeyError(user)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(pwd, "getpwnam", unknown)


@pytest.fixture
def of_nobody() -> Iterator[Path]:
    """A directory that anybody can enter, while this process is not root: root could read and write all."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield folder
    finally:
        if root:
            os.seteuid(0)
        subprocess.run(["chmod", "-R", "u+rwx", str(folder)], check=True)
        shutil.rmtree(folder)


# A process of its own for each script, all of them forked from one that has run what they begin with
FORKS = """
import json, os, sys, tempfile, traceback

first, scripts = json.load(sys.stdin)
namespace = {"__name__": "__main__"}
exec(first, namespace)
found = {}
for name, script in scripts.items():
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1), os.dup2(err.fileno(), 2)
            status = 0
            try:
                exec(script, namespace)
            except BaseException:
                traceback.print_exc()
                status = 1
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(status)
        status = os.waitpid(child, 0)[1]
        out.seek(0), err.seek(0)
        found[name] = status, out.read(), err.read()
json.dump(found, sys.stdout)
"""


def _in_forks(first: str, scripts: dict[str, str]) -> dict[str, str]:
    command = [sys.executable, "-W", "ignore", "-c", FORKS]
    given = json.dumps([first, scripts])
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    faults = [f"{name}: {err[-3000:]}" for name, (status, _, err) in found.items() if status]
    assert not faults, "\n".join(faults)
    return {name: out for name, (_, out, _) in found.items()}


@pytest.fixture
def in_forks() -> Callable[[str, dict[str, str]], dict[str, str]]:
    """What each script writes, run in a process of its own behind `first`, which is run once.

    Importing torch takes longer than most of what is asked of a fresh process.
    """
    return _in_forks


@pytest.fixture(scope="session")
def kernel_compiler() -> None:
    """Skip where kernels cannot be compiled: no nvcc or no ThunderKittens (none is fetched)."""
    try:
        find_toolchain()
        find_thunderkittens(clone=False)
    except BuildError as error:
        pytest.skip(error.reason.splitlines()[0])


# What the small kernels of the mLSTM backward compute, formula by formula as mlstm_bwd_*.cuh have it, in fp64

CHUNK = 64
ANCHOR_CHUNKS = 8  # kAnchorChunks
FORGOTTEN, FORGOTTEN_STABILISED = 12.0, 24.0  # kForgotten, in log2
LEAST_LOG_GATE = -2e5  # kLeastLogGate


class RowSums(NamedTuple):
    """q_t.dq_t or k_t.dk_t.

    Attributes:
        whole: of every token, [B, NH, S].
        inter: of every chunk the part through the state that entered it: the sum of its summands and of their
            squares, [B, NH, slots, 2]; where that is inf (kNotSummed) the squares of some of them.
    """

    whole: Tensor
    inter: Tensor


def _row_factors(dh_h: Tensor, d: Tensor, m: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """log2 w_t and e_t, from dh_t.h_t; m is None with the sigmoid gate."""
    dh_h, d = dh_h.double(), d.double()
    log2_floor = torch.zeros_like(d) if m is None else -m.double() / math.log(2)
    floor = torch.exp2(log2_floor)
    log2_w = torch.where(floor.isinf(), log2_floor, torch.log2(torch.maximum(d.abs(), floor) + eps))
    return log2_w, torch.where(d.abs() > floor, -dh_h * d.sign(), 0.0)


def _gate_gradients(
    q_dq: Sequence[Tensor],
    k_dk: Sequence[Tensor],
    anchors: Tensor | None,
    i: Tensor,
    f: Tensor,
    chunk_m: Tensor | None,
    flows: Sequence[Tensor],
    bounds: list[tuple[int, int]],
    before: Tensor | None = None,
    every: int = ANCHOR_CHUNKS,
) -> tuple[Tensor, Tensor]:
    """di and df.

    Args:
        q_dq, k_dk: whole and inter of RowSums.
        anchors: [B, NH, slots, parts], to be summed over the parts: the flow before chunks that are multiples
            of `every`; None to do without.
        chunk_m: [B, NH, slots], the sum of the parts that the forward op returns; None with the sigmoid gate.
        flows: <dC, C> + <dn, n> [N, NH] before the first and after the last token.
        bounds: (start, end) of every packed sequence; [(0, S)] for a batch.
        before: like `anchors`, for the chunks before an anchor, where that is another.
    """
    i, f = i.double(), f.double()
    q, k = (RowSums(*(x.double() for x in sums)) for sums in (q_dq, k_dk))
    dlog_f = torch.zeros_like(f)
    for sequence, (start, end) in enumerate(bounds):
        rows = slice(None) if len(bounds) == 1 else slice(sequence, sequence + 1)
        own = slice(start, end)
        slot = start // CHUNK + (sequence if len(bounds) > 1 else 0)
        behind = [] if anchors is None else range(every, -(-(end - start) // CHUNK), every)
        dlog_f[:, :, own] = _dlog_f(
            *(RowSums(sums.whole[:, :, own], sums.inter[:, :, slot:]) for sums in (q, k)),
            (logsigmoid(i) if chunk_m is None else i)[:, :, own].clamp(min=LEAST_LOG_GATE),
            logsigmoid(f)[:, :, own].clamp(min=LEAST_LOG_GATE),
            None if chunk_m is None else chunk_m[:, :, slot:].double(),
            *(
                {c: given[:, :, (slot + c) // every].double().sum(-1) for c in behind}
                for given in (anchors, anchors if before is None else before)
            ),
            *(x[rows].double() for x in flows),
        )
    di = k.whole if chunk_m is not None else k.whole * torch.sigmoid(-i)
    return di, dlog_f * torch.sigmoid(-f)


def _dlog_f(
    q_dq: RowSums,
    k_dk: RowSums,
    log_i: Tensor,
    log_f: Tensor,
    chunk_m: Tensor | None,
    after: dict[int, Tensor],
    before: dict[int, Tensor],
    flow_start: Tensor,
    flow_end: Tensor,
) -> Tensor:
    """The gradient of the log forget gates of one sequence.

    Args:
        after, before: the flow before some of its chunks, from which those after it and before it follow.
    """
    pieces = [slice(t, t + CHUNK) for t in range(0, log_f.shape[-1], CHUNK)]
    if not pieces:
        return torch.zeros_like(log_f)
    received, sent = ([sums.inter[:, :, chunk] for chunk in range(len(pieces))] for sums in (q_dq, k_dk))
    forgets = []
    for number, x in enumerate(pieces):
        weight = (log_i[:, :, x] - log_f[:, :, x].cumsum(-1)).amax(-1) / math.log(2)
        summed = (received[number][..., 0] != math.inf) & (sent[number][..., 0] != math.inf)
        for sums, own in ((q_dq, received), (k_dk, sent)):  # else the sums of all rows serve as well
            value, squares = own[number].unbind(-1)
            value = torch.where(summed, value, sums.whole[:, :, x].sum(-1))
            own[number] = torch.stack([value, squares], dim=-1)
        if chunk_m is None:
            forgets.append(summed & (weight > FORGOTTEN))
        else:
            forgets.append(summed & (weight - chunk_m[:, :, number] > FORGOTTEN_STABILISED))

    inside = range(1, len(pieces))
    known_left = [flow_start, *(after.get(c) for c in inside)]
    known_right = [flow_end, *(before.get(c) for c in reversed(inside))]
    from_left = _followed(received, sent, forgets, known_left)
    from_right = _followed(sent[::-1], received[::-1], forgets[::-1], known_right)[::-1]

    found = []
    for x, left, right, sends in zip(pieces, from_left, from_right, sent, strict=True):
        variance = left[1] + right[1]
        of_left = torch.where(variance > 0, right[1] / variance, 0.0)
        flow = right[0] + of_left * (left[0] - right[0]) + sends[..., 0]
        of_tokens = (q_dq.whole - k_dk.whole)[:, :, x]
        found.append(flow[..., None] + of_tokens.flip(-1).cumsum(-1).flip(-1))
    return torch.cat(found, dim=-1)


def _followed(
    ends_in: list[Tensor], starts_in: list[Tensor], forgets: list[Tensor], known: list[Tensor | None]
) -> list[tuple[Tensor, Tensor]]:
    """The flow through every chunk and the variance of its noise, as followed from chunk to chunk.

    Args:
        ends_in, starts_in: what leaves and joins the flow in every chunk, and the squares of its summands.
        known: the flow that comes to every chunk; None where it is known from the chunk before alone.
    """
    found = []
    for ends, starts, forgotten, start in zip(ends_in, starts_in, forgets, known, strict=True):
        if start is not None:
            value, variance = start, torch.zeros_like(start)
        value = torch.where(forgotten, 0.0, value - ends[..., 0])
        variance = torch.where(forgotten, 0.0, variance + ends[..., 1])
        found.append((value, variance))
        value, variance = value + starts[..., 0], variance + starts[..., 1]
    return found


@pytest.fixture
def row_factors() -> Callable[..., tuple[Tensor, Tensor]]:
    """The formulas of mlstm_bwd_rows and mlstm_bwd_factors, from dh_t.h_t."""
    return _row_factors


@pytest.fixture
def gate_gradients() -> Callable[..., tuple[Tensor, Tensor]]:
    """The formulas of mlstm_bwd_gates."""
    return _gate_gradients
