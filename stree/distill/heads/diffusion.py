"""A masked-diffusion drafter in training (MDLM, arXiv 2406.07524; SpecDiff, 2408.05636)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from stree.distill.heads.network import HeadNetwork
from stree.distill.training import mean_over_rows
from stree.models.heads.diffusion import DiffusionConfig, DiffusionNetwork, describe
from stree.models.tree_lm import TreeLM

__all__ = ["DiffusionTraining", "new_diffusion"]

NUM_LAYERS = 3
WINDOW = 8


class DiffusionTraining(HeadNetwork):
    """A masked-diffusion drafter in training: an embedding of its own, and no hidden states of the target.

    Args:
        target: see ``HeadNetwork``.
        config: sizes.
    """

    def __init__(self, target: TreeLM, config: DiffusionConfig) -> None:
        super().__init__(target, [0], {})
        self.sizes, self.model = config, DiffusionNetwork(config)
        depth = 2 * config.num_layers
        for name, parameter in self.model.named_parameters():
            if name.endswith("_proj.weight"):
                is_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=(parameter.shape[1] * (depth if is_residual else 1)) ** -0.5)
        nn.init.normal_(self.model.embed_tokens.weight, std=0.02)

    @property
    def num_drafted(self) -> int:
        """Tokens of a window."""
        return self.sizes.window

    def published_name(self, name: str) -> str:
        """Return the name of a parameter in a checkpoint."""
        return name.removeprefix("model.")

    def loss(self, token_ids: Tensor, logits: Tensor, features: Tensor) -> Tensor:
        """MDLM's loss: of windows behind many tokens, a random share t is masked, and what is masked counts 1 / t.

        In place of a token's cross entropy it has the divergence from the target's distribution at its position, whose
        mean over the target's texts differs by a constant where no later token is in place.
        """
        config, size = self.sizes, self.sizes.window
        n = min(config.context, token_ids.shape[1])
        count = token_ids.shape[1] // n
        tokens, wanted = (part[:, : n * count].unflatten(1, (count, n)).flatten(0, 1) for part in (token_ids, logits))
        random = torch.Generator().manual_seed(int(token_ids.sum()))
        first = int(torch.randint(min(size, n - size), (), generator=random))
        anchors = torch.arange(first, n - size, size, device=tokens.device)
        place = (anchors[:, None] + torch.arange(1, size + 1, device=tokens.device)).flatten()
        share = 1 - torch.rand(len(tokens), len(anchors), 1, generator=random) * (1 - 1 / size)  # in (1 / size, 1]
        is_masked = (torch.rand(*share.shape[:2], size, generator=random) < share).flatten(1).to(tokens.device)
        weights = (1 / share).expand(-1, -1, size).flatten(1).to(tokens.device)
        windows = tokens[:, place].masked_fill(is_masked, config.vocab_size)
        hidden = self.windows(tokens, windows, place, anchors)
        counted, rows = is_masked.nonzero(as_tuple=True)
        at = counted * n + place[rows] - 1  # the target's row that predicts each masked token
        weights, wanted = weights[is_masked], wanted.flatten(0, 1)

        def weighted(hidden: Tensor, weight: Tensor, row: Tensor) -> Tensor:
            target = wanted[at[row]].float().log_softmax(-1)
            found = nn.functional.linear(hidden, weight[:-1].to(hidden.dtype)).float().log_softmax(-1)
            total: Tensor = ((target.exp() * (target - found)).sum(-1) * weights[row]).sum()
            return total

        every = torch.arange(len(at), device=tokens.device)
        return mean_over_rows(weighted, self, hidden[is_masked][None], every[None]) * (len(at) / is_masked.numel())

    def windows(self, tokens: Tensor, windows: Tensor, place: Tensor, anchors: Tensor) -> Tensor:
        """Run windows int64[batch, m] at int64[m] places of texts int64[batch, n], each behind its own anchor."""
        size, n = self.sizes.window, tokens.shape[1]
        owner = torch.arange(len(anchors), device=tokens.device).repeat_interleave(size)
        before = torch.arange(n, device=tokens.device) <= anchors[owner, None]
        is_visible = torch.cat([before, owner == owner[:, None]], 1).expand(len(tokens), -1, -1)
        context = self.model.encode(tokens, torch.ones_like(tokens, dtype=torch.bool))
        return self.model.windows(windows, place, is_visible, context)

    def get_output_embeddings(self) -> nn.Embedding:
        """The drafter's own embedding, whose last row is no token."""
        return self.model.embed_tokens

    def save(self, folder: Path) -> None:
        """Save weights in bfloat16 and config.json."""
        super().save(folder)
        (folder / "config.json").write_text(describe(self.sizes), encoding="utf-8")

    def config(self) -> dict[str, object]:
        """Return nothing that other programs read."""
        return {}


def new_diffusion(target: TreeLM, seed: int) -> DiffusionTraining:
    """Make a masked-diffusion drafter of half the target's width with random weights."""
    width = int(target.model.get_input_embeddings().weight.shape[1])
    config = DiffusionConfig(target.vocab_size, max(64, width // 2 // 32 * 32), NUM_LAYERS, WINDOW)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return DiffusionTraining(target, config).to(target.device, torch.float32)
