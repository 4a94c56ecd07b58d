"""Reward functions, each in a process of its own.

channel    Pipes between an actor and one reward worker
frames     Messages between an actor and its reward worker
functions  Reward functions of the user: found by name, recognised by their parameters
judge      A language model as a judge: a reward function that asks an OpenAI-compatible server
pool       Reward functions of a run, each in processes of its own
process    The actor's side of one reward worker: time limits, restarts and retries
worker     Process of a user's reward function: `python -m actors.rewards.worker
           path.py:function MiB FD`
"""
