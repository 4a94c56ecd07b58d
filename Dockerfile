# One image for all roles; compose.yaml builds it with PROFILE=cpu and PROFILE=cuda.
# The CUDA wheels carry their own CUDA libraries, so both stand on the same small base.
FROM python:3.12.12-slim-bookworm

# vLLM's CPU kernels need libnuma; torch and Triton compile small kernels at run time.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/*

# Folders of the image own what volumes are mounted over them.
RUN useradd --uid 1000 --create-home nyala \
    && install --directory --owner nyala --group nyala \
        /srv/nyala /srv/nyala/runs /srv/nyala/scratch /srv/nyala/huggingface /srv/nyala/work /home/nyala/.cache \
        /srv/nyala/keys /srv/nyala/keys/allowed /srv/nyala/secrets /srv/nyala/secrets/broker \
        /srv/nyala/secrets/learner /srv/nyala/secrets/actor /srv/nyala/secrets/redis /srv/nyala/secrets/allowed
USER 1000
WORKDIR /srv/nyala

ARG PROFILE=cpu
ENV PROFILE=$PROFILE \
    PATH=/srv/nyala/.venv/bin:$PATH \
    PIP_NO_CACHE_DIR=1 \
    PYTHONUNBUFFERED=1 \
    UV_LINK_MODE=copy

# The packages are a layer of their own, and what was downloaded outlives it: no change of ours
# downloads them again.
COPY --chown=1000 LICENSE pyproject.toml run ./
COPY --chown=1000 requirements requirements
RUN --mount=type=cache,target=/home/nyala/.cache/uv,uid=1000,gid=1000 ./run setup

COPY --chown=1000 . .
ENTRYPOINT []
CMD ["nyala", "--help"]
