"""Which model speaks: any chat model of LangChain by name, an OpenAI-compatible endpoint, or none at all.

Knows no tool but the name of the one that runs commands.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import langsmith
from langchain.chat_models import init_chat_model
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, BaseCallbackHandler, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from pydantic import SecretStr

from carrel.errors import InvalidRequest
from carrel.integrations.langgraph.metrics import ModelMetrics

SHELL = "shell"


class ShellModel(BaseChatModel):
    """No model: each line a person says is a command, and what the command printed is the answer."""

    tool: str = "run_command"

    @property
    def _llm_type(self) -> str:
        return "carrel-shell"

    def bind_tools(
        self, tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool], **_kwargs: Any
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """The tools are known already."""
        del tools
        return self

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **_kwargs: Any,
    ) -> ChatResult:
        del stop, run_manager
        return ChatResult(generations=[ChatGeneration(message=self._reply(messages))])

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **_kwargs: Any,
    ) -> ChatResult:
        del stop, run_manager
        return ChatResult(generations=[ChatGeneration(message=self._reply(messages))])

    def _reply(self, messages: list[BaseMessage]) -> AIMessage:
        last = messages[-1] if messages else None
        if isinstance(last, ToolMessage):
            return AIMessage(content=last.text)
        command = last.text.strip() if isinstance(last, HumanMessage) else ""
        if not command:
            return AIMessage(content="Say a command, such as `ls`.")
        call = {"name": self.tool, "args": {"command": command}, "id": f"call-{uuid.uuid4().hex}", "type": "tool_call"}
        return AIMessage(content="", tool_calls=[call])


def resolve_model(
    name: str, *, base_url: str | None = None, api_key: str | None = None, metrics: ModelMetrics | None = None
) -> BaseChatModel:
    """The chat model of a name: `shell`, `provider:model`, or with `base_url` a model of an OpenAI-compatible endpoint.

    A key that is not given comes from the provider's own environment variable. Traces of runs go nowhere.
    """
    be_silent()
    callbacks: list[BaseCallbackHandler] | None = None if metrics is None else [metrics.handler]
    if name == SHELL:
        return ShellModel(callbacks=callbacks)
    if not name.strip():
        raise InvalidRequest("the model has no name", field="model", hint="for example shell, or openai:gpt-5.5")
    try:
        if base_url is not None:
            return _endpoint(name.removeprefix("openai:"), base_url, api_key, callbacks)
        given: dict[str, Any] = {"callbacks": callbacks} | ({} if api_key is None else {"api_key": api_key})
        found: BaseChatModel = init_chat_model(name, **given)
        return found
    except ImportError as error:
        raise InvalidRequest(
            f"model '{name}' needs a package that is not installed", field="model", hint=str(error)[:300]
        ) from None
    except ValueError as error:
        raise InvalidRequest(
            f"there is no model '{name}'", field="model", hint=f"use shell or provider:model; {str(error)[:300]}"
        ) from None
    except Exception as error:  # each provider has errors of its own for a key that is missing
        raise InvalidRequest(
            f"model '{name}' cannot be used: {type(error).__name__}", field="model", hint=str(error)[:300]
        ) from None


def _endpoint(
    name: str, base_url: str, api_key: str | None, callbacks: list[BaseCallbackHandler] | None
) -> BaseChatModel:
    import openai
    from langchain_openai import ChatOpenAI

    # Many endpoints of one's own take no key, but the protocol's client insists on one.
    key = api_key or os.environ.get("OPENAI_API_KEY") or "none"
    return ChatOpenAI(
        model=name,
        base_url=base_url,
        api_key=SecretStr(key),
        callbacks=callbacks,
        use_responses_api=False,
        # Without one, LangChain shares a client among all models of a URL: who closes one model closes the others.
        timeout=openai.DEFAULT_TIMEOUT,
        stream_usage=True,  # else an answer that is streamed has no count of tokens
    )


def be_silent() -> None:
    """Make sure that no run is traced to a service outside, whatever the environment says."""
    langsmith.configure(enabled=False)
