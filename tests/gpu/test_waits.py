"""A CTA's wait for what another CTA writes (kernels/common/sync.cuh), in a program of its own: a trap leaves
its process no GPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tfla_tk.build import find_thunderkittens, find_toolchain, sources

# the first CTA waits for the second one, which sets the flag only if it is told so
PROGRAM = """
#include <cstdio>
#include "common/sync.cuh"

__global__ void wait_for_flag(int* flag, bool set) {
    using namespace tfla_tk;
    if (blockIdx.x == 0)
        wait_for_cta(32, [&] { return peek_from_device(flag) != 0; });
    else if (set && threadIdx.x == 0)
        release_to_device(flag, 1);
}

int main() {
    int* flag;
    cudaMalloc(&flag, sizeof(*flag));
    for (bool set : {true, false}) {
        cudaMemset(flag, 0, sizeof(*flag));
        wait_for_flag<<<2, 32>>>(flag, set);
        puts(cudaGetErrorName(cudaDeviceSynchronize()));
    }
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("waits")
    source, program = folder / "waits.cu", folder / "waits"
    source.write_text(PROGRAM)
    flags = ["-std=c++20", "--expt-relaxed-constexpr", "--expt-extended-lambda", "-DKITTENS_HOPPER"]
    target = ["-gencode=arch=compute_90a,code=sm_90a", "-include=chrono"]
    includes = [f"-I{sources.kernels_root()}", f"-I{find_thunderkittens().include}"]
    command = [find_toolchain().nvcc, *flags, *target, *includes, source, "-o", program]
    subprocess.run(command, check=True, timeout=600)
    return program


def test_a_wait_for_what_never_comes_ends_in_an_error(program: Path) -> None:
    """After a minute or so; one for what comes does not."""
    done = subprocess.run([program], capture_output=True, text=True, timeout=500)
    assert done.stdout.split() == ["cudaSuccess", "cudaErrorLaunchFailure"]
