"""A C++ matrix product for a few rows on CPUs, compiled on first use where there is a C++ compiler."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp

SOURCE = Path(__file__).with_name("skinny_matmul.cc")
CACHE = Path("~/.cache/specjax/native")
TARGET = "specjax_skinny_matmul"
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-std=c++17", "-fPIC", "-shared")


def compiler() -> str | None:
    """The C++ compiler found on the path, or None."""
    return next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)


@functools.cache
def available() -> bool:
    """Whether the kernel can be used here; compiles and registers it at the first call.

    Raises:
        RuntimeError: there is a compiler, but it fails; holds its message.
    """
    command = compiler()
    if command is None:
        return False
    library = ctypes.cdll.LoadLibrary(str(_build(command)))
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(library.specjax_skinny_matmul), platform="cpu")
    return True


def skinny_matmul(x: jax.Array, kernel_oi: jax.Array) -> jax.Array:
    """`[rows, in]` times `[out, in]` transposed: `[rows, out]` float32, on a CPU only; not differentiable."""
    shape = jax.ShapeDtypeStruct((x.shape[0], kernel_oi.shape[0]), jnp.float32)
    return jax.ffi.ffi_call(TARGET, shape)(x, kernel_oi)


def _build(command: str) -> Path:
    include = Path(jax.ffi.include_dir())
    version = subprocess.run([command, "--version"], capture_output=True, text=True, check=False).stdout
    # -march=native: a home directory shared between machines must not share the library.
    flags = subprocess.run(
        [command, "-march=native", "-E", "-dM", "-x", "c++", "/dev/null"], capture_output=True, text=True, check=False
    ).stdout
    parts = (SOURCE.read_text(), version, flags, jax.__version__, " ".join(FLAGS))
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    cache = CACHE.expanduser()
    library = cache / f"skinny_matmul-{key}.so"
    if not library.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            built = Path(scratch) / "kernel.so"
            done = subprocess.run(
                [command, *FLAGS, f"-I{include}", str(SOURCE), "-o", str(built)],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                raise RuntimeError(f"{command} could not compile {SOURCE.name}:\n{done.stderr.strip()}")
            os.replace(built, library)
    return library
