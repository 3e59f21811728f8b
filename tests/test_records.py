"""What a record says of its arm."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from bcgbench.records import PLACES_LIMIT, _broke_at


def arm(*graphs: list[str]) -> SimpleNamespace:
    """An arm whose graphs broke at these places."""
    return SimpleNamespace(graphs=[SimpleNamespace(break_names=names) for names in graphs])


@pytest.mark.parametrize(
    ("graphs", "text"),
    [
        ([[], []], "nothing"),
        ([["index in a", "index in a"], ["unique in b"]], "index in a; unique in b"),
        ([[f"index in {n}" for n in range(60)]],
         "; ".join(f"index in {n}" for n in range(PLACES_LIMIT)) + f"; and {60 - PLACES_LIMIT} more"),
    ],
)  # fmt: skip
def test_a_record_names_where_auto_broke_each_place_once(graphs: list[list[str]], text: str):
    """A block that repeats 60 times does not fill the report."""
    assert _broke_at(arm(*graphs)) == text  # type: ignore[arg-type]
