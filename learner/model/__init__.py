"""The policy: a causal language model, sharded over ranks.

activations        Activations of layers: computed again in the backward pass, or kept in host
                   memory
attention          Attention within each of several packed sequences, which must not see one another
compilers          Checks for the compilers of code that is made while a model runs
cpu                Faster steps on a CPU: linear layers by oneDNN, and freed memory that is kept
frozen             Frozen weights in fewer bits than passes compute with, widened for each product
fused              Norms, rotary embeddings and gated activations of layers by one kernel each, on a
                   card
kernels            Triton kernels of a layer: norm, rotary embedding and gated activation, forwards
                   and backwards
logit_kernels      Triton kernels for logits, which read them once and keep the rest in registers
logits             Logits of tokens, a chunk at a time: log-probs, entropies and their gradients
lora               Low-rank adapters: small trained matrices beside frozen ones
memory_rules       Rules by which the learner trades memory for time
one_rank           The weights of one rank that computes in a narrower dtype than it trains in,
                   without FSDP2
output_layer       The output layer: log-probs and entropies of tokens from the hidden states before
                   them
policy             The target policy: a Hugging Face causal language model, sharded with FSDP2, that
                   scores tokens
ranks              The process group of the learner: rank, device, and communication between ranks
rendezvous         Rendezvous of ranks: environment variables by which a launcher lets a rank find
                   the others
saved_model        A model in Hugging Face's format, read shard by shard
sequence_cost      Estimated cost of training a sequence, from the model's configuration
sequence_parallel  Sequence parallelism (Ulysses): the tokens of each microbatch, cut over several
                   ranks
tensor_parallel    Tensor parallelism: each rank has a part of every large matrix, and runs all
                   tokens with it
"""
