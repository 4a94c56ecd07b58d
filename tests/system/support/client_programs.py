"""Agents of stock clients, each as its project's users write it, and what the model says to them.

Each is asked `TASK`, calls `add` or a shell in several turns, and posts whether the sum is right.
"""

from __future__ import annotations

import json
from typing import NamedTuple

VERSIONS = (
    "openai==3.57.0",
    "openai-agents==0.24.0",
    "pydantic-ai-slim[openai]==2.68.0",
    "langgraph==1.2.24",
    "langchain-openai==1.7.4",
    "smolagents[openai]==1.26.0",
    "mini-swe-agent==2.4.6",
)
"""Packages of the clients, which all fit one virtual environment."""

TASK, ANSWER = "(2+3)+(4+5)", "14"

POST = """
import json, os, urllib.request

TASK = json.loads(os.environ["NYALA_TASK"])["task"]

def add(a: int, b: int) -> int:
    \"\"\"Add two numbers.

    Args:
        a: One number.
        b: The other number.
    \"\"\"
    return a + b

def post(answer):
    url = os.environ["OPENAI_BASE_URL"].removesuffix("/v1") + "/reward"
    headers = {"x-api-key": os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    body = json.dumps({"reward": float(str(answer).strip() == "14")}).encode()
    urllib.request.urlopen(urllib.request.Request(url, body, headers))
"""
"""A module `nyala_task` beside the agents."""

OPENAI = """
import json, openai
from nyala_task import TASK, add, post

numbers = {"a": {"type": "integer"}, "b": {"type": "integer"}}
parameters = {"type": "object", "properties": numbers, "required": ["a", "b"]}
tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
client = openai.OpenAI()
messages = [{"role": "user", "content": TASK}]
while True:
    asked = {"model": "nyala", "messages": messages, "tools": tools}
    with client.chat.completions.stream(**asked) as stream:
        said = stream.get_final_completion().choices[0].message
    messages.append(said.model_dump(exclude_none=True))
    if not said.tool_calls:
        break
    for call in said.tool_calls:
        result = str(add(**json.loads(call.function.arguments)))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
post(said.content)
"""

OPENAI_AGENTS = """
from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled
from nyala_task import TASK, add, post

set_default_openai_api("chat_completions")
set_tracing_disabled(True)
agent = Agent(name="adder", model="nyala", tools=[function_tool(add)])
post(Runner.run_sync(agent, TASK).final_output)
"""

PYDANTIC_AI = """
from pydantic_ai import Agent
from nyala_task import TASK, add, post

agent = Agent("openai-chat:nyala", tools=[add])
post(agent.run_sync(TASK).output)
"""

LANGGRAPH = """
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent
from nyala_task import TASK, add, post

agent = create_react_agent(ChatOpenAI(model="nyala"), tools=[add])
ended = agent.invoke({"messages": [{"role": "user", "content": TASK}]})
post(ended["messages"][-1].content)
"""

SMOLAGENTS = """
from smolagents import OpenAIModel, ToolCallingAgent, tool
from nyala_task import TASK, add, post

model = OpenAIModel("nyala", tool_choice="auto")
post(ToolCallingAgent(tools=[tool(add)], model=model, max_steps=5).run(TASK))
"""

MINI_SWE_AGENT = """
import os, pathlib, yaml
os.environ |= {"MSWEA_SILENT_STARTUP": "1", "MSWEA_GLOBAL_CONFIG_DIR": os.getcwd()}
import minisweagent
from minisweagent.agents.default import AgentConfig, DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
from nyala_task import TASK, post

told = yaml.safe_load((minisweagent.package_dir / "config" / "mini.yaml").read_text())
templates = {name: told["agent"][name] for name in ("system_template", "instance_template")}
model = LitellmModel(model_name="openai/nyala", cost_tracking="ignore_errors", **told["model"])
agent = DefaultAgent(model, LocalEnvironment(), **templates)
agent.run(TASK)
post(pathlib.Path("sum").read_text())
"""


def call(name: str, **arguments: object) -> str:
    """Write a call as the chat template of the test's model has it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class StockClient(NamedTuple):
    """A program, and the turns that its model says."""

    program: str
    turns: tuple[str, ...]
    rewrites_history: bool = False


BOTH, SUM = call("add", a=2, b=3) + call("add", a=4, b=5), call("add", a=5, b=9)
SHELL = call("bash", command="echo $((2+3)) $((4+5))"), call("bash", command="echo 14 > sum")
SUBMIT = call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")

CLIENTS = {
    "openai": StockClient(OPENAI, (BOTH, SUM, ANSWER)),
    "openai-agents": StockClient(OPENAI_AGENTS, (BOTH, SUM, ANSWER)),
    "pydantic-ai": StockClient(PYDANTIC_AI, (BOTH, SUM, ANSWER)),
    "langgraph": StockClient(LANGGRAPH, (BOTH, SUM, ANSWER)),
    "smolagents": StockClient(
        SMOLAGENTS, (BOTH, SUM, call("final_answer", answer=ANSWER)), rewrites_history=True
    ),
    # It puts an error into its history in place of a turn without a call.
    "mini-swe-agent": StockClient(MINI_SWE_AGENT, (*SHELL, "Done.", SUBMIT), rewrites_history=True),
}
IN_PLACE_OF_A_TURN = "Tool call error:"
