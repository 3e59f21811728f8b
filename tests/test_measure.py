"""measure, tap, clock: which times a request gets, what the tap replaces and restores, and the order of images."""

from __future__ import annotations

import copy
import inspect
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bcgbench.errors import BcgbenchError
from bcgbench.measure import (
    DenoiseTap,
    FakeClock,
    HostClock,
    check_calls,
    clock_for,
    peak,
    peak_reset,
    request,
    schedule,
    time_call,
)
from bcgbench.models.media import Media

REQUEST_TIMES = [
    0.0,  # the request begins, tap included
    1.0,  # generate is called
    3.0,  # the loop begins
    13.0,  # the loop has ended
    20.0,  # generate has returned
    21.0,  # the request has ended
]
MARKS = [100.0, 104.0, 107.0, 109.0, 109.5]
"""Loop begins, three steps end, loop ends."""


class Bar:
    """What tqdm offers to a pipeline."""

    def __init__(self, iterable=None, total=None):
        self.iterable, self.total, self.updates, self.is_closed, self.postfix = iterable, total, 0, False, None

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.is_closed = True

    def __iter__(self):
        return iter(self.iterable)

    def update(self, n=1):
        self.updates += n

    def set_postfix(self, **values):
        self.postfix = values


class Scheduler:
    """Adds one per step and counts its own steps, as diffusers' schedulers do."""

    def __init__(self):
        self.step_index = 0

    def step(self, model_output, timestep, sample, generator=None, return_dict=True):
        self.step_index += 1
        sample = sample + model_output
        return SimpleNamespace(prev_sample=sample) if return_dict else (sample,)


class Pipeline:
    """The denoise loop of a diffusers pipeline, with an audio scheduler copied as LTX-2 does."""

    def __init__(self, *, steps=3, fails_at=None):
        self.scheduler, self.steps, self.fails_at, self.bars = Scheduler(), steps, fails_at, []
        self.audio_scheduler = None

    def progress_bar(self, iterable=None, total=None):
        self.bars.append(Bar(iterable, total))
        return self.bars[-1]

    def __call__(self, *, return_dict=False):
        latents = torch.zeros(2)
        self.audio_scheduler = copy.deepcopy(self.scheduler)
        with self.progress_bar(total=self.steps) as bar:
            for i in range(self.steps):
                if i == self.fails_at:
                    raise RuntimeError("illegal memory access")
                result = self.scheduler.step(torch.ones(2), i, latents, return_dict=return_dict)
                latents = result.prev_sample if return_dict else result[0]
                self.audio_scheduler.step(torch.full((2,), -1.0), i, latents, return_dict=False)
                bar.update()
                bar.set_postfix(step=i)
        return latents


class Session:
    """As much of a loaded model as `request` uses."""

    def __init__(self, pipe=None):
        self.pipe, self.calls = pipe or Pipeline(), []

    def produce(self, prompt, *, steps=None):
        self.calls.append((prompt, steps))
        self.pipe()
        return Media(images=np.zeros((1, 4, 4, 3), dtype=np.uint8))


def device_clock():
    """A clock whose marks come from the device, as scripted."""
    return FakeClock(REQUEST_TIMES, marks=MARKS)


def test_a_request_is_split_into_its_stages():
    """Host times before, in and after the loop; the loop by the device too; steps from mark to mark."""
    session = Session()
    measured = request(session, 1, clock=device_clock(), steps=3)
    assert session.calls == [(1, 3)]
    assert measured.before_s == 2.0
    assert measured.denoise_host_s == 10.0
    assert measured.after_s == 7.0
    assert measured.denoise_event_s == 9.5
    assert measured.step_s == (4.0, 3.0, 2.0)
    assert measured.latents.tolist() == [3.0, 3.0]
    assert measured.loop_steps == (3,)
    assert measured.media.images.shape == (1, 4, 4, 3)


class Staged:
    """Two stages over one model, with work between them, as LTX-2's two-stage recipe."""

    def __init__(self, *, skipped=False):
        self.stages, self.skipped = (Pipeline(steps=2), Pipeline(steps=1)), skipped

    def __call__(self):
        self.stages[0]()
        if not self.skipped:
            self.stages[1]()


STAGE_TIMES = [0.0, 1.0, 3.0, 13.0, 20.0, 24.0, 30.0, 31.0]
"""Request, produce, first loop from 3 to 13, second from 20 to 24, produce returns, request ends."""


def test_two_loops_add_up_and_what_lies_between_counts_as_before_the_second():
    """Loops of 10 and 4 s; 2 s before the first and 7 s between them; steps in order, with each loop's number."""
    clock = FakeClock(STAGE_TIMES, marks=[100.0, 104.0, 109.0, 109.5, 200.0, 203.0, 203.5])
    seen = []
    measured = request(Session(Staged()), 0, clock=clock, on_step=seen.append)
    assert (measured.denoise_host_s, measured.before_s, measured.after_s) == (14.0, 9.0, 6.0)
    assert measured.denoise_event_s == 9.5 + 3.5
    assert measured.before_s + measured.denoise_host_s + measured.after_s == 30.0 - 1.0
    assert (measured.step_s, measured.loop_steps) == ((4.0, 5.0, 3.0), (2, 1))
    assert measured.latents.tolist() == [1.0, 1.0], "those of the last stage"
    assert seen == [0, 1, 2]


def test_a_stage_that_never_runs_is_an_error():
    """Its time would be missing from a total that claims to hold it."""
    with pytest.raises(BcgbenchError, match="never opened its progress bar"):
        request(Session(Staged(skipped=True)), 0, clock=HostClock())


def test_stages_that_are_listed_in_the_wrong_order_are_an_error():
    """The span between them would be negative."""
    staged = Staged()
    staged.stages = staged.stages[::-1]
    staged.__class__ = type("Reversed", (Staged,), {"__call__": lambda self: [s() for s in self.stages[::-1]]})
    with pytest.raises(BcgbenchError, match="one after the other"):
        request(Session(staged), 0, clock=HostClock())


def test_steps_without_a_hooked_call_are_an_error():
    """A second stage with a transformer of its own would run eagerly in every arm and be called exact."""
    measured = request(Session(Staged()), 0, clock=HostClock())
    assert check_calls(3, measured, Staged()) == 3
    with pytest.raises(BcgbenchError, match="Staged made 3 denoise steps and 2 calls of its hooked denoisers"):
        check_calls(2, measured, Staged())


def test_end_to_end_is_measured_on_its_own():
    """It is 21 s here although the stages sum to 19 s: a sum could never disagree with itself."""
    measured = request(Session(), 0, clock=device_clock())
    assert measured.end_to_end_s == 21.0
    assert measured.before_s + measured.denoise_host_s + measured.after_s == 19.0


def test_the_device_is_synchronised_around_the_loop_and_never_in_it():
    """A synchronise per step would take the host's run-ahead away: the count does not depend on the steps."""
    counts = []
    for steps in (1, 3):
        clock = FakeClock(REQUEST_TIMES, marks=range(steps + 2))
        request(Session(Pipeline(steps=steps)), 0, clock=clock)
        counts.append(clock.synchronized)
    assert counts == [4, 4]


def test_without_a_device_there_is_no_event_time():
    """On a CPU steps are timed by the host clock and the second clock is missing, not copied."""
    clock = FakeClock([0.0, 1.0, 3.0, 3.0, 4.0, 6.0, 9.0, 9.0, 9.0, 10.0, 11.0])
    measured = request(Session(), 0, clock=clock)
    assert measured.denoise_event_s is None
    assert measured.denoise_host_s == 6.0
    assert measured.step_s == (1.0, 2.0, 3.0)


def test_host_clock_times_a_request():
    """With real time, steps fill the span and the stages lie within the whole."""
    measured = request(Session(), 0, clock=HostClock())
    assert len(measured.step_s) == 3
    assert 0 < sum(measured.step_s) <= measured.denoise_host_s
    assert measured.before_s + measured.denoise_host_s + measured.after_s <= measured.end_to_end_s


def test_steps_are_announced():
    """A display learns of each finished step, from 0."""
    seen = []
    request(Session(), 0, clock=device_clock(), on_step=seen.append)
    assert seen == [0, 1, 2]


def test_a_request_can_be_stopped_between_steps():
    """What `on_step` raises ends the request, and everything is restored."""

    def stop(step):
        raise KeyboardInterrupt

    session = Session()
    with pytest.raises(KeyboardInterrupt):
        request(session, 0, clock=device_clock(), on_step=stop)
    assert "progress_bar" not in vars(session.pipe)
    assert session.pipe.bars[0].is_closed


def test_what_is_done_when_the_loop_ends_counts_nowhere():
    """Reading the GPU's clocks there, while it is warm, is 5 s of the clock: every stage is as without."""
    before, start, end, *after = REQUEST_TIMES[1:]
    times = [REQUEST_TIMES[0], before, start, end, end + 5, *(at + 5 for at in after)]
    told = []
    measured = request(Session(), 0, clock=FakeClock(times, marks=MARKS), on_end=lambda: told.append("GPU"))
    plain = request(Session(), 0, clock=device_clock())
    assert told == ["GPU"]
    for stage in ("before_s", "denoise_host_s", "denoise_event_s", "after_s", "end_to_end_s"):
        assert getattr(measured, stage) == getattr(plain, stage)


def test_the_pipeline_is_left_as_it_was():
    """Methods of the class are reachable again, and attributes set by others are put back."""
    pipe = Pipeline()
    own = pipe.scheduler.step = pipe.scheduler.step
    with DenoiseTap(pipe, FakeClock([0.0, 1.0], marks=MARKS)):
        assert pipe.scheduler.step is not own
        pipe()
    assert "progress_bar" not in vars(pipe)
    assert vars(pipe.scheduler)["step"] is own


def test_other_pipelines_are_not_touched():
    """Nothing is replaced on a class."""
    with DenoiseTap(Pipeline(), FakeClock([0.0, 1.0], marks=MARKS)) as tap:
        assert "progress_bar" not in vars(Pipeline())
        assert Pipeline.progress_bar.__module__ == Scheduler.step.__module__ == __name__
        tap._pipe()


def test_an_error_in_the_loop_is_not_hidden():
    """The device may be unusable, so it is not synchronised again; the bar is closed and the pipeline restored."""
    pipe, clock = Pipeline(fails_at=1), FakeClock([0.0], marks=MARKS)
    with pytest.raises(RuntimeError, match="illegal memory access"), DenoiseTap(pipe, clock):
        pipe()
    assert clock.synchronized == 1
    assert pipe.bars[0].is_closed
    assert "progress_bar" not in vars(pipe)
    assert "step" not in vars(pipe.scheduler)


def test_a_copied_scheduler_steps_itself():
    """LTX-2 copies its scheduler for the audio: a closure over the video's would step that one twice."""
    session = Session()
    measured = request(session, 0, clock=device_clock())
    assert (session.pipe.scheduler.step_index, session.pipe.audio_scheduler.step_index) == (3, 3)
    assert measured.latents.tolist() == [3.0, 3.0], "latents are those of the pipeline's own scheduler"


def test_the_signature_of_step_is_kept():
    """SANA passes `generator` only to a scheduler whose step names it; noise would change silently."""
    pipe = Pipeline()
    before = inspect.signature(pipe.scheduler.step)
    with DenoiseTap(pipe, FakeClock([0.0, 1.0], marks=MARKS)):
        assert inspect.signature(pipe.scheduler.step) == before
        pipe()


def test_latents_are_kept_without_a_copy():
    """The tensor of the last step itself: a copy would be work inside the span."""
    pipe = Pipeline()
    with DenoiseTap(pipe, FakeClock([0.0, 1.0], marks=MARKS)) as tap:
        latents = pipe()
    assert tap.latents is latents


def test_both_return_forms_of_a_scheduler_are_read():
    """A tuple or an output object."""
    pipe = Pipeline()
    with DenoiseTap(pipe, FakeClock([0.0, 1.0], marks=MARKS)) as tap:
        pipe(return_dict=True)
    assert tap.latents.tolist() == [3.0, 3.0]


def test_the_bar_keeps_its_other_methods():
    """Updates and postfixes still reach the pipeline's own bar."""
    session = Session()
    request(session, 0, clock=device_clock())
    (bar,) = session.pipe.bars
    assert (bar.total, bar.updates, bar.postfix) == (3, 3, {"step": 2})


def test_a_loop_over_the_bar_is_timed_too():
    """Older pipelines write `for t in self.progress_bar(timesteps)`."""
    pipe = Pipeline()
    with DenoiseTap(pipe, FakeClock([0.0, 10.0], marks=MARKS)) as tap:
        for t in pipe.progress_bar([3, 2, 1]):
            pipe.scheduler.step(torch.ones(2), t, torch.zeros(2))
    assert tap.step_s == (4.0, 3.0, 2.0)
    assert tap.denoise_host_s == 10.0


def run_nothing(pipe):
    """No bar."""


def update_never(pipe):
    """A bar without a step."""
    with pipe.progress_bar(total=1):
        pass


def close_never(pipe):
    """A bar that is left open."""
    pipe.progress_bar(total=1).__enter__().update()


def step_never(pipe):
    """A bar without the pipeline's scheduler."""
    with pipe.progress_bar(total=1) as bar:
        bar.update()


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (run_nothing, "never opened its progress bar"),
        (update_never, "never updated"),
        (close_never, "was not closed"),
        (step_never, "scheduler made no step"),
    ],
)
def test_a_loop_that_cannot_be_seen_is_an_error(run, message):
    """No time is better than the time of something else; the message names the pipeline."""
    pipe = Pipeline()
    with (
        pytest.raises(BcgbenchError, match=f"Pipeline.*{message}"),
        DenoiseTap(pipe, FakeClock([0.0, 1.0], marks=MARKS)),
    ):
        run(pipe)


def test_two_loops_in_one_request_are_an_error():
    """A prior and a decoder would be added up as one denoise loop."""
    pipe = Pipeline()
    with DenoiseTap(pipe, FakeClock([0.0, 1.0], marks=MARKS)):
        pipe()
        with pytest.raises(BcgbenchError, match="second progress bar"):
            pipe()


def test_times_before_the_request_are_an_error():
    """Not None, and not 0."""
    with pytest.raises(BcgbenchError, match="has not run"):
        _ = DenoiseTap(Pipeline(), FakeClock([])).denoise_host_s


def test_a_diffusers_pipeline_is_tapped():
    """The real base class: its own __setattr__, tqdm and an Euler scheduler. Latents equal an untapped run's."""
    diffusers = pytest.importorskip("diffusers")

    class Tiny(diffusers.DiffusionPipeline):
        def __init__(self, scheduler):
            super().__init__()
            self.register_modules(scheduler=scheduler)

        def __call__(self, steps):
            self.scheduler.set_timesteps(steps)
            latents = torch.ones(1, 4)
            with self.progress_bar(total=steps) as bar:
                for t in self.scheduler.timesteps:
                    latents = self.scheduler.step(latents * 0.5, t, latents, return_dict=False)[0]
                    bar.update()
            return latents

    pipe = Tiny(diffusers.FlowMatchEulerDiscreteScheduler())
    pipe.set_progress_bar_config(disable=True)
    expected = pipe(4)
    with DenoiseTap(pipe, HostClock()) as tap:
        pipe(4)
    assert torch.equal(tap.latents, expected)
    assert len(tap.step_s) == 4
    assert torch.equal(pipe(4), expected)


@pytest.mark.parametrize("arms", [["a", "b"], ["a", "b", "c"]])
def test_arms_are_interleaved(arms):
    """A B B A: forward in even rounds, reversed in odd ones, each arm once per round."""
    turns = list(schedule(arms, 4))
    for number in range(4):
        found = [(t.order, t.arm) for t in turns if t.round == number]
        assert found == list(enumerate(arms if number % 2 == 0 else arms[::-1]))


def test_a_block_of_two_rounds_has_one_prompt():
    """Were the prompt to change inside A B B A, its effect would not cancel."""
    prompts = {t.round: t.prompt for t in schedule(["a", "b"], 7, prompts=2)}
    assert [prompts[r] for r in range(7)] == [0, 0, 1, 1, 0, 0, 1]


def test_turns_unpack_in_order():
    """round, order, arm, prompt."""
    assert list(schedule(["a", "b"], 1)) == [(0, 0, "a", 0), (0, 1, "b", 0)]


def test_time_call_takes_the_median_after_one_untimed_call():
    """An outlier among the repeats does not move it; the first call, which fills caches, is not timed."""
    calls = []
    clock = FakeClock([0.0, 1.0, 10.0, 13.0, 20.0, 29.0])
    assert time_call(lambda: calls.append(1), repeats=3, clock=clock) == 3.0
    assert len(calls) == 4


def test_a_cpu_has_no_allocator_peak():
    """None, not 0: 0 would be a measurement."""
    peak_reset("cpu")
    assert peak("cpu") == (None, None)


def test_host_clock_waits_for_nothing_and_runs_forward():
    """Marks are host times on a CPU."""
    clock = clock_for("cpu")
    a = clock.mark()
    time.sleep(0.002)
    clock.synchronize()
    assert not clock.is_device_timed
    assert clock.elapsed_s(a, clock.mark()) >= 0.002
