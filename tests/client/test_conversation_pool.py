"""Which conversation a call belongs to. Answers are made up; nothing is sent."""

from __future__ import annotations

from typing import Any

import pytest

from leyline_agent import Conversation, ConversationPool, Policy
from leyline_agent.conversation_pool import Place
from leyline_agent.core.messages import messages_from_openai

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
        for place in (AGENT, EXPERT, Place("model", "http://other")):
            caller = Caller(pool, place)
            ways = [stem, stem]
            for idx in range(2):
                ways = [caller.ask(way, f"{number}.{idx}")[1] for number, way in enumerate(ways)]
        return [conversation.id for conversation in pool.all_of_thread("t")]

    ids = run()
    assert len(set(ids)) == len(ids) == 6
    assert run() == ids
    assert Conversation.for_thread(KEY, "t").id in ids


def test_a_subgraph_that_calls_first_does_not_take_the_threads_own_id() -> None:
    pool = ConversationPool(key=KEY)
    Caller(pool, EXPERT).ask([], "within")
    conversation, _ = Caller(pool).ask([], "outside")
    assert conversation.id == Conversation.for_thread(KEY, "t").id
