"""The layout: imports point one way, the links are links, and nothing hides a package of Hugging Face."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import stree

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(path for area in ("stree", "kernels", "models") for path in (ROOT / area).rglob("*.py"))

# What each module may import of the package; folders stand for their files.  A module that is not named here fails the
# test, so that it is given a place.  Tree and sampling use of kernels/ the topology and the random numbers.
FOLDERS = (
    "stree.kernels",
    "stree.models",
    "stree.growth",
    "stree.drafters",
    "stree.verify",
    "stree.bench",
    "stree.distill",
    "stree.retrieval",
)
PLAIN = {"stree.counts", "stree.sampling", "stree.tree"}
POLICIES = {"stree.growth", "stree.retrieval", "stree.verify", "stree.budget", "stree.goodput", "stree.sizes"}
LOOP = {"stree.room", "stree.engine", "stree.graphs", "stree.program", "stree.statistics", "stree.steering"}
ENGINE = PLAIN | POLICIES | {"stree.kernels", "stree.models", "stree.drafters"}
ALLOWED: dict[str, set[str]] = {
    "stree": ENGINE | {"stree.distill", "stree.generation", "stree.hook", "stree.warming"},
    "stree.tree": {"stree.kernels.topology"},
    "stree.sampling": {"stree.draws", "stree.kernels.accept_door", "stree.kernels.law_door", "stree.kernels.topology"},
    "stree.counts": set(),
    "stree.draws": set(),
    "stree.retrieval": {"stree.files", "stree.retrieval"},
    "stree.vocabulary": {"stree.files"},
    "stree.growth": PLAIN
    | {"stree.growth", "stree.kernels.growth_door", "stree.kernels.growth_learning", "stree.kernels.reference_growth"},
    "stree.verify": PLAIN | {"stree.verify", "stree.kernels"},
    "stree.sizes": set(),
    "stree.goodput": {"stree.sizes"},
    "stree.budget": {"stree.goodput", "stree.sizes"},
    "stree.drafters": PLAIN
    | POLICIES
    | {"stree.models", "stree.drafters", "stree.kernels.bookkeeping", "stree.kernels.growth_door"}
    | {"stree.draws", "stree.kernels.law_door", "stree.kernels.tiles", "stree.kernels.topology"},
    "stree.steering": PLAIN | POLICIES | {"stree.models", "stree.drafters"},
    "stree.processing": PLAIN | {"stree.drafters", "stree.models"},
    "stree.statistics": {"stree.drafters"},
    "stree.graphs": set(),
    "stree.clocks": set(),
    "stree.program": PLAIN
    | POLICIES
    | {"stree.clocks", "stree.graphs", "stree.models", "stree.drafters"}
    | {"stree.kernels.bookkeeping", "stree.kernels.topology"},
    "stree.engine": {"stree.graphs", "stree.models", "stree.program"},
    "stree.session": PLAIN | POLICIES | LOOP | {"stree.models", "stree.drafters", "stree.kernels.topology"},
    "stree.rehearsal": PLAIN
    | POLICIES
    | LOOP
    | {"stree.models", "stree.drafters", "stree.processing", "stree.session"},
    "stree.arguments": PLAIN | POLICIES | {"stree.models", "stree.drafters", "stree.kernels.topology", "stree.session"},
    "stree.generation": PLAIN
    | POLICIES
    | LOOP
    | {"stree.models", "stree.drafters", "stree.processing", "stree.rehearsal"}
    | {"stree.arguments", "stree.session"},
    "stree.room": {"stree.drafters", "stree.models"},
    "stree.inputs": set(),
    "stree.prepare": ENGINE | {"stree.generation", "stree.inputs", "stree.vocabulary"},
    "stree.distill": ENGINE | {"stree.distill", "stree.files", "stree.generation", "stree.inputs"},
    "stree.cli": ENGINE
    | {"stree.generation", "stree.bench", "stree.distill", "stree.info", "stree.inputs", "stree.prepare"}
    | {"stree.vocabulary"},
    "stree.files": set(),
    "stree.cost": {"stree.files"},
    "stree.bench": ENGINE
    | {"stree.generation", "stree.clocks", "stree.cost", "stree.bench", "stree.engine", "stree.files", "stree.inputs"}
    | {"stree.rehearsal", "stree.statistics", "stree.steering"},
    "stree.info": {"stree.engine", "stree.graphs", "stree.models", "stree.room"},
    "stree.warming": ENGINE | {"stree.engine", "stree.generation", "stree.graphs", "stree.steering"},
    "stree.hook": ENGINE | {"stree.generation", "stree.hook_steps", "stree.session"},
    "stree.hook_steps": {"stree.processing"},
    "stree.kernels": {"stree.kernels"},
    "stree.models": {"stree.counts", "stree.models", "stree.kernels", "stree.tree"},
}
OUTSIDE = {
    # The benches compare with transformers' own generate.
    "transformers": {"stree.models", "stree.cli", "stree.prepare", "stree.hook", "stree.hook_steps", "stree.bench"}
    | {"stree.distill", "stree.inputs"},
    "triton": {"stree.kernels"},
}


def module_name(path: Path) -> str:
    """Name a file as it is imported: kernels/ops.py is stree.kernels.ops."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("stree", *parts) if parts[0] != "stree" else parts).removesuffix(".__init__")


def place_of(module: str) -> str:
    """Find the module or folder under which it stands in ALLOWED."""
    return next((folder for folder in FOLDERS if module == folder or module.startswith(f"{folder}.")), module)


def imports(path: Path) -> Iterator[str]:
    """Give every imported module, wherever in the file; ``from stree import tree`` counts as stree.tree."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno} imports relatively"
            within = node.module in ("stree", "stree.kernels", "stree.models")
            yield from ([f"{node.module}.{alias.name}" for alias in node.names] if within else [str(node.module)])


def test_every_area_has_files() -> None:
    assert {"stree.tree", "stree.kernels.ops", "stree.models.tree_lm"} <= {module_name(path) for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_point_one_way(path: Path) -> None:
    module = module_name(path)
    assert place_of(module) in ALLOWED, f"{module} has no place among the layers; name it in ALLOWED"
    allowed = ALLOWED[place_of(module)]
    for imported in imports(path):
        top = imported.split(".")[0]
        assert top not in ("kernels", "models"), f"{module} imports {imported}; write stree.{imported}"
        if top in OUTSIDE:
            assert place_of(module) in OUTSIDE[top], f"{module} imports {imported}; only {OUTSIDE[top]} may"
        if top == "stree":
            assert imported in allowed or place_of(imported) in allowed, f"{module} may not import {imported}"


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
    run("import sys, stree; assert not {'torch', 'transformers'} & set(sys.modules), 'loaded'; assert dir(stree)")


def test_the_engine_without_a_model_does_not_load_transformers() -> None:
    run("import sys, stree; stree.TokenTree, stree.accept, stree.growth; assert 'transformers' not in sys.modules")


def test_transformers_and_its_models_import_from_the_root_of_the_repository() -> None:
    run("from transformers import Mamba2ForCausalLM, BambaForCausalLM, LlamaForCausalLM")


@pytest.mark.parametrize("name", stree.__all__)
def test_a_public_name_can_be_reached(name: str) -> None:
    assert getattr(stree, name) is not None


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'stree' has no attribute 'nothing'"):
        _ = stree.nothing


def test_operations_run_by_the_reference_without_triton() -> None:
    run(
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from stree.kernels import ops\n"
        "x, chain = torch.ones(1, 2, 3), torch.tensor([[-1, 0]], dtype=torch.int32)\n"
        "assert ops.diagonal_tree_scan(-x, x, chain, x[:, 0]).shape == (1, 2, 3)"
    )
