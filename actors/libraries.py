"""Import of an actor's libraries ahead of it, by a process that forks actors.

To import them starts no thread and meets no device.
"""

from importlib import import_module

ALWAYS = (
    "transformers.models.auto.tokenization_auto",
    "actors.assembly",
    "actors.weights.receiver",
)
ENGINES = {
    "torch": ("actors.engine.torch_engine",),
    "vllm": (
        "actors.engine.vllm_engine",
        "actors.engine.vllm_weights",
        "vllm.engine.arg_utils",
        "vllm.v1.engine.core",
        "vllm.v1.engine.llm_engine",
        "vllm.v1.executor.uniproc_executor",
        "vllm.v1.worker.cpu_worker",
    ),
}


def import_libraries(engine: str) -> None:
    """Import what an actor with this engine does until it samples."""
    if engine == "vllm":
        from actors.engine.vllm_options import set_defaults  # noqa: PLC0415 - torch

        set_defaults()
    for name in (*ALWAYS, *ENGINES[engine]):
        import_module(name)
