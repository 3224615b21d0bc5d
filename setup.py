"""What `make wheel` adds to pyproject.toml: compiled kernels, and the tags and version of such a wheel."""

import json
import os
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

# holds what `tfla-tk build --copy` has left there; unset for the wheel that is pure Python
COMPILED = os.environ.get("TFLA_TK_COMPILED")


class WithKernels(Distribution):
    """Of one platform and one Python."""

    def has_ext_modules(self) -> bool:
        return True


class BuildWithKernels(build_py):
    """Python files, and the compiled kernels beside them."""

    def run(self) -> None:
        super().run()
        self.copy_tree(COMPILED, str(Path(self.build_lib, "tfla_tk", "_prebuilt")))


if COMPILED:
    cuda, _ = json.loads(Path(COMPILED, "index.json").read_text())["cuda"]
    # not beside the sources, where Python started there would take it for what is installed
    options = {"egg_info": {"tag_build": f"+cu{cuda}", "egg_base": str(Path(COMPILED).parent)}}
    setup(distclass=WithKernels, cmdclass={"build_py": BuildWithKernels}, options=options)
else:
    setup()
