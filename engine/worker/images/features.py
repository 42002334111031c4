"""The features of the images that a step's tokens stand for, kept by content within a bound."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from quire.engine.core.batch import Admission, Row
from quire.engine.encoders.vision.tower import Tower
from quire.engine.images.config import KEPT_BYTES
from quire.engine.images.vision import Vision
from quire.engine.models.decoder import Features
from quire.engine.types import Span
from quire.engine.worker.images.places import ImagePlaces
from quire.engine.worker.inputs import Owner


class ImageFeatures:
    def __init__(self, tower: Tower, vision: Vision, most_bytes: int = KEPT_BYTES) -> None:
        self._tower = tower
        self.places = ImagePlaces(vision)
        self._most = most_bytes
        self._kept: OrderedDict[tuple[str, bytes], Tensor] = OrderedDict()
        """By salt and content; the one that was used last at the end. Salts are apart, so that nobody can tell by the
        time that it takes whether another tenant has shown an image."""
        self._bytes = 0
        self.made = 0
        """Images, or parts of them, that the tower has read."""

    def of(self, rows: Iterable[Row], owner: Callable[[Row], Owner]) -> Features | None:
        """For the tokens of these rows, in their order, that stand for a part of an image; None where none does."""
        places: list[Tensor] = []
        values: list[Tensor] = []
        begin = 0
        for row in rows:
            admission = owner(row).admission
            for span in admission.spans:
                first = max(span.start, row.start)
                last = min(span.start + span.count, row.start + row.count)
                if first < last:
                    at = span.start - span.offset
                    values.append(self._features(admission, span)[first - at : last - at])
                    places.append(torch.arange(begin + first - row.start, begin + last - row.start))
            begin += row.count
        return Features(torch.cat(places), torch.cat(values)) if places else None

    def _features(self, admission: Admission, span: Span) -> Tensor:
        key = admission.salt, span.digest
        found = self._kept.get(key)
        if found is None:
            image = next(each for each in admission.images if each.digest == span.digest)
            found = self._tower.features(image)
            self.made += 1
            self._keep(key, found)
        self._kept.move_to_end(key) if key in self._kept else None
        assert span.offset + span.count <= len(found), "a span is longer than its image's features"
        return found

    def _keep(self, key: tuple[str, bytes], features: Tensor) -> None:
        self._kept[key] = features
        self._bytes += features.nbytes
        while self._bytes > self._most:
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= dropped.nbytes
