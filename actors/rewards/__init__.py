"""Reward functions, each in a process of its own.

channel    Pipes between an actor and one reward worker: frames both ways, and what the reward
           prints
frames     Messages between an actor and its reward worker: frames of msgpack
functions  Reward functions of the user: found by name, recognised by their parameters, called and
           checked
judge      A language model as a judge: a reward function that asks an OpenAI-compatible server
pool       Reward functions of a run, each in processes of its own, and the sum of their rewards
process    The actor's side of one reward worker: time limits, restarts and retries
worker     Process of a user's reward function: `python -m actors.rewards.worker path.py:function
           MiB FD`
"""
