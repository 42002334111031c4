"""Images of a prompt: the text that stands for them, and the spans of its tokens in whose place they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quire.engine.errors import InvalidRequest
from quire.engine.images.config import VisionConfig, read_vision
from quire.engine.images.decode import opened, refused, upright, upright_size
from quire.engine.images.tiles import Layout, layout_of, shown, tiles_of
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
    mark = None if vision is None else tokenizer.token(vision.image_token_id)
    return None if vision is None or mark is None else ImageReader(vision, mark)


@dataclass(frozen=True, slots=True)
class ImageReader:
    """How a model reads images."""

    vision: VisionConfig
    mark: str
    """The token that stands for a part of an image, as text: chat templates write one for each image."""

    def text(self, text: str, asked: Sequence[Asked]) -> str:
        """A rendered conversation with all that stands for its images. Raises InvalidRequest, naming the field, for an
        image whose size cannot be read, and where the text itself holds the mark."""
        return self._expanded(text, [self._layout(self._opened(each), each) for each in asked])

    def read(self, text: str, asked: Sequence[Asked], encode: Callable[[str], list[int]]) -> ReadPrompt:
        """The prompt of a rendered conversation. encode: its token ids, checked for their number, which is known before
        any pixel is read. Raises InvalidRequest as above, and for an image that cannot be decoded."""
        files = [self._opened(each) for each in asked]
        layouts = [self._layout(file, each) for file, each in zip(files, asked, strict=True)]
        ids = encode(self._expanded(text, layouts))
        tiles: list[Image] = []
        for layout, each in zip(layouts, asked, strict=True):  # one at a time has its pixels in memory
            tiles += tiles_of(upright(files.pop(0), each.where), layout, self.vision)
        return ReadPrompt(ids, self._spans(ids, tiles), tuple({tile.digest: tile for tile in tiles}.values()))

    def _expanded(self, text: str, layouts: Sequence[Layout]) -> str:
        pieces = text.split(self.mark)
        if len(pieces) != len(layouts) + 1:
            found = f"the prompt has {self.mark}, which stands for an image, {len(pieces) - 1} times"
            why = "text may not hold it" if len(pieces) > len(layouts) else "the chat template leaves some out"
            raise InvalidRequest(f"messages: {found}, for {len(layouts)} images: {why}", param="messages")
        marks = [*(shown(layout, self.mark, self.vision.tile_tokens) for layout in layouts), ""]
        return "".join(part for pair in zip(pieces, marks, strict=True) for part in pair)

    def _opened(self, asked: Asked) -> Pillow.Image:
        return opened(asked.content, asked.where) if isinstance(asked.content, bytes) else asked.content

    def _layout(self, file: Pillow.Image, asked: Asked) -> Layout:
        return layout_of(*upright_size(file), self.vision, splits=self.vision.splits and not asked.low)

    def _spans(self, ids: Sequence[int], tiles: Sequence[Image]) -> tuple[Span, ...]:
        places = [place for place, token in enumerate(ids) if token == self.vision.image_token_id]
        count = self.vision.tile_tokens
        starts, ends = places[::count], places[count - 1 :: count]
        whole = all(end - start == count - 1 for start, end in zip(starts, ends, strict=False))
        if len(places) != count * len(tiles) or not whole:
            raise refused("messages", "the model's tokenizer does not write images as its config.json says")
        return tuple(Span(at, count, tile.digest) for at, tile in zip(starts, tiles, strict=True))
