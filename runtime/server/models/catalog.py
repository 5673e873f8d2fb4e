"""`ModelCatalog`: the models of a server by the names that requests give: own names, adapters, encoders and aliases.

Must not import doors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

from ...common.errors import QuireError
from ...engine.facade import EngineFacade, EngineInfo, EngineObserver, EngineStats, HostStatus
from ...engine.stats import sum_stats
from .residency import ModelState, Residency

Task = Literal["text", "vectors", "any"]  # work that a request needs; scores count as vectors
MAX_NAMES_SHOWN = 20  # names in the refusal of an unknown one


class CatalogModel:
    """One model, or a model that generates and an encoder beside it, with its engine."""

    def __init__(self, name: str, engine: EngineFacade, key: str = "") -> None:
        """`key` is `model` of the requests that its engine gets; empty for the server's first model."""
        self.name = name
        self.engine = engine
        self.key = key

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    @property
    def encoder(self) -> str:
        """The name of the model that makes vectors or scores, which may be the model itself."""
        info = self.info
        return (info.encoder.name if info.encoder is not None and info.generates else "") or self.name

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the model, of its adapters, and of an encoder beside it."""
        return tuple(dict.fromkeys((self.name, *self.info.adapters, self.encoder)))


class ModelName(NamedTuple):
    """A name that a request may give, and the part of a model that it selects."""

    name: str
    target: str  # name of the model, the adapter or the encoder that `name` stands for
    model: CatalogModel
    lora: str = ""  # name of the adapter; empty without one

    @property
    def info(self) -> EngineInfo:
        return self.model.info

    @property
    def is_encoder(self) -> bool:
        """Whether the name selects an encoder beside a model that generates."""
        return self.target == self.model.encoder and self.target != self.model.name


class ModelCatalog:
    """The models of one server, the first of which answers requests without a name."""

    def __init__(
        self,
        models: Sequence[CatalogModel],
        aliases: Mapping[str, str] = MappingProxyType({}),
        residency: Residency | None = None,
    ) -> None:
        """`residency` loads and unloads models; a model that it does not have is always loaded."""
        self.residency = residency or Residency([])
        self.models = tuple(models)
        self.aliases = dict(aliases)
        self._by_key = {model.key: model for model in models}

    @classmethod
    def of_one(cls, name: str, engine: EngineFacade) -> ModelCatalog:
        """Return the catalog of a server with one model."""
        return cls([CatalogModel(name, engine)])

    @property
    def main(self) -> CatalogModel:
        """The server's first model."""
        return self.models[0]

    @property
    def fingerprint(self) -> str:
        """The identity of all models, adapters and the build, which decide bits."""
        infos = [model.info for model in self.models]
        if len(infos) == 1 and not infos[0].adapters:
            return infos[0].fingerprint
        found = [(model.name, model.info.fingerprint, sorted(model.info.adapters.values())) for model in self.models]
        return hashlib.sha256(repr(found).encode()).hexdigest()

    @property
    def names(self) -> tuple[str, ...]:
        """All names that a request may give, aliases last."""
        return (*(name for model in self.models for name in model.names), *self.aliases)

    def find(self, name: str) -> ModelName | None:
        """Return the model of a name, None for an unknown one."""
        target = self.aliases.get(name, name)
        for model in self.models:
            if target == model.name or target in model.names:
                return ModelName(name, target, model, target if target in model.info.adapters else "")
        return None

    def unknown(self, name: str) -> str:
        """Return the refusal of an unknown name, with the names of this server."""
        names = self.names
        more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
        served = " and ".join(map(repr, names[:MAX_NAMES_SHOWN]))
        return f"the model {name[:80]!r} does not exist here; this server has {served}{more}"

    def default(self, task: Task) -> ModelName:
        """Return the model of a request without a name: the first one that can do the task, if there is one."""
        for model in self.models:
            info = model.info
            if task == "vectors" and info.encoder is not None:
                return ModelName(model.encoder, model.encoder, model)
            if task == "text" and info.generates:
                return ModelName(model.name, model.name, model)
        name = self.main.encoder if task == "vectors" else self.main.name
        return ModelName(name, name, self.main)

    def engine(self, key: str) -> EngineFacade:
        """Return the engine of the requests whose `model` is `key`."""
        return self._by_key[key].engine

    async def ready(self, model: CatalogModel) -> None:
        """Wait until a model is loaded. Raises Overloaded or Unavailable, with a time."""
        if (resident := self.residency.residents.get(model.name)) is not None:
            await self.residency.ready(resident)

    def state(self, model: CatalogModel) -> ModelState:
        """Return whether a model is loaded."""
        resident = self.residency.residents.get(model.name)
        return "ready" if resident is None else resident.state

    def stats(self) -> EngineStats:
        """Return the sums over all engines. Raises Unavailable if none answers."""
        found: list[EngineStats] = []
        problem: QuireError | None = None
        for model in self.models:
            try:
                found.append(model.engine.stats())
            except QuireError as error:
                problem = error
        if problem is not None and not found:
            raise problem
        return sum_stats(found)

    def host_statuses(self) -> Sequence[HostStatus] | None:
        """Return the state of each engine host; None if the engines compute on this machine."""
        return self.main.engine.host_statuses()

    def set_observer(self, observer: EngineObserver) -> None:
        """Make all engines report to `observer`."""
        for model in self.models:
            model.engine.set_observer(observer)
