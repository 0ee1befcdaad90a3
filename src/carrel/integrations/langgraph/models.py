"""Chat models by name: any of LangChain, one of an OpenAI-compatible endpoint, or `shell`, which is none."""

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
    """Not a language model: each message is run as a command, and the output of the command is the answer."""

    tool: str = "run_command"

    @property
    def _llm_type(self) -> str:
        return "carrel-shell"

    def bind_tools(
        self, tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool], **_kwargs: Any
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Return this model, which knows its tool already."""
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
            return AIMessage(content="Send a command, such as `ls`.")
        call = {"name": self.tool, "args": {"command": command}, "id": f"call-{uuid.uuid4().hex}", "type": "tool_call"}
        return AIMessage(content="", tool_calls=[call])


def resolve_model(
    name: str, *, base_url: str | None = None, api_key: str | None = None, metrics: ModelMetrics | None = None
) -> BaseChatModel:
    """Return a chat model: `shell`, `provider:model`, or with `base_url` a model of an OpenAI-compatible endpoint.

    Without `api_key` the key is taken from the provider's own environment variable. Tracing of runs is switched off.
    """
    be_silent()
    callbacks: list[BaseCallbackHandler] | None = None if metrics is None else [metrics.handler]
    if name == SHELL:
        return ShellModel(callbacks=callbacks)
    if not name.strip():
        raise InvalidRequest("the name of the model is empty", field="model", hint="use shell, or openai:gpt-5.5")
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
    except Exception as error:  # each provider has its own error for a missing key
        raise InvalidRequest(
            f"model '{name}' cannot be used: {type(error).__name__}", field="model", hint=str(error)[:300]
        ) from None


def _endpoint(
    name: str, base_url: str, api_key: str | None, callbacks: list[BaseCallbackHandler] | None
) -> BaseChatModel:
    import openai
    from langchain_openai import ChatOpenAI

    # Many private endpoints need no key, but the client insists on one.
    key = api_key or os.environ.get("OPENAI_API_KEY") or "none"
    return ChatOpenAI(
        model=name,
        base_url=base_url,
        api_key=SecretStr(key),
        callbacks=callbacks,
        use_responses_api=False,
        # Without a timeout, LangChain shares one client among all models of a URL: closing one closes the others.
        timeout=openai.DEFAULT_TIMEOUT,
        stream_usage=True,  # otherwise streamed answers have no token counts
    )


def be_silent() -> None:
    """Switch off tracing to LangSmith, whatever the environment says."""
    langsmith.configure(enabled=False)
