"""The rules of bcgbench/README.md that a script can hold: layers, sizes, who prints, what is declared.

What ruff can say (complexity, banned calls, mutable defaults) stands in pyproject.toml instead.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "bcgbench"
FILE_LINES = 300
FILE_LINES_OF = {"bcgbench.types": 530}
"""`types` only declares: the stored schema is read in one place, each field with its unit."""
FUNCTION_LINES = 50


def read_levels() -> dict[str, int]:
    """Component of bcgbench -> level, from the table in bcgbench/README.md.

    A part of a module, such as `cli_run`, counts as the module, here `cli`.
    """
    rows = re.findall(r"^\| (\d) \| (.*?) \|", (PACKAGE / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {name: int(level) for level, names in rows for name in re.findall(r"`(\w+)(?:/\*|\*)?`", names)}


LEVELS = read_levels()

HEAVY = {"torch", "torchvision", "diffusers", "transformers", "accelerate", "cuda"}
"""Seconds to import each, or absent where a stored result is read."""

ENGINE_MAY_IMPORT = {"torch", "cuda", "numpy"}
"""numpy, because forwards take numpy scalars and arrays as constants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One import statement: who, what, where, and when it runs."""

    module: str
    target: str
    line: int
    at_load: bool
    """Runs when the module is loaded: not inside a function and not under TYPE_CHECKING."""

    @property
    def root(self) -> str:
        return self.target.split(".")[0]

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


def read_sources() -> dict[str, str]:
    """Dotted module name -> source, for everything under bcgbench/."""
    sources = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        sources[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    return sources


def imports_of(module: str, source: str) -> list[Import]:
    """Every import statement of one module, those inside functions and TYPE_CHECKING blocks too."""

    def visit(node: ast.AST, at_load: bool) -> Iterator[Import]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                yield from visit(child, False)
            for child in node.orelse:
                yield from visit(child, at_load)
            return
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module=module, target=alias.name, line=node.lineno, at_load=at_load)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: relative import; write the full name"
            # `from package import module` names a module, `from module import name` does not: keep both readings.
            names = (
                [f"{node.module}.{alias.name}" for alias in node.names] if node.module in PACKAGES else [node.module]
            )
            for name in names:
                yield Import(module=module, target=str(name), line=node.lineno, at_load=at_load)
        inner = at_load and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inner)

    return list(visit(ast.parse(source), True))


def refuse(offenders: Iterable[str], rule: str) -> None:
    """Fail with the rule and one offender a line, if there is any."""
    lines = sorted(offenders)
    if lines:
        pytest.fail("\n  ".join([f"{rule}; {len(lines)} against it:", *lines]), pytrace=False)


PACKAGES = {"bcgbench", *(f"bcgbench.{folder.name}" for folder in PACKAGE.iterdir() if folder.is_dir())}
SOURCES = read_sources()


def component(module: str) -> str:
    """`bcgbench.engine.graph` -> `engine`, `bcgbench` and `bcgbench.__version__` -> `__init__`."""
    parts = module.split(".")
    if len(parts) == 1 or (len(parts) == 2 and parts[1].startswith("__") and parts[1] != "__main__"):
        return "__init__"
    whole = parts[1].split("_")[0]
    return whole if parts[1] not in LEVELS and whole in LEVELS else parts[1]


def own_imports(sources: dict[str, str]) -> list[Import]:
    """Imports of one bcgbench component by another."""
    found = [i for module, source in sources.items() for i in imports_of(module, source) if i.root == "bcgbench"]
    return [i for i in found if component(i.module) != component(i.target)]


def unknown_components(sources: dict[str, str]) -> list[str]:
    """Modules that the level table does not name."""
    return sorted({module for module in sources if component(module) not in LEVELS})


def upward_imports(sources: dict[str, str]) -> list[str]:
    """Imports from a lower level to a higher one, as readable lines."""
    return [
        f"{i} (level {LEVELS[component(i.module)]} -> {LEVELS[component(i.target)]})"
        for i in own_imports(sources)
        if LEVELS.get(component(i.module), 99) < LEVELS.get(component(i.target), 0)
    ]


def engine_imports(sources: dict[str, str]) -> list[str]:
    """What the engine imports beyond itself, errors, torch, cuda-python and the standard library."""
    allowed = {*ENGINE_MAY_IMPORT, *sys.stdlib_module_names}
    found = [
        i for module, source in sources.items() if component(module) == "engine" for i in imports_of(module, source)
    ]
    return [
        str(i)
        for i in found
        if (i.root == "bcgbench" and component(i.target) not in {"engine", "errors"})
        or (i.root != "bcgbench" and i.root not in allowed)
    ]


def heavy_imports(sources: dict[str, str]) -> list[str]:
    """Imports of torch and its kin where they must not run: at load in models and cli, anywhere in levels 0 and 1."""
    lines = []
    for module, source in sources.items():
        name = component(module)
        lazy_allowed = name in {"models", "cli"}
        if name == "engine" or not (lazy_allowed or LEVELS.get(name, 9) <= 1):
            continue
        heavy = [i for i in imports_of(module, source) if i.root in HEAVY and (i.at_load or not lazy_allowed)]
        lines += [str(i) for i in heavy]
    return lines


def loaded_with(module: str, sources: dict[str, str]) -> dict[str, tuple[str, ...]]:
    """Modules that load when `module` is imported -> the chain that leads there. Includes third-party roots."""
    chains: dict[str, tuple[str, ...]] = {module: (module,)}
    queue = [module]
    while queue:
        current = queue.pop()
        for found in imports_of(current, sources[current]):
            if not found.at_load:
                continue
            target = found.target
            while target.startswith("bcgbench") and target not in sources:
                target = target.rpartition(".")[0]
            if target not in chains:
                chains[target] = (*chains[current], target)
                if target in sources:
                    queue.append(target)
    return chains


def test_every_module_has_a_level() -> None:
    """A new module is entered in the import table of bcgbench/README.md."""
    refuse(unknown_components(SOURCES), "every module has a level in bcgbench/README.md")


def test_the_import_table_names_only_what_exists() -> None:
    """A module that was renamed or removed leaves the table of bcgbench/README.md."""
    refuse(LEVELS.keys() - {component(module) for module in SOURCES}, "a module in bcgbench/README.md exists")


def test_imports_only_go_down() -> None:
    """A module imports its own level or lower ones, lazily or not, also for annotations."""
    refuse(upward_imports(SOURCES), "imports only go down")


def test_components_do_not_import_each_other_in_a_circle() -> None:
    """Within a level, too, imports have one direction."""
    graph: dict[str, set[str]] = {}
    for found in own_imports(SOURCES):
        graph.setdefault(component(found.module), set()).add(component(found.target))
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import circle: {' -> '.join(error.args[1])}")


def test_engine_can_be_lifted_out() -> None:
    """The engine imports torch, cuda-python and bcgbench.errors, nothing else."""
    refuse(engine_imports(SOURCES), "the engine imports torch, cuda-python and bcgbench.errors only")


def test_torch_stays_out_of_what_reads_results() -> None:
    """Levels 0 and 1 never import torch or diffusers; models and cli only inside functions."""
    refuse(heavy_imports(SOURCES), "no torch or diffusers in levels 0 and 1, nor when models or cli are loaded")


@pytest.mark.parametrize("entry", ["cli", "models", "reports", "runners", "worker"])
def test_loading_an_entry_point_does_not_reach_torch(entry: str) -> None:
    """--help, list, report and compare, and the parent of a run, load these: no chain of imports may end in torch."""
    if f"bcgbench.{entry}" not in SOURCES:
        pytest.skip(f"bcgbench.{entry} does not exist")
    reached = loaded_with(f"bcgbench.{entry}", SOURCES)
    chains = [" -> ".join(chain) for target, chain in reached.items() if target.split(".")[0] in HEAVY]
    refuse(chains, f"loading {entry} does not import torch")


@pytest.mark.parametrize(
    ("module", "source", "check"),
    [
        ("bcgbench.stats", "from bcgbench.store import open_run", upward_imports),
        ("bcgbench.verdict", "from bcgbench import arms", upward_imports),
        ("bcgbench.metrics", "def f():\n    import bcgbench.bench", upward_imports),
        ("bcgbench.engine.graph", "from bcgbench.types import Case", engine_imports),
        ("bcgbench.engine.breaks", "def f():\n    import diffusers", engine_imports),
        ("bcgbench.reports.table", "def f():\n    import torch", heavy_imports),
        ("bcgbench.models.qwen_image", "import diffusers", heavy_imports),
        ("bcgbench.cli", "from torch import nn", heavy_imports),
        ("bcgbench.helpers", "", unknown_components),
    ],
)
def test_a_planted_violation_is_caught(module: str, source: str, check) -> None:
    """Each rule above can fail."""
    assert len(check({module: source})) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("bcgbench.models.qwen_image", "def f():\n    import diffusers"),
        ("bcgbench.models.base", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("bcgbench.engine.trees", "import torch\nfrom bcgbench.errors import EngineError"),
        ("bcgbench.arms", "import torch\nfrom bcgbench.engine.cache import GraphCache"),
    ],
)
def test_what_the_rules_allow_passes(module: str, source: str) -> None:
    """The checks above flag nothing that the design asks for."""
    sources = {module: source}
    assert upward_imports(sources) + engine_imports(sources) + heavy_imports(sources) == []


def test_files_are_short() -> None:
    """A file of more than 300 lines holds two subjects."""
    lengths = {module: source.count("\n") for module, source in SOURCES.items()}
    long = [f"{m}: {lines} lines" for m, lines in lengths.items() if lines > FILE_LINES_OF.get(m, FILE_LINES)]
    refuse(long, f"a file has at most {FILE_LINES} lines")


def function_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, the docstring not counted."""
    first = node.body[0]
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    docstring = (first.end_lineno or 0) - first.lineno + 1 if is_docstring else 0
    return (node.end_lineno or 0) - node.lineno + 1 - docstring


def test_functions_are_short() -> None:
    """No function is longer than 50 lines without its docstring."""
    offenders = [
        f"{module}:{node.lineno} {node.name}: {function_lines(node)} lines"
        for module, source in SOURCES.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and function_lines(node) > FUNCTION_LINES
    ]
    refuse(offenders, f"a function has at most {FUNCTION_LINES} lines")


def test_every_module_says_what_belongs_in_it() -> None:
    """Each module with code begins with a docstring."""
    silent = [module for module, source in SOURCES.items() if source and not ast.get_docstring(ast.parse(source))]
    refuse(silent, "a module begins with a docstring")


def test_only_the_command_line_prints() -> None:
    """Everything else returns values or logs."""
    offenders = [
        f"{module}:{node.lineno} {ast.unparse(node.func)}"
        for module, source in SOURCES.items()
        if component(module) != "cli"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"print", "sys.stdout.write", "sys.stderr.write"}
    ]
    refuse(offenders, "only cli*.py prints")


def project() -> dict:
    """pyproject.toml, parsed."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_packages_listed_for_the_wheel_are_those_in_the_tree() -> None:
    """A folder that pyproject.toml does not list would be missing from the wheel only."""
    in_tree = {"bcgbench", "bcgbench.suites", *(".".join(p.parent.parts) for p in relative_inits())}
    assert set(project()["tool"]["setuptools"]["packages"]) == in_tree


def relative_inits() -> list[Path]:
    """Every bcgbench/**/__init__.py, relative to the root."""
    return [path.relative_to(ROOT) for path in PACKAGE.rglob("__init__.py")]


IMPORT_NAMES = {
    "cuda-python": "cuda",
    "huggingface-hub": "huggingface_hub",
    "nvidia-ml-py": "pynvml",
    "pillow": "PIL",
    "scikit-image": "skimage",
}
"""Requirement -> import name, where the two differ."""


def test_every_third_party_import_is_declared() -> None:
    """What works only because something else happens to install it is declared."""
    table = project()["project"]
    requirements = [
        *table["dependencies"],
        *(name for extra in table["optional-dependencies"].values() for name in extra),
    ]
    names = {re.split(r"[^\w.-]", requirement)[0] for requirement in requirements}
    declared = {IMPORT_NAMES.get(name, name) for name in names} | set(sys.stdlib_module_names) | {"bcgbench"}
    found = [i for module, source in SOURCES.items() for i in imports_of(module, source)]
    refuse((str(i) for i in found if i.root not in declared), "pyproject.toml declares every import")


def tracked_texts() -> Iterator[tuple[str, str]]:
    """Path and text of every small text file under version control; every file of the tree where git is absent."""
    try:
        listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        paths = [ROOT / name for name in listing.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        paths = [p for folder in ("bcgbench", "tests", "suites", "results") for p in (ROOT / folder).rglob("*.*")]
    for path in paths:
        if not path.is_file() or path.stat().st_size > 1_000_000:
            continue
        content = path.read_bytes()
        if b"\0" not in content:
            yield path.relative_to(ROOT).as_posix(), content.decode("utf-8", errors="replace")


# One letter of each stands in brackets, so that this line does not match itself.
MACHINE_PATHS = re.compile(r"(?<![\w.])/(?:wo[r]k|opt/whee[l]s|opt/pyp[i]|root/\.pyen[v]|tmp/bc[g])\b")
"""Folders of the machines that the project was written and measured on."""


def test_no_file_names_a_folder_of_one_machine() -> None:
    """Published results and documents carry no path that exists on one machine only."""
    offenders = [
        f"{name}:{number}: {line.strip()[:100]}"
        for name, text in tracked_texts()
        for number, line in enumerate(text.splitlines(), 1)
        if MACHINE_PATHS.search(line)
    ]
    refuse(offenders, "no file names a folder of one machine")
