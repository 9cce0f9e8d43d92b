"""Facts about the source tree that a reviewer would otherwise have to look for."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "headrace"
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 500

# Variables of the world around us, not settings of ours.
ENVIRONMENT_ALLOWED = {"NO_COLOR", "TERM", "HOME", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE"}

# Packages that a machine without torch, and (the second group) without the engine's other needs, must be able to load.
WITHOUT_TORCH = ("config", "protocol", "engine", "text", "planner", "server", "gateway", "cli")
WITHOUT_ENGINE_NEEDS = ("config", "protocol", "gateway", "cli")

IMPORT_WITH_BLOCKED = """
import importlib, sys

blocked, package = sys.argv[1].split(","), sys.argv[2]

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
for name in sys.argv[3:]:
    importlib.import_module(name)
"""

SHOW_HELP_AND_HEAVY_MODULES = """
import sys
from headrace.cli.main import main

sys.argv = ["headrace", "--help"]
try:
    main()
except SystemExit:
    pass
print("loaded:", sorted({"torch", "numpy", "transformers", "tokenizers", "jinja2"} & set(sys.modules)))
"""


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), relative(path))


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_a_file_is_one_thing_and_says_what_it_is_for(path: Path) -> None:
    num_lines = len(path.read_text().splitlines())
    assert num_lines <= MAX_LINES, f"{relative(path)} has {num_lines} lines: it is probably two things"
    assert ast.get_docstring(tree(path)), f"{relative(path)} does not say in its first lines what it is for"


def test_every_folder_of_the_package_is_a_package() -> None:
    folders = {path.parent for path in FILES}
    assert [relative(f) for f in sorted(folders) if not (f / "__init__.py").exists()] == []


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_settings_come_from_flags_and_files_not_from_environment_variables(path: Path) -> None:
    for node in ast.walk(tree(path)):
        name = None
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name("os"), attr="getenv"), args=[first, *_]):
                name = first
            case ast.Call(
                func=ast.Attribute(value=ast.Attribute(ast.Name("os"), "environ"), attr="get"), args=[first, *_]
            ):
                name = first
            case ast.Subscript(value=ast.Attribute(ast.Name("os"), "environ"), slice=key, ctx=ast.Load()):
                name = key
        if name is not None:
            variable = name.value if isinstance(name, ast.Constant) else ast.unparse(name)
            assert variable in ENVIRONMENT_ALLOWED, f"{relative(path)}:{node.lineno} reads the variable {variable}"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_nothing_is_left_open_in_the_code(path: Path) -> None:
    lines = path.read_text().splitlines()
    found = [f"{i}: {line}" for i, line in enumerate(lines, 1) if re.search(r"\b(TODO|FIXME|XXX)\b", line)]
    assert found == []


def load_without(blocked: str, packages: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    names = [module_name(p) for p in FILES if p.relative_to(PACKAGE).parts[0] in packages]
    command = [sys.executable, "-c", IMPORT_WITH_BLOCKED, blocked, "headrace", *names]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_everything_but_the_device_side_loads_without_torch() -> None:
    result = load_without("torch,transformers", WITHOUT_TORCH)
    assert result.returncode == 0, result.stderr


def test_the_command_line_loads_without_the_packages_of_the_engine() -> None:
    result = load_without("torch,transformers,numpy,tokenizers,jinja2,huggingface_hub", WITHOUT_ENGINE_NEEDS)
    assert result.returncode == 0, result.stderr


def test_help_is_printed_without_loading_torch_or_numpy() -> None:
    command = [sys.executable, "-c", SHOW_HELP_AND_HEAVY_MODULES]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert "serve" in result.stdout
    assert result.stdout.splitlines()[-1] == "loaded: []"


def test_every_pinned_version_satisfies_what_the_package_asks_for() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {r.name.lower().replace("_", "-"): r for r in map(Requirement, (x for x in lines if x and x[0] != "#"))}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    for requirement in map(Requirement, wanted):
        pin = pinned[requirement.name.lower().replace("_", "-")]
        version = next(iter(pin.specifier)).version
        assert requirement.specifier.contains(version), f"{pin} does not satisfy {requirement}"
