"""What a caller asks of a generation: one request per sequence, checked, and the batch of them."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from stree.checks import check_counts, check_flags, check_object, check_sizes
from stree.decode.grammar import CompiledGrammar, Grammar
from stree.decode.logits_processors import LogitsProcessor, NodeProcessor
from stree.decode.prompts import token_ids
from stree.decode.stop_strings import StopStrings, string_list
from stree.decode.token_rules import TokenRules
from stree.models.tree_lm import TreeLM
from stree.sampling import Sampling

__all__ = ["Batch", "Observer", "Request", "Streamer", "alternatives"]


class Streamer(Protocol):
    """Receives tokens as transformers' streamers do: the prompt first, then what each step emits."""

    def put(self, value: Tensor) -> None:
        """Receive int64[count] tokens."""
        ...

    def end(self) -> None:
        """Finish the text."""
        ...


class Observer(Protocol):
    """Observes every token of one sequence, and may end it."""

    needs_logits: bool  # False: ``logits`` is None

    def observe(self, tokens: Sequence[int], logits: Tensor | None) -> int | None:
        """Observe the next tokens, at least one, and float[len(tokens), vocab], the logits they were drawn from.

        Returns:
            How many of the tokens end the sequence, at least 1, or None to go on.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One sequence to decode: a prompt and the options of its text, checked by ``of`` and ``with_prompt``.

    Attributes:
        prompt: its tokens.
        sampling: how its tokens are drawn.
        max_new_tokens: most new tokens.
        stop_token_ids: tokens that end it.
        seed: of its random numbers.
        sequence: the second word of its random numbers, beside the seed; the place of its text in ``generate``.
        problem: why it cannot be run, or None.
        stop_strings: strings that end it, or None.
        logprobs: alternatives whose log probabilities are kept beside each token's own, or None for none at all.
        rules: bias, penalties, and allowed and forbidden tokens.
        grammar: of its new tokens, or None.
        processors: of its logits, one after the other; the batch must have a ``RowProcessors`` for them.
        streamer: receives its tokens, or None.
        observer: observes every token, or None.
        budget: most nodes of its trees, root included, or None for those of the step.
        return_steps: whether what happens in its steps is kept.
    """

    prompt: list[int]
    sampling: Sampling = Sampling()
    max_new_tokens: int = 128
    stop_token_ids: frozenset[int] = frozenset()
    seed: int = 0
    sequence: int = 0
    problem: str | None = None
    stop_strings: StopStrings | None = None
    logprobs: int | None = None
    rules: TokenRules = TokenRules()
    grammar: CompiledGrammar | None = None
    processors: tuple[LogitsProcessor, ...] = ()
    streamer: Streamer | None = None
    observer: Observer | None = None
    budget: int | None = None
    return_steps: bool = False

    @classmethod
    def of(
        cls, lm: TreeLM, *, sampling: Sampling | None = None,
        grammar: Grammar | None = None, logits_processor: LogitsProcessor | None = None, seed: int = 0,
        max_new_tokens: int = 128,
        stop_token_ids: Iterable[int] | None = None, stop_strings: str | Sequence[str] | StopStrings | None = None,
        tokenizer: Any = None, ignore_eos: bool = False, logprobs: bool | int | None = None,
        streamer: Streamer | None = None, observer: Observer | None = None, budget: int | None = None,
        return_steps: bool = False, **rules: Any,
    ) -> Request:  # fmt: skip
        """Check the options of a text, which are those of ``generate``, and make a request that has no prompt yet.

        Further options are those of ``TokenRules.of``.

        Raises:
            TypeError: an object or a number of another kind.
            ValueError: a number out of its range, stop strings without a tokenizer, or a grammar that allows no text.
            RuntimeError: a grammar without the package that it needs.
        """
        sampling = Sampling() if sampling is None else sampling
        check_object("sampling", sampling, "probs", "stree.Sampling(temperature=0.8)")
        if streamer is not None:
            check_object("streamer", streamer, "end", "transformers.TextStreamer(tokenizer)")
        if logits_processor is not None and (isinstance(logits_processor, type) or not callable(logits_processor)):
            raise TypeError(f"logits_processor must be a function of text and logits, got {logits_processor!r:.80}")
        if grammar is not None:
            check_object("grammar", grammar, "compile", 'stree.Grammar.regex("[0-9]+")')
        check_flags(ignore_eos=ignore_eos, return_steps=return_steps)
        max_new_tokens = _integer("max_new_tokens", max_new_tokens)
        check_counts(max_new_tokens=max_new_tokens)
        check_sizes(budget=budget)
        if stop_token_ids is None:  # anything with the methods of a TreeLM may be passed in its place
            stop_token_ids = () if ignore_eos else getattr(lm, "eos_token_ids", ())
        stops = token_ids("stop_token_ids", stop_token_ids)
        if stop_strings is not None and not isinstance(stop_strings, StopStrings):
            strings = string_list("stop_strings", stop_strings)
            stop_strings = StopStrings(tokenizer, strings) if strings else None
        # As in transformers, a stop token that no vocabulary has, such as -1, ends no text.
        ends = frozenset(token for token in stops if 0 <= token < lm.vocab_size)
        eos = frozenset(getattr(lm, "eos_token_ids", ()))
        return cls(
            [], sampling, max_new_tokens, ends, _integer("seed", seed), stop_strings=stop_strings,
            logprobs=alternatives("logprobs", lm, logprobs),
            rules=TokenRules.of(lm.vocab_size, ends, max_new_tokens, **rules),
            grammar=None if grammar is None else grammar.compile(tokenizer, lm.vocab_size, ends, eos),
            processors=() if logits_processor is None else (logits_processor,), streamer=streamer, observer=observer,
            budget=budget, return_steps=return_steps,
        )  # fmt: skip

    def with_prompt(
        self, lm: TreeLM, prompt: Any, max_length: int | None = None, number: int = 0, sequence: int = 0
    ) -> Request:
        """Return the request for a prompt: tokens of the vocabulary, and as many as leave space for the new ones.

        Args:
            lm: the target.
            prompt: token ids.
            max_length: most tokens of a prompt and its new ones, beside the model's own limit.
            number: of the prompt, for messages.
            sequence: see the class.

        Raises:
            TypeError: no token ids.
            ValueError: no tokens, too many, or some that the target does not have.
        """
        if isinstance(prompt, str) or not hasattr(prompt, "__len__") or getattr(prompt, "ndim", 1) == 0:
            raise TypeError(f"prompt {number} must be a list of tokens, got {type(prompt).__name__}")
        if not len(prompt):
            raise ValueError(f"prompt {number} is empty; every prompt needs at least one token")
        tokens = token_ids(f"prompt {number}", prompt)
        bad = next((token for token in tokens if not 0 <= token < lm.vocab_size), None)
        if bad is not None:
            raise ValueError(f"prompt {number} has token {bad}, outside the vocabulary of {lm.vocab_size}")
        most = min((length for length in (max_length, lm.max_length) if length is not None), default=None)
        if most is not None and len(tokens) + self.max_new_tokens > most:
            what = f"prompt {number} of {len(tokens)} tokens plus {self.max_new_tokens} new ones"
            raise ValueError(f"{what} exceeds max_length {most}")
        return replace(self, prompt=tokens, sequence=sequence)


def _integer(name: str, value: Any) -> int:
    """Return Python's own integer."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer or a list of them, got {value!r:.80}") from None


def alternatives(name: str, lm: TreeLM, logprobs: Any) -> int | None:
    """Return how many alternatives are kept beside each token's own log probability, or None for no probabilities."""
    if logprobs is None or isinstance(logprobs, bool):
        return 0 if logprobs else None
    try:
        count = operator.index(logprobs)
    except TypeError:
        count = -1
    if not 0 <= count <= lm.vocab_size:
        what = f"True or a number of alternatives up to {lm.vocab_size}"
        raise ValueError(f"{name} must be {what}, got {logprobs!r:.80}")
    return count


@dataclass(frozen=True, slots=True)
class Batch:
    """The requests of a generation, and the size of the batch that runs them.

    Attributes:
        requests: in the order of the prompts; read as rows become free.
        kinds: the sampling parameters of all of them.
        most_stops: most stop tokens of one of them.
        max_batch: most sequences at once.
        max_length: most tokens of a prompt and its new ones.
        prompt_length: most tokens of a prompt.
        is_padded: whether prompts may differ in length.
        refills: whether a request takes the row of a sequence that has ended.
        rules: token rules of the requests that have some.
        has_grammar: whether a request has a grammar.
        processor: of all their logits, or None; its steps are not captured.
        min_nodes: nodes that a state has room for at least, and so tokens that ``extend`` runs at once.
        limits_nodes: whether requests may have budgets of their own.
        keeps_probs: whether the probabilities of the accepted paths are computed.
        keeps_logprobs: whether log probabilities of tokens are.
        isolates_nan: whether NaN in the logits of one request ends that request alone; if not, it is raised.
    """

    requests: Iterator[Request]
    kinds: frozenset[Sampling]
    most_stops: int
    max_batch: int
    max_length: int
    prompt_length: int
    is_padded: bool = False
    refills: bool = False
    rules: tuple[TokenRules, ...] = ()
    has_grammar: bool = False
    processor: NodeProcessor | None = None
    min_nodes: int = 1
    limits_nodes: bool = False
    keeps_probs: bool = False
    keeps_logprobs: bool = False
    isolates_nan: bool = False

    @property
    def is_greedy(self) -> bool:
        """Whether all requests are greedy."""
        return all(kind.is_greedy for kind in self.kinds)
