"""Text of tokens that arrive one by one: whole characters, cut at stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stree.decode.stop_strings import NewText, StopSearch, TokenBytes, utf8_decoder

__all__ = ["IncrementalText", "TextToken", "text_of"]


@dataclass(frozen=True, slots=True)
class TextToken:
    """Where a token is in a text.

    Attributes:
        offset: characters of the text that end before the token, whether or not they are held back.
        is_first: whether no shown token is before it.
    """

    offset: int
    is_first: bool


class IncrementalText:
    """The text that new tokens add to a prompt's, without special tokens, in pieces that never change again.

    Characters whose last byte has not come, and what may be the beginning of a stop string, are held back.  A stop
    string may have special tokens in it.  Bytes that never become a character are U+FFFD.

    Args:
        tokenizer: of transformers; or its ``TokenBytes``, which several texts may share.
        prompt: token ids before the text.
        stops: strings that end the text and do not belong to it.

    Attributes:
        text: all pieces so far.
        tokens: where each token so far is.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stops: Sequence[str] = ()) -> None:
        token_bytes = tokenizer if isinstance(tokenizer, TokenBytes) else TokenBytes(tokenizer)
        self._new, self._search = NewText(token_bytes, prompt), StopSearch([stop.encode() for stop in stops])
        self._decoder, self._counter, self._num_characters = utf8_decoder(), utf8_decoder(), 0
        self._decoder.decode(self._search.add(self._new.begin))
        self._counter.decode(self._new.begin)
        self.text, self.tokens = "", list[TextToken]()

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was found; nothing follows."""
        return self._search.is_stopped

    def push(self, tokens: Sequence[int], *, is_last: bool = False) -> str:
        """Append tokens; return the next piece, which may be empty."""
        piece = ""
        for token in tokens:
            self.tokens.append(TextToken(self._num_characters, self._new.is_first))
            own, is_shown = self._new.add(token)
            self._num_characters += len(self._counter.decode(own * is_shown))
            if not self.is_stopped:
                certain = self._search.add(own, is_shown=is_shown)
                piece += self._decoder.decode(certain, final=self.is_stopped)
        if is_last and not self.is_stopped:
            piece += self._decoder.decode(self._search.rest(), final=True)
        self.text += piece
        return piece


def text_of(tokenizer: Any, prompt: Sequence[int], tokens: Sequence[int], stops: Sequence[str] = ()) -> str:
    """Write all new tokens of a prompt, up to a stop string; as ``tokenizer.decode``, without a space at the beginning.

    Unlike it, keeps the characters beside bytes that are none, such as those of a character that the last token cuts.
    """
    token_bytes = tokenizer if isinstance(tokenizer, TokenBytes) else TokenBytes(tokenizer)
    text = IncrementalText(token_bytes, prompt, stops)
    text.push(tokens, is_last=True)
    first = next((piece for piece in map(token_bytes.piece, tokens) if piece.is_shown), None)
    if first is None or text.tokens[0].is_first:
        return text.text
    return text.text.removeprefix(first.later.removesuffix(first.first).decode(errors="replace"))
