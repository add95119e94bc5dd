"""ik_llama.cpp through ik-llama-cpp-python: driven as llama.cpp is, weights repacked when they are loaded."""

from __future__ import annotations

import ctypes
import importlib.util
from importlib import metadata
from typing import Any, ClassVar

from shoal.bench.systems.base import Setup
from shoal.bench.systems.llama import LlamaCpp


class _Names:
    """Its C functions under the names that they have in llama.cpp."""

    def __init__(self, api: Any) -> None:
        library = api._lib
        self._api = api
        pointer, number = ctypes.c_void_p, ctypes.c_int32
        self.llama_log_callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, pointer)
        self.llama_log_set = _bound(library, "llama_log_set", None, self.llama_log_callback, pointer)
        self.llama_print_system_info = _bound(library, "llama_print_system_info", ctypes.c_char_p)
        self.llama_model_free = api.llama_free_model
        self._clear = _bound(library, "llama_kv_cache_clear", None, pointer)
        remove = _bound(library, "llama_kv_cache_seq_rm", ctypes.c_bool, pointer, number, number, number)
        self.llama_memory_seq_rm = remove

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    def llama_get_memory(self, context: Any) -> Any:
        """The context: its cache has no name of its own."""
        return context

    def llama_memory_clear(self, context: Any, _: bool) -> None:
        """Empty the cache."""
        self._clear(context)


def _bound(library: Any, name: str, gives: Any, *takes: Any) -> Any:
    function = getattr(library, name)
    function.restype, function.argtypes = gives, list(takes)
    return function


class IkLlamaCpp(LlamaCpp):
    """One GGUF in ik_llama.cpp. `IK_LLAMA_CPP_LIB_PATH` names a library that was built for this machine."""

    VARIANTS: ClassVar[dict[str, str]] = {"": "slots, weights repacked"}

    @staticmethod
    def missing() -> str | None:
        """Whether ik-llama-cpp-python is here."""
        found = importlib.util.find_spec("ik_llama_cpp") is not None
        return None if found else "ik-llama-cpp-python is not installed"

    @staticmethod
    def load_api() -> Any:
        """Its functions."""
        from ik_llama_cpp import _ctypes_api

        return _Names(_ctypes_api)

    @staticmethod
    def model_params(api: Any) -> Any:
        """Repacked: that is how it is fast."""
        params = api.llama_model_default_params()
        params.use_mmap, params.repack_tensors = False, True
        return params

    def context_params(self, setup: Setup) -> Any:
        """Its defaults; but its flash attention ends the process (`S > 0`) on a batch of several sequences."""
        params = self._api.llama_context_default_params()
        params.flash_attn = setup.streams == 1
        return params

    def version(self) -> dict[str, Any]:
        """The bindings' version, and what it does other than llama.cpp."""
        return {
            "version": f"ik-llama-cpp-python {metadata.version('ik-llama-cpp-python')}",
            "repacked": True,
            "flash_attn": "one stream",
        }
