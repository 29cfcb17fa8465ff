"""The check for authors passes all drafters of the package; a class that is added must have a case."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stree import drafters
from stree.drafters import Drafter, FusedDrafter, NoDrafter, SuffixDrafter
from stree.growth import Static
from stree.sampling import Random
from stree.testing import check_drafter, check_growth, table_drafter
from stree.testing.outcomes import all_outcomes
from stree.testing.tables import random_pair

MODEL = table_drafter(random_pair(3, 4)[1])
DRAFTERS: dict[str, Drafter] = {
    "ModelDrafter": MODEL,
    "SuffixDrafter": SuffixDrafter(),
    "FusedDrafter": FusedDrafter(MODEL, SuffixDrafter(), least_share=0.0),
    "NoDrafter": NoDrafter(),
}
IN_OTHER_TESTS = {"Drafter", "HeadDrafter"}  # heads read a target's states: tests/drafters, tests/heads


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_drafters_pass(name: str) -> None:
    assert check_drafter(DRAFTERS[name], vocab_size=3, budget=3, seeds=(0,)).worst < 1e-12


def test_no_drafter_is_left_out() -> None:
    kinds = {name: getattr(drafters, name) for name in drafters.__all__}
    found = {name for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Drafter)}
    assert found == DRAFTERS.keys() | IN_OTHER_TESTS


def draw_nine_tokens(rng: Random, cases: Tensor) -> list[Tensor]:
    probs = torch.full((len(cases), 4), 0.25)
    return [rng.choice("draft", probs, torch.zeros_like(cases), node) for node in range(9)]


def test_what_cannot_be_enumerated_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="no tree of Static.* has 2 to 3 nodes: a tree of 7 nodes"):
        check_growth(Static([2, 2]), budget=3)
    with pytest.raises(ValueError, match="there are more than .* outcomes: take a smaller budget, depth or vocabulary"):
        list(all_outcomes(draw_nine_tokens, 1, most=1000))
    with pytest.raises(ValueError, match=r"vocab_size must be in \[2, 8\] for enumeration, got 97"):
        check_drafter(SuffixDrafter(), vocab_size=97)
    with pytest.raises(TypeError, match=r"growth must be an object such as stree.growth.Chain\(4\), got 'chain:2'"):
        check_growth("chain:2")  # type: ignore[arg-type]
