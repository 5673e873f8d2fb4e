"""The image runner: computes the rows of images with a vision tower, in stages, and keeps them in a bounded cache.

Its methods block; the model runner calls them from its own thread. An image is computed alone.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ....kernels import Pool
from ....scheduler import PlacedImage, ScheduledSequence
from ...common.errors import ConfigError
from ..program import ProgramPlan
from ..vision import PackedTower
from ..vision.spec import TowerInput
from .staged_program import Floats, Ints, StagedProgram

Key = tuple[bytes, bytes]  # salt of the sequence, digest of the image


class ImageRunner:
    """A tower bound to memory and threads. The constructor takes all memory but that of the cache.

    The cache holds the rows of at most `max_cache_bytes`, those used last, and at least those of one image.
    """

    def __init__(self, tower: PackedTower, max_cache_bytes: int, pool: Pool, isa: str) -> None:
        self.spec = spec = tower.spec
        self.num_encoded = 0
        self.num_cache_hits = 0
        self._max_cache_bytes = max_cache_bytes
        self._cache: OrderedDict[Key, Floats] = OrderedDict()  # least recently used first
        self._cache_bytes = 0
        self._begun: Key | None = None  # image that is not done
        self._order: npt.NDArray[np.int64] | None = None  # of the image that is computed, as in `TowerInput`
        self._levels: list[Floats] = []  # of this image, what the programs of `squares` after the first one have made
        self._tower = tower
        programs, vocab_size = tower.programs, spec.body.vocab_size
        self._patches = _ImageProgram(programs.patches, spec.num_patches, spec.num_windows, vocab_size, pool, isa)
        at_once = spec.squares_at_once
        self._squares = [
            _ImageProgram(plan, at_once * spec.square_rows, at_once, 1, pool, isa) for plan in programs.squares
        ]

    def prepare(self, sequences: Sequence[ScheduledSequence], seconds: float) -> frozenset[int]:
        """Compute the images of a step, one stage of the tower at least, then others until `seconds` have passed.

        Returns the ids of the sequences whose images are not done. The next call goes on where this one stopped.
        """
        return frozenset(
            sequence.request_id
            for sequence in sequences
            if not all(self._is_done((sequence.salt, image.digest), image, seconds) for image in sequence.images)
        )

    def embeddings(self, sequences: Sequence[ScheduledSequence]) -> tuple[Ints, Floats] | None:
        """Return the rows of a step that stand for images: for each row an index or -1, and what the index is into.

        None if no row does. Images that are not in the cache are computed.
        """
        if not any(sequence.images for sequence in sequences):
            return None
        indices, given, num_given = [], [], 0
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
        """Return the position of the last token that each row of a step sees; None if each sees none after itself."""
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
        self._begun = None
        self._begin(image)
        while not self._advance():
            pass
        return self._finish()

    def _is_done(self, key: Key, image: PlacedImage, seconds: float) -> bool:
        if key in self._cache:
            self.num_cache_hits += 1
            return True
        start = time.perf_counter()
        if self._begun != key:
            if self._begun is not None:  # otherwise the images of two requests could take turns, and none be done
                seconds = math.inf
            self._begin(image)
            self._begun = key
        while not self._advance():
            if time.perf_counter() - start >= seconds:
                return False
        self._begun = None
        self._keep(key, self._finish())
        return True

    def _rows(self, key: Key, image: PlacedImage) -> Floats:
        if key not in self._cache:
            self._keep(key, self.encode(image))
        self._cache.move_to_end(key)
        return self._cache[key]

    def _begin(self, image: PlacedImage) -> None:
        pixels = np.frombuffer(image.pixels, np.uint8).reshape(image.height, image.width, -1)
        given = self._tower.input(pixels)
        self._order, self._levels = given.order, []
        self._patches.begin(given)

    def _advance(self) -> bool:
        """Compute the next stage of the image; return whether it was the last one."""
        layer = self._patches.next_stage
        is_done = self._patches.advance()
        if layer in self._tower.read_layers:
            self._levels.append(self._merge(self._squares[len(self._levels) + 1], self._patches.result(1)))
        return is_done

    def _finish(self) -> Floats:
        """Return the rows of the image whose patches are computed."""
        rows = np.concatenate([self._merge(self._squares[0], self._patches.result()), *self._levels], axis=1)
        return rows if self._order is None else rows[self._order]

    def _merge(self, program: _ImageProgram, patches: Floats) -> Floats:
        """Return what one of the programs after the patches makes of them, [squares, columns]."""
        spec = self.spec
        at_once = spec.squares_at_once * spec.square_rows * spec.square_columns // patches.shape[1]
        merged = []
        for chunk in np.split(patches, range(at_once, len(patches), at_once)):
            rows = chunk.reshape(-1, spec.square_columns)
            squares = np.arange(0, len(rows) + 1, spec.square_rows, dtype=np.int32)
            program.begin(TowerInput(rows, np.zeros(len(rows), np.int32), (squares,)))
            while not program.advance():
                pass
            merged.append(program.result().copy())
        return np.concatenate(merged)

    def _keep(self, key: Key, rows: Floats) -> None:
        self.num_encoded += 1
        self._cache[key] = rows
        self._cache_bytes += rows.nbytes
        while self._cache_bytes > self._max_cache_bytes and len(self._cache) > 1:
            self._cache_bytes -= self._cache.popitem(last=False)[1].nbytes


class _ImageProgram:
    """One program of a tower, for the rows of one image at a time."""

    def __init__(self, plan: ProgramPlan, max_rows: int, max_texts: int, vocab_size: int, pool: Pool, isa: str) -> None:
        self.next_stage = 0
        self._row_starts: Sequence[Ints] = ()  # of each stage
        self._num_rows = 0
        sizes = {"max_rows": max_rows, "max_texts": max_texts, "vocab_size": vocab_size}
        try:
            self._program = StagedProgram(plan, pool, isa, **sizes)
        except MemoryError as error:
            raise ConfigError(
                f"the vision tower needs {plan.arena_bytes:,} bytes for an image, which the system does not give; use "
                "a smaller model or more memory"
            ) from error
        self._inputs = [self._program.view(given) for given in plan.inputs]  # [rows, padded columns] each
        self._results = [self._program.view(result)[:, : result.columns] for result in plan.results]

    def begin(self, given: TowerInput) -> None:
        """Take an image, in place of one that is not done."""
        self._num_rows = len(given.patches)
        arrays = [given.patches] if given.positions is None else [given.patches, given.positions]
        for memory, array in zip(self._inputs, arrays, strict=True):
            columns = array.shape[1]
            memory[: self._num_rows, :columns] = array
            memory[: self._num_rows, columns:] = 0  # another value of the arena may have been there
        self._row_starts, self.next_stage = given.row_starts, 0
        self._program.begin(given.token_ids, given.row_starts[0], rotary=given.rotary)

    def advance(self) -> bool:
        """Compute the next stage; return whether it was the last one."""
        self._program.divide(self._row_starts[self.next_stage])
        self.next_stage += 1
        return self._program.advance(1)

    def result(self, index: int = 0) -> Floats:
        """Return one of the results, [rows, columns], which the next stage may overwrite."""
        return self._results[index][: self._num_rows]
