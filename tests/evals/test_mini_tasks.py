"""The bundled tasks: sizes by the test model's tokenizer, answers that nobody guesses, tools that never raise."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evals.mini_tasks import KINDS, LENGTHS, NUM_SEEDS, SPLITS, MiniTask, make_task, solve
from evals.mini_tasks.noise import CODE_LENGTH, CODE_LETTERS
from leyline_agent.tokenizers import LocalTokenizer

_TOKENS = {"short": (0, 1000), "medium": (2000, 4000), "long": (6000, 12000)}
_CALLS = {"short": (4, 4), "medium": (8, 12), "long": (13, 24)}
_CODE = re.compile(rf"\b[{CODE_LETTERS}]{{{CODE_LENGTH}}}\b")

every_task = pytest.mark.parametrize(("kind", "length"), [(kind, length) for kind in KINDS for length in LENGTHS])
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> LocalTokenizer:
    return LocalTokenizer.from_pretrained(str(model_dir))


def _conversation(task: MiniTask) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Play the solving calls; return the messages and the tools."""
    begin = task.reset()
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": begin.system},
        {"role": "user", "content": begin.user},
    ]
    for idx, (name, arguments) in enumerate(solve(task)):
        function = {"name": name, "arguments": json.dumps(arguments)}
        call = {"id": f"call_{idx}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": task.call(name, arguments).text})
    return messages, begin.tools


def _observations(task: MiniTask) -> list[str]:
    task.reset()
    return [task.call(name, arguments).text for name, arguments in solve(task)]


@every_task
@pytest.mark.parametrize("split", SPLITS)
def test_the_solving_conversation_has_the_size_that_its_length_says(
    split: Any, kind: Any, length: Any, tokenizer: LocalTokenizer
) -> None:
    for seed in [*range(25), NUM_SEEDS - 1]:
        task = make_task(kind, length, seed, split=split)
        messages, tools = _conversation(task)
        num_tokens = len(tokenizer.render(messages, tools=tools, add_generation_prompt=False))
        assert _TOKENS[length][0] <= num_tokens <= _TOKENS[length][1], f"seed {seed}"
        assert _CALLS[length][0] <= len(solve(task)) <= _CALLS[length][1], f"seed {seed}"


@every_task
def test_the_solving_calls_solve_it_and_it_ends_with_the_answer(kind: Any, length: Any) -> None:
    task = make_task(kind, length, 7)
    task.reset()
    *reads, (last, arguments) = solve(task)
    for name, sent in reads:
        assert not task.call(name, sent).done
        assert not task.score().solved
    assert last == "submit"
    assert task.call(last, arguments).done
    assert (task.score().score, task.score().max_score, task.score().solved) == (1, 1, True)


@every_task
def test_the_answer_is_not_in_the_prompt_and_not_whole_in_any_output_but_the_last(kind: Any, length: Any) -> None:
    for seed in range(50):
        task = make_task(kind, length, seed)
        begin = task.reset()
        prompt = json.dumps([begin.system, begin.user, begin.tools])
        assert not _CODE.search(prompt)
        for name, arguments in solve(task)[:-2]:
            assert task.answer not in task.call(name, arguments).text


@every_kind
def test_an_answer_is_one_of_more_than_a_million(kind: Any) -> None:
    assert len(CODE_LETTERS) ** CODE_LENGTH > 10**6
    answers = [make_task(kind, "short", seed).answer for seed in range(400)]
    assert len(set(answers)) == 400
    # Each letter is drawn anew: in 400 draws of 25 letters, one of them fails to come up once in 500,000 answers.
    for position in range(CODE_LENGTH):
        assert {answer[position] for answer in answers} == set(CODE_LETTERS)


@every_task
def test_codes_that_a_reader_meets_on_the_way_are_wrong(kind: Any, length: Any) -> None:
    task = make_task(kind, length, 3)
    met = {code for text in _observations(task) for code in _CODE.findall(text)} - {task.answer}
    if kind == "file_chain":
        task.reset()
        paths = task.call("list_files", {}).text.splitlines()
        met |= {code for path in paths for code in _CODE.findall(task.call("read_file", {"path": path}).text)}
        met.remove(task.answer)
    assert met
    for guess in [*met, "", "code", task.answer[:-1], f"{task.answer}{task.answer}", f"the code is {task.answer}"]:
        task.reset()
        assert task.call("submit", {"answer": guess}).done
        assert task.score().score == 0, guess


def test_spaces_and_case_of_an_answer_do_not_matter() -> None:
    task = make_task("carry", "short", 0)
    task.call("submit", {"answer": f"  {task.answer.lower()}\n"})
    assert task.score().solved


def test_only_the_first_submission_counts() -> None:
    task = make_task("log_line", "short", 0)
    task.call("submit", {"answer": "wrong"})
    late = task.call("submit", {"answer": task.answer})
    assert late.done
    assert "ended" in late.text
    assert not task.score().solved
    task.reset()
    assert not task.score().solved
    assert task.call(*solve(task)[0]).text != late.text


@every_task
def test_a_seed_always_gives_the_same_task_and_another_gives_another(kind: Any, length: Any) -> None:
    first, again, other = (_conversation(make_task(kind, length, seed)) for seed in (5, 5, 6))
    assert first == again
    assert first[0] != other[0]


def test_tasks_are_the_same_on_any_machine() -> None:
    conversations = [_conversation(make_task(kind, length, 11)) for kind in KINDS for length in LENGTHS]
    digest = hashlib.sha256(json.dumps(conversations, sort_keys=True).encode()).hexdigest()
    # Changes with the generator: results of before and after cannot be compared then.
    assert digest[:16] == "11016f82e73ac9e9"


@every_kind
def test_no_seed_is_in_both_splits(kind: Any) -> None:
    train = {make_task(kind, "short", seed, split="train").seed for seed in (0, 1, 2, NUM_SEEDS - 1)}
    test = {make_task(kind, "short", seed, split="test").seed for seed in (0, 1, 2, NUM_SEEDS - 1)}
    assert max(train) < min(test)
    texts = {
        split: {_conversation(make_task(kind, "short", seed, split=split))[0][3]["content"] for seed in range(50)}
        for split in SPLITS
    }
    assert texts["train"].isdisjoint(texts["test"])


def test_the_test_split_is_the_default() -> None:
    assert make_task("carry", "short", 0).answer == make_task("carry", "short", 0, split="test").answer


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("chain", "short", 0), "kind: got 'chain', expected one of file_chain, log_line, carry"),
        (("carry", "tiny", 0), "length: got 'tiny', expected one of short, medium, long"),
        (("carry", "short", -1), "seed: got -1, expected a whole number from 0 to 999999"),
        (("carry", "short", NUM_SEEDS), "expected a whole number from 0 to 999999"),
        (("carry", "short", True), "seed: got True"),
    ],
)
def test_a_task_that_does_not_exist_is_refused(arguments: Any, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        make_task(*arguments)


@pytest.mark.parametrize(
    ("kind", "name", "arguments", "said"),
    [
        ("file_chain", "read_file", {"path": "notes/none.txt"}, "There is no file 'notes/none.txt'. list_files lists"),
        ("file_chain", "read_file", {"path": ""}, "There is no file ''"),
        ("file_chain", "read_file", {"path": "x" * 500}, "There is no file 'xxx"),
        ("file_chain", "read_file", {"path": 3}, "read_file: 'path' must be of type string; got a number. Expected"),
        ("file_chain", "read_file", {"path": ["a"]}, "got a list"),
        ("file_chain", "read_file", {"path": None}, "got null"),
        ("file_chain", "read_file", {}, "read_file: the argument 'path' is missing. Expected: path (string)."),
        ("file_chain", "read_file", {"path": "a", "n": 1}, "read_file: unknown argument 'n'. Expected: path (string)."),
        ("file_chain", "read_file", "notes", "read_file: the arguments must be a JSON object; got 'notes'."),
        ("file_chain", "read_file", None, "got null"),
        ("file_chain", "list_files", {"path": "a"}, "list_files: unknown argument 'path'. Expected: nothing."),
        ("file_chain", "open", {}, "There is no tool 'open'. The tools are: list_files, read_file, submit."),
        ("log_line", "read_log", {"page": "2"}, "read_log: 'page' must be of type integer; got '2'."),
        ("log_line", "read_log", {"page": True}, "got a boolean"),
        ("log_line", "read_log", {"page": 2.0}, "'page' must be of type integer"),
        ("log_line", "read_log", {"page": 0}, "There is no such page. requests.log has pages 1 to 4."),
        ("log_line", "read_log", {"page": 10**5000}, "There is no such page."),
        ("carry", "visit", {"room": "nowhere-1"}, "There is no room 'nowhere-1'."),
        ("carry", "submit", {"answer": 5}, "submit: 'answer' must be of type string; got a number."),
        ("carry", "submit", {"answer": 10**5000}, "got a number"),
        ("carry", ["visit"], {}, "There is no tool a list."),
    ],
)
def test_a_wrong_call_gets_an_answer_that_says_what_is_wrong(kind: Any, name: Any, arguments: Any, said: str) -> None:
    task = make_task(kind, "short", 1)
    task.reset()
    observation = task.call(name, arguments)
    assert said in observation.text
    assert len(observation.text) < 250
    assert not observation.done
    # Nothing is lost by it: the task can be solved as before.
    for call in solve(task):
        task.call(*call)
    assert task.score().solved


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
_NAMES = st.sampled_from(["list_files", "read_file", "read_log", "visit", "submit"]) | st.text()
_ARGUMENTS = _JSON | st.dictionaries(st.sampled_from(["path", "page", "room", "answer"]), _JSON, max_size=2)


@every_kind
@given(calls=st.lists(st.tuples(_NAMES, _ARGUMENTS), max_size=4))
def test_no_call_raises_and_none_is_worth_anything(kind: Any, calls: Any) -> None:
    task = make_task(kind, "short", 2)
    task.reset()
    for name, arguments in calls:
        assert task.call(name, arguments).text
    assert task.score().score == 0


@pytest.mark.parametrize("path", ["/{}", "./{}", " {} ", "notes/../{}"])
def test_a_path_may_be_written_in_other_ways(path: str) -> None:
    task = make_task("file_chain", "short", 0)
    (_, arguments), *_ = solve(task)
    assert task.call("read_file", {"path": path.format(arguments["path"])}) == task.call("read_file", arguments)


def test_tools_are_openai_schemas_of_what_the_solving_calls_send() -> None:
    for kind in KINDS:
        task = make_task(kind, "medium", 0)
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in task.reset().tools}
        for name, arguments in solve(task):
            assert schemas[name]["required"] == list(arguments)
            assert schemas[name]["properties"].keys() == arguments.keys()


@pytest.mark.parametrize("length", LENGTHS)
def test_what_carry_shows_first_cannot_be_had_again(length: Any) -> None:
    task = make_task("carry", length, 4)
    first_half, second_half = task.answer.split("-")
    observations = _observations(task)
    assert [first_half in text for text in observations] == [True] + [False] * (len(observations) - 1)
    # The last room, and the acknowledgement of the answer.
    assert [second_half in text for text in observations] == [False] * (len(observations) - 2) + [True, False]

    task.reset()
    name, arguments = solve(task)[0]
    task.call(name, arguments)
    again = task.call(name, arguments).text
    assert first_half not in again
    assert "shown on the first visit" in again
    assert "next:" in again


@pytest.mark.parametrize("kind", ["file_chain", "log_line"])
def test_the_other_kinds_need_no_old_output(kind: Any) -> None:
    task = make_task(kind, "medium", 4)
    *_, last, _ = _observations(task)
    assert task.answer in last
    # What is read once can be read again.
    assert _observations(task)[-2] == last


def test_a_reset_shows_the_first_half_again() -> None:
    task = make_task("carry", "short", 4)
    assert _observations(task) == _observations(task)


def test_the_failing_line_is_one_of_many_and_some_look_like_it() -> None:
    task = make_task("log_line", "long", 2)
    lines = "\n".join(_observations(task)).splitlines()
    assert len([line for line in lines if "failed:" in line]) == 1
    assert len([line for line in lines if "retried after" in line]) > 20
    assert len(lines) > 200
