from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from quire.engine.common.scheduler_output import EncoderChunk, NewRequestData, ScheduledRequest, SchedulerOutput
from quire.engine.common.types import Image, MediaSpan
from quire.engine.encoders.vision.tower import ChunkedEncoding, Tower
from quire.engine.families.base.vision.vision_spec import VisionSpec
from quire.engine.images.vision_config import ENCODER_CACHE_BYTES
from quire.engine.models.decoder import MediaEmbeddings
from quire.engine.worker.images.image_positions import ImagePositions
from quire.kernels.gpu.host_transfer import upload_arrays

CacheKey = tuple[str, bytes]
"""(salt, digest). The salt prevents tenants with different salts from finding out by timing that an image is cached."""


class _PartialEncoding:
    def __init__(self, key: CacheKey, reading: ChunkedEncoding, work: int) -> None:
        self.key = key
        self._encoding = reading
        self._total_work = work
        self._work_done = 0.0

    def advance_and_get_features(self, chunk: EncoderChunk) -> Tensor | None:
        try:
            while chunk.is_last or self._work_done * chunk.total_cost < chunk.end_progress * self._total_work:
                self._work_done += next(self._encoding)
        except StopIteration as end:
            (features,) = end.value
            assert isinstance(features, Tensor)
            return features
        return None


class ImageEncoderCache:
    def __init__(
        self, tower: Tower | None, vision: VisionSpec, max_bytes: int = ENCODER_CACHE_BYTES, *, one_by_one: bool = False
    ) -> None:
        """`tower` is None in later pipeline stages. `one_by_one` encodes each image alone, because a batch would change
        the bits of its features.
        """
        self._tower = tower
        self._vision = vision
        self._one_by_one = one_by_one
        self.positions = ImagePositions(vision)
        self.max_bytes = max_bytes
        """The image that was stored last is kept even if its features alone are larger."""
        self._cache: OrderedDict[CacheKey, Tensor] = OrderedDict()
        self._cached_bytes = 0
        self._partial: dict[int, _PartialEncoding] = {}
        """Several slots may share an encoding."""
        self.num_encoded = 0

    def run_scheduled_encoder_chunks(
        self, scheduler_output: SchedulerOutput, get_new_request: Callable[[ScheduledRequest], NewRequestData]
    ) -> None:
        if self._tower is None:
            return
        for slot in (*scheduler_output.freed_slots, *(each.slot for each in scheduler_output.new_requests)):
            self._partial.pop(slot, None)
        whole_images: dict[tuple[int, int], dict[CacheKey, Image]] = {}
        for row in scheduler_output.scheduled_requests:
            new_request = get_new_request(row)
            for chunk in row.encoder_chunks:
                key, image = (new_request.cache_salt, chunk.digest), _find_image_by_digest(new_request, chunk.digest)
                partial = next((each for each in self._partial.values() if each.key == key), None)
                if key in self._cache:
                    self._cache.move_to_end(key)
                elif partial is None and chunk.is_last and not self._one_by_one:
                    whole_images.setdefault((image.height, image.width), {})[key] = image
                else:
                    partial = partial or _PartialEncoding(
                        key, self._tower.encode_in_chunks([image]), self._vision.encoder_cost(image)
                    )
                    self._continue_encoding(row.slot, partial, chunk)
        for images in whole_images.values():
            self._encode_images(images)

    def gather_features(
        self, rows: Iterable[ScheduledRequest], get_new_request: Callable[[ScheduledRequest], NewRequestData]
    ) -> MediaEmbeddings | None:
        token_indices: list[np.ndarray] = []
        values: list[Tensor] = []
        begin = 0
        for row in rows if self._tower is not None else ():
            new_request = get_new_request(row)
            for span in new_request.spans:
                first = max(span.start, row.start)
                last = min(span.start + span.count, row.start + row.num_tokens)
                if first < last:
                    at = span.start - span.offset
                    values.append(self._get_features(new_request, span)[first - at : last - at])
                    token_indices.append(np.arange(begin + first - row.start, begin + last - row.start))
            begin += row.num_tokens
        if not token_indices:
            return None
        (device_indices,) = upload_arrays([np.concatenate(token_indices)], values[0].device)
        return MediaEmbeddings(device_indices, torch.cat(values))

    def warm_up_tower(self) -> None:
        if self._tower is not None:
            self._tower.encode_images([make_dummy_image(self._vision, 256)])

    def image_request_vectors(
        self, rows: Sequence[ScheduledRequest], get_new_request: Callable[[ScheduledRequest], NewRequestData]
    ) -> Tensor:
        """Returns [rows, size]."""
        features = self.gather_features(rows, get_new_request)
        assert features is not None
        return features.embeddings

    def _continue_encoding(self, slot: int, partial: _PartialEncoding, chunk: EncoderChunk) -> None:
        self._partial[slot] = partial
        if (features := partial.advance_and_get_features(chunk)) is not None:
            self._store_features(partial.key, features)
            self._partial = {slot: each for slot, each in self._partial.items() if each is not partial}

    def _encode_images(self, images: dict[CacheKey, Image]) -> None:
        assert self._tower is not None
        features = self._tower.encode_images(list(images.values()))
        for key, each in zip(images, features, strict=True):
            self._store_features(key, each)

    def _get_features(self, new_request: NewRequestData, span: MediaSpan) -> Tensor:
        key = new_request.cache_salt, span.digest
        if key not in self._cache:
            self._encode_images({key: _find_image_by_digest(new_request, span.digest)})
        self._cache.move_to_end(key)
        features = self._cache[key]
        assert span.offset + span.count <= len(features), "a span is longer than its image's features"
        return features

    def _store_features(self, key: CacheKey, features: Tensor) -> None:
        self.num_encoded += 1
        self._cache[key] = features
        self._cached_bytes += features.nbytes
        while self._cached_bytes > self.max_bytes and len(self._cache) > 1:
            _, dropped = self._cache.popitem(last=False)
            self._cached_bytes -= dropped.nbytes


def make_dummy_image(vision: VisionSpec, side: int) -> Image:
    """`side` is in pixels. If the layout splits the image, returns the part with the most patches."""
    from PIL import Image as Pillow  # only GPU starts need it

    image = Pillow.new("RGB", (side, side))
    return max(vision.make_layout(side, side).iter_resized_images(image), key=vision.num_patches)


def _find_image_by_digest(new_request: NewRequestData, digest: bytes) -> Image:
    return next(each for each in new_request.images if each.digest == digest)
