"""Build hook: compiles the native runner's extension; where no C++ compiler is found, the build brings one as a wheel.

Without it the package works over OpenVINO. SHOAL_NATIVE=0 leaves it out, SHOAL_NATIVE=1 makes its absence an error.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeBuildHook(BuildHookInterface):  # type: ignore[misc]
    """Adds the extension, and the wheel tag that goes with it, to wheels and editable installs."""

    def dependencies(self) -> list[str]:
        """What a build needs beside `build-system.requires`: a compiler as a wheel, where the machine has none."""
        wanted = os.environ.get("SHOAL_NATIVE", "") != "0" and not os.environ.get("CXX")
        if self.target_name != "wheel" or not wanted or self._builder().compiler() is not None:
            return []
        return ["ziglang>=0.13"]

    def _builder(self) -> Any:
        spec = importlib.util.spec_from_file_location("native_build", Path(self.root, "scripts", "native_build.py"))
        assert spec is not None
        assert spec.loader is not None
        builder = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(builder)
        return builder

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; `version` is "standard" or "editable"."""
        wanted = os.environ.get("SHOAL_NATIVE", "")
        if self.target_name != "wheel" or wanted == "0":
            return
        try:
            built: Path = self._builder().build()
        except RuntimeError as error:
            if wanted == "1":
                raise
            self.app.display_warning(f"native kernels are left out, OpenVINO will be used instead: {error}")
            return
        build_data["infer_tag"] = True
        build_data["pure_python"] = False
        if version != "editable":
            build_data["force_include"][str(built)] = str(built.relative_to(Path(self.root, "src")))
