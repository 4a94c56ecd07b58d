# One image for all roles; compose.yaml builds it with PROFILE=cpu and PROFILE=cuda.
# The CUDA wheels carry their own CUDA libraries, so both stand on the same small base.
FROM python:3.12.12-slim-bookworm

# vLLM's CPU kernels need libnuma; torch and Triton compile small kernels at run time.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/*

# The user's number must be that of the secrets' owner, or the 0600 keys cannot be read.
ARG UID=1000
RUN useradd --uid "$UID" --create-home nyala \
    && install --directory --owner nyala --group nyala \
        /srv/nyala /srv/nyala/runs /srv/nyala/keys /srv/nyala/keys/allowed /srv/nyala/keys/allowed/actor \
        /srv/nyala/huggingface /srv/nyala/scratch
USER nyala
WORKDIR /srv/nyala

ARG PROFILE=cpu
ENV PROFILE=$PROFILE \
    PATH=/srv/nyala/.venv/bin:$PATH \
    PIP_NO_CACHE_DIR=1 \
    PYTHONUNBUFFERED=1 \
    UV_NO_CACHE=1

# The packages are a layer of their own: a change of our code alone does not install them again.
COPY --chown=nyala LICENSE pyproject.toml run ./
COPY --chown=nyala requirements requirements
RUN ./run setup

COPY --chown=nyala . .
ENTRYPOINT []
CMD ["nyala", "--help"]
