"""Weights inside an engine's process: a member of a group in vLLM's worker, loading, reading back.

fill_plan      Plan of a fill: which part of which parameter each tensor of a version becomes
group          The receiving end of a weight group: a torch process group of its own, beside vLLM's
live_model     The model of a vLLM worker, written over and read back between two steps, and calls
               for that
loading        Loading of a version through vLLM's own loader: its layerwise reload
member_thread  Member of a weight group in this process: a thread joins the group and receives its
               bytes
pinned_files   Files of weights that a worker of vLLM keeps mapped, and registered with the CUDA
               driver
shadow_model   Second copy of vLLM's model on a CPU: filled beside the running steps, exchanged
               between two
stored         Contents of a model's storage, compared with the version that they should be
worker_member  The worker's end of the line to its actor: a member of weight groups inside vLLM's
               worker
worker_orders  Orders to the member in vLLM's worker, and its answers: one line of JSON each
"""
