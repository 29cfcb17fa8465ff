"""Prompts in answers of /v1/completions: their text, and the log probabilities of their tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stree.decode.logprobs import TokenLogprob
from stree.decode.stop_strings import TokenBytes
from stree.decode.text import IncrementalText
from stree.serving.answers import Piece, completion_logprobs
from stree.serving.document import token_name
from stree.serving.handle import RequestHandle
from stree.serving.protocol import CompletionRequest, GenerationRequest

__all__ = ["Echoes", "prompt_fields", "prompt_top"]


def prompt_top(body: GenerationRequest) -> int | None:
    """Return how many alternatives to each token of a prompt are wanted; None where no log probabilities are."""
    echoed = body.logprobs if isinstance(body, CompletionRequest) and body.echo else None
    return body.prompt_logprobs if echoed is None else max(echoed, body.prompt_logprobs or 0)


def prompt_fields(body: GenerationRequest, handle: RequestHandle, token_bytes: TokenBytes) -> dict[str, Any]:
    """Return ``prompt_logprobs`` as vLLM writes them, if wanted: null for the first token, then tokens by number."""
    if body.prompt_logprobs is None:
        return {}
    fields: list[dict[str, Any] | None] = [None]
    for one, rank in handle.prompt_logprobs:
        top = [(token, value, place) for place, (token, value) in enumerate(one.top[: body.prompt_logprobs], 1)]
        entries = [(one.token, one.logprob, rank), *(entry for entry in top if entry[0] != one.token)]
        fields.append({
            f"{token}": {"logprob": value, "rank": place, "decoded_token": token_bytes.tokenizer.decode([token])}
            for token, value, place in entries
        })  # fmt: skip
    return {"prompt_logprobs": fields}


class Echoes:
    """Puts the prompts of a request in front of its texts, where it wants that.

    Args:
        body: the request.
        token_bytes: of the tokenizer.
    """

    def __init__(self, body: CompletionRequest, token_bytes: TokenBytes) -> None:
        self._body, self._token_bytes, self._echoes = body, token_bytes, dict[int, Echo]()

    def __call__(
        self, piece: Piece, handle: RequestHandle, logprobs: dict[str, Any] | None
    ) -> tuple[str, dict[str, Any] | None]:
        """Return text and log probabilities of a piece, in the first of a choice behind those of the prompt."""
        if not self._body.echo:
            return piece.text, logprobs
        if is_first := piece.index not in self._echoes:
            top, found = self._body.logprobs, None
            if top is not None:
                found = [one._replace(top=one.top[:top]) for one, _ in handle.prompt_logprobs]
            self._echoes[piece.index] = Echo(self._token_bytes, handle.prompt, found)
        echo = self._echoes[piece.index]
        moved = None if logprobs is None else echo.moved(logprobs, is_first=is_first)
        return (echo.text if is_first else "") + piece.text, moved


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
