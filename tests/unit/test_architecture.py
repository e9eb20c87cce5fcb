"""The layout of docs/design.md, section 3: imports point downwards only, and only engine/ and serving/ know vLLM."""

import ast
from pathlib import Path

import pytest

import userkv

ROOT = Path(userkv.__file__).parent
LAYERS = ("core", "client", "models", "store", "engine", "serving", "sim", "bench", "train", "cli")
"""From the bottom to the top."""

BESIDE = {
    "client": {"models", "store", "engine"},
    "models": {"client", "store"},
    "store": {"client", "models"},
    "sim": {"client", "models", "store", "engine", "serving"},
}
"""What is not used although it lies below."""

ABOVE = {layer: {*LAYERS[place + 1 :], *BESIDE.get(layer, ())} - {layer} for place, layer in enumerate(LAYERS)}
MODULES = sorted(ROOT.rglob("*.py"))


def imports(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


@pytest.mark.parametrize("path", MODULES, ids=[str(path.relative_to(ROOT)) for path in MODULES])
def test_imports_point_downwards(path: Path) -> None:
    layer = path.relative_to(ROOT).parts[0]
    for name in imports(path):
        package, *rest = name.split(".")
        assert not (package == "userkv" and rest and rest[0] in ABOVE.get(layer, ())), name
        if layer in ("core", "store", "client"):
            assert package not in ("vllm", "torch", "transformers", "prometheus_client"), name
        if layer in ("core", "store"):
            assert package not in ("aiohttp", "requests"), name
