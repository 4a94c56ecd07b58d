"""Environments: prompts, steps and scores.

adapters/      Environments written for other projects, taken as they are
agent          Tasks of live agents: `environment: agent`
answer_process  Answers that are compared in processes of their own, with a limit of CPU time
answer_worker  Process that compares answers: `python -P -m actors.environments.answer_worker SCORER
               MEMORY`
base           Interface of environments, for one turn and for several, and the split of held-out
               questions
calculator     Environment of two turns with a tool: the policy may use a calculator before it
               answers
calls          Calls of an environment's methods, which may be `async`, from a thread or from an
               event loop
dataset/       The environment `dataset`: questions and answers out of a file
final_answer   The final answer of a completion, without the reasoning, and its agreement with a
               reference
hosted/        Environments in a process and a Python of their own
reasoning_gym  Datasets of reasoning-gym as single-turn environments
registry       Environments by the name in `run.environment`: making, checking and trying them
"""
