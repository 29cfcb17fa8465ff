"""Options of a command from a YAML file and from the environment, as defaults that the command line overrides."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["PREFIX", "add_config", "take_settings"]

PREFIX = "STREE_"  # before an option's name in capitals, as in STREE_MAX_BATCH
SWITCHES = {"true": True, "1": True, "false": False, "0": False}


def add_config(command: argparse.ArgumentParser) -> None:
    """Add ``--config``; the command's options are then read by ``take_settings``."""
    command.add_argument(
        "--config", type=Path, help=f"YAML of options by name; {PREFIX}* of the environment and the command line win"
    )


def take_settings(command: argparse.ArgumentParser, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Make the values of a file and of the environment the defaults of a command's options.

    Args:
        command: with ``--config``.
        arguments: of the command line, of which only ``--config`` is read.
        environment: whose variables of other names are not looked at.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no YAML of names and values, names no option, or a value is not one of a switch or choice.
    """
    options = {action.dest: action for action in command._actions if action.dest not in ("help", "config")}
    first = argparse.ArgumentParser(command.prog, add_help=False)
    add_config(first)
    path = first.parse_known_args(arguments)[0].config or environment.get(f"{PREFIX}CONFIG")
    given = {} if not path else _read(Path(path), options)
    given |= {name: environment[variable] for name in options if (variable := f"{PREFIX}{name.upper()}") in environment}
    command.set_defaults(**{name: _checked(options[name], value) for name, value in given.items()})


def _read(path: Path, options: Mapping[str, argparse.Action]) -> dict[str, Any]:
    """Read a file of options."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        found, node = yaml.safe_load(text) or {}, yaml.compose(text, yaml.SafeLoader)
    except OSError as error:
        raise OSError(f"--config: cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config: {path} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        raise ValueError(f"--config: {path} must hold names of options and their values, got {type(found).__name__}")
    named = {str(name).replace("-", "_"): value for name, value in found.items()}
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    written = [str(key.value).replace("-", "_") for key, _ in pairs]
    if twice := [name for name in named if written.count(name) > 1]:
        raise ValueError(f"--config: {path} names an option twice: {', '.join(twice)}")
    if unknown := sorted(named.keys() - options.keys()):
        raise ValueError(f"--config: {path} names no options of this command: {', '.join(unknown)}")
    return {name: value for name, value in named.items() if value is not None}  # null is the option's own default


def _checked(option: argparse.Action, value: Any) -> Any:
    """Return a value as a default; argparse converts a string as if the command line had it."""
    name, text = option.dest.replace("_", "-"), str(value)
    if option.nargs == 0:
        if text.lower() not in SWITCHES:
            raise ValueError(f"{name} must be true or false, got {text!r}")
        return SWITCHES[text.lower()]
    if isinstance(value, dict | list):
        raise ValueError(f"{name} must be one value, got {text}")
    if option.choices is not None and text not in option.choices:
        raise ValueError(f"{name} must be one of {', '.join(option.choices)}, got {text!r}")
    return text
