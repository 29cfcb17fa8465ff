"""States of single families, and steps of all of them, which read nothing from the device and have fixed shapes.

States are kept on modules, in latents and small stashes; the language model of a multimodal checkpoint is loaded alone.
"""

from __future__ import annotations

import json
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.family_states import Decoding
from helpers.fast_cases import slow_unless
from helpers.on_device import NoHostReads, ResultSizes, treat_as_on_device
from helpers.tiny_family_models import DELTA, EVERY_ADAPTER, EVERY_STATE, family_model, matrix
from helpers.tiny_models import (
    TOLERANCE,
    as_commit,
    extended,
    fresh_logits,
    patched,
    path_to,
    random_texts,
    relative_error,
    tree_error,
)
from torch import Tensor
from transformers import DynamicCache, Qwen3_5Config, Qwen3_5ForConditionalGeneration

from stree import TokenTree, TreeLM
from stree.models.layers.delta_rule import DeltaSpec
from stree.models.layers.mla import LatentStack

FLOAT32 = TOLERANCE[torch.float32]


def module_states(lm: TreeLM) -> list[Tensor | None]:
    """List the states that transformers stores on the modules of a RecurrentGemma."""
    blocks = [module for module in lm.model.modules() if hasattr(module, "conv1d_state")]
    assert len(blocks) == 2
    return [state for block in blocks for state in (block.conv1d_state, block.rg_lru.recurrent_states)]


def test_states_on_modules_are_neither_left_there_nor_touched() -> None:
    plain, lm = family_model("recurrent_gemma"), patched(family_model("recurrent_gemma"))
    oracle = family_model("recurrent_gemma")  # its forwards without a cache would wipe the states of the plain model
    texts = torch.tensor(random_texts(random.Random(2), [14, 14]))
    Decoding(oracle, [6], lm=lm)
    assert module_states(lm) == [None] * 4
    caches = [DynamicCache(config=plain.config) for _ in range(2)]
    for place, tokens in enumerate(texts.split([9, 1, 1, 1, 1, 1], dim=1)):  # with trees of another text in between
        plain_logits, logits = (
            model(tokens, use_cache=True, **{lm.cache_argument: cache}).logits
            for model, cache in zip((plain, lm.model), caches, strict=True)
        )
        assert torch.equal(plain_logits, logits)
        before = module_states(lm)
        assert all(isinstance(tensor, Tensor) for tensor in before)
        Decoding(oracle, [place + 1], lm=lm, seed=place).step([7])
        assert all(old is new for old, new in zip(before, module_states(lm), strict=True))


def test_a_failing_prefill_restores_the_state_of_the_modules() -> None:
    lm = patched(family_model("recurrent_gemma"))
    lm.model(torch.tensor([[1, 2, 3]]), use_cache=True)
    before = module_states(lm)
    lm.model.model.layers[2].temporal_block.rg_lru._rnn_scan = None
    with pytest.raises(TypeError, match="not callable"):
        lm.prefill(lm.new_state(1, 16, 4), torch.tensor([[5, 6]]))
    assert all(old is new for old, new in zip(before, module_states(lm), strict=True))


@pytest.mark.parametrize(("family", "positions"), [("recurrent_gemma", None), ("kimi_linear", 512)])
def test_a_model_without_positions_has_no_longest_text(family: str, positions: int | None) -> None:
    assert patched(family_model(family)).max_length == positions


@pytest.mark.parametrize("family", ["bailing_hybrid", "kimi_linear"])
def test_latent_attention_stores_latents_only(family: str) -> None:
    lm = patched(family_model(family))
    (stack,) = (stack for stack in lm.new_state(2, 64, 16).stacks.values() if isinstance(stack, LatentStack))
    # Of one layer and two sequences: rank 10 and 6 shared key channels, against 4 heads of 17 and 9 expanded.
    assert stack.num_bytes == 2 * (64 + 16) * (10 + 6) * 4


def test_the_stash_of_a_node_is_a_small_part_of_a_gated_delta_state() -> None:
    """Qwen3-Next-80B's sizes: 2 MiB of state a layer; the bar of docs/gpu.md is 1/55, convolution inputs counted."""
    sizes = {"key_heads": 16, "heads": 32, "dk": 128, "dv": 128, "conv_width": 4}
    spec = DeltaSpec(**sizes, per_channel=False, dtype=torch.bfloat16, device=torch.device("meta"))
    stack = spec.allocate(1, 1, 4096, 64)
    stash = sum(getattr(stack, f"stash_{name}").nbytes for name in ("conv", "k", "u", "g")) / 64
    assert stack.state.nbytes == 32 * 128 * 128 * 4
    assert 1 / 60 < stash / stack.state.nbytes < 1 / 55


def multimodal_model(**options: Any) -> Any:
    """Make a Qwen3.5 with a vision tower."""
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    patches = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 16}
    config = Qwen3_5Config(text_config=DELTA, vision_config={**vision, **patches}, **options)
    return Qwen3_5ForConditionalGeneration(config).eval()


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_the_language_model_of_a_multimodal_checkpoint_is_loaded_alone(is_tied: bool, tmp_path: Path) -> None:
    model = multimodal_model(tie_word_embeddings=is_tied)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["text_config"].pop("tie_word_embeddings")
    path.write_text(json.dumps(config), encoding="utf-8")
    lm, (text,) = TreeLM.from_pretrained(tmp_path, device="cpu"), random_texts(random.Random(3), [9])
    assert lm.model.config.model_type == "qwen3_5_text"
    state = lm.new_state(1, 32, 8)
    lm.prefill(state, torch.tensor([text[:8]]))
    logits = lm.verify(state, TokenTree.chain(torch.tensor([text[8:]])))
    assert relative_error(logits[0], fresh_logits(model, text)[8:]) < FLOAT32


def test_a_model_with_a_vision_tower_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="model family 'qwen3_5' is not supported; supported: .*qwen3_5_text"):
        TreeLM(multimodal_model())


@pytest.mark.parametrize("family", matrix())
def test_neither_a_trees_forward_nor_a_commit_reads_the_device(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    treat_as_on_device(monkeypatch)  # on the CPU numba reads memory
    decoding = Decoding(family_model(family), [6, 9])
    decoding.step([8, 8])

    def unread(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            with NoHostReads():
                return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, run)

    unread(decoding.lm, "forward")  # verify and commit themselves check trees and paths of the CPU
    unread(decoding.state, "commit")
    for _ in range(2):
        tree = decoding.tree([8, 5])
        decoding.lm.verify(decoding.state, tree)
        decoding.commit(tree, [path_to(tree, 0, 7), [0]])


@pytest.mark.parametrize(
    ("family", "fixed"),
    slow_unless(
        lambda family, fixed: family in EVERY_STATE or not fixed,
        [*((family, True) for family in EVERY_ADAPTER), ("gemma3_text", False), ("lfm2", False)],
    ),
)
def test_steps_of_fixed_shapes_run_the_same_operators_on_the_same_sizes(
    family: str, fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    treat_as_on_device(monkeypatch)
    decoding = Decoding(
        family_model(family), [9, 4], max_length=24, max_nodes=6, fixed_shapes=fixed, defers_commit=fixed
    )
    steps = []
    for short in ([0], [], [0]):
        tree = decoding.tree([6, 6])
        paths = [path_to(tree, 0, 4), short]
        path, lengths = as_commit([*paths, [0] * 6])
        tree = TokenTree.unchecked(tree.tokens, tree.parents, tree.depths, tree.ancestor_mask)
        with NoHostReads() if fixed else nullcontext(), ResultSizes() as sizes:
            decoding.lm.verify(decoding.state, tree)
            decoding.lm.commit(decoding.state, path[:2], lengths[:2])
        decoding.texts = extended(decoding.texts, tree, paths)
        steps.append(sizes.seen)
    decoding.score([6, 6])
    assert [step == steps[0] for step in steps] == [True, fixed, fixed]


def test_a_text_beyond_a_fixed_state_loses_rows_and_harms_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    treat_as_on_device(monkeypatch)
    decoding = Decoding(family_model("llama"), [9, 4], max_length=12, max_nodes=6, fixed_shapes=True)
    tree = TokenTree.chain(torch.tensor(random_texts(decoding.rng, [6, 6])))
    paths = [[*range(6)], [0]]
    decoding.lm.verify(decoding.state, tree)
    decoding.lm.commit(decoding.state, *as_commit(paths))
    text = extended(decoding.texts, tree, paths)[1]
    logits = decoding.lm.verify(decoding.state, tree)[1:]
    assert tree_error(decoding.model, [text], TokenTree(tree.tokens[1], tree.parents[1]), logits) < decoding.tolerance
