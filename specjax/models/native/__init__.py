"""C++ kernels for decoding on CPUs, products and attention, compiled on first use where there is a C++ compiler."""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

HERE = Path(__file__).parent
SOURCES = ("skinny_matmul.cc", "cached_attention.cc")
HEADERS = ("vector.h", "parallel.h")
CACHE = Path("~/.cache/specjax/native")
MATMUL, ATTENTION = "specjax_skinny_matmul", "specjax_cached_attention"
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-std=c++17", "-fPIC", "-shared")


def compiler() -> str | None:
    """The C++ compiler found on the path, or None."""
    return next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)


@functools.cache
def available() -> bool:
    """Whether the kernels can be used here; compiles and registers them at the first call.

    Where a compiler fails, a warning says so with its message, and XLA's own, slower products serve.
    """
    command = compiler()
    if command is None:
        return False
    try:
        library = ctypes.cdll.LoadLibrary(str(_build(command)))
    except (OSError, RuntimeError) as error:
        warnings.warn(f"no native kernels, decoding on a CPU is slower: {error}", RuntimeWarning, stacklevel=2)
        return False
    for name in (MATMUL, ATTENTION):
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    return True


def skinny_matmul(x: jax.Array, kernel_oi: jax.Array) -> jax.Array:
    """`[rows, in]` times `[out, in]` transposed: `[rows, out]` float32, on a CPU only; not differentiable."""
    shape = jax.ShapeDtypeStruct((x.shape[0], kernel_oi.shape[0]), jnp.float32)
    return jax.ffi.ffi_call(MATMUL, shape)(x, kernel_oi)


def cached_attention(
    q_btkgh: jax.Array,
    k_bskh: jax.Array,
    v_bskh: jax.Array,
    prefix_b: jax.Array,
    mask_btm: jax.Array,
    depths_bm: jax.Array,
    *,
    window: int | None,
    softcap: float,
) -> jax.Array:
    """Attention over a cache, `[B, T, K, G, H]` float32, on a CPU only; not differentiable.

    Args:
        q_btkgh: float32 scaled, rotated queries; the G of one K share its keys.
        k_bskh: float32 keys.
        v_bskh: float32 values.
        prefix_b: int32, see `specjax.models.attention.View`.
        mask_btm: bool, likewise.
        depths_bm: int32, likewise.
        window: sliding window in positions, or None.
        softcap: tanh cap on the scores, 0 for none.
    """
    call = jax.ffi.ffi_call(ATTENTION, jax.ShapeDtypeStruct(q_btkgh.shape, jnp.float32), vmap_method="broadcast_all")
    options = {"window": np.int64(window or 0), "softcap": np.float32(softcap)}
    return call(q_btkgh, k_bskh, v_bskh, prefix_b, mask_btm, depths_bm, **options)


def _cache() -> Path:
    """Where libraries are kept: below the home directory, or for this process alone where that cannot be written."""
    try:
        cache = CACHE.expanduser()
        cache.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=cache).close()
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        warnings.warn(
            f"{CACHE} cannot be written ({error}): every process compiles its kernels", RuntimeWarning, stacklevel=4
        )
        own = Path(tempfile.mkdtemp(prefix="specjax-native-"))
        atexit.register(shutil.rmtree, own, ignore_errors=True)
        return own
    return cache


def _build(command: str) -> Path:
    include = Path(jax.ffi.include_dir())
    version = subprocess.run([command, "--version"], capture_output=True, text=True, check=False).stdout
    # -march=native: a home directory shared between machines must not share the library.
    flags = subprocess.run(
        [command, "-march=native", "-E", "-dM", "-x", "c++", "/dev/null"], capture_output=True, text=True, check=False
    ).stdout
    texts = ((HERE / name).read_text() for name in (*SOURCES, *HEADERS))
    parts = (*texts, version, flags, jax.__version__, " ".join(FLAGS))
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    cache = _cache()
    library = cache / f"kernels-{key}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            built = Path(scratch) / "kernels.so"
            sources = [str(HERE / name) for name in SOURCES]
            done = subprocess.run(
                [command, *FLAGS, f"-I{include}", *sources, "-o", str(built)],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                raise RuntimeError(f"{command} could not compile {', '.join(SOURCES)}:\n{done.stderr.strip()}")
            os.replace(built, library)
    return library
