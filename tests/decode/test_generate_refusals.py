"""What generate refuses, before anything runs or where it is met: bad arguments, texts that do not fit, bad logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from helpers.tiny_models import VOCAB, patched, tiny_model
from torch import Tensor

import stree
from stree.decode import memory
from stree.drafters import ModelDrafter, NoDrafter, SuffixDrafter
from stree.growth import Chain, DySpec, Static
from stree.models.prefill_memory import prefill_bytes
from stree.models.tree_lm import TreeLM

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [3, 4, 2]]


@cache
def lm() -> TreeLM:
    return patched(tiny_model("bamba"))


@cache
def drafter() -> ModelDrafter:
    return ModelDrafter(patched(tiny_model("mamba2")))


class Listener:
    """A streamer."""

    def put(self, value: Tensor) -> None:
        """Hear nothing."""

    def end(self) -> None:
        """Hear nothing."""


@cache
class Fixed(ModelDrafter):
    """A drafter of a user's own, whose model cannot be replaced by one of the target's number of tokens."""

    def with_model(self, change: Any) -> Fixed:
        return self


def small_lm() -> TreeLM:
    return patched(tiny_model("mamba2", vocab_size=64))


@cache
def training_lm() -> TreeLM:
    lm = patched(tiny_model("bamba"))
    lm.model.train()
    return lm


@cache
def chunkless_lm() -> TreeLM:
    lm = patched(tiny_model("bamba"))
    lm.chunk_size = 0
    return lm


@cache
def moved_lm() -> TreeLM:
    lm = patched(tiny_model("bamba"))
    lm.model.double()
    return lm


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"prompts": "text"},
            ValueError,
            "generate needs at least one prompt, a list of token lists, got str; tokenise the text first",
        ),
        ({"prompts": None}, ValueError, "needs at least one prompt, a list of token lists, got NoneType"),
        ({"prompts": [[4], 3]}, TypeError, "prompt 1 must be a list of tokens, got int"),
        ({"budget": 8.5}, TypeError, "budget must be an integer, got float"),
        ({"max_new_tokens": None}, TypeError, "max_new_tokens must be an integer or a list of them, got None"),
        ({"prompts": []}, ValueError, "generate needs at least one prompt, a list of token lists, got none"),
        ({"prompts": [[1], []]}, ValueError, "prompt 1 is empty; every prompt needs at least one token"),
        ({"prompts": [[1, VOCAB]]}, ValueError, "prompt 0 has token 97, outside the vocabulary of 97"),
        ({"prompts": [[1], [-3]]}, ValueError, "prompt 1 has token -3, outside the vocabulary of 97"),
        ({"prompts": [[1, 2.5]]}, TypeError, r"prompt 0 must be a list of token ids, integers, got \[1, 2.5\]"),
        (
            {"prompts": iter([[1]]), "streamer": Listener(), "max_batch": 1, "max_length": 200},
            ValueError,
            "a streamer takes one prompt, got an iterator",
        ),
        ({"max_new_tokens": "8"}, TypeError, "max_new_tokens must be an integer or a list of them, got .8."),
        ({"stop_token_ids": "end"}, TypeError, "stop_token_ids must be a list of token ids, integers, got 'end'"),
        ({"stop_token_ids": 5}, TypeError, "stop_token_ids must be a list of token ids, integers, got 5"),
        ({"drafter": "sufix"}, ValueError, "drafter must be 'suffix', 'none', .*, got 'sufix'"),
        ({"drafter": SuffixDrafter}, TypeError, "drafter must be .*derived from stree.drafters.Drafter, got <class"),
        ({"growth": "chian:4"}, ValueError, "chian"),
        ({"growth": "calibrated:8", "budget": "auto"}, ValueError, "sets a budget of 8 nodes, and budget is 'auto'"),
        ({"growth": Chain}, TypeError, "growth must be an object such as .*, got <"),
        ({"verifier": "block"}, ValueError, r"block verification takes trees without .*; got Calibrated\("),
        ({"verifier": "block", "drafter": SuffixDrafter()}, ValueError, "block .* branches, .*; got SuffixDrafter"),
        ({"verifier": "block", "growth": DySpec(form="heap"), "budget": 3}, ValueError, "block .* got DySpec"),
        ({"seed": None}, TypeError, "seed must be an integer or a list of them, got None"),
        ({"sampling": 0.8}, TypeError, "sampling must be an object such as .*, got 0.8"),
        ({"budget": 0}, ValueError, "budget must be at least 1, got 0"),
        ({"budget": "many"}, ValueError, "budget must be a number of nodes or 'auto', got 'many'"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens must be at least 1, got 0"),
        (
            {"verifier": "typical"},
            ValueError,
            "verifier must be one of auto, match, rejection, traversal, block, got 'typical'",
        ),
        ({"streamer": Listener(), "prompts": [[1], [2]]}, ValueError, "a streamer takes one prompt, got 2"),
        ({"streamer": Listener(), "prompts": [[1], [2]], "seed": [1, 2]}, ValueError, "takes one prompt, got 2"),
        (
            {"prompts": iter([[1]]), "max_new_tokens": 0, "max_batch": 1, "max_length": 9},
            ValueError,
            "at least 1, got 0",
        ),
        (
            {"growth": Static.stree(), "budget": 12},
            ValueError,
            r"a tree of 13 nodes \(root included\) exceeds the budget of 12",
        ),
        ({"cancelled": 3}, TypeError, "cancelled must be an object such as a function of .*, got 3"),
        ({"streamer": 3}, TypeError, "streamer must be an object such as .*, got 3"),
        ({"logits_processor": 3}, TypeError, "logits_processor must be a function of text and logits, got 3"),
        ({"lm": None}, TypeError, "lm must be an object such as .*, got None"),
        ({"drafter": Fixed(small_lm())}, ValueError, "the drafter has 64 tokens, the target 97"),
        ({"drafter": ModelDrafter(training_lm())}, RuntimeError, "the model is in training mode"),
        ({"lm": training_lm()}, RuntimeError, "the model is in training mode"),
        ({"lm": chunkless_lm()}, ValueError, "chunk_size must be at least 1, got 0"),
        ({"lm": moved_lm()}, ValueError, "the model was moved since it was patched"),
        ({"growth": Chain(4), "budget": 4}, ValueError, r"a tree of 5 nodes \(root included\) exceeds the budget of 4"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_argument_is_refused_before_anything_runs(
    arguments: dict[str, Any],
    error: type[Exception],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def untouched(*_: Any) -> None:
        raise AssertionError("the model ran")

    monkeypatch.setattr(TreeLM, "new_state", untouched)
    with pytest.raises(error, match=message):
        stree.generate(
            **{"lm": lm(), "prompts": PROMPTS[:1], "drafter": ModelDrafter(patched(tiny_model("mamba2"))), **arguments}
        )
    assert not caplog.records


ODD: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (stree.generate, {"sampling": [None]}, "sampling must be an object .* got None in a list"),
    (stree.generate, {"attention_mask": {}}, "attention_mask must be in the form of the prompts, .* got {}"),
    (stree.generate, {"attention_mask": 3}, "attention_mask must be in the form of the prompts, .* got 3"),
    (stree.generate, {"attention_mask": [None]}, "attention_mask of prompt 0 must hold 0 or 1 .* got None"),
    (stree.generate, {"budget": torch.tensor([4, 4])}, "budget must be an integer, got Tensor"),
    (stree.generate, {"max_batch": torch.tensor([4, 4])}, "max_batch must be an integer, got Tensor"),
    (stree.generate, {"logprobs": torch.tensor([4, 4])}, "logprobs must be True or a number"),
    (stree.generate, {"ignore_eos": "no"}, "ignore_eos must be True or False, got 'no'"),
    (stree.generate, {"return_steps": 2}, "return_steps must be True or False, got 2"),
    (stree.generate, {"overlap": "no"}, "overlap must be True or False, got 'no'"),
    (stree.generate, {"allow_lossy": None}, "allow_lossy must be True or False, got None"),
    (
        stree.generate,
        {"logits_processor": lambda *_: None},
        r"logits_processor must return logits float\[1, 97\], got None",
    ),
    (stree.generate, {"logits_processor": lambda _, logits: logits[:, 1:]}, r"got float\[1, 96\]"),
    (stree.generate, {"logits_processor": lambda _, logits: logits - torch.inf}, "leaves no token to draw"),
    (stree.Sampling, {"temperature": torch.tensor([1.0, 2.0])}, "temperature must be a number, got tensor"),
    (stree.Sampling, {"top_k": torch.tensor([1, 2])}, "top_k must be an integer of at least 1, got tensor"),
    (stree.growth.Chain, {"depth": torch.tensor([1, 2])}, "depth must be an integer, got Tensor"),
    (stree.growth.Static, {"shape": None}, "shape must be a list of integers, got None"),
    (stree.growth.SpecInfer, {"widths": "ab"}, "widths must be a list of integers, got 'ab'"),
    (stree.TokenTree, {"tokens": "ab", "parents": [-1]}, "tokens must be an integer tensor, got str"),
    (stree.TokenTree.from_paths, {"paths": None}, "paths must be lists of tokens, integers, got None"),
]


@pytest.mark.parametrize(("call", "arguments", "message"), ODD, ids=lambda value: "")
def test_an_odd_value_is_refused_by_the_name_of_its_argument(
    call: Callable[..., Any], arguments: dict[str, Any], message: str
) -> None:
    if call is stree.generate:
        arguments = {"lm": lm(), "prompts": PROMPTS[:1], "max_new_tokens": 2, **arguments}
    with pytest.raises((TypeError, ValueError), match=message):
        call(**arguments)


def test_a_default_device_without_numbers_is_refused() -> None:
    with torch.device("meta"), pytest.raises(ValueError, match="default device must hold numbers, got meta"):
        stree.generate(lm(), PROMPTS[:1], max_new_tokens=2)


def test_a_model_that_is_not_patched_is_refused() -> None:
    with pytest.raises(TypeError, match=r"lm must be an object such as stree.TreeLM\(model\), got Mamba2"):
        stree.generate(tiny_model("mamba2"), PROMPTS)


def test_what_memory_cannot_hold_is_refused_with_the_sum() -> None:
    tokens = f"{(1 << 40) + 5:,} tokens"  # the last step may go beyond the limit by a whole tree
    match = rf"the states need [\d.,]+ GB, .* = 2 texts x \(1 state x .* {tokens} x .*\) and .* are free on cpu; lower"
    with pytest.raises(ValueError, match=match):
        stree.generate(
            lm(), iter(PROMPTS), drafter(), growth=Chain(4), budget=5, max_new_tokens=4, max_batch=2, max_length=1 << 40
        )


def test_memory_for_the_scans_of_prefill_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    # A chunk of 256 tokens, to which a prompt of one is padded, takes more than the states.
    model = patched(tiny_model("mamba2", chunk_size=256))
    states, scan = memory.state_bytes(model, 1, 12, 1), prefill_bytes(model, 1, 1)
    assert scan > states > 0
    monkeypatch.setattr(memory, "free_bytes", lambda _: states + scan - 1)
    with pytest.raises(ValueError, match="the states need .* of them in a prefill or a step, .* are free on cpu"):
        stree.generate(model, [[1]], NoDrafter(), max_length=11, max_new_tokens=4, budget=1)
    monkeypatch.setattr(memory, "free_bytes", lambda _: states + 2 * scan)
    assert stree.generate(model, [[1]], NoDrafter(), max_length=11, max_new_tokens=4, budget=1).stats["steps"]


def test_a_text_longer_than_the_model_s_positions_is_refused() -> None:
    model = patched(tiny_model("llama", max_position_embeddings=20))
    with pytest.raises(ValueError, match="prompt 1 of 7 tokens plus 14 new ones exceeds max_length 20"):
        stree.generate(model, [[1], [1, 2, 3, 4, 5, 6, 7]], max_new_tokens=14)
    out = stree.generate(model, [[1], [1, 2, 3, 4, 5, 6, 7]], max_new_tokens=13)
    assert [len(text) for text in out.sequences] == [14, 20]


def test_nan_logits_end_generation_with_what_there_is() -> None:
    calls = 0

    def poisoned(input_ids: Tensor, logits: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return logits if calls < 4 else torch.full_like(logits, torch.nan)

    with pytest.raises(
        stree.GenerationError, match=r"the target's logits are NaN at \(row, node\) \[\[0, 0\]\]"
    ) as caught:
        stree.generate(lm(), PROMPTS[:1], NoDrafter(), budget=1, logits_processor=poisoned)
    plain = stree.generate(lm(), PROMPTS[:1], NoDrafter(), budget=1, max_new_tokens=3)
    assert caught.value.output.sequences == [plain.sequences[0][: len(PROMPTS[0]) + 3]]
    calls = 4
    with pytest.raises(ValueError, match="the target's logits are NaN after the prompt"):
        stree.generate(lm(), PROMPTS[:1], NoDrafter(), budget=1, logits_processor=poisoned)
