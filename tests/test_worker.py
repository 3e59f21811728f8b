"""A case in its own process: any death becomes a record, a stop keeps what was measured, a resume completes it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from bcgbench import child, errors, store, worker
from tests import factories as make
from tests import fake_bench

ROOT = Path(__file__).parents[1]
ROUNDS = 8


def new_run(results: Path, *, cases: int = 1, name: str = "run", **changes):
    """A run of small cases with two runners."""
    listed = tuple(make.case(seed=i, rounds=ROUNDS, runners=("eager", "bcg"), **changes) for i in range(cases))
    return store.create_run(results, make.run_info(run_id=name, cases=listed))


def run_target(results: Path, name: str, **changes):
    """The records after one attempt of one case with a function of fake_bench, and the run."""
    with new_run(results, **changes) as run:
        worker.run_case(run.info.cases[0], run, target=f"tests.fake_bench:{name}")
        assert store.open_run(run.path).records() == run.records()
        return run.records(), run


def essence(run):
    """What a verdict reads: independent of when, and in which attempt, it was measured."""
    return [(r.case.key, r.runner, r.status, r.reasons, r.samples) for r in run.records()]


def is_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition, *, limit_s: float = 5.0) -> bool:
    """Whether the condition came true in time."""
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        if condition():
            return True
        time.sleep(0.01)
    return False


# --- an ordinary case -----------------------------------------------------------------------------------------------


def test_a_case_is_journaled_as_it_goes(tmp_path):
    """Samples come first, in the order measured, then the records; progress is shown and not stored."""
    seen = []
    with new_run(tmp_path) as run:
        case = run.info.cases[0]
        worker.run_case(case, run, target=fake_bench.TARGET, on_progress=seen.append)
        kinds = [json.loads(line)["kind"] for line in (run.path / store.JOURNAL).read_text().splitlines()]
    assert kinds == ["run"] + ["sample"] * 2 * ROUNDS + ["record"] * 2
    assert [(p.arm, p.done) for p in seen] == [(arm, i) for i in range(ROUNDS) for arm in ("eager", "bcg")]
    assert run.is_complete(case)
    assert run.records()[1].samples == run.samples(case.key, attempt=1, runner="bcg")


def test_what_libraries_print_lands_in_the_log(tmp_path):
    """Neither Python's print nor C's printf can forge or break an event, and stdin is empty for them."""
    records, run = run_target(tmp_path, "prints")
    assert [record.status for record in records] == ["OK", "OK"]
    (log,) = run.logs.iterdir()
    assert {'{"kind": "record", "data": {}}', "printf from C"} <= set(log.read_text().splitlines())
    assert "a warning" in log.read_text()


def test_a_module_in_the_current_folder_does_not_shadow_the_standard_library(tmp_path, monkeypatch):
    """A user's random.py next to the results must not be what the worker imports."""
    (tmp_path / "random.py").write_text("raise RuntimeError('shadowed')")
    monkeypatch.chdir(tmp_path)
    records, _ = run_target(tmp_path, "prints")
    assert [record.status for record in records] == ["OK", "OK"]


# --- deaths ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "code", "words"),
    [
        (
            "exits",
            "crashed",
            "exit code 3 in stage measure of eager 1/8; last words: 'RuntimeError: CUDA error: an ille",
        ),
        (
            "segfaults",
            "crashed",
            "ended by SIGSEGV in stage measure of eager 1/8; last words: 'Fatal Python error: Segm",
        ),
        ("raises", "crashed", "ZeroDivisionError: 1/0 in the bench (log: logs/"),
        ("leaves", "crashed", "exit code 1 before it reported anything; last words: 'cannot go on'"),
        ("ends_early", "crashed", "ended without a record"),
        ("refuses", "usage", "weights cannot be both"),
        ("lacks", "environment", "no GPU here"),
        ("fills_memory", "out-of-memory", "Unable to allocate 8.00 GiB; use a smaller"),
        ("not_a_number", "store", "Sample.step_s[0] is nan"),
        ("does_not_exist", "crashed", "AttributeError"),
    ],
)
def test_any_death_becomes_a_record_for_every_runner(tmp_path, target, code, words):
    """Status, reason and what to look at; samples that had arrived stay with their runner."""
    records, run = run_target(tmp_path, target)
    assert [(r.runner, r.status, r.reasons[0].code) for r in records] == [
        ("eager", "FAILED", code),
        ("bcg", "FAILED", code),
    ]
    assert words in records[0].reasons[0].text
    assert f"logs/{run.info.cases[0].key}.1.log" in records[0].reasons[0].text
    measured = 1 if target in {"exits", "segfaults", "raises"} else 0
    assert [len(r.samples) for r in records] == [measured, measured]
    assert run.is_complete(run.info.cases[0]) is (code in {"usage", "store"})


def test_a_traceback_goes_to_the_log(tmp_path):
    """The record has the type and the message, the log has where."""
    _, run = run_target(tmp_path, "raises")
    (log,) = run.logs.iterdir()
    assert "in raises" in log.read_text()


def test_an_arm_that_finished_keeps_its_record(tmp_path):
    """Only the runners without a record get a FAILED one."""
    (eager, bcg), _ = run_target(tmp_path, "half")
    assert eager.status == "OK"
    assert (bcg.status, bcg.reasons[0].code, len(bcg.samples)) == ("FAILED", "crashed", 1)
    assert "SIGABRT" in bcg.reasons[0].text


def test_a_death_is_noticed_while_something_holds_the_pipe_open(tmp_path):
    """A process forked by the case inherits its descriptors; waiting for their end would wait for it."""
    began_s = time.monotonic()
    records, run = run_target(tmp_path, "keeps_pipe_open")
    assert time.monotonic() - began_s < 3
    os.kill(int((run.path / "forked.pid").read_text()), signal.SIGKILL)
    assert "exit code 4" in records[0].reasons[0].text


@pytest.mark.parametrize(
    ("target", "where", "samples"), [("hangs", "in stage measure", 1), ("hangs_silently", "before", 0)]
)
def test_a_hung_case_is_ended_at_its_time_limit(tmp_path, target, where, samples):
    """The samples stay, the record says where it hung, and the log shows the stacks."""
    began_s = time.monotonic()
    records, run = run_target(tmp_path, target, timeout_s=1.0)
    assert time.monotonic() - began_s < 4
    assert {r.reasons[0].code for r in records} == {"timeout"}
    text = records[0].reasons[0].text
    assert f"not finished after 1 s, {where}" in text
    assert re.search(rf"\(at fake_bench.py:\d+ \({target}\)", text)
    assert [len(r.samples) for r in records] == [samples, samples]
    (log,) = run.logs.iterdir()
    assert f"in {target}" in log.read_text()


def test_a_worker_that_cannot_start_is_a_fault_of_the_environment(tmp_path, monkeypatch):
    """No process, no exception: the case has its records and the next one gets its turn."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    records, _ = run_target(tmp_path, "run_case")
    assert [r.reasons[0].code for r in records] == ["environment", "environment"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ReplayError("x"), "replay-failed"),
        (errors.ProcessPoisoned("x"), "process-poisoned"),
        (errors.BcgbenchError("x"), "failed"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes"),
            "out-of-memory",
        ),
        (RuntimeError("x"), "crashed"),
        (ExceptionGroup("x", [ValueError()]), "crashed"),
    ],
)
def test_reason_codes(error, code):
    """The nearest class of the error tree decides; what is no error of ours is a crash."""
    assert child.reason_of(error).code == code


def test_cuda_out_of_memory_keeps_the_figures():
    """torch's message without its advice on fragmentation, which does not fit a benchmark."""
    torch = pytest.importorskip("torch")
    message = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB"
    reason = child.reason_of(torch.OutOfMemoryError(message + ". If reserved but unallocated memory is large try ..."))
    assert reason.code == "out-of-memory"
    assert reason.text.startswith(message)
    assert "If reserved" not in reason.text


# --- stopping -------------------------------------------------------------------------------------------------------


def test_first_stop_finishes_the_image_and_keeps_it(tmp_path):
    """The process gets SIGINT, writes its records and ends by itself."""
    stop = threading.Event()
    with new_run(tmp_path) as run:
        case = run.info.cases[0]

        def ask(progress):
            if progress.done == 3:
                stop.set()

        worker.run_case(case, run, target=fake_bench.TARGET, on_progress=ask, stop=stop)
        records = run.records()
        assert [(r.status, r.reasons[0].text) for r in records] == [("FAILED", "asked to")] * 2
        assert 3 <= len(records[0].samples) < ROUNDS
        assert not run.is_complete(case)
        worker.run_case(case, run, target=fake_bench.TARGET, stop=stop)
        assert run.next_attempt(case.key) == 2  # once stopped, nothing more is started


@pytest.mark.parametrize("how", ["event", "exception"])
def test_second_stop_ends_the_process_at_once(tmp_path, how):
    """By the kill event or by a KeyboardInterrupt in the parent; the samples are kept as "interrupted"."""
    stop, kill = threading.Event(), threading.Event()

    def interrupt(_):
        if how == "exception":
            raise KeyboardInterrupt
        stop.set()
        kill.set()

    began_s = time.monotonic()
    expected = pytest.raises(KeyboardInterrupt) if how == "exception" else contextlib.nullcontext()
    with new_run(tmp_path) as run:
        with expected:
            worker.run_case(
                run.info.cases[0], run, target="tests.fake_bench:hangs", on_progress=interrupt, stop=stop, kill=kill
            )
        records = run.records()
    assert time.monotonic() - began_s < 3
    assert [r.reasons[0].code for r in records] == ["interrupted", "interrupted"]


def test_terminal_interrupt_reaches_only_the_parent(tmp_path):
    """The child has a session of its own, so the terminal's SIGINT does not go to it."""
    sessions = []

    def note(_):
        with contextlib.suppress(ProcessLookupError):  # it may have ended before its last words are read
            sessions.append(os.getsid(int(pid_file.read_text())))

    with new_run(tmp_path) as run:
        pid_file = run.path / "worker.pid"
        worker.run_case(run.info.cases[0], run, target=fake_bench.TARGET, on_progress=note)
        assert set(sessions) == {int(pid_file.read_text())}
    assert os.getsid(0) not in sessions


# --- kill -9 and resume ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What two cases give when nothing happens."""
    with new_run(tmp_path_factory.mktemp("undisturbed"), cases=2) as run:
        path = run.path
    fake_bench.drive(path)
    return essence(store.open_run(path))


def check_complete(path: Path, undisturbed) -> None:
    """The run ends with the records of an undisturbed one, and its journal has every number once."""
    run = store.open_run(path)
    assert essence(run) == undisturbed
    lines = (path / store.JOURNAL).read_text().splitlines()
    assert [json.loads(line)["seq"] for line in lines] == list(range(len(lines)))


def worker_pid(path: Path) -> int | None:
    """Process id of the latest worker, once it has written it."""
    with contextlib.suppress(OSError, ValueError):
        return int((path / "worker.pid").read_text())
    return None


@pytest.mark.parametrize("seed", range(4))
def test_resume_after_the_worker_was_killed(tmp_path, undisturbed, seed):
    """kill -9 of the child at any moment leaves "crashed" records, and a resume measures the case again."""
    chance = random.Random(seed)
    with new_run(tmp_path, cases=2) as run:
        path = run.path

    def kill():
        if wait_for(lambda: worker_pid(path)):
            time.sleep(chance.random() * 2 * ROUNDS * fake_bench.IMAGE_S)
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker_pid(path), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    fake_bench.drive(path)
    killer.join()
    failed = [r for r in store.open_run(path).records() if r.status == "FAILED"]
    assert {r.reasons[0].code for r in failed} <= {"crashed"}
    fake_bench.drive(path)
    check_complete(path, undisturbed)


def driving(path: Path, *, target: str = fake_bench.TARGET) -> subprocess.Popen:
    """A process that runs what a run folder lacks, as `bcgbench run` does."""
    call = f"fake_bench.drive(Path({str(path)!r}), target={target!r})"
    code = f"from pathlib import Path; from tests import fake_bench; {call}"
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)


def test_a_case_that_says_nothing_ends_with_its_parent(tmp_path):
    """A load or a long step writes no event that would fail: the child must notice by itself, or it keeps the GPU."""
    with new_run(tmp_path) as run:
        path = run.path
    parent = driving(path, target="tests.fake_bench:hangs_silently")
    assert wait_for(lambda: worker_pid(path))
    parent.kill()
    parent.wait()
    assert wait_for(lambda: not is_alive(worker_pid(path)), limit_s=2)


@pytest.mark.parametrize("seed", range(6))
def test_resume_after_the_parent_was_killed(tmp_path, undisturbed, seed):
    """kill -9 of the parent ends the child within moments, and the journal it left is completed by a resume."""
    chance = random.Random(100 + seed)
    with new_run(tmp_path, cases=2) as run:
        path = run.path
    parent = driving(path)
    assert wait_for(lambda: worker_pid(path))
    time.sleep(chance.random() * 5 * ROUNDS * fake_bench.IMAGE_S)
    parent.kill()
    parent.wait()
    assert wait_for(lambda: not is_alive(worker_pid(path)), limit_s=2)
    assert wait_for(lambda: _resumed(path), limit_s=10)
    check_complete(path, undisturbed)


def _resumed(path: Path) -> bool:
    """Drive the run; False while a child that was being started still holds the lock of the killed parent."""
    try:
        fake_bench.drive(path)
    except errors.StoreError as error:
        if "being written" not in str(error):
            raise
        return False
    return True


# --- the parent's side ----------------------------------------------------------------------------------------------


def test_watching_a_case_does_not_import_torch():
    """The parent's memory and start-up stay small; only the child loads torch."""
    code = "import sys; from bcgbench import worker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ""),
        ("a\n\n \n", "a"),
        ("ValueError: bad\nat exit\n", "ValueError: bad"),
        (
            "torch.AcceleratorError: CUDA error: misaligned address\nCUDA kernel errors might be\n",
            "torch.AcceleratorError: ",
        ),
        (" 10%|#\r 20%|##\r", "20%|##"),
        ("x" * 1000, "x" * 300),
        ("\xff", "\ufffd"),
    ],
)
def test_last_words_of_a_log(tmp_path, text, line):
    """An error line if there is one, else the last line that is not blank, cut to a readable length."""
    log = tmp_path / "log"
    log.write_bytes(text.encode("latin-1"))
    found = worker.last_telling_line(log)
    assert found.startswith(line)
    assert len(found) <= 300
    assert worker.last_telling_line(tmp_path / "absent") == ""
