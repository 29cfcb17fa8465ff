"""Layout: imports point one way, the links are links, and nothing hides a package of Hugging Face."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import stree

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(path for area in ("stree", "kernels", "models") for path in (ROOT / area).rglob("*.py"))

# What the files of a folder, or a single file, may import of the package beside their own folder.
BOTTOM = {
    "stree.checks",
    "stree.files",
    "stree.growth_names",
    "stree.kernels",
    "stree.returned",
    "stree.sampling",
    "stree.tree",
}
POLICIES = BOTTOM | {"stree.growth", "stree.models", "stree.retrieval", "stree.verify"}
LOOP = POLICIES | {"stree.budget", "stree.decode", "stree.drafters"}
TOP = LOOP | {
    "stree.generation",
    "stree.heads",
    "stree.inputs",
    "stree.request_fields",
    "stree.grammar_fields",
    "stree.rule_fields",
    "stree.vocabulary",
}
ALLOWED: dict[str, set[str]] = {
    "stree.checks": set(),
    "stree.files": set(),
    "stree.growth_names": set(),
    "stree.inputs": set(),
    "stree.request_fields": {"stree.sampling"},
    "stree.grammar_fields": {"stree.request_fields"},
    "stree.rule_fields": {"stree.request_fields"},
    "stree.vocabulary": {"stree.files"},
    "stree.kernels": set(),
    "stree.returned": {"stree.kernels"},
    "stree.tree": {"stree.kernels"},
    "stree.distributions": {"stree.kernels"},
    "stree.sampling": {"stree.checks", "stree.distributions", "stree.kernels"},
    "stree.models": {"stree.checks", "stree.kernels", "stree.tree"},
    "stree.heads": {"stree.models"},
    "stree.growth": BOTTOM,
    "stree.verify": BOTTOM,
    "stree.retrieval": {"stree.checks", "stree.files", "stree.kernels"},
    "stree.drafters": POLICIES,
    "stree.budget": {"stree.growth"},
    "stree.decode": LOOP,
    "stree.generation": LOOP,
    "stree.streaming": LOOP | {"stree.generation"},
    "stree.warming": LOOP | {"stree.generation"},
    "stree.tool_calls": set(),
    "stree.serving": TOP | {"stree.tool_calls"},
    "stree.integrations": TOP | {"stree.serving", "stree.warming"},
    "stree.distill": TOP,
    "stree.bench": TOP,
    "stree.cli": TOP | {"stree.bench", "stree.distill", "stree.integrations", "stree.serving", "stree.warming"},
    "stree.testing": LOOP,
    "stree.__main__": {"stree.cli"},
    "stree": TOP
    | {
        "stree.distill",
        "stree.heads",
        "stree.integrations",
        "stree.serving",
        "stree.streaming",
        "stree.testing",
        "stree.warming",
    },
}
OUTSIDE = {
    # The benches compare with transformers' own generate.
    "transformers": {
        "stree.models", "stree.integrations", "stree.cli", "stree.inputs", "stree.bench",
        "stree.distill",
    },
    "triton": {"stree.kernels"},
}  # fmt: skip


@cache
def modules() -> dict[str, Path]:
    """List the modules of the package: kernels/ops.py is stree.kernels.ops."""
    found = {}
    for path in FILES:
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(("stree", *parts) if parts[0] != "stree" else parts).removesuffix(".__init__")] = path
    return found


def place_of(module: str) -> str:
    """Find the entry of ALLOWED for a module: its folder or itself."""
    return ".".join(module.split(".")[:2])


@cache
def imports(path: Path) -> tuple[str, ...]:
    """List every imported module, wherever in the file."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno} imports relatively"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in modules() else str(node.module) for name in names)


def test_every_area_has_files() -> None:
    assert {"stree.tree", "stree.kernels.ops", "stree.models.tree_lm"} <= set(modules())


def wrong_imports() -> Iterator[str]:
    """Say what is wrong with imports that do not point one way."""
    for module, path in sorted(modules().items()):
        place = place_of(module)
        if place not in ALLOWED:
            yield f"{module} has no place among the layers; name it in ALLOWED"
            continue
        for imported in imports(path):
            top = imported.split(".")[0]
            if top in ("kernels", "models"):
                yield f"{module} imports {imported}; write stree.{imported}"
            if place not in OUTSIDE.get(top, {place}):
                yield f"{module} imports {imported}; only {OUTSIDE[top]} may"
            if top == "stree" and place_of(imported) not in ALLOWED[place] | {place}:
                yield f"{module} may not import {imported}"


def test_imports_point_one_way() -> None:
    assert not list(wrong_imports())


def test_no_file_imports_itself_through_others() -> None:
    graph = {name: set(imports(path)) & set(modules()) - {name} for name, path in modules().items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the files


@pytest.mark.parametrize("area", ["kernels", "models"])
def test_the_folders_are_reached_through_relative_links_and_are_no_packages(area: str) -> None:
    link = ROOT / "stree" / area
    assert link.is_symlink(), f"stree/{area} is no link; clone with core.symlinks=true"
    assert os.readlink(link) == f"../{area}"
    assert not list((ROOT / area).rglob("__init__.py")), f"{area}/__init__.py would hide a package of that name"


def test_no_folder_of_tests_or_benchmarks_is_named_like_a_package_of_ours() -> None:
    for area in ("tests", "benchmarks"):
        assert not list((ROOT / area).glob("kernels*")) + list((ROOT / area).glob("models*"))


def run(code: str) -> None:
    """Run Python in the root of the repository, which stands first on its path."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_importing_stree_loads_neither_torch_nor_transformers() -> None:
    run("import sys, stree; assert not {'torch', 'transformers'} & set(sys.modules), 'loaded'")

    run("import sys, stree; assert {*stree.__all__, '__version__'} <= {*dir(stree)}; assert 'torch' not in sys.modules")


@pytest.mark.slow
def test_the_engine_without_a_model_does_not_load_transformers() -> None:
    run("import sys, stree; stree.TokenTree, stree.accept, stree.growth; assert 'transformers' not in sys.modules")


@pytest.mark.slow
def test_transformers_and_its_models_import_from_the_root_of_the_repository() -> None:
    run("from transformers import Mamba2ForCausalLM")


@pytest.mark.parametrize("name", stree.__all__)
def test_a_public_name_can_be_reached(name: str) -> None:
    assert getattr(stree, name) is not None


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'stree' has no attribute 'nothing'"):
        _ = stree.nothing


@pytest.mark.slow
def test_operations_run_by_the_reference_without_triton() -> None:
    run(
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from stree.kernels import ops\n"
        "x, chain = torch.ones(1, 2, 3), torch.tensor([[-1, 0]], dtype=torch.int32)\n"
        "assert ops.diagonal_tree_scan(-x, x, chain, x[:, 0]).shape == (1, 2, 3)"
    )
