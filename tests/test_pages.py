"""The pages that users read name what there is, and lead where they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.main import get_command

from bcgbench import cli
from bcgbench.runners import RUNNERS
from bcgbench.suite import SUITES_DIR

ROOT = Path(__file__).parents[1]
FOR_USERS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [*sorted(ROOT.glob("*.md")), *FOR_USERS[1:]]
PAGES += [ROOT / each / "README.md" for each in ("bcgbench", "bcgbench/models", "results", "suites", "tests")]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    """Each relative link names a file that exists, and a heading in it."""
    for path, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


def test_users_read_of_every_command_and_runner() -> None:
    """A new command or runner is entered in the README or a page of docs/."""
    text = "".join(page.read_text(encoding="utf-8") for page in FOR_USERS)
    names = {*get_command(cli.app).commands, *RUNNERS}
    assert {name for name in names if f"`{name}`" not in text} == set()


def test_users_read_of_every_suite() -> None:
    """suites/README.md has a row per built-in suite and none that does not exist."""
    rows = re.findall(r"^\| `(\w+)` \|", (SUITES_DIR / "README.md").read_text().partition("## Form")[0], re.MULTILINE)
    assert sorted(rows) == sorted(path.stem for path in SUITES_DIR.glob("*.toml"))
