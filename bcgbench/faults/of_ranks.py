"""Faults of one process among several. Literal rows only."""

from __future__ import annotations

from bcgbench.faults.fault import Fault

_MODEL = "tiny/z-image"

FAULTS: dict[str, Fault] = {
    "captured-collective": Fault(
        part="ranks", breaks="the forward calls a collective that would become part of a segment",
        published=("sgl-project/sglang#31852", "sgl-project/sglang#33421", "sgl-project/sglang#33775"),
        inject="ranks:captured_collective", model=_MODEL, shown="ranks",
        code="rank-vote", says="a collective may not be captured", exit_code=4,
    ),
    "lone-capture-failure": Fault(
        part="ranks", breaks="one rank cannot capture: it would run eagerly while the others replay",
        inject="ranks:lone_capture_failure", model=_MODEL, shown="ranks",
        code="rank-vote", says="one has no graph; rank 1: no room for a graph", exit_code=4,
    ),
    "missed-signature": Fault(
        part="ranks", breaks="one rank lacks a graph that the others hold",
        inject="ranks:missed_signature", model=_MODEL, shown="ranks",
        code="ranks-disagree", says="fallbacks by rank: 0, ", exit_code=4,
    ),
    "unlike-latents": Fault(
        part="ranks", breaks="one rank goes on with other latents",
        inject="ranks:unlike_latents", model=_MODEL, shown="ranks",
        code="ranks-disagree", says="with different latents", exit_code=3,
    ),
    "killed-rank": Fault(
        part="ranks", breaks="one rank is killed while the others wait for it",
        inject="ranks:killed_rank", model=_MODEL, shown="ranks", case={"timeout_s": 120.0},
        code="crashed", says="rank 1: the worker process was ended by SIGKILL", exit_code=7,
    ),
    "hung-rank": Fault(
        part="ranks", breaks="one rank hangs in a break", published=("sgl-project/sglang#31854",),
        inject="ranks:hung_rank", model=_MODEL, shown="ranks", case={"timeout_s": 60.0},
        code="rank-hung", says=", the break ", exit_code=7,
    ),
}  # fmt: skip
