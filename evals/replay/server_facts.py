"""What a running server says about itself."""

from __future__ import annotations

from dataclasses import dataclass

import httpx

from evals.replay.errors import ReplayError


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Enough to talk to a server and to name it in a report."""

    model: str
    """As chat requests name it."""
    model_path: str | None
    version: str | None


def read_facts(client: httpx.Client) -> ServerFacts:
    """Ask a server for its model.

    Raises:
        ReplayError: nobody answers there, or it is no OpenAI-compatible server.
    """
    try:
        models = client.get("/v1/models")
        models.raise_for_status()
        model = models.json()["data"][0]["id"]
    except httpx.TransportError as error:
        raise ReplayError(f"no server answers at {client.base_url} ({error}); start one with `make serve`") from error
    except (httpx.HTTPStatusError, ValueError, KeyError, IndexError) as error:
        raise ReplayError(
            f"{client.base_url}/v1/models gave no model ({error}); expected an OpenAI-compatible SGLang server"
        ) from error
    return ServerFacts(
        model=model,
        model_path=_field(client, "/model_info", "model_path"),
        version=_field(client, "/server_info", "version"),
    )


def warm_up(client: httpx.Client, model: str) -> None:
    """Send one short request, so that the first arm does not pay for what a server does once."""
    body = {"model": model, "messages": [{"role": "user", "content": "Ready?"}], "max_tokens": 1, "temperature": 0}
    response = client.post("/v1/chat/completions", json=body)
    if not response.is_success:
        raise ReplayError(
            f"the server refused a chat request of one word: {response.status_code} {response.text[:300]!r}"
        )


def _field(client: httpx.Client, path: str, key: str) -> str | None:
    response = client.get(path)
    if not response.is_success:
        return None
    value = response.json().get(key)
    return value if isinstance(value, str) else None
