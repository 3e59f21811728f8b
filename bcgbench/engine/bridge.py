"""The way of a break's output into the segment that reads it."""

from __future__ import annotations

from torch import Tensor

from bcgbench.engine import trees
from bcgbench.engine.buffers import Address, dense, empty_like_strided
from bcgbench.engine.pull import WORD_BYTES


class Bridge:
    """Where a break's output is copied to for the next segment: by the break, or by that segment before all else."""

    def __init__(self, place: Tensor | Address, cell: Tensor | None = None) -> None:
        self._place = place
        self._cell = cell
        """What the segment reads the address from; None if the break copies."""
        self._shape, self._dtype, self._stride = place.shape, place.dtype, _stride(place)
        self._pointer = 0
        """What was written to the cell."""
        self._handed: Tensor | None = None
        """What the segment is about to copy."""
        self._views: tuple[Tensor, Tensor] | None = None
        """The place, and its elements once where it is expanded; made once, since every replay fills it."""

    @property
    def place(self) -> Tensor:
        """What the next segment reads; does not keep it alive on a GPU."""
        return self._place if isinstance(self._place, Tensor) else self._place.view()

    @property
    def handed(self) -> Tensor:
        """What the next segment will read: what lies in its place, unless it is to copy something there before."""
        handed, cell = self._handed, self._cell
        if handed is None or cell is None or int(cell) != handed.data_ptr():
            return self.place
        return handed

    def fill(self, result: Tensor) -> None:
        """Hand on a break's output; raises `StaticInputError` on another shape or dtype."""
        if result.shape != self._shape or result.dtype is not self._dtype:
            trees.check_like(self.place, result, name="output of a break")
        if self._cell is None:
            self._copy(result)
        else:
            self._hand_over(result, self._cell)

    def _copy(self, result: Tensor) -> None:
        if self._views is None:
            whole = self.place
            self._views = whole, dense(whole)
        whole, once = self._views
        if once is not whole:  # a result that is expanded no longer does not fit
            result = dense(result)
            trees.check_like(once, result, name="expanded output of a break")
        once.copy_(result)

    def _hand_over(self, result: Tensor, cell: Tensor) -> None:
        """Keep the result until the segment was launched, and tell it where it is: mostly where it was last time."""
        pointer = result.data_ptr()
        as_it_lies = result.stride() == self._stride and result.device == cell.device and pointer % WORD_BYTES == 0
        if not as_it_lies or result.is_neg() or result.is_conj():
            result = empty_like_strided(self.place, cell.device).copy_(result)
            pointer = result.data_ptr()
        if pointer != self._pointer:
            cell.fill_(pointer)
            self._pointer = pointer
        self._handed = result

    def launched(self) -> None:
        """The segment was: what follows in its stream may have the memory."""
        self._handed = None

    def poison(self) -> None:
        """Write NaN where the break's output goes: a replay that does not fill it again shows. Integers stay."""
        if self._cell is not None:
            self._cell.zero_()
            self._pointer = 0
        place = self.place
        if place.dtype.is_floating_point or place.dtype.is_complex:
            dense(place).fill_(float("nan"))


def _stride(place: Tensor | Address) -> tuple[int, ...]:
    return place.stride() if isinstance(place, Tensor) else place.stride
