"""Which fields of two records must agree before their times, and those of two runs before their outputs, are compared.

Here: the list of fields and the sentence that names those that do not agree. No limits; those stand in `verdict.py`.
"""

from __future__ import annotations

import dataclasses

from bcgbench.types import Case, Environment, Reason, Record

SWITCH = frozenset({
    "runner", "capture", "break_policy", "auto broke at", "break choice", "engine without", "padding", "compile",
    "fused projections", "attention order",
})  # fmt: skip
"""Settings in which two compared arms may differ: the thing under test."""
NOT_WORK = frozenset({"runners", "rounds", "profile", "timeout_s"})
"""Fields of a case that change neither what is computed nor how one image is measured, as in `Case.key`."""

PRIOR = "prior"
"""The setting with the digest of everything random."""
OF_PRIOR = frozenset({"seed", "prior", "rewrite_prompts"})
"""Fields of a case that only choose the prior: where both digests are known, these are compared instead."""

Fields = dict[str, object]


def comparable(a: Record, b: Record) -> tuple[Reason, ...]:
    """A reason "different-prior", and one "not-comparable" naming every other field in which two arms differ.

    Empty when they are alike but for `SWITCH`.
    """
    priors = _priors(a, b)
    skipped = NOT_WORK | (OF_PRIOR if priors else frozenset())
    unlike = [
        *_unlike("case", _case_fields(a.case, skipped), _case_fields(b.case, skipped)),
        *_unlike_environments(a.environment, b.environment),
        *_unlike("settings", _fixed_settings(a), _fixed_settings(b)),
        *_unlike("record", _input_fields(a), _input_fields(b)),
    ]
    reasons = []
    if priors and not share_prior(a, b):
        text = f"{a.runner} got the prior {priors[0]} in run {a.run_id} and {b.runner} got {priors[1]} in {b.run_id}"
        text += ": other noise, tokens or prompts give other outputs; replay one with --prior FILE"
        reasons.append(Reason(code="different-prior", text=text))
    if unlike:
        text = f"{a.runner} and {b.runner} were not run alike: {'; '.join(unlike)}"
        reasons.append(Reason(code="not-comparable", text=text))
    return tuple(reasons)


def share_prior(a: Record, b: Record) -> bool:
    """Whether both arms are known to have been given the same noise, sampled tokens and prompts."""
    priors = _priors(a, b)
    return priors is not None and priors[0] == priors[1]


def _priors(a: Record, b: Record) -> tuple[str, str] | None:
    """Both digests; None where a record has none, because it is older or failed before anything was drawn."""
    first, second = a.settings.get(PRIOR), b.settings.get(PRIOR)
    return (first, second) if first and second else None


def interleaved(a: Record, b: Record) -> bool:
    """Whether the two arms were measured in turn by one process, so that a drift cancels between them."""
    return (a.run_id, a.attempt, a.case.key) == (b.run_id, b.attempt, b.case.key)


def _unlike(prefix: str, a: Fields, b: Fields) -> list[str]:
    names = [name for name in dict.fromkeys((*a, *b)) if a.get(name) != b.get(name)]
    return [f"{prefix}.{name} ({a.get(name, 'absent')} against {b.get(name, 'absent')})" for name in names]


def _unlike_environments(a: Environment | None, b: Environment | None) -> list[str]:
    if a is None or b is None:
        return ["environment (not recorded)"]
    return _unlike("environment", _environment_fields(a), _environment_fields(b))


def _case_fields(case: Case, skipped: frozenset[str]) -> Fields:
    return {f.name: getattr(case, f.name) for f in dataclasses.fields(case) if f.name not in skipped}


def _environment_fields(environment: Environment) -> Fields:
    # Left out on purpose: the card's UUID and the commit, which people do compare, and the launch time, which is
    # itself measured. The CPU is kept in, because eager speed is host speed.
    gpu = environment.gpu
    return {
        "gpu": gpu and gpu.name,
        "gpu_memory_bytes": gpu and gpu.memory_bytes,
        "power_limit_w": gpu and gpu.power_limit_w,
        "driver": gpu and gpu.driver,
        "cpu": environment.cpu,
        "python": environment.python,
        "cuda": environment.cuda,
        **{f"packages.{name}": version for name, version in environment.packages.items()},
        **{f"settings.{name}": value for name, value in environment.settings.items()},
        **{f"env_vars.{name}": value for name, value in environment.env_vars.items()},
    }


def _fixed_settings(record: Record) -> Fields:
    return {name: value for name, value in record.settings.items() if name not in SWITCH and not name.startswith(PRIOR)}


def _input_fields(record: Record) -> Fields:
    return {"synthetic": record.synthetic, "token_counts": record.token_counts}
