# Quire on CPU. Build: docker build -t quire .   Run: docker run -p 8000:8000 -v quire-models:/models quire [MODEL] [flags]
# The NVIDIA target is not there yet.
FROM python:3.11-slim AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
RUN python -m venv /opt/quire
ENV PATH=/opt/quire/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# The dependencies have a layer of their own: a change of the sources does not fetch them again.
COPY constraints.txt pyproject.toml ./
ARG TORCH_INDEX=
# On Linux the default build of torch carries CUDA libraries; --build-arg TORCH_INDEX= names an index of CPU builds.
RUN pip install -c constraints.txt setuptools \
    && pip install -c constraints.txt torch ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} \
    && python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
    > requirements.txt \
    && pip install -c constraints.txt -r requirements.txt
COPY . .
RUN pip install --no-deps --no-build-isolation .

FROM python:3.11-slim
RUN useradd --create-home --uid 10001 quire && mkdir /models && chown quire /models
COPY --from=build /opt/quire /opt/quire
USER quire
WORKDIR /home/quire
# Hub downloads land in the volume, so a new container starts without fetching them again.
ENV PATH=/opt/quire/bin:$PATH PYTHONUNBUFFERED=1 HF_HOME=/models QUIRE_HOST=0.0.0.0 QUIRE_PORT=8000
VOLUME /models
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=5m --start-interval=1s CMD \
    python -c "import os, urllib.request as u; u.urlopen(f'http://127.0.0.1:{os.environ[\"QUIRE_PORT\"]}/health', timeout=2)"
ENTRYPOINT ["quire", "serve"]
