"""Which fields of two records must agree before their times may be compared.

Here: the list of fields and the sentence that names those that do not agree. No limits; those stand in `verdict.py`.
"""

from __future__ import annotations

import dataclasses

from bcgbench.types import Case, Environment, Reason, Record

SWITCH = frozenset({"runner", "capture", "break_policy", "padding"})
"""Settings in which two compared arms may differ: the thing under test."""
NOT_WORK = frozenset({"runners", "rounds", "profile", "timeout_s"})
"""Fields of a case that change neither what is computed nor how one image is measured, as in `Case.key`."""

Fields = dict[str, object]


def comparable(a: Record, b: Record) -> tuple[Reason, ...]:
    """One reason "not-comparable" naming every field in which two arms differ beyond `SWITCH`; empty when alike."""
    unlike = [
        *_unlike("case", _case_fields(a.case), _case_fields(b.case)),
        *_unlike_environments(a.environment, b.environment),
        *_unlike("settings", _fixed_settings(a), _fixed_settings(b)),
        *_unlike("record", _input_fields(a), _input_fields(b)),
    ]
    if not unlike:
        return ()
    text = f"{a.runner} and {b.runner} were not run alike: {'; '.join(unlike)}"
    return (Reason(code="not-comparable", text=text),)


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


def _case_fields(case: Case) -> Fields:
    return {f.name: getattr(case, f.name) for f in dataclasses.fields(case) if f.name not in NOT_WORK}


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
    return {name: value for name, value in record.settings.items() if name not in SWITCH}


def _input_fields(record: Record) -> Fields:
    return {"synthetic": record.synthetic, "token_counts": record.token_counts}
