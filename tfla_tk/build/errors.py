"""The errors that the steps of the kernel build raise."""

_loaded_before = (globals()["BuildError"], globals()["CaptureError"]) if "BuildError" in globals() else None


class BuildError(RuntimeError):
    """A kernel could not be built or loaded. reason: What went wrong. remedy: What the user can do about
    it; may be empty."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        self.reason = reason
        self.remedy = remedy
        super().__init__(f"{reason}\nRemedy: {remedy}" if remedy else reason)


class CaptureError(BuildError):
    """A kernel would have to be compiled while a CUDA graph is being captured: it loads at any other time."""


# after a reload of this module too, what `except BuildError` elsewhere names is what is raised
if _loaded_before is not None:
    BuildError, CaptureError = _loaded_before  # type: ignore[misc]
