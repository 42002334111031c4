"""Images of a prompt: the text that stands for them, and the spans of its tokens in whose place they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from quire.engine.errors import InvalidRequest, ModelError
from quire.engine.images.config import read_vision
from quire.engine.images.decode import opened, refused, upright, upright_size
from quire.engine.images.vision import InvalidImage, Layout, Vision
from quire.engine.text.tokenizer import Tokenizer
from quire.engine.types import Image, Span

if TYPE_CHECKING:
    from PIL import Image as Pillow


SHOWING = ("user", "tool")
"""Roles whose messages may have images."""
NOT_SHOWING = "images are read in messages of the user and in results of tools"


@dataclass(frozen=True, slots=True)
class Asked:
    """An image of a request."""

    where: str
    """The field, for errors."""
    content: bytes | Pillow.Image
    """A file, or what Pillow has read already."""
    low: bool = False
    """It is to take few tokens: it is not cut into tiles."""


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """A prompt's tokens, and what some of them stand for."""

    ids: list[int]
    spans: tuple[Span, ...]
    images: tuple[Image, ...]


def image_reader(path: Path, tokenizer: Tokenizer) -> ImageReader | None:
    """That of the model at `path`; None where it reads no images. Raises ModelError."""
    vision = read_vision(path)
    mark = None if vision is None else tokenizer.token(vision.mark_id)
    return None if vision is None or mark is None else ImageReader(vision, mark, tokenizer)


@dataclass(frozen=True, slots=True)
class ImageReader:
    """How a model reads images."""

    vision: Vision
    mark: str
    """The text of the token that chat templates write for each image."""
    tokenizer: Tokenizer

    def text(self, text: str, asked: Sequence[Asked]) -> str:
        """A rendered conversation with all that stands for its images. Raises InvalidRequest, naming the field, for an
        image whose size cannot be read, and where the text itself holds the mark."""
        return self._expanded(text, self._layouts([self._opened(each) for each in asked], asked))

    def read(self, text: str, asked: Sequence[Asked], encode: Callable[[str], list[int]]) -> ReadPrompt:
        """The prompt of a rendered conversation. encode: its token ids, checked for their number, which is known before
        any pixel is read. Raises InvalidRequest as above, and for an image that cannot be decoded."""
        files = [self._opened(each) for each in asked]
        layouts = self._layouts(files, asked)
        ids = encode(self._expanded(text, layouts))
        contents: list[Image] = []
        for layout, each in zip(layouts, asked, strict=True):  # one at a time has its pixels in memory
            contents += self._contents(layout, files.pop(0), each)
        spans = self._spans(ids, [runs for layout in layouts for runs in layout.runs], contents)
        return ReadPrompt(ids, spans, tuple({each.digest: each for each in contents}.values()))

    def alone(self, asked: Asked) -> ReadPrompt:
        """The prompt of an image whose vector is its own: a token that stands for it. Raises InvalidRequest as
        above."""
        (content,) = self.tiles(asked)
        token = self.vision.image_token_id
        return ReadPrompt([token], (Span(0, 1, content.digest),), (content,))

    def tiles(self, asked: Asked) -> list[Image]:
        """What becomes of one image. Raises InvalidRequest as above."""
        file = self._opened(asked)
        (layout,) = self._layouts([file], [asked])
        return self._contents(layout, file, asked)

    def _contents(self, layout: Layout, file: Pillow.Image, asked: Asked) -> list[Image]:
        contents = layout.contents(upright(file, asked.where))
        return [msgspec.structs.replace(each, work=self.vision.work(each)) for each in contents]

    def _expanded(self, text: str, layouts: Sequence[Layout]) -> str:
        pieces = text.split(self.mark)
        if len(pieces) != len(layouts) + 1:
            found = f"the prompt has {self.mark}, which stands for an image, {len(pieces) - 1} times"
            why = "text may not hold it" if len(pieces) > len(layouts) else "the chat template leaves some out"
            raise InvalidRequest(f"messages: {found}, for {len(layouts)} images: {why}", param="messages")
        token = self._spelled(self.vision.image_token_id)
        if layouts and token != self.mark and token in text:
            raise InvalidRequest(f"messages: the prompt has {token}, of which images are made", param="messages")
        marks = [*(layout.shown(self._spelled) for layout in layouts), ""]
        return "".join(part for pair in zip(pieces, marks, strict=True) for part in pair)

    def _opened(self, asked: Asked) -> Pillow.Image:
        return opened(asked.content, asked.where) if isinstance(asked.content, bytes) else asked.content

    def _layouts(self, files: Sequence[Pillow.Image], asked: Sequence[Asked]) -> list[Layout]:
        several = len(files) > 1
        return [self._layout(file, each, several=several) for file, each in zip(files, asked, strict=True)]

    def _layout(self, file: Pillow.Image, asked: Asked, *, several: bool) -> Layout:
        try:
            return self.vision.layout(*upright_size(file), low=asked.low, several=several)
        except InvalidImage as error:
            raise refused(asked.where, str(error)) from None

    def _spelled(self, token: int) -> str:
        text = self.tokenizer.token(token)
        if text is None:
            raise ModelError(f"model: tokenizer.json: lacks the token {token}, by which config.json marks images")
        return text

    def _spans(self, ids: Sequence[int], runs: Sequence[Sequence[int]], contents: Sequence[Image]) -> tuple[Span, ...]:
        """Where the contents stand, whose tokens stand side by side in such runs."""
        places = [place for place, token in enumerate(ids) if token == self.vision.image_token_id]
        spans, begin = list[Span](), 0
        for content, counts in zip(contents, runs, strict=True):
            offset = 0
            for count in counts:
                own = places[begin : begin + count]
                if len(own) < count or own[-1] - own[0] != count - 1:
                    raise _not_written()
                spans.append(Span(own[0], count, content.digest, whole=self.vision.whole, offset=offset))
                begin, offset = begin + count, offset + count
        if begin != len(places):
            raise _not_written()
        return tuple(spans)


def by_digest(reader: ImageReader, asked: Iterable[Asked]) -> dict[str, Image]:
    """All that images become, cut into tiles and not, by digest in hexadecimal: what receipts name. Raises
    InvalidRequest as `tiles`."""
    found = dict[str, Image]()
    for each in asked:
        for low in (False, True):
            found |= {tile.digest.hex(): tile for tile in reader.tiles(replace(each, low=low))}
    return found


def _not_written() -> InvalidRequest:
    return refused("messages", "the model's tokenizer does not write images as its config.json says")
