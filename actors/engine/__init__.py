"""Inference engines behind one protocol, vLLM and a small one in torch, and the tokenizer.

character_tokenizer  Tokenizer of a small model that a run makes for itself: one character is one
               token
choice         Engines by name, and the choice of an actor's engine and device
engine         Interfaces of engines: `Engine` for the actor, `Stepper` for the model behind it
engine_args    `actors.engine_args`: further arguments of vLLM's engine, and the reasons why some
               are refused
engine_thread  Thread of an engine: owns the stepper, executes commands between steps, collects
               tokens
threaded       Engine made of a stepper and a thread that owns it; the event loop never waits for a
               step
tokenizer      Tokenizer of the run's model: text to tokens and back
torch_engine   Small engine: transformers' forward with a KV cache, for macOS and quick tests. No
               paging
turns          Turns of the policy: the frame of a chat template around one, and strings that end
               one
vllm_engine    vLLM engine: requests, tokens and swaps of its core, in this process or in one of
               its own
vllm_options   Options of vLLM: from settings to its environment variables and the arguments of its
               engine
vllm_private   Private names of vLLM, which may change with any release: all that this folder uses
waits          Waits for an engine's thread: answers with a deadline, and a limit on its silence
weights/       Weights inside an engine's process: a member of a group in vLLM's worker, loading,
               reading back
wire_tensors   Staged weights as named tensors, and the messages about them to and from vLLM's
               workers
"""
