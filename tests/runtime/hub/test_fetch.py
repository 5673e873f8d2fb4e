"""Models by name: what is downloaded, when, and that nothing partial is ever used."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from huggingface_hub import constants
from quire.runtime.common.errors import (
    ConfigError,
    CorruptCheckpoint,
    ModelNotFound,
    QuireError,
    Unauthenticated,
    Unavailable,
    UnsupportedModel,
)
from quire.runtime.hub import ModelReference, cached, cached_models, fetch, headers, pull, remove
from quire.runtime.hub.cache import RECORDS
from quire.runtime.hub.fetch import OnBytes
from quire.runtime.model import read_spec

from tests.support.hub_server import COMMIT, Hub

FOLDER = ModelReference("org/tiny")
Q8 = ModelReference("org/tiny-GGUF", "Q8_0")


class Memory:
    """Models up to a size of their files fit."""

    def __init__(self, nbytes: float = 1e18) -> None:
        self._nbytes = nbytes
        self.asked: list[str] = []

    def fits(self, path: Path) -> bool:
        self.asked.append(path.name)
        return path.stat().st_size <= self._nbytes

    def check(self, path: Path) -> None:
        assert read_spec(path).num_layers == 2
        if not self.fits(path):
            raise ConfigError("too large")


class Shown:
    """The progress, as a list."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.bytes: list[int] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    @contextmanager
    def download(self, name: str, nbytes: int) -> Iterator[OnBytes]:
        self.notes.append(f"{name} {nbytes}")
        yield self.bytes.append


def get(reference: ModelReference, memory: float = 1e18) -> Path:
    return fetch(reference, Memory(memory), Shown())


def content(path: Path) -> dict[str, bytes]:
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_a_folder_has_the_files_that_are_read_and_no_others(hub: Hub) -> None:
    shown = Shown()
    path = fetch(FOLDER, Memory(), shown)
    wanted = {name: hub.models["org/tiny"][name] for name in ("config.json", "model.safetensors")}
    assert content(path) == wanted
    assert path == Path(constants.HF_HUB_CACHE) / "models--org--tiny" / "snapshots" / COMMIT
    assert shown.notes == [f"org/tiny {len(wanted['model.safetensors'])}"]
    assert sum(shown.bytes) == len(wanted["model.safetensors"])
    assert (path.parents[1] / "refs" / "main").read_text() == COMMIT


def test_the_second_start_makes_no_request(hub: Hub) -> None:
    paths = get(FOLDER), get(Q8)
    hub.requests.clear()
    assert (get(FOLDER), get(Q8)) == paths
    assert hub.requests == []


def test_a_model_in_the_cache_is_used_offline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    path = get(FOLDER)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert get(FOLDER) == path
    with pytest.raises(
        ModelNotFound, match=r"^org/tiny-GGUF is not completely in the cache, and HF_HUB_OFFLINE is set; un"
    ):
        get(Q8)


@pytest.mark.parametrize("tag", ["Q8_0", "q8_0", "tiny-Q8_0", "tiny-Q8_0.gguf"])
def test_a_gguf_file_is_chosen_by_its_quantization_or_its_name(hub: Hub, tag: str) -> None:
    path = get(ModelReference("org/tiny-GGUF", tag))
    assert path.name == "tiny-Q8_0.gguf"
    assert content(path.parent) == {path.name: hub.models["org/tiny-GGUF"][path.name]}


@pytest.mark.parametrize(
    ("largest", "chosen"),
    [("tiny-Q8_0.gguf", "tiny-Q4_K_M.gguf"), ("tiny-Q4_K_M.gguf", "tiny-Q4_K_M.gguf")],
)
def test_without_a_tag_q4_k_m_is_chosen_where_it_fits(hub: Hub, largest: str, chosen: str) -> None:
    size = len(hub.models["org/tiny-GGUF"][largest])
    assert get(ModelReference("org/tiny-GGUF"), size).name == chosen


def test_without_q4_k_m_the_largest_quantized_file_that_fits_is_chosen(hub: Hub) -> None:
    files = hub.models["org/tiny-GGUF"]
    hub.models["org/more"] = {
        "a-Q8_0.gguf": files["tiny-Q8_0.gguf"],
        "a-F16.gguf": files["tiny-F16.gguf"],
        "a-Q4_0.gguf": files["tiny-Q4_K_M.gguf"],
    }
    assert get(ModelReference("org/more")).name == "a-Q8_0.gguf"
    shutil.rmtree(constants.HF_HUB_CACHE)
    assert get(ModelReference("org/more"), len(files["tiny-Q4_K_M.gguf"])).name == "a-Q4_0.gguf"


def test_nothing_is_downloaded_if_no_file_fits(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.runtime.hub.skeleton.FIRST_BYTES", 4096)
    for reference in (ModelReference("org/tiny-GGUF"), Q8, FOLDER):
        with pytest.raises(ConfigError, match="too large"):
            get(reference, 10)
    assert all(" bytes=" in request for request in hub.downloads())
    assert not list(Path(constants.HF_HUB_CACHE).rglob("*.gguf"))
    assert not list(Path(constants.HF_HUB_CACHE).rglob("*.safetensors"))


@pytest.mark.parametrize("tenth", range(1, 10))
def test_a_download_that_is_cut_continues_where_it_ended(hub: Hub, tenth: int, pauses: list[float]) -> None:
    whole = hub.models["org/tiny"]["model.safetensors"]
    cut = len(whole) * tenth // 10
    hub.cut_after.append(cut)
    assert (get(FOLDER) / "model.safetensors").read_bytes() == whole
    assert hub.downloads() == [
        "GET /cdn/org/tiny/model.safetensors",
        f"GET /cdn/org/tiny/model.safetensors bytes={cut}-{len(whole) - 1}",
    ]
    assert pauses == [1]


@pytest.mark.parametrize("tenth", range(1, 10))
def test_a_download_that_failed_is_not_used_and_the_next_command_continues(hub: Hub, tenth: int) -> None:
    whole = hub.models["org/tiny"]["model.safetensors"]
    cut = len(whole) * tenth // 10
    hub.cut_after += [cut, *[0] * 5]
    with pytest.raises(
        Unavailable, match=r"cannot be reached for org/tiny: .*; check the network and HF_ENDPOINT, then re"
    ):
        get(FOLDER)
    assert cached(FOLDER) is None
    assert not list(Path(constants.HF_HUB_CACHE).rglob("model.safetensors"))
    hub.requests.clear()
    assert (get(FOLDER) / "model.safetensors").read_bytes() == whole
    assert hub.downloads() == [f"GET /cdn/org/tiny/model.safetensors bytes={cut}-{len(whole) - 1}"]


def test_a_hub_without_ranges_sends_the_whole_file_again(hub: Hub) -> None:
    hub.ranges = False
    hub.cut_after.append(1000)
    whole = hub.models["org/tiny"]["model.safetensors"]
    assert (get(FOLDER) / "model.safetensors").read_bytes() == whole


def test_bytes_with_another_checksum_are_dropped(hub: Hub) -> None:
    hub.digests["model.safetensors"] = "0" * 64
    with pytest.raises(
        CorruptCheckpoint, match=r"org/tiny: model.safetensors arrived with another checksum than the hub"
    ):
        get(FOLDER)
    blobs = Path(constants.HF_HUB_CACHE) / "models--org--tiny" / "blobs"
    assert [path.stat().st_size for path in blobs.iterdir()] == [len(hub.models["org/tiny"]["config.json"])]
    hub.digests.clear()
    assert (get(FOLDER) / "model.safetensors").read_bytes() == hub.models["org/tiny"]["model.safetensors"]


def test_a_damaged_file_in_the_cache_is_downloaded_again(hub: Hub) -> None:
    path = get(FOLDER) / "model.safetensors"
    whole = path.read_bytes()
    path.resolve().write_bytes(whole[:-1])
    shown = Shown()
    assert (fetch(FOLDER, Memory(), shown) / "model.safetensors").read_bytes() == whole
    assert shown.notes[0] == "model.safetensors in the cache is damaged; it is downloaded again"


def test_a_full_disk_is_seen_before_the_download(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(
        ConfigError, match=r"^org/tiny needs [\d,]+ bytes of disk in .*cache, where 1,000 are free; free "
    ):
        get(FOLDER)
    assert hub.downloads() == []


def test_a_disk_that_fills_up_during_the_download_keeps_what_arrived(hub: Hub) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(
            ConfigError, match=r"is full; free space .*, or set HF_HOME to a folder on another disk, then re"
        ):
            get(FOLDER)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert cached(FOLDER) is None
    hub.requests.clear()
    get(FOLDER)
    assert hub.downloads()[0].startswith("GET /cdn/org/tiny/model.safetensors bytes=100000-")


@pytest.mark.parametrize(
    ("end", "status", "header", "error", "message"),
    [
        (
            "tiny",
            401,
            {},
            ModelNotFound,
            "there is no public model org/tiny at .*, or set HF_TOKEN if the model is private",
        ),
        (
            "tiny",
            403,
            {"X-Error-Code": "GatedRepo"},
            Unauthenticated,
            "is gated: accept its terms at http.*/org/tiny, th",
        ),
        (
            "tiny",
            401,
            {"X-Error-Code": "GatedRepo"},
            Unauthenticated,
            "is gated: accept its terms at http.*/org/tiny, th",
        ),
        ("tiny", 403, {}, Unauthenticated, "the token has no access to org/tiny; see http"),
        (
            "tiny",
            404,
            {"X-Error-Code": "RepoNotFound"},
            ModelNotFound,
            "there is no public model org/tiny at .*; check the spelling",
        ),
        ("tiny", 404, {}, ModelNotFound, "there is no org/tiny at http"),
        (
            "tiny",
            429,
            {"Retry-After": "200"},
            Unavailable,
            r"too many requests \(429\); repeat the command in 200 s, or se",
        ),
        ("tiny", 500, {}, Unavailable, "answers with status 500 for org/tiny; repeat the command later"),
        ("tiny", 418, {}, ModelNotFound, "refuses the request for org/tiny with status 418; check HF_ENDPOINT"),
        (
            "resolve/x/model.safetensors",
            403,
            {"X-Error-Code": "GatedRepo"},
            Unauthenticated,
            "org/tiny is gated: accept",
        ),
        ("model.safetensors", 404, {"X-Error-Code": "EntryNotFound"}, ModelNotFound, "a file of org/tiny has vanished"),
        ("model.safetensors", 429, {"Retry-After": "61"}, Unavailable, "repeat the command in 61 s"),
        ("model.safetensors", 429, {"Retry-After": "9" * 400}, Unavailable, "repeat the command later"),
    ],
)
def test_a_refusal_says_what_to_do(
    hub: Hub, end: str, status: int, header: dict[str, str], error: type[QuireError], message: str
) -> None:
    hub.refusals[end.replace("x/", f"{COMMIT}/")] = [(status, header)] * 9
    with pytest.raises(error, match=message) as caught:
        get(FOLDER)
    assert "\n" not in str(caught.value)
    assert cached(FOLDER) is None


def test_a_hub_that_asks_for_a_pause_gets_it(hub: Hub, pauses: list[float]) -> None:
    hub.refusals["model.safetensors"] = [(429, {"Retry-After": "7"}), (503, {})]
    get(FOLDER)
    assert pauses == [7, 2]


def test_a_token_goes_to_the_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "hf_secret"
    with pytest.raises(ModelNotFound):
        get(FOLDER)
    monkeypatch.setattr("huggingface_hub.utils._headers.get_token", lambda: "hf_wrong")
    with pytest.raises(
        Unauthenticated, match="refuses the token for org/tiny; set HF_TOKEN to a valid one, or unset it"
    ):
        get(FOLDER)
    monkeypatch.setattr("huggingface_hub.utils._headers.get_token", lambda: "hf_secret")
    get(FOLDER)


def test_a_hub_that_cannot_be_reached(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        Unavailable, match=r"^http://127.0.0.1:9 cannot be reached for org/tiny: .*refused; check the netw"
    ):
        get(FOLDER)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/pickled", "^org/pickled has no config.json with model.safetensors and no GGUF file; choose a repository"),
        ("org/tiny:Q8_0", "^org/tiny has no GGUF file; leave out `:Q8_0`"),
        ("org/tiny-GGUF:Q5_K", "^org/tiny-GGUF has no Q5_K; it has F16, Q4_K_M, Q8_0"),
    ],
)
def test_a_repository_without_the_model(hub: Hub, name: str, message: str) -> None:
    with pytest.raises(ModelNotFound, match=message):
        get(ModelReference(*name.split(":")))


def test_pulling_again_fetches_only_files_that_have_changed(hub: Hub, models: dict[str, dict[str, bytes]]) -> None:
    old = get(FOLDER)
    config = models["org/tiny"]["config.json"]
    hub.models["org/tiny"] = {**models["org/tiny"], "config.json": config + b"\n"}
    hub.commits["org/tiny"] = "f" * 40
    hub.requests.clear()
    new = pull(FOLDER, Memory(), Shown())
    assert (new.name, content(new)["config.json"]) == ("f" * 40, config + b"\n")
    assert content(old)["config.json"] == config
    assert hub.downloads() == []
    assert cached(FOLDER) == new


def test_a_model_that_another_program_cached_is_used_offline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    path = get(FOLDER)
    gguf = get(Q8)
    for folder in Path(constants.HF_HUB_CACHE).rglob(".quire"):
        shutil.rmtree(folder)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert (get(FOLDER), get(Q8), get(ModelReference("org/tiny-GGUF"))) == (path, gguf, gguf)
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound):
        get(FOLDER)


def test_bytes_that_another_program_cached_are_checked_once(hub: Hub) -> None:
    path = get(FOLDER)
    shutil.rmtree(path.parents[1] / ".quire")
    hub.requests.clear()
    assert get(FOLDER) == path
    assert len(hub.requests) == 1
    assert hub.downloads() == []


@pytest.mark.parametrize("name", ["org/tiny", "org/tiny-GGUF:Q8_0"])
def test_headers_are_enough_to_read_a_model(hub: Hub, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.runtime.hub.skeleton.FIRST_BYTES", 128)
    with headers(ModelReference(*name.split(":")), Memory()) as path:
        assert read_spec(path).hidden_size == 64
        assert path.is_dir() or path.stat().st_blocks * 512 < path.stat().st_size
    assert not path.exists()
    assert cached(ModelReference(*name.split(":"))) is None


def test_split_files_and_shards_come_completely(hub: Hub) -> None:
    shards = {f"model-0000{n}-of-00002.safetensors": bytes([n]) * 100 for n in (1, 2)}
    index = b'{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'
    config = hub.models["org/tiny"]["config.json"]
    hub.models["org/shards"] = {"config.json": config, "model.safetensors.index.json": index, **shards}
    assert content(get(ModelReference("org/shards"))) == hub.models["org/shards"]
    hub.models["org/lacks"] = {"config.json": config, "model.safetensors.index.json": index}
    with pytest.raises(
        CorruptCheckpoint, match=r"^org/lacks lacks model-00001-of-00002.safetensors, which its index nam"
    ):
        get(ModelReference("org/lacks"))


@pytest.mark.parametrize("name", ["../x.json", "/etc/x.json", "a/../../x.json", "a//b.json", ""])
def test_a_hub_cannot_name_files_outside_of_the_folder(hub: Hub, name: str) -> None:
    hub.models["org/evil"] = {**hub.models["org/tiny"], name: b"{}"}
    with pytest.raises(CorruptCheckpoint, match=r"lists a file .*, which is not the name of a file in a folder"):
        get(ModelReference("org/evil"))


@pytest.mark.parametrize(
    "answer",
    [b"", b"<html>Log in</html>", b"[]", b"{}", b"\xff", b'{"id": "org/tiny", "siblings": [{}]}', b"[" * 100_000],
)
def test_an_answer_that_is_not_a_hubs_is_a_typed_error(hub: Hub, answer: bytes) -> None:
    hub.answer = answer
    with pytest.raises(CorruptCheckpoint, match=r"the answer about org/tiny is not a hub's"):
        get(FOLDER)


def test_a_cache_that_other_programs_have_damaged_is_listed_and_cleared(hub: Hub) -> None:
    get(Q8)
    get(ModelReference("org/tiny-GGUF", "F16"))
    folder = Path(constants.HF_HUB_CACHE)
    (folder / "models--lost--link").symlink_to(folder / "nowhere")
    (folder / "models--a--file").touch()
    odd = folder / "models--odd--index" / "snapshots" / COMMIT
    odd.mkdir(parents=True)
    (odd / "config.json").touch()
    (odd / "model.safetensors.index.json").write_text('{"weight_map": {"a": ["b"]}}')
    names = [(model.name, model.is_complete) for model in cached_models()]
    assert names == [("odd/index", False), ("org/tiny-GGUF:F16", True), ("org/tiny-GGUF:Q8_0", True)]
    for record in (folder / "models--org--tiny-GGUF" / RECORDS).iterdir():
        record.write_bytes(b"{")
    assert remove(Q8) > 0
    assert [model.name for model in cached_models()] == ["odd/index", "org/tiny-GGUF:F16"]


def test_an_unsupported_architecture_is_refused_before_the_download(hub: Hub) -> None:
    hub.models["org/odd"] = {**hub.models["org/tiny"], "config.json": b'{"architectures": ["OddForCausalLM"]}'}
    with pytest.raises(UnsupportedModel):
        get(ModelReference("org/odd"))
    assert hub.downloads() == []
