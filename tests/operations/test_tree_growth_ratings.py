"""Ratings of slots, compiled for the CPU and in Triton, equal the same in torch.

Run: TRITON_INTERPRET=1 python -m pytest tests/operations/test_tree_growth_ratings.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.growth_problems import DEVICE, SIZES, Ranked, some_children, some_table
from torch import Tensor

pytest.importorskip("triton")

from stree.kernels.tree_growth import cpu_ratings, reference, slots_kernel
from stree.kernels.tree_growth.operands import Children, Level, Memory, Ratings, Table, Words

CPU = torch.device("cpu")
ROUNDING = 1e-5, 1e-7  # relative and absolute: a logarithm and an exponential of float32 differ in their last bits
Backend = tuple[Any, torch.device]  # owner of the ratings, and where its tensors are
COMPILED, TRITON = (cpu_ratings, CPU), (slots_kernel, DEVICE)
every_backend = pytest.mark.parametrize("backend", [COMPILED, TRITON], ids=["compiled", "triton"])


# Ratings of drawn children by a table.


def check_ratings(backend: Backend, table: Table, children: Children, close: float = 0.0) -> Ratings:
    """Require the reference's cells, values bit for bit or nearly, and siblings in falling order of priority."""
    expected: Ratings = reference.rate_by_table(table, children)
    found: Ratings = backend[0].rate_by_table(table, children)
    assert torch.equal(found.cells, expected.cells)
    for name in ("priority", "value"):
        one, other = getattr(found, name), getattr(expected, name)
        assert one.dtype == other.dtype and torch.equal(one > 0, other > 0), name
        assert torch.allclose(one, other, *(ROUNDING if one.is_cuda else (close, 0.0))), name
    for row in found.priority.flatten(0, 1):
        assert bool((row[row > 0].diff() <= 0).all())
    return found


def in_width(table: Table, children: Children, dtype: torch.dtype) -> tuple[Table, Children]:
    counts = {name: getattr(table, name).to(dtype) for name in ("passed", "tests", "sharpness", "confidence")}
    dists = {name: getattr(children, name).to(dtype) for name in ("reach", "probs", "norms")}
    return replace(table, **counts), replace(children, **dists)


@every_backend
@pytest.mark.parametrize(("batch", "above", "ranks"), SIZES)
def test_ratings_by_a_table_are_those_of_torch(batch: int, above: int, ranks: int, backend: Backend) -> None:
    for seed in range(2):
        children = some_children(batch, above, ranks, seed, backend[1])
        table = some_table(batch, max(ranks, 6), seed, backend[1])
        check_ratings(backend, table, children)
        if backend is COMPILED:
            check_ratings(backend, *in_width(table, children, torch.float64))


@every_backend
@pytest.mark.parametrize("edge", ["sharpness", "confidence"])
def test_a_number_at_an_edge_of_the_table_falls_below_it(edge: str, backend: Backend) -> None:
    device = backend[1]
    table = some_table(1, 2, 0, device)
    # Powers of two have exact squares and quotients.
    edges = torch.tensor([2.0**-k for k in range(2 * len(getattr(table, edge)), 0, -2)], device=device)
    norms = torch.tensor([[2.0**-k for k in range(8)]], device=device)
    probs = torch.tensor([[[2.0**-k, 0.0] for k in range(8)]], device=device)
    children = Children(torch.ones(1, 8, device=device), probs, norms)
    cells = check_ratings(backend, replace(table, **{edge: edges}), children).cells
    assert len(set(cells[0, :, 0, 0 if edge == "sharpness" else 1].tolist())) > 4


def test_tables_and_distributions_of_other_widths_are_rated_as_in_torch_and_strides_change_nothing() -> None:
    rounding = 1e-4  # a share of float64 is refused by a count of float32, of which little may be left
    table, children = some_table(2, 6, 0, CPU), some_children(2, 7, 5, 0, CPU)
    wide_table, wide = in_width(table, children, torch.float64)
    assert check_ratings(COMPILED, table, wide, rounding).value.dtype == torch.float64
    assert check_ratings(COMPILED, wide_table, children, rounding).value.dtype == torch.float64
    expected = check_ratings(COMPILED, table, children)
    far = Children(**apart(children, "reach", "probs", "norms"))
    found = check_ratings(COMPILED, replace(table, **apart(table, "passed", "tests")), far)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def apart(owner: object, *names: str) -> dict[str, Any]:
    """Lay tensors out with other strides."""
    return {name: torch.stack([part := getattr(owner, name), part + 1], -1)[..., 0] for name in names}


@every_backend
def test_distributions_that_are_used_up_and_tables_that_only_pass_are_rated_as_in_torch(backend: Backend) -> None:
    device = backend[1]
    table = some_table(1, 4, 0, device)
    probs = torch.tensor([[[0.75, 0.25, 0.25, 0.5], [1.0, 0.5, 0.25, 0.125], [0.5, 0.5, 0.0, 0.25], [0.0] * 4]])
    norms, reach = torch.linalg.vector_norm(probs, dim=-1), torch.tensor([[1.0, 0.5, 0.25, 1.0]])
    children = Children(reach.to(device), probs.to(device), norms.to(device))
    for passed in (table.passed, table.tests.clone(), table.tests * 1.5):  # more passed than tested: counts are rounded
        check_ratings(backend, replace(table, passed=passed), children)


def test_shares_are_rounded_as_in_torch_before_they_fall_into_cells_and_no_node_has_none() -> None:
    table, children = some_table(1, 6, 0, CPU), some_children(1, 30, 4, 0, CPU)
    shares = children.probs / (1 - reference.spent_before(children.probs)).clamp(min=1e-6)
    count = len(table.confidence)
    for edges in shares[..., 1:].flatten().unique().split(count):
        if len(edges) == count:
            check_ratings(COMPILED, replace(table, confidence=edges), children)
    nothing = Children(torch.rand(1, 0), torch.rand(1, 0, 3), torch.rand(1, 0))
    assert check_ratings(COMPILED, some_table(1, 4, 0, CPU), nothing).cells.shape == (1, 0, 3, 2)


WRONG_CHILDREN: dict[str, Callable[[Children], Children]] = {
    "another sharpness": lambda children: replace(children, norms=children.norms * 0.7),
    "another reach": lambda children: replace(children, reach=children.reach * 1.001),
    "siblings in another order": lambda children: replace(children, probs=children.probs.flip(-1)),
}


@pytest.mark.parametrize("control", WRONG_CHILDREN)
def test_ratings_that_are_wrong_in_one_thing_are_rejected(control: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table, children = some_table(3, 6, 1, CPU), some_children(3, 12, 5, 1, CPU)
    check_ratings(COMPILED, table, children)
    rate = reference.rate_by_table
    monkeypatch.setattr(reference, "rate_by_table", lambda table, given: rate(table, WRONG_CHILDREN[control](given)))
    with pytest.raises(AssertionError):
        check_ratings(COMPILED, table, children)


# Ratings of the likeliest children by rank.


def check_ranks(backend: Backend, given: Ranked) -> Tensor:
    """Require the reference's values, nearly, 0 where it has 0, and none above its parent's."""
    expected: Tensor = reference.rate_by_rank(*given)
    found: Tensor = backend[0].rate_by_rank(*given)
    assert found.dtype == expected.dtype and torch.equal(found > 0, expected > 0)
    compiled = {torch.float32: (4e-6, 0.0), torch.float64: (1e-13, 0.0)}  # exponentials are another library's
    assert torch.allclose(found, expected, *(compiled[found.dtype] if backend is COMPILED else ROUNDING))
    assert bool((found <= given.given.reach[..., None]).all())
    return found


@every_backend
@pytest.mark.parametrize(("batch", "above", "ranks"), SIZES)
def test_ratings_by_rank_are_those_of_torch(batch: int, above: int, ranks: int, backend: Backend) -> None:
    for seed in range(2):
        given = Ranked.draw(batch, above, ranks, seed, backend[1])
        check_ranks(backend, given)
        if backend is COMPILED:
            wide = {name: getattr(given.given, name).double() for name in ("reach", "probs", "norms")}
            assert check_ranks(backend, with_given(given, **wide)).dtype == torch.float64


def words_of(ranked: Ranked) -> Words:
    assert ranked.given.words is not None
    return ranked.given.words


def with_given(ranked: Ranked, **changes: Any) -> Ranked:
    return ranked._replace(given=replace(ranked.given, **changes))


@every_backend
def test_what_a_text_holds_is_known_by_its_last_two_words_and_the_tree_s(backend: Backend) -> None:
    device = backend[1]

    def ids(values: Any, dtype: torch.dtype = torch.long) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    memory = Memory.empty(2, device)
    texts = ids([[5, 6, 7, 5, 6, 8], [6, 7, 0, 0, 0, 0]])
    reference.remember(memory, texts, None, ids([6, 2], torch.int32))
    # A root 7 behind a token 8, a root 6 behind a token 9, and below the first root a node 5.
    tokens, parents = ids([[8, 7, 5], [9, 6, 0]]), ids([[-1, 0, 1], [-1, 0, -1]], torch.int32)
    children = ids([[[5, 6]], [[7, 8]]])
    fit = Ranked.draw(1, 1, 2, 0, device).fit
    fit = replace(fit, **{name: getattr(fit, name) * 0 for name in ("level", "by_confidence", "by_sharpness")})
    even = torch.tensor([[0.5, 0.5]], device=device)

    def rated(words: Words, memory: Memory) -> list[float]:
        batch = len(words.children)
        one, level = torch.ones(batch, 1, device=device), torch.zeros(batch, device=device)
        siblings = Children(one, even.expand(batch, 1, 2), one, words)
        values: list[float] = check_ranks(backend, Ranked(fit, Level(level, level + 1), memory, siblings)).tolist()
        return values

    roots = Words(children, tokens, parents, 1)
    both = rated(roots, memory)
    forgotten = rated(roots, Memory.empty(2, device))
    assert both != forgotten, "7 5 and 6 7 were said"
    below = rated(Words(children[:1], tokens[:1], parents[:1], 2), Memory(memory.places[:1], memory.last[:1]))
    assert below != forgotten[:1] and below != both[:1], "7 5 6 was said, which is a triple"


@every_backend
def test_of_equal_children_the_first_is_the_likeliest_and_of_none_nothing_is_rated(backend: Backend) -> None:
    device = backend[1]
    fit = Ranked.draw(1, 4, 3, 0, device).fit
    fit = replace(fit, **{name: getattr(fit, name) * 0 for name in ("level", "by_confidence", "by_text")})
    level = Level(torch.ones(1, device=device), torch.ones(1, device=device))
    probs = torch.tensor([[[0.25, 0.25, 0.25], [0.0, 0.5, 0.25], [0.0, 0.0, 0.0], [1e-12, 0.0, 0.0]]], device=device)
    children = Children(torch.ones(1, 4, device=device), probs, torch.zeros(1, 4, device=device))
    found = check_ranks(backend, Ranked(fit, level, Memory.empty(1, device), children))
    assert found[0, 0, 0] > found[0, 0, 1] == found[0, 0, 2] and found[0, 1, 1] > found[0, 1, 2]
    assert not bool(found[0, 2].any()) and found[0, 3, 0] > 0


def with_others(ranked: Ranked, name: str) -> Ranked:
    """Give children whose tokens, or what they follow, are those of others."""
    words = words_of(ranked)
    return with_given(ranked, words=replace(words, **{name: getattr(words, name).roll(1, -1)}))


WRONG_RANKS: dict[str, Callable[[Ranked], Ranked]] = {
    "another level": lambda ranked: ranked._replace(level=Level(ranked.level.shift + 0.1, ranked.level.weight)),
    "nothing is known of tokens": lambda ranked: with_given(ranked, words=None),
    "a text that said nothing": lambda ranked: ranked._replace(memory=Memory.empty(3, CPU)),
    "other tokens": lambda ranked: with_others(ranked, "children"),
    "below other nodes": lambda ranked: with_others(ranked, "tokens"),
    "behind other tokens": lambda ranked: with_others(ranked, "parents"),
    "another frontier": lambda ranked: with_given(ranked, words=replace(words_of(ranked), first=2)),
}


@pytest.mark.parametrize("control", WRONG_RANKS)
def test_ratings_by_rank_that_are_wrong_in_one_thing_are_rejected(
    control: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranked = Ranked.draw(3, 12, 5, 2, CPU)
    check_ranks(COMPILED, ranked)
    rate = reference.rate_by_rank
    monkeypatch.setattr(reference, "rate_by_rank", lambda *_: rate(*WRONG_RANKS[control](ranked)))
    with pytest.raises(AssertionError):
        check_ranks(COMPILED, ranked)
