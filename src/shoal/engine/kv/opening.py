"""From settings to the tiers of an engine."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from shoal.config import EngineConfig
from shoal.core.scheduler import Scheduler
from shoal.engine.kv.buffers import Buffers
from shoal.engine.kv.disk import DiskTier
from shoal.engine.kv.files import KVFiles
from shoal.engine.kv.host import HostTier
from shoal.engine.kv.tiering import Tiering
from shoal.errors import ConfigError
from shoal.runners.base import BlockAccess, Runner
from shoal.runners.plan import ModelSpec

log = logging.getLogger("shoal.engine")

_AUTO_SHARE = 0.05  # of the free disk, what "auto" may take
_AUTO_MOST = 2 << 30
_SPARE_BYTES = 32 << 20  # of buffers that are used again


def kv_root() -> Path:
    """Where KV is kept on disk."""
    from shoal.models.store import default_root

    return default_root() / "kv"


def open_tiers(
    runner: Runner, scheduler: Scheduler, config: EngineConfig, on_change: Callable[[], None]
) -> Tiering | None:
    """The tiers that the settings ask for; None where they ask for none.

    `ConfigError` where the runner's blocks cannot be read. A disk that cannot be used is logged, and done without.
    """
    if config.kv_host is None and config.kv_cache is None:
        return None
    access = runner.access
    if access is None or not config.prefix_sharing:
        if config.kv_host is None and config.kv_cache == "auto":
            return None
        raise _refused(config, runner.spec)
    host = None if config.kv_host is None else HostTier(config.bytes_of("kv_host") or 0)
    # What host memory keeps cannot be used again.
    buffers = Buffers(access.block_bytes, _SPARE_BYTES if host is None else 0)
    disk = None if config.kv_cache is None else _open_disk(access, runner.spec, config, buffers, on_change)
    return None if host is None and disk is None else Tiering(scheduler, access, host, disk, buffers)


def _open_disk(
    access: BlockAccess, spec: ModelSpec, config: EngineConfig, buffers: Buffers, on_change: Callable[[], None]
) -> DiskTier | None:
    root = kv_root()
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        if config.kv_cache == "auto":
            quota = min(_AUTO_MOST, int(shutil.disk_usage(root).free * _AUTO_SHARE))
        else:
            quota = config.bytes_of("kv_cache") or 0
        about = {"model": spec.name, "runner": spec.runner, "precision": spec.precision, "block": str(spec.block_size)}
        return DiskTier(KVFiles(root, access.identity, about, quota), buffers, on_change)
    except OSError as error:
        log.warning("KV is not kept on disk, in %s: %s", root, error)
        return None


def _refused(config: EngineConfig, spec: ModelSpec) -> ConfigError:
    name = "kv_host" if config.kv_host is not None else "kv_cache"
    why = f"the {spec.runner} runner's blocks cannot be read" if config.prefix_sharing else "prefix_sharing is off"
    return ConfigError(
        f"{name} is {getattr(config, name)!r}, and {why}", value=getattr(config, name), hint=f"leave {name} out"
    )
