"""What the compiler made of the kernels for a scalar decay: a clean ptxas log, and mLSTM's schedule.

They are mLSTM's kernels without normaliser, compiled with another gate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tfla_tk import build
from tfla_tk.build.instances import (
    MLSTM_TILES,
    WALK_TILES,
    for_scalar_decay,
    mlstm_bwd,
    mlstm_fwd,
    mlstm_pass,
)

WALKS = [*(mlstm_fwd(*dims) for dims in MLSTM_TILES), *(mlstm_pass("dv", *tile) for tile in WALK_TILES)]
SCHEDULED = ("HGMMA", "WARPGROUP.", "BAR.", "UTMALDG", "UTMASTG", "UTMAREDG")
# instructions that a walk of the backward may have more: a token's own key may be left out of its sums
OF_STRICT_SUMS = 24

Compile = Callable[[build.Instance], Any]


def schedule_of(kernel: Any) -> list[tuple[str, str]]:
    """Tensor-core instructions, their waits, barriers between roles and TMA, in the order of the program."""
    return [
        # what a wait leaves in flight; registers and descriptors are the compiler's
        (opcode, operands if opcode.startswith("WARPGROUP.DEPBAR") else "")
        for opcode, operands in kernel.instructions
        if opcode.startswith(SCHEDULED)
    ]


def role_of(kernel: Any) -> tuple[Any, ...]:
    return kernel.name, kernel.half, kernel.gradient


@pytest.mark.parametrize("instance", [*WALKS, mlstm_bwd()], ids=lambda instance: instance.name)
def test_ptxas_reports_no_fault(instance: build.Instance, compile_once: Compile) -> None:
    compiled = compile_once(for_scalar_decay(instance))
    build.check_ptxas_log(compiled.ptxas_log, compiled.instance.name)
    assert not any(kernel.normalize for kernel in compiled.every_kernel)


@pytest.mark.parametrize("instance", WALKS, ids=lambda instance: instance.name)
def test_the_schedule_is_that_of_mlstm(instance: build.Instance, compile_once: Compile) -> None:
    of_mlstm = {
        role_of(kernel): kernel
        for kernel in compile_once(instance).every_kernel
        if not kernel.normalize and kernel.gate in ("", "SigmoidInput")
    }
    found = {role_of(kernel): kernel for kernel in compile_once(for_scalar_decay(instance)).every_kernel}
    assert found.keys() == of_mlstm.keys()
    for role, kernel in found.items():
        assert schedule_of(kernel) == schedule_of(of_mlstm[role]), role
        assert len(kernel.instructions) <= len(of_mlstm[role].instructions) + OF_STRICT_SUMS, role
