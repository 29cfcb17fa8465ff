"""A drawn problem of an operation family (`operation_families`): operands by name, trees, and what is run on them."""

# Operands travel as dictionaries, which a type checker cannot count against a signature.
# mypy: disable-error-code="call-arg, arg-type, misc"

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from helpers import oracles
from stree.kernels.precision import float32_tolerance

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Family:
    """An operation family.  Functions take all operands by name, and rows of nodes as a stash holds them.

    Attributes:
        name: of the family.
        states: names of what a commit writes.
        rows: names of what has a row for each node.
        narrow: names of operands that have the dtype of the rows; others are float32, or float64.
        draw: operands from a function that draws normal numbers, batch, nodes and sizes.
        stashed: rows of nodes as the stash holds them.
        scan: outputs from operands, stashed rows of all nodes, parents and first.
        commit: writes the states, from stashed rows, path and path_lengths.
        step: outputs from operands (rows cut to the new ones), stash, path, path_lengths, parents and first.
        oracle: outputs and, for each state, its value after every node, of one sequence.
        alternates: whether a step may commit from another stash.
    """

    name: str
    states: tuple[str, ...]
    rows: tuple[str, ...]
    narrow: frozenset[str]
    draw: Callable[..., Tensors]
    stashed: Callable[[Tensors], Tensors]
    scan: Callable[..., Tensor]
    commit: Callable[..., None]
    step: Callable[..., Tensor]
    oracle: Callable[..., tuple[Tensor, list[list[Tensor]]]]
    alternates: bool = True


@dataclass(frozen=True)
class Problem:
    """Operands of a family, and trees."""

    family: Family
    given: Tensors
    parents: Tensor
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def draw(
        cls, family: Family, parents: Tensor, seed: int = 0, dtype: torch.dtype = torch.float64,
        options: dict[str, Any] | None = None, **sizes: Any,
    ) -> Problem:  # fmt: skip
        rng = torch.Generator().manual_seed(seed)
        given = family.draw(lambda *shape: torch.randn(shape, generator=rng), *parents.shape, **sizes)
        given = {name: tensor.to(DEVICE) for name, tensor in given.items()}
        return cls(family, given, parents.to(DEVICE), options or {}).to(dtype)

    def to(self, dtype: torch.dtype) -> Problem:
        """Convert rows to a dtype, and the rest to the one that goes with it."""
        return self.changed(**self.cast(self.given, dtype))

    def cast(self, tensors: Tensors, dtype: torch.dtype) -> Tensors:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return {
            name: t.to(dtype if name in self.family.narrow else wide, copy=True) if t.is_floating_point() else t.clone()
            for name, t in tensors.items()
        }

    def changed(self, **tensors: Tensor) -> Problem:
        return replace(self, given=self.given | tensors)

    def like(self, other: Problem) -> Problem:
        """Take the states and weights of another problem."""
        return self.changed(**{name: t for name, t in other.given.items() if name not in self.family.rows})

    def cut(self, n: int) -> Problem:
        """Keep the first nodes only."""
        kept = {name: self.given[name][:, :n].contiguous() for name in self.family.rows}
        return replace(self.changed(**kept), parents=self.parents[:, :n].contiguous())

    @property
    def states(self) -> list[Tensor]:
        return [self.given[name] for name in self.family.states]

    @property
    def is_node(self) -> Tensor:
        """Which rows are no padding: bool[batch, n]."""
        return (self.parents >= 0) | (torch.arange(self.parents.shape[1], device=DEVICE) == 0)

    def stashed(self) -> Tensors:
        return self.cast(self.family.stashed(self.given | {"parents": self.parents}), self.given[self.dtype_of].dtype)

    @property
    def dtype_of(self) -> str:
        """Name a row that has the dtype of rows."""
        return next(name for name in self.family.rows if name in self.family.narrow)

    def stash(self, room: int, rows: Tensors | None = None) -> Tensors:
        """Make a stash of NaN that begins with some rows."""
        made = {name: t.new_full((len(t), room, *t.shape[2:]), torch.nan) for name, t in self.stashed().items()}
        for name, t in (rows or {}).items():
            made[name][:, : t.shape[1]] = t
        return made

    def scan(self, parents: Any = None, first: int = 0, backend: str = "reference") -> Tensor:
        parents = self.parents if parents is None else parents
        return self.family.scan(self.given, self.stashed(), parents, first, backend=backend, **self.options)

    def commit(
        self, path: Any, lengths: Any, rows: Tensors | None = None, backend: str = "reference", **changes: Tensor
    ) -> None:
        kept = self.stashed() if rows is None else rows
        self.family.commit(self.given | changes, kept, path, lengths, backend=backend)

    def step(
        self, stash: Tensors, path: Any = None, lengths: Any = None, first: int = 0, backend: str = "reference",
        **options: Any,
    ) -> Tensor:  # fmt: skip
        new = {name: self.given[name][:, first:] for name in self.family.rows}
        parents = options.pop("topology", self.parents)
        options |= {"backend": backend, **self.options}
        return self.family.step(self.given | new, stash, path, lengths, parents, first, **options)

    def oracle(self, row: int, rows: Tensors | None = None) -> tuple[Tensor, list[list[Tensor]]]:
        """Run the float64 loop over one sequence; rows are those that would be stashed unless others are given."""
        shared = {name for name in self.given if name not in (*self.family.states, *self.family.rows)}
        one = {name: (t if name in shared else t[row]).cpu() for name, t in self.given.items()}
        kept = {name: t[row].cpu() for name, t in (rows or self.stashed()).items()}
        return self.family.oracle(one, kept, self.parents[row].tolist(), **self.options)

    def outputs(self, rows: Tensors | None = None) -> Tensor:
        return torch.stack([self.oracle(row, rows)[0] for row in range(len(self.parents))])

    def states_at(self, ends: tuple[int | None, ...], rows: Tensors | None = None) -> list[Tensor]:
        """Return the states after a node of each tree, or before it for None."""
        found = [self.oracle(row, rows)[1] for row in range(len(ends))]
        return [
            torch.stack([state[i].double().cpu() if end is None else found[i][k][end] for i, end in enumerate(ends)])
            for k, state in enumerate(self.states)
        ]


def error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference as a share of the largest expected value; NaN counts as infinite."""
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    assert actual.shape == expected.shape
    difference = (actual - expected).abs().max() / expected.abs().max()
    return float(difference.nan_to_num(torch.inf))


def chain(n: int, batch: int = 1) -> Tensor:
    return torch.arange(-1, n - 1, dtype=torch.int32).expand(batch, n).contiguous()


def random_parents(n: int, batch: int = 2, seed: int = 0, padding: int = 0) -> Tensor:
    return oracles.random_parents(batch, n, torch.Generator().manual_seed(seed), min(padding, n - 1))


def mixed_parents(n: int, seed: int = 0, padding: int = 0) -> Tensor:
    """Draw a chain, a star and a random tree with padding at its end."""
    star = -(torch.arange(n) == 0).int()
    return torch.cat((chain(n), star[None], random_parents(n, 1, seed, padding)))


def paths_to(parents: Tensor, ends: tuple[int | None, ...], extra: int = 1) -> tuple[Tensor, Tensor]:
    path, lengths = oracles.paths_to(parents.cpu(), ends, extra)
    return path.to(DEVICE), lengths.to(DEVICE)


def off_path(parents: Tensor, ends: tuple[int | None, ...], room: int) -> Tensor:
    """Mark the rows of a stash that are on no path: bool[batch, room]."""
    off = torch.ones(len(ends), room, dtype=torch.bool)
    for row, end in enumerate(ends):
        off[row, [] if end is None else oracles.path_to(parents[row].tolist(), end)] = False
    return off.to(DEVICE)


# Largest error of a Triton version as a share of the largest value of the reference on the same rounded inputs.
TOLERANCE = {
    torch.float32: float32_tolerance(400),  # 6e-8 rounding, sums of some hundred products
    torch.bfloat16: 2e-2,  # the output has 8 bits, and the interpreter rounds them towards zero
    torch.float16: 2e-3,  # the output has 11 bits
}
CLOSE = TOLERANCE[torch.float32]


def assert_scanned(problem: Problem, first: int = 0, tolerance: float = CLOSE) -> None:
    """Require the reference's outputs of all nodes from some on."""
    wanted = problem.is_node[:, first:]
    y = problem.scan(first=first, backend="triton")
    assert y.dtype == problem.given[problem.dtype_of].dtype and y.is_contiguous() and bool(y.isfinite().all())
    assert error(y[wanted], problem.to(torch.float64).scan(first=first)[wanted]) < tolerance


# Hard numbers.


def all_or_nothing(family: Family, n: int, dtype: torch.dtype, **sizes: int) -> tuple[Problem, Tensors]:
    """Draw decays of all or nothing at every node, and rows as stashed with them."""
    problem = Problem.draw(family, random_parents(n, 2, 5), dtype=dtype, **sizes)
    rng = torch.Generator().manual_seed(1)

    def one_of(like: Tensor, *values: float) -> Tensor:
        return torch.tensor(values)[torch.randint(0, len(values), like.shape, generator=rng)].to(like)

    for name in {"g", "log_a"} & problem.given.keys():
        problem = problem.changed(**{name: one_of(problem.given[name], 0.0, -1e-3, -0.5, -1e4)})
    rows = problem.stashed()
    if "stash_dt" not in rows:
        return problem, rows
    rows["stash_dt"] = one_of(rows["stash_dt"], 0.0, 1e-3, 0.5, 1e4)
    name, A, most = next(iter(rows)), -torch.ones_like(problem.given["A"]), rows["stash_dt"].clamp(min=1)
    if family.name == "selective":
        A[:, 0], A[:, 1] = -1e-30, -1e30
        rows[name] /= most
    else:
        heads, headdim = problem.states[0].shape[1:3]
        x = rows[name][..., : heads * headdim].unflatten(-1, (heads, headdim))
        x /= most[..., None]
    return problem.changed(A=A), rows


def correlated(problem: Problem, cosine: float) -> Problem:
    """Give all keys of a delta rule this cosine to one direction, with beta up to 2 and weak decays."""
    common = torch.zeros_like(problem.given["k"])
    common[..., 0] = 1
    noise = torch.nn.functional.normalize(problem.given["k"] * (1 - common), dim=-1)
    keys = cosine * common + (1 - cosine**2) ** 0.5 * noise
    beta = torch.where(problem.given["beta"] > 1, 2.0, problem.given["beta"])
    return problem.changed(q=keys, k=keys, g=problem.given["g"] * 1e-3, beta=beta)
