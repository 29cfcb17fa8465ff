"""Requests of OpenAI's API that the server reads, with vLLM's names for what OpenAI does not have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from stree.sampling import Sampling
from stree.serving.errors import APIError

__all__ = ["ChatRequest", "CompletionRequest", "DemoRequest", "GenerationRequest"]

# Parameters that are not supported, and their values that ask for nothing; None is always one.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,), "logit_bias": ({},),
    "response_format": ({"type": "text"},), "best_of": (1,), "echo": (False,), "suffix": ("",), "tools": ([],),
    "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False), "modalities": (["text"],), "store": (False,), "metadata": ({},),
    "service_tier": ("auto", "default"), "use_beam_search": (False,), "length_penalty": (1,), "min_tokens": (0,),
    "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,),
}  # fmt: skip
ANY_VALUE = {"user", "safety_identifier", "prompt_cache_key"}  # name a caller, which changes no text

Stops = str | Annotated[list[str], Field(max_length=16)]


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None


class GenerationRequest(BaseModel):
    """What completions and chats have in common."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    n: int | None = Field(default=None, ge=1, le=128)
    stop: Stops | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = Field(default=None, max_length=64)
    ignore_eos: bool | None = None
    seed: int | None = Field(default=None, ge=-(1 << 63), lt=1 << 64)
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def sampling(self) -> Sampling:
        """How tokens are drawn; OpenAI's temperature is 1 by default."""
        temperature = 1.0 if self.temperature is None else self.temperature
        top_k = None if self.top_k in (None, -1, 0) else self.top_k
        return Sampling(0.0 if temperature < 1e-5 else temperature, top_k, self.top_p, self.min_p)

    @property
    def stops(self) -> list[str]:
        """Strings that end a text."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in stops if stop]

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check(self) -> None:
        """Refuse parameters that are not supported.

        Raises:
            APIError: it names the parameter.
        """
        for name, value in (self.model_extra or {}).items():
            if name in ANY_VALUE or value is None or any(_is_same(value, one) for one in NEUTRAL.get(name, ())):
                continue
            known = "is not supported" if name in NEUTRAL else "is not known"
            raise APIError(400, f"{name} {known}, got {str(value)[:60]!r}", param=name, code="unsupported_parameter")
        if self.stream_options is not None and not self.stream:
            raise APIError(400, "stream_options needs stream", param="stream_options")


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = Field(default=None, ge=1)
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
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def top_logprobs_wanted(self) -> bool | int:
        """As ``logprobs`` of the engine."""
        return False if self.logprobs is None else self.logprobs


class Message(BaseModel):
    """One message of a chat."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None

    def as_template_takes_it(self) -> Mapping[str, str]:
        """Return role and text.

        Raises:
            APIError: a part that is no text.
        """
        parts = self.content if isinstance(self.content, list) else [{"type": "text", "text": self.content or ""}]
        for part in parts:
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise APIError(400, "messages: content must be text", param="messages")
        return {"role": self.role, "content": "".join(part["text"] for part in parts)}


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)

    @property
    def limit(self) -> int | None:
        """Most new tokens, or None for what fits."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def top_logprobs_wanted(self) -> bool | int:
        """As ``logprobs`` of the engine."""
        return (self.top_logprobs or True) if self.logprobs else False

    def check(self) -> None:
        """Refuse what is not supported, too."""
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise APIError(400, "top_logprobs needs logprobs", param="top_logprobs")


class DemoRequest(BaseModel):
    """POST /demo/stream, of the page at /."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    prompt: str = Field(min_length=1)
    max_tokens: int = Field(128, ge=1)
    temperature: float = Field(0.0, ge=0, le=2)


def _is_same(value: Any, other: Any) -> bool:
    """Whether two JSON values are equal; true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
