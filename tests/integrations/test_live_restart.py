"""An agent whose server is killed and started again."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import openai
import pytest
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.memory import InMemorySaver

from evals.serving import RunningServer, free_port, serve
from leyline_agent.integrations.langchain import LeylineMiddleware

from .live import answer_of, cat, models, thread, turn

pytestmark = pytest.mark.sglang


def test_an_agent_goes_on_when_its_server_is_killed_and_started_again(
    model_dir: Path, unpatched_server: RunningServer
) -> None:
    """After the restart each answer equals a plain server's for the very same messages."""
    port, here = free_port(), thread("restart")
    middleware = LeylineMiddleware()
    with models() as live:
        agent = create_agent(
            live.chat(f"http://127.0.0.1:{port}"), [cat], middleware=[middleware], checkpointer=InMemorySaver()
        )
        with serve(model_dir, port=port, env={"LEYLINE_GATE": "0"}, fork=True) as server:
            for idx in range(2):
                agent.invoke({"messages": turn(idx, "restart")}, here)
            conversation = middleware.conversation("restart")
            conversation.edit(live.sent[0].body["messages"][2], "[evicted: cat]")
            agent.invoke({"messages": turn(2, "restart")}, here)
            assert conversation.telemetry.splices == 1
            os.killpg(server.pid, signal.SIGKILL)
        with pytest.raises(openai.APIConnectionError):
            agent.invoke({"messages": turn(3, "restart")}, here)
        with serve(model_dir, port=port, env={"LEYLINE_GATE": "0"}, fork=True):
            live.sent.clear()
            # The checkpoint has the question that was not answered.
            states = [agent.invoke(None, here)]
            states += [agent.invoke({"messages": turn(idx, "restart")}, here) for idx in (4, 5)]
            assert conversation.telemetry.fallbacks == {"unknown_base": 1}
            for state, sent in zip(states, live.sent, strict=True):
                assert sent.num_evicted == 1
                assert state["messages"][-1].content == answer_of(unpatched_server, sent)
            conversation.edit(live.sent[-1].body["messages"][6], "[evicted: cat]")
            agent.invoke({"messages": [HumanMessage("And now?")]}, here)
            assert conversation.telemetry.splices == 2
