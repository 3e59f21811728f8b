"""The tool finds what is wrong with itself: every fault by its own finding, and nothing where there is none."""

from __future__ import annotations

import json
import logging
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bcgbench import bench, cli, fidelity, measure, selftest
from bcgbench.arms import Arm
from bcgbench.engine.buffers import StaticInputs
from bcgbench.engine.cache import GraphCache
from bcgbench.engine.graph import SegmentedGraph
from bcgbench.engine.graphed import GraphedForward
from bcgbench.engine.steps import Break, Guard
from bcgbench.engine.tape import TapeSegment
from bcgbench.faults import FAULTS, injected, selected, skipped
from bcgbench.faults import engine as broken
from bcgbench.faults.places import replaced
from bcgbench.models import base
from bcgbench.models.qwen_image import QwenImage
from bcgbench.tap import DenoiseTap

HERE = [name for name, fault in FAULTS.items() if not skipped(fault, device="cpu", chosen=False)]
PATCHED = (bench.CaseBench, base.Session, SegmentedGraph, GraphedForward, GraphCache, StaticInputs, Arm, Break, Guard,
           TapeSegment, QwenImage, DenoiseTap, fidelity._Flat, measure, base)  # fmt: skip
ROOT = Path(__file__).parents[1]


def invoke(*args: str):
    """`bcgbench selftest` in this process."""
    return CliRunner().invoke(cli.app, ["selftest", *args])


@pytest.mark.parametrize("name", HERE)  # those of ranks: test_ranks.py
def test_a_fault_ends_in_its_own_finding(name: str, tmp_path: Path):
    """Reason, words and exit code, through a whole tiny case."""
    outcome = selftest.run_fault(name, FAULTS[name], device="cpu", folder=tmp_path)
    assert outcome.passed, f"expected {outcome.expected}, found {outcome.found}: {outcome.told}"


@pytest.mark.parametrize("model", selftest.OFTEN[:2])
def test_without_a_fault_nothing_alarms(model: str, tmp_path: Path):
    """Else every fault would be caught, by accident."""
    outcome = selftest.run_control(selftest.case_of(model), folder=tmp_path)
    assert (outcome.passed, outcome.found) == (True, "exit 0")


def test_being_judged_as_a_gpus_is_no_fault(tmp_path: Path):
    """Rows about clocks mark records of a CPU: without a fault these are OK."""
    case = selftest.case_of("tiny/z-image-turbo", steps=8)
    assert selftest.run_control(case, folder=tmp_path, as_gpu=True).passed


def test_a_model_that_draws_random_numbers_is_exact_while_replays_advance_the_generator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What `lost-random-advance` finds is the lost advance, not the draws."""

    def unless_replay(owner: object, name: str, other: object):
        return ExitStack() if owner is SegmentedGraph else replaced(owner, name, other)

    monkeypatch.setattr(broken, "replaced", unless_replay)
    fault = FAULTS["lost-random-advance"]
    outcome = selftest.run_fault("lost-random-advance", fault, device="cpu", folder=tmp_path)
    assert (outcome.passed, outcome.found) == (False, "not-timed, exit 0")


@pytest.mark.parametrize("name", HERE)
def test_a_fault_is_taken_out_again(name: str):
    """After its context nothing is patched."""
    before = [dict(vars(owner)) for owner in PATCHED]
    with injected(name):
        pass
    assert [dict(vars(owner)) for owner in PATCHED] == before


def test_parts_share_a_finding_only_with_a_reason():
    """A finding that two kinds of fault end in names neither, unless the row says why it cannot."""
    rows: dict[str, list[str]] = {}
    for name, fault in FAULTS.items():
        rows.setdefault(fault.finding, []).append(name)
    shared = [names for names in rows.values() if len({FAULTS[name].part for name in names}) > 1]
    assert [names for names in shared if not any(FAULTS[name].note for name in names)] == []


def test_no_fault_may_end_in_0():
    """A fault that changes nothing in the exit code is none, or is not caught."""
    assert {fault.exit_code for fault in FAULTS.values()} == {1, 3, 4, 7}


def test_published_failures_are_named_by_repository_and_number():
    """As links that anyone can follow."""
    links = {link for fault in FAULTS.values() for link in fault.links}
    assert "https://github.com/sgl-project/sglang/issues/30584" in links
    assert all(link.split("/")[5] == "issues" and link.split("/")[6].isdigit() for link in links)


def test_the_table_of_published_failures_names_rows_that_exist():
    """`tests/README.md` is checked against the registry, in both directions."""
    text = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    named = {word for line in text.splitlines() if line.startswith("| [") for word in line.split("`")[1::2]}
    assert {name for name, fault in FAULTS.items() if fault.published} - named == set()
    missing = {ref for fault in FAULTS.values() for ref in fault.published if ref.split("/")[1] not in text}
    assert missing == set()


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_list_counts_what_the_registry_holds():
    """Counts per backend and what cannot be shown here, computed and not written."""
    counts = Counter(fault.backend for fault in FAULTS.values())
    shown = invoke("--list")
    assert shown.exit_code == 0
    assert set(counts) == {"tape", "cpu", "cuda", "none"}
    each = ", ".join(f"{number} {backend}" for backend, number in counts.items())
    assert f"{len(FAULTS)} faults: {each}" in shown.stdout
    assert f"skipped here: {counts['cuda']} (needs CUDA graphs: --device cuda)" in shown.stdout
    assert json.loads(invoke("--list", "--json").stdout).keys() == FAULTS.keys()


def test_only_limits_by_part_and_name():
    """`--only clock` is all clocks, `--only clock/moved` one."""
    assert {fault.part for fault in selected(["clock"]).values()} == {"clock"}
    assert list(selected(["clock/moved"])) == ["moved-time"]


def test_a_caught_fault_is_exit_code_0_and_a_skipped_one_is_shown():
    """One row each, and no tracebacks."""
    done = invoke("--only", "nan-output", "--only", "freed")
    assert done.exit_code == 0
    assert "nan-output       yes      failed, exit 7" in done.stdout
    assert "freed-reference  skipped" in done.stdout
    assert "1 of 1 fault caught, 1 skipped" in done.stdout
    assert "Traceback" not in done.output


def test_a_fault_that_is_missed_is_exit_code_4(monkeypatch: pytest.MonkeyPatch):
    """With what was found in its place."""
    monkeypatch.setitem(FAULTS, "nan-output", replace(FAULTS["nan-output"], code="outputs-differ", exit_code=3))
    done = invoke("--only", "nan-output", "--quiet", "--json")
    (outcome,) = json.loads(done.stdout)["outcomes"]
    assert (done.exit_code, outcome["passed"], outcome["found"]) == (4, False, "failed, exit 7")


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("--only", "nothing-like-it"), 2, "parts are replay"),
        (("--device", "tpu"), 2, "expected cpu or cuda"),
    ],
)
def test_bad_input_says_what_there_is(args: tuple[str, ...], code: int, message: str):
    """Before anything runs."""
    done = invoke(*args)
    assert done.exit_code == code
    assert message in done.stderr


def test_cases_without_a_fault_run_in_a_process_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Beside the faults, which are patches of this one; what is not wanted any more is not waited for."""
    run = partial(selftest.Outcome, name="quiet", expected="", found="", told="", passed=True)
    monkeypatch.setattr(selftest, "_controls", lambda **_: iter([run] * 3))
    with selftest.controls(device="cpu", folder=tmp_path) as unbroken:
        assert next(unbroken).name == "quiet"
        assert logging.root.manager.disable != logging.CRITICAL
