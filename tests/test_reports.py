"""Reports: what a reader sees of given records, in every format."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bcgbench import cli_compare
from bcgbench.errors import UsageError
from bcgbench.reports import REPORTS, base, formats, headline, markdown, markdown_syntax, renderer
from bcgbench.reports.base import Report
from bcgbench.types import Record
from tests import factories as make

ESCAPE = "\x1b"
WIDTH = 100


def report_of(*records: Record, **changes) -> Report:
    """A report with the verdicts that a run would give."""
    cases = tuple({record.case.key: record.case for record in records}.values())
    fields = {"info": make.run_info(cases=cases), "records": records, "verdicts": cli_compare.judge_run(records)}
    return Report(**{**fields, **changes})


def usual(**changes) -> Report:
    """Eager, bcg and graph of one case, all fine."""
    return report_of(make.record(), make.graph_record(), make.graph_record(runner="graph", denoise_s=0.495), **changes)


def tape() -> Report:
    """The same on a CPU."""
    case = make.case(model="tiny/qwen-image", device="cpu", weights="random")
    eager = make.record(case=case, synthetic=True)
    bcg = make.graph_record(case=case, backend="tape", synthetic=True)
    return report_of(eager, bcg)


def markdown_tables(text: str) -> list[list[list[str]]]:
    """Every table as rows of cells, split at unescaped pipes as GitHub does."""
    tables, rows = [], []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
        elif rows:
            tables.append(rows)
            rows = []
    return tables


# --- every format ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.parametrize("report", [usual(), tape(), report_of(), report_of(make.record(samples=(), memory=None))])
def test_every_format_renders_every_report_without_escape_sequences(name: str, report: Report):
    """No report fails on missing parts, none holds ANSI, each ends in exactly one newline."""
    text = renderer(name)(report)
    assert ESCAPE not in text
    assert text.endswith("\n")
    assert not text.endswith("\n\n")


def test_an_unknown_format_names_the_known_ones():
    """A misspelt format is a usage error, not a KeyError."""
    with pytest.raises(UsageError, match="table, markdown, json, csv"):
        renderer("yaml")


@pytest.mark.parametrize("name", REPORTS)
def test_local_paths_and_logins_never_show(name: str):
    """A report is made to be published: the command, the source folder and reasons may hold private paths."""
    secret = "/home/alice/models/qwen"
    case = make.case(model=secret, source=secret)
    reason = make.reason(code="load", text=f"cannot read {secret}/config.json on alice@gpu-17.example.org")
    info = make.run_info(command=f"bcgbench run --source {secret} --results '{secret} x'", cases=(case,))
    failed = make.record(case=case, status="FAILED", reasons=(reason,))
    text = renderer(name)(Report(info=info, records=(failed,), notes=(f"log: {secret}/a.log",)))
    assert "alice" not in text
    assert "gpu-17" not in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("--model Qwen/Qwen-Image --res 512x512", "--model Qwen/Qwen-Image --res 512x512"),
        ("--source /data/a b", "--source <path> b"),
        ("--source=~/m/x", "--source=<path>"),
        ("'../../x/y'", "'<path>'"),
        ("C:\\Users\\alice\\x", "<path>"),
        ("see https://github.com/a/b/issues/1", "see https://github.com/a/b/issues/1"),
        ("560/560 replays, 4 s / 2 s", "560/560 replays, 4 s / 2 s"),
        ("root@box:/root/x", "<login>:<path>"),
        ("Qwen/Qwen-Image @ 512x512", "Qwen/Qwen-Image @ 512x512"),
    ],
)
def test_redaction_takes_paths_and_leaves_model_ids(text: str, expected: str):
    """Model ids, URLs and fractions look like paths and stay."""
    assert base.redact(text) == expected


# --- overall verdict ------------------------------------------------------------------------------------------------


def test_the_first_line_of_a_good_run_says_speed_outputs_and_replays():
    """One line tells a reviewer everything that decides."""
    line = headline.overall(report_of(make.record(), make.graph_record()))
    assert (
        line
        == "PASS: 1 case; bcg against eager FASTER 2.00x [2.00, 2.00], n = 10 pairs; outputs exact; replays 560/560"
    )


def test_several_cases_are_counted_by_verdict():
    """Cases are summed per pair of arms, with the range of ratios."""
    other = make.case(width_px=1024)
    records = (
        make.record(),
        make.graph_record(),
        make.record(case=other),
        make.graph_record(case=other, denoise_s=0.25),
    )
    line = headline.overall(report_of(*records))
    assert "2 cases; bcg against eager 2 FASTER (2.00x to 4.00x); outputs exact" in line


def test_different_outputs_come_before_a_speedup():
    """A wrong picture twice as fast is a failure."""
    report = report_of(make.record(), make.graph_record(fidelity=(make.inexact(),)))
    assert base.exit_code(report) == 3
    assert headline.overall(report).startswith("OUTPUTS DIFFER: ")


def test_a_slower_bcg_arm_fails_and_a_slower_baseline_does_not():
    """eager-padded is slower by design and decides nothing; bcg slower than eager is exit code 1."""
    padded = make.record(runner="eager-padded", denoise_s=1.2)
    assert base.exit_code(report_of(make.record(), make.graph_record(), padded)) == 0
    assert base.exit_code(report_of(make.record(), make.graph_record(denoise_s=1.2), padded)) == 1


def test_bcg_a_little_behind_the_whole_graph_is_no_failure():
    """The whole graph is the bound, not the competitor."""
    report = report_of(make.record(), make.graph_record(denoise_s=0.6), make.graph_record(runner="graph"))
    assert ("graph", "bcg", "SLOWER") in [(v.a, v.b, v.speed) for v in report.verdicts]
    assert base.exit_code(report) == 0


def test_a_failed_arm_sets_the_exit_code_by_its_own_reason():
    """Out of memory is exit code 7 and no verdict hides it."""
    failed = make.graph_record(
        status="FAILED", reasons=(make.reason(code="out-of-memory", text="needs 80 GB"),), samples=(), engagement=None
    )
    report = report_of(make.record(), failed)
    assert report.verdicts == ()
    assert base.exit_code(report) == 7
    assert headline.overall(report) == "FAILED: 1 case; 1 arm FAILED (out-of-memory: bcg); no pair of arms to compare"


def test_a_failed_arm_shows_in_the_first_line_beside_good_ones():
    """A reader of the first line alone learns that an arm is missing."""
    failed = make.graph_record(runner="graph", status="FAILED", reasons=(make.reason(code="out-of-memory"),))
    line = headline.overall(report_of(make.record(), make.graph_record(), failed))
    assert line.startswith("FAILED: 1 case; 1 arm FAILED (out-of-memory: graph); bcg against eager FASTER 2.00x")


def test_no_record_is_exit_code_6():
    """An empty run is said to be empty."""
    assert base.exit_code(report_of()) == 6
    assert headline.overall(report_of()).startswith("NOTHING MEASURED")


def test_a_run_of_one_arm_has_no_verdict_and_is_fine():
    """Nothing was asked to be compared, so nothing failed."""
    assert base.exit_code(report_of(make.record())) == 0
    assert headline.overall(report_of(make.record())) == "PASS: 1 case; no pair of arms to compare"


# --- table ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arms", [2, 4, 6])
def test_the_table_fits_100_columns(arms: int):
    """However many arms and however long the names."""
    case = make.case(model="organisation/" + "very-long-model-name-" * 10)
    others = [make.graph_record(case=case, runner=f"runner-number-{n}-of-many") for n in range(1, arms)]
    text = renderer("table")(report_of(make.record(case=case), *others))
    assert max(len(line) for line in text.splitlines() if "very-long" not in line) <= WIDTH
    assert f"runner-number-{arms - 1}" in text


def test_the_table_shows_times_with_units_and_the_proof_of_replay():
    """Denoise with interval, graph use, memory."""
    text = renderer("table")(usual())
    rows = {line.strip()[:17].strip(): line.split()[-1] for line in text.splitlines() if line.strip()}
    assert "[498.5, 501.5] ms" in text
    assert rows["replays/expected"] == "560/560"
    assert rows["outputs"] == "exact"
    assert re.search(r"captures +no graph +2 -> 2 -> 2 -> 2", text)


def test_arms_that_failed_alike_share_one_line_and_no_column():
    """One fault of the machine is told once, not per arm and metric."""
    fault = {"status": "FAILED", "reasons": (make.reason(code="environment", text="no GPU here"),), "samples": ()}
    records = (make.record(**fault), make.graph_record(**fault), make.graph_record(runner="graph", **fault))
    text = renderer("table")(report_of(*records))
    assert text.startswith("FAILED: 1 case; 3 arms FAILED (environment: eager, bcg, graph); no pair of arms")
    assert "  eager, bcg, graph FAILED: environment: no GPU here\n" in text
    assert "n/a" not in text
    assert text.count("no GPU here") == 1


def test_a_tape_run_says_of_each_pair_only_what_a_tape_can_say():
    """Outputs; that nothing was timed stands once, below the metrics."""
    text = renderer("table")(tape())
    assert "pays" not in text
    assert "  bcg against eager: outputs: exact; padding changes nothing\n" in text
    assert text.startswith("PASS: 1 case; speed not timed on a CPU; outputs exact; replays 560/560")
    assert text.count("carries no speed") == 1
    assert "hook" not in text


def test_four_arms_with_intervals_fit_on_single_lines():
    """An interval that is folded reads as two values."""
    arms = [make.graph_record(runner=runner, denoise_s=0.1494) for runner in ("bcg", "graph", "eager-padded")]
    text = renderer("table")(report_of(make.record(denoise_s=0.1494), *arms))
    assert re.search(r"95 % interval +(\[[\d.]+, [\d.]+\] ms *){4}\n", text)


def test_arms_that_were_asked_for_and_not_run_are_no_pass():
    """A run that was cut off is not fine only because what is left of it is."""
    report = usual(missing=((make.case().key, "compile"),))
    assert headline.overall(report).startswith("UNFINISHED: 1 case; 1 arm not run (compile); bcg against eager FASTER")


@pytest.mark.parametrize("name", ["table", "markdown"])
def test_a_tape_run_shows_no_time_and_says_why(name: str):
    """A CPU tape carries outputs and graph use, never speed."""
    text = renderer(name)(tape())
    assert not re.search(r"\d (s|ms|µs)\b", text.partition("host time per launch")[0])
    assert "carries no speed" in text
    assert "exact" in text


@pytest.mark.parametrize("name", ["table", "markdown"])
@pytest.mark.parametrize("status", ["INVALID", "FAILED", "SKIPPED"])
def test_an_arm_that_is_not_ok_shows_its_reason_and_no_time(name: str, status: str):
    """A time that cannot be believed is not printed where it could be quoted."""
    bad = make.graph_record(status=status, reasons=(make.reason(),))
    text = renderer(name)(report_of(make.record(), bad))
    assert f"{status}: not-engaged" in text
    assert "0 of 40 forwards were replayed" in text
    assert "500.1 ms" not in text


# --- markdown -------------------------------------------------------------------------------------------------------


def test_the_columns_reviewers_read_stay_first_and_in_order():
    """The published support tables of breakable CUDA graphs have these eight columns."""
    header = markdown_tables(renderer("markdown")(usual()))[0][0]
    assert header[:8] == [
        "Model / shape",
        "Capture after warmup -> req1 -> req2",
        "Eager denoise",
        "BCG denoise",
        "Denoise speedup",
        "Eager total",
        "BCG total",
        "Peak mem (Eager -> BCG)",
    ]
    assert tuple(header[8:]) == markdown.PROOF_COLUMNS + markdown.GRAPH_COLUMNS


def test_the_summary_row_holds_values_with_units_and_counts():
    """Every figure has its unit, medians have n."""
    row = dict(zip(*markdown_tables(renderer("markdown")(usual()))[0][::2], strict=True))
    assert row == {
        "Model / shape": "Qwen/Qwen-Image @ 512x512",
        "Capture after warmup -> req1 -> req2": "2 -> 2 -> 2",
        "Eager denoise": "1.000 s (n = 10)",
        "BCG denoise": "500.1 ms (n = 10)",
        "Denoise speedup": "FASTER 2.00x [2.00, 2.00] (n = 10)",
        "Eager total": "1.071 s",
        "BCG total": "570.6 ms",
        "Peak mem (Eager -> BCG)": "64.42 GB -> 65.50 GB",
        "Replays / expected": "560 / 560",
        "Misses": "0",
        "Fallbacks": "0",
        "Outputs (BCG vs padded eager)": "exact",
        "GPU busy (Eager -> BCG)": "40.0 % -> 80.0 %",
        "Graph denoise": "495.1 ms (n = 10)",
        "Graph / BCG": "0.990x [0.990, 0.990] (n = 10)",
    }


def test_the_first_markdown_line_is_the_verdict():
    """A folded comment still says it."""
    assert renderer("markdown")(usual()).startswith("**PASS: 1 case; bcg against eager FASTER 2.00x")


def test_missing_arms_are_not_available_with_a_reason():
    """Never blank, never 0."""
    row = markdown_tables(renderer("markdown")(report_of(make.record())))[0][2]
    assert all(row)
    assert row[3] == "n/a (arm not run)"


@pytest.mark.parametrize(
    "name",
    [
        "a|b",
        "a\nb",
        "a\r\n| --- |",
        "rocket 🚀",
        "x" * 200,
        "`code`",
        "<script>alert(1)</script>",
        "[a](http://b)",
        "\\|",
        "@team",
    ],
)
def test_hostile_names_stay_in_their_cell(name: str):
    """Pipes, newlines, emoji, long names, HTML and mentions: still one summary table with one row."""
    case = make.case(model=name)
    text = renderer("markdown")(report_of(make.record(case=case), make.graph_record(case=case)))
    summary, arms = markdown_tables(text)[:2]
    assert {len(row) for row in summary} == {15}
    assert len(summary) == 3
    assert {len(row) for row in arms} == {len(markdown.ARM_COLUMNS)}
    assert "<script>" not in text
    assert "@team" not in text
    assert "](http://b)" not in text


@given(st.text())
def test_any_text_is_one_cell(text: str):
    """Whatever a name or a reason holds, a table keeps its shape."""
    ((header, _, row),) = markdown_tables(markdown_syntax.table(("a", "b"), [(markdown_syntax.escape(text), "x")]))
    assert len(header) == len(row) == 2
    assert row[1] == "x"


@given(st.text())
def test_redaction_is_stable(text: str):
    """What was redacted once stays as it is."""
    assert base.redact(base.redact(text)) == base.redact(text)


def test_the_samples_say_whether_the_gpu_was_throttled():
    """A power cap explains a slow image; idle is no throttling."""
    fine, capped = (
        replace(make.sample(), gpu_state=make.gpu_state(throttle_bits=bits, sm_clock_hz=hz, power_w=power))
        for bits, hz, power in ((0x1, 1_980_000_000, 300.0), (0x4, 1_755_000_000, 700.0))
    )
    text = renderer("markdown")(report_of(make.record(samples=(fine, fine, capped))))
    assert "1755 to 1980 MHz, 300 to 700 W, throttled at 1 of 3 (reasons 0x4)" in text


def test_figures_stand_right_and_words_left():
    """Digits line up below each other; a list of figures reads like words."""
    text = markdown_syntax.table(
        ("name", "time", "why", "all"), [("a", "1 s", "slow", "1 s, 2 s"), ("b", "n/a (no GPU)", "none", "3 s")]
    )
    assert text.splitlines()[1] == "| :--- | ---: | :--- | :--- |"


def test_commands_name_the_arms_and_the_folder_of_this_run():
    """They can be typed one after the other, by whoever repeats the run."""
    command = "bcgbench run --model Qwen/Qwen-Image --runner eager,graph --results out"
    report = report_of(make.record(), make.graph_record(runner="graph"), info=make.run_info(command=command))
    block = renderer("markdown")(report).partition("```\n")[2].partition("```")[0]
    assert block.splitlines() == [
        command,
        "bcgbench compare eager graph --results out",
        "bcgbench report --format markdown --results out",
    ]


def test_a_tape_report_has_no_columns_and_no_sentences_of_times():
    """Nothing was timed by CUDA events, and no memory was measured on a CPU."""
    text = renderer("markdown")(tape())
    assert "CUDA events" not in text
    assert "<summary>Memory" not in text
    assert "not-timed" not in text
    assert markdown_tables(text)[1][0] == [
        "Model / shape", "Arm", "Status", "Against", "Outputs", "Padding alone", "Captures",
    ]  # fmt: skip


def test_details_are_folded_and_balanced():
    """Published figures, commands, environment, memory, outputs, misses, samples and images follow the tables."""
    text = renderer("markdown")(usual())
    summaries = re.findall(r"<details><summary>(.*?)</summary>", text)
    assert summaries == [
        "Published figures", "Commands to repeat", "Environment", "Memory", "Outputs compared", "Misses: none",
        "Samples", "Images",
    ]  # fmt: skip
    assert text.count("<details>") == text.count("</details>")
    assert "[image-0](artifacts/bcg/image-0.png)" in text


def test_outputs_compared_say_how_much_differs_and_where():
    """As reviewers ask: how many values, largest, mean, rms and the box around them; zeros for one exact replay."""
    differs = make.graph_record(fidelity=(make.inexact(),))
    text = renderer("markdown")(report_of(make.record(), differs))
    table = next(t for t in markdown_tables(text) if "Question" in t[0])
    names = ("Values that differ", "Max difference", "Mean, RMS", "Bounding box")
    cells = {row[1] + " " + row[2]: [row[table[0].index(name)] for name in names] for row in table[1:]}
    assert cells["eager rerun"] == ["0 of 262144", "0", "0, 0", "none"]
    assert cells["bcg graph"] == ["3600 of 196608", "3 at image 0", "0.0004, 0.007", "0..0 x 3..900 x 0..63"]


def test_priors_are_listed_with_what_they_hold():
    """One row per prior; the long setting is not repeated beside the samples."""
    held = {"prior": "sha256:0123456789abcdef", "prior holds": "noise 1x16x64x64 float32; seed 42"}
    records = [make.record(settings=held, artifacts={"prior": "artifacts/a.safetensors"}),
               make.graph_record(settings=held, artifacts={"prior": "artifacts/a.safetensors"})]  # fmt: skip
    text = renderer("markdown")(report_of(*records))
    table = next(t for t in markdown_tables(text) if "Holds" in t[0])
    assert table[2][1:] == ["eager, bcg", *held.values(), "artifacts/a.safetensors"]
    assert text.count("prior holds") == 0


def test_a_miss_names_the_field_that_differs():
    """The reader sees what to fix, not that something missed."""
    bcg = make.graph_record(
        status="INVALID", engagement=make.engagement(misses=(make.miss(),), fallbacks=3, replays=557)
    )
    text = renderer("markdown")(report_of(make.record(), bcg))
    assert "encoder_hidden_states: shape (1, 64, 3584) captured, (1, 71, 3584) called" in text


def test_synthetic_weights_are_stated():
    """Random weights must never pass for a model's pictures."""
    text = renderer("markdown")(tape())
    assert "(synthetic weights)" in text
    assert "the pictures mean nothing" in text


def test_a_fence_is_longer_than_the_backticks_within():
    """A command with backticks cannot end its block."""
    text = renderer("markdown")(usual(info=make.run_info(command="bcgbench run --prompt '```'")))
    assert "````\nbcgbench run" in text


def test_two_environments_are_two_blocks():
    """Records of unlike machines do not hide behind the first one's description."""
    other = make.environment(gpu=make.gpu(name="NVIDIA B200"))
    text = renderer("markdown")(report_of(make.record(), make.graph_record(environment=other)))
    assert "Environment of Qwen/Qwen-Image bcg" in text
    assert "NVIDIA B200" in text


# --- json and csv ---------------------------------------------------------------------------------------------------


def test_json_is_one_document_with_everything_stored():
    """Same names as in the journal, and the outcome."""
    document = json.loads(renderer("json")(usual()))
    assert set(document) == {"schema_version", "exit_code", "outcome", "run", "records", "verdicts", "notes"}
    assert [record["runner"] for record in document["records"]] == ["eager", "bcg", "graph"]
    assert document["exit_code"] == 0
    assert document["records"][0]["samples"][0]["denoise_event_s"] == 1.0


def test_csv_has_one_row_per_case_arm_and_metric():
    """Unrounded values with unit, direction and count."""
    rows = list(csv.DictReader(io.StringIO(renderer("csv")(usual()))))
    picked = [row for row in rows if row["metric"] == "denoise_s"]
    assert [row["arm"] for row in picked] == ["eager", "bcg", "graph"]
    assert float(picked[0]["value"]) == pytest.approx(1.00025)
    assert (picked[0]["unit"], picked[0]["better"], picked[0]["n"]) == ("s", "lower", "10")


def test_csv_leaves_tape_times_empty_and_says_why():
    """A spreadsheet must not average times of a tape."""
    rows = list(csv.DictReader(io.StringIO(renderer("csv")(tape()))))
    times = [row for row in rows if row["unit"] == "s"]
    assert {row["value"] for row in times} == {""}
    assert {row["note"] for row in times} == {"a CPU (tape) run carries no speed"}


# --- numbers and labels ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value_s", "expected"),
    [
        (6.48, "6.480 s"),
        (0.0341, "34.10 ms"),
        (7.2e-6, "7.200 µs"),
        (123.456, "123.5 s"),
        (0.0, "0.000 s"),
        (-0.5, "-500.0 ms"),
    ],
)
def test_times_have_four_digits_and_a_unit(value_s: float, expected: str):
    """Seconds, milliseconds, microseconds."""
    assert formats.seconds(value_s) == expected


@pytest.mark.parametrize(
    ("value", "expected"), [(2.6412, "2.64x"), (1.0042, "1.004x"), (0.952, "0.952x"), (0.5, "0.50x")]
)
def test_ratios_near_one_keep_a_third_decimal(value: float, expected: str):
    """0.4 % is a result and must not round to nothing."""
    assert formats.ratio(value) == expected


@pytest.mark.parametrize(("value", "expected"), [(58.098e9, "58.10 GB"), (1.5e6, "1.5 MB"), (0, "0 B"), (999, "999 B")])
def test_sizes_are_decimal(value: float, expected: str):
    """GB is 10^9 bytes."""
    assert formats.size(value) == expected


def test_arms_of_two_runs_are_told_apart():
    """With two runs in one report a label carries the run."""
    after = replace(make.graph_record(), run_id="later")
    report = Report(info=make.run_info(), records=(make.graph_record(), after))
    (view,) = base.views(report)
    assert list(view.arms) == [f"bcg of {make.RUN_ID}", "bcg of later"]
