"""Prompts in answers of /v1/completions: their text, and the log probabilities of their tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stree.decode.grammar import Grammar
from stree.decode.logprobs import TokenLogprob
from stree.decode.stop_strings import TokenBytes
from stree.decode.text import IncrementalText
from stree.serving.answers import Choice, Piece, completion_logprobs
from stree.serving.document import token_name
from stree.serving.engine import Engine
from stree.serving.errors import APIError
from stree.serving.handle import QueueFull
from stree.serving.protocol import CompletionRequest

__all__ = ["Echo", "echoes_of"]


async def echoes_of(
    body: CompletionRequest, choices: Sequence[Choice], engine: Engine, token_bytes: TokenBytes
) -> list[Echo]:
    """Return the prompts of a request whose choices were submitted; an error ends these.

    Raises:
        APIError: log probabilities are wanted, and the prompt has none, or too many requests wait.
    """
    echoes = list[Echo]()
    try:
        for choice in choices[:: body.n or 1]:
            prompt, found = choice.handle.prompt, None
            if body.logprobs is not None:
                found = await prompt_logprobs(engine, token_bytes, prompt, body.logprobs)
            echoes.append(Echo(token_bytes, prompt, found))
    except BaseException as error:
        for choice in choices:
            choice.handle.cancel()
        if isinstance(error, QueueFull):
            raise APIError(429, str(error), headers={"Retry-After": "1"}) from error
        if isinstance(error, (ValueError, RuntimeError)):
            raise APIError(400, f"echo with logprobs is not possible: {error}", param="echo") from error
        raise
    return echoes


async def prompt_logprobs(
    engine: Engine, token_bytes: TokenBytes, prompt: Sequence[int], top: int
) -> list[TokenLogprob]:
    """Return the log probabilities of the tokens of a prompt after its first, with alternatives.

    They are those of a request whose new tokens are these, forced by a grammar.

    Raises:
        RuntimeError: grammars are not installed, decoding failed, or as ``Engine.submit``.
        ValueError: the tokenizer's end token is behind the first token, where no grammar allows it.
    """
    if len(prompt) < 2:
        return []
    if (end := token_bytes.tokenizer.eos_token_id) in prompt[1:]:
        raise ValueError(f"the prompt has the end token {end} behind its first token")
    handle = engine.submit(
        prompt[:1], grammar=Grammar.lark("start: " + " ".join(f"<[{token}]>" for token in prompt[1:])),
        tokenizer=token_bytes, max_new_tokens=len(prompt) - 1, stop_token_ids=(), ignore_eos=True, logprobs=top,
        cache=False,
    )  # fmt: skip
    try:
        return [found async for step in handle for found in step.logprobs or ()]
    finally:
        handle.cancel()  # nothing, where it has ended


class Echo:
    """The prompt of a choice, as the choice's first piece has it.

    Args:
        token_bytes: of the tokenizer.
        prompt: tokens.
        logprobs: of those after the first, or None where they are not wanted.
    """

    def __init__(self, token_bytes: TokenBytes, prompt: Sequence[int], logprobs: list[TokenLogprob] | None) -> None:
        text = IncrementalText(token_bytes, [])
        self.text, self._logprobs = text.push(prompt, is_last=True), None
        if logprobs is not None:
            self._logprobs = completion_logprobs(Piece(0, "", logprobs, text.tokens[1:], None), token_bytes)
            first = {
                "tokens": token_name(token_bytes, prompt[0], is_first=True, mark="bytes:"), "token_logprobs": None,
                "text_offset": 0, "top_logprobs": None,
            }  # fmt: skip
            self._logprobs = {name: [first[name], *values] for name, values in self._logprobs.items()}

    def moved(self, logprobs: Mapping[str, Any], *, is_first: bool) -> dict[str, Any]:
        """Return log probabilities of a piece with places behind the prompt, and the prompt's where it is the first."""
        offsets = [len(self.text) + place for place in logprobs["text_offset"]]
        found = {**logprobs, "text_offset": offsets}
        if not is_first or self._logprobs is None:
            return found
        return {name: values + found[name] for name, values in self._logprobs.items()}
