"""Which conversation a call belongs to. Answers are made up; nothing is sent."""

from __future__ import annotations

from typing import Any

import pytest

from leyline_agent import Conversation, ConversationPool, Policy
from leyline_agent.conversation_pool import Place
from leyline_agent.core.messages import Message, messages_from_openai

KEY = b"0123456789abcdef"
AGENT, EXPERT = Place("model"), Place("expert|model")
History = list[dict[str, Any]]


class Caller:
    """Calls as an agent does, and keeps the notes."""

    def __init__(self, pool: ConversationPool, place: Place = AGENT, thread_id: str = "t") -> None:
        self.pool, self.place, self.thread_id = pool, place, thread_id
        self.modes: list[str] = []

    def begin(self, history: History) -> tuple[Conversation, Any]:
        conversation = self.pool.of_call(self.thread_id, self.place, messages_from_openai(history))
        prepared = conversation.prepare({"messages": history})
        self.modes.append(prepared.note.mode if prepared.note else "none")
        return conversation, prepared

    def end(self, history: History, conversation: Conversation, prepared: Any, text: str) -> History:
        answer = {"role": "assistant", "content": text}
        turn = conversation.commit(prepared, answer, expects_outcome=False)
        self.pool.answered(self.thread_id, self.place, messages_from_openai(history), turn, conversation)
        return [*history, answer]

    def ask(self, history: History, question: str) -> tuple[Conversation, History]:
        history = [*history, {"role": "user", "content": question}]
        conversation, prepared = self.begin(history)
        return conversation, self.end(history, conversation, prepared, f"answer to {question}")


@pytest.fixture
def pool() -> ConversationPool:
    return ConversationPool()


def test_a_history_that_grows_is_one_conversation(pool: ConversationPool) -> None:
    caller, history, found = Caller(pool), [], []
    for idx in range(4):
        conversation, history = caller.ask(history, f"{idx}")
        found.append(conversation)
    assert found == found[:1] * 4
    assert caller.modes == ["amortize"] * 4
    assert pool.of_thread("t") is found[0]


def test_branches_that_take_turns_get_a_conversation_each(pool: ConversationPool) -> None:
    caller = Caller(pool)
    _, stem = caller.ask([], "stem")
    left, right = stem, stem
    caller.modes.clear()
    for idx in range(4):
        _, left = caller.ask(left, f"left {idx}")
        _, right = caller.ask(right, f"right {idx}")
    # The second branch leaves the last answered turn; from then on each has its own to go on from.
    assert caller.modes == ["amortize", "reprefill"] + ["amortize"] * 6
    assert len(pool.all_of_thread("t")) == 2


def test_a_branch_that_is_never_gone_on_with_makes_no_conversation(pool: ConversationPool) -> None:
    caller = Caller(pool)
    first, stem = caller.ask([], "stem")
    for idx in range(20):
        assert caller.ask(stem, f"way {idx}")[0] is first
    assert pool.all_of_thread("t") == [first]


def test_a_changed_history_stays_in_its_conversation(pool: ConversationPool) -> None:
    caller = Caller(pool)
    first, history = caller.ask([], "What is the port?")
    changed = [history[0], {"role": "assistant", "content": "It is 81."}]
    second, history = caller.ask(changed, "Sure?")
    assert second is first
    assert caller.modes == ["amortize", "reprefill"]


def test_the_same_turn_answered_twice_is_no_branch(pool: ConversationPool) -> None:
    caller = Caller(pool)
    for _ in range(2):
        first, history = caller.ask([], "same")
    second, history = caller.ask(history, "next")
    assert second is first
    assert pool.all_of_thread("t") == [first]


def test_number_of_branches_is_bounded(pool: ConversationPool) -> None:
    caller = Caller(pool)
    _, stem = caller.ask([], "stem")
    ways = [stem] * 12
    for idx in range(3):
        ways = [caller.ask(way, f"{number}.{idx}")[1] for number, way in enumerate(ways)]
    assert len(pool.all_of_thread("t")) == 8


def test_places_are_conversations_of_their_own(pool: ConversationPool) -> None:
    agent, expert = Caller(pool), Caller(pool, EXPERT)
    history: History = []
    inner: History = []
    for idx in range(3):
        outer_conversation, history = agent.ask(history, f"{idx}")
        inner_conversation, inner = expert.ask(inner, f"within {idx}")
    assert outer_conversation is not inner_conversation
    assert agent.modes == expert.modes == ["amortize"] * 3
    assert pool.of_thread("t") is inner_conversation


def test_calls_at_once_may_share_a_conversation_that_has_no_base(pool: ConversationPool) -> None:
    caller = Caller(pool)
    histories = [[{"role": "user", "content": name}] for name in ("left", "right")]
    begun = [caller.begin(history) for history in histories]
    assert begun[0][0] is begun[1][0]
    grown = [caller.end(h, *b, "yes") for h, b in zip(histories, begun, strict=True)]
    found = [caller.ask(history, "more")[0] for history in grown]
    assert found[0] is not found[1]
    assert caller.modes == ["amortize"] * 4


def test_edits_by_hand_are_those_of_the_whole_thread() -> None:
    pool = ConversationPool(Policy.model_validate({"version": 1, "rules": []}))
    # Before any call.
    main = pool.of_thread("t")
    main.edit({"role": "user", "content": "my key is 123"}, "[secret]", mode="forget")
    agent, expert = Caller(pool), Caller(pool, EXPERT)
    secret: History = [{"role": "user", "content": "my key is 123"}]
    prompts = []
    for caller in (agent, expert):
        conversation, prepared = caller.begin(secret)
        caller.end(secret, conversation, prepared, "yes")
        prompts.append(prepared.body["messages"][0]["content"])
    assert prompts == ["[secret]", "[secret]"]
    assert pool.all_of_thread("t")[0] is main
    # A conversation that has sent an edit has to tell when it is taken back.
    main.undo_edit(secret[0])
    conversation, prepared = expert.begin([*secret, {"role": "assistant", "content": "yes"}, *secret])
    assert prepared.body["messages"][0]["content"] == "my key is 123"
    assert prepared.note is not None
    assert prepared.note.mode == "reprefill"


def test_ids_survive_a_restart_and_differ_by_place_and_branch() -> None:
    def run() -> list[str]:
        pool = ConversationPool(key=KEY)
        _, stem = Caller(pool).ask([], "stem")
        for place in (AGENT, EXPERT, Place("model", "http://other/v1")):
            caller = Caller(pool, place)
            ways = [stem, stem]
            for idx in range(2):
                ways = [caller.ask(way, f"{number}.{idx}")[1] for number, way in enumerate(ways)]
        return [conversation.id for conversation in pool.all_of_thread("t")]

    ids = run()
    assert len(set(ids)) == len(ids) == 6
    assert run() == ids
    assert len({*ids, Conversation.for_thread(KEY, "t").id}) == 7


def test_ids_do_not_depend_on_who_calls_first() -> None:
    first, second = ConversationPool(key=KEY), ConversationPool(key=KEY)
    # Made before the call, for an edit by hand.
    second.of_thread("t")
    places = [EXPERT, AGENT]
    ids = {place: Caller(first, place).ask([], "q")[0].id for place in places}
    assert {place: Caller(second, place).ask([], "q")[0].id for place in reversed(places)} == ids


def test_a_server_is_told_no_id_of_another() -> None:
    """Of each server the first place asked; a stranger is asked in a process of its own."""
    ids = [
        Caller(ConversationPool(key=KEY), Place("agent", server)).ask([], "q")[0].id
        for server in ("http://127.0.0.1:30000/v1", "https://stranger.example/v1")
    ]
    assert len(set(ids)) == 2


def test_no_thread_id_gives_the_id_of_another_threads_place() -> None:
    pool = ConversationPool(key=KEY)
    victim, other = Place("agent", "http://s"), Place("other", "http://s")
    ids = {Caller(pool, place, "victim").ask([], "q")[0].id for place in (victim, other)}
    for thread_id in (
        '["victim","other","http://s",0]',
        '["victim", "other", "http://s", 0]',
        '["leyline-pool", "victim", "agent", "http://s", 0]',
    ):
        ids.add(pool.of_thread(thread_id).id)
        ids.add(Caller(pool, victim, thread_id).ask([], "q")[0].id)
        ids.add(Conversation.for_thread(KEY, thread_id).id)
    assert len(ids) == 2 + 3 * 3


def _ask_anonymous(pool: ConversationPool, history: History, answer: str) -> tuple[Conversation, History]:
    conversation = pool.of_messages(history)
    message = {"role": "assistant", "content": answer}
    conversation.commit(conversation.prepare({"messages": history}), message, expects_outcome=False)
    pool.keep(conversation)
    return conversation, [*history, message]


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_without_a_thread_id_messages_find_what_they_go_on_from(pool: ConversationPool) -> None:
    opening = [_user("q"), {"role": "assistant", "content": "a"}]
    histories: list[History] = [[*opening, _user(f"{idx}")] for idx in range(3)]
    grown = [_ask_anonymous(pool, history, f"answer {idx}") for idx, history in enumerate(histories)]
    for conversation, history in grown:
        assert pool.of_messages([*history, _user("next")]) is conversation
        # Another answer, a message before it changed, and no answer.
        for other in ([*history[:-1], {"role": "assistant", "content": "b"}], [_user("p"), *history[1:]], history[:-1]):
            assert pool.of_messages(other) not in [one for one, _ in grown]
    # It is found where it stands now, and there alone.
    conversation, longer = _ask_anonymous(pool, [*grown[0][1], _user("next")], "more")
    assert conversation is grown[0][0]
    assert pool.of_messages([*longer, _user("?")]) is conversation
    assert pool.of_messages([*grown[0][1], _user("another")]) is not conversation


@pytest.mark.parametrize(("num_gone", "is_found"), [(1, True), (3, True), (4, False)])
def test_without_a_thread_id_reminders_before_the_answer_may_be_gone(
    pool: ConversationPool, num_gone: int, is_found: bool
) -> None:
    kept: History = [_user("q")]
    conversation, history = _ask_anonymous(pool, [*kept, *(_user(f"clock {idx}") for idx in range(num_gone))], "a")
    assert (pool.of_messages([*kept, history[-1], _user("next")]) is conversation) is is_found


def test_without_a_thread_id_the_last_used_stay() -> None:
    pool = ConversationPool(max_conversations=2)
    grown = [_ask_anonymous(pool, [_user(f"{idx}")], "a") for idx in range(3)]
    assert [pool.of_messages([*history, _user("n")]) is one for one, history in grown] == [False, True, True]
    # What is forgotten is not held by the index either.
    assert len(pool._anonymous._kept) == len(pool._anonymous.prompts._at) == 2


def test_without_a_thread_id_each_message_is_digested_once(
    pool: ConversationPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening = [_user(f"m{idx}") for idx in range(20)]
    for idx in range(10):
        _ask_anonymous(pool, [*opening, _user(f"{idx}")], "a")
    digest, digested = Message.digest, []
    monkeypatch.setattr(Message, "digest", lambda message: digested.append(message) or digest(message))
    pool.of_messages([*opening, _user("new")])
    assert len(digested) == len(opening) + 1
