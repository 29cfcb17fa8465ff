"""A step of the reference is commit, then write, then scan, bit for bit, and reads no device.

Run: python -m pytest tests/operations/test_reference_steps.py
"""

# Operands travel as dictionaries and tuples, which a type checker cannot count against a signature.
# mypy: disable-error-code="call-arg, arg-type, misc"

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.on_device import NoHostReads
from helpers.operation_families import FAMILIES
from helpers.operation_problem import Family, Problem, Tensors, chain, paths_to, random_parents
from torch import Tensor

from stree.kernels import ops
from stree.kernels.topology import AcceptedPath, Topology

pytestmark = [pytest.mark.skipif(torch.cuda.is_available(), reason="the reference is tested on the CPU")]

every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)


def by_parts(problem: Problem, stash: Tensors, path: Any, lengths: Any, first: int) -> Tensor:
    """Commit from the stash, write the new rows, scan what the stash then holds."""
    family, n = problem.family, problem.parents.shape[1]
    if path is not None:
        problem.commit(path, lengths, stash)
    own = {name: problem.given[name][:, first:] for name in family.rows}
    new = family.stashed(problem.given | own | {"parents": chain(n - first, 2)})  # u is solved for below
    for name in stash.keys() - {"stash_u"}:
        stash[name][:, first:n] = new[name]
    kept = {name: rows[:, :n] for name, rows in stash.items()}
    if "stash_u" not in stash:
        return family.scan(problem.given, kept, problem.parents, first, backend="reference")
    q, _, v, _, beta = (problem.given[name] for name in family.rows)
    rows = q, kept["stash_k"], v, kept["stash_g"], beta
    o, u = ops.gated_delta_tree_scan(
        *rows, problem.parents, problem.states[0], scale=0.7, first=first, u=stash["stash_u"]
    )  # fmt: skip
    stash["stash_u"][:, first:n] = u[:, first:]
    return o


@every_family
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("first", [0, 4], ids=["first0", "first4"])
@pytest.mark.parametrize("committed", ["no path", "tensors", "accepted path"])
def test_a_step_is_commit_then_write_then_scan(family: Family, dtype: torch.dtype, first: int, committed: str) -> None:
    old, new = (Problem.draw(family, random_parents(11, 2, seed, 1), seed, dtype) for seed in range(2))
    ours, theirs = old.stash(16, old.stashed()), old.stash(16, old.stashed())
    other = new.to(dtype)
    path, lengths = paths_to(old.parents, (7, None))
    prepared: tuple[Any, Any] = (path, lengths)
    if committed == "no path":
        prepared = (None, None)
    elif committed == "accepted path":
        prepared = (AcceptedPath.of(path, lengths, 4), None)
    y = new.step(ours, *prepared, first=first, topology=Topology.of(new.parents, 4))
    assert torch.equal(y, by_parts(other, theirs, *prepared, first))
    pairs = [*zip(new.states, other.states, strict=True), *((ours[name], theirs[name]) for name in ours)]
    assert all(torch.equal(mine.nan_to_num(9), theirs.nan_to_num(9)) for mine, theirs in pairs)
    assert y.dtype == dtype and y.is_contiguous() and bool(y.isfinite().all())


def test_the_watch_over_host_reads_sees_them() -> None:
    for read in (lambda t: t.item(), lambda t: t[t > 0], lambda t: t.nonzero(), lambda t: bool(t)):
        with NoHostReads(), pytest.raises(AssertionError, match="reads the device"):
            read(torch.ones(1))


@every_family
@pytest.mark.parametrize("first", [0, 4], ids=["first0", "first4"])
def test_no_step_reads_the_device(family: Family, first: int) -> None:
    problem = Problem.draw(family, random_parents(11, padding=1), dtype=torch.float32)
    stash, (path, lengths) = problem.stash(16, problem.stashed()), paths_to(problem.parents, (7, 2))
    with NoHostReads():
        problem.step(stash, path, lengths, first, topology=Topology.of(problem.parents))
        accepted = AcceptedPath.of(path, lengths, 4)
        problem.step(stash, accepted, None, first, topology=Topology.of(problem.parents, 4))
