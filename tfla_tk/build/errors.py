"""The error that every step of the kernel build raises."""

from __future__ import annotations

_loaded_before = globals().get("BuildError")


class BuildError(RuntimeError):
    """A kernel could not be built or loaded.

    Attributes:
        reason: What went wrong.
        remedy: What the user can do about it; may be empty.
    """

    def __init__(self, reason: str, remedy: str = "") -> None:
        self.reason = reason
        self.remedy = remedy
        super().__init__(f"{reason}\nRemedy: {remedy}" if remedy else reason)


# after a reload of this module too, what `except BuildError` elsewhere names is what is raised
if _loaded_before is not None:
    BuildError = _loaded_before  # type: ignore[misc]
