"""Who may import whom: trainer and sampler meet only at a published adapter directory, and nothing knows the server."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODULES = {"server", "wire", "trainer", "losses", "model", "sampler", "router", "cache"}
ALLOWED = {
    "server": MODULES - {"server"},  # it joins the others; losses and model only for their names and configs
    "trainer": {"losses", "model", "cache"},
    "sampler": {"router", "model", "cache"},
}


def imported(source: str) -> set[str]:
    """Top-level names of every import in the source, those inside functions too."""
    nodes = list(ast.walk(ast.parse(source)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "." for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("name", sorted(MODULES & {path.stem for path in ROOT.glob("*.py")}))
def test_a_module_imports_only_those_below_it(name):
    assert imported((ROOT / f"{name}.py").read_text()) & MODULES <= ALLOWED.get(name, set())


def test_every_python_file_at_the_top_is_one_of_the_eight_modules():
    assert {path.stem for path in ROOT.glob("*.py")} <= MODULES
