"""`RequestReader`: the fields of bodies, the images that they name, and refusals before the engine.

Must not import handlers of paths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from functools import partial

from ...common.errors import QuireError, Unavailable
from ...engine.facade import EngineFacade, EngineInfo, GenerateRequest
from ...engine.validator import check_num_images
from ..app_context import AppContext
from ..models.catalog import ModelName, Task
from .fields import Fields
from .image_urls import ImageFetcher
from .json_body import PARSED_AT_ONCE, BodyReader, parse_object
from .request_cycle import RequestCycle


class RequestReader:
    """Reads the requests of one API. All APIs share `bodies`."""

    def __init__(
        self, context: AppContext, check_model: Callable[[Fields, Task], ModelName], bodies: BodyReader
    ) -> None:
        """Find each body's model with `check_model`, which raises BadRequest."""
        self.bodies = bodies
        self._context = context
        self._check_model = check_model
        self._images = ImageFetcher(context.config.allowed_image_hosts, context.config.max_frame_bytes)

    def check_accepting(self) -> None:
        """Raise Unavailable while the server drains."""
        if self._context.leaves_at is not None:
            raise Unavailable("the server is shutting down; send this request elsewhere")

    async def fields(
        self, cycle: RequestCycle, known: Set[str], task: Task = "text", *, loads: bool = True
    ) -> tuple[Fields, ModelName]:
        """Return the fields and the model of a body. With `loads`, wait until the model is loaded.

        Raises BadRequest, the refusal of a long body, or the refusal of a model that is not loaded in time.
        """
        tenant = cycle.tenant
        body = cycle.body
        assert tenant is not None, "authenticated"
        cycle.body = b""
        is_long = len(body) > PARSED_AT_ONCE
        release = self._context.requests.texts.of(tenant.name).reserve(len(body) if is_long else 0)
        try:
            fields = Fields(await self.bodies.read(tenant.name, len(body), partial(parse_object, body)))
        finally:
            release()
        self._context.observer.http_unknown_fields.value += fields.num_unknown(known)
        model = self._check_model(fields, task)
        if loads:
            await self.load(model, tenant.name, len(body))
        return fields, model

    async def load(self, model: ModelName, tenant: str, num_bytes: int) -> None:
        """Wait until a model is loaded; the tenant holds `num_bytes` of a body meanwhile. Raises a refusal."""
        models = self._context.models
        if models.state(model.model) == "ready":
            await models.ready(model.model)
            return
        release = self._context.requests.texts.of(tenant).reserve(num_bytes)
        try:
            await models.ready(model.model)
        finally:
            release()

    async def fetch_images(self, fields: Fields, info: EngineInfo, tenant: str) -> int:
        """Replace the URLs of images at listed hosts by data URLs; return their bytes. Raises a refusal."""
        images = self._images.remote_images(fields.values)
        if not images:
            return 0
        check_num_images(len(images), info)
        release = self._context.requests.texts.of(tenant).reserve(self._images.max_bytes)
        try:
            return await self._images.fetch(images)
        finally:
            release()

    async def tokens_of(self, engine: EngineFacade, chat: GenerateRequest) -> tuple[int, ...]:
        """Return the token ids of a chat for the model of `engine`. Raises a refusal."""
        release = self._context.requests.texts.of(chat.tenant).reserve(chat.text_bytes())
        try:
            return await engine.tokenize_chat(chat)
        finally:
            release()

    @contextmanager
    def reporting(self, cycle: RequestCycle) -> Iterator[None]:
        """Count and log a refusal before the engine, and raise it again."""
        try:
            yield
        except QuireError as error:
            assert cycle.tenant is not None, "authenticated"
            self._context.observer.on_rejected(error)
            self._context.requests.log.refused(cycle.tenant.name, cycle.number, error.code, error.retry_after_ms)
            raise
