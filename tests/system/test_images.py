"""Images in chats over every door, on a tiny model with a vision tower: the same answer, and refusals that say why."""

from __future__ import annotations

import asyncio
import base64
import io
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image
from quire import LLM, ContextLengthExceeded, InvalidRequest, Overloaded, QuotaExceeded, SamplingParams
from quire.runtime.client import AsyncClient
from quire.runtime.common.images import extract_images
from quire.runtime.engine.text import Tokenizer
from quire.runtime.engine.text.content_marks import RenderedChat
from quire.runtime.server.http.json_body import BodyReader
from quire.scheduler import AdmissionEstimate, QueueFull

from tests.support.http_client import Reply, connection
from tests.support.image_folder import TOKENS, write_image_folder, write_qwen_folder

OPTIONS: dict[str, Any] = {"weights": "f32", "kv_cache_dtype": "f32", "kv_cache_memory": 4 << 20, "max_num_seqs": 4}
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)
TLS_FILES = Path(__file__).parents[1] / "data" / "tls"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
PLAIN: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


def png(*colors: str, size: tuple[int, int] = (40, 20)) -> bytes:
    """Return an image with vertical stripes."""
    pixels = np.array([Image.new("RGB", (1, 1), each).getpixel((0, 0)) for each in colors], np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels[None]).resize(size, Image.Resampling.NEAREST).save(out, "PNG")
    return out.getvalue()


RED = png("red")
STRIPES = png("red", "blue", "white")


def messages(*files: bytes, text: str = "What is this?") -> list[dict[str, Any]]:
    images = [{"type": "image", "image": file} for file in files]
    return [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]


def url(file: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


def openai_messages(*files: bytes) -> Any:
    images = [{"type": "image_url", "image_url": {"url": url(file), "detail": "auto"}} for file in files]
    return [{"role": "user", "content": [*images, {"type": "text", "text": "What is this?"}]}]


def watch_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by the number of bytes of each read of a body."""
    sizes: list[int] = []
    read = BodyReader.read

    async def watched(self: BodyReader, tenant: str, num_bytes: int, function: Callable[[], Any]) -> Any:
        sizes.append(num_bytes)
        return await read(self, tenant, num_bytes, function)

    monkeypatch.setattr(BodyReader, "read", watched)
    return sizes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_image_folder(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def wanted(folder: Path) -> dict[bytes, str]:
    """Return the text for each image, from a model in this process."""
    with LLM(folder, **OPTIONS) as llm:
        return {file: llm.chat(messages(file), GREEDY).text for file in (RED, STRIPES)}


@pytest.fixture
async def real(serving: Callable[..., Any], folder: Path) -> AsyncIterator[Any]:
    async with serving(model=str(folder), **OPTIONS) as real:
        yield real
        assert real.engine._outputs.image_bytes == 0


async def ask(real: Any, path: str, method: str = "POST", **body: Any) -> Reply:
    async with connection(real) as client:
        return await client.ask(method, path, body if method == "POST" else None)


def test_a_chat_has_the_tokens_of_its_images_and_their_pixels_decide(folder: Path, wanted: dict[bytes, str]) -> None:
    with LLM(folder, **OPTIONS) as llm:
        output = llm.chat(messages(STRIPES), GREEDY)
        assert output.prompt_token_ids is not None
        assert output.prompt_token_ids.count(159) == 3 * TOKENS, "two tiles and the whole image"
        assert output.usage.prompt_tokens == len(output.prompt_token_ids)
        prepared = llm.engine.text_processor.encode_chat(RenderedChat("<image>"), [STRIPES])[1]
        assert [image.pixels.shape for image in prepared] == [(64, 64, 3)] * 3
        again = llm.chat(messages(RED, STRIPES), GREEDY)
        assert again.usage.prompt_tokens > output.usage.prompt_tokens
        assert llm.chat(messages(STRIPES), GREEDY).text == output.text == wanted[STRIPES]
        assert llm.chat([{"role": "user", "content": "What is this?"}], GREEDY).usage.prompt_tokens < 40
    assert wanted[RED] != wanted[STRIPES]


async def test_every_door_gives_the_same_answer(real: Any, wanted: dict[bytes, str]) -> None:
    async with AsyncClient(real.address) as client:
        (model,) = await client.models()
        assert model.max_images == 16
        for file in (RED, STRIPES):
            assert (await client.complete(sampling_params=GREEDY, messages=messages(file))).text == wanted[file]
            assert (await client.complete(sampling_params=GREEDY, messages=openai_messages(file))).text == wanted[file]
    async with openai.AsyncOpenAI(base_url=f"http://{real.server.openai_address}/v1", api_key="none") as ai:
        cards = [card.model_dump() async for card in ai.models.list()]
        assert [card["input_modalities"] for card in cards] == [["text", "image"]]
        answer = await ai.chat.completions.create(
            model=cards[0]["id"], messages=openai_messages(STRIPES), max_tokens=6, temperature=0, extra_body=PLAIN
        )
        assert answer.choices[0].message.content == wanted[STRIPES]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens > 3 * TOKENS
        parts = [{"type": "input_image", "image_url": url(STRIPES), "detail": "auto"}]
        given: Any = [{"role": "user", "content": [*parts, {"type": "input_text", "text": "What is this?"}]}]
        response = await ai.responses.create(
            model=cards[0]["id"], input=given, max_output_tokens=6, temperature=0, store=True, extra_body=PLAIN
        )
        assert response.output_text == wanted[STRIPES]
        items = await ai.responses.input_items.list(response.id)
        assert [part.type for part in items.data[0].content] == ["input_image", "input_text"]  # type: ignore[union-attr]
        more = await ai.responses.create(
            model=cards[0]["id"], input="And?", previous_response_id=response.id, max_output_tokens=2
        )
        assert more.usage is not None
        assert response.usage is not None
        assert more.usage.input_tokens > response.usage.input_tokens, "the image is in the chat still"


async def test_a_prompt_with_images_can_be_tokenized(real: Any) -> None:
    reply = await ask(real, "/tokenize", messages=openai_messages(STRIPES))
    assert reply.json["tokens"].count(159) == 3 * TOKENS


async def test_frames_have_images_only_if_they_were_negotiated(real: Any) -> None:
    bare, files = extract_images(messages(RED))
    fields = [None, {"max_tokens": 2}, None, 0, None, bare, None, None, False, None, None, [], "", list(files)]
    old = await real.raw()
    old.send("MODELS", 1)
    assert "max_images" not in (await old.receive())[2][0]
    old.send("GENERATE", 2, *fields)
    assert (await old.receive())[2:4] == [
        "INVALID_ARGUMENT",
        "images belong to the feature `images`, which HELLO did not request",
    ]
    new = await real.raw(hello=False)
    new.send("HELLO", [1], None, ["images"])
    assert (await new.receive())[2] == ["images"]
    new.send("GENERATE", 2, *fields)
    assert (await new.until("DONE", "ERROR"))[-1][0] == "DONE"
    new.send("GENERATE", 3, *fields[:-1], [])
    assert (await new.receive())[2:4] == [
        "INVALID_ARGUMENT",
        "messages: 1 image parts, and 0 images; one each is needed",
    ]
    new.send("GENERATE", 4, "a prompt", *fields[1:5], None, *fields[6:])
    assert (await new.receive())[3] == "images belong to messages; send them instead of a prompt"


BAD_PARTS: dict[str, tuple[Any, str]] = {
    "remote": ({"url": "https://example.org/cat.png"}, "not fetched from other hosts"),
    "no image": ({"url": url(b"hello")}, "messages: image 1: it is not a PNG"),
    "damaged": ({"url": url(STRIPES[:60])}, "messages: image 1: it is damaged"),
    "detail": ({"url": url(RED), "detail": 5}, "detail must be one of auto, low, high"),
}


@pytest.mark.parametrize(("image", "reason"), BAD_PARTS.values(), ids=BAD_PARTS.keys())
async def test_a_bad_image_is_a_400_that_names_the_field(real: Any, image: Any, reason: str) -> None:
    chat = [{"role": "user", "content": [{"type": "image_url", "image_url": image}]}]
    reply = await ask(real, CHAT, messages=chat)
    assert (reply.status, reply.error["param"], reply.error["type"]) == (400, "messages", "invalid_request_error")
    assert reason in reply.error["message"]


async def test_a_bad_image_in_a_response_names_its_own_field(real: Any) -> None:
    items = [{"type": "input_image", "image_url": url(b"hello")}]
    body = {"input": [{"role": "user", "content": items}]}
    for path in (RESPONSES, f"{RESPONSES}/input_tokens"):
        reply = await ask(real, path, **body)
        assert (reply.status, reply.error["param"]) == (400, "input")
        assert reply.error["message"].startswith("input: image 1: it is not a PNG")


async def test_images_of_listed_hosts_are_fetched(
    serving: Callable[..., Any], folder: Path, wanted: dict[bytes, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(TLS_FILES / "cert.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS_FILES / "cert.pem", TLS_FILES / "key.pem")

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: image/png\r\ncontent-length: %d\r\n\r\n" % len(STRIPES))
        writer.write(STRIPES)
        writer.close()

    host = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    listed = f"127.0.0.1:{host.sockets[0].getsockname()[1]}"
    image = {"url": f"https://{listed}/a.png"}
    text = "What is this?"
    async with serving(model=str(folder), **OPTIONS, allowed_image_hosts=listed) as real:
        content = [{"type": "image_url", "image_url": image}, {"type": "text", "text": text}]
        messages = [{"role": "user", "content": content}]
        reply = await ask(real, CHAT, messages=messages, max_tokens=6, **PLAIN)
        assert reply.json["choices"][0]["message"]["content"] == wanted[STRIPES]
        sizes = watch_reads(monkeypatch)
        assert (await ask(real, "/tokenize", messages=messages)).json["tokens"].count(159) == 3 * TOKENS
        body, with_image = sizes
        assert with_image - body == len(url(STRIPES)), "a long image is not read in the event loop"
        items = [{"type": "input_image", "image_url": image["url"]}, {"type": "input_text", "text": text}]
        reply = await ask(real, RESPONSES, input=[{"role": "user", "content": items}], max_output_tokens=6, **PLAIN)
        assert reply.json["output"][0]["content"][0]["text"] == wanted[STRIPES]
        image["url"] = "https://example.org/a.png"
        reply = await ask(real, CHAT, messages=messages)
        assert (reply.status, reply.error["param"]) == (400, "messages")
        assert "content[0]: image_url: images are not fetched from 'example.org'" in reply.error["message"]
        reply = await ask(real, CHAT, messages=[{"role": "user", "content": content[:1] * 17}])
        assert "17 images; at most 16" in reply.error["message"]
        reply = await ask(real, CHAT, messages=openai_messages(STRIPES), max_tokens=6, **PLAIN)
        assert reply.json["choices"][0]["message"]["content"] == wanted[STRIPES]
    host.close()


async def test_too_many_images_are_refused(real: Any) -> None:
    reply = await ask(real, CHAT, messages=openai_messages(*[RED] * 17))
    assert (reply.status, reply.error["param"]) == (400, "messages")
    assert "17 images; at most 16 (`max_images_per_request`)" in reply.error["message"]
    reply = await ask(real, CHAT, messages=openai_messages(*[RED] * 16))
    assert reply.error["code"] == "context_length_exceeded"


async def test_a_model_without_a_tower_names_the_field(system: Any) -> None:
    reply = await ask(system, CHAT, messages=openai_messages(RED))
    assert (reply.status, reply.error["param"]) == (400, "messages")
    assert reply.error["message"] == "messages: this model takes no images; send text parts only"
    image = {"type": "input_image", "image_url": url(RED)}
    reply = await ask(system, RESPONSES, input=[{"role": "user", "content": [image]}])
    assert (reply.status, reply.error["param"]) == (400, "input")
    assert "input_modalities" not in (await ask(system, "/v1/models", "GET")).json["data"][0]


async def test_images_of_live_requests_take_limited_memory(serving: Callable[..., Any], folder: Path) -> None:
    tile = 64 * 64 * 3
    async with (
        serving(model=str(folder), **OPTIONS, max_image_memory=4 * tile) as real,
        AsyncClient(real.address) as client,
    ):
        with pytest.raises(QuotaExceeded, match=rf"2 images take {6 * tile} bytes .* may take {4 * tile}"):
            await client.complete(sampling_params=GREEDY, messages=messages(RED, RED))
        long = client.generate(sampling_params=SamplingParams(max_tokens=60, ignore_eos=True), messages=messages(RED))
        await anext(long)
        with pytest.raises(Overloaded, match="max_image_memory"):
            await client.complete(sampling_params=GREEDY, messages=messages(RED))
        await long.aclose()
        async with asyncio.timeout(60):
            while real.engine._outputs.image_bytes:
                await asyncio.sleep(0.002)
        await client.complete(sampling_params=GREEDY, messages=messages(RED))


async def test_images_of_refused_requests_take_no_memory(
    serving: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(_: object) -> AdmissionEstimate:
        raise QueueFull("the queue is full", AdmissionEstimate(0, 0, 0))

    async with serving(model=str(folder), **OPTIONS, max_image_memory=4 * 64 * 64 * 3) as real:
        with monkeypatch.context() as patched:
            patched.setattr(real.engine.core, "add", refuse)
            for _ in range(6):
                reply = await ask(real, CHAT, messages=openai_messages(RED), max_tokens=4)
                assert (reply.status, "the queue is full" in reply.error["message"]) == (429, True)
        assert (await ask(real, CHAT, messages=openai_messages(RED), max_tokens=4)).status == 200


def test_a_text_that_spells_an_image_is_text(folder: Path) -> None:
    with LLM(folder, **OPTIONS) as llm:
        image = Tokenizer(folder).special_tokens["<image>"]
        spelled, plain = (llm.chat(messages(RED, text=text), GREEDY).prompt_token_ids for text in ("<image>", "a"))
        assert spelled is not None
        assert plain is not None
        assert spelled.count(image) == plain.count(image) > 0
        assert len(spelled) > len(plain), "the name is several tokens of text"
        with pytest.raises(ContextLengthExceeded):
            llm.chat(messages(*[RED] * 9))
    with (
        LLM(folder, **OPTIONS, special_tokens_in_content=True) as llm,
        pytest.raises(InvalidRequest, match="this text stands for an image"),
    ):
        llm.chat(messages(RED, text="<image>"))


# Images of any size


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5_images"])
def test_a_chat_has_a_token_for_each_square_of_its_images(tmp_path: Path, family: str) -> None:
    """Images keep their shape; those larger than `max_image_tokens` are made smaller."""
    folder = write_qwen_folder(tmp_path, family)
    wide = png("red", "blue")
    tall = png("blue", size=(20, 40))
    with LLM(folder, **OPTIONS) as llm:
        output = llm.chat(messages(wide, tall), GREEDY)
        rendered = RenderedChat("<|vision_start|><|image_pad|><|vision_end|>" * 2)
        prompt, images = llm.engine.text_processor.encode_chat(rendered, [wide, tall])
        assert [each.pixels.shape for each in images] == [(16, 40, 3), (40, 16, 3)]
        assert output.prompt_token_ids is not None
        assert output.prompt_token_ids.count(159) == prompt.count(159) == 20
        swapped = llm.chat(messages(tall, wide), GREEDY)
        assert (swapped.text, swapped.usage.prompt_tokens) != (output.text, 0)
        assert llm.chat(messages(wide, tall), GREEDY).text == output.text
        spelled = llm.chat(messages(wide, text="<|image_pad|>"), GREEDY).prompt_token_ids
        assert spelled is not None
        assert spelled.count(159) == 10
        with pytest.raises(InvalidRequest, match="at most 200 times the shorter"):
            llm.chat(messages(png("red", size=(300, 1))), GREEDY)
    with LLM(folder, **OPTIONS, max_image_tokens=6) as llm:
        smaller = llm.chat(messages(wide), GREEDY)
        assert smaller.prompt_token_ids is not None
        assert smaller.prompt_token_ids.count(159) == 3
