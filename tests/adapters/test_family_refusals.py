"""Models that cannot be patched are refused by name before anything is changed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from helpers.tiny_family_models import family_model
from helpers.tiny_models import TOLERANCE, tree_error

from stree import TokenTree, TreeLM
from stree.models.families import FAMILIES as SUPPORTED


def test_a_layer_without_a_known_mixer_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = family_model("nemotron_h")
    monkeypatch.setitem(SUPPORTED, "nemotron_h", dataclasses.replace(SUPPORTED["nemotron_h"], stateless=frozenset()))
    with pytest.raises(NotImplementedError, match=r"3 of 5 layers of this nemotron_h model .*\(NemotronHMamba2Mixer, "):
        TreeLM(model)
    assert "forward" not in model.model.layers[0].mixer.__dict__  # nothing was patched before


@pytest.mark.parametrize("kind", ["FalconH1Attention", "FalconH1Mixer"])
def test_a_layer_of_which_one_mixer_is_unknown_is_refused_by_name(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, row = family_model("falcon_h1"), SUPPORTED["falcon_h1"]
    rest = {name: patch for name, patch in row.mixers.items() if name != kind}
    monkeypatch.setitem(SUPPORTED, "falcon_h1", dataclasses.replace(row, mixers=rest))
    with pytest.raises(NotImplementedError, match=f"{kind} of layer 0 is not known in a falcon_h1 model; known are"):
        TreeLM(model)


@pytest.mark.parametrize(("family", "weight"), [("jamba", "dt_proj"), ("kimi_linear", "kv_b_proj")])
def test_a_quantised_weight_that_trees_read_is_refused(family: str, weight: str) -> None:
    model = family_model(family)
    (mixer, *_) = (module for module in model.modules() if hasattr(module, weight))
    kind, projection = type(mixer).__name__, getattr(mixer, weight)
    projection.weight = torch.nn.Parameter(torch.zeros_like(projection.weight, dtype=torch.int8), requires_grad=False)
    with pytest.raises(NotImplementedError, match=rf"{weight}.weight of {kind} holds int8\[.*\], quantised"):
        TreeLM(model)


def test_linears_that_hide_their_weights_are_refused() -> None:
    class Hidden(torch.nn.Module):
        """As torch's own dynamic quantisation makes them."""

        def weight(self) -> torch.Tensor:
            return torch.zeros(1)

    model = family_model("llama")
    model.model.layers[0].self_attn.k_proj = Hidden()
    with pytest.raises(NotImplementedError, match=r"k_proj \(Hidden\) has no weight tensor, as quantised layers"):
        TreeLM(model)


def test_a_convolution_with_another_activation_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="MambaMixer has activation 'gelu'; only 'silu' is supported"):
        TreeLM(family_model("mamba", hidden_act="gelu"))


def test_attention_that_looks_ahead_is_refused() -> None:
    model = family_model("gemma3_text").train()
    model.model.layers[2].self_attn.is_causal = False
    with pytest.raises(NotImplementedError, match="Gemma3Attention is not causal"):
        TreeLM(model)
    assert model.training and not any("forward" in module.__dict__ for module in model.modules())


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
FACTORS = {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6, "original_max_position_embeddings": 16}
ROTARY: dict[str, tuple[str, dict[str, Any]]] = {
    "dynamic": ("bamba", DYNAMIC),
    "longrope": ("qwen3", {**DYNAMIC, **FACTORS, "rope_type": "longrope"}),
    "one-kind-of-layer": (
        "gemma3_text",
        {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": DYNAMIC},
    ),
}


@pytest.mark.parametrize(("family", "positions"), ROTARY.values(), ids=ROTARY)
def test_rotary_positions_that_change_with_the_longest_text_are_refused(family: str, positions: dict[str, Any]) -> None:
    model = family_model(family, rope_parameters=positions)
    with pytest.raises(NotImplementedError, match="rope_type '(dynamic|longrope)' change with the longest text"):
        TreeLM(model)
    assert not any("forward" in module.__dict__ for module in model.modules())  # nothing was patched before


@pytest.mark.parametrize(
    ("family", "path", "kind"),
    [
        ("bamba", "model.layers.0.mamba", "BambaMixer"),
        ("bamba", "model.layers.1.self_attn", "BambaAttention"),
        ("recurrent_gemma", "model.layers.0.temporal_block.conv_1d", "Conv1d"),
        ("recurrent_gemma", "model.layers.0.temporal_block.rg_lru", "RecurrentGemmaRglru"),
    ],
)
def test_a_forward_that_trees_would_not_run_is_refused(family: str, path: str, kind: str) -> None:
    model = family_model(family)
    module, tokens = model.get_submodule(path), torch.tensor([[1, 2, 3]])
    own = module.forward
    module.forward = lambda *args, **kwargs: own(*args, **kwargs)
    with pytest.raises(NotImplementedError, match=rf"{path} \({kind}\) has a replaced forward, which trees would not"):
        TreeLM(model)
    module.forward = own
    expected = model(tokens).logits
    TreeLM(model)
    assert torch.equal(model(tokens).logits, expected)
    patched = module.forward
    module.forward = lambda *args, **kwargs: patched(*args, **kwargs)
    with pytest.raises(NotImplementedError, match="has a replaced forward"):
        TreeLM(model)


def test_a_patched_projection_of_a_mixer_is_run_in_trees() -> None:
    model = family_model("bamba")
    projection = model.model.layers[0].mamba.in_proj
    projection.forward = lambda x: 2 * torch.nn.Linear.forward(projection, x)
    lm, oracle = TreeLM(model), family_model("bamba")
    oracle.model.layers[0].mamba.in_proj.weight.data.mul_(2)
    tree = TokenTree(torch.tensor([1, 2, 3]), torch.tensor([-1, 0, 0]))
    assert tree_error(oracle, [[]], tree, lm.verify(lm.new_state(1, 8, 4), tree)) < TOLERANCE[torch.float32]
