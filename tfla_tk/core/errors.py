"""Exceptions of tfla_tk. Bad arguments raise the builtin ValueError and TypeError."""

_loaded_before = globals().get("UnsupportedError")


class UnsupportedError(RuntimeError):
    """A backend asked for by name cannot serve the call.

    Attributes:
        reason: what about the call, the machine or the installation stands in the way.
        remedy: what to change; empty where nothing helps.
        failed: the backend takes such calls, but what serves them could not be built or loaded here.
    """

    __module__ = "tfla_tk"  # where users find it

    def __init__(self, what: str, reason: str, remedy: str = "", *, failed: bool = False) -> None:
        self.reason = reason
        self.remedy = remedy
        self.failed = failed
        super().__init__(f"{what}: {reason}" + (f" ({remedy})" if remedy else ""))


# after a reload of this module too, what `except UnsupportedError` elsewhere names is what is raised
if _loaded_before is not None:
    UnsupportedError = _loaded_before  # type: ignore[misc]
