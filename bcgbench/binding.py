"""A call's arguments by name: what padding, signatures and captures work on."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

Arguments = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Traced:
    """One transformer call as the pipeline made it: bound arguments and, by the eager arm, its output."""

    module: str
    arguments: Arguments
    output: Any


class Binder:
    """Turns a call's positional and keyword arguments into all arguments by name, defaults filled.

    LongCat passes `guidance=None` in one branch and omits it in the other: without defaults these are two signatures.
    """

    def __init__(self, function: Any) -> None:
        self._signature = inspect.signature(function)
        parameters = self._signature.parameters.values()
        self._names = [p.name for p in parameters]
        self._defaults = {p.name: None if p.default is p.empty else p.default for p in parameters}
        self._required = {p.name for p in parameters if p.default is p.empty}
        self._plain = all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)

    def __call__(self, args: tuple[Any, ...], kwargs: Arguments) -> Arguments:
        """The arguments by name; raises `TypeError` as the call itself would."""
        given = dict(zip(self._names, args, strict=False)) | kwargs
        once = len(args) + len(kwargs) == len(given)
        if self._plain and once and self._required <= given.keys() <= self._defaults.keys():
            return self._defaults | given
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments
