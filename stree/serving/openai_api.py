"""Requests of OpenAI's API, answered by an engine."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse

from stree.decode.stop_strings import TokenBytes
from stree.decode.text import IncrementalText
from stree.grammar_fields import GRAMMAR_FIELDS, grammar_of
from stree.inputs import stop_tokens
from stree.rule_fields import RULE_FIELDS, rules_of, tokenized_words
from stree.serving import reasoning
from stree.serving.answers import (
    Choice,
    Piece,
    acceptance,
    chat_logprobs,
    completion_logprobs,
    merged,
    unless_left,
    usage,
    whole_pieces,
)  # fmt: skip
from stree.serving.echo import Echoes, prompt_fields, prompt_top
from stree.serving.encoding import PromptEncoder
from stree.serving.engine import Engine
from stree.serving.errors import APIError, error_event
from stree.serving.grammars import grammar_of_request
from stree.serving.handle import QueueFull, RequestHandle
from stree.serving.metrics import Metrics
from stree.serving.protocol import (
    ChatRequest,
    CompletionRequest,
    DemoRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)  # fmt: skip
from stree.serving.reasoning import ReasoningReader
from stree.serving.tool_answers import ToolAnswer
from stree.tool_calls import tool_format

__all__ = ["OpenAIAPI", "event"]


class OpenAIAPI:
    """Turns requests of the API into requests of the engine, and their tokens into answers.

    Args:
        engine: decodes.
        tokenizer: of the target.
        model: its name.
        has_metrics: whether answers have ``metrics``.
        replica: the label ``engine`` of the metrics.

    Attributes:
        token_bytes: of the tokenizer.
    """

    def __init__(
        self, engine: Engine, tokenizer: Any, model: str, *, has_metrics: bool = False, replica: str = "0"
    ) -> None:
        self._engine, self._tokenizer, self._model = engine, tokenizer, model
        self._has_metrics = has_metrics
        self._encoder = PromptEncoder(tokenizer, model, engine.max_length - 1)
        self.token_bytes, self.metrics = TokenBytes(tokenizer), Metrics(engine, model, replica)
        self._tool_format = tool_format(tokenizer.chat_template)
        # By the special tokens that a text shows.
        self._bytes_with: dict[tuple[str, ...], TokenBytes] = {(): self.token_bytes}
        self._special_tokens = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        self.card = {
            "id": model, "object": "model", "created": int(time.time()), "owned_by": "stree",
            "max_model_len": engine.max_length,
        }  # fmt: skip

    def check_model(self, name: str | None) -> None:
        """Refuse another model's name."""
        if name not in (None, self._model):
            message = f"the model {name!r} does not exist; this server has {self._model!r}"
            raise APIError(404, message, param="model", code="model_not_found")

    async def complete(self, body: CompletionRequest, request: Request) -> Any:
        """Answer POST /v1/completions."""
        await self._check(body)
        if not body.prompts:
            raise APIError(400, "prompt must hold at least one text or token list, got none", param="prompt")
        choices = await self._submit(body, body.prompts)
        head, echoes = self._head("cmpl", "text_completion"), Echoes(body, self.token_bytes)

        def part(piece: Piece, *, is_whole: bool) -> dict[str, Any]:
            if body.max_tokens == 0:  # one token was decoded
                piece = replace(piece, text="", logprobs=[], finish_reason=piece.finish_reason and "length")
            found = None if body.logprobs is None else completion_logprobs(piece, self.token_bytes)
            handle = choices[piece.index].handle
            text, found = echoes(piece, handle, found)
            own = prompt_fields(body, handle, self.token_bytes)
            return {"index": piece.index, "text": text, "logprobs": found, "finish_reason": piece.finish_reason, **own}

        return await self._answer(body, request, choices, head, head, part)

    async def chat(self, body: ChatRequest, request: Request, *, has_parts: bool = False) -> Any:
        """Answer POST /v1/chat/completions; with the ``parts`` of ``ToolAnswer`` if they are wanted."""
        await self._check(body)
        if body.tool_schemas and self._tool_format is None:
            raise APIError(400, f"tool calls of {self._model} have no known format", param="tools")
        prompt, num_shared = await self._encoder.shared_chat(body.messages, body.template_options)
        choices = await self._submit(body, [prompt], num_shared=num_shared)
        calling = [self._calling(body, has_parts) for _ in choices]
        thinking = [self._thinking(body, prompt) for _ in choices]
        whole, chunk = (self._head("chatcmpl", f"chat.completion{end}") for end in ("", ".chunk"))
        chunk["id"] = whole["id"]
        begun = set[int]()

        def part(piece: Piece, *, is_whole: bool) -> dict[str, Any]:
            found = chat_logprobs(piece, self.token_bytes) if body.logprobs else None
            text, finish_reason, thought = piece.text, piece.finish_reason, ""
            if (reader := thinking[piece.index]) is not None:
                thought, text = reader.push(text, is_last=finish_reason is not None)
            content: dict[str, Any] = {"content": text}
            if (answer := calling[piece.index]) is not None:
                content, finish_reason = answer.push(text, finish_reason, is_whole=is_whole)
            if thought or (is_whole and reader is not None):
                content["reasoning_content"] = thought or None
            if is_whole or piece.index not in begun:
                begun.add(piece.index)
                content = {"role": "assistant", **content, **({"refusal": None} if is_whole else {})}
            return {
                "index": piece.index, "message" if is_whole else "delta": content, "logprobs": found,
                "finish_reason": finish_reason,
            }  # fmt: skip

        answer = await self._answer(body, request, choices, whole, chunk, part)
        return answer if body.stream else answer | prompt_fields(body, choices[0].handle, self.token_bytes)

    def _calling(self, body: ChatRequest, has_parts: bool) -> ToolAnswer | None:
        """Return what finds the calls in an answer, where it may have some."""
        if self._tool_format is None or not body.tool_schemas:
            return None
        return ToolAnswer(self._tool_format, body.tool_schemas, is_one=body.has_one_call, has_parts=has_parts)

    def _thinking(self, body: ChatRequest, prompt: list[int]) -> ReasoningReader | None:
        """Return what finds the reasoning in an answer, where it is wanted; a grammar is one of the whole answer."""
        if not body.separate_reasoning:
            return None
        has_grammar = body.has_forced_call or grammar_of(dict(body)) is not None
        return ReasoningReader(is_open=not has_grammar and self._encoder.ends_with(prompt, reasoning.BEGIN))

    def _shown(self, body: GenerationRequest) -> tuple[str, ...]:
        """Return the markers that must be in the text, special tokens or not, for its parts to be found."""
        if not isinstance(body, ChatRequest):
            return ()
        form = self._tool_format if body.tool_schemas else None
        calls = () if form is None else (form.begin, form.end or "")
        return calls + ((reasoning.BEGIN, reasoning.END) if body.separate_reasoning else ())

    async def tokenize(self, body: TokenizeRequest) -> dict[str, Any]:
        """Answer POST /tokenize, as vLLM does."""
        await self._check(body)
        found = await self._encoder.tokenize(body)
        return {"count": len(found["tokens"]), "max_model_len": self._engine.max_length, **found}

    async def detokenize(self, body: DetokenizeRequest) -> dict[str, str]:
        """Answer POST /detokenize."""
        self.check_model(body.model)
        return {"prompt": await self._encoder.detokenize(body.tokens)}

    async def submit_demo(self, body: DemoRequest) -> Choice:
        """Submit a text whose steps have their trees, and whose prompt runs whole, so that its time is comparable."""
        request = CompletionRequest(model=self._model, **body.model_dump())
        return (await self._submit(request, [body.prompt], trees=True, cache=False))[0]

    async def _check(self, body: GenerationRequest | TokenizeRequest) -> None:
        self.check_model(body.model)
        await asyncio.to_thread(body.check)  # of megabytes of logit_bias it takes 0.2 s

    def _head(self, kind: str, name: str) -> dict[str, Any]:
        return {
            "id": f"{kind}-{secrets.token_hex(12)}", "object": name, "created": int(time.time()), "model": self._model,
        }  # fmt: skip

    async def _submit(
        self, body: GenerationRequest, prompts: Sequence[str | list[int]], **options: Any
    ) -> list[Choice]:
        """Submit all texts of a request, or none; a prompt is tokenised when those before it are in the queue."""
        choices: list[Choice] = []
        count, queue = len(prompts) * (body.n or 1), self._engine.max_queue
        if queue is not None and count > (most := self._engine.max_batch + queue):
            param = "prompt" if body.n in (None, 1) else "n"
            raise APIError(400, f"{count} texts of one request, where at most {most} run and wait", param=param)
        shown = self._shown(body)
        if shown not in self._bytes_with:
            self._bytes_with[shown] = TokenBytes(self._tokenizer, shown)
        grammar = await asyncio.to_thread(grammar_of_request, body, self._tool_format, self._special_tokens)
        options = {**options, "grammar": grammar}
        seed = secrets.randbits(63) if body.seed is None else body.seed
        try:
            for each in prompts:
                prompt = await self._encoder.text(each) if isinstance(each, str) else each
                for number in range(body.n or 1):
                    handle = await asyncio.to_thread(self._submit_one, body, prompt, seed + number, options)
                    text = IncrementalText(self._bytes_with[shown], prompt, body.stops)
                    choices.append(Choice(len(choices), handle, text))
        except BaseException:
            for choice in choices:
                choice.handle.cancel()
            raise
        return choices

    def _submit_one(self, body: Any, prompt: list[int], seed: int, options: dict[str, Any]) -> RequestHandle:
        most = self._engine.max_length
        if not prompt:
            raise APIError(400, "the prompt is empty; give at least one token", param="prompt")
        if len(prompt) >= most:
            message = f"the prompt has {len(prompt)} tokens, of at most {most - 1}"
            raise APIError(400, message, param="prompt", code="context_length_exceeded")
        limit = most - len(prompt) if body.limit is None else body.limit
        if len(prompt) + limit > most:
            message = f"{len(prompt)} tokens of the prompt and {limit} new ones are more than {most}"
            raise APIError(400, message, param=body.limit_field, code="context_length_exceeded")
        rules = rules_of(dict(body))
        if "bad_words" in rules:
            rules["bad_words"] = tokenized_words(rules["bad_words"], self._tokenizer)
        ends = [] if body.ignore_eos else stop_tokens(self._engine.lm, self._tokenizer)
        try:
            return self._engine.submit(
                prompt, sampling=body.sampling, max_new_tokens=limit,
                stop_token_ids={*ends, *(body.stop_token_ids or ())}, stop_strings=body.stops,
                tokenizer=self.token_bytes, logprobs=body.top_logprobs_wanted, seed=seed,
                budget=body.budget, prompt_logprobs=prompt_top(body), **options, **rules,
            )  # fmt: skip
        except QueueFull as error:
            raise APIError(429, str(error), headers={"Retry-After": "1"}) from error
        except (ValueError, TypeError) as error:
            param = next((name for name in ("budget", *RULE_FIELDS) if str(error).startswith(name)), "prompt")
            if str(error).startswith("grammar"):
                named = (name for name in GRAMMAR_FIELDS if getattr(body, name) is not None)
                param = next(named, "tool_choice")
            raise APIError(400, str(error), param=param) from error
        except RuntimeError as error:
            raise APIError(503, str(error)) from error

    async def _answer(
        self, body: GenerationRequest, request: Request, choices: list[Choice], whole: dict[str, Any],
        chunk: dict[str, Any], part: Callable[..., dict[str, Any]],
    ) -> Any:  # fmt: skip
        """Stream the answer, or wait for all of it; a client that leaves cancels it."""
        request.state.handles = [choice.handle for choice in choices]  # for the log
        num_prompt_tokens = sum(len(choice.handle.prompt) for choice in choices[:: body.n or 1])
        if body.stream:
            events = self._events(body, choices, chunk, part, num_prompt_tokens)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        try:
            pieces = await unless_left(request, whole_pieces(choices))
        finally:
            self._end(choices)
        parts = [part(piece, is_whole=True) for piece in pieces]
        return {**whole, "choices": parts, **self._sums(choices, num_prompt_tokens)}

    def _sums(self, choices: Sequence[Choice], num_prompt_tokens: int) -> dict[str, Any]:
        """Return the fields about a whole answer."""
        metrics = {"metrics": {"speculative_decoding": acceptance(choices)}} if self._has_metrics else {}
        return {"usage": usage(choices, num_prompt_tokens), **metrics}

    async def _events(
        self, body: GenerationRequest, choices: list[Choice], chunk: dict[str, Any],
        part: Callable[..., dict[str, Any]], num_prompt_tokens: int,
    ) -> AsyncIterator[str]:  # fmt: skip
        extra: dict[str, Any] = {"usage": None} if body.includes_usage else {}
        counts_all = body.includes_usage and getattr(body.stream_options, "continuous_usage_stats", None)
        try:
            async for piece in merged(choices):
                if piece.text or piece.logprobs or piece.finish_reason:
                    extra |= {"usage": usage(choices, num_prompt_tokens)} if counts_all else {}
                    yield event({**chunk, "choices": [part(piece, is_whole=False)], **extra})
            if body.includes_usage:
                yield event({**chunk, "choices": [], **self._sums(choices, num_prompt_tokens)})
            yield "data: [DONE]\n\n"
        except APIError as error:
            yield error_event(error)
        finally:
            self._end(choices)

    def _end(self, choices: Sequence[Choice]) -> None:
        for choice in choices:
            choice.handle.cancel()  # nothing, where it has ended


def event(data: Any) -> str:
    """Write a server-sent event."""
    return f"data: {json.dumps(data)}\n\n"
