from __future__ import annotations

import base64
import hashlib
import string
import uuid
from collections.abc import Callable
from random import Random

import pytest

from leyline_agent.core import check_conversation_id

SECRET = "KYc2t0XkLlV8bXwWq1mDfQ"

RANDOM: dict[str, Callable[[Random], str]] = {
    "token_urlsafe(16)": lambda random: _urlsafe(random.randbytes(16)),
    "token_urlsafe(24)": lambda random: _urlsafe(random.randbytes(24)),
    "token_urlsafe(32)": lambda random: _urlsafe(random.randbytes(32)),
    "token_hex(16)": lambda random: random.randbytes(16).hex(),
    "token_hex(32), sha256": lambda random: random.randbytes(32).hex(),
    "base32": lambda random: base64.b32encode(random.randbytes(16)).decode().rstrip("="),
    "letters and digits": lambda random: "".join(random.choices(string.ascii_letters + string.digits, k=22)),
}


def _urlsafe(secret: bytes) -> str:
    return base64.urlsafe_b64encode(secret).decode().rstrip("=")


@pytest.mark.parametrize("make", RANDOM.values(), ids=RANDOM.keys())
def test_random_ids_pass(make: Callable[[Random], str]) -> None:
    random = Random(2024)
    for _ in range(20_000):
        check_conversation_id(make(random))


@pytest.mark.parametrize(
    "conversation_id",
    [
        pytest.param(hashlib.sha256(b"key and thread").hexdigest(), id="what for_thread makes"),
        pytest.param(hashlib.sha256(b"key and thread").hexdigest().upper(), id="upper case"),
        pytest.param("314159265358979323846264338327950288419", id="39 digits"),
        pytest.param(f"thread_{SECRET}", id="prefix"),
        pytest.param("dtqnaknawuoybseojuarve67t4", id="base32 with a t between digits, which is no time of day"),
        pytest.param(f"agent-run-000000000000000000000-{SECRET}", id="long guessable prefix"),
        pytest.param(f"{SECRET}:{uuid.UUID(int=5)}", id="beside a UUID"),
        pytest.param(base64.b64encode(bytes.fromhex("b0ff3e7c9a15d2684f0b8e71c6a3592d")).decode(), id="plain base64"),
        pytest.param(SECRET * 8, id="repeated, but a secret all the same"),
    ],
)
def test_other_secrets_pass(conversation_id: str) -> None:
    assert check_conversation_id(conversation_id) == conversation_id


@pytest.mark.parametrize(
    ("conversation_id", "problem"),
    [
        ("", "too short: 0 characters"),
        ("me", "too short"),
        (SECRET[:-1], "hold 126 bits at most, expected 128"),
        ("3f9c1ab27d50e864b1f7a2c9d06e4d8", "31 characters of its kind hold 124 bits"),
        ("3F9C1AB27D50E864B1F7A2C9D06E4D8", "hold 124 bits"),
        ("3f9c-1ab2-7d50-e864-b1f7-a2c9-d06e-4d8", "hold 124 bits"),
        ("8230174659018273645091827364501", "hold 124 bits"),
        ("2024-05-01T12:34:56.789012+00:00", "hold 96 bits"),
        ("20240501-123456-789012-4711", "hold 96 bits"),
        (str(uuid.UUID("d5fd7671-8476-4d64-8706-fff55259b71b")), "is a UUID"),
        ("D5FD7671-8476-4D64-8706-FFF55259B71B", "is a UUID"),
        ("urn:uuid:d5fd7671-8476-4d64-8706-fff55259b71b", "is a UUID"),
        ("thread-d5fd7671-8476-4d64-8706-fff55259b71b", "is a UUID"),
        ("my-agent-conversation-number-000001", "words and numbers"),
        ("MY_AGENT_CONVERSATION_NUMBER_1", "words and numbers"),
        ("conversation.of.user.bob", "words and numbers"),
        ("agent7:user42:session12345", "words and numbers"),
        ("chat-session-2024-05-01T12:34:56", "words and numbers"),
        ("correct-horse-battery-staple", "words and numbers"),
        ("thisisaverylongusername", "words and numbers"),
        ("c" * 32, "repeats itself"),
        ("ab" * 20, "repeats itself"),
        ("deadbeef" * 4, "repeats itself"),
        ("k3J9fQ2xZpa" * 2, "repeats itself"),
        ("password123password123", "repeats itself"),
        ("00000000000000000000000000000000000000000042", "repeats itself"),
        ("User0000000000000000000001", "repeats itself"),
        ("0123456789" * 4, "repeats itself"),
        ("9876543210" * 4, "repeats itself"),
        ("0123456789abcdef" * 2, "repeats itself"),
        ("abcdefghijklmnopqrstuvwxyz", "repeats itself"),
        ("ABCDEFGHIJKLMNOPQRSTUVWXYZ", "repeats itself"),
        ("abcdefghijklmABCDEFGHIJKLM", "repeats itself"),
        ("a1b2c3d4e5f6g7h8i9j0k1l2m3", "repeats itself"),
        ("acegikmoqsuwyACEGIKMOQSUWY", "repeats itself"),
        ("110100110101110010110001101011", "hold 120 bits"),
        ("11010011010111001011000110101100", "few distinct"),
        ("aQaQQaaQaQQQaaaQaQaQQaQaaQQa", "few distinct"),
        (SECRET + " " + SECRET, "printable ASCII"),
        (SECRET + "\n", "printable ASCII"),
        (SECRET + "\x7f", "printable ASCII"),
        ("schlüssel" + SECRET, "printable ASCII"),
        (SECRET * 12, "at most 256 characters"),
    ],
)
def test_short_guessable_and_unfit_ids_are_refused(conversation_id: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check_conversation_id(conversation_id)


@pytest.mark.parametrize("bad", [SECRET[:20], "my-agent-conversation-1", "xy" * 16, SECRET + "é"])
def test_message_says_what_to_use_and_does_not_quote_the_id(bad: str) -> None:
    with pytest.raises(ValueError, match=r"secrets\.token_urlsafe\(24\)") as caught:
        check_conversation_id(bad)
    assert bad[:6] not in str(caught.value)
