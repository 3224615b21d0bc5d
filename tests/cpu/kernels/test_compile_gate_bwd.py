"""What the compiler made of the small kernels around the walks of the mLSTM backward: a clean ptxas log."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from tfla_tk import build
from tfla_tk.build.instances import mlstm_bwd

# four CTAs of 256 threads on a multiprocessor; of the combine three, each with more loads in flight
REGISTERS, COMBINE_REGISTERS = 64, 80


def test_ptxas_reports_no_fault(compile_once: Callable[[build.Instance], Any]) -> None:
    compiled = compile_once(mlstm_bwd())
    build.check_ptxas_log(compiled.ptxas_log, compiled.instance.name)
    entries = build.parse_ptxas_log(compiled.ptxas_log)
    found = Counter(re.search(r"mlstm_\w+?_kernel", entry.function)[0] for entry in entries)
    # dtypes times sizes of a row; input gates
    assert found == {
        "mlstm_bwd_rows_kernel": 6,
        "mlstm_bwd_factors_kernel": 1,
        "mlstm_bwd_scan_kernel": 2,
        "mlstm_bwd_combine_kernel": 1,
        "mlstm_bwd_flows_kernel": 1,
        "mlstm_bwd_gates_kernel": 2,
    }
    for entry in entries:
        assert entry.registers <= (COMBINE_REGISTERS if "combine" in entry.function else REGISTERS)
