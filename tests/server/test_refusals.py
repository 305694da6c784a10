"""Every reason for a refusal, brought about on a live server: it is told, and nothing else happens.

A refused note's request is served as if it had none: the same answer, nothing cached but its own prompt and output in
the caller's namespace, and whatever was cached before is there as it was. A refused call of a route changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from leyline_agent.core.protocol import Reason, hash_token_ids

from .live import Answer, Live, Snapshot, new_conversation, note

pytestmark = pytest.mark.sglang

# What each server is started with. All but the first have the Python tree core, which shows more to a snapshot.
SERVERS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "default": ((), {}),
    "bounded": (
        ("--max-total-tokens", "2000"),
        {
            "LEYLINE_TIMEOUT_S": "3",
            "LEYLINE_DIFF_BUDGET": "1500",
            "LEYLINE_MAX_DIRECTIVES": "2",
            "LEYLINE_ONE_STEP": "0",
        },
    ),
    "switched_off": ((), {"LEYLINE_ENABLED": "0"}),
    "pages": (("--page-size", "16"), {}),
}


@dataclass
class Scene:
    """A conversation whose turn "1" is cached, and whose turn "2", an edit of it, is to be refused."""

    live: Live
    reason: Reason
    conversation: str = ""
    base: list[int] = field(default_factory=list)
    cached_base: list[int] = field(default_factory=list)
    """With what was generated for it, as far as it has rows."""
    edited: list[int] = field(default_factory=list)
    page_size: int = 1
    served_plain: Answer | None = None
    is_checked: bool = False
    _before: Snapshot | None = None

    def begin(self, base: list[int], edited: list[int]) -> None:
        self.live.flush()
        self.conversation, self.base, self.edited = new_conversation(), base, edited
        self.cached_base = base + self.live.generate(base, note(self.conversation, "1")).output_ids[:-1]
        self.look()

    def look(self) -> None:
        """Take what is cached now for what must be there after the refusal."""
        self._before = self.live.snapshot()

    def turn(self, said: Any = None, **body: Any) -> Answer:
        """Send turn "2". `said` adds to its note, or, as a string, stands in its place."""
        if not isinstance(said, str):
            said = json.dumps(note(self.conversation, "2", "1") | (said or {}))
        return self.live.generate(self.edited, said, **body)

    def explicit(self, directives: list[dict[str, Any]]) -> dict[str, Any]:
        return {"directives": directives, "base_len": len(self.base), "base_hash": hash_token_ids(self.base)}

    def splice(self, directives: Any = None, **more: Any) -> httpx.Response:
        """Call the route for explicit splices. Its R is empty, so that nothing is prefilled before the rows move."""
        body = {"v": 1, "conversation": self.conversation, "base_ids": self.base}
        directives = directives or [{"start": 20, "end": 90}]
        return self.live.http.post("/leyline/splice", json={**body, "directives": directives, **more})

    def is_told(self, answer: Answer, status: str = "refused") -> None:
        assert answer.outcome is not None
        told = (answer.outcome["status"], answer.outcome["reason"])
        assert told == (status, self.reason), answer.outcome
        assert answer.outcome["message"]
        assert self.conversation not in json.dumps(answer.outcome)
        self.is_checked = True

    def is_served_plain(self, answer: Answer) -> None:
        self.is_told(answer)
        self.served_plain = answer
        assert len(answer.output_ids) == 4
        new = self.new_slots()
        sequence = self.edited + answer.output_ids[:-1]
        slots = self.live.rows(sequence)["slots"]
        assert len(slots) == len(sequence) - len(sequence) % self.page_size
        assert new <= set(slots)

    def new_slots(self) -> set[int]:
        """Check that what was cached still is, slots, locks and rows; return the slots that are cached beside it."""
        assert self._before is not None
        after = self.live.snapshot()
        kept = {slot: after.cached.get(slot) for slot in self._before.cached}
        assert kept == self._before.cached
        return after.cached.keys() - kept.keys()

    def goes_on(self) -> None:
        """Edit turn "1" once more; where its rows are gone, the turn after that."""
        edited = self.base[:30] + self.base[60:] + [77]
        answer = self.live.generate(edited, note(self.conversation, "3", "1"))
        if self.reason is Reason.EVICTED:
            self.is_told(answer)
            answer = self.live.generate(edited[:5] + edited[9:], note(self.conversation, "4", "3"))
        assert answer.outcome is not None
        assert answer.outcome["status"] == "spliced", answer.outcome

    def changed_nothing(self, response: httpx.Response, status_code: int) -> None:
        assert response.status_code == status_code, response.text
        told = response.json()
        assert told["reason"] == self.reason, told
        assert told["message"]
        assert self.conversation not in response.text
        assert self.live.snapshot() == self._before
        self.is_checked = True


def _served_plain(**said: Any) -> Callable[[Scene], None]:
    return lambda scene: scene.is_served_plain(scene.turn(said))


def _text_served_plain(text: str) -> Callable[[Scene], None]:
    return lambda scene: scene.is_served_plain(scene.turn(text))


def _directives_served_plain(*directives: dict[str, Any]) -> Callable[[Scene], None]:
    return lambda scene: scene.is_served_plain(scene.turn(scene.explicit(list(directives))))


def _evicted(scene: Scene) -> None:
    """After the check whether the base is cached, and before its rows move; in one step there is nothing between."""
    if not scene.live.http.get("/leyline/capabilities").json()["not_in_one_step"]:
        scene.live.evict(scene.cached_base, 60)
        scene.look()
        scene.is_served_plain(scene.turn())
        return
    with scene.live.stopped("before_move") as stop:
        answer = scene.live.send(scene.edited, note(scene.conversation, "2", "1"))
        stop.wait()
        scene.live.evict(scene.cached_base, 60)
        scene.look()
    scene.is_served_plain(answer.result())


def _without_room(scene: Scene, ask: Callable[[], None]) -> None:
    """Leave room for the prompt, most of which is cached, and none for a copy of it; then ask."""
    base = scene.live.ids(600, 3)
    scene.begin(base, base[:500] + base[520:] + scene.live.ids(4, 4))
    filler = scene.live.ids(scene.live.counts()["available"] - 300, 5)
    scene.live.generate(filler, max_new_tokens=0)
    scene.look()
    with scene.live.locked(filler):
        ask()


def _pool_full(scene: Scene) -> None:
    answers: list[Answer] = []
    _without_room(scene, lambda: answers.append(scene.turn()))
    scene.is_served_plain(answers[0])


def _diff_budget(scene: Scene) -> None:
    scene.edited = scene.live.ids(600, 6)
    scene.is_served_plain(scene.turn())


def _too_many_directives(scene: Scene) -> None:
    """Those from the left that are allowed are carried out, and stay."""
    base = scene.base
    scene.edited = base[:20] + base[40:80] + base[100:140] + base[160:] + scene.live.ids(4, 7)
    answer = scene.turn()
    scene.is_told(answer, "partial")
    scene.new_slots()
    assert answer.outcome is not None
    assert ["edit_id" in directive for directive in answer.outcome["directives"]] == [True, True]
    assert answer.outcome["num_directives"] == 2
    assert answer.outcome["moved_tokens"] == 80
    assert answer.cached_tokens == 100


def _late(scene: Scene) -> None:
    """The rows move after all, when nobody waits for it any more; that does no harm."""
    with scene.live.stopped("before_move"):
        scene.is_served_plain(scene.turn())


def _aborted(scene: Scene) -> None:
    """Nobody waits for the answer; what was prefilled and generated by then stays cached."""
    scene.edited = scene.base[:20] + scene.live.ids(3, 8) + scene.base[90:]
    with scene.live.stopped("after_prefill") as stop:
        answer = scene.live.send(scene.edited, note(scene.conversation, "2", "1"), rid="mine")
        stop.wait()
        scene.live.http.post("/abort_request", json={"rid": "mine"})
    scene.is_told(answer.result())
    assert scene.new_slots() <= set(scene.live.rows(scene.edited + answer.result().output_ids)["slots"])


def _broken(scene: Scene) -> None:
    scene.live.break_kernel()
    scene.is_served_plain(scene.turn())


def _cannot_splice_at_all(scene: Scene) -> None:
    """Every reason why is told, in the outcome and beforehand."""
    scene.page_size = 16 if scene.reason is Reason.UNSUPPORTED_SERVER else 1
    answer = scene.turn()
    scene.is_served_plain(answer)
    capabilities = scene.live.http.get("/leyline/capabilities").json()
    assert capabilities["enabled"] is (scene.reason is not Reason.DISABLED)
    assert capabilities["supported"] is (scene.reason is not Reason.UNSUPPORTED_SERVER)
    said = capabilities["unsupported"] or ["LEYLINE_ENABLED"]
    assert answer.outcome is not None
    assert all(part in answer.outcome["message"] for part in said)


NOTES: dict[Reason, Callable[[Scene], None]] = {
    Reason.BAD_NOTE: _text_served_plain("{"),
    Reason.WEAK_CONVERSATION_ID: _served_plain(conversation="me"),
    Reason.UNSUPPORTED_VERSION: _served_plain(v=2),
    Reason.NOTE_TOO_LARGE: _text_served_plain(" " * 10_000_000),
    Reason.BAD_DIRECTIVES: _directives_served_plain({"start": 20, "end": 60}, {"start": 50, "end": 90}),
    Reason.TOKEN_OUT_OF_VOCABULARY: _directives_served_plain({"start": 2, "end": 3, "replacement_ids": [9_999_999]}),
    Reason.UNKNOWN_BASE: _served_plain(base="never"),
    Reason.STALE_BASE: _directives_served_plain({"start": 20, "end": 30, "replacement_ids": [11]}),
    Reason.EVICTED: _evicted,
    Reason.POOL_FULL: _pool_full,
    Reason.DIFF_BUDGET: _diff_budget,
    Reason.TOO_MANY_DIRECTIVES: _too_many_directives,
    Reason.TIMEOUT: _late,
    Reason.ABORTED: _aborted,
    Reason.UNSUPPORTED_REQUEST: lambda scene: scene.is_served_plain(
        scene.turn(return_logprob=True, logprob_start_len=0)
    ),
    Reason.UNSUPPORTED_SERVER: _cannot_splice_at_all,
    Reason.DISABLED: _cannot_splice_at_all,
    Reason.INTERNAL_ERROR: _broken,
}
"""How the note of a request comes to be refused."""


def _splice_refused(status_code: int, directives: Any = None, **more: Any) -> Callable[[Scene], None]:
    return lambda scene: scene.changed_nothing(scene.splice(directives, **more), status_code)


def _splice_evicted(scene: Scene) -> None:
    scene.live.evict(scene.cached_base, 60)
    scene.look()
    scene.changed_nothing(scene.splice(), 409)


def _splice_without_room(scene: Scene) -> None:
    def ask() -> None:
        scene.look()
        scene.changed_nothing(scene.splice([{"start": 500, "end": 520}]), 409)

    _without_room(scene, ask)


def _splice_late(scene: Scene) -> None:
    with scene.live.stopped("before_move"):
        scene.changed_nothing(scene.splice(), 408)


def _splice_broken(scene: Scene) -> None:
    scene.live.break_kernel()
    scene.changed_nothing(scene.splice(), 500)


def _release_unknown(scene: Scene) -> None:
    body = {"conversation": new_conversation()}
    scene.changed_nothing(scene.live.http.post("/leyline/release", json=body), 404)


ROUTES: dict[Reason, Callable[[Scene], None]] = {
    Reason.BAD_NOTE: _splice_refused(400, color="red"),
    Reason.WEAK_CONVERSATION_ID: _splice_refused(400, conversation="me"),
    Reason.UNSUPPORTED_VERSION: _splice_refused(400, v=2),
    Reason.NOTE_TOO_LARGE: _splice_refused(413, color="red" * 1_000_000),
    Reason.BAD_DIRECTIVES: _splice_refused(400, [{"start": 20, "end": 100_000}]),
    Reason.TOKEN_OUT_OF_VOCABULARY: _splice_refused(400, [{"start": 2, "end": 3, "replacement_ids": [9_999_999]}]),
    Reason.EVICTED: _splice_evicted,
    Reason.POOL_FULL: _splice_without_room,
    Reason.TIMEOUT: _splice_late,
    Reason.UNSUPPORTED_SERVER: _splice_refused(409),
    Reason.DISABLED: _splice_refused(409),
    Reason.INTERNAL_ERROR: _splice_broken,
    Reason.UNKNOWN_CONVERSATION: _release_unknown,
}
"""How a call of one of our routes comes to be refused."""

_TAKES_A_BOUND = {Reason.POOL_FULL, Reason.DIFF_BUDGET, Reason.TOO_MANY_DIRECTIVES, Reason.TIMEOUT, Reason.ABORTED}
"""Or two steps, between which something comes; the server with the bounds takes two."""
_ONLY_ON = {Reason.DISABLED: "switched_off", Reason.UNSUPPORTED_SERVER: "pages"}
CASES = [
    pytest.param(server, reason, bring_about, id=f"{server}-{how}-{reason}")
    for server in SERVERS
    for how, table in (("note", NOTES), ("route", ROUTES))
    for reason, bring_about in table.items()
    if server == _ONLY_ON.get(reason, "bounded") or (server == "default" and reason not in {*_TAKES_A_BOUND, *_ONLY_ON})
]


def test_every_reason_is_brought_about() -> None:
    # That one is no refusal; `test_gate.py` has it.
    everything = set(Reason) - {Reason.GATED}
    assert {reason for case in CASES for reason in case.values if isinstance(reason, Reason)} == everything


@pytest.fixture(scope="module")
def running(serve_probed: Callable[..., Any], shared_live: Live) -> Iterator[Callable[[str], Live]]:
    """Return one of `SERVERS`, which runs until another one is asked for."""
    current: dict[str, Live] = {"default": shared_live}
    with ExitStack() as stack:

        def run(name: str) -> Live:
            if name not in current:
                stack.close()
                args, env = SERVERS[name]
                env = {**env, "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"}
                live = stack.enter_context(serve_probed(*args, **env))
                current.clear()
                current.update({"default": shared_live, name: live})
            return current[name]

        yield run


@pytest.mark.parametrize(("server", "reason", "bring_about"), CASES)
def test_a_refusal_is_told_and_nothing_else_happens(
    running: Callable[[str], Live], server: str, reason: Reason, bring_about: Callable[[Scene], None]
) -> None:
    _check(running(server), reason, bring_about)


VARIATIONS: dict[str, tuple[Reason, Callable[[Scene], None]]] = {
    "empty": (Reason.BAD_NOTE, _text_served_plain("")),
    "a_list": (Reason.BAD_NOTE, _text_served_plain("[]")),
    "unknown_key": (Reason.BAD_NOTE, _served_plain(color="red")),
    "unknown_mode": (Reason.BAD_NOTE, _served_plain(mode="shrink")),
    "half_explicit": (Reason.BAD_NOTE, _served_plain(directives=[])),
    "no_string": (
        Reason.BAD_NOTE,
        lambda scene: scene.is_served_plain(
            scene.live.generate(scene.edited, sampling={"custom_params": {"leyline": {"v": 1}}})
        ),
    ),
    "out_of_order": (
        Reason.BAD_DIRECTIVES,
        _directives_served_plain({"start": 100, "end": 110}, {"start": 20, "end": 30}),
    ),
    "end_before_start": (Reason.BAD_DIRECTIVES, _directives_served_plain({"start": 60, "end": 20})),
    "negative": (Reason.BAD_DIRECTIVES, _directives_served_plain({"start": -5, "end": 20})),
    "beyond_the_base": (Reason.BAD_DIRECTIVES, _directives_served_plain({"start": 20, "end": 100_000})),
    "unknown_directive_mode": (
        Reason.BAD_DIRECTIVES,
        _directives_served_plain({"start": 20, "end": 30, "mode": "burn"}),
    ),
    "negative_id": (
        Reason.BAD_DIRECTIVES,
        _directives_served_plain({"start": 20, "end": 30, "replacement_ids": [-1]}),
    ),
    "id_beyond_int32": (
        Reason.TOKEN_OUT_OF_VOCABULARY,
        _directives_served_plain({"start": 20, "end": 30, "replacement_ids": [1 << 40]}),
    ),
    "wrong_hash": (Reason.STALE_BASE, _served_plain(directives=[], base_len=200, base_hash="0" * 64)),
    "longer_than_the_base": (Reason.STALE_BASE, _served_plain(directives=[], base_len=9000, base_hash="0" * 64)),
}


@pytest.mark.parametrize("variation", VARIATIONS)
def test_other_ways_to_be_refused(live: Live, variation: str) -> None:
    _check(live, *VARIATIONS[variation])


def _check(live: Live, reason: Reason, bring_about: Callable[[Scene], None]) -> None:
    base = live.ids(200, 1)
    scene = Scene(live, reason)
    scene.begin(base, base[:20] + base[90:] + live.ids(4, 2))
    bring_about(scene)
    assert scene.is_checked
    live.assert_conserved()
    if reason not in _ONLY_ON:
        scene.goes_on()
    if scene.served_plain is not None:
        live.flush()
        assert live.generate(scene.edited).output_ids == scene.served_plain.output_ids


@pytest.mark.parametrize("ids", [[5, 10_000_000], [5, -3]], ids=["beyond", "negative"])
def test_a_prompt_with_ids_outside_the_vocabulary_is_a_400(live: Live, ids: list[int]) -> None:
    """They kill a stock server when they reach a prefill; with a note they do not get that far."""
    answer = live.generate(ids, note(new_conversation(), "1"))
    assert answer.status_code == 400
    assert answer.outcome is not None
    assert answer.outcome["reason"] == "token_out_of_vocabulary"


@pytest.mark.parametrize(
    "body",
    [{"input_ids": [[11, 12, 13], [14, 15]]}, {"text": "not tokenized yet"}],
    ids=["batch", "text"],
)
def test_requests_without_one_list_of_ids_are_served_plain(live: Live, body: dict[str, Any]) -> None:
    params = {"max_new_tokens": 2, "custom_params": {"leyline": json.dumps(note(new_conversation(), "1"))}}
    response = live.http.post("/generate", json={**body, "sampling_params": params})
    assert response.status_code == 200
    assert json.loads(response.headers["x-leyline"])["reason"] == "unsupported_request"


def test_a_flush_forgets_the_turns(live: Live) -> None:
    conversation, base = new_conversation(), live.ids(200, 6)
    live.generate(base, note(conversation, "1"))
    live.flush()
    answer = live.generate(base[:20] + base[90:] + [77], note(conversation, "2", "1"))
    assert answer.outcome is not None
    assert answer.outcome["reason"] == "unknown_base"


def test_a_partly_cached_base_gives_what_it_has(live: Live) -> None:
    """The base is cut to its cached length: 150 of 200 tokens are left, so 60 of the 110 behind the edit are moved."""
    conversation, base = new_conversation(), live.ids(200, 7)
    live.generate(base, note(conversation, "1"))
    live.evict_all()
    live.generate(base[:150], max_new_tokens=0)
    answer = live.generate(base[:20] + base[90:] + [77], note(conversation, "2", "1"))
    assert answer.outcome is not None
    assert answer.outcome["status"] == "spliced"
    assert answer.outcome["moved_tokens"] == 60
    assert answer.cached_tokens == 80


def test_a_prompt_beyond_the_context_is_a_400_and_nothing_is_spliced(live: Live) -> None:
    conversation, base = new_conversation(), live.ids(200, 9)
    live.generate(base, note(conversation, "1"))
    before = live.counts()
    answer = live.generate(base[:20] + [13] * 66_000 + base[30:], note(conversation, "2", "1"))
    assert answer.status_code == 400
    assert answer.outcome is not None
    assert answer.outcome["reason"] == "unsupported_request"
    assert live.counts() == before


def test_a_refused_flush_forgets_nothing(live: Live) -> None:
    conversation, base = new_conversation(), live.ids(200, 10)
    live.generate(base, note(conversation, "1"))
    body = {
        "input_ids": live.ids(20, 11),
        "stream": True,
        "sampling_params": {"max_new_tokens": 300, "ignore_eos": True},
    }
    with live.http.stream("POST", "/generate", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        assert live.http.post("/flush_cache").status_code == 400
        assert list(lines)
    answer = live.generate(base[:20] + base[90:] + [77], note(conversation, "2", "1"))
    assert answer.outcome is not None
    assert answer.outcome["status"] == "spliced"
