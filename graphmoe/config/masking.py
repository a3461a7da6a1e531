"""Masking of host.env and ${oc.env:NAME} values in files and messages."""

import dataclasses
import hashlib
import os
import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.resolvers import oc

from graphmoe.config.schema import RunConfig

MASK = "***"
_WHOLE = re.compile(r"\$\{oc\.env:[^,${}]*\}")
_OTHER_CALL = re.compile(r"\$\{(?!oc\.)[^${}]*:[^${}]*\}")
_ROUNDS = 2_000
_GIVEN = r"([+~]*host(?:\.env[^=]*|(?==\s*\{.*env)))="  # an override of host.env in any form

_LEAF = re.compile(r"[^\s\[\]{},:'\"=]++(?!\s*:)")  # texts in an override, but names of a dictionary

_written: dict[str, tuple[Any, Any]] = {}
_read: set[str] = set()  # values of ${oc.env:NAME}
_secrets: set[str] = set()  # forms of what no message shows; kept, as a process may compose several runs
# names of variables whose short values and numbers are secrets too; TOKENS counts, TOKENIZERS_... switches
_OF_SECRETS = re.compile("KEY|TOKEN(?![IS])|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)
_NUMBER = re.compile(r"[-+]?[\d.]+(e[-+]?\d+)?")
_SHORTEST, _SHORTEST_NAMED = 8, 6  # characters


def note_interpolations(cfg: DictConfig) -> None:
    """Record values from ${oc.env:...} and their source for `to_plain`. *Raises* OmegaConfBaseException."""
    _written.clear()
    _read.clear()
    present, environment = dict(os.environ), OmegaConf.select(cfg, "host.env")
    for name, value in environment.items() if isinstance(environment, DictConfig) else ():
        _note_secret(str(name), str(value))
        _note_secret(str(name), present.get(str(name), ""))  # of a worker, which reads *** as the value
    if "oc.env" not in str(OmegaConf.to_container(cfg)):
        return
    used: list[str] = []

    def read(key: str, *default: str | None) -> str | None:
        used.append(key)
        if key in os.environ:
            _read.add(os.environ[key])
        return oc.env(key, *default)

    OmegaConf.register_new_resolver("oc.env", read, replace=True)
    try:
        _note(cfg, "", used)
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def to_plain(config: RunConfig) -> dict[str, Any]:
    """Return plain values for ``resolved.yaml``: host.env masked, ${oc.env:...} kept, enums by name."""
    found = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    assert isinstance(found, dict)
    plain = {str(key): value for key, value in found.items()}
    environment = plain["host"]["env"]
    for name in environment:
        environment[name] = MASK
    for key, (text, _) in _written.items():
        is_secret = key.startswith("host.env.") and not _WHOLE.fullmatch(text)
        if not is_secret and (place := _place(plain, key)) is not None:
            place[key.rpartition(".")[2]] = text
    return plain


def prints() -> dict[str, str]:
    """Return a salted hash of each interpolated value, by key."""
    salt = os.urandom(8).hex()
    values = {key: value for key, (_, value) in _written.items() if not key.startswith("host.env.")}
    return {key: f"{salt}:{_hash(salt, value)}" for key, value in values.items()}


def aligned(theirs: dict[str, Any], ours: dict[str, Any], prints: dict[str, Any]) -> dict[str, Any]:
    """Write another run's masked values as ours if they are equal, in place; ``prints``: their hashes."""
    for key in {**_written, **prints}:
        their_place, our_place = _place(theirs, key), _place(ours, key)
        name = key.rpartition(".")[2]
        if their_place is None or our_place is None:
            continue
        text, value = _written.get(key, (our_place[name], our_place[name]))
        salt, _, digest = str(prints.get(key, "")).partition(":")
        if digest:
            is_same = digest == _hash(salt, value)
        else:
            is_same = their_place[name] == text or str(their_place[name]) == str(value)
        if is_same:
            their_place[name] = our_place[name]
        elif their_place[name] == our_place[name]:
            their_place[name] = f"{text} (another value)"
    return theirs


def masked_overrides(words: Sequence[str]) -> list[str]:
    masked = [re.sub(rf"^(--)?{_GIVEN}.*", rf"\1\2={MASK}", word, flags=re.DOTALL) for word in words]
    for place, word in enumerate(words[:-1]):
        if re.fullmatch(r"--host\.env[^=]*", word):  # the value is the next word
            masked[place + 1] = MASK
    return masked


def masked(text: str) -> str:
    """Mask in a message the values that SECURITY.md lists, of every configuration of this process."""
    for secret in sorted(_secrets, key=len, reverse=True):
        text = text.replace(secret, MASK)
    return text


def hidden(message: str, words: Sequence[str] = ()) -> str:
    """Mask in an error message what was read from the environment, and host.env of the command line."""
    given = [found for word in words if (found := re.match(rf"(?:--)?{_GIVEN}(.*)", word, re.DOTALL))]
    secrets = _read | {leaf for found in given if "host.env" in message for leaf in _LEAF.findall(found[2])}
    for secret in sorted(secrets - {""}, key=len, reverse=True):
        edge = r"\b" if len(secret) < 4 else ""  # a short one is part of other words too
        message = re.sub(rf"{edge}{re.escape(secret)}{edge}", MASK, message)
    return masked(message)


def masked_line(text: str) -> str:
    sections = "|".join([field.name for field in dataclasses.fields(RunConfig)])
    quoted = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
    end = rf" [+~]*(?:{sections}|hydra)[.=/@]|$"
    return re.sub(rf"\b{_GIVEN}(?:{quoted}|.*?)(?={end})", rf"\1={MASK}", text, flags=re.DOTALL)


def _note_secret(name: str, value: str) -> None:
    is_named = bool(_OF_SECRETS.search(name))
    is_ordinary = not is_named and (_NUMBER.fullmatch(value) or os.path.exists(value))
    if len(value) >= (_SHORTEST_NAMED if is_named else _SHORTEST) and not is_ordinary:
        _secrets.update((value, repr(value)[1:-1], quote(value, safe="", errors="replace")))


def _place(plain: dict[str, Any], key: str) -> dict[str, Any] | None:
    place: Any = plain
    *path, name = key.split(".")
    for part in path:
        place = place.get(part) if isinstance(place, dict) else None
    return place if isinstance(place, dict) and name in place else None


def _hash(salt: str, value: Any) -> str:
    return hashlib.pbkdf2_hmac("sha256", str(value).encode(), salt.encode(), _ROUNDS).hex()[:32]


def _note(node: DictConfig, prefix: str, used: list[str]) -> None:
    for name in map(str, node):
        key = f"{prefix}{name}"
        value = node[name] if not node._is_none() else None
        if isinstance(value, DictConfig):
            _note(value, f"{key}.", used)
            continue
        used.clear()
        value, raw = (_items(node, name, resolve) for resolve in (True, False))
        if used:
            _written[key] = raw, value
            for variable in used:
                if key != "run.name" or _OF_SECRETS.search(variable):  # which names the run's folder
                    _note_secret(variable, os.environ.get(variable, ""))


def _items(node: DictConfig, name: Any, resolve: bool) -> Any:
    raw = OmegaConf.to_container(OmegaConf.masked_copy(node, [name]), resolve=False)[name]  # type: ignore[index]
    if not resolve:
        return [_kept(item) for item in raw] if isinstance(raw, list) else _kept(raw)
    value = node[name]
    return list(value) if isinstance(value, ListConfig) else value


def _kept(raw: Any) -> Any:
    if not isinstance(raw, str):
        return raw
    return _OTHER_CALL.sub(lambda call: str(OmegaConf.create({"value": call[0]}).value), raw)
