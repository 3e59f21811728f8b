"""Suites: TOML files or flags to lists of cases.

Here: keys and their types, the suite's defaults, axes and their product. What is wrong is said before anything is
loaded: the file, the case, the key and what is allowed. Not here: whether a model can make what a case asks for
(`cases.py`), which models and runners exist (the caller passes `facts` and `runner_names`).

The built-in suites lie in `suites/` at the top of the repository and are installed as `bcgbench/suites/`.
"""

from __future__ import annotations

import difflib
import itertools
import math
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bcgbench.cases import DEFAULT_PROMPTS, LONG_PROMPT, SHORT_PROMPT, Resolution, make_case, parse_resolution
from bcgbench.errors import UsageError
from bcgbench.parallel import EXPECTED, is_parallel
from bcgbench.types import Case, ModelFacts

__all__ = [
    "AXES", "DEFAULT_PROMPTS", "KEYS", "LONG_PROMPT", "SHORT_PROMPT", "SUITES_DIR", "Key", "Resolution", "Suite",
    "expand", "load_suite", "make_case", "only", "parse_resolution",
]  # fmt: skip

_PLACES = (Path(__file__).parent / "suites", Path(__file__).parents[1] / "suites")
SUITES_DIR = next((path for path in _PLACES if path.is_dir()), _PLACES[0])
"""Where the built-in suites are: inside the package when installed, beside it in a checkout."""

AXES = ("model", "resolution", "steps", "seed", "parallel")
"""Keys that take one value or a list; lists are multiplied with each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What a key of a case takes."""

    expected: str
    fits: Callable[[Any], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Tables of cases as written, with the suite's defaults filled in, their axes not yet multiplied."""

    name: str
    description: str
    cases: tuple[Mapping[str, Any], ...]
    origin: str = ""
    """The file, for error messages; "" when the tables come from flags."""


def _is_int(value: object, *, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_list(value: object, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(map(fits, value))


_TEXT = Key(expected="a text that is not empty", fits=_is_text)
_COUNT = Key(expected="a whole number from 1", fits=lambda v: _is_int(v, least=1))

KEYS: dict[str, Key] = {
    "model": _TEXT,
    "resolution": Key(expected='"WxH" or "WxHxFRAMES"', fits=_is_text),
    "steps": _COUNT,
    "seed": Key(expected="a whole number from 0", fits=lambda v: _is_int(v, least=0)),
    "prompts": Key(expected="a list of texts", fits=lambda v: _is_list(v, lambda x: isinstance(x, str))),
    "token_counts": Key(expected="a list of whole numbers from 1", fits=lambda v: _is_list(v, _COUNT.fits)),
    "guidance": Key(expected="a number from 0", fits=lambda v: _is_positive(v) or (v == 0 and v is not False)),
    "dtype": Key(expected="bfloat16, float16 or float32", fits=("bfloat16", "float16", "float32").__contains__),
    "device": Key(expected="cpu, cuda or cuda:N", fits=lambda v: bool(re.fullmatch(r"cpu|cuda(:\d+)?", str(v)))),
    "weights": Key(expected="pretrained or random", fits=("pretrained", "random").__contains__),
    "source": Key(expected="the path of a folder", fits=_is_text),
    "buckets": Key(expected="a list of lengths from 1, or [] for none", fits=lambda v: _is_list(v, _COUNT.fits)),
    "break": Key(expected='"none", or "attention", "auto", "best" and dotted names separated by commas', fits=_is_text),
    "runners": Key(expected="a list of runner names", fits=lambda v: bool(v) and _is_list(v, _is_text)),
    "rounds": _COUNT,
    "profile": Key(expected="true or false", fits=lambda v: isinstance(v, bool)),
    "timeout_s": Key(expected="seconds above 0", fits=_is_positive),
    "prior": Key(expected="the path of a saved prior", fits=_is_text),
    "parallel": Key(expected=EXPECTED, fits=is_parallel),
    "rewrite_prompts": Key(expected="true or false", fits=lambda v: isinstance(v, bool)),
}
"""Keys of a [[case]] table, of [suite.defaults] and of the overrides of `expand`."""


def load_suite(name_or_path: str | Path) -> Suite:
    """A built-in suite by name, or any TOML file by its path. UsageError naming file, key and what is allowed."""
    path = _suite_path(name_or_path)
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read the suite {path}: {error.strerror}; see `bcgbench list suites`") from error
    except ValueError as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from error
    _check_names(document, allowed=("suite", "case"), where=f"{path}: ")
    head = document.get("suite", {})
    _check_names(head, allowed=("name", "description", "defaults"), where=f"{path}: [suite]: ")
    for key in ("name", "description"):
        if not isinstance(head.get(key, ""), str):
            raise UsageError(f"{path}: [suite]: {key} = {head[key]!r}: expected a text")
    tables = document.get("case")
    if not tables or not isinstance(tables, list):
        raise UsageError(f"{path} has no case: add at least one [[case]] table, with double brackets")
    defaults = head.get("defaults", {})
    _check_table(defaults, where=f"{path}: [suite.defaults]: ")
    for number, table in enumerate(tables, start=1):
        _check_table(table, where=f"{path}: case {number}: ")
    return Suite(
        name=head.get("name", path.stem),
        description=head.get("description", ""),
        cases=tuple({**defaults, **table} for table in tables),
        origin=str(path),
    )


def expand(
    suite: Suite,
    *,
    facts: Callable[[str], ModelFacts],
    overrides: Mapping[str, Any] | None = None,
    runner_names: Collection[str] | None = None,
) -> tuple[Case, ...]:
    """All cases of a suite, in its order, each once. `overrides` replace a key in every table; None leaves it.

    New prompts drop the suite's `token_counts`, which belong to its own prompts. UsageError as of `make_case`, and when
    two tables describe the same cell but measure it differently: a run holds one record per cell and runner.
    """
    replaced = {key: value for key, value in (overrides or {}).items() if value is not None}
    _check_table(replaced, where="")
    cases: dict[str, Case] = {}
    for number, table in enumerate(suite.cases, start=1):
        where = f"{suite.origin}: case {number}: " if suite.origin else ""
        _check_table(table, where=where)
        kept = {k: v for k, v in table.items() if k != "token_counts" or "prompts" not in replaced}
        for values in _product({**kept, **replaced}, where=where):
            case = _located(values, facts=facts, runner_names=runner_names, where=where)
            if cases.setdefault(case.key, case) != case:
                raise UsageError(
                    f"{where}{case.model} at {case.resolution} stands in the suite already, but with other runners, "
                    "rounds, profile or timeout_s: make them equal, or write two suites"
                )
    return tuple(cases.values())


def only(cases: Sequence[Case], wanted: Sequence[str]) -> tuple[Case, ...]:
    """The cases whose `MODEL @ WxH[, KIND:N]` contains one of the texts, letter case aside; all of them for no text.

    A text that is a whole model id means that model alone, since some ids begin like others. UsageError for a text that
    fits no case.
    """
    names = {case.key: f"{case.model} @ {case.resolution}, {case.parallel}" for case in cases}
    names = {key: name.removesuffix(", none") for key, name in names.items()}
    ids = {case.model for case in cases}

    def fits(case: Case, text: str) -> bool:
        return case.model == text if text in ids else text.lower() in names[case.key].lower()

    for text in wanted:
        if not any(fits(case, text) for case in cases):
            raise UsageError(f"no case fits {text!r}; there are {', '.join(dict.fromkeys(names.values()))}")
    return tuple(case for case in cases if not wanted or any(fits(case, text) for text in wanted))


def _product(table: Mapping[str, Any], *, where: str) -> Iterator[dict[str, Any]]:
    """The table once per combination of its axes, the last axis varying fastest."""
    if "model" not in table:
        raise UsageError(f'{where}no model: add model = "..." (see `bcgbench list models`)')
    axes = {key: _values(table[key]) for key in AXES if key in table}
    for combination in itertools.product(*axes.values()):
        yield {**table, **dict(zip(axes, combination, strict=True))}


def _values(value: Any) -> list[Any]:
    return list(value) if _is_list(value, lambda _: True) else [value]


def _located(values: Mapping[str, Any], *, where: str, **known: Any) -> Case:
    """`make_case` of one combination, its errors with the place in the suite in front."""
    given = {"break_policy" if key == "break" else key: value for key, value in values.items() if key != "model"}
    try:
        return make_case(values["model"], **given, **known)
    except UsageError as error:
        raise UsageError(f"{where}{error}") from error


def _check_table(table: Mapping[str, Any], *, where: str) -> None:
    _check_names(table, allowed=KEYS, where=where)
    for name, value in table.items():
        values = _values(value) if name in AXES else [value]
        wrong = [each for each in values if not KEYS[name].fits(each)]
        if wrong or not values:
            listed = ", or a list of such" if name in AXES else ""
            raise UsageError(f"{where}{name} = {value!r}: expected {KEYS[name].expected}{listed}")


def _check_names(table: object, *, allowed: Iterable[str], where: str) -> None:
    if not isinstance(table, Mapping):
        raise UsageError(f"{where}expected a table of {', '.join(allowed)}, got {table!r}")
    for name in table:
        if name not in allowed:
            near = difflib.get_close_matches(name, allowed, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise UsageError(f"{where}unknown key {name!r}{hint} Allowed: {', '.join(allowed)}")


def _suite_path(name_or_path: str | Path) -> Path:
    path = Path(name_or_path)
    if path.suffix == ".toml" or len(path.parts) > 1:
        return path
    built_in = {file.stem: file for file in sorted(SUITES_DIR.glob("*.toml"))}
    if path.name in built_in:
        return built_in[path.name]
    near = difflib.get_close_matches(path.name, built_in, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise UsageError(f"unknown suite {path.name!r}{hint} Built in: {', '.join(built_in)}; a path ends in .toml")
