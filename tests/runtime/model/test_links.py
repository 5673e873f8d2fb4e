"""Links out of a model's folder, which are refused, and the caches of huggingface_hub, which have them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from quire.runtime.common.errors import CorruptCheckpoint
from quire.runtime.model import BUNDLED_MODEL, model_path
from quire.runtime.model.families.registry import open_model

from tests.support.gguf_files import write

FILES = ("config.json", "model.safetensors", "tokenizer.json")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a copy of the bundled model."""
    copy = tmp_path / "model"
    copy.mkdir()
    for name in FILES:
        shutil.copyfile(BUNDLED_MODEL / name, copy / name)
    return copy


def hub_cache(root: Path, revision: str = "1f2e3d") -> Path:
    """Write the bundled model as huggingface_hub caches it; return the snapshot."""
    repository = root / "models--org--name"
    snapshot = repository / "snapshots" / revision
    for part in (snapshot, repository / "blobs"):
        part.mkdir(parents=True, exist_ok=True)
    for index, name in enumerate(FILES):
        shutil.copyfile(BUNDLED_MODEL / name, repository / "blobs" / f"sha{index}")
        (snapshot / name).symlink_to(f"../../blobs/sha{index}")
    return snapshot


@pytest.mark.parametrize("name", [*FILES, "chat_template.jinja", "special_tokens_map.json", "model-2.safetensors"])
def test_a_link_out_of_the_folder_is_refused(folder: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_text("{}")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("../secret")
    with pytest.raises(CorruptCheckpoint, match=r"is a link to .*secret, outside of the model's folder"):
        model_path(folder)


@pytest.mark.parametrize("name", ["model-of-others", "model2", "modelmodel"])
def test_a_link_to_a_folder_whose_name_begins_alike_is_refused(folder: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "secret").write_text("{}")
    (folder / "generation_config.json").symlink_to(f"../{name}/secret")
    with pytest.raises(CorruptCheckpoint, match=rf"is a link to .*/{name}/secret, outside of the model's folder"):
        model_path(folder)


def test_a_link_that_leaves_by_another_one_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("{}")
    (folder / "a").symlink_to(tmp_path / "secret")
    (folder / "generation_config.json").symlink_to("a")
    with pytest.raises(CorruptCheckpoint, match=r"generation_config\.json is a link to .*secret"):
        model_path(folder)


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_link_in_a_subfolder_or_of_one_is_refused(folder: Path, tmp_path: Path, is_folder: bool) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "config.json").write_text("{}")
    if is_folder:
        (folder / "1_Pooling").symlink_to(tmp_path / "outside")
    else:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").symlink_to(tmp_path / "outside" / "config.json")
    with pytest.raises(CorruptCheckpoint, match=r"1_Pooling.* is a link to .*outside"):
        model_path(folder)


def test_links_within_the_folder_are_read(folder: Path) -> None:
    """Kubernetes mounts files so."""
    (folder / "..data").mkdir()
    for name in FILES:
        (folder / name).rename(folder / "..data" / name)
        (folder / name).symlink_to(f"..data/{name}")
    assert model_path(folder) == folder


def test_links_that_no_model_reads_do_not_matter(folder: Path) -> None:
    (folder / "notes.md").symlink_to("/etc/hostname")
    (folder / "runs").symlink_to("/etc/ssl")
    assert model_path(folder) == folder


def test_the_folder_may_be_a_link_itself(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "name").symlink_to(folder)
    assert model_path(tmp_path / "name") == tmp_path / "name"


def test_the_snapshots_of_a_hub_cache_link_to_its_blobs(tmp_path: Path) -> None:
    snapshot = hub_cache(tmp_path / "hub")
    assert open_model(model_path(snapshot))[0].family == "qwen3"
    (tmp_path / "moved").symlink_to(tmp_path / "hub")
    assert model_path(tmp_path / "moved" / "models--org--name" / "snapshots" / "1f2e3d").exists()
    (tmp_path / "name").symlink_to(snapshot)
    assert model_path(tmp_path / "name").exists()


@pytest.mark.parametrize("target", ["../../../models--other--name/blobs/sha0", "../../refs/main", "/etc/hostname"])
def test_a_hub_cache_links_to_nothing_else(tmp_path: Path, target: str) -> None:
    (tmp_path / "models--other--name" / "blobs").mkdir(parents=True)
    (tmp_path / "models--other--name" / "blobs" / "sha0").write_text("{}")
    snapshot = hub_cache(tmp_path)
    (tmp_path / "models--org--name" / "refs").mkdir()
    (snapshot / "generation_config.json").symlink_to(target)
    with pytest.raises(CorruptCheckpoint, match="outside of the model's folder"):
        model_path(snapshot)


def test_a_folder_that_only_looks_like_a_cache_is_none(tmp_path: Path) -> None:
    snapshot = tmp_path / "name" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (tmp_path / "name" / "blobs").mkdir()
    (tmp_path / "name" / "blobs" / "sha").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/sha")
    with pytest.raises(CorruptCheckpoint, match="outside of the model's folder"):
        model_path(snapshot)


def test_a_gguf_file_may_be_a_link_but_nothing_beside_it(tmp_path: Path) -> None:
    (tmp_path / "all").mkdir()
    (tmp_path / "here").mkdir()
    write(tmp_path / "all" / "sha.gguf", {"general.architecture": "llama"}, {})
    link = tmp_path / "here" / "model.gguf"
    for name in ("model.gguf", "other.gguf"):
        (tmp_path / "here" / name).symlink_to(tmp_path / "all" / "sha.gguf")
    assert model_path(link) == link
    (tmp_path / "here" / "tokenizer.json").symlink_to("/etc/hostname")
    with pytest.raises(CorruptCheckpoint, match=r"tokenizer\.json is a link to /etc/hostname"):
        model_path(link)


def test_a_part_of_a_gguf_file_is_no_link_out_of_its_folder(tmp_path: Path) -> None:
    first = write(tmp_path / "a-00001-of-00002.gguf", {"general.architecture": "llama"}, {})
    (tmp_path / "a-00002-of-00002.gguf").symlink_to("/etc/hostname")
    with pytest.raises(CorruptCheckpoint, match=r"a-00002-of-00002\.gguf is a link to /etc/hostname"):
        model_path(first)
