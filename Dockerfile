# Penstock with all that its tests need. On processors, or on GPUs with a base that has CUDA's libraries:
#
#   docker build -t penstock:cpu .
#   docker build -t penstock:cuda --build-arg BASE=nvidia/cuda:12.8.1-devel-ubuntu24.04 .
#
# A base needs Python 3.11 or newer in its packages, or has it already. An index of smaller wheels, such as torch's for processors, is
# given as --build-arg PIP_EXTRA_INDEX_URL=….
ARG BASE=python:3.12-slim
FROM ${BASE}

ARG PIP_EXTRA_INDEX_URL=""
ENV PIP_EXTRA_INDEX_URL=${PIP_EXTRA_INDEX_URL} PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1

# A C compiler is for Triton's launchers, a Redis server for the tests of its store.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc g++ make redis-server git openssl \
    && if ! command -v python3 > /dev/null; then apt-get install --yes --no-install-recommends python3 python3-dev python3-venv; fi \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/penstock

# First what changes seldom, so that a change of the code installs nothing again.
COPY pyproject.toml constraints.txt Makefile README.md LICENSE ./
COPY src/penstock/__init__.py src/penstock/
RUN make .venv/.installed && rm -r src

COPY . .
RUN make setup

# Jobs of other users, as under Slurm, write what they keep where they may.
ENV PATH=/opt/penstock/.venv/bin:${PATH} PENSTOCK_CACHE=/tmp/penstock
WORKDIR /work
CMD ["penstock", "--help"]
