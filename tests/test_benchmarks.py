"""The engine's own benchmark: it runs where there is no GPU, and says which cost does not grow like a line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import engine
from benchmarks.engine import Bench, Row


def row(*us: float) -> Row:
    """A cost at sizes 1, 2, 4, ..."""
    return Row(cost="replay", per="segment", sizes=[2**power for power in range(len(us))], us=list(us))


@pytest.mark.parametrize(
    ("costs", "linear"), [((12, 14, 18, 26), True), ((5, 5.2, 4.9, 5.1), True), ((1, 4, 16, 64), False)]
)
def test_a_cost_that_grows_faster_than_its_size_is_named(costs: tuple[float, ...], linear: bool):
    """A constant cost is a line too; a quadratic one is none."""
    assert row(*costs).linear is linear
    assert ("NOT A LINE" in "".join(engine._table([row(*costs)]))) is not linear


def test_a_line_is_at_all_and_each():
    """Microseconds at no size, and for each unit."""
    assert row(12, 14, 18, 26).line == pytest.approx((10, 2))


def test_every_cost_is_measured_and_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """With the smallest two sizes of each, once."""

    def small(self: Bench, cost: str, per: str, sizes: tuple[int, ...], measure) -> Row:
        return Row(cost=cost, per=per, sizes=list(sizes[:2]), us=[measure(size) for size in sizes[:2]])

    monkeypatch.setattr(Bench, "row", small)
    monkeypatch.setattr(
        sys, "argv", ["engine", "--device", "cpu", "--repeats", "2", "--json", str(tmp_path / "b.json")]
    )
    assert engine.main() in {0, 1}
    stored = json.loads((tmp_path / "b.json").read_text())
    assert stored["torch"] == torch.__version__
    assert {stored_row["cost"] for stored_row in stored["rows"]} >= {"replay", "capture", "output clone"}
    assert all(us > 0 for stored_row in stored["rows"] for us in stored_row["us"])
    assert capsys.readouterr().out.count("\n") == len(stored["rows"]) + 2
