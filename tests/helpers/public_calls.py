"""A call of every public name with good arguments, of which a test replaces one at a time by an odd value."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList

import stree
from helpers.captured import launched
from helpers.tiny_models import tiny_model
from helpers.tiny_pairs import Letters
from stree import drafters, growth, testing, verify
from stree.drafters import NoDrafter, SuffixDrafter
from stree.growth import Chain
from stree.retrieval import Datastore, SuffixAutomaton
from stree.serving import RequestHandle

__all__ = ["CALLS", "OUTPUTS", "TREE"]

TREE = stree.TokenTree(torch.tensor([1, 2, 3]), torch.tensor([-1, 0, 0]))
STOPPING = StoppingCriteriaList([MaxLengthCriteria(4)])
PATH = {"path": torch.tensor([[0, 1]], dtype=torch.int32), "path_lengths": torch.tensor([2], dtype=torch.int32)}
TABLE = testing.TableModel.random(3, seed=0)
DRAFT = {"probs": torch.full((1, 1, 4), 0.25), "row": torch.zeros(1, 3).int(), "kind": torch.zeros(1, 3).int()}
OFFSET = torch.tensor([0])

# Public names that are what calls return, raise or hold for a caller's own class, and are not made by a caller.
OUTPUTS = {
    "Acceptance", "AcceptanceModel", "BaseGrowth", "CausalHead", "CheckFailed", "Draft", "DraftRun", "Drafter",
    "Generation",
    "GenerationError", "GenerationInterrupted", "Growth", "KeptSlots", "Layer", "MaskedDiffusion", "NamedGrowth",
    "OneShotHead", "Plan", "Proposal", "QueueFull", "Report", "Seen", "Slots", "StepRecord", "Stop", "TableLM",
    "TableModel", "TokenStream", "TreeProcessor", "Verifier", "check_vocabulary", "choose_slots", "head_layout",
    "learns_alike", "mtp_files", "name_of", "padded_prompts",
}  # fmt: skip


@cache
def lm() -> stree.TreeLM:
    return launched()


@cache
def drafter() -> drafters.ModelDrafter:
    return drafters.ModelDrafter(lm())


@cache
def engine() -> stree.Engine:
    return stree.Engine(launched(), NoDrafter(), max_batch=1, max_length=64)


@cache
def state(*, is_verified: bool = False) -> Any:
    """A state of one text, with a pending tree or without; no refused call may change it."""
    made = lm().new_state(1, 64, 16)
    lm().prefill(made, torch.tensor([[1, 2]]))
    if is_verified:
        lm().verify(made, TREE)
    return made


def generated(**options: Any) -> Any:
    return stree.generate(lm(), **options).sequences


def submitted(**options: Any) -> Any:
    handle: RequestHandle = engine().submit(**options)
    return handle.result(30).sequences


def with_engine(**options: Any) -> None:
    stree.Engine(lm(), **options).close()


def custom(**options: Any) -> Any:
    model = tiny_model("mamba2")
    config = GenerationConfig(max_new_tokens=2, do_sample=False, pad_token_id=0)
    rest = {"logits_processor": LogitsProcessorList(), "stopping_criteria": STOPPING}
    return stree.custom_generate(model, generation_config=config, **{**rest, **options})


def committed(**given: Any) -> Any:
    """Commit to a copy by good arguments, and by others to the state itself, which must refuse them."""
    if all(given[name] is PATH[name] for name in PATH):
        copy = state().clone()
        lm().verify(copy, TREE)
        lm().commit(copy, **given)
        return lm().verify(copy, TREE)
    before = state(is_verified=True)
    try:
        return lm().commit(before, **given)
    finally:
        if before.lengths.tolist() != [2]:  # it was accepted
            state.cache_clear()


SAMPLING = {"temperature": 1.0, "top_k": 3, "top_p": 0.9, "min_p": 0.1}
CONSTRAINTS = {"sampling": stree.Sampling(), "max_new_tokens": 2, "seed": 0, "stop_token_ids": None, "tokenizer": None}
CONSTRAINTS |= {"stop_strings": None, "ignore_eos": False, "logprobs": False, "grammar": None, "logit_bias": None}
CONSTRAINTS |= {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "min_new_tokens": 0}
CONSTRAINTS |= {"allowed_token_ids": None, "bad_words": None}
GENERATE = {
    **CONSTRAINTS, "prompts": [[1, 2, 3]], "drafter": None, "growth": None, "budget": 2, "verifier": "auto",
    "overlap": False, "logits_processor": None, "num_samples": 1, "return_steps": False, "attention_mask": None,
    "streamer": None, "cancelled": None, "max_batch": None, "max_length": None, "allow_lossy": False,
}  # fmt: skip
CHECK = {"budget": 2, "sampling": stree.Sampling(1.0), "seeds": (0,)}
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "generate": (generated, GENERATE),
    "stream": (lambda **given: list(stree.stream(lm(), **given)), {"prompt": [1, 2, 3], "drafter": None, "seed": 0}),
    "stream.text": (
        lambda **given: list(stree.stream(lm(), [1, 2], max_new_tokens=2).text(**given)), {"tokenizer": Letters()}
    ),
    "custom_generate": (
        custom,
        {
            "input_ids": torch.tensor([[1, 2]]), "drafter": "suffix", "growth": None, "budget": None,
            "verifier": "auto", "seed": 0,
        },
    ),
    "Engine": (
        with_engine,
        {
            "drafter": None, "growth": None, "budget": 2, "verifier": "auto", "max_batch": 1, "max_length": 64,
            "max_queue": None, "cache_bytes": 0, "prefill_chunk": None, "before_step": None,
        },
    ),
    "Engine.submit": (
        submitted,
        {**CONSTRAINTS, "prompt": [1, 2, 3], "trees": False, "budget": None, "cache": True, "num_shared": 0},
    ),
    "Engine.close": (
        lambda **given: stree.Engine(lm(), NoDrafter(), max_batch=1, max_length=64).close(**given),
        {"grace": 0.0, "timeout": 1.0},
    ),
    "Sampling": (stree.Sampling, SAMPLING),
    "Sampling.probs": (stree.Sampling(1.0).probs, {"logits": torch.zeros(1, 3)}),
    "Random": (stree.Random, {"seed": 0, "sequences": OFFSET, "positions": OFFSET}),
    "Random.uniform": (stree.Random(0, OFFSET, OFFSET).uniform, {"purpose": "target", "offset": OFFSET, "node": 0}),
    "Random.choice": (
        stree.Random(0, OFFSET, OFFSET).choice,
        {"purpose": "draft", "probs": torch.full((1, 4), 0.25), "offset": OFFSET, "node": 0},
    ),
    "accept": (
        lambda **given: stree.accept(**given).path,
        {
            "tree": TREE, "target_logits": torch.zeros(1, 3, 4), "sampling": stree.Sampling(1.0),
            "rng": stree.Random(0, OFFSET, OFFSET), "draft": None, "verifier": "auto", "max_depth": None,
        },
    ),
    "accept, draft": (
        lambda **given: stree.accept(
            TREE, torch.zeros(1, 3, 4), stree.Sampling(1.0), stree.Random(0, OFFSET, OFFSET), stree.DraftProbs(**given)
        ).path,
        DRAFT,
    ),
    "DraftProbs": (stree.DraftProbs, DRAFT),
    "DraftLaws": (stree.DraftLaws, DRAFT),
    "TokenTree": (stree.TokenTree, {"tokens": [1, 2], "parents": [-1, 0]}),
    "TokenTree.chain": (stree.TokenTree.chain, {"tokens": [1, 2]}),
    "TokenTree.from_paths": (stree.TokenTree.from_paths, {"paths": [[1, 2]]}),
    "TokenTree.prune": (TREE.prune, {"kept": torch.tensor([[True, True, False]])}),
    "Grammar": (stree.Grammar, {"kind": "regex", "source": "a"}),
    "Grammar.choice": (stree.Grammar.choice, {"choices": ["a"]}),
    "Grammar.json_schema": (stree.Grammar.json_schema, {"schema": {"type": "object"}, "whitespace": True}),
    "Grammar.lark": (stree.Grammar.lark, {"grammar": 'start: "a"'}),
    "Grammar.regex": (stree.Grammar.regex, {"pattern": "a"}),
    "TreeLM": (stree.TreeLM, {"model": "nothing"}),
    "TreeLM.from_pretrained": (
        stree.TreeLM.from_pretrained,
        {"name_or_path": "/none", "device": "cpu", "dtype": "auto", "device_map": None, "tp_plan": None},
    ),
    "TreeLM.new_state": (
        lambda **given: lm().new_state(**given).lengths, {"batch_size": 1, "max_length": 64, "max_nodes": 16}
    ),
    "TreeLM.prefill": (
        lambda **given: lm().prefill(lm().new_state(1, 64, 16), **given),
        {"input_ids": torch.tensor([[1, 2]]), "lengths": None, "hidden_layers": None},
    ),
    "TreeLM.extend": (
        lambda **given: lm().extend(state().clone(), **given),
        {"input_ids": torch.tensor([[1, 2]]), "lengths": None, "hidden_layers": None},
    ),
    "TreeLM.verify": (
        lambda **given: lm().verify(state(), **given), {"tree": TREE, "first": 0, "hidden_layers": None}
    ),
    "TreeLM.commit": (committed, PATH),
    "state of another": (lambda **given: lm().verify(**given, tree=TREE), {"state": None}),
    "DecodeState.select": (lambda **given: state().select(**given).lengths, {"batch_indices": [0]}),
    "Datastore": (Datastore.build, {"documents": [[1, 2]], "vocab_size": 10, "max_tokens": 100, "tokenizer": ""}),
    "Datastore.load": (Datastore.load, {"path": "nowhere"}),
    "SuffixAutomaton": (SuffixAutomaton, {"tokens": [1, 2]}),
    "drafters.load": (lambda **given: drafters.load(target=lm(), **given), {"source": "suffix"}),
    "drafters.load, target": (lambda **given: drafters.load("suffix", **given), {"target": None}),
    "heads.load": (lambda **given: stree.heads.load(target=lm(), **given), {"source": "/none"}),
    "ModelDrafter": (lambda **given: drafters.ModelDrafter(lm(), **given), {"vocab": None}),
    "ModelDrafter, lm": (drafters.ModelDrafter, {"lm": None}),
    "HeadDrafter": (drafters.HeadDrafter, {"head": None}),
    "FusedDrafter": (
        drafters.FusedDrafter, {"first": SuffixDrafter(), "second": NoDrafter(), "least_share": 0.1}
    ),
    "NoDrafter": (NoDrafter, {}),
    "SuffixDrafter": (SuffixDrafter, {"datastore": None}),
    "distill": (stree.distill.Settings, {"kind": "model", "minutes": 1.0, "steps": 2, "seed": 0, "recipe": "plain"}),
    "check_drafter": (
        testing.check_drafter, {"drafter": NoDrafter(), "vocab_size": 3, "growth": None, **CHECK}
    ),
    "check_growth": (testing.check_growth, {"growth": Chain(1), "vocab_size": 2, **CHECK}),
    "check_verifier": (testing.check_verifier, {"verifier": "nothing", "vocab_size": 3, "seeds": (0,)}),
    "check_family": (testing.check_family, {"model": None, "seed": 0}),
    "table_drafter": (testing.table_drafter, {"table": TABLE}),
    "verifier_of": (verify.verifier_of, {"verifier": "auto"}),
    "TypicalAcceptance": (verify.TypicalAcceptance, {"threshold": 0.1, "alpha": 0.3}),
    "ForcedLength": (verify.ForcedLength, {"tokens": 2.0}),
    "parse_growth": (growth.parse_growth, {"text": "chain:2"}),
    "sized_growth": (growth.sized_growth, {"growth": "chain:2", "budget": None}),
    "checked_plan": (growth.checked_plan, {"growth": Chain(2), "budget": 4}),
    "Chain": (Chain, {"depth": 3, "stop": None}),
    "Static": (growth.Static, {"shape": [2, 1]}),
    "SpecInfer": (growth.SpecInfer, {"widths": [2, 1]}),
    "RSDC": (growth.RSDC, {"widths": [2, 1]}),
    "RSDS": (growth.RSDS, {"width": 2, "depth": 2}),
    "Sequoia": (growth.Sequoia, {"depth": 2, "rates": (0.5, 0.2), "source": ""}),
    "DySpec": (growth.DySpec, {"depth": 2, "width": 2, "ranks": 2, "threshold": None, "form": "layers"}),
    "OptTree": (growth.OptTree, {"depth": 2, "least_gain": 0.5}),
    "Eagle2": (growth.Eagle2, {"depth": 2, "beam": 2}),
    "TargetInit": (growth.TargetInit, {"width": 2, "depth": 2}),
    "Calibrated": (growth.Calibrated, {"depth": 4, "ranks": 4}),
    "Stopped": (growth.Stopped, {"base": Chain(2), "rule": growth.Confidence(0.1)}),
    "DepthStop": (growth.DepthStop, {"base": Chain(2), "threshold": -1.0, "layers": (1,)}),
    "DecisionStop": (growth.DecisionStop, {"base": Chain(2), "threshold": 0.4}),
    "Confidence": (growth.Confidence, {"least_prob": 0.1, "most_entropy": 1.0}),
}  # fmt: skip
