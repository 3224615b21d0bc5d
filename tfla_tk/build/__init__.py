"""The one build path of the kernels: ahead of time (``tfla-tk build``) and on a kernel's first call.

``load(launcher, *instances)`` gives the functions of a launcher and compiles what the cache lacks;
``ensure(artifacts)`` compiles many in parallel; ``compile_instance`` and ``disassemble`` serve the tests and
``make sass``.
"""

# ruff: noqa: F401
from tfla_tk.build.builder import Built, cache_key, compile_instance, ensure, is_cached, launches, load
from tfla_tk.build.cache import Artifact, check_cache, name_of
from tfla_tk.build.compiler import EXTENSION
from tfla_tk.build.errors import BuildError, CaptureError
from tfla_tk.build.gate import check_ptxas_log, parse_ptxas_log
from tfla_tk.build.instances import Instance, Launcher, all_instances, shipped_instances, shipped_launchers
from tfla_tk.build.thunderkittens import find_thunderkittens
from tfla_tk.build.toolchain import disassemble, find_toolchain
