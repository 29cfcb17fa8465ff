"""``stree bench fit-rates``: acceptance rates by sibling rank, from which Sequoia's trees are made."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from stree.bench.methods import Method
from stree.bench.pair import Pair
from stree.bench.records import Record
from stree.drafters import NoDrafter
from stree.generation import generate
from stree.growth import Growth, Sequoia
from stree.growth.sequoia import SOURCE
from stree.growth.stops import StoppedGrowth
from stree.models.tree_lm import TreeLM
from stree.sampling import Sampling
from stree.tree import TokenTree

__all__ = ["Rates", "fit_rates", "rank_rates", "uses_default_rates"]

DRAWS = 8  # of the children below every context
LEAST = 1e-4  # rate, and the unit of rates


@dataclass(frozen=True, slots=True)
class Rates:
    """Fitted rates of a pair.

    Attributes:
        by_temperature: rates of the ranks, from 0, by temperature.
        source: what they were fitted on, in words.
    """

    by_temperature: Mapping[float, tuple[float, ...]]
    source: str

    @classmethod
    def load(cls, path: Path, pair: Pair, temperatures: Sequence[float]) -> Rates:
        """Read what ``stree bench fit-rates`` wrote.

        Args:
            path: the file.
            pair: that they must be of.
            temperatures: that are needed.

        Raises:
            ValueError: no such file, or one of another pair or of other temperatures.
        """
        names = pair.names
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            rates = {float(t): tuple(Sequoia(rates=tuple(found)).rates or ()) for t, found in record["rates"].items()}
            fitted = record["target"], record["drafter"]
            source = f"{record['contexts']} contexts of {', '.join(record['suites'])}"
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} holds no rates of 'stree bench fit-rates': {error}") from error
        if fitted != names:
            raise ValueError(f"the rates in {path} are of target and drafter {fitted}, not {names}")
        if record.get("weights", pair.weights) != pair.weights:
            raise ValueError(f"the rates in {path} are of other weights of {names}; fit them again")
        if missing := {*temperatures} - rates.keys():
            raise ValueError(f"{path} has rates of the temperatures {[*rates]}, not of {[*missing]}")
        return cls(rates, f"fitted to {names[1]} for {names[0]} on {source}")

    def of(self, method: Method, temperature: float) -> Method:
        """Return a method whose Sequoia trees are made from these rates, unless its name gives its own."""
        return method if method.growth is None else replace(method, growth=self._fitted(method.growth, temperature))

    def _fitted(self, growth: Growth, temperature: float) -> Growth:
        if not uses_default_rates(growth):
            return growth
        if isinstance(growth, StoppedGrowth):
            return replace(growth, base=self._fitted(growth.base, temperature))
        assert isinstance(growth, Sequoia)
        source = f"{self.source}, temperature {temperature:g}"
        return replace(growth, rates=self.by_temperature[temperature], source=source)


def uses_default_rates(growth: Growth | None) -> bool:
    """Whether a growth is Sequoia's tree of the default rates."""
    if isinstance(growth, StoppedGrowth):
        return uses_default_rates(growth.base)
    return isinstance(growth, Sequoia) and growth.source == SOURCE


def fit_rates(
    pair: Pair, prompts: Sequence[Sequence[int]], kinds: Sequence[Sampling], *, ranks: int, new_tokens: int, seed: int
) -> Record:
    """Measure rates on texts of the target alone, by recursive rejection as Sequoia's paper does (arXiv 2402.12374).

    Args:
        pair: target and draft model.
        prompts: tokens of the texts' beginnings.
        kinds: how tokens are drawn, one for each set of rates.
        ranks: most siblings.
        new_tokens: of every text; a context is the text before each of them.
        seed: of texts and drawn children.

    Returns:
        ``rates`` by temperature, and the number of ``contexts`` at each.

    Raises:
        NotImplementedError: the pair has no draft model.
    """
    if pair.drafter is None:
        raise NotImplementedError("rates are fitted for a draft model; a draft head or no drafter has none")
    rates, contexts = {}, len(prompts) * new_tokens
    for sampling in kinds:
        total, generator = torch.zeros(ranks, dtype=torch.float64), torch.Generator().manual_seed(seed)
        for number, prompt in enumerate(prompts):
            (text,) = generate(
                pair.target, [prompt], NoDrafter(), sampling=sampling, max_new_tokens=new_tokens, ignore_eos=True,
                seed=seed + number,
            ).sequences  # fmt: skip
            target, draft = (_logits(lm, prompt, text[len(prompt) :]) for lm in (pair.target, pair.drafter))
            total += rank_rates(sampling.probs(target), sampling.draft_probs(draft)[0], ranks, sampling, generator)
        mean = (total / len(prompts)).cummin(0).values  # chance may raise one above an earlier one
        # Rounded down, so that their sum stays at most 1; Sequoia's are above 0.
        known = [round(int(rate / LEAST) * LEAST, 4) for rate in mean.tolist() if rate >= LEAST]
        rates[str(sampling.temperature)] = known or [LEAST]
    return {"contexts": contexts, "rates": rates}


def rank_rates(target: Tensor, draft: Tensor, ranks: int, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """Return how probably the child of each rank is the accepted one, on average over contexts.

    At temperature 0 the children are the draft's most probable tokens, and the target's argmax is accepted.  Otherwise
    they are drawn without replacement and tested by recursive rejection, each draw counted by its probability to pass.

    Args:
        target: float[contexts, vocab], the target's distributions.
        draft: likewise the draft's.
        ranks: number of children.
        sampling: of both.
        generator: draws children.

    Returns:
        float64[ranks], on the CPU.
    """
    if sampling.is_greedy:
        places = draft.topk(min(ranks, draft.shape[1])).indices
        rates = (places == target.argmax(-1, keepdim=True)).double().mean(0)
    else:
        residual, rest = (probs.double().cpu().repeat_interleave(DRAWS, 0) for probs in (target, draft))
        untested, found = torch.ones(len(rest), dtype=torch.float64), []
        for _ in range(min(ranks, draft.shape[1])):
            is_left = rest.sum(-1) > 0
            token = torch.multinomial(torch.where(is_left[:, None], rest, 1.0), 1, generator=generator)
            chance = (residual.gather(1, token) / rest.gather(1, token)).squeeze(1).clamp(max=1)
            chance = torch.where(is_left, chance, 0.0)
            found.append((untested * chance).mean())
            untested = untested * (1 - chance)
            residual = _normalised((residual - rest).clamp(min=0))
            rest = _normalised(rest.scatter(1, token, 0.0))
        rates = torch.stack(found)
    return torch.nn.functional.pad(rates.cpu(), (0, ranks - len(rates)))


def _normalised(weights: Tensor) -> Tensor:
    """Divide float[contexts, vocab] by its sums; a row of zeros stays as it is."""
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)


@torch.no_grad()
def _logits(lm: TreeLM, prompt: Sequence[int], new: Sequence[int]) -> Tensor:
    """Return float[len(new), vocab], the logits of each new token."""
    state = lm.new_state(1, len(prompt) + len(new) + 1, len(new))
    first = lm.prefill(state, torch.tensor([list(prompt)], device=lm.device))
    tree = TokenTree.chain(torch.tensor([list(new)], device=lm.device))
    return torch.cat([first[:, None], lm.verify(state, tree)[:, :-1]], 1)[0]
