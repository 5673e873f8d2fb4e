"""The image runner: computes the rows of images with a vision tower, in parts, and keeps them in a bounded cache.

Its methods block; the model runner calls them from its own thread. An image is computed alone.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ....kernels import Pool
from ....scheduler import PlacedImage, ScheduledSequence
from ..vision import PackedTower
from ..vision.spec import SQUARES_WRITTEN, TowerInput
from .image_program import Floats, ImageProgram, Ints
from .paced_work import PacedWork, WorkPiece

Key = tuple[bytes, bytes]  # salt of the sequence, digest of the image


class ImageRunner:
    """A tower bound to memory and threads. The constructor takes all memory but the cache's.

    The cache holds up to `max_cache_bytes` of recently used rows, and at least the rows of one image.
    """

    def __init__(
        self,
        tower: PackedTower,
        max_cache_bytes: int,
        pool: Pool,
        isa: str,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.spec = spec = tower.spec
        self.num_encoded = 0
        self.num_cache_hits = 0
        self._max_cache_bytes = max_cache_bytes
        self._cache: OrderedDict[Key, Floats] = OrderedDict()  # least recently used first
        self._cache_bytes = 0
        self._in_progress: Key | None = None  # the image that is being computed
        self._rows_in_progress = np.zeros((0, spec.out_size), np.float32)  # rows of the current image
        self._work = PacedWork(clock)  # work of the current image
        self._finished_unused: Key | None = None  # the image that was finished last, if no step has used it yet
        self._clock = clock
        self._tower = tower
        programs = tower.programs
        vocab_size = spec.body.vocab_size
        self._patches = ImageProgram(programs.patches, spec.num_patches, spec.num_windows, vocab_size, pool, isa)
        at_once = spec.squares_at_once
        self._squares = [
            ImageProgram(plan, at_once * spec.square_rows, at_once, 1, pool, isa) for plan in programs.squares
        ]

    def prepare(self, sequences: Sequence[ScheduledSequence], seconds: float) -> frozenset[int]:
        """Compute the images of a step: at least one part, then parts that are predicted to end within `seconds`.

        Returns the ids of the sequences whose images were not in the cache before: a step that computes images does not
        also compute the tokens that wait for them. The next call continues where this call stopped, even if the step
        has other images: otherwise images could alternate without end.
        """
        end = self._clock() + seconds
        wanted: list[tuple[Key, PlacedImage]] = []
        deferred: set[int] = set()
        for sequence in sequences:
            for image in sequence.images:
                key = sequence.salt, image.digest
                if key not in self._cache:
                    wanted.append((key, image))
                    deferred.add(sequence.request_id)
                elif key != self._finished_unused:
                    self.num_cache_hits += 1
                else:
                    self._finished_unused = None
        for key, image in wanted:
            self._compute(key, image, end)
        return frozenset(deferred)

    def embeddings(self, sequences: Sequence[ScheduledSequence]) -> tuple[Ints, Floats] | None:
        """Return the rows of a step that stand for images: for each row an index or -1, and the array of the indices.

        None if no row does. Images that are not in the cache are computed.
        """
        if not any(sequence.images for sequence in sequences):
            return None
        indices = []
        given = []
        num_given = 0
        for sequence in sequences:
            first = sequence.first_position
            of_sequence = np.full(len(sequence.token_ids), -1, np.int32)
            for image in sequence.images:
                begin, end = max(image.position, first), min(image.end, first + len(of_sequence))
                rows = self._rows((sequence.salt, image.digest), image)
                given.append(rows[begin - image.position : end - image.position])
                of_sequence[begin - first : end - first] = np.arange(num_given, num_given + end - begin)
                num_given += end - begin
            indices.append(of_sequence)
        return np.concatenate(indices), np.concatenate(given)

    def last_seen(self, sequences: Sequence[ScheduledSequence]) -> Ints | None:
        """Return the position of the last token that each row attends to; None if no row attends to later ones."""
        if not self.spec.whole_images or not any(sequence.images for sequence in sequences):
            return None
        seen = []
        for sequence in sequences:
            first = sequence.first_position
            of_sequence = np.arange(first, first + len(sequence.token_ids), dtype=np.int32)
            for image in sequence.images:
                of_sequence[max(0, image.position - first) : image.end - first] = image.end - 1
            seen.append(of_sequence)
        return np.concatenate(seen)

    def encode(self, image: PlacedImage) -> Floats:
        """Return the rows of an image, f32 [tokens, out_size], without the cache."""
        self._in_progress = None
        self._begin(image)
        self._work.advance(math.inf)
        return self._rows_in_progress

    def _compute(self, key: Key, image: PlacedImage, end: float) -> None:
        """Compute the image in progress, then this image, until `end`."""
        while key not in self._cache:
            current = self._in_progress
            if current is None:
                self._begin(image)
                current = self._in_progress = key
            if not self._work.advance(end - self._clock()):
                return
            self._keep(current, self._rows_in_progress)
            self._in_progress = None
            self._finished_unused = current
            if self._clock() >= end:
                return

    def _rows(self, key: Key, image: PlacedImage) -> Floats:
        if key not in self._cache:
            self._keep(key, self.encode(image))
        self._cache.move_to_end(key)
        return self._cache[key]

    def _begin(self, image: PlacedImage) -> None:
        """Take an image, and drop the one in progress."""
        pixels = np.frombuffer(image.pixels, np.uint8).reshape(image.height, image.width, -1)
        given = self._tower.input(pixels)
        self._rows_in_progress = np.empty((len(given.places), self.spec.out_size), np.float32)
        self._work.begin(self._pieces(given))

    def _pieces(self, given: TowerInput) -> Iterator[WorkPiece]:
        """Yield all work of an image, in order."""
        yield self._write(given)
        read_layers = self.spec.read_layers
        for layer, row_start in enumerate(given.row_starts):
            yield from self._patches.stage(layer, row_start)
            if layer in read_layers:
                yield from self._merge(1 + read_layers.index(layer), self._patches.result(1), given)
        yield from self._merge(0, self._patches.result(), given)

    def _write(self, given: TowerInput) -> WorkPiece:
        """Return the work of writing the input of the patches."""
        size = len(given.token_ids) // len(given.places)
        head_dim = self.spec.body.head_dim
        rotary = np.empty((len(given.token_ids), head_dim), np.float32) if given.rows(0, 1).rotary is not None else None
        self._patches.begin(given.token_ids, rotary)

        def write(first: int, end: int) -> None:
            for begin in range(first, end, SQUARES_WRITTEN):
                part = given.rows(begin, min(begin + SQUARES_WRITTEN, end))
                inputs = [part.patches] if part.positions is None else [part.patches, part.positions]
                self._patches.write(begin * size, *inputs)
                if rotary is not None and part.rotary is not None:
                    rotary[begin * size : begin * size + len(part.rotary)] = part.rotary

        return WorkPiece("write", len(given.places), float(size * self.spec.patch_columns), SQUARES_WRITTEN, write)

    def _merge(self, index: int, patches: Floats, given: TowerInput) -> Iterator[WorkPiece]:
        """Yield the work of one of the programs after the patches, for some squares of an image at a time."""
        spec = self.spec
        program = self._squares[index]
        places = given.places
        per_square = len(given.token_ids) // len(places)
        columns = slice(index * spec.out_size // len(self._squares), (index + 1) * spec.out_size // len(self._squares))
        for first in range(0, len(places), spec.squares_at_once):
            squares = len(places[first : first + spec.squares_at_once])
            row_start = np.arange(0, (squares + 1) * spec.square_rows, spec.square_rows, dtype=np.int32)
            program.begin(np.zeros(row_start[-1], np.int32))

            def copy(begin: int, end: int, first: int = first) -> None:
                rows = patches[(first + begin) * per_square : (first + end) * per_square]
                program.write(begin * spec.square_rows, rows.reshape(-1, spec.square_columns))

            def keep(begin: int, end: int, first: int = first) -> None:
                self._rows_in_progress[places[first + begin : first + end], columns] = program.result()[begin:end]

            yield WorkPiece("copy", squares, float(spec.square_rows * spec.square_columns), SQUARES_WRITTEN, copy)
            yield from program.stage(0, row_start)
            yield WorkPiece("copy", squares, float(columns.stop - columns.start), SQUARES_WRITTEN, keep)

    def _keep(self, key: Key, rows: Floats) -> None:
        self.num_encoded += 1
        self._cache[key] = rows
        self._cache_bytes += rows.nbytes
        while self._cache_bytes > self._max_cache_bytes and len(self._cache) > 1:
            self._cache_bytes -= self._cache.popitem(last=False)[1].nbytes
