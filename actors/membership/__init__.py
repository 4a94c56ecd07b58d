"""Membership of this actor in weight groups: steered here, joined where its weights are used.

group          The receiving end of a weight group: a torch process group of its own, beside vLLM's
member_thread  A member of a weight group in this process: joined, and its bytes received, in a
               thread
place          The place in which this actor is a member of weight groups: its own process, or a
               worker's
worker_line    The actor's end of the line to vLLM's first worker, in which its weight groups are
               joined
worker_member  The worker's end of the line to its actor: a member of weight groups inside vLLM's
               worker
worker_orders  Orders to the member in vLLM's worker, and its answers: one line of JSON each
"""
