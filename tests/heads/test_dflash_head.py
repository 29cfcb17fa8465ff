"""One-shot heads against their definition in plain torch, and against speculators' classes where those are installed.

Run: python -m pytest tests/heads/test_dflash_head.py
STREE_SPECULATORS names a folder that holds the package speculators, where it is not installed.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fast_cases import slow_unless
from helpers.plain_heads import plain_block
from helpers.tiny_heads import MASK, block_tensors, save_block_head, tiny_target
from helpers.tiny_models import relative_error
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config

from stree.heads import load
from stree.models.heads.dflash import OneShotHead, load_dflash
from stree.models.heads.dflash_head import BlockCache

READ = {"mask_token_id": 1, "target_layer_ids": [0]}
CLOSE = 1e-4  # of the largest logit; measured 3e-6
SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4, "use_sliding_window": True}
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "dflash": ("dflash", "z-lab", {}, {}),
    "speculators": ("dflash", "speculators", {}, {}),
    "dspark": ("dspark", "z-lab", {}, {}),
    "dflash2": ("dflash2", "z-lab", {}, {}),
    "sliding": ("dflash", "z-lab", SLIDING, {"is_causal": True, "window": 4}),
    "sliding both ways": ("dflash", "z-lab", {**SLIDING, "is_causal": False}, {"window": 4}),
    "neighbours": ("dflash", "z-lab", {"rope_is_neox_style": False}, {"neighbours": True}),
}
IDS = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(0))
ANCHOR = torch.tensor([5, 40])


def features_of(layers: list[int]) -> Tensor:
    """The target's hidden states at IDS: float[2, 9, layers x hidden]."""
    target = tiny_target("llama")
    return target.prefill(target.new_state(2), IDS, hidden_layers=layers)[1].flatten(2)


def embedded(row: int, anchor_is_mask: bool = False) -> Tensor:
    """Embeddings of the block of a row."""
    block = [MASK if anchor_is_mask else int(ANCHOR[row])] + [MASK] * 4
    weight: Tensor = tiny_target("llama").model.get_input_embeddings().weight.detach()
    return weight[block]


def drafted(head: OneShotHead) -> Tensor:
    """The head's logits after IDS and ANCHOR: float[2, 5, 97]."""
    out = head.draft(IDS, features_of([1, 2]), ANCHOR)
    return out if isinstance(out, Tensor) else out[0]


def plain(kind: str, features: Tensor, anchor_is_mask: bool = False, **options: Any) -> Tensor:
    """The same by definition."""
    tensors, output = block_tensors(kind, 32, 97), tiny_target("llama").model.get_output_embeddings()
    blocks = [plain_block(tensors, features[row], embedded(row, anchor_is_mask), **options) for row in range(2)]
    return output(torch.stack(blocks)).detach()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", slow_unless(lambda name: [*CASES].index(name) % 2 == 0, CASES))
def test_a_block_s_logits_are_those_of_the_definition(name: str, tmp_path: Path) -> None:
    kind, layout, changes, options = CASES[name]
    head = load_dflash(save_block_head(tmp_path, tiny_target("llama"), kind, layout, **changes), tiny_target("llama"))
    assert head.hidden_layers == (1, 2)
    found = drafted(head)
    assert relative_error(found, plain(kind, features_of([1, 2]), **options)) < CLOSE
    wrong = {"is_causal": not options.get("is_causal"), "neighbours": not options.get("neighbours")}
    for key, value in wrong.items():
        assert relative_error(found, plain(kind, features_of([1, 2]), **options | {key: value})) > 100 * CLOSE
    assert relative_error(found, plain(kind, features_of([0, 1]), **options)) > 100 * CLOSE, "layers shifted by one"
    assert relative_error(found, plain(kind, features_of([1, 2]), anchor_is_mask=True, **options)) > 100 * CLOSE


@pytest.mark.parametrize("kind", ["dflash", "dspark", "gated", "dflash2"])
def test_logits_after_a_token_have_the_bias_or_the_edge_scores_of_their_kind(kind: str, tmp_path: Path) -> None:
    target = tiny_target("llama")
    head = load_dflash(save_block_head(tmp_path, target, kind), target)
    out, tensors = head.draft(IDS, features_of([1, 2]), ANCHOR), block_tensors(kind, 32, 97)
    logits = out if isinstance(out, Tensor) else out[0]
    tokens = torch.tensor([[5, 11, 70, 3, 8], [40, 0, 9, 96, 1]])[:, : head.num_drafted]
    found = after(head, features_of([1, 2]), tokens)
    for row in range(2):
        hidden = plain_block(tensors, features_of([1, 2])[row], embedded(row))
        for depth, token in enumerate(tokens[row].tolist()):
            slot = depth + (kind in ("dflash", "dflash2"))
            expected = logits[row, slot].clone()
            if kind in ("dspark", "gated"):
                before = tensors["markov_head.markov_w1.weight"][token]
                if kind == "gated":
                    gate = tensors["markov_head.gate_proj.weight"] @ torch.cat([hidden[slot], before])
                    before = before * torch.sigmoid(gate + tensors["markov_head.gate_proj.bias"])
                expected += tensors["markov_head.markov_w2.weight"] @ before
            if kind == "dflash2":
                one = tensors["candidate_selector.predecessor_codebook"][token]
                one = one * (tensors["candidate_selector.hidden_projection.weight"] @ hidden[slot])
                expected += tensors["candidate_selector.successor_codebook"] @ one
                is_candidate = logits[row, slot] >= logits[row, slot].topk(4).values[-1]
                expected = expected.masked_fill(~is_candidate, -torch.inf)
            assert relative_error(found[row, depth].softmax(-1), expected.softmax(-1)) < CLOSE
    if not isinstance(out, Tensor):
        edges = out[1]
        for depth in range(1, head.num_drafted):
            for place in range(4):
                tokens = ANCHOR[:, None].repeat(1, depth + 1)
                tokens[:, depth] = edges.candidates[:, depth - 1, place]
                score = after(head, features_of([1, 2]), tokens)[:, depth].gather(1, edges.candidates[:, depth])
                assert relative_error(edges.scores[:, depth, place], score) < CLOSE


def after(head: OneShotHead, features: Tensor, tokens: Tensor) -> Tensor:
    """The head's logits after the nodes of a chain of int64[batch, n] tokens, the anchor first."""
    cache = BlockCache(head, *features.shape[:2])
    head.append(cache, head.project(features[:, :, None]), torch.full_like(cache.lengths, features.shape[1]))
    depths = torch.arange(tokens.shape[1]).expand(len(tokens), -1)
    return head.node_logits(head.slots(cache, tokens[:, 0]), depths, tokens)


@pytest.mark.parametrize("layout", ["speculators", "z-lab"])
def test_a_head_of_a_smaller_vocabulary_drafts_tokens_of_the_target(layout: str, tmp_path: Path) -> None:
    target, tokens = tiny_target("llama"), torch.tensor([3, 4, 40, 90])
    whole = drafted(load_dflash(save_block_head(tmp_path, target, "dflash", layout), target))
    save_block_head(tmp_path, target, "dflash", layout, draft_vocab_size=4)
    tensors = load_file(tmp_path / "model.safetensors") | {"d2t": tokens - torch.arange(4)}
    tensors["lm_head.weight"] = target.model.get_output_embeddings().weight.detach()[tokens].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    logits = drafted(load_dflash(tmp_path, target))
    assert relative_error(logits[..., tokens], whole[..., tokens]) < CLOSE
    assert int(logits.isinf().sum()) == 2 * 5 * 93
    for offsets, message in ((torch.zeros(3), r"d2t \[4\], got \[3\]"), (torch.full((4,), 95), "below 97 by d2t")):
        save_file({**tensors, "d2t": offsets}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            load_dflash(tmp_path, target)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_target_layers": 9}, ValueError, "must have num_target_layers 2, the target's, got 9"),
        ({"vocab_size": 50}, ValueError, "must have vocab_size 97, the target's, got 50"),
        ({"intermediate_size": 40}, ValueError, r"must have layers.0.mlp.down_proj.weight \[32, 40\], got \[32, 48\]"),
        ({"markov_rank": 4, "markov_head_type": "rnn"}, NotImplementedError, "must be 'vanilla' or 'gated', got 'rnn'"),
        ({"causal_head": True}, NotImplementedError, "with causal_head are not known"),
        ({"dflash_config": {"mask_token_id": 1, "block_size": 4}}, ValueError, "must have target_layer_ids"),
        ({"dflash_config": {"mask_token_id": 1, "block_size": 4, "target_layer_ids": [2]}}, ValueError, "to 2, the l"),
        ({"dflash_config": {**READ, "block_size": 1}}, ValueError, "at least 2"),
        ({"dflash_config": {**READ, "block_size": 513}}, ValueError, "block_size must be below 513, got 513"),
        ({"dflash_config": {**READ, "selector_rank": 6, "selector_top_k": 98}}, ValueError, "top_k must be below 98"),
        ({"dflash_config": {**READ, "selector_rank": 6, "selector_top_k": 0}}, ValueError, "top_k must be at least 1"),
        ({"speculators_model_type": "xpress"}, NotImplementedError, "'xpress' are not known"),
    ],
)  # fmt: skip
def test_heads_that_do_not_fit_are_refused(
    changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        load_dflash(save_block_head(tmp_path, tiny_target("llama"), **changes), tiny_target("llama"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("num_hidden_layers", "must have num_hidden_layers of at most 25, got 1000000000000"),
        ("head_dim", r"must have layers.0.self_attn.k_norm.weight \[1000000000000\], got \[8\]"),
    ],
)
def test_absurd_sizes_are_refused_before_memory_is_allocated_for_them(name: str, message: str, tmp_path: Path) -> None:
    target = tiny_target("llama")
    for layout in ("z-lab", "speculators"):
        folder = save_block_head(tmp_path, target, "dflash", layout)
        config = json.loads((folder / "config.json").read_text())
        config.get("transformer_layer_config", config)[name] = 10**12
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=message):
            load(folder, target)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    file = save_block_head(tmp_path, tiny_target("llama")) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:999])
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        load_dflash(tmp_path, tiny_target("llama"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "window"), [("dflash", None), ("dflash", 4), ("dspark", None), ("gated", 4), ("dflash2", 4)]
)
def test_logits_are_those_of_speculators(
    kind: str, window: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, os.environ.get("STREE_SPECULATORS", "")])
    package = {"gated": "dspark"}.get(kind, kind)
    core = pytest.importorskip(f"speculators.models.{package}.core", reason="speculators is not installed")
    target = tiny_target("llama")
    save_block_head(tmp_path, target, kind, "speculators")
    if window is not None:
        config = json.loads((tmp_path / "config.json").read_text())
        config["transformer_layer_config"] |= {**SLIDING, "layer_types": ["sliding_attention", "full_attention"]}
        (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = of_speculators(core, tmp_path)
    theirs.save_pretrained(tmp_path / "saved")
    head, errors = load_dflash(tmp_path / "saved", target), []
    text = torch.randint(3, 97, (1, 40), generator=torch.Generator().manual_seed(1))
    hidden = target.prefill(target.new_state(1), text, hidden_layers=[1, 2])[1].flatten(2)
    for anchor in range(1, 30, 2):
        unary, block = backbone(theirs, text, hidden, anchor)
        out = head.draft(text[:, :anchor], hidden[:, :anchor], text[:, anchor])
        logits = out if isinstance(out, Tensor) else out[0]
        errors.append(relative_error(logits[0], unary[0]))
        if kind in ("dspark", "gated"):
            tokens = text[:, anchor : anchor + 5]
            bias = theirs.markov_head.block_bias(prev_token_ids=tokens, hidden_states=block)
            errors.append(relative_error(after(head, hidden[:, :anchor], tokens), (unary + bias).detach()))
        if kind == "dflash2":
            tokens, hidden_of_slots = text[:, anchor : anchor + 4], block[:, 1:]
            candidates, scores = theirs.candidate_selector.select(unary[:, 1:], hidden_of_slots, tokens)
            found = after(head, hidden[:, :anchor], tokens).gather(-1, candidates)
            errors.append(relative_error(found, scores.detach()))
    assert max(errors) < CLOSE
    wrong = target.prefill(target.new_state(1), text, hidden_layers=[0, 1])[1].flatten(2)
    assert relative_error(backbone(theirs, text, wrong, 29)[0], unary) > 100 * CLOSE, "layers shifted by one"


def of_speculators(core: Any, folder: Path) -> Any:
    """Make speculators' model of a checkpoint, with the target's embedding and head."""
    config = json.loads((folder / "config.json").read_text())
    layers = Qwen3Config(**config.pop("transformer_layer_config"))
    layers._attn_implementation = "eager"
    name = {"dflash": "DFlash", "dspark": "DSpark", "dflash2": "DFlash2"}[config["speculators_model_type"]]
    cls = getattr(core, f"{name}DraftModel")
    model = cls(cls.config_class(transformer_layer_config=layers, **config))
    target = tiny_target("llama").model
    head, embedding = target.get_output_embeddings().weight.detach(), target.get_input_embeddings().weight.detach()
    tensors = load_file(folder / "model.safetensors") | {"embed_tokens.weight": embedding, "lm_head.weight": head}
    tensors |= {"verifier_lm_head.weight": head, "verifier_norm.weight": torch.ones(32)}
    model.load_state_dict(tensors)
    return model.eval()


@torch.no_grad()
def backbone(model: Any, text: Tensor, hidden: Tensor, anchor: int) -> tuple[Tensor, Tensor]:
    """Speculators' logits and hidden states of the block at a position of a text."""
    is_anchor = torch.zeros(text.shape, dtype=torch.long)
    is_anchor[0, anchor] = 1
    out = model._backbone_forward(hidden, text, is_anchor, hidden[..., :32], torch.zeros_like(text), max_anchors=1)
    return out[1], out[0]
