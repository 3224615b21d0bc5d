"""The command line: ``tfla-tk doctor``, ``tfla-tk build``, ``tfla-tk compare``, ``tfla-tk gradcheck``.

Exit status: 0 done, 1 failed (the message says why and what to do), 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
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
from tfla_tk.bench import compare, gradcheck, intra
from tfla_tk.bench.usage import UsageError
from tfla_tk.core.errors import UnsupportedError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    return run_command(_parser(), argv)


def run_command(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    """Run the command that the arguments name; what it raises becomes a message and an exit status."""
    arguments = parser.parse_args(argv)
    if env.OMP_NUM_THREADS.get() is None:
        # what commands compute on a CPU is small, and on a busy machine threads wait long for one another
        torch.set_num_threads(1)
    try:
        status: int = arguments.run(arguments)
        return status
    except UsageError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
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

    command = commands.add_parser(
        "doctor", help="what this machine offers, and the backend each operator would use"
    )
    command.add_argument("--json", action="store_true", help="print the report as JSON")
    command.set_defaults(run=_doctor)

    command = commands.add_parser("build", help="compile the kernels ahead of their first call")
    command.add_argument("--match", default="*", metavar="GLOB", help="only the instances of this name")
    command.add_argument(
        "--all",
        action="store_true",
        help="also the schedules that auto does not take, and the intra-chunk kernel of the ablation",
    )
    command.add_argument(
        "--jobs",
        type=compare.argument(compare.positive),
        help="compiler processes at a time (default: the CPU cores)",
    )
    command.add_argument("--list", action="store_true", help="print the names and compile nothing")
    command.add_argument(
        "--sass", type=Path, metavar="DIR", help="write cubin, SASS and ptxas log there instead"
    )
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
    known = build.shipped_instances()
    if arguments.all:
        known = [*build.all_instances(), *intra.all_instances()]
    chosen = [instance for instance in known if fnmatch.fnmatch(instance.name, arguments.match)]
    if known and not chosen:
        names = ", ".join(instance.name for instance in known)
        more = "" if arguments.all else "; with --all more"
        raise UsageError(f"--match: no kernel is named {arguments.match!r}; there are {names}{more}")
    if arguments.list:
        print("\n".join(instance.name for instance in chosen))
        return 0
    jobs = arguments.jobs or env.build_jobs()
    console = Console()
    with _progress(console) as progress:
        task = progress.add_task("compiling", total=len(chosen))

        def done(line: str) -> None:
            progress.console.print(line, highlight=False, markup=False)
            progress.advance(task)

        faults: list[str] = []
        if arguments.sass is not None:
            with ThreadPoolExecutor(jobs) as pool:
                for line, fault in pool.map(partial(_write_sass, arguments.sass), chosen):
                    done(line)
                    faults += fault
        else:
            build.ensure(chosen, jobs, lambda built: done(_built_line(built)))
    if faults:
        raise build.BuildError("\n".join(faults))
    console.print(f"{len(chosen)} kernels ready", highlight=False)
    return 0


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def _built_line(built: build.Built) -> str:
    took = f"{built.seconds:.1f} s" if built.compiled else "cached"
    registers = [str(kernel.registers) for kernel in build.parse_ptxas_log(built.ptxas_log)]
    return f"{built.instance.name}: {took}, registers {', '.join(registers)}"


def _write_sass(folder: Path, instance: build.Instance) -> tuple[str, list[str]]:
    """What to tell of it, and the fault that the build would refuse it for."""
    compiled = build.compile_cubin(instance, folder)
    listing = compiled.cubin.with_suffix(".sass")
    listing.write_text(build.disassemble(compiled.cubin))
    compiled.cubin.with_suffix(".ptxas.log").write_text(compiled.ptxas_log)
    line = f"{listing}: {compiled.seconds:.1f} s"
    try:
        build.check_ptxas_log(compiled.ptxas_log, instance.name)
    except build.BuildError as error:
        return line, [str(error)]
    return line, []
