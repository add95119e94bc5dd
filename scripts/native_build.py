"""Compile the native runner's extension next to its sources: `python scripts/native_build.py [--sanitize] [--out DIR]`.

Needs a C++20 compiler ($CXX, g++, clang++ or the ziglang wheel) and nanobind. Used by hatch_build.py, so it imports
nothing else.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1] / "src" / "shoal" / "runners" / "native"
COMMON = ["-std=c++20", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
# gcc's own AVX512 header leaves placeholders uninitialised, and warns of it
KERNELS = ["-ffp-contract=off", "-Wno-unknown-warning-option", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
_AVX2 = ["-mavx2", "-mfma", "-mf16c"]
_AVX512 = [*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni"]
ISAS = {
    "x86_64": {
        "amx": [*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-int8", "-mamx-bf16"],
        "avx512bf16": [*_AVX512, "-mavx512bf16"],
        "avx512vnni": _AVX512,
        "avx2vnni": [*_AVX2, "-mavxvnni"],
        "avx2base": _AVX2,
        "plain": ["-DSHOAL_PLAIN"],
    },
    "aarch64": {
        "neon_i8mm": ["-march=armv8.2-a+dotprod+i8mm"],
        "neon_dot": ["-march=armv8.2-a+dotprod"],
        "plain": ["-DSHOAL_PLAIN"],
    },
}
MACHINES = {"AMD64": "x86_64", "amd64": "x86_64", "arm64": "aarch64"}


def compiler() -> list[str] | None:
    """The C++ compiler to use: $CXX, the system's, or the `ziglang` wheel's where it is installed. None: none."""
    wanted = os.environ.get("CXX")
    for name in [wanted] if wanted else ["g++", "clang++", "c++"]:
        found = shutil.which(name)
        if found:
            return [found]
    if wanted or importlib.util.find_spec("ziglang") is None:
        return None
    return [sys.executable, "-m", "ziglang", "c++", "-mcpu=baseline"]  # without, it compiles for this CPU alone


def kernel_jobs(machine: str, optimise: str) -> list[tuple[str, list[str]]]:
    """(object name, arguments) of each instruction set's kernels."""
    jobs = []
    for isa, flags in ISAS[machine].items():
        level = "-O2" if (isa, optimise) == ("plain", "-O3") else optimise  # -O3 unrolls its loops for half a minute
        jobs.append((f"isa_{isa}.o", [level, *KERNELS, *flags, f"-DSHOAL_ISA={isa}", str(ROOT / "csrc" / "isa.cpp")]))
    return jobs


def build(out: Path = ROOT, *, extra: list[str] | None = None, optimise: str = "-O3") -> Path:
    """Compile and link; returns the extension's path. RuntimeError says what is missing or what the compiler said."""
    import nanobind

    cxx, machine = compiler(), MACHINES.get(platform.machine(), platform.machine())
    if cxx is None or machine not in ISAS or sys.platform == "win32":
        raise RuntimeError(
            "no C++ compiler found" if cxx is None else f"no native kernels for {sys.platform} on {machine}"
        )
    bind = Path(nanobind.__file__).parent
    includes = [
        f"-I{bind / 'include'}",
        f"-I{bind / 'ext' / 'robin_map' / 'include'}",
        f"-I{sysconfig.get_paths()['include']}",
    ]
    baseline = ["-O2", "-ffp-contract=off"]
    jobs = kernel_jobs(machine, optimise)
    jobs += [
        (f"{n}.o", [*baseline, str(ROOT / "csrc" / f"{n}.cpp")])
        for n in ("attend", "cpu", "feed", "layers", "lift", "model", "pack", "packed_file", "pool", "recur", "step")
    ]
    loose = ["-fno-strict-aliasing", "-DNDEBUG"]
    binding = ROOT / "csrc" / "binding.cpp"
    told = f'-DSHOAL_BINDING="{hashlib.sha256(binding.read_bytes()).hexdigest()}"'  # load_core() compares it
    jobs.append(("binding.o", [*baseline, *includes, *loose, told, str(binding)]))
    jobs.append(("nb.o", ["-Os", *includes, *loose, "-w", str(bind / "src" / "nb_combined.cpp")]))
    target = out / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"
    with tempfile.TemporaryDirectory() as tmp:

        def compile_one(job: tuple[str, list[str]]) -> None:
            name, arguments = job
            run([*cxx, *COMMON, *(extra or []), *arguments, "-c", "-o", str(Path(tmp) / name)])

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(compile_one, sorted(jobs, key=lambda job: job[0] not in ("nb.o", "isa_plain.o"))))
        link = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
        built = Path(tmp) / target.name
        objects = [str(Path(tmp) / name) for name, _ in jobs]
        run([*cxx, "-shared", *(extra or []), *objects, "-pthread", *link, "-o", str(built)])
        staged = target.with_suffix(".tmp")
        shutil.copy(built, staged)
        staged.replace(target)  # a process that has the old one mapped keeps it
    return target


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-4000:]}")
    if done.stderr:
        print(done.stderr, file=sys.stderr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT)
    parser.add_argument("--sanitize", action="store_true", help="with address and undefined-behaviour sanitizers")
    options = parser.parse_args()
    flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g"] if options.sanitize else None
    options.out.mkdir(parents=True, exist_ok=True)
    print(build(options.out, extra=flags, optimise="-O1" if options.sanitize else "-O3"))
