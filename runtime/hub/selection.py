"""The files of a model that Quire reads, among all files of its repository; the GGUF models of a repository.

A repository may also have weights of other programs, several precisions, pictures and texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch

from ..common.errors import ConfigError, CorruptCheckpoint, ModelNotFound
from ..model.config_json import CONFIG_FILE
from ..model.weights.gguf import PART
from ..model.weights.safetensors import INDEX_FILE, SINGLE_FILE
from .listing import Listing, RemoteFile
from .reference import ModelReference

FOLDER_PATTERNS = (
    "*.json",
    "*.jinja",
    "*_*/config.json",
    "*chat_templates/*.jinja",
)  # names of the files before the weights
NOT_READ = ("vocab.json", "*.index.json", "*.index.*.json")
MODULE_WEIGHTS = "[0-9]*_*/model.safetensors"  # weights of sentence-transformers' modules
MAX_SMALL_BYTES = 256 << 20  # size of a file before the weights
DEFAULT_QUANTIZATION = "Q4_K_M"
FULL_PRECISION = re.compile(r"(?i)(?<![A-Z0-9])(b?f16|f32)(?![A-Z0-9])")
QUANTIZATION_SUFFIX = re.compile(
    r"(?i)(?<![A-Z0-9])((?:UD-)?(?:I?Q\d+(?:_[A-Z0-9]+)*|TQ\d_\d|MXFP4(?:_MOE)?|BF16|F16|F32))$"
)
MAX_SHOWN = 20  # names in an error


@dataclass(frozen=True, slots=True)
class GGUFModel:
    """A GGUF file of a repository, or the parts of one in order."""

    files: tuple[RemoteFile, ...]

    @property
    def name(self) -> str:
        """The name of the file without its ending; of a split one, without the number of the part."""
        first = self.files[0].name
        part = PART.fullmatch(first)
        return part[1] if part else first.removesuffix(".gguf")

    @property
    def quantization(self) -> str:
        """The quantization that the name ends with, or the whole name of the file."""
        base = self.name.rsplit("/", 1)[-1]
        found = QUANTIZATION_SUFFIX.search(base)
        return found[1] if found else base

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files)


def gguf_models(files: Iterable[RemoteFile]) -> list[GGUFModel]:
    """Return the GGUF models, by name. Files for images, and split files that lack a part, are left out."""
    whole: list[GGUFModel] = []
    parts: dict[tuple[str, int], dict[int, RemoteFile]] = {}
    for file in files:
        if not file.name.endswith(".gguf") or "mmproj" in file.name.lower():
            continue
        part = PART.fullmatch(file.name)
        if part is None:
            whole.append(GGUFModel((file,)))
        else:
            parts.setdefault((part[1], int(part[3])), {})[int(part[2])] = file
    for (_, count), found in parts.items():
        if sorted(found) == list(range(1, count + 1)):
            whole.append(GGUFModel(tuple(found[number] for number in sorted(found))))
    return sorted(whole, key=lambda model: model.name)


def is_folder(names: Iterable[str]) -> bool:
    """Return whether files are a model in Hugging Face's format."""
    names = set(names)
    return CONFIG_FILE in names and bool(names & {SINGLE_FILE, INDEX_FILE})


def tagged(models: list[GGUFModel], reference: ModelReference) -> GGUFModel:
    """Return the GGUF model that the tag names: its file, or its quantization. Raises ModelNotFound or ConfigError."""
    tag = reference.tag.lower()
    found = [model for model in models if tag in (model.name.lower(), *(file.name.lower() for file in model.files))]
    found = found or [model for model in models if model.quantization.lower() == tag]
    found = found or [model for model in models if tag in re.split(r"[/.]", model.name.lower())]
    if not models:
        raise ModelNotFound(f"{reference.repo} has no GGUF file; leave out `:{reference.tag}`")
    if not found:
        raise ModelNotFound(f"{reference.repo} has no {reference.tag}; it has {_shown(m.quantization for m in models)}")
    if len(found) > 1:
        names = _shown(model.name for model in found)
        raise ConfigError(f"{reference} could be any of {names}; give one of these names after the colon")
    return found[0]


def by_preference(models: list[GGUFModel]) -> list[GGUFModel]:
    """Return the models in the order in which they are tried: Q4_K_M, then the largest first.

    Unquantized ones are left out if there are others.
    """
    quantized = [model for model in models if FULL_PRECISION.search(model.name) is None] or models
    largest = sorted(quantized, key=lambda model: -model.nbytes)
    return sorted(largest, key=lambda model: model.quantization.upper() != DEFAULT_QUANTIZATION)


def files_before_weights(listing: Listing) -> list[RemoteFile]:
    """Return the files of a folder besides its weights. Raises CorruptCheckpoint for a large one."""
    chosen = [
        file
        for name, file in listing.files.items()
        if any(_fits(name, pattern) for pattern in FOLDER_PATTERNS)
        and (name == INDEX_FILE or not any(_fits(name, pattern) for pattern in NOT_READ))
    ]
    for file in chosen:
        if file.size > MAX_SMALL_BYTES:
            raise CorruptCheckpoint(
                f"{listing.repo}: {file.name} has {file.size:,} bytes; {MAX_SMALL_BYTES:,} are allowed"
            )
    return chosen


def weight_files(listing: Listing, index: bytes | None) -> list[RemoteFile]:
    """Return the files with weights: the shards of the index, or the single file; and those of further modules."""
    names = [SINGLE_FILE] if index is None else sorted(_shards(listing.repo, index))
    names += sorted(name for name in listing.files if _fits(name, MODULE_WEIGHTS))
    if missing := [name for name in names if name not in listing.files]:
        raise CorruptCheckpoint(f"{listing.repo} lacks {missing[0]}, which its index names; choose another repository")
    return [listing.files[name] for name in names]


def no_weights(listing: Listing) -> ModelNotFound:
    """Return the error for a repository that has neither safetensors nor a GGUF file."""
    return ModelNotFound(
        f"{listing.repo} has no {CONFIG_FILE} with {SINGLE_FILE} and no GGUF file; choose a repository in one of these "
        "forms"
    )


def _shards(repo: str, index: bytes) -> set[str]:
    try:
        shards = json.loads(index)["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptCheckpoint(f"{repo}: {INDEX_FILE} has no map of weights: {error}") from error
    if not isinstance(shards, Mapping) or not shards or not all(isinstance(name, str) for name in shards.values()):
        raise CorruptCheckpoint(f"{repo}: {INDEX_FILE} has no map of weights to files")
    return set(shards.values())


def _fits(name: str, pattern: str) -> bool:
    return name.count("/") == pattern.count("/") and fnmatch(name, pattern)


def _shown(names: Iterable[str]) -> str:
    unique = sorted(set(names))
    more = f" and {len(unique) - MAX_SHOWN} more" if len(unique) > MAX_SHOWN else ""
    return ", ".join(unique[:MAX_SHOWN]) + more
