"""The golden prompts with images of tests/goldens/make_vision_goldens.py, of all families that have a tower."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from quire.runtime.common.prompts import PromptImage, image_digest

GOLDENS = Path(__file__).parents[1] / "goldens"
FAMILIES = tuple(sorted(path.parent.name for path in GOLDENS.glob("*/images.npz")))
PLACEHOLDER = 159

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class GoldenImages:
    """A prompt with images, and the results of transformers."""

    folder: Path
    prompt: list[int]
    images: list[PromptImage]
    rows: list[Floats]  # rows of each image, [tokens, hidden]
    logits: Floats  # [tokens of the prompt, vocab]

    def check_logits(self, logits: Floats, tolerance: float, least_cosine: float = 0.999) -> None:
        """Assert that logits differ from those of transformers by `tolerance` of their range at most, and in cosine."""
        assert np.abs(logits - self.logits).max() <= tolerance * np.ptp(self.logits)
        cosine = (logits * self.logits).sum() / np.linalg.norm(logits) / np.linalg.norm(self.logits)
        assert cosine >= least_cosine


def golden_images(family: str) -> GoldenImages:
    """Return the golden prompt of a family."""
    folder = GOLDENS / family
    with np.load(folder / "images.npz") as data:
        prompt: list[int] = data["token_ids"].tolist()
        if "pixels" in data:
            pixels = [*data["pixels"]]
            rows = [*data["rows"]]
        else:
            count = sum(name.startswith("pixels_") for name in data)
            pixels, rows = ([data[f"{kind}_{index}"] for index in range(count)] for kind in ("pixels", "rows"))
        logits = data["logits"]
    images = []
    position = 0
    for array, of_image in zip(pixels, rows, strict=True):
        position = prompt.index(PLACEHOLDER, position)
        images.append(PromptImage(position, len(of_image), array, image_digest(array)))
        position += len(of_image)
    return GoldenImages(folder, prompt, images, rows, logits)
