# An image for JobSets and other container platforms:
#   docker build --build-arg EXTRA=tpu -t <registry>/specjax:1 .
FROM python:3.11-slim
ARG EXTRA=tpu
RUN apt-get update && apt-get install -y --no-install-recommends g++ git && rm -rf /var/lib/apt/lists/*
WORKDIR /specjax
COPY setup.py README.md ./
COPY specjax specjax
RUN pip install --no-cache-dir ".[${EXTRA},launch]"
COPY configs configs
COPY experiments experiments
