"""Whatever goes wrong in the middle of a splice: nothing leaks, the conversation goes on, nobody else sees anything."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from evals.serving import RunningServer, free_port, serve
from leyline_agent import Client, Conversation
from leyline_agent.core.protocol import hash_token_ids
from leyline_agent.errors import SpliceTransportError

from .live import Answer, Live, new_conversation, note

pytestmark = pytest.mark.sglang

POINTS = ["before_prefill", "after_prefill", "before_move", "after_move"]
"""Where a turn is stopped: around the prefill of its R, and around the move of the kept run."""


@dataclass(frozen=True)
class Story:
    """Three turns of a conversation, the second and third each an edit of the one before, and their answers."""

    base: list[int]
    base_output: list[int]
    edited: list[int]
    edited_again: list[int]
    plain: list[int]
    """What `edited` is answered with where nothing was spliced."""
    spliced: list[int]
    """What it is answered with as an edit of `base`."""
    spliced_again: list[int]
    """What `edited_again` is answered with as an edit of that."""
    spliced_after_plain: list[int]
    """What `edited_again` is answered with as an edit of `edited` where that was prefilled."""

    def begin(self, live: Live, *, num_turns: int = 1) -> str:
        """Start a conversation and send its first turns, "1" and "2"."""
        conversation = new_conversation()
        live.generate(self.base, note(conversation, "1"))
        if num_turns > 1:
            assert self.edit(live, conversation).output_ids == self.spliced
        return conversation

    def edit(self, live: Live, conversation: str, turn: str = "2", base: str = "1") -> Answer:
        return live.generate(self.edited, note(conversation, turn, base))

    def edit_again(self, live: Live, conversation: str, turn: str = "3", base: str = "2") -> Answer:
        return live.generate(self.edited_again, note(conversation, turn, base))

    def goes_on(self, live: Live, conversation: str, *, may_be_prefilled: bool = False) -> None:
        """Send turn "2" again, as after any fault, and turn "3": as if nothing had happened.

        `may_be_prefilled`: the fault may have left all of `edited` in the shared namespace, a longer match than what
        the splice makes.
        """
        live.assert_conserved()
        again = self.edit(live, conversation)
        prefilled = may_be_prefilled and not live.turn(conversation, "2")["own_namespace"]
        assert (status(again), again.output_ids) == ("spliced", self.plain if prefilled else self.spliced)
        later = self.edit_again(live, conversation)
        answer = self.spliced_after_plain if prefilled else self.spliced_again
        assert (status(later), later.output_ids) == ("spliced", answer)
        live.assert_conserved()

    def goes_on_from_nothing(self, live: Live, conversation: str) -> None:
        """The same where the server has lost all that it knew: one turn is served plain, the next is spliced again."""
        live.assert_conserved()
        again = self.edit(live, conversation)
        assert (status(again), again.output_ids) == ("unknown_base", self.plain)
        later = self.edit_again(live, conversation)
        assert (status(later), later.output_ids) == ("spliced", self.spliced_after_plain)
        live.assert_conserved()


def status(answer: Answer) -> str:
    """The reason where there is one, else the status."""
    assert answer.outcome is not None
    return answer.outcome.get("reason") or answer.outcome["status"]


@pytest.fixture(scope="module")
def shared_live(serve_probed: Callable[..., AbstractContextManager[Live]]) -> Iterator[Live]:
    """R is prefilled before its request here, as there is more that can come between; see `test_one_step.py`."""
    with serve_probed(LEYLINE_ONE_STEP="0") as live:
        yield live


@pytest.fixture(scope="module")
def story(shared_live: Live) -> Story:
    live = shared_live
    base = live.ids(300, 1)
    edited = base[:100] + live.ids(7, 2) + base[150:] + live.ids(5, 3)
    edited_again = edited[:40] + live.ids(3, 4) + edited[60:] + live.ids(5, 5)
    live.flush()
    base_output = live.generate(base).output_ids
    live.flush()
    plain = live.generate(edited).output_ids
    answers = []
    for edit in ({}, {"mode": "reprefill"}):
        live.flush()
        conversation = new_conversation()
        live.generate(base, note(conversation, "1"))
        answers.append(live.generate(edited, note(conversation, "2", "1", **edit)).output_ids)
        answers.append(live.generate(edited_again, note(conversation, "3", "2")).output_ids)
    spliced, spliced_again, prefilled, spliced_after_plain = answers
    assert prefilled == plain != spliced
    assert spliced_again != spliced_after_plain
    return Story(base, base_output, edited, edited_again, plain, spliced, spliced_again, spliced_after_plain)


@pytest.fixture
def other(live: Live, story: Story) -> Iterator[None]:
    """Another conversation with the same prompts, which has edited, too. The test must not touch it."""
    conversation = story.begin(live, num_turns=2)
    before = live.rows(story.edited, conversation=conversation)
    assert len(before["slots"]) == len(story.edited)
    yield
    assert live.rows(story.edited, conversation=conversation) == before
    assert story.edit_again(live, conversation).output_ids == story.spliced_again


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.usefixtures("other")
def test_a_caller_who_leaves(live: Live, story: Story, point: str, stream: bool) -> None:
    conversation = story.begin(live)
    turn = note(conversation, "2", "1")
    with live.stopped(point) as stop:
        with live.caller(story.edited, turn, stream=stream):
            stop.wait()
        if stream:
            # A stream's caller is missed at once, so its turn ends here; any other goes on until it waits for tokens.
            live.wait_until(lambda: live.counts()["edited_requests"] == 0)
    story.goes_on(live, conversation)


@pytest.mark.parametrize("asked", [{"rid": "mine"}, {"abort_all": True}], ids=["of_the_request", "of_all"])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.usefixtures("other")
def test_an_abort(live: Live, story: Story, point: str, asked: dict[str, Any]) -> None:
    conversation = story.begin(live)
    with live.stopped(point) as stop:
        answer = live.send(story.edited, note(conversation, "2", "1"), rid="mine", max_new_tokens=1000)
        stop.wait()
        live.http.post("/abort_request", json=asked)
    assert len(answer.result().output_ids) < 500
    story.goes_on(live, conversation, may_be_prefilled=True)


@pytest.mark.parametrize("how", ["flush", "weights"])
@pytest.mark.parametrize("point", POINTS)
def test_a_cache_that_is_emptied(live: Live, story: Story, model_dir: Path, point: str, how: str) -> None:
    conversation = story.begin(live)
    with live.stopped(point) as stop:
        answer = live.send(story.edited, note(conversation, "2", "1"))
        stop.wait()
        # Refused while the scheduler has not let go yet of a request that has answered.
        path, body = (
            ("/flush_cache", {}) if how == "flush" else ("/update_weights_from_disk", {"model_path": str(model_dir)})
        )
        live.wait_until(lambda: live.http.post(path, json=body).status_code == 200)
    assert answer.result().output_ids == story.plain
    story.goes_on_from_nothing(live, conversation)


@pytest.mark.parametrize("what", ["r", "base"])
@pytest.mark.usefixtures("other")
def test_an_eviction_before_the_move(live: Live, story: Story, what: str) -> None:
    conversation = story.begin(live)
    with live.stopped("before_move") as stop:
        answer = live.send(story.edited, note(conversation, "2", "1"))
        stop.wait()
        if what == "r":
            live.evict(story.edited[:107], 104)
        else:
            live.evict(story.base + story.base_output[:-1], 100)
    assert (status(answer.result()), answer.result().output_ids) == ("evicted", story.plain)
    later = story.edit_again(live, conversation)
    assert (status(later), later.output_ids) == ("spliced", story.spliced_after_plain)


@pytest.mark.parametrize("at_once", [False, True], ids=["one_after_the_other", "at_once"])
@pytest.mark.parametrize("num_turns", [1, 2], ids=["copied", "moved_in_place"])
@pytest.mark.usefixtures("other")
def test_the_same_turn_twice(live: Live, story: Story, num_turns: int, at_once: bool) -> None:
    conversation = story.begin(live, num_turns=num_turns)
    edit, output_ids = [(story.edit, story.spliced), (story.edit_again, story.spliced_again)][num_turns - 1]
    if at_once:
        with live.stopped("before_move") as stop, ThreadPoolExecutor(2) as threads:
            answers = [threads.submit(edit, live, conversation) for _ in range(2)]
            stop.wait()
            live.wait_until(lambda: live.counts()["edited_requests"] == 2)
            stop.let_go()
        both = [answer.result() for answer in answers]
    else:
        both = [edit(live, conversation), edit(live, conversation)]
    assert [(status(answer), answer.output_ids) for answer in both] == [("spliced", output_ids)] * 2
    moved = [answer.outcome.get("moved_tokens", 0) for answer in both if answer.outcome]
    assert sorted(map(bool, moved)) == [False, True]
    prompt = [story.edited, story.edited_again][num_turns - 1]
    # What the first of them left of `edited` beside it, and the three generated tokens that have rows.
    assert live.state(conversation)["own_tokens"] == len(prompt) + 3
    if num_turns == 1:
        story.goes_on(live, conversation)


@pytest.mark.usefixtures("other")
def test_two_turns_side_by_side_copy_from_one_base(live: Live, story: Story) -> None:
    """Both edit the base in the shared namespace, where rows are only ever copied."""
    alone, conversation = story.begin(live), story.begin(live)
    prompt = story.base[:30] + live.ids(2, 6) + story.base[50:] + live.ids(5, 7)
    reference = live.generate(prompt, note(alone, "b", "1"))
    with live.stopped("before_move") as stop:
        first = live.send(story.edited, note(conversation, "2", "1"))
        stop.wait()
        second = live.send(prompt, note(conversation, "b", "1"))
        live.wait_until(lambda: live.counts()["edited_requests"] == 2)
    assert (status(first.result()), first.result().output_ids) == ("spliced", story.spliced)
    assert (status(second.result()), second.result().output_ids) == ("spliced", reference.output_ids)
    story.goes_on(live, conversation)
    later = live.generate(prompt[:5] + prompt[9:], note(conversation, "c", "b"))
    assert status(later) == "spliced"


@pytest.mark.usefixtures("other")
def test_two_turns_side_by_side_move_one_base(live: Live, story: Story) -> None:
    """In the conversation's own namespace the first one takes the base's rows away: the second is prefilled."""
    prompt = story.edited[:70] + live.ids(2, 6) + story.edited[90:] + live.ids(5, 7)
    plain = live.generate(prompt).output_ids
    conversation = story.begin(live, num_turns=2)
    with live.stopped("before_move") as stop:
        first = live.send(story.edited_again, note(conversation, "3", "2"))
        stop.wait()
        second = live.send(prompt, note(conversation, "b", "2"))
        live.wait_until(lambda: live.counts()["edited_requests"] == 2)
    assert (status(first.result()), first.result().output_ids) == ("spliced", story.spliced_again)
    assert (status(second.result()), second.result().output_ids) == ("evicted", plain)
    for turn, grown in (("3", story.edited_again), ("b", prompt)):
        later = live.generate(grown[:5] + grown[9:], note(conversation, turn + " later", turn))
        assert status(later) == "spliced"


@pytest.mark.usefixtures("other")
def test_an_edit_of_a_base_that_decodes_in_the_own_namespace(live: Live, story: Story) -> None:
    """Its rows are held, so they are copied, and it goes on undisturbed."""
    alone, conversation = story.begin(live), story.begin(live)
    reference = live.generate(story.edited, note(alone, "2", "1"), max_new_tokens=150).output_ids
    base = live.send(story.edited, note(conversation, "2", "1"), max_new_tokens=150)
    live.wait_until(lambda: live.cached(story.edited, conversation=conversation) == len(story.edited))
    later = story.edit_again(live, conversation)
    assert not base.done(), "the base ended before the edit; make it longer"
    assert (status(later), later.output_ids) == ("spliced", story.spliced_again)
    assert base.result().output_ids == reference


# --- servers of their own -------------------------------------------------------------------------------------------


@dataclass
class Mortal:
    """A server that a test may kill. It is started again, on the same port, when it is needed next.

    Its pool is small, and its tree core the Python one, whose namespaces can be listed.
    """

    _model_dir: Path
    _env: dict[str, str]
    _port: int = field(default_factory=free_port)
    _running: ExitStack = field(default_factory=ExitStack)
    _server: RunningServer | None = None

    def live(self) -> Live:
        if self._server is None:
            self._running.close()
            env = self._env | {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"}
            args = ("--max-total-tokens", "3000")
            server = serve(self._model_dir, port=self._port, env=env, extra_args=args, fork=True)
            self._server = self._running.enter_context(server)
        live = self._running.enter_context(Live(self._server.url))
        live.flush()
        return live

    def kill(self) -> None:
        """Kill all of its processes at once."""
        assert self._server is not None
        os.killpg(self._server.pid, signal.SIGKILL)
        self._server = None


@pytest.fixture(scope="module")
def mortal(model_dir: Path, probe_env: dict[str, str]) -> Iterator[Mortal]:
    mortal = Mortal(model_dir, probe_env | {"LEYLINE_ONE_STEP": "0"})
    with mortal._running:
        yield mortal


@pytest.mark.parametrize("what", ["evicted", "aborted", "internal_error"])
def test_the_second_of_three_directives_is_refused(mortal: Mortal, story: Story, what: str) -> None:
    """What the first one moved in place stays, what it parked for the second is dropped."""
    live = mortal.live()
    base = story.edited
    starts = [20, 80, 150]
    prompt = base[:20] + live.ids(2, 1) + base[30:80] + live.ids(2, 2) + base[90:150] + live.ids(2, 3) + base[160:]
    prompt += live.ids(5, 4)
    first = {
        "directives": [{"start": 20, "end": 30, "replacement_ids": prompt[20:22]}],
        "base_len": 80,
        "base_hash": hash_token_ids(base[:80]),
    }
    alone, conversation = (story.begin(live, num_turns=2) for _ in range(2))
    reference = live.generate(prompt, note(alone, "3", "2", **first))
    assert status(reference) == "spliced"
    with live.stopped("before_move" if what != "aborted" else "after_prefill", skip=1) as stop:
        answer = live.send(prompt, note(conversation, "3", "2"), rid="mine")
        stop.wait()
        if what == "evicted":
            live.evict(prompt[:74], 72, conversation=conversation)
        elif what == "aborted":
            live.http.post("/abort_request", json={"rid": "mine"})
        else:
            live.break_kernel()
    outcome = answer.result().outcome
    assert outcome is not None
    assert (outcome["status"], outcome["reason"], outcome["moved_tokens"]) == ("partial", what, 50)
    assert [directive["start"] for directive in outcome["directives"]] == starts
    assert ["edit_id" in directive for directive in outcome["directives"]] == [True, False, False]
    if what != "aborted":
        assert answer.result().output_ids == reference.output_ids
    live.assert_conserved()
    assert not any("parked" in (salt or "") for _, salt in live.snapshot().namespaces())
    later = live.generate(prompt[:5] + prompt[9:], note(conversation, "4", "3"))
    assert status(later) == "spliced"
    live.assert_conserved()


@pytest.mark.parametrize("point", POINTS)
def test_a_release_during_a_turn(mortal: Mortal, story: Story, point: str) -> None:
    """It waits for the splice, not for the request: that finds the rows or not, and what it caches is dropped, too."""
    live = mortal.live()
    conversation = story.begin(live)
    release = {"conversation": conversation}
    with live.stopped(point) as stop, ThreadPoolExecutor(1) as thread:
        answer = live.send(story.edited, note(conversation, "2", "1"))
        stop.wait()
        released = thread.submit(live.http.post, "/leyline/release", json=release)
        stop.let_go()
    assert released.result().status_code == 200
    assert status(answer.result()) == "spliced"
    assert answer.result().output_ids in (story.spliced, story.plain)
    live.assert_conserved()
    assert live.snapshot().namespaces() == {(None, None)}
    assert live.http.post("/leyline/release", json=release).status_code == 404
    story.goes_on_from_nothing(live, conversation)


@pytest.mark.parametrize("point", ["before_close", "after_close"])
def test_a_caller_who_leaves_during_a_forget(mortal: Mortal, story: Story, point: str) -> None:
    """What was to be forgotten goes all the same."""
    live = mortal.live()
    conversation = story.begin(live, num_turns=2)
    with live.stopped(point) as stop:
        with live.caller(story.edited_again, note(conversation, "3", "2", forget="all"), stream=True):
            stop.wait()
        live.wait_until(lambda: live.counts()["edited_requests"] == 0)
    live.assert_conserved()
    assert live.snapshot().namespaces() == {(None, None)}
    story.goes_on_from_nothing(live, conversation)


def test_a_forget_whose_copy_fails(mortal: Mortal, story: Story) -> None:
    """What it keeps is held by a running request and copied. The turn is prefilled; the release cleans up."""
    live = mortal.live()
    plain = live.generate(story.edited_again).output_ids
    conversation = story.begin(live)
    running = live.send(story.edited, note(conversation, "2", "1"), max_new_tokens=100)
    live.wait_until(lambda: live.cached(story.edited, conversation=conversation) == len(story.edited))
    live.break_kernel()
    answer = live.generate(story.edited_again, note(conversation, "3", "2", mode="forget"))
    assert not running.done(), "nothing was held; let it generate more"
    assert (status(answer), answer.output_ids) == ("internal_error", plain)
    running.result()
    live.assert_conserved()
    assert live.http.post("/leyline/release", json={"conversation": conversation}).status_code == 200
    assert live.snapshot().namespaces() == {(None, None)}


def test_a_pool_too_small_for_everything(mortal: Mortal, story: Story) -> None:
    """Six conversations that together need twice the pool, each edited three times, all at once: all are answered."""
    live = mortal.live()
    bases = [live.ids(600, 10 + idx) for idx in range(6)]
    plain = []
    for base in bases:
        plain.append(live.generate(base).output_ids)
        live.flush()

    def talk(idx: int) -> list[Answer]:
        conversation, prompt = new_conversation(), bases[idx]
        answers = [live.generate(prompt, note(conversation, "0"))]
        for turn in range(1, 4):
            prompt = prompt[: 50 * turn] + live.ids(3, turn) + prompt[50 * turn + 30 :] + live.ids(5, 20 + turn)
            answers.append(live.generate(prompt, note(conversation, str(turn), str(turn - 1))))
        return answers

    with ThreadPoolExecutor(6) as threads:
        told = list(threads.map(talk, range(6), timeout=300))
    assert [answers[0].output_ids for answers in told] == plain
    outcomes = [status(answer) for answers in told for answer in answers[1:]]
    assert {len(answer.output_ids) for answers in told for answer in answers} == {4}
    assert set(outcomes) <= {"spliced", "partial", "evicted", "pool_full"}
    assert set(outcomes) & {"evicted", "pool_full"}, "the pool was large enough; make it smaller"
    live.assert_conserved()
    story.goes_on(live, story.begin(live))


def test_a_conversation_that_does_not_fit_twice(mortal: Mortal) -> None:
    """There is no room for a copy: every turn is prefilled, and answered."""
    live = mortal.live()
    base = live.ids(1700, 30)
    edited = base[:100] + base[150:] + live.ids(5, 31)
    plain = live.generate(edited).output_ids
    live.flush()
    conversation = new_conversation()
    live.generate(base, note(conversation, "1"))
    for turn in ("2", "3"):
        answer = live.generate(edited, note(conversation, turn, "1"))
        assert (status(answer), answer.output_ids) == ("pool_full" if turn == "2" else "evicted", plain)
    live.assert_conserved()


SYSTEM = {"role": "system", "content": "You fix packages."}
TASK = {"role": "user", "content": "The tests fail. " + "Here is what I saw. " * 20}
MORE = {"role": "user", "content": "Go on, step by step. " * 10}
CHAT = {"model": "m", "temperature": 0, "max_tokens": 4}


def _plain_answer(live: Live, messages: list[dict[str, Any]]) -> Any:
    return live.http.post("/v1/chat/completions", json={**CHAT, "messages": messages}).json()["choices"][0]["message"]


@pytest.mark.parametrize("point", ["after_prefill", "after_move"])
def test_a_server_that_is_killed_and_started_again(mortal: Mortal, point: str) -> None:
    """The client sends the turn again: it is answered from nothing, and the one after it is spliced."""
    live = mortal.live()
    conversation, messages = Conversation(), [SYSTEM, TASK, MORE]
    with Client(live.url) as client, ThreadPoolExecutor(1) as thread:
        messages += [client.chat(conversation, messages, **CHAT).message, MORE]
        conversation.edit(1, "[stale]")
        with live.stopped(point) as stop:
            lost = thread.submit(client.chat, conversation, messages, **CHAT)
            stop.wait()
            mortal.kill()
        with pytest.raises(SpliceTransportError):
            lost.result(timeout=60)

        live = mortal.live()
        again = client.chat(conversation, messages, **CHAT)
        assert again.outcome is not None
        assert (again.outcome.status, again.outcome.reason) == ("refused", "unknown_base")
        messages += [again.message, MORE]
        conversation.edit(0, "[stale, too]")
        later = client.chat(conversation, messages, **CHAT)
        assert later.outcome is not None
        assert later.outcome.status == "spliced"
    live.assert_conserved()
    assert again.message == _plain_answer(live, [SYSTEM, {**TASK, "content": "[stale]"}, *messages[2:5]])


def test_tokenizer_workers_without_the_plugin(live: Live, model_dir: Path, probe_env: dict[str, str]) -> None:
    """SGLang's tokenizer workers load no plugins: the note is ignored, and that the plugin is not there shows."""
    edited = [SYSTEM, {**TASK, "content": "[stale]"}, MORE]
    chat = {**CHAT, "messages": edited, "return_prompt_token_ids": True}
    expected = live.http.post("/v1/chat/completions", json=chat).json()
    with (
        serve(model_dir, env=probe_env, extra_args=("--tokenizer-worker-num", "2"), fork=True) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        assert http.get("/leyline/capabilities").status_code == 404
        conversation = new_conversation()
        for turn, base in (("1", None), ("2", "1"), ("3", "2"), ("4", "3")):
            their_note = {"custom_params": {"leyline": json.dumps(note(conversation, turn, base))}}
            response = http.post("/v1/chat/completions", json={**chat, **their_note})
            assert response.status_code == 200
            assert "x-leyline" not in response.headers
            choice = response.json()["choices"][0]
            assert choice["prompt_token_ids"] == expected["choices"][0]["prompt_token_ids"]
            assert choice["message"] == expected["choices"][0]["message"]
