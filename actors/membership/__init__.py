"""Membership of this actor in weight groups: steered here, joined where its weights are used.

group          The receiving end of a weight group: a torch process group of its own
member_thread  A member of a weight group in this process
place          The place in which this actor is a member of weight groups
worker_line    The actor's end of the line to vLLM's first worker
worker_member  The worker's end of the line to its actor
worker_orders  Orders to the member in vLLM's worker, and its answers: one line of JSON each
"""
