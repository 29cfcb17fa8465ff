"""``stree serve``: an HTTP server with OpenAI's API."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import ssl
from pathlib import Path
from typing import Any

from stree.cli.compiling import advice
from stree.cli.generate import drafting_options, prepare
from stree.cli.importing import without_collection
from stree.cli.options import add_command, add_device, add_drafting, add_import, add_launching
from stree.cli.settings import add_config

__all__ = ["add_serve"]

NEEDED = ("fastapi", "uvicorn", "prometheus_client")
UVICORN = ("root_path", "ssl_certfile", "ssl_keyfile", "forwarded_allow_ips")  # options that are passed on
LAST_STEP_S = 10.0  # that the step which runs has to end when the server stops


def add_serve(commands: Any) -> None:
    """Register the command with an argparse subparsers object."""
    text = "serve a target by OpenAI's API; requests of different kinds share a batch"
    command = add_command(commands, "serve", _serve, text)
    command.add_argument("target", nargs="?", default="bundled", metavar="MODEL", help="'bundled', a folder, or hub id")
    command.add_argument("--tokenizer", default=None, help="a folder or hub id, where the target's own has none")
    command.add_argument("--name", default=None, help="the model's name in requests; MODEL by default")
    add_drafting(command, default_budget="auto")
    add_import(command)
    command.add_argument("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0 for all of the machine's")
    command.add_argument("--port", type=int, default=8000, help="port to listen at")
    command.add_argument("--uds", type=Path, help="Unix socket to listen at, instead of host and port")
    command.add_argument("--root-path", default="", help="prefix that a proxy cuts off the paths of requests")
    command.add_argument("--ssl-certfile", type=Path, help="PEM file of the certificate: then https")
    command.add_argument("--ssl-keyfile", type=Path, help="PEM file of its key, where the certificate's has none")
    command.add_argument(
        "--forwarded-allow-ips",
        default="127.0.0.1",
        metavar="ADDRESSES",
        help="proxies whose X-Forwarded-For and -Proto headers are believed, with commas; * for all",
    )
    command.add_argument(
        "--allowed-origins", default="", help="pages of other sites that browsers let ask, with commas; * for all"
    )
    command.add_argument(
        "--per-request-spec-decode-metrics",
        choices=("none", "summary"),
        default="none",
        help="put counts of accepted nodes into the responses",
    )
    command.add_argument("--log-format", choices=("text", "json"), default="text", help="of lines on standard error")
    command.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info", help="info has a line a request"
    )
    command.add_argument("--max-batch", type=int, default=8, help="most requests that run at once")
    command.add_argument("--max-length", type=int, default=4096, help="most tokens of a prompt and its new ones")
    command.add_argument("--max-queue", type=int, default=256, help="most requests that wait, 0 for none; more get 429")
    command.add_argument("--max-body-mb", type=float, default=8, help="most megabytes of a request")
    command.add_argument(
        "--cache-mb", type=float, default=512, help="of states of earlier texts, which later ones continue"
    )
    command.add_argument(
        "--prefill-chunk", type=int, help="most tokens of a prompt between two steps (512; on CUDA what fits)"
    )
    command.add_argument("--grace", type=float, default=30, help="seconds that running requests have after SIGTERM")
    command.add_argument(
        "--api-key-env", default=None, metavar="NAME", help="environment variable that holds the API key"
    )
    command.add_argument("--trust-remote-code", action="store_true", help="execute the checkpoints' own code")
    add_device(command)
    add_launching(command)
    add_config(command)


def _serve(arguments: argparse.Namespace) -> int:
    """Run ``stree serve``."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"stree serve needs {', '.join(missing)}: pip install 'stree[serve]'")
    engine_options, api_key = _checked(arguments)

    from stree.cli.threads import FreeCores

    cores = FreeCores()
    tokenizer, load = prepare(arguments)

    with without_collection():
        from stree.serving import Engine, in_own_thread
        from stree.serving.app import create_app
        from stree.serving.first_requests import run_first_requests
        from stree.serving.logs import configure
        from stree.serving.server import bind, bind_path, serve
        from stree.warming import ALL_BATCHES, compile_steps

    def start() -> Engine:
        lm, drafter = load()
        if line := advice(lm):
            logging.getLogger("stree").info(line)
        drafting = {name: engine_options[name] for name in ("growth", "budget", "verifier")}
        compile_steps(lm, drafter, batches=ALL_BATCHES, **drafting)  # so that the first request need not wait
        cores.fit(lm.model.parameters())
        before_step = cores.adapt if lm.device.type == "cpu" else None
        engine = Engine(lm, drafter, before_step=before_step, **engine_options)
        run_first_requests(engine)
        if before_step:
            logging.getLogger("stree").info("torch runs on %d thread(s)", engine.totals.num_threads)
        return engine

    binding = bind(arguments.host, arguments.port) if arguments.uds is None else bind_path(arguments.uds)
    with binding as listener:  # a mistake there is named before the model is loaded
        configure(arguments.log_format, arguments.log_level)
        engine = in_own_thread(start)
        try:
            name = arguments.name or arguments.target
            app = create_app(
                engine, tokenizer, name, api_key=api_key, max_body=int(arguments.max_body_mb * 1e6),
                has_metrics=arguments.per_request_spec_decode_metrics != "none",
                allowed_origins=[origin for origin in arguments.allowed_origins.split(",") if origin],
            )  # fmt: skip
            said = f"stree serves {name} at {_address(arguments)}{'' if api_key else ', without a key'}"
            serve(
                app, listener, grace=arguments.grace, on_start=lambda: logging.getLogger("stree").info(said),
                **{name: getattr(arguments, name) for name in UVICORN},
            )  # fmt: skip
        finally:
            has_ended = engine.close(timeout=LAST_STEP_S)
    if not has_ended:  # Python's own end would crash under a thread that computes
        os._exit(0)
    return 0


def _address(arguments: argparse.Namespace) -> str:
    """Return where the server listens, as a URL."""
    if arguments.uds is not None:
        return f"unix:{arguments.uds}"
    host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
    scheme = "http" if arguments.ssl_certfile is None else "https"
    return f"{scheme}://{host}:{arguments.port}{arguments.root_path}"


def _checked(arguments: argparse.Namespace) -> tuple[dict[str, Any], str | None]:
    """Check the options before models are loaded; return those of the engine, and the key.

    Raises:
        ValueError: one outside its range, or no such variable.
    """
    from stree.checks import check_counts, check_sizes

    counts = {"--max-batch": "max_batch", "--max-length": "max_length", "--prefill-chunk": "prefill_chunk"}
    check_sizes(**{name: getattr(arguments, name) for name in counts.values()})
    check_counts(port=arguments.port, max_queue=arguments.max_queue + 1)
    if arguments.port > 65535:
        raise ValueError(f"--port must be at most 65535, got {arguments.port}")
    root = arguments.root_path
    if root and (not root.startswith("/") or root.endswith("/")):
        raise ValueError(f"--root-path must begin with / and not end with it, got {root!r}")
    for option in ("max_body_mb", "cache_mb", "grace"):
        value = getattr(arguments, option)
        if not 0 <= value < float("inf"):
            raise ValueError(f"--{option.replace('_', '-')} must be finite and not negative, got {value}")
    _check_certificate(arguments.ssl_certfile, arguments.ssl_keyfile)
    api_key = None if arguments.api_key_env is None else os.environ.get(arguments.api_key_env)
    if arguments.api_key_env is not None and not api_key:
        raise ValueError(f"--api-key-env: the environment has no {arguments.api_key_env}, or an empty one")
    options = {
        **drafting_options(arguments), "max_queue": arguments.max_queue, "cache_bytes": int(arguments.cache_mb * 1e6),
        **{name: getattr(arguments, name) for name in counts.values()},
    }  # fmt: skip
    return options, api_key


def _check_certificate(certificate: Path | None, key: Path | None) -> None:
    """Raise ValueError unless the files hold a certificate and its key, or none are given."""
    if certificate is None:
        if key is not None:
            raise ValueError("--ssl-keyfile needs --ssl-certfile")
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key)
    except OSError as error:
        files = certificate if key is None else f"{certificate} and {key}"
        raise ValueError(f"--ssl-certfile: {files} are no certificate and key: {error.strerror or error}") from error
