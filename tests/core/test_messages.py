import copy
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_agent.core.messages import Message, ToolCall, messages_from_openai

CALL = {
    "role": "assistant",
    "content": None,
    "reasoning_content": "hm",
    "tool_calls": [
        {"id": "c1", "type": "function", "index": 0, "function": {"name": "cat", "arguments": '{"path": "a.py"'}},
        {"type": "function", "function": {"name": "ls", "arguments": {"path": "ä"}}},
        {"id": "c3", "function": None},
        "no dict",
    ],
}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
chat_dicts = st.builds(
    lambda rest, role: {**rest, "role": role}, st.dictionaries(st.text(), json_values), st.text(min_size=1)
)


@given(chat_dicts)
def test_a_chat_dict_comes_back_equal_with_keys_in_order(chat_dict):
    returned = Message.from_openai(chat_dict).to_openai()
    assert returned == chat_dict
    assert list(returned) == list(chat_dict)


@given(chat_dicts)
def test_any_chat_dict_can_be_viewed(chat_dict):
    message = Message.from_openai(chat_dict)
    assert isinstance(message.text, str)
    assert isinstance(message.tool_calls, tuple)


def test_neither_the_callers_dict_nor_the_returned_one_is_shared():
    chat_dict = copy.deepcopy(CALL)
    message = Message.from_openai(chat_dict)
    chat_dict["tool_calls"][0]["function"]["name"] = "changed by the caller"
    message.to_openai()["tool_calls"][0]["function"]["name"] = "changed by the receiver"
    message.with_text("x").raw["tool_calls"][0]["function"]["name"] = "changed in a copy"
    message.without_tool_calls().raw["content"] = "changed in another"
    assert message.to_openai() == CALL


@pytest.mark.parametrize(
    ("content", "text"),
    [
        pytest.param("as it is", "as it is", id="string"),
        pytest.param(None, "", id="none"),
        pytest.param([], "", id="no_parts"),
        pytest.param([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab", id="text_parts"),
        pytest.param(
            [{"type": "image_url", "text": "no", "image_url": {"url": "data:"}}, "bare", {"type": "text"}, 7],
            "bare",
            id="only_text_parts_count",
        ),
        pytest.param({"odd": 1}, "", id="unknown_shape"),
    ],
)
def test_text_flattens_the_content(content, text):
    assert Message.from_openai({"role": "user", "content": content}).text == text


def test_text_is_empty_where_there_is_no_content():
    assert Message.from_openai({"role": "assistant"}).text == ""


def test_tool_calls_are_viewed_as_they_came_and_in_place():
    assert Message.from_openai(CALL).tool_calls == (
        ToolCall("c1", "cat", '{"path": "a.py"'),
        ToolCall(None, "ls", '{"path": "ä"}'),
        ToolCall("c3", "", ""),
        ToolCall(None, "", ""),
    )


@pytest.mark.parametrize("tool_calls", [None, [], "text", {"id": "c"}])
def test_no_tool_calls(tool_calls):
    assert Message.from_openai({"role": "assistant", "tool_calls": tool_calls}).tool_calls == ()


def test_tool_result_keys():
    message = Message.from_openai({"role": "tool", "tool_call_id": "c1", "name": "cat", "content": "x"})
    assert (message.tool_call_id, message.name) == ("c1", "cat")
    bare = Message.from_openai({"role": "tool", "tool_call_id": None, "content": "x"})
    assert (bare.tool_call_id, bare.name) == (None, None)


def test_with_text_replaces_the_content_only():
    assert Message.from_openai(CALL).with_text("stub").to_openai() == {**CALL, "content": "stub"}


def test_without_tool_calls_removes_them_only():
    expected = {key: value for key, value in CALL.items() if key != "tool_calls"}
    assert Message.from_openai(CALL).without_tool_calls().to_openai() == expected


def test_digest_is_that_of_the_dict_whatever_the_order_of_its_keys():
    first = Message.from_openai({"role": "user", "content": [{"type": "text", "text": "ä\ud800"}]})
    second = Message.from_openai({"content": [{"text": "ä\ud800", "type": "text"}], "role": "user"})
    assert first.digest() == second.digest()
    assert len(first.digest()) == 64
    assert hash(first) == hash(second)


@pytest.mark.parametrize("changed", [{"content": "b"}, {"role": "tool"}, {"extra": None}, {"content": ["a"]}])
def test_digest_tells_messages_apart(changed):
    base = {"role": "user", "content": "a"}
    assert Message.from_openai(base).digest() != Message.from_openai({**base, **changed}).digest()


def test_digest_tells_numbers_that_are_none_apart():
    """A proxy's JSON may have them, and orjson writes null for each."""
    values = (None, math.nan, math.inf, -math.inf)
    digests = {Message.from_openai({"role": "user", "content": None, "extra": [value]}).digest() for value in values}
    assert len(digests) == len(values)


def test_digest_names_the_type_that_has_no_json_form():
    with pytest.raises(TypeError, match="object"):
        Message.from_openai({"role": "user", "content": object()}).digest()


@given(st.lists(chat_dicts, max_size=4), st.lists(chat_dicts, max_size=4), st.integers(0, 4))
def test_a_list_is_the_same_whatever_is_known_of_an_earlier_one(earlier, later, common):
    later = copy.deepcopy(earlier[:common]) + later
    known = messages_from_openai(earlier)
    for message in known:
        message.digest()
    taken, fresh = messages_from_openai(later, known), messages_from_openai(later)
    assert [json.dumps(message.raw) for message in taken] == [json.dumps(message.raw) for message in fresh]
    assert [(message.role, message.digest()) for message in taken] == [(m.role, m.digest()) for m in fresh]


@pytest.mark.parametrize(
    ("before", "now"),
    [
        pytest.param({"x": 1}, {"x": True}, id="true_equals_1"),
        pytest.param({"x": 1}, {"x": 1.0}, id="1.0_equals_1"),
        pytest.param({"x": 0.0}, {"x": -0.0}, id="minus_0"),
        pytest.param({"x": 1, "y": 2}, {"y": 2, "x": 1}, id="another_order"),
        pytest.param({"x": [1]}, {"x": [2]}, id="changed_within"),
    ],
)
def test_what_only_equals_a_known_message_is_taken_anew(before, now):
    def message(function):
        return {"role": "assistant", "tool_calls": [{"function": {"arguments": function}}]}

    taken = messages_from_openai([message(now)], messages_from_openai([message(before)]))
    assert json.dumps(taken[0].raw) == json.dumps(message(now))
    assert taken[0].digest() == Message.from_openai(message(now)).digest()


def test_a_known_message_is_not_the_dict_that_it_came_from():
    chat_dict = copy.deepcopy(CALL)
    known = messages_from_openai([chat_dict])
    chat_dict["tool_calls"][0]["function"]["name"] = "changed by the caller"
    assert messages_from_openai([chat_dict], known)[0].tool_calls[0].name == "changed by the caller"
    assert known[0].to_openai() == CALL


def test_a_known_message_is_not_copied_again():
    known = messages_from_openai([CALL, {"role": "user", "content": "a"}])
    taken = messages_from_openai([copy.deepcopy(CALL), {"role": "user", "content": "b"}], known)
    assert taken[0] is known[0]
    assert taken[1].text == "b"


def test_messages_are_taken_as_they_are():
    message = Message.from_openai(CALL)
    assert messages_from_openai([message])[0] is message


@pytest.mark.parametrize(
    ("bad", "wanted"),
    [
        pytest.param("text", r"messages\[1\]: got str 'text', expected a chat dict", id="no_dict"),
        pytest.param({"content": "x"}, r"messages\[1\]: got keys \['content'\], expected a 'role'", id="no_role"),
        pytest.param({"role": None}, r"messages\[1\]: got role None, expected a non-empty string", id="null_role"),
        pytest.param({"role": ""}, r"messages\[1\]: got role '', expected", id="empty_role"),
    ],
)
def test_a_bad_message_is_named_by_index(bad, wanted):
    with pytest.raises(ValueError, match=wanted):
        messages_from_openai([{"role": "user", "content": "fine"}, bad])


@pytest.mark.parametrize("bad", ["text", {"role": "user"}, None, 3])
def test_a_list_is_expected(bad):
    with pytest.raises(ValueError, match=f"got {type(bad).__name__}, expected a list of chat dicts"):
        messages_from_openai(bad)
