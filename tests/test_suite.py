"""Suites: what a file or a flag says becomes cases, and what is wrong is named before anything is loaded."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bcgbench import models, suite
from bcgbench.cases import nearest_sizes
from bcgbench.errors import UsageError
from bcgbench.thresholds import DEFAULTS
from tests import factories as make

BUILT_IN = ("engine", "parallel", "pr27436", "prompt_length", "resolution", "rivals", "seeds", "smoke", "tiny")


def facts(model):
    """An image model with multiples of 16, a tiny one, and a video model."""
    known = {
        "big": make.model_facts(id="big"),
        "tiny/one": make.model_facts(id="tiny/one", width_px=64, height_px=64, steps=4, tiny=True),
        "video": make.model_facts(id="video", width_px=832, height_px=480, frames=81),
    }
    return known[model]


def write(folder: Path, text: str) -> Path:
    """A suite file."""
    path = folder / "mine.toml"
    path.write_text(text)
    return path


def cases_of(folder: Path, text: str, **overrides):
    """The cases of a suite text."""
    return suite.expand(suite.load_suite(write(folder, text)), facts=facts, overrides=overrides)


# --- resolutions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [("512x512", (512, 512, None)), ("768x512x121", (768, 512, 121)), (" 1024X64 ", (1024, 64, None))],
)
def test_resolution_is_width_height_frames(text, expected):
    """Width first, as in every image viewer."""
    assert suite.parse_resolution(text) == expected


@pytest.mark.parametrize(
    "text", ["", "512", "512x", "x512", "512*512", "0x512", "-5x5", "512x512x0", "5.5x5", "axb", "\u0665x\u0665"]
)
def test_malformed_resolution_says_what_is_expected(text):
    """No guess is made from half a size."""
    with pytest.raises(UsageError, match=r"malformed resolution .* expected WxH \(512x512\)"):
        suite.parse_resolution(text)


def test_size_between_multiples_names_the_multiple_and_the_nearest():
    """Nothing is rounded: the four sizes around are offered, the nearest first."""
    with pytest.raises(UsageError) as caught:
        suite.make_case("big", facts=facts, resolution="500x520")
    expected = "500x520 is not possible: big needs multiples of 16 pixels; nearest: 496x512, 496x528, 512x512, 512x528"
    # 500 lies 4 above 496, 520 lies 8 from both neighbours
    assert str(caught.value) == expected


@given(st.integers(1, 4000), st.integers(1, 4000), st.sampled_from([4, 8, 16, 32]))
def test_nearest_sizes_are_possible_and_near(width, height, multiple):
    """Every offered size is a positive multiple less than one multiple away, unless the side is below one multiple."""
    for text in nearest_sizes(width, height, multiple_px=multiple):
        for side, asked in zip(suite.parse_resolution(text)[:2], (width, height), strict=True):
            assert side % multiple == 0
            assert abs(side - asked) < multiple


def test_frames_are_for_videos_only():
    """An image model does not drop the frames silently; a video model without frames takes its own."""
    with pytest.raises(UsageError, match="big makes images, so give WxH"):
        suite.make_case("big", facts=facts, resolution="512x512x9")
    assert suite.make_case("video", facts=facts, resolution="640x480").frames == 81
    assert suite.make_case("video", facts=facts, resolution="640x480x9").frames == 9


# --- one case -------------------------------------------------------------------------------------------------------


def test_what_is_left_out_comes_from_the_model():
    """Size and steps are the model's; the GPU is the default, in bfloat16."""
    case = suite.make_case("big", facts=facts)
    assert (case.resolution, case.steps, case.guidance, case.device, case.dtype) == (
        "1328x1328", 50, None, "cuda", "bfloat16",
    )  # fmt: skip
    assert case.prompts == (suite.SHORT_PROMPT, suite.LONG_PROMPT)


@pytest.mark.parametrize(
    ("model", "given", "device", "dtype"),
    [
        ("tiny/one", {}, "cpu", "float32"),
        ("tiny/one", {"device": "cuda"}, "cuda", "bfloat16"),
        ("tiny/one", {"dtype": "bfloat16"}, "cpu", "bfloat16"),
        ("big", {"device": "cpu"}, "cpu", "float32"),
        ("big", {"device": "cuda:1"}, "cuda:1", "bfloat16"),
    ],
)
def test_device_and_dtype_defaults(model, given, device, dtype):
    """A tiny model runs without a GPU unless one is asked for; dtype follows the device unless given."""
    case = suite.make_case(model, facts=facts, **given)
    assert (case.device, case.dtype) == (device, dtype)


def test_same_case_written_twice_has_one_key():
    """A whole number where a fraction is possible makes no other case."""
    whole = suite.make_case("big", facts=facts, guidance=4, buckets=[64])
    assert whole.key == suite.make_case("big", facts=facts, guidance=4.0, buckets=(64,)).key


@pytest.mark.parametrize("prompts", [["a cube", ""], [" \n", "a cube"]])
def test_empty_prompt_is_refused(prompts):
    """An empty prompt is a mistake in a script more often than a wish."""
    with pytest.raises(UsageError, match=r"prompt [12] is empty"):
        suite.make_case("big", facts=facts, prompts=prompts)


@pytest.mark.parametrize("prompts", [[], ["a cube"], ["a cube", "a cube"]])
def test_two_different_prompts_are_needed(prompts):
    """With one prompt a graph that replays stale inputs would look right."""
    with pytest.raises(UsageError, match="at least 2 different prompts"):
        suite.make_case("big", facts=facts, prompts=prompts)


def test_token_counts_go_with_the_prompts():
    """One count per prompt."""
    with pytest.raises(UsageError, match="token_counts has 1 entries for 2 prompts"):
        suite.make_case("big", facts=facts, token_counts=[8], prompts=suite.DEFAULT_PROMPTS)


def test_token_counts_alone_name_their_prompts():
    """Lengths to sweep need no texts; with real weights a tokenizer would count the made-up ones otherwise."""
    swept = suite.make_case("big", facts=facts, token_counts=[63, 128, 63], weights="random")
    assert swept.prompts == ("a prompt of 63 tokens", "a prompt of 128 tokens", "a prompt of 63 tokens")
    assert suite.make_case("big", facts=facts, token_counts=[13, 31]).prompts == suite.DEFAULT_PROMPTS
    with pytest.raises(UsageError, match="random weights only: give prompts"):
        suite.make_case("big", facts=facts, token_counts=[63, 128, 63])


def test_only_keeps_the_cases_that_are_named(tmp_path):
    """Part of a name in any letter case, or a whole id, which must not take along the ids that begin like it."""
    known = {name: make.model_facts(id=name) for name in ("a/LTX-2", "a/LTX-2.3", "b/big")}
    cases = [
        suite.make_case(name, facts=known.__getitem__, resolution=size) for name in known for size in ("64x64", "96x96")
    ]
    assert suite.only(cases, ()) == tuple(cases)
    assert [case.model for case in suite.only(cases, ["a/LTX-2"])] == ["a/LTX-2"] * 2
    assert suite.only(cases, ["ltx", "big @ 64"]) == tuple(cases[:5])
    with pytest.raises(UsageError, match="no case fits 'wan'; there are a/LTX-2 @ 64x64, a/LTX-2 @ 96x96"):
        suite.only(cases, ["big", "wan"])


def test_unknown_runner_names_the_nearest():
    """The caller says which runners exist; without it they are not checked."""
    names = ("eager", "bcg", "graph")
    with pytest.raises(UsageError, match=r"unknown runner 'grap'; did you mean 'graph'\? There are eager, bcg, graph"):
        suite.make_case("big", facts=facts, runners=["eager", "grap"], runner_names=names)
    assert suite.make_case("big", facts=facts, runners=["grap", "grap"]).runners == ("grap",)


# --- files ----------------------------------------------------------------------------------------------------------


def test_lists_are_multiplied_in_the_order_written(tmp_path):
    """Model varies slowest, then resolution, steps and seed; defaults fill in, a case wins over them."""
    text = """
        [suite]
        description = "d"
        [suite.defaults]
        rounds = 3
        steps = 5
        [[case]]
        model = ["big", "tiny/one"]
        resolution = ["32x32", "64x32"]
        seed = [1, 2]
        [[case]]
        model = "big"
        steps = 9
        break = "none"
    """
    assert suite.load_suite(write(tmp_path, text)).name == "mine"
    found = [(c.model, c.resolution, c.seed, c.steps, c.rounds) for c in cases_of(tmp_path, text)]
    product = [(m, r, s, 5, 3) for m in ("big", "tiny/one") for r in ("32x32", "64x32") for s in (1, 2)]
    assert found == [*product, ("big", "1328x1328", 42, 9, 3)]
    assert cases_of(tmp_path, text)[-1].break_policy == "none"


def test_overrides_replace_a_key_everywhere_and_equal_cases_run_once(tmp_path):
    """A flag wins over the suite; None is a flag that was not given."""
    text = '[[case]]\nmodel = "big"\nresolution = ["32x32", "64x64"]\nguidance = 2.0'
    cases = cases_of(tmp_path, text, resolution="48x48", rounds=7, guidance=None)
    assert [(c.resolution, c.rounds, c.guidance) for c in cases] == [("48x48", 7, 2.0)]


def test_new_prompts_drop_the_token_counts_of_the_old(tmp_path):
    """Counts of other prompts would be wrong silently."""
    text = '[[case]]\nmodel = "big"\ntoken_counts = [8, 26]'
    assert cases_of(tmp_path, text)[0].token_counts == (8, 26)
    assert cases_of(tmp_path, text, prompts=["one", "two"])[0].token_counts is None
    assert cases_of(tmp_path, text, prompts=["one", "two"], token_counts=[1, 2])[0].token_counts == (1, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '[[case]]\nmodel = "big"\nstep = 3',
            r"mine.toml: case 1: unknown key 'step'; did you mean 'steps'\? Allowed: ",
        ),
        ('[[case]]\nmodel = "big"\n[[case]]\nqqq = 1', r"case 2: unknown key 'qqq'\. Allowed: model, resolution"),
        ('[suite]\ntitle = "x"\n[[case]]\nmodel = "big"', r"\[suite\]: unknown key 'title'"),
        ('[suite.defaults]\nround = 1\n[[case]]\nmodel = "big"', r"\[suite.defaults\]: unknown key 'round'"),
        ('[cases]\nmodel = "big"', "unknown key 'cases'; did you mean 'case'"),
        ('[case]\nmodel = "big"', r"no case: add at least one \[\[case\]\] table"),
        ("[suite]\nname = 3\n[[case]]", "name = 3: expected a text"),
        ("suite = 1", "expected a table"),
        ("", "has no case"),
        ("[[case]]\nmodel = big", "not valid TOML: .*line 2"),
        ("[[case]]\nsteps = 1", "case 1: no model"),
        ('[[case]]\nmodel = "big"\nsteps = "8"', "case 1: steps = '8': expected a whole number from 1, or a list"),
        ('[[case]]\nmodel = "big"\nsteps = []', r"steps = \[\]: expected"),
        ('[[case]]\nmodel = "big"\nsteps = [1, 0]', "steps = .*expected a whole number from 1"),
        ('[[case]]\nmodel = "big"\nrounds = true', "rounds = True: expected a whole number from 1"),
        ('[[case]]\nmodel = "big"\nguidance = nan', "guidance = nan: expected a number from 0"),
        ('[[case]]\nmodel = "big"\nguidance = false', "guidance = False: expected a number"),
        ('[[case]]\nmodel = "big"\ntimeout_s = inf', "timeout_s = inf: expected seconds above 0"),
        ('[[case]]\nmodel = "big"\nprompts = "one"', "prompts = 'one': expected a list of texts"),
        ('[[case]]\nmodel = "big"\nweights = "none"', "expected pretrained or random"),
        ('[[case]]\nmodel = "big"\ndtype = ["float32"]', "expected bfloat16, float16 or float32"),
        ('[[case]]\nmodel = "big"\ndevice = "gpu"', "expected cpu, cuda or cuda:N"),
        ('[[case]]\nmodel = "big"\nrunners = []', "expected a list of runner names"),
        ('[[case]]\nmodel = "big"\nprofile = 1', "expected true or false"),
        ('[[case]]\nmodel = "big"\nresolution = "500x512"', "mine.toml: case 1: 500x512 is not possible: big needs"),
        (
            '[[case]]\nmodel = "big"\n[[case]]\nmodel = "big"\nrounds = 3',
            "case 2: big at 1328x1328 stands in the suite",
        ),
    ],
)
def test_a_mistake_in_a_suite_is_named_with_its_place(tmp_path, text, message):
    """File, case and key, what was expected and what comes nearest."""
    with pytest.raises(UsageError, match=message):
        cases_of(tmp_path, text)


def test_override_that_does_not_exist_is_refused(tmp_path):
    """A flag goes through the same check as a file."""
    with pytest.raises(UsageError, match="unknown key 'round'; did you mean 'rounds'"):
        cases_of(tmp_path, '[[case]]\nmodel = "big"', round=3)


def test_unknown_suite_names_the_nearest():
    """A misspelt name lists what is built in; a path that is absent says so."""
    with pytest.raises(UsageError, match="unknown suite 'smok'; did you mean 'smoke'"):
        suite.load_suite("smok")
    with pytest.raises(UsageError, match="No such file"):
        suite.load_suite("elsewhere/mine.toml")


# --- built-in suites ------------------------------------------------------------------------------------------------


def test_built_in_suites_are_found():
    """Those that the documentation names, each with a description."""
    assert tuple(sorted(path.stem for path in suite.SUITES_DIR.glob("*.toml"))) == BUILT_IN
    assert all(suite.load_suite(name).description for name in BUILT_IN)


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_suite_expands_with_the_real_models(name):
    """Every model exists and can make the size; a random-weights suite never asks for a download."""
    cases = suite.expand(suite.load_suite(name), facts=models.facts)
    assert cases
    assert {case.weights for case in cases} == ({"pretrained"} if name in {"smoke", "tiny"} else {"random"})


def test_tiny_covers_every_tiny_model_and_smoke_some_on_the_cpu():
    """What CI can run needs no GPU, and one suite leaves no adapter out."""
    every = {name for name in models.MODELS if name.startswith("tiny/")}
    for name in ("smoke", "tiny"):
        cases = suite.expand(suite.load_suite(name), facts=models.facts)
        assert {case.model for case in cases} <= every
        assert {(c.device, c.dtype, c.steps, c.profile) for c in cases} == {("cpu", "float32", 2, False)}
        assert all(c.width_px == c.height_px == max(32, models.facts(c.model).multiple_px) for c in cases)
    assert {case.model for case in cases} == every


def test_pr27436_is_the_published_table():
    """Models, sizes, prompts and seed of the pull request."""
    cases = suite.expand(suite.load_suite("pr27436"), facts=models.facts)
    assert [(c.model, c.resolution) for c in cases] == [
        ("Qwen/Qwen-Image", "512x512"),
        ("Qwen/Qwen-Image-2512", "512x512"),
        ("Tongyi-MAI/Z-Image", "256x256"),
        ("Tongyi-MAI/Z-Image-Turbo", "512x512"),
        ("zai-org/GLM-Image", "512x512"),
        ("Comfy-Org/Ideogram-4", "512x512"),
    ]
    assert {(c.seed, c.steps, c.rounds) for c in cases} == {(42, 8, 10)}
    assert {c.prompts for c in cases} == {(suite.SHORT_PROMPT, suite.LONG_PROMPT)}


def test_every_key_is_documented():
    """suites/README.md has one row per key and none that does not exist."""
    text = (suite.SUITES_DIR / "README.md").read_text().partition("## Keys of a case")[2]
    assert re.findall(r"^\| `(\w+)`", text, re.MULTILINE) == list(suite.KEYS)


def test_expanding_a_suite_does_not_import_torch():
    """`plan` and `list` start at once."""
    code = (
        "import sys; from bcgbench import models, suite, store\n"
        "suite.expand(suite.load_suite('smoke'), facts=models.facts)\n"
        "sys.exit('torch' in sys.modules or 'diffusers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=Path(__file__).parents[1]).returncode == 0


def test_seeds_covers_every_released_model_and_can_be_judged_or_says_why():
    """No adapter is left out; only videos, whose steps take seconds, have fewer rounds than a verdict needs."""
    cases = suite.expand(suite.load_suite("seeds"), facts=models.facts)
    assert {case.model for case in cases} == {name for name in models.MODELS if not models.facts(name).tiny}
    assert all(case.rounds >= DEFAULTS.min_pairs or case.frames for case in cases)
    assert all(case.profile and {"eager", "bcg"} <= set(case.runners) for case in cases)


def test_prompt_length_steps_around_every_shape_and_always_up_or_down():
    """b - 1, b and b + 1 wherever the pipeline keeps so many; short and long take turns."""
    for case in suite.expand(suite.load_suite("prompt_length"), facts=models.facts):
        adapter = models.adapter(case.model)
        changes = adapter.default_buckets or range(32, adapter.max_tokens + 1, 32)
        around = {length + off for length in changes for off in (-1, 0, 1)}
        counts = case.token_counts
        assert sorted(counts) == sorted(length for length in around if length <= adapter.max_tokens)
        steps = [after - before for before, after in itertools.pairwise(counts)]
        assert all(before * after < 0 for before, after in itertools.pairwise(steps))
