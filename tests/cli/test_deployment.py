"""The files of the page on deployment: their options, settings, probes and paths are those of the server.

Run: python -m pytest tests/cli/test_deployment.py
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from stree.cli.serve import add_serve
from stree.cli.settings import take_settings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/deployment.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)


def block(kind: str, part: str) -> str:
    """The block of code of a kind that holds a part."""
    (found,) = [str(text) for name, text in BLOCKS if name == kind and part in text]
    return found


def parsed(arguments: list[str], environment: dict[str, str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    add_serve(commands)
    take_settings(commands.choices["serve"], ["serve", *arguments], environment or {})
    return parser.parse_args(["serve", *arguments])


def test_the_container_starts_the_server() -> None:
    file = block("dockerfile", "FROM")
    lines = dict(line.split(" ", 1) for line in file.splitlines() if not line.startswith("RUN"))
    command = json.loads(lines["ENTRYPOINT"])
    environment = dict(setting.split("=") for setting in lines["ENV"].split())
    assert command[:2] == ["stree", "serve"] and parsed(command[2:], environment).host == "0.0.0.0"
    assert parsed([]).port == int(lines["EXPOSE"])
    (torch_version,) = re.findall(r"^torch==.*", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert f" {torch_version} --index-url " in file, "pip would replace another version by the CUDA build"
    (owned,) = re.findall(rf"install --directory --owner {lines['USER']} (.*)", file)
    assert owned.split() == [environment["HF_HOME"], environment["TORCHINDUCTOR_CACHE_DIR"]]


def test_the_unit_reads_the_settings(tmp_path: Path) -> None:
    unit = block("ini", "[Service]")
    settings = tmp_path / "stree.yaml"
    settings.write_text(block("yaml", "/etc/stree.yaml"))
    command = shlex.split(re.findall(r"ExecStart=(.*)", unit)[0].replace("/etc/stree.yaml", str(settings)))
    found = parsed(command[2:])
    assert (found.max_batch, found.api_key_env, found.log_format) == (16, "STREE_KEY", "json")
    assert int(re.findall(r"TimeoutStopSec=(\d+)", unit)[0]) >= found.grace + 12
    if shutil.which("systemd-analyze"):
        path = tmp_path / "stree.service"
        path.write_text(unit.replace("/opt/stree/bin/stree", shutil.which("true") or "").replace("User=stree\n", ""))
        checked = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True)
        assert str(path) not in checked.stderr, checked.stderr


def test_kubernetes_asks_paths_that_are_there_and_waits_for_the_drain() -> None:
    deployment: dict[str, Any] = yaml.safe_load(block("yaml", "kind: Deployment"))
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["enableServiceLinks"] is False, "STREE_PORT=tcp://10.0.0.1:8000 is no port to listen at"
    found = parsed(container["args"])
    assert container["ports"][0]["containerPort"] == found.port
    sleep_s = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] >= sleep_s + found.grace + 12
    paths = {container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    assert paths == {"/ready", "/health"}
    assert found.api_key_env in {variable["name"] for variable in container["env"]}


def test_the_proxy_passes_every_body_that_the_server_takes() -> None:
    (limit,) = re.findall(r"client_max_body_size (\d+)m;", block("nginx", "location"))
    assert int(limit) == parsed([]).max_body_mb


@pytest.mark.parametrize("option", sorted(set(re.findall(r"`(--[a-z-]+)", PAGE)) - {"--drafter", "--time"}))
def test_options_of_the_text_are_the_servers(option: str) -> None:
    assert option.removeprefix("--").replace("-", "_") in vars(parsed([]))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool to ask")
@pytest.mark.parametrize("page", ["deployment", "serving"])
def test_prometheus_takes_the_configurations_of_scrapes(page: str, tmp_path: Path) -> None:
    text = (ROOT / f"docs/{page}.md").read_text()
    (config,) = re.findall(r"```yaml\n(scrape_configs:.*?)```", text, re.DOTALL)
    (tmp_path / "prometheus.yml").write_text(config)
    subprocess.run(["promtool", "check", "config", tmp_path / "prometheus.yml"], check=True, capture_output=True)
