from __future__ import annotations

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI

from carrel.errors import InvalidRequest
from carrel.integrations.langgraph import ShellModel, resolve_model


def test_the_shell_makes_a_command_of_what_is_said_and_an_answer_of_what_it_printed() -> None:
    model = resolve_model("shell")
    assert isinstance(model, ShellModel) and model.bind_tools([]) is model
    asked = model.invoke([SystemMessage("be good"), HumanMessage("  ls -l ")])
    assert isinstance(asked, AIMessage)
    [call] = asked.tool_calls
    assert (call["name"], call["args"]) == ("run_command", {"command": "ls -l"})
    told = model.invoke([HumanMessage("ls"), asked, ToolMessage("a\nb", tool_call_id=call["id"])])
    assert (told.text, told.tool_calls) == ("a\nb", [])
    assert "Send a command" in model.invoke([HumanMessage(" ")]).text


def test_each_call_of_the_shell_is_another_one() -> None:
    model = resolve_model("shell")
    ids = {model.invoke([HumanMessage("ls")]).tool_calls[0]["id"] for _ in range(10)}
    assert len(ids) == 10


def test_an_endpoint_of_ones_own_needs_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    for name in ("tiny", "openai:tiny"):
        model = resolve_model(name, base_url="http://127.0.0.1:9/v1")
        assert isinstance(model, ChatOpenAI)
        assert (model.model_name, model.openai_api_base) == ("tiny", "http://127.0.0.1:9/v1")


async def test_a_model_that_is_closed_leaves_the_others_of_its_endpoint_open() -> None:
    one, other = (resolve_model("tiny", base_url="http://127.0.0.1:9/v1") for _ in range(2))
    assert isinstance(one, ChatOpenAI) and isinstance(other, ChatOpenAI)
    await one.root_async_client.close()
    assert one.root_async_client.is_closed() and not other.root_async_client.is_closed()
    await other.root_async_client.close()


def test_a_model_by_the_name_of_its_provider() -> None:
    model = resolve_model("openai:gpt-5.5", api_key="sk-x")
    assert isinstance(model, ChatOpenAI) and model.model_name == "gpt-5.5"


@pytest.mark.parametrize("name", ["", "  ", "no-such-model", "nobody:x", "mistralai:x", "openai:gpt-5.5"])
def test_a_model_that_cannot_be_had_is_named_in_words(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(InvalidRequest) as caught:
        resolve_model(name)
    assert caught.value.field == "model" and caught.value.hint
