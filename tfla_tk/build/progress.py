"""What a call that has to compile for more than a moment tells on stderr."""

import sys
import threading
import time
from types import TracebackType

_SILENT_S = 2.0


class Progress:
    """Counts what is compiled; silent where that takes less than two seconds. total: how many files are
    compiled. jobs: compiler processes at a time. kept: where they are kept."""

    def __init__(self, total: int, jobs: int, kept: str) -> None:
        self._total, self._jobs, self._kept, self._done = total, jobs, kept, 0
        self._started = time.monotonic()
        self._shown = False
        self._lock = threading.Lock()
        self._timer = threading.Timer(_SILENT_S, self._announce)
        self._timer.daemon = True

    def __enter__(self) -> "Progress":
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        with self._lock:
            if self._shown and kind is None:
                self._write(f"compiled in {time.monotonic() - self._started:.0f} s", end="\n")

    def advance(self) -> None:
        """One more is there."""
        with self._lock:
            self._done += 1
            if self._shown and sys.stderr.isatty():
                self._write(f"{self._done} of {self._total} compiled", end="")

    def _announce(self) -> None:
        with self._lock:
            self._shown = True
            self._write(
                f"compiling {self._total} files for the first call of this kind, {self._jobs} at a time; "
                f"they are kept in {self._kept} (`tfla-tk build` compiles all kernels before)",
                end="\n",
            )
            if self._done and sys.stderr.isatty():
                self._write(f"{self._done} of {self._total} compiled", end="")

    def _write(self, text: str, end: str) -> None:
        start = "\r\x1b[K" if sys.stderr.isatty() else ""
        print(f"{start}tfla_tk: {text}", end=end, file=sys.stderr, flush=True)
