"""The methods that the pair's table compares, by name, and one run of each; greedy output is checked before timing."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import stree
from stree.drafters import Drafter, ModelDrafter, NoDrafter, SuffixDrafter
from stree.growth import Chain, DySpec, Growth, Static

# Two passes of one model over one text differ by up to 1e-4 of the logit scale in float32 (the project's own bar), so
# two logits may change places where they are closer than twice that.
NEAR_TIE = 2e-4


@dataclass(frozen=True, slots=True)
class Method:
    """A named way to generate.

    Attributes:
        name: as on the command line.
        kind: what comes before the colon; the best of a kind can be asked for.
        drafter: "model", "suffix", "none", or "transformers" for that library's own generate.
        growth: shape of a draft model's trees, or None.
        budget: most nodes a step, root included.
    """

    name: str
    kind: str
    drafter: str
    growth: Growth | None
    budget: int

    def verifier(self, temperature: float) -> str:
        """Say which verifier "auto" means here."""
        if self.drafter == "transformers":
            return "none"
        return "greedy" if temperature == 0 else "traversal" if self.drafter == "model" else "match"


@dataclass(frozen=True, slots=True)
class Run:
    """One generation: new tokens, wall seconds from prompt to last token (prefill included), statistics."""

    tokens: list[int]
    seconds: float
    stats: dict[str, Any]


@dataclass(slots=True, eq=False)
class Pair:
    """A target, its drafter, and an ungrafted copy of the target for transformers' own generate."""

    target: stree.TreeLM
    drafter: stree.TreeLM
    plain: Any
    tokenizer: Any

    @classmethod
    def load(cls, target: str | Path, drafter: str | Path) -> Pair:
        """Load both folders or hub ids."""
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        lm = stree.TreeLM.from_pretrained(target)
        plain = AutoModelForCausalLM.from_pretrained(target, dtype=lm.dtype).to(lm.device).eval()
        plain.generation_config.eos_token_id = None  # every method emits exactly the tokens asked for
        return cls(lm, stree.TreeLM.from_pretrained(drafter), plain, AutoTokenizer.from_pretrained(target))


def parse_methods(text: str) -> list[Method]:
    """Read a comma-separated list of methods.

    ``plain``, ``transformers``, ``chain:DEPTH``, ``chain:FROM-TO``, ``static:WIDTH,WIDTH,...``, ``static:stree``,
    ``dyspec:BUDGET`` or ``dyspec:BUDGETxDEPTH``, ``dyspec-heap:BUDGET``, ``suffix:BUDGET``.

    Raises:
        ValueError: an unknown method; the message names it.
    """
    methods: dict[str, Method] = {}
    for name in re.split(r",(?=[a-z])", text):
        chains = re.fullmatch(r"chain:(\d+)-(\d+)", name)
        depths = range(int(chains[1]), int(chains[2]) + 1) if chains else ()
        for single in [f"chain:{depth}" for depth in depths] or [name]:
            methods[single] = _parse_method(single)
    return list(methods.values())


def _parse_method(name: str) -> Method:
    """Read one method."""
    kind, _, rest = name.partition(":")
    numbers = [int(number) for number in re.findall(r"\d+", rest)]
    if name == "plain":
        return Method(name, kind, "none", None, 1)
    if name == "transformers":
        return Method(name, kind, "transformers", None, 1)
    if kind == "suffix" and re.fullmatch(r"\d+", rest):
        return Method(name, kind, "suffix", None, numbers[0])
    if kind == "chain" and re.fullmatch(r"\d+", rest):
        return Method(name, kind, "model", Chain(numbers[0]), numbers[0] + 1)
    if kind == "static" and re.fullmatch(r"\d+(,\d+)*|stree", rest):
        growth = Static(numbers) if numbers else Static.stree()
        nodes = sum(layer.width for layer in growth.plan(1 << 30).layers)
        return Method(name, kind, "model", growth, nodes + 1)
    if kind == "dyspec" and re.fullmatch(r"\d+(x\d+)?", rest):
        depth = numbers[1] if len(numbers) > 1 else DySpec().depth
        return Method(name, kind, "model", DySpec(depth), numbers[0])
    if kind == "dyspec-heap" and re.fullmatch(r"\d+", rest):
        return Method(name, kind, "model", DySpec(form="heap"), numbers[0])
    raise ValueError(
        f"method {name!r} is unknown; use plain, transformers, chain:DEPTH, chain:FROM-TO, static:WIDTH,WIDTH,..., "
        "static:stree, dyspec:BUDGET[xDEPTH], dyspec-heap:BUDGET or suffix:BUDGET"
    )


def run(pair: Pair, method: Method, prompt: list[int], new_tokens: int, temperature: float, seed: int) -> Run:
    """Generate once."""
    if method.drafter == "transformers":
        return _run_transformers(pair, prompt, new_tokens, temperature, seed)
    drafters: dict[str, Drafter] = {
        "none": NoDrafter(),
        "suffix": SuffixDrafter(),
        "model": ModelDrafter(pair.drafter),
    }
    began = time.perf_counter()
    out = stree.generate(
        pair.target,
        [prompt],
        drafter=drafters[method.drafter],
        growth=method.growth,
        budget=method.budget,
        sampling=stree.Sampling(temperature),
        max_new_tokens=new_tokens,
        seed=seed,
    )
    seconds = time.perf_counter() - began
    return Run(out.sequences[0][len(prompt) :], seconds, out.stats)


def _run_transformers(pair: Pair, prompt: list[int], new_tokens: int, temperature: float, seed: int) -> Run:
    """Generate once with the ungrafted copy."""
    options: dict[str, Any] = {"do_sample": False}
    if temperature:
        options = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    torch.manual_seed(seed)
    began = time.perf_counter()
    ids = torch.tensor([prompt], device=pair.plain.device)
    out = pair.plain.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, **options)
    tokens = out[0, len(prompt) :].tolist()
    return Run(tokens, time.perf_counter() - began, {"steps": len(tokens) - 1, "tau": 1.0, "nodes_per_step": 1.0})


@torch.no_grad()
def compare(pair: Pair, prompt: list[int], tokens: list[int], wanted: list[int]) -> dict[str, Any]:
    """Compare a greedy output with transformers': identical, or how near a tie their first difference is.

    Returns:
        lossless: identical, or apart first at a near-tie; with its place, logit gap and the logits' scale.
    """
    if tokens == wanted:
        return {"lossless": True, "identical": True}
    place = next((i for i, (a, b) in enumerate(zip(tokens, wanted, strict=False)) if a != b), None)
    if place is None:
        return {"lossless": False, "identical": False, "lengths": [len(tokens), len(wanted)]}
    ids = torch.tensor([prompt + wanted[:place]], device=pair.plain.device)
    logits = pair.plain(ids).logits[0, -1]
    gap = float(logits[wanted[place]] - logits[tokens[place]])
    scale = float(logits.abs().max())
    report = {"identical": False, "first_divergence": place, "logit_gap": gap, "logit_scale": scale}
    return {"lossless": abs(gap) <= NEAR_TIE * scale, **report}
