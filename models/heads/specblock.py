"""SpecBlock heads (arXiv 2605.07243): a block of slots for every token, which predicts several tokens after it at once.

The input of slot k at token t[p + 1] is ``fuse([norm(g); norm(embedding); norm(query_k)])`` with ``g = fc([h_a; h_b;
h_c])`` of the target's hidden states at p, as in EAGLE-3; it predicts t[p + 2 + k].  A slot attends to all slots of
earlier tokens and to those before it in its block.  Before every layer but the first it also reads the output of the
slot before it.  A block may hang below any slot of another one: it takes that slot's output in place of ``g``.

The rank head tells from a slot's output and its distribution where the true token ranks among the head's own: first,
2-4, 5-10, or below.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from stree.kernels.topology import most_nodes
from stree.models.heads.causal import CausalHead
from stree.models.heads.eagle3 import check_sizes, read_layers
from stree.models.heads.refinements import Fusion
from stree.models.heads.weights import assign, checkpoint_file, draft_tokens, read_tensors
from stree.models.hidden_states import check_hidden_layers
from stree.models.state import DecodeState
from stree.models.tree_lm import TreeLM
from stree.tree import TokenTree

__all__ = ["RankHead", "ShiftedLayer", "SlotFusion", "SpecBlockHead", "load_specblock", "published_name"]

NUM_RANKED, NUM_FEATURES = 20, 15  # logits that the rank head reads, and what it computes of them
WIDTH = 256  # of the rank head
PREFIXES = {
    "input_layer.condition_proj.": "projection.fc.", "input_layer.": "fusion.", "rank_head.": "rank_head.",
    "lm_head.": "head.",
}  # fmt: skip
UNREAD = ("t2d", "input_layer.embed_tokens.weight")  # the first says which tokens the head has; the second is a copy


class SlotFusion(Fusion):
    """The inputs of the slots of tokens.

    Args:
        config: of the layers.
        num_slots: of a block.
    """

    def __init__(self, config: Any, num_slots: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.condition_norm, self.token_norm = nn.RMSNorm(hidden, eps=eps), nn.RMSNorm(hidden, eps=eps)
        self.query_norm, self.position_queries = nn.RMSNorm(hidden, eps=eps), nn.Embedding(num_slots, hidden)
        self.fuse = nn.Linear(3 * hidden, hidden, bias=False)

    def forward(self, embeddings: Tensor, features: Tensor) -> Tensor:
        """Fuse float[batch, n * slots, hidden] embeddings and float[batch, n, hidden] features, one for each block."""
        queries = self.query_norm(self.position_queries.weight).repeat(features.shape[1], 1)
        condition = self.condition_norm(features).repeat_interleave(len(self.position_queries.weight), 1)
        parts = condition, self.token_norm(embeddings), queries.expand_as(embeddings)
        fused: Tensor = self.fuse(torch.cat(parts, -1))
        return fused


class RankHead(nn.Sequential):
    """Tells where the true token ranks in the distribution of a slot.

    Args:
        hidden: width of a slot's output.
        num_classes: of ranks.
    """

    def __init__(self, hidden: int, num_classes: int) -> None:
        super().__init__(
            nn.Linear(hidden + NUM_FEATURES, WIDTH, bias=False), nn.SiLU(), nn.Linear(WIDTH, num_classes, bias=False)
        )  # fmt: skip

    def forward(self, hidden: Tensor, logits: Tensor) -> Tensor:  # type: ignore[override]
        """Return float[..., classes] logits from float[..., hidden] normed outputs and [..., vocab] logits."""
        top = logits.detach().float().topk(NUM_RANKED, -1).values
        logprobs = top.log_softmax(-1)
        probs, gaps = logprobs.exp(), top[..., :1] - top[..., [1, 2, 4]]
        entropy = -(probs * logprobs).nan_to_num(0.0).sum(-1, keepdim=True)
        found = torch.cat([logprobs[..., :10], gaps, probs[..., :1], entropy], -1)
        read = torch.cat([hidden.detach(), found.to(hidden.dtype)], -1)
        classes: Tensor = super().forward(read)  # type: ignore[no-untyped-call]
        return classes


class ShiftedLayer(LlamaDecoderLayer):  # type: ignore[misc]
    """A layer that reads the slot before each one, too; slot 0 reads itself.

    Args:
        config: of the layers.
        index: of this one.
        num_slots: of a block.
    """

    def __init__(self, config: Any, index: int, num_slots: int) -> None:
        super().__init__(config, index)
        self.shift_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self._num_slots = num_slots

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Run the layer on float[batch, n * slots, hidden]."""
        slots = hidden_states.unflatten(1, (-1, self._num_slots))
        before = torch.cat([slots[:, :, :1], slots[:, :, :-1]], 2).flatten(1, 2)
        shifted = self.shift_proj(torch.cat([hidden_states, before], -1))
        out: Tensor = super().forward(shifted, **kwargs)
        return out


class SpecBlockHead(CausalHead):
    """A causal head whose every token takes ``num_slots`` columns of its state: sizes of states count tokens.

    Args:
        rank_head: of the slots.
        num_slots: of a block.
        kwargs: see ``CausalHead``.
    """

    def __init__(self, *args: Any, rank_head: RankHead, num_slots: int, **kwargs: Any) -> None:
        self.num_slots = num_slots
        super().__init__(*args, **kwargs)
        self._rank_head = rank_head.eval()

    def new_state(
        self, batch_size: int = 1, max_length: int = 4096, max_nodes: int = 64, *, fixed_shapes: bool = False
    ) -> DecodeState:
        """Allocate an empty state, with a column for every slot of so many tokens and nodes."""
        columns = self.num_columns(max_nodes)
        return super().new_state(batch_size, self.num_slots * max_length, columns, fixed_shapes=fixed_shapes)

    def num_columns(self, nodes: int) -> int:
        """Return the slots of so many nodes, as far as the device's kernels take them."""
        most = most_nodes(self.device, self.dtype)
        return self.num_slots * nodes if most is None else min(self.num_slots * nodes, most)

    @torch.no_grad()
    def verify_features(
        self, state: DecodeState, tree: TokenTree, first: int, features: Tensor, places: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Score the slots ``first``.. of a tree of blocks; see ``CausalHead``.

        Args:
            state: of this head.
            tree: n columns, a block beside the other; the parent of a slot is the one before it, and that of a block's
                first slot the one that it hangs below.
            first: number of columns that were scored by earlier calls.
            features: float[batch, blocks, num_features], of the target where it has run, else the output of the slot
                that a block hangs below.
            places: int[batch, n - first], positions behind the state's text; None for a tree, all of whose blocks begin
                at the root's, as in the published code.

        Returns:
            float32[batch, n - first, vocab] logits, and float[batch, n - first, num_features] outputs of the slots.
        """
        if places is None:
            places = torch.arange(first, tree.tokens.shape[1], device=self.device) % self.num_slots
        positions = state.lengths[:, None] // self.num_slots + places
        logits, hidden = self.score(
            state, tree, first, [self.feedback_layer], positions=positions.long(), features=features
        )
        assert hidden is not None, "a layer was asked for"
        return logits, hidden[:, :, 0]

    @torch.no_grad()
    def ranks(self, logits: Tensor, feedback: Tensor) -> Tensor:
        """Return the class of the rank of each slot's true token, int64[batch, n]: 0 where it is the first."""
        norm: Any = self.model.base_model.norm
        classes: Tensor = self._rank_head(norm(feedback), logits)
        return classes.argmax(-1)

    @torch.no_grad()
    def run(self, token_ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Run a text from an empty cache, by transformers' own forward.

        Args:
            token_ids: int64[batch, n]; token i follows the position whose features are ``features[:, i]``.
            features: float[batch, n, width], the target's hidden states of all ``hidden_layers`` side by side.

        Returns:
            float[batch, n, slots, vocab] logits; slot k predicts the token that follows k tokens after token i.
            float[batch, n, slots, num_features] outputs of the slots.
        """
        slots, count = self.num_slots, token_ids.shape[1]
        mask = torch.ones(count * slots, count * slots, dtype=torch.bool, device=self.device).tril()
        places = torch.arange(count, device=self.device)[:, None] + torch.arange(slots, device=self.device)
        logits, hidden = self.forward_recording(
            [self.feedback_layer], token_ids.repeat_interleave(slots, 1), self.family.new_cache(self.model.config),
            places.flatten().expand(len(token_ids), -1), mask[None, None],
            features=self.project(features[:, :, None]),
        )  # fmt: skip
        assert hidden is not None, "a layer was asked for"
        return logits.unflatten(1, (count, slots)), hidden[:, :, 0].unflatten(1, (count, slots))


def load_specblock(target: TreeLM, source: str | Path, published: Mapping[str, Any]) -> SpecBlockHead:
    """Load a head in the published layout.

    Args:
        target: the head is placed on its device, in its dtype, and shares its embedding.
        source: folder or hub id.
        published: its config.json.

    Raises:
        ValueError: the checkpoint cannot be read, or was made for a target of other sizes.
    """
    num_slots, num_classes = published.get("diffspec_draft_token_num", 7), published.get("rank_classes", 4)
    head_dim = published["hidden_size"] // published["num_attention_heads"]  # whatever the config says
    sizes = {**published, "head_dim": head_dim, "tie_word_embeddings": False}
    config = LlamaConfig(**{name: value for name, value in sizes.items() if name != "model_type"})
    layers = read_layers(published, target.num_layers)
    check_hidden_layers(layers, target.num_layers)
    tensors = read_tensors(source, lambda name: name not in UNREAD, str(target.device))
    draft_ids = _draft_ids(source, tensors.pop("d2t", None), target)
    if len(draft_ids) < NUM_RANKED:
        raise ValueError(f"draft head {str(source)!r} must draft at least {NUM_RANKED} tokens, got {len(draft_ids)}")
    width = int(target.model.get_input_embeddings().weight.shape[1])
    check_sizes(source, target, config, published, width)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        model.lm_head = nn.Linear(config.hidden_size, len(draft_ids), bias=False)
        for index in range(1, config.num_hidden_layers):
            model.model.layers[index] = ShiftedLayer(model.config, index, num_slots)
        projection = nn.ModuleDict({"fc": nn.Linear(len(layers) * width, config.hidden_size, bias=False)})
        fusion, rank_head = SlotFusion(config, num_slots), RankHead(config.hidden_size, num_classes)
    model.requires_grad_(False)
    model.set_input_embeddings(target.model.get_input_embeddings())
    model.generation_config = target.model.generation_config
    parts = nn.ModuleDict({
        "base": model.model, "head": model.lm_head, "projection": projection, "fusion": fusion, "rank_head": rank_head,
    })  # fmt: skip
    named = {placed(name): value.to(target.dtype) for name, value in tensors.items()}
    assign(parts, named, f"draft head {str(source)!r}")
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(target.device)
    return SpecBlockHead(
        model.eval(), fusion, layers, config.num_hidden_layers, projection["fc"], draft_ids,
        target.vocab_size, rank_head=rank_head, num_slots=num_slots,
    )  # fmt: skip


def _draft_ids(source: str | Path, offsets: Tensor | None, target: TreeLM) -> Tensor:
    """Return the token of each logit by the weights' offsets or those of ``vocab_mapping.pt``."""
    if offsets is None:
        file = checkpoint_file(source, "vocab_mapping.pt")
        if file is None:
            raise ValueError(f"draft head {str(source)!r} has neither the tensor d2t nor vocab_mapping.pt")
        offsets = torch.load(file, map_location=target.device, weights_only=True)["d2t"]
    return draft_tokens(offsets, len(offsets), target.vocab_size, f"draft head {str(source)!r}")


def placed(name: str) -> str:
    """Return the name of a published tensor among the parts of a head."""
    name = re.sub(r"^shift_proj\.(\d+)\.", lambda found: f"layers.{int(found[1]) + 1}.shift_proj.", name)
    for theirs, ours in PREFIXES.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return f"base.{name}"


def published_name(name: str) -> str:
    """Return the published name of a tensor of a head; undoes ``placed``."""
    for theirs, ours in (*PREFIXES.items(), ("", "base.")):
        if name.startswith(ours):
            name = theirs + name.removeprefix(ours)
            break
    return re.sub(r"^layers\.(\d+)\.shift_proj\.", lambda found: f"shift_proj.{int(found[1]) - 1}.", name)
