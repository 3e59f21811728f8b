"""Journal lines of an older schema, brought to the next one. Each step knows the two versions it lies between."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Line = dict[str, Any]
"""The data of one journal line."""


def _to_2(kind: str, data: Line) -> Line:
    """Schema 2 has audio, steps per loop, FLOPs of a denoise, graphs captured and not engaged, and priors of cases."""
    if kind == "run":
        return {**data, "cases": [_case_2(case) for case in data["cases"]]}
    if kind == "sample":
        return {**data, "sample": _sample_2(data["sample"])}
    if kind != "record":
        return data
    profile, proof = data["profile"], data["engagement"]
    return {
        **data,
        "case": _case_2(data["case"]),
        "samples": [_sample_2(sample) for sample in data["samples"]],
        "fidelity": [{**answer, "audio": []} for answer in data["fidelity"]],
        "profile": profile and {**profile, "loop_steps": []},
        "engagement": proof and {**proof, "unengaged": []},
        "denoise_flops": None,
    }


def _to_4(kind: str, data: Line) -> Line:
    """Schema 4 has arms in another arithmetic than eager's: their errors, and what torch.compile did."""
    return {**data, "accuracy": None, "compilation": None} if kind == "record" else data


def _case_2(case: Line) -> Line:
    """Schema 1 drew its own prior and rewrote nothing."""
    return {**case, "prior": None, "rewrite_prompts": False}


def _sample_2(sample: Line) -> Line:
    """Schema 1 had one loop per request."""
    return {**sample, "loop_steps": [len(sample["step_s"])]}


def _to_3(kind: str, data: Line) -> Line:
    """Schema 3 has cases of several processes; before it there was one."""
    if kind == "run":
        return {**data, "cases": [{**case, "parallel": "none"} for case in data["cases"]]}
    if kind != "record":
        return data
    return {**data, "case": {**data["case"], "parallel": "none"}, "ranks": []}


MIGRATIONS: Mapping[int, Callable[[str, Line], Line]] = {1: _to_2, 2: _to_3, 3: _to_4}
"""Schema version -> (kind, data of that version) to the data of the next version; applied to each line on reading."""
