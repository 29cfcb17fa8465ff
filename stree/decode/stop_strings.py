"""Bytes of tokens, and strings that end a text, found in these bytes."""

from __future__ import annotations

import codecs
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "NewText",
    "StopSearch",
    "StopStringMatch",
    "StopStrings",
    "TokenBytes",
    "TokenPiece",
    "new_text_stops",
    "string_list",
]

PREFIX = "abcdef"  # before a token while its own characters are asked for: tokenizers strip leading spaces
UNFINISHED = "\ufffd"  # what decoding writes for part of a character


@dataclass(frozen=True, slots=True)
class TokenPiece:
    """What a token adds to a text; it may be a part of a character.

    Attributes:
        later: its bytes behind other tokens; those of a special token are its name.
        first: at the beginning of a text, where tokenizers strip a space.
        is_shown: whether a text without special tokens has them.
    """

    later: bytes
    first: bytes
    is_shown: bool


class TokenBytes:
    """The bytes that each token of a tokenizer adds to a text; a token may hold a part of a character only.

    Args:
        tokenizer: of transformers.
        shown: names of special tokens that texts show.

    Attributes:
        tokenizer: the same.
    """

    def __init__(self, tokenizer: Any, shown: Collection[str] = ()) -> None:
        self.tokenizer, self._shown, self._known = tokenizer, shown, dict[int, TokenPiece]()
        self._prefix: list[int] = tokenizer(PREFIX, add_special_tokens=False)["input_ids"]
        self._num_before = len(self._decoded(self._prefix))

    def __getitem__(self, token: int) -> bytes:
        return self.piece(token).later

    def piece(self, token: int) -> TokenPiece:
        """Return what a token adds to a text; ids beyond the tokenizer's add nothing."""
        if token not in self._known:
            name = self.tokenizer.convert_ids_to_tokens(token)
            self._known[token] = TokenPiece(b"", b"", False) if name is None else self._piece(token, name)
        return self._known[token]

    def unfinished(self, tokens: Sequence[int]) -> bytes:
        """Return the first bytes of a character that a text of tokens ends with, and whose other bytes it lacks."""
        end = b""
        for token in reversed(tokens):
            if len(end) >= 4:  # bytes of the longest characters
                break
            end = self[token] * self.piece(token).is_shown + end
        decoder = utf8_decoder()
        decoder.decode(end)
        return decoder.getstate()[0]

    def _piece(self, token: int, name: str) -> TokenPiece:
        """Read the bytes of a token off its text; those of a part of a character, which has none, off its name."""
        text = self._decoded([*self._prefix, token])[self._num_before :]
        alone = self._decoded([token])
        is_shown = name in self._shown or self._decoded([token], skip_special_tokens=True) == alone
        if UNFINISHED not in text:
            return TokenPiece(text.encode(), alone.encode(), is_shown)
        own = text.encode()
        if len(name) == 6 and name.startswith("<0x"):
            own = bytes.fromhex(name[3:5])
        elif all(character in BYTE_OF for character in name):
            own = bytes(BYTE_OF[character] for character in name)
        return TokenPiece(own, own, is_shown)

    def _decoded(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        text: str = self.tokenizer.decode(
            ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text


def _byte_level_names() -> dict[str, int]:
    """Make GPT-2's table of names of bytes: printable characters are their own, the others follow from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTE_OF = _byte_level_names()


def utf8_decoder() -> codecs.IncrementalDecoder:
    """Make a decoder that writes U+FFFD for bytes that are no character."""
    return codecs.getincrementaldecoder("utf-8")("replace")


class NewText:
    """The bytes that new tokens add, one token after the other, to the text of a prompt without special tokens.

    Args:
        token_bytes: of the tokenizer.
        prompt: tokens before them.

    Attributes:
        begin: first bytes of a character that the prompt ends with, and that the new tokens may complete.
        is_first: whether the text has no token yet.
    """

    def __init__(self, token_bytes: TokenBytes, prompt: Sequence[int]) -> None:
        self._token_bytes, self.begin = token_bytes, token_bytes.unfinished(prompt)
        self.is_first = not any(token_bytes.piece(token).is_shown for token in reversed(prompt))

    def add(self, token: int) -> tuple[bytes, bool]:
        """Return the bytes of the next token, and whether the text shows them."""
        piece = self._token_bytes.piece(token)
        own = piece.first if self.is_first else piece.later
        self.is_first &= not piece.is_shown
        return own, piece.is_shown


class StopSearch:
    """Looks for stop strings in a growing text, as it is shown and with the names of special tokens.

    Args:
        strings: none empty.
        begin: text before, in which a string may begin but not end.

    Attributes:
        is_stopped: whether a string was found.
    """

    def __init__(self, strings: Sequence[bytes], begin: bytes = b"") -> None:
        self._strings, self.is_stopped = strings, False
        self._firsts, self._longest = {stop[0] for stop in strings}, max(map(len, strings), default=0)
        self._held = begin[self._first_open(begin) :]  # what may be the beginning of a string
        self._is_shown = [True] * len(self._held)

    def add(self, piece: bytes, *, is_shown: bool = True) -> bytes:
        """Append bytes; return those shown that no string can begin in any more, or that are before one found."""
        if not self._strings:
            return piece * is_shown
        num_before = len(self._held)
        self._held += piece
        self._is_shown += [is_shown] * len(piece)
        cuts, ends = list[int](), list[int]()
        for places in (range(len(self._held)), *([] if all(self._is_shown) else [self._shown()])):
            text = self._held if len(places) == len(self._held) else bytes(self._held[place] for place in places)
            begin = bisect_left(places, num_before) + 1  # a match that ends before the piece was there before it
            found = (text.find(stop, max(begin - len(stop), 0)) for stop in self._strings)
            cuts += [places[place] for place in found if place >= 0]
            first_open = self._first_open(text)
            ends.append(places[first_open] if first_open < len(places) else len(self._held))
        self.is_stopped = bool(cuts)
        return self._release(min(cuts or ends))

    def rest(self) -> bytes:
        """Return what is held back, where the text has ended."""
        return self._release(len(self._held))

    def _shown(self) -> list[int]:
        """List the places of bytes that are shown."""
        return [place for place, is_shown in enumerate(self._is_shown) if is_shown]

    def _release(self, end: int) -> bytes:
        """Take bytes out of what is held back; return those that are shown."""
        released = bytes(byte for byte, is_shown in zip(self._held[:end], self._is_shown, strict=False) if is_shown)
        self._held, self._is_shown = self._held[end:], self._is_shown[end:]
        return released

    def _first_open(self, text: bytes) -> int:
        """Return the first place from which on a text is a proper beginning of a string, or its length."""
        for place in range(max(len(text) - self._longest + 1, 0), len(text)):
            if text[place] in self._firsts:
                end = text[place:]
                if any(len(end) < len(stop) and stop.startswith(end) for stop in self._strings):
                    return place
        return len(text)


class StopStrings:
    """Strings that end a text: one of them must be in it, across any tokens, and end in the last token.

    Args:
        tokenizer: of transformers, of the model; or the ``TokenBytes`` of one, which several objects may share.
        strings: none empty.
        in_new_text: look for them in what new tokens add, with the names of special tokens and without; by default, as
            transformers does, in the prompt's end and all new tokens with the names of special ones.

    Raises:
        ValueError: an empty string, none at all, or no tokenizer.
        TypeError: something that is no string.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str], *, in_new_text: bool = False) -> None:
        bad = next((one for one in strings if not isinstance(one, str)), None)
        if bad is not None:
            raise TypeError(f"stop_strings must be strings, got {bad!r:.80}")
        if not strings or not all(strings):
            raise ValueError(f"stop_strings must be strings of at least one character, got {[*strings]!r:.80}")
        if tokenizer is None:
            raise ValueError("stop_strings need the model's tokenizer: tokenizer=")
        self.token_bytes = tokenizer if isinstance(tokenizer, TokenBytes) else TokenBytes(tokenizer)
        self.strings, self.in_new_text = [one.encode() for one in strings], in_new_text

    def match(self, prompt: Sequence[int]) -> StopStringMatch:
        """Begin with a text's prompt."""
        return StopStringMatch(self, prompt)


def string_list(name: str, strings: Any) -> list[str]:
    """List one string, or several.

    Raises:
        TypeError: something else.
    """
    listed = [strings] if isinstance(strings, str) else strings
    if not isinstance(listed, (list, tuple, set, frozenset)) or not all(isinstance(one, str) for one in listed):
        raise TypeError(f"{name} must be strings, got {strings!r:.80}")
    return [*listed]


def new_text_stops(tokenizer: Any, strings: str | Iterable[str] | None) -> StopStrings | None:
    """Return stop strings that are looked for in what new tokens add, or None for none."""
    listed = [] if strings is None else string_list("stop_strings", strings)
    return StopStrings(tokenizer, listed, in_new_text=True) if listed else None


class StopStringMatch:
    """Looks for the stop strings of one text as its tokens come."""

    needs_logits = False

    def __init__(self, stops: StopStrings, prompt: Sequence[int]) -> None:
        self._token_bytes, self._new = stops.token_bytes, None
        if stops.in_new_text:
            self._new = NewText(stops.token_bytes, prompt)
            self._search = StopSearch(stops.strings)
            self._search.add(self._new.begin)
            return
        tail, longest = b"", max(map(len, stops.strings))
        for token in reversed(prompt):
            if len(tail) >= longest:
                break
            tail = stops.token_bytes[token] + tail
        self._search = StopSearch(stops.strings, tail)

    def observe(self, tokens: Sequence[int], logits: Any = None) -> int | None:
        """Return how many of the next tokens complete a stop string, or None."""
        for count, token in enumerate(tokens, 1):
            piece, is_shown = (self._token_bytes[token], True) if self._new is None else self._new.add(token)
            self._search.add(piece, is_shown=is_shown)
            if self._search.is_stopped:
                return count
        return None
