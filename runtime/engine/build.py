"""Load the configured models and their text processors; build the pager and the scheduler."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import structlog

from ...pager import Pager, SpillFile, SpillUnavailable
from ...scheduler import (
    NO_ENCODER,
    Budget,
    CostModel,
    EncoderLimits,
    Fair,
    FirstComeFirstServed,
    LatencyBudget,
    Policy,
    Priority,
    QueuedRequest,
    Scheduler,
    SchedulerConfig,
    TokenBudget,
)
from ..common.config import MTP, EngineConfig
from ..common.errors import ConfigError
from ..model import model_path
from ..model.encoder import is_encoder, read_encoder
from ..model.runner import Capacity, DraftRunner, HeadRunner, ModelRunner, load_draft, load_head, load_model
from ..model.runner.capacity import EncoderCapacity
from ..model.runner.encoder_runner import EncoderRunner, load_encoder
from ..model.vision import read_vision
from .core_parts import DecoderPart, LoadedDecoder, NoDecoder
from .embedding.encoder import EncoderPart, LoadedEncoder, NoEncoder, describe_encoder
from .embedding.encoder_text import EncoderText
from .facade import NO_TEMPLATE
from .text import Tokenizer, has_tokenizer
from .text_processor import TextProcessor

if TYPE_CHECKING:
    from .images import ImageReader

_log = structlog.get_logger("quire.engine")

R = TypeVar("R", bound=QueuedRequest)


def load_models(
    config: EngineConfig,
    stop: threading.Event,
    *,
    populate: bool = True,
    on_planned: Callable[[Capacity | EncoderCapacity], None] | None = None,
) -> tuple[DecoderPart, EncoderPart]:
    """Load the models of `config`: a model that generates, an encoder, or both, which share their threads.

    Raises ModelError or ConfigError, and Unavailable soon after another thread has set `stop`.
    """
    if is_encoder(model_path(config.model)):
        if config.embedding_model is not None:
            raise ConfigError("embedding_model cannot be given with a model that is an encoder itself; leave it out")
        if config.draft_model is not None:
            raise ConfigError("draft_model cannot be given with a model that is an encoder; leave it out")
        alone = _loaded(load_encoder(config, stop, on_planned=on_planned), config)
        return NoDecoder(alone, config), alone
    with ExitStack() as undo:
        runner = load_model(config, stop, populate=populate, on_planned=on_planned)
        undo.callback(runner.close)
        encoder: EncoderPart = NoEncoder()
        if config.embedding_model is not None:
            encoder = _loaded(load_encoder(config, stop, runner.pool), config)
            undo.callback(encoder.close)
        draft = _load_draft(config, runner, stop, populate)
        if draft is not None:
            undo.callback(draft.close)
        decoder = LoadedDecoder(runner, config, _open_spill_file(config, runner), draft)
        undo.pop_all()
        return decoder, encoder


def _load_draft(
    config: EngineConfig, runner: ModelRunner, stop: threading.Event, populate: bool
) -> DraftRunner | HeadRunner | None:
    """Load the draft model or the model's own head, if `config` has one."""
    if config.draft_model is None:
        return None
    load = load_head if config.draft_model == MTP else load_draft
    return load(config, runner, stop, populate=populate)


def _loaded(encoder: EncoderRunner, config: EngineConfig) -> LoadedEncoder:
    return LoadedEncoder(encoder, describe_encoder(encoder), config.weights)


def load_texts(config: EngineConfig) -> tuple[TextProcessor, EncoderText | None]:
    """Return the processors of texts, for the model that generates and for the encoder. Raises ModelError."""
    path = model_path(config.model)
    if is_encoder(path):
        for name in ("system_prompt", "default_sampling"):
            if getattr(config, name):
                raise ConfigError(f"{name} cannot be given with a model that is an encoder; leave it out")
        texts = EncoderText(path, read_encoder(path))
        return TextProcessor(texts.tokenizer, None), texts
    text_processor = TextProcessor.load(
        path,
        config.tool_call_parser,
        chat_template=config.chat_template,
        special_tokens_in_content=config.special_tokens_in_content,
        open_tool_arguments=config.open_tool_arguments,
        system_prompt=config.system_prompt,
        default_sampling=config.default_sampling,
    )
    if config.draft_model not in (None, MTP):
        _check_vocabulary(text_processor.tokenizer, model_path(config.draft_model))
    if text_processor.chat_template is None and text_processor.chat_problem != NO_TEMPLATE:
        _log.warning("chats are refused", reason=text_processor.chat_problem)
    text_processor.image_reader = _load_image_reader(path, text_processor.tokenizer, config)
    if config.embedding_model is None:
        return text_processor, None
    path = model_path(config.embedding_model)
    return text_processor, EncoderText(path, read_encoder(path))


def _check_vocabulary(tokenizer: Tokenizer | None, draft: Path) -> None:
    """Raise ConfigError if a token of the draft model has another text in the model's vocabulary."""
    if tokenizer is None or not has_tokenizer(draft):
        return
    difference = tokenizer.first_difference(Tokenizer(draft))
    if difference is not None:
        token_id, text, draft_text = difference
        raise ConfigError(
            f"draft_model {draft} has another vocabulary: token {token_id} is {draft_text!r}, not {text!r}"
        )


def _open_spill_file(config: EngineConfig, runner: ModelRunner) -> SpillFile | None:
    """Return the file for spilled pages and states; None if `kv_spill_size` is 0. Raises ConfigError."""
    if not config.kv_spill_size:
        return None
    try:
        folder = config.kv_spill_dir or tempfile.gettempdir()
        return SpillFile(runner.arena, config.kv_spill_size, folder, state_memory=runner.state_memory)
    except ValueError as error:
        raise ConfigError(f"kv_spill_size: {error}") from error
    except SpillUnavailable as error:
        raise ConfigError(f"kv_spill_dir: {error}") from error


class KVEvents(Protocol):
    """A publisher of the pages of the prefix cache."""

    def publish(self) -> None:
        """Send the changes since the last call."""

    def close(self) -> None:
        """Send no more."""


class NoKVEvents:
    """The `KVEvents` of a core without subscribers."""

    def publish(self) -> None:
        """Send nothing."""

    def close(self) -> None:
        """Close nothing."""


def build_kv_events(config: EngineConfig, pager: Pager) -> KVEvents:
    """Return the publisher of the prefix cache's pages, a silent one without `kv_events`. Raises ConfigError."""
    if config.kv_events is None:
        for name in ("kv_events_replay", "kv_events_topic"):
            if getattr(config, name):
                raise ConfigError(f"{name} needs kv_events, which is not set")
        return NoKVEvents()
    try:
        from .kv_events import KVEventPublisher
    except ImportError as error:
        raise ConfigError(f"kv_events needs ZeroMQ ({error}); pip install 'quire[events]'") from error
    return KVEventPublisher(config.kv_events, config.kv_events_replay, config.kv_events_topic, pager)


def build_scheduler(
    config: EngineConfig,
    pager: Pager,
    max_num_samples: int,
    encoder: EncoderLimits = NO_ENCODER,
    clock: Callable[[], float] = time.monotonic,
    *,
    whole_images: bool = False,
    draft_cost: float | None = None,
    draft_reads_steps: bool = False,
) -> Scheduler:
    """Return the scheduler that the configuration describes, for a model that may need `whole_images`.

    `draft_cost` is the estimated time of a draft model's step over the model's; None: there is no draft model. See
    `SchedulerConfig` for `draft_reads_steps`.
    """
    cost = CostModel()
    share = config.max_kv_share_per_tenant
    limits = SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_samples=max_num_samples,
        num_speculative_tokens=config.num_speculative_tokens,
        draft_cost=draft_cost,
        draft_reads_steps=draft_reads_steps,
        max_num_waiting=config.max_num_waiting,
        max_num_waiting_per_tenant=config.max_num_waiting_per_tenant,
        max_kv_pages_per_tenant=None if share is None else max(1, int(share * pager.pool.num_pages)),
        whole_images=whole_images,
    )
    return Scheduler(
        pager,
        _budget(config, cost),
        limits,
        cost=cost,
        policy=_policy(config),
        encoder=encoder,
        encoder_policy=_policy(config),
        clock=clock,
    )


def _load_image_reader(path: Path, tokenizer: Tokenizer | None, config: EngineConfig) -> ImageReader | None:
    """Return the reader of images for a model that takes them. Raises ModelError."""
    if tokenizer is None or read_vision(path, config.max_image_tokens) is None:
        return None
    from .images import ImageReader, read_image_processor  # imported here, because other models need no Pillow

    return ImageReader(read_image_processor(path, config.max_image_tokens), tokenizer, config)


def _budget(config: EngineConfig, cost: CostModel) -> Budget:
    if config.itl_target_ms is None:
        return TokenBudget(config.max_num_batched_tokens)
    return LatencyBudget(cost, config.itl_target_ms / 1000, config.max_num_batched_tokens)


def _policy(config: EngineConfig) -> Policy[R]:
    match config.scheduling_policy:
        case "fcfs":
            return FirstComeFirstServed()
        case "priority":
            return Priority()
        case "fair":
            return Fair(config.tenant_weights)
