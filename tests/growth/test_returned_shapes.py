"""What policies of a user's own return has the documented shape and dtype, or is refused by class and method."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import stree
from stree.drafters import Draft, Drafter, DraftRun, SuffixDrafter
from stree.growth import AcceptanceModel, BaseGrowth, DySpec, Layer, Plan, Slots, Stop, Stopped
from stree.growth.acceptance_model import DraftProbability
from stree.sampling import Sampling
from stree.testing import TableLM, TableModel, table_drafter
from stree.verify import VERIFIERS, Acceptance, Verifier

TABLE = TableModel.random(5, 1)


class Rating(AcceptanceModel):
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def rate(self, slots: Slots) -> Any:
        priorities, values = DraftProbability().rate(slots)
        kinds = {"one": values, "no ranks": (slots.values,) * 2, "integers": (priorities.long(), values)}
        return kinds[self.kind]


@dataclass(frozen=True)
class Rated(BaseGrowth):
    kind: str = "none"

    def plan(self, budget: int) -> Plan:
        return Plan((Layer(budget - 1, ranks=3), Layer(budget - 1, ranks=3)), num_nodes=budget - 1)

    def acceptance_model(self, batch: int, device: torch.device) -> Any:
        return Rating(self.kind) if self.kind != "none" else None


@dataclass(frozen=True)
class Ending(Stop):
    kind: str

    def draws(self, values: Tensor, dist: Tensor) -> Any:
        kinds = {"nodes": dist.amax(-1) >= 0.3, "float": dist.amax((1, 2)), "Python": True}
        return kinds.get(self.kind)

    def goes_on(self, depth: int, values: Tensor) -> Any:
        return values > 0.1 if self.kind == "goes_on" else None


class Drafting(Drafter):
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def start(self, *inputs: Any) -> Any:
        return Proposing(SuffixDrafter().start(*inputs), self.kind)


class Proposing(DraftRun):
    def __init__(self, run: DraftRun, kind: str) -> None:
        self.run, self.kind = run, kind

    def propose(self, *inputs: Any) -> Any:
        draft = self.run.propose(*inputs)
        wrong: dict[str, Any] = {"max_depth": torch.tensor(1), "values": torch.ones(2), "tree": draft.tree.tokens}
        if self.kind == "root":
            return Draft(stree.TokenTree(torch.full((2, 1), 4), torch.full((2, 1), -1, dtype=torch.int32)), None, 0)
        return replace(draft, **{self.kind: wrong[self.kind]}) if self.kind in wrong else None


class Ratios(Verifier):
    def __call__(self, *inputs: Any) -> Acceptance:
        accepted = VERIFIERS["rejection"](*inputs)
        return replace(accepted, ratios=torch.ones(2, 1))


WRONG: list[tuple[Any, str]] = [
    (Rated("one"), r"Rating.rate must return two tensors, priorities and values, .*, got float64\[2, 1, 3\]"),
    (Rated("no ranks"), r"Rating.rate must return priorities float.* = \[2, 1, 3\], got .*\[2, 1\]"),
    (Rated("integers"), r"Rating.rate must return priorities float.*, got int64\[2, 1, 3\]"),
    (Rated(), "Rated.acceptance_model must return a stree.growth.AcceptanceModel, got NoneType"),
    (Stopped(Rated("one"), Ending("")), "Rating.rate must return two tensors"),
    (Stopped(DySpec(2), Ending("nodes")), r"Ending.draws must return bool\[batch\] = \[2\], got bool\[2, 1\]"),
    (Stopped(DySpec(2), Ending("float")), r"Ending.draws must return bool\[batch\] = \[2\], got float64\[2\]"),
    (Stopped(DySpec(2), Ending("Python")), r"Ending.draws must return bool\[batch\] = \[2\], got bool"),
    (Stopped(DySpec(2), Ending("goes_on")), r"Ending.goes_on must return bool\[batch\] = \[2\], got bool\[2, \d\]"),
    (Drafting("tree"), "propose must return a Draft whose tree is a stree.TokenTree, got int64"),
    (Drafting("max_depth"), r"propose must return a Draft whose max_depth is an integer, got int64\[\]"),
    (Drafting("values"), r"propose must return values float\[batch, n\] = \[2, \d\], got float32\[2\]"),
    (Drafting("draft"), "propose must return a stree.drafters.Draft, got NoneType"),
    (Drafting("root"), r"propose must return trees whose roots are the pending tokens \[\d, \d\], got \[4, 4\]"),
    (Ratios(), r"Ratios.__call__ must return ratios float\[batch, n\] = \[2, \d\], got float32\[2, 1\]"),
]  # fmt: skip


@pytest.mark.parametrize(("policy", "message"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_shape_or_dtype_is_refused_by_class_and_method(policy: Any, message: str) -> None:
    options: dict[str, Any] = {"drafter": table_drafter(TABLE), "growth": policy}
    if isinstance(policy, Drafter):
        options = {"drafter": policy}
    elif isinstance(policy, Ratios):
        options = {"drafter": table_drafter(TABLE), "verifier": policy}
    lm = TableLM(TABLE).as_lm()
    with pytest.raises((RuntimeError, TypeError, ValueError), match=message):
        stree.generate(lm, [[0, 1, 0], [2, 2]], budget=6, sampling=Sampling(1.0), max_new_tokens=6, seed=1, **options)
