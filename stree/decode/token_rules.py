"""Bias, penalties, and allowed and forbidden tokens of a text, checked."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stree.checks import check_numbers, integer
from stree.decode.prompts import token_ids

__all__ = ["RULES", "TokenRules", "check_names", "token_mask"]

# Options of ``generate``, and their values that ask for nothing.
RULES: dict[str, Any] = {
    "logit_bias": None, "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0,
    "allowed_token_ids": None, "bad_words": None, "min_new_tokens": 0,
}  # fmt: skip
MOST, MOST_PENALTY = 1e20, 1000.0  # with which all sums and quotients are finite in float32


@dataclass(frozen=True, slots=True, eq=False)
class TokenRules:
    """How the logits of one text depend on its tokens, applied in this order, of which the last three only exclude.

    The order is that of transformers' and vLLM's processors.

    Attributes:
        logit_bias: added to the logits of tokens.
        repetition_penalty: divides positive logits of tokens of the text, prompt included, and multiplies others (CTRL:
            Keskar et al., 2019).
        frequency_penalty: subtracted from a token's logit for each time that it is among the new tokens.
        presence_penalty: subtracted once where it is among them.
        allowed_token_ids: all others are excluded; None for no limit.
        bad_words: token lists; the last token of one is excluded after its others, the prompt's tokens included.
        min_new_tokens: the stop tokens are excluded before so many new tokens.
        stops: the stop tokens, where ``min_new_tokens`` excludes them.
    """

    logit_bias: Mapping[int, float] | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    allowed_token_ids: frozenset[int] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_new_tokens: int = 0
    stops: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls, vocab_size: int, stops: frozenset[int], max_new_tokens: int, *, logit_bias: Any = None,
        repetition_penalty: Any = 1.0, frequency_penalty: Any = 0.0, presence_penalty: Any = 0.0,
        allowed_token_ids: Any = None, bad_words: Any = None, min_new_tokens: Any = 0,
    ) -> TokenRules:  # fmt: skip
        """Check the options, which are those of ``generate``.

        Raises:
            TypeError: an object or a number of another kind.
            ValueError: a number out of its range, a token outside the vocabulary, an empty list, or options that
                together may leave no token.
        """
        penalty = _number("repetition_penalty", repetition_penalty)
        if not 1 / MOST_PENALTY <= penalty <= MOST_PENALTY:
            bounds = f"[{1 / MOST_PENALTY}, {MOST_PENALTY}]"
            raise ValueError(f"repetition_penalty must be in {bounds}, got {repetition_penalty}")
        least = integer("min_new_tokens", min_new_tokens)
        if not 0 <= least <= max_new_tokens:
            raise ValueError(f"min_new_tokens must be in [0, max_new_tokens {max_new_tokens}], got {min_new_tokens}")
        rules = cls(
            _bias(logit_bias, vocab_size), penalty, _bounded("frequency_penalty", frequency_penalty),
            _bounded("presence_penalty", presence_penalty), _allowed(allowed_token_ids, vocab_size),
            _words(bad_words, vocab_size), least, stops if least else frozenset(),
        )  # fmt: skip
        excluded = {word[-1] for word in rules.bad_words} | rules.stops
        allowed = range(vocab_size) if rules.allowed_token_ids is None else rules.allowed_token_ids
        if len(excluded) >= len(allowed) and excluded.issuperset(allowed):
            raise ValueError("allowed_token_ids, bad_words and min_new_tokens may leave no token to draw")
        return rules

    @property
    def parts(self) -> frozenset[str]:
        """Which operations the rules need."""
        has_single = any(len(word) == 1 for word in self.bad_words)
        needed = {
            "bias": bool(self.logit_bias) or self.allowed_token_ids is not None or has_single,
            "repetition": self.repetition_penalty != 1,
            "counts": bool(self.frequency_penalty or self.presence_penalty),
            "words": any(len(word) > 1 for word in self.bad_words),
            "minimum": bool(self.stops),
        }
        return frozenset(name for name, is_needed in needed.items() if is_needed)

    @property
    def words_shape(self) -> tuple[int, int]:
        """Number of the bad words of several tokens, and the length of the longest."""
        lengths = [len(word) for word in self.bad_words if len(word) > 1]
        return len(lengths), max(lengths, default=0)

    def bias(self, vocab_size: int) -> Tensor:
        """Return float32[vocab], what is added to the logits of every node: -inf where a token is always excluded."""
        bias = torch.zeros(vocab_size, device="cpu")
        for token, value in (self.logit_bias or {}).items():
            bias[token] = value
        if self.allowed_token_ids is not None:
            bias[~token_mask(self.allowed_token_ids, vocab_size)] = -torch.inf
        bias[[word[0] for word in self.bad_words if len(word) == 1]] = -torch.inf
        return bias


def check_names(rules: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return options; refuse those that are no token rules.

    Raises:
        TypeError: it names the first of them.
    """
    other = next((name for name in rules if name not in RULES), None)
    if other is not None:
        raise TypeError(f"unknown option {other}; token rules are {', '.join(RULES)}")
    return rules


def token_mask(tokens: Collection[int], vocab_size: int) -> Tensor:
    """Return bool[vocab], whether each token is one of some tokens; on the host."""
    mask = torch.zeros(vocab_size, dtype=torch.bool, device="cpu")
    mask[[*tokens]] = True
    return mask


def _number(name: str, value: Any) -> float:
    check_numbers(**{name: value})
    return float(value)


def _bounded(name: str, value: Any) -> float:
    number = _number(name, value)
    if not -MOST <= number <= MOST:
        raise ValueError(f"{name} must be in [{-MOST}, {MOST}], got {number}")
    return number


def _bias(bias: Any, vocab_size: int) -> dict[int, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, Mapping):
        raise TypeError(f"logit_bias must be a dict of tokens and numbers, got {bias!r:.80}")
    tokens = _tokens("logit_bias", bias.keys(), vocab_size)
    return {token: _bounded("logit_bias", value) for token, value in zip(tokens, bias.values(), strict=True)}


def _allowed(tokens: Any, vocab_size: int) -> frozenset[int] | None:
    return None if tokens is None else frozenset(_tokens("allowed_token_ids", tokens, vocab_size, least=1))


def _words(words: Any, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    if words is None:
        return ()
    if not isinstance(words, Sequence) or isinstance(words, str):
        raise TypeError(f"bad_words must be a list of token lists, got {words!r:.80}")
    found = tuple(tuple(_tokens("bad_words", word, vocab_size, least=1)) for word in words)
    if not found:
        raise ValueError("bad_words must hold at least one token list, got none")
    return found


def _tokens(name: str, tokens: Iterable[Any], vocab_size: int, least: int = 0) -> list[int]:
    """Return token ids of the vocabulary."""
    found = token_ids(name, tokens)
    if len(found) < least:
        raise ValueError(f"{name} must hold at least one token, got none")
    bad = next((token for token in found if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise ValueError(f"{name} has token {bad}, outside the vocabulary of {vocab_size}")
    return found
