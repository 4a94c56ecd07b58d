"""Inference engines behind one protocol: vLLM, and a small one in torch.

choice         Engines by name; the one of an actor, set or with `auto` what runs here, and its
               device
engine         Interfaces of engines: `Engine` for the actor, `Stepper` for the model behind it
engine_args    `actors.engine_args`: which further arguments vLLM's engine may be given, and why
               others may not
engine_thread  Thread of an engine: owns the stepper, executes commands between steps, collects
               tokens
threaded       Engine made of a stepper and a thread that owns it; the event loop never waits for a
               step
tokenizer      Tokenizer of the run's model: text to tokens and back
torch_engine   Small engine: transformers' forward with a KV cache, for macOS and quick tests. No
               paging
turns          Turns of the policy: the frame of a chat template around one, and strings that end
               one
vllm_engine    vLLM engine: its core stepped by a thread, here or in a process of its own, and ended
vllm_options   Options of vLLM: from settings to its environment variables and the arguments of its
               engine
vllm_private   Names of vLLM that it does not promise to keep: all that this folder uses of them
waits          Waits for an engine: answers with a deadline, and its silence
weights/       Weights inside an engine's process: a member of a group in vLLM's worker, loading,
               reading back
wire_tensors   Staged weights as named tensors: views into one flat file of canonical wire bytes
"""
