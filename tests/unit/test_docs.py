"""The documentation is true where a program can see it: links, paths, commands, line lengths."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from userkv.cli import build_parser

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
LONGEST_LINE = 120

each_page = pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])


def prose(page: Path) -> Iterator[str]:
    """The lines of a page outside its code blocks."""
    in_code = False
    for line in page.read_text().splitlines():
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code:
            yield line


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = (re.match(r"#+ (.*)", line) for line in prose(page))
    return {re.sub(r"[^\w\- ]", "", found[1].lower()).replace(" ", "-") for found in headings if found}


@each_page
def test_links_and_anchors_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", "\n".join(prose(page))):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        aim = (page.parent / path).resolve() if path else page
        assert aim.exists(), target
        if anchor:
            assert anchor in anchors(aim), target


@each_page
def test_paths_that_are_named_exist(page: Path) -> None:
    rooms = "src|tests|docs|benchmarks|examples|scripts|requirements"
    for path in re.findall(rf"(?<![\w/.])((?:{rooms})/[\w/.-]*\w/?)", page.read_text()):
        assert (ROOT / path).exists() or "results/" in path, path


@each_page
def test_lines_are_short_outside_tables_and_code(page: Path) -> None:
    long = [line for line in prose(page) if len(line) > LONGEST_LINE and not line.startswith("|")]
    # A link or a word of code cannot be broken.
    assert [line for line in long if len(re.sub(r"\]\([^)]*\)|`[^`]*`", "", line)) > LONGEST_LINE] == []


@each_page
def test_commands_exist(page: Path) -> None:
    (subparsers,) = (action for action in build_parser()._actions if action.dest == "==SUPPRESS==" or action.choices)
    assert subparsers.choices is not None
    commands = set(subparsers.choices)
    code = re.findall(r"```(?:\w*)\n(.*?)```|`([^`\n]+)`", page.read_text(), re.DOTALL)
    for line in "\n".join(part for pair in code for part in pair).splitlines():
        for command in re.findall(r"(?:^|[\s/;(])userkv ([a-z]\w*)", line):
            assert command in commands, line


def test_makefile_has_every_target_that_is_named() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        for target in re.findall(r"(?:`|^)make ([a-z-]+)", page.read_text(), re.MULTILINE):
            assert target in targets, f"{page.name}: make {target}"
