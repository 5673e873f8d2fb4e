"""The cards of `/v1/models`. Must not import routes."""

from __future__ import annotations

from ...common.default_sampling import http_sampling
from ...engine.facade import AdapterStatus, EncoderInfo, EngineInfo


def model_card(name: str, info: EngineInfo, created: int, *, is_main: bool) -> dict[str, object]:
    """Return the card of a model. `is_main` distinguishes the served model from a separate embedding model.

    If both have the same name, one card has the capabilities of both.
    """
    encoder = info.encoder
    limits = info if is_main or encoder is None else encoder
    card: dict[str, object] = {"id": name, "object": "model", "created": created, "owned_by": "quire"}
    card["max_model_len"] = limits.max_model_len
    capabilities: list[str] = []
    if is_main and info.generates:
        capabilities += ["completion", "chat"] if info.has_chat_template else ["completion"]
        card["default_sampling_params"] = http_sampling(info.default_sampling)
        if info.max_images:
            card["input_modalities"] = ["text", "image"]
    if encoder is not None and (not is_main or not info.generates or encoder.name == name):
        capabilities += _capabilities(encoder)
        if encoder.prompts:
            card["prompt_names"] = list(encoder.prompts)
    return {**card, "capabilities": capabilities}


def adapter_card(card: dict[str, object], parent: str, status: AdapterStatus) -> dict[str, object]:
    """Return the card of an adapter; `card` has the limits of the model `parent` that it changes."""
    adapter = {"loaded": status.is_loaded, "pinned": status.is_pinned, "requests": status.num_requests}
    return {**card, "parent": parent, "adapter": adapter}


def _capabilities(encoder: EncoderInfo) -> list[str]:
    """Return the capabilities of an encoder: vectors rank texts by their cosine, a single label is a pair's score."""
    if not encoder.num_labels:
        return ["embedding", "rerank"]
    return ["rerank", "classify"] if encoder.num_labels == 1 else ["classify"]
