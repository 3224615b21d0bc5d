"""Ops of a family whose schemas differ from those that `ops.linear` makes, in the order of their options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any


@dataclass(frozen=True)
class Schemas:
    """The schemas of a family's ops behind the inputs, results included: "Tensor do, float scale) -> ...".

    The tensors come in the order of `ops.linear`; the options have their names, in any order.
    """

    fwd: str
    bwd: str
    packed: str
    packed_bwd: str


class Reordered:
    """An op that is called and implemented with its arguments in the order of `ops.linear`.

    Attributes:
        op: torch's.
    """

    def __init__(self, op: Any, names: Sequence[str]) -> None:
        """Args: names: of all arguments in the order of `ops.linear`; the op need not have all options."""
        arguments = op._schema.arguments
        names_of_op = [argument.name for argument in arguments]
        self.op = op
        self._to_op = [names.index(name) for name in names_of_op]
        self._from_op = itemgetter(*(names_of_op.index(x) if x in names_of_op else -1 for x in names))
        # torch leaves out what a default stands for; the last one is of options that the op does not have
        self._defaults = *(argument.default_value for argument in arguments), False

    def __call__(self, *args: Any) -> Any:
        return self.op(*[args[place] for place in self._to_op])

    def implemented_by(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What torch calls with the op's arguments, from a function of those in the order of `ops.linear`."""

        defaults, from_op = self._defaults, self._from_op

        def call(*args: Any) -> Any:
            return function(*from_op((*args, *defaults[len(args) :])))

        return call


def op_of_torch(op: Any) -> Any:
    """torch's op of one that may be reordered."""
    return op.op if isinstance(op, Reordered) else op


def implementation(op: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """What torch calls with an op's arguments, from a function of those with which the op is called."""
    return op.implemented_by(function) if isinstance(op, Reordered) else function
