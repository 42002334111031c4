"""Questions with options. One token answers each prompt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from string import ascii_lowercase, ascii_uppercase

from quire.engine.common.errors import InvalidRequest
from quire.engine.common.request_params import SamplingParams
from quire.engine.text.tokenizer import Tokenizer
from quire.server.config import ServerConfig
from quire.server.generation.resolved_request import OptionQuestion, Prompt, QuestionType
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.chat_translation import TranslatableBody
from quire.server.protocol.field_limits import MAX_PROMPT_ENTRIES
from quire.server.protocol.request_bodies import ignored_params_header
from quire.server.protocol.response_items import InputItem, Message
from quire.server.resolve.chat import PROMPT_TAIL_TOKENS
from quire.server.resolve.checks import check_json_no_surrogates, check_prompt_length
from quire.server.resolve.other_apis.chat_conversion import (
    CallerFields,
    merge_user_turns,
    rename_fields_in_raised_errors,
)
from quire.server.resolve.other_apis.input_items import turns_from_items
from quire.server.resolve.parse import validate_body
from quire.server.resolve.prompts import build_chat_prompt
from quire.server.resolve.resolved_generation import (
    AnswerForm,
    AnswerOptions,
    RequestGrammars,
    ResolvedGeneration,
    build_generation,
)
from quire.server.served_model import ServedModel

QUESTION_PHRASES: Mapping[QuestionType, str] = {
    "predicate": "Is this true?",
    "choice": "Which one applies?",
    "score": "Which level applies?",
}


@dataclass(frozen=True, slots=True)
class PromptQuestion:
    type: QuestionType
    name: str | None
    instructions: Sequence[str]
    options: Sequence[tuple[str | bool, str]]

    def question_text(self, labels: Iterable[str]) -> str:
        lines = [
            f"{label}) "
            f"{str(value).lower() if isinstance(value, bool) else value}{': ' if description else ''}{description}"
            for label, (value, description) in zip(labels, self.options, strict=False)
        ]
        end = ["", "Answer with the letter alone."]
        return "\n".join([*self.instructions, "", QUESTION_PHRASES[self.type], *lines, *end]).lstrip("\n")

    def to_option_question(self, tokens: Sequence[int], *, must_be_distinct: bool) -> OptionQuestion:
        """With `must_be_distinct`, raises InvalidRequest for duplicate options."""
        options = [value for value, _ in self.options]
        if must_be_distinct and len({(type(value), value) for value in options}) < len(options):
            raise InvalidRequest("questions: each option must be unique", param="questions")
        return OptionQuestion(self.type, self.name, options, tokens[: len(options)])


@dataclass(frozen=True, slots=True)
class DecisionApiVariant:
    form: AnswerForm
    options_are_distinct: bool

    def resolve_questions(
        self,
        body: TranslatableBody,
        name: str,
        items: Sequence[InputItem],
        posed: Sequence[PromptQuestion],
        model: ServedModel,
        config: ServerConfig,
    ) -> ResolvedGeneration:
        headers = ignored_params_header(body.check_params_and_list_ignored(), config.strict)
        labels = single_token_labels(model.tokenizer, max(len(each.options) for each in posed))
        ids = tuple(labels.values())
        questions = [each.to_option_question(ids, must_be_distinct=self.options_are_distinct) for each in posed]
        check_json_no_surrogates([[question.name, *question.options] for question in questions], "questions")
        with rename_fields_in_raised_errors(self.form.field_names) as caller_fields:
            chats = [
                question_chat_request(body, items, each.question_text(labels), model, caller_fields) for each in posed
            ]
            prompts = [build_non_thinking_prompt(chats[0], model)]
            if len(prompts[0].ids) * len(chats) > MAX_PROMPT_ENTRIES:
                raise InvalidRequest(
                    "questions: too many for an input of this length: ask fewer at once", param="questions"
                )
            prompts += [build_non_thinking_prompt(chat, model) for chat in chats[1:]]
            params = SamplingParams(
                max_tokens=1, temperature=0.0, logprobs=0, logprob_token_ids=ids, allowed_token_ids=ids, ignore_eos=True
            )
            options = AnswerOptions(headers=headers, logprobs=True, questions=questions)
            return build_generation(chats[0], self.form, config, name, prompts, params, options, RequestGrammars())


def single_token_labels(tokenizer: Tokenizer, count: int) -> dict[str, int]:
    """Returns letters, then pairs and triples of letters, each a single token. Raises InvalidRequest if there are too
    few.
    """
    labels = dict(islice(_iterate_single_token_labels(tokenizer), count))
    if len(labels) < count:
        raise InvalidRequest(
            f"questions: this model's vocabulary can distinguish {len(labels)} options, got {count}", param="questions"
        )
    return labels


def _iterate_single_token_labels(tokenizer: Tokenizer) -> Iterator[tuple[str, int]]:
    capitals, small = list(ascii_uppercase), list(ascii_lowercase)
    kinds = [capitals], [capitals] * 2, [capitals, small], [small] * 2, [small] * 3
    seen: set[int] = set()
    for letters in kinds:
        texts = ["".join(each) for each in product(*letters)]
        for text, ids in zip(texts, tokenizer.encode_batch(texts, add_special_tokens=False), strict=True):
            if len(ids) == 1 and ids[0] not in seen:
                seen.add(ids[0])
                yield text, ids[0]


def question_chat_request(
    body: TranslatableBody, items: Sequence[InputItem], question: str, model: ServedModel, caller_fields: CallerFields
) -> ChatRequest:
    question_message = Message(role="user", content=question)
    turns = turns_from_items(
        [*items, question_message], "", has_developer_role="developer" in model.chat_formats.template_text
    )
    turns = merge_user_turns(turns, caller_fields)
    fields = body.pick_extensions()
    if model.chat_formats.thinking_switch.off_variables:
        template_kwargs = fields.get("chat_template_kwargs", {})
        fields["chat_template_kwargs"] = (
            {**model.chat_formats.thinking_switch.off_variables, **template_kwargs}
            if isinstance(template_kwargs, dict)
            else template_kwargs
        )
    return validate_body({**fields, "messages": turns}, ChatRequest)


def build_non_thinking_prompt(chat: ChatRequest, model: ServedModel) -> Prompt:
    prompt, reasoning = build_chat_prompt(chat, model, None, trusted=False), model.chat_formats.reasoning_format
    if reasoning is None or not reasoning.starts_in_thinking(
        model.tokenizer.decode(prompt.ids[-PROMPT_TAIL_TOKENS:], skip_special_tokens=False)
    ):
        return prompt
    closing = model.tokenizer.encode(f"{reasoning.end}\n\n", add_special_tokens=False)
    ended = replace(prompt, ids=[*prompt.ids, *closing])
    check_prompt_length(ended.ids, model.context_length, "input")
    return ended
