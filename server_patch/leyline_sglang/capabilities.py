"""What `GET /leyline/capabilities` says. Imports nothing of SGLang, so that it can tell why nothing was installed."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse

from leyline_agent.core.protocol import PROTOCOL_VERSION
from leyline_sglang import compat


def capabilities_body(*, enabled: bool, unsupported: list[str], installed: list[str], **more: Any) -> dict[str, Any]:
    """Return the answer. `unsupported` lists every reason why this server cannot splice."""
    return {
        "version": version("leyline-agent"),
        "protocol": PROTOCOL_VERSION,
        "sglang": compat.sglang_version(),
        "enabled": enabled,
        "supported": not unsupported,
        "unsupported": unsupported,
        "installed": installed,
        **more,
    }


def add_failure(app: FastAPI, problem: str) -> None:
    """Tell why nothing was installed; SGLang only logs it."""

    @app.get("/leyline/capabilities")
    async def capabilities() -> JSONResponse:
        return JSONResponse(capabilities_body(enabled=False, unsupported=[problem], installed=[]))
