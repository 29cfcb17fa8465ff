"""How large a tree to draft: the size whose emitted tokens are worth its time, plain decoding among the choices.

Goodput (SmartSpec, arXiv 2406.14066, for trees): expected emitted tokens a step over the step's time.  Trees are
nested: that of a smaller budget is the part of a larger one with the greatest values, that of a smaller depth its top.
So one step says what every smaller tree would have emitted and cost, and only larger ones need be tried.

It knows no model and no drafter, reads nothing but values fixed before a token was drawn, and no clock: what steps take
is given, so that the same text leads to the same sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["BudgetController", "Choice", "Experience", "StepMs", "flat_choices", "layered_choices"]

NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
PRIOR = 50  # observations that the promised values are worth
DEPTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
COARSE_NODES, COARSE_DEPTHS = (4, 8, 16, 32, 64, 128), (2, 4, 8, 16)
PRIOR_KEPT = 5.0  # accepted drafts, all of them promised, that a drafter is credited with beforehand
KEPT_STEPS = 50  # steps with drafts over which the share of kept promises is averaged
LOOK = 16  # steps of plain decoding between two looks at all choices
OPENING = 16  # steps with drafts that are looked at one by one without experience; later TOGETHER are
TOGETHER = 4
TRACE = 0.1  # observations below which nothing that was seen fades
MOST_PATIENCE = 3.0
REFUSED = np.linspace(0.02, 1.0, 50)  # how often one node alone may be no prefix of the text
TYPICAL = 0.4  # how often it is, before anything was seen
DEAREST = 2.0  # of plain decoding's time, what the first tree may take
ALLOWANCE = 1.0  # steps of plain decoding that drafts may lose before they are given up
PROMPT = 1.0  # steps of plain decoding that running the prompt through a draft model takes, about
WORTH = 15.0  # observations that experience with other texts is worth
FIRST_MARGIN = 0.15  # share by which by experience a tree must be better than plain decoding to begin with it

# Milliseconds of steps by int[...] nodes, root included, and int[...] draft calls, which broadcast: float[...].
StepMs = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True, slots=True)
class Choice:
    """A size of tree.

    Attributes:
        nodes: most nodes, root included; 1 is plain decoding.
        depth: most draft calls of a model that grows layer by layer; 0 for plain decoding.
    """

    nodes: int
    depth: int


PLAIN = Choice(1, 0)


@dataclass(frozen=True, slots=True, eq=False)
class Experience:
    """What steps have shown of every choice.

    Attributes:
        seen: float[choices], observations.
        emitted: float[choices], the sum of the tokens that it emitted.
        predicted: float[choices], the sum of what the values promised for it.
        accepted: accepted drafts of all trees.
        promised: what the values promised for them.
    """

    seen: np.ndarray
    emitted: np.ndarray
    predicted: np.ndarray
    accepted: float
    promised: float


def layered_choices(max_nodes: int, max_depth: int, *, is_coarse: bool = False) -> list[Choice]:
    """List sizes for a draft model whose tree grows a layer a call, plain decoding first.

    Args:
        max_nodes: most nodes, root included.
        max_depth: most draft calls.
        is_coarse: whether to list a few sizes only, for where each one is captured before it is fast.

    Raises:
        ValueError: a size below 1.
    """
    if max_nodes < 1 or max_depth < 1:
        raise ValueError(f"max_nodes and max_depth must be at least 1, got {max_nodes} and {max_depth}")
    depths = [depth for depth in (COARSE_DEPTHS if is_coarse else DEPTHS) if depth < max_depth] + [max_depth]
    sizes = _sizes(max_nodes, COARSE_NODES if is_coarse else NODES)
    return [PLAIN, *(Choice(nodes, depth) for nodes in sizes for depth in depths if depth < nodes)]


def flat_choices(max_nodes: int) -> list[Choice]:
    """List sizes for trees whose depth costs nothing, such as retrieved ones, plain decoding first.

    Raises:
        ValueError: a size below 1.
    """
    if max_nodes < 1:
        raise ValueError(f"max_nodes must be at least 1, got {max_nodes}")
    return [Choice(nodes, nodes - 1) for nodes in (1, *_sizes(max_nodes, NODES))]


def _sizes(max_nodes: int, sizes: Sequence[int]) -> list[int]:
    """List numbers of nodes above 1: those of ``sizes`` that are smaller, and the largest."""
    return [nodes for nodes in sizes if 1 < nodes < max_nodes] + [max_nodes] * (max_nodes > 1)


class BudgetController:
    """Choose a size for every step of a batch, learning from what was accepted.

    While plain decoding is the best size its steps are only counted, and looked at together now and then: they cost
    the host next to nothing.  Counts are noisy, so drafting begins again only where it promises three times the margin.

    Args:
        choices: the sizes to choose from, plain decoding first.
        step_ms: what steps take.
        experience: what steps on other texts have shown of these choices, or None.
        is_padded: whether a step takes what its size says, however few nodes were found for it.
        behind_ms: milliseconds that a tree takes more after plain decoding.
        memory: steps over which estimates are averaged, about.
        probe_share: share of the time that may be spent on trying other sizes.
        margin: share by which another choice must be better before it is taken.

    Raises:
        ValueError: a number out of its range, or a time that is not positive.
    """

    def __init__(
        self,
        choices: Sequence[Choice],
        step_ms: StepMs,
        *,
        experience: Experience | None = None,
        is_padded: bool = False,
        behind_ms: float = 0.0,
        memory: int = 200,
        probe_share: float = 0.01,
        margin: float = 0.01,
    ) -> None:
        if not choices or choices[0] != PLAIN or len(set(choices)) != len(choices):
            raise ValueError(f"choices must differ and begin with plain decoding, got {list(choices)[:3]}")
        if memory < 1:
            raise ValueError(f"memory must be at least 1 step, got {memory}")
        if not (0 <= probe_share < 1 and 0 <= margin < 1):
            raise ValueError(f"probe_share and margin must be in [0, 1), got {probe_share} and {margin}")
        self.choices = list(choices)
        self._index = {choice: index for index, choice in enumerate(self.choices)}
        self._sizes = np.array([[choice.nodes, choice.depth] for choice in self.choices])
        most_nodes, most_depth = self._sizes.max(0)
        self._table = np.array(step_ms(np.arange(1, most_nodes + 1)[:, None], np.arange(most_depth + 1)), dtype=float)
        self._table = np.broadcast_to(self._table, (most_nodes, most_depth + 1))
        nodes, depth = self._sizes.T
        self._nominal_ms = self._table[nodes - 1, depth]
        if not (np.isfinite(self._nominal_ms).all() and (self._nominal_ms > 0).all()):
            raise ValueError(f"every time must be positive, got {self._nominal_ms.min()}")
        self._is_padded, self._behind_ms = is_padded, behind_ms
        self._decay, self._probe_share, self._margin = 1 - 1 / memory, probe_share, margin
        # Tokens of every choice if a layer of one node is refused so often, the less often the wider it is.
        width = np.maximum((nodes - 1) / np.maximum(depth, 1), 1)
        chance = 1 - REFUSED[:, None] / np.sqrt(width)
        self._laws = np.where(nodes > 1, (1 - chance ** (depth + 1)) / (1 - chance), 1.0)  # [laws, choices]
        self._seen = np.zeros(len(self.choices))  # decayed number of observations of each choice
        self._emitted = np.zeros(len(self.choices))  # decayed sum of the tokens that it emitted
        self._predicted = np.zeros(len(self.choices))  # decayed sum of what the values promised for it
        self._spent_ms = np.zeros(len(self.choices))  # decayed sum of the time that its nodes took
        self._seen[0] = self._emitted[0] = self._predicted[0] = 1.0
        self._accepted = self._promised = 0.0  # decayed sums over the drafts of all trees
        if experience is not None:
            share = min(1.0, WORTH / float(experience.seen.max()))
            self._seen, self._emitted = share * experience.seen, share * experience.emitted
            self._predicted = share * experience.predicted
            self._accepted, self._promised = share * experience.accepted, share * experience.promised
        self._spent_ms[:] = self._seen * self._nominal_ms
        self._own = np.zeros(len(self.choices))  # observations of each choice on this text
        self._known: np.ndarray | None = None  # tokens that every choice emits by experience alone
        self._current = 0
        self._credit, self._turn = 0.0, 0  # milliseconds saved for trials
        self._wanted = 0.0  # credit that the next trial costs, as last reckoned
        self._patience = 1.0  # times its cost that a trial must have saved: grows while trials change nothing
        self._plain_steps = 0  # observed since the last look at all choices
        self._waiting: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # observed likewise, all of one size
        self._tree_steps = 0
        # bool[choices, choices]: the second is no larger than the first.
        self._smaller = np.asarray((self._sizes[None] <= self._sizes[:, None]).all(2))
        if experience is not None:
            self._known = self._expected()
        self._current = self._start()
        if experience is not None and not self._current:
            self._credit = -PROMPT * float(self._nominal_ms[0])

    @property
    def best(self) -> Choice:
        """The best known size."""
        return self.choices[self._current]

    def choose(self) -> Choice:
        """Give the size of the next step: the best known one, or a trial that the time saved for trials can pay."""
        if self._plain_steps >= LOOK:
            self._count_plain()
            self._settle()
        is_off = self._current == 0
        if self._credit < self._wanted or (is_off and self._plain_steps) or not self._seen[self._current]:
            return self.choices[self._current]
        trial = self._trial()
        return self.choices[self._current if trial is None else trial]

    def observe_plain(self) -> None:
        """Take note of a step of plain decoding, which teaches nothing."""
        self._plain_steps += 1
        self._credit += self._probe_share * float(self._nominal_ms[0])

    def observe(self, choice: Choice, values: np.ndarray, depths: np.ndarray, is_accepted: np.ndarray) -> None:
        """Take note of a step.

        Args:
            choice: its size, as ``choose`` gave it.
            values: float[batch, n], estimates fixed before the nodes were drawn, never rising along a path; root
                first, 0 for padding.
            depths: int[batch, n].
            is_accepted: bool[batch, n], the accepted paths, roots included; an all-False row stood still.
        """
        ran = self._index[choice]
        is_trial = ran != self._current
        if is_trial:
            self._learn_waiting(self._current)
        else:
            self._credit += self._probe_share * float(self._nominal_ms[ran])
        self._waiting.append((values, depths, is_accepted))
        self._tree_steps += 1
        if is_trial or (self._known is None and self._tree_steps <= OPENING) or len(self._waiting) >= TOGETHER:
            self._learn_waiting(ran)
            self._settle()

    def experience(self) -> Experience:
        """Give what was seen so far."""
        self._learn_waiting(self._current)
        sums = (self._seen.copy(), self._emitted.copy(), self._predicted.copy())
        return Experience(*sums, self._accepted, self._promised)

    def goodput(self) -> np.ndarray:
        """Estimate tokens a millisecond of every choice, float[choices]."""
        return np.asarray(self._expected() / self._ms())

    def _ms(self) -> np.ndarray:
        """Estimate the milliseconds of every choice; one that was not seen is as far from what was as its size says."""
        known = self._spent_ms / np.maximum(self._seen, 1e-9)
        most = self._largest_seen()
        beyond = self._nominal_ms * float(known[most] / self._nominal_ms[most])
        return np.asarray(np.where(self._seen > 0, known, np.maximum(beyond, self._nominal_ms[0])))

    def _largest_seen(self) -> int:
        """Name what speaks for larger trees: the present one, or where none is drafted the largest that was seen."""
        if self._current and self._seen[self._current] > 0:
            return self._current
        return int(np.where(self._seen > 0, self._nominal_ms, 0.0).argmax())

    def _count_plain(self) -> None:
        """Let what is known fade by the steps of plain decoding that went by."""
        if self._plain_steps:
            self._fade(self._decay**self._plain_steps)
            for sums in (self._seen, self._emitted, self._predicted):
                sums[0] += self._plain_steps
            self._spent_ms[0] += self._plain_steps * self._nominal_ms[0]
            self._plain_steps = 0

    def _fade(self, share: float) -> None:
        """Keep a share of all counts; of what was seen at all a trace stays, which says what a trial would bring."""
        kept = np.maximum(share, np.minimum(1.0, TRACE / np.maximum(self._seen, 1e-9)))
        for sums in (self._seen, self._emitted, self._predicted, self._spent_ms):
            sums *= kept

    def _learn_waiting(self, ran: int) -> None:
        """Learn from the steps that wait, which had one size."""
        self._count_plain()
        if not self._waiting:
            return
        values, depths, is_accepted = (_stacked(parts) for parts in zip(*self._waiting, strict=True))
        self._fade(self._decay ** len(self._waiting))
        share = (1 - 1 / KEPT_STEPS) ** len(self._waiting)
        self._waiting = []
        is_live = is_accepted.max(2)
        if is_live.any():
            self._accepted = share * self._accepted + float(is_accepted.sum() - is_live.sum())
            self._promised = share * self._promised + float((values.sum(2) - 1)[is_live].sum())
            self._learn(ran, values, depths, is_accepted)

    def _learn(self, ran: int, values: np.ndarray, depths: np.ndarray, is_accepted: np.ndarray) -> None:
        """Count for the choice that ran and all smaller ones what their trees would have emitted and cost.

        All are [steps, batch, n]; a step costs what its widest and its deepest row need, and one draft call at least.
        """
        order = np.argsort(-values, axis=2, kind="stable")
        rank = np.argsort(order, axis=2, kind="stable")
        known = self._smaller[ran].copy()
        known[0] = True
        sizes = self._sizes[known][:, :, None, None, None]  # [known, 2, 1, 1, 1]
        is_inside = np.logical_and(rank < sizes[:, 0], depths <= sizes[:, 1])  # [known, steps, batch, n]
        is_inside[int(known[:ran].sum())] = True  # others may have put deeper nodes into what ran
        is_live = is_accepted.max(2)
        count = is_live.sum(1)  # of each step
        self._seen[known] += count.sum()
        self._own[known] += count.sum()
        self._emitted[known] += (is_inside & is_accepted).sum((1, 2, 3))
        self._predicted[known] += np.where(is_inside & is_live[..., None], values, 0.0).sum((1, 2, 3))
        if self._is_padded:
            self._spent_ms[known] += count.sum() * self._nominal_ms[known]
            return
        is_node = values > 0
        found = np.maximum(is_node.sum(2).max(1), 1)  # [steps]; a smaller tree would have taken as many if it could
        nodes = np.minimum(self._sizes[known, :1], found)  # [known, steps]
        depth = np.minimum(self._sizes[known, 1:], np.maximum((depths * is_node).max((1, 2)), 1))
        self._spent_ms[known] += (count * self._table[nodes - 1, depth]).sum(1)

    def _expected(self) -> np.ndarray:
        """Estimate the tokens that a step of every choice emits.

        Counts are noisy, promised values biased: a choice's own counts are joined by what its values promise, scaled
        by how promises were kept lately, as if that had been seen a fixed number of times.  What was not seen follows
        the law that what was seen suggests.
        """
        seen = np.maximum(self._seen, 1e-9)
        promised = self._predicted / seen - 1
        kept = (self._accepted + PRIOR_KEPT) / (self._promised + PRIOR_KEPT)
        expected = (self._emitted + PRIOR * (1 + kept * promised)) / (seen + PRIOR)
        is_seen = self._seen > 0
        most = self._largest_seen()
        law = self._law(most, expected) if most else np.abs(REFUSED - TYPICAL).argmin()
        beyond = np.maximum(self._laws[law], (self._smaller * np.where(is_seen, expected, 0.0)).max(1))
        return self._at_this_level(np.where(is_seen, expected, beyond))

    def _at_this_level(self, expected: np.ndarray) -> np.ndarray:
        """Correct what experience says of sizes that this text has not had: it agrees with its drafts more or less.

        A step says nothing of larger trees.  What they emitted elsewhere is worth here what the sizes that ran make of
        the difference, else the largest would always seem the best.

        Args:
            expected: float[choices], tokens a step as all observations together say.

        Returns:
            float[choices].
        """
        most = float(self._own[1:].max(initial=0.0))
        if self._known is None or most <= 0:
            return expected
        ran = int(np.where(self._own >= most, self._nominal_ms, 0.0)[1:].argmax()) + 1
        then, now = self._law(ran, self._known), self._law(ran, expected)
        share = np.minimum(self._own / most, 1.0)
        return np.asarray(share * expected + (1 - share) * self._known * self._laws[now] / self._laws[then])

    def _law(self, choice: int, tokens: np.ndarray) -> int:
        """Name the law that suits the tokens of a choice, of float[choices]."""
        return int(np.abs(self._laws[:, choice] - tokens[choice]).argmin())

    def _settle(self) -> None:
        """Go over to the choice of the greatest goodput if it is better than the present one by the margin."""
        expected, ms = self._expected(), self._ms()
        goodput = np.where(self._seen > 0.5, expected / ms, 0.0)
        best = 1 + int(goodput[1:].argmax()) if len(goodput) > 1 else 0
        if self._current:
            if goodput[best] <= (1 + self._margin) * goodput[self._current]:
                best = self._current
            if goodput[best] < (1 + self._margin) * goodput[0]:
                lost = self._tree_steps * float(ms[self._current] - expected[self._current] * ms[0])
                allowance = ALLOWANCE * float(ms[0])
                if lost >= allowance:
                    best, self._credit = 0, min(self._credit, 0.0) - allowance
        elif goodput[best] <= (1 + 3 * self._margin) * goodput[0]:
            best = 0
        if best != self._current:
            self._current, self._patience = best, 1.0

    def _trial(self) -> int | None:
        """Find a size worth trying that the credit pays for.

        While drafting is off the tree that is least behind; else one that was not seen and promises more than the
        present one, or in turn a few more nodes, more depth, a much larger one.
        """
        current = self._sizes[self._current]
        nodes, depth = self._sizes.T
        expected, ms = self._expected(), self._ms()
        is_off = self._current == 0
        promise = np.where(is_off & (nodes > 1) | (self._seen == 0), expected / ms, 0.0)
        if is_off or promise.max() > (1 + self._margin) * expected[self._current] / ms[self._current]:
            trial = int(promise.argmax())
        else:
            more_nodes = (nodes > current[0]) & (depth >= np.minimum(max(current[1], 1), nodes - 1))
            deeper = (depth > current[1]) & (nodes >= current[0])
            much_larger = (nodes > 2 * current[0]) & (depth > 2 * current[1])
            candidates = (more_nodes, deeper, much_larger)[self._turn % 3]
            if not candidates.any():
                self._turn += 1
                return None
            trial = int(np.where(candidates, ms, np.inf).argmin())
        loss = float(ms[trial] - expected[trial] * ms[self._current] / max(expected[self._current], 1e-12))
        if is_off:
            loss = self._patience * (max(loss, 0.0) + self._behind_ms)
        if loss > self._credit:
            self._wanted = self._credit + 0.5 * (loss - self._credit)  # by then counts may have changed
            return None
        self._credit -= max(loss, 0.0)
        self._wanted = 0.0
        self._turn += 1
        if is_off:
            self._patience = min(1.5 * self._patience, MOST_PATIENCE)
        return trial

    def _start(self) -> int:
        """Begin with the tree of the greatest goodput as far as can be said beforehand, or with none if none pays."""
        goodput = self.goodput()
        if self._known is not None:
            best = int(np.where(self._seen > 0, goodput, 0.0).argmax())
            return best if goodput[best] > (1 + FIRST_MARGIN) * goodput[0] else 0
        return int(np.where(self._nominal_ms <= DEAREST * self._nominal_ms[0], goodput, 0.0).argmax())


def _stacked(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Put [batch, n] arrays, one a step, into [steps, batch, most n], padded with zeros."""
    stacked = np.zeros((len(parts), len(parts[0]), max(part.shape[1] for part in parts)), parts[0].dtype)
    for room, part in zip(stacked, parts, strict=True):
        room[:, : part.shape[1]] = part
    return stacked
