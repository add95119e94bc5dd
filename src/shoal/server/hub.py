"""The model that is being served, and the switch to another."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shoal.engine.aio import AsyncEngine
from shoal.engine.engine import Engine
from shoal.errors import ConfigError, ShoalError
from shoal.models.store import Store, StoredModel
from shoal.server.errors import ApiError, unavailable

if TYPE_CHECKING:
    from shoal.agents.rollout.rollout import Rollout
    from shoal.agents.rollout.trial import Ride
    from shoal.power import Governor

Load = Callable[[str], Engine]


@dataclass(eq=False)
class Served:
    """A loaded model and how many calls use it at the moment."""

    name: str
    engine: Engine
    since: float = field(default_factory=time.time)
    leases: int = 0
    ride: Ride | None = None  # of one call, while a second configuration is on trial
    of: Served | None = None  # what such a call holds a lease of


class ModelHub:
    """Holds at most one engine. All methods belong on the event loop's thread.

    A call takes a lease (`acquire`, `release`); a switch waits for the leases, up to a deadline, and then closes the
    engine, which ends what is still in flight with an error that says so.
    """

    def __init__(
        self,
        load: Load,
        name: str | None = None,
        engine: Engine | None = None,
        check: Callable[[str], object] | None = None,
    ) -> None:
        """`check` raises for names that may not be switched to; it is asked before any request is ended."""
        self._load = load
        self._check = check
        self._known = {name} if name is not None else set()
        self._hurried = False
        self.served = Served(name or engine.spec.name, engine) if engine is not None else None
        self.stopping = False
        self._switching: str | None = None
        self._last_error: str | None = None
        self._lock = asyncio.Lock()
        self._released = asyncio.Event()
        self.rollout: Rollout | None = None  # given before `open`
        self.opening: list[Callable[[], Awaitable[None]]] = []  # called when the hub opens
        self.keeping: list[Callable[[Served], Awaitable[None]]] = []  # called at a stop, before the model is closed
        self.closing: list[Callable[[], Awaitable[None]]] = []  # called last when the hub closes

    async def open(self) -> None:
        """Begin the rollout, if there is one, and what interrupted calls there are; raises as `Rollout` does."""
        if self.rollout is not None:
            await self.rollout.__aenter__()
            self.closing.append(self.rollout.close)
        for begin in self.opening:
            await begin()

    def acquire(self, model: str | None, task: str | None = None) -> Served:
        """A lease on the served model. ApiError: 404 when `model` is another one, 503 when none is usable.

        With a `task` it may be the candidate of a rollout that serves in its place.
        """
        if self.stopping:
            raise unavailable("the server is stopping", "server_stopping")
        if self._switching is not None:
            raise unavailable(f"the model is being switched to {self._switching}", "model_loading")
        served = self.served
        if served is None:
            raise unavailable(f"no model is loaded{self._why}: POST /models/load", "no_model")
        if model is not None and model != served.name:
            raise ApiError(
                404,
                f"the model {model!r} is not loaded; this server has {served.name!r} (POST /models/load switches)",
                param="model",
                code="model_not_found",
            )
        if served.engine.failure is not None:
            raise unavailable(f"the engine has failed: {served.engine.failure}", "engine_unavailable")
        served.leases += 1
        if task is None or self.rollout is None:
            return served
        ride = self.rollout.take(task)
        assert isinstance(ride.engine, AsyncEngine)  # `local_candidate` loads no other
        return Served(served.name, ride.engine.engine, served.since, ride=ride, of=served)

    def release(self, served: Served) -> None:
        """Give a lease back."""
        if served.ride is not None:
            served.ride.leave()
        (served.of or served).leases -= 1
        self._released.set()

    @property
    def _why(self) -> str:
        return f" ({self._last_error})" if self._last_error else ""

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Whether requests can be served, and the state in words."""
        served = self.served
        if self.stopping:
            state = "stopping"
        elif self._switching is not None:
            state = "loading"
        elif served is None:
            state = "no model"
        elif served.engine.failure is not None:
            state = f"failed: {served.engine.failure}"
        else:
            state = "closed" if served.engine.closed else "ok"
        return state == "ok", {"status": state, "model": served.name if served else None}

    async def load(self, name: str, drain_s: float) -> Served:
        """Serve model `name` from here on. When it cannot be loaded the old one is loaded again, and the error raised.

        Raises ApiError 409 when another switch is under way, any `ShoalError`.
        """
        before = self.served
        if before is not None and before.name == name and before.engine.failure is None and not before.engine.closed:
            return before
        self._refuse_switch()
        if self._check is not None and name not in self._known:
            await asyncio.to_thread(self._check, name)
        async with _Turn(self, name):
            await self._close(drain_s)
            try:
                return await self._open(name)
            except ShoalError as error:
                self._last_error = str(error)
                if before is not None:
                    await self._open(before.name)
                raise

    async def unload(self, drain_s: float) -> str | None:
        """Free the served model; gives its name. ApiError 409 while something is on trial beside it."""
        self._refuse_switch()
        async with _Turn(self, "none"):
            name = self.served.name if self.served else None
            await self._close(drain_s)
            return name

    def _refuse_switch(self) -> None:
        if self.rollout is not None:
            message = "this server was started with --rollout: its model stays, the plan says what is tried beside it"
            raise ApiError(409, message, code="rollout")

    async def _open(self, name: str) -> Served:
        engine = await asyncio.to_thread(self._load, name)
        self.served = Served(name, engine)
        self._last_error = None
        return self.served

    async def _close(self, drain_s: float) -> None:
        served = self.served
        if served is None:
            return
        await self._drain(served, drain_s)
        self.served = None
        await asyncio.to_thread(served.engine.close)

    async def _drain(self, served: Served, drain_s: float) -> None:
        """Wait until the model is not in use, at most that long."""
        try:
            async with asyncio.timeout(drain_s):
                while served.leases and not self._hurried:
                    self._released.clear()
                    await self._released.wait()
        except TimeoutError:
            return

    async def close(self, drain_s: float = 0.0) -> None:
        """Take no more calls, let those in flight go on for `drain_s`, then end them and free the model."""
        self.stopping = True
        async with self._lock:
            if self.served is not None:
                await self._drain(self.served, drain_s)
                for keep in self.keeping:
                    await keep(self.served)
            await self._close(0.0)
        for close in self.closing:
            await close()

    def hurry(self) -> None:
        """Let a close that is under way wait no longer."""
        self._hurried = True
        self._released.set()

    def begin_switch(self, name: str | None) -> None:
        """Mark a switch as under way, or (None) as done."""
        self._switching = name

    @property
    def in_use(self) -> set[str]:
        """Names whose files are needed: of the served model, and of one that is being loaded."""
        names = {self.served.name} if self.served is not None else set()
        return names | ({self._switching} if self._switching is not None else set())

    @property
    def lock(self) -> asyncio.Lock:
        """Held while the engine is exchanged."""
        return self._lock


class _Turn:
    """The right to switch models; one at a time, a second one is refused."""

    def __init__(self, hub: ModelHub, name: str) -> None:
        self._hub = hub
        self._name = name

    async def __aenter__(self) -> None:
        if self._hub.stopping:
            raise unavailable("the server is stopping", "server_stopping")
        if self._hub.lock.locked():
            raise ApiError(409, "another switch of models is under way", code="model_loading")
        await self._hub.lock.acquire()
        self._hub.begin_switch(self._name)

    async def __aexit__(self, *error: object) -> None:
        self._hub.begin_switch(None)
        self._hub.lock.release()


def local_candidate(settings: Mapping[str, Any], governor: Governor | None) -> AsyncEngine:
    """The candidate of a rollout on a server: an engine in this process. ConfigError for one elsewhere."""
    if "base_url" in settings:
        hint = "give it a model; for a share of a server's calls a proxy in front of both is the place"
        raise ConfigError("a server's candidate must run in its process", value=settings["base_url"], hint=hint)
    return AsyncEngine.load(**settings, governor=governor)


def stored_models() -> list[StoredModel]:
    """What the store holds."""
    return Store().list()
