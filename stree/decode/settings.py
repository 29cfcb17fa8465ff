"""How the steps of a batch are drafted and verified, checked before anything runs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from stree.budget.policy import BudgetPolicy
from stree.checks import check_flags, check_object, check_sizes
from stree.decode.claims import is_own
from stree.decode.request import Batch, Request
from stree.drafters import Drafter, NoDrafter, SuffixDrafter, check_vocabulary, load
from stree.drafters.overlapped import OverlappedDrafter
from stree.drafters.target_init import drafter_and_verifier
from stree.growth import Growth, sized_growth
from stree.models.heads.causal import CausalHead
from stree.models.heads.dflash_head import OneShotHead
from stree.models.hidden_states import check_hidden_layers, check_hidden_size
from stree.models.tree_lm import TreeLM
from stree.verify import LONGEST, Verifier, name_of, verifier_of

__all__ = ["Settings"]


class Settings:
    """What all texts of a batch share: models, drafting and verification.  Not changed once made.

    Args:
        lm: the target.
        drafter: as for ``generate``, like all arguments of the same names.
        policy: makes what chooses the budget of every step, from growth and sizes; None for the budget's own.

    Attributes:
        drafter: what drafts; ``NoDrafter`` for a budget of 1.
        growth: of model drafters' trees, or None for the drafter's own.
        budget: nodes a step, "auto", or None for the default.
        verifier: the rule of verification, by name or as an object.
        rule: the rule that the caller chose.
        runs_on_device: whether neither drafter nor rule runs host code in a step.

    Raises:
        TypeError: an object or a number of another kind.
        ValueError: a number out of its range, another name, models of two vocabularies or on two devices, a head
            for a target of other sizes, or a model that was moved since it was patched.
        RuntimeError: a model in training mode, or one that would run under autocast.
    """

    def __init__(
        self, lm: TreeLM, drafter: Drafter | TreeLM | str | Path | None = None, *, growth: Growth | str | None = None,
        budget: int | str | None = None, verifier: str | Verifier = "auto", overlap: bool = False,
        allow_lossy: bool = False, cancelled: Callable[[int], bool] | None = None,
        policy: Callable[[Growth | None, Sequence[int]], BudgetPolicy] | None = None,
    ) -> None:  # fmt: skip
        check_object("lm", lm, "new_state", "stree.TreeLM(model)")
        self.growth, budget = sized_growth(growth, budget)
        if growth is not None:
            check_object("growth", self.growth, "bind", "stree.growth.Chain(4)")
        check_flags(overlap=overlap, allow_lossy=allow_lossy)
        if cancelled is not None:
            check_object("cancelled", cancelled, "__call__", "a function of a prompt's place")
        if isinstance(budget, str) and budget != "auto":
            raise ValueError(f"budget must be a number of nodes or 'auto', got {budget!r}")
        check_sizes(below=1 << 31, budget=None if isinstance(budget, str) else budget)
        self.rule = verifier_of(verifier)
        if not (allow_lossy or getattr(self.rule, "is_lossless", True)):
            what = f"{name_of(self.rule)} does not keep the target's distribution"
            raise ValueError(f"{what}; it runs only with allow_lossy=True")
        self.lm, self.cancelled, self.policy, self._overlaps = lm, cancelled, policy, overlap
        self.budget = budget if budget is None or isinstance(budget, str) else operator.index(budget)
        self.drafter = SuffixDrafter() if drafter is None else load(drafter, lm)
        self.check_models()
        drafter, self.verifier = drafter_and_verifier(self.drafter, self.growth, verifier, allow_lossy)
        drafter = OverlappedDrafter(drafter) if overlap else drafter
        self.drafter = NoDrafter() if self.budget == 1 else drafter
        self.runs_on_device = self.drafter.is_lossless and not overlap and is_own(self.rule)

    def check_models(self) -> None:
        """Refuse models that do not go together, or that cannot run now.

        Raises:
            ValueError, RuntimeError: as the class.
        """
        lm = self.lm
        if torch.get_default_device().type == "meta":
            raise ValueError("torch's default device must hold numbers, got meta; see torch.set_default_device")
        for model in self.drafter.models:
            check_vocabulary(model, lm.vocab_size)
            if model.device != lm.device:
                raise ValueError(f"drafter and target must be on one device, got {model.device} and {lm.device}")
            if isinstance(model, (CausalHead, OneShotHead)) and isinstance(lm, TreeLM):
                check_hidden_size(model.num_features, lm.model)
                check_hidden_layers(model.hidden_layers, lm.num_layers)
        for model in (lm, *self.drafter.models):
            if isinstance(model, TreeLM):  # anything with its methods may be passed in its place
                model.check_ready()

    def check_batch(self, batch: Batch) -> None:
        """Refuse texts that cannot be decoded so.

        Raises:
            ValueError: logits processors, grammars or token rules with ``overlap``, several kinds of sampling under
                ``TargetInit``, or one that the verifier does not take.
        """
        for sampling in batch.kinds:
            self.rule.check(sampling)
        if self._overlaps and (batch.processor is not None or batch.rules or batch.has_grammar):
            raise ValueError("overlap takes no logits_processor, grammar, bias, penalty or rule of tokens")
        if self.verifier == LONGEST and len(batch.kinds) > 1:
            raise ValueError(f"TargetInit takes one sampling for all prompts, got {len(batch.kinds)}")

    def check_request(self, request: Request) -> None:
        """Refuse a text that joins the batch later: its sampling or its budget, or models that cannot run now.

        Raises:
            ValueError, RuntimeError: as the class, and as the verifier.
        """
        self.check_models()
        self.rule.check(request.sampling)
        if request.budget is not None and isinstance(self.budget, int) and request.budget > self.budget:
            raise ValueError(f"budget of a request must be at most the engine's {self.budget}, got {request.budget}")
