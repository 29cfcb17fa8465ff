"""Draft heads while they are trained: layers of transformers, and losses on the target's own distributions."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from stree.distill.training import mean_over_rows
from stree.models.heads.mtp import MtpFusion
from stree.models.hidden_states import FINAL_NORM
from stree.models.tree_lm import TreeLM

__all__ = ["HeadNetwork", "Outputs", "head_loss", "new_mtp", "outputs_of", "save_head"]

# int64[batch, length] tokens -> float[batch, length, vocab] logits and float[batch, length, width] hidden states.
Outputs = Callable[[Tensor], tuple[Tensor, Tensor]]
NUM_STEPS = 3  # of a head that are trained
STEP_DECAY = 0.6  # weight of a head step relative to the one before it (FastMTP, arXiv 2509.18362)


class HeadNetwork(nn.Module):
    """A causal head in training; embedding and output head are the target's and are not trained.

    Args:
        fusion: see ``CausalHead``.
        layers: a base model of transformers, whose embedding is not used.
        target: of the embedding and the output head.
        hidden_layers: of the target, see ``CausalHead``.
    """

    def __init__(self, fusion: nn.Module, layers: nn.Module, target: TreeLM, hidden_layers: Sequence[int]) -> None:
        super().__init__()
        self.fusion, self.layers = fusion, layers
        self.hidden_layers = list(hidden_layers)
        # Not registered as parts: they are neither trained nor saved.
        self._shared = (target.model.get_input_embeddings(), target.model.get_output_embeddings())

    def get_output_embeddings(self) -> Any:
        """The target's output head."""
        return self._shared[1]

    def forward(self, token_ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Run int64[batch, n] tokens and float[batch, n, hidden] features.

        Returns:
            What the output head reads, and the feedback: float[batch, n, hidden] each.
        """
        inputs = self.fusion(self._shared[0](token_ids), features)
        hidden: Tensor = self.layers(inputs_embeds=inputs, use_cache=False).last_hidden_state
        return hidden, hidden


def new_mtp(target: TreeLM, seed: int) -> HeadNetwork:
    """Make an MTP head of one Qwen3 layer with random weights, of the target's width."""
    config = target.model.config.get_text_config()
    hidden, heads = config.hidden_size, max(1, config.hidden_size // 64)
    layer = Qwen3Config(
        vocab_size=1, hidden_size=hidden, num_hidden_layers=1, intermediate_size=3 * hidden, num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2), head_dim=hidden // heads, tie_word_embeddings=False,
        max_position_embeddings=target.max_length or 1 << 20,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = Qwen3ForCausalLM(layer).model
        layers.embed_tokens = nn.Identity()  # the target's is read
        fusion = MtpFusion(hidden, lambda: nn.RMSNorm(hidden, eps=layer.rms_norm_eps))
        fusion.fc.to_empty(device="cpu").reset_parameters()
    return HeadNetwork(fusion, layers, target, [FINAL_NORM]).to(target.device, torch.float32)


def save_head(network: HeadNetwork, target: TreeLM, folder: Path) -> None:
    """Save an MTP head in bfloat16, in the layout of the package speculators."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {
        "fusion.norm_embedding": "token_layernorm", "fusion.norm_hidden": "hidden_layernorm", "fusion.fc": "input_proj",
        "layers.norm": "final_layernorm",
    }  # fmt: skip
    tensors = {}
    for name, value in network.state_dict().items():
        part, _, last = name.rpartition(".")
        ours = f"{names[part]}.{last}" if part in names else name.removeprefix("layers.layers.0.")
        tensors[f"mtp_layers.0.{ours}"] = value.to("cpu", torch.bfloat16).contiguous()
    layer = {**cast(Any, network.layers).config.to_diff_dict(), "model_type": "qwen3", "vocab_size": target.vocab_size}
    methods = [{"proposal_type": "greedy", "speculative_tokens": NUM_STEPS}]
    verifier = {"name_or_path": str(target.model.name_or_path), "architectures": target.model.config.architectures}
    config = {
        "architectures": ["MTPDraftModel"], "speculators_model_type": "mtp", "num_nextn_predict_layers": 1,
        "transformer_layer_config": layer, "dtype": "bfloat16", "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "mtp", "default_proposal_method": "greedy", "proposal_methods": methods, "verifier": verifier,
        },
    }  # fmt: skip
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def head_loss(outputs: Outputs, num_steps: int = NUM_STEPS) -> Callable[[HeadNetwork, Tensor], Tensor]:
    """Mean KL divergence in nats from the target's distributions to those of ``num_steps`` steps of a head.

    The first step reads the target's hidden states, the next ones the feedback of the step before, each with the true
    tokens; step k counts ``STEP_DECAY ** k`` (FastMTP, arXiv 2509.18362).
    """
    weights = [STEP_DECAY**step for step in range(num_steps)]

    def divergence(hidden: Tensor, weight: Tensor, target_logits: Tensor) -> Tensor:
        wanted = target_logits.float().log_softmax(-1)
        found = nn.functional.linear(hidden, weight.to(hidden.dtype)).float().log_softmax(-1)
        return (wanted.exp() * (wanted - found)).sum()

    def loss(network: HeadNetwork, windows: Tensor) -> Tensor:
        tokens = windows[:, :-1]
        logits, features = outputs(tokens)
        total, length = features.new_zeros(()), tokens.shape[1]
        for step, weight in enumerate(weights):
            count = length - 1 - step
            hidden, feedback = network(tokens[:, 1 + step :], features[:, :count])
            total = total + weight * mean_over_rows(divergence, network, hidden, logits[:, 1 + step :])
            features = feedback
        return total / sum(weights)

    return loss


def outputs_of(target: TreeLM, hidden_layers: Sequence[int]) -> Outputs:
    """Make the function that gives a target's logits and hidden states, the layers side by side."""

    @torch.no_grad()
    def outputs(tokens: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        cache = target.family.new_cache(target.model.config)
        logits, hidden = target.forward_recording(hidden_layers, tokens, cache, positions)
        assert hidden is not None, "layers were asked for"
        return logits, hidden.flatten(2).float()

    return outputs
