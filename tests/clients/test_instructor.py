"""instructor makes objects from answers by tools, JSON and JSON schema: whole, partial and iterable."""

from __future__ import annotations

from typing import Any, Literal

import instructor
import openai
import pytest
from pydantic import BaseModel, Field

MODEL = "quire-demo"
ASKED: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Describe a fox."}],
    "max_tokens": 300,
    "seed": 5,
    "max_retries": 0,
}


class Animal(BaseModel, extra="forbid"):
    name: Literal["fox", "crow"]
    sounds: list[Literal["yip", "caw"]] = Field(min_length=1, max_length=3)


def client(url: str, mode: instructor.Mode) -> instructor.Instructor:
    return instructor.from_openai(openai.OpenAI(base_url=url, api_key="none", max_retries=0), mode=mode)


MODES = [instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_instructor_returns_object_in_each_mode(url: str, mode: instructor.Mode) -> None:
    assert isinstance(client(url, mode).create(response_model=Animal, **ASKED), Animal)


def test_instructor_json_mode_returns_object(url: str, closing: dict[str, int]) -> None:
    """In this mode the schema is only in the prompt, which this model does not understand, so any object will do."""

    class Anything(BaseModel, extra="allow"):
        pass

    answer = client(url, instructor.Mode.JSON).create(response_model=Anything, logit_bias=closing, **ASKED)
    assert isinstance(answer, Anything)


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA], ids=lambda mode: mode.value)
def test_instructor_partial_object_ends_as_whole_object(url: str, mode: instructor.Mode) -> None:
    parts = list(client(url, mode).create_partial(response_model=Animal, **ASKED))
    assert len(parts) > 3
    whole = client(url, mode).create(response_model=Animal, **ASKED)
    assert parts[-1].model_dump() == whole.model_dump()


def test_instructor_iterable_yields_objects(url: str) -> None:
    """The schema does not end the list, so the answer may be cut off; complete objects are whole."""
    animals = []
    for animal in client(url, instructor.Mode.TOOLS).create_iterable(response_model=Animal, **ASKED):
        animals.append(animal)
        if len(animals) == 2:
            break
    assert all(isinstance(animal, Animal) for animal in animals)
