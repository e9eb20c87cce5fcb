"""The layout of docs/design.md, section 3: imports point downwards only, without circles, and few rooms know vLLM."""

import ast
import re
from pathlib import Path

import pytest

import userkv

ROOT = Path(userkv.__file__).parent

MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "cache": {"core"},
    "records": {"core"},
    "ranking": {"core"},
    "logs": {"core"},
    "client": {"core"},
    "sim": {"core", "cache"},
    "store": {"core", "cache", "records"},
    "models": {"core", "ranking"},
    "engine": {"core", "cache", "records", "ranking", "models", "store"},
    "serving": {"core", "cache", "ranking", "client", "store", "engine"},
    "replay": {"core", "cache", "ranking", "logs", "client", "serving"},
    "train": {"core", "ranking", "logs", "models"},
    "cli.py": {"core", "serving", "replay", "train"},
    "__init__.py": set(),
}
"""Room of the package -> the rooms that it may import beside itself."""

ENGINE_LIBRARIES = {
    "core": set(),
    "cache": set(),
    "records": set(),
    "ranking": set(),
    "logs": set(),
    "client": {"aiohttp", "requests"},
    "sim": set(),
    "store": set(),
    "models": {"vllm", "torch", "transformers"},
    "engine": {"vllm", "torch", "prometheus_client"},
    "serving": {"vllm", "torch", "transformers", "prometheus_client", "requests"},
    "replay": {"vllm", "aiohttp", "prometheus_client"},
    "train": {"torch"},
    "cli.py": set(),
    "__init__.py": set(),
}
"""Room -> those of the watched libraries that it may import."""

WATCHED = set().union(*ENGINE_LIBRARIES.values())
MODULES = sorted(ROOT.rglob("*.py"))


def imports(path: Path) -> list[str]:
    """Full names that a file imports, wherever in it, also for type checking only."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def module_of(path: Path) -> str:
    """The dotted name of a file."""
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_every_room_has_its_rules() -> None:
    rooms = {path.relative_to(ROOT).parts[0] for path in MODULES}
    assert rooms == MAY_IMPORT.keys() == ENGINE_LIBRARIES.keys()


@pytest.mark.parametrize("path", MODULES, ids=[str(path.relative_to(ROOT)) for path in MODULES])
def test_imports_point_downwards(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    for name in imports(path):
        package, *rest = name.split(".")
        if package == "userkv" and rest and (ROOT / rest[0]).is_dir():
            assert rest[0] == room or rest[0] in MAY_IMPORT[room], name
        if package in WATCHED:
            assert package in ENGINE_LIBRARIES[room], name


def test_no_circles() -> None:
    known = {module_of(path): path for path in MODULES}
    graph: dict[str, set[str]] = {}
    for module, path in known.items():
        targets = set()
        for name in imports(path):
            while name and name not in known:
                name = name.rpartition(".")[0]
            targets.add(name)
        graph[module] = {target for target in targets if target and target != module}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail[trail.index(module) :], module))
        if module in done:
            return
        for target in sorted(graph[module]):
            # A package's face takes from its own files; that is how it is made, and no circle.
            if not module.startswith(f"{target}."):
                visit(target, (*trail, module))
        done.add(module)

    for module in sorted(graph):
        visit(module, ())


def test_rooms_depend_on_each_other_one_way() -> None:
    order: list[str] = []
    rooms = dict(MAY_IMPORT)
    while rooms:
        free = [room for room, needs in rooms.items() if needs <= set(order)]
        assert free, f"a circle among {sorted(rooms)}"
        order += free
        for room in free:
            del rooms[room]


ROOMS = sorted(room for room in MAY_IMPORT if (ROOT / room).is_dir())


@pytest.mark.parametrize("room", ROOMS)
def test_a_rooms_docstring_names_what_it_may_import_and_files_to_start_with(room: str) -> None:
    doc = ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text())) or ""

    def named(label: str) -> set[str]:
        line = re.search(rf"^{label}: (.*)\.$", doc, re.MULTILINE)
        assert line, f"{room}: no line {label!r}"
        return set(re.findall(r"``([^`]+)``", line[1]))

    assert named("Rooms that it may import") == MAY_IMPORT[room]
    assert named("Of the watched libraries") == ENGINE_LIBRARIES[room]
    files = {name for name in named("Start here") if name.endswith((".py", "/"))}
    assert files
    assert [name for name in files if not (ROOT / room / name).exists()] == []
