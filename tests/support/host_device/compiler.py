"""Compiles the source of kernels for the host: a folder's kernel.cu and options become a library, named in binary."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

__all__ = ["FLAGS", "main"]

_HERE = Path(__file__).parent
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-w", "-ffp-contract=off", "-x", "c++")
_KERNEL = re.compile(r'extern "C"\s+__global__\s+void\s+(?:__launch_bounds__\(\w+\)\s*)?(\w+)\s*\(')


def main(folder: Path, libraries: Path) -> int:
    """Compile what is in a folder, unless the library is there; return the exit status."""
    source = (folder / "kernel.cu").read_text(encoding="utf-8")
    given = (folder / "options").read_text(encoding="utf-8").split("\n")
    options = [line for line in given if line[:2] in ("-D", "-I")]
    # The kernels of unscale.cu say of each instruction that it keeps subnormals.
    flushes = str("-ftz=true" in given and not any(line.startswith("-DGRADSCALE_") for line in options)).lower()
    key = "\n".join([source, flushes, *options, *((_HERE / name).read_text() for name in ("kernels.h", "host_cuda.h"))])
    made = libraries / f"{hashlib.sha256(key.encode()).hexdigest()}.so"
    if not made.exists():
        # Blocks run one after the other, and share what is as large as any asks for.
        source = re.sub(
            r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];", r"alignas(64) static \1 \2[1 << 16];", source
        )
        source = re.sub(r'asm volatile\("mov.u64 %0, %%globaltimer;" : "=l"\((\w+)\)\)', r"\1 = host_time()", source)
        # Only what some macro defines has no name in the source.
        names = [name for name in _KERNEL.findall(source) if name != "__launch_bounds__"] or _after_macros(
            source, options
        )
        meets = str(any(word in source for word in ("__sync", "__shfl"))).lower()
        whole = folder / "kernel.cpp"
        whole.write_text(
            source + "\n" + "\n".join(f"PREPARED_KERNEL({name}, {meets}, {flushes})" for name in names),
            encoding="utf-8",
        )
        part = f"{made}.{os.getpid()}"
        command = ["c++", "-shared", *FLAGS, "-include", libraries / "kernels.h", *options, whole, "-o", part]
        status = subprocess.run(command, check=False).returncode
        if status:
            return status
        Path(part).rename(made)
    (folder / "binary").write_text(str(made), encoding="utf-8")
    return 0


def _after_macros(source: str, options: list[str]) -> list[str]:
    command = ["c++", "-E", "-P", "-x", "c++", "-D__device__=", *options, "-"]
    return _KERNEL.findall(subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(os.environ["HOST_KERNELS"])))
