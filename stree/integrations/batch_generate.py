"""Texts of many rows, each with its own sampling, seed and limits, in one call of ``generate``."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from stree.decode.failures import GenerationError
from stree.decode.grammar import Grammar
from stree.decode.stop_strings import TokenBytes, new_text_stops
from stree.decode.text import text_of
from stree.decode.token_rules import RULES
from stree.drafters import Drafter
from stree.generation import Generation, generate
from stree.grammar_fields import grammar_of
from stree.inputs import stop_tokens
from stree.models.tree_lm import TreeLM
from stree.request_fields import check_roles, rendered, sampling_of, template_options
from stree.rule_fields import rules_of, tokenized_words
from stree.sampling import Sampling

__all__ = ["RowGenerator"]

logger = logging.getLogger("stree")


@dataclass(frozen=True, eq=False)
class RowGenerator:
    """Generates the texts of rows.

    Attributes:
        lm: the target.
        tokenizer: of transformers, of the target.
        drafter: as for ``generate``; one object, so that a draft model is loaded once.
        sampling: of rows without one; each of its parameters is replaced by a row's own.
        max_new_tokens: of rows without one.
        max_batch: most sequences at once.
        chat: put prompts into the tokenizer's chat template, as messages always are.
        options: further ones of ``generate``, such as ``budget``.
    """

    lm: TreeLM
    tokenizer: Any
    drafter: Drafter
    sampling: Sampling = Sampling()
    max_new_tokens: int = 128
    max_batch: int = 8
    chat: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Refuse what can serve no row, by generating a token.

        Raises:
            ValueError, TypeError, NotImplementedError: options that do not go together, with each other or the models.
        """
        generate(self.lm, [[0]], self.drafter, sampling=self.sampling, max_new_tokens=1, **self.options)

    def run(self, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Generate one text for each request.

        Args:
            requests: as ``batch_rows.request_of`` returns them; with a ``seed`` each.

        Returns:
            One dict for each: ``text``, ``token_ids`` (new ones), ``finish_reason`` and ``num_new_tokens``, and
            ``reason`` None; or only a ``reason`` why it cannot be run.

        Raises:
            Exception: the model fails for other rows, too.
        """
        results: list[dict[str, Any]] = [{} for _ in requests]
        prompts: list[tuple[int, list[int]]] = []
        grammars: dict[int, Grammar | None] = {}
        for place, request in enumerate(requests):
            try:
                prompt, grammars[place] = self._encode(request), _grammar(request)
                prompts.append((place, prompt))
            except (TypeError, ValueError) as error:
                results[place] = _rejected(error)
        runnable = [{**requests[place], "grammar": grammars[place]} for place, _ in prompts]
        found = self._generate(runnable, [prompt for _, prompt in prompts])
        for (place, _), result in zip(prompts, found, strict=True):
            results[place] = result
        return results

    def _encode(self, request: Mapping[str, Any]) -> list[int]:
        """Turn a prompt or messages into tokens."""
        prompt, messages = request.get("prompt"), request.get("messages")
        if isinstance(prompt, list):
            return [*prompt]
        if messages is None and not self.chat:
            ids: list[int] = self.tokenizer(prompt, verbose=False)["input_ids"]
            return ids
        if self.tokenizer.chat_template is None:
            raise ValueError("the target's tokenizer has no chat template")
        messages = messages or [{"role": "user", "content": prompt}]
        options = {"add_generation_prompt": True, **template_options(request), "return_dict": True}

        def encoded(turns: list[dict[str, Any]]) -> list[int]:
            return [*self.tokenizer.apply_chat_template(turns, **options)["input_ids"]]

        try:
            messages, tokens = rendered(messages, encoded)
        except Exception as error:  # templates raise their own for roles that they do not know
            raise ValueError(f"the chat template refuses the messages: {str(error).strip()[:200]}") from error
        check_roles(messages, encoded)
        return tokens

    def _generate(self, requests: Sequence[Mapping[str, Any]], prompts: Sequence[list[int]]) -> list[dict[str, Any]]:
        """Generate for prompts; where that fails for one of them, for the halves without it."""
        if not prompts:
            return []
        try:
            return self._texts(requests, prompts)
        except Exception as error:
            if len(prompts) == 1:
                self.check()  # what still works was not ended by the row
                return [_rejected(error)]
            half = len(prompts) // 2
            return [
                result
                for part in (slice(half), slice(half, None))
                for result in self._generate(requests[part], prompts[part])
            ]

    def _texts(self, requests: Sequence[Mapping[str, Any]], prompts: Sequence[list[int]]) -> list[dict[str, Any]]:
        """Run ``generate``, whose arguments are checked before anything runs."""
        stops = [request.get("stop") or [] for request in requests]
        out = _complete(
            self.lm, prompts, self.drafter, sampling=[sampling_of(request, self.sampling) for request in requests],
            max_new_tokens=[request.get("max_new_tokens", self.max_new_tokens) for request in requests],
            seed=[request.get("seed", 0) for request in requests],
            stop_strings=[new_text_stops(self._token_bytes, own) for own in stops],
            max_batch=self.max_batch, grammar=[request.get("grammar") for request in requests],
            tokenizer=self.tokenizer, **self._rules(requests), **self._endings, **self.options,
        )  # fmt: skip
        return [
            _rejected(reason.removeprefix("error: "))
            if reason.startswith("error: ")
            else {
                "text": text_of(self._token_bytes, prompt, tokens, own),
                "token_ids": tokens,
                "finish_reason": reason,
                "num_new_tokens": len(tokens),
                "reason": None,
            }
            for prompt, tokens, own, reason in zip(
                prompts, out.new_tokens, stops, out.stats["finish_reasons"], strict=True
            )
        ]

    def _rules(self, requests: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
        """Return the token rules that some request has, one for each."""
        each = [rules_of(request) for request in requests]
        for rules in each:
            if "bad_words" in rules:
                rules["bad_words"] = tokenized_words(rules["bad_words"], self.tokenizer)
        names = {name for rules in each for name in rules}
        return {name: [rules.get(name, RULES[name]) for rules in each] for name in names}

    @cached_property
    def _token_bytes(self) -> TokenBytes:
        return TokenBytes(self.tokenizer)

    @property
    def _endings(self) -> dict[str, Any]:
        """The tokens that end a text, unless the options name them."""
        if "stop_token_ids" in self.options or self.options.get("ignore_eos"):
            return {}
        return {"stop_token_ids": stop_tokens(self.lm, self.tokenizer)}


def _complete(*arguments: Any, **options: Any) -> Generation:
    """Run ``generate``; its output also where only the drafter failed, and the rest was decoded without it."""
    try:
        return generate(*arguments, **options)
    except GenerationError as error:
        if "error" in error.output.stats["finish_reasons"]:
            raise
        logger.warning(error)
        return error.output


def _grammar(request: Mapping[str, Any]) -> Grammar | None:
    """Return the grammar that a row asks for, or None."""
    asked = grammar_of(request)
    if asked is None:
        return None
    grammar: Grammar = getattr(Grammar, asked[1])(asked[2])
    return grammar


def _rejected(error: Exception | str) -> dict[str, Any]:
    """Return the result of a row that cannot be run; an error is that of a call with no other row."""
    return {"reason": str(error).splitlines()[0].replace("prompt 0", "the prompt", 1)}
