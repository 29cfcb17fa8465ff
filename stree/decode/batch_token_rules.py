"""Token rules of a batch, for all nodes of all trees at once.

A node's counts are those of its text plus those of its ancestors.  All is tensors with a row for each sequence, so a
captured step reads the present values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stree.decode.token_rules import TokenRules, token_mask
from stree.tree import TokenTree

__all__ = ["BatchTokenRules"]

REPETITION, FREQUENCY, PRESENCE, MIN_NEW, PROMPT = range(5)  # columns of the numbers of a row
NEUTRAL = (1.0, 0.0, 0.0, 0.0, 0.0)


class BatchTokenRules:
    """The rules of a batch, with a row for each sequence; memory is allocated when a rule first needs it.

    Args:
        batch: rows.
        vocab_size: of the logits.
        device: of the tensors.

    Attributes:
        parts: operations that run: none where no running sequence needs one, else all that some row has needed, so
            that few kinds of steps are captured.
    """

    def __init__(self, batch: int, vocab_size: int, device: torch.device) -> None:
        self.parts: frozenset[str] = frozenset()
        self._vocab_size, self._device, self._needed = vocab_size, device, self.parts
        self._has_rules = [False] * batch
        self._is_neutral = [True] * batch  # whether a row's tensors change nothing
        # Allocated here, so that captured steps find them at one place.
        self._numbers = torch.tensor([NEUTRAL] * batch, dtype=torch.float64, device=device).view(batch, len(NEUTRAL))
        self._bias: Tensor | None = None  # float32[batch, vocab]
        self._is_stop: Tensor | None = None  # bool[batch, vocab]
        self._words: Tensor | None = None  # int64[batch, words, length], right-aligned, padded by -1

    @property
    def key(self) -> tuple[str, ...]:
        """Parts of the key of captured steps: the operations and shapes that they hold."""
        shape = "" if self._words is None or "words" not in self.parts else f" {[*self._words.shape]}"
        return (f"rules {' '.join(sorted(self.parts))}{shape}",) if self.parts else ()

    @property
    def num_bytes(self) -> int:
        """Bytes of all that is kept between steps."""
        return sum(part.nbytes for part in vars(self).values() if isinstance(part, Tensor))

    def begin(self, row: int, rules: TokenRules, prompt_length: int) -> None:
        """Write the rules of the sequence that a row holds from now on, in place."""
        self._use(row, rules.parts)
        if self._is_neutral[row] and not rules.parts:
            return
        self._is_neutral[row] = not rules.parts
        numbers = (rules.repetition_penalty, rules.frequency_penalty, rules.presence_penalty, rules.min_new_tokens)
        self._numbers[row] = torch.tensor([*numbers, prompt_length], dtype=torch.float64)
        shape = len(self._has_rules), self._vocab_size
        if self._bias is None and "bias" in rules.parts:
            self._bias = torch.zeros(shape, device=self._device)
        if self._bias is not None:
            self._bias[row] = rules.bias(self._vocab_size).to(self._device)
        if self._is_stop is None and "minimum" in rules.parts:
            self._is_stop = torch.zeros(shape, dtype=torch.bool, device=self._device)
        if self._is_stop is not None:
            self._is_stop[row] = token_mask(rules.stops, self._vocab_size).to(self._device)
        self._write_words(row, [word for word in rules.bad_words if len(word) > 1])

    def end(self, row: int) -> None:
        """Do without the rules of a row whose sequence has ended; its tensors stay as they are."""
        self._use(row, frozenset())

    def _use(self, row: int, parts: frozenset[str]) -> None:
        self._has_rules[row], self._needed = bool(parts), self._needed | parts
        self.parts = self._needed if any(self._has_rules) else frozenset()

    def _write_words(self, row: int, words: list[tuple[int, ...]]) -> None:
        """Write the words of several tokens of a row; where there is no room for them, memory is allocated anew."""
        if self._words is None and not words:
            return
        count, length = len(words), max(map(len, words), default=0)
        old = torch.full((len(self._has_rules), 0, 0), -1, device=self._device) if self._words is None else self._words
        if count > old.shape[1] or length > old.shape[2] or self._words is None:
            most, longest = max(count, old.shape[1]), max(length, old.shape[2])
            self._words = old.new_full((len(old), most, longest), -1)
            self._words[:, : old.shape[1], longest - old.shape[2] :] = old
        most, longest = self._words.shape[1:]
        padded = [[-1] * (longest - len(word)) + [*word] for word in words]
        self._words[row] = torch.tensor([*padded, *[[-1] * longest] * (most - count)])

    def first(self, tokens: Tensor, rows: Tensor, lengths: Tensor, logits: Tensor) -> Tensor:
        """Process float[count, vocab] logits of what follows int64[count] tokens of the prompts of int64[count] rows.

        Args:
            tokens: int64[batch, max_length], the texts of all rows.
            rows: that begin.
            lengths: of their prompts.
            logits: of their first tokens.
        """
        if not self.parts:
            return logits
        own = BatchTokenRules(0, self._vocab_size, self._device)
        own.parts, own._numbers = self.parts, self._numbers[rows]
        own._bias, own._is_stop, own._words = (
            None if part is None else part[rows] for part in (self._bias, self._is_stop, self._words)
        )
        last = tokens[rows, lengths - 1][:, None]
        root = TokenTree.unchecked(last, torch.full_like(last, -1, dtype=torch.int32))
        return own(tokens[rows], lengths - 1, root, logits[:, None])[:, 0]

    def __call__(self, tokens: Tensor, lengths: Tensor, tree: TokenTree, logits: Tensor) -> Tensor:
        """Return the processed logits of trees; nothing is read by the host.

        Args:
            tokens: int64[batch, max_length].
            lengths: int64[batch], tokens before the trees' roots.
            tree: of n nodes.
            logits: float[batch, columns, vocab] of its last columns.
        """
        if not self.parts:
            return logits
        out = logits.to(torch.promote_types(logits.dtype, torch.float32))
        columns, vocab = logits.shape[1:]
        on_path = tree.ancestor_mask[:, -columns:]
        is_text = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        numbers = [column[:, None, None] for column in self._numbers.unbind(1)]
        if self._bias is not None and "bias" in self.parts:
            out = out + self._bias[:, None].to(out.dtype)
        if "repetition" in self.parts:
            penalty = numbers[REPETITION].to(out.dtype)
            occurs = _counts(tokens, is_text, tree.tokens, on_path, vocab, torch.bool)
            out = torch.where(occurs, torch.where(out < 0, out * penalty, out / penalty), out)
        position = lengths[:, None] + tree.depths
        if "counts" in self.parts:
            prompt = numbers[PROMPT][..., 0]
            is_new = is_text & (torch.arange(tokens.shape[1], device=tokens.device) >= prompt)
            counts = _counts(tokens, is_new, tree.tokens, on_path & (position >= prompt)[:, None], vocab, out.dtype)
            out = out - numbers[FREQUENCY].to(out.dtype) * counts
            out = out - numbers[PRESENCE].to(out.dtype) * (counts > 0)
        if self._words is not None and "words" in self.parts:
            recent = _last_tokens(tokens, lengths, tree, columns, self._words.shape[2] - 1)
            out = out.masked_fill(_ends_of_words(self._words, recent, vocab), -torch.inf)
        if self._is_stop is not None and "minimum" in self.parts:
            num_new = position[:, -columns:, None] + 1 - numbers[PROMPT]
            out = out.masked_fill((num_new < numbers[MIN_NEW]) & self._is_stop[:, None], -torch.inf)
        return out.to(logits.dtype)


def _counts(tokens: Tensor, is_text: Tensor, nodes: Tensor, on_path: Tensor, vocab: int, dtype: torch.dtype) -> Tensor:
    """Count the tokens of texts and paths, or with bool tell which occur: [batch, columns, vocab].

    Args:
        tokens: int64[batch, max_length].
        is_text: bool[batch, max_length], those that count.
        nodes: int64[batch, n], tokens of the trees.
        on_path: bool[batch, columns, n], those that count for each column.
        vocab: tokens of the vocabulary.
        dtype: of the counts.
    """
    # What does not count is written to an entry past the vocabulary.
    counts = torch.zeros(len(tokens), vocab + 1, dtype=dtype, device=tokens.device)
    of_text, of_path = torch.where(is_text, tokens, vocab), torch.where(on_path, nodes[:, None], vocab)
    if dtype == torch.bool:
        whole = counts.scatter_(1, of_text, True)[:, None].repeat(1, on_path.shape[1], 1)
        return whole.scatter_(2, of_path, True)[..., :vocab]
    ones = torch.ones_like(of_text, dtype=dtype)
    whole = counts.scatter_add_(1, of_text, ones)[:, None].repeat(1, on_path.shape[1], 1)
    return whole.scatter_add_(2, of_path, torch.ones_like(of_path, dtype=dtype))[..., :vocab]


def _last_tokens(tokens: Tensor, lengths: Tensor, tree: TokenTree, columns: int, count: int) -> Tensor:
    """Return the last ``count`` tokens of the text that ends in each of the last columns, -2 before its beginning."""
    n = tree.tokens.shape[1]
    depths = torch.where(tree.ancestor_mask[:, -columns:], tree.depths[:, None].long(), n)
    by_depth = torch.zeros_like(depths[..., :1]).repeat(1, 1, n + 1)
    by_depth.scatter_(2, depths, tree.tokens[:, None].expand_as(depths))
    wanted = tree.depths[:, -columns:, None] + torch.arange(1 - count, 1, device=tokens.device)
    place = lengths[:, None, None] + wanted
    of_text = tokens.gather(1, place.clamp(0, tokens.shape[1] - 1).flatten(1)).view_as(place)
    recent = torch.where(wanted < 0, of_text, by_depth.gather(2, wanted.clamp(min=0).long()))
    return torch.where(place < 0, -2, recent)


def _ends_of_words(words: Tensor, recent: Tensor, vocab: int) -> Tensor:
    """Return bool[batch, columns, vocab], the tokens that would complete one of int64[batch, words, length] words."""
    before, last = words[:, None, :, :-1], words[:, None, :, -1]
    has_begun = ((before == recent[:, :, None]) | (before < 0)).all(-1) & (last >= 0)
    completed = torch.where(has_begun, last, vocab)
    is_end = torch.zeros(*recent.shape[:2], vocab + 1, dtype=torch.bool, device=words.device)
    return is_end.scatter_(2, completed, True)[..., :vocab]
