"""Behaviour of `bcgbench.outputs`, through `verdict.compare`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bcgbench.thresholds import Thresholds
from bcgbench.types import Record
from bcgbench.verdict import compare
from tests import factories as make
from tests.factories import codes, graph_record, inexact, record, unequal


def test_exact_outputs_are_called_exact() -> None:
    """No decibels for equal bytes."""
    found = compare(record(), graph_record())
    assert (found.exact, found.fidelity, found.padding) == (True, "exact", "exact")


def test_outputs_that_differ_exit_3_even_when_faster() -> None:
    """A wrong picture outranks every speed; the phrase gives size, place and first call."""
    found = compare(record(), graph_record(fidelity=(inexact(),)))
    assert (found.speed, found.exact, found.exit_code) == ("FASTER", False, 3)
    assert found.fidelity == "differs: max difference 3, PSNR 52.0 dB in image 0; 28 of 40 calls, first call 12"
    assert codes(found) == ["outputs-differ"]


def test_a_call_that_differs_counts_although_the_picture_is_equal() -> None:
    """One wrong transformer call hidden by rounding is still a difference."""
    hidden = make.fidelity(calls_exact=39, first_call=7, worst_call=unequal(name="call 7"))
    found = compare(record(), graph_record(fidelity=(hidden,)))
    assert (found.exact, found.exit_code) == (False, 3)
    assert found.fidelity == "differs: 1 of 40 calls, first call 7"


@pytest.mark.parametrize("fidelity", [(), (make.fidelity(latents=(), images=()),)])
def test_a_graph_arm_never_checked_is_not_fine(fidelity: Any) -> None:
    """Comparing nothing is not equality: exit 4, speed still shown."""
    found = compare(record(), graph_record(fidelity=fidelity))
    assert (found.speed, found.exact, found.fidelity, found.exit_code) == ("FASTER", None, "not judged", 4)
    assert codes(found) == ["fidelity-not-judged"]


def test_an_arm_without_graphs_need_not_be_checked() -> None:
    """Eager against eager asks no graph question."""
    found = compare(record(), record(run_id="another"))
    assert (found.exact, found.fidelity, found.exit_code) == (None, "not judged", 0)


def test_equal_outputs_of_an_arm_that_fell_back_prove_nothing() -> None:
    """They may be eager's own outputs."""
    found = compare(record(), graph_record(status="INVALID"))
    assert (found.exact, found.fidelity, found.exit_code) == (None, "not judged", 4)


def test_wrong_outputs_outrank_an_invalid_time() -> None:
    """Exit 3 before 4."""
    assert compare(record(), graph_record(status="INVALID", fidelity=(inexact(),))).exit_code == 3


def unstable() -> Record:
    """Eager that does not repeat itself: 52 dB in image 0."""
    return record(fidelity=(inexact(question="rerun"), make.fidelity(question="padding")))


def test_a_graph_no_worse_than_eager_against_itself_is_fine() -> None:
    """The phrase names the floor; `exact` stays False and the exit code 0."""
    found = compare(unstable(), graph_record(fidelity=(inexact(),)))
    assert (found.exact, found.exit_code) == (False, 0)
    floor = "no worse than eager (eager itself is not repeatable: differs: max difference 3, PSNR 52.0 dB in image 0"
    assert floor in found.fidelity


def test_a_graph_worse_than_the_floor_exits_3() -> None:
    """40 dB where eager repeats itself to 52 dB."""
    far = unequal(name="image 0", max_abs=30.0, psnr_db=40.0, data_range=255.0)
    found = compare(unstable(), graph_record(fidelity=(inexact(images=(far,)),)))
    assert found.exit_code == 3
    assert "worse than eager (eager itself is not repeatable" in found.fidelity


def test_a_floor_in_the_image_excuses_no_latents() -> None:
    """Eager repeats latents and calls exactly, so the graph must."""
    shaky = make.fidelity(question="rerun", images=inexact().images)
    found = compare(record(fidelity=(shaky,)), graph_record(fidelity=(inexact(),)))
    assert found.exit_code == 3


def test_a_floor_in_the_outputs_excuses_no_call() -> None:
    """Eager computes each call alike on equal inputs, so the graph must too."""
    steady = replace(inexact(question="rerun"), calls_exact=40, first_call=None, worst_call=None)
    assert compare(record(fidelity=(steady,)), graph_record(fidelity=(inexact(),))).exit_code == 3


@pytest.mark.parametrize(("max_abs", "code"), [(4.0, 0), (5.0, 3)])
def test_one_pixel_level_above_the_floor_is_granted(max_abs: float, code: int) -> None:
    """Eager differs from itself by 3 levels: 4 is noise, 5 is not, at equal PSNR."""
    image = unequal(name="image 0", max_abs=max_abs, psnr_db=52.0, data_range=255.0)
    assert compare(unstable(), graph_record(fidelity=(inexact(images=(image,)),))).exit_code == code


@pytest.mark.parametrize(("factor", "code"), [(1.1, 0), (1.2, 3)])
def test_latents_may_be_1_db_worse_than_the_floor(factor: float, code: int) -> None:
    """12 % in the largest difference; no pixel level is granted to latents."""
    latents = unequal(max_abs=0.015625 * factor)
    assert compare(unstable(), graph_record(fidelity=(inexact(latents=(latents,)),))).exit_code == code


def test_a_difference_without_finite_psnr_is_never_within_the_floor() -> None:
    """NaN latents are worse than any noise."""
    broken = unequal(psnr_db=None, max_abs=0.0)
    assert compare(unstable(), graph_record(fidelity=(inexact(latents=(broken,)),))).exit_code == 3


def test_an_exact_graph_stays_exact_over_an_unstable_eager() -> None:
    """The floor is mentioned, not applied."""
    found = compare(unstable(), graph_record())
    assert found.exact is True
    assert found.fidelity.startswith("exact (eager itself is not repeatable: ")


def test_the_floor_can_be_handed_in() -> None:
    """Two graph arms carry no rerun question of their own."""
    a, b = graph_record(), graph_record(runner="graph", fidelity=(inexact(),))
    assert compare(a, b).exit_code == 3
    assert compare(a, b, rerun=inexact(question="rerun")).exit_code == 0


def test_padding_is_reported_and_is_no_error() -> None:
    """Worst image with its size, whichever arm asked the question; exit 0."""
    padded = record(fidelity=(inexact(question="padding"),))
    assert compare(padded, graph_record()).padding == "max difference 3, PSNR 52.0 dB in image 0"
    assert compare(padded, graph_record()).exit_code == 0
    assert compare(record(fidelity=()), graph_record()).padding == ""


def test_padding_over_a_limit_exits_3() -> None:
    """Only when a limit is set."""
    padded = record(fidelity=(inexact(question="padding"),))
    found = compare(padded, graph_record(), thresholds=Thresholds(min_padding_psnr_db=60.0))
    assert (found.exit_code, codes(found)) == (3, ["padding-over-limit"])


def of_runs(**changes: Any) -> tuple[Record, Record]:
    """One graph arm in two runs with one prior; `changes` are those of the second."""
    settings = {"prior": "sha256:0123456789abcdef"}
    return graph_record(settings=settings), graph_record(**({"run_id": "b", "settings": settings} | changes))


def other_image() -> Any:
    """Run b made another picture, and its own eager reference with it."""
    image = make.difference(name="image 1", data_range=255.0, sha256_a="33" * 32, sha256_b="33" * 32)
    return make.fidelity(images=(make.difference(name="image 0", data_range=255.0), image))


def test_equal_digests_of_two_runs_are_the_same_outputs() -> None:
    """Across runs there is more to say than that each equals its own eager."""
    found = compare(*of_runs())
    assert (found.exact, found.fidelity, found.exit_code) == (True, "same outputs (4 digests)", 0)


def test_other_digests_from_one_prior_exit_3_and_are_named() -> None:
    """Exact in its own run, and yet not what the other run made."""
    found = compare(*of_runs(fidelity=(other_image(),)))
    assert (found.exact, found.exit_code, codes(found)[0]) == (False, 3, "outputs-differ")
    assert found.fidelity == "different outputs from one prior: image 1"


def test_other_digests_of_compiled_code_are_judged_by_its_reference() -> None:
    """Another process may choose other kernels, within tolerance of eager as the first ones."""
    question = make.fidelity(question="arithmetic", calls_exact=0)
    other = make.replace(other_image(), question="arithmetic", calls_exact=0)
    settings = {"prior": "sha256:0123456789abcdef"}
    found = compare(make.rival_record(settings=settings, fidelity=(question,)),
                    make.rival_record(settings=settings, fidelity=(other,), run_id="b"))  # fmt: skip
    assert (found.exact, found.exit_code) == (False, 0)
    assert found.fidelity.startswith("within tolerance")


def test_an_eager_that_does_not_repeat_itself_excuses_other_digests() -> None:
    """No run would make the same twice."""
    found = compare(*of_runs(fidelity=(other_image(),)), rerun=inexact(question="rerun"))
    assert (found.exact, found.exit_code) == (False, 0)
    assert "eager itself is not repeatable" in found.fidelity


def test_wrong_outputs_of_a_run_are_not_hidden_by_another_prior() -> None:
    """Its graph differs from its own eager, whatever the noise."""
    found = compare(*of_runs(fidelity=(inexact(),), settings={"prior": "sha256:ffff"}))
    assert found.exit_code == 3
    assert found.fidelity.startswith("differs: ")


@pytest.mark.parametrize("changes", [{"settings": {}}, {"environment": make.environment(python="3.13")}])
def test_outputs_of_runs_that_are_not_alike_are_not_compared(changes: dict[str, Any]) -> None:
    """Without a known prior, or on other software, unequal digests say nothing."""
    assert compare(*of_runs(fidelity=(other_image(),), **changes)).fidelity == "exact"


def test_requests_that_differ_while_every_call_is_exact_say_so() -> None:
    """Each call is right on its own inputs: an overwritten output, or settings of one arm."""
    late = make.fidelity(latents=(unequal(),))
    assert compare(record(), graph_record(fidelity=(late,))).fidelity.endswith("each of 40 calls alone exact")


def test_noise_that_differs_per_request_excuses_no_graph() -> None:
    """Eager repeats all calls and no request: that is no noise of kernels, and pictures cannot be judged."""
    other = make.fidelity(question="rerun", latents=(unequal(), unequal(name="latents 1")))
    found = compare(record(fidelity=(other,)), graph_record(fidelity=(make.fidelity(latents=(unequal(),)),)))
    assert (found.exact, found.exit_code, found.reasons[0].code) == (None, 4, "requests-unlike")


def test_an_eager_that_changed_after_its_requests_excuses_no_graph() -> None:
    """All requests repeat, then not one call does: something was switched."""
    switched = inexact(question="rerun", calls_exact=0, first_call=0, latents=make.fidelity().latents)
    found = compare(record(fidelity=(switched,)), graph_record(fidelity=(inexact(),)))
    assert (found.exact, found.exit_code, found.reasons[0].code) == (None, 4, "eager-changed")


def test_an_exact_graph_stays_exact_whatever_eager_does() -> None:
    """It equals padded eager bit for bit in the same process."""
    other = make.fidelity(question="rerun", latents=(unequal(), unequal(name="latents 1")))
    assert compare(record(fidelity=(other,)), graph_record()).exact


@pytest.mark.parametrize(("own", "code"), [(0.0, 3), (0.5, 4)])
def test_what_eager_does_to_itself_is_not_charged_to_padding(own: float, code: int) -> None:
    """Padded eager is as far from the traced call as unpadded eager is: no mask is missing."""
    case = make.case(dtype="float32")
    moved = unequal(name="call 3", max_abs=0.5)
    padding = inexact(question="padding", worst_call=moved)
    rerun = make.fidelity(question="rerun", calls_exact=0 if own else 40, worst_call=moved if own else None)
    wrong = inexact() if own else make.fidelity()
    found = compare(record(case=case, fidelity=(rerun,)), graph_record(case=case, fidelity=(wrong, padding)))
    assert found.exit_code == code
    assert ("padding-over-limit" in [reason.code for reason in found.reasons]) is not bool(own)
