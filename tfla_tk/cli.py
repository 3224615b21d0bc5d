"""The command line: ``tfla-tk doctor``, ``tfla-tk build``, ``tfla-tk compare``, ``tfla-tk gradcheck``.

Exit status: 0 done, 1 failed (the message says why and what to do), 2 wrong usage, 130 interrupted.
"""

import argparse
import fnmatch
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import tfla_tk
from tfla_tk import build, doctor, env
from tfla_tk.bench import compare, gradcheck
from tfla_tk.bench.usage import UsageError
from tfla_tk.build import prebuilt
from tfla_tk.core.errors import UnsupportedError


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(_parser(), argv)


def run_command(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    """Run the command that the arguments name; what it raises becomes a message and an exit status."""
    arguments = parser.parse_args(argv)
    if env.OMP_NUM_THREADS.get() is None:
        # what commands compute on a CPU is small, and on a busy machine threads wait long for one another
        torch.set_num_threads(1)
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except UsageError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # by a reader such as `head`
        # what has not been written yet is flushed once more at the end of the process
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (build.BuildError, UnsupportedError, ValueError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tfla-tk", description=(tfla_tk.__doc__ or "").splitlines()[0])
    parser.add_argument("--version", action="version", version=f"tfla_tk {tfla_tk.__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    told = "what this machine offers, and the backend each operator would use"
    command = commands.add_parser("doctor", help=told)
    command.add_argument("--json", action="store_true", help="print the report as JSON")
    command.set_defaults(run=_doctor)

    command = commands.add_parser("build", help="compile the kernels ahead of their first call")
    add, jobs = command.add_argument, compare.argument(compare.positive)
    add("--match", default="*", metavar="GLOB", help="only the instances of this name")
    add("--dtype", choices=("bf16", "fp16"), help="only the kernels of this dtype (default: both)")
    add("--all", action="store_true", help="also the sequential kernels, which measurements alone take")
    add("--jobs", type=jobs, help="compiler processes at a time (default: the CPU cores)")
    add("--list", action="store_true", help="print the names and compile nothing")
    add("--sass", type=Path, metavar="DIR", help="write cubin, SASS and ptxas log there instead")
    add("--copy", type=Path, metavar="DIR", help="copy what is compiled there, for a wheel (`make wheel`)")
    command.set_defaults(run=_build)

    command = commands.add_parser("compare", help="time the backends side by side")
    compare.add_arguments(command)
    command.set_defaults(run=compare.run)

    command = commands.add_parser("gradcheck", help="the error of every backend's gradients against fp64")
    gradcheck.add_arguments(command)
    command.set_defaults(run=gradcheck.run)
    return parser


def _doctor(arguments: argparse.Namespace) -> int:
    found = doctor.report()
    print(json.dumps(found, indent=2) if arguments.json else doctor.render(found))
    return 0


def _build(arguments: argparse.Namespace) -> int:
    known = build.all_instances() if arguments.all else build.shipped_instances()
    of_dtype = [x for x in known if x.dtype in ("", arguments.dtype or x.dtype)]
    chosen = [x for x in of_dtype if fnmatch.fnmatch(x.name, arguments.match)]
    if known and not chosen:
        raise UsageError(f"no kernel is named {arguments.match!r}; `tfla-tk build --list` prints the names")
    if arguments.list:
        print("\n".join(instance.name for instance in chosen))
        return 0
    jobs = arguments.jobs or env.build_jobs()
    # launchers take the longest
    artifacts: list[build.Artifact] = [build.EXTENSION]
    artifacts += [*dict.fromkeys(instance.launcher for instance in chosen), *chosen]
    if arguments.copy is None:
        artifacts = [artifact for artifact in artifacts if prebuilt.find(artifact) is None]
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("compiling", total=len(chosen if arguments.sass else artifacts))

        def done(count: int, line: str) -> None:
            progress.console.print(line, highlight=False, markup=False)
            progress.advance(task, count)

        faults: list[str] = []
        if arguments.sass is not None:
            with ThreadPoolExecutor(jobs) as pool:
                for line, fault in pool.map(partial(_write_sass, arguments.sass), chosen):
                    done(1, line)
                    faults += fault
        else:
            found = build.ensure(artifacts, jobs, lambda built: done(len(built.files), _built_line(built)))
    if faults:
        raise build.BuildError("\n".join(faults))
    if arguments.copy is not None:
        files = {artifact: file for built in found for artifact, file in built.files.items()}
        prebuilt.write(arguments.copy, build.find_toolchain().version, files)
    console.print(f"{len(chosen)} kernels ready", highlight=False)
    return 0


def _built_line(built: build.Built) -> str:
    took = f"{built.seconds:.1f} s" if built.compiled else "cached"
    registers = [str(kernel.registers) for kernel in build.parse_ptxas_log(built.ptxas_log)]
    names = ", ".join(map(build.name_of, built.files))
    return f"{names}: {took}" + (f", registers {', '.join(registers)}" if registers else "")


def _write_sass(folder: Path, instance: build.Instance) -> tuple[str, list[str]]:
    """What to tell of it, and the fault that the build would refuse it for."""
    compiled = build.compile_instance(instance, folder)
    listing = compiled.cubin.with_suffix(".sass")
    listing.write_text(build.disassemble(compiled.cubin))
    compiled.cubin.with_suffix(".ptxas.log").write_text(compiled.ptxas_log)
    line = f"{listing}: {compiled.seconds:.1f} s"
    try:
        build.check_ptxas_log(compiled.ptxas_log, instance.name)
    except build.BuildError as error:
        return line, [str(error)]
    return line, []
