"""The one build path of the kernels: ahead of time (``make kernels``) and on a kernel's first call.

``load(instance)`` gives the Python module of an instance and compiles it where the cache lacks it;
``ensure(instances)`` compiles many in parallel; ``compile_cubin`` and ``disassemble`` serve the tests and
``make sass``.
"""

from tfla_tk.build.builder import Built, cache_key, compile_cubin, ensure, is_cached, load
from tfla_tk.build.cache import check_cache
from tfla_tk.build.disassembly import disassemble
from tfla_tk.build.errors import BuildError, CaptureError
from tfla_tk.build.gate import check_ptxas_log, parse_ptxas_log
from tfla_tk.build.instances import Instance, all_instances, shipped_instances
from tfla_tk.build.thunderkittens import find_thunderkittens
from tfla_tk.build.toolchain import find_toolchain

__all__ = [
    "BuildError",
    "Built",
    "CaptureError",
    "Instance",
    "all_instances",
    "cache_key",
    "check_cache",
    "check_ptxas_log",
    "compile_cubin",
    "disassemble",
    "ensure",
    "find_thunderkittens",
    "find_toolchain",
    "is_cached",
    "load",
    "parse_ptxas_log",
    "shipped_instances",
]
