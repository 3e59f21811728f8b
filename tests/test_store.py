"""Run folders: what is stored comes back, and no kill, torn line, second writer or newer schema goes unnoticed."""

from __future__ import annotations

import builtins
import dataclasses
import json
import logging
import math
import os
import types
import typing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bcgbench import store
from bcgbench.errors import NothingMeasured, StoreError
from bcgbench.types import SCHEMA_VERSION, Case, Reason, Record, RunInfo, Sample
from tests import factories as make

GOLDEN = Path(__file__).parent / "golden"
FINITE = st.floats(allow_nan=False, allow_infinity=False)


def write_lines(folder: Path, lines: list[dict]) -> Path:
    """A journal with these lines."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / store.JOURNAL).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def read_lines(folder: Path) -> list[dict]:
    """The lines of a journal."""
    return [json.loads(text) for text in (folder / store.JOURNAL).read_text().splitlines()]


@pytest.fixture
def run(tmp_path):
    """A run of one case with the runners eager and bcg."""
    info = make.run_info(cases=(make.case(runners=("eager", "bcg")),))
    with store.create_run(tmp_path, info) as opened:
        yield opened


# --- JSON -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [make.record(), make.graph_record(), make.run_info(), make.verdict(), make.case()])
def test_values_survive_json(value):
    """A stored value comes back equal, through text."""
    text = json.dumps(store.to_json(value))
    assert store.from_json(type(value), json.loads(text)) == value


def anything(hint: object) -> st.SearchStrategy:
    """Any value of a type hint of `types.py`; floats are finite."""
    arguments = typing.get_args(hint)
    match typing.get_origin(hint):
        case typing.Literal:
            return st.sampled_from(arguments)
        case typing.Union | types.UnionType:
            return st.one_of(*map(anything, arguments))
        case builtins.tuple:
            several = st.lists(anything(arguments[0]), max_size=2).map(tuple)
            return several if Ellipsis in arguments else st.tuples(*map(anything, arguments))
        case builtins.dict:
            return st.dictionaries(st.text(max_size=3), anything(arguments[1]), max_size=2)
    if dataclasses.is_dataclass(hint):
        return st.builds(hint, **{name: anything(field) for name, field in typing.get_type_hints(hint).items()})
    return FINITE if hint is float else st.from_type(hint)


@given(anything(Record))
def test_any_record_survives_json(record):
    """Not only plausible records: any value that the type hints allow."""
    text = json.dumps(store.to_json(record), allow_nan=False)
    assert store.from_json(Record, json.loads(text)) == record


def test_whole_number_in_a_float_field_keeps_the_key():
    """The key is made from the JSON of the fields, where 4 and 4.0 differ: reading must not turn one into the other."""
    case = make.case(guidance=4)
    assert store.from_json(Case, store.to_json(case)).key == case.key


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_refused(value):
    """NaN is not JSON; the message names the field."""
    with pytest.raises(StoreError, match=r"Sample\.step_s\[1\] is"):
        store.to_json(make.sample(step_s=(0.1, value)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"round": "1"}, r"Sample\.round: expected int, got '1'"),
        ({"round": True}, r"Sample\.round: expected int"),
        ({"round": 1.5}, r"Sample\.round: expected int"),
        ({"phase": "cold"}, r"Sample\.phase: expected one of first, warm"),
        ({"step_s": 0.1}, r"Sample\.step_s: expected a list"),
        ({"step_s": [0.1, None]}, r"Sample\.step_s\[1\]: expected float"),
        ({"gpu_state": []}, r"Sample\.gpu_state: expected an object"),
        ({"colour": 1}, r"no field more or less.*colour"),
    ],
)
def test_data_that_does_not_fit_is_refused(change, message):
    """A wrong type is an error that names the field, never a coerced value."""
    with pytest.raises(StoreError, match=message):
        store.from_json(Sample, store.to_json(make.sample()) | change)


def test_missing_field_is_refused():
    """A field with a default is not filled in silently either."""
    data = store.to_json(make.sample())
    del data["gpu_state"]
    with pytest.raises(StoreError, match="gpu_state"):
        store.from_json(Sample, data)


# --- the journal ----------------------------------------------------------------------------------------------------


def test_what_was_appended_is_read_again(run):
    """Header, samples and records come back from disk, and every line has the next number."""
    sample, record = make.sample(), make.record(case=run.info.cases[0])
    run.append_sample(sample, case_key=record.case.key, attempt=1)
    run.append_record(record)
    again = store.open_run(run.path)
    assert again.info == run.info
    assert again.samples(record.case.key, attempt=1) == (sample,)
    assert again.records() == run.records() == (record,)
    assert [(line["seq"], line["kind"]) for line in read_lines(run.path)] == [(0, "run"), (1, "sample"), (2, "record")]


def test_run_opened_for_reading_cannot_append(run):
    """Reading a run that is being written is allowed; adding to it is not."""
    with pytest.raises(StoreError, match="reading only"):
        store.open_run(run.path).append_record(make.record())


def test_second_writer_is_refused_until_the_first_is_gone(run):
    """Two processes that append to one journal would interleave their numbers."""
    with pytest.raises(StoreError, match="being written by another"):
        store.open_run(run.path, write=True)
    run.close()
    store.open_run(run.path, write=True).close()


def test_existing_folder_is_not_overwritten(run, tmp_path):
    """A run never mixes with an older one."""
    with pytest.raises(StoreError, match="File exists"):
        store.create_run(tmp_path, run.info)


@pytest.mark.parametrize("torn", [b'{"seq":2,"kind":"sam', b"\0" * 40 + b"\n", b'{"seq":2,"kind":"record"}\n', b"\xff"])
def test_torn_last_line_is_set_aside(run, torn, caplog):
    """What a kill or a power cut leaves is reported on reading, moved away on writing, and numbering goes on."""
    record = make.record(case=run.info.cases[0])
    run.append_record(record)
    run.close()
    with (run.path / store.JOURNAL).open("ab") as stream:
        stream.write(torn)
    with caplog.at_level(logging.WARNING):
        assert store.open_run(run.path).records() == (record,)
    assert "torn line" in caplog.text
    assert not (run.path / "journal.torn").exists()
    with store.open_run(run.path, write=True) as again:
        again.append_record(replace(record, attempt=2))
    assert (run.path / "journal.torn").read_bytes().rstrip(b"\n") == torn.rstrip(b"\n")
    assert [line["seq"] for line in read_lines(run.path)] == [0, 1, 2]


@pytest.mark.parametrize("cut", [1, 7, 60])
def test_every_cut_of_the_last_line_leaves_the_lines_before(run, cut):
    """Whatever number of bytes of the last write reached the disk, the earlier lines are read."""
    first = make.record(case=run.info.cases[0])
    run.append_record(first)
    size_bytes = (run.path / store.JOURNAL).stat().st_size
    run.append_record(replace(first, runner="bcg"))
    run.close()
    os.truncate(run.path / store.JOURNAL, size_bytes + cut)
    assert store.open_run(run.path).records() == (first,)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda lines: [lines[0], lines[1][:20], lines[2]], "line 2 is damaged"),
        (lambda lines: [lines[0], lines[2]], "line 2 has seq 2, expected 1"),
        (lambda lines: [lines[0], lines[1], lines[1]], "line 3 has seq 1, expected 2"),
        (lambda lines: [lines[0], lines[1].replace('"OK"', '"FINE"'), lines[2]], "line 2 .*Record.status"),
        (lambda lines: [lines[0], lines[1].replace('"record"', '"note"', 1), lines[2]], "line 2 .*unknown kind 'note'"),
        (lambda lines: [lines[1].replace('"seq":1', '"seq":0')], "line 1 is no run header"),
        (lambda lines: [], "has no header"),
    ],
)
def test_damage_before_the_last_line_is_an_error_that_names_the_line(run, damage, message):
    """A journal that lost something in the middle is not read as if it were whole."""
    run.append_record(make.record(case=run.info.cases[0]))
    run.append_record(make.record(case=run.info.cases[0], runner="bcg"))
    file = run.path / store.JOURNAL
    file.write_text("".join(line + "\n" for line in damage(file.read_text().splitlines())))
    with pytest.raises(StoreError, match=message):
        store.open_run(run.path)


def test_failed_write_leaves_the_journal_as_it_was(run, monkeypatch):
    """A full disk is an error with the cause; the half-written line is taken back, so a resume finds a whole file."""
    before = (run.path / store.JOURNAL).read_bytes()
    write = os.write

    def fill(fd, data):
        if len(data) < 50:
            raise OSError(28, "No space left on device")
        return write(fd, data[: len(data) // 2])

    monkeypatch.setattr("bcgbench.journal.os.write", fill)
    with pytest.raises(StoreError, match=r"No space left on device; make room, then resume"):
        run.append_record(make.record())
    assert (run.path / store.JOURNAL).read_bytes() == before
    monkeypatch.undo()
    run.append_record(make.record())
    assert [line["seq"] for line in read_lines(run.path)] == [0, 1]


def test_interrupt_in_the_middle_of_a_write_doubles_no_line(run, monkeypatch):
    """Ctrl-C may fall after the bytes are written and before they are counted: the number is then used once."""

    def interrupted(fd):
        raise KeyboardInterrupt

    monkeypatch.setattr("bcgbench.journal.os.fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.append_record(make.record())
    monkeypatch.undo()
    run.append_record(make.record(runner="bcg"))
    assert [line["seq"] for line in read_lines(run.path)] == [0, 1]
    assert [record.runner for record in store.open_run(run.path).records()] == ["bcg"]


# --- attempts and resume --------------------------------------------------------------------------------------------


def test_newest_attempt_counts_in_suite_order(tmp_path):
    """Records come in the order of cases and runners, each from its newest attempt, whatever the order written."""
    small, large = make.case(width_px=256, runners=("eager", "bcg")), make.case(runners=("eager",))
    with store.create_run(tmp_path, make.run_info(cases=(small, large))) as run:
        run.append_record(make.record(case=large))
        run.append_record(make.record(case=small, runner="bcg", attempt=2))
        run.append_record(make.record(case=small, runner="eager", attempt=2))
        run.append_record(make.record(case=small, runner="eager", attempt=1))
        found = [(r.case.width_px, r.runner, r.attempt) for r in run.records()]
    assert found == [(256, "eager", 2), (256, "bcg", 2), (512, "eager", 1)]


def test_attempts_count_samples_that_got_no_record(run):
    """An attempt that was killed before its record still used up its number."""
    key = run.info.cases[0].key
    assert run.next_attempt(key) == 1
    run.append_sample(make.sample(), case_key=key, attempt=1)
    assert run.next_attempt(key) == 2
    assert run.next_attempt("another-case") == 1
    assert run.samples(key, attempt=1, runner="bcg") == ()


@pytest.mark.parametrize(
    ("status", "code", "complete"),
    [
        ("OK", None, True),
        ("INVALID", "not-engaged", True),
        ("SKIPPED", "unsupported", True),
        ("FAILED", "capture-failed", True),
        ("FAILED", "usage", True),
        ("FAILED", "interrupted", False),
        ("FAILED", "crashed", False),
        ("FAILED", "timeout", False),
        ("FAILED", "out-of-memory", False),
        ("FAILED", "environment", False),
    ],
)
def test_only_failures_of_circumstance_are_run_again(run, status, code, complete):
    """A resume repeats what the machine or the user stopped, not what would fail the same way again."""
    case = run.info.cases[0]
    run.append_record(make.record(case=case))
    assert not run.is_complete(case)
    reasons = (Reason(code=code, text="why"),) if code else ()
    run.append_record(make.record(case=case, runner="bcg", status=status, reasons=reasons))
    assert run.is_complete(case) is complete


# --- schema ---------------------------------------------------------------------------------------------------------


def test_newer_schema_asks_for_an_upgrade(tmp_path):
    """Reading half of a newer file would misread it."""
    info = store.to_json(make.run_info()) | {"schema_version": SCHEMA_VERSION + 1, "new": 1}
    folder = write_lines(tmp_path / "run", [{"seq": 0, "kind": "run", "data": info}])
    message = f"newer bcgbench \\(schema {SCHEMA_VERSION + 1}, this one reads up to {SCHEMA_VERSION}\\): upgrade"
    with pytest.raises(StoreError, match=message):
        store.open_run(folder)


def test_older_schema_is_migrated_on_reading_and_not_written(tmp_path, monkeypatch):
    """Each line goes through the migration of its version; an old file is never continued in the new form."""
    old = make.run_info(schema_version=0)
    lines = [{"seq": 0, "kind": "run", "data": store.to_json(old)}]
    data = store.to_json(make.record(case=old.cases[0]))
    data["arm"] = data.pop("runner")
    folder = write_lines(tmp_path / "run", [*lines, {"seq": 1, "kind": "record", "data": data}])
    with pytest.raises(StoreError, match="no migration from schema 0 to 1"):
        store.open_run(folder)

    def rename(kind, data):
        return data if kind != "record" else {**{k: v for k, v in data.items() if k != "arm"}, "runner": data["arm"]}

    monkeypatch.setattr(store, "MIGRATIONS", {**store.MIGRATIONS, 0: rename})
    assert [record.runner for record in store.open_run(folder).records()] == ["eager"]
    with pytest.raises(StoreError, match="can be read, not resumed"):
        store.open_run(folder, write=True)


@pytest.mark.parametrize("version", range(1, SCHEMA_VERSION + 1))
def test_golden_journal_of_each_schema_is_read(tmp_path, version):
    """A file of every schema stays readable: when this fails, a stored field changed without a migration."""
    (tmp_path / store.JOURNAL).write_bytes((GOLDEN / f"journal-v{version}.jsonl").read_bytes())
    run = store.open_run(tmp_path)
    assert run.info.schema_version == version
    assert [(r.runner, r.status, r.attempt) for r in run.records()] == [("eager", "OK", 1), ("bcg", "FAILED", 1)]
    key = run.info.cases[0].key
    assert key == "qwen-qwen-image-512x512-43bad9d1"
    assert [s.denoise_event_s for s in run.samples(key, attempt=1)] == [1.0, 0.5]
    assert run.records()[0].profile == make.profile(loop_steps=(2, 3) if version > 1 else ())
    assert {s.loop_steps for s in run.records()[0].samples} == {(20,)}
    assert [d.name for d in run.records()[0].fidelity[0].audio] == (["audio 0"] if version > 1 else [])
    assert run.records()[1].engagement.unengaged == (("hidden_states bfloat16[1, 4096, 64]",) if version > 1 else ())
    assert run.info.cases[0].parallel == "none"
    assert [rank.rank for rank in run.records()[1].ranks] == ([0, 1] if version > 2 else [])
    found = run.records()[1]
    stored = (make.accuracy(), make.compilation()) if version > 3 else (None, None)
    assert (found.accuracy, found.compilation) == stored
    assert (run.info.cases[0].prior, run.info.cases[0].rewrite_prompts) == (None, False)


# --- finding runs ---------------------------------------------------------------------------------------------------


def test_run_ids_sort_by_time_and_are_safe_file_names():
    """Time first, then the model or suite as a slug, then a random end for runs of one second."""
    names = {store.run_id("2026-11-29T15:12:00.123Z", name="Qwen/Qwen-Image") for _ in range(50)}
    assert len(names) == 50
    assert {name[:-8] for name in names} == {"20261129T151200Z-qwen-qwen-image-"}
    assert store.run_id(store.utc_now(), name="///").split("-")[1] == "run"


def start(results: Path, name: str, *, created_utc: str) -> Path:
    """An empty run."""
    info: RunInfo = make.run_info(run_id=name, created_utc=created_utc)
    with store.create_run(results, info) as run:
        return run.path


def test_runs_are_found_by_id_path_and_recency(tmp_path):
    """The latest run is the one begun last, also within a second; folders without a header are no runs."""
    second = start(tmp_path, "20260101T000000Z-a", created_utc="2026-01-01T00:00:00.200Z")
    first = start(tmp_path, "20260101T000000Z-b", created_utc="2026-01-01T00:00:00.100Z")
    write_lines(tmp_path / "20270101T000000Z-broken", [])
    assert store.list_runs(tmp_path) == (first, second)
    assert store.find_run(tmp_path) == store.find_run(tmp_path, "latest") == second
    assert store.find_run(tmp_path, first.name) == store.find_run(tmp_path, str(first)) == first
    assert store.find_run(tmp_path / "elsewhere", str(first / store.JOURNAL)) == first
    with pytest.raises(StoreError, match=f"no run '20260101T000000Z-c' .*nearest: .*{second.name}"):
        store.find_run(tmp_path, "20260101T000000Z-c")


@pytest.mark.parametrize("ref", [None, "latest", "20260101T000000Z-a"])
def test_no_run_at_all_is_nothing_measured(tmp_path, ref):
    """An empty or absent results folder has its own exit code and says how to begin."""
    with pytest.raises(NothingMeasured, match="measure one first"):
        store.find_run(tmp_path / "absent", ref)


def test_folder_without_a_journal_is_refused(tmp_path):
    """A wrong path is told as such."""
    with pytest.raises(StoreError, match=r"holds no journal\.jsonl"):
        store.open_run(tmp_path)
