"""Bodies of chat and text completions, as the OpenAI API documents them and with our extensions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from shoal.server.openai.fields import FreeObject, Listed, Sampled, Strict, at_most, contradiction

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
MAX_TOOLS = 512  # of a call, and calls in a message
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class TextPart(Strict):
    """A piece of a message. Other kinds than text are refused: the models read text."""

    type: Literal["text", "refusal"]
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _has_text(self) -> TextPart:
        if (self.text if self.type == "text" else self.refusal) is None:
            raise ValueError(f"a part of type {self.type} needs the field {self.type}")
        return self


def call_arguments(text: str | None) -> str:
    """Arguments of a call as JSON text: nothing, however models and clients spell it, is `{}`."""
    return "{}" if text is None or text.strip() in ("", "null") else text


class FunctionCall(Strict):
    """What an assistant called; `arguments` is JSON text."""

    name: str
    arguments: Annotated[str, AfterValidator(call_arguments)] = "{}"


class ToolCall(Strict):
    """One call in an assistant's message."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class ChatMessage(Strict):
    """One message of a conversation, the caller's or one that an answer brought."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Listed[TextPart] | None = None
    name: str | None = None
    tool_calls: Annotated[Listed[ToolCall], at_most(MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    annotations: Listed[dict[str, Any]] | None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _complete(self) -> ChatMessage:
        if self.content is None and not (self.role == "assistant" and (self.tool_calls or self.refusal)):
            raise ValueError(f"a message of role {self.role} needs content")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"a message of role {self.role} cannot have tool_calls")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("a message of role tool needs tool_call_id")
        return self


class Function(Strict):
    """A tool that the model may call. `strict`: its arguments follow `parameters` to the letter."""

    name: Name
    description: str | None = None
    parameters: FreeObject | None = None
    strict: bool | None = None


class Tool(Strict):
    """One tool."""

    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    """A name."""

    name: Annotated[str, Field(max_length=128)]


class NamedTool(Strict):
    """The one tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Strict):
    """A schema that the answer follows."""

    name: Name
    description: str | None = None
    schema_: FreeObject | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to type json_schema, and that needs it")
        return self

    def schema_of(self) -> dict[str, Any] | None:
        """The JSON schema of the answer; None for free text."""
        if self.type == "text":
            return None
        given = self.json_schema.schema_ if self.json_schema is not None else None
        return {"type": "object"} if given is None else given


class Prediction(Strict):
    """A text that much of the answer is expected to be like: it changes how fast that comes, and nothing else."""

    type: Literal["content"]
    content: str | Listed[TextPart]

    @property
    def text(self) -> str:
        """All of it."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text or "" for part in self.content)


class ChatRequest(Sampled):
    """`POST /v1/chat/completions`."""

    messages: Annotated[Listed[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[Listed[Tool], at_most(MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    modalities: Listed[Literal["text"]] | None = None
    chat_template_kwargs: FreeObject | None = None
    audio: None = None
    prediction: Prediction | None = None
    web_search_options: None = None
    functions: None = None
    function_call: None = None
    reasoning_effort: ReasoningEffort | None = None
    thinking_budget: Annotated[int, Field(ge=0, le=2**31)] | None = None
    moderation: None = None
    prompt_cache_options: None = None
    verbosity: None = None

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise contradiction("top_logprobs", "needs logprobs to be true")
        return self


def _kind_of_prompts(given: Any) -> str | None:
    """Which branch a prompt is held to: its first element tells. None for what is none of them."""
    first = given[0] if isinstance(given, list) and given else ""
    kinds = {str: "Texts", int: "Tokens", list: "TokenLists"}
    return "Text" if isinstance(given, str) else kinds.get(type(first)) if isinstance(given, list) else None


Prompts = Annotated[
    Annotated[str, Tag("Text")]
    | Annotated[Listed[str], Tag("Texts")]
    | Annotated[Listed[int], Tag("Tokens")]
    | Annotated[Listed[Listed[int]], Tag("TokenLists")],
    Discriminator(
        _kind_of_prompts,
        custom_error_type="prompt",
        custom_error_message="it must be a text, a list of texts, a list of token ids, or a list of such lists",
    ),
]
"""The four forms of a prompt, of which only one is tried."""


class CompletionRequest(Sampled):
    """`POST /v1/completions`."""

    prompt: Prompts
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    suffix: None = None
    max_tokens: Annotated[int, Field(ge=0, le=2**31)] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise contradiction("max_tokens", "is 0: only with echo or prompt_logprobs")
        return self


class TokenizeRequest(Strict):
    """`POST /tokenize`: a text or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Listed[ChatMessage] | None = None
    tools: Annotated[Listed[Tool], at_most(MAX_TOOLS)] | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise contradiction("prompt", "or messages must be given, not both")
        return self


class DetokenizeRequest(Strict):
    """`POST /detokenize`: the text of tokens."""

    model: str | None = None
    tokens: Listed[int]


class LoadRequest(Strict):
    """`POST /models/load`: a model of the store. Calls in flight may go on for `drain_s`."""

    model: Annotated[str, Field(min_length=1, max_length=300)]
    drain_s: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)] = 30.0


class UnloadRequest(Strict):
    """`POST /models/unload`."""

    model: str | None = None
    drain_s: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)] = 30.0
