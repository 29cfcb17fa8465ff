"""What a caller asks of a generation: the arguments of ``generate``, and one request per sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from stree.budget.policy import BudgetPolicy
from stree.decode.logits_processors import LogitsProcessor, NodeProcessor
from stree.decode.stop_strings import StopStrings
from stree.growth import Growth
from stree.sampling import Sampling

__all__ = ["Batch", "GenerateArguments", "Observer", "Request", "Streamer"]


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


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GenerateArguments:
    """Arguments of ``generate`` beside models, drafter and prompts, and what only callers within the library pass.

    Attributes:
        observer: observes every token of a sequence, or None; or a list of one for each prompt.
        processor: processes the logits of many nodes in place of processors of each sequence, or None.
        policy: makes what chooses the budget of every step, from growth and sizes; None for the budget's own.
    """

    growth: Growth | None = None
    budget: int | str | None = None
    verifier: str = "auto"
    sampling: Sampling | Sequence[Sampling] | None = None
    repetition_penalty: float | Sequence[float] = 1.0
    logits_processor: LogitsProcessor | Sequence[LogitsProcessor | None] | None = None
    seed: int | Sequence[int] = 0
    num_samples: int = 1
    max_new_tokens: int | Sequence[int] = 128
    stop_token_ids: Iterable[int] | Sequence[Iterable[int]] | None = None
    stop_strings: Any = None
    tokenizer: Any = None
    ignore_eos: bool = False
    logprobs: bool | int | None = None
    attention_mask: Any = None
    streamer: Streamer | None = None
    cancelled: Callable[[int], bool] | None = None
    max_batch: int | None = None
    max_length: int | None = None
    allow_lossy: bool = False
    overlap: bool = False
    observer: Observer | Sequence[Observer] | None = None
    processor: NodeProcessor | None = None
    policy: Callable[[Growth | None, Sequence[int]], BudgetPolicy] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One sequence to decode.

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
        processors: of its logits, one after the other; the batch must have a ``RowProcessors`` for them.
        streamer: receives its tokens, or None.
        observer: observes every token, or None.
        needs_trees: whether the trees of its steps are copied to the host.
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
    processors: tuple[LogitsProcessor, ...] = ()
    streamer: Streamer | None = None
    observer: Observer | None = None
    needs_trees: bool = False


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
        processor: of all their logits, or None; its steps are not captured.
        min_nodes: nodes that a state has room for at least, and so tokens that ``extend`` runs at once.
    """

    requests: Iterator[Request]
    kinds: frozenset[Sampling]
    most_stops: int
    max_batch: int
    max_length: int
    prompt_length: int
    is_padded: bool = False
    refills: bool = False
    processor: NodeProcessor | None = None
    min_nodes: int = 1

    @property
    def is_greedy(self) -> bool:
        """Whether all requests are greedy."""
        return all(kind.is_greedy for kind in self.kinds)
