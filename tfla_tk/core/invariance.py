"""The option that makes the bits of a sequence's results follow from that sequence alone.

A call reads it once, in front of all else, and carries it in its description, through the arguments of its op
to its backward. So a change between a forward and its backward, which autograd runs in a thread of its own,
does not reach that backward.
"""

from tfla_tk.core.checks import check_bool

_on = False


class batch_invariant:
    """Have the tk kernels compute a sequence in the same way alone, in any batch, and packed with others.

    A call of this sets the option for the whole process, all threads of it, like
    torch.use_deterministic_algorithms. In a `with` statement the option is set back at the end::

        tfla_tk.batch_invariant(True)

        with tfla_tk.batch_invariant():
            h = tfla_tk.mlstm_chunkwise(q, k, v, i, f)

    Outputs, states and gradients of a sequence are then equal bit for bit, whatever else is in the call,
    between calls of equal heads, head dims, dtypes and options. docs/batch-invariance.md says what that costs
    and where it ends. Calls keep what they began with: their backward does, and captured CUDA graphs do.

    Args:
        enabled: whether the option is on.

    Raises:
        TypeError: enabled is no bool.
    """

    def __init__(self, enabled: bool = True) -> None:
        self._enabled = check_bool("enabled", enabled)
        self._before = _on
        _set(self._enabled)

    def __enter__(self) -> None:
        _set(self._enabled)

    def __exit__(self, *error: object) -> None:
        _set(self._before)


def is_batch_invariant() -> bool:
    """Whether `batch_invariant` is on."""
    return _on


def _set(enabled: bool) -> None:
    global _on
    _on = enabled
