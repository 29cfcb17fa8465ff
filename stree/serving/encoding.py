"""Texts and chats of requests as tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import anyio.to_thread
from anyio import CapacityLimiter

from stree.request_fields import check_roles, rendered, template_options
from stree.serving.errors import APIError
from stree.serving.protocol import TokenizeRequest

__all__ = ["PromptEncoder"]

SHORT = 4096  # characters of a prompt that is tokenised in some milliseconds

T = TypeVar("T")


class PromptEncoder:
    """Tokenises prompts in two threads, one for short prompts, so that they need not wait for long ones.

    A text of more characters than ``max_tokens`` of the longest tokens have is refused before it is tokenised.

    Args:
        tokenizer: of transformers.
        model: its name in messages.
        max_tokens: most tokens of a prompt.
    """

    def __init__(self, tokenizer: Any, model: str, max_tokens: int) -> None:
        self._tokenizer, self._model, self._max_tokens = tokenizer, model, max_tokens
        self._longest = max(map(len, tokenizer.get_vocab()))
        self._for_short, self._for_long = CapacityLimiter(1), CapacityLimiter(1)

    async def text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a text.

        Raises:
            APIError: it is too long, or no text that UTF-8 can write.
        """
        self._check_length(text, "prompt")
        return await self._in_thread(len(text), lambda: self._tokenized(text, add_special_tokens))

    async def chat(self, messages: Sequence[dict[str, Any]], options: Mapping[str, Any]) -> list[int]:
        """Return the tokens of messages, written by the chat template, which reads ``options``.

        Raises:
            APIError: there is no template, it refuses the messages, or what it writes is too long.
        """
        return await self._chat(messages, lambda: self._tokenized_chat(messages, options))

    async def shared_chat(
        self, messages: Sequence[dict[str, Any]], options: Mapping[str, Any]
    ) -> tuple[list[int], int]:
        """Return the tokens of messages as ``chat`` does, and how many do not depend on what the user says first."""

        def work() -> tuple[list[int], int]:
            tokens = self._tokenized_chat(messages, options)
            first = next((place for place, one in enumerate(messages) if one.get("role") == "user"), None)
            if first is None:
                return tokens, 0
            others = self._tokenized_chat([*messages[:first], {**messages[first], "content": "?"}], options)
            pairs = enumerate(zip(tokens, others, strict=False))
            return tokens, next((place for place, (one, other) in pairs if one != other), 0)

        return await self._chat(messages, work)

    async def _chat(self, messages: Sequence[dict[str, Any]], work: Callable[[], T]) -> T:
        """Call ``work`` in a thread, unless there are more messages than tokens, or no template."""
        if self._tokenizer.chat_template is None:
            raise APIError(400, f"{self._model} has no chat template; use /v1/completions", param="messages")
        if len(messages) > self._max_tokens:
            message = f"there are {len(messages)} messages, each at least a token, of at most {self._max_tokens}"
            raise APIError(400, message, param="messages", code="context_length_exceeded")
        size = sum(len(message.get("content") or "") for message in messages)
        return await self._in_thread(size, work)

    def ends_with(self, prompt: Sequence[int], text: str) -> bool:
        """Whether the text of a prompt ends with another, which is short, and spaces."""
        return str(self._tokenizer.decode(prompt[-32:])).rstrip().endswith(text)

    async def tokenize(self, body: TokenizeRequest) -> dict[str, Any]:
        """Return the tokens of a text or a chat, and their names where they are asked for."""
        if body.messages is not None:
            options = {**template_options(dict(body)), "add_generation_prompt": body.add_generation_prompt}
            tokens = await self.chat(body.messages, options)
        else:
            tokens = await self.text(body.prompt or "", add_special_tokens=body.add_special_tokens)
        names = self._tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
        return {"tokens": tokens, "token_strs": names}

    async def detokenize(self, tokens: list[int]) -> str:
        """Return the text of tokens.

        Raises:
            APIError: one that is not the tokenizer's.
        """
        most = len(self._tokenizer)
        if any(not 0 <= token < most for token in tokens):
            raise APIError(400, f"tokens must be from 0 to {most - 1}", param="tokens")
        return await self._in_thread(len(tokens), lambda: str(self._tokenizer.decode(tokens)))

    async def _in_thread(self, size: int, work: Callable[[], T]) -> T:
        """Call ``work`` for a prompt of so many characters when the thread for such prompts is free."""
        limiter = self._for_short if size <= SHORT else self._for_long
        return await anyio.to_thread.run_sync(work, limiter=limiter, abandon_on_cancel=True)

    def _check_length(self, text: str, param: str) -> None:
        least = -(-len(text) // self._longest)
        if least > self._max_tokens:
            message = f"the prompt has {len(text)} characters, at least {least} tokens, of at most {self._max_tokens}"
            raise APIError(400, message, param=param, code="context_length_exceeded")

    def _tokenized(self, text: str, add_special_tokens: bool, param: str = "prompt") -> list[int]:
        try:
            ids: list[int] = self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        except (UnicodeEncodeError, TypeError) as error:  # half of a character: tokenizers differ in what they raise
            raise APIError(400, f"{param}: no text that UTF-8 can write", param=param) from error
        return ids

    def _tokenized_chat(self, messages: Sequence[dict[str, Any]], options: Mapping[str, Any]) -> list[int]:
        def written(turns: Sequence[dict[str, Any]]) -> str:
            settings = {"add_generation_prompt": True, **options, "tokenize": False}
            return str(self._tokenizer.apply_chat_template(turns, **settings))

        try:
            messages, text = rendered(messages, written)
        except Exception as error:  # templates raise for turns in another order than theirs
            raise APIError(400, f"the chat template refuses the messages: {error}", param="messages") from error
        self._check_length(text, "messages")
        try:
            check_roles(messages, written)
        except ValueError as error:
            raise APIError(400, str(error), param="messages") from error
        return self._tokenized(text, False, "messages")
