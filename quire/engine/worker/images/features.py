"""The features of the images that a step's tokens stand for, kept by content within a bound."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from quire.engine.core.scheduler_output import EncoderChunk, NewRequestData, ScheduledRequest, SchedulerOutput
from quire.engine.encoders.vision.tower import Reading, Tower
from quire.engine.images.config import KEPT_BYTES
from quire.engine.images.vision import Vision
from quire.engine.models.decoder import Features
from quire.engine.types import Image, Span
from quire.engine.worker.images.places import ImagePlaces
from quire.kernels.gpu.transfer import upload

Key = tuple[str, bytes]
"""Salt and content. Salts are apart, so that nobody can tell by the time that it takes whether another tenant has shown
an image."""


class _Begun:
    """An image whose reading is not over."""

    def __init__(self, key: Key, reading: Reading, work: int) -> None:
        self.key = key
        self._reading, self._work, self._done = reading, work, 0.0

    def go_on(self, look: EncoderChunk) -> Tensor | None:
        """Read up to there. Returns the features, where that is the end."""
        try:
            while look.is_last or self._done * look.total < look.end * self._work:
                self._done += next(self._reading)
        except StopIteration as end:
            (found,) = end.value
            assert isinstance(found, Tensor)
            return found
        return None


class ImageFeatures:
    def __init__(
        self, tower: Tower | None, vision: Vision, most_bytes: int = KEPT_BYTES, *, apart: bool = False
    ) -> None:
        """tower: None where another stage of a pipeline has it. apart: no image is read beside others, whose number
        would change its bits."""
        self._tower, self._vision, self._apart = tower, vision, apart
        self.places = ImagePlaces(vision)
        self.most_bytes = most_bytes
        """Of features that are kept; those of the image that was read last are in any case."""
        self._kept: OrderedDict[Key, Tensor] = OrderedDict()
        """The one that was used last at the end."""
        self._bytes = 0
        self._begun: dict[int, _Begun] = {}
        """By slot; several may have the same."""
        self.made = 0
        """Images, or parts of them, that the tower has read."""

    def look(self, batch: SchedulerOutput, owner: Callable[[ScheduledRequest], NewRequestData]) -> None:
        """Read what the step's rows say. Those that it reads from their beginning to their end, of one height and
        width, are read together."""
        if self._tower is None:
            return
        for slot in (*batch.freed_slots, *(each.slot for each in batch.new_requests)):
            self._begun.pop(slot, None)
        whole: dict[tuple[int, int], dict[Key, Image]] = {}
        for row in batch.scheduled_requests:
            admission = owner(row)
            for look in row.encoder_chunks:
                key, image = (admission.salt, look.digest), _content(admission, look.digest)
                begun = next((each for each in self._begun.values() if each.key == key), None)
                if key in self._kept:
                    self._kept.move_to_end(key)
                elif begun is None and look.is_last and not self._apart:
                    whole.setdefault((image.height, image.width), {})[key] = image
                else:
                    begun = begun or _Begun(key, self._tower.reading([image]), self._vision.work(image))
                    self._go_on(row.slot, begun, look)
        for images in whole.values():
            self._read(images)

    def of(
        self, rows: Iterable[ScheduledRequest], owner: Callable[[ScheduledRequest], NewRequestData]
    ) -> Features | None:
        """For the tokens of these rows, in their order, that stand for a part of an image; None where none does."""
        places: list[np.ndarray] = []
        values: list[Tensor] = []
        begin = 0
        for row in rows if self._tower is not None else ():
            admission = owner(row)
            for span in admission.spans:
                first = max(span.start, row.start)
                last = min(span.start + span.count, row.start + row.num_tokens)
                if first < last:
                    at = span.start - span.offset
                    values.append(self._features(admission, span)[first - at : last - at])
                    places.append(np.arange(begin + first - row.start, begin + last - row.start))
            begin += row.num_tokens
        if not places:
            return None
        (standing,) = upload([np.concatenate(places)], values[0].device)
        return Features(standing, torch.cat(values))

    def warm_up(self) -> None:
        """Read an image that nobody has shown."""
        if self._tower is not None:
            self._tower.features([largest(self._vision, 256)])

    def vectors(self, rows: Sequence[ScheduledRequest], owner: Callable[[ScheduledRequest], NewRequestData]) -> Tensor:
        """Of rows each of which is one image, whose features are its vector: [rows, size]."""
        found = self.of(rows, owner)
        assert found is not None
        return found.values

    def _go_on(self, slot: int, begun: _Begun, look: EncoderChunk) -> None:
        self._begun[slot] = begun
        if (found := begun.go_on(look)) is not None:
            self._keep(begun.key, found)
            self._begun = {slot: each for slot, each in self._begun.items() if each is not begun}

    def _read(self, images: dict[Key, Image]) -> None:
        assert self._tower is not None
        found = self._tower.features(list(images.values()))
        for key, each in zip(images, found, strict=True):
            self._keep(key, each)

    def _features(self, admission: NewRequestData, span: Span) -> Tensor:
        key = admission.salt, span.digest
        if key not in self._kept:  # it was let go of since it was read
            self._read({key: _content(admission, span.digest)})
        self._kept.move_to_end(key)
        found = self._kept[key]
        assert span.offset + span.count <= len(found), "a span is longer than its image's features"
        return found

    def _keep(self, key: Key, features: Tensor) -> None:
        """All of it, and what else there is room for."""
        self.made += 1
        self._kept[key] = features
        self._bytes += features.nbytes
        while self._bytes > self.most_bytes and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= dropped.nbytes


def largest(vision: Vision, side: int) -> Image:
    """What has most patches of what a square of so many black pixels becomes."""
    from PIL import Image as Pillow  # no start but a GPU's needs it

    black = Pillow.new("RGB", (side, side))
    return max(vision.layout(side, side).contents(black), key=vision.patches)


def _content(admission: NewRequestData, digest: bytes) -> Image:
    return next(each for each in admission.images if each.digest == digest)
