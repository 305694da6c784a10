"""The rules of the note, on the client's side."""

from __future__ import annotations

import copy
import json
from typing import Any

import httpx
import pytest

from leyline_agent import Client, Conversation, Policy, SpliceTransportError
from leyline_agent.core import messages as messages_module
from leyline_agent.core.protocol import ROUTING_HEADER, Note, Outcome, Reason, Status

Chat = dict[str, Any]


def call(idx: int) -> Chat:
    function = {"name": "read", "arguments": json.dumps({"path": f"f{idx}"})}
    calls = [{"id": f"c{idx}", "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def result(idx: int) -> Chat:
    return {"role": "tool", "tool_call_id": f"c{idx}", "content": f"output {idx} " * 10}


class Agent:
    """Sends a growing history through the real client; every answer is a tool call."""

    def __init__(self, server: Any, conversation: Conversation) -> None:
        self.server, self.conversation = server, conversation
        self.client = Client("http://server", transport=httpx.MockTransport(server))
        self.messages: list[Chat] = [
            {"role": "system", "content": "The port is 80."},
            {"role": "user", "content": "Debug it."},
        ]
        self.body: Chat = {"model": "m"}
        self.num_turns = 0

    def send(self, messages: list[Chat] | None = None) -> Note:
        self.server.answers = [call(self.num_turns + 1)]
        reply = self.client.chat(self.conversation, messages or self.messages, **self.body)
        self.num_turns += 1
        self.messages += [reply.message, result(self.num_turns)]
        return self.note

    @property
    def note(self) -> Note:
        return Note.model_validate(self.server.notes[-1])


@pytest.fixture
def agent(server: Any, stub_old_outputs: Policy) -> Agent:
    return Agent(server, Conversation(stub_old_outputs))


@pytest.fixture
def spliced_agent(agent: Agent) -> Agent:
    """Three turns, of which the third stubbed the first output; its edit is called e1."""
    agent.send()
    agent.send()
    agent.server.will_splice("e1")
    agent.send()
    return agent


def test_first_note_names_no_base_and_the_next_names_the_turn_before(agent: Agent) -> None:
    first = agent.send()
    second = agent.send()
    assert (first.base, first.mode) == (None, "amortize")
    assert second.base == first.turn
    assert first.turn != second.turn


def test_a_policy_edit_is_amortized(spliced_agent: Agent) -> None:
    assert spliced_agent.note.mode == "amortize"
    assert spliced_agent.note.forget == ()
    assert spliced_agent.server.bodies[-1]["messages"][3]["content"] == "[gone]"


def test_input_is_not_mutated(agent: Agent) -> None:
    agent.send()
    body = {"model": "m", "messages": agent.messages, "custom_params": {"thinking_budget": 5}}
    before = copy.deepcopy(body)
    prepared = agent.conversation.prepare(body)
    assert body == before
    assert prepared.body["custom_params"]["thinking_budget"] == 5
    assert prepared.body["messages"] is not body["messages"]


def test_a_dict_that_is_changed_in_place_is_a_change(spliced_agent: Agent) -> None:
    spliced_agent.messages[2]["tool_calls"][0]["function"]["arguments"] = '{"path": "another"}'
    note = spliced_agent.send()
    assert note.mode == "reprefill"
    sent = spliced_agent.server.bodies[-1]["messages"]
    assert sent[2]["tool_calls"][0]["function"]["arguments"] == '{"path": "another"}'


def test_what_the_receiver_does_to_a_prepared_request_changes_nothing_of_ours(agent: Agent) -> None:
    agent.send()
    agent.send()
    prepared = agent.conversation.prepare({"messages": agent.messages})
    expected = copy.deepcopy(prepared.body["messages"])
    for message in prepared.body["messages"]:
        message["content"] = "overwritten"
        for entry in message.get("tool_calls", []):
            entry["function"]["name"] = "overwritten"
    assert [message.to_openai() for message in prepared.messages] == expected
    assert agent.conversation.prepare({"messages": agent.messages}).body["messages"] == expected


def test_a_turn_digests_what_is_new_and_nothing_twice(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(5):
        agent.send()
    canonical, encoded = messages_module._canonical, []
    monkeypatch.setattr(messages_module, "_canonical", lambda raw: encoded.append(raw) or canonical(raw))
    agent.send()
    # The call and the output that came since, and the stub of the output that became old.
    assert [raw["role"] for raw in encoded] == ["assistant", "tool", "tool"]
    assert encoded[2]["content"] == "[gone]"


def test_changed_fact_in_the_system_prompt_says_reprefill(spliced_agent: Agent) -> None:
    spliced_agent.messages[0] = {"role": "system", "content": "The port is 81."}
    note = spliced_agent.send()
    assert (note.mode, note.forget) == ("reprefill", ())
    assert spliced_agent.send().mode == "amortize"


@pytest.mark.parametrize(
    "change",
    [
        {"tools": [{"type": "function", "function": {"name": "write"}}]},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"tool_choice": "none"},
        {"model": "other"},
        {"cache_salt": "mine"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_changed_argument_of_the_template_says_reprefill(agent: Agent, tools: list[Chat], change: Chat) -> None:
    agent.body = {"model": "m", "tools": tools}
    agent.send()
    agent.body = {**agent.body, **change}
    assert agent.send().mode == "reprefill"
    assert agent.send().mode == "amortize"


def test_sampling_parameters_are_no_change(agent: Agent) -> None:
    agent.send()
    agent.body = {"model": "m", "temperature": 0.5, "max_tokens": 7}
    assert agent.send().mode == "amortize"


def test_corrected_fact_says_reprefill_again_after_an_aborted_request(agent: Agent) -> None:
    first = agent.send()
    agent.messages[1] = {"role": "user", "content": "Debug the other one."}
    agent.server.fail_next = httpx.ReadTimeout("aborted")
    with pytest.raises(SpliceTransportError):
        agent.send()
    aborted = agent.note
    retried = agent.send()
    assert (aborted.mode, retried.mode) == ("reprefill", "reprefill")
    assert aborted.base == retried.base == first.turn
    assert aborted.turn != retried.turn


@pytest.mark.parametrize("later", [[], [{"role": "user", "content": "12:01"}]], ids=["reminder", "clock"])
def test_message_that_vanishes_from_the_end_is_amortized(agent: Agent, later: list[Chat]) -> None:
    agent.send([*agent.messages, {"role": "user", "content": "12:00"}])
    assert agent.send([*agent.messages, *later]).mode == "amortize"


def test_message_that_vanishes_from_the_middle_says_reprefill(agent: Agent) -> None:
    agent.send()
    agent.send()
    del agent.messages[1]
    assert agent.send().mode == "reprefill"


def test_edited_answer_says_reprefill(agent: Agent) -> None:
    agent.send()
    agent.messages[2] = {**agent.messages[2], "content": "I did not say this."}
    assert agent.send().mode == "reprefill"


def test_answer_sent_back_in_another_form_is_unchanged(agent: Agent) -> None:
    agent.send()
    received = agent.messages[2]
    function = {"name": "read", "arguments": '{ "path":"f1" }'}
    calls = [{**received["tool_calls"][0], "function": function}]
    agent.messages[2] = {"role": "assistant", "content": "", "tool_calls": calls}
    assert agent.send().mode == "amortize"


def test_answer_without_its_reasoning_is_unchanged_and_with_another_is_not(server: Any) -> None:
    for sent_back, mode in ((None, "amortize"), ("hm, no", "reprefill")):
        conversation = Conversation()
        messages = [{"role": "user", "content": "u"}]
        prepared = conversation.prepare({"messages": messages})
        conversation.commit(prepared, {"role": "assistant", "content": "a", "reasoning_content": "hm"})
        answer = {"role": "assistant", "content": "a"} | ({"reasoning_content": sent_back} if sent_back else {})
        note = conversation.prepare({"messages": [*messages, answer]}).note
        assert note is not None
        assert note.mode == mode


def test_another_branch_says_reprefill(agent: Agent) -> None:
    agent.send()
    agent.send()
    assert agent.send(agent.messages[:2]).mode == "reprefill"


def test_corrected_fact_that_was_amortized_is_forgotten(spliced_agent: Agent) -> None:
    spliced_agent.messages[3] = {**result(1), "content": "another output 1 " * 10}
    note = spliced_agent.send()
    assert spliced_agent.server.bodies[-1]["messages"][3]["content"] == "[gone]"
    assert (note.mode, note.forget) == ("reprefill", ("e1",))
    assert spliced_agent.send().forget == ()


def test_edit_ids_survive_turns_and_name_only_the_changed_message(spliced_agent: Agent) -> None:
    spliced_agent.server.will_splice("e2")
    spliced_agent.send()
    spliced_agent.server.will_splice("e3")
    spliced_agent.send()
    spliced_agent.messages[3] = {**result(1), "content": "another output 1 " * 10}
    assert spliced_agent.send().forget == ("e1",)


def test_truncated_list_of_directives_is_forgotten_as_all(agent: Agent) -> None:
    agent.send()
    agent.send()
    agent.server.will_splice("e1", num_directives=3)
    agent.send()
    agent.messages[3] = {**result(1), "content": "another output 1 " * 10}
    assert agent.send().forget == "all"


def test_edit_of_an_aborted_turn_is_forgotten_as_all(agent: Agent) -> None:
    agent.send()
    agent.send()
    agent.server.fail_next = httpx.ReadTimeout("aborted after the splice")
    with pytest.raises(SpliceTransportError):
        agent.send()
    agent.messages[3] = {**result(1), "content": "another output 1 " * 10}
    assert agent.send().forget == "all"


def test_refused_forget_is_asked_again(spliced_agent: Agent) -> None:
    spliced_agent.messages[3] = {**result(1), "content": "another output 1 " * 10}
    spliced_agent.server.outcomes = [Outcome(status=Status.REFUSED, reason=Reason.TIMEOUT)]
    spliced_agent.send()
    again = spliced_agent.send()
    assert (again.mode, again.forget) == ("reprefill", ("e1",))
    assert spliced_agent.send().forget == ()


def test_unexplained_changes_amortize_is_the_users_to_set(server: Any, stub_old_outputs: Policy) -> None:
    agent = Agent(server, Conversation(stub_old_outputs, unexplained_changes="amortize"))
    agent.send()
    agent.messages[0] = {"role": "system", "content": "The port is 81."}
    assert (agent.send().mode, agent.note.forget) == ("amortize", ())


def test_rule_that_forgets_says_forget_once(server: Any) -> None:
    rule = {"name": "secret", "select": {"role": "tool", "older_than": {"turns": 1}}, "replace": "-", "mode": "forget"}
    agent = Agent(server, Conversation(Policy.model_validate({"version": 1, "rules": [rule]})))
    modes = []
    for _ in range(4):
        modes.append(agent.send().mode)
        if agent.num_turns > 1:
            # Nothing to forget in it.
            agent.messages[-1]["content"] = ""
    assert modes == ["amortize", "amortize", "forget", "amortize"]


def test_forgetting_rule_forgets_the_amortized_edit_of_the_same_message(agent: Agent) -> None:
    agent.send()
    agent.send()
    agent.server.will_splice("e1")
    agent.send()
    agent.conversation.edit(3, "[gone]", mode="forget")
    note = agent.send()
    assert (note.mode, note.forget) == ("forget", ("e1",))


def test_policy_without_rules_sends_the_same_request_as_without_us(server: Any) -> None:
    agent = Agent(server, Conversation(Policy(version=1, rules=())))
    agent.client.chat(agent.conversation, agent.messages, model="m")
    assert server.bodies == [{"model": "m", "messages": agent.messages}]
    assert ROUTING_HEADER not in server.requests[0].headers


def test_policy_without_rules_sends_notes_once_something_is_edited(server: Any) -> None:
    agent = Agent(server, Conversation(Policy(version=1, rules=())))
    for content in ("q", "r"):
        agent.client.chat(agent.conversation, [{"role": "user", "content": content}], model="m")
    agent.conversation.edit(0, "edited")
    agent.client.chat(agent.conversation, [{"role": "user", "content": "r"}], model="m")
    assert "custom_params" not in server.bodies[1]
    assert json.loads(server.bodies[2]["custom_params"]["leyline"]).get("base") is None


@pytest.mark.parametrize("bad", ["", "me", "my-agent-conversation-number-000001"])
def test_conversation_refuses_a_guessable_id(bad: str) -> None:
    with pytest.raises(ValueError, match=r"the conversation id .* use secrets\.token_urlsafe\(24\)"):
        Conversation(conversation_id=bad)


def test_routing_key_is_stable_and_not_the_id(agent: Agent) -> None:
    agent.send()
    agent.send()
    keys = {request.headers[ROUTING_HEADER] for request in agent.server.requests}
    assert len(keys) == 1
    assert agent.conversation.id not in keys.pop()


def test_ids_are_random_or_derived_from_a_key() -> None:
    key = "k" * 16
    assert Conversation().id != Conversation().id
    assert len(Conversation().id) >= 22
    assert Conversation.for_thread(key, "t").id == Conversation.for_thread(key, "t").id
    assert Conversation.for_thread(key, "t").id != Conversation.for_thread(key, "u").id
    assert Conversation.for_thread(key, "t").id != Conversation.for_thread("l" * 16, "t").id
    with pytest.raises(ValueError, match="got a key of 5 bytes, expected 16"):
        Conversation.for_thread("short", "t")


def test_process_that_does_not_know_the_base_says_reprefill() -> None:
    conversation = Conversation.for_thread("k" * 16, "t")
    note = conversation.prepare({"messages": [{"role": "user", "content": "u"}]}).note
    assert note is not None
    assert (note.base, note.mode) == (None, "reprefill")


def test_late_answer_of_a_parallel_branch_is_no_base_for_another(agent: Agent) -> None:
    agent.send()
    left = agent.conversation.prepare({"model": "m", "messages": [*agent.messages, {"role": "user", "content": "l"}]})
    right = agent.conversation.prepare({"model": "m", "messages": [*agent.messages, {"role": "user", "content": "r"}]})
    assert left.note is not None
    assert right.note is not None
    assert left.note.base == right.note.base
    agent.conversation.commit(right, {"role": "assistant", "content": "R"})
    agent.conversation.commit(left, {"role": "assistant", "content": "L"})
    goes_on = [*agent.messages, {"role": "user", "content": "r"}, {"role": "assistant", "content": "R"}]
    note = agent.conversation.prepare({"model": "m", "messages": goes_on}).note
    assert note is not None
    assert (note.base, note.mode) == (left.turn, "reprefill")


@pytest.mark.parametrize("body", [{"input_ids": [1]}, {"custom_params": {"leyline": "{}"}}], ids=["ids", "note"])
def test_request_that_is_not_ours_to_edit_is_refused(body: Chat) -> None:
    with pytest.raises(ValueError, match=r"got input_ids|has a 'leyline' already"):
        Conversation().prepare({"messages": [{"role": "user", "content": "u"}], **body})


def test_process_that_does_not_know_what_was_amortized_forgets_all_of_it() -> None:
    """The one before it may have amortized this very message, and its edit ids are gone with it."""
    conversation = Conversation.for_thread("k" * 16, "thread")
    messages = [{"role": "user", "content": "go"}, {"role": "user", "content": "the key is sk-1"}]
    conversation.edit(messages[1], "[secret]", mode="forget")
    note = conversation.prepare({"messages": messages}).note
    assert (note.mode, note.forget) == ("forget", "all")
    fresh = Conversation()
    fresh.edit(messages[1], "[secret]", mode="forget")
    note = fresh.prepare({"messages": messages}).note
    assert (note.mode, note.forget) == ("amortize", ())
