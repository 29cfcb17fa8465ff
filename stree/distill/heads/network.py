"""What all draft heads in training share: the target's outputs, the divergence from it, and the files of a head."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Qwen3Config

from stree.distill.training import LossFn, mean_over_rows
from stree.models.tree_lm import TreeLM

__all__ = ["HeadNetwork", "Outputs", "divergence_of_rows", "head_loss", "layer_config", "outputs_of"]

# int64[batch, length] tokens -> float[batch, length, vocab] logits and float[batch, length, width] hidden states.
Outputs = Callable[[Tensor], tuple[Tensor, Tensor]]


class HeadNetwork(nn.Module, ABC):
    """A head in training; embedding and output head are the target's and are not trained.

    Args:
        target: of the embedding and the output head.
        hidden_layers: of the target, whose hidden states are the features; see ``TreeLM``.
        config: config.json in the layout of the package speculators, but for what all kinds have.
    """

    def __init__(self, target: TreeLM, hidden_layers: Sequence[int], config: dict[str, Any]) -> None:
        super().__init__()
        self.hidden_layers, self._config = list(hidden_layers), config
        # Not registered as parts: they are neither trained nor saved.
        self._shared = (target.model.get_input_embeddings(), target.model.get_output_embeddings())
        name = str(target.model.name_or_path)
        self._verifier = {
            "name_or_path": Path(name).name if Path(name).is_dir() else name,
            "architectures": target.model.config.architectures,
        }

    @abstractmethod
    def loss(self, token_ids: Tensor, logits: Tensor, features: Tensor) -> Tensor:
        """Mean loss in nats: the KL divergence from the target's distributions to the head's, and what a recipe adds.

        Args:
            token_ids: int64[batch, n].
            logits: [batch, n, vocab] of the target; row i predicts token i + 1.
            features: float[batch, n, width], the target's hidden states of all ``hidden_layers`` side by side.
        """

    @abstractmethod
    def published_name(self, name: str) -> str:
        """Return the name of a parameter in a checkpoint."""

    @property
    def num_drafted(self) -> int:
        """Tokens that one draft of a chain has."""
        methods: Any = self._config["speculators_config"]["proposal_methods"]
        return int(methods[0]["speculative_tokens"])

    def get_output_embeddings(self) -> Any:
        """The weight of the target's output head, which gets no gradient."""
        return SimpleNamespace(weight=self._shared[1].weight.detach())

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embed tokens as the target does, in float32 as all of a head in training."""
        with torch.no_grad():
            embedded: Tensor = self._shared[0](token_ids)
        return embedded.float()

    def divergence(self, hidden: Tensor, logits: Tensor) -> Tensor:
        """Mean KL divergence from [batch, n, vocab] logits to those of float[batch, n, hidden] outputs of the head."""
        return mean_over_rows(divergence_of_rows, self, hidden, logits)

    def tensors(self) -> dict[str, Tensor]:
        """Return what is saved, in bfloat16."""
        return {
            self.published_name(name): value.detach().to("cpu", torch.bfloat16).contiguous()
            for name, value in self.state_dict().items()
        }

    def config(self) -> dict[str, Any]:
        """Return config.json."""
        speculators = {**self._config["speculators_config"], "verifier": self._verifier}
        common = {"dtype": "bfloat16", "speculators_version": "0.9.0"}
        return {**self._config, **common, "speculators_config": speculators}

    def save(self, folder: Path) -> None:
        """Save the head in bfloat16, in the layout of the package speculators."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.tensors(), folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self.config(), indent=2) + "\n", encoding="utf-8")


def divergence_of_rows(hidden: Tensor, weight: Tensor, target_logits: Tensor) -> Tensor:
    """Sum the KL divergence in nats over float[rows, hidden] outputs of a head and [rows, vocab] of the target."""
    wanted = target_logits.float().log_softmax(-1)
    found = nn.functional.linear(hidden, weight.to(hidden.dtype)).float().log_softmax(-1)
    return (wanted.exp() * (wanted - found)).sum()


def layer_config(target: TreeLM, num_layers: int, intermediate_size: int) -> Qwen3Config:
    """Describe Qwen3 layers of the target's width, with heads of 64 columns and at most half as many of keys."""
    hidden = int(target.model.get_input_embeddings().weight.shape[1])
    heads = max(1, hidden // 64)
    key_heads = max(count for count in range(1, max(1, heads // 2) + 1) if heads % count == 0)
    return Qwen3Config(
        vocab_size=target.vocab_size, hidden_size=hidden, num_hidden_layers=num_layers,
        intermediate_size=intermediate_size, num_attention_heads=heads, num_key_value_heads=key_heads,
        head_dim=hidden // heads, tie_word_embeddings=False, max_position_embeddings=target.max_length or 1 << 20,
    )  # fmt: skip


def published(kind: str, model: str, layers: Qwen3Config, num_drafted: int, **options: Any) -> dict[str, Any]:
    """Write the config of a head as the package speculators does."""
    method = {"proposal_type": "greedy", "speculative_tokens": num_drafted}
    return {
        "architectures": [model],
        "speculators_model_type": kind,
        "transformer_layer_config": {**layers.to_diff_dict(), "model_type": "qwen3"},
        "speculators_config": {
            "algorithm": kind, "default_proposal_method": "greedy", "proposal_methods": [method],
        },
        **options,
    }  # fmt: skip


def head_loss(outputs: Outputs) -> LossFn:
    """Make the loss of a head on windows int64[batch, length + 1]."""

    def loss(network: HeadNetwork, windows: Tensor) -> Tensor:
        tokens = windows[:, :-1]
        return network.loss(tokens, *outputs(tokens))

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
