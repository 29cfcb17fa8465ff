"""Raises before running if what a generation allocates would not fit in memory; the message shows the computation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch

from stree.decode.draft_memory import (
    Drafting,
    columns_at_once,
    kept_rows,
    one_shot_heads,
    rereading_bytes,
    root_rows,
    row_bytes,
    scored_bytes,
)
from stree.decode.logits_memory import accept_bytes, logprob_bytes, rule_bytes
from stree.decode.token_rules import TokenRules
from stree.drafters import Drafter, FusedDrafter, HeadDrafter, ModelDrafter
from stree.drafters.draft_state import CHUNK
from stree.drafters.tree_builder import FIRST_DRAFTED
from stree.growth import Growth
from stree.models.prefill import pads_exactly
from stree.models.prefill_memory import prefill_bytes
from stree.models.state_size import StateSize, measure_state
from stree.models.tree_lm import TreeLM
from stree.models.tree_memory import tree_bytes
from stree.verify import Verifier

__all__ = [
    "Extent",
    "arithmetic",
    "check_memory",
    "fits_in_memory",
    "free_bytes",
    "needed_bytes",
    "path_nodes",
    "state_bytes",
    "verifier_bytes",
]

PAIR_BYTES = 10  # of a tree's masks, for every pair of its nodes: two of one byte and one of eight


@dataclass(frozen=True, slots=True)
class Extent:
    """Sizes of a generation.

    Attributes:
        batch: sequences at once.
        length: most tokens that a state holds of each.
        nodes: most nodes of a tree, root included.
        prompts: prompts that are prefilled together, or one by one where a model cannot pad them.
        prompt_length: most tokens of each.
        chunk: most tokens of a prompt that run at once; 0 for the model's ``chunk_size``.
        is_padded: whether they may differ in length.
        single_rows: states of one row beside the batch's, which prompts are prefilled in.
        is_greedy: whether no token is sampled.
        truncates: whether top-k, top-p or min-p may exclude tokens.
        verifier_bytes: of a logit, that the verifier holds beside probabilities on a CPU.
        drafting: sizes of what a draft model grows, or None.
        rules: token rules of the texts.
        has_grammar: whether a text has a grammar.
        path_nodes: most nodes of a path whose logits are kept for log probabilities; 0 where none are asked for.
    """

    batch: int
    length: int
    nodes: int
    prompts: int = 1
    prompt_length: int = 1
    chunk: int = 0
    is_padded: bool = False
    single_rows: int = 0
    is_greedy: bool = False
    truncates: bool = False
    verifier_bytes: int = 11
    drafting: Drafting | None = None
    rules: tuple[TokenRules, ...] = ()
    has_grammar: bool = False
    path_nodes: int = 0

    def rounded_up(self) -> Extent:
        """Return powers of two in place of the sizes that are measured, so that one measurement serves all below it."""
        drafting = self.drafting
        return replace(
            self, batch=_power_of_two(self.batch), length=_power_of_two(self.length), nodes=_power_of_two(self.nodes),
            prompts=_power_of_two(self.prompts),
            drafting=None if drafting is None else replace(drafting, width=_power_of_two(drafting.width)),
        )  # fmt: skip

    def nodes_of(self, place: int) -> int:
        """Return the nodes that a state of the target, which has place 0, or of a draft model has room for."""
        columns = 0 if self.drafting is None else self.drafting.nodes + FIRST_DRAFTED - 1
        return max(self.nodes, columns, CHUNK + 1) if place else self.nodes


def verifier_bytes(drafter: Drafter, growth: Growth | None, budget: int, verifier: str | Verifier) -> int:
    """Return the bytes of a logit that a verifier holds beside probabilities where tokens are sampled on a CPU.

    MATCH holds none, traversal a copy of the draft's probabilities, rejection and other rules sums in float64 and a
    part of such a copy, as measured.  "auto" is traversal where nodes are drawn, else MATCH.
    """
    if verifier != "auto":
        return {"match": 0, "traversal": 4}.get(str(verifier), 11)
    parts = (drafter.first, drafter.second) if isinstance(drafter, FusedDrafter) else (drafter,)
    if growth is None or budget == 1 or not any(part.models for part in parts):
        return 0
    return 0 if growth.plan(budget).drawing == "top" else 4


def path_nodes(drafter: Drafter, growth: Growth | None, budget: int) -> int:
    """Return the most nodes of a path through a drafter's trees, root included."""
    plan = None if growth is None or budget == 1 else growth.plan(budget)
    if plan is None or plan.is_heap or not isinstance(drafter, (ModelDrafter, HeadDrafter)):
        return budget
    return min(budget, 1 + len(plan.layers))


def check_memory(lm: TreeLM, drafter: Drafter, extent: Extent) -> None:
    """Refuse a generation that does not fit.

    Args:
        lm: the target.
        drafter: its models have states of the same texts.
        extent: sizes.

    Raises:
        ValueError: target and draft models need more than is free; the message shows the sum.
    """
    if fits_in_memory(lm, drafter, extent):
        return
    models = _models(lm, drafter, extent.nodes)
    sums = " and ".join(
        arithmetic(model, extent.batch, extent.length, extent.nodes_of(place)) for place, model in enumerate(models)
    )
    passing = _size(_transient_bytes(models, extent, one_shot_heads(drafter, extent.nodes)))
    raise ValueError(
        f"the states need {_size(needed_bytes(lm, drafter, extent))}, {passing} of them in a prefill or a step, "
        f"{sums}, and {_size(free_bytes(lm.device))} are free on {lm.device}; lower max_batch, max_length or budget"
    )


def fits_in_memory(lm: TreeLM, drafter: Drafter, extent: Extent) -> bool:
    """Whether a generation fits; see ``check_memory``.  Its own sizes are measured only if rounded ones do not fit."""
    free = free_bytes(lm.device)
    return any(needed_bytes(lm, drafter, one) <= free for one in (extent.rounded_up(), extent))


def _power_of_two(size: int) -> int:
    """Return the least power of two that is not smaller."""
    return 1 << (size - 1).bit_length()


def needed_bytes(lm: TreeLM, drafter: Drafter, extent: Extent) -> int:
    """Bytes of all states, the contexts of one-shot heads included, and of the larger one of prefill and step."""
    batch, length, models = extent.batch, extent.length, _models(lm, drafter, extent.nodes)
    contexts = sum(getattr(model, "context_bytes_per_token", 0) for model in drafter.models) * batch * length
    states = 0
    for place, model in enumerate(models):
        rows = batch + max(extent.single_rows, _runs_one_by_one(model, extent))
        states += state_bytes(model, rows, length, extent.nodes_of(place))
    return contexts + states + _transient_bytes(models, extent, one_shot_heads(drafter, extent.nodes))


def _transient_bytes(models: list[TreeLM], extent: Extent, heads: Sequence[Any] = ()) -> int:
    """Bytes that are free again after a prefill, which models run one after the other, or after a step."""
    if not models:  # a target without weights has neither
        return 0
    target, drafts = models[0], [*models[1:], *heads]
    nodes, drafting = extent.nodes, extent.drafting or Drafting(extent.nodes, extent.nodes)
    scoring = tree_bytes(target, extent.batch, nodes, extent.length)
    step = max(scoring, _ruled_bytes(target, extent, nodes), _logits_bytes(target, extent))
    drawn = drafting.nodes * sum(row_bytes(model, extent.batch) for model in drafts) * (not extent.is_greedy)
    # Logits of the root of the last draft, and of a one-shot head's block.
    kept = sum(kept_rows(model, drafting) * row_bytes(model, extent.batch) for model in drafts)
    # A head reads accepted tokens while the logits of the step are there.
    rereading = sum(rereading_bytes(model, drafting, extent.batch, extent.length) for model in drafts)
    step = max(step, nodes * row_bytes(target, extent.batch) + rereading)
    growing = max((_growing_bytes(model, extent, drafting) for model in drafts), default=0)
    learnt = extent.batch * drafting.model_bytes if drafts else 0
    overlaps = len({*map(id, drafts)}) < len(drafts)  # a tree grows while the one before it is verified
    step = drawn + step + growing if overlaps else max(drawn + step, growing)
    return learnt + max([kept + step, *(_prefill_bytes(model, extent) for model in models)])


def _growing_bytes(lm: TreeLM, extent: Extent, drafting: Drafting) -> int:
    """Bytes of the logits and distributions of a draft model while a tree grows."""
    row, width = row_bytes(lm, extent.batch), drafting.width
    scored = scored_bytes(lm, extent.batch, columns_at_once(lm, drafting), extent.length)
    root = root_rows(lm) * row
    layer = root + max(scored, _ruled_bytes(lm, extent, width, is_draft=True))
    if drafting.is_heap:  # as drawn, what is left of them, a longer copy of that, and those of the last tree
        return layer + (4 - extent.is_greedy) * drafting.nodes * row
    if extent.is_greedy:  # with the probabilities by which candidates are ranked
        return max(layer, root + 2 * width * row)
    return layer + drafting.nodes * row


def _ruled_bytes(lm: TreeLM, extent: Extent, nodes: int, *, is_draft: bool = False) -> int:
    """Bytes of the logits of some nodes while token rules and then masks of grammars are applied; 0 without both."""
    kept, ruling = rule_bytes(extent.rules, extent.batch, nodes, lm.vocab_size, extent.length)
    raw, has_rules = nodes * row_bytes(lm, extent.batch), bool(extent.rules)
    masking = (2 + has_rules) * raw + extent.batch * nodes * lm.vocab_size * 9 // 8  # masks as bools and bits
    if is_draft:  # whose logits stay as they are where a mask leaves no token
        masking = 3 * raw
    return max((kept + ruling + raw) * has_rules, (kept + masking) * extent.has_grammar)


def _logits_bytes(lm: TreeLM, extent: Extent) -> int:
    """Bytes of the logits of a step, and of what accepting and log probabilities make of them."""
    batch, nodes, vocab, is_on_cpu = extent.batch, extent.nodes, lm.vocab_size, lm.device.type == "cpu"
    copies = accept_bytes(
        lm.dtype, is_greedy=extent.is_greedy, truncates=extent.truncates,
        verifier_bytes=extent.verifier_bytes * is_on_cpu,
    )  # fmt: skip
    raw, has_rules = nodes * row_bytes(lm, extent.batch), bool(extent.rules) or extent.has_grammar
    kept = rule_bytes(extent.rules, batch, nodes, vocab, extent.length)[0] + raw * has_rules  # before the rules, too
    paths, behind = (batch * each for each in logprob_bytes(extent.path_nodes, vocab, has_rules=has_rules))
    step = kept + max(batch * nodes * vocab * copies, raw + paths)
    return max(step, behind) if is_on_cpu else step + behind  # graphs keep what a captured step needs


def _prefill_bytes(lm: TreeLM, extent: Extent) -> int:
    """Bytes of a prefill beside the state."""
    length = min(extent.prompt_length, extent.chunk or lm.chunk_size or extent.prompt_length)
    prompts = 1 if _runs_one_by_one(lm, extent) else extent.prompts
    memory = _measured(lm)
    held = 0  # tokens before the last chunk, if it does not run as chains
    if lm.family.continues_caches and not (extent.is_padded and extent.prompts > 1):
        held = extent.prompt_length - length
    cache = memory.state + memory.window + memory.kv_per_token * (held + length)  # where more cannot be measured
    is_padded = extent.is_padded and prompts > 1
    return max(prompts * cache, prefill_bytes(lm, prompts, length, held=held, is_padded=is_padded))


def _runs_one_by_one(lm: TreeLM, extent: Extent) -> bool:
    """Whether each prompt is prefilled in a state of one row."""
    return extent.is_padded and extent.prompts > 1 and not pads_exactly(lm)


def state_bytes(lm: TreeLM, batch: int, length: int, nodes: int) -> int:
    """Bytes of a decode state: ``batch`` texts of ``length`` tokens, each with a tree of ``nodes``."""
    return batch * sum(size * count for _, size, count in _terms(lm, length, nodes))


def arithmetic(lm: TreeLM, batch: int, length: int, nodes: int) -> str:
    """The computation of ``state_bytes`` as text."""
    terms = " + ".join(f"{count:,} {name} x {_size(size)}" for name, size, count in _terms(lm, length, nodes) if size)
    return f"{_size(state_bytes(lm, batch, length, nodes))} = {batch} texts x ({terms})"


def free_bytes(device: torch.device) -> int:
    """Bytes that can be allocated: on a device also those that its caching allocator holds unused."""
    if device.type != "cuda":
        return int(psutil.virtual_memory().available)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + kept


def _models(lm: TreeLM, drafter: Drafter, nodes: int) -> list[TreeLM]:
    """The models with states of known sizes."""
    models = [lm, *(drafter.models if nodes > 1 else ())]
    return [model for model in models if isinstance(model, TreeLM)]


def _measured(lm: TreeLM) -> StateSize:
    """Return the sizes of a state, measured once."""
    if "memory" not in lm.cache:
        lm.cache["memory"] = measure_state(lm)
    memory: StateSize = lm.cache["memory"]
    return memory


def _terms(lm: TreeLM, length: int, nodes: int) -> list[tuple[str, int, int]]:
    """Parts of a text's state: name, bytes of one, and their number."""
    memory = _measured(lm)
    return [
        ("state", memory.state + memory.window, 1),
        ("tokens", memory.kv_per_token, length),
        ("nodes", memory.stash_per_node + memory.kv_stash_per_node, nodes),
        ("pairs of nodes", PAIR_BYTES, nodes * nodes),
    ]


def _size(count: float) -> str:
    """Bytes in the largest fitting unit."""
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.1f} GB"
