"""Prompts whose next token is known after two splices: how they are made, sent and what came of each.

The steps are those that `correctness` describes. Knows the server's routes; judges nothing.
"""

from __future__ import annotations

import json
import random
import secrets
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from evals.micro.bench_server import BenchError, Server
from leyline_agent.core.protocol import CONVERSATION_HEADER, hash_token_ids

WRONG_BY = 64
"""Positions, in the arm that must disagree."""
_TOP = 10
"""Log probabilities asked for: of the first two of the reference, and wherever those went in another batch."""
_FIRST_ID = 1000
"""Ids below may be special."""
_PREFIX_TOKENS, _TAIL_TOKENS, _INSERTED_TOKENS = (60, 200), (300, 700), (8, 256)
_TIMEOUT_S = 60


@dataclass(frozen=True)
class Next:
    """What came back: the first token, the most likely ones, and the outcome of the note."""

    token: int
    top: tuple[tuple[int, float], ...]
    """Token ids with their log probabilities, the most likely first."""
    cached_tokens: int
    outcome: dict[str, Any]

    @property
    def margin(self) -> float:
        """How far the second token is behind the first."""
        return self.top[0][1] - self.top[1][1]

    def margin_of(self, first: int, second: int) -> float:
        """Return the margin between two tokens; where one is not among the likeliest, as if it were the last of them.

        So a difference from another answer's margin comes out too small rather than too large.
        """
        known, least = dict(self.top), self.top[-1][1]
        return known.get(first, least) - known.get(second, least)


class Judged:
    """The server: what follows a prompt, what is remembered of a turn, and the fault."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self.bench = Server(url)

    def ask(self, token_ids: Sequence[int], note: dict[str, Any] | None = None, extra_key: str | None = None) -> Next:
        """Return what follows a prompt."""
        # No `logprob_start_len`: one that lies in the prompt would have it prefilled again, whatever is cached.
        more = {"extra_key": extra_key, "return_logprob": True, "top_logprobs_num": _TOP}
        answer = self.bench.generate(token_ids, 1, note, **more)
        likeliest = answer.meta_info["output_top_logprobs"][0]
        top = tuple((int(token), float(logprob)) for logprob, token, *_ in likeliest)
        return Next(answer.output_ids[0], top, answer.cached_tokens, answer.outcome)

    def turn_state(self, conversation: str, turn: str) -> dict[str, Any]:
        """Return what the server tells of a remembered turn."""
        turns = self._get("/leyline/conversation", {CONVERSATION_HEADER: conversation})["turns"]
        found: dict[str, Any] = next(known for known in turns if known["turn"] == turn)
        return found

    def vocab_size(self) -> int:
        """Return the number of token ids, by the configuration that the server was started with."""
        return int(json.loads((Path(self._get("/model_info")["model_path"]) / "config.json").read_text())["vocab_size"])

    def set_fault(self, rotation: int | None) -> None:
        """Have keys turned by so many positions too many from now on."""
        self.bench.post("/bench/fault", {"rotation": rotation})

    def _get(self, path: str, headers: dict[str, str] | None = None) -> Any:
        # Without the environment's proxies: this is loopback.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(
                urllib.request.Request(self._url + path, headers=headers or {}), timeout=_TIMEOUT_S
            ) as got:
                return json.load(got)
        except OSError as error:
            raise BenchError(f"{path}: no answer from {self._url}: {error}") from error


@dataclass(frozen=True)
class Case:
    """One prompt, the span that comes and goes, and last tokens that keep the sequences apart."""

    idx: int
    prefix: list[int]
    inserted: list[int]
    tail: list[int]
    last: int
    others: tuple[int, int, int]
    """Last tokens of the base, of the sequence with the span, and of what is rebatched."""

    @classmethod
    def random(cls, idx: int, *, seed: int, vocab_size: int) -> Case:
        """Draw one."""
        rng = random.Random(f"{seed} {idx}")

        def some(num_tokens: int) -> list[int]:
            return [rng.randrange(min(_FIRST_ID, vocab_size // 4), vocab_size) for _ in range(num_tokens)]

        prefix, inserted, tail = (some(rng.randint(*n)) for n in (_PREFIX_TOKENS, _INSERTED_TOKENS, _TAIL_TOKENS))
        last, *others = rng.sample(range(min(_FIRST_ID, vocab_size // 4), vocab_size), 4)
        return cls(idx, prefix, inserted, tail, last, (others[0], others[1], others[2]))

    @property
    def context(self) -> list[int]:
        """What stands before the last token."""
        return [*self.prefix, *self.tail]

    @property
    def prompt(self) -> list[int]:
        """The sequence whose next token is known."""
        return [*self.context, self.last]

    @property
    def longer(self) -> list[int]:
        """The context with the span in it."""
        return [*self.prefix, *self.inserted, *self.tail]

    def part(self, name: str) -> list[int]:
        """Return the prompt, or what is prefilled of it before."""
        context = {"first_half": self.context[: len(self.context) // 2], "rebatched_context": self.context}.get(name)
        return self.prompt if context is None else [*context, self.others[2]]

    def shuffled(self) -> list[int]:
        """Return the prompt with its context in another order."""
        return [*random.Random(self.idx).sample(self.context, len(self.context)), self.last]


@dataclass
class Verdict:
    """What became of one case."""

    case: Case
    answers: dict[str, Next] = field(default_factory=dict)
    problem: str | None = None

    def fail(self, name: str, problem: str) -> None:
        """Say why nothing follows from this case; the first reason stays."""
        self.problem = self.problem or f"prompt {self.case.idx}, {name}: {problem}"

    def agrees(self, name: str) -> bool:
        """Tell whether an answer has the reference's first token."""
        return self.answers[name].token == self.answers["reference"].token

    def margin_change(self, name: str) -> float:
        """Return how far an answer is from the reference in the margin between the reference's first two tokens."""
        reference = self.answers["reference"]
        (first, _), (second, _) = reference.top[:2]
        return abs(reference.margin - self.answers[name].margin_of(first, second))


class _Spliced:
    """A conversation that has its base cached, and takes the span in and out again."""

    def __init__(self, server: Judged, verdict: Verdict, removed_as: str) -> None:
        self._server, self._verdict, self._removed_as = server, verdict, removed_as
        self._conversation = secrets.token_urlsafe(24)

    def base(self) -> None:
        case = self._verdict.case
        self._server.ask([*case.context, case.others[0]], self._note("base"))

    def insert(self) -> None:
        case = self._verdict.case
        at = len(case.prefix)
        note = self._note("insert", "base", case.context, {"start": at, "end": at, "replacement_ids": case.inserted})
        self._keep("insert", self._server.ask([*case.longer, case.others[1]], note))

    def remove(self) -> None:
        case = self._verdict.case
        at = len(case.prefix)
        directive = {"start": at, "end": at + len(case.inserted), "replacement_ids": []}
        answer = self._server.ask(case.prompt, self._note("remove", "insert", case.longer, directive))
        self._keep(self._removed_as, answer)
        state = self._server.turn_state(self._conversation, "remove")
        if not state["own_namespace"]:
            self._verdict.fail(
                self._removed_as, f"served from the shared namespace, where the original rows are: {state}"
            )

    def _note(
        self, turn: str, base: str | None = None, base_ids: Sequence[int] = (), *directives: dict[str, Any]
    ) -> dict[str, Any]:
        note: dict[str, Any] = {"v": 1, "conversation": self._conversation, "turn": turn, "gate": "off"}
        if base is not None:
            note |= {"base": base, "directives": directives}
            note |= {"base_len": len(base_ids), "base_hash": hash_token_ids(base_ids)}
        return note

    def _keep(self, name: str, answer: Next) -> None:
        self._verdict.answers[name] = answer
        moved, expected = answer.outcome.get("moved_tokens", 0), len(self._verdict.case.tail)
        if answer.outcome.get("status") != "spliced" or moved != expected:
            self._verdict.fail(
                name, f"expected a splice that moves {expected} tokens, got {json.dumps(answer.outcome)}"
            )


@dataclass(frozen=True)
class Batches:
    """How many prompts are in flight, so that they share batches."""

    most: int
    rebatched: int


def run_round(server: Judged, cases: Sequence[Case], *, num_wrong: int, at_once: Batches) -> list[Verdict]:
    """Judge some cases, the first `num_wrong` of them with the fault too; leave the cache empty.

    Each step is taken for all cases before the next.
    """
    verdicts = [Verdict(case) for case in cases]
    right = [_Spliced(server, verdict, "remove") for verdict in verdicts]
    wrong = [_Spliced(server, verdict, "wrong") for verdict in verdicts[:num_wrong]]

    def ask(verdict: Verdict, name: str, token_ids: list[int], extra_key: str | None = None) -> None:
        verdict.answers[name] = server.ask(token_ids, extra_key=extra_key)

    _together([conversation.base for conversation in right], at_once.most)
    _together([conversation.base for conversation in wrong], at_once.most)
    _together([conversation.insert for conversation in [*right, *wrong]], at_once.most)
    _together([conversation.remove for conversation in right], at_once.most)
    if wrong:
        server.set_fault(WRONG_BY)
        try:
            _together([conversation.remove for conversation in wrong], at_once.most)
        finally:
            server.set_fault(None)
    # Only now: the shared namespace then has the whole prompt, and would be preferred.
    _together([partial(ask, known, "reference", known.case.prompt) for known in verdicts], at_once.most)
    _together([partial(ask, known, "shuffled", known.case.shuffled()) for known in verdicts], at_once.most)
    for part in ("first_half", "rebatched_context", "rebatched"):
        _together(
            [partial(ask, known, part, known.case.part(part), "rebatched") for known in verdicts], at_once.rebatched
        )
    for verdict in verdicts:
        for name in ("reference", "rebatched"):
            cached, expected = verdict.answers[name].cached_tokens, len(verdict.case.context)
            if cached != expected:
                verdict.fail(name, f"{cached} of {expected} tokens were cached; is the pool too small?")
    server.bench.flush()
    return verdicts


def _together(steps: Sequence[Callable[[], None]], at_once: int) -> None:
    with ThreadPoolExecutor(at_once) as threads:
        for done in [threads.submit(step) for step in steps]:
            done.result()
