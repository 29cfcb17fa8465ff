"""Requests of OpenAI's API that the server reads, with vLLM's names for what OpenAI does not have."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from stree.grammar_fields import grammar_of
from stree.request_fields import (
    FieldError,
    UnsupportedField,
    chat_messages,
    check_fields,
    check_prompt,
    sampling_of,
    stop_strings,
    template_options,
)  # fmt: skip
from stree.rule_fields import rules_of
from stree.sampling import Sampling
from stree.serving.errors import APIError
from stree.serving.tools import NamedTool, Tool

__all__ = [
    "ChatRequest", "CompletionRequest", "DemoRequest", "DetokenizeRequest", "GenerationRequest", "TokenizeRequest",
]  # fmt: skip

Stops = Annotated[list[str], BeforeValidator(stop_strings, json_schema_input_type=str | list[str] | None)]
# Lists end at the first wrong item: an error for each of a million items would take seconds and a gigabyte.
Tokens = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
TokenLists = Annotated[list[Tokens], Field(fail_fast=True)]
StopTokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=64, fail_fast=True)]
Messages = Annotated[list[dict[str, Any]], BeforeValidator(chat_messages)]


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # changes no text


class GenerationRequest(BaseModel):
    """What completions and chats have in common."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    n: int | None = Field(default=None, ge=1, le=128)
    stop: Stops = []
    stop_token_ids: StopTokens | None = None
    ignore_eos: bool | None = None
    budget: int | None = Field(default=None, ge=1)
    logit_bias: dict[str, Any] | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    allowed_token_ids: Tokens | None = None
    bad_words: list[Any] | None = None
    min_tokens: int | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    prompt_logprobs: int | None = Field(default=None, ge=0, le=20)
    seed: int | None = Field(default=None, ge=-(1 << 63), lt=1 << 64)
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def sampling(self) -> Sampling:
        """How tokens are drawn; OpenAI's temperature is 1 by default."""
        is_greedy = self.temperature is not None and self.temperature < 1e-5
        return sampling_of({**dict(self), **({"temperature": 0.0} if is_greedy else {})}, Sampling(1.0))

    @property
    def limit(self) -> int | None:
        """Most new tokens, or None for what fits."""
        raise NotImplementedError

    @property
    def limit_field(self) -> str:
        """Field that has the limit."""
        return "max_tokens"

    @property
    def stops(self) -> list[str]:
        """Strings that end a text."""
        return self.stop

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check(self) -> None:
        """Refuse parameters that are not supported.

        Raises:
            APIError: it names the parameter.
        """
        try:
            check_fields(dict(self), type(self).model_fields)
            template_options(dict(self))
            grammar_of(dict(self))
            least = rules_of(dict(self)).get("min_new_tokens", 0)
            if self.limit is not None and least > self.limit:
                most = f"{self.limit_field} {self.limit}"
                raise FieldError("min_tokens", f"min_tokens must be at most {most}, got {least}")
        except FieldError as error:
            code = "unsupported_parameter" if isinstance(error, UnsupportedField) else None
            raise APIError(400, str(error), param=error.field, code=code) from error
        if self.prompt_logprobs is not None and self.stream:
            raise APIError(400, "prompt_logprobs are not in streams", param="prompt_logprobs")
        if self.stream_options is not None and not self.stream:
            raise APIError(400, "stream_options needs stream", param="stream_options")


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Annotated[str | Tokens | Texts | TokenLists, BeforeValidator(check_prompt)]
    max_tokens: int | None = Field(default=None, ge=0)
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=20)

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, texts or token lists."""
        prompt: Any = self.prompt
        is_one = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))
        return [prompt] if is_one else list(prompt)

    @property
    def limit(self) -> int | None:
        """Most new tokens; OpenAI's default is 16."""
        return 16 if self.max_tokens is None else self.max_tokens or 1

    def check(self) -> None:
        """Refuse an empty answer, too."""
        super().check()
        if self.max_tokens == 0 and not self.echo:
            raise APIError(400, "max_tokens must be at least 1 without echo, got 0", param="max_tokens")

    @property
    def top_logprobs_wanted(self) -> bool | int:
        """As ``logprobs`` of the engine."""
        return False if self.logprobs is None else self.logprobs


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Messages
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    separate_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    @property
    def tool_schemas(self) -> dict[str, dict[str, Any]]:
        """JSON schemas of the parameters, by the names of the tools that may be called."""
        tools = [] if self.tool_choice == "none" else self.tools or []
        if isinstance(self.tool_choice, NamedTool):
            tools = [tool for tool in tools if tool.function.name == self.tool_choice.function.name]
        return {tool.function.name: tool.function.parameters or {} for tool in tools}

    @property
    def has_forced_call(self) -> bool:
        """Whether the answer must be calls."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def has_one_call(self) -> bool:
        """Whether calls after the first are left out."""
        return self.parallel_tool_calls is False or isinstance(self.tool_choice, NamedTool)

    @property
    def template_options(self) -> dict[str, Any]:
        """What the chat template reads beside the messages."""
        tools = {"tools": [tool.given for tool in self.tools or []]} if self.tool_schemas else {}
        return {**template_options(dict(self)), **tools}

    @property
    def limit(self) -> int | None:
        """Most new tokens, or None for what fits."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def limit_field(self) -> str:
        """Field that has the limit; the newer one is read where both are there."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def top_logprobs_wanted(self) -> bool | int:
        """As ``logprobs`` of the engine."""
        return (self.top_logprobs or True) if self.logprobs else False

    def check(self) -> None:
        """Refuse what is not supported, too."""
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise APIError(400, "top_logprobs needs logprobs", param="top_logprobs")
        if not self.has_forced_call:
            return
        if not self.tools:
            raise APIError(400, "tool_choice needs tools, got none", param="tool_choice")
        if not self.tool_schemas:
            raise APIError(400, "tool_choice must be one of tools", param="tool_choice")
        if (asked := grammar_of(dict(self))) is not None:
            message = f"tool_choice and {asked[0]} must not both ask for a grammar; take one of them"
            raise APIError(400, message, param=asked[0])


class TokenizeRequest(BaseModel):
    """POST /tokenize: a prompt, or messages of a chat."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False

    def check(self) -> None:
        """Refuse neither and both."""
        if (self.prompt is None) == (self.messages is None):
            which = "neither" if self.prompt is None else "both"
            raise APIError(400, f"give a prompt or messages, got {which}", param="prompt")
        try:
            template_options(dict(self))
        except FieldError as error:
            raise APIError(400, str(error), param=error.field) from error


class DetokenizeRequest(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = None
    tokens: Tokens


class DemoRequest(BaseModel):
    """POST /demo/stream, of the page at /."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    prompt: str = Field(min_length=1)
    max_tokens: int = Field(128, ge=1)
    temperature: float = Field(0.0, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    seed: int = Field(0, ge=-(1 << 63), lt=1 << 64)
    budget: int | None = Field(default=None, ge=1)
