"""A server that listens, and requests in OpenAI's format that it and batch files must read alike."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import uvicorn

import stree
from stree.serving.app import create_app

PROMPT = "Question: Tom has 3 apples. He gets 2 more"
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
KEY = "a secret"


@dataclass
class Served:
    """A server that listens."""

    url: str
    engine: Any  # or what has its target only
    app: Any
    tokenizer: Any

    @property
    def client(self) -> openai.OpenAI:
        """The official client, which refuses answers that do not fit OpenAI's schema."""
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=KEY, _strict_response_validation=True, max_retries=0
        )  # fmt: skip

    @property
    def lenient(self) -> openai.OpenAI:
        """The same without that check: OpenAI's schema of text completions has no chunk before the last one."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """Send JSON, or bytes as they are, with the key unless headers are given."""
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json", **options.pop("headers", {})}
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx.post(self.url + path, content=content, headers=headers, timeout=60, **options)

    def alone(self, prompt: str, **options: Any) -> str:
        """The text that generate gives."""
        ids = self.tokenizer(prompt)["input_ids"]
        text = stree.generate(self.engine.lm, [ids], stree.drafters.NoDrafter(), **options).sequences[0]
        whole: str = self.tokenizer.decode(text, skip_special_tokens=True)
        return whole[len(self.tokenizer.decode(ids)) :]


@contextmanager
def listening(engine: stree.Engine, tokenizer: Any, **options: Any) -> Iterator[Served]:
    """Serve an engine on a free port, under the name "tiny"; ``options`` are those of ``create_app``."""
    app = create_app(engine, tokenizer, "tiny", **{"api_key": KEY, "max_body": 20_000, **options})
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield Served(f"http://127.0.0.1:{port}", engine, app, tokenizer)
    server.should_exit = True
    thread.join()


# Fields that change no text, and values of others that ask for nothing.
NEUTRAL: list[tuple[str, Any]] = [
    ("user", "me"), ("metadata", {"run": "7"}), ("store", True), ("service_tier", "flex"), ("safety_identifier", "a"),
    ("prompt_cache_key", "k"), ("prompt_cache_retention", "24h"), ("prediction", {"type": "content", "content": "x"}),
    ("presence_penalty", 0), ("frequency_penalty", 0.0), ("repetition_penalty", 1.0), ("logit_bias", {}), ("n", 1),
    ("best_of", 1), ("echo", False), ("suffix", ""), ("response_format", {"type": "text"}), ("tools", []),
    ("tool_choice", "none"), ("tool_choice", "auto"), ("parallel_tool_calls", True), ("parallel_tool_calls", False),
    ("stop", ""), ("stop", []), ("stop", None), ("stop", [""]), ("top_k", -1), ("top_k", 0), ("min_p", 0),
    ("seed", None), ("tools", None), ("no_such_field", None), ("stream", False), ("logprobs", None),
    ("ignore_eos", False), ("stop_token_ids", []), ("include_stop_str_in_output", False), ("min_tokens", 0),
    ("add_generation_prompt", True), ("continue_final_message", False), ("skip_special_tokens", True),
    ("chat_template_kwargs", {}), ("priority", 0),
]  # fmt: skip
# What asks for another text or answer, and part of the message.
REFUSED: list[tuple[str, Any, str]] = [
    ("presence_penalty", 2.5, "presence_penalty must be in [-2, 2], got 2.5"),
    ("logit_bias", {"5": 101}, "logit_bias must be in [-100, 100], got 101 for token 5"),
    ("logit_bias", {"a": 1}, "logit_bias must have token ids as keys, got 'a'"),
    ("repetition_penalty", 0, "repetition_penalty must be above 0, got 0"), ("bad_words", [""], "no empty string"),
    ("allowed_token_ids", [], "allowed_token_ids must be a list of at least one token id, got []"),
    ("best_of", 2, "best_of"), ("suffix", "end", "suffix"), ("tools", [{}], "tools"),
    ("tool_choice", "required", "tool_choice"), ("response_format", {"type": "xml"}, "response_format"),
    ("min_tokens", -1, "min_tokens must be an integer of at least 0, got -1"),
    ("include_stop_str_in_output", True, "include_stop_str_in_output"),
    ("add_generation_prompt", False, "add_generation_prompt"), ("skip_special_tokens", False, "skip_special_tokens"),
    ("n", True, "n"), ("best_of", True, "best_of"), ("no_such_field", 0, "no_such_field is not known, got 0"),
    ("no_such_field", [], "no_such_field is not known"), ("stop", ["a"] * 17, "at most 16 strings, got 17"),
    ("stop", ["a", 3], "stop must be a string or a list of at most 16 strings"), ("stop", "\ud800", "no UTF-8 text"),
]  # fmt: skip

ARGUMENTS = {"city": "Oslo", "days": [1, 2]}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "name": "Ann", "content": [{"type": "text", "text": "Warm"}, {"type": "text", "text": " there?"}]},
    {
        "role": "assistant", "content": None, "reasoning_content": "Ask for it.", "refusal": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": json.dumps(ARGUMENTS)}},
            {"id": "c2", "type": "function", "function": {"name": "clock", "arguments": "{torn"}},
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "9 degrees"},
    {"role": "control", "content": "brief"},
]  # fmt: skip
# Writes every field; transformers leaves out those that are null.
TOOL_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}{% for key in ['name', 'tool_call_id', 'reasoning_content', 'refusal'] %}"
    "{% if key in m %} {{ key }} {{ m[key] }}{% endif %}{% endfor %}: {{ m.content or 'null' }}"
    "{% for call in m.tool_calls or [] %} {{ call.id }} {{ call.function.name }} "
    "{{ call.function.arguments | tojson }}{% endfor %}{{ '\\n' }}{% endfor %}assistant:"
)


def as_a_template_has_it() -> str:
    """Write the conversation as ``TOOL_TEMPLATE`` must."""
    calls = f"c1 weather {json.dumps(ARGUMENTS)} c2 clock {json.dumps('{torn')}"
    return (
        "user name Ann: Warm there?\n"
        f"assistant reasoning_content Ask for it.: null {calls}\n"
        "tool tool_call_id c1: 9 degrees\ncontrol: brief\nassistant:"
    )
