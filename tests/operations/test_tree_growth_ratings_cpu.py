"""Ratings and what texts hold, compiled for the CPU, equal the same in torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.growth_problems import SIZES, Ranked, begun, some_siblings, some_table
from helpers.on_device import treat_as_on_device
from torch import Tensor

from stree.kernels.tree_growth import api, cpu_ratings, reference
from stree.kernels.tree_growth.operands import Level, Memory, Ratings, Siblings, Table, Words

CPU = torch.device("cpu")
WIDTHS = (torch.float32, torch.float64)
ROUNDING = 1e-4  # relative: a share of float64 is refused by a count of float32, of which little may be left
CLOSE = {torch.float32: 4e-6, torch.float64: 1e-13}  # relative: exponentials and logarithms are another library's


def check_ratings(table: Table, children: Siblings, close: float = 0.0) -> Ratings:
    """Require the reference's cells and values, bit for bit or nearly."""
    expected = reference.rate_by_table(table, children)
    found = cpu_ratings.rate_by_table(table, children)
    assert torch.equal(found.cells, expected.cells)
    for name in ("priority", "value"):
        one, other = getattr(found, name), getattr(expected, name)
        assert one.dtype == other.dtype and torch.equal(one > 0, other > 0), name
        assert torch.allclose(one, other, rtol=close, atol=0.0), name
    return found


def in_width(table: Table, children: Siblings, dtype: torch.dtype) -> tuple[Table, Siblings]:
    """Give the same in another dtype."""
    counts = {name: getattr(table, name).to(dtype) for name in ("passed", "tests", "sharpness", "confidence")}
    dists = {name: getattr(children, name).to(dtype) for name in ("reach", "probs", "norms")}
    return replace(table, **counts), replace(children, **dists)


@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize(("batch", "above", "ranks"), SIZES)
def test_ratings_by_a_table_are_those_of_torch(
    batch: int, above: int, ranks: int, dtype: torch.dtype, poisoned_empty: None
) -> None:
    for seed in range(8):
        children = some_siblings(batch, above, ranks, seed, CPU)
        table, children = in_width(some_table(batch, max(ranks, 6), seed, CPU), children, dtype)
        found = check_ratings(table, children)
        for row in found.priority.flatten(0, 1):
            assert bool((row[row > 0].diff() <= 0).all())


def test_tables_and_distributions_of_other_widths_are_rated_as_in_torch_and_strides_change_nothing() -> None:
    table, children = some_table(2, 6, 0, CPU), some_siblings(2, 7, 5, 0, CPU)
    wide = replace(
        children, reach=children.reach.double(), probs=children.probs.double(), norms=children.norms.double()
    )
    assert check_ratings(table, wide, ROUNDING).value.dtype == torch.float64
    assert check_ratings(in_width(table, children, torch.float64)[0], children, ROUNDING).value.dtype == torch.float64
    reach, probs, norms = (
        torch.stack([part, part + 1], -1)[..., 0] for part in (children.reach, children.probs, children.norms)
    )
    passed, tests = (torch.stack([part, part + 1], -1)[..., 0] for part in (table.passed, table.tests))
    expected = check_ratings(table, children)
    far = Siblings(reach, probs, norms)
    found = check_ratings(replace(table, passed=passed, tests=tests), far)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("edge", ["sharpness", "confidence"])
def test_a_number_at_an_edge_of_the_table_falls_below_it(edge: str, dtype: torch.dtype) -> None:
    table = some_table(1, 2, 0, CPU)
    # Powers of two have exact squares and quotients.
    edges = torch.tensor([2.0**-k for k in range(2 * len(getattr(table, edge)), 0, -2)])
    norms = torch.tensor([[2.0**-k for k in range(8)]])
    probs = torch.tensor([[[2.0**-k, 0.0] for k in range(8)]])
    given = in_width(replace(table, **{edge: edges}), Siblings(torch.ones(1, 8), probs, norms), dtype)
    cells = check_ratings(*given).cells
    assert len(set(cells[0, :, 0, 0 if edge == "sharpness" else 1].tolist())) > 4


def test_distributions_that_are_used_up_and_tables_that_only_pass_are_rated_as_in_torch() -> None:
    table = some_table(1, 4, 0, CPU)
    sure = replace(table, passed=table.tests.clone())
    beyond = replace(table, passed=table.tests * 1.5)  # more passed than tested: counts are rounded
    probs = torch.tensor([[[0.75, 0.25, 0.25, 0.5], [1.0, 0.5, 0.25, 0.125], [0.5, 0.5, 0.0, 0.25], [0.0] * 4]])
    norms, reach = torch.linalg.vector_norm(probs, dim=-1), torch.tensor([[1.0, 0.5, 0.25, 1.0]])
    for given in (table, sure, beyond):
        check_ratings(given, Siblings(reach, probs, norms))


@pytest.mark.parametrize("m", [0, 1, 2, 9])
@pytest.mark.parametrize("batch", [1, 3])
def test_texts_are_read_as_in_torch(batch: int, m: int) -> None:
    generator = torch.Generator().manual_seed(m)
    memories = [Memory.empty(batch, CPU) for _ in range(2)]
    for turn in range(6):
        tokens = torch.randint(6, (batch, m + 3, 2), generator=generator)[..., turn % 2]
        path = torch.randint(-1, m + 3, (batch, m, 2), generator=generator, dtype=torch.int32)[..., turn % 2]
        lengths = torch.randint(m + 1, (batch,), generator=generator, dtype=torch.int32 if turn % 3 else torch.int64)
        given = tokens, path if turn % 2 else None, lengths
        reference.remember(memories[0], *given)
        cpu_ratings.remember(memories[1], *given)
        one, other = memories
        assert torch.equal(one.places[:, :-1], other.places[:, :-1]) and torch.equal(one.last, other.last)
    assert bool(one.places[:, :-1].any()) == (m > 0)


def test_shares_are_rounded_as_in_torch_before_they_fall_into_cells() -> None:
    table, children = some_table(1, 6, 0, CPU), some_siblings(1, 30, 4, 0, CPU)
    shares = children.probs / (1 - reference.spent_before(children.probs)).clamp(min=1e-6)
    count = len(table.confidence)
    for edges in shares[..., 1:].flatten().unique().split(count):
        if len(edges) == count:
            check_ratings(replace(table, confidence=edges), children)


def test_no_node_is_rated_as_in_torch() -> None:
    children = Siblings(torch.rand(1, 0), torch.rand(1, 0, 3), torch.rand(1, 0))
    assert check_ratings(some_table(1, 4, 0, CPU), children).cells.shape == (1, 0, 3, 2)


WRONG_CHILDREN: dict[str, Callable[[Siblings], Siblings]] = {
    "another sharpness": lambda children: replace(children, norms=children.norms * 0.7),
    "another reach": lambda children: replace(children, reach=children.reach * 1.001),
    "siblings in another order": lambda children: replace(children, probs=children.probs.flip(-1)),
}


@pytest.mark.parametrize("control", WRONG_CHILDREN)
def test_ratings_that_are_wrong_in_one_thing_are_rejected(control: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table, children = some_table(3, 6, 1, CPU), some_siblings(3, 12, 5, 1, CPU)
    check_ratings(table, children)
    rate = reference.rate_by_table

    def wrong(table: Table, given: Siblings) -> Ratings:
        return rate(table, WRONG_CHILDREN[control](given))

    monkeypatch.setattr(reference, "rate_by_table", wrong)
    with pytest.raises(AssertionError):
        check_ratings(table, children)


def check_ranks(given: Ranked) -> Tensor:
    """Require the reference's values, nearly, and 0 where it has 0."""
    expected, found = reference.rate_by_rank(*given), cpu_ratings.rate_by_rank(*given)
    assert found.dtype == expected.dtype and torch.equal(found > 0, expected > 0)
    assert torch.allclose(found, expected, rtol=CLOSE[found.dtype], atol=0.0)
    return found


@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize(("batch", "above", "ranks"), SIZES)
def test_ratings_by_rank_are_those_of_torch(
    batch: int, above: int, ranks: int, dtype: torch.dtype, poisoned_empty: None
) -> None:
    for seed in range(6):
        given = Ranked.draw(batch, above, ranks, seed, CPU)
        dists = {name: getattr(given.given, name).to(dtype) for name in ("reach", "probs", "norms")}
        assert check_ranks(given._replace(given=replace(given.given, **dists))).dtype == dtype


def of(ranked: Ranked) -> Words:
    """Give what is known of children."""
    assert ranked.given.words is not None
    return ranked.given.words


def test_what_no_token_stands_before_makes_no_triple_and_below_none_there_is_no_pair() -> None:
    ranked = begun(Ranked.draw(2, 7, 5, 2, CPU))
    found = check_ranks(ranked)
    nowhere = replace(of(ranked), tokens=torch.full_like(of(ranked).tokens, -1))
    assert not torch.equal(check_ranks(with_given(ranked, words=nowhere)), found)


def test_of_equal_children_the_first_is_the_likeliest_and_of_none_nothing_is_rated() -> None:
    fit = Ranked.draw(1, 4, 3, 0, CPU).fit
    fit = replace(fit, **{name: getattr(fit, name) * 0 for name in ("level", "by_confidence", "by_text")})
    level = Level(torch.tensor([1.0]), torch.ones(1))
    probs = torch.tensor([[[0.25, 0.25, 0.25], [0.0, 0.5, 0.25], [0.0, 0.0, 0.0], [1e-12, 0.0, 0.0]]])
    found = check_ranks(Ranked(fit, level, Memory.empty(1, CPU), Siblings(torch.ones(1, 4), probs, torch.zeros(1, 4))))
    assert found[0, 0, 0] > found[0, 0, 1] == found[0, 0, 2] and found[0, 1, 1] > found[0, 1, 2]
    assert not bool(found[0, 2].any()) and found[0, 3, 0] > 0


def test_ratings_by_rank_do_not_depend_on_strides() -> None:
    ranked = Ranked.draw(2, 7, 5, 3, CPU)

    def apart(owner: object, *names: str) -> dict[str, Any]:
        return {name: torch.stack([part := getattr(owner, name), part + 1], -1)[..., 0] for name in names}

    words = of(ranked)
    words = replace(words, **apart(words, "children", "tokens", "parents"))
    far = replace(ranked.given, words=words, **apart(ranked.given, "reach", "probs", "norms"))
    assert torch.equal(check_ranks(ranked._replace(given=far)), check_ranks(ranked))


def with_fit(ranked: Ranked, order: list[int]) -> Ranked:
    """Put the slopes by text into another order."""
    return ranked._replace(fit=replace(ranked.fit, by_text=ranked.fit.by_text[order]))


def with_given(ranked: Ranked, **changes: Any) -> Ranked:
    """Change the children."""
    return ranked._replace(given=replace(ranked.given, **changes))


def with_others(ranked: Ranked, name: str) -> Ranked:
    """Give children whose tokens, or what they follow, are those of others."""
    words = of(ranked)
    return with_given(ranked, words=replace(words, **{name: getattr(words, name).roll(1, -1)}))


WRONG_RANKS: dict[str, Callable[[Ranked], Ranked]] = {
    "another level": lambda ranked: ranked._replace(level=Level(ranked.level.shift + 0.1, ranked.level.weight)),
    "nothing is known of tokens": lambda ranked: with_given(ranked, words=None),
    "a text that said nothing": lambda ranked: ranked._replace(memory=Memory.empty(3, CPU)),
    "other tokens": lambda ranked: with_others(ranked, "children"),
    "below other nodes": lambda ranked: with_others(ranked, "tokens"),
    "behind other tokens": lambda ranked: with_others(ranked, "parents"),
    "another frontier": lambda ranked: with_given(ranked, words=replace(of(ranked), first=2)),
    "another sharpness": lambda ranked: with_given(ranked, norms=ranked.given.norms * 0.7),
    "siblings in another order": lambda ranked: with_given(ranked, probs=ranked.given.probs.flip(-1)),
    "pairs taken for triples": lambda ranked: with_fit(ranked, [1, 0, 2, 3]),
    "another's pairs taken for its triples": lambda ranked: with_fit(ranked, [0, 1, 3, 2]),
}


@pytest.mark.parametrize("control", WRONG_RANKS)
def test_ratings_by_rank_that_are_wrong_in_one_thing_are_rejected(
    control: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranked = Ranked.draw(3, 12, 5, 2, CPU)
    check_ranks(ranked)
    rate = reference.rate_by_rank
    monkeypatch.setattr(reference, "rate_by_rank", lambda *_: rate(*WRONG_RANKS[control](ranked)))
    with pytest.raises(AssertionError):
        check_ranks(ranked)


def test_the_api_calls_the_compiled_code_on_the_cpu_and_torch_where_the_host_must_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    for owner, by in ((cpu_ratings, "compiled"), (reference, "torch")):
        for name in ("rate_by_table", "rate_by_rank", "remember"):
            monkeypatch.setattr(owner, name, lambda *_, word=f"{name} {by}": asked.append(word))
    table, children = some_table(1, 4, 0, CPU), some_siblings(1, 3, 4, 0, CPU)

    def ask() -> list[str]:
        asked.clear()
        api.rate_by_table(table, children)
        api.rate_by_rank(*Ranked.draw(1, 3, 4, 0, CPU))
        api.remember(Memory.empty(1, CPU), torch.zeros(1, 1).long(), None, torch.ones(1).int())
        return asked

    assert ask() == ["rate_by_table compiled", "rate_by_rank compiled", "remember compiled"]
    treat_as_on_device(monkeypatch)
    assert ask() == ["rate_by_table torch", "rate_by_rank torch", "remember torch"]
