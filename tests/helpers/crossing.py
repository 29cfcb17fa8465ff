"""One generation that crosses features: what it draws, how it runs, and the text that plain decoding gives instead."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import stree
from helpers.draft_steps import GROWTHS
from helpers.generate_ways import transformers_text
from helpers.grammars import letters_tokenizer
from helpers.hooked_generate import left_padded, new_tokens
from helpers.tiny_family_models import family_model
from helpers.tiny_heads import target_and_head
from helpers.tiny_models import patched
from stree.drafters import Drafter, FusedDrafter, HeadDrafter, ModelDrafter, NoDrafter, SuffixDrafter
from stree.sampling import Sampling

__all__ = ["Crossing", "crossings", "first_tokens", "plain", "run", "without_mates"]

NEW = 14  # tokens of a text
SAMPLES = 300  # of a distribution
SMALL = 17  # vocabulary; frequencies of two tokens have 289 cells
# A layer of every kind: matrix states and attention, Mamba-1, gated DeltaNet, RG-LRU, convolutions.
FAMILIES = ("bamba", "mamba", "qwen3_5_text", "recurrent_gemma", "lfm2", "llama")
DRAFTERS = ("none", "model", "near", "head", "suffix", "fused", "overlapped")
SAMPLINGS = {
    "greedy": Sampling(), "whole": Sampling(1.0), "top-k": Sampling(1.1, top_k=3), "top-p": Sampling(0.9, top_p=0.5),
    "both": Sampling(1.2, top_k=5, top_p=0.6), "min-p": Sampling(1.0, min_p=0.3),
}  # fmt: skip
# Growths and truncations by which the trees of a batch's rows differ in size, so that most are padded.
UNEVEN_GROWTHS, UNEVEN_SAMPLINGS = ("rsds", "opt-tree", "eagle2"), ("top-p", "both", "min-p")


@dataclass(frozen=True)
class Crossing:
    """What is drawn; every field is a feature that users combine freely.

    Attributes:
        way: "generate", "engine" or "hook" (transformers' ``generate``, greedy).
        lengths: of the prompts.
        words: distinct tokens of the prompts: few make texts repeat themselves.
        slots: of the batch, or None for one for each prompt.
        threads: that run the same call at the same time on one ``TreeLM``.
        keeps: whether the engine keeps texts, and every prompt is asked for twice.
    """

    family: str
    drafter: str
    growth: str
    budget: int | str
    verifier: str
    sampling: str
    penalty: float
    processor: str
    grammar: str
    stops: bool
    logprobs: int | None
    lengths: tuple[int, ...]
    words: int
    slots: int | None
    way: str
    compiled: bool
    threads: int
    keeps: bool
    seed: int

    @property
    def prompts(self) -> list[list[int]]:
        """The prompts."""
        rng = random.Random(self.seed)
        return [[rng.randrange(self.words) for _ in range(length)] for length in self.lengths]

    @property
    def follows_plain(self) -> bool:
        """Whether the text is that of plain decoding, token for token: greedy, or MATCH."""
        is_delta = self.drafter in ("none", "suffix") or self.budget == 1
        return self.sampling == "greedy" or self.verifier == "match" or (self.verifier == "auto" and is_delta)


@st.composite
def crossings(draw: st.DrawFn) -> Crossing:
    """Draw one; features that are refused together are not drawn together."""
    way = draw(st.sampled_from(["generate"] * 4 + ["engine", "hook"]))
    # transformers' own decoding of RecurrentGemma is no oracle.
    family = draw(st.sampled_from([one for one in FAMILIES if way != "hook" or one != "recurrent_gemma"]))
    is_uneven = way != "hook" and draw(st.sampled_from([False] * 5 + [True]))
    drafters = ["near"] if is_uneven else DRAFTERS if way == "generate" else DRAFTERS[:-1]
    drafter = draw(st.sampled_from(drafters))
    if drafter == "head":
        family = "qwen3_5_text"
    growths = UNEVEN_GROWTHS if is_uneven else ["default", *(name for name in GROWTHS if name != "none")]
    growth = draw(st.sampled_from(growths))
    budget: Any = draw(st.sampled_from([16, 16, "auto", 1, 2, 8] if growth == "default" else [16, 16, 13]))
    samplings = UNEVEN_SAMPLINGS if is_uneven else ["greedy"] if way == "hook" else ["greedy", *SAMPLINGS]
    sampling = draw(st.sampled_from(samplings))
    verifiers = ["traversal"] if is_uneven else ["auto", "auto", "match", "rejection", "traversal"]
    has_grammar = way != "hook" and drafter != "overlapped" and draw(st.sampled_from([False] * 3 + [True]))
    bans = () if has_grammar else ("bans",)  # both may leave no token
    processors = ("none", "add", *bans) if way != "engine" and drafter != "overlapped" else ("none",)
    return Crossing(
        family, drafter, growth, budget,
        verifier=draw(st.sampled_from(verifiers)),
        sampling=sampling,
        penalty=draw(st.sampled_from([1.0, 1.0, 2.0])) if drafter != "overlapped" else 1.0,
        processor=draw(st.sampled_from(processors)),
        grammar=draw(st.sampled_from(PATTERNS)) if has_grammar else "",
        stops=draw(st.booleans()),
        logprobs=draw(st.sampled_from([None, None, 2])) if way != "hook" else None,
        lengths=tuple(draw(st.lists(st.integers(1, 12), min_size=1 + is_uneven, max_size=4))),
        words=draw(st.sampled_from([3, SMALL])),
        slots=draw(st.sampled_from([None, None, 1, 2])),
        way=way,
        compiled=draw(st.sampled_from([False] * 5 + [True])),
        threads=draw(st.sampled_from([1, 1, 1, 3])) if way == "generate" else 1,
        keeps=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )  # fmt: skip


class Add:
    """Adds to the logits what depends on every token of the text and on its place; padding, token 0, adds nothing."""

    def __call__(self, text: Tensor, logits: Tensor) -> Tensor:
        weights = (torch.arange(text.shape[1], 0, -1) * text).sum(1, keepdim=True)
        return logits + torch.sin(weights * (1 + torch.arange(logits.shape[1])))


class Bans:
    """Excludes the last three tokens, as a ban of repeated n-grams does."""

    def __call__(self, text: Tensor, logits: Tensor) -> Tensor:
        last = text[:, -3:]
        return logits.scatter(1, torch.where(last > 0, last, text[:, -1:]), -torch.inf)


PROCESSORS = {"none": None, "add": Add(), "bans": Bans()}
PATTERNS = ("([a-e]f?|ghi|[jk]{2})+", "(a[b-o]|[c-f]+[g-o])+")  # of texts without end, some tokens of which are forced


@cache
def model_of(family: str, compiled: bool) -> Any:
    """Make a small model in float64, where there are no near-ties; compiled layers are float32."""
    dtype = torch.float32 if compiled else torch.float64
    if family == "qwen3_5_text":
        return target_and_head(family, SMALL, dtype)
    return patched(family_model(family, dtype, vocab_size=SMALL)), None


@cache
def target(family: str, compiled: bool) -> stree.TreeLM:
    """Return the target, which all draws of its family share."""
    lm: stree.TreeLM = model_of(family, compiled)[0]
    if compiled:
        lm.compile()
    return lm


def drafter_of(one: Crossing) -> Drafter:
    """Return the drafter."""
    return drafter(one.drafter, one.family, one.compiled)


@cache
def drafter(name: str, family: str, compiled: bool) -> Drafter:
    """Return a drafter of a name; "near" has nearly the target's weights."""
    if name in ("none", "suffix"):
        return NoDrafter() if name == "none" else SuffixDrafter()
    if name == "head":
        return HeadDrafter(model_of(family, compiled)[1])
    dtype = torch.float32 if compiled else torch.float64
    if name in ("near", "overlapped"):
        near = family_model("bamba" if family == "qwen3_5_text" else family, dtype, vocab_size=SMALL)
        with torch.no_grad():
            for parameter in near.parameters():
                parameter.add_(0.01 * torch.randn(parameter.shape, dtype=dtype))
        return ModelDrafter(patched(near))
    model = ModelDrafter(patched(family_model("mamba2", dtype, seed=3, vocab_size=SMALL)))
    return FusedDrafter(model, SuffixDrafter()) if name == "fused" else model


def text(one: Crossing) -> dict[str, Any]:
    """Return the arguments of ``generate`` that say which text it is."""
    stops = [SMALL - 1, SMALL - 2] if one.stops else []
    arguments: dict[str, Any] = {
        "sampling": SAMPLINGS[one.sampling], "max_new_tokens": NEW, "seed": one.seed, "stop_token_ids": stops,
        "repetition_penalty": one.penalty, "logits_processor": PROCESSORS[one.processor],
    }  # fmt: skip
    if one.grammar:
        arguments |= {"grammar": stree.Grammar.regex(one.grammar), "tokenizer": letters_tokenizer("abcdefghijklmno")}
    return arguments


def drafting(one: Crossing) -> dict[str, Any]:
    """Return the arguments that say how it is drafted."""
    arguments: dict[str, Any] = {"budget": one.budget, "verifier": one.verifier}
    if one.growth != "default" and one.drafter != "suffix":
        arguments["growth"] = GROWTHS[one.growth]
    return arguments | ({"overlap": True} if one.drafter == "overlapped" else {})


def plain(one: Crossing) -> list[list[int]]:
    """Return the text of each prompt, decoded plainly with no other text in its batch; of the hook, by transformers."""
    if one.way != "hook":
        return _one_by_one(one, target(one.family, False), NoDrafter(), {"budget": 1})
    model, own = target(one.family, False).model, PROCESSORS[one.processor]
    given: dict[str, Any] = {"repetition_penalty": one.penalty, "logits_processor": [] if own is None else [own]}
    return [transformers_text(model, prompt, NEW, **given) for prompt in one.prompts]


def without_mates(one: Crossing) -> list[list[int]]:
    """Return the text of each prompt, drafted alike with no other text in its batch."""
    return _one_by_one(one, target(one.family, one.compiled), drafter_of(one), drafting(one))


def _one_by_one(one: Crossing, lm: stree.TreeLM, chosen: Drafter, how: dict[str, Any]) -> list[list[int]]:
    """Generate in one row; a request of the engine is the first text of its call, whatever its place."""
    if one.way == "engine":
        return [stree.generate(lm, [prompt], chosen, **text(one), **how).sequences[0] for prompt in one.prompts]
    return stree.generate(lm, one.prompts, chosen, **text(one), **how, max_batch=1).sequences


def run(one: Crossing) -> list[list[list[int]]]:
    """Run it; return the texts of the prompts, from every thread and every time that they were asked for."""
    return {"generate": _generated, "engine": _served, "hook": _hooked}[one.way](one)


def _generated(one: Crossing) -> list[list[list[int]]]:
    lm, chosen, how = target(one.family, one.compiled), drafter_of(one), drafting(one)

    def once(_: int) -> list[list[int]]:
        logprobs = False if one.logprobs is None else one.logprobs
        out = stree.generate(lm, one.prompts, chosen, **text(one), **how, max_batch=one.slots, logprobs=logprobs)
        return out.sequences

    with ThreadPoolExecutor(one.threads) as pool:
        return [*pool.map(once, range(one.threads))]


def _served(one: Crossing) -> list[list[list[int]]]:
    given = {key: value for key, value in text(one).items() if key != "logits_processor"}
    engine = stree.Engine(
        target(one.family, one.compiled), drafter_of(one), **drafting(one), max_batch=one.slots or 4, max_length=256,
        cache_bytes=10**8 if one.keeps else 0, prefill_chunk=4,
    )  # fmt: skip
    logprobs = False if one.logprobs is None else one.logprobs
    with engine:
        times = []
        for _ in range(1 + one.keeps):
            handles = [engine.submit(prompt, **given, logprobs=logprobs, trees=one.keeps) for prompt in one.prompts]
            times.append([handle.result(600).sequences[0] for handle in handles])
    return times


def _hooked(one: Crossing) -> list[list[list[int]]]:
    own = PROCESSORS[one.processor]
    out = target(one.family, one.compiled).model.generate(
        **left_padded(one.prompts), custom_generate=stree.custom_generate, drafter=drafter_of(one), do_sample=False,
        max_new_tokens=NEW, eos_token_id=None, pad_token_id=0, repetition_penalty=one.penalty,
        logits_processor=[] if own is None else [own], **drafting(one),
    )  # fmt: skip
    new = new_tokens(one.prompts, out)
    return [[[*prompt, *tokens] for prompt, tokens in zip(one.prompts, new, strict=True)]]


def first_tokens(one: Crossing, *, drafted: bool) -> Tensor:
    """Count the second and third new token of ``SAMPLES`` texts of the first prompt: int64[SMALL ** 2]."""
    chosen, how = (drafter_of(one), drafting(one)) if drafted else (NoDrafter(), {"budget": 1})
    given = {**text(one), "stop_token_ids": [], "max_new_tokens": 3, "seed": one.seed + (not drafted)}
    out = stree.generate(target(one.family, False), one.prompts[:1], chosen, **given, **how, num_samples=SAMPLES)
    cells = [sequence[-2] * SMALL + sequence[-1] for sequence in out.sequences]
    return torch.bincount(torch.tensor(cells), minlength=SMALL**2)
