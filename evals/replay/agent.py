"""A LangGraph agent whose model is called for real and answers from the recording.

Two nodes: `model` sends the conversation to the server, `environment` returns what the recording saw. The graph's own
state is the recorded conversation, unedited; a policy edits only what the model node sends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from pydantic import PrivateAttr, SecretStr

from evals.replay.trajectory import Trajectory

CallModel = Callable[[MessagesState], AIMessage]
"""What the model node does: send the state's messages and return the answer."""


class RecordedChatOpenAI(ChatOpenAI):
    """A ChatOpenAI that sends each request, then answers with the next recorded message instead of the server's token.

    The answer keeps the metadata of the real response (usage, model), so whatever wraps this model sees it.
    """

    # An iterator, so that copies of the model, which integrations make, go on where the original stands.
    _answers: Iterator[AIMessage] = PrivateAttr(default_factory=lambda: iter(()))

    @classmethod
    def replaying(
        cls, answers: Sequence[AIMessage], *, base_url: str, model: str, http: httpx.Client
    ) -> RecordedChatOpenAI:
        """Make a model for one replay: one token a call, greedy, no retries."""
        recorded = cls(
            model=model,
            base_url=f"{base_url.rstrip('/')}/v1",
            api_key=SecretStr("none"),
            temperature=0,
            max_completion_tokens=1,
            max_retries=0,
            streaming=False,
            http_client=http,
            use_responses_api=False,
        )
        recorded._answers = iter(answers)
        return recorded

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        result = super()._generate(messages, stop=stop, run_manager=run_manager, **kwargs)
        real = result.generations[0]
        assert isinstance(real.message, AIMessage)
        recorded = next(self._answers).model_copy(
            update={
                "response_metadata": real.message.response_metadata,
                "usage_metadata": real.message.usage_metadata,
            }
        )
        generation = ChatGeneration(message=recorded, generation_info=real.generation_info)
        return ChatResult(generations=[generation], llm_output=result.llm_output)


def build_agent(
    trajectory: Trajectory,
    call_model: CallModel,
    *,
    max_turns: int | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Any:
    """Compile the graph; it ends after the last recorded answer, after `max_turns`, or once `stopped` says so."""
    turns = trajectory.turns[:max_turns]
    answers_before = sum(isinstance(message, AIMessage) for message in trajectory.opening)

    def turn_idx(state: MessagesState) -> int:
        return sum(isinstance(message, AIMessage) for message in state["messages"]) - answers_before - 1

    def environment(state: MessagesState) -> dict[str, list[BaseMessage]]:
        return {"messages": list(turns[turn_idx(state)].observations)}

    def after_model(state: MessagesState) -> str:
        return END if stopped() or turn_idx(state) + 1 >= len(turns) else "environment"

    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [call_model(state)]})
    graph.add_node("environment", environment)
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", after_model, ["environment", END])
    graph.add_edge("environment", "model")
    return graph.compile()
