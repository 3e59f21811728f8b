"""The command line: what is printed where, and with which exit code. No model runs: the worker is a stand-in."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bcgbench import cli, cli_options, cli_progress, cli_run, store, worker
from bcgbench.errors import EnvironmentFault
from bcgbench.types import SCHEMA_VERSION, Record
from tests import factories as make

ESCAPE = "\x1b"
ROOT = Path(__file__).parents[1]
TINY = ("--model", "tiny/qwen-image", "--res", "32x32")


def invoke(*args: str):
    """A command in this process."""
    return CliRunner().invoke(cli.app, [str(arg) for arg in args])


def in_process(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, stdout and stderr no terminals."""
    command = [sys.executable, "-m", "bcgbench", *map(str, args)]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **environment}, check=False, timeout=60
    )


def stored(results: Path, *records: Record, run_id: str = make.RUN_ID) -> Path:
    """A run folder that holds these records."""
    cases = tuple({record.case.key: record.case for record in records}.values()) or (make.case(),)
    info = make.run_info(run_id=run_id, cases=cases)
    with store.create_run(results, info) as run:
        for record in records:
            run.append_record(record)
    return run.path


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A results folder with one run of eager, bcg and graph."""
    stored(tmp_path, make.record(), make.graph_record(), make.graph_record(runner="graph", denoise_s=0.495))
    return tmp_path


@pytest.fixture
def fake_worker(monkeypatch: pytest.MonkeyPatch):
    """Each case yields the records that `fake_worker.records(case)` gives; calls are counted."""

    class Fake:
        def __init__(self) -> None:
            self.cases: list = []
            self.records = lambda case: (
                make.record(case=case),
                make.graph_record(case=case),
                make.graph_record(case=case, runner="graph"),
            )
            self.before = lambda case, stop: None

        def __call__(self, case, run, *, on_progress, stop) -> None:
            self.cases.append(case)
            on_progress(make.progress(case=case.key))
            self.before(case, stop)
            for record in self.records(case):
                run.append_record(make.replace(record, run_id=run.info.run_id))

    fake = Fake()
    monkeypatch.setattr(worker, "run_case", fake)
    return fake


# --- start-up -------------------------------------------------------------------------------------------------------


def test_help_is_fast_and_imports_nothing_heavy():
    """--help answers at once: no torch, diffusers, pandas or rich. 1 s leaves room for a busy CI machine."""
    command = [sys.executable, "-X", "importtime", "-m", "bcgbench", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    rows = [line.split("|") for line in done.stderr.splitlines() if line.startswith("import time:")]
    modules = {row[2].strip().split(".")[0] for row in rows}
    assert not modules & {"torch", "diffusers", "transformers", "pandas", "numpy", "rich"}
    total_us = sum(int(row[0].split(":")[1]) for row in rows[1:])
    assert total_us < 1_000_000
    assert "bcgbench compare eager bcg" in done.stdout


@pytest.mark.parametrize(
    "args",
    [
        ("compare", "eager", "bcg"),
        ("report",),
        ("report", "--format", "csv"),
        ("list", "models"),
        ("list", "runners"),
        ("list", "metrics"),
        ("list", "suites"),
        ("list", "runs"),
        ("plan", "--model", "Qwen/Qwen-Image", "--res", "512x512"),
        ("predict", "--check", "latest"),
    ],
    ids=" ".join,
)
def test_reading_commands_never_import_torch(results: Path, args: tuple[str, ...]):
    """Results can be read where torch is not installed."""
    code = "import sys; from bcgbench.cli import app; app(sys.argv[1:], standalone_mode=False)"
    tail = () if args[0] == "plan" else ("--results", str(results))
    command = [sys.executable, "-c", f"{code}\nsys.exit('torch' in sys.modules)", *args, *tail]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()


@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}, {"FORCE_COLOR": "1"}, {"TERM": "dumb"}])
@pytest.mark.parametrize("args", [("--help",), ("report",), ("compare", "eager", "bcg"), ("report", "--nonsense")])
def test_no_escape_sequences_where_there_is_no_terminal(
    results: Path, args: tuple[str, ...], environment: dict[str, str]
):
    """Logs and pipes stay plain text."""
    tail = () if args[0].startswith("-") else ("--results", str(results))
    done = in_process(*args, *tail, **environment)
    assert ESCAPE not in done.stdout + done.stderr


def test_version_names_the_tool_and_the_schema():
    """For bug reports."""
    assert invoke("--version").stdout == f"bcgbench 0.1.0 (result schema {SCHEMA_VERSION})\n"


RUN_ONLY = {"--no-profile", "--rounds", "--quiet", "--resume", "--strict", "--timeout"}
"""Options of `run` that say how it measures, which `validate` does not."""


NOT_EAGER = {"--break", "--prior", "--rewrite-prompts"}
"""Options of a case that an eager profile for a prediction does without."""


def test_options_are_pinned():
    """An option is added or renamed on purpose, together with the README."""
    from typer.main import get_command

    commands = get_command(cli.app).commands
    options = {name: sorted(o for p in c.params for o in p.opts if o.startswith("--")) for name, c in commands.items()}
    case = ["--device", "--dtype", "--guidance", "--model", "--no-profile", "--only", "--res", "--rounds", "--runner"]
    case += ["--steps", "--suite", "--weights"]
    extra = ["--break", "--buckets", "--debug", "--json", "--prompt", "--quiet", "--results", "--resume", "--seed"]
    extra += ["--source", "--strict", "--timeout", "--prior", "--rewrite-prompts"]
    unmeasured = {"--no-profile", "--rounds", "--runner", "--results", "--resume", "--strict", "--timeout"}
    assert options == {
        "run": sorted([*case, *extra, "--executor", "--parallel"]),
        "validate": sorted({*case, *extra, "--golden", "--list"} - RUN_ONLY),
        "predict": sorted({*case, *extra, "--check", "--results"} - (unmeasured - {"--results"}) - NOT_EAGER),
        "compare": ["--arm", "--debug", "--json", "--results", "--run", "--strict"],
        "report": ["--debug", "--format", "--output", "--results"],
        "list": ["--debug", "--json", "--results"],
        "plan": sorted([*case, "--debug", "--json"]),
        "doctor": ["--debug", "--json", "--results", "--strict"],
        "divergence": sorted({*case, *extra, "--fault"} - unmeasured),
        "selftest": ["--debug", "--device", "--json", "--list", "--only", "--quiet"],
    }


def test_what_looks_at_one_process_refuses_shared_cases():
    """A case that several processes share is not run whole under its name."""
    for command in (("validate",), ("predict",), ("divergence", "eager", "bcg")):
        done = invoke(*command, "--suite", "parallel", "--device", "cpu")
        assert (done.exit_code, "only `run` starts several processes" in done.stderr) == (2, True)


def test_a_plan_tells_shared_cases_apart():
    """The name of a case says how many processes share it, and what the figures then mean."""
    done = invoke("plan", "--suite", "parallel", "--only", "MiniMax")
    assert "256x256x124, context:2 " in done.stdout
    assert "memory of each, time as if one ran it" in done.stdout


def test_what_several_processes_cannot_run_is_refused():
    """A compiled arm's reference is of whole calls."""
    done = invoke("run", "--model", "tiny/z-image", "--parallel", "cfg:2", "--runner", "eager,compile")
    assert (done.exit_code, "compile run in one process only" in done.stderr) == (2, True)


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--model", "Qwen/Qwen-Imag"), "Qwen/Qwen-Image"),
        (("--model", "tiny/qwen-image", "--res", "32by32"), "32by32"),
        (("--model", "tiny/qwen-image", "--res", "33x32"), "nearest: 32x32"),
        (("--model", "tiny/qwen-image", "--runner", "eager,bgc"), "bgc"),
        ((*TINY, "--prompt", "  "), "--prompt is empty"),
        ((*TINY, "--buckets", "64,many"), "64,many"),
        ((*TINY, "--prior", "no/such.safetensors"), "The prior no/such.safetensors does not exist"),
        ((*TINY, "--rewrite-prompts"), "has no prompt rewriting of its own"),
        ((*TINY, "--buckets", "0"), "above 0"),
        (("--suite", "no-such-suite"), "no-such-suite"),
        ((), "give --model MODEL or --suite SUITE"),
        ((*TINY, "--weights", "guessed"), "guessed"),
        ((*TINY, "--device", "tpu"), "tpu"),
        ((*TINY, "--dtype", "int3"), "int3"),
        ((*TINY, "--source", "/no/such/folder"), "/no/such/folder"),
        ((*TINY, "--source", "tests", "--weights", "random"), "leave out one of the two"),
        ((*TINY, "--steps", "1"), "at least 2 denoise steps"),
        (("--model", "tiny/z-image", "--buckets", "64"), "no prompt-length buckets"),
        (("--model", "Efficient-Large-Model/SANA1.5_1.6B_1024px_diffusers", "--res", "500x512"), "multiples of 32"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_bad_input_is_one_message_and_exit_code_2(tmp_path: Path, fake_worker, args: tuple[str, ...], message: str):
    """Nothing runs, nothing is created, no traceback."""
    done = invoke("run", *args, "--results", tmp_path / "r")
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert fake_worker.cases == []
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    "args", [("run", "--steps", "0"), ("run", "--nonsense"), ("compare", "eager"), ("list", "cats"), ("frob",)]
)
def test_usage_errors_of_the_parser_are_exit_code_2(args: tuple[str, ...]):
    """Wrong options and missing arguments."""
    done = invoke(*args)
    assert done.exit_code == 2
    assert done.stdout == ""


def test_no_argument_at_all_is_a_message(fake_worker):
    """`bcgbench run` alone, where even the folder of results is left out."""
    done = in_process("run")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: nothing to run")


def test_an_unknown_suite_key_names_file_key_and_nearest(tmp_path: Path, fake_worker):
    """A misspelt key must not be ignored: the case would run with a default instead."""
    suite = tmp_path / "own.toml"
    suite.write_text('[[case]]\nmodel = "tiny/qwen-image"\nresolutoin = "32x32"\n')
    done = invoke("run", "--suite", suite, "--results", tmp_path / "r")
    assert (done.exit_code, fake_worker.cases) == (2, [])
    assert f"{suite}: case 1: unknown key 'resolutoin'; did you mean 'resolution'?" in done.stderr


@pytest.mark.parametrize("args", [("report",), ("compare", "eager", "bcg"), ("run", "--resume")], ids=" ".join)
def test_a_journal_of_a_newer_schema_is_refused_and_kept(results: Path, args: tuple[str, ...], fake_worker):
    """One message that says to upgrade, exit code 2, and the file untouched."""
    (journal,) = results.glob("*/journal.jsonl")
    newer = journal.read_text(encoding="utf-8").replace(f'"schema_version":{SCHEMA_VERSION}', '"schema_version":99', 1)
    journal.write_text(newer, encoding="utf-8")
    done = invoke(*args, "--results", results)
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"schema 99, this one reads up to {SCHEMA_VERSION}): upgrade" in done.stderr
    assert journal.read_text(encoding="utf-8") == newer


def test_an_unreadable_run_does_not_hide_the_others(results: Path):
    """`list runs` names what it cannot read."""
    later = stored(results, make.record(), run_id="20261130T000000Z-smoke-1b2c3d4e") / "journal.jsonl"
    newer = later.read_text(encoding="utf-8").replace(f'"schema_version":{SCHEMA_VERSION}', '"schema_version":99', 1)
    later.write_text(newer, encoding="utf-8")
    done = invoke("list", "runs", "--results", results, "--json")
    assert [row["run"] for row in json.loads(done.stdout)] == [make.RUN_ID, "20261130T000000Z-smoke-1b2c3d4e"]
    assert "upgrade" in json.loads(done.stdout)[1]["models"]


def test_an_interrupted_run_is_unfinished_not_failed(tmp_path: Path, fake_worker):
    """Ctrl-C is no fault of a model."""
    stopped = {"status": "FAILED", "reasons": (make.reason(code="interrupted"),)}
    fake_worker.records = lambda case: (make.record(case=case), make.graph_record(case=case, **stopped))
    done = invoke("run", *TINY, "--runner", "eager,bcg", "--results", tmp_path)
    assert done.exit_code == 7
    assert done.stdout.startswith("UNFINISHED: 1 case; 1 arm FAILED (interrupted: bcg)")


def test_a_journal_cut_off_within_a_line_is_shown_as_unfinished(results: Path):
    """What was written whole is reported, what is missing is named, and no PASS stands over a part."""
    (journal,) = results.glob("*/journal.jsonl")
    with journal.open("r+b") as file:
        file.truncate(journal.stat().st_size - 50)
    done = invoke("report", "--results", results)
    assert done.exit_code == 0
    assert done.stdout.startswith("UNFINISHED: 1 case; 1 arm not run (graph); bcg against eager FASTER")
    assert f"not finished: finish it with `bcgbench run --resume {make.RUN_ID}`" in " ".join(done.stdout.split())


def test_an_unwritable_results_folder_is_said_before_anything_runs(tmp_path: Path, fake_worker):
    """A file stands where the folder should be (permissions do not stop root)."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    done = invoke("run", *TINY, "--results", blocked / "results")
    assert done.exit_code == 2
    assert str(blocked) in done.stderr
    assert fake_worker.cases == []


@pytest.mark.parametrize("args", [("report",), ("compare", "eager", "bcg")])
def test_no_runs_is_exit_code_6(tmp_path: Path, args: tuple[str, ...]):
    """There is nothing to answer with."""
    done = invoke(*args, "--results", tmp_path / "empty")
    assert (done.exit_code, done.stdout) == (6, "")
    assert "bcgbench run" in done.stderr


def test_a_run_without_records_is_exit_code_6(tmp_path: Path):
    """A run that was ended before its first record."""
    stored(tmp_path)
    done = invoke("report", "--results", tmp_path)
    assert done.exit_code == 6
    assert "--resume" in done.stderr


def test_an_unknown_run_names_the_nearest(results: Path):
    """A misspelt run id."""
    done = invoke("report", make.RUN_ID[:-1], "--results", results)
    assert done.exit_code == 2
    assert f"nearest: {make.RUN_ID}" in done.stderr
    assert f"the latest is {make.RUN_ID}" in invoke("report", "nothing-like-it", "--results", results).stderr


def test_a_bug_is_one_message_with_a_hint_and_debug_shows_the_traceback(results: Path, monkeypatch: pytest.MonkeyPatch):
    """Unexpected errors hide their traceback until it is asked for."""
    monkeypatch.setattr(cli_run, "report_of", lambda _: 1 / 0)
    plain = invoke("report", "--results", results)
    assert plain.exit_code == 7
    assert (
        plain.stderr
        == "error: unexpected ZeroDivisionError: division by zero; run again with --debug for the traceback\n"
    )
    debug = invoke("report", "--results", results, "--debug")
    assert "Traceback" in debug.stderr


# --- run ------------------------------------------------------------------------------------------------------------


def test_run_prints_the_table_and_stores_the_report(tmp_path: Path, fake_worker):
    """Data on stdout, the run folder on stderr, report.md in it."""
    done = invoke("run", *TINY, "--results", tmp_path)
    (folder,) = store.list_runs(tmp_path)
    assert done.exit_code == 0
    assert done.stdout.startswith("PASS: 1 case")
    assert f"run folder: {folder}" in done.stderr
    assert (folder / "report.md").read_text(encoding="utf-8").startswith("**PASS: 1 case")
    assert list(folder.glob("report.md.*")) == []


def test_run_json_is_one_document_on_stdout(tmp_path: Path, fake_worker):
    """`bcgbench run --json | jq` works; everything else is on stderr."""
    done = invoke("run", *TINY, "--results", tmp_path, "--json")
    assert json.loads(done.stdout)["exit_code"] == 0


def test_flags_reach_the_case(tmp_path: Path, fake_worker):
    """Every case option ends in the stored case."""
    options = (
        "--runner eager,bcg --runner eager --steps 3 --guidance 2.5 --seed 7 --rounds 6 --buckets 128,64 --break none"
    )
    options += " --dtype float32 --timeout 9 --no-profile --device cpu --weights random"
    done = invoke("run", *TINY, "--prompt", "one cube", *options.split(), "--results", tmp_path)
    assert done.exit_code == 0, done.stderr
    (case,) = fake_worker.cases
    assert (case.model, case.resolution, case.runners, case.steps) == ("tiny/qwen-image", "32x32", ("eager", "bcg"), 3)
    assert (case.guidance, case.seed, case.rounds, case.buckets, case.break_policy) == (2.5, 7, 6, (64, 128), "none")
    assert (case.dtype, case.timeout_s, case.profile, case.device, case.weights) == (
        "float32",
        9.0,
        False,
        "cpu",
        "random",
    )
    assert case.prompts[0] == "one cube"
    assert len(case.prompts) == 2
    assert len(case.prompts[1]) > len(case.prompts[0])


def test_a_tiny_model_runs_on_the_cpu_with_all_arms_by_default(tmp_path: Path, fake_worker):
    """The offline example needs no further flags, and its report says that the weights are random."""
    done = invoke("run", *TINY, "--results", tmp_path)
    (case,) = fake_worker.cases
    assert (case.device, case.runners) == ("cpu", ("eager", "bcg", "graph"))
    assert "(synthetic weights)" in done.stdout


def test_several_models_and_resolutions_make_a_product(tmp_path: Path, fake_worker):
    """Two by two."""
    args = ("--model", "tiny/qwen-image", "--model", "tiny/z-image", "--res", "32x32", "--res", "64x64")
    invoke("run", *args, "--results", tmp_path)
    assert len(fake_worker.cases) == 4


def test_flags_override_a_suite(tmp_path: Path, fake_worker):
    """The suite's cases with other steps."""
    suite = tmp_path / "own.toml"
    case = 'model = "tiny/qwen-image"\nresolution = "32x32"\nsteps = 2\n'
    suite.write_text(f'[suite]\nname = "own"\ndescription = "x"\n[[case]]\n{case}')
    done = invoke("run", "--suite", suite, "--steps", "5", "--results", tmp_path / "r")
    assert done.exit_code == 0, done.stderr
    (case,) = fake_worker.cases
    assert case.steps == 5


@pytest.mark.parametrize(
    ("records", "code"),
    [
        (lambda c: (make.record(case=c), make.graph_record(case=c, fidelity=(make.inexact(),))), 3),
        (lambda c: (make.record(case=c), make.graph_record(case=c, status="INVALID", reasons=(make.reason(),))), 4),
        (lambda c: (make.record(case=c, status="FAILED", reasons=(make.reason(code="out-of-memory"),)),), 7),
        (lambda c: (), 6),
    ],
    ids=["outputs differ", "invalid", "out of memory", "nothing"],
)
def test_the_exit_code_says_what_went_wrong_and_the_report_is_there(tmp_path: Path, fake_worker, records, code: int):
    """A failing run prints and stores its report like any other."""
    fake_worker.records = records
    done = invoke("run", *TINY, "--results", tmp_path)
    (folder,) = store.list_runs(tmp_path)
    assert done.exit_code == code
    assert done.stdout
    assert (folder / "report.md").is_file()


def test_an_error_within_a_run_leaves_the_report_of_what_was_measured(tmp_path: Path, fake_worker):
    """One message, its exit code, and a report of the first case."""

    def fail_on_second(case, stop) -> None:
        if len(fake_worker.cases) > 1:
            raise EnvironmentFault("the disk is full")

    fake_worker.before = fail_on_second
    done = invoke("run", *TINY, "--res", "64x64", "--results", tmp_path)
    (folder,) = store.list_runs(tmp_path)
    assert done.exit_code == 7
    assert "error: the disk is full" in done.stderr
    assert "32x32" in (folder / "report.md").read_text(encoding="utf-8")


def test_resume_runs_only_what_is_missing(tmp_path: Path, fake_worker):
    """A bare --resume takes the latest run; complete cases are not measured again."""
    full = fake_worker.records
    fake_worker.records = lambda case: full(case) if case.width_px == 32 else ()
    invoke("run", *TINY, "--res", "64x64", "--runner", "eager,bcg", "--results", tmp_path)
    fake_worker.cases.clear()
    fake_worker.records = full
    done = invoke("run", "--results", tmp_path, "--resume")
    assert done.exit_code == 0, done.stderr
    assert [case.resolution for case in fake_worker.cases] == ["64x64"]
    assert len(store.list_runs(tmp_path)) == 1
    assert "PASS: 2 cases" in done.stdout


def test_resume_refuses_to_change_what_is_run(results: Path):
    """A resumed run is the run that was asked for."""
    done = invoke("run", "--resume", make.RUN_ID, "--steps", "3", "--results", results)
    assert done.exit_code == 2
    assert "--resume" in done.stderr


def test_the_first_interrupt_ends_after_the_current_image(tmp_path: Path, fake_worker):
    """The worker is asked to stop; a partial report and the command to resume follow; exit code 130."""

    def interrupt(case, stop: threading.Event) -> None:
        assert not stop.is_set()
        signal.raise_signal(signal.SIGINT)
        assert stop.is_set()

    fake_worker.before = interrupt
    done = invoke("run", *TINY, "--res", "64x64", "--results", tmp_path)
    (folder,) = store.list_runs(tmp_path)
    assert done.exit_code == 130
    assert len(fake_worker.cases) == 1
    assert "press Ctrl-C again to stop now" in done.stderr
    assert f"bcgbench run --resume {folder.name} --results {tmp_path}" in done.stderr
    assert "interrupted: finish it with" in (folder / "report.md").read_text(encoding="utf-8")


def test_the_second_interrupt_stops_at_once(tmp_path: Path, fake_worker):
    """KeyboardInterrupt reaches the worker; the report is still written and handlers are restored."""
    before = signal.getsignal(signal.SIGINT)

    def interrupt_twice(case, stop: threading.Event) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("not reached")

    fake_worker.before = interrupt_twice
    done = invoke("run", *TINY, "--results", tmp_path)
    (folder,) = store.list_runs(tmp_path)
    assert done.exit_code == 130
    assert (folder / "report.md").is_file()
    assert signal.getsignal(signal.SIGINT) is before


# --- compare, report, list, plan, doctor ----------------------------------------------------------------------------


def test_compare_says_outputs_then_speed_then_memory(results: Path):
    """In the order in which they matter."""
    done = invoke("compare", "eager", "bcg", "--results", results)
    assert done.exit_code == 0
    lines = [line.split()[0] for line in done.stdout.splitlines()[:5]]
    assert lines == ["Qwen/Qwen-Image", "outputs", "speed", "memory", "graphs"]
    assert "speed    FASTER 2.00x [2.00, 2.00], n = 10 pairs" in done.stdout


def test_compare_fails_by_what_it_was_asked(results: Path):
    """Asked for bcg against graph, a slower bcg is exit code 1."""
    done = invoke("compare", "graph", "bcg", "--results", results, "--json")
    assert done.exit_code == json.loads(done.stdout)["exit_code"]
    assert done.exit_code == 0 if "SAME" in done.stdout else 1


def test_compare_takes_a_run_by_position_or_option(results: Path):
    """`compare A B RUN` and `--run RUN`."""
    by_position = invoke("compare", "eager", "bcg", make.RUN_ID, "--results", results)
    by_option = invoke("compare", "eager", "bcg", "--run", make.RUN_ID, "--results", results)
    assert by_position.stdout == by_option.stdout
    assert by_position.exit_code == 0


def test_compare_of_arms_that_were_not_run_names_those_that_were(results: Path):
    """Exit code 6."""
    done = invoke("compare", "eager", "eager-padded", "--results", results)
    assert done.exit_code == 6
    assert "arms measured: eager, bcg, graph" in done.stderr


def test_compare_names_the_nearest_arm(results: Path):
    """A misspelt arm beside a known one is no run."""
    done = invoke("compare", "eager", "bgc", "--results", results)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: unknown arm 'bgc'; did you mean 'bcg'?")


def test_two_runs_are_compared_arm_by_arm(results: Path):
    """Equal arms of equal cases, with the reason why drift may pass for a change."""
    later = "20261130T000000Z-smoke-1b2c3d4e"
    records = (make.record(run_id=later), make.graph_record(run_id=later, denoise_s=0.25))
    stored(results, *records, run_id=later)
    done = invoke("compare", make.RUN_ID, later, "--results", results, "--arm", "bcg", "--json")
    document = json.loads(done.stdout)
    (verdict,) = document["verdicts"]
    assert (verdict["a"], verdict["b"], verdict["speed"]) == (f"bcg of {make.RUN_ID}", f"bcg of {later}", "FASTER")
    assert "not-interleaved" in [reason["code"] for reason in verdict["reasons"]]
    assert [record["run_id"] for record in document["records"]] == [make.RUN_ID, later]
    text = invoke("compare", make.RUN_ID, later, "--results", results).stdout
    assert text.startswith(f"A: {make.RUN_ID}\nB: {later}\n\n")
    assert "bcg of B against bcg of A" in text
    assert "outputs exact;" in text.partition("\n\n")[2].partition("\n\n")[0]


def test_a_run_that_replays_the_prior_of_another_is_paired_with_it(results: Path):
    """The seed and the file that it asked for are other ones; of two such cases the one with the same prior counts."""
    prior, other = ({"prior": f"sha256:{digit * 16}"} for digit in "ab")
    first, later = "20261130T000000Z-smoke-0b2c3d4e", "20261130T000001Z-smoke-1b2c3d4e"
    stored(results, make.record(run_id=first, settings=prior), run_id=first)
    seeded = make.record(run_id=later, case=make.case(seed=1), settings=other)
    replayed = make.record(run_id=later, case=make.case(seed=2, prior="a.safetensors"), settings=prior)
    stored(results, seeded, replayed, run_id=later)
    done = invoke("compare", first, later, "--results", results, "--json")
    document = json.loads(done.stdout)
    (verdict,) = document["verdicts"]
    assert (verdict["case"]["seed"], verdict["fidelity"], done.exit_code) == (2, "same outputs (4 digests)", 0)
    assert {record["run_id"] for record in document["records"]} == {first, later}


def test_two_runs_without_a_common_arm_are_exit_code_6(results: Path):
    """Nothing pairs."""
    later = "20261130T000000Z-smoke-1b2c3d4e"
    stored(results, make.record(run_id=later, case=make.case(width_px=1024)), run_id=later)
    done = invoke("compare", make.RUN_ID, later, "--results", results)
    assert done.exit_code == 6


@pytest.mark.parametrize("style", ["table", "markdown", "json", "csv"])
def test_report_writes_the_same_text_to_a_file(results: Path, tmp_path: Path, style: str):
    """--output holds what stdout would."""
    shown = invoke("report", "--format", style, "--results", results)
    file = tmp_path / "out.txt"
    done = invoke("report", "--format", style, "--results", results, "--output", file)
    assert (shown.exit_code, done.exit_code, done.stdout) == (0, 0, "")
    assert file.read_text(encoding="utf-8") == shown.stdout


def test_report_to_an_unwritable_file_is_exit_code_2(results: Path, tmp_path: Path):
    """The folder is not there."""
    done = invoke("report", "--results", results, "--output", tmp_path / "none" / "x.md")
    assert done.exit_code == 2
    assert "choose another --output" in done.stderr


@pytest.mark.parametrize(
    ("what", "key", "expected"),
    [("models", "model", "tiny/qwen-image"), ("runners", "runner", "bcg"), ("metrics", "metric", "denoise_s"),
     ("suites", "suite", "smoke"), ("runs", "run", make.RUN_ID)],
)  # fmt: skip
def test_list_shows_what_there_is_as_text_and_json(results: Path, what: str, key: str, expected: str):
    """A table for people, a list of objects for programs."""
    text = invoke("list", what, "--results", results)
    rows = json.loads(invoke("list", what, "--results", results, "--json").stdout)
    assert text.exit_code == 0
    assert expected in text.stdout
    assert expected in [row[key] for row in rows]


def test_plan_sums_time_and_names_the_largest_memory():
    """One line per case, then the sum."""
    done = invoke("plan", "--model", "Qwen/Qwen-Image", "--res", "512x512", "--res", "1024x1024")
    assert done.exit_code == 0, done.stderr
    assert "\n2 cases: about " in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
    document = json.loads(invoke("plan", "--model", "tiny/qwen-image", "--json").stdout)
    assert document["duration_s"] == sum(case["duration_s"] for case in document["cases"])
    assert "Lightricks/LTX-2 @ 768x512x121, cfg:2 " in invoke("plan", "--suite", "parallel").stdout


def test_doctor_fails_only_with_strict(monkeypatch: pytest.MonkeyPatch):
    """Exit code 7 where something needed is missing and --strict asks for it."""
    from types import SimpleNamespace

    from bcgbench import environment

    missing = SimpleNamespace(name="GPU", ok=False, text="no CUDA device")
    unknown = SimpleNamespace(name="MIG", ok=None, text="does not apply")
    monkeypatch.setattr(environment, "doctor", lambda *, results: [unknown])
    assert invoke("doctor", "--strict").exit_code == 0
    monkeypatch.setattr(environment, "doctor", lambda *, results: [missing, unknown])
    assert invoke("doctor").exit_code == 0
    assert invoke("doctor", "--strict").exit_code == 7
    assert "no CUDA device" in invoke("doctor").stdout
    assert "cannot measure speed on the GPU: GPU" in invoke("doctor").stdout


# --- parts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "filled"),
    [
        (["--resume"], ["--resume", "latest"]),
        (["--resume", "--json"], ["--resume", "latest", "--json"]),
        (["--resume", "x"], ["--resume", "x"]),
        (["--json", "--resume=x"], ["--json", "--resume=x"]),
    ],
)
def test_a_bare_resume_means_the_latest(given: list[str], filled: list[str]):
    """The value of --resume may be left out."""
    assert cli_options.with_latest(given) == filled


def test_plain_progress_writes_at_most_one_line_per_period():
    """A log of a long run stays readable, and every line names its case."""
    stream, now = io.StringIO(), iter([0.0, 1.0, 9.9, 10.0, 25.0])
    shown = cli_progress.PlainDisplay(stream, names={"a": "[1/2] A", "b": "[2/2] B"}, clock=lambda: next(now))
    for case in ("a", "a", "b", "b", "b"):
        shown(make.progress(case=case))
    assert stream.getvalue().splitlines() == [
        "[1/2] A: measure bcg 3/10 step 7, about 12 s left",
        "[2/2] B: measure bcg 3/10 step 7, about 12 s left",
        "[2/2] B: measure bcg 3/10 step 7, about 12 s left",
    ]


def test_progress_fits_its_stream():
    """Nothing when quiet, plain lines into a file, a live line on a terminal."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    kinds = [
        type(cli_progress.display(stream, quiet=quiet, cases=())).__name__
        for stream, quiet in ((Terminal(), True), (io.StringIO(), False), (Terminal(), False))
    ]
    assert kinds == ["SilentDisplay", "PlainDisplay", "LiveDisplay"]


def test_the_live_line_shows_case_stage_and_arm():
    """And leaves nothing behind that would break the report below it."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with cli_progress.LiveDisplay(stream, names=cli_progress.case_names((make.case(),))) as shown:
        shown(make.progress(case=make.case().key))
        shown._bar.refresh()
    assert "[1/1] Qwen/Qwen-Image @ 512x512: measure bcg 3/10 step 7" in stream.getvalue()


def test_quiet_prints_no_progress(tmp_path: Path, fake_worker):
    """Only where the run lies and what came out."""
    done = invoke("run", *TINY, "--results", tmp_path, "--quiet")
    assert "measure bcg" not in done.stderr
    assert "measure bcg" in invoke("run", *TINY, "--results", tmp_path).stderr
