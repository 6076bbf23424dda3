"""What `tools` and `tool_choice` of a request mean for its prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .chat import ChatTemplate
from .errors import RequestError
from .messages import normal_tools
from .reasoning import CLOSE, OPEN, prompt_opens_thought
from .tokenizer import Tokenizer
from .tool_calls import CALL_OPEN, FUNCTION_OPEN

_FORMS = 'use "auto", "none", "required" or {"type": "function", "function": {"name": …}}'


@dataclass(frozen=True)
class ToolPlan:
    """tools: those that the prompt shows, None for none. callable: those that the answer may call.

    A forced call is either `guided`, by a grammar of `callable`, or begun by `prefix`, which is put at the end of the prompt;
    the parser of the answer must be given it first. several: whether one call may follow another.
    """

    tools: list[dict[str, Any]] | None = None
    prefix: str = ""
    guided: bool = False
    callable: tuple[dict[str, Any], ...] = ()
    several: bool = True

    @property
    def forced(self) -> bool:
        return self.guided or bool(self.prefix)

    def prompt_ids(self, template: ChatTemplate, tokenizer: Tokenizer, messages: object, *, enable_thinking: bool | None = None) -> list[int]:
        """Token ids of the prompt, the forced opening included.

        Before a forced call thinking is off unless it is asked for, which a guided one allows and a prefix leaves no room for.
        """
        if not self.forced or self.guided and enable_thinking:
            return template.encode(messages, tools=self.tools, enable_thinking=enable_thinking)
        if enable_thinking:
            raise RequestError("cannot be combined with thinking when it forces a call", where="tool_choice",
                               fix='use "auto", turn thinking off, or install the `guidance` extra')
        ids = template.encode(messages, tools=self.tools, enable_thinking=False)
        if prompt_opens_thought(ids, tokenizer.control.get(OPEN), tokenizer.control.get(CLOSE)):
            ids += tokenizer.encode(f"\n{CLOSE}\n\n", control=True)  # a template without the switch
        return ids + tokenizer.encode(self.prefix, control=True)


def plan_tools(tools: object, tool_choice: object = None, *, guided: bool = False) -> ToolPlan:
    """Checks both keywords. Raises RequestError for tools or a choice that is not OpenAI's, or that names no offered function.

    None and "auto": the model decides. "none": the tools are not shown. "required": the answer is a call. One function, by
    name: the answer is a call of it. guided: forced calls follow a grammar (extra `guidance`), otherwise they are only begun.
    """
    offered = normal_tools(tools)
    if tool_choice in (None, "auto", "none"):
        return ToolPlan() if tool_choice == "none" else ToolPlan(offered, callable=tuple(offered or ()))
    if isinstance(tool_choice, str) and tool_choice != "required":
        raise RequestError(f"unknown choice {tool_choice!r}", where="tool_choice", fix=_FORMS)
    if not offered:
        raise RequestError("needs tools to choose from", where="tool_choice", fix="give tools, or leave tool_choice out")
    names = [tool.get("function", tool)["name"] for tool in offered]
    if tool_choice == "required" and guided:
        return ToolPlan(offered, guided=True, callable=tuple(offered))
    if tool_choice == "required":
        # One tool leaves no choice, and a longer opening is one that the model cannot get wrong.
        return ToolPlan(offered, _opening(names[0]) if len(names) == 1 else _opening())
    name = _named(tool_choice)
    if name not in names:
        raise RequestError(f"names the function {name!r}, which tools does not hold", where="tool_choice")
    if guided:
        return ToolPlan(offered, guided=True, callable=(offered[names.index(name)],), several=False)
    return ToolPlan(offered, _opening(name))


def _opening(name: str | None = None) -> str:
    return f"{CALL_OPEN}\n{FUNCTION_OPEN}" + (f"{name}>\n" if name is not None else "")


def _named(choice: object) -> str:
    if not isinstance(choice, Mapping):
        raise RequestError(f"must be a string or an object, got {type(choice).__name__}", where="tool_choice", fix=_FORMS)
    function = choice.get("function")
    if choice.get("type", "function") != "function" or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError("must name one function", where="tool_choice", fix=_FORMS)
    return str(function["name"])
