"""Compiles every kernel that ships with several compilers and says what differs (`make compilers`).

The compilers come from pip, into build/compilers. Of CUDA 12, pip has ptxas alone: it takes the PTX of the
first nvcc. Nothing is run, so no GPU is needed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from tfla_tk import build, env
from tfla_tk.bench.environment import git_commit

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build/compilers"
RECORD = ROOT / "docs/compilers.md"
RELEASES = ("13.0", "13")  # of CUDA 13: the oldest that is tried, and the newest that there is
TOOLKIT = "cuda-toolkit[nvcc,cudart,cccl]=={}.*"
PTXAS, PTX_VERSION = "nvidia-cuda-nvcc-cu12==12.8.*", "8.7"
PTXAS_FLAGS = ("-arch=sm_90a", "-v", "--warn-on-spills")  # as nvcc calls it
HEAD = """\
# Compilers

Every kernel that ships, in bf16 and fp16, compiled for sm_90a at commit {commit}; written by
`make compilers`.

| compiler | instances | kernels | serialised wgmmas | spills or stack frames |
|---|---:|---:|---:|---:|
"""


def from_pip(requirement: str, program: str) -> Path:
    """A program of what pip brings."""
    target = FOLDER / re.sub(r"\W+", "-", requirement).strip("-")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--target", str(target)]
    subprocess.run([*command, requirement], check=True)
    return next(target.glob(f"nvidia/*/bin/{program}")).absolute()


def version(program: Path) -> str:
    """Its name and version, for instance "nvcc 13.0.88"."""
    said = subprocess.run([str(program), "--version"], capture_output=True, text=True, check=True).stdout
    return f"{program.name} " + re.search(r"V([\d.]+)", said)[1]


def compiled(instance: build.Instance, nvccs: list[Path], ptxas: Path) -> dict[str, str]:
    """The log of ptxas by compiler. Called in a process of its own, whose environment it changes."""
    folder = FOLDER / "scratch" / instance.name
    folder.mkdir(parents=True, exist_ok=True)
    logs = {}
    os.environ[env.NVCC_APPEND_FLAGS.name] = f"--keep --keep-dir {folder}"  # its PTX
    for nvcc in nvccs:
        os.environ[env.NVCC.name] = str(nvcc)
        logs[version(nvcc)] = build.compile_instance(instance, folder).ptxas_log
        if nvcc == nvccs[0]:
            (ptx,) = folder.glob("*.ptx")
            ptx.write_text(re.sub(r"(?m)^\.version .*", f".version {PTX_VERSION}", ptx.read_text()))
            command = [str(ptxas), *PTXAS_FLAGS, str(ptx), "-o", str(folder / "again.cubin")]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if done.returncode:
                raise RuntimeError(f"{instance.name}: {ptxas} fails\n{done.stdout}")
            logs[f"{version(ptxas)}, PTX of {version(nvcc)}"] = done.stdout
    shutil.rmtree(folder)
    return logs


def kernels_of(log: str) -> dict[str, tuple[str, bool, bool]]:
    """What ptxas says of every kernel: in words, whether it serialises wgmmas, whether it spills."""
    advice = {line for line in log.splitlines() if re.search(r"\bC75\d\d\b|setmaxnreg ignored", line)}
    found = {}
    for kernel in build.parse_ptxas_log(log):
        of_kernel = {line for line in advice if f"'{kernel.function}'" in line}
        advice -= of_kernel
        local = {"frame": kernel.stack_frame, "spills": kernel.spill_stores + kernel.spill_loads}
        words = [
            f"{kernel.registers} registers",
            *(f"{size} bytes of {x}" for x, size in local.items() if size),
        ]
        words += sorted(re.search(r"\bC75\d\d\b|$", line)[0] or line for line in of_kernel)
        found[kernel.function] = (", ".join(words), bool(of_kernel), any(local.values()))
    found.update((line, (line, True, False)) for line in advice)  # which names no kernel
    return found


def differences(logs: dict[str, str]) -> Iterator[str]:
    """A line for each kernel and compiler that says other things of it than the first does, or has faults."""
    first = kernels_of(next(iter(logs.values())))
    for compiler, log in logs.items():
        for function, (words, *faults) in kernels_of(log).items():
            usual = first[function][0] if function in first else "nothing"
            if any(faults) or words != usual:
                yield f"{compiler}: {words}, first compiler {usual}: {demangled(function)}"


def demangled(function: str) -> str:
    """A kernel with its template arguments, without namespaces and parameters."""
    name = subprocess.run(["c++filt", function], capture_output=True, text=True, check=True).stdout
    return re.sub(r"\w+::|^void |>\(\w+\)\s*$", "", name.strip())


def row(compiler: str, logs: list[str]) -> str:
    """A line of the record."""
    kernels = [kernel for log in logs for kernel in kernels_of(log).values()]
    serialised, spilling = (sum(kernel[fault] for kernel in kernels) or "none" for fault in (1, 2))
    return f"| {compiler} | {len(logs)} | {len(kernels)} | {serialised} | {spilling} |\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nvcc", nargs="*", default=RELEASES, help="a release of CUDA that pip has, or a path")
    parser.add_argument("--only", default="", help="part of the names of instances; nothing goes on record")
    arguments = parser.parse_args()
    nvccs = [Path(nvcc) if "/" in nvcc else from_pip(TOOLKIT.format(nvcc), "nvcc") for nvcc in arguments.nvcc]
    ptxas = from_pip(PTXAS, "ptxas")
    build.find_thunderkittens()
    instances = [instance for instance in build.shipped_instances() if arguments.only in instance.name]
    by_compiler: dict[str, list[str]] = {}
    with ProcessPoolExecutor(env.build_jobs()) as pool:
        running = {pool.submit(compiled, instance, nvccs, ptxas): instance.name for instance in instances}
        for future in as_completed(running):
            logs = future.result()
            lines = list(differences(logs))
            print(f"{running[future]}:", *(lines or ["no difference"]), sep="\n  ", flush=True)
            for compiler, log in logs.items():
                by_compiler.setdefault(compiler, []).append(log)
    rows = [row(compiler, logs) for compiler, logs in by_compiler.items()]
    print("".join(rows), end="")
    if not arguments.only:
        RECORD.write_text(HEAD.format(commit=git_commit(ROOT)) + "".join(rows))
    return any(not line.endswith("| none | none |\n") for line in rows)


if __name__ == "__main__":
    sys.exit(main())
