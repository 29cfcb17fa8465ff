"""The models under measurement: target, drafter, and an unpatched copy of the target for transformers' generate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from logging import getLogger
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from stree.bench.smollm2 import named, prepared
from stree.drafters import DRAFTERS, Drafter
from stree.heads import CausalHead, MaskedDiffusion, OneShotHead, head_layout, load
from stree.inputs import ASSETS, load_tokenizer, locate
from stree.models.common_vocabulary import in_vocabulary_of
from stree.models.loading import load_config, load_model, weights_digest
from stree.models.tree_lm import TreeLM
from stree.models.trimmed import TrimmedLM
from stree.vocabulary import load_vocabulary

__all__ = ["Pair"]


@dataclass(eq=False)
class Pair:
    """A target and its drafter.

    Attributes:
        target: what is measured.
        drafter: the draft model, or None.
        tokenizer: the target's.
        source: where the target was loaded from.
        drafter_source: likewise the drafter or head, or None.
        head: the draft head, in place of a draft model, or None.
        vocab: tokens that the output layer of the draft model or head keeps, or None for all.
        drafters: of the methods that have run, by method; captured steps belong to one drafter object.
    """

    target: TreeLM
    drafter: TreeLM | None
    tokenizer: Any
    source: str
    drafter_source: str | None = None
    head: CausalHead | OneShotHead | MaskedDiffusion | None = None
    vocab: list[int] | None = None
    drafters: dict[str, Drafter] = field(default_factory=dict)

    @classmethod
    def load(
        cls,
        target: str = "bundled",
        drafter: str | None = None,
        device: str = "auto",
        dtype: str = "auto",
        drafter_vocab: str | Path | None = None,
    ) -> Pair:
        """Load a pair.

        Args:
            target: "bundled", "smollm2" (``stree.bench.smollm2``), a folder, or a hub id.
            drafter: likewise, a model or a draft head, "mtp" for the target's own MTP layers, or "none"; None for the
                bundled one beside the bundled target, else no draft model.
            device: as for ``TreeLM.from_pretrained``.
            dtype: likewise.
            drafter_vocab: file of the tokens that the output layer of the draft model or head keeps; None for all.

        Raises:
            ValueError: no checkpoint there, a drafter of another number of tokens with another tokenizer, or a
                ``drafter_vocab`` that cannot be read, is of another size, leaves out a stop token, or has no draft
                model to trim.
            NotImplementedError: ``drafter_vocab`` and a head that cannot be trimmed.
        """
        logging.set_verbosity_error()
        getLogger("huggingface_hub").setLevel("ERROR")  # a line for every time that it tries again
        logging.disable_progress_bar()
        if drafter is None:
            drafter = "bundled" if target == "bundled" else "none"
        source = locate(prepared(target), "target")
        drafter_source = None if drafter == "none" else locate(prepared(drafter), "drafter")
        name = drafter_source or "mtp"
        if name != "mtp" and "/" not in name and not Path(name).is_dir():
            raise ValueError(
                "--drafter must be 'bundled', 'smollm2', 'mtp', 'none', a folder, or a hub id OWNER/NAME, got "
                f"{drafter!r}; drafters without a model are --methods: {', '.join(sorted(DRAFTERS.keys() - {'mtp'}))}"
            )
        is_head = drafter == "mtp" or (drafter_source is not None and head_layout(drafter_source) is not None)
        if drafter_vocab is not None:  # checked before weights are loaded
            if drafter_source is None:
                raise ValueError("--drafter-vocab trims a draft model; there is none, give one with --drafter")
            trimmed = source if is_head else drafter_source
            load_vocabulary(drafter_vocab, load_config(trimmed).get_text_config().vocab_size)
        lm = TreeLM.from_pretrained(source, device=device, dtype=dtype)
        if drafter_source is not None and is_head:
            head = load(drafter_source, lm)
            vocab = None if drafter_vocab is None else load_vocabulary(drafter_vocab, lm.vocab_size, lm.eos_token_ids)
            head = head if vocab is None else head.trimmed(vocab)
            return cls(lm, None, load_tokenizer(source), source, drafter_source, head, vocab)
        draft, vocab = None, None
        if drafter_source is not None:
            draft = TreeLM.from_pretrained(drafter_source, device, dtype)
            if drafter_vocab is not None:
                vocab = load_vocabulary(drafter_vocab, draft.vocab_size, lm.eos_token_ids)
                draft = TrimmedLM(draft, vocab)
            draft = in_vocabulary_of(draft, lm)
        return cls(lm, draft, load_tokenizer(source), source, drafter_source, vocab=vocab)

    @cached_property
    def plain(self) -> Any:
        """Load the unpatched copy; no stop token, as every method emits exactly the tokens asked for."""
        return self._unpatched(self.source)

    @cached_property
    def plain_drafter(self) -> Any:
        """Load an unpatched copy of the draft model.

        Raises:
            NotImplementedError: there is no draft model.
        """
        if self.drafter is None:
            raise NotImplementedError("an assistant model is a draft model; give one with --drafter")
        return self._unpatched(str(self.drafter_source))

    def _unpatched(self, source: str) -> Any:
        lm = self.target
        model: Any = load_model(source, device=lm.device, dtype=lm.dtype, device_map=None, trust_remote_code=False)
        model.generation_config.eos_token_id = None
        return model.eval()

    def compile(self) -> None:
        """Compile the scoring of trees by the models; see ``TreeLM.compile``."""
        for lm in (self.target, self.drafter, self.head):
            if isinstance(lm, TreeLM):
                lm.compile()

    @property
    def names(self) -> tuple[str, str | None]:
        """Name target and drafter without the place of those that need no folder."""
        known = {str(ASSETS / role): "bundled" for role in ("target", "drafter")}
        known[str(ASSETS / "mtp")] = "bundled-mtp"
        drafter = self.drafter_source
        target = known.get(self.source, named(self.source))
        return target, None if drafter is None else known.get(drafter, named(drafter))

    @property
    def weights(self) -> list[str]:
        """Name the weights of target and drafter by some values of each tensor: a folder may get others later."""
        draft = self.drafter or self.head
        return [weights_digest(lm.model, getattr(lm, "fusion", None)) for lm in (self.target, draft) if lm is not None]

    @property
    def dtype(self) -> str:
        """Name the dtype of the weights."""
        return str(self.target.dtype).removeprefix("torch.")

    def encode(self, turns: Sequence[str], answers: Sequence[Sequence[int]] = (), *, chat: bool = False) -> list[int]:
        """Turn a conversation into tokens that end where the next answer begins.

        Args:
            turns: what the user says, one more than there are answers.
            answers: tokens of the earlier answers; a stop token and what follows it are left out.
            chat: use the tokenizer's chat template; else texts follow each other, an empty line before a later turn.

        Raises:
            ValueError: a chat template is asked for and the tokenizer has none.
        """
        known = [self._until_stop(answer) for answer in answers]
        if chat:
            if not self.tokenizer.chat_template:
                raise ValueError(f"--chat needs a tokenizer with a chat template; that of {self.source!r} has none")
            messages: list[dict[str, str]] = []
            for number, turn in enumerate(turns):
                messages.append({"role": "user", "content": turn})
                if number < len(known):
                    messages.append({"role": "assistant", "content": self.tokenizer.decode(known[number])})
            ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
            return list(ids["input_ids"])
        tokens = list(self.tokenizer(turns[0])["input_ids"])
        for answer, turn in zip(known, turns[1:], strict=True):
            tokens += answer + list(self.tokenizer(f"\n\n{turn}\n\n", add_special_tokens=False)["input_ids"])
        return tokens

    @torch.no_grad()
    def plain_logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Run the unpatched target over a whole text: float[length, vocab]."""
        ids = torch.tensor([list(tokens)], device=self.target.device)
        logits: torch.Tensor = self.plain(ids).logits[0]
        return logits

    def _until_stop(self, answer: Sequence[int]) -> list[int]:
        """Cut an answer before its first stop token."""
        stops = self.target.eos_token_ids
        end = next((place for place, token in enumerate(answer) if token in stops), len(answer))
        return list(answer[:end])
