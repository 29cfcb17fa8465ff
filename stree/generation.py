"""``generate`` and ``stream``, which users call: they check their arguments, size the steps and run the loop."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stree.decode.batching import batch_for
from stree.decode.claims import losslessness
from stree.decode.failures import GenerationError, GenerationInterrupted, failures_with_output
from stree.decode.logits_processors import LogitsProcessor
from stree.decode.loop import DecodeLoop
from stree.decode.memory import Extent, arithmetic, check_memory, fits_in_memory
from stree.decode.request import Batch, Streamer
from stree.decode.sequences import Sequences
from stree.decode.settings import Settings
from stree.decode.stats import Generation
from stree.decode.step_cache import StepCache, step_cache_of
from stree.decode.tree_sizes import budget_policy
from stree.drafters import Drafter
from stree.growth import Growth
from stree.models.tree_lm import TreeLM
from stree.sampling import Sampling
from stree.verify import Verifier, name_of

__all__ = [
    "Generation", "GenerationError", "GenerationInterrupted", "Streamer", "TokenStream", "generate", "run", "stream",
]  # fmt: skip

Prompts = Sequence[Sequence[int]] | Sequence[int] | Tensor | Mapping[str, Any] | Iterator[Sequence[int]]
SEVERAL = {"streamer", "max_batch", "num_samples"}  # options of ``generate`` that make no sense of one streamed text


def generate(
    lm: TreeLM,
    prompts: Prompts,
    drafter: Drafter | TreeLM | str | Path | None = None,
    *,
    growth: Growth | str | None = None,
    budget: int | str | None = None,
    verifier: str | Verifier = "auto",
    overlap: bool = False,
    sampling: Sampling | Sequence[Sampling] | None = None,
    logit_bias: Mapping[int, float] | Sequence[Mapping[int, float] | None] | None = None,
    repetition_penalty: float | Sequence[float] = 1.0,
    frequency_penalty: float | Sequence[float] = 0.0,
    presence_penalty: float | Sequence[float] = 0.0,
    allowed_token_ids: Iterable[int] | Sequence[Iterable[int] | None] | None = None,
    bad_words: Iterable[Sequence[int]] | Sequence[Sequence[Sequence[int]] | None] | None = None,
    min_new_tokens: int | Sequence[int] = 0,
    logits_processor: LogitsProcessor | Sequence[LogitsProcessor | None] | None = None,
    seed: int | Sequence[int] = 0,
    num_samples: int = 1,
    max_new_tokens: int | Sequence[int] = 128,
    stop_token_ids: Iterable[int] | Sequence[Iterable[int]] | None = None,
    stop_strings: str | Sequence[str] | Sequence[Sequence[str]] | None = None,
    tokenizer: Any = None,
    ignore_eos: bool = False,
    logprobs: bool | int = False,
    attention_mask: Any = None,
    streamer: Streamer | None = None,
    cancelled: Callable[[int], bool] | None = None,
    max_batch: int | None = None,
    max_length: int | None = None,
    allow_lossy: bool = False,
) -> Generation:
    """Generate from a target, token for token distributed as the target alone would.

    What is said here to leave a text as it is does so in float32 on a CPU, near-ties of logits apart.  On CUDA, and in
    bfloat16, products are rounded by the number of rows in a step, so batch and budget may change a text, but not its
    distribution.

    Everything under "which token" and "where a text ends" but ``num_samples``, ``tokenizer`` and ``ignore_eos`` is one
    for all prompts, or a list of one for each.

    Args:
        lm: the target.
        prompts: token lists of any lengths, none empty; or one; or what a tokenizer returns, padded on either side with
            its mask; or an iterator of token lists, read as slots become free.
        attention_mask: 0 where a prompt's token is padding, where ``prompts`` does not hold its own.  Without a mask
            every token counts.

        How trees are drafted and verified:
        drafter: what proposes trees, or what ``stree.drafters.load`` makes one of; None for ``SuffixDrafter()``.
        growth: the shape of a model drafter's trees, or its name as on the command line, such as "chain:4"; None for
            its default, ``Calibrated()``.  Where nothing is grown, as with ``SuffixDrafter`` or a budget of 1, it is
            not used, and the statistics name none.
        budget: most nodes a step, root included; 1 is plain decoding.  "auto" chooses the size of every step, up to 64
            nodes, by goodput: what earlier steps emitted over the time that they took.  Greedy text and text under
            MATCH do not depend on it; sampled text of a draft model does, and so on timing and on the prompts that
            share its batch, where under a number a seed names a text.  None: 16 for one sequence with a draft model,
            else "auto".
        verifier: "auto", "match", "rejection", "traversal" or "block", see ``stree.accept``; or a rule of your own, an
            object derived from ``stree.verify.Verifier``, with which steps are not captured.
        overlap: draft the next tree while the target verifies, below the path that is likeliest to be accepted, and use
            it if that one was: in a thread, on CUDA in a second stream.  For draft models, without logits processors,
            bias and penalties; steps are not captured.  See docs/choosing.md for where it pays.
        allow_lossy: let ``TargetInit`` run, whose text is not distributed as the target's.

        Which token:
        sampling: temperature, top-k, top-p, min-p; None for greedy.
        logit_bias: numbers that are added to the logits of tokens, before everything below.
        repetition_penalty: divides the logits of the text's tokens, prompt included, as in transformers.
        frequency_penalty: subtracted from a token's logit for each time that it is among the new tokens, as in vLLM.
        presence_penalty: subtracted once where it is among them.
        allowed_token_ids: the only tokens that may be drawn.
        bad_words: token lists that are never completed, not from the prompt's last tokens either, as in transformers.
        min_new_tokens: no stop token is drawn before so many new tokens; stop strings end a text earlier, too.
        logits_processor: a function of int64[1, length] text and float[1, vocab] logits that returns logits, as
            transformers' processors are; called last, for every node that the target may reach, with the text that
            ends there, and for the draft model's likewise.  It must depend on nothing but its arguments.  With one,
            steps are not captured as CUDA graphs.
        seed: of the random numbers.
        num_samples: texts of every prompt, those of one prompt together, each with random numbers of its own.

        Where a text ends:
        max_new_tokens: most new tokens a sequence.
        stop_token_ids: tokens that end a sequence, and are kept; None for ``lm.eos_token_ids``, the model's own.
        stop_strings: strings that end a sequence, across any tokens, the prompt's included.  The token that completes
            one is kept whole, as in transformers.
        tokenizer: of transformers, of the model, which stop strings need.
        ignore_eos: write on through the model's own stop tokens, as benchmarks do.
        cancelled: asked after every step, by each running sequence's place in the output, whether that one shall end.

        What is told:
        logprobs: keep each new token's log probability, and a number of most probable alternatives.  It is that of the
            model's own distribution, before penalties, processors, temperature and truncation (vLLM's "raw").
        streamer: receives tokens as they are emitted; of one prompt, or a list of one for each.

        How many at once:
        max_batch: most sequences at once; the next prompt takes the place of one that has finished.  None for all
            prompts of a list together.  In float32 on a CPU, under a fixed budget, no text depends on it.
        max_length: most tokens of a prompt and its new ones; None for what the longest prompt of a list needs.  Memory
            is bounded by ``max_batch`` times it.  An iterator needs both.

    Returns:
        Sequences, log probabilities, and statistics, which say under "lossless" whether the text has the target's
        distribution: "claimed" where a drafter, growth or verifier of another author took part.

    Raises:
        ValueError: an argument outside its range, which the message names, or states that memory cannot hold.
        GenerationError: something failed in the loop; it carries what was generated before.
        GenerationInterrupted: Ctrl-C; likewise.
    """
    settings = Settings(
        lm, drafter, growth=growth, budget=budget, verifier=verifier, overlap=overlap, allow_lossy=allow_lossy,
        cancelled=cancelled,
    )  # fmt: skip
    batch = batch_for(
        lm, prompts, attention_mask=attention_mask, num_samples=num_samples, max_batch=max_batch, max_length=max_length,
        sampling=sampling, logit_bias=logit_bias, repetition_penalty=repetition_penalty,
        frequency_penalty=frequency_penalty, presence_penalty=presence_penalty, allowed_token_ids=allowed_token_ids,
        bad_words=bad_words, min_new_tokens=min_new_tokens, logits_processor=logits_processor, seed=seed,
        max_new_tokens=max_new_tokens, stop_token_ids=stop_token_ids, stop_strings=stop_strings, tokenizer=tokenizer,
        ignore_eos=ignore_eos, logprobs=logprobs, streamer=streamer,
    )  # fmt: skip
    return run(settings, batch)


class TokenStream(Iterator[int]):
    """The new tokens of one text, one by one.  A step emits several at once, so some come without a wait.

    ``close()``, or dropping the iterator, ends the text as cancelled and frees its memory.

    Attributes:
        result: what ``generate`` returns, of the text so far.
        stats: its statistics.
    """

    def __init__(self, steps: Generator[DecodeLoop, None, Generation]) -> None:
        self._steps: Generator[DecodeLoop, None, Generation] | None = steps
        self._loop: DecodeLoop | None = next(steps)  # checks the arguments
        self._result = self._loop.output("length")
        self._next = 0

    def __next__(self) -> int:
        while self._next >= len(new := self._new_tokens()):
            if self._steps is None:
                raise StopIteration
            self._advance()
        self._next += 1
        return new[self._next - 1]

    @property
    def result(self) -> Generation:
        """What was generated so far; after the end, all of it."""
        return self._result if self._loop is None else self._loop.output("running")

    @property
    def stats(self) -> dict[str, Any]:
        """Statistics of the text so far."""
        return self.result.stats

    def close(self) -> None:
        """End the text; tokens that were not taken are dropped."""
        if self._steps is not None and self._loop is not None:
            self._steps.close()
            self._finish(self._loop.output("cancelled"))
        self._next = len(self._new_tokens())

    def _new_tokens(self) -> list[int]:
        """New tokens of the text so far."""
        if self._loop is not None:
            return next((sequence.new for sequence in self._loop.sequences.all), [])
        prompt = sum(self._result.stats["num_prompt_tokens"])
        return [token for text in self._result.sequences for token in text[prompt:]]

    def _advance(self) -> None:
        """Take a step."""
        assert self._steps is not None and self._loop is not None
        try:
            next(self._steps)
        except StopIteration as end:
            self._finish(end.value)
        except BaseException:
            self._finish(self._loop.output("error"))
            raise

    def _finish(self, result: Generation) -> None:
        self._result, self._loop, self._steps = result, None, None


def stream(
    lm: TreeLM, prompt: Prompts, drafter: Drafter | TreeLM | str | Path | None = None, **options: Any
) -> TokenStream:
    """Generate one text and give its tokens as they are emitted: ``for token in stree.stream(lm, prompt): ...``.

    Args:
        lm: the target.
        prompt: as ``prompts`` of ``generate``, but one.
        drafter: as for ``generate``.
        options: those of ``generate`` that concern one text.

    Raises:
        ValueError: an argument outside its range, or several prompts.
        TypeError: another option.
    """
    known = inspect.signature(generate).parameters.keys() - SEVERAL
    other = next((name for name in options if name not in known), None)
    if other is not None:
        raise TypeError(f"stream takes generate's options for one text, got {other}")
    shared = inspect.signature(Settings).parameters.keys() & options.keys()
    settings = Settings(lm, drafter, **{name: options.pop(name) for name in shared})
    return TokenStream(_decode(settings, batch_for(lm, prompt, most_prompts=1, **options)))


def run(settings: Settings, batch: Batch) -> Generation:
    """Decode a batch to its end."""
    steps = _decode(settings, batch)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            output: Generation = end.value
            return output


@torch.inference_mode(False)  # what is kept for the next call must be usable outside of it
@torch.no_grad()
def _decode(settings: Settings, batch: Batch) -> Generator[DecodeLoop, None, Generation]:
    """Decode; yield the loop when it is known that the batch can run, after prefill and after every step."""
    settings.check_batch(batch)
    lm, drafter, ask = settings.lm, settings.drafter, settings.cancelled
    step_cache = step_cache_of(lm) if settings.runs_on_device and batch.processor is None else None
    budget, policy = budget_policy(settings, batch.max_batch, batch.kinds)
    cancelled = None if ask is None else lambda request: ask(request.sequence)
    loop = DecodeLoop(settings, batch, Sequences(cancelled), step_cache)
    loop.reported = {
        "growth": str(policy.growth) if drafter.uses_growth and policy.growth is not None else None, "budget": budget,
        "verifier": name_of(settings.verifier), "lossless": losslessness(drafter, policy.growth, settings.rule),
    }  # fmt: skip
    key = None if step_cache is None else loop.key(policy, batch.max_batch)
    extent = loop.extent(policy)
    _reserve_memory(lm, drafter, step_cache, extent, key)
    yield loop
    with failures_with_output(loop, lambda: arithmetic(lm, extent.batch, extent.length, policy.max_nodes)):
        for _ in loop.steps(policy):
            yield loop
    if loop.problem is not None:
        message = f"the drafter failed, and the rest was decoded without it: {loop.problem}"
        raise GenerationError(message, loop.output("length")) from loop.problem
    return loop.output("length")


def _reserve_memory(lm: TreeLM, drafter: Drafter, step_cache: StepCache | None, extent: Extent, key: Hashable) -> None:
    """Drop what is kept for other texts where these need its memory, unless it has this key; refuse what cannot fit."""
    if step_cache is not None and key in step_cache:
        return
    if step_cache is not None and not fits_in_memory(lm, drafter, extent):
        step_cache.release()
    check_memory(lm, drafter, extent)
