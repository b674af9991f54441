"""Gives CuPy a driver on the host: builds it, and CuPy's own module of the runtime to call it, into this environment.

    python build.py CUPY_SOURCES FOLDER

CUPY_SOURCES is the source distribution of the CuPy that is installed. It writes FOLDER/environment, for a shell, with
which that CuPy finds devices.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import Cython
from compiler import FLAGS
from Cython.Build import cythonize
from setuptools import Extension

_HERE = Path(__file__).parent
_PACKAGES = Path(sysconfig.get_paths()["purelib"])
_INCLUDES = [f"-I{path}" for path in _PACKAGES.glob("nvidia/*/include")]
_MODULE = "cupy_backends/cuda/api/runtime"
# What the CuPy of these names is built for.
_VERSIONS = {"cupy-cuda12x": 12090, "cupy-cuda13x": 13000}
_CUDA = _VERSIONS[importlib.metadata.packages_distributions()["cupy"][0]]


def main(sources: Path, folder: Path):
    """Build everything in a folder."""
    folder.mkdir(parents=True)
    with tarfile.open(sources) as archive:
        archive.extractall(folder, filter="data")
    (tree,) = folder.glob("cupy-*")
    runtime = _runtime(tree)
    (nccl,) = _PACKAGES.glob("cupy_backends/cuda/libs/nccl.*.so")
    driver = _library("libcuda.so.1", folder, "driver.cpp", runtime)
    _library(f"libnvrtc.so.{_CUDA // 1000}", folder, "nvrtc.cpp", None)
    _library("libnccl.so.2", folder, "nccl.cpp", nccl, driver)
    # The module now in CuPy finds its functions in the driver, and not in the runtime that is linked into it.
    installed = _PACKAGES / f"{_MODULE}{sysconfig.get_config_var('EXT_SUFFIX')}"
    _run("c++", "-shared", runtime, "-o", installed, driver)
    kernels = folder / "kernels"
    kernels.mkdir()
    (kernels / "kernels.h").write_text(f'#define HOST_CUDA {_CUDA}\n#include "{_HERE / "kernels.h"}"\n')
    header = kernels / "kernels.h"
    _run("c++", *FLAGS[:-1], "c++-header", *_INCLUDES, header, "-o", f"{header}.gch")
    variables = {
        "LD_LIBRARY_PATH": folder,
        "HOST_COMPILER": f"'{sys.executable} {_HERE / 'compiler.py'}'",
        "HOST_KERNELS": kernels,
        "CUPY_CACHE_DIR": folder / "cache",
        # CUB's kernels are compiled for a device.
        "CUPY_ACCELERATORS": "",
    }
    (folder / "environment").write_text("".join(f"export {name}={value}\n" for name, value in variables.items()))


def _runtime(tree: Path) -> Path:
    """Compile CuPy's module of the runtime, with all that it calls left open."""
    cythonize(
        [Extension(_MODULE.replace("/", "."), [str(tree / f"{_MODULE}.pyx")], language="c++")],
        language_level=3,
        include_path=[str(tree)],
        compile_time_env={
            "CUPY_USE_CUDA_PYTHON": False,
            "CUPY_CUDA_VERSION": _CUDA,
            "CUPY_HIP_VERSION": 0,
            "CUPY_CUFFT_STATIC": False,
            "CUPY_CYTHON_VERSION": Cython.__version__,
        },
    )
    made = tree / "runtime.o"
    includes = [f"-I{tree / 'cupy_backends'}", f"-I{sysconfig.get_paths()['include']}", *_INCLUDES]
    _run("c++", "-c", "-O1", "-fPIC", "-w", *includes, tree / f"{_MODULE}.cpp", "-o", made)
    return made


def _library(name: str, folder: Path, source: str, caller: Path | None, *libraries: Path) -> Path:
    """Build a library; what CuPy calls and is not there is an error when it is called."""
    options = ("-std=c++17", "-O1", "-fPIC", "-w", f"-DHOST_CUDA={_CUDA}", *_INCLUDES, "-pthread")
    made = folder / f"{source}.o"
    _run("c++", "-c", *options, _HERE / source, "-o", made)
    called = set() if caller is None else _symbols(caller, "-D" if caller.suffix == ".so" else "-a", "--undefined-only")
    missing = sorted(one for one in called - _symbols(made, "--defined-only") if one.startswith(("cuda", "nccl")))
    others = folder / f"{source}.missing.cpp"
    # cudaErrorNotSupported, which NCCL has no name for.
    others.write_text("".join(f'extern "C" int {one}() {{ return 801; }}\n' for one in missing))
    _run("c++", "-shared", *options, made, others, *libraries, "-o", folder / name, f"-Wl,-soname,{name}")
    return folder / name


def _symbols(path: Path, *options: str) -> set[str]:
    listed = subprocess.run(["nm", *options, path], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1] for line in listed.splitlines()}


def _run(*command: str | Path):
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
