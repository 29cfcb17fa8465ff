"""Strings that end a text, found in the bytes of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

__all__ = ["StopStringMatch", "StopStrings", "TokenBytes"]

PREFIX = "abcdef"  # before a token while its own characters are asked for: tokenizers strip leading spaces


class TokenBytes:
    """The bytes that each token of a tokenizer adds to a text; a token may hold a part of a character only.

    Args:
        tokenizer: of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._known = tokenizer, dict[int, bytes]()
        self._prefix = tokenizer.convert_ids_to_tokens(tokenizer(PREFIX, add_special_tokens=False)["input_ids"])
        self._num_before = len(tokenizer.convert_tokens_to_string(self._prefix))

    def __getitem__(self, token: int) -> bytes:
        if token not in self._known:
            name = self._tokenizer.convert_ids_to_tokens(token)
            self._known[token] = b"" if name is None else self._bytes(name)  # ids beyond the tokenizer's write nothing
        return self._known[token]

    def _bytes(self, name: str) -> bytes:
        """Turn a token's name into its bytes."""
        if self._is_byte_level and all(character in self._byte_of for character in name):
            return bytes(self._byte_of[character] for character in name)
        if self._has_byte_tokens and len(name) == 6 and name.startswith("<0x"):
            return bytes.fromhex(name[3:5])
        return self._text(name).encode()

    def _text(self, name: str) -> str:
        """Return the characters that a token adds to a text."""
        text: str = self._tokenizer.convert_tokens_to_string([*self._prefix, name])
        return text[self._num_before :]

    @cached_property
    def _is_byte_level(self) -> bool:
        """Whether each character of a token's name is a byte, as in GPT-2's vocabulary."""
        return self._text("\u0120") == " "

    @cached_property
    def _has_byte_tokens(self) -> bool:
        """Whether a token such as <0x41> is a byte, as in SentencePiece's vocabularies."""
        return self._text("<0x41>") == "A"

    @cached_property
    def _byte_of(self) -> dict[str, int]:
        """GPT-2's table: printable characters are their own bytes, the others follow from U+0100 on."""
        printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
        others = [byte for byte in range(256) if byte not in printable]
        return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


class StopStrings:
    """Strings that end a text: one of them must be in it, across any tokens, and end in the last token.

    Args:
        tokenizer: of transformers, of the model; or the ``TokenBytes`` of one, which several objects may share.
        strings: none empty.

    Raises:
        ValueError: an empty string, none at all, or no tokenizer.
        TypeError: something that is no string.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str]) -> None:
        bad = next((one for one in strings if not isinstance(one, str)), None)
        if bad is not None:
            raise TypeError(f"stop_strings must be strings, got {bad!r:.80}")
        if not strings or not all(strings):
            raise ValueError(f"stop_strings must be strings of at least one character, got {[*strings]!r:.80}")
        if tokenizer is None:
            raise ValueError("stop_strings need the model's tokenizer: tokenizer=")
        self.token_bytes = tokenizer if isinstance(tokenizer, TokenBytes) else TokenBytes(tokenizer)
        self.strings = [one.encode() for one in strings]

    @property
    def longest(self) -> int:
        """Bytes of the longest string."""
        return max(map(len, self.strings))

    def match(self, prompt: Sequence[int]) -> StopStringMatch:
        """Begin with a text's prompt, in which a string may begin."""
        return StopStringMatch(self, prompt)


class StopStringMatch:
    """Looks for the stop strings of one text as its tokens come."""

    needs_logits = False

    def __init__(self, stops: StopStrings, prompt: Sequence[int]) -> None:
        self._stops, self._tail = stops, b""
        for token in reversed(prompt):
            if len(self._tail) >= stops.longest:
                break
            self._tail = stops.token_bytes[token] + self._tail

    def observe(self, tokens: Sequence[int], logits: Any = None) -> int | None:
        """Return how many of the next tokens complete a stop string, or None."""
        for count, token in enumerate(tokens, 1):
            piece = self._stops.token_bytes[token]
            text = self._tail + piece
            before = len(self._tail)
            # A match that ends before the last token was there before it.
            if any(text.find(stop, max(before - len(stop) + 1, 0)) >= 0 for stop in self._stops.strings):
                return count
            self._tail = text[-self._stops.longest :]
        return None
