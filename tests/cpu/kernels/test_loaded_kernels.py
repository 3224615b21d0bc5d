"""Which kernels a cubin has, as launchers read it (kernels/common/loaded_kernels.cpp)."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tfla_tk import build
from tfla_tk.build import instances, sources

PROGRAM = """
#include "common/loaded_kernels.cpp"
#include <cstdio>
int main(int, char** arguments) {
    tfla_tk::for_kernels_of(arguments[1], [](const std::string& symbol) { std::puts(symbol.c_str()); });
}
"""


@pytest.mark.usefixtures("kernel_compiler")
def test_the_kernels_of_a_cubin(tmp_path: Path) -> None:
    compiled = build.compile_instance(instances.mlstm_bwd_combine(), tmp_path)
    source, program = tmp_path / "program.cpp", tmp_path / "program"
    source.write_text(PROGRAM)
    toolchain = build.find_toolchain()
    includes = [f"-I{folder}" for folder in (sources.kernels_root(), toolchain.include)]
    command = [
        str(toolchain.nvcc),
        "-std=c++20",
        *includes,
        f"-L{toolchain.lib}",
        str(source),
        "-o",
        str(program),
    ]
    subprocess.run(command, check=True)
    found = subprocess.run([program, compiled.cubin], capture_output=True, text=True, check=True).stdout
    symbols = set(re.findall(r"Compiling entry function '(\w+)'", compiled.ptxas_log))
    assert symbols and set(found.split()) == symbols
