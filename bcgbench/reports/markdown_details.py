"""The folded blocks below the tables of a markdown report: commands, environment, memory, fidelity, misses, samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bcgbench.reports import base, formats
from bcgbench.reports.markdown_syntax import code, escape, folded, table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bcgbench.reports.base import CaseView, Report
    from bcgbench.types import Difference, Environment, Fidelity, Record, Sample

Rows = list[list[str]]
_DIGITS = 4
HOLDS = "prior holds"
"""The one setting that has a block of its own."""


def details(report: Report, views: tuple[CaseView, ...]) -> list[str]:
    """The blocks that have something to say, in the order in which a reviewer asks for them."""
    return [
        folded("Commands to repeat", code(_commands(report))),
        *_environments(report),
        *_block("Memory", _MEMORY_COLUMNS, [row for view in views if view.timed for row in _memory(view)]),
        *_block(
            "Outputs compared", _FIDELITY_COLUMNS, [row for view in views for row in _fidelity(view)], about=_QUESTIONS
        ),
        *_block("Priors", _PRIOR_COLUMNS, [row for view in views for row in _priors(view)], about=_PRIOR),
        *_misses(views),
        *_reasons(report, views),
        *_block("Samples", _SAMPLE_COLUMNS, [row for view in views for row in _samples(view)]),
        *_images(views),
    ]


def _block(summary: str, columns: tuple[str, ...], rows: Rows, *, about: str = "") -> list[str]:
    body = "\n\n".join(part for part in (about, table(columns, rows)) if part)
    return [folded(summary, body)] if rows else []


def _arms(view: CaseView) -> Iterator[tuple[list[str], Record]]:
    for label, record in view.arms.items():
        yield [escape(view.name), escape(label)], record


def _commands(report: Report) -> str:
    """What to type to see the same again: `compare` and `report` take the run that the first line makes."""
    command = base.redact(base.one_line(report.info.command))
    words = command.split()
    results = f" --results {words[words.index('--results') + 1]}" if "--results" in words[:-1] else ""
    pairs = dict.fromkeys((base.runner_of(verdict.a), base.runner_of(verdict.b)) for verdict in base.gating(report))
    lines = [command, *(f"bcgbench compare {a} {b}{results}" for a, b in pairs if a != b)]
    return "\n".join([*lines, f"bcgbench report --format markdown{results}"])


def _environments(report: Report) -> list[str]:
    """One block per distinct environment; host launch time differs a little between processes and is no distinction."""
    seen: dict[str, tuple[Environment, list[str]]] = {}
    for record in report.records:
        if record.environment is not None:
            facts = _environment_facts(record.environment)
            seen.setdefault(repr(facts), (record.environment, []))[1].append(
                f"{base.model_name(record.case)} {record.runner}"
            )
    blocks = []
    for environment, arms in seen.values():
        rows = [[escape(name), escape(base.redact(value))] for name, value in _environment_facts(environment).items()]
        launch = environment.host_launch_s
        rows.append(["host time per launch", "n/a (no GPU)" if launch is None else formats.seconds(launch)])
        summary = "Environment" if len(seen) == 1 else f"Environment of {escape(', '.join(sorted(set(arms))))}"
        blocks.append(folded(summary, table(("Field", "Value"), rows)))
    return blocks


def _environment_facts(environment: Environment) -> dict[str, str]:
    gpu = environment.gpu
    facts = {
        "GPU": gpu.name if gpu else "n/a (none)",
        "GPU memory": formats.size(gpu.memory_bytes) if gpu else "n/a (none)",
        "driver": gpu.driver if gpu else "n/a (none)",
        "CUDA": environment.cuda or "n/a (none)",
        "CPU": f"{environment.cpu}, {formats.plural(environment.cpu_count, 'core')}",
        "memory": formats.size(environment.memory_bytes),
        "OS": environment.os,
        "Python": environment.python,
        "bcgbench commit": _commit(environment),
    }
    if gpu and gpu.power_limit_w is not None:
        facts["GPU power limit"] = f"{gpu.power_limit_w:.0f} W"
    if gpu and gpu.other_processes:
        facts["other processes on the GPU"] = str(gpu.other_processes)
    facts |= {f"package {name}": version for name, version in sorted(environment.packages.items())}
    facts |= {f"setting {name}": value for name, value in sorted(environment.settings.items())}
    return facts | {f"variable {name}": value for name, value in sorted(environment.env_vars.items())}


def _commit(environment: Environment) -> str:
    if environment.git_commit is None:
        return "n/a (not a git checkout)"
    return environment.git_commit[:12] + (" with local changes" if environment.git_dirty else "")


_MEMORY_COLUMNS = (
    "Model / shape", "Arm", "Weights", "Peak allocated", "Peak reserved", "Graph pool", "Growth per captured shape",
)  # fmt: skip


def _memory(view: CaseView) -> Rows:
    return [[*head, *_memory_cells(view, record)] for head, record in _arms(view) if record.memory]


def _memory_cells(view: CaseView, record: Record) -> Iterator[str]:
    memory = record.memory
    yield (
        formats.size(memory.weights_bytes)
        if memory
        else formats.missing(escape(base.why_missing(record, "weights_bytes")))
    )
    for name in ("peak_allocated_bytes", "peak_reserved_bytes", "pool_bytes"):
        yield escape(base.metric_text(view, record, name))
    yield ", ".join(formats.size(each) for each in (memory.growth_bytes if memory else ())) or "none"


_QUESTIONS = (
    "rerun: eager against itself. padding: eager on padded inputs against eager. graph: the arm against eager on the "
    "same padded inputs. Calls are those of the transformer, each on the inputs that eager saw. Values are those of "
    "all final latents and images and of the worst call; mean, RMS and bounding box are of the one that differs most."
)
_FIDELITY_COLUMNS = (
    "Model / shape", "Arm", "Question", "Against", "Calls exact", "First call that differs", "Latents exact",
    "Images exact",
    "Audio exact", "Values that differ", "Max difference", "Mean, RMS", "Bounding box", "Least PSNR (of sound: SNR)",
    "Least SSIM",
)  # fmt: skip


def _fidelity(view: CaseView) -> Rows:
    return [head + _answer(answer) for head, record in _arms(view) for answer in record.fidelity]


def _answer(answer: Fidelity) -> list[str]:
    worst = answer.worst_call
    found = [*answer.finals, *([worst] if worst else [])]
    largest = max(found, key=lambda difference: difference.max_abs, default=None)
    differs = largest is not None and not largest.exact
    psnr = [each.psnr_db for each in answer.finals if each.psnr_db is not None]
    ssim = [each.ssim for each in answer.images if each.ssim is not None]
    return [
        answer.question,
        escape(answer.reference),
        f"{answer.calls_exact} of {answer.calls}",
        "none" if answer.first_call is None else str(answer.first_call),
        _exact_of(answer.latents),
        _exact_of(answer.images),
        _exact_of(answer.audio) if answer.audio else "n/a (no sound)",
        f"{sum(each.differing for each in found)} of {sum(each.total for each in found)}",
        "0" if largest is None or largest.max_abs == 0 else f"{largest.max_abs:.{_DIGITS}g} at {escape(largest.name)}",
        f"{largest.mean_abs:.{_DIGITS}g}, {largest.rms:.{_DIGITS}g}" if largest and differs else "0, 0",
        _box(largest) if largest and differs else "none",
        formats.decibels(min(psnr)) if psnr else "n/a (exact)" if answer.exact else "n/a (not finite)",
        f"{min(ssim):.{_DIGITS}f}" if ssim else "n/a (exact)" if answer.exact else "n/a (not computed)",
    ]


def _box(difference: Difference) -> str:
    """First to last differing index per axis."""
    return " x ".join(f"{first}..{last}" for first, last in difference.bounding_box or ()) or "none"


def _exact_of(differences: tuple[Difference, ...]) -> str:
    return f"{sum(each.exact for each in differences)} of {len(differences)}"


_PRIOR = (
    "All that is random in a request, drawn once and shared by the arms: noise, sampled tokens, rewritten prompts. "
    "`bcgbench run --prior FILE` replays it."
)
_PRIOR_COLUMNS = ("Model / shape", "Arms", "Prior", "Holds", "File")


def _priors(view: CaseView) -> Rows:
    """One row per prior: with several runs side by side there may be two."""
    arms: dict[tuple[str, ...], list[str]] = {}
    for label, record in view.arms.items():
        if "prior" in record.settings:
            held = (record.settings["prior"], record.settings.get(HOLDS, ""), record.artifacts.get("prior", ""))
            arms.setdefault(held, []).append(label)
    return [
        [escape(view.name), escape(", ".join(labels)), *map(escape, held[:2]), escape(held[2]) or "n/a (not written)"]
        for held, labels in arms.items()
    ]


def _misses(views: tuple[CaseView, ...]) -> list[str]:
    rows = [
        [*head, escape(miss.module), str(miss.count), escape(base.redact(miss.reason)),
         escape(base.redact("; ".join(miss.difference))) or "n/a (no captured signature)"]
        for view in views
        for head, record in _arms(view)
        if record.engagement
        for miss in record.engagement.misses
    ]  # fmt: skip
    if not rows:
        proofs = [base.proof_of(record) for view in views for record in view.arms.values()]
        return (
            [folded("Misses: none", "Every call of every graph arm found its captured graph.")] if any(proofs) else []
        )
    columns = ("Model / shape", "Arm", "Module", "Count", "Reason", "Difference from the nearest captured signature")
    return [folded("Misses", table(columns, rows))]


def _reasons(report: Report, views: tuple[CaseView, ...]) -> list[str]:
    lines = [
        f"- {escape(f'{view.name}, {label}, {record.status}: {base.reason_text(reason)}')}"
        for view in views
        for label, record in view.arms.items()
        for reason in record.reasons
    ]
    for v in report.verdicts:
        arms = f"{base.case_name(v.case)}, {v.b} against {v.a}"
        told = [reason for reason in v.reasons if reason.code != "not-timed"]  # the caption says it of all
        lines += [f"- {escape(f'{arms}: {base.reason_text(reason)}')}" for reason in told]
    return [folded("Reasons", "\n".join(lines))] if lines else []


_SAMPLE_COLUMNS = (
    "Model / shape",
    "Arm",
    "n",
    "Clock",
    "Denoise per image, in order of measurement",
    "GPU",
    "Settings",
)


def _samples(view: CaseView) -> Rows:
    rows = []
    for head, record in _arms(view):
        measured = record.measured
        clock, times = _denoise_samples(measured) if view.timed else ("none", formats.NOT_TIMED)
        settings = ", ".join(f"{name}={value}" for name, value in sorted(record.settings.items()) if name != HOLDS)
        rows.append(
            [
                *head,
                str(len(measured)),
                clock,
                times,
                _gpu_states(measured),
                escape(base.redact(settings)) or "n/a (none recorded)",
            ]
        )
    return rows


_HARMLESS_BITS = 0x1 | 0x2 | 0x10 | 0x100
"""NVML's clock-event reasons that take nothing away: idle, clocks as set, sync boost, display."""


def _gpu_states(measured: tuple[Sample, ...]) -> str:
    """`1980 MHz, 259 to 271 W, throttled at 0 of 20`: the state right after each image."""
    states = [sample.gpu_state for sample in measured if sample.gpu_state]
    if not states:
        return formats.missing("not recorded")
    clocks = formats.span([state.sm_clock_hz / 1e6 for state in states], unit="MHz")
    power = formats.span([state.power_w for state in states], unit="W")
    slowed = [state.throttle_bits for state in states if state.throttle_bits & ~_HARMLESS_BITS]
    reasons = f" (reasons {', '.join(f'{bits:#x}' for bits in sorted(set(slowed)))})" if slowed else ""
    return f"{clocks}, {power}, throttled at {len(slowed)} of {len(states)}{reasons}"


def _denoise_samples(measured: tuple[Sample, ...]) -> tuple[str, str]:
    if not measured:
        return "none", formats.missing("no sample")
    by_event = [sample.denoise_event_s for sample in measured if sample.denoise_event_s is not None]
    if len(by_event) == len(measured):
        return "CUDA events", ", ".join(formats.seconds(value_s) for value_s in by_event)
    return "host", ", ".join(formats.seconds(sample.denoise_host_s) for sample in measured)


def _images(views: tuple[CaseView, ...]) -> list[str]:
    links = [
        f"- {head[0]}, {head[1]}: [{escape(name)}]({path.replace(' ', '%20').replace(')', '%29')})"
        for view in views
        for head, record in _arms(view)
        for name, path in sorted(record.artifacts.items())
        if path.endswith(".png") and not record.synthetic  # noise, and large: left out of published runs
    ]
    about = "Links are relative to the folder of the run.\n\n"
    return [folded("Images", about + "\n".join(links))] if links else []
