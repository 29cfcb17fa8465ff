"""Steps of runs of draft heads with the target's true hidden states, and what their drafts should be drawn from."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import stree
from helpers.draft_steps import DraftSteps
from helpers.plain_heads import PlainBlocks
from helpers.tiny_heads import block_tensors, target_and_block_head, target_and_head
from helpers.tiny_models import as_commit, path_to, random_texts, relative_error
from stree.drafters import Draft, Drafter, HeadDrafter
from stree.growth import Growth, Static
from stree.sampling import Sampling
from stree.testing.enumeration import PLAIN, DraftedTrees, drafts_of
from stree.tree import TokenTree

__all__ = ["TEXTS", "BlockSteps", "HeadSteps", "MtpSteps", "SlotSteps", "drafts_of_head"]

TEXTS = random_texts(random.Random(0), [5, 1, 9])


class HeadSteps(DraftSteps):
    """Steps of a head's run on ``TEXTS``.

    Attributes:
        probe: growth and budget of the drafts whose distributions ``error`` looks at; None for the run's own growth.
    """

    probe: tuple[Growth | None, int]

    def __init__(self, lm: stree.TreeLM, head: Any, growth: Growth, temperature: float = 1.0) -> None:
        self.lm, self.head = lm, head
        super().__init__(HeadDrafter(head), lm.vocab_size, TEXTS, growth, temperature)
        self.read(range(len(TEXTS)))

    def hidden_of(self, text: list[int]) -> Tensor:
        """The target's hidden states of a text: float[len(text), layers, hidden]."""
        return self.lm.prefill(self.lm.new_state(1), torch.tensor([text]), hidden_layers=self.head.hidden_layers)[1][0]

    def read(self, rows: Any) -> None:
        """Pass the hidden states of the texts in some rows, as after a prefill."""
        states = [self.hidden_of(self.texts[row]) for row in rows]
        padded = torch.full((len(states), max(map(len, states)), *states[0].shape[1:]), 1e3)
        for place, state in enumerate(states):
            padded[place, : len(state)] = state
        self.run.read_prompts(rows, padded)

    def accept(self, tree: TokenTree, paths: list[list[int]]) -> None:
        path = as_commit([*paths, [0]])[0][:-1]
        hidden = torch.full((*path.shape, len(self.head.hidden_layers), self.head.num_features), 1e3)
        for row, nodes in enumerate(paths):
            if nodes:
                text = [*self.texts[row], *tree.tokens[row, nodes].tolist()]
                hidden[row, : len(nodes)] = self.hidden_of(text)[-len(nodes) :]
        observe = self.run.observe
        self.run.observe = lambda acceptance: observe(replace(acceptance, hidden=hidden))  # type: ignore[method-assign]
        super().accept(tree, paths)
        del self.run.observe

    def drafted_error(self, draft: Draft) -> float:
        """Largest error of the distributions that a draft's nodes were drawn from."""
        raise NotImplementedError

    def error(self, model: Any = None) -> float:
        """The same of a next draft, which is not accepted."""
        growth, budget = self.probe
        growth = self.growth if growth is None else growth.bind(Sampling(1.0))
        draft = self.run.propose(self.pending, growth, budget)
        error = self.drafted_error(draft)
        self.accept(draft.tree, [[] for _ in self.texts])
        return error


class MtpSteps(HeadSteps):
    """Steps of an MTP head's run with the target's true hidden states."""

    probe = Static([2, 2]), 7

    def __init__(self, growth: Growth, temperature: float = 1.0) -> None:
        super().__init__(*target_and_head(), growth, temperature)

    def drafted_error(self, draft: Draft) -> float:
        """Largest error of the distributions that a draft's nodes were drawn from, against the head run from anew."""
        assert draft.probs is not None
        tree, errors = draft.tree, [0.0]
        for row, text in enumerate(self.texts):
            for node in range(1, int(tree.num_nodes[row])):
                path = path_to(tree, row, node)[:-1]  # to the parent, the root first
                tokens, features = torch.tensor([[*text[1:], int(tree.tokens[row, 0])]]), self.hidden_of(text)[None]
                features = features.flatten(2)
                for below in path[1:]:
                    feedback = self.head.run(tokens, features)[1]
                    tokens = torch.cat([tokens, tree.tokens[row, below].view(1, 1)], 1)
                    features = torch.cat([features, feedback[:, -1:]], 1)
                fresh = self.head.run(tokens, features)[0][0, -1].softmax(-1)
                errors.append(relative_error(draft.probs.probs[row, int(draft.probs.row[row, node])], fresh))
        return max(errors)


class BlockSteps(HeadSteps):
    """Steps of a one-shot head, whose blocks are compared with those of a fresh context."""

    probe = Static([2, 2]), 7

    def __init__(self, growth: Growth, kind: str = "dflash", temperature: float = 1.0) -> None:
        self.kind = kind
        super().__init__(*target_and_block_head("llama", kind), growth, temperature)

    def drafted_error(self, draft: Draft) -> float:
        assert draft.probs is not None
        tree, errors = draft.tree, [0.0]
        for row, text in enumerate(self.texts):
            features = self.hidden_of(text).flatten(1)[None]
            out = self.head.draft(torch.tensor([text]), features, tree.tokens[row, :1])
            for node in range(1, int(tree.num_nodes[row])):
                parent = path_to(tree, row, node)[-2]
                logits = out[0, int(tree.depths[row, parent]) + (self.kind == "dflash")]
                if self.kind == "dspark":
                    tensors = block_tensors("dspark", 32, 97)
                    before = tensors["markov_head.markov_w1.weight"][tree.tokens[row, parent]]
                    logits = logits + tensors["markov_head.markov_w2.weight"] @ before
                found = draft.probs.probs[row, int(draft.probs.row[row, node])]
                errors.append(relative_error(found, logits.softmax(-1)))
        return max(errors)


class SlotSteps(HeadSteps):
    """Steps of a SpecBlock head, compared with plain blocks.

    Args:
        made: target, head, plain blocks of its weights, and its tokens.
        growth: of the run.
        on_device: whether the rank head is not asked where blocks hang.
    """

    probe = None, 12

    def __init__(self, made: Any, growth: Growth, *, on_device: bool = False) -> None:
        lm, head, self.plain, self.tokens = made
        self.on_device, self.begun = on_device, set[bool]()
        super().__init__(lm, head, growth)

    def drafted_error(self, draft: Draft) -> float:
        assert draft.probs is not None
        tree, errors = draft.tree, [0.0]
        for row, text in enumerate(self.texts):
            plain = PlainBlocks(self.plain.weights, self.plain.embedding)
            features, visible = plain.project(self.hidden_of(text).flatten(1)), list[int]()
            for place, token in enumerate([*text[1:], int(tree.tokens[row, 0])]):
                outputs, columns = plain.block(token, features[place], place, visible)
                visible += columns
            root = outputs, columns, visible[: -len(columns)]
            for node in range(1, int(tree.num_nodes[row])):
                expected = self._slot_of(plain, tree, row, path_to(tree, row, node)[1:-1], len(text) - 1, root)
                wanted = torch.zeros(self.lm.vocab_size).double()
                wanted[self.tokens] = plain.logits(expected).softmax(-1)
                found = draft.probs.probs[row, int(draft.probs.row[row, node])]
                errors.append(relative_error(found, wanted.float()))
        return max(errors)

    def _slot_of(self, plain: Any, tree: TokenTree, row: int, path: list[int], position: int, root: Any) -> Tensor:
        """Output of the slot that the children of a path's last node are drawn from; the path begins below the root."""
        (outputs, columns, visible), slot = root, 0
        for node in path:
            is_last = slot == plain.slots - 1
            begins = is_last or (not self.on_device and plain.rank(outputs[slot]) > 0)
            self.begun.add(begins)
            if begins:
                seen = [*visible, *columns[: slot + 1]]
                outputs, columns = plain.block(int(tree.tokens[row, node]), outputs[slot], position, seen)
                visible, slot = seen, 0
            else:
                slot += 1
        found: Tensor = outputs[slot]
        return found


class _Reading(Drafter):
    """A head's drafter whose runs have read the same hidden states after every prompt of one token."""

    def __init__(self, head: Any) -> None:
        self.drafter, shape = HeadDrafter(head), (1, 1, len(head.hidden_layers), head.num_features)
        self.hidden = torch.randn(shape, generator=torch.Generator().manual_seed(0)).double()

    def start(self, vocab_size: int, prompts: Any, rng: Any) -> Any:
        run = self.drafter.start(vocab_size, prompts, rng)
        run.read_prompts(range(len(prompts)), self.hidden.expand(len(prompts), -1, -1, -1))
        return run


def drafts_of_head(head: Any, growth: Growth, budget: int) -> DraftedTrees:
    """Enumerate the drafts of a head in float64 over three tokens."""
    return drafts_of(_Reading(head), growth, budget, PLAIN, 3)
