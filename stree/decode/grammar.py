"""Grammars of texts: JSON schemas, regular expressions, lists of choices and context-free grammars, by llguidance.

llguidance 1.9 against xgrammar 0.2.8, one CPU thread, a JSON object of five properties, masks at its 60 tokens: 28
against 74 us a mask with Mistral's 32,000 tokens, 104 against 670 us with Qwen's 151,644; to compile it 1 ms against
95 and 590 ms.  A copy of llguidance's matcher takes 0.7 us.  It reads Lark, and needs no other package.

Where the next characters are certain it allows their first token alone: the tokenizer's, or the longest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from stree.decode.stop_strings import TokenBytes

__all__ = ["CompiledGrammar", "Grammar", "GrammarEnd"]

WHITESPACE = r"( |\n[ \t]{0,32})"  # between two parts of a JSON document
MOST_CHARACTERS = 1 << 20  # of a grammar
NO_TOKEN = "the tokenizer has no token for what must follow"
# Options of Lark rules that are refused; comments, strings and expressions are matched first, and so passed over.
REFUSED_OPTIONS = re.compile(r'(?://|#)[^\n]*|"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/|[\[,]\s*(temperature|stop)\s*=')
NEEDED = "grammars need the package llguidance: pip install 'stree[grammar]'"


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise RuntimeError(NEEDED) from error
    return llguidance


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a text may be: ``generate(..., grammar=Grammar.regex("[0-9]+"), tokenizer=tokenizer)``.

    Made by ``json_schema``, ``regex``, ``choice`` or ``lark``, which refuse with a ValueError what llguidance cannot
    read or does not implement, and with a RuntimeError without the package.

    Attributes:
        kind: which of these has made it.
        source: the grammar as llguidance takes it.
    """

    kind: str
    source: str

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str | bool, *, whitespace: bool = True) -> Grammar:
        """Allow the JSON documents of a schema.

        Args:
            schema: as a dict or its JSON; ``{"type": "object"}`` for any object.
            whitespace: whether a space, or a line break and up to 32 spaces or tabs, may stand between two parts of a
                document.  Any number is not allowed: small models write them without end.
        """
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"json_schema is not JSON: {error}") from error
        if not isinstance(schema, (Mapping, bool)):
            raise TypeError(f"json_schema must be an object or its JSON, got {schema!r:.80}")
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        if not isinstance(whitespace, bool):
            raise TypeError(f"whitespace must be True or False, got {whitespace!r:.80}")
        try:
            text = json.dumps(dict(schema))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"json_schema must be made of JSON's types: {error}") from error
        options: dict[str, Any] = {"whitespace_flexible": whitespace}
        if whitespace:
            options["whitespace_pattern"] = WHITESPACE
        make = _llguidance().LLMatcher.grammar_from_json_schema
        return cls._checked("json_schema", text, lambda: make(text, overrides=options))

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Allow what a whole regular expression matches, in the syntax of Rust's ``regex`` without look-around."""
        return cls._checked("regex", pattern, lambda: _llguidance().LLMatcher.grammar_from_regex(pattern))

    @classmethod
    def choice(cls, choices: Sequence[str]) -> Grammar:
        """Allow one of some texts, none of them empty."""
        if isinstance(choices, str) or not isinstance(choices, Sequence) or not choices:
            raise TypeError(f"choice must be a list of at least one string, got {choices!r:.80}")
        for one in choices:
            if not isinstance(one, str) or not one:
                raise TypeError(f"choice must hold strings that are not empty, got {one!r:.80}")
        text = "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(one, ensure_ascii=False) for one in choices)
        return cls._checked("choice", text, lambda: _llguidance().LLMatcher.grammar_from_lark(text))

    @classmethod
    def lark(cls, grammar: str) -> Grammar:
        """Allow what a context-free grammar derives from ``start``: Lark, or llama.cpp's EBNF from ``root ::=``."""

        def make() -> Any:
            library = _llguidance()
            from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

            try:
                text = gbnf_to_lark(grammar) if "::=" in grammar else grammar
            except GbnfToLarkError as error:
                raise ValueError(str(error)) from error
            if refused := next(filter(None, REFUSED_OPTIONS.findall(text)), None):
                raise ValueError(f"{refused}= of a rule is not supported; lazy, suffix= and max_tokens= are")
            return library.LLMatcher.grammar_from_lark(text)

        return cls._checked("lark", grammar, make)

    @classmethod
    def _checked(cls, kind: str, text: Any, make: Any) -> Grammar:
        if not isinstance(text, str):
            raise TypeError(f"{kind} must be a string, got {text!r:.80}")
        if len(text) > MOST_CHARACTERS:
            raise ValueError(f"{kind} must have at most {MOST_CHARACTERS} characters, got {len(text)}")
        matcher = _llguidance().LLMatcher
        try:
            text.encode()
            source = make()
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{kind} cannot be read: {_short(error)}") from error
        is_wrong, messages = matcher.validate_grammar_with_warnings(source)
        if is_wrong:
            raise ValueError(f"{kind} cannot be read: {_short(messages[0])}")
        return cls(kind, source)

    def compile(self, tokenizer: Any, vocab_size: int, stops: frozenset[int], eos: frozenset[int]) -> CompiledGrammar:
        """Compile the grammar for a tokenizer.

        Args:
            tokenizer: a fast one of transformers, or its ``TokenBytes``.
            vocab_size: of the logits.
            stops: tokens that end the text.
            eos: the model's own ones.

        Raises:
            TypeError: another tokenizer, or none.
            ValueError: a grammar that is too complex, or allows no text.
        """
        tokens = _tokens_of(tokenizer, vocab_size)
        ends = frozenset(token for token in stops if token in eos or tokens.is_special_token(token))
        return _compiled(self, tokens, vocab_size, ends)


@dataclass(frozen=True, slots=True, eq=False)
class CompiledGrammar:
    """A grammar and the tokens of a vocabulary.

    Attributes:
        start: llguidance's matcher at the beginning of a text.
        vocab_size: of the logits.
        ends: tokens that end a text, and are allowed where it is whole.
        eos: the tokenizer's own ones, which llguidance allows there.
        tokens: llguidance's form of the tokenizer.
    """

    start: Any
    vocab_size: int
    ends: frozenset[int]
    eos: frozenset[int]
    tokens: Any

    def matcher(self) -> Any:
        """Return a matcher at the beginning of a text."""
        return self.start.deep_copy()

    def mask(self, matcher: Any) -> Any:
        """Return uint8[ceil(vocab / 8)], a bit for each token that may follow; None where nothing can.

        Raises:
            ValueError: the grammar is too complex there.
        """
        import numpy as np

        if _usable(matcher).is_stopped():
            return None
        mask = np.frombuffer(bytearray(matcher.compute_bitmask()), np.uint8)[: -(-self.vocab_size // 8)]
        _usable(matcher)
        if np.count_nonzero(mask) == 1 and not matcher.validate_tokens(_allowed(mask)[:1]):
            # Of characters that must follow, llguidance allows the first token that the tokenizer makes of them.  It is
            # none of the grammar where the tokenizer normalizes them or reads a special token in them.
            mask[:] = 0
            written = self.tokens.greedy_tokenize(matcher.compute_ff_bytes().decode(errors="ignore"))
            if matcher.validate_tokens(written[:1]):
                mask[written[0] // 8] = 1 << written[0] % 8
        if self.eos != self.ends:
            is_whole = matcher.is_accepting()
            for token in self.eos | self.ends:
                bit = np.uint8(1 << token % 8)
                is_end = is_whole and token in self.ends
                mask[token // 8] = mask[token // 8] | bit if is_end else mask[token // 8] & ~bit
        if not mask.any():
            raise ValueError(f"grammar cannot be followed: {NO_TOKEN}")
        return mask


class GrammarEnd:
    """Ends a text where its grammar lets nothing follow, or cannot be followed, for its ``problem``."""

    needs_logits = False

    def __init__(self, grammar: CompiledGrammar) -> None:
        self._grammar, self._matcher = grammar, grammar.matcher()
        self.problem: Exception | None = None

    def observe(self, tokens: Sequence[int], logits: Tensor | None) -> int | None:
        """Return how many of the next tokens end the text, or None; where there is a problem, those before it."""
        for place, token in enumerate(tokens, 1):
            if self._matcher.try_consume_tokens([token]):
                if self._matcher.is_stopped():
                    return place
                continue
            try:
                self._grammar.mask(self._matcher)
            except ValueError as problem:
                self.problem = problem
                return place - 1
        return None


@lru_cache(maxsize=64)  # requests of a server repeat their schemas
def _compiled(grammar: Grammar, tokens: Any, vocab_size: int, ends: frozenset[int]) -> CompiledGrammar:
    """Compile a grammar for llguidance's form of a tokenizer."""
    start = _llguidance().LLMatcher(tokens, grammar.source, log_level=0)
    compiled = CompiledGrammar(start, vocab_size, ends, frozenset(tokens.eos_tokens), tokens)
    mask = compiled.mask(start)
    if mask is None or ends.issuperset(_allowed(mask)):
        raise ValueError(f"grammar allows no text: the {grammar.kind} fits nothing, or the empty text alone")
    return compiled


_TOKENIZERS: WeakKeyDictionary[Any, dict[int, Any]] = WeakKeyDictionary()


def _tokens_of(tokenizer: Any, vocab_size: int) -> Any:
    """Return llguidance's form of a tokenizer, which is kept: with 151,000 tokens it takes 0.6 s to make.

    Raises:
        TypeError, ValueError: as ``Grammar.compile``.
    """
    if isinstance(tokenizer, TokenBytes):
        tokenizer = tokenizer.tokenizer
    if not hasattr(tokenizer, "backend_tokenizer"):
        what = "grammar needs tokenizer=, a fast tokenizer of transformers"
        raise TypeError(f"{what}, got {'none' if tokenizer is None else type(tokenizer).__name__}")
    known = _TOKENIZERS.setdefault(tokenizer, {})
    if vocab_size not in known:
        try:
            known[vocab_size] = _llguidance().LLTokenizer(_serialized(tokenizer), vocab_size, tokenizer.eos_token_id)
        except ValueError as error:
            raise ValueError(f"grammar cannot use this tokenizer: {_short(error)}") from error
    return known[vocab_size]


def _serialized(tokenizer: Any) -> str:
    """Return a tokenizer's JSON, with a special token at each id that has none: llguidance reads as many as tokens."""
    state, ids = json.loads(tokenizer.backend_tokenizer.to_str()), {*tokenizer.get_vocab().values()}
    state |= {"padding": None, "truncation": None}
    flags = {"special": True, **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)}
    vocab = state["model"]["vocab"]
    gaps = {*range(max(ids))} - ids if isinstance(vocab, dict) else ()  # a list, as unigram's, has none
    for gap in gaps:
        name = f"<no token {gap}>"
        vocab[name] = gap
        state["added_tokens"].append({"id": gap, "content": name, **flags})
    return json.dumps(state)


def _usable(matcher: Any) -> Any:
    """Return a matcher; refuse one that has met an error."""
    if matcher.is_error():
        reason = str(matcher.get_error()).partition("<state>")[0]  # behind it is the state of llguidance's parser
        if "NoExtensionBias" in reason:
            reason = NO_TOKEN
        raise ValueError(f"grammar cannot be followed: {_short(reason)}")
    return matcher


def _allowed(mask: Any) -> list[int]:
    """Return the tokens of a mask."""
    import numpy as np

    tokens: list[int] = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
    return tokens


def _short(message: object) -> str:
    """Return the beginning of a message as one line."""
    return " ".join(str(message).split())[:200]
