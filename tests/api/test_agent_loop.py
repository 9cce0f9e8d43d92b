"""An agent framework on the bundled model: it must call a tool, gets the result, and must answer in a typed form.

The model is too small to be relied on: that every call is right is the grammar's work.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, RunContext
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.messages import ToolCallPart, ToolReturnPart
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings
from pydantic_ai.usage import UsageLimits

from tests.serving import MODEL_NAME, Server

City = Annotated[str, Field(max_length=12)]
Days = Literal[1, 2, 3]


class Report(BaseModel):
    """The weather, reported."""

    city: City
    sky: Literal["rain", "sun", "snow"]
    umbrella: bool


class ToolThenAnswer(AbstractCapability[None]):
    """The first step must call the tool, the second give the answer; which words, the model chooses."""

    def get_model_settings(self) -> Callable[[RunContext[None]], ModelSettings]:
        return lambda context: ModelSettings(tool_choice=["weather" if context.run_step == 1 else "final_result"])


async def test_an_agent_calls_a_tool_and_ends_with_a_typed_answer(server: Server) -> None:
    asked: list[tuple[str, int]] = []

    def weather(city: City, days: Days) -> str:
        """The weather in a city for some days."""
        asked.append((city, days))
        return "It will rain."

    agent = Agent(
        OpenAIChatModel(MODEL_NAME, provider=OpenAIProvider(base_url=server.base_url, api_key="unused")),
        output_type=Report,
        tools=[weather],
        capabilities=[ToolThenAnswer()],
        model_settings={"temperature": 0.0, "max_tokens": 100},
    )
    result = await agent.run("What is the weather in Rome?", usage_limits=UsageLimits(request_limit=3))
    ((city, days),) = asked
    assert len(city) <= 12 and days in (1, 2, 3)
    assert isinstance(result.output, Report)
    messages = result.all_messages()
    parts = [part for message in messages for part in message.parts]
    calls = [part for part in parts if isinstance(part, ToolCallPart)]
    returns = [part for part in parts if isinstance(part, ToolReturnPart)]
    assert [call.tool_name for call in calls] == ["weather", "final_result"]
    assert json.loads(calls[0].args_as_json_str()) == {"city": city, "days": days}
    assert returns[0].tool_call_id == calls[0].tool_call_id and returns[0].content == "It will rain."
    assert result.usage.requests == 2 and result.usage.input_tokens > 200
