"""Settings, and what is told when they are wrong or SGLang is another version. No server here."""

from __future__ import annotations

import re
import secrets
import traceback
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from leyline_sglang import compat, plugin
from leyline_sglang.config import Config, load_config

from leyline_agent.errors import LeylineError


def test_defaults_and_every_variable() -> None:
    assert load_config({"PATH": "/bin"}).enabled is True
    found = load_config({"LEYLINE_ENABLED": "0", "LEYLINE_TIMEOUT_S": "2.5", "LEYLINE_SECRET": "x" * 16})
    assert (found.enabled, found.timeout_s, found.secret) == (False, 2.5, "x" * 16)


def test_secrets_are_random_and_not_shown() -> None:
    first, second = load_config({}), load_config({})
    assert first.secret != second.secret
    assert first.secret not in repr(first)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LEYLINE_TIMEOUT_S", "soon"),
        ("LEYLINE_SECRET", "short"),
        ("LEYLINE_COLOR", "red"),
        ("LEYLINE_DIFF_BUDGET", "0"),
    ],
)
def test_a_wrong_setting_is_named_with_those_there_are(name: str, value: str) -> None:
    with pytest.raises(LeylineError, match=name) as caught:
        load_config({name: value})
    assert all("LEYLINE_" + field.upper() in str(caught.value) for field in Config.model_fields)


def test_a_wrong_value_is_quoted_unless_it_may_be_a_secret() -> None:
    with pytest.raises(LeylineError, match="got 'soon'"):
        load_config({"LEYLINE_TIMEOUT_S": "soon"})
    for name in ("LEYLINE_SECRET", "LEYLINE_PROXY_KEYS"):
        value = secrets.token_hex(4)
        with pytest.raises(LeylineError, match=name) as caught:
            load_config({name: value})
        assert value not in "".join(traceback.format_exception(caught.value))


def test_the_documented_settings_are_those_there_are() -> None:
    text = (Path(__file__).parents[2] / "docs/wire-protocol.md").read_text()
    documented = dict(re.findall(r"^\| `LEYLINE_([A-Z_]+)` \| (\S+) \|", text, re.M))
    config = load_config({})
    defaults = {name.upper(): getattr(config, name) for name in Config.model_fields} | {"SECRET": "random"}

    written = {name: value if isinstance(value, str) else str(int(value)) for name, value in defaults.items()}
    assert documented == written


def test_variables_of_the_rest_of_the_project_are_left_alone() -> None:
    root = Path(__file__).parents[2]
    texts = [
        path.read_text() for folder in ("leyline_agent", "evals", "tests") for path in (root / folder).rglob("*.py")
    ]
    assert len(texts) > 200
    named = {name for text in texts for name in re.findall(r"\bLEYLINE_[A-Z][A-Z_]*[A-Z]\b", text)}
    wrong_on_purpose = {"LEYLINE_COLOR", "LEYLINE_PROXY_KEYS"}
    others = named - wrong_on_purpose - {"LEYLINE_" + field.upper() for field in Config.model_fields}
    assert {"LEYLINE_CONVERSATION", "LEYLINE_MINI_NIGHTMARE", "LEYLINE_PROXY_KEY"} <= others

    load_config(dict.fromkeys(others, "x"))


@pytest.mark.parametrize("what", ["setting", "version"])
def test_what_was_not_installed_is_told(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    app = FastAPI()
    monkeypatch.setattr(compat, "http_app", lambda: app)
    monkeypatch.setattr(compat, "around", lambda *_: pytest.fail("a hook was installed all the same"))
    if what == "setting":
        monkeypatch.setenv("LEYLINE_TIMEOUT_S", "soon")
    else:
        monkeypatch.setattr(compat, "sglang_version", lambda: "0.9.9")
    plugin.activate()
    told = TestClient(app).get("/leyline/capabilities").json()
    assert told["supported"] is False
    assert ("LEYLINE_TIMEOUT_S" if what == "setting" else "0.9.9") in told["unsupported"][0]
