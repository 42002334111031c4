from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from quire.engine.common.errors import InvalidRequest, ModelError
from quire.engine.common.types import Image, MediaSpan
from quire.engine.families.base.vision.vision_spec import ImageLayout, InvalidImage, VisionSpec
from quire.engine.images.image_decoding import decode_upright, image_error, open_image, upright_size
from quire.engine.images.vision_config import read_vision_spec
from quire.engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from PIL import Image as Pillow


IMAGE_ROLES = ("user", "tool")
IMAGE_ROLES_MESSAGE = "images are accepted in user messages and in tool results"


@dataclass(frozen=True, slots=True)
class RequestImage:
    field_path: str
    file_or_image: bytes | Pillow.Image
    low_detail: bool = False


@dataclass(frozen=True, slots=True)
class MultimodalPrompt:
    token_ids: list[int]
    spans: tuple[MediaSpan, ...]
    images: tuple[Image, ...]


def make_multimodal_prompt_builder(path: Path, tokenizer: Tokenizer) -> MultimodalPromptBuilder | None:
    """Raises ModelError."""
    vision = read_vision_spec(path)
    template_image_token = None if vision is None else tokenizer.id_to_token(vision.template_image_token_id)
    return (
        None
        if vision is None or template_image_token is None
        else MultimodalPromptBuilder(vision, template_image_token, tokenizer)
    )


@dataclass(frozen=True, slots=True)
class MultimodalPromptBuilder:
    vision: VisionSpec
    template_image_token: str
    tokenizer: Tokenizer

    def expand_text(self, text: str, request_images: Sequence[RequestImage]) -> str:
        """Raises InvalidRequest if an image's size is unreadable or the text contains a placeholder."""
        return self._expand_placeholders_in_text(
            text, self._make_layouts([self._open_image(each) for each in request_images], request_images)
        )

    def make_multimodal_prompt(
        self, text: str, request_images: Sequence[RequestImage], encode: Callable[[str], list[int]]
    ) -> MultimodalPrompt:
        """`encode` checks the token count before pixels are decoded. Raises InvalidRequest."""
        files = [self._open_image(each) for each in request_images]
        layouts = self._make_layouts(files, request_images)
        ids = encode(self._expand_placeholders_in_text(text, layouts))
        contents: list[Image] = []
        for layout, each in zip(layouts, request_images, strict=True):  # only one file's pixels are in memory at a time
            contents += self._decode_and_resize(layout, files.pop(0), each)
        spans = self._locate_spans(ids, [runs for layout in layouts for runs in layout.token_run_lengths], contents)
        return MultimodalPrompt(ids, spans, tuple({each.digest: each for each in contents}.values()))

    def make_image_only_prompt(self, request_image: RequestImage) -> MultimodalPrompt:
        """Raises InvalidRequest."""
        (content,) = self.make_tiles_of_image(request_image)
        token = self.vision.image_token_id
        return MultimodalPrompt([token], (MediaSpan(0, 1, content.digest),), (content,))

    def make_tiles_of_image(self, request_image: RequestImage) -> list[Image]:
        """Raises InvalidRequest."""
        file = self._open_image(request_image)
        (layout,) = self._make_layouts([file], [request_image])
        return self._decode_and_resize(layout, file, request_image)

    def _decode_and_resize(self, layout: ImageLayout, file: Pillow.Image, request_image: RequestImage) -> list[Image]:
        contents = layout.iter_resized_images(decode_upright(file, request_image.field_path))
        return [msgspec.structs.replace(each, encoder_cost=self.vision.encoder_cost(each)) for each in contents]

    def _expand_placeholders_in_text(self, text: str, layouts: Sequence[ImageLayout]) -> str:
        pieces = text.split(self.template_image_token)
        if len(pieces) != len(layouts) + 1:
            count_text = (
                f"the prompt has {self.template_image_token}, which stands for an image, {len(pieces) - 1} times"
            )
            why = "text may not hold it" if len(pieces) > len(layouts) else "the chat template leaves some out"
            raise InvalidRequest(f"messages: {count_text}, for {len(layouts)} images: {why}", param="messages")
        token = self._token_text(self.vision.image_token_id)
        if layouts and token != self.template_image_token and token in text:
            raise InvalidRequest(f"messages: the prompt has {token}, which is reserved for images", param="messages")
        marks = [*(layout.placeholder_text(self._token_text) for layout in layouts), ""]
        return "".join(part for pair in zip(pieces, marks, strict=True) for part in pair)

    def _open_image(self, request_image: RequestImage) -> Pillow.Image:
        return (
            open_image(request_image.file_or_image, request_image.field_path)
            if isinstance(request_image.file_or_image, bytes)
            else request_image.file_or_image
        )

    def _make_layouts(self, files: Sequence[Pillow.Image], request_images: Sequence[RequestImage]) -> list[ImageLayout]:
        has_other_images = len(files) > 1
        return [
            self._make_layout(file, each, has_other_images=has_other_images)
            for file, each in zip(files, request_images, strict=True)
        ]

    def _make_layout(self, file: Pillow.Image, request_image: RequestImage, *, has_other_images: bool) -> ImageLayout:
        try:
            return self.vision.make_layout(
                *upright_size(file), low_detail=request_image.low_detail, has_other_images=has_other_images
            )
        except InvalidImage as error:
            raise image_error(request_image.field_path, str(error)) from None

    def _token_text(self, token: int) -> str:
        text = self.tokenizer.id_to_token(token)
        if text is None:
            raise ModelError(f"model: tokenizer.json: lacks the token {token}, by which config.json marks images")
        return text

    def _locate_spans(
        self, ids: Sequence[int], runs: Sequence[Sequence[int]], contents: Sequence[Image]
    ) -> tuple[MediaSpan, ...]:
        positions = [position for position, token in enumerate(ids) if token == self.vision.image_token_id]
        spans, begin = list[MediaSpan](), 0
        for content, counts in zip(contents, runs, strict=True):
            offset = 0
            for count in counts:
                run_positions = positions[begin : begin + count]
                if len(run_positions) < count or run_positions[-1] - run_positions[0] != count - 1:
                    raise _placeholder_mismatch_error()
                spans.append(
                    MediaSpan(
                        run_positions[0],
                        count,
                        content.digest,
                        is_bidirectional=self.vision.is_bidirectional,
                        offset=offset,
                    )
                )
                begin, offset = begin + count, offset + count
        if begin != len(positions):
            raise _placeholder_mismatch_error()
        return tuple(spans)


def make_tiles_by_tile_digest(
    reader: MultimodalPromptBuilder, request_images: Iterable[RequestImage]
) -> dict[str, Image]:
    """Return tiles at both levels of detail, keyed by their hex digest in receipts. Raises InvalidRequest."""
    images = dict[str, Image]()
    for each in request_images:
        for low in (False, True):
            images |= {tile.digest.hex(): tile for tile in reader.make_tiles_of_image(replace(each, low_detail=low))}
    return images


def _placeholder_mismatch_error() -> InvalidRequest:
    return image_error("messages", "the model's tokenizer does not encode images as its config.json says")
