"""EAGLE-3 heads: both layouts against a plain forward and speculators' own class, texts, and what is refused.

Run: STREE_SPECULATORS=FOLDER python -m pytest tests/heads/test_eagle3.py, FOLDER with the package speculators
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fast_cases import slow_unless
from helpers.tiny_family_models import BUILDERS
from helpers.tiny_heads import drawn, layer_shapes
from helpers.tiny_models import patched, tiny_model
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear, silu
from transformers import LlamaConfig

import stree
from stree.drafters import HeadDrafter, NoDrafter
from stree.models.heads.causal import CausalHead

LENGTH, HEADS, WIDTH = 64, 4, 8
LAYER = {
    "model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": 2,
    "head_dim": WIDTH, "intermediate_size": 48, "vocab_size": 97, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {}, "normed residual": {"norm_before_residual": True}, "norm before fc": {"norm_before_fc": True},
    "norm of each": {"fc_norm": True}, "normed output": {"norm_output": True}, "some tokens": {"draft_vocab_size": 40},
}  # fmt: skip


def target(family: str = "bamba") -> stree.TreeLM:
    model = BUILDERS[family]() if family in BUILDERS else tiny_model(family)
    return patched(model)


def hidden_size(lm: stree.TreeLM) -> int:
    return int(lm.model.get_input_embeddings().weight.shape[1])


def tensors_of(size: int, options: dict[str, Any]) -> dict[str, Tensor]:
    """Random tensors of a head, in speculators' names."""
    layer = {**layer_shapes(size, HEADS * WIDTH, 2 * WIDTH, 2 * size), "hidden_norm": [size]}
    shapes: dict[str, Sequence[int]] = {f"layers.0.{name}.weight": shape for name, shape in layer.items()}
    shapes |= {"fc.weight": [size, 3 * size], "norm.weight": [size]}
    shapes["lm_head.weight"] = [options.get("draft_vocab_size", 97), size]
    shapes |= {f"fc_norm.{number}.weight": [size] for number in range(3) if options.get("fc_norm")}
    if options.get("norm_before_fc"):
        shapes["input_norm.weight"] = [3 * size]
    tensors = drawn(shapes)
    if "draft_vocab_size" in options:
        ids = (
            torch.randperm(97, generator=torch.Generator().manual_seed(0))[: options["draft_vocab_size"]].sort().values
        )
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(97, dtype=torch.bool).index_fill(0, ids, True)
    return tensors


def save(folder: Path, size: int, options: dict[str, Any], layout: str = "speculators") -> dict[str, Tensor]:
    """Write a checkpoint in a published layout; return its tensors in speculators' names."""
    tensors = tensors_of(size, options)
    layer = {**LAYER, "hidden_size": size}
    config: dict[str, Any] = {
        "speculators_model_type": "eagle3", "architectures": ["Eagle3DraftModel"], "transformer_layer_config": layer,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3], "draft_vocab_size": 97, **options,
    }  # fmt: skip
    named = tensors
    if layout == "specforge":
        ids = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
        config = {**layer, "architectures": ["LlamaForCausalLMEagle3"], "eagle_config": ids, **options}
        named = {name.replace("layers.0.", "midlayer."): value for name, value in tensors.items()}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(named, folder / "model.safetensors")
    return tensors


def load(folder: Path, lm: stree.TreeLM) -> CausalHead:
    head = stree.heads.load(folder, lm)
    assert isinstance(head, CausalHead)
    return head


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def rotated(x: Tensor) -> Tensor:
    """Rotate float[heads, n, WIDTH] queries or keys by their positions."""
    angles = torch.arange(x.shape[1])[:, None] * 1e4 ** (-torch.arange(0, WIDTH, 2) / WIDTH)
    cos, sin = (torch.cat([part(angles)] * 2, -1) for part in (torch.cos, torch.sin))
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


def plain_forward(
    lm: stree.TreeLM, w: dict[str, Tensor], ids: Tensor, hidden: Tensor, options: dict[str, Any], swapped: bool = False
) -> tuple[Tensor, Tensor]:
    """Logits over the draft vocabulary and feedback of int64[n] tokens and float[n, 3 x hidden] states."""
    if options.get("norm_before_fc"):
        hidden = rms(hidden, w["input_norm.weight"])
    if options.get("fc_norm"):
        parts = enumerate(hidden.chunk(3, -1))
        hidden = torch.cat([rms(part, w[f"fc_norm.{number}.weight"]) for number, part in parts], -1)
    g = linear(hidden, w["fc.weight"])
    e = rms(lm.model.get_input_embeddings()(ids), w["layers.0.input_layernorm.weight"])
    normed = rms(g, w["layers.0.hidden_norm.weight"])
    x = torch.cat([normed, e] if swapped else [e, normed], -1)
    q, k, v = (
        linear(x, w[f"layers.0.self_attn.{name}_proj.weight"]).view(len(ids), -1, WIDTH).transpose(0, 1)
        for name in "qkv"
    )
    k, v = rotated(k).repeat_interleave(HEADS // 2, 0), v.repeat_interleave(HEADS // 2, 0)
    scores = rotated(q) @ k.transpose(1, 2) * WIDTH**-0.5 + torch.full((len(ids),) * 2, -torch.inf).triu(1)
    attended = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
    x = (normed if options.get("norm_before_residual") else g) + linear(attended, w["layers.0.self_attn.o_proj.weight"])
    y = rms(x, w["layers.0.post_attention_layernorm.weight"])
    gate, up, down = (w[f"layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    x = x + linear(silu(linear(y, gate)) * linear(y, up), down)
    out = rms(x, w["norm.weight"])
    return linear(out, w["lm_head.weight"]), out if options.get("norm_output") else x


def inputs(size: int, count: int = LENGTH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, 90, (1, count), generator=generator), torch.randn(1, count, 3 * size, generator=generator)


@pytest.mark.parametrize("layout", ["speculators", "specforge"])
@pytest.mark.parametrize("name", VARIANTS)
def test_run_gives_the_logits_of_a_plain_forward(name: str, layout: str, tmp_path: Path) -> None:
    lm, options = target(), VARIANTS[name]
    size = hidden_size(lm)
    weights, head = save(tmp_path, size, options, layout), load(tmp_path, lm)
    assert head.hidden_layers == (1, 2, 3)
    ids, hidden = inputs(size)
    found, feedback = (part[0] for part in head.run(ids, hidden))
    with torch.no_grad():
        expected, right = plain_forward(lm, weights, ids[0], hidden[0], options)
        swapped = plain_forward(lm, weights, ids[0], hidden[0], options, swapped=True)[0]
        again = plain_forward(lm, weights, ids[0], hidden[0], {**options, "norm_before_residual": name == "plain"})[0]
    if "d2t" in weights:
        kept = weights["d2t"] + torch.arange(len(weights["d2t"]))
        assert bool((found.index_fill(-1, kept, -torch.inf) == -torch.inf).all())
        found = found[:, kept]
        trimmed = head.trimmed(range(0, 97, 2)).run(ids, hidden)[0][0]
        assert torch.equal(trimmed[:, kept] > -torch.inf, (kept % 2 == 0).expand(len(found), -1))
    scale = expected.abs().max()
    assert (found - expected).abs().max() < 1e-4 * scale and (feedback - right).abs().max() < 1e-4 * right.abs().max()
    assert (found - swapped).abs().max() > 1e-2 * scale, "the embedding comes first"
    assert name != "plain" or (found - again).abs().max() > 1e-2 * scale, "the residual is not normed"
    shifted = head.run(ids, hidden.roll(size, -1))[0][0]
    shifted = shifted[:, kept] if "d2t" in weights else shifted
    assert (shifted - expected).abs().max() > 1e-2 * scale, "layers in another order"
    assert (head.run(ids, right[None])[0] - head.run(ids, hidden)[0]).nan_to_num().abs().max() > 0, "feedback skips fc"


@pytest.mark.skipif("STREE_SPECULATORS" not in os.environ, reason="STREE_SPECULATORS names no folder of speculators")
@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "some tokens"])
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")  # by speculators' own code
def test_run_gives_the_logits_of_speculators(name: str, tmp_path: Path) -> None:
    sys.path.append(os.environ["STREE_SPECULATORS"])
    eagle3: Any = importlib.import_module("speculators.models.eagle3")

    lm, options = target(), VARIANTS[name]
    size = hidden_size(lm)
    weights, head = save(tmp_path, size, options), load(tmp_path, lm)
    layer = LlamaConfig(**{**LAYER, "hidden_size": size, "attn_implementation": "eager"})
    config = eagle3.Eagle3SpeculatorConfig(
        transformer_layer_config=layer, draft_vocab_size=97, eagle_aux_hidden_state_layer_ids=[1, 2, 3], **options
    )
    theirs = eagle3.Eagle3DraftModel(config).eval()
    theirs.load_state_dict({**weights, "embed_tokens.weight": lm.model.get_input_embeddings().weight}, strict=False)
    ids, hidden = inputs(size)
    captured: list[Tensor] = []
    theirs.lm_head.register_forward_hook(lambda module, given, out: captured.append(out))
    with torch.no_grad():
        theirs(hidden, ids, torch.zeros_like(ids), ttt_steps=1)
    expected = captured[0][0]
    assert (head.run(ids, hidden)[0][0] - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize(
    ("family", "name"),
    slow_unless(
        lambda family, name: False,  # test_published_layouts.py has a fast one
        itertools.product(("bamba", "qwen3_next", "llama"), ("plain", *list(VARIANTS)[4:])),
        in_ci=lambda family, name: (
            (family == "qwen3_next") == (name == "plain") or (family, name) == ("bamba", "plain")
        ),
    ),
)
def test_texts_are_those_of_plain_decoding(family: str, name: str, tmp_path: Path) -> None:
    lm, prompts = target(family), [[5, 17, 9, 33, 20], [4, 8, 9]]
    save(tmp_path, hidden_size(lm), {**VARIANTS[name], "eagle_aux_hidden_state_layer_ids": [0, 1, lm.num_layers]})
    head = load(tmp_path, lm)
    for temperature in (0.0, 1.5):
        options: dict[str, Any] = {"max_new_tokens": 14, "seed": 1, "sampling": stree.Sampling(temperature)}
        expected = stree.generate(lm, prompts, NoDrafter(), **options)
        for growth in ("chain:3", "calibrated"):
            found = stree.generate(lm, prompts, str(tmp_path), growth=growth, budget=8, verifier="match", **options)
            assert found.sequences == expected.sequences
    assert stree.generate(lm, prompts, HeadDrafter(head), budget=8, **options).stats["tau"] > 1.1


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "width": ({"target_hidden_size": 64}, ValueError, "must have target_hidden_size 32, the target's, got 64"),
    "layers": ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, ValueError, "hidden_layers must be integers from 0"),
    "missing": ({"fc_norm": True}, ValueError, "must have projection.fc_norm.0.weight .32., got none"),
    "type": ({"transformer_layer_config": {**LAYER, "rms_norm_eps": "small"}}, ValueError, "'rms_norm_eps' expected"),
    "config": ({"transformer_layer_config": 3}, ValueError, "draft head '/.*' cannot be read: .*'int'"),
    "family": ({"transformer_layer_config": {"model_type": "gemma"}}, NotImplementedError, "'gemma' layers; known are"),
    "kind": ({"speculators_model_type": "peagle"}, NotImplementedError, "is not known .'peagle'.; known: mtp, eagle3"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_heads_that_do_not_fit_are_refused(name: str, tmp_path: Path) -> None:
    changes, error, message = REFUSED[name]
    lm = target()
    save(tmp_path, hidden_size(lm), {})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(error, match=message):
        stree.heads.load(tmp_path, lm)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lm_head.weight": torch.ones(50, 32)}, r"must have head.weight \[40, 32\], got \[50, 32\]"),
        ({"lm_head.weight": None}, r"must have head.weight \[40, 32\], got none"),
        ({"d2t": None}, r"must have head.weight \[97, 32\], got \[40, 32\]"),
        ({"d2t": torch.ones(40, 1)}, r"must have d2t \[40\], got \[40, 1\]"),
        ({"d2t": torch.full((40,), 60)}, "must map its tokens below 97 by d2t"),
    ],
)
def test_logits_of_other_tokens_are_refused(changes: dict[str, Tensor | None], message: str, tmp_path: Path) -> None:
    lm = target()
    tensors = {**save(tmp_path, hidden_size(lm), VARIANTS["some tokens"]), **changes}
    save_file({name: value for name, value in tensors.items() if value is not None}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        stree.heads.load(tmp_path, lm)


def test_a_checkpoint_of_a_model_is_no_head(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds no draft head by its config.json; its tensors: "):
        stree.heads.load(tmp_path, target())
