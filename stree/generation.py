"""``generate``, which users call: it checks its arguments, sizes the steps and runs the loop."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stree.checks import check_counts
from stree.decode.batching import batch_for
from stree.decode.claims import losslessness
from stree.decode.failures import GenerationError, GenerationInterrupted, failures_with_output
from stree.decode.grammar import Grammar
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
from stree.models.loading import reason_of
from stree.models.tree_lm import TreeLM
from stree.sampling import Sampling
from stree.verify import Verifier, name_of

__all__ = [
    "Generation", "GenerationError", "GenerationInterrupted", "Prompts", "Streamer", "decode_steps", "generate", "run",
]  # fmt: skip

Prompts = Sequence[Sequence[int]] | Sequence[int] | Tensor | Mapping[str, Any] | Iterator[Sequence[int]]


def generate(
    lm: TreeLM,
    prompts: Prompts,
    drafter: Drafter | TreeLM | str | Path | None = None,
    *,
    growth: Growth | str | None = None,
    budget: int | str | list[int] | tuple[int, ...] | None = None,
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
    grammar: Grammar | Sequence[Grammar | None] | None = None,
    logits_processor: LogitsProcessor | Sequence[LogitsProcessor | None] | None = None,
    seed: int | Sequence[int] = 0,
    num_samples: int = 1,
    max_new_tokens: int | Sequence[int] = 128,
    stop_token_ids: Iterable[int] | Sequence[Iterable[int]] | None = None,
    stop_strings: str | Sequence[str] | Sequence[Sequence[str]] | None = None,
    tokenizer: Any = None,
    ignore_eos: bool = False,
    logprobs: bool | int = False,
    return_steps: bool = False,
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
        growth: the shape of a model drafter's trees, or its name, such as "chain:4" or "calibrated:16x4", 16 nodes and
            at most 4 draft calls (see docs/choosing.md); None for its default, ``Calibrated()``.  Where nothing is
            grown, as with ``SuffixDrafter`` or a budget of 1, it is checked, not used, and the statistics name none.
        budget: most nodes a step, root included; 1 is plain decoding.  "auto" chooses the size of every step, up to 64
            nodes, by goodput: what earlier steps emitted over the time that they took.  Greedy text and text under
            MATCH do not depend on it; sampled text of a draft model does, and so on timing and on the prompts that
            share its batch, where under a number a seed names a text.  None: what the growth's name sets, else 16 for
            one sequence with a draft model, else "auto".  A list bounds the trees of each prompt.  Steps are planned
            for its greatest entry, on which sampled texts depend, but under MATCH.
        verifier: "auto", "match", "rejection", "traversal" or "block", see ``stree.accept``; or a rule of your own, an
            object derived from ``stree.verify.Verifier``, with which steps are not captured.
        overlap: draft the next tree while the target verifies, below the path that is likeliest to be accepted, and use
            it if that one was: in a thread, on CUDA in a second stream.  For draft models, without logits processors,
            grammars, bias and penalties; steps are not captured.  See docs/choosing.md for where it pays.
        allow_lossy: let ``TargetInit``, ``TypicalAcceptance`` and ``ForcedLength`` run, whose texts do not follow the
            target's distribution.

        Which token:
        sampling: temperature, top-k, top-p, min-p; None for greedy.
        logit_bias: numbers that are added to the logits of tokens, before everything below.
        repetition_penalty: 0.001 to 1000, divides the logits of the text's tokens, prompt included, as in transformers.
        frequency_penalty: subtracted from a token's logit for each time that it is among the new tokens, as in vLLM.
        presence_penalty: subtracted once where it is among them.
        allowed_token_ids: the only tokens that may be drawn.
        bad_words: token lists that are never completed, not from the prompt's last tokens either, as in transformers.
        min_new_tokens: no stop token is drawn before so many new tokens; stop strings end a text earlier, too.
        grammar: what the new tokens may be, such as ``stree.Grammar.json_schema(schema)``: others are excluded at every
            node, for the draft model, too.  A stop token of the model is drawn where a text is whole, and where
            nothing can follow it ends, as "stop".  It needs ``tokenizer``; its steps are not captured as CUDA graphs.
        logits_processor: a function of int64[1, length] text and float[1, vocab] logits that returns logits, as
            transformers' processors are; called last, for every node that the target may reach, with the text that
            ends there, and for the draft model's likewise.  It must depend on nothing but its arguments.  With one,
            steps are not captured as CUDA graphs.
        seed: of the random numbers, or one for each prompt, whose text then depends on its place in the list as well.
        num_samples: texts of every prompt, those of one prompt together, each with random numbers of its own.  They
            share steps, so that the default budget is "auto", not 16, as for several prompts.

        Where a text ends:
        max_new_tokens: most new tokens a sequence.
        stop_token_ids: tokens that end a sequence, and are kept; None for ``lm.eos_token_ids``, the model's own.
        stop_strings: strings that end a sequence, across any tokens.  One may begin in the prompt's last tokens, and
            the token that completes it is kept whole, as in transformers; ``Engine`` looks at new text alone.
        tokenizer: of transformers, of the model, which stop strings and grammars need.
        ignore_eos: write on through the model's own stop tokens, as benchmarks do.
        cancelled: asked after every step, by each running sequence's place in the output, whether that one shall end;
            nothing of the step is cut off.  To end a text at a token by its content leave a loop over ``stree.stream``.

        What is told:
        logprobs: keep each new token's log probability, and a number of most probable alternatives.  It is that of the
            model's own distribution, before penalties, processors, temperature and truncation (vLLM's "raw").
        return_steps: keep what happens in every step of every text: its tree, the accepted path and its probabilities,
            and times; see ``stree.StepRecord``.
        streamer: receives tokens as they are emitted; of one prompt, or a list of one for each.

        How many at once:
        max_batch: most sequences at once; the next prompt takes the place of one that has finished.  None for all
            prompts of a list together.  In float32 on a CPU, under a fixed budget, no text depends on it.
        max_length: most tokens of a prompt and its new ones; None for what the longest prompt of a list needs.  Memory
            is bounded by ``max_batch`` times it.  An iterator needs both.

    Returns:
        Sequences, log probabilities, steps, and statistics, which say under "lossless" whether the text has the
        target's distribution: "claimed" where a drafter, growth or verifier of another author took part; and under
        "rule" which rule has verified where ``verifier`` is "auto".

    Raises:
        ValueError: an argument outside its range, which the message names, or states that memory cannot hold.
        GenerationError: something failed in the loop; it carries what was generated before.
        GenerationInterrupted: Ctrl-C; likewise.
    """
    each: list[int] | None = None
    if isinstance(budget, (list, tuple)):
        each = [*budget]
        check_counts(**{f"budget[{place}]": own for place, own in enumerate(each)})
        budget = max(each, default=1)
    settings = Settings(
        lm, drafter, growth=growth, budget=budget, verifier=verifier, overlap=overlap, allow_lossy=allow_lossy,
        cancelled=cancelled,
    )  # fmt: skip
    batch = batch_for(
        lm, prompts, attention_mask=attention_mask, num_samples=num_samples, max_batch=max_batch, max_length=max_length,
        budget=each, sampling=sampling, logit_bias=logit_bias, repetition_penalty=repetition_penalty,
        frequency_penalty=frequency_penalty, presence_penalty=presence_penalty, allowed_token_ids=allowed_token_ids,
        bad_words=bad_words, min_new_tokens=min_new_tokens, grammar=grammar, logits_processor=logits_processor,
        seed=seed, max_new_tokens=max_new_tokens, stop_token_ids=stop_token_ids, stop_strings=stop_strings,
        tokenizer=tokenizer, ignore_eos=ignore_eos, logprobs=logprobs, return_steps=return_steps, streamer=streamer,
    )  # fmt: skip
    return run(settings, batch)


def run(settings: Settings, batch: Batch) -> Generation:
    """Decode a batch to its end."""
    steps = decode_steps(settings, batch)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            output: Generation = end.value
            return output


@torch.inference_mode(False)  # what is kept for the next call must be usable outside of it
@torch.no_grad()
def decode_steps(settings: Settings, batch: Batch) -> Generator[DecodeLoop, None, Generation]:
    """Decode; yield the loop when it is known that the batch can run, after prefill and after every step."""
    settings.check_batch(batch)
    lm, drafter, ask = settings.lm, settings.drafter, settings.cancelled
    step_cache = step_cache_of(lm) if settings.runs_on_device and batch.processor is None else None
    budget, policy = budget_policy(settings, batch.max_batch, batch.kinds)
    cancelled = None if ask is None else lambda request: ask(request.sequence)
    loop = DecodeLoop(settings, batch, Sequences(cancelled), step_cache)
    loop.reported = {
        "growth": str(policy.growth) if drafter.uses_growth and policy.growth is not None else None, "budget": budget,
        "verifier": name_of(settings.verifier), "rule": name_of(settings.verifier),
        "lossless": losslessness(drafter, policy.growth, settings.rule),
    }  # fmt: skip
    key = None if step_cache is None else loop.key(policy, batch.max_batch)
    extent = loop.extent(policy)
    _reserve_memory(lm, drafter, step_cache, extent, key)
    yield loop
    with failures_with_output(loop, lambda: arithmetic(lm, extent.batch, extent.length, policy.max_nodes)):
        for _ in loop.steps(policy):
            yield loop
    if loop.problem is not None:
        message = f"the drafter failed, and the rest was decoded without it: {reason_of(loop.problem)}"
        raise GenerationError(message, loop.output("length")) from loop.problem
    return loop.output("length")


def _reserve_memory(lm: TreeLM, drafter: Drafter, step_cache: StepCache | None, extent: Extent, key: Hashable) -> None:
    """Drop what is kept for other texts where these need its memory, unless it has this key; refuse what cannot fit."""
    if step_cache is not None and key in step_cache:
        return
    if step_cache is not None and not fits_in_memory(lm, drafter, extent):
        step_cache.release()
    check_memory(lm, drafter, extent)
