"""transformers' logits processors and stopping criteria, called as transformers would call them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria
from transformers.generation import logits_process as processors

from stree.decode.logits_processors import LogitsProcessor, Node

__all__ = ["BatchProcessor", "Stops", "TextObserver", "scores_of"]

TEXT_FREE = (
    processors.TemperatureLogitsWarper, processors.TopKLogitsWarper, processors.TopPLogitsWarper,
    processors.MinPLogitsWarper, processors.TopHLogitsWarper, processors.TypicalLogitsWarper,
    processors.EpsilonLogitsWarper, processors.EtaLogitsWarper, processors.InfNanRemoveLogitsProcessor,
    processors.SuppressTokensLogitsProcessor, processors.LogitNormalization,
)  # fmt: skip
# These carry something over from call to call, or change the batch.
REFUSED = (
    processors.SynthIDTextWatermarkLogitsProcessor, processors.UnbatchedClassifierFreeGuidanceLogitsProcessor,
    processors.ClassifierFreeGuidanceLogitsProcessor, processors.WhisperTimeStampLogitsProcessor,
)  # fmt: skip


class BatchProcessor:
    """A list of transformers' processors over the nodes of trees.

    Those that look at the text are called as ``generate`` calls them: with the whole batch, its left padding included,
    row b being sequence b, for some of them hold a number a row.

    Args:
        logits_processor: as prepared by transformers.
        input_ids: int64[batch, length], the padded prompts.
        lengths: true lengths of the prompts.

    Raises:
        NotImplementedError: a processor that keeps something between calls.
    """

    def __init__(self, logits_processor: LogitsProcessorList, input_ids: Tensor, lengths: Sequence[int]) -> None:
        refused = [type(one).__name__ for one in logits_processor if isinstance(one, REFUSED)]
        if refused:
            raise NotImplementedError(f"custom_generate cannot run {', '.join(refused)} along the paths of a tree")
        groups = groupby(logits_processor, key=lambda one: type(one) in TEXT_FREE)
        self._groups = [(is_free, LogitsProcessorList(group)) for is_free, group in groups]
        self.looks_at_text = any(not is_free for is_free, _ in self._groups)
        self._device = input_ids.device  # of the processors' own tensors
        self._padding = [row[: len(row) - length] for row, length in zip(input_ids, lengths, strict=True)]

    def begin(self, row: int, processors: Sequence[LogitsProcessor]) -> None:
        """Every row keeps its sequence."""

    def __call__(self, nodes: Sequence[Node], logits: Tensor) -> Tensor:
        """Process nodes of one depth: float[nodes, vocab]."""
        device, logits = logits.device, logits.to(self._device)
        calls = self._calls(nodes) if self.looks_at_text else []
        for is_free, group in self._groups:
            if is_free:
                logits = group(torch.empty(len(logits), 0, dtype=torch.long, device=self._device), logits)
                continue
            before, logits = logits, torch.empty_like(logits)
            for call in calls:
                processed = group(call.texts, before[call.rows])[[*call.places]]
                logits[[*call.places.values()]] = processed.to(logits)
        return logits.to(device)

    def _calls(self, nodes: Sequence[Node]) -> list[_Call]:
        """Arrange nodes in batches of equally long texts, each sequence at its own row."""
        texts = [torch.cat([self._padding[node.row], node.text.to(self._device)]) for node in nodes]
        by_length: dict[int, list[dict[int, int]]] = {}
        for place, node in enumerate(nodes):
            batches = by_length.setdefault(len(texts[place]), [])
            free = next((batch for batch in batches if node.row not in batch), None)
            if free is None:
                batches.append(free := {})
            free[node.row] = place
        return [self._call(batch, texts) for batches in by_length.values() for batch in batches]

    def _call(self, places: dict[int, int], texts: list[Tensor]) -> _Call:
        """Fill the rows of absent sequences with another's node, whose result is dropped."""
        filler = next(iter(places.values()))
        rows = [places.get(row, filler) for row in range(len(self._padding))]
        return _Call(places, rows, torch.stack([texts[place] for place in rows]))


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """One call of the processors.

    Attributes:
        places: the node whose result counts, by row.
        rows: the node at each row.
        texts: int64[batch, length].
    """

    places: dict[int, int]
    rows: list[int]
    texts: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Stops:
    """When a generation ends: what the decode loop checks itself, and the criteria that must be called.

    Attributes:
        token_ids: tokens that end a sequence.
        max_length: most tokens a sequence, left padding and prompt included.
        criteria: the rest.
    """

    token_ids: list[int]
    max_length: int
    criteria: StoppingCriteriaList

    @classmethod
    def of(cls, criteria: StoppingCriteriaList) -> Stops:
        """Divide the criteria that transformers prepared."""
        tokens = {int(token) for one in criteria if type(one) is EosTokenCriteria for token in one.eos_token_id}
        longest = min(one.max_length for one in criteria if type(one) is MaxLengthCriteria)
        left = [one for one in criteria if type(one) not in (EosTokenCriteria, MaxLengthCriteria)]
        return cls(sorted(tokens), longest, StoppingCriteriaList(left))


class TextObserver:
    """Calls stopping criteria after every token of a text and keeps its scores.

    Args:
        criteria: those that the decode loop does not check.
        input_ids: int64[length], the padded prompt.
        keeps_scores: whether ``scores`` are kept; criteria see them then, as under transformers.

    Attributes:
        scores: float32[1, vocab] of each new token.
    """

    def __init__(self, criteria: StoppingCriteriaList, input_ids: Tensor, keeps_scores: bool) -> None:
        self._criteria, self.needs_logits = criteria, keeps_scores
        self._text = input_ids[None]
        self.scores: list[Tensor] = []

    def observe(self, tokens: Sequence[int], logits: Tensor | None) -> int | None:
        """Observe the next tokens; return how many end the text, or None."""
        for count, token in enumerate(tokens, 1):
            if logits is not None:
                self.scores.append(logits[count - 1][None].float())
            if self._criteria:
                self._text = torch.cat([self._text, self._text.new_tensor([[token]])], 1)
                if bool(self._criteria(self._text, tuple(self.scores) if self.needs_logits else None).all()):
                    return count
        return None


def scores_of(observers: Sequence[TextObserver], columns: int) -> tuple[Tensor, ...]:
    """float32[batch, vocab] for each new column; zero where a sequence had ended."""
    empty = torch.zeros_like(observers[0].scores[0])
    filled = [[*one.scores, *[empty] * (columns - len(one.scores))] for one in observers]
    return tuple(torch.cat(column) for column in zip(*filled, strict=True))
