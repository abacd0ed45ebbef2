"""Packaging of specjax: what a user installs, and the extras for what they want to do with it."""

from pathlib import Path

from setuptools import find_packages, setup

# One version of torch everywhere: it serves to compare with transformers and to read `.pt` files.
TORCH = "torch==2.13.0"
# Writes event files; what it needs (numpy, packaging, protobuf) comes with the core anyway.
TENSORBOARD = "tensorboardX>=2.6.2"
SUBMITIT = "submitit>=1.5"
# What runs notebooks; the tests do.
NOTEBOOKS = ["jupytext>=1.16", "ipykernel>=6.29", "nbclient>=0.10", "nbformat>=5.10"]

CORE = [
    "jax>=0.10",
    "flax>=0.12.8",
    "optax>=0.2.5",
    "orbax-checkpoint>=0.11.40",
    "numpy>=1.26",
    "scipy>=1.12",
    "ml-collections>=1.1",
    "ml-dtypes>=0.5",
    "absl-py>=2.1",
    "pyyaml>=6.0",
    "etils[epath]>=1.12",
    "datasets>=3.0",
    "grain>=0.2.12",
    "huggingface_hub>=0.30",
    "pyarrow>=15.0",
    "tokenizers>=0.21",
    "transformers>=4.57",
    "jinja2>=3.1",
    "safetensors>=0.5",
    "gguf>=0.17",
    "rich>=13.7",
    "matplotlib>=3.8",
]

EXTRAS = {
    "cuda13": ["jax[cuda13]>=0.10"],
    "tpu": ["jax[tpu]>=0.10", "etils[epath-gcs]>=1.12"],
    "torch": [TORCH],
    "wandb": ["wandb>=0.19"],
    "tensorboard": [TENSORBOARD],
    "search": ["optuna>=4.0"],
    "notebooks": ["jupyterlab>=4.2", *NOTEBOOKS],
    "launch": ["etils[epath-gcs]>=1.12", SUBMITIT],
    "test": [
        TORCH,
        TENSORBOARD,
        SUBMITIT,
        "optuna>=4.0",
        "wandb>=0.19",
        "pytest>=8.3",
        "pytest-xdist>=3.6",
        "setuptools>=77",
        *NOTEBOOKS,
    ],
    "dev": ["ruff>=0.14", "mypy>=1.18", "pre-commit>=4.0"],
}

setup(
    name="specjax",
    version="0.1.0",
    description="Speculative decoding research in JAX: one compiled draft-verify loop, trained and measured",
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["specjax", "specjax.*"]),
    package_data={"specjax": ["zoo/**/*", "evaluation/data/*", "models/native/*.cc", "models/native/*.h"]},
    install_requires=CORE,
    extras_require=EXTRAS,
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3 :: Only",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
