"""Every tensor argument of a call changed in turn, in place and legally: the graph must move exactly as eager does."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from bcgbench.arms import Arm
from bcgbench.engine import trees
from bcgbench.engine.buffers import clone_strided, dense
from bcgbench.engine.diagnose import bit_equal
from bcgbench.validate import Answer, ruled
from bcgbench.validate_subject import Shape, Subject


def changed_inputs(subject: Subject) -> Answer:
    """One leaf at a time: its buffer is overwritten in place, replayed, restored and replayed again."""
    arm = subject.arm()
    problems: list[str] = []
    notes: list[str] = []
    moved = 0
    for shape in subject.shapes:
        leaves, spec = trees.flatten(shape.arguments)
        copies = _private(leaves)
        for index, path in enumerate(trees.paths(spec)):
            if not isinstance(leaves[index], Tensor) or any(leaves[index] is other for other in leaves[:index]):
                continue
            outcome = _Leaf(subject, arm, shape, arguments=trees.rebuild(spec, copies), leaf=copies[index])
            new = mutated(copies[index])
            if new is None:
                notes.append(f"{path}: has no other legal value that is known, left as it is")
                continue
            found, note = outcome.changed_to(new)
            problems += [f"{path}: {text}" for text in found]
            notes += [f"{path}: {note}"] if note else []
            moved += not note
    fine = f"{moved} changed arguments of {len(subject.shapes)} signatures: the graph moves exactly as eager does"
    return ruled(list(dict.fromkeys(problems)), fine=fine, details=tuple(dict.fromkeys(notes)))


def _private(leaves: list[Any]) -> list[Any]:
    """Copies to write to; a tensor met twice stays one, since aliasing is part of a signature."""
    copies: dict[int, Tensor] = {}
    return [copies.setdefault(id(leaf), clone_strided(leaf)) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


class _Leaf:
    """One argument of one call."""

    def __init__(self, subject: Subject, arm: Arm, shape: Shape, *, arguments: dict[str, Any], leaf: Tensor) -> None:
        self._subject, self._shape = subject, shape
        self._graphed = subject.hook(arm, shape).graphed
        self._arguments = arguments
        self._leaf = leaf

    def changed_to(self, new: Tensor) -> tuple[list[str], str]:
        """Problems, and a note where eager does not react or refuses."""
        old = clone_strided(self._leaf)
        base = trees.clone(self._graphed(self._arguments))
        self._write(new)
        try:
            expected = self._subject.eager(self._shape, self._arguments)
        except (RuntimeError, ValueError, IndexError) as error:
            self._write(old)
            return [], f"eager refuses the changed value ({type(error).__name__})"
        got = trees.clone(self._graphed(self._arguments))
        self._write(old)
        again = self._graphed(self._arguments)
        problems = []
        if unlike := self._subject.unlike(expected, got):
            frozen = _same(base, got) and not _same(base, expected)
            problems.append("frozen input: eager's output moves with it and the graph's does not" if frozen else unlike)
        if unlike := self._subject.unlike(base, again):
            problems.append(f"the old value set again: {unlike}")
        return problems, "eager's output does not depend on it" if not problems and _same(base, expected) else ""

    def _write(self, value: Tensor) -> None:
        """In place, as a scheduler may: the graph must see it by torch's counter."""
        dense(self._leaf).copy_(dense(value))


def _same(a: Any, b: Any) -> bool:
    return all(itertools.starmap(bit_equal, zip(trees.tensors(a), trees.tensors(b), strict=True)))


def mutated(leaf: Tensor) -> Tensor | None:
    """Another legal value of an argument, or None.

    Numbers are scaled and shifted. Masks lose their last entry. Other integers (positions, ids, lengths) change places,
    since each value is known to be legal; where all are equal they are one less, if that leaves them above 0.
    """
    new = clone_strided(leaf)
    values = dense(new)
    if leaf.dtype.is_floating_point or leaf.is_complex():
        values.copy_(values * 1.25 + 0.125)
    elif set(values.unique().tolist()) <= {0, 1}:
        return _masked(new)
    elif bool((values != values.flatten()[0]).any()):
        values.copy_(values.flip(tuple(range(values.dim()))))
    elif int(values.flatten()[0]) > 1:
        values.copy_(values - 1)
    return None if bit_equal(new, leaf) else new


def _masked(mask: Tensor) -> Tensor | None:
    """The last entry that is on goes off; None where that would leave a row without any."""
    values = dense(mask)
    rows = values.reshape(-1, values.shape[-1]) if values.dim() else values.reshape(1, 1)
    if int(rows[0].sum()) <= 1:
        return None
    last = int(rows[0].nonzero()[-1])
    values[..., last] = torch.zeros((), dtype=values.dtype, device=values.device)
    return mask
