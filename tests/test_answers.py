"""Outputs that cannot be compared are an error, never equal."""

from __future__ import annotations

import pytest
import torch

from bcgbench.answers import CallTally
from bcgbench.errors import BcgbenchError


@pytest.mark.parametrize(
    ("reference", "output"),
    [(object(), object()), ((), ()), (None, None), ((torch.ones(1),), (torch.ones(1), torch.ones(1)))],
    ids=["opaque", "empty", "None", "one more"],
)  # fmt: skip
def test_outputs_without_equal_numbers_of_tensors(reference: object, output: object):
    """Nothing to compare would count as exact."""
    with pytest.raises(BcgbenchError, match="call 0: the outputs cannot be compared"):
        CallTally().add(reference, output)


def test_calls_are_counted_and_the_first_and_worst_difference_kept():
    """In the order of the trace."""
    tally = CallTally()
    for change in (0.0, 1.0, 3.0, 2.0):
        tally.add((torch.ones(4),), (torch.ones(4) + change,))
    assert (tally.calls, tally.exact, tally.first) == (4, 1, 1)
    assert tally.worst is not None
    assert (tally.worst.name, tally.worst.max_abs) == ("call 2", 3.0)
