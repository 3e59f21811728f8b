"""Cases on a cluster: records come home to the one journal, and a lost node costs no case."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from bcgbench import cli, cli_run, models, store, suite, worker_ray
from bcgbench.errors import EnvironmentFault
from bcgbench.runners import RUNNERS
from tests import factories as make
from tests import fake_bench

ROUNDS = 4


class Lost(Exception):
    """Stands in for Ray's error."""


class Raised(Lost):
    """Stands in for Ray's error of a task that raised."""


class FakeRay:
    """Ray's few calls in this process; the first `losses` tasks lose their node."""

    exceptions = SimpleNamespace(RayError=Lost, RayTaskError=Raised)

    def __init__(self, *, losses: int = 0) -> None:
        self.losses = losses
        self.asked: list[dict[str, Any]] = []

    def remote(self, function: Any) -> Any:
        """A task that is made when it is got."""

        def options(**needs: Any) -> Any:
            self.asked.append(needs)
            return SimpleNamespace(remote=lambda *args, **kwargs: functools.partial(function, *args, **kwargs))

        return SimpleNamespace(options=options)

    def nodes(self) -> list[dict[str, Any]]:
        """One node of one GPU."""
        return [{"Alive": True, "Resources": {"GPU": 1.0}}]

    def wait(self, tasks: list[Any], *, timeout: float) -> tuple[list[Any], list[Any]]:
        """One after the other."""
        return tasks[:1], tasks[1:]

    def get(self, task: Any) -> Any:
        """Run it here, or lose it."""
        self.losses -= 1
        if self.losses >= 0:
            raise Lost("node 1 died\nat night")
        try:
            return task()
        except OSError as error:
            raised = Raised("ray::measure_case() (pid=7, ip=10.0.0.1)\n  Traceback")
            raised.cause = error
            raise raised from error


def run_of(folder: Path, *, cases: int, **changes: Any) -> store.Run:
    """A run of small cases with two runners."""
    listed = tuple(make.case(seed=n, rounds=ROUNDS, runners=("eager", "bcg"), **changes) for n in range(cases))
    return store.create_run(folder, make.run_info(cases=listed))


def drive(run: store.Run, ray: Any, monkeypatch: pytest.MonkeyPatch, *, target: str = fake_bench.TARGET) -> None:
    """All cases of a run by a fake cluster."""
    monkeypatch.setattr(worker_ray, "_ray", lambda: ray)
    worker_ray.measure(run, run.info.cases, on_progress=lambda _: None, stop=threading.Event(), target=target)


def test_records_samples_and_logs_come_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The journal is that of a local run, and what records name lies in the run folder."""
    ray = FakeRay()
    with run_of(tmp_path, cases=2) as run:
        drive(run, ray, monkeypatch)
        assert [(record.status, record.attempt, len(record.samples)) for record in run.records()] == [
            ("OK", 1, ROUNDS)
        ] * 4
        assert len(list(run.logs.iterdir())) == 2
    assert store.open_run(run.path).records() == run.records()
    assert [(asked["num_gpus"], asked["max_retries"]) for asked in ray.asked] == [(1, 0), (1, 0)]


def test_a_resume_keeps_the_log_of_the_attempt_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each attempt has a log, and its records name it."""
    with run_of(tmp_path, cases=1) as run:
        for attempt in (1, 2):
            drive(run, FakeRay(), monkeypatch, target="tests.fake_bench:raises")
            logs = {path.relative_to(run.path).as_posix() for path in run.logs.iterdir()}
            assert len(logs) == attempt
            assert all(any(log in record.reasons[0].text for log in logs) for record in run.records())
            assert {f"logs/{record.case.key}.{record.attempt}.log" for record in run._records} == logs


def test_a_task_that_raises_is_no_lost_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It would raise again on any node; the record says what, not where Ray was when it noticed."""

    def measure_case(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(worker_ray, "measure_case", measure_case)
    with run_of(tmp_path, cases=1) as run:
        drive(run, FakeRay(), monkeypatch)
        assert {(record.status, record.attempt) for record in run.records()} == {("FAILED", 1)}
        reason = run.records()[0].reasons[0]
        assert (reason.code, reason.text) == ("crashed", "OSError: no space left")


@pytest.mark.parametrize(("losses", "status", "attempts"), [(1, "OK", 2), (2, "FAILED", 2)])
def test_a_lost_nodes_case_is_tried_once_more(
    losses: int, status: str, attempts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The loss is a record of its own attempt; after the second one a resume may try again."""
    with run_of(tmp_path, cases=1) as run:
        drive(run, FakeRay(losses=losses), monkeypatch)
        assert {(record.status, record.attempt) for record in run.records()} == {(status, attempts)}
        lost = [record for record in run._records if record.status == "FAILED"]
        assert {record.reasons[0].text for record in lost} == {"the node that ran it was lost: node 1 died"}
        assert run.is_complete(run.info.cases[0]) is (status == "OK")


def test_a_parallel_case_asks_for_a_gpu_per_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """And for none on a CPU."""
    case = make.case(parallel="cfg:2")
    assert (worker_ray._gpus(case), worker_ray._ranks(case)) == (2, 2)
    assert worker_ray._gpus(make.case(device="cpu")) == 0
    with run_of(tmp_path / "1", cases=1, device="cuda:1") as run, pytest.raises(Exception, match="give --device cuda"):
        drive(run, FakeRay(), monkeypatch)
    with run_of(tmp_path, cases=1, parallel="cfg:2") as run, pytest.raises(EnvironmentFault, match="a node of 2 GPUs"):
        drive(run, FakeRay(), monkeypatch)


def test_without_ray_the_way_on_is_named(monkeypatch: pytest.MonkeyPatch):
    """What to install is told, and nothing else needs it."""
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EnvironmentFault, match="pip install ray"):
        worker_ray._ray()


def test_without_ray_no_run_begins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Exit code 7 before there is a run folder, which would be the latest run."""
    monkeypatch.setitem(sys.modules, "ray", None)
    options = ["run", "--model", "tiny/z-image", "--executor", "ray", "--results", str(tmp_path / "none")]
    assert CliRunner().invoke(cli.app, options).exit_code == 7
    assert not (tmp_path / "none").exists()


# --- a real cluster of one machine ----------------------------------------------------------------------------------


REAL = pytest.mark.filterwarnings(  # Ray advises, and leaves files to the garbage collector
    "ignore::FutureWarning", "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head without room for tasks, and two nodes of one CPU each."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    nodes = [made.add_node(num_cpus=1) for _ in range(2)]
    ray.init(address=made.address, log_to_driver=False)
    yield SimpleNamespace(cluster=made, nodes=nodes)
    ray.shutdown()
    made.shutdown()
    gc.collect()


def smoke(folder: Path, name: str) -> store.Run:
    """A run of the smoke suite."""
    cases = suite.expand(suite.load_suite("smoke"), facts=models.facts, runner_names=RUNNERS)
    return store.create_run(folder, make.run_info(run_id=name, suite="smoke", cases=cases))


@REAL
def test_the_smoke_suite_ends_alike_on_a_cluster_and_here(cluster: Any, tmp_path: Path):
    """Same statuses, same verdicts, same outputs."""
    found = {}
    for executor in ("local", "ray"):
        with smoke(tmp_path, executor) as run:
            cli_run.measure(run, display=lambda _: None, stop=threading.Event(), executor=executor)
            report = cli_run.report_of(run)
        found[executor] = [(v.case.key, v.a, v.b, v.speed, v.exact, v.exit_code) for v in report.verdicts]
    assert {(speed, exact, code) for _, _, _, speed, exact, code in found["ray"]} == {("NOT-TIMED", True, 0)}
    assert found["ray"] == found["local"]


@REAL
def test_a_node_killed_in_mid_suite_loses_nothing(cluster: Any, tmp_path: Path):
    """Its case runs again on the other node, and the journal tells of both attempts."""

    def kill() -> None:
        time.sleep(2)
        cluster.cluster.remove_node(cluster.nodes[0], allow_graceful=False)

    killer = threading.Thread(target=kill)
    with run_of(tmp_path, cases=2, device="cpu") as run:
        killer.start()
        worker_ray.measure(
            run,
            run.info.cases,
            on_progress=lambda _: None,
            stop=threading.Event(),
            target="tests.fake_bench:takes_long",
        )
        killer.join()
        assert {record.status for record in run.records()} == {"OK"}
        assert sorted({record.attempt for record in run.records()}) == [1, 2]
